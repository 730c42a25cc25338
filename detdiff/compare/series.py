"""What a report draws of a comparison: numbers by position, layer, token and forward, read from the two traces."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import AnswerOfOtherTraces
from detdiff.trace import Generated, Lens, Trace, format_ranges, parse_ranges
from detdiff.trace.log import MODELS

from .answer import Pass
from .digests import Distances
from .divergence import Divergence, Member, PathUse, RequestDivergence
from .events import deed
from .flips import Flip
from .forwards import RunLog, members_of
from .grids import Cells, Grid
from .ladder import Aligned, align, scan
from .noticed import Noticed, grouped
from .tokens import RequestPair, Steps


@dataclass(frozen=True)
class TokenPoint:
    """A generated token: ``index`` counts a request's tokens from 0, ``position`` is that of the row that chose it.

    ``margin`` is the top logit minus the second one. ``delta`` is by how much the other run moved the difference of
    these two logits, None where it cannot say, as after the flip, and in tokens of run b.
    """

    index: int
    position: int
    token: int
    text: str
    margin: float | None
    delta: float | None


@dataclass(frozen=True)
class LensPoint:
    """At the flip, in layer ``layer``: the logit of run a's token minus that of run b's, in each run.

    None where a run did not record both logits.
    """

    layer: int
    a: float | None
    b: float | None


def token_points(
    request: RequestPair, texts: tuple[Mapping[int, str], Mapping[int, str]]
) -> tuple[tuple[TokenPoint, ...], tuple[TokenPoint, ...]]:
    """All tokens of a request in run a and in run b; ``texts`` are each run's token texts by id."""
    a, b = request.steps_a, request.steps_b
    moved = np.full(len(a), np.nan)
    common = a.moved(b)
    moved[: len(common)] = np.where(a.position[: len(common)] <= request.limit, common, np.nan)
    return _points(a, texts[0], moved), _points(b, texts[1], np.full(len(b), np.nan))


def _points(steps: Steps, texts: Mapping[int, str], moved: NDArray[np.float64]) -> tuple[TokenPoint, ...]:
    columns = steps.position, steps.token, steps.margins(), moved
    return tuple(
        TokenPoint(index, position, token, texts.get(token, ""), _known(margin), _known(delta))
        for index, (position, token, margin, delta) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        )
    )


def _known(number: float) -> float | None:
    return None if np.isnan(number) else number


def lens_points(a: Trace, b: Trace, request: RequestPair, flip: Flip | None) -> tuple[LensPoint, ...]:
    """Empty without a flip of two tokens, and where neither run recorded its layers' logits."""
    if flip is None or flip.a.token is None or flip.b.token is None:
        return ()
    tokens = flip.a.token, flip.b.token
    sides = [
        _preference(trace, number, flip.index, tokens) for trace, number in ((a, request.a), (b, request.b))
    ]
    layers = max(map(len, sides))
    padded = [[*side, *[None] * (layers - len(side))] for side in sides]
    return tuple(LensPoint(layer, *both) for layer, both in enumerate(zip(*padded, strict=True)))


def _preference(trace: Trace, request: int, index: int, tokens: tuple[int, int]) -> list[float | None]:
    """By layer the logit of one token minus that of the other at a step; empty where the trace has none."""
    for shard in reversed(trace.shards):
        generated = shard.generated(lens=False)
        if generated is None:
            continue
        found = np.flatnonzero((generated.request == request) & (generated.index == index))
        if len(found):
            whole = shard.generated()
            assert whole is not None
            return [] if whole.lens is None else _by_layer(whole, whole.lens, int(found[-1]), tokens)
    return []


def _by_layer(generated: Generated, lens: Lens, row: int, tokens: tuple[int, int]) -> list[float | None]:
    contested = generated.top_ids[row, :2].tolist()
    found = []
    for ids, logits, both in zip(lens.top_ids[row], lens.top_logits[row], lens.contested[row], strict=True):
        known = dict(zip(ids.tolist(), logits.tolist(), strict=True))
        known |= dict(zip(contested, both.tolist(), strict=False))
        first, second = (known.get(token) for token in tokens)
        found.append(None if first is None or second is None else first - second)
    return found


