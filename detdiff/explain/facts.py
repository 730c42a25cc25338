"""The facts that rules ask about: what the traces say, what comparing found, what the controls gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from detdiff.compare.divergence import Divergence, Finding, Origin, RequestDivergence
from detdiff.engines.registry import changed_imports
from detdiff.scenario import Scenario, Schedule
from detdiff.scenario.sampling import PROCESSORS
from detdiff.trace import Trace, parse_ranges

from .control import Control, Figures
from .outside import AnswerDifferences, differences, engine_name

if TYPE_CHECKING:
    from .controls.oracle import OracleFigures

F = TypeVar("F", bound=Figures)

SERVER: Final = "server"
KNOWN_CACHES: Final = frozenset(
    {
        "KVCache", "QuantizedKVCache", "RotatingKVCache", "BatchKVCache", "BatchRotatingKVCache", "ConcatenateKVCache",
        "ChunkedKVCache", "ArraysCache", "MambaCache", "PagedCache",
    }
)  # fmt: skip
"""Classes of which it is known which entries they give back. What another one does is not presumed."""
CACHE_FINDINGS: Final = (
    "offset", "trim", "cache_missing", "cache_foreign", "cache_changed", "cache_more", "stale",
)  # fmt: skip
"""Contradictions that rest on how a cache counts and keeps its entries."""

CONTRADICTIONS: Final = {
    "rank_token": "a process that chose another token than the others",
    "rank_differs": "a process that holds other bits than another where both should hold the same",
    "token_fed": "a token that is not the row's",
    "sequence": "a row computed in another request's sequence",
    "offset": "an offset that is not the row's position",
    "state": "a recurrent state that was not taken back with its rows",
    "turn": "a turn whose own rows do not begin where those that it keeps end",
    "adapter": "rows that an adapter computed, or did not, although it was said otherwise",
    "template": "a turn without the tokens with which the chat template ends the answer before",
    "trim": "a trim that took off another number of rows than was asked",
    "cache_missing": "an entry of its own that a row did not see",
    "cache_foreign": "a cache entry that a row saw and that is not its own",
    "cache_changed": "a cache entry that is not what was written",
    "converted": "a cache entry that quantising put further from what was written than half a step of its scale",
    "cache_more": "more contradictions of cache entries than are told one by one",
    "stale": "rows that a trim should have taken off and that were read again",
    "prefix": "a prefix taken over from other tokens",
    "page": "a physical page with two owners",
    "token_in": "a row that was fed another token though none before it differs",
    "choice": "a verification that takes another token than its row's logits choose",
    "acceptance": "acceptance counts that are not the engine's own",
    "logits_read": "a token chosen from logits that are not its row's",
}
"""Findings of compare that no rounding can make, by name."""

CACHE_TYPES: Final = ("cache_type_k", "cache_type_v")
"""Settings of llama.cpp that decide what a cache entry is rounded to; f16 where nothing is said."""
QUANTISES: Final = ("kv_bits", "kv_group_size", "kv_start")
"""Settings that decide how the cache is quantised."""


@dataclass(frozen=True)
class RecordedFacts:
    """What both traces say beyond what comparing says.

    ``quantised_a`` and ``quantised_b`` are (position, last forward before it) of each quantisation of a cache, in order.
    ``not_finite`` lists (run, request id, index) of the first token in each run that was chosen from logits with
    a NaN or an infinite top, or with None for the index of the first embedding that is not finite. ``conversion_error`` is the largest of
    a quantised entry in units of its bound, None where it was not measured. ``unknown`` has the class of each layer's cache of which nothing is known, by layer, of either run.
    """

    quantised_a: tuple[tuple[int, int], ...] = ()
    quantised_b: tuple[tuple[int, int], ...] = ()
    conversion_error: float | None = None
    not_finite: tuple[tuple[str, str, int | None], ...] = ()
    unknown: Mapping[int, str] = field(default_factory=dict)
    answers: AnswerDifferences | None = None
    """Of runs that a server answered."""
    changed_imports: tuple[str, ...] = ()
    """Modules that a run was recorded with and that are others today."""

    @classmethod
    def of(cls, a: Trace, b: Trace) -> RecordedFacts:
        """Read both traces' events and tokens."""
        return cls(
            _quantised(a),
            _quantised(b),
            _conversion_error(a, b),
            tuple(found for run, trace in (("a", a), ("b", b)) for found in _not_finite(run, trace)),
            {**_unknown(a), **_unknown(b)},
            differences(a, b) if all(engine_name(t.scenario) == SERVER for t in (a, b)) else None,
            tuple(dict.fromkeys(name for t in (a, b) for name in changed_imports(t.header["environment"]))),
        )


