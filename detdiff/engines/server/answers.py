"""What a server answers, read event by event: tokens by id where it gives them, text, log-probabilities, times."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.function import Generation

from .shapes import LAST_ID, AnswerEvent, Invalid, NamedToken, TokenValues, answer_event, json_object


@dataclass(eq=False)
class ServerAnswer:
    """The answer to one request as far as it has come. ``came`` are seconds of each token, or piece of text.

    ``cached`` is how many tokens of the prompt came from a prefix cache, ``counted`` and ``prompted`` how many tokens the answer and the
    prompt have, each None where the server does not say.
    ``collided`` counts tokens whose top list is shorter than it was asked for, because it is keyed by text.
    """

    invalid: Invalid
    top: int
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    tokens: list[NamedToken] = field(default_factory=list)
    tops: list[Sequence[NamedToken]] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    cached: int | None = None
    counted: int | None = None
    prompted: int | None = None
    finished: str | None = None
    collided: int = 0
    name: str | int | None = None

    def openai(self, line: bytes, now: float) -> None:
        """One event of OpenAI's completions or chat, or the whole answer."""
        event = answer_event(line, self.invalid)
        if event.id is not None and event.id != self.name:
            if self.name is not None:
                self.invalid(
                    f"events of two answers ({self.name!r} and {event.id!r}) in one stream", "those of one"
                )
            self.name = event.id
        if event.usage is not None or event.timings is not None:
            self._usage(event)
        if not event.choices:
            return
        choice = event.choices[0]
        if len(event.choices) != 1:
            self.invalid(f"{len(event.choices)} choices", "one")
        if choice.index:
            self.invalid(f"a choice with the index {choice.index}", "the only one, 0")
        said = choice.delta or choice.message or choice
        new = 0
        for words in (said.reasoning_content, said.reasoning, said.content, said.text):
            if words:
                self.text.append(words)
                new = 1
        if choice.logprobs is not None:
            new = max(new, self._scores(choice.logprobs))
        if choice.token_ids is not None:
            self.ids += choice.token_ids
            new = max(new, len(choice.token_ids))
        self.came += [now] * new
        if choice.finish_reason is not None:
            self.finished = choice.finish_reason

    def _usage(self, event: AnswerEvent) -> None:
        usage, timings = event.usage, event.timings
        if usage is not None:
            if usage.prompt_tokens_details is not None:
                self.cached = usage.prompt_tokens_details.cached_tokens
            if usage.completion_tokens is not None:
                self.counted = usage.completion_tokens
            if usage.prompt_tokens is not None:
                self.prompted = usage.prompt_tokens
        if self.cached is None and timings is not None:
            self.cached = timings.cache_n

    def _scores(self, given: TokenValues) -> int:
        """Add the tokens of an event; how many they are."""
        if given.content is not None:
            content = [each for each in given.content if each != _NO_TOKEN]
            self.tokens += content
            self.tops += [each.top_logprobs or () for each in content]
            return len(content)
        names, scores, tops = given.tokens, given.token_logprobs, given.top_logprobs
        if names is None or scores is None:
            return 0
        if len(names) != len(scores):
            self.invalid(
                f"log-probabilities for {len(scores)} entries and {len(names)} entries",
                "a log-probability for each token",
            )
        if tops is not None and len(tops) != len(names):
            self.invalid(
                f"{len(tops)} entries of top log-probabilities for {len(names)} tokens", "one for each token"
            )
        offsets = given.text_offset or ()
        if any(y < x for x, y in itertools.pairwise(offsets)):
            self.invalid(
                f"tokens out of order (text offsets {_short(offsets)})", "tokens as they were generated"
            )
        self.tokens += map(NamedToken, scores, names)
        for found in tops or [None] * len(names):
            named = [NamedToken(score, name) for name, score in (found or {}).items()]
            if named and len(named) < self.top and all(each.number is None for each in named):
                self.collided += 1
            self.tops.append(named)
        return len(names)

    def _id(self, given: Any) -> int:
        if type(given) is not int or not 0 <= given <= LAST_ID:
            self.invalid(f"the token id {_short(given)}", "a whole number from 0")
        return int(given)

    def _score(self, given: Any) -> float:
        if not isinstance(given, int | float) or isinstance(given, bool):
            self.invalid(
                f"the log-probability {_short(given)} for token {len(self.tokens)}", "a finite number"
            )
        return given

    def tgi(self, line: bytes, now: float) -> None:
        """One event of TGI's ``/generate_stream``, or the whole answer of ``/generate``."""
        event = json_object(line, self.invalid)
        if "token" in event:
            self._tgi_token(event, now)
            return
        details = event.get("details")
        if not isinstance(details, Mapping) or not isinstance(details.get("tokens"), list):
            self.invalid("an answer without details", "details with tokens")
        tops = itertools.chain(details.get("top_tokens") or (), itertools.repeat([]))
        for token, named in zip(details["tokens"], tops, strict=False):
            self._tgi_token({"token": token, "top_tokens": named}, now)
        self.finished = str(details.get("finish_reason"))

    def _tgi_token(self, event: Mapping[str, Any], now: float) -> None:
        token = event.get("token")
        if not isinstance(token, Mapping):
            self.invalid(f"the event {_short(event)}", "one with a token")
        index = event.get("index")
        if type(index) is int and index != len(self.tokens) + 1:
            self.invalid(f"token {index} after token {len(self.tokens)}", "tokens in their order, each once")
        self.tokens.append(self._own(token))
        self.text.append(str(token.get("text", "")))
        self.came.append(now)
        tops = event.get("top_tokens") or []
        if not isinstance(tops, list) or not all(isinstance(each, Mapping) for each in tops):
            self.invalid(f"the top tokens {_short(tops)}", "a list of tokens")
        self.tops.append([self._own(each) for each in tops])
        if event.get("generated_text") is not None:
            details = event.get("details")
            self.finished = str(details.get("finish_reason")) if isinstance(details, Mapping) else "unknown"

    def _own(self, token: Mapping[str, Any]) -> NamedToken:
        return NamedToken(
            self._score(token.get("logprob")), str(token.get("text", "")), self._id(token.get("id"))
        )

    def sglang(self, line: bytes, now: float) -> None:
        """One event of SGLang's ``/generate``, which holds all tokens so far, or those that are new."""
        event = json_object(line, self.invalid)
        meta, text = event.get("meta_info"), event.get("text", "")
        if not isinstance(meta, Mapping) or not isinstance(text, str):
            self.invalid(f"the event {_short(event)}", "one with text and meta_info")
        triples, tops = meta.get("output_token_logprobs") or [], meta.get("output_top_logprobs") or []
        counted = meta.get("completion_tokens")
        whole = type(counted) is int and len(triples) == counted
        old = len(self.tokens) if whole else 0
        if (
            not isinstance(triples, list)
            or not isinstance(tops, list)
            or (tops and len(tops) != len(triples))
        ):
            self.invalid(
                f"{_count(tops)} of top log-probabilities for {_count(triples)}", "one for each token"
            )
        if whole and len(triples) < len(self.tokens):
            self.invalid(f"{len(triples)} tokens after {len(self.tokens)}", "all tokens so far")
        new = triples[old:]
        self.tokens += [self._triple(each) for each in new]
        self.tops += [
            [self._triple(other) for other in each or ()] for each in (tops[old:] or [[]] * len(new))
        ]
        self.came += [now] * len(new)
        if whole or not triples:
            self.text = [text]
        else:
            self.text.append(text)
        if not triples and type(counted) is int:
            self.came += [now] * (counted - len(self.came))
        if type(meta.get("cached_tokens")) is int:
            self.cached = meta["cached_tokens"]
        if type(meta.get("prompt_tokens")) is int:
            self.prompted = meta["prompt_tokens"]
        self.counted = counted if type(counted) is int else None
        reason = meta.get("finish_reason")
        if reason is not None:
            self.finished = str(reason.get("type")) if isinstance(reason, Mapping) else str(reason)

    def _triple(self, given: Any) -> NamedToken:
        if not isinstance(given, list) or len(given) < 2:
            self.invalid(f"the log-probability {_short(given)}", "[log-probability, token id, text]")
        text = given[2] if len(given) > 2 and isinstance(given[2], str) else ""
        return NamedToken(self._score(given[0]), text, self._id(given[1]))

    @property
    def named_by_id(self) -> bool:
        """Whether its tokens have ids of the server's tokenizer."""
        return bool(self.ids) or (bool(self.tokens) and all(each.number is not None for each in self.tokens))

    @property
    def whole_text(self) -> str:
        return "".join(self.text)

    @cached_property
    def _keyed(self) -> list[dict[int, NamedToken]]:
        """The top lists by their tokens' keys."""
        return [{each.key if each.id is None else each.id: each for each in row} for row in self.tops]

    @cached_property
    def _numbers(self) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
        """Log-probabilities [tokens], and keys and log-probabilities [tokens, width] of the top lists."""
        # What a server computed is a float32, of which JSON holds a decimal.
        scores = np.array([token.logprob for token in self.tokens], np.float32)
        named = [each for row in self._keyed for each in row.values()]
        counts = np.array([len(row) for row in self._keyed], np.int64)
        width = int(counts.max(initial=0))
        there = np.arange(width) < counts[:, None]
        # Places that the server left empty have no score and an id that no model has.
        ids = np.tile(LAST_ID - np.arange(width), (len(counts), 1))
        values = np.full((len(counts), width), -np.inf, np.float32)
        ids[there] = [key for row in self._keyed for key in row]
        values[there] = [each.logprob for each in named]
        of_token = np.repeat(np.arange(len(counts)), counts)
        for what, found, all_named, number in (
            ("the log-probability", scores, self.tokens, range(len(scores))),
            ("the top log-probability", values[there], named, of_token),
        ):
            for place in np.flatnonzero(~np.isfinite(found)).tolist():
                self.invalid(
                    f"{what} {all_named[place].logprob} for token {number[place]}", "a finite number"
                )
        return scores, ids, values

    @property
    def misnamed(self) -> int:
        """Tokens that are not the likeliest of their own top list, which greedy tokens are."""
        scores, _, values = self._numbers
        return int((values.max(axis=1, initial=-np.inf) > scores[: len(values)]).sum())

    def generation(self) -> Generation:
        """The answer as an engine's, by ids where there are any, else by the tokens' bytes, else by text."""
        if self.ids and self.tokens and len(self.ids) != len(self.tokens):
            self.invalid(
                f"{len(self.ids)} token ids and {len(self.tokens)} log-probabilities",
                "one of each for each token",
            )
        if self.ids and not self.tokens:
            return Generation(np.array(self.ids, np.int64))
        if not self.tokens:
            return Generation(text=self.whole_text)
        keys = self.ids or [token.key for token in self.tokens]
        scores, ids, values = self._numbers
        top = None
        if self.top >= 2 and any(self.tops):
            order = np.lexsort((ids, -values), axis=1)[:, : self.top]
            short = max(0, self.top - order.shape[1])
            top = (
                np.pad(np.take_along_axis(ids, order, 1), ((0, 0), (0, short))),
                np.pad(np.take_along_axis(values, order, 1), ((0, 0), (0, short)), constant_values=-np.inf),
            )
            top[0][:, self.top - short :] = LAST_ID - self.top - np.arange(short)
        return Generation(np.array(keys, np.int64), scores, top=top)

    def texts(self, known: Container[int]) -> dict[int, str]:
        """The text of each token id that is not ``known``, as far as the server says it; ``<id>`` where it does not."""
        named = {key: each for row in self._keyed for key, each in row.items()}
        named |= zip(self.ids or [each.key for each in self.tokens], self.tokens, strict=False)
        raws = {key: each.raw for key, each in named.items() if key not in known}
        raws |= {key: None for key in self.ids if key not in named and key not in known}
        return {
            key: f"<{key}>" if raw is None else raw.decode("utf-8", "replace")
            for key, raw in raws.items()
            if raw != b""
        }


_NO_TOKEN = NamedToken()


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 80 else text[:80] + "..."


def _count(given: Any) -> str:
    return f"{len(given)} entries" if isinstance(given, list) else "no list"
