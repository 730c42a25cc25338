"""Later turns of a request: the conversation that each goes on with, and what it finds in the cache of the turn before."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlx_lm.models import cache as mlx_caches

from detdiff.engines.schedule import OnEvent, Said, Work, silent
from detdiff.errors import ContextExceeded, ScenarioRangeError, TokenOutOfRange
from detdiff.scenario import Request
from detdiff.trace import format_ranges

from .cache_events import mlx_lm_generate
from .model import LoadedModel, context_limit, encode, encode_messages
from .model_directory import config_value


class Conversations:
    """What is said in the turns of a run; ``requests`` are the scenario's, in the order of their numbers."""

    def __init__(self, requests: Sequence[Request], loaded: LoadedModel) -> None:
        self._requests, self._loaded = requests, loaded

    def said(self, work: Work) -> Said:
        """The conversation of a later turn, once the one before is over.

        Raises ScenarioRangeError for more tokens to take back than there are, ContextExceeded, TokenOutOfRange, and what
        ``encode`` and ``encode_messages`` raise.
        """
        request, before = self._requests[work.index], work.before
        assert request.turn is not None and before is not None
        answer = before.generated
        told = () if request.turn.anew else (*before.prompt, *answer)
        limit = len(answer) if request.chat else len(told)
        if request.turn.rewind >= max(1, limit) and request.turn.rewind:
            raise ScenarioRangeError(
                f"rewind is {request.turn.rewind} in request {request.id!r}, and {'the answer' if request.chat else 'the conversation'} "
                f"before it has {limit} tokens; take back fewer, or begin anew."
            )
        told = told[: len(told) - request.turn.rewind]
        closing = None
        if request.chat and not request.turn.anew:
            messages = self._messages(work)
            arguments = request.chat_template_args
            closed = encode_messages(self._loaded, messages[:-1], answers=False, arguments=arguments)
            tokens = tuple(encode_messages(self._loaded, messages, arguments=arguments))
            closing = tuple(closed[len(told) :]) if tuple(closed[: len(told)]) == told else None
            told = told[: _alike(told, tokens)]
        elif request.tokens is not None:
            tokens = (*told, *request.tokens)
        else:
            tokens = (
                *told,
                *encode(self._loaded, request.prompt or "", request.chat, request.chat_template_args),
            )
        self._check(work, tokens)
        return Said(tokens, len(told), closing)

    def _messages(self, work: Work) -> list[dict[str, Any]]:
        """The chat up to a turn's own question."""
        request = self._requests[work.index]
        if request.messages is not None:
            return [dict(message) for message in request.messages]
        own = {"role": "user", "content": request.prompt or ""}
        if work.before is None or request.turn is None or request.turn.anew:
            return [own]
        answer = list(work.before.generated)
        while answer and answer[-1] in self._loaded.tokenizer.eos_token_ids:
            answer.pop()
        answer = answer[: len(answer) - request.turn.rewind]
        text = str(self._loaded.tokenizer.decode(answer))
        return [*self._messages(work.before), {"role": "assistant", "content": text}, own]

    def _check(self, work: Work, tokens: Sequence[int]) -> None:
        vocabulary = config_value(dict(self._loaded.config), "vocab_size")
        if vocabulary is not None and max(tokens) >= vocabulary:
            raise TokenOutOfRange(
                f"Request {work.id!r} has the token id {max(tokens)}; the model's vocabulary has {vocabulary} ids, 0 to "
                f"{vocabulary - 1}. Correct the tokens, or name the model they are from."
            )
        limit = context_limit(self._loaded)
        if limit is not None and len(tokens) + work.max_tokens > limit:
            raise ContextExceeded(
                f"Request {work.id!r} comes after a conversation that makes {len(tokens)} tokens with it and asks for "
                f"{work.max_tokens} more; the model's context is {limit}. Leave turns out, or lower max_tokens."
            )


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


Caches = list[Any]


