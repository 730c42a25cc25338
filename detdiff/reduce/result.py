"""What a candidate gave, in which way its two runs diverge, and what reducing gave in the end. Needs no model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from detdiff.compare import Divergence, RequestDivergence
from detdiff.explain import Verdict
from detdiff.explain.facts import Facts
from detdiff.scenario import Scenario
from detdiff.trace import Trace

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class DivergenceKind:
    """The stage, the site of the first origin with the kernel path of each side (None: no origin was found), the first
    finding of the bookkeeping that no rounding can make, whether a token flipped, and whether anything that is compared of
    re-runs differs (a cache entry, a logit, a token)."""

    stage: str
    site: str | None
    kind: str | None
    path_a: str | None
    path_b: str | None
    contradiction: str | None
    flip: bool
    shows: bool

    @classmethod
    def of(cls, divergence: Divergence) -> DivergenceKind | None:
        """None where nothing diverged."""
        if divergence.stage is None:
            return None
        found = first_request(divergence)
        origin = None if found is None else found.origin
        facts = Facts(divergence)
        contradictions = facts.contradictions
        return cls(
            divergence.stage,
            None if origin is None else origin.site,
            None if origin is None else origin.kind,
            None if origin is None else origin.path_a,
            None if origin is None else origin.path_b,
            contradictions[0].what if contradictions else None,
            any(request.flip is not None for request in divergence.requests),
            facts.shows,
        )

    def alike(self, other: DivergenceKind, *, flip: bool, layers: bool) -> bool:
        """Whether ``other`` diverges in the same way: with a flip if ``flip`` asks for one; with ``layers`` in whatever layer."""
        sites = (self.site, other.site)
        if layers:
            sites = tuple(None if site is None else _LAYER.sub("*", site) for site in sites)  # type: ignore[assignment]
        same = (self.stage, self.path_a, self.path_b, self.contradiction)
        if same != (other.stage, other.path_a, other.path_b, other.contradiction) or sites[0] != sites[1]:
            return False
        if self.shows and not other.shows:
            return False
        # Where no value differs, a flip is all that there is.
        return other.flip or not (flip or (self.site is None and self.flip))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DivergenceKind:
        return cls(**{field.name: values[field.name] for field in fields(cls)})


def first_request(divergence: Divergence) -> RequestDivergence | None:
    """The request with the earliest origin, or else the first that diverges; None where none does."""
    diverged = [request for request in divergence.requests if request.stage is not None]
    first = next((request for request in diverged if request.id == divergence.first), None)
    return first or next(iter(diverged), None)


@dataclass(frozen=True)
class TrialOutcome:
    """``kind`` is None where the two runs do not diverge, or could not be run or compared: ``why`` says so then.

    ``needed`` are limits for generated tokens by request id, smallest first: as many as it takes to reach the first
    origin, the bookkeeping's finding and the flip, and at last somewhat more. ``first_request`` is the request that diverges first.
    """

    rows: int
    kind: DivergenceKind | None
    needed: tuple[Mapping[str, int], ...] = ()
    first_request: str | None = None
    why: str = ""

    @classmethod
    def of(cls, a: Trace, b: Trace, divergence: Divergence) -> TrialOutcome:
        rows = len(a.row_index().request) + len(b.row_index().request)
        kind = DivergenceKind.of(divergence)
        if kind is None:
            return cls(rows, None, why="the two runs do not diverge")
        first = first_request(divergence)
        return cls(rows, kind, _needed(a, b, divergence), None if first is None else first.id)

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "kind": None if self.kind is None else self.kind.to_json(),
            "needed": [dict(each) for each in self.needed],
            "first_request": self.first_request,
            "why": self.why,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrialOutcome:
        """Raises KeyError and TypeError for what ``to_json`` did not write."""
        kind = values["kind"]
        return cls(
            int(values["rows"]),
            None if kind is None else DivergenceKind.from_json(kind),
            tuple(dict(each) for each in values["needed"]),
            values["first_request"],
            values["why"],
        )


@dataclass(frozen=True)
class _LastForwards:
    """How far a run has to be followed on each side: the number of the last forward that matters."""

    a: int | None = None
    b: int | None = None


def _needed(a: Trace, b: Trace, divergence: Divergence) -> tuple[dict[str, int], ...]:
    ends: list[_LastForwards] = []
    first = first_request(divergence)
    if first is not None and first.origin is not None:
        ends.append(_LastForwards(first.origin.forward_a, first.origin.forward_b))
    if first is not None and first.flip is not None:
        ends.append(_LastForwards(first.flip.forward_a, first.flip.forward_b))
    for finding in divergence.bookkeeping[:1]:
        at = finding.forward
        ends.append(_LastForwards(at if finding.run != "b" else None, at if finding.run != "a" else None))
    limits = [_limits(a, b, end) for end in ends]
    together = {id: max(each[id] for each in limits) for id in limits[0]} if limits else {}
    # A difference that arises in a last row may reach nothing that lasts; and drafts are fewer near a request's end.
    further = {id: limit + max(1, _drafts(a, b)) for id, limit in together.items()}
    found: list[dict[str, int]] = []
    for each in sorted([*limits, together, further], key=lambda each: sum(each.values())):
        if each and each not in found:
            found.append(each)
    return tuple(found)


def _limits(a: Trace, b: Trace, end: _LastForwards) -> dict[str, int]:
    """By request id, how many tokens it has to be let generate for all its rows up to a forward of each run."""
    found: dict[str, int] = {}
    for trace, forward in ((a, end.a), (b, end.b)):
        index = trace.row_index()
        inside = index.forward <= (forward if forward is not None else -1)
        for number, request in enumerate(trace.requests):
            last = int(index.position[inside & (index.request == number)].max(initial=-1))
            # A row chooses the token after its own, and the last token is never fed.
            limit = max(1, last + 2 - len(request["tokens"]))
            found[request["id"]] = max(found.get(request["id"], 1), limit)
    return found


def _drafts(a: Trace, b: Trace) -> int:
    return max(int(trace.scenario.get("drafts", 0)) for trace in (a, b))


@dataclass(frozen=True)
class ReduceOptions:
    """How to reduce. ``keep_flip``: a token has to flip still, where bits that differ would be enough. ``twin``: whether
    random weights may stand for the model's own; None: where those are no part of detdiff."""

    keep_flip: bool = False
    twin: bool | None = None


