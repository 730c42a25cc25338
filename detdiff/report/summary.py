"""A report's first sentence: what parted, where it was born, what kind it is; and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from detdiff.compare.divergence import Divergence, Flip, RequestDivergence
from detdiff.explain.verdict import Verdict

from .text import headline
from .words import count, named, passage, short_path, shown

_KINDS: Final = {
    "numerics": "Rounding",
    "bug": "A bug",
    "policy": "A difference of policy",
    "race": "Runs that do not repeat",
    "undetermined": "Cause undetermined",
}


def sentence(divergence: Divergence | None, verdict: Verdict | None) -> str:
    """One sentence; the verdict's kind leads where there is one."""
    if divergence is None:
        return "Inconclusive: nothing of the two runs could be compared."
    if divergence.identical or divergence.inconclusive:
        return headline(divergence)
    first = next((r for r in divergence.requests if r.id == divergence.first), None)
    kind = "The runs part" if verdict is None else _KINDS.get(verdict.kind, verdict.kind)
    return f"{kind}: {_parted(divergence)}{_born(divergence, first)}{_enough(verdict)}."


def _enough(verdict: Verdict | None) -> str:
    """The smallest set of path changes that still gives a flip; the first origin need not be in it."""
    relax = None if verdict is None else verdict.control("relax")
    if relax is None or relax.result != "smallest":
        return ""
    found, of = relax.detail.get("smallest"), relax.detail.get("effective")
    target = str(relax.detail.get("target", ""))
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


def _parted(divergence: Divergence) -> str:
    flipped = [request for request in divergence.requests if request.flip is not None]
    if not flipped:
        bits = "bits differ" if divergence.compared.differing else "no compared bit differs"
        return f"{bits} and no token flips"
    first = flipped[0]
    assert first.flip is not None
    more = f", and {count(len(flipped) - 1, 'more request')} flip" if len(flipped) == 2 else ""
    if len(flipped) > 2:
        more = f", and {len(flipped) - 1} more requests flip"
    return f"{named(first.id)} {_flips(first.flip)}{more}"


def _flips(flip: Flip) -> str:
    if flip.kind == "length":
        return f"ends at another length (token {flip.index})"
    return f"flips at token {flip.index} from {shown(flip.a.text)} to {shown(flip.b.text)}"


def _born(divergence: Divergence, first: RequestDivergence | None) -> str:
    if first is None or first.origin is None:
        return f"; the earliest rung that parts is {divergence.rung}, and no origin could be named"
    origin = first.origin
    where = f"; born at {named(origin.site)}, position {origin.position} of {named(first.id)}"
    if origin.path_a == origin.path_b:
        return where
    a, b = short_path(origin.path_a), short_path(origin.path_b)
    rows = [count(n, "row") if n is not None else "unknown rows" for n in (origin.rows_a, origin.rows_b)]
    return f"{where}, where {rows[0]} took {a} and {rows[1]} took {b}"


def advice(divergence: Divergence | None, verdict: Verdict | None) -> str:
    """What to do about it; empty where there is nothing to do."""
    if verdict is not None and verdict.advice:
        return passage(verdict.advice)
    if verdict is not None and verdict.missing:
        return passage(f"Find out what is missing: {'; '.join(verdict.missing)}.")
    if divergence is None:
        return "Record two runs of the same model that share a request."
    if divergence.inconclusive:
        return "See under `What was compared` what was left out, and record it in both runs."
    if divergence.identical or verdict is not None:
        return ""
    return (
        "`detdiff explain` on the same two sides says which kind of difference it is and what takes it away."
    )
