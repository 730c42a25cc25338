"""Where a difference came from, in three steps for the top of a page: born, carried, flipped."""

from __future__ import annotations

from dataclasses import dataclass

from detdiff.compare.divergence import Divergence, RequestDivergence

from .content import Report
from .words import count, named, number, runs_of, short_path, shown, spans


@dataclass(frozen=True)
class Fact:
    """``section`` is where more of it stands."""

    section: str
    title: str
    what: str
    details: tuple[str, ...]


def facts(report: Report) -> tuple[Fact, ...]:
    """The earliest origin, and the first request that flips; what was compared where nothing parts."""
    divergence = report.divergence
    if divergence is None:
        return ()
    parted = [each for each in divergence.requests if each.rung is not None]
    made: list[Fact | None] = [_compared(divergence)]
    if parted:
        first = next((each for each in parted if each.id == divergence.first), parted[0])
        flipped = [each for each in (first, *parted) if each.flip is not None]
        end = flipped[0] if flipped else first
        made = [_born(first), _carried(end), _flipped(end)]
    return tuple(fact for fact in made if fact is not None and report.section(fact.section) is not None)


def _compared(divergence: Divergence) -> Fact:
    found = divergence.compared
    details = (count(found.requests, "request"), count(found.rows, "row"), f"{found.differing:,} differ")
    return Fact("compared", "Compared", count(found.digests, "digest"), details)


def _born(request: RequestDivergence) -> Fact:
    origin = request.origin
    if origin is None:
        return Fact("birth", "Born", "no origin could be named", (f"parts in {request.rung}",))
    details = [f"position {origin.position} of {named(request.id)}"]
    if origin.path_a != origin.path_b:
        rows = ["?" if n is None else count(n, "row") for n in (origin.rows_a, origin.rows_b)]
        details.append(f"a: {rows[0]}, {short_path(origin.path_a)}")
        details.append(f"b: {rows[1]}, {short_path(origin.path_b)}")
    else:
        details.append(f"{short_path(origin.path_a)} in both")
    return Fact("birth", "Born", named(origin.site), tuple(details))


def _carried(request: RequestDivergence) -> Fact | None:
    found = request.carriers
    if found is None:
        return None
    if not found.count:
        return Fact("carriers", "Carried", "by no cache entry", (f"{found.entries:,} compared, all equal",))
    details = (
        f"of {found.entries:,} alive at position {found.alive_at} of {named(request.id)}",
        f"positions {spans(found.positions)}",
        f"layers {spans(runs_of(found.layers))}",
    )
    return Fact("carriers", "Carried", count(found.count, "cache entry", "cache entries"), details)


def _flipped(request: RequestDivergence) -> Fact:
    flip = request.flip
    if flip is None:
        generated = min(request.generated_a, request.generated_b)
        return Fact("flip", "No flip", f"{count(generated, 'generated token')} alike", ())
    if flip.kind == "length":
        return Fact("flip", "Flipped", "ends at another length", (f"token {flip.index}",))
    details = (
        f"generated token {flip.index} of {named(request.id)}",
        f"margin {number(flip.a.margin)} in a, {number(flip.b.margin)} in b",
    )
    return Fact("flip", "Flipped", f"{shown(flip.a.text)} → {shown(flip.b.text)}", details)