@dataclass(frozen=True)
class Step:
    """A pair that diverges in the same way and is smaller than the one before; step 0 is the original.

    ``sentence`` is what was done. ``rows`` counts the rows of both runs, ``prompt_tokens`` and ``max_tokens`` are sums over
    the ``requests`` of side a. ``layers`` is the number of layers of a random-weight twin, None without one. ``key`` tells
    this pair from every other.
    """

    number: int
    sentence: str
    rows: int
    requests: int
    prompt_tokens: int
    max_tokens: int
    layers: int | None
    key: str

    def to_json(self) -> dict[str, Any]:
        """Its JSON object; the key of ``sentence`` is ``said``."""
        found = asdict(self)
        return {"number": found.pop("number"), "said": found.pop("sentence"), **found}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Step:
        """Raises KeyError and TypeError for other keys."""
        found = dict(values)
        return cls(found.pop("number"), found.pop("said"), **found)


@dataclass(frozen=True)
class Reduction:
    """``scenario_a`` and ``scenario_b`` are the smallest pair found, as they lie in ``folder``, and ``verdict`` is on them.

    ``rows_before`` and ``rows_after`` count the rows of both runs; ``tried`` counts the pairs that were run, the original
    among them. ``dropped`` are the settings that turned out not to be needed. ``finished`` is False where a budget ended
    the search.
    """

    scenario_a: Scenario
    scenario_b: Scenario
    verdict: Verdict
    rows_before: int
    rows_after: int
    steps: tuple[Step, ...]
    tried: int
    dropped: tuple[str, ...]
    twin: bool
    finished: bool
    folder: Path

    def __bool__(self) -> NoReturn:
        raise TypeError("a Reduction has no truth value; ask .rows_after")