Event = Mapping[str, Any]

DRAWN: Final = 32
"""Requests that are drawn at most: a page has no room for more pictures."""


@dataclass(frozen=True)
class ForwardPoint:
    """One forward of one model, ``target`` or ``draft``.

    ``rows`` is M, the rows that its linear calls see: with padding, which ``members`` leave out. ``paths`` are most used
    first; ``linear_path`` is the path of most linear sites, None where no kernel plan was recorded. ``writes`` is the
    number of positions whose cache entries it wrote, and ``events`` say what engines and caches did in or after it.
    """

    forward: int
    model: str
    rows: int
    members: tuple[Member, ...]
    paths: tuple[PathUse, ...]
    linear_path: str | None
    writes: int
    events: tuple[str, ...]


@dataclass(frozen=True)
class Threshold:
    """Between two row counts a run's linear calls change their kernel paths, as the recorded calls show.

    In run ``run``, ``a`` or ``b``, calls of ``after`` rows took ``path_after`` and those of ``before`` rows, the next
    more that were recorded, ``path_before``; several paths are joined by commas.
    """

    run: str
    after: int
    before: int
    path_after: str
    path_before: str


@dataclass(frozen=True)
class Timeline:
    """One run's forwards in order, and where its linear calls change their paths."""

    forwards: tuple[ForwardPoint, ...]
    thresholds: tuple[Threshold, ...]

    @classmethod
    def of(cls, trace: Trace, run: str, drawn: Collection[str] | None = None) -> Timeline:
        """``run`` is ``a`` or ``b``. Of a forward's members only those ``drawn`` are told one by one. Raises what reading
        forwards and events raises."""
        ids = [str(request["id"]) for request in trace.requests]
        log, linear = RunLog(trace, run), _LinearPaths(trace)
        events: dict[int, list[Event]] = {}
        for event in trace.events():
            # What came before any forward is told of with the first.
            events.setdefault(max(0, event["forward"]), []).append(event)
        paths: dict[int, tuple[PathUse, ...]] = {}
        found = []
        for number, line in enumerate(trace.forwards()):
            plan, model = line["plan"], str(line.get("model", MODELS[0]))
            if plan not in paths:
                paths[plan] = log.paths(number)
                linear.add(plan, line["calls"], model)
            members = members_of(line, ids)
            if drawn is not None:
                members = _together(members, drawn)
            lines = [*_sentences(events.get(number, ()), ids)]
            for each in grouped(run, ids, [Noticed(number, model, event) for event in line["events"]]):
                lines.append(f"{each.request}: {each.detail}" if each.request else each.detail)
            found.append(
                ForwardPoint(
                    forward=number,
                    model=model,
                    rows=line["shape"][0] * line["shape"][1],
                    members=members,
                    paths=paths[plan],
                    linear_path=linear.path[plan],
                    writes=sum(member.rows for member in members),
                    events=tuple(lines),
                )
            )
        return cls(tuple(found), linear.thresholds(run))


OTHERS: Final = "other requests"
"""What a forward's members are called that are not drawn."""


def _together(members: tuple[Member, ...], drawn: Collection[str]) -> tuple[Member, ...]:
    others: dict[str, Member] = {}
    for each in members:
        if each.request not in drawn:
            before = others.get(each.phase, Member(OTHERS, each.phase, each.start, 0))
            start = min(before.start, each.start)
            others[each.phase] = Member(OTHERS, each.phase, start, before.rows + each.rows)
    return (*(each for each in members if each.request in drawn), *others.values())


