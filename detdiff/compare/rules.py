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


class Rules:
    """The rules for rows of one pair of tables, looked up once: which column pairs each site asks for."""

    def __init__(self, ports: CommonPorts, columns: Columns) -> None:
        # Rows of one model have no port of the other's sites, which then hides nothing.
        drafted = any(
            bool((columns.pair[list(site.outputs)] >= 0).any()) for site in ports.sites if site.draft
        )
        self.sites = [_Site.of(ports, columns, site, site.draft == drafted) for site in ports.sites]

    def judge(self, differ: Sequence[Mask]) -> Judged:
        """Apply the rules; ``differ`` has the rows in which each column pair differs."""
        judging = _Judging(self.sites, differ)
        for place, site in enumerate(self.sites):
            judging.visit(place, site)
        judging.visit_root()
        return judging.judged


@dataclass(frozen=True)
class _Site:
    """A site's column pairs. ``blind`` sites lack the digest of what they read, which may be the cache."""

    layer: int | None
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    carrying: tuple[int, ...]
    inside: tuple[int, ...]
    stateful: bool
    known: bool
    blind: bool

    @classmethod
    def of(cls, ports: CommonPorts, columns: Columns, common: CommonSite, runs: bool) -> _Site:
        """``runs`` says that the site is of the model whose rows these are."""

        def pairs(numbers: Iterable[int]) -> tuple[int, ...]:
            found = columns.pair[list(numbers)].tolist()
            return tuple(dict.fromkeys(pair for pair in found if pair >= 0))

        site = common.site
        # A row's tokens were compared before its digests, so an embedding's input is known even if not recorded.
        recorded = bool(common.inputs) and bool((columns.pair[list(common.inputs)] >= 0).all())
        known = site.kind == "embedding" or (common.whole and recorded)
        carrying = [n for n in common.inputs if ports.names[n].endswith((".kv", ".written"))]
        return cls(
            layer=site.layer,
            kind=site.kind,
            inputs=pairs(common.inputs),
            outputs=pairs(common.outputs),
            carrying=pairs(carrying) if common.carrying else (),
            inside=common.descendants,
            stateful=common.stateful,
            known=known,
            blind=runs and site.kind == "attention" and "kv" in site.inputs and not known,
        )


class _Judging:
    def __init__(self, sites: Sequence[_Site], differ: Sequence[Mask]) -> None:
        self.sites = sites
        self.differ = differ
        self.judged = Judged()
        self.explained: dict[int, Mask] = {}
        self.written: dict[int | None, Mask] = {}

    def visit(self, place: int, site: _Site) -> None:
        entering, leaving = self._any(site.inputs), self._any(site.outputs)
        if site.inside or site.stateful:
            mask = self._born_between(site.inside, leaving) & ~entering
            if mask and site.known and not self._blind(site.inside):
                self._claim(place, mask, site.inside, lasting=site.stateful)
        elif site.known and site.kind != "state":
            self._claim(place, leaving & ~entering, lasting=site.kind == "cache_read")
        if entering or leaving:
            self.judged.touched[place] = entering | leaving
        if entering and site.carrying:
            self._note_carried(place, site)
        if leaving and site.kind == "cache_write":
            self.written[site.layer] = self.written.get(site.layer, 0) | leaving

    def visit_root(self) -> None:
        everything = range(len(self.sites))
        mask = self._born_between(everything, 0)
        if mask and self._blind(everything):
            self.judged.blind = mask.bit_count()
        else:
            self._claim(ROOT, mask, everything)

    def _born_between(self, inside: Sequence[int], leaving: Mask) -> Mask:
        """Rows that differ inside, or at ``leaving``, without a cause inside."""
        touched, explained = leaving, 0
        for place in inside:
            touched |= self.judged.touched.get(place, 0)
            explained |= self.explained.get(place, 0)
        return touched & ~explained

    def _claim(self, place: int, mask: Mask, inside: Sequence[int] = (), lasting: bool = False) -> None:
        if not mask:
            return
        unclear = 0
        if inside:
            self.judged.first[place] = self._first_touched(inside, mask)
            unclear = mask & union(self.judged.unclear.get(other, 0) for other in inside)
        if unclear:
            self.judged.pending[place] = unclear
        (self.judged.lasting if lasting else self.judged.origins)[place] = mask & ~unclear
        self.explained[place] = mask & ~unclear

    def _note_carried(self, place: int, site: _Site) -> None:
        mask = self._any(site.carrying)
        # What a row reads has its own entry in it, so where that differs an earlier one need not.
        own = self.written.get(site.layer, 0)
        self.judged.carried[place], self.judged.unclear[place] = mask & ~own, mask & own
        self.explained[place] = self.explained.get(place, 0) | mask & ~own

    def _first_touched(self, inside: Sequence[int], mask: Mask) -> list[tuple[int, Mask]]:
        first = []
        for place in inside:
            if here := mask & self.judged.touched.get(place, 0):
                first.append((place, here))
                mask &= ~here
        return first

    def _any(self, pairs: tuple[int, ...]) -> Mask:
        found = 0
        for pair in pairs:
            found |= self.differ[pair]
        return found

    def _blind(self, inside: Iterable[int]) -> bool:
        return any(self.sites[place].blind for place in inside)


def union(masks: Iterable[Mask]) -> Mask:
    """The rows that are in any of the masks."""
    found = 0
    for mask in masks:
        found |= mask
    return found
