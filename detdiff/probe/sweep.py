"""Which rows come out with other bits: with another M, at another position, beside other rows, on a repeat."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import combinations, islice
from math import comb

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.metrics import Values
from detdiff.errors import ProbeResultUnusable, ProbeRowsInvalid
from detdiff_kernels.rounding import Float32, rounded

from .operation import ProbedOperation

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
class RowContent:
    """What one seed puts into rows: ``rows`` are the rows that are looked at, ``others`` what replaces neighbours.

    Both are float32 (most rows, k) and hold values of the operation's dtype. ``cancelling`` (1, k) is one more row 0,
    where the weights are known; see `Weights.cancelling`.
    """

    rows: Float32
    others: Float32
    cancelling: Float32 | None

    @classmethod
    def of_seed(cls, seed: int, most: int, operation: ProbedOperation) -> RowContent:
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


RUNS = 3  # of the same rows, the first one included

OnCalls = Callable[[int, int], None]


@dataclass(frozen=True)
class ChangedRows:
    """At M ``rows``, the rows at ``positions`` came out with other bits, with each of ``seeds``."""

    rows: int
    positions: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass
class SeedSweep:
    """What one seed showed. ``first`` is row 0's outputs by M, ``cancelling`` those of the cancelling row, where there
    is one; the sets hold (M, position).
    """

    seed: int
    first: dict[int, Values] = field(default_factory=dict)
    cancelling: dict[int, Values] = field(default_factory=dict)
    position: set[tuple[int, int]] = field(default_factory=set)
    neighbours: set[tuple[int, int]] = field(default_factory=set)
    repeat: set[tuple[int, int]] = field(default_factory=set)

    def outputs(self, rows: int) -> list[Values]:
        """All that row 0 came out as at M ``rows``."""
        return [found[rows] for found in (self.first, self.cancelling) if found]

    def key(self, rows: int) -> tuple[tuple[str, bytes], ...]:
        """Their dtypes and bits."""
        return tuple((values.dtype, values.data.tobytes()) for values in self.outputs(rows))


def work(rows: Sequence[int]) -> int:
    """How many rows one seed computes at most, over all calls."""
    return sum(m * (RUNS + 1 + bool(m > 1) + len(kept_rows(m))) for m in rows)


def look(
    operation: ProbedOperation,
    content: RowContent,
    rows: Sequence[int],
    seed: int,
    on_rows: Callable[[int], None],
) -> SeedSweep:
    """Runs one seed over every M of ``rows``; ``on_rows`` is told the rows of each call."""
    seen = SeedSweep(seed)
    wanted: dict[int, list[bytes]] = {}
    for m in rows:
        values = _run(operation, content.rows[:m], on_rows)
        seen.first[m] = Values(values.data[:1].copy(), values.dtype)
        wanted[m] = _keys(values)
        width = seen.first[rows[0]].data.shape[1]
        if values.data.shape[1] != width:
            raise ProbeResultUnusable(
                f"The operation returned {values.data.shape[1]} values a row for {m} rows and {width} for {rows[0]}; "
                "expected the same number for every M. What comes out for a row must not grow with the batch."
            )
    for m in rows if content.cancelling is not None else ():
        x = np.concatenate([content.cancelling, content.rows[1:m]])
        values = _run(operation, x, on_rows)
        seen.cancelling[m] = Values(values.data[:1].copy(), values.dtype)
    for m in rows[1:]:
        # Every row alike: whatever differs now is due to the position alone.
        alike = _keys(_run(operation, np.repeat(content.rows[:1], m, axis=0), on_rows))
        seen.position.update((m, at) for at in range(1, m) if alike[at] != alike[0])
        if alike[0] != wanted[m][0]:
            seen.neighbours.add((m, 0))
        for kept in kept_rows(m):
            mixed = np.where(kept[:, None], content.rows[:m], content.others[:m])
            found = _keys(_run(operation, mixed, on_rows))
            seen.neighbours.update(
                (m, at) for at in np.flatnonzero(kept).tolist() if found[at] != wanted[m][at]
            )
    # Last, and far from the first runs, so that what an operation keeps from call to call shows as well.
    for _ in range(RUNS - 1):
        for m in rows:
            found = _keys(_run(operation, content.rows[:m], on_rows))
            seen.repeat.update((m, at) for at in range(m) if found[at] != wanted[m][at])
    return seen


def _run(operation: ProbedOperation, x: Float32, on_rows: Callable[[int], None]) -> Values:
    values = operation.read(operation.run(operation.given(x)), len(x))
    on_rows(len(x))
    return values


def _keys(values: Values) -> list[bytes]:
    rows = np.ascontiguousarray(values.data)
    dtype = values.dtype.encode()
    return [blake2b(row.tobytes(), digest_size=16, key=dtype).digest() for row in rows]


def classes(seen: Sequence[SeedSweep], rows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Partition of ``rows``: two M are together only if row 0 has the same bits for every seed."""
    found: dict[tuple[object, ...], list[int]] = {}
    for m in rows:
        found.setdefault(tuple(one.key(m) for one in seen), []).append(m)
    return tuple(tuple(members) for members in found.values())


def findings(
    seen: Sequence[SeedSweep], what: Callable[[SeedSweep], set[tuple[int, int]]]
) -> tuple[ChangedRows, ...]:
    """What single seeds found, joined: one finding an M."""
    return tuple(_joined([(one.seed, what(one)) for one in seen]))


def _joined(found: list[tuple[int, set[tuple[int, int]]]]) -> Iterator[ChangedRows]:
    for m in sorted({rows for _, places in found for rows, _ in places}):
        positions = sorted({at for _, places in found for rows, at in places if rows == m})
        seeds = tuple(seed for seed, places in found if any(rows == m for rows, _ in places))
        yield ChangedRows(m, tuple(positions), seeds)
