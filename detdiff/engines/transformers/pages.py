"""Pages of a cache as cells: who wrote each of them last and what, what a forward is handed of them, and what of that each row sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .rows import Int64, UInt64

NOBODY = -1


@dataclass(frozen=True, eq=False)
class HandedKeys:
    """The keys that layers of one kind of attention are handed in a forward, int64 [keys] each.

    ``cell`` is where each lies; ``request`` and ``position`` are whose it is, by who wrote there last; ``row`` is the forward's own row whose entry
    it is; -1: none. ``places`` int64 [rows] is where each row's own entry is among the keys, ``written`` the cell that it goes to. ``late``: cells
    are written after they were read, so that the forward's own keys come from no cell.
    """

    cell: Int64
    request: Int64
    position: Int64
    row: Int64
    places: Int64
    written: Int64
    late: bool

    def __len__(self) -> int:
        return len(self.cell)


class PageLedger:
    """The cells of the layers of one kind of attention: the request and position that was written to each last, and the digests of that by layer."""

    def __init__(self) -> None:
        self._owner = np.full((0, 2), NOBODY, np.int64)
        self._entries: dict[str, UInt64] = {}

    def handed(
        self, read: Int64, write: Int64, rows: Int64, *, late: bool, sentinel: int, trash: int
    ) -> HandedKeys:
        """What a forward is handed that reads the cells ``read`` and writes its ``rows`` int64 [rows, 2] (request, position) to the cells ``write``.

        Without any to read nobody has a past, and the keys are those of the rows. ``sentinel`` stands for the next of the forward's own rows
        where cells are read before they are written, ``trash`` is the cell of what is not kept.
        """
        written = np.where(write == trash, NOBODY, write)
        count = len(rows)
        self._grow(int(max(read.max(initial=-1), written.max(initial=-1))) + 1)
        if not len(read):
            self._own(written, rows)
            places = np.arange(count)
            return HandedKeys(written, rows[:, 0], rows[:, 1], places, places, written, True)
        if late:
            own = read == sentinel
            row = np.where(own, np.minimum(np.cumsum(own) - 1, count - 1), NOBODY)
        else:
            self._own(written, rows)
            fresh = np.full(len(self._owner), NOBODY, np.int64)
            fresh[written[written >= 0]] = np.flatnonzero(written >= 0)
            row = fresh[read]
        whose = np.where((row >= 0)[:, None], rows[row], self._owner[read])
        cell = np.where(row >= 0, written[row], read) if late else read
        if late:
            self._own(written, rows)
        places = np.full(count, NOBODY, np.int64)
        mine = np.flatnonzero(row >= 0)[::-1]
        places[row[mine]] = mine
        return HandedKeys(cell, whose[:, 0], whose[:, 1], row, places, written, late)

    def write(self, layer: str, cells: Int64, entries: UInt64) -> None:
        """Entries uint64 [rows, heads] go to cells of a layer; -1: nowhere."""
        self._held(layer, entries.shape[1])[cells[cells >= 0]] = entries[cells >= 0]

    def expected(self, layer: str, handed: HandedKeys, own: UInt64) -> UInt64:
        """The entries uint64 [keys, heads] that a layer is to be handed, ``own`` [rows, heads] those of the forward; 0 where nobody wrote."""
        before = self._held(layer, own.shape[1])[np.maximum(handed.cell, 0)]
        found: UInt64 = np.where((handed.row >= 0)[:, None], own[handed.row], before)
        return found

    def _held(self, layer: str, heads: int) -> UInt64:
        known = self._entries.get(layer, np.zeros((0, heads), np.uint64))
        if len(known) < len(self._owner):
            more = np.zeros((len(self._owner) - len(known), heads), np.uint64)
            self._entries[layer] = known = np.concatenate([known, more])
        return known

    def whose(self, layer: str, head: int, entry: int) -> tuple[int, int] | None:
        """The request and position for which an entry with this digest was written in a layer, if one was."""
        known = self._entries.get(layer)
        found = () if known is None else np.flatnonzero(known[:, head] == np.uint64(entry))
        return next(
            ((int(r), int(p)) for r, p in (self._owner[cell] for cell in found) if r >= 0),
            None,
        )

    def _own(self, cells: Int64, rows: Int64) -> None:
        self._owner[cells[cells >= 0]] = rows[cells >= 0]

    def _grow(self, cells: int) -> None:
        if cells > len(self._owner):
            more = np.full((cells - len(self._owner), 2), NOBODY, np.int64)
            self._owner = np.concatenate([self._owner, more])


class WrongKeys(NamedTuple):
    """A ``row`` that sees keys which are not its own at places ``foreign`` int64 [n], or not all of its own: how many are ``missing``, from the
    position ``first`` on."""

    row: int
    foreign: Int64
    missing: int
    first: int


class SeenKeys:
    """Which of the handed keys each row sees, by a mask bool [rows, keys]; rows int64 [rows, 2] are (request, position)."""

    def __init__(
        self, mask: NDArray[np.bool_], handed: HandedKeys, rows: Int64, window: int | None = None
    ) -> None:
        self._mask = mask
        counts = mask.sum(axis=1)
        self._first = mask.argmax(axis=1)
        self._last = np.where(counts > 0, mask.shape[1] - mask[:, ::-1].argmax(axis=1), self._first)
        self._scattered = np.flatnonzero(self._last - self._first != counts)
        self._handed, self._rows, self._window = handed, rows, window

    def sums(self, terms: UInt64) -> UInt64:
        """For each row the sum of the terms uint64 [keys] of what it sees, mod 2**64."""
        up_to = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
        found: UInt64 = up_to[self._last] - up_to[self._first]
        for row in self._scattered.tolist():
            found[row] = terms[self._mask[row]].sum(dtype=np.uint64)
        return found

    def wrong(self) -> Iterator[WrongKeys]:
        """The rows that see others than the keys of their request up to themselves, or of the last ``window`` of these."""
        scattered = set(self._scattered.tolist())
        handed = self._handed
        for row, (request, position) in enumerate(self._rows.tolist()):
            least = max(0, position + 1 - self._window) if self._window else 0
            span = slice(int(self._first[row]), int(self._last[row]))
            own = np.arange(least, position + 1)
            if (
                row not in scattered
                and span.stop - span.start == len(own)
                and (handed.request[span] == request).all()
                and (handed.position[span] == own).all()
            ):
                continue
            seen = np.flatnonzero(self._mask[row])
            mine = (handed.request[seen] == request) & np.isin(handed.position[seen], own)
            missing = np.setdiff1d(own, handed.position[seen[mine]])
            if not mine.all() or len(missing):
                first = int(missing[0]) if len(missing) else NOBODY
                yield WrongKeys(row, seen[~mine], len(missing), first)
