"""Answers in the shapes of OpenAI's API: text piece by piece, stop strings, log-probabilities, token ids as vLLM gives them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from detdiff.engines.live import LiveToken

from .reading import ApiRequest

Decode = Callable[[Sequence[int], bool], str]
"""The text of token ids, with special tokens or without."""

_WINDOW: Final = 24
_BEFORE: Final = 6
_UNFINISHED: Final = "\ufffd"


class TextPieces:
    """The text of an answer, token by token: a character that is not whole yet waits for the rest of its bytes.

    The last tokens of the prompt stand before it, so that what a tokenizer does at the beginning of a text is not done to it.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._decode, self._ids = decode, list(prompt[-_BEFORE:])
        self._said = decode(self._ids, False)

    def add(self, tokens: Sequence[int]) -> str:
        """What these tokens add to the text."""
        self._ids += tokens
        whole = self._decode(self._ids, False)
        if whole.endswith(_UNFINISHED):
            return ""
        piece = whole[len(self._said) :]
        self._said = whole
        if len(self._ids) > _WINDOW:
            self._ids = self._ids[-_BEFORE:]
            self._said = self._decode(self._ids, False)
        return piece

    def rest(self) -> str:
        """What is left at the end: bytes that never became a character."""
        return self._decode(self._ids, False)[len(self._said) :]


class StopStrings:
    """Holds back text that may be the beginning of a stop string, and cuts the text before the first that is whole."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """What may be said after ``piece``; nothing once a stop string was found."""
        if not self._stops:
            return piece
        text = self._held + piece
        places = [(text.find(stop), stop) for stop in self._stops]
        found = min((each for each in places if each[0] >= 0), default=None)
        if found is not None:
            self.found, self._held = found[1], ""
            return text[: found[0]]
        longest = max(
            (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]

    def rest(self) -> str:
        """What was held back where the text ended otherwise."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True)
class AnswerPiece:
    """Tokens of an answer, what they add to its text, and why it ended (None: it goes on)."""

    tokens: tuple[LiveToken, ...]
    text: str
    finished: str | None = None


@dataclass
class AnswerShape:
    """One answer's objects. ``name`` is its id, ``model`` and ``fingerprint`` what served it, ``created`` in seconds since
    1970, ``prompt`` the prompt's token ids and ``cached`` how many of them came from a cache."""

    asked: ApiRequest
    name: str
    model: str
    fingerprint: str
    created: int
    prompt: Sequence[int]
    decode: Decode
    cached: int = 0
    said: int = 0
    count: int = 0
    texts: dict[int, str] = field(default_factory=dict)

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": self.count,
            "total_tokens": len(self.prompt) + self.count,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def whole(self, piece: AnswerPiece) -> dict[str, Any]:
        """The answer that is not streamed."""
        asked, choice = self.asked, self._choice(piece)
        if asked.chat:
            choice["message"] = {"role": "assistant", "content": piece.text}
        else:
            choice["text"] = piece.text
        found = self._object("chat.completion" if asked.chat else "text_completion", [choice])
        if asked.ids:
            (found if asked.chat else choice)["prompt_token_ids"] = list(self.prompt)
        return {**found, "usage": self.usage()}

    def first(self) -> dict[str, Any] | None:
        """What a stream begins with, before any token; None where there is nothing to say."""
        if not (self.asked.chat or self.asked.ids):
            return None
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
        if self.asked.chat:
            choice["delta"] = {"role": "assistant", "content": ""}
        else:
            choice["text"] = ""
        found = self._object(self._streamed(), [choice])
        if self.asked.ids:
            (found if self.asked.chat else choice)["prompt_token_ids"] = list(self.prompt)
        return found

    def event(self, piece: AnswerPiece) -> dict[str, Any]:
        """One event of a stream."""
        choice = self._choice(piece)
        if self.asked.chat:
            choice["delta"] = {"content": piece.text} if piece.text or piece.tokens else {}
        else:
            choice["text"] = piece.text
        return self._object(self._streamed(), [choice])

    def last(self) -> dict[str, Any] | None:
        """The event that holds the usage, where it was asked for."""
        if not self.asked.usage_in_stream:
            return None
        return {**self._object(self._streamed(), []), "usage": self.usage()}

    def _streamed(self) -> str:
        return "chat.completion.chunk" if self.asked.chat else "text_completion"

    def _object(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def _choice(self, piece: AnswerPiece) -> dict[str, Any]:
        self.count += len(piece.tokens)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": piece.finished}
        if self.asked.ids:
            choice["token_ids"] = [each.token for each in piece.tokens]
        if self.asked.top is not None and piece.tokens:
            scored = self._chat_scores if self.asked.chat else self._completion_scores
            choice["logprobs"] = scored(piece.tokens)
        return choice

    def _chat_scores(self, tokens: Sequence[LiveToken]) -> dict[str, Any]:
        content = []
        for each in tokens:
            assert each.scores is not None
            entry = self._entry(each.token, each.scores.chosen)
            entry["top_logprobs"] = [self._entry(*likely) for likely in each.scores.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, score: float) -> dict[str, Any]:
        raw = list(self._text(token).encode("utf-8", "replace"))
        return {"token": self._name(token), "logprob": score, "bytes": raw}

    def _completion_scores(self, tokens: Sequence[LiveToken]) -> dict[str, Any]:
        scores = [each.scores for each in tokens if each.scores is not None]
        offsets = []
        for each in tokens:
            offsets.append(self.said)
            self.said += len(self._text(each.token))
        # As vLLM does it, the chosen token is among the named ones whatever its place.
        tops = [
            {self._name(id): score for id, score in (*found.top, (each.token, found.chosen))}
            for each, found in zip(tokens, scores, strict=True)
        ]
        return {
            "tokens": [self._name(each.token) for each in tokens],
            "token_logprobs": [each.chosen for each in scores],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.asked.by_id else self._text(token)

    def _text(self, token: int) -> str:
        found = self.texts.get(token)
        if found is None:
            found = self.texts[token] = self.decode([token], True)
        return found


def sent(event: Mapping[str, Any]) -> bytes:
    """An event of a stream as it goes over the wire."""
    return b"data: " + dumped(event) + b"\n\n"


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "replace"
    )
