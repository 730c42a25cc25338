"""Which rows come out with other bits: with another M, at another position, beside other rows, on a repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from detdiff.compare.metrics import Values
from detdiff.errors import ProbeResultUnusable
from detdiff_kernels.rounding import Float32

from .operation import Operation
from .rows import Content, kept_rows

RUNS = 3  # of the same rows, the first one included

OnCalls = Callable[[int, int], None]


@dataclass(frozen=True)
class Finding:
    """At M ``rows``, the rows at ``positions`` came out with other bits, with each of ``seeds``."""

    rows: int
    positions: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass
class Seen:
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
    operation: Operation, content: Content, rows: Sequence[int], seed: int, on_rows: Callable[[int], None]
) -> Seen:
    """Runs one seed over every M of ``rows``; ``on_rows`` is told the rows of each call."""
    seen = Seen(seed)
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


def _run(operation: Operation, x: Float32, on_rows: Callable[[int], None]) -> Values:
    values = operation.read(operation.run(operation.given(x)), len(x))
    on_rows(len(x))
    return values


def _keys(values: Values) -> list[bytes]:
    rows = np.ascontiguousarray(values.data)
    dtype = values.dtype.encode()
    return [blake2b(row.tobytes(), digest_size=16, key=dtype).digest() for row in rows]


def classes(seen: Sequence[Seen], rows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Partition of ``rows``: two M are together only if row 0 has the same bits for every seed."""
    found: dict[tuple[object, ...], list[int]] = {}
    for m in rows:
        found.setdefault(tuple(one.key(m) for one in seen), []).append(m)
    return tuple(tuple(members) for members in found.values())


def findings(seen: Sequence[Seen], what: Callable[[Seen], set[tuple[int, int]]]) -> tuple[Finding, ...]:
    """What single seeds found, joined: one finding an M."""
    return tuple(_joined([(one.seed, what(one)) for one in seen]))


def _joined(found: list[tuple[int, set[tuple[int, int]]]]) -> Iterator[Finding]:
    for m in sorted({rows for _, places in found for rows, _ in places}):
        positions = sorted({at for _, places in found for rows, at in places if rows == m})
        seeds = tuple(seed for seed, places in found if any(rows == m for rows, _ in places))
        yield Finding(m, tuple(positions), seeds)
