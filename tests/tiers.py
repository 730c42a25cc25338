"""The two tiers of tests: ``make test`` runs what a person waits for, ``CI=1`` all of it.

What is marked ``thorough`` shows more of what the rest shows already: more seeds, sizes, models and places of the same
kind. Every capability keeps a test with its injected fault in the first tier.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import pytest

FULL = bool(os.environ.get("DETDIFF_TEST_FULL"))
THOROUGH = bool(os.environ.get("CI")) or FULL


def only_in_full(reason: str) -> Any:
    """A mark for what takes minutes of a core and shows on a real model what small ones show in the thorough tier."""
    return pytest.mark.skipif(not FULL, reason=f"set DETDIFF_TEST_FULL=1: {reason}")


def some_now(values: Iterable[Any], *places: int, ci: Iterable[int] | None = None) -> list[Any]:
    """The parameters ``values``: those at ``places`` in both tiers, the others in the thorough one only; of these those at
    ``ci``, where it is given, and the rest with DETDIFF_TEST_FULL.

    A value that is a tuple is all parameters of one test.
    """
    given = [value if isinstance(value, tuple) else (value,) for value in values]
    thorough = set(range(len(given)) if ci is None else ci)
    assert all(0 <= place < len(given) for place in (*places, *thorough)), (places, thorough, len(given))
    rare = only_in_full("more of the same kind")

    def marks(place: int) -> Any:
        if place in places:
            return ()
        return pytest.mark.thorough if place in thorough else (pytest.mark.thorough, rare)

    return [pytest.param(*each, marks=marks(place)) for place, each in enumerate(given)]


def first_of_each(groups: Iterable[Hashable], count: int = 1) -> list[int]:
    """The places of the first ``count`` of each group, for `some_now`."""
    seen: Counter[Hashable] = Counter()
    places = []
    for place, group in enumerate(groups):
        seen[group] += 1
        if seen[group] <= count:
            places.append(place)
    return places


def examples(count: int) -> int:
    """How many examples hypothesis tries: ``count`` in the thorough tier, a quarter of them in the first."""
    return count if THOROUGH else max(count // 4, 2)
