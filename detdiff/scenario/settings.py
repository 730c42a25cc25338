"""What a scenario is made of: frozen dataclasses that check themselves when they are made.

An object that exists can be run, as far as that can be known without the model and the kernel library.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeGuard

from detdiff.errors import PromptAmbiguous, PromptMissing, ScenarioConflict, ScenarioRangeError
from detdiff.scenario.keys import check_utf8, nearest
from detdiff.scenario.sampling import Sampling

NATIVE = "native"
SCHEDULES = ("serial", "static", "continuous")
LAYOUTS = ("padded", "packed")
LEVELS = ("digest", "full", "window")
DIGESTS = ("auto", "host", "device")
TURNS = ("kept", "reloaded", "fresh")
GENERATE, SCORE, EMBED = "generate", "score", "embed"
TASKS = (GENERATE, SCORE, EMBED)
POOLINGS = ("mean", "first", "last")
PHASES = ("any", "prefill", "decode", "mixed", "draft", "verify")
KV_BITS, KV_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)  # what MLX can quantise to
INT32_MAX = 2**31 - 1  # positions, token ids and forwards are 32-bit in a trace


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises ScenarioRangeError for a value that is none of ``choices``."""
    if value not in choices:
        raise ScenarioRangeError(f"{name} is {value!r}; {nearest(value, choices)}")


def _between(name: str, value: int | None, low: int, high: int = INT32_MAX) -> None:
    if value is not None and not low <= value <= high:
        bound = f"{low} or more" if value < low else f"{high} or less"
        raise ScenarioRangeError(f"{name} is {value}; it must be {bound}.")


def check_text(name: str, value: str) -> None:
    """Raises ScenarioRangeError when ``value`` is empty or not valid Unicode."""
    if not value:
        raise ScenarioRangeError(f"{name} is empty; give it a value or leave it out.")
    check_utf8(name, value)


def check_name(name: str, value: str) -> None:
    """Raises ScenarioRangeError when ``value`` cannot stand in one line of a report or of a log."""
    check_text(name, value)
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in value):
        raise ScenarioRangeError(f"{name} {value!r} has control characters; use printable ones.")


@dataclass(frozen=True)
class Turn:
    """What a request goes on from: the conversation of the request ``after`` which it comes, without its newest ``rewind``
    tokens. ``anew``: from nothing, in the same slot.

    Raises ScenarioRangeError, and ScenarioConflict for ``rewind`` with ``anew``.
    """

    after: str
    rewind: int = 0
    anew: bool = False

    def __post_init__(self) -> None:
        check_name("after", self.after)
        _between("rewind", self.rewind, 0)
        if self.rewind and self.anew:
            raise ScenarioConflict(
                f"rewind is {self.rewind} and anew is true, which leaves no token to take back; remove one of them."
            )


@dataclass(frozen=True)
class Request:
    """One prompt, as text or as token ids, and how it is continued. ``arrival`` counts forwards of the run; ``cancel`` is
    after how many tokens the request is cancelled. A ``turn`` goes on from an earlier request.

    ``messages`` go through the model's chat template, as text does with ``chat``; ``chat_template_args`` are what the template
    is given beside. ``stop`` are texts at whose tokens generation ends.
    Where a run scores, ``continuation`` is text whose tokens are scored after the prompt's; without one the tokens from position
    ``score_from`` on are (nothing comes before the first).

    Raises PromptMissing, PromptAmbiguous, ScenarioConflict (``chat`` with token ids) and ScenarioRangeError.
    """

    id: str
    prompt: str | None = None
    tokens: tuple[int, ...] | None = None
    chat: bool = False
    max_tokens: int = 64
    arrival: int = 0
    ignore_stop: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    cancel: int | None = None
    turn: Turn | None = None
    use_adapter: bool = True
    # Dictionaries have no hash.
    messages: tuple[Mapping[str, Any], ...] | None = field(default=None, hash=False)
    chat_template_args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    stop: tuple[str, ...] = ()
    continuation: str | None = None
    score_from: int = 1

    def __post_init__(self) -> None:
        check_name("id", self.id)
        given = [name for name in ("prompt", "tokens", "messages") if getattr(self, name) is not None]
        if not given:
            raise PromptMissing("there is neither prompt nor tokens nor messages; give one of them.")
        if len(given) > 1:
            raise PromptAmbiguous(f"there are both {given[0]} and {given[1]}; keep one of them.")
        if not getattr(self, given[0]):
            name = given[0]
            raise PromptMissing(
                f"{name} is empty, and a model needs one token at least; give it some text or token ids."
            )
        if self.prompt is not None:
            check_utf8("prompt", self.prompt)
        for token in self.tokens or ():
            _between("a token id", token, 0)
        if self.chat and self.tokens is not None:
            raise ScenarioConflict(
                "chat needs a prompt that is text; remove chat, or put the template's tokens in tokens."
            )
        for place, message in enumerate(self.messages or (), 1):
            if not isinstance(message.get("role"), str):
                raise ScenarioRangeError(
                    f"message {place} has no role that is text; give it one, such as user."
                )
        if self.chat_template_args and not (self.chat or self.messages):
            raise ScenarioConflict(
                "chat_template_args are for a chat template, and there is neither chat nor messages; add one of them, or remove "
                "chat_template_args."
            )
        if self.messages and self.turn is not None:
            raise ScenarioConflict(
                "messages are a whole chat, and this is a later turn of one; give what is said in it as prompt."
            )
        for text in self.stop:
            check_text("an entry of stop", text)
        if self.continuation is not None:
            check_text("continuation", self.continuation)
            if self.prompt is None or self.chat or self.score_from != 1:
                raise ScenarioConflict(
                    "there is a continuation, which follows a prompt that is text, outside a chat template and without score_from; "
                    "remove one of them, or give tokens and score_from."
                )
        _between("score_from", self.score_from, 1)
        _between("max_tokens", self.max_tokens, 1)
        _between("arrival", self.arrival, 0)
        _between("cancel", self.cancel, 1)


