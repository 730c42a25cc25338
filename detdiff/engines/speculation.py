"""Speculation: a draft model proposes tokens for several requests at a time, and the target's rows verify them.

The same for every engine that serves requests packed: what a model is made of, and how its rows are taken back, is said by
``DraftedModel``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from detdiff.errors import ContextExceeded, DraftMismatch

from .schedule import Allotment, OnEvent, OnToken, Share, Work


class DraftedModel(Protocol):
    """What speculation asks of a model, the one that proposes as well as the one that verifies."""

    def choices(self, shares: Sequence[Share]) -> list[int]:
        """The token that a greedy request takes after each answering row, from one forward over these rows."""

    def write(self, shares: Sequence[Share]) -> None:
        """One forward over these rows, for what it leaves in the cache."""

    def rewind(self, request: int, rows: int) -> None:
        """Take the newest rows of a request out of the cache."""


Model = TypeVar("Model", bound=DraftedModel)


@dataclass
class DraftCounts:
    """The engine's own account of one request: tokens that were proposed, and that were accepted."""

    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Proposal:
    """What the draft proposed for a request; the rows that verify it begin with the request's last token."""

    work: Work
    tokens: tuple[int, ...]

    def share(self) -> Share:
        """The verification rows: the row before each proposal."""
        fed = (self.work.generated[-1], *self.tokens[:-1])
        return Share(self.work, self.work.done, fed, len(fed), "verify")


@dataclass
class Speculator(Generic[Model]):
    """Proposes with ``draft`` and settles what the target chose; ``counts`` are by request."""

    target: Model
    draft: Model
    drafts: int
    event: OnEvent
    counts: dict[int, DraftCounts] = field(default_factory=dict)

    def propose(self, allotted: Sequence[Allotment]) -> list[Proposal]:
        """Proposals for each request, as many as it has rows; all requests' draft rows share a forward."""
        found: list[list[int]] = [[] for _ in allotted]
        for turn in range(max((rows for _, rows in allotted), default=0)):
            taking = [n for n, (_, rows) in enumerate(allotted) if rows > turn]
            shares = []
            for n in taking:
                work = allotted[n].work
                fed = (work.generated[-1], *found[n])[turn]
                shares.append(Share(work, work.done + turn, (fed,), 1, "draft"))
            for n, token in zip(taking, self.draft.choices(shares), strict=True):
                found[n].append(token)
        return [Proposal(work, tuple(tokens)) for (work, _), tokens in zip(allotted, found, strict=True)]

    def follow(self, shares: Sequence[Share]) -> None:
        """Write the rows of prompts into the draft's caches, too."""
        if shares:
            self.draft.write([Share(share.work, share.start, share.tokens, 0, "draft") for share in shares])

    def settle(self, proposal: Proposal, choices: Sequence[int], on_token: OnToken) -> None:
        """Take what the target chose after each verification row, up to the first that was not proposed."""
        work, proposed = proposal.work, proposal.tokens
        fed = _fed(work, choices)
        start, count = work.done, len(work.generated)
        accepted, replacement = 0, None
        for guess, token in zip(proposed, fed, strict=True):
            work.answer(token, on_token)
            if token != guess:
                replacement = token
                break
            accepted += 1
            if work.finished:
                break
        committed = work.generated[count:]
        counts = self.counts.setdefault(work.index, DraftCounts())
        counts.proposed += len(proposed)
        counts.accepted += accepted
        self.event(
            "verify",
            request=work.index,
            start=start,
            proposals=list(proposed),
            choices=list(choices),
            accepted=accepted,
            replacement=replacement,
            committed=list(committed),
        )
        work.done = start + len(committed)
        self.rewind(work.index, len(proposed) - len(committed))

    def rewind(self, request: int, rejected: int) -> None:
        """Take the rejected rows out of the caches of both models."""
        if rejected:
            self.target.rewind(request, rejected)
            self.draft.rewind(request, rejected)

    def recount(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Put back an earlier account: (proposed, accepted) by request."""
        self.counts = {index: DraftCounts(*both) for index, both in counts.items()}

    def counted(self, work: Sequence[Work]) -> dict[str, dict[str, int]]:
        """The account by request id, as a trace's header has it."""
        return {
            item.id: {"proposed": one.proposed, "accepted": one.accepted}
            for item in work
            if (one := self.counts.get(item.index)) is not None
        }


def _fed(work: Work, choices: Sequence[int]) -> list[int]:
    """The tokens that the answer goes on with: the target's choices, or what a forced run's sampler feeds."""
    feeds = getattr(work.sampler, "fed", None)
    if feeds is None:
        return list(choices)
    count = len(work.generated)
    return [feeds(count + n, own) for n, own in enumerate(choices)]


def refuse_other_vocabulary(target: tuple[str, int | None], draft: tuple[str, int | None]) -> None:
    """Raises DraftMismatch where both numbers of token ids are known and are not one; each side is (name, ids)."""
    if None not in (target[1], draft[1]) and target[1] != draft[1]:
        raise DraftMismatch(
            f"The draft {draft[0]!r} has {draft[1]} token ids and the model {target[0]!r} has {target[1]}; expected one "
            "vocabulary, since one proposes tokens to the other. Name a draft that was made for this model."
        )


def refuse_long_for_draft(work: Sequence[Work], limit: int | None) -> None:
    """Raises ContextExceeded for a request that does not fit a draft's context of ``limit`` tokens."""
    for item in work if limit is not None else ():
        if limit is not None and len(item.prompt) + item.max_tokens > limit:
            raise ContextExceeded(
                f"Request {item.id!r} has {len(item.prompt)} prompt tokens and asks for {item.max_tokens} more; the "
                f"draft model's context is {limit}. Shorten the prompt, lower max_tokens, or leave out draft."
            )
