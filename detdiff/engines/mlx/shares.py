"""Who gets how many rows in the next forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from detdiff.scenario import Schedule

from .work import Work


@dataclass(frozen=True)
class Share:
    """Rows that one request gets in a forward: ``tokens`` at the positions from ``start`` on.

    The logits of the last ``answers`` of them are asked for.
    """

    work: Work
    start: int
    tokens: tuple[int, ...]
    answers: int
    phase: str


class Allotment(NamedTuple):
    """How many rows a request gets."""

    work: Work
    rows: int


def allot(active: Sequence[Work], schedule: Schedule, drafts: int | None = None) -> list[Allotment]:
    """Rows by request: decoding requests first, then prompts in order of arrival, within the budget.

    A decoding request gets one row, and under speculation as many as proposals of it can be verified: ``drafts``, or
    what is left of its answer or of the budget.
    """
    left = schedule.row_budget if schedule.row_budget is not None else 1 << 40
    found: list[Allotment] = []
    for work in active:
        if work.generated:
            rows = min(left, 1 if drafts is None else min(drafts, work.max_tokens - len(work.generated)))
            found += [Allotment(work, rows)] if rows else []
            left -= rows
    for work in active:
        if not work.generated:
            rows = min(left, schedule.prefill_chunk, len(work.prompt) - work.done)
            found += [Allotment(work, rows)] if rows else []
            left -= rows
    return found


def prompt_share(work: Work, rows: int) -> Share:
    """The next ``rows`` of a prompt; its last row answers."""
    end = work.done + rows
    return Share(work, work.done, work.prompt[work.done : end], int(end == len(work.prompt)), "prefill")
