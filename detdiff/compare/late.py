"""Origins that only the whole pass can settle, since they depend on what earlier rows of the request did."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .details import Found
from .ports import CommonPorts
from .rows import RowPairs
from .rules import ROOT, Judged
from .scan import Scanner
from .tally import NEVER, Tally

_LOW = (1 << 32) - 1


class LateRules:
    """Applies the rules that ask what earlier rows of the same request did."""

    def __init__(self, tally: Tally, ports: CommonPorts, pairs: RowPairs, scanner: Scanner) -> None:
        self._tally, self._ports, self._pairs, self._scanner = tally, ports, pairs, scanner
        self._known: dict[int, Judged] = {}

    def origins(self) -> list[Found]:
        """The settled origins, in no particular order."""
        found = []
        for number in range(len(self._tally.lasting)):
            found += [*self._lasting(number), *self._visible(number), *self._pending(number)]
        return found

    def place_of(self, found: Found) -> int:
        """The site that orders an origin: for a composite, the first one inside that differs."""
        if found.how != "composite":
            return found.place
        first = self._judged(found.row).first.get(found.place)
        return first[0][0] if first else found.place

    def _judged(self, row: int) -> Judged:
        if row not in self._known:
            block = self._scanner.pair(row)
            self._known[row] = self._tally.judged(block.columns, block.differ[0].tolist())
        return self._known[row]

    def _lasting(self, number: int) -> Iterator[Found]:
        """The first row at which a state or a cache differs by itself; later rows inherit it."""
        for place in np.flatnonzero(self._tally.lasting[number] != NEVER).tolist():
            key = int(self._tally.lasting[number, place])
            if not self._ports.sites[place].stateful:
                yield Found(key & _LOW, place, "changed")
            elif int(self._tally.touched[number, place]) >> 32 >= key >> 32:
                leaf = not self._ports.sites[place].descendants
                yield Found(key & _LOW, place, "leaf" if leaf else "composite")

    def _pending(self, number: int) -> Iterator[Found]:
        """Births inside a composite in a row whose attention read a difference: its own entry, or an earlier one.

        Only a row before which no entry differs can have such a birth, so the first candidate decides.
        """
        claimed: dict[int, list[int]] = {}
        sites = range(len(self._ports.sites))
        for place in (*sites, ROOT):
            key = int(self._tally.pending[number, place])
            if key == NEVER:
                continue
            row, position = key & _LOW, key >> 32
            inside = sites if place == ROOT else self._ports.sites[place].descendants
            unclear = self._judged(row).unclear
            layers = {self._ports.sites[n].site.layer for n in inside if unclear.get(n)}
            earlier = any(self._explained_from(number, layer) < position for layer in layers)
            if not earlier and not any(n in inside for n in claimed.get(row, ())):
                claimed.setdefault(row, []).append(place)
                yield Found(row, place, "composite")

    def _visible(self, number: int) -> Iterator[Found]:
        """Rows that read other entries although every entry up to them was written alike.

        At most one for each layer: the first row, at the first site that shows it.
        """
        done: dict[int | None, int] = {}
        for place in np.flatnonzero(self._tally.carried[number] != NEVER).tolist():
            key = int(self._tally.carried[number, place])
            layer = self._ports.sites[place].site.layer
            if key >> 32 < min(done.get(layer, int(NEVER)), self._explained_from(number, layer)):
                done[layer] = key >> 32
                if self._entries_known(number, layer, key >> 32):
                    yield Found(key & _LOW, place, "visible")

    def _explained_from(self, number: int, layer: int | None) -> int:
        """The first position from which a differing or changed entry explains a difference in what is read."""
        first = min(
            (int(self._tally.differs[number, n]) >> 32 for n in self._writes(number, layer)),
            default=int(NEVER),
        )
        for place, site in enumerate(self._ports.sites):
            if site.site.kind == "cache_read" and site.site.layer == layer and self._mine(number, place):
                first = min(first, int(self._tally.lasting[number, place]) >> 32)
        return first

    def _mine(self, number: int, place: int) -> bool:
        """Whether a site is of the model that the stream ``number`` is of."""
        return self._ports.sites[place].draft == (number >= self._pairs.requests)

    def _entries_known(self, number: int, layer: int | None, position: int) -> bool:
        """Whether the entries of every position up to this one were compared."""
        rows = np.flatnonzero((self._pairs.stream == number) & (self._pairs.position <= position))
        writes = self._writes(number, layer)
        return (
            bool(writes)
            and len(rows) == position + 1
            and all(bool((self._tally.present(n, rows) > 0).all()) for n in writes)
        )

    def _writes(self, number: int, layer: int | None) -> list[int]:
        """Rows of the tally's entries for a layer's cache; all layers where it has none and reads another's."""
        kinds = [
            (n, self._ports.sites[place].site)
            for n, place in enumerate(self._tally.cache_sites)
            if self._mine(number, place)
        ]
        writes = [n for n, site in kinds if site.kind == "cache_write"]
        return [n for n, site in kinds if site.kind == "cache_write" and site.layer == layer] or writes
