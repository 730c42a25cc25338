"""Row policies: in calls of which sizes a linear layer computes its rows, and which of them keep a row's bits here.

A row's bits may depend on how many rows its call has and on its place among them. What was probed says which sizes of a call
agree with each other at every place; a policy makes calls of such sizes alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from detdiff.errors import PolicyUnusable
from detdiff.scenario import PathRule

AUTO: Final = "auto"
NATIVE: Final = "native"
EACH: Final = 16
"""Up to so many rows, each number of rows has calls of its own size."""
LARGE: Final = (32, 64)
"""Sizes of calls that more rows are cut into."""
SIZES: Final = (*range(1, EACH + 1), *LARGE)
DECODE: Final = (1, 4, 8, 16)
"""Numbers of rows whose time decides, and for which the price is measured: requests that decode at once."""
SAME: Final = 1.1
"""Measured times within this factor are taken for the same, so that noise does not choose the bits of a model."""
CLEARLY: Final = 1.5
_NAMED = re.compile(r"(pad|tile|split_rows)[:=]([1-9][0-9]{0,3})")


@dataclass(frozen=True)
class RowPolicy:
    """``tiles`` has for 1, 2, … rows the size of the calls that they are computed in, the last one filled up with zero rows;
    ``large`` are sizes that more rows are cut into, the largest first, before what is left is computed by ``tiles``.
    ``as_it_comes``: calls of up to so many rows are not touched at all."""

    tiles: tuple[int, ...]
    large: tuple[int, ...] = ()
    as_it_comes: bool = False

    @property
    def sizes(self) -> frozenset[int]:
        """All sizes of calls that it makes."""
        return frozenset((*self.tiles, *self.large))

    def calls(self, rows: int) -> Iterator[tuple[int, int]]:
        """For ``rows`` rows: how many of them each call takes, and the size that it is filled up to."""
        while rows:
            cut = next((size for size in self.large if size <= rows), None)
            if cut is None:
                # Without a size to cut by, the last tile is that of all greater numbers.
                cut = self.tiles[min(rows, len(self.tiles)) - 1]
            taken = min(rows, cut)
            yield taken, cut
            rows -= taken

    def __str__(self) -> str:
        """In the words of kernel plans: native, rows, pad:N, tile:N, split_rows:N; else each number of rows with its calls."""
        tiles, most = self.tiles, len(self.tiles)
        plain = tuple(range(1, most + 1))
        if tiles == plain:
            return NATIVE
        if len(set(tiles)) == 1:
            return "rows" if tiles[0] == 1 else f"tile:{tiles[0]}"
        for size in range(2, most + 1):
            if tiles == tuple(max(size, rows) for rows in plain):
                return f"pad:{size}"
            if tiles == tuple(1 if rows <= size else rows for rows in plain):
                return f"split_rows:{size}"
        parts = []
        for first, last, path in self._runs():
            own = "native" if path is None else path
            parts.append(f"{first} {own}" if first == last else f"{first}..{last} {own}")
        return ", ".join(parts)

    def _runs(self) -> Iterator[tuple[int, int, str | None]]:
        """Neighbouring numbers of rows with the same path; None: calls as large as they come."""
        paths = [
            None if size == rows else "rows" if size == 1 else f"tile:{size}"
            for rows, size in enumerate(self.tiles, 1)
        ]
        first = 0
        for place, path in enumerate(paths):
            if place + 1 == len(paths) or paths[place + 1] != path:
                yield first + 1, place + 1, path
                first = place + 1

    def rules(self, site: str) -> list[PathRule]:
        """The same as rules of a kernel plan for sites of that pattern."""
        first = len(self.tiles) + 1 if self.as_it_comes else 1
        bounds = [*self.large[::-1], None]
        rules = [
            PathRule(
                site,
                rows=f"{max(low, first)}.." if high is None else f"{max(low, first)}..{high - 1}",
                path=f"cut:{low}",
            )
            for low, high in zip(bounds, bounds[1:], strict=False)
            if low is not None
        ]
        if not self.as_it_comes:
            same: list[tuple[int, int, int]] = []
            for rows, size in enumerate(self.tiles, 1):
                if same and same[-1][2] == size:
                    same[-1] = (same[-1][0], rows, size)
                else:
                    same.append((rows, rows, size))
            rules += [PathRule(site, rows=f"{a}..{b}", path=f"tile:{size}") for a, b, size in same]
        if len(self.tiles) + 1 < (self.large[-1] if self.large else 1 << 30):
            rules.append(PathRule(site, rows=f"{len(self.tiles) + 1}..", path=f"tile:{self.tiles[-1]}"))
        return rules


def cheapest(sets: Sequence[frozenset[int]], seconds: Mapping[int, float] | None) -> RowPolicy | None:
    """The policy with calls of one of ``sets`` whose sizes cost least at DECODE; None where there is none.

    ``seconds`` is what a call of each size took. Without it, a call costs what reading the weights does, and more rows break ties.
    The set of one row, which is how a request alone is computed, wins where it costs no more than ``SAME`` times the least.
    """

    def cost(rows: int, size: int) -> float:
        each = 1 + 1e-3 * size if seconds is None else seconds[size]
        return -(-rows // size) * each

    found: list[tuple[float, int, RowPolicy]] = []
    for sizes in sets:
        policy = _of(sizes, cost)
        total = sum(cost(rows, policy.tiles[rows - 1]) / cost(rows, rows) for rows in DECODE)
        found.append((total * (1 if 1 in sizes else SAME), len(found), policy))
    return min(found)[2] if found else None


def _of(sizes: frozenset[int], cost: object) -> RowPolicy:
    assert callable(cost)
    tiles = []
    for rows in range(1, EACH + 1):
        best = min(sorted(sizes), key=lambda size, rows=rows: (cost(rows, size), size))  # type: ignore[misc]
        # A call as large as it comes is kept where nothing is clearly cheaper.
        tiles.append(rows if rows in sizes and cost(rows, rows) <= CLEARLY * cost(rows, best) else best)
    large = tuple(size for size in sorted(sizes, reverse=True) if size >= EACH)
    return RowPolicy(tuple(tiles), large, as_it_comes=False)


def named(policy: str, probed: Sequence[int]) -> RowPolicy:
    """The policy of that name. Raises PolicyUnusable for another one than rows, pad:N, tile:N, split_rows:N and native."""
    most = max(EACH, size_of(policy))
    every = range(1, most + 1)
    large = tuple(size for size in sorted(probed, reverse=True) if size >= EACH)
    kind, size = policy.partition(":")[0].partition("=")[0], size_of(policy)
    if policy == "rows":
        return RowPolicy((1,) * EACH)
    if policy == NATIVE:
        return RowPolicy(tuple(every), large)
    if kind == "tile":
        return RowPolicy((size,) * most)
    if kind == "pad":
        return RowPolicy(
            tuple(max(rows, size) for rows in every), tuple(each for each in large if each >= most)
        )
    return RowPolicy(
        tuple(1 if rows <= size else rows for rows in every), tuple(each for each in large if each >= most)
    )


def size_of(policy: str) -> int:
    """The N of a policy's name, 1 where it has none. Raises PolicyUnusable for a name that is none."""
    if policy in (AUTO, NATIVE, "rows"):
        return 1
    found = _NAMED.fullmatch(str(policy))
    if found is None or not 1 <= int(found[2]) <= 256:
        raise PolicyUnusable(
            f"The policy {policy!r} is none that pins kernels; expected auto, or rows, pad:N, tile:N, split_rows:N with N from 1 to 256, "
            "or native, which is refused where it is not invariant. Take auto, which finds one here."
        )
    return int(found[2])
