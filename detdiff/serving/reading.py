"""What a client asks in OpenAI's completions and chat API, read to the last key: what cannot be done is refused, never left out."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from detdiff.errors import DetdiffError
from detdiff.scenario import Sampling
from detdiff.scenario.keys import SETTING_KEYS, check_utf8, typed

MOST_TOP: Final = 20
"""Likeliest tokens that can be asked for, as in OpenAI's chat API."""
MOST_STOPS: Final = 16
_LONGEST_STOP: Final = 1000
_LARGEST: Final = 2**31 - 1

_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (True, False),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "prompt_logprobs": (),
}
"""The values at which keys of the API change nothing; at others they are refused, unless a scenario has the key."""
_SAYS_NOTHING: Final = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")
"""Keys that name who asks, and change no answer."""


class ApiRefused(Exception):
    """A request that is not run: an HTTP ``status``, a paragraph, and the key of the body that it is about."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str = "") -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def to_json(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code or None}
        return {"error": error}


def stopping() -> ApiRefused:
    """What a server that ends says to who comes."""
    return ApiRefused("The server is stopping; expected one that runs on. Ask again later.", status=503)


@dataclass(frozen=True)
class ApiRequest:
    """A request of either API. ``prompt`` is text or token ids, ``messages`` those of a chat; one of them is there.

    ``uncached`` asks for a prompt that is not taken from a cache, as llama.cpp's ``cache_prompt: false`` does. ``top`` is None where no log-probabilities are asked for, 0 for those of the chosen tokens alone. ``max_tokens`` None is
    as many as fit. ``ids`` says whether token ids come with the answer, ``by_id`` whether log-probabilities name tokens by
    them.
    """

    chat: bool
    prompt: str | tuple[int, ...] | None
    messages: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...] = ()
    ignore_stop: bool = False
    top: int | None = None
    stream: bool = False
    usage_in_stream: bool = False
    ids: bool = False
    by_id: bool = False
    uncached: bool = False

    @classmethod
    def read(cls, body: Any, chat: bool, model: str) -> ApiRequest:
        """From the JSON of a body; ``model`` is the one that is served. Raises ApiRefused, and ScenarioRangeError for text that
        is no Unicode."""
        if not isinstance(body, Mapping):
            raise ApiRefused(f"The body is {_shown(body)}; expected a JSON object. Send one.")
        keys = _Keys({name: value for name, value in body.items() if value is not None})
        named = keys.text("model")
        if named is not None and named != model:
            raise ApiRefused(
                f"There is no model {named!r} here; expected {model!r}, the one that is served. Name it, or leave model out.",
                status=404,
                param="model",
                code="model_not_found",
            )
        prompt, messages = (None, _messages(keys)) if chat else (_prompt(keys), ())
        longest = keys.whole("max_tokens", 1, _LARGEST)
        if chat:
            longest = keys.whole("max_completion_tokens", 1, _LARGEST) or longest
        found = cls(
            chat=chat,
            prompt=prompt,
            messages=messages,
            max_tokens=longest,
            sampling=_sampling(keys),
            stops=_stops(keys),
            ignore_stop=keys.truth("ignore_eos"),
            top=_chat_top(keys) if chat else keys.whole("logprobs", 0, MOST_TOP),
            stream=keys.truth("stream"),
            usage_in_stream=_usage(keys),
            ids=keys.truth("return_token_ids"),
            by_id=keys.truth("return_tokens_as_token_ids"),
            uncached="cache_prompt" in keys.names() and not keys.truth("cache_prompt"),
        )
        keys.refuse_rest()
        return found


class _Keys:
    """The keys of a body, each of which is taken once or refused in the end."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    def take(self, name: str) -> Any:
        return self._given.pop(name, None)

    def names(self) -> Sequence[str]:
        return tuple(self._given)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise _wrong(name, value, "a string")
        return value

    def truth(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool | None):
            raise _wrong(name, value, "true or false")
        return bool(value)

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is not None and not (type(value) is int and low <= value <= high):
            raise _wrong(name, value, f"a whole number from {low} to {high}")
        return value

    def refuse_rest(self) -> None:
        """Raises ApiRefused for a key that is left and does not say what would be done without it."""
        for name, value in self._given.items():
            if name in _SAYS_NOTHING or any(value == each for each in _NEUTRAL.get(name, ())):
                continue
            neutral = [str(each) for each in _NEUTRAL.get(name, ())]
            advice = f"Leave it out{f', or say {neutral[0]}' if neutral else ''}."
            what = "is not done here" if name in _NEUTRAL else "is no key that is known here"
            raise ApiRefused(
                f"{name} is {_shown(value)}, and {what}: the answer would be another one than what was asked for. Expected "
                f"keys that this server follows. {advice}",
                param=name,
            )


