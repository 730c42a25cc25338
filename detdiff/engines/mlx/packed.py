"""The packed layout: iteration-level scheduling of prefill chunks, decode and verification rows in one forward.

With a draft model, verification rows take the place of decode rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from detdiff.engines.mlx.taps.forward import DRAFT
from detdiff.engines.mlx.taps.session import Session
from detdiff.engines.schedule import (
    Allotment,
    OnEvent,
    OnToken,
    Share,
    Work,
    admitted,
    allot,
    by_arrival,
    prompt_share,
    silent,
)
from detdiff.engines.speculation import Proposal, Speculator
from detdiff.scenario import GENERATE, CachePlan, Schedule

from .adapters import switch_adapter
from .packed_model import ForwardClock, PackedModel, greedy, ids
from .padded import OnChoice
from .requests import Forced
from .sampling import StateDraw, TokenDraw, native_sampler, processed, random_state, seed_state
from .turns import TurnCaches


class StopRun(Exception):
    """Raised before a step to end a run there."""


@dataclass(frozen=True)
class Progress:
    """How far one request is: its prompt, rows in the caches, tokens generated, and what its sampler remembers."""

    prompt: tuple[int, ...]
    done: int
    generated: tuple[int, ...]
    sampled: Any

    @classmethod
    def of(cls, work: Work) -> Progress:
        return cls(work.prompt, work.done, tuple(work.generated), _sampled(work.sampler))

    def put(self, work: Work) -> None:
        """Make ``work`` stand here."""
        work.prompt, work.done, work.generated = self.prompt, self.done, list(self.generated)
        if isinstance(work.sampler, TokenDraw):
            work.sampler.index = self.sampled
        elif isinstance(work.sampler, Forced):
            work.sampler.chosen[:] = self.sampled


@dataclass(frozen=True)
class Snapshot:
    """A packed engine before one of its steps. ``waiting`` and ``active`` are request indices in order.

    ``forwards`` and ``steps`` are the numbers of the next forward of any model and of the target's next one; ``caches``
    are by model; ``counts`` are (proposed, accepted) by request.
    """

    progress: tuple[Progress, ...]
    waiting: tuple[int, ...]
    active: tuple[int, ...]
    forwards: int
    steps: int
    caches: tuple[object, ...]
    counts: Mapping[int, tuple[int, int]]
    random_state: int | None = None
    """MLX's, where a request draws from it."""


def _sampled(sampler: Any) -> Any:
    if isinstance(sampler, TokenDraw):
        return sampler.index
    return list(sampler.chosen) if isinstance(sampler, Forced) else None


BeforeStep = Callable[["PackedEngine", int], None]
OnScores = Callable[[Work, mx.array], None]
"""Called with a request and the logits [1, V] that choose its next token, before anything changes or evaluates them."""


@dataclass(frozen=True)
class DraftSession:
    """The draft model's session, and how many tokens it proposes at a time."""

    session: Session
    drafts: int


@dataclass
class _RequestQueue:
    """The requests that wait and those that are served, in order."""

    waiting: list[Work] = field(default_factory=list)
    active: list[Work] = field(default_factory=list)


