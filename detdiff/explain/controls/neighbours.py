"""The controls ``neighbour_content`` and ``neighbour_length``: what the other requests say, and how long it is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from detdiff.compare import CacheEntry, Composition, Origin, RequestDivergence, compare
from detdiff.engines.base import VALUES, Overrides
from detdiff.scenario import SCORE, Capture, Request, Scenario
from detdiff.trace import Trace

from ..case import Case, Side
from ..control import CannotRun, Figures, Outcome, control
from ..facts import Facts
from .dtype import NAMES, UNIT

SEED = 4


@dataclass(frozen=True, eq=False)
class ChangeFigures(Figures):
    """What changed of ``request`` of ``side`` first: ``where`` in words, a site with ``composition``, or a token or a cache entry.

    ``entry`` is the first changed cache entry.
    """

    side: str
    request: str | None = None
    where: str | None = None
    site: str | None = None
    kind: str | None = None
    layer: int | None = None
    head: int | None = None
    position: int | None = None
    forward: int | None = None
    composition: tuple[Mapping[str, Any], ...] | None = None
    entry_kind: str | None = None
    entry: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class NeighbourFigures(ChangeFigures):
    """What other neighbours changed; ``forwards_alike`` of ``forwards`` were looked at: those of the same composition."""

    forwards_alike: int | None = None
    forwards: int | None = None


def _inside(facts: Facts) -> bool:
    """Whether both engines show what was in their batches. What a server was sent together is no such proof."""
    return not facts.outside


@control("neighbour_content", after="padding", asked_by=_inside)
def neighbour_content(case: Case) -> Outcome:
    """Other text of the same length for all requests but one: nothing of that one may change.

    Looked at up to the first forward that is composed otherwise (another text may end or be verified elsewhere). Result
    ``equal``; ``differs``, a leak, with the first changed site and cache entry; or ``undecided`` where the first change is
    at an expert layer, whose rows are put together by what they say, and no further than rounding goes.
    """
    side, id = _subject(case)
    trace = case.trace(side)
    scenario = changed(case, side, id, lambda tokens, draw: [draw() for _ in tokens], keep_length=True)
    again = case.record(scenario, side)
    alike = _alike_forwards(trace, again)
    found = compare(trace, again).request(id)
    first = first_change(found, alike)
    detail: dict[str, Any] = {
        "side": side,
        "request": id,
        "forwards_alike": alike,
        "forwards": len(trace.forwards()),
    }
    more = len(scenario.requests) - len(scenario.turns_with(id))
    others = "the other request" if more == 1 else f"the other {more} requests"
    if first is None:
        sentence = f"with other text of the same length in {others} of side {side}, no bit of {id} changed in the first {alike} forwards"
        return Outcome("equal", sentence, NeighbourFigures(**detail))
    detail |= first
    runs = ((case.scenario(side), Overrides()), (scenario, Overrides()))
    if first.get("kind") == "switch" and not moved_far(case, side, id, first, runs):
        sentence = (
            f"with other text in {others} of side {side}, {id} changed first at the expert layer {first['where']}, whose "
            "calls hold the rows of all requests that chose an expert"
        )
        return Outcome("undecided", sentence, NeighbourFigures(**detail))
    sentence = f"with other text of the same length in {others} of side {side}, {id} changed, first at {first['where']}"
    return Outcome("differs", sentence, NeighbourFigures(**detail))


def moved_far(
    case: Case,
    side: Side,
    id: str,
    change: Mapping[str, Any],
    runs: Sequence[tuple[Scenario, Overrides]],
) -> bool:
    """Whether experts whose inputs are equal gave a row of ``id`` values further apart in two runs than another number of rows makes them:
    the norm of the difference over the first one's is above the root of the dtype's unit roundoff. False where it cannot be measured."""
    from ..origins import DRAFT, Captured

    site, position = str(change["site"]), int(change["position"])
    if case.lacking((VALUES,)) is not None:
        return False
    values = []
    for scenario, overrides in runs:
        capture = Capture(
            level="window",
            requests=tuple(sorted(scenario.turns_with(id))),
            positions=(position, position),
            sites=(site,),
            digest=scenario.capture.digest,
            memory_mb=scenario.capture.memory_mb,
        )
        try:
            captured = Captured(case.record(replace(scenario, capture=capture), side, overrides=overrides))
        except CannotRun:
            return False
        row = captured.row(id, position, draft=site.startswith(DRAFT))
        value = None if row is None else captured.value(row, site, "out")
        if value is None or value.dtype not in NAMES:
            return False
        values.append(value.numbers())
        unit = UNIT[NAMES[value.dtype]]
    norm = float(np.linalg.norm(values[0]))
    return bool(np.linalg.norm(values[0] - values[1]) > math.sqrt(unit) * norm)


def _length_asked(facts: Facts) -> bool | str:
    return facts.rests_without("another length of the neighbours") or _inside(facts)


@control("neighbour_length", after="patch_out", asked_by=_length_asked)
def neighbour_length(case: Case) -> Outcome:
    """The other requests one token shorter (longer, where they have one). Result ``equal`` or ``differs``: shapes change,
    so kernels may, and only together with ``neighbour_content`` does it say anything."""
    side, id = _subject(case)
    scenario = changed(
        case,
        side,
        id,
        lambda tokens, draw: tokens[:-1] if len(tokens) > 1 else [*tokens, draw()],
        keep_length=False,
    )
    again = case.record(scenario, side)
    found = compare(case.trace(side), again).request(id)
    detail: dict[str, Any] = {"side": side, "request": id}
    first = first_change(found, None)
    if found.stage is None or first is None:
        sentence = f"with the other requests one token shorter, no bit of {id} changed"
        return Outcome("equal", sentence, NeighbourFigures(**detail))
    sentence = f"with the other requests one token shorter, {id} changed, first at {first['where']}"
    return Outcome("differs", sentence, NeighbourFigures(**detail, **first))


def _subject(case: Case) -> tuple[Side, str]:
    """The side in which the focus shares more forwards with others, and its id there."""
    id = case.focus.id
    shared = {side: _company(case.trace(side), case.number(side, id)) for side in "ab"}
    side = "a" if shared["a"] > shared["b"] else "b"
    if len(case.ids(side)) == len(case.scenario(side).turns_with(id)):
        raise CannotRun(f"{id} is the only request, so it has no neighbours")
    return side, id


def _company(trace: Trace, number: int) -> int:
    members = [{row["request"] for row in line["rows"]} for line in trace.forwards()]
    return sum(number in them and len(them) > 1 for them in members)


def changed(
    case: Case,
    side: Side,
    id: str,
    change: Callable[[list[int], Callable[[], int]], list[int]],
    *,
    keep_length: bool,
    seed: int = SEED,
) -> Scenario:
    """The scenario of a side with the tokens of all requests but ``id`` and its other turns changed, drawn with ``seed``."""
    trace, scenario = case.trace(side), case.scenario(side)
    engine = case.engine(side)
    size = engine.identity.get("vocab_size") or max(max(r["tokens"]) for r in trace.requests) + 1
    stops = set(getattr(engine, "stop_tokens", ()))
    random_ = random.Random(seed)
    usable = [token for token in range(int(size)) if token not in stops]

    def draw() -> int:
        return random_.choice(usable)

    generated = trace.generated()
    requests: list[Request] = []
    own = scenario.turns_with(id)
    for number, request in enumerate(scenario.requests):
        if request.id in own or (request.turn is not None and request.tokens is None):
            requests.append(request)
            continue
        given = list(trace.requests[number]["tokens"])
        if request.turn is not None:
            # Of a later turn a trace has the whole conversation.
            given = list(request.tokens or ())
        prompt = len(given)
        if scenario.task == SCORE:
            given += generated.token[generated.request == number].tolist()
        tokens = tuple(change(given, draw))
        new = replace(request, prompt=None, continuation=None, tokens=tokens, chat=False)
        if scenario.task == SCORE:
            new = replace(new, score_from=max(1, min(prompt, len(tokens) - 1)))
        elif keep_length:
            # So that it ends when it ended before, whatever it says.
            count = int((generated.request == number).sum())
            new = replace(new, max_tokens=max(1, count), ignore_stop=True)
        requests.append(new)
    forced = None if scenario.force_tokens is None else scenario.force_tokens
    if forced is not None:
        raise CannotRun("the tokens of all requests are forced, so no neighbour can say something else")
    return replace(scenario, requests=tuple(requests))


def _alike_forwards(a: Trace, b: Trace) -> int:
    """How many forwards from the first on hold the same rows of the same requests."""
    lines = [[(line["shape"], line["rows"]) for line in trace.forwards()] for trace in (a, b)]
    alike = 0
    for x, y in zip(*lines, strict=False):
        if x != y:
            break
        alike += 1
    return alike


@dataclass(frozen=True)
class _NeighbourChange:
    """Something that changed: the forward it was in, and how it is told."""

    forward: int
    detail: dict[str, Any]


def first_change(request: RequestDivergence, alike: int | None) -> dict[str, Any] | None:
    """The first change, in the forwards that are alike; its cache entry beside it."""
    origin, entry = request.origin, request.cache_entry
    found: list[_NeighbourChange] = []
    if origin is not None:
        found.append(_NeighbourChange(origin.forward_a, _origin(origin)))
    if entry is not None:
        found.append(_NeighbourChange(entry.written_a, _entry(entry)))
    if request.flip is not None and request.flip.forward_a is not None:
        where = {"where": f"token {request.flip.index}", "position": request.flip.position}
        found.append(_NeighbourChange(request.flip.forward_a, where))
    found = [each for each in found if alike is None or each.forward < alike]
    if not found:
        return None
    first = min(found, key=lambda each: each.forward).detail
    if entry is not None and (alike is None or entry.written_a < alike):
        first = {**first, "entry": _entry(entry)}
    return first


def _origin(origin: Origin) -> dict[str, Any]:
    where = f"{origin.site}, position {origin.position}"
    head = None
    if origin.changes:
        # The write that went wrong, where a cache entry is not what was written.
        change = origin.changes[0]
        head = change.head
        where = f"{change.kind} of layer {change.layer}, head {change.head}, position {change.position} (seen at {origin.site})"
    return {
        "where": where,
        "site": origin.site,
        "kind": origin.kind,
        "layer": origin.layer,
        "head": head,
        "position": origin.position,
        "forward": origin.forward_a,
        "composition": _members(origin.composition_a),
    }


def _entry(entry: CacheEntry) -> dict[str, Any]:
    return {
        "where": f"{entry.kind} of layer {entry.layer}, head {entry.head}, position {entry.position}",
        "layer": entry.layer,
        "head": entry.head,
        "position": entry.position,
        "entry_kind": entry.kind,
        "forward": entry.written_a,
    }


def _members(composition: Composition | None) -> list[dict[str, Any]]:
    members = () if composition is None else composition.members
    return [{"request": m.request, "phase": m.phase, "start": m.start, "rows": m.rows} for m in members]