def _wrong(name: str, value: Any, expected: str) -> ApiRefused:
    return ApiRefused(
        f"{name} is {_shown(value)}; expected {expected}. Correct it, or leave it out.", param=name
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _prompt(keys: _Keys) -> str | tuple[int, ...]:
    value = keys.take("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        check_utf8("prompt", value)
        return value
    if (
        isinstance(value, list)
        and value
        and all(type(each) is int and 0 <= each <= _LARGEST for each in value)
    ):
        return tuple(value)
    if isinstance(value, list) and len(value) > 1 and all(isinstance(each, str | list) for each in value):
        raise ApiRefused(
            f"prompt holds {len(value)} prompts; expected one, as text or as token ids. Send a request for each: requests that "
            "are there together run together.",
            param="prompt",
        )
    raise _wrong("prompt", value, "some text, or a list of token ids")


def _messages(keys: _Keys) -> tuple[Mapping[str, Any], ...]:
    value = keys.take("messages")
    if not isinstance(value, list) or not value:
        raise _wrong("messages", value, "a list of messages, each with role and content")
    return tuple(_message(place, each) for place, each in enumerate(value))


def _message(place: int, given: Any) -> Mapping[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise _wrong(where, given, "an object with a role and a content")
    content = given.get("content")
    if isinstance(content, list):
        parts = [
            each.get("text") if isinstance(each, Mapping) and each.get("type") == "text" else None
            for each in content
        ]
        if not all(isinstance(each, str) for each in parts):
            raise _wrong(f"{where}.content", content, "text, or a list of parts of type text")
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise _wrong(f"{where}.content", content, "text")
    rest = {key for key, value in given.items() if value is not None and value != []} - {
        "role",
        "content",
        "name",
    }
    if rest:
        raise ApiRefused(
            f"{where} has {', '.join(sorted(map(str, rest)))}; expected role, content and name alone. Leave it out.",
            param="messages",
        )
    kept = {key: given[key] for key in ("role", "name") if given.get(key) is not None}
    check_utf8(f"{where}.content", content)
    return {**kept, "content": content}


def _sampling(keys: _Keys) -> Sampling:
    """As a scenario's request settings, whose names those of the API are. Temperature 0 unless one is asked for; a request that
    draws without a seed gets one of its own."""
    own = {name: key for name, key in SETTING_KEYS.items() if key.part == "sampling"}
    given = {name: keys.take(name) for name in own if name in keys.names()}
    given = {name: value for name, value in given.items() if value not in _NEUTRAL.get(name, ())}
    if given.get("temperature") and "seed" not in given:
        given["seed"] = secrets.randbits(53)
    try:
        values = typed(given, own)
        return Sampling(**{own[name].attribute: value for name, value in values.items()})
    except DetdiffError as error:
        name = next((name for name in given if str(error).startswith(name)), None)
        raise ApiRefused(f"{str(error)[:1].upper()}{str(error)[1:]}", param=name) from None


def _stops(keys: _Keys) -> tuple[str, ...]:
    value = keys.take("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    good = isinstance(stops, list) and all(
        isinstance(each, str) and 0 < len(each) <= _LONGEST_STOP for each in stops
    )
    if not good or len(stops) > MOST_STOPS:
        raise _wrong("stop", value, f"a string that is not empty, or at most {MOST_STOPS} of them")
    return tuple(stops)


def _chat_top(keys: _Keys) -> int | None:
    asked, top = keys.truth("logprobs"), keys.whole("top_logprobs", 0, MOST_TOP)
    if top is not None and not asked:
        raise ApiRefused(
            f"top_logprobs is {top} without logprobs; expected logprobs to be true. Say it, or leave top_logprobs out.",
            param="top_logprobs",
        )
    return (top or 0) if asked else None


def _usage(keys: _Keys) -> bool:
    value = keys.take("stream_options")
    if value is None:
        return False
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    if (
        not isinstance(value, Mapping)
        or not value.keys() <= known
        or not all(isinstance(each, bool) for each in value.values())
    ):
        raise _wrong("stream_options", value, "an object with include_usage")
    if value.get("continuous_usage_stats"):
        raise _wrong("stream_options.continuous_usage_stats", True, "false: usage comes with the last event")
    return bool(value.get("include_usage"))