class PackedEngine:
    """Serves requests packed over one model, and a draft model where there is one."""

    def __init__(
        self,
        session: Session,
        drafting: DraftSession | None = None,
        *,
        plan: CachePlan | None = None,
        event: OnEvent = silent,
        on_choice: OnChoice | None = None,
    ) -> None:
        self._on_choice = on_choice
        self.clock = ForwardClock()
        rewinds = 0 if drafting is None else drafting.drafts
        self.target = PackedModel(session, clock=self.clock, plan=plan, event=event, rewinds=rewinds)
        self.speculation: Speculator[PackedModel] | None = None
        if drafting is not None:
            draft = PackedModel(
                drafting.session, name=DRAFT, clock=self.clock, plan=plan, event=event, rewinds=rewinds
            )
            self.speculation = Speculator(self.target, draft, drafting.drafts, event)
        self._queue = _RequestQueue()
        self._work: list[Work] = []
        self._plan, self._event = plan or CachePlan(), event
        self._turns = TurnCaches((), self._plan.turns, event)
        self.on_scores: OnScores | None = None

    @property
    def models(self) -> tuple[PackedModel, ...]:
        """The target, and the draft if there is one."""
        return (self.target,) if self.speculation is None else (self.target, self.speculation.draft)

    def run(
        self,
        work: list[Work],
        schedule: Schedule,
        on_token: OnToken,
        *,
        from_: Snapshot | None = None,
        until: int | None = None,
        before_step: BeforeStep | None = None,
    ) -> None:
        """Serve all requests: admit, propose, share rows, run one forward, settle, until none is left.

        ``from_`` continues a snapshot instead of beginning; ``until`` ends before the target's forward of that number.
        ``before_step(engine, step)`` is called before each of the target's forwards and its proposals; StopRun ends
        the run there.
        """
        if from_ is None:
            self._work, self._queue = work, _RequestQueue(by_arrival(work))
            seed_state(self._queue.waiting)
        else:
            self.resume(from_, work)
        switch = partial(switch_adapter, self.target.session.model)
        self._turns = TurnCaches(work, self._plan.turns, self._event, switch=switch)
        for item in self._queue.active:
            self._turns.adapt(item)
        serial = schedule.kind == "serial"
        try:
            while self._queue.waiting or self._queue.active:
                due = self._admit(schedule)
                if serial:
                    seed_state(due)
                if self.clock.steps == until:
                    return
                if before_step is not None:
                    before_step(self, self.clock.steps)
                self.step(schedule, on_token)
                self.release()
        except StopRun:
            return
        finally:
            self._turns.close()

    def snapshot(self) -> Snapshot:
        """All that the next step depends on, to continue from as often as needed; arrays are shared, not copied."""
        queue = self._queue
        counts = self.speculation.counts if self.speculation is not None else {}
        return Snapshot(
            progress=tuple(Progress.of(item) for item in self._work),
            waiting=tuple(item.index for item in queue.waiting),
            active=tuple(item.index for item in queue.active),
            forwards=self.clock.forwards,
            steps=self.clock.steps,
            caches=tuple(model.caches.snapshot() for model in self.models),
            counts={index: (one.proposed, one.accepted) for index, one in counts.items()},
            random_state=random_state()
            if any(isinstance(native_sampler(item), StateDraw) for item in self._work)
            else None,
        )

    def resume(self, snapshot: Snapshot, work: list[Work]) -> None:
        """Go back to a snapshot of an engine like this one; ``work`` are the same requests, in the same order."""
        of = {item.index: item for item in work}
        for progress, item in zip(snapshot.progress, work, strict=True):
            progress.put(item)
        self._work = work
        self._queue = _RequestQueue([of[n] for n in snapshot.waiting], [of[n] for n in snapshot.active])
        self.clock.forwards, self.clock.steps = snapshot.forwards, snapshot.steps
        for model, caches in zip(self.models, snapshot.caches, strict=True):
            model.caches.restore(caches)
        if self.speculation is not None:
            self.speculation.recount(snapshot.counts)
        if snapshot.random_state is not None:
            mx.random.seed(snapshot.random_state)

    def counts(self) -> dict[str, dict[str, int]]:
        """The engine's own account of its proposals, by request id; empty without speculation."""
        return {} if self.speculation is None else self.speculation.counted(self._work)

    def _admit(self, schedule: Schedule) -> list[Work]:
        queue = self._queue
        due = admitted(queue.waiting, queue.active, schedule, self.clock.steps)
        queue.waiting = [item for item in queue.waiting if item not in due]
        for item in due:
            self.admit(item)
        return due

    @property
    def active(self) -> Sequence[Work]:
        """The requests that have rows in the next forward, in order."""
        return tuple(self._queue.active)

    def admit(self, item: Work) -> None:
        """Begin a request, which has rows from the next forward on."""
        self._turns.adapt(item)
        if item.before is None or not self._goes_on(item, item.before):
            # A draft may have run fewer of a donor's rows than the target has.
            shared = min(model.caches.shareable(item.prompt) for model in self.models)
            for model in self.models:
                item.done = model.begin(item.index, item.prompt, shared)
        self._queue.active.append(item)

    def _goes_on(self, item: Work, before: Work) -> bool:
        """Begin a later turn; False where nothing of the turn before can be kept."""
        every = [model.caches for model in self.models]
        # A draft may have run fewer rows than the target has.
        held = min((caches.rows(before.index) for caches in every), key=len)
        kept = self._turns.begin(
            item, held, lambda n: all(caches.forgets(before.index, n) for caches in every)
        )
        for caches in every:
            if kept is None:
                caches.free(before.index)
            else:
                caches.go_on(item.index, before.index, kept, lambda held: self._turns.reloaded(item, held))
        item.done = kept or 0
        return kept is not None

    def step(self, schedule: Schedule, on_token: OnToken) -> None:
        """Propose, share rows, run one forward of the target and settle; there must be a request."""
        queue, speculation = self._queue, self.speculation
        allotted = allot(queue.active, schedule, None if speculation is None else speculation.drafts)
        decoding = [one for one in allotted if one.work.decoding]
        prompts = [prompt_share(*one) for one in allotted if not one.work.decoding]
        proposals: list[Proposal] = []
        if speculation is not None:
            speculation.follow(prompts)
            proposals = speculation.propose(decoding)
            shares = [*(proposal.share() for proposal in proposals), *prompts]
        else:
            shares = [*map(_decode_share, decoding), *prompts]
        self._settle(shares, proposals, self.target.logits(shares), on_token)

    def release(self) -> list[Work]:
        """Let go of the requests that are through."""
        queue = self._queue
        through = [item for item in queue.active if item.finished]
        for item in through:
            self._turns.ended(item)
            for model in () if self._turns.followed(item) else self.models:
                model.caches.free(item.index)
        queue.active = [item for item in queue.active if not item.finished]
        return through

    def _settle(
        self, shares: Sequence[Share], proposals: Sequence[Proposal], logits: mx.array, on_token: OnToken
    ) -> None:
        verifying = {proposal.work.index: proposal for proposal in proposals}
        row = 0
        chosen: list[tuple[Share, Any]] = []
        drawn: list[tuple[Work, mx.array]] = []
        for share in shares:
            scores = logits[0, row : row + share.answers]
            row += share.answers
            if share.work.index in verifying:
                chosen.append((share, scores))
            else:
                share.work.done += len(share.tokens)
                if share.work.task != GENERATE and share.answers:
                    chosen.append((share, scores))
                elif share.answers:
                    if self.on_scores is not None:
                        self.on_scores(share.work, scores)
                    scores = processed(share.work, scores)
                    logprobs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
                    chosen.append((share, share.work.sampler(logprobs)))
                    drawn.append((share.work, logprobs[0]))
        if not chosen:
            self.target.evaluate(shares)
            return
        mx.eval([array for _, array in chosen])
        if self._on_choice is not None:
            for work, logprobs in drawn:
                self._on_choice(work.index, len(work.generated), logprobs)
        for share, found in chosen:
            proposal = verifying.get(share.work.index)
            if share.work.task != GENERATE:
                share.work.score(share.answers, on_token)
            elif proposal is None:
                share.work.answer(ids(found)[0], on_token)
            elif self.speculation is not None:
                self.speculation.settle(proposal, greedy(found), on_token)


def _decode_share(allotment: Allotment) -> Share:
    work = allotment.work
    return Share(work, work.done, (work.generated[-1],), 1, "decode")
