"""Which numbers of rows are swept, and what the rows hold."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import ProbeRowsInvalid
from detdiff_kernels.rounding import rounded

from .operation import Operation

Float32 = NDArray[np.float32]

MOST_ROWS = 8192
MOST_SIZES = 256
MOST_ITEMS = 1 << 28
# Other content in other rows is this much larger, so that a scale taken over the batch would move.
LOUDER = 8


def row_counts(asked: str | Iterable[int]) -> tuple[int, ...]:
    """The numbers of rows M that are swept, ascending and with 1, which every other M is compared with.

    Takes numbers, or text such as ``1..8`` or ``1..8,16,32``. Raises ProbeRowsInvalid.
    """
    found = {1}
    for part in asked.split(",") if isinstance(asked, str) else asked:
        first, last = _bounds(part)
        if not 1 <= first <= last <= MOST_ROWS:
            raise ProbeRowsInvalid(
                f"The rows {part!r} were asked for; a number of rows is between 1 and {MOST_ROWS:,}, and a range goes "
                "upwards. Write them as 1..8 or 1..8,16,32."
            )
        found.update(range(first, last + 1))
    if len(found) > MOST_SIZES or found == {1}:
        raise ProbeRowsInvalid(
            f"The rows {asked!r} are {len(found):,} different numbers of rows, one row included; a sweep takes 2 to "
            f"{MOST_SIZES}. Write them as 1..8 or 1..8,16,32."
        )
    return tuple(sorted(found))


def _bounds(part: str | int) -> tuple[int, int]:
    if isinstance(part, int) and not isinstance(part, bool):
        return part, part
    match = re.fullmatch(r"\s*([0-9]{1,9})(?:\.\.([0-9]{1,9}))?\s*", part) if isinstance(part, str) else None
    if match is None:
        raise ProbeRowsInvalid(
            f"The rows hold {part!r}, which is no number of rows and no range. Write them as 1..8 or 1..8,16,32."
        )
    return int(match[1]), int(match[2] or match[1])


@dataclass(frozen=True, eq=False)
class Content:
    """What one seed puts into rows: ``rows`` are the rows that are looked at, ``others`` what replaces neighbours.

    Both are float32 (most rows, k) and hold values of the operation's dtype. ``cancelling`` (1, k) is one more row 0,
    where the weights are known; see `Weights.cancelling`.
    """

    rows: Float32
    others: Float32
    cancelling: Float32 | None

    @classmethod
    def of_seed(cls, seed: int, most: int, operation: Operation) -> Content:
        """Independent standard normals; ``others`` are ``LOUDER`` times as large.

        Raises ProbeRowsInvalid for more items than fit a sweep.
        """
        random = np.random.default_rng([seed, 1])
        k, dtype = operation.k, operation.dtype
        if most * k > MOST_ITEMS:
            raise ProbeRowsInvalid(
                f"{most:,} rows of {k:,} were asked for, {most * k:,} items; a sweep takes {MOST_ITEMS:,} at most. Ask for "
                "fewer rows."
            )
        rows = random.standard_normal((most, k), dtype=np.float32)
        others = LOUDER * random.standard_normal((most, k), dtype=np.float32)
        cancelling = None
        if operation.weights is not None and k > 1:
            start = int(random.integers(1 << 30))
            with np.errstate(all="ignore"):  # a model's weights may hold anything
                whole = operation.weights.cancelling(random.standard_normal(k), start)
            cancelling = rounded(whole.astype(np.float32)[None], dtype)
        return cls(rounded(rows, dtype), rounded(others.astype(np.float32), dtype), cancelling)


def kept_rows(rows: int) -> list[NDArray[np.bool_]]:
    """Masks (rows,) of the rows to keep while all others are replaced, one mask a trial, as few as can be.

    For any two rows there is a trial that keeps the first and replaces the second, so a row that depends on any
    single other one is found. Sperner: each row is kept in its own half of the trials.
    """
    if rows < 2:
        return []
    trials = next(t for t in range(2, rows + 2) if comb(t, t // 2) >= rows)
    masks = np.zeros((trials, rows), dtype=np.bool_)
    for row, chosen in enumerate(islice(combinations(range(trials), trials // 2), rows)):
        masks[list(chosen), row] = True
    return list(masks)
