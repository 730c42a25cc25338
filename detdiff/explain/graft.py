"""The controls ``graft_in`` and ``graft_out``: cache entries of one run in the other, right before the flip's forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from detdiff.engines.mlx.cache_patches import Answer, Entry, Held, Moment, differing, grafted, moment, ranges
from detdiff.engines.mlx.deciding_rows import place
from detdiff.engines.mlx.path_changes import baseline
from detdiff.engines.mlx.reruns import Reruns

from .case import Case, Side
from .control import BudgetSpent
from .outcome import Outcome
from .smallest import by_groups

TRIALS = 256
"""Trials at most in a search for the smallest set; each is one forward."""


class _Enough(Exception):
    """The trials are used up."""


@dataclass(frozen=True, eq=False)
class _Pair:
    """Both sides before the forward that decides, the entries that differ, and what each side answers on its own."""

    moments: dict[Side, Moment]
    entries: dict[Side, list[Held]]
    carriers: list[Entry]
    own: dict[Side, Answer]

    def answer(self, side: Side, given: Sequence[Entry]) -> Answer:
        """What ``side`` answers with these entries of the other run."""
        layers = sorted({entry.layer for entry in given})
        mine, theirs = self.entries[side], self.entries["b" if side == "a" else "a"]
        changed = {
            layer: grafted(mine[layer], theirs[layer], [e for e in given if e.layer == layer])
            for layer in layers
        }
        return self.moments[side].answer(changed)


def graft_in(case: Case) -> Outcome:
    """Run a's carriers in b. Result ``removed`` (b then decides as a did), ``remains``, ``no_carriers``, or ``no_effect``
    where carriers differ and both decide alike."""
    return _graft(case, "b", ("removed", "remains"))


def graft_out(case: Case) -> Outcome:
    """Run b's carriers in a. Result ``reproduced`` (a then decides as b did), ``not_reproduced``, ``no_carriers`` or
    ``no_effect``."""
    return _graft(case, "a", ("reproduced", "not_reproduced"))


def _pair(case: Case) -> _Pair:
    found = case.known.get("graft")
    if not isinstance(found, _Pair):
        base = baseline(Reruns.of(case))
        moments = {side: moment(Reruns.of(case), side, base) for side in "ab"}
        entries = {side: moments[side].entries() for side in "ab"}
        carriers = differing(entries["a"], entries["b"])
        own = {side: moments[side].answer({}) for side in "ab"} if carriers else {}
        found = case.known["graft"] = _Pair(moments, entries, carriers, own)
    return found


def _graft(case: Case, side: Side, results: tuple[str, str]) -> Outcome:
    pair = _pair(case)
    other = "b" if side == "a" else "a"
    what = (
        f"the flip of {case.focus.id}" if case.focus.flip is not None else f"the parting of {case.focus.id}"
    )
    detail: dict[str, Any] = {
        "carriers": len(pair.carriers),
        "position": place(Reruns.of(case), side).position,
    }
    ends = [max(layer.end for layer in pair.entries[s]) for s in "ab"]
    states = [layer for layer, held in enumerate(pair.entries[side]) if not held.keys]
    if states:
        # A recurrent state has no positions, so it stays each run's own.
        detail["not_grafted"] = states
    if ends[0] != ends[1]:
        detail["positions_held"] = dict(zip("ab", ends, strict=True))
    if not pair.carriers:
        said = f"every cache entry that {case.focus.id} could read before the forward of the flip is equal in both runs"
        return Outcome("no_carriers", said, detail)
    if pair.own["a"] == pair.own["b"]:
        said = f"{len(pair.carriers)} cache entries differ, and the deciding row of {case.focus.id} gives the same bits in both runs"
        return Outcome("no_effect", said, detail)
    wanted = pair.own[other]
    took = f"{len(pair.carriers)} differing cache entries of {other} in {side}"
    if pair.answer(side, pair.carriers) != wanted:
        said = f"with all {took}, {side} still decides otherwise than {other}: {what} is not in {_kept(states)} alone"
        return Outcome(results[1], said, detail)
    best, exact, trials = _smallest(pair, side, wanted)
    detail |= {
        "smallest": [list(entry) for entry in best[:64]],
        "entries": len(best),
        "layers": sorted({entry.layer for entry in best}),
        "kinds": sorted({entry.kind for entry in best}),
        "heads": sorted({entry.head for entry in best}),
        "positions": ranges([entry.position for entry in best]),
        "exact": exact,
        "trials": trials,
    }
    happens = "appears" if side == "a" else "is gone"
    few = "these suffice" if exact else "the search ended with these"
    said = (
        f"with {took}, {what} {happens}; {few}: {len(best)} entr{'y' if len(best) == 1 else 'ies'} of layer"
        f"{'' if len(detail['layers']) == 1 else 's'} {_listed(detail['layers'])} at position"
        f"{'' if len({e.position for e in best}) == 1 else 's'} {_spans(detail['positions'])}"
    )
    return Outcome(results[0], said, detail)


def _smallest(pair: _Pair, side: Side, wanted: Answer) -> tuple[list[Entry], bool, int]:
    best = list(pair.carriers)
    known: dict[frozenset[Entry], bool] = {}

    def works(some: Sequence[Entry]) -> bool:
        nonlocal best
        key = frozenset(some)
        if key not in known:
            if len(known) >= TRIALS:
                raise _Enough
            known[key] = pair.answer(side, some) == wanted
        if known[key] and len(some) < len(best):
            best = list(some)
        return known[key]

    keys: tuple[Callable[[Entry], object], ...] = (
        lambda entry: entry.layer,
        lambda entry: entry.position,
        lambda entry: (entry.layer, entry.position, entry.kind),
    )
    try:
        return by_groups(pair.carriers, keys, works), True, len(known)
    except (_Enough, BudgetSpent):
        return best, False, len(known)


def _kept(states: Sequence[int]) -> str:
    return f"the keys and values (layers {_listed(states)} are recurrent)" if states else "the cache"


def _listed(numbers: Sequence[int]) -> str:
    return _spans(ranges(numbers))


def _spans(spans: Sequence[Sequence[int]]) -> str:
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in spans[:6]]
    return ", ".join(shown) + (f" and {len(spans) - 6} more" if len(spans) > 6 else "")
