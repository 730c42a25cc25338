"""The smallest part of a set that still has an effect, by halving first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def smallest(items: Sequence[T], works: Callable[[Sequence[T]], bool]) -> list[T]:
    """A part of ``items`` that works and of which no single item can be left out; ``items`` as a whole must work.

    Where one item does it alone, that takes at most two trials for each halving of their number. ``works`` is asked with
    items in their order, later ones first, and need not be monotonous.
    """
    found = list(items)
    parts = 2
    while len(found) > 1:
        cut = [found[n * len(found) // parts : (n + 1) * len(found) // parts] for n in range(parts)]
        part = next((each for each in reversed(cut) if works(each)), None)
        if part is not None:
            found, parts = part, 2
            continue
        if parts > 2:
            rest = next((others for others in _without_one(cut) if works(others)), None)
            if rest is not None:
                found, parts = rest, max(parts - 1, 2)
                continue
        if parts >= len(found):
            break
        parts = min(2 * parts, len(found))
    return found


def _without_one(cut: list[list[T]]) -> list[list[T]]:
    return [[item for m, each in enumerate(cut) if m != n for item in each] for n in range(len(cut))]


def by_groups(
    items: Sequence[T], keys: Sequence[Callable[[T], object]], works: Callable[[Sequence[T]], bool]
) -> list[T]:
    """``smallest``, group by group: whole groups of the first key first, then of the next, at last single items."""
    found = list(items)
    for key in keys:
        groups: dict[object, list[T]] = {}
        for item in found:
            groups.setdefault(key(item), []).append(item)
        kept = smallest(list(groups.values()), lambda some: works(_joined(some)))
        found = _joined(kept)
    return smallest(found, works)


def _joined(groups: Sequence[Sequence[T]]) -> list[T]:
    return [item for group in groups for item in group]


def ranges(positions: Sequence[int]) -> list[list[int]]:
    """Positions as inclusive ranges."""
    found: list[list[int]] = []
    for position in sorted(set(positions)):
        if found and found[-1][1] == position - 1:
            found[-1][1] = position
        else:
            found.append([position, position])
    return found
