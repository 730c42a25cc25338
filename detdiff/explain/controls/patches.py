"""The controls ``patch_in`` and ``patch_out``: cache entries of one run in the other, right before the flip's forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from detdiff.engines.base import PATCH

from ..case import Case, Side
from ..control import BudgetSpent, Figures, Outcome, by_groups, control, ranges
from ..facts import Facts

TRIALS = 256
"""Trials at most in a search for the smallest set; each is one forward."""

Decision = int | bytes
"""The token that is chosen, or a digest of the row where nothing flipped."""


class EntryKey(NamedTuple):
    """A cache entry by layer, kind (``K`` or ``V``), head and position."""

    layer: int
    kind: str
    head: int
    position: int


class Patches(Protocol):
    """Both sides right before the forward that decides, as an engine with the capability ``patch`` gives them.

    ``differing`` are the entries of positions that both hold whose bits differ; ``own`` is what each side decides as it is,
    empty where nothing differs; ``ends`` are the positions that each holds; ``positions`` those of the deciding row.
    """

    differing: Sequence[EntryKey]
    own: Mapping[Side, Decision]
    ends: Mapping[Side, int]
    positions: Mapping[Side, int]

    def recurrent(self, side: Side) -> list[int]:
        """Layers whose state has no positions, so that it stays each run's own."""

    def answer(self, side: Side, given: Sequence[EntryKey]) -> Decision:
        """What ``side`` decides with these entries of the other run. Raises BudgetSpent."""


class PatchesCache(Protocol):
    """An engine with the capability ``patch``."""

    def cache_patches(self, case: Case) -> Patches:
        """Raises CannotRun."""


@dataclass(frozen=True, eq=False)
class PatchFigures(Figures):
    """``differing_entries`` entries differ at the deciding row's ``position``; the smallest set that works has ``entries`` of these
    ``layers``, ``kinds``, ``heads`` and ``positions`` (inclusive ranges), and is ``exact`` where no smaller one was left to
    try. ``smallest`` lists at most 64 of it."""

    differing_entries: int
    position: int
    not_patched: tuple[int, ...] | None = None
    positions_held: Mapping[Side, int] | None = None
    smallest: tuple[tuple[Any, ...], ...] | None = None
    entries: int | None = None
    layers: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None
    heads: tuple[int, ...] | None = None
    positions: tuple[tuple[int, int], ...] | None = None
    exact: bool | None = None
    trials: int | None = None


class _TrialsSpent(Exception):
    """The trials are used up."""


def _says_more(facts: Facts) -> bool | str:
    """Nothing rests on which entries carried a flip, and a search for them takes longest, where its path changes are known."""
    if facts.held_inside and facts.result("minimal_change") == "smallest":
        return "the smallest set of path changes is known, and no rule asks which cache entries carried them"
    return True


@control("patch_in", after="minimal_change", needs=(PATCH,), asked_by=_says_more)
def patch_in(case: Case) -> Outcome:
    """Run a's differing cache entries in b. Result ``removed`` (b then decides as a did), ``remains``, ``no_differing_entries``, or ``no_effect``
    where differing cache entries differ and both decide alike."""
    return _patch(case, "b", ("removed", "remains"))


@control("patch_out", after="patch_in", needs=(PATCH,), asked_by=_says_more)
def patch_out(case: Case) -> Outcome:
    """Run b's differing cache entries in a. Result ``reproduced`` (a then decides as b did), ``not_reproduced``, ``no_differing_entries`` or
    ``no_effect``."""
    return _patch(case, "a", ("reproduced", "not_reproduced"))


def _patches(case: Case) -> Patches:
    engine: Any = case.one_engine()
    if "patches" not in case.known:
        case.known["patches"] = engine.cache_patches(case)
    found: Patches = case.known["patches"]
    return found


def _patch(case: Case, side: Side, results: tuple[str, str]) -> Outcome:
    pair = _patches(case)
    other = "b" if side == "a" else "a"
    what = (
        f"the flip of {case.focus.id}"
        if case.focus.flip is not None
        else f"the divergence of {case.focus.id}"
    )
    figures: dict[str, Any] = {"differing_entries": len(pair.differing), "position": pair.positions[side]}
    states = pair.recurrent(side)
    if states:
        figures["not_patched"] = tuple(states)
    if pair.ends["a"] != pair.ends["b"]:
        figures["positions_held"] = dict(pair.ends)
    if not pair.differing:
        forward = "the forward of the flip" if case.focus.flip is not None else "its deciding forward"
        sentence = f"every cache entry that {case.focus.id} could read before {forward} is equal in both runs"
        return Outcome("no_differing_entries", sentence, PatchFigures(**figures))
    if pair.own["a"] == pair.own["b"]:
        sentence = f"{len(pair.differing):,} cache entries differ, and the deciding row of {case.focus.id} gives the same bits in both runs"
        return Outcome("no_effect", sentence, PatchFigures(**figures))
    wanted = pair.own[other]
    took = f"{len(pair.differing):,} differing cache entries of {other} in {side}"
    if pair.answer(side, pair.differing) != wanted:
        sentence = f"with all {took}, {side} still decides otherwise than {other}: {what} is not in {_patched(states)} alone"
        return Outcome(results[1], sentence, PatchFigures(**figures))
    best, exact, trials = _smallest(pair, side, wanted)
    positions = tuple((first, last) for first, last in ranges([entry.position for entry in best]))
    layers = tuple(sorted({entry.layer for entry in best}))
    figures |= {
        "smallest": tuple(tuple(entry) for entry in best[:64]),
        "entries": len(best),
        "layers": layers,
        "kinds": tuple(sorted({entry.kind for entry in best})),
        "heads": tuple(sorted({entry.head for entry in best})),
        "positions": positions,
        "exact": exact,
        "trials": trials,
    }
    happens = "appears" if side == "a" else "is gone"
    few = "these suffice" if exact else "the search ended with these"
    sentence = (
        f"with {took}, {what} {happens}; {few}: {len(best):,} entr{'y' if len(best) == 1 else 'ies'} of layer"
        f"{'' if len(layers) == 1 else 's'} {_spans(ranges(layers))} at position"
        f"{'' if len({e.position for e in best}) == 1 else 's'} {_spans(positions)}"
    )
    return Outcome(results[0], sentence, PatchFigures(**figures))


def _smallest(pair: Patches, side: Side, wanted: Decision) -> tuple[list[EntryKey], bool, int]:
    best = list(pair.differing)
    known: dict[frozenset[EntryKey], bool] = {}

    def works(some: Sequence[EntryKey]) -> bool:
        nonlocal best
        key = frozenset(some)
        if key not in known:
            if len(known) >= TRIALS:
                raise _TrialsSpent
            known[key] = pair.answer(side, some) == wanted
        if known[key] and len(some) < len(best):
            best = list(some)
        return known[key]

    keys: tuple[Callable[[EntryKey], object], ...] = (
        lambda entry: entry.layer,
        lambda entry: entry.position,
        lambda entry: (entry.layer, entry.position, entry.kind),
    )
    try:
        return by_groups(pair.differing, keys, works), True, len(known)
    except (_TrialsSpent, BudgetSpent):
        return best, False, len(known)


def _patched(states: Sequence[int]) -> str:
    return f"the keys and values (layers {_spans(ranges(states))} are recurrent)" if states else "the cache"


def _spans(spans: Sequence[Sequence[int]]) -> str:
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in spans[:6]]
    return ", ".join(shown) + (f" and {len(spans) - 6} more" if len(spans) > 6 else "")
