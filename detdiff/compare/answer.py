"""Puts the answer together, request by request, from what the pass over the rows left behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Trace, parse_ranges

from .alignment import CommonPorts, RowPairs
from .details import Details, Runs
from .divergence import (
    Agreement,
    CacheEntry,
    Chunk,
    DifferingEntries,
    DraftDivergence,
    Finding,
    FlipForward,
    Growth,
    LayerGrowth,
    Margin,
    Origin,
    OriginCount,
    PositionGrowth,
    RequestDivergence,
    SiteDifference,
)
from .events import chunk_of
from .flips import Acceptance, Flip, Proposed, TokenChoice, TopToken, Verification, Verified
from .origins import ROOT, FoundOrigin, Tally
from .tokens import RequestPair, Steps

Event = Mapping[str, Any]


class Verifications:
    """The verifications of two runs, by request."""

    def __init__(self, a: Trace, b: Trace) -> None:
        self._traces = a, b
        self._events: tuple[dict[int, list[Event]], ...] = ({}, {})
        for trace, found in zip(self._traces, self._events, strict=True):
            for event in trace.events() if _speculated(trace) else ():
                if event["event"] == "verify":
                    found.setdefault(event["request"], []).append(event)

    def answer(self, request: RequestPair) -> Verification | None:
        """None where neither run speculated."""
        if not any(map(_speculated, self._traces)):
            return None
        a, b = (
            events.get(number, [])
            for events, number in zip(self._events, (request.a, request.b), strict=True)
        )
        by_token = _by_token(a, request.prompt), _by_token(b, request.prompt)
        end = request.flip if request.flip is not None else len(request.steps_a) - 1
        both = [n for n in range(end + 1) if all(n in found for found in by_token)]
        pairs = [(n, by_token[0][n], by_token[1][n]) for n in both]
        proposals = [n for n, x, y in pairs if x.proposal != y.proposal]
        choices = [n for n, x, y in pairs if x.choice != y.choice]
        flip = None if request.flip is None else tuple(found.get(request.flip) for found in by_token)
        return Verification(
            tokens=len(both),
            proposals_equal=not proposals if both else None,
            first_other_proposal=proposals[0] if proposals else None,
            choices_equal=not choices if both else None,
            first_other_choice=choices[0] if choices else None,
            flip_a=None if flip is None else flip[0],
            flip_b=None if flip is None else flip[1],
            a=self._acceptance(0, request, a),
            b=self._acceptance(1, request, b),
        )

    def findings(self, requests: Sequence[RequestPair]) -> Iterator[Finding]:
        """Choices that are not what their own row's logits say: taken from another row, or from another model."""
        for request in requests:
            for side, (number, steps) in enumerate(
                ((request.a, request.steps_a), (request.b, request.steps_b))
            ):
                events = self._events[side].get(number, ())
                row = (
                    {int(position): n for n, position in enumerate(steps.position.tolist())} if events else {}
                )
                for event in events:
                    for place, choice in enumerate(event["choices"][: len(event["committed"])]):
                        n = row.get(event["start"] + place)
                        own = choice if n is None or not steps.top_ids.shape[1] else int(steps.top_ids[n, 0])
                        if own != choice:
                            yield Finding(
                                "ab"[side],
                                "choice",
                                request.id,
                                event["forward"],
                                f"the verification takes token {choice} as the choice at position {event['start'] + place}, "
                                f"and that row's own logits choose {own}",
                            )

    def _acceptance(self, side: int, request: RequestPair, events: list[Event]) -> Acceptance | None:
        trace = self._traces[side]
        if not _speculated(trace):
            return None
        own = trace.header.get("speculation", {}).get(request.id)
        proposed = sum(len(event["proposals"]) for event in events)
        accepted = sum(event["accepted"] for event in events)
        counted = (own.get("proposed"), own.get("accepted")) if isinstance(own, Mapping) else (None, None)
        return Acceptance(
            verifications=len(events),
            proposed=proposed,
            accepted=accepted,
            own_proposed=counted[0],
            own_accepted=counted[1],
            agrees=None if None in counted else counted == (proposed, accepted),
        )


def _speculated(trace: Trace) -> bool:
    return trace.scenario.get("draft") is not None


