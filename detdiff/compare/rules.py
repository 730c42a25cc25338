"""Which differences are origins: the rules, applied to many rows at once.

A leaf is an origin where all its inputs are equal and an output is not. A composite, and the whole model around all
sites, is one where its inputs are equal, something inside differs, nothing came in through the cache, and no site
inside is an origin: the difference was born between two recorded sites. Everything else that differs is propagated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from .ports import Columns, CommonPorts, CommonSite

Mask = int
"""A set of rows: bit n stands for row n."""

ROOT: Final = -1
"""The place of the model as a whole, where a difference is born between two sites that no composite holds."""


@dataclass
class Judged:
    """The verdict on some rows; masks are keyed by the place of a site, and a place without rows may be absent.

    ``origins`` are final. ``lasting`` are origins unless an earlier row of the request already differed there, since
    a recurrent state or a changed cache entry carries on. ``carried`` rows had a difference come in through the
    cache. ``unclear`` rows read a difference that may be their own entry; ``pending`` are origins unless it was not.
    ``touched`` sites differ at any port. ``first`` gives, for a composite's origin, which site inside differs first
    in which rows. ``blind`` rows differ and no origin can be named, as an input was not recorded.
    """

    origins: dict[int, Mask] = field(default_factory=dict)
    lasting: dict[int, Mask] = field(default_factory=dict)
    carried: dict[int, Mask] = field(default_factory=dict)
    unclear: dict[int, Mask] = field(default_factory=dict)
    pending: dict[int, Mask] = field(default_factory=dict)
    touched: dict[int, Mask] = field(default_factory=dict)
    first: dict[int, list[tuple[int, Mask]]] = field(default_factory=dict)
    blind: int = 0


def judge(ports: CommonPorts, columns: Columns, differ: Sequence[Mask]) -> Judged:
    """Apply the rules to rows of one pair of tables; ``differ`` has the rows in which each column pair differs."""
    rules = _Rules(ports, columns, differ)
    for place in range(len(ports.sites)):
        rules.visit(place)
    rules.visit_root()
    return rules.judged


class _Rules:
    def __init__(self, ports: CommonPorts, columns: Columns, differ: Sequence[Mask]) -> None:
        self.ports = ports
        self.pair: list[int] = columns.pair.tolist()
        self.differ = differ
        self.judged = Judged()
        self.explained: dict[int, Mask] = {}
        self.written: dict[int | None, Mask] = {}

    def visit(self, place: int) -> None:
        site, judged = self.ports.sites[place], self.judged
        entering, leaving = self._any(site.inputs), self._any(site.outputs)
        if site.carrying:
            self._note_carried(place, site)
        if site.site.kind == "cache_write":
            self.written[site.site.layer] = self.written.get(site.site.layer, 0) | leaving
        if site.descendants or site.stateful:
            self._composite(place, site, entering, leaving)
        elif site.site.kind != "state" and self._knows_inputs(site):
            self._claim(place, leaving & ~entering, lasting=site.site.kind == "cache_read")
        if entering or leaving:
            judged.touched[place] = entering | leaving
        causes = (found.get(place, 0) for found in (judged.origins, judged.lasting, judged.carried))
        if explained := union(causes):
            self.explained[place] = explained

    def visit_root(self) -> None:
        everything = range(len(self.ports.sites))
        mask = self._born_between(everything, 0)
        if mask and self._blind(everything):
            self.judged.blind = mask.bit_count()
        else:
            self._claim(ROOT, mask, everything)

    def _composite(self, place: int, site: CommonSite, entering: Mask, leaving: Mask) -> None:
        mask = self._born_between(site.descendants, leaving) & ~entering
        if mask and self._knows_inputs(site) and not self._blind(site.descendants):
            self._claim(place, mask, site.descendants, lasting=site.stateful)

    def _born_between(self, inside: Sequence[int], leaving: Mask) -> Mask:
        """Rows that differ inside, or at ``leaving``, without a cause inside."""
        touched = union(self.judged.touched.get(place, 0) for place in inside)
        return (touched | leaving) & ~union(self.explained.get(place, 0) for place in inside)

    def _claim(self, place: int, mask: Mask, inside: Sequence[int] = (), lasting: bool = False) -> None:
        if not mask:
            return
        if inside:
            self.judged.first[place] = self._first_touched(inside, mask)
        if unclear := mask & union(self.judged.unclear.get(other, 0) for other in inside):
            self.judged.pending[place] = unclear
        (self.judged.lasting if lasting else self.judged.origins)[place] = mask & ~unclear

    def _note_carried(self, place: int, site: CommonSite) -> None:
        names = self.ports.names
        mask = self._any(tuple(p for p in site.inputs if names[p].endswith((".kv", ".written"))))
        # What a row reads has its own entry in it, so where that differs an earlier one need not.
        own = self.written.get(site.site.layer, 0)
        self.judged.carried[place], self.judged.unclear[place] = mask & ~own, mask & own

    def _first_touched(self, inside: Sequence[int], mask: Mask) -> list[tuple[int, Mask]]:
        first = []
        for place in inside:
            if here := mask & self.judged.touched.get(place, 0):
                first.append((place, here))
                mask &= ~here
        return first

    def _any(self, numbers: tuple[int, ...]) -> Mask:
        return union(self.differ[self.pair[number]] for number in numbers if self.pair[number] >= 0)

    def _knows_inputs(self, site: CommonSite) -> bool:
        # A row's tokens were compared before its digests, so an embedding's input is known even if not recorded.
        if site.site.kind == "embedding":
            return True
        return site.whole and bool(site.inputs) and all(self.pair[number] >= 0 for number in site.inputs)

    def _blind(self, inside: Iterable[int]) -> bool:
        """Whether an attention inside lacks the digest of what it read, so that the cache cannot be ruled out."""
        for place in inside:
            site = self.ports.sites[place]
            if site.site.kind == "attention" and "kv" in site.site.inputs and not self._knows_inputs(site):
                return True
        return False


def union(masks: Iterable[Mask]) -> Mask:
    """The rows that are in any of the masks."""
    found = 0
    for mask in masks:
        found |= mask
    return found
