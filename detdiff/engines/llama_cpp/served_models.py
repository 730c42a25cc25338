"""The models of a run while requests are served: the one that is asked, and the draft if there is one.

Each has a context of its own, in which a request is the same sequence as in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from detdiff.engines.schedule import Share, Work
from detdiff.errors import LlamaFailed
from detdiff.scenario import Scenario
from detdiff.trace import format_ranges

from .context import BatchRow, Float32, LlamaContext
from .contradictions import SequenceOwners
from .nodes import NodeRecorder
from .recorder import ChosenToken, ModelPart, WrittenCount
from .sites import GraphSites

DRAFT: Final = "draft."
"""What the sites of a draft begin with, before the names that they have in its graph."""
Batch = Callable[[Sequence[Share], list[BatchRow]], dict[int, Any]]
"""Computes a batch, and gives the logits of the rows that ask for them, by their place in it."""


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """A scenario's requests, a context that has room for them, its recorder, and the model's sites.

    ``draft`` is the same of the draft model, where there is one.
    """

    scenario: Scenario
    work: list[Work]
    context: LlamaContext
    nodes: NodeRecorder
    graph: GraphSites
    draft: PreparedRun | None = None

    def decode(self, rows: list[BatchRow]) -> dict[int, Float32]:
        """Compute a batch that the recorder was told of; the logits of the rows that ask for them, by row, valid until the next.

        Raises LlamaFailed, also where the graph is another one than the recorder's.
        """
        self.context.decode(rows)
        if not self.nodes.whole:
            raise LlamaFailed(
                "llama.cpp built another graph in the middle of a run than it did for other numbers of rows; expected one of the "
                "same nodes. What was recorded before is readable."
            )
        return {n: self.context.logits(n) for n, row in enumerate(rows) if row.answers}

    def computed(self, shares: Sequence[Share], rows: list[BatchRow]) -> dict[int, Float32]:
        """A ``Batch`` in a context that nothing looks into."""
        self.context.decode(rows)
        return {n: self.context.logits(n) for n, row in enumerate(rows) if row.answers}


class FollowsBatches(Protocol):
    """What is told of each batch. ``owners`` are the requests of the cache's sequences; ``part`` says whose batches they are."""

    owners: SequenceOwners
    part: ModelPart

    def begin(self, shares: Sequence[Share], held: Sequence[int] | None = None) -> None:
        """The next batch has these rows; ``held`` are the positions that the cache says it has of each share's request."""

    def end(self, shares: Sequence[Share], logits: Mapping[int, Float32]) -> None:
        """It was computed; ``logits`` are by the row's place in it."""

    def chosen(self, answers: Sequence[ChosenToken], texts: Callable[[int], str]) -> None:
        """Tokens were chosen from rows of the batches since the last that were."""

    def event(self, kind: str, **fields: Any) -> None:
        """Something was done after the last batch."""


class Unfollowed:
    """Follows batches that nobody records."""

    def __init__(self, part: ModelPart) -> None:
        self.owners, self.part = SequenceOwners(), part

    def begin(self, shares: Sequence[Share], held: Sequence[int] | None = None) -> None: ...
    def end(self, shares: Sequence[Share], logits: Mapping[int, Float32]) -> None: ...
    def chosen(self, answers: Sequence[ChosenToken], texts: Callable[[int], str]) -> None: ...
    def event(self, kind: str, **fields: Any) -> None: ...


