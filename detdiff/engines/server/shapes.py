"""OpenAI's answers as types, which check and read an event of a stream in one go: the rest of a token's cost is the network's."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Annotated, Any, Final, NoReturn

import msgspec
from msgspec import Meta, Struct

LAST_ID: Final = 2**31 - 1
"""The highest token id."""
TokenId = Annotated[int, Meta(ge=0, le=LAST_ID)]
Invalid = Callable[[str, str], NoReturn]
"""Called with what was found and what was expected."""
_Spelled = list[Annotated[int, Meta(ge=0, le=255)]] | None
_AS_ID: Final = "token_id:"


class NamedToken(Struct, gc=False):
    """A token as a server names it: by ``id`` where it gives one, its text (``spelled`` in bytes), and its log-probability.

    In the place of the text there may be ``token_id:N``, as vLLM has it where it is asked to.
    """

    logprob: float | None = None
    token: str | None = None
    id: TokenId | None = None
    spelled: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="bytes")
    top_logprobs: list[NamedToken] | None = None

    @property
    def number(self) -> int | None:
        """The id that the server gives, None without one."""
        if self.id is not None or self.token is None or not self.token.startswith(_AS_ID):
            return self.id
        digits = self.token[len(_AS_ID) :]
        known = digits.isascii() and digits.isdigit() and len(digits) <= len(str(LAST_ID))
        return int(digits) if known and int(digits) <= LAST_ID else None

    @property
    def raw(self) -> bytes | None:
        """The text in bytes, None where an id stands in its place."""
        try:
            spelled = msgspec.json.decode(self.spelled, type=_Spelled) if self.spelled else None
        except msgspec.MsgspecError:
            spelled = None
        text = (self.token or "").encode("utf-8", "surrogatepass")
        found = text if spelled is None else bytes(spelled)
        return None if found == text and self.id is None and self.number is not None else found

    @property
    def key(self) -> int:
        """The id, else a number of 31 bits of its bytes."""
        number = self.number
        return zlib.crc32(self.raw or b"") & LAST_ID if number is None else number


class TokenValues(Struct, gc=False):
    """Log-probabilities as chat has them (``content``), or as completions have them (by text)."""

    content: list[NamedToken] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] | None = None


class ChoiceText(Struct, gc=False):
    reasoning_content: str | None = None
    reasoning: str | None = None
    content: str | None = None
    text: str | None = None


class AnswerChoice(ChoiceText, gc=False):
    index: int = 0
    delta: ChoiceText | None = None
    message: ChoiceText | None = None
    logprobs: TokenValues | None = None
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None


class CachedTokens(Struct, gc=False):
    cached_tokens: int | None = None


class Usage(Struct, gc=False):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None


class Timings(Struct, gc=False):
    cache_n: int | None = None


class AnswerEvent(Struct, gc=False):
    """One event of completions or chat, or the whole answer. ``timings`` are llama.cpp's."""

    id: str | int | None = None
    choices: list[AnswerChoice] | None = None
    usage: Usage | None = None
    timings: Timings | None = None


_EVENT: Final = msgspec.json.Decoder(AnswerEvent)


def answer_event(line: bytes, invalid: Invalid) -> AnswerEvent:
    """The event of a line. Calls ``invalid`` for what is none."""
    try:
        return _EVENT.decode(line)
    except msgspec.MsgspecError:
        given = json_object(line, invalid)
    try:
        # Halves of surrogate pairs, which Python writes, are no text.
        return _EVENT.decode(json.dumps(given, ensure_ascii=False).encode("utf-8", "replace"))
    except msgspec.MsgspecError as error:
        text = line.decode("utf-8", "replace")
        invalid(
            f"{text if len(text) <= 80 else text[:80] + '...'!r}",
            f"an answer as OpenAI shapes it ({error})",
        )


def json_object(line: bytes, invalid: Invalid) -> dict[str, Any]:
    """The JSON object of a line. Calls ``invalid`` for what is none."""
    try:
        given = json.loads(
            line, parse_constant=lambda name: invalid(f"the number {name} in an answer", "a finite number")
        )
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        text = line[:200].decode("utf-8", "replace")
        invalid(f"the line {text!r} in a stream", "a JSON object")
    return given
