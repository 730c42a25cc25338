"""The requests of a scenario on their way through llama.cpp: who gets rows in the next batch, and what becomes of the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from detdiff.engines.schedule import Allotment, Share, Work, admitted, allot, by_arrival, prompt_share
from detdiff.engines.speculation import Speculator

from .recorder import ChosenToken
from .served_models import Batch, FollowsBatches, PreparedRun, ServedModel, answering


class EndTokens:
    """Tokens that end an answer, as a set that asks the model."""

    def __init__(self, ends: Callable[[int], bool]) -> None:
        self._ends = ends

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and self._ends(token)


class FedTokens:
    """Feeds given tokens, and keeps what the model would have chosen."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.chosen = tuple(tokens), list[int]()

    def fed(self, index: int, own: int) -> int:
        """Token ``index``; notes the model's ``own`` choice."""
        del self.chosen[index:]
        self.chosen.append(own)
        return self.tokens[index] if index < len(self.tokens) else own

    def own(self, index: int) -> int:
        """What the model would have chosen for a token."""
        return self.chosen[index]


class Serving:
    """Requests through a context: who gets rows in the next batch, and what becomes of the logits."""

    def __init__(
        self,
        run: PreparedRun,
        pinned: bool,
        batch: Batch,
        on_token: Callable[..., None],
    ) -> None:
        self._schedule, self._work, self._run, self._pinned = run.scenario.schedule, run.work, run, pinned
        self._batch, self._on_token = batch, on_token

    def run(
        self,
        recorder: FollowsBatches,
        text: Callable[[int], str],
        draft: ServedModel | None = None,
    ) -> dict[str, dict[str, int]]:
        """Serve all requests to their ends; the account of what ``draft`` proposed, by request id."""
        target = ServedModel(self._run, recorder, self._batch, self._pinned)
        models = [target] if draft is None else [target, draft]
        asked = self._run.scenario.speculation
        speculator = None
        if draft is not None and asked is not None:
            speculator = Speculator(target, draft, asked.drafts, recorder.event)
        schedule = self._schedule
        waiting, active, step = by_arrival(self._work), list[Work](), 0
        while waiting or active:
            due = admitted(waiting, active, schedule, step, target.most)
            if not active:
                step = max(step, due[0].arrival)
            waiting = [item for item in waiting if item not in due]
            for item in due:
                for model in models:
                    model.begin(item.index)
            active += due
            allotted = allot(active, schedule, None if speculator is None else speculator.drafts)
            recorder.chosen(self._step(target, speculator, allotted), text)
            step += 1
            for item in [item for item in active if item.finished]:
                for model in models:
                    model.end(item.index)
            active = [item for item in active if not item.finished]
        return {} if speculator is None else speculator.counted(self._work)

    def _step(
        self,
        target: ServedModel,
        speculator: Speculator[ServedModel] | None,
        allotted: Sequence[Allotment],
    ) -> list[ChosenToken]:
        """One batch of the target, and the draft's before it; the tokens that were chosen."""
        prompts = [prompt_share(*one) for one in allotted if not one.work.generated]
        decoding = [one for one in allotted if one.work.generated]
        if speculator is None:
            verified = {}
            shares = [Share(work, work.done, (work.generated[-1],), 1, "decode") for work, _ in decoding]
        else:
            speculator.follow(prompts)
            proposals = speculator.propose(decoding)
            verified = {proposal.work.index: proposal for proposal in proposals}
            shares = [proposal.share() for proposal in proposals]
        shares += prompts
        chosen: list[ChosenToken] = []
        for share, logits in zip(shares, target.logits(shares), strict=True):
            work, first = share.work, len(share.work.generated)
            choices = [target.run.context.choose(each) for each in logits]
            if speculator is not None and work.index in verified:
                speculator.settle(verified[work.index], choices, self._on_token)
            else:
                work.done += len(share.tokens)
                for own in choices:
                    feeds = getattr(work.sampler, "fed", None)
                    work.answer(own if feeds is None else feeds(first, own), self._on_token)
            places = answering(share)[: len(work.generated) - first]
            for n, position in enumerate(places):
                chosen.append(ChosenToken(work.index, first + n, position, choices[n], logits[n]))
        return chosen