class _LinearPaths:
    """The linear calls of a run's plans: ``path`` is that of most linear sites by plan."""

    def __init__(self, trace: Trace) -> None:
        self._sites = len(trace.sites)
        self._linear = frozenset(n for n, site in enumerate(trace.sites) if site.kind == "linear")
        self._taken: dict[int, set[str]] = {}
        self.path: dict[int, str | None] = {}

    def add(self, plan: int, calls: Sequence[Mapping[str, Any]], model: str) -> None:
        """A plan of ``model``; a site whose rows took several paths counts for each."""
        taken: dict[str, set[int]] = {}
        for call in calls:
            sites = {site for run in parse_ranges(call["sites"], self._sites) for site in run} & self._linear
            taken.setdefault(call["path"], set()).update(sites)
            # The draft has linear sites of other sizes, whose thresholds may be others.
            if sites and model == MODELS[0] and type(call.get("rows")) is int:
                self._taken.setdefault(call["rows"], set()).add(call["path"])
        most = max(sorted(taken), key=lambda path: len(taken[path]), default=None)
        self.path[plan] = most if most is not None and taken[most] else None

    def thresholds(self, run: str) -> tuple[Threshold, ...]:
        """Ascending by rows."""
        paths = {rows: ", ".join(sorted(paths)) for rows, paths in sorted(self._taken.items())}
        return tuple(
            Threshold(run, fewer, more, paths[fewer], paths[more])
            for fewer, more in pairwise(paths)
            if paths[fewer] != paths[more]
        )


def _sentences(events: Sequence[Event], ids: Sequence[str]) -> Iterator[str]:
    """The events of one forward; pages that one request named are said together."""
    for (kind, *_), group in groupby(events, key=_alike):
        several = list(group)
        if kind == "page":
            pages, indices = (format_ranges(event[key] for event in several) for key in ("page", "index"))
            s = "s" if len(several) > 1 else ""
            freed, whose = several[0].get("freed"), _of(several[0], ids)
            yield f"physical page{s} {pages}{whose} {'freed' if freed else f'given as page{s} {indices}'}"
        else:
            yield from (_said(event, ids) for event in several)


def _alike(event: Event) -> tuple[Any, ...]:
    return event["event"], event.get("request"), event.get("model"), bool(event.get("freed"))


def _of(event: Event, ids: Sequence[str]) -> str:
    """Whose event it is; the format leaves most keys free."""
    draft = " in the draft" if event.get("model", MODELS[0]) != MODELS[0] else ""
    return (f" of {ids[event['request']]}" if "request" in event else "") + draft


def _said(event: Event, ids: Sequence[str]) -> str:
    kind, detail = str(event["event"]), ""
    if kind in ("filter", "extend", "merge", "roll"):
        return deed(event, ids)
    if kind == "trim":
        detail = f", {event['asked']} asked, {event['done']} done"
    elif kind == "verify":
        detail = f", {len(event['proposals'])} proposed, {event['accepted']} accepted"
    elif kind == "prefix":
        own = event["from"] == event["request"]
        source = "run beforehand" if own else f"from {ids[event['from']]}"
        detail = f", {event['tokens']} positions {source}"
    elif kind == "quantise":
        detail = f", from position {event['position']} on, layers {event['layers']}"
    return kind + _of(event, ids) + detail


@dataclass(frozen=True, eq=False)
class RequestSeries:
    """One request. ``prompt`` is its number of prompt tokens, ``positions`` the last compared position plus one.

    ``flip_index`` is the index of the first token that differs, and ``flip_position`` the row that chose it.
    ``layers`` has a row for what comes before the layers, each layer and what comes after, of the target and then of the
    draft where its rows were compared (``draft: layer 0``); ``sites`` a grid for each of these rows with a row for each
    of its sites, in execution order; ``entries`` a grid for each of them that has cache entries, with rows such as
    ``K head 0`` or ``state 0`` over the positions that wrote them. ``lens`` is empty without a flip or a recorded lens.
    ``origin_forwards`` and ``flip_forwards`` are the forwards of the first origin and of the flip in run a and in run b.
    """

    id: str
    prompt: int
    flip_index: int | None
    flip_position: int | None
    positions: int
    layers: Grid
    sites: tuple[Grid, ...]
    entries: tuple[Grid, ...]
    tokens_a: tuple[TokenPoint, ...]
    tokens_b: tuple[TokenPoint, ...]
    lens: tuple[LensPoint, ...]
    origin_forwards: tuple[int, int] | None = None
    flip_forwards: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True, eq=False)
