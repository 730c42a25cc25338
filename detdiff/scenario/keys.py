"""The keys of a scenario: one table for files, flags, dictionaries, changes and the page that lists them."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from detdiff.errors import ScenarioFlagError, ScenarioKeyUnknown, ScenarioRangeError, ScenarioTypeError


@dataclass(frozen=True)
class Kind:
    """A type that a key can take: how to say it, how to check it, how to read it from text.

    ``check`` gives the value in its one stored form, or None where it is of another type. ``read`` gives a
    value for ``check`` and may raise ValueError.
    """

    name: str
    check: Callable[[Any], Any]
    read: Callable[[str], Any]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tuple_of(test: Callable[[Any], bool]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        return tuple(value) if isinstance(value, (list, tuple)) and all(map(test, value)) else None

    return check


def _number(value: Any) -> float | None:
    # `+ 0.0` turns -0.0 into 0.0: one stored form for one meaning.
    return float(value) + 0.0 if _is_int(value) or isinstance(value, float) else None


def _read_truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _read_ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _read_token_lists(text: str) -> list[list[int]]:
    return [_read_ints(part) for part in text.split(";")]


def _read_pair(text: str) -> list[int]:
    return [int(part) for part in text.split(".." if ".." in text else ",")]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _json_value(value: Any) -> Any:
    """A copy, which what was given cannot change; TOML has no null, so that None is none."""
    try:
        copied = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None
    return None if _has_null(copied) else copied


def _has_null(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_null, inner))


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _engine(value: Any) -> Any:
    if isinstance(value, str):
        return value
    copied = _json_value(dict(value)) if isinstance(value, Mapping) else None
    return copied if copied is not None and isinstance(copied.get("name", ""), str) else None


_ints = _tuple_of(_is_int)

TEXT = Kind("a string", lambda v: v if _is_text(v) else None, str)
INT = Kind("an integer", lambda v: v if _is_int(v) else None, int)
NUMBER = Kind("a number", _number, float)
TRUTH = Kind("true or false", lambda v: v if isinstance(v, bool) else None, _read_truth)
TEXTS = Kind("a list of strings", _tuple_of(_is_text), lambda text: text.split(","))
INTS = Kind("a list of integers", _ints, _read_ints)
TOKEN_LISTS = Kind("lists of token ids", _tuple_of(lambda v: _ints(v) is not None), _read_token_lists)
RANGE = Kind(
    "a pair of integers", lambda v: p if (p := _ints(v)) is not None and len(p) == 2 else None, _read_pair
)
ENGINE = Kind("an engine's name, or a table with a name and its settings", _engine, str)
JSON = Kind("a JSON value without null, NaN and infinity", _json_value, _read_json)
TABLES = Kind("a list of tables", _tuple_of(lambda v: isinstance(v, Mapping)), str)


@dataclass(frozen=True)
class Key:
    """One key: its type, the field of a Scenario, Request or PathRule that it sets, and what its page says of it.

    ``value`` and ``default`` are Markdown. ``useless`` are the changes of another key that leave this one without a use
    (None: that key is taken back). ``sparse`` keys are written only where they are not at their default. ``file`` is what
    a relative path in it is: "model", "profile" or "trace".
    """

    name: str
    kind: Kind
    field: str
    value: str = ""
    default: str = ""
    useless: tuple[tuple[str, Any], ...] = ()
    sparse: bool = False
    file: str = ""

    @property
    def part(self) -> str:
        """The part of the whole that holds the field, such as schedule; "" for a field of the whole itself."""
        return self.field.rpartition(".")[0]

    @property
    def attribute(self) -> str:
        """The field's own name."""
        return self.field.rpartition(".")[2]


_PADDED = (("layout", "padded"),)
_NO_WINDOW = (("capture", "digest"), ("capture", "full"))