def _by_token(events: list[Event], prompt: int) -> dict[int, Verified]:
    """The verification of each generated token that one gave; a token's index counts from 0."""
    found: dict[int, Verified] = {}
    for event in events:
        first = event["start"] - prompt + 1
        for place in range(len(event["committed"])):
            proposal = event["proposals"][place] if place < len(event["proposals"]) else None
            choice = event["choices"][place] if place < len(event["choices"]) else None
            found[first + place] = Verified(
                event["forward"],
                Proposed(tuple(event["proposals"]), tuple(event["choices"])),
                place,
                proposal,
                choice,
            )
    return found


Int64 = NDArray[np.int64]

_MARGINS: Final = 5
_BUCKETS: Final = 16


@dataclass(frozen=True)
class Pass:
    """What one pass over all row pairs gave; ``settled`` says how the origins that needed a second pass were found."""

    ports: CommonPorts
    pairs: RowPairs
    tally: Tally
    details: Details
    settled: dict[tuple[int, int], str]
    across_models: bool = False


@dataclass(frozen=True)
class Rewritten:
    """Entries below ``position`` that run ``run`` alone stored anew in these layers, after forward ``forward``."""

    run: str
    position: int
    forward: int
    layers: frozenset[int]


def _quantised(trace: Trace, request: int, before: int) -> dict[int, tuple[int, int]]:
    """(position, forward) at which the target's cache of a request was quantised before a forward began, by layer."""
    found: dict[int, tuple[int, int]] = {}
    for event in trace.events():
        mine = event.get("request", request) == request and event.get("model", "target") == "target"
        if event["event"] == "quantise" and mine and event["forward"] < before:
            for run in parse_ranges(event["layers"], 1 << 20):
                for layer in run:
                    found.setdefault(layer, (event["position"], event["forward"]))
    return found