class Series:
    """The requests of a comparison that are drawn, in its order, the forwards of both runs, and the thresholds seen in them.

    Where there are more than ``DRAWN`` requests, those are drawn that flip first, then those that differ otherwise."""

    requests: tuple[RequestSeries, ...]
    a: tuple[ForwardPoint, ...]
    b: tuple[ForwardPoint, ...]
    thresholds: tuple[Threshold, ...]


def _chosen(requests: Sequence[RequestDivergence]) -> Sequence[RequestDivergence]:
    """The requests to draw, in their order."""
    if len(requests) <= DRAWN:
        return requests
    first = sorted(range(len(requests)), key=lambda n: (requests[n].flip is None, requests[n].identical, n))
    return [requests[n] for n in sorted(first[:DRAWN])]


def series(a: Trace, b: Trace, divergence: Divergence) -> Series:
    """What to draw of ``divergence``, the comparison of ``a`` and ``b``. Needs the traces alone, no model.

    Takes about as long as comparing them, and a few bytes for each site and position of what is drawn; values are read where both traces
    hold them. Raises AnswerOfOtherTraces where ``divergence`` is not theirs, and what ``compare`` raises.
    """
    chosen = _chosen(divergence.requests)
    ids = [request.id for request in chosen]
    across = divergence.across_engines is not None
    aligned = align(a, b, ids, across_models=divergence.across_models, across_engines=across)
    cells = Cells(aligned.ports, aligned.pairs, Distances(a, b, aligned.pairs))
    done = scan(aligned, cells)
    _must_be_theirs(aligned, done, chosen)
    numbers = {request.id: number for number, request in enumerate(aligned.pairing.pairs)}
    texts = a.texts(), b.texts()
    drawn = None if len(chosen) == len(divergence.requests) else frozenset(ids)
    timelines = Timeline.of(a, "a", drawn), Timeline.of(b, "b", drawn)
    return Series(
        requests=tuple(_request(aligned, cells, numbers[each.id], each, texts) for each in chosen),
        a=timelines[0].forwards,
        b=timelines[1].forwards,
        thresholds=(*timelines[0].thresholds, *timelines[1].thresholds),
    )


def _request(
    aligned: Aligned,
    cells: Cells,
    number: int,
    found: RequestDivergence,
    texts: tuple[dict[int, str], dict[int, str]],
) -> RequestSeries:
    request, runs = aligned.pairing.pairs[number], aligned.runs
    tokens_a, tokens_b = token_points(request, texts)
    return RequestSeries(
        id=request.id,
        prompt=request.prompt,
        flip_index=request.flip,
        flip_position=None if request.flip is None else request.at,
        positions=int(cells.lengths[number]),
        layers=cells.layers(number),
        sites=cells.sites(number),
        entries=cells.entries(number),
        tokens_a=tokens_a,
        tokens_b=tokens_b,
        lens=lens_points(runs.a, runs.b, request, found.flip),
        origin_forwards=None if found.origin is None else (found.origin.forward_a, found.origin.forward_b),
        flip_forwards=(None, None) if found.flip is None else (found.flip.forward_a, found.flip.forward_b),
    )


def _must_be_theirs(aligned: Aligned, done: Pass, requests: Sequence[RequestDivergence]) -> None:
    """A saved comparison may be older than the traces that lie where its own did."""
    numbers = {request.id: number for number, request in enumerate(aligned.pairing.pairs)}
    for request in requests:
        number = numbers.get(request.id)
        claimed = request.rows, request.differing, None if request.flip is None else request.flip.index
        found = None
        if number is not None:
            rows = aligned.pairs.of(number)
            differing = int(done.tally.differing[rows].sum())
            found = len(rows), differing, aligned.pairing.pairs[number].flip
        if claimed != found:
            raise AnswerOfOtherTraces(
                f"The comparison says of request {request.id} that {claimed[1]} digests of {claimed[0]} rows differ, and that "
                f"{_flip(claimed[2])}; {aligned.runs.a.path} and {aligned.runs.b.path} "
                + (
                    "do not share that request"
                    if found is None
                    else f"have {found[1]} of {found[0]}, and {_flip(found[2])}"
                )
                + ". Expected the comparison of these two traces. Compare them again."
            )


def _flip(index: int | None) -> str:
    return "no token differs" if index is None else f"token {index} is the first that differs"