def goes_on(scenario: Mapping[str, Any]) -> bool:
    """Whether a scenario has later turns that go on over a kept cache."""
    asked = scenario.get("request", ())
    return scenario.get("turns", "kept") != "fresh" and any("turn" in each for each in asked)


def _cache_types(scenario: Mapping[str, Any]) -> list[str]:
    engine = scenario.get("engine")
    settings = engine if isinstance(engine, Mapping) else {}
    return [str(settings.get(key, "f16")) for key in CACHE_TYPES]


def rows_seen(origin: Origin, run: str) -> int | None:
    """The rows that the operation saw; where no kernel call was recorded, those of its forward, padding not counted."""
    rows = origin.rows_a if run == "a" else origin.rows_b
    whole = origin.composition_a if run == "a" else origin.composition_b
    return whole.rows if rows is None and whole is not None else rows


def seen(origin: Origin, run: str) -> str:
    """A side's kernel path and rows, such as ``native on 3 rows``."""
    path = origin.path_a if run == "a" else origin.path_b
    rows = rows_seen(origin, run)
    return f"{path or 'native'} on {'unknown rows' if rows is None else f'{rows:,} row' + 's' * (rows != 1)}"


def _quantised(trace: Trace) -> tuple[tuple[int, int], ...]:
    return tuple(
        (int(event["position"]), int(event["forward"]))
        for event in trace.events()
        if event["event"] == "quantise"
    )


def _conversion_error(*traces: Trace) -> float | None:
    """The largest error of a converted cache entry in units of its bound, where both runs' were looked at."""
    events = [event for trace in traces for event in trace.events() if event["event"] == "quantise"]
    errors = [event.get("error") for event in events]
    return (
        max((float(e) for e in errors if e is not None), default=None)
        if all(isinstance(error, int | float) for error in errors)
        else None
    )


def _unknown(trace: Trace) -> dict[int, str]:
    """Layers whose caches are of a class that is not known."""
    found: dict[int, str] = {}
    for line in trace.forwards():
        for note in line.get("caches", ()):
            if note.get("kind", "KVCache") not in KNOWN_CACHES:
                for layers in parse_ranges(note["layers"], 1 << 31):
                    found.update(dict.fromkeys(layers, str(note["kind"])))
    return found


def where_not_finite(run: str, request: str, index: int | None) -> str:
    """One of RecordedFacts.not_finite in a clause."""
    if index is None:
        return f"in run {run}, the embedding of {request} has a NaN or an infinity"
    return f"in run {run}, token {index} of {request} was chosen from logits with a NaN or an infinity"


def _not_finite(run: str, trace: Trace) -> Iterator[tuple[str, str, int | None]]:
    embeddings = trace.embeddings()
    bad = np.flatnonzero(~np.isfinite(embeddings.vector).all(axis=1)).tolist()
    if bad:
        yield run, str(trace.requests[int(embeddings.request[bad[0]])]["id"]), None
    generated = trace.generated(lens=False)
    if not generated.top_logits.size:
        return
    # A forbidden token's logit may be minus infinity.
    wrong = np.flatnonzero((np.isnan(generated.top_logits) | (generated.top_logits == np.inf)).any(axis=1))
    if len(wrong):
        first = int(wrong[0])
        yield run, str(trace.requests[int(generated.request[first])]["id"]), int(generated.index[first])


@dataclass(frozen=True)
class Fix:
    """How kernels are pinned for good, in code, and what is known of its price before it was measured, as clauses."""

    call: str
    price: str