class RequestAnswer:
    """Answers for one request at a time; texts are token texts by id."""

    def __init__(
        self,
        runs: Runs,
        done: Pass,
        texts: tuple[dict[int, str], dict[int, str]],
        verifications: Verifications,
    ) -> None:
        self._runs, self._done, self._texts = runs, done, texts
        self._verifications = verifications

    def answer(self, number: int, request: RequestPair, fed_otherwise: bool) -> RequestDivergence:
        """The comparison of request ``number``; ``fed_otherwise`` says that rows got different tokens in."""
        tally, pairs = self._done.tally, self._done.pairs
        rows = pairs.of(number)
        differing = int(tally.differing[rows].sum())
        draft = self._draft(number)
        own = self._first_origin(number)
        origin = own if own is not None or draft is None or differing else draft.origin
        stage = None
        if fed_otherwise:
            stage = "workload"
        elif differing or (draft is not None and draft.differing):
            stage = origin.stage if origin is not None else "bits"
        scores = request.scores()
        if stage is None and scores is not None and scores.differing and not self._done.ports.names:
            stage = "bits"
        embedding = request.embedding()
        if stage is None and embedding is not None and embedding.differing:
            stage = "bits"
        if stage is None and request.flip is not None:
            stage = "tokens"
        not_finite = request.not_finite()
        finite = not not_finite and (embedding is None or embedding.max_abs is not None)
        flip = None if request.flip is None else self._flip(request, rows)
        forward = None
        if flip is not None and len(rows) and "forwards" not in (*self._runs.a.lacks, *self._runs.b.lacks):
            forward = self._flip_forward(request, flip, rows)
        return RequestDivergence(
            id=request.id,
            identical=stage is None and request.cut is None and not pairs.lacking[number] and finite,
            stage=stage,
            prompt_tokens=request.prompt,
            generated_a=len(request.steps_a),
            generated_b=len(request.steps_b),
            rows=len(rows),
            differing=differing,
            flip=flip,
            swapped=None if flip is None else _swapped(flip),
            flip_forward=forward,
            inherited=None if forward is None else forward.origins == 0 and forward.differing > 0,
            origin=origin,
            origins=self._counts(number),
            cache_entry=self._first_entry(request, rows),
            differing_entries=self._differing_entries(request, rows[pairs.position[rows] <= request.at])
            if differing
            else None,
            margins=_margins(request) if stage is not None else (),
            growth=self._growth(number, rows) if differing else None,
            chunks=() if origin is None else self._chunks(request, rows, origin),
            forced=_agreement(request) if request.forced else None,
            draft=draft,
            verification=self._verifications.answer(request),
            text=request.text,
            scores=scores,
            logits_equal=self._logits_equal(request, rows),
            not_finite=not_finite,
            first_site=self._first_site(rows) if self._done.across_models else None,
            scored=request.scored(),
            embedding=embedding,
        )

    def _logits_equal(self, request: RequestPair, rows: Int64) -> bool | None:
        """Whether the flip's row has bit-equal logits in both runs; None where that is not known."""
        at = rows[self._done.pairs.position[rows] == request.at]
        found = self._done.details.logits_equal(int(at[0])) if request.flip is not None and len(at) else None
        return request.scores_at_flip() if found is None else found

    def _first_site(self, rows: Int64) -> SiteDifference | None:
        """The first site that differs, by run A's forward, then site, then row."""
        some = rows[self._done.tally.differing[rows] > 0]
        if not len(some):
            return None
        forward = self._runs.a.row_index().forward[self._done.pairs.a[some]]
        some = some[forward == forward.min()]
        firsts = [(self._done.details.first_port(int(row)), int(row)) for row in some]
        port, row = min(firsts)
        return self._done.details.site_difference(row, port)

    def _first_origin(self, stream: int) -> Origin | None:
        """The first origin among the rows of a request in one model."""
        first = self._done.tally.first.get(stream)
        if first is None:
            return None
        _, _, row, place = first
        leaf = place != ROOT and not self._done.ports.sites[place].descendants
        how = self._done.settled.get((row, place), "leaf" if leaf else "composite")
        return self._done.details.origin(FoundOrigin(row, place, how))

    def _draft(self, number: int) -> DraftDivergence | None:
        """The draft's rows of a request; None where no row of a draft was compared."""
        stream = number + self._done.pairs.requests
        rows = self._done.pairs.of(stream)
        if not len(rows):
            return None
        firsts = self._done.tally.first
        drafted, own = firsts.get(stream), firsts.get(number)
        earlier = None if drafted is None else own is None or drafted[0] < own[0]
        differing = int(self._done.tally.differing[rows].sum())
        return DraftDivergence(len(rows), differing, self._first_origin(stream), earlier)

    def _flip(self, request: RequestPair, rows: Int64) -> Flip:
        index = request.flip
        assert index is not None
        at = rows[self._done.pairs.position[rows] == request.at]
        forwards = [
            int(steps.forward[index]) if index < len(steps) else None
            for steps in (request.steps_a, request.steps_b)
        ]
        return Flip(
            index=index,
            kind=request.kind,
            position=request.at,
            forward_a=forwards[0],
            forward_b=forwards[1],
            a=_choice(request.steps_a, index, self._texts[0]),
            b=_choice(request.steps_b, index, self._texts[1]),
            magnitude=self._done.details.logits(int(at[0])) if len(at) else None,
        )

    def _flip_forward(self, request: RequestPair, flip: Flip, rows: Int64) -> FlipForward:
        log_a, log_b, pairs = self._runs.log_a, self._runs.log_b, self._done.pairs
        inside = np.zeros(len(rows), dtype=bool)
        for trace, at, forward in (
            (self._runs.a, pairs.a, flip.forward_a),
            (self._runs.b, pairs.b, flip.forward_b),
        ):
            if forward is not None:
                inside |= trace.row_index().forward[at[rows]] == forward
        equal = None
        if flip.forward_a is not None and flip.forward_b is not None:
            calls = [
                (
                    log_a.call(flip.forward_a, s.index_a, (request.a, flip.position)).path,
                    log_b.call(flip.forward_b, s.index_b, (request.b, flip.position)).path,
                )
                for s in self._done.ports.sites
            ]
            known = [(a, b) for a, b in calls if a is not None and b is not None]
            equal = all(a == b for a, b in known) if known else None
        return FlipForward(
            composition_a=None if flip.forward_a is None else log_a.composition(flip.forward_a),
            composition_b=None if flip.forward_b is None else log_b.composition(flip.forward_b),
            paths_a=() if flip.forward_a is None else log_a.paths(flip.forward_a),
            paths_b=() if flip.forward_b is None else log_b.paths(flip.forward_b),
            paths_equal=equal,
            origins=int(self._done.tally.origins[rows[inside]].sum()),
            differing=int(self._done.tally.differing[rows[inside]].sum()),
        )

    def _chunks(self, request: RequestPair, rows: Int64, origin: Origin) -> tuple[Chunk, ...]:
        """The prefill forward of each run that the origin lies in."""
        pairs, found = self._done.pairs, []
        position, differs = pairs.position[rows], self._done.tally.differing[rows] > 0
        for run, trace, number, at, forward in (
            ("a", self._runs.a, request.a, pairs.a, origin.forward_a),
            ("b", self._runs.b, request.b, pairs.b, origin.forward_b),
        ):
            index = chunk_of(trace, number, forward)
            if index is None:
                continue
            inside = trace.row_index().forward[at[rows]] == forward
            here = position[inside]
            earlier = differs[position < here.min()]
            ranges = _ranges(np.sort(position[inside & differs]))
            found.append(Chunk(run, index, int(here.min()), int(here.max()), ranges, not earlier.any()))
        return tuple(found)

    def _counts(self, number: int) -> tuple[OriginCount, ...]:
        total: dict[tuple[str, int | None, str | None, str | None], int] = {}
        for call_a, call_b, place, count in self._counted.get(number, ()):
            site = self._done.ports.sites[place]
            path_a = self._runs.log_a.numbered(call_a).path
            path_b = self._runs.log_b.numbered(call_b).path
            key = (site.site.kind, site.site.layer, path_a, path_b)
            total[key] = total.get(key, 0) + count
        found = [OriginCount(*key, count) for key, count in total.items()]
        found.sort(
            key=lambda c: (-c.count, c.layer is None, c.layer or 0, c.kind, c.path_a or "", c.path_b or "")
        )
        return tuple(found)

    @cached_property
    def _counted(self) -> dict[int, list[tuple[int, int, int, int]]]:
        """Of each request (call a, call b, site, origins)."""
        found: dict[int, list[tuple[int, int, int, int]]] = {}
        for (request, call_a, call_b, place), count in self._done.tally.counts.items():
            found.setdefault(request, []).append((call_a, call_b, place, count))
        return found

    def _rewritten(self, request: RequestPair, rows: Int64) -> Rewritten | None:
        """The entries that one run alone stored anew, before the last of ``rows`` was computed; None without any.

        Where both runs did, entries that were equal before are equal again, whenever that was.
        """
        if not len(rows):
            return None
        last = int(rows[np.argmax(self._done.pairs.position[rows])])
        sides = [
            _quantised(trace, number, int(trace.row_index().forward[at[last]]))
            for trace, number, at in (
                (self._runs.a, request.a, self._done.pairs.a),
                (self._runs.b, request.b, self._done.pairs.b),
            )
        ]
        alone = [side.keys() - other.keys() for side, other in (sides, sides[::-1])]
        if bool(alone[0]) == bool(alone[1]):
            return None
        run = int(not alone[0])
        layer = min(alone[run])
        position, forward = sides[run][layer]
        return Rewritten("ab"[run], position, forward, frozenset(alone[run]))

    def _first_entry(self, request: RequestPair, rows: Int64) -> CacheEntry | None:
        """In execution order: by run A's forward, then site, then row."""
        tally, pairs = self._done.tally, self._done.pairs
        new = self._rewritten(request, rows[pairs.position[rows] <= request.at])
        old = self._first_written(rows)
        if new is None:
            return old
        mine = rows[pairs.position[rows] < new.position]
        places = [
            place
            for n, place in enumerate(tally.cache_sites)
            if self._done.ports.sites[place].site.layer in new.layers and tally.present(n, mine).any()
        ]
        if not places or (old is not None and old.position < new.position):
            return old
        first = int(mine[np.argmin(pairs.position[mine])])
        return self._done.details.cache_entry(first, places[0], rewritten=(new.run, new.forward))

    def _first_written(self, rows: Int64) -> CacheEntry | None:
        tally, pairs = self._done.tally, self._done.pairs
        some = rows[tally.differing[rows] > 0]
        if len(some):
            some = some[tally.entries[some].any(axis=1)]
        if not len(some):
            return None
        forward = self._runs.a.row_index().forward[pairs.a[some]]
        some = some[forward == forward.min()]
        n = int(np.argmax((tally.entries[some] > 0).any(axis=0)))
        row = int(some[np.argmax(tally.entries[some, n] > 0)])
        return self._done.details.cache_entry(row, tally.cache_sites[n])

    def _differing_entries(self, request: RequestPair, rows: Int64) -> DifferingEntries | None:
        """What the last compared row, which is the flip's where there is one, could read; None where no entry is recorded.

        Entries written at or before it, of the layers where what that row read differs; of a recurrent state, the last.
        """
        tally, ports = self._done.tally, self._done.ports
        position = self._done.pairs.position[rows]
        last = int(np.argmax(position))
        unread = self._done.details.layers_read_alike(int(rows[last]))
        count = entries = 0
        layers: set[int] = set()
        differing = tally.entries[rows]
        new = self._rewritten(request, rows)
        for n, place in enumerate(tally.cache_sites):
            site = ports.sites[place].site
            if new is not None and site.layer in new.layers and site.kind == "cache_write":
                before = position < new.position
                differing[:, n] = np.where(before, tally.present(n, rows), differing[:, n])
            if site.kind == "state" and (present := tally.present(n, rows)).any():
                latest = position == position[present > 0].max()
                differing[:, n] *= latest
                entries += int((present * latest).sum())
            else:
                entries += tally.present_in(n, rows)
        if not entries:
            return None
        counts, shown = differing.sum(axis=0, dtype=np.int64), []
        for n in np.flatnonzero(counts).tolist():
            site = ports.sites[tally.cache_sites[n]].site
            if site.kind == "cache_write" and site.layer in unread:
                continue
            shown.append(n)
            count += int(counts[n])
            layers |= {site.layer} if site.layer is not None else set()
        where = differing[:, shown].any(axis=1)
        ranges = _ranges(np.sort(position[where]))
        return DifferingEntries(count, entries, tuple(sorted(layers)), ranges, int(position[last]))

    def _growth(self, number: int, rows: Int64) -> Growth:
        tally, position = self._done.tally, self._done.pairs.position[rows]
        layers = tuple(
            LayerGrowth(layer, int(tally.layer_differing[number, n]), int(tally.layer_compared[number, n]))
            for n, layer in enumerate(tally.layers)
            if tally.layer_compared[number, n]
        )
        width = int(position.max()) // _BUCKETS + 1
        bucket = position // width
        # As floats these sums are exact.
        differing, compared = (
            np.bincount(bucket, counted[rows]).astype(np.int64).tolist()
            for counted in (tally.differing, tally.compared)
        )
        buckets = tuple(
            PositionGrowth(n * width, n * width + width - 1, differing[n], compared[n])
            for n in np.unique(bucket).tolist()
        )
        return Growth(layers, buckets)


