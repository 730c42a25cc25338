"""What running a candidate gave, as it is kept on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from detdiff.compare import Divergence
from detdiff.trace import Trace

from .parting import Parting, focus


@dataclass(frozen=True)
class Answer:
    """``parting`` is None where the two runs do not part, or could not be run or compared: ``why`` says so then.

    ``needed`` are limits for generated tokens by request id, smallest first: as many as it takes to reach the first
    origin, the bookkeeping's finding and the flip, and at last somewhat more. ``focus`` is the request that parts first.
    """

    rows: int
    parting: Parting | None
    needed: tuple[Mapping[str, int], ...] = ()
    focus: str | None = None
    why: str = ""

    @classmethod
    def of(cls, a: Trace, b: Trace, divergence: Divergence) -> Answer:
        rows = len(a.row_index().request) + len(b.row_index().request)
        parting = Parting.of(divergence)
        if parting is None:
            return cls(rows, None, why="the two runs do not part")
        first = focus(divergence)
        return cls(rows, parting, _needed(a, b, divergence), None if first is None else first.id)

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "parting": None if self.parting is None else self.parting.to_json(),
            "needed": [dict(each) for each in self.needed],
            "focus": self.focus,
            "why": self.why,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Answer:
        """Raises KeyError and TypeError for what ``to_json`` did not write."""
        parting = values["parting"]
        return cls(
            int(values["rows"]),
            None if parting is None else Parting.from_json(parting),
            tuple(dict(each) for each in values["needed"]),
            values["focus"],
            values["why"],
        )


@dataclass(frozen=True)
class _Ends:
    """How far a run has to be followed on each side: the number of the last forward that matters."""

    a: int | None = None
    b: int | None = None


def _needed(a: Trace, b: Trace, divergence: Divergence) -> tuple[dict[str, int], ...]:
    ends: list[_Ends] = []
    first = focus(divergence)
    if first is not None and first.origin is not None:
        ends.append(_Ends(first.origin.forward_a, first.origin.forward_b))
    if first is not None and first.flip is not None:
        ends.append(_Ends(first.flip.forward_a, first.flip.forward_b))
    for finding in divergence.bookkeeping[:1]:
        at = finding.forward
        ends.append(_Ends(at if finding.run != "b" else None, at if finding.run != "a" else None))
    limits = [_limits(a, b, end) for end in ends]
    together = {id: max(each[id] for each in limits) for id in limits[0]} if limits else {}
    # A difference that is born in a last row may reach nothing that lasts; and drafts are fewer near a request's end.
    further = {id: limit + max(1, _drafts(a, b)) for id, limit in together.items()}
    found: list[dict[str, int]] = []
    for each in sorted([*limits, together, further], key=lambda each: sum(each.values())):
        if each and each not in found:
            found.append(each)
    return tuple(found)


def _limits(a: Trace, b: Trace, end: _Ends) -> dict[str, int]:
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