@dataclass(frozen=True)
class Facts:
    """What is known when a rule is asked. ``divergence`` is None where nothing could be compared, and ``why`` says why."""

    divergence: Divergence | None
    recorded: RecordedFacts = field(default_factory=RecordedFacts)
    controls: Mapping[str, Control] = field(default_factory=dict)
    why: str = ""
    stateless: bool = True
    """Whether the engines say that their runs share nothing."""
    fix: Fix | None = None
    """Where both sides' one engine can pin its kernels."""

    def figures(self, kind: type[F]) -> F | None:
        """What the control whose results are of this kind found out."""
        return next((c.detail for c in self.controls.values() if isinstance(c.detail, kind)), None)

    @property
    def oracle(self) -> OracleFigures | None:
        """What the oracle found."""
        from .controls.oracle import OracleFigures

        return self.figures(OracleFigures)

    def result(self, control: str) -> str:
        """A control's result; ``not_run`` for one that was not asked for."""
        found = self.controls.get(control)
        return "not_run" if found is None else found.result

    @property
    def diverged(self) -> tuple[RequestDivergence, ...]:
        """The requests that part."""
        return () if self.divergence is None else tuple(r for r in self.divergence.requests if r.stage)

    @property
    def outside(self) -> bool:
        """Whether both runs are answers of a server, of which nothing else is seen."""
        runs = () if self.divergence is None else (self.divergence.a, self.divergence.b)
        return bool(runs) and all(engine_name(run.scenario) == SERVER for run in runs)

    @property
    def first(self) -> RequestDivergence | None:
        """The request with the first origin in execution order."""
        if self.divergence is None:
            return None
        return next((r for r in self.divergence.requests if r.id == self.divergence.first), None)

    @property
    def origin(self) -> Origin | None:
        """The first origin in execution order."""
        return None if self.first is None else self.first.origin

    @property
    def contradictions(self) -> tuple[Finding, ...]:
        """What the bookkeeping of a run says against its rows, but for what a quantisation of the cache explains."""
        if self.divergence is None:
            return ()
        findings = (*self.divergence.bookkeeping, *self.divergence.workload)
        return tuple(
            f
            for f in findings
            if f.what in CONTRADICTIONS
            and not self._quantises(f)
            and not (self.unknown and f.what in CACHE_FINDINGS)
        )

    @property
    def unknown(self) -> tuple[str, ...]:
        """What is not recorded of caches, as clauses; nothing is presumed of what they give back."""
        if self.divergence is None:
            return ()
        layers: dict[str, list[int]] = {}
        for layer, kind in sorted(self.recorded.unknown.items()):
            layers.setdefault(kind, []).append(layer)
        found = [
            f"the cache of layer{'s' * (len(of) > 1)} {', '.join(map(str, of))} is not known: class {kind}"
            for kind, of in layers.items()
        ]
        reasons = [
            run.lacks["cache"] for run in (self.divergence.a, self.divergence.b) if "cache" in run.lacks
        ]
        return tuple(dict.fromkeys(reasons or found))

    @property
    def goes_on(self) -> bool:
        """Whether a later turn of a run goes on over what was kept of the turn before."""
        runs = () if self.divergence is None else (self.divergence.a, self.divergence.b)
        return any(goes_on(run.scenario) for run in runs)

    @property
    def observed(self) -> tuple[str, ...]:
        """The runs whose logits were changed by recording them."""
        if self.divergence is None:
            return ()
        runs = (("a", self.divergence.a), ("b", self.divergence.b))
        return tuple(run for run, found in runs if found.observer.get("equal") is False)

    def _quantises(self, finding: Finding) -> bool:
        """Whether the cache was quantised right before the forward that saw it changed."""
        if not finding.what.startswith("cache_changed"):
            return False
        sides = {"a": self.recorded.quantised_a, "b": self.recorded.quantised_b}
        asked = sides.get(finding.run, (*self.recorded.quantised_a, *self.recorded.quantised_b))
        if finding.forward is None:
            return bool(asked)
        return any(finding.forward in (forward, forward + 1) for _, forward in asked)

    @property
    def quantised_apart(self) -> bool:
        """Whether the runs quantised a cache at different positions."""
        positions = [
            [position for position, _ in side]
            for side in (self.recorded.quantised_a, self.recorded.quantised_b)
        ]
        return positions[0] != positions[1]

    @property
    def before_quantisation(self) -> bool:
        """Whether an origin precedes every quantisation of the run that it is of."""
        forwards = [
            min((forward for _, forward in side), default=None)
            for side in (self.recorded.quantised_a, self.recorded.quantised_b)
        ]
        origins = [request.origin for request in self.diverged if request.origin is not None]
        return any(
            all(
                forward is None or at <= forward
                for at, forward in zip((origin.forward_a, origin.forward_b), forwards, strict=True)
            )
            for origin in origins
        )

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings that change what is computed, whatever the rows of a forward, and that differ between the sides."""
        if self.divergence is None:
            return ()
        a, b = self.divergence.a.scenario, self.divergence.b.scenario
        poolings = [side.get("pooling", Scenario.pooling) for side in (a, b)]
        if poolings[0] != poolings[1] and not any(request.differing for request in self.divergence.requests):
            # Where a site differs as well, the pooling is not why.
            return (f"pooling {poolings[0]} and {poolings[1]}",)
        asked = [*zip(QUANTISES, *([side.get(key) for key in QUANTISES] for side in (a, b)), strict=True)]
        if self.divergence.a.engine == self.divergence.b.engine == "llama.cpp":
            asked += zip(CACHE_TYPES, _cache_types(a), _cache_types(b), strict=True)
        return tuple(f"{key} {mine} and {theirs}" for key, mine, theirs in asked if mine != theirs)

    @property
    def sizes(self) -> tuple[int | None, ...]:
        """How many positions the caches of a and of b keep (None: all), where that differs, or is some of them and the prompts are cut
        otherwise, and no origin before the first that goes is anything else than rounding; empty elsewhere."""
        if self.divergence is None:
            return ()
        runs = (self.divergence.a, self.divergence.b)
        found = tuple(run.scenario.get("max_kv_size") for run in runs)
        same = found[0] == found[1] and (found[0] is None or not self.cuts)
        # A ring that turned, or that padding filled up, rounds otherwise long before a position goes.
        oracle = self.oracle
        rounds = oracle is not None and not (oracle.outside_a or oracle.outside_b or oracle.skipped)
        early = any(not rounds or origin.kind == "cache_read" for origin in self.before_one_goes)
        return () if same or early or not self.diverged else found

    @property
    def before_one_goes(self) -> tuple[Origin, ...]:
        """The origins of requests before the first position that a cache of fewer positions no longer keeps."""
        if self.divergence is None:
            return ()
        sizes = (run.scenario.get("max_kv_size") for run in (self.divergence.a, self.divergence.b))
        least = min((size for size in sizes if size is not None), default=0)
        return tuple(r.origin for r in self.diverged if r.origin is not None and r.origin.position < least)

    @property
    def cuts(self) -> tuple[str, ...]:
        """Settings that cut prompts into other forwards, and nothing else, which differ between the sides of one schedule."""
        if self.divergence is None:
            return ()
        a, b = self.divergence.a.scenario, self.divergence.b.scenario
        if any(a.get(key) != b.get(key) for key in ("schedule", "layout", "active")):
            return ()
        plain = {"turns": "kept", "prefill_chunk": Schedule.prefill_chunk, "reuse_tokens": 0}
        asked = ((key, a.get(key, unsaid), b.get(key, unsaid)) for key, unsaid in plain.items())
        return tuple(f"{key} {mine} and {theirs}" for key, mine, theirs in asked if mine != theirs)

    @property
    def asked_otherwise(self) -> tuple[Finding, ...]:
        """Requests whose sampling or limits differ between the sides."""
        if self.divergence is None:
            return ()
        return tuple(finding for finding in self.divergence.workload if finding.what == "settings")

    @property
    def asked_alone(self) -> bool:
        """Whether nothing that was compared differs, and what was not compared in whole are requests with other sampling or limits, and
        turns of theirs."""
        found = self.divergence
        if (
            found is None
            or not found.inconclusive
            or self.outside
            or not (found.a.complete and found.b.complete)
        ):
            return False
        theirs = {str(finding.request) for finding in self.asked_otherwise}
        for request in found.a.scenario.get("request", ()):
            ids = {str(turn.get("id")) for turn in (request, *request.get("turn", ()))}
            theirs |= ids if ids & theirs else set()
        left = {each.id for each in found.not_compared} | {r.id for r in found.requests if not r.identical}
        return bool(theirs) and left <= theirs

    @property
    def chosen_otherwise(self) -> tuple[RequestDivergence, ...]:
        """Requests whose every compared digest is equal up to a token that differs, where nothing else parts."""
        if any(request.differing for request in self.diverged) or self.divergence is None:
            return ()
        if any({"logits", "sites"} & run.lacks.keys() for run in (self.divergence.a, self.divergence.b)):
            # Nothing that led to the token was compared, so that its choice is not what is left.
            return ()
        return tuple(
            request for request in self.diverged if request.stage == "tokens" or request.flip is not None
        )

    @property
    def processed_otherwise(self) -> tuple[Finding, ...]:
        """Requests of equal logits whose sampler was given others, by their logits processors."""
        found = () if self.divergence is None else self.divergence.bookkeeping
        return tuple(finding for finding in found if finding.what == "processed")

    def samples(self, id: str) -> bool:
        """Whether a request draws its tokens, or has logits processors, in either run."""
        runs = () if self.divergence is None else (self.divergence.a, self.divergence.b)
        requests = [each for run in runs for each in run.scenario.get("request", ()) if each.get("id") == id]
        return any(each.get("temperature") or any(map(each.get, PROCESSORS)) for each in requests)

    @property
    def ended_otherwise(self) -> RequestDivergence | None:
        """The first request that ends in one run and goes on in the other, where nothing else parts and neither was forced."""
        runs = () if self.divergence is None else (self.divergence.a, self.divergence.b)
        if any(run.scenario.get("force_tokens") is not None for run in runs) or self.asked_otherwise:
            return None
        ends = (r for r in self.chosen_otherwise if r.flip is not None and r.flip.kind == "length")
        return next(ends, None)

    @property
    def logits_equal(self) -> bool:
        """Whether equal digests are those of logits too, by one engine with the same settings: an engine that shows answers
        alone, or two engines, may have chosen from other logits."""
        if self.divergence is None:
            return False
        a, b = self.divergence.a, self.divergence.b
        shown = "logits" not in a.lacks and "logits" not in b.lacks
        return shown and a.scenario.get("engine") == b.scenario.get("engine")

    @property
    def path_change(self) -> bool:
        """Whether the first origin's operation took another path, by another rule or on another number of rows."""
        origin = self.origin
        if origin is None:
            return False
        return (origin.path_a, origin.rule_a, rows_seen(origin, "a")) != (
            origin.path_b,
            origin.rule_b,
            rows_seen(origin, "b"),
        )

    @property
    def moved_alone(self) -> bool:
        """Whether the row's place or the order of its keys was seen to move the first origin's bits on the very same inputs."""
        return self.result("place") in ("order", "place")

    @property
    def shows(self) -> bool:
        """Whether a token, a cache entry, a logit or an embedding differs: what re-runs under other paths are compared by."""
        return any(
            request.flip is not None
            or (request.embedding is not None and request.embedding.differing > 0)
            or request.cache_entry is not None
            or any(margin.margin_a != margin.margin_b for margin in request.margins)
            or any(count.kind in ("head", "logits") for count in request.origins)
            for request in self.diverged
        )

    @property
    def held(self) -> bool:
        """A change of path, place or order whose cause was tried: held, it makes no difference; repeated, neither side changes."""
        held = (
            (self.path_change or self.moved_alone)
            and self.result("pin_kernels") == "removed"
            and self.result("repeat") == "equal"
        )
        # What never reached a cache or a logit is not seen to go.
        return held and self.shows

    def rests_without(self, what: str) -> str:
        """Why a control that only says more need not be run; empty where nothing is decided yet."""
        if not self.held_inside:
            return ""
        return f"the rounding is inside its bound and held it is gone, so that {what} would say nothing more"

    @property
    def held_inside(self) -> bool:
        """The same, and every judged origin is inside of its rounding bound on both sides."""
        return self.held and self.result("oracle") == "inside"

    @property
    def read_otherwise(self) -> tuple[tuple[str, Origin], ...]:
        """First origins, by request, at which a cache was read otherwise than it was written."""
        return tuple(
            (request.id, request.origin)
            for request in self.diverged
            if request.origin is not None
            and request.origin.how in ("changed", "visible")
            and request.origin.layer not in self.recorded.unknown
        )