def _choice(steps: Steps, index: int, texts: dict[int, str]) -> TokenChoice:
    if index >= len(steps):
        return TokenChoice(None, "", None, None, ())
    token = int(steps.token[index])
    top = tuple(
        TopToken(int(id), texts.get(int(id), ""), float(logit))
        for id, logit in zip(steps.top_ids[index], steps.top_logits[index], strict=True)
    )
    logit = next((candidate.logit for candidate in top if candidate.token == token), None)
    margin = top[0].logit - top[1].logit if len(top) > 1 else None
    return TokenChoice(token, texts.get(token, ""), logit, margin, top)


def _swapped(flip: Flip) -> bool | None:
    if len(flip.a.top) < 2 or len(flip.b.top) < 2:
        return None
    a, b = [c.token for c in flip.a.top[:2]], [c.token for c in flip.b.top[:2]]
    return a == b[::-1]


def _margins(request: RequestPair) -> tuple[Margin, ...]:
    common = min(len(request.steps_a), len(request.steps_b)) if request.flip is None else request.flip
    a, b = request.steps_a.margins()[:common], request.steps_b.margins()[:common]
    smaller = np.minimum(a, b)
    known = np.flatnonzero(~np.isnan(smaller))
    nearest = known[np.argsort(smaller[known], kind="stable")[:_MARGINS]]
    return tuple(Margin(int(n), int(request.steps_a.token[n]), float(a[n]), float(b[n])) for n in nearest)


def _agreement(request: RequestPair) -> Agreement:
    common = min(len(request.steps_a), len(request.steps_b))
    same = request.steps_a.token[:common] == request.steps_b.token[:common]
    again, span = None, 0
    if request.flip is not None and same[request.flip :].any():
        again = request.flip + int(np.argmax(same[request.flip :]))
        span = int(np.argmin(np.append(same[again:], False)))
    return Agreement(common, int(np.count_nonzero(~same)), again, span)


def _ranges(positions: Int64) -> tuple[tuple[int, int], ...]:
    """Ascending positions, some perhaps more than once, as inclusive ranges."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    return tuple((int(run[0]), int(run[-1])) for run in runs if len(run))
