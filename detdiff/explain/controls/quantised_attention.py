"""The control ``quantised_attention``: attention over quantised caches, each side's by what its own call was given.

Sides that quantise otherwise differ by themselves, so that nothing has equal inputs and no origin is judged: what is wrong in how such
a cache is read would look like the setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from detdiff.engines.base import ORACLE, VALUES

from ..case import Case, Side
from ..control import CannotRun, Figures, Outcome, control
from ..facts import Facts, RecordedFacts
from .oracle import capture_side, judge_rows


@dataclass(frozen=True, eq=False)
class QuantisedAttentionFigures(Figures):
    """How many rows of attention were ``judged`` on each side, how many are outside of their bound, and the first of them, ``where``."""

    judged: int
    outside_a: int
    outside_b: int
    where: Mapping[str, Any] | None = None


def _quantised(facts: Facts) -> bool:
    recorded = facts.recorded
    return (
        bool(facts.diverged)
        and bool(recorded.quantised_a or recorded.quantised_b)
        and not facts.contradictions
    )


@control("quantised_attention", after="repeat", needs=(ORACLE, VALUES), asked_by=_quantised)
def quantised_attention(case: Case) -> Outcome:
    """Result ``inside`` or ``outside``. Costs one re-run of each side, which captures the values.

    Raises CannotRun where no cache was quantised, or no attention after it was compared or can be judged.
    """
    from ..oracle import Scores
    from ..origins import attention_rows

    recorded = RecordedFacts.of(case.a, case.b)
    positions = [position for position, _ in (*recorded.quantised_a, *recorded.quantised_b)]
    if not positions:
        raise CannotRun("neither side quantised its cache")
    rows = attention_rows(case.a, case.b, min(positions))
    if not rows or not all(hasattr(case.engine(side), "watch") for side in "ab"):
        raise CannotRun("no attention over a quantised cache can be judged by what it was called with")
    names: tuple[Side, ...] = ("a", "b")
    sides = [capture_side(case, side, rows, rows) for side in names]
    scores = Scores(len(rows))
    for row in rows:
        places = [side.row(row.request, row.position) for side in sides]
        if None not in places:
            here = replace(row, row_a=places[0] or 0, row_b=places[1] or 0)
            judge_rows(case, sides, [here], scores, own=True)
    found = scores.detail("")
    if scores.result == "not_run":
        raise CannotRun(scores.sentence())
    outside = next(iter(found["outside_where"]), None)
    figures = QuantisedAttentionFigures(found["judged"], found["outside_a"], found["outside_b"], outside)
    if outside is None:
        sentence = f"{found['judged']} rows of attention, each given its own call over its own cache, stay inside their bounds on both sides"
        return Outcome("inside", sentence, figures)
    return Outcome("outside", str(outside["said"]), figures)
