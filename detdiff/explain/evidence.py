"""The evidence of a verdict: facts of two runs as sentences with their figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from detdiff.compare.divergence import Origin
from detdiff.compare.flips import Verification

from .facts import Facts, seen, where_not_finite
from .verdict import Evidence


def evidence_of(facts: Facts) -> Iterator[Evidence]:
    """All facts worth reporting, whatever decides."""
    divergence = facts.divergence
    if divergence is None:
        yield Evidence("not_compared", facts.why)
        return
    c = divergence.compared
    figures = {"requests": c.requests, "rows": c.rows, "digests": c.digests, "differing": c.differing}
    yield Evidence(
        "compared",
        f"{c.requests:,} requests, {c.rows:,} rows and {c.digests:,} digests were compared; {c.differing:,} differ",
        figures,
    )
    for run in facts.observed:
        yield Evidence(
            "observed",
            f"recording changed the logits of run {run}: its first forwards, run again without recording, gave others",
            {"run": run},
        )
    for name in facts.recorded.changed_imports:
        yield Evidence(
            "imports",
            f"the module {name} (--import) is another than was recorded with; re-runs ran with today's",
        )
    for what in facts.unknown:
        yield Evidence("unknown_cache", what)
    for finding in facts.contradictions:
        where = {
            "run": finding.run,
            "request": finding.request,
            "forward": finding.forward,
            "what": finding.what,
        }
        yield Evidence("contradiction", finding.detail, where)
    for finding in divergence.bookkeeping:
        if finding.what in ("processed", "drawn"):
            yield Evidence("chosen", f"{finding.request}: {finding.detail}", {"request": finding.request})
    for finding in facts.asked_otherwise:
        yield Evidence("settings", finding.detail, {"request": finding.request})
    if facts.settings:
        yield Evidence("settings", f"the sides were asked for other caches: {'; '.join(facts.settings)}")
    if facts.recorded.quantised_a or facts.recorded.quantised_b:
        error = facts.recorded.conversion_error
        within = (
            ""
            if error is None or error > 1
            else f"; what was converted is off what was written by at most {error:.3g} of its bound, half a step of its scale"
        )
        places = {
            "a": [position for position, _ in facts.recorded.quantised_a],
            "b": [position for position, _ in facts.recorded.quantised_b],
        }
        yield Evidence(
            "quantised",
            f"the cache was quantised at position {_list(places['a'])} in a and {_list(places['b'])} in b{within}",
            {**places, "error": error},
        )
    for run, request, index in facts.recorded.not_finite:
        yield Evidence(
            "not_finite",
            where_not_finite(run, request, index),
            {"run": run, "request": request, "index": index},
        )
    if facts.origin is not None and facts.first is not None:
        yield _origin(facts.first.id, facts.origin)
    for each in divergence.requests:
        if each.verification is not None:
            yield from _speculation(each.id, each.verification)


def _speculation(id: str, found: Verification) -> Iterator[Evidence]:
    if found.flip_a is not None or found.flip_b is not None:
        yield _proposals(
            id, *(None if each is None else each.proposal for each in (found.flip_a, found.flip_b))
        )
    sides = {run: side for run, side in (("a", found.a), ("b", found.b)) if side is not None}
    sentence = " and ".join(
        f"{side.accepted} of {side.proposed} drafts accepted in {run}" for run, side in sides.items()
    )
    agrees = [side.agrees for side in sides.values()]
    own = "THE ENGINE COUNTED OTHERWISE" if False in agrees else "the engine counted the same"
    own = "the engine did not count" if None in agrees else own
    counts = {run: {"proposed": side.proposed, "accepted": side.accepted} for run, side in sides.items()}
    yield Evidence(
        "acceptance", f"{id}: {sentence}; {own}", {"request": id, **counts, "engine_equal": all(agrees)}
    )


def _proposals(request: str, a: int | None, b: int | None) -> Evidence:
    if a is None and b is None:
        sentence = "no run had a draft for the flip's token"
    elif a is None or b is None:
        run = "b" if a is None else "a"
        sentence = f"run {run} had a draft for the flip's token ({b if a is None else a}), the other none"
    elif a == b:
        sentence = f"both runs had the same draft for the flip's token ({a}): the target decided differently, not the draft"
    else:
        sentence = f"the drafts for the flip's token differ: {a} in a, {b} in b"
    return Evidence("proposals", sentence, {"request": request, "a": a, "b": b, "equal": a == b})


def _origin(request: str, origin: Origin) -> Evidence:
    sentence = (
        f"the first origin is {origin.site} ({origin.kind}), position {origin.position} of {request}, where "
        f"inputs are bit-equal: {seen(origin, 'a')} in a, {seen(origin, 'b')} in b"
    )
    detail = {
        name: getattr(origin, name)
        for name in (
            "site", "kind", "layer", "position", "how", "forward_a", "forward_b", "rows_a", "rows_b", "path_a", "path_b",
            "rule_a", "rule_b",
        )
    }  # fmt: skip
    return Evidence("origin", sentence, {"request": request, **detail})


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "") if numbers else "none"
