"""The headline of a report: one sentence that says what was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from detdiff.compare.divergence import Divergence, RequestDivergence
from detdiff.explain.verdict import Verdict

from .roles import role_words
from .words import count, named, number, passage, short_path, shown

_KINDS: Final = {
    "numerics": "Rounding",
    "bug": "A bug",
    "configuration": "A difference of configuration",
    "nondeterminism": "Runs that do not repeat",
    "undetermined": "Cause undetermined",
}


def headline(divergence: Divergence | None, verdict: Verdict | None = None) -> str:
    """One sentence; the verdict's kind leads where there is one."""
    if divergence is None:
        return "Inconclusive: nothing of the two runs could be compared."
    lead = "" if verdict is None else _KINDS.get(verdict.kind, "")
    if divergence.identical:
        alike = f"he runs are identical: {_amount(divergence)} compared, none differs."
        return f"{lead}: t{alike}" if lead else f"T{alike}"
    if divergence.inconclusive:
        what = _amount(divergence)
        return f"Inconclusive: {what} compared and none differs, but not everything could be compared."
    first = next((r for r in divergence.requests if r.id == divergence.first), None)
    return f"{lead or 'The runs diverge'}: {_diverged(divergence)}{_first_origin(divergence, first)}{_enough(verdict)}."


def _amount(divergence: Divergence) -> str:
    compared = divergence.compared
    requests, tokens = count(compared.requests, "request"), count(compared.tokens, "token")
    if not compared.rows and compared.tokens:
        return f"{requests} and {tokens}"
    return f"{requests}, {count(compared.rows, 'row')} and {count(compared.digests, 'digest')}"


def _enough(verdict: Verdict | None) -> str:
    """The smallest set of path changes that still gives a flip; the first origin need not be in it."""
    minimal_change = None if verdict is None else verdict.control("minimal_change")
    if minimal_change is None or minimal_change.result != "smallest":
        return ""
    found, of = minimal_change.detail.get("smallest"), minimal_change.detail.get("effective")
    target = str(minimal_change.detail.get("target", ""))
    if (
        not target.startswith("the flip")
        or not isinstance(found, list | tuple)
        or not found
        or not isinstance(found[0], Mapping)
    ):
        return ""
    site, forward = found[0].get("site"), found[0].get("forward")
    enough = "is enough" if len(found) == 1 else "are enough"
    first = "at" if len(found) == 1 else "first at"
    return f"; of {of} path changes {len(found)} {enough} for {named(target)}, {first} {named(str(site))} in forward {forward}"


def _moved(divergence: Divergence) -> str:
    """How far log-probabilities of given tokens, or vectors, are apart."""
    scored = [each.scored.max_abs for each in divergence.requests if each.scored is not None]
    if scored:
        return f" and log-probabilities of given tokens move by at most {number(max(scored))}"
    cosines = [
        each.embedding.cosine
        for each in divergence.requests
        if each.embedding is not None and each.embedding.cosine is not None
    ]
    return (
        f" and the least cosine of two embeddings is {min(cosines):.9g}"
        if cosines
        else " and embeddings are not finite"
    )


def _diverged(divergence: Divergence) -> str:
    flipped = [each for each in divergence.requests if each.flip is not None or each.text is not None]
    if not flipped:
        scores = any(each.scores is not None and each.scores.differing for each in divergence.requests)
        bits = "bits differ" if divergence.compared.differing or scores else "no compared bit differs"
        generates = not any(each.scored or each.embedding for each in divergence.requests)
        return f"{bits} and no token flips" if generates else f"{bits}{_moved(divergence)}"
    first = flipped[0]
    more = ", and 1 more request flips" if len(flipped) == 2 else ""
    if len(flipped) > 2:
        more = f", and {len(flipped) - 1} more requests flip"
    return f"{named(first.id)} {_flips(first)}{more}"


def _flips(request: RequestDivergence) -> str:
    flip, text = request.flip, request.text
    if text is not None or flip is None:
        return f"says another text from character {0 if text is None else text.index} on"
    if flip.kind == "length":
        return f"ends at another length (token {flip.index})"
    return f"flips at token {flip.index} from {shown(flip.a.text)} to {shown(flip.b.text)}"


def _first_origin(divergence: Divergence, first: RequestDivergence | None) -> str:
    if divergence.across_engines is not None:
        return role_words(divergence)
    if divergence.across_models:
        return "; the weights are two, so nothing arises anywhere"
    lacking = next((run.lacks["sites"] for run in (divergence.a, divergence.b) if "sites" in run.lacks), None)
    if lacking is not None and (first is None or first.origin is None):
        return f"; where it arose cannot be said, as sites are not shown: {passage(lacking)}"
    if first is None or first.origin is None:
        return f"; the earliest stage that diverges is {divergence.stage}, and no origin could be named"
    origin = first.origin
    where = f"; origin at {named(origin.site)}, position {origin.position} of {named(first.id)}"
    if origin.path_a == origin.path_b:
        return where
    a, b = short_path(origin.path_a), short_path(origin.path_b)
    rows = [count(n, "row") if n is not None else "unknown rows" for n in (origin.rows_a, origin.rows_b)]
    return f"{where}, where {rows[0]} took {a} and {rows[1]} took {b}"