TABLE: Mapping[str, tuple[Key, ...]] = {
    "Model": (
        Key(
            "model",
            TEXT,
            "model",
            '`"builtin"`, a directory that mlx-lm can load, or a hub id',
            "required",
            file="model",
        ),
    ),
    "Engine": (
        Key(
            "engine",
            ENGINE,
            "engine",
            "what runs the requests: `mlx`, `transformers`, the name of an installed engine, or a factory of your own as "
            "`package.module:factory`; as a table, `name` and free keys, which the engine is given",
            "`mlx`",
        ),
    ),
    "Schedule": (
        Key(
            "schedule",
            TEXT,
            "schedule.kind",
            "`serial`: one request after the other. `static`: all at once. `continuous`: each at its arrival",
            "`serial`",
        ),
        Key(
            "layout",
            TEXT,
            "schedule.layout",
            "`padded`: batch × length, as mlx-lm does. `packed`: all rows of all requests on one axis",
            "`padded`",
        ),
        Key(
            "active",
            INT,
            "schedule.active",
            "how many requests may run at a time; for `continuous`",
            "no limit",
            (("schedule", "serial"), ("schedule", "static")),
        ),
        Key(
            "row_budget",
            INT,
            "schedule.row_budget",
            "how many rows a forward may have; for `packed`",
            "no limit",
            _PADDED,
        ),
        Key(
            "prefill_chunk",
            INT,
            "schedule.prefill_chunk",
            "how many prompt tokens of one request a forward takes at most",
            "2048",
        ),
    ),
    "Speculation": (
        Key(
            "draft",
            TEXT,
            "speculation.draft",
            'the draft model, named as `model` is: `"builtin-draft"`, a directory, or a hub id',
            "off",
            file="model",
        ),
        Key(
            "drafts",
            INT,
            "speculation.drafts",
            "how many tokens it proposes at a time; near a request's end, no more than are left",
            "4",
            (("draft", None),),
        ),
    ),
    "Teacher forcing": (
        Key(
            "force_tokens",
            TEXT,
            "force_tokens",
            "the directory of a trace; a request is fed the tokens that it generated there under the same id, whatever it would choose here",
            "off",
            file="trace",
        ),
    ),
    "Cache": (
        Key(
            "kv_bits",
            INT,
            "cache.kv_bits",
            "mlx-lm's quantised cache: 2, 3, 4, 5, 6 or 8 bits; for `padded` and `serial`",
            "off",
            sparse=True,
        ),
        Key(
            "kv_group_size",
            INT,
            "cache.kv_group_size",
            "how many values share a scale: 32, 64 or 128; with `kv_bits`",
            "64",
            (("kv_bits", None),),
            sparse=True,
        ),
        Key(
            "kv_start",
            INT,
            "cache.kv_start",
            "the position from which on the cache is quantised; with `kv_bits`",
            "0",
            (("kv_bits", None),),
            sparse=True,
        ),
        Key(
            "page_tokens",
            INT,
            "cache.page_tokens",
            "a paged cache, and how many positions a page has; for `packed`",
            "contiguous",
            _PADDED,
            sparse=True,
        ),
        Key(
            "share_prefix",
            TRUTH,
            "cache.share_prefix",
            "a request takes over the keys and values of what an earlier prompt began with, in whole pages if it is paged; for `packed`",
            "false",
            _PADDED,
            sparse=True,
        ),
        Key(
            "reuse_tokens",
            INT,
            "cache.reuse_tokens",
            "so many tokens of a prompt are in mlx-lm's `prompt_cache` beforehand, from a forward of their own; for `padded` and `serial`",
            "off",
            (("schedule", "static"), ("schedule", "continuous"), ("layout", "packed")),
            sparse=True,
        ),
    ),
    "Kernel plan": (
        Key(
            "kernels",
            TEXT,
            "kernels.profile",
            "a dispatch profile, or `native`",
            "`native`: the backend's own choice",
            file="profile",
        ),
        Key(
            "split_rows",
            INT,
            "kernels.split_rows",
            "linear calls of at most so many rows go row by row",
            "off",
        ),
    ),
    "Capture": (
        Key(
            "capture",
            TEXT,
            "capture.level",
            "`digest`: a 64-bit digest of each row at each site. `full`: the values too. `window`: the values inside a window",
            "`digest`",
        ),
        Key("lens", TRUTH, "capture.lens", "also the logits that each layer's output gives", "false"),
        Key("top", INT, "capture.top", "how many of the largest logits are kept for each token, from 2", "8"),
        Key(
            "window_requests",
            TEXTS,
            "capture.requests",
            "ids of the requests in the window",
            "all",
            _NO_WINDOW,
        ),
        Key(
            "window_positions",
            RANGE,
            "capture.positions",
            "first and last position in the window, such as `[120, 130]`",
            "all",
            _NO_WINDOW,
        ),
        Key("window_sites", TEXTS, "capture.sites", "patterns of the sites in the window", "all", _NO_WINDOW),
        Key(
            "digest",
            TEXT,
            "capture.digest",
            "where digests are computed: `host`, `device`, or `auto`",
            "`auto`",
        ),
        Key(
            "memory_mb",
            INT,
            "capture.memory_mb",
            "how many MiB one forward's captured values may take before they are digested",
            "256",
        ),
    ),
    "Requests": (
        Key("id", TEXT, "id", "a name, unique in the scenario", "`r0`, `r1`, ... by place"),
        Key(
            "prompt",
            TEXT,
            "prompt",
            "text, which goes through the model's tokenizer",
            "one of `prompt`, `tokens`",
        ),
        Key("tokens", INTS, "tokens", "token ids, such as `[1, 2, 3]`", "one of `prompt`, `tokens`"),
        Key(
            "arrival",
            INT,
            "arrival",
            "the forward at which the request arrives, from 0; with `static` only 0",
            "0",
            (("schedule", "static"),),
        ),
    ),
    "Request settings": (
        Key("max_tokens", INT, "max_tokens", "how many tokens are generated at most", "64"),
        Key("temperature", NUMBER, "sampling.temperature", "0 is greedy", "0"),
        Key("top_p", NUMBER, "sampling.top_p", "more than 0, at most 1; 1 keeps all tokens", "1"),
        Key(
            "seed",
            INT,
            "sampling.seed",
            "of this request's draws, which do not depend on the other requests",
            "0",
        ),
        Key("ignore_stop", TRUTH, "ignore_stop", "generate on after a stop token", "false"),
        Key("chat", TRUTH, "chat", "put the prompt into the model's chat template; for text only", "false"),
    ),
    "Rules": (
        Key("site", TEXT, "site", "a pattern of site names (`*`, `?`, `[...]`)", "`*`"),
        Key(
            "phase",
            TEXT,
            "phase",
            "`prefill`, `decode`, `draft` (all forwards of a draft model), `verify`, `mixed` (several in one forward) or `any`",
            "`any`",
        ),
        Key("rows", TEXT, "rows", "how many rows the call has: `4`, `2..8` or `9..`", "`1..`"),
        Key(
            "path",
            TEXT,
            "path",
            "`native`, `rows` (row by row), `pad:N`, or a reference kernel such as `candle-metal/mv`",
            "`native`",
        ),
        Key(
            "second_last",
            TEXT,
            "second_last",
            "the second-to-last dimension of the call's input, written as `rows` is. Two rows are [1, 2, K] when packed and [2, 1, K] when padded",
            "`1..`",
        ),
    ),
}
"""Every key, by the section of docs/scenario.md that its table stands in. The order is the one that ``to_dict`` writes."""


