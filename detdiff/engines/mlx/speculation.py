"""Packed speculation: a draft model proposes tokens for several requests at a time, the target's rows verify them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import greedy_sampler

from .forced import Forced
from .packed_model import PackedModel
from .pages import OnEvent
from .shares import Allotment, Share
from .work import OnToken, Work


def greedy(logits: mx.array) -> list[int]:
    """The token of every row of logits [rows, V], as a greedy request's sampler chooses it."""
    return ids(greedy_sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))


def ids(sampled: mx.array) -> list[int]:
    """Token ids out of an array."""
    return [int(token) for token in np.asarray(sampled).ravel()]


@dataclass
class Counts:
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
class Speculation:
    """Proposes with ``draft`` and settles what the target chose; ``counts`` are by request."""

    target: PackedModel
    draft: PackedModel
    drafts: int
    event: OnEvent
    counts: dict[int, Counts] = field(default_factory=dict)

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
            for n, token in zip(taking, greedy(self.draft.logits(shares)[0]), strict=True):
                found[n].append(token)
        return [Proposal(work, tuple(tokens)) for (work, _), tokens in zip(allotted, found, strict=True)]

    def follow(self, shares: Sequence[Share]) -> None:
        """Write the rows of prompts into the draft's caches, too."""
        if shares:
            mirrored = [Share(share.work, share.start, share.tokens, 0, "draft") for share in shares]
            self.draft.logits(mirrored)
            self.draft.evaluate(mirrored)

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
        counts = self.counts.setdefault(work.index, Counts())
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
            self.target.caches.trim(request, rejected)
            self.draft.caches.trim(request, rejected)

    def recount(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Put back an earlier account: (proposed, accepted) by request."""
        self.counts = {index: Counts(*both) for index, both in counts.items()}


def _fed(work: Work, choices: Sequence[int]) -> list[int]:
    """The tokens that the answer goes on with: the target's choices, or what a forced run is fed."""
    if not isinstance(work.sampler, Forced):
        return list(choices)
    count = len(work.generated)
    return [work.sampler.fed(count + n, own) for n, own in enumerate(choices)]