class Turns:
    """Which requests of a run have a later turn, and how one begins. ``mode`` is the scenario's ``turns``."""

    def __init__(
        self,
        work: Sequence[Work],
        mode: str,
        event: OnEvent = silent,
        switch: Callable[[bool], None] | None = None,
    ) -> None:
        """``switch`` lets the model's adapter compute, or not; for runs in which one turn has it and another has not."""
        self._event, self.mode = event, mode
        self._switch = switch if any(not item.adapter for item in work) else None
        self._followed = {item.before.index for item in work if item.before is not None and mode != "fresh"}

    def followed(self, work: Work) -> bool:
        """Whether a later turn goes on over the caches of a request."""
        return work.index in self._followed

    def begin(self, work: Work, held: Sequence[int], trims: Callable[[int], bool]) -> int | None:
        """Put the conversation of a later turn together, as ``work.prompt``; how many of the rows ``held`` it goes on over.

        ``trims(n)`` says whether the newest n rows can be forgotten: None where they would have to be and cannot. The event ``turn``
        says what is kept. Raises what ``Conversations.said`` raises.
        """
        assert work.before is not None and work.conversation is not None
        said = work.conversation(work)
        work.prompt = said.tokens
        kept: int | None = 0
        if self.mode != "fresh" and said.told and work.adapter == work.before.adapter:
            # What one adapter computed is nothing for a turn with another.
            kept = min(_alike(held, work.prompt), len(work.prompt) - 1)
        if self.mode == "fresh" or (len(held) > (kept or 0) and not trims(len(held) - (kept or 0))):
            kept = None
        self._event(
            "turn",
            request=work.index,
            **{"from": work.before.index},
            tokens=len(work.prompt),
            told=said.told,
            kept=kept or 0,
            closing=None if said.closing is None else list(said.closing),
        )
        return kept

    def adapt(self, work: Work) -> None:
        """From now on the model computes with its adapter, or without, as a request says."""
        if self._switch is not None:
            self._switch(work.adapter)
            self._event("adapter", request=work.index, on=work.adapter)

    def ended(self, work: Work) -> None:
        """A request is over."""
        if work.cancelled:
            self._event("cancel", request=work.index, tokens=len(work.generated))


class TurnCaches(Turns):
    """The caches of requests that have a later turn, from the end of one turn to the next; one list, a cache a layer, for
    each. ``make`` gives empty ones."""

    def __init__(
        self,
        work: Sequence[Work],
        mode: str,
        event: OnEvent = silent,
        make: Callable[[], Caches] = list,
        switch: Callable[[bool], None] | None = None,
    ) -> None:
        super().__init__(work, mode, event, switch)
        self._make = make
        self._kept: dict[int, Caches | Path] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def close(self) -> None:
        """Remove the files, and let the adapter compute again."""
        if self._switch is not None:
            self._switch(True)
        if self._folder is not None:
            self._folder.cleanup()
        self._kept.clear()

    def caches(self, work: Work) -> Caches | None:
        """The caches that a request begins with, ``work.done`` of whose rows they hold; None where the engine makes them.

        Raises what ``Conversations.said`` raises.
        """
        held, before = None, work.before
        if before is not None:
            held = self._loaded(work, self._kept.pop(before.index, None))
            rows = before.rows if held is not None else ()
            kept = self.begin(work, rows, lambda n: mlx_caches.can_trim_prompt_cache(held or []))
            if held is not None and kept is None:
                held = None
            elif held is not None and len(rows) > (kept or 0):
                # Called where mlx-lm's own generator calls it, so that one watch sees both.
                mlx_lm_generate.trim_prompt_cache(held, len(rows) - (kept or 0))
            if held is not None and kept:
                self._event(
                    "prefix", request=work.index, model="target", **{"from": before.index}, tokens=kept
                )
            work.done = kept or 0
        return self._make() if held is None and self.followed(work) else held

    def _loaded(self, work: Work, kept: Caches | Path | None) -> Caches | None:
        if not isinstance(kept, Path):
            return kept
        caches: Caches = mlx_caches.load_prompt_cache(str(kept))
        self._event("load", request=work.index, layers=format_ranges(range(len(caches))))
        return caches

    def _saved(self, work: Work, caches: Caches) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="detdiff-turns-")
        path = Path(self._folder.name) / f"{work.index}.safetensors"
        mlx_caches.save_prompt_cache(str(path), caches)
        self._event("save", request=work.index, layers=format_ranges(range(len(caches))))
        return path

    def keep(self, work: Work, caches: Caches | None) -> None:
        """A request is over and left ``caches`` behind."""
        self.ended(work)
        if caches is not None and self.followed(work):
            self._kept[work.index] = caches if self.mode == "kept" else self._saved(work, caches)

    def reloaded(self, work: Work, caches: Caches) -> Caches:
        """What a later turn finds of caches that stay where they are: themselves, or what is loaded of them."""
        found = caches if self.mode == "kept" else self._loaded(work, self._saved(work, caches))
        assert found is not None
        return found