def _of(*sections: str) -> dict[str, Key]:
    return {key.name: key for section in sections for key in TABLE[section]}


RUN_KEYS: Mapping[str, Key] = _of(
    "Model", "Engine", "Schedule", "Speculation", "Teacher forcing", "Cache", "Kernel plan", "Capture"
)
"""What belongs to the run as a whole."""

SETTING_KEYS: Mapping[str, Key] = _of("Request settings")
"""What each request has; given for the run, it is the default of every request."""

REQUEST_KEYS: Mapping[str, Key] = _of("Requests", "Request settings")
RULE_KEYS: Mapping[str, Key] = _of("Rules")
# Asked for by those who know them from an engine, and near to keys that mean something else.
_SAMPLERS = {"top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"}
ENGINE_SETTING = "engine.KEY"
CHANGE_KEYS: Mapping[str, Key] = {
    **RUN_KEYS,
    **SETTING_KEYS,
    "arrivals": Key("arrivals", INTS, "arrival"),
    ENGINE_SETTING: Key(ENGINE_SETTING, JSON, "engine_settings"),
}
FLAG_KEYS: Mapping[str, Key] = {**CHANGE_KEYS, "tokens": Key("tokens", TOKEN_LISTS, "tokens")}
FILE_KEYS: Mapping[str, Key] = {
    **RUN_KEYS,
    **SETTING_KEYS,
    "request": Key("request", TABLES, "requests"),
    "rule": Key("rule", TABLES, "kernels.rules"),
}


