"""Which differences are origins: the rules, applied to many rows at once.

A leaf is an origin where all its inputs are equal and an output is not. A composite, and the whole model around all
sites, is one where its inputs are equal, something inside differs, nothing came in through the cache, and no site
inside is an origin: the difference was born between two recorded sites. Everything else that differs is propagated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .ports import Columns, CommonPorts, CommonSite

Mask = NDArray[np.bool_]

ROOT: Final = -1
"""The place of the model as a whole, where a difference is born between two sites that no composite holds."""


@dataclass
class Judged:
    """The verdict on the rows of a block; masks are bool [rows], keyed by the place of a site.

    ``origins`` are final. ``lasting`` are origins unless an earlier row of the request already differed there, since
    a recurrent state or a changed cache entry carries on. ``carried`` rows had a difference come in through the
    cache. ``unclear`` rows read a difference that may be their own entry; ``pending`` are origins unless it was not.
    ``touched`` sites differ at any port. ``first`` int64 [rows] gives, for a composite's origin, the first
    site inside that differs. ``blind`` rows differ and no origin can be named, as an input was not recorded.
    """

    origins: dict[int, Mask] = field(default_factory=dict)
    lasting: dict[int, Mask] = field(default_factory=dict)
    carried: dict[int, Mask] = field(default_factory=dict)
    unclear: dict[int, Mask] = field(default_factory=dict)
    pending: dict[int, Mask] = field(default_factory=dict)
    touched: dict[int, Mask] = field(default_factory=dict)
    first: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    blind: int = 0


def judge(ports: CommonPorts, columns: Columns, differ: Mask) -> Judged:
    """Apply the rules to ``differ``, bool [pairs, rows] of column pairs of one pair of tables."""
    block = _Block(ports, columns, differ)
    for place in range(len(ports.sites)):
        block.visit(place)
    block.visit_root()
    return block.judged


class _Block:
    def __init__(self, ports: CommonPorts, columns: Columns, differ: Mask) -> None:
        self.ports = ports
        self.pair = columns.pair
        self.differ = differ
        self.active: Mask = np.any(differ, axis=1)
        self.judged = Judged()
        self.inputs: dict[int, Mask] = {}
        self.written: dict[int | None, Mask] = {}

    def visit(self, place: int) -> None:
        site = self.ports.sites[place]
        entering, leaving = self._any(site.inputs), self._any(site.outputs)
        if entering is not None:
            self.inputs[place] = entering
        if site.carrying:
            self._note_carried(place, site)
        if site.site.kind == "cache_write" and leaving is not None:
            self.written[site.site.layer] = _either(self.written.get(site.site.layer), leaving)
        composite = bool(site.descendants) or site.stateful
        if composite:
            self._composite(place, site, leaving)
        elif leaving is not None and site.site.kind != "state" and self._knows_inputs(site):
            mask = leaving if entering is None else leaving & ~entering
            self._claim(place, mask, lasting=site.site.kind == "cache_read")
        if entering is not None or leaving is not None:
            self.judged.touched[place] = _either(entering, leaving)

    def visit_root(self) -> None:
        everything = range(len(self.ports.sites))
        mask = self._born_between(everything, None)
        if mask is None:
            return
        if self._blind(everything):
            self.judged.blind = int(np.count_nonzero(mask))
        else:
            self._claim(ROOT, mask, everything)

    def _composite(self, place: int, site: CommonSite, leaving: Mask | None) -> None:
        entering = self.inputs.get(place)
        if entering is not None and entering.all():
            return
        mask = self._born_between(site.descendants, leaving)
        if mask is None or not self._knows_inputs(site) or self._blind(site.descendants):
            return
        if entering is not None:
            mask &= ~entering
        self._claim(place, mask, site.descendants, lasting=site.stateful)

    def _born_between(self, inside: tuple[int, ...] | range, leaving: Mask | None) -> Mask | None:
        """Rows that differ inside, or at ``leaving``, without a cause inside; None where no row differs."""
        judged = self.judged
        mask = leaving
        for place in inside:
            if place in judged.touched:
                mask = _either(mask, judged.touched[place])
        if mask is None:
            return None
        mask = mask.copy()
        for place in inside:
            for causes in (judged.origins, judged.lasting, judged.carried):
                if place in causes:
                    mask &= ~causes[place]
        return mask

    def _claim(
        self, place: int, mask: Mask, inside: tuple[int, ...] | range = (), lasting: bool = False
    ) -> None:
        if not mask.any():
            return
        if inside:
            self.judged.first[place] = self._first_touched(inside, place)
        for other in inside:
            if other in self.judged.unclear:
                unclear = mask & self.judged.unclear[other]
                if unclear.any():
                    self.judged.pending[place] = _either(self.judged.pending.get(place), unclear)
                    mask = mask & ~unclear
        (self.judged.lasting if lasting else self.judged.origins)[place] = mask

    def _note_carried(self, place: int, site: CommonSite) -> None:
        names = self.ports.names
        mask = self._any(tuple(p for p in site.inputs if names[p].endswith((".kv", ".written"))))
        if mask is None:
            return
        # What a row reads has its own entry in it, so where that differs an earlier one need not.
        own = self.written.get(site.site.layer)
        if own is None:
            self.judged.carried[place] = mask
        else:
            self.judged.carried[place], self.judged.unclear[place] = mask & ~own, mask & own

    def _first_touched(self, inside: tuple[int, ...] | range, itself: int) -> NDArray[np.int64]:
        first = np.full(self.differ.shape[1], itself, dtype=np.int64)
        for place in reversed(inside):
            if place in self.judged.touched:
                first[self.judged.touched[place]] = place
        return first

    def _any(self, numbers: tuple[int, ...]) -> Mask | None:
        mask: Mask | None = None
        for number in numbers:
            pair = int(self.pair[number])
            if pair >= 0 and bool(self.active[pair]):
                mask = _either(mask, self.differ[pair])
        return mask

    def _knows_inputs(self, site: CommonSite) -> bool:
        # A row's tokens were compared before its digests, so an embedding's input is known even if not recorded.
        if site.site.kind == "embedding":
            return True
        return site.whole and bool(site.inputs) and all(self.pair[number] >= 0 for number in site.inputs)

    def _blind(self, inside: tuple[int, ...] | range) -> bool:
        """Whether an attention inside lacks the digest of what it read, so that the cache cannot be ruled out."""
        for place in inside:
            site = self.ports.sites[place]
            if site.site.kind == "attention" and "kv" in site.site.inputs and not self._knows_inputs(site):
                return True
        return False


def _either(a: Mask | None, b: Mask | None) -> Mask:
    if a is None or b is None:
        found = b if a is None else a
        assert found is not None
        return found
    return a | b