class ServedModel:
    """A model while requests are served: a sequence of its cache for each, rows in, logits out, and rows taken back.

    ``pinned``: each row is decoded in a call of its own, as are the rows of a batch of at most the scenario's ``split_rows``.
    """

    def __init__(self, run: PreparedRun, recorder: FollowsBatches, batch: Batch, pinned: bool) -> None:
        self.run, self.recorder = run, recorder
        self._batch, self._pinned = batch, pinned
        self._free = list(range(run.context.settings.sequences))
        self._own: dict[int, int] = {}

    @property
    def most(self) -> int:
        """How many requests can be served at a time."""
        return self.run.context.settings.sequences

    def begin(self, request: int) -> None:
        """A request gets a sequence."""
        sequence = self._own[request] = self._free.pop(0)
        self.recorder.owners.begin(sequence, request)

    def end(self, request: int) -> None:
        """A request's sequence is free again."""
        sequence = self._own.pop(request)
        self.run.context.remove(sequence)
        self.run.nodes.forget(sequence)
        self.recorder.owners.end(sequence)
        # The slot that was free longest is taken next, as if there were a ring of them.
        self._free.append(sequence)

    def logits(self, shares: Sequence[Share]) -> list[list[Float32]]:
        """Of each share the logits [vocabulary] of its answering rows, from one batch of all rows."""
        found: dict[tuple[int, int], Float32] = {}
        for group in self._groups(shares):
            rows = [
                BatchRow(
                    token,
                    share.start + n,
                    self._own[share.work.index],
                    n >= len(share.tokens) - share.answers,
                )
                for share in group
                for n, token in enumerate(share.tokens)
            ]
            self.run.context.check_rows(len(rows))
            held = [self.run.context.held(self._own[share.work.index]) for share in group]
            self.recorder.begin(group, held)
            # Kept beyond the next batch, which may come before all of them are looked at.
            logits = {n: each.copy() for n, each in self._batch(group, rows).items()}
            self.recorder.end(group, logits)
            places = [
                (share.work.index, share.start + n) for share in group for n in range(len(share.tokens))
            ]
            found |= {places[n]: each for n, each in logits.items()}
        return [[found[share.work.index, position] for position in answering(share)] for share in shares]

    def choices(self, shares: Sequence[Share]) -> list[int]:
        """The token that a greedy request takes after each answering row, from one batch of these rows."""
        choose = self.run.context.choose
        return [choose(each) for found in self.logits(shares) for each in found]

    def write(self, shares: Sequence[Share]) -> None:
        """One batch of these rows, for what it leaves in the cache."""
        self.logits(shares)

    def rewind(self, request: int, rows: int) -> None:
        """Take a request's newest rows out of the cache, and say whether they went."""
        context, sequence = self.run.context, self._own[request]
        before = context.held(sequence)
        context.remove(sequence, before - rows)
        self.run.nodes.rewind(sequence, before - rows)
        self.recorder.event(
            "trim",
            request=request,
            model=self.recorder.part.name,
            asked=rows,
            done=before - context.held(sequence),
            layers=format_ranges(range(context.model.layers)),
        )

    def _groups(self, shares: Sequence[Share]) -> list[list[Share]]:
        split = self.run.scenario.kernels.split_rows or 0
        if not self._pinned and sum(len(each.tokens) for each in shares) > split:
            return [list(shares)]
        return [
            [Share(each.work, each.start + n, (token,), int(n >= len(each.tokens) - each.answers), each.phase)]
            for each in shares
            for n, token in enumerate(each.tokens)
        ]  # fmt: skip


@dataclass
class FirstBatches:
    """Computes the batches of a run, and keeps the first ``most`` of them: the positions that the cache had of each sequence, the
    rows, and their logits' bytes."""

    run: PreparedRun
    most: int
    seen: list[tuple[list[int], list[BatchRow], dict[int, bytes]]] = field(default_factory=list)

    def __call__(self, shares: Sequence[Share], rows: list[BatchRow]) -> dict[int, Float32]:
        if len(self.seen) >= self.most:
            return self.run.decode(rows)
        context = self.run.context
        held = [context.held(sequence) for sequence in range(context.settings.sequences)]
        found = self.run.decode(rows)
        self.seen.append((held, rows, {n: each.tobytes() for n, each in found.items()}))
        return found

    def again(self) -> bool:
        """Whether they give the same logits in a context that nothing looks into."""
        context = LlamaContext(self.run.context.model, self.run.context.settings)
        try:
            equal = True
            for held, rows, logits in self.seen:
                for sequence, start in enumerate(held):
                    # What had been taken out of the cache before this batch, of requests without a row in it too: in a cache that is
                    # shared, which cells are free decides where the others' keys lie.
                    context.remove(sequence, start)
                context.decode(rows)
                equal &= all(context.logits(n).tobytes() == each for n, each in logits.items())
        finally:
            context.close()
        return equal


def observed(first: Sequence[FirstBatches]) -> dict[str, Any]:
    """A trace's ``observer``: whether recording the models changed no bit of their first logits."""
    count = sum(len(each.seen) for each in first)
    return {"forwards": count, "equal": all(each.again() for each in first) if count else None}


def model_parts(graphs: Sequence[GraphSites]) -> list[ModelPart]:
    """Where the sites of the target and of the draft lie in their run's trace."""
    written = WrittenCount()
    ports = sum(len(each.columns) for each in graphs)
    parts: list[ModelPart] = []
    site = port = 0
    for name, graph in zip(("target", "draft"), graphs, strict=False):
        parts.append(ModelPart(name, site, port, ports, written))
        site, port = site + len(graph.sites), port + len(graph.columns)
    return parts


def drafted(graph: GraphSites) -> GraphSites:
    """The sites of a draft, as a trace names them."""
    sites = tuple(
        replace(each, site=replace(each.site, name=f"{DRAFT}{each.site.name}")) for each in graph.sites
    )
    return replace(graph, sites=sites, unseen=tuple(f"of the draft, {clause}" for clause in graph.unseen))


def answering(share: Share) -> list[int]:
    """The positions whose logits are asked for."""
    end = share.start + len(share.tokens)
    return list(range(end - share.answers, end))