def are_messages(given: object) -> TypeGuard[list[dict[str, Any]]]:
    """Whether ``given`` is a list of messages with role and content."""
    return (
        isinstance(given, list)
        and bool(given)
        and all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in given)
    )


def prompt_messages(prompt: str) -> list[dict[str, Any]] | None:
    """The messages of a chat prompt that is JSON of a list of them, as a file of prompts has it; None where it is text."""
    if not prompt.lstrip().startswith("["):
        return None
    try:
        found = json.loads(prompt)
    except (ValueError, RecursionError):
        return None
    return found if are_messages(found) else None


@dataclass(frozen=True)
class Schedule:
    """What decides the rows of each forward. ``active`` and ``row_budget`` None: no limit.

    Raises ScenarioRangeError, and ScenarioConflict for a limit that the schedule or layout has no use for.
    """

    kind: Literal["serial", "static", "continuous"] = "serial"
    layout: Literal["padded", "packed"] = "padded"
    active: int | None = None
    row_budget: int | None = None
    prefill_chunk: int = 2048

    def __post_init__(self) -> None:
        one_of("schedule", self.kind, SCHEDULES)
        one_of("layout", self.layout, LAYOUTS)
        _between("active", self.active, 1)
        _between("row_budget", self.row_budget, 1)
        _between("prefill_chunk", self.prefill_chunk, 1)
        if self.kind == "serial" and self.active not in (None, 1):
            raise ScenarioConflict(
                f"active is {self.active} and schedule is serial, which runs one request at a time; "
                "remove active, or use schedule continuous."
            )
        if self.row_budget is not None and self.layout == "padded":
            raise ScenarioConflict(
                f"row_budget is {self.row_budget} and layout is padded, which has no budget of rows; "
                "remove row_budget, or use layout packed."
            )


@lru_cache(maxsize=256)
def _bounds(name: str, text: str) -> tuple[int, int | None]:
    match = re.fullmatch(r"([0-9]{1,9})(\.\.([0-9]{1,9})?)?", text, re.ASCII)
    if match is None:
        raise ScenarioRangeError(f"{name} is {text!r}; it must be like '4', '2..8' or '9..'.")
    first, dots, last = match.groups()
    low, high = int(first), int(last) if last else None if dots else int(first)
    if low < 1 or (high is not None and high < low):
        raise ScenarioRangeError(
            f"{name} is {text!r}, which no call can have; count from 1, smaller end first."
        )
    return low, high


@dataclass(frozen=True)
class PathRule:
    """Calls at a site that matches ``site`` (fnmatch), of a phase and of a size in range take ``path``, where its kind
    of operation can.

    ``rows`` and ``second_last`` are ``"4"``, ``"2..8"`` or ``"9.."``. Two rows are [1, 2, K] when packed and
    [2, 1, K] when padded; ``second_last`` is the second-to-last dimension, by which some backends choose, and
    tells them apart. ``path`` is ``native``, ``rows``, ``pad:N``, ``tile:N`` (calls of N rows each, the last one filled
    up, on the path that N rows have without rules), ``cut:N`` (the same of all whole N rows, and what is left as a call of so many
    rows), ``keys`` (attention: each row as a call of its own, over the keys that it sees)
    or a reference kernel. Raises ScenarioRangeError.
    """

    site: str = "*"
    phase: Literal["any", "prefill", "decode", "mixed", "draft", "verify"] = "any"
    rows: str = "1.."
    path: str = NATIVE
    second_last: str = "1.."

    def __post_init__(self) -> None:
        check_text("site", self.site)
        one_of("phase", self.phase, PHASES)
        _bounds("rows", self.rows)
        _bounds("second_last", self.second_last)
        if not re.fullmatch(
            r"native|rows|keys|(?:pad|tile|cut):[1-9][0-9]{0,8}|[\w.-]+/[\w.-]+", self.path, re.ASCII
        ):
            raise ScenarioRangeError(
                f"path is {self.path!r}; it must be native, rows, pad:N, tile:N or cut:N with N of 1 or more, keys, or a reference "
                "kernel such as candle-metal/mv."
            )

    def holds(self, rows: int, second_last: int | None = None) -> bool:
        """Whether a call of ``rows`` rows, whose input has this second-to-last dimension, is in range.

        Raises ValueError when the rule asks about the second-to-last dimension and it is not given.
        """
        low, high = _bounds("rows", self.rows)
        if not low <= rows <= (rows if high is None else high):
            return False
        if self.second_last == "1..":
            return True
        if second_last is None:
            raise ValueError(f"the rule asks for second_last {self.second_last}, and it is not given")
        low, high = _bounds("second_last", self.second_last)
        return low <= second_last <= (second_last if high is None else high)


