"""What a server answers, read event by event: tokens by id where it gives them, text, log-probabilities, times."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np

from detdiff.engines.function import Generation

_LAST_ID: Final = 2**31 - 1
_AS_ID: Final = "token_id:"
_LARGEST: Final = 1e30

Invalid = Callable[[str, str], NoReturn]
"""Called with what was found and what was expected."""


class NamedToken(NamedTuple):
    """A token as a server names it: by ``id`` where it gives one, its text as ``raw`` bytes, and its log-probability."""

    id: int | None
    raw: bytes
    score: float

    @property
    def key(self) -> int:
        """The id, else a number of 31 bits of its bytes."""
        return zlib.crc32(self.raw) & _LAST_ID if self.id is None else self.id


@dataclass(eq=False)
class ServerAnswer:
    """The answer to one request as far as it has come. ``came`` are seconds of each token, or piece of text.

    ``cached`` is how many tokens of the prompt came from a prefix cache, None where the server does not say.
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
    finished: str | None = None
    collided: int = 0
    name: str | None = None

    def openai(self, event: Mapping[str, Any], now: float) -> None:
        """One event of OpenAI's completions or chat, or the whole answer."""
        name = event.get("id")
        if isinstance(name, str):
            if self.name is not None and name != self.name:
                self.invalid(
                    f"events of two answers ({self.name!r} and {name!r}) in one stream", "those of one"
                )
            self.name = name
        self._usage(event)
        choices = event.get("choices")
        if choices is None or choices == []:
            return
        if not isinstance(choices, list) or not isinstance(choices[0], Mapping) or len(choices) != 1:
            self.invalid(f"the choices {_short(choices)}", "a list of one choice")
        choice = choices[0]
        if choice.get("index", 0) != 0:
            self.invalid(f"a choice with the index {_short(choice.get('index'))}", "the only one, 0")
        said = choice.get("delta") or choice.get("message") or choice
        if not isinstance(said, Mapping):
            self.invalid(f"the message {_short(said)}", "an object")
        words = [
            said.get(key)
            for key in ("reasoning_content", "reasoning", "content", "text")
            if said.get(key) is not None
        ]
        if not all(isinstance(each, str) for each in words):
            self.invalid(f"the text {_short(words)}", "a string")
        before = len(self.tokens), len(self.ids)
        self._scores(choice.get("logprobs"))
        ids = choice.get("token_ids")
        if ids is not None:
            if not isinstance(ids, list):
                self.invalid(f"the token ids {_short(ids)}", "a list of them")
            self.ids += [self._id(each) for each in ids]
        self.text += map(str, words)
        new = max(len(self.tokens) - before[0], len(self.ids) - before[1], int(any(words)))
        self.came += [now] * new
        if choice.get("finish_reason") is not None:
            self.finished = str(choice["finish_reason"])

    def _usage(self, event: Mapping[str, Any]) -> None:
        usage, timings = event.get("usage"), event.get("timings")
        if isinstance(usage, Mapping):
            details = usage.get("prompt_tokens_details")
            if isinstance(details, Mapping) and type(details.get("cached_tokens")) is int:
                self.cached = details["cached_tokens"]
            if type(usage.get("completion_tokens")) is int:
                self.counted = usage["completion_tokens"]
        if self.cached is None and isinstance(timings, Mapping) and type(timings.get("cache_n")) is int:
            self.cached = timings["cache_n"]

    def _scores(self, given: Any) -> None:
        if given is None:
            return
        if not isinstance(given, Mapping):
            self.invalid(f"the log-probabilities {_short(given)}", "an object")
        if "content" in given:
            content = given["content"] or []
            if not isinstance(content, list) or not all(isinstance(each, Mapping) for each in content):
                self.invalid(
                    f"the log-probabilities {_short(content)}", "a list of objects, one for each token"
                )
            for each in content:
                if each == {}:
                    continue
                self.tokens.append(self._entry(each))
                tops = each.get("top_logprobs")
                if tops is not None and not isinstance(tops, list):
                    self.invalid(f"the top log-probabilities {_short(tops)}", "a list")
                self.tops.append([self._entry(other) for other in tops or () if isinstance(other, Mapping)])
            return
        names, scores, tops = (given.get(key) for key in ("tokens", "token_logprobs", "top_logprobs"))
        if not isinstance(names, list) or not isinstance(scores, list) or len(names) != len(scores):
            self.invalid(
                f"log-probabilities for {_count(scores)} and {_count(names)}",
                "a log-probability for each token",
            )
        if tops is not None and (not isinstance(tops, list) or len(tops) != len(names)):
            self.invalid(
                f"{_count(tops)} of top log-probabilities for {len(names)} tokens", "one for each token"
            )
        offsets = given.get("text_offset")
        if isinstance(offsets, list) and any(
            isinstance(x, int) and isinstance(y, int) and y < x
            for x, y in zip(offsets, offsets[1:], strict=False)
        ):
            self.invalid(
                f"tokens out of order (text offsets {_short(offsets)})", "tokens as they were generated"
            )
        for place, (name, score) in enumerate(zip(names, scores, strict=True)):
            self.tokens.append(self._named(name, score))
            found = (tops or [None] * len(names))[place] or {}
            if not isinstance(found, Mapping):
                self.invalid(f"the top log-probabilities {_short(found)}", "an object by token")
            by_text = [self._named(each, value) for each, value in found.items()]
            if by_text and len(by_text) < self.top and all(each.id is None for each in by_text):
                self.collided += 1
            self.tops.append(by_text)

    def _entry(self, given: Mapping[str, Any]) -> NamedToken:
        name, raw, id = given.get("token"), given.get("bytes"), given.get("id")
        if id is not None and (name is None or isinstance(name, str)):
            # What is asked for every token of every answer, and so is read the shortest way.
            return NamedToken(
                self._id(id), (name or "").encode("utf-8", "surrogatepass"), self._score(given.get("logprob"))
            )
        found = self._named("" if name is None else name, given.get("logprob"))
        if (
            isinstance(raw, list)
            and found.id is None
            and all(type(each) is int and 0 <= each < 256 for each in raw)
        ):
            found = NamedToken(None, bytes(raw), found.score)
        return found

    def _named(self, name: Any, score: Any) -> NamedToken:
        if not isinstance(name, str):
            self.invalid(f"the token {_short(name)}", "its text")
        value = self._score(score)
        if name.startswith(_AS_ID) and name[len(_AS_ID) :].isdigit():
            return NamedToken(self._id(int(name[len(_AS_ID) :])), b"", value)
        return NamedToken(None, name.encode("utf-8", "surrogatepass"), value)

    def _id(self, given: Any) -> int:
        if type(given) is not int or not 0 <= given <= _LAST_ID:
            self.invalid(f"the token id {_short(given)}", "a whole number from 0")
        return int(given)

    def _score(self, given: Any) -> float:
        number = isinstance(given, int | float) and not isinstance(given, bool)
        if not number or given != given or abs(given) == float("inf"):
            self.invalid(
                f"the log-probability {_short(given)} for token {len(self.tokens)}", "a finite number"
            )
        # What a server computed is a float32, of which JSON holds a decimal.
        return float(np.float32(given))

    def tgi(self, event: Mapping[str, Any], now: float) -> None:
        """One event of TGI's ``/generate_stream``."""
        token = event.get("token")
        if not isinstance(token, Mapping):
            self.invalid(f"the event {_short(event)}", "one with a token")
        index = event.get("index")
        if type(index) is int and index != len(self.tokens) + 1:
            self.invalid(f"token {index} after token {len(self.tokens)}", "tokens in their order, each once")
        self._own_token(token, now)
        tops = event.get("top_tokens") or []
        if not isinstance(tops, list) or not all(isinstance(each, Mapping) for each in tops):
            self.invalid(f"the top tokens {_short(tops)}", "a list of tokens")
        self.tops.append([self._own(each) for each in tops])
        if event.get("generated_text") is not None:
            details = event.get("details")
            self.finished = str(details.get("finish_reason")) if isinstance(details, Mapping) else "unknown"

    def _own_token(self, token: Mapping[str, Any], now: float) -> None:
        self.tokens.append(self._own(token))
        self.text.append(str(token.get("text", "")))
        self.came.append(now)

    def _own(self, token: Mapping[str, Any]) -> NamedToken:
        return NamedToken(
            self._id(token.get("id")),
            str(token.get("text", "")).encode("utf-8", "replace"),
            self._score(token.get("logprob")),
        )

    def sglang(self, event: Mapping[str, Any], now: float) -> None:
        """One event of SGLang's ``/generate``, which holds all tokens so far, or those that are new."""
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
        self.counted = counted if type(counted) is int else None
        reason = meta.get("finish_reason")
        if reason is not None:
            self.finished = str(reason.get("type")) if isinstance(reason, Mapping) else str(reason)

    def _triple(self, given: Any) -> NamedToken:
        if not isinstance(given, list) or len(given) < 2:
            self.invalid(f"the log-probability {_short(given)}", "[log-probability, token id, text]")
        text = given[2] if len(given) > 2 and isinstance(given[2], str) else ""
        return NamedToken(self._id(given[1]), text.encode("utf-8", "replace"), self._score(given[0]))

    @property
    def whole_text(self) -> str:
        return "".join(self.text)

    @property
    def misnamed(self) -> int:
        """Tokens that are not the likeliest of their own top list, which greedy tokens are."""
        return sum(
            bool(tops) and max(each.score for each in tops) > token.score
            for token, tops in zip(self.tokens, self.tops, strict=False)
        )

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
        # What a server computed is a float32, of which JSON holds a decimal.
        scores = np.array([token.score for token in self.tokens], np.float32)
        return Generation(np.array(keys, np.int64), scores, top=self._top())

    def _top(self) -> tuple[Any, Any] | None:
        if self.top < 2 or not any(self.tops):
            return None
        ids = np.zeros((len(self.tokens), self.top), np.int64)
        scores = np.full((len(self.tokens), self.top), -np.inf, np.float32)
        for place, tops in enumerate(self.tops):
            best = sorted(
                {each.key: each for each in tops}.values(), key=lambda each: (-each.score, each.key)
            )[: self.top]
            keys = [each.key for each in best]
            # Places that the server left empty have no score and an id that no model has.
            keys += [_LAST_ID - n for n in range(self.top - len(keys))]
            ids[place] = keys
            scores[place, : len(best)] = [each.score for each in best]
        return ids, scores

    def texts(self) -> Iterable[tuple[int, str]]:
        """The text of each token id, as far as the server says it."""
        for token, key in zip(self.tokens, self.ids or [each.key for each in self.tokens], strict=False):
            if token.raw:
                yield key, token.raw.decode("utf-8", "replace")
        for tops in self.tops:
            for token in tops:
                if token.raw:
                    yield token.key, token.raw.decode("utf-8", "replace")


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 80 else text[:80] + "..."


def _count(given: Any) -> str:
    return f"{len(given)} entries" if isinstance(given, list) else "no list"
