"""What each level of a check lets through of a divergence, and what no level does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from detdiff.compare import Divergence, RequestDivergence
from detdiff.explain import Control
from detdiff.report.words import count, escaped, shown

from .settings import BOUNDED, TOKENS

STRUCTURAL: Final = ("workload", "bookkeeping", "dtype", "shape", "tokens")
"""Stages that no rounding can diverge on."""


@dataclass(frozen=True)
class Ruling:
    """``why`` a divergence is not let through, in sentences; empty where it is. ``oracle`` is what was judged for it."""

    why: tuple[str, ...]
    oracle: Control | None = None

    @property
    def passes(self) -> bool:
        return not self.why


def rule(level: str, divergence: Divergence, oracle: Callable[[], Control]) -> Ruling:
    """Whether ``level`` (not ``golden``) lets a divergence through. ``oracle`` judges all origins, at ``bounded`` only.

    What was not compared in whole is let through at no level.
    """
    left_out = tuple(_left_out(divergence))
    if left_out or divergence.identical:
        return Ruling(left_out)
    if level == TOKENS:
        return Ruling(tuple(_flips(divergence)))
    if level == BOUNDED:
        return _bounded(divergence, oracle)
    return Ruling(("bits of the same rows differ",))


def _left_out(divergence: Divergence) -> Iterator[str]:
    """What keeps a comparison from being one of everything that was asked."""
    for each in divergence.not_compared:
        yield f"{escaped(each.id)} was not compared: {escaped(each.reason)}"
    for finding in divergence.workload:
        yield f"the two runs were asked for other things: {escaped(finding.detail)}"
    for run, found in (("a", divergence.a), ("b", divergence.b)):
        if not found.complete:
            yield f"run {run} is incomplete"
        if found.observer.get("equal") is False:
            yield f"recording changed the logits of run {run}, or the run does not repeat"
    for request in divergence.requests:
        if request.stage is None and not request.identical:
            yield f"{escaped(request.id)} was not compared in whole"
    compared = divergence.compared
    if not (compared.requests and compared.rows and compared.digests):
        yield "nothing was compared"


def _flips(divergence: Divergence) -> Iterator[str]:
    for request in divergence.requests:
        if request.flip is not None or request.generated_a != request.generated_b:
            yield f"{escaped(request.id)} generates other tokens"


def _bounded(divergence: Divergence, oracle: Callable[[], Control]) -> Ruling:
    structural = [
        f"the runs diverge in {stage}, which no rounding does"
        for stage in STRUCTURAL
        if divergence.stage == stage or any(request.stage == stage for request in divergence.requests)
    ]
    if structural:
        return Ruling(tuple(structural))
    found = oracle()
    return Ruling((*_outside(found), *_far_flips(divergence)), found)


def _outside(found: Control) -> Iterator[str]:
    """What the oracle found beyond rounding, or could not judge."""
    if found.result == "not_run":
        yield f"whether rounding explains the difference could not be judged: {escaped(found.sentence)}"
        return
    if found.detail.get("changed"):
        yield (
            f"{count(int(found.detail['changed']), 'cache read')} gave other entries than were written there, and copying "
            "rounds nothing"
        )
    where = found.detail.get("outside_where", ())
    for each in where[:1]:
        more = int(found.detail.get("outside_a", 0)) + int(found.detail.get("outside_b", 0)) - 1
        yield escaped(str(each["said"])) + (f"; and {count(more, 'more output')} outside" if more else "")
    skipped = dict(found.detail.get("skipped", {}))
    for why, times in skipped.items():
        yield f"{count(int(times), 'origin')} could not be judged: {escaped(str(why))}"


def _far_flips(divergence: Divergence) -> Iterator[str]:
    """Flips that are none between the two tokens that were nearest to each other in both runs."""
    for request in divergence.requests:
        if request.flip is not None and not _near_tie(request):
            a, b = request.flip.a, request.flip.b
            yield (
                f"{escaped(request.id)} flips from {shown(a.text)} to {shown(b.text)}, which were not the two highest logits of "
                "both runs"
            )


def _near_tie(request: RequestDivergence) -> bool:
    return request.flip is not None and request.flip.kind == "token" and request.swapped is True