@dataclass(frozen=True)
class KernelPlan:
    """What computes each site: own rules first, then "at most ``split_rows`` rows go row by row", then the
    profile, by name or file and with its parameters.

    The profile ``native`` is none. Whether another one exists is for the kernel library to say.
    Raises ScenarioRangeError.
    """

    profile: str | None = None
    split_rows: int | None = None
    rules: tuple[PathRule, ...] = ()

    def __post_init__(self) -> None:
        if self.profile == NATIVE:
            object.__setattr__(self, "profile", None)
        if self.profile is not None:
            check_name("kernels", self.profile)
        _between("split_rows", self.split_rows, 1)


@dataclass(frozen=True)
class Speculation:
    """``draft`` proposes ``drafts`` tokens at a time, fewer near a request's end, and the model verifies them in one
    forward.

    ``draft`` is named as a model is. Raises ScenarioRangeError.
    """

    draft: str
    drafts: int = 4

    def __post_init__(self) -> None:
        check_name("draft", self.draft)
        _between("drafts", self.drafts, 1)


@dataclass(frozen=True)
class CachePlan:
    """How keys and values are kept. None and False: plain, contiguous, each request its own.

    ``kv_bits``, ``kv_group_size`` and ``kv_start`` (from which position on) are mlx-lm's quantised cache;
    ``reuse_tokens`` is how much of a prompt its ``prompt_cache`` holds beforehand, as a forward of its own. Packed:
    ``max_kv_size`` is how many positions mlx-lm's rotating cache keeps. ``page_tokens`` is the size of a page, and ``share_prefix`` lets
    a request take what an earlier prompt began with.
    ``turns`` says what a later turn finds: the cache of the one before, ``kept`` or ``reloaded`` from a file, or nothing.
    Raises ScenarioRangeError, and ScenarioConflict for a part of the quantised cache without ``kv_bits``.
    """

    kv_bits: int | None = None
    kv_group_size: int = 64
    kv_start: int = 0
    page_tokens: int | None = None
    share_prefix: bool = False
    reuse_tokens: int | None = None
    turns: Literal["kept", "reloaded", "fresh"] = "kept"
    max_kv_size: int | None = None

    def __post_init__(self) -> None:
        if self.kv_bits is not None and self.kv_bits not in KV_BITS:
            raise ScenarioRangeError(f"kv_bits is {self.kv_bits}; it must be one of {_listed(KV_BITS)}.")
        if self.kv_group_size not in KV_GROUPS:
            raise ScenarioRangeError(
                f"kv_group_size is {self.kv_group_size}; it must be one of {_listed(KV_GROUPS)}."
            )
        _between("kv_start", self.kv_start, 0)
        one_of("turns", self.turns, TURNS)
        _between("page_tokens", self.page_tokens, 1)
        _between("reuse_tokens", self.reuse_tokens, 1)
        # mlx-lm keeps the first four positions for good.
        _between("max_kv_size", self.max_kv_size, 5)
        if self.kv_bits is None and (self.kv_group_size, self.kv_start) != (64, 0):
            raise ScenarioConflict(
                "kv_group_size and kv_start are of a quantised cache, and there is no kv_bits; add kv_bits, or "
                "remove them."
            )


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"


@dataclass(frozen=True)
class Capture:
    """What a run writes. ``requests``, ``positions`` (inclusive), ``sites`` (fnmatch) bound a window; empty:
    all.

    Raises ScenarioRangeError, and ScenarioConflict for a window's bounds at another level.
    """

    level: Literal["digest", "full", "window"] = "digest"
    lens: bool = False
    top: int = 8
    requests: tuple[str, ...] = ()
    positions: tuple[int, int] | None = None
    sites: tuple[str, ...] = ()
    digest: Literal["auto", "host", "device"] = "auto"
    memory_mb: int = 256

    def __post_init__(self) -> None:
        one_of("capture", self.level, LEVELS)
        one_of("digest", self.digest, DIGESTS)
        # A margin needs two logits.
        _between("top", self.top, 2)
        _between("memory_mb", self.memory_mb, 1)
        if self.positions is not None and not 0 <= self.positions[0] <= self.positions[1] <= INT32_MAX:
            raise ScenarioRangeError(
                f"window_positions is {list(self.positions)}; it must be [first, last], counted from 0."
            )
        for name, values in (("window_requests", self.requests), ("window_sites", self.sites)):
            for value in values:
                check_text(f"an entry of {name}", value)
        if self.level != "window" and (self.requests or self.positions is not None or self.sites):
            raise ScenarioConflict(
                "window_requests, window_positions and window_sites need capture window, and capture is "
                f"{self.level}; change it, or remove them."
            )
