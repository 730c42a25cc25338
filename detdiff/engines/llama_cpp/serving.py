"""Requests through a context of llama.cpp: who gets rows in the next batch, and what becomes of the logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detdiff.engines.schedule import Share, Work, allot, by_arrival, prompt_share
from detdiff.errors import LlamaFailed
from detdiff.scenario import Scenario

from .context import BatchRow, Float32, LlamaContext
from .node_loops import TROUBLE
from .nodes import NodeRecorder
from .recorder import ChosenToken, LlamaRecorder
from .sites import GraphSites


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """A scenario's requests, a context that has room for them, its recorder, and the model's sites."""

    scenario: Scenario
    work: list[Work]
    context: LlamaContext
    nodes: NodeRecorder
    graph: GraphSites

    def decode(self, rows: list[BatchRow]) -> dict[int, Float32]:
        """Compute a batch that the recorder was told of; the logits of the rows that ask for them, by row, valid until the next.

        Raises LlamaFailed, also where the graph is another one than the recorder's.
        """
        self.context.decode(rows)
        if self.nodes.state[TROUBLE]:
            raise LlamaFailed(
                "llama.cpp built another graph in the middle of a run than it did for other numbers of rows; expected one of the "
                "same nodes. What was recorded before is readable."
            )
        return {n: self.context.logits(n) for n, row in enumerate(rows) if row.answers}


class EndTokens:
    """Tokens that end an answer, as a set that asks the model."""

    def __init__(self, ends: Callable[[int], bool]) -> None:
        self._ends = ends

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and self._ends(token)


class FedTokens:
    """Feeds given tokens, and keeps what the model would have chosen."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.chosen = tuple(tokens), -1

    def own(self, index: int) -> int:
        return self.chosen


class Serving:
    """Requests through a context: who gets rows in the next batch, and what becomes of the logits."""

    def __init__(
        self,
        run: PreparedRun,
        pinned: bool,
        batch: Callable[[Sequence[Share], list[BatchRow]], dict[int, Any]],
        on_token: Callable[..., None],
    ) -> None:
        self._schedule, self._work, self._run, self._pinned = run.scenario.schedule, run.work, run, pinned
        self._batch, self._on_token = batch, on_token
        self._free = list(range(run.context.settings.sequences))

    def run(self, recorder: LlamaRecorder, text: Callable[[int], str]) -> None:
        schedule = self._schedule
        limit = 1 if schedule.kind == "serial" else (schedule.active or len(self._work))
        limit = min(limit, len(self._free))
        waiting, active, step = by_arrival(self._work), list[Work](), 0
        own: dict[int, int] = {}
        while waiting or active:
            step = step if active else max(step, waiting[0].arrival)
            due = [item for item in waiting if item.arrival <= step][: limit - len(active)]
            waiting = [item for item in waiting if item not in due]
            for item in due:
                own[item.index] = self._free.pop(0)
                recorder.owners.begin(own[item.index], item.index)
            active += due
            shares = [
                Share(item, item.done, (item.generated[-1],), 1, "decode")
                if item.generated
                else prompt_share(item, rows)
                for item, rows in allot(active, schedule)
            ]
            for group in self._groups(shares):
                self._compute(group, recorder, own, text)
            step += 1
            for item in [item for item in active if item.finished]:
                sequence = own.pop(item.index)
                self._run.context.remove(sequence)
                self._run.nodes.forget(sequence)
                recorder.owners.end(sequence)
                # The slot that was free longest is taken next, as if there were a ring of them.
                self._free.append(sequence)
            active = [item for item in active if not item.finished]

    def _groups(self, shares: Sequence[Share]) -> list[list[Share]]:
        if not self._pinned:
            return [list(shares)]
        return [
            [Share(each.work, each.start + n, (token,), int(bool(each.answers) and n == len(each.tokens) - 1), each.phase)]
            for each in shares
            for n, token in enumerate(each.tokens)
        ]  # fmt: skip

    def _compute(
        self,
        shares: Sequence[Share],
        recorder: LlamaRecorder,
        own: Mapping[int, int],
        text: Callable[[int], str],
    ) -> None:
        rows = [
            BatchRow(token, share.start + n, own[share.work.index], n >= len(share.tokens) - share.answers)
            for share in shares
            for n, token in enumerate(share.tokens)
        ]
        logits = self._batch(shares, rows)
        answers, at = [], 0
        for share in shares:
            at += len(share.tokens)
            share.work.done += len(share.tokens)
            if not share.answers:
                continue
            scores = logits[at - 1]
            token, index = self._run.context.choose(scores), len(share.work.generated)
            if isinstance(share.work.sampler, FedTokens):
                share.work.sampler.chosen = token
                share.work.answer(share.work.sampler.tokens[index], self._on_token)
            else:
                share.work.answer(token, self._on_token)
            answers.append(
                ChosenToken(
                    share.work.index, index, share.start + len(share.tokens) - 1, at - 1, token, scores
                )
            )
        recorder.end(shares, answers, text)