def useless(asked: Iterable[str], changes: Mapping[str, Any]) -> set[str]:
    """The keys that a change leaves without a use. ``asked`` are all changed keys; those that ``changes`` lacks are
    taken back. A key that is asked for itself is never among them."""
    asked = set(asked)
    gone = {
        key.name
        for key in (*RUN_KEYS.values(), *REQUEST_KEYS.values())
        for other, value in key.useless
        if other in asked and changes.get(other) == value
    }
    return gone - asked - ({"arrival"} if "arrivals" in asked else set())


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown ``name``: the nearest known one, else all of them."""
    choices = list(known)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.7)
    return f"did you mean {close[0]!r}?" if close else f"the known ones are {', '.join(choices)}."


def known(name: str, keys: Mapping[str, Key]) -> Key:
    """The key ``name``; raises ScenarioKeyUnknown, naming the nearest key."""
    if ENGINE_SETTING in keys and re.fullmatch(r"engine\.[\w-]+", name):
        return keys[ENGINE_SETTING]
    if name in _SAMPLERS and "seed" in keys:
        raise ScenarioKeyUnknown(
            f"there is no key {name!r} here: a scenario draws with temperature, top_p and seed alone; leave it out."
        )
    if name not in keys or name == ENGINE_SETTING:
        raise ScenarioKeyUnknown(f"there is no key {name!r} here; {nearest(str(name), keys)}")
    return keys[name]


def typed(values: Mapping[str, Any], keys: Mapping[str, Key]) -> dict[str, Any]:
    """``values`` in their stored form; raises ScenarioKeyUnknown and ScenarioTypeError."""
    return {name: _checked(name, value, known(name, keys).kind) for name, value in values.items()}


def _checked(name: str, value: Any, kind: Kind) -> Any:
    result = kind.check(value)
    if result is None:
        raise ScenarioTypeError(
            f"{name} takes {kind.name}, and {_shown(value)} is something else; change its value."
        )
    return result


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_flags(flags: str) -> dict[str, Any]:
    """Read ``key=value key=value`` into typed values, as ``Scenario.with_changes`` takes them.

    Words are split as a shell does. A key that takes true or false may stand alone for true. ``engine.KEY=VALUE`` is a
    setting of the engine, JSON where it can be read so and text elsewhere. Lists are
    separated by commas: ``arrivals=0,5``, ``window_sites=layers.0.*,lm_head``; a range is ``3..9`` or
    ``3,9``; the token ids of several requests are separated by semicolons: ``tokens=1,2,3;4,5``.

    Raises ScenarioFlagError for text that cannot be read so, ScenarioKeyUnknown and ScenarioTypeError.
    """
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise ScenarioFlagError(f"{flags!r} cannot be split into words ({error}); close it.") from None
    result: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        kind = known(name, FLAG_KEYS).kind
        if name in result:
            raise ScenarioFlagError(f"{name} is given twice; keep one of them.")
        if not equals and kind not in (TRUTH, JSON):
            raise ScenarioFlagError(f"{name} has no value and takes {kind.name}; write {name}=VALUE.")
        try:
            value = kind.read(text) if equals else True
        except ValueError:
            value = text
        result[name] = _checked(name, value, kind)
    return result


def toml_text(keys: Mapping[str, Any]) -> str:
    """``keys`` as TOML: plain values and lists first, then a ``[name]`` for each table, then a ``[[name]]`` for each table
    of a list."""
    plain = [
        name for name, value in keys.items() if not isinstance(value, Mapping) and not TABLES.check(value)
    ]
    lines = _toml_lines({name: keys[name] for name in plain})
    for name, value in keys.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{name}]", *_toml_lines(value)]
    for name, value in keys.items():
        if name not in plain and not isinstance(value, Mapping):
            for table in value:
                lines += ["", f"[[{name}]]", *_toml_lines(table)]
    return "\n".join(lines) + "\n"


def _toml_lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_toml_key(name)} = {_toml_value(value)}" for name, value in table.items()]


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_value(name)


def _toml_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(_toml_lines(value)) + "}"
    # JSON writes strings, finite numbers, true and false as TOML does, but for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def check_utf8(name: str, text: str) -> None:
    """Raises ScenarioRangeError when ``text`` holds half characters, which no file or tokenizer can take."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ScenarioRangeError(
            f"{name} {_shown(text)} is not valid Unicode text and cannot be written as UTF-8; "
            "the file or terminal that it came from uses another encoding."
        ) from None
