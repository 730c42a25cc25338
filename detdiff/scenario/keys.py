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
    value for ``check`` and may raise ValueError. ``write`` gives the stored form as JSON has it.
    """

    name: str
    check: Callable[[Any], Any]
    read: Callable[[str], Any]
    write: Callable[[Any], Any] = lambda value: list(value) if isinstance(value, tuple) else value


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


def _objects(value: Any) -> Any:
    """JSON objects in a tuple."""
    copied = _json_value(list(value)) if isinstance(value, (list, tuple)) else None
    return tuple(copied) if copied is not None and all(isinstance(each, dict) for each in copied) else None


def _object(value: Any) -> Any:
    copied = _json_value(dict(value)) if isinstance(value, Mapping) else None
    return copied if isinstance(copied, dict) else None


def _biases(value: Any) -> Any:
    """Pairs of a token id and a number, by id; in a table ids are text."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not (
        isinstance(pairs, (list, tuple)) and all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs)
    ):
        return None
    found: dict[int, float] = {}
    for token, bias in pairs:
        if isinstance(token, str) and re.fullmatch("[0-9]{1,9}", token, re.ASCII):
            token = int(token)
        number = _number(bias)
        if not _is_int(token) or token < 0 or number is None or token in found:
            return None
        found[token] = number
    return tuple(sorted(found.items()))


def _read_biases(text: str) -> list[list[Any]]:
    return [[int(token), float(bias)] for token, _, bias in (part.partition(":") for part in text.split(","))]


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
OBJECT = Kind("a table without null", _object, _read_json)
OBJECTS = Kind("a list of tables without null", _objects, _read_json)
BIASES = Kind(
    "a table of token ids and numbers",
    _biases,
    _read_biases,
    lambda value: {str(token): bias for token, bias in value},
)
TABLES = Kind("a list of tables", _tuple_of(lambda v: isinstance(v, Mapping)), str)


_ALWAYS_WRITTEN = ("temperature", "top_p", "seed")
_SCORING = ("task", "pooling", "continuation", "score_from")


@dataclass(frozen=True)
class Key:
    """One key: its type, the field of a Scenario, Request or PathRule that it sets, and what its page says of it.

    ``useless`` are the changes of another key that leave this one without a use (None: that key is taken back). ``file`` is
    what a relative path in it is: "model", "profile" or "trace". ``value`` and ``default`` are Markdown.
    """

    name: str
    kind: Kind
    field: str
    useless: tuple[tuple[str, Any], ...] = ()
    default: str = ""
    value: str = ""
    file: str = ""

    @property
    def part(self) -> str:
        """The part of the whole that holds the field, such as schedule; "" for a field of the whole itself."""
        return self.field.rpartition(".")[0]

    @property
    def attribute(self) -> str:
        """The field's own name."""
        return self.field.rpartition(".")[2]

    @property
    def sparse(self) -> bool:
        """Whether it is written only where it is not at its default."""
        return (
            self.part in ("cache", "turn")
            or self.name in (*_SCORING, "use_adapter")
            or (self.part == "sampling" and self.name not in _ALWAYS_WRITTEN)
        )


_KINDS: Mapping[str, Kind] = {
    "text": TEXT,
    "integer": INT,
    "number": NUMBER,
    "truth": TRUTH,
    "texts": TEXTS,
    "integers": INTS,
    "range": RANGE,
    "engine": ENGINE,
    "object": OBJECT,
    "objects": OBJECTS,
    "biases": BIASES,
    **dict.fromkeys(("model", "profile", "trace"), TEXT),
}
# key | type, or what a path in it is | field | of no use once another key has a value | default | value
_TABLE = """
# Model
model            | model    | model                  |                                  | required         | `"builtin"`, a directory that mlx-lm can load, or a hub id
adapter_path     | model    | adapter_path           |                                  | none             | a directory with mlx-lm's `adapter_config.json` and `adapters.safetensors`, LoRA or DoRA, which the model is loaded with
# Engine
engine           | engine   | engine                 |                                  | `mlx`            | what runs the requests: `mlx`, `transformers`, `llama.cpp`, `server` (which an address as `model` means by itself), the name of an installed engine, or a factory of your own as `package.module:factory`; as a table, `name` and free keys, which the engine is given
# Task
task             | text     | task                   |                                  | `generate`       | `generate`: continue each prompt. `score`: the log-probabilities of given tokens, from forwards over whole texts; nothing is generated. `embed`: one vector for each prompt
pooling          | text     | pooling                | task=generate task=score         | `mean`           | what of the last hidden states is a prompt's vector: the `mean` of its own positions, the `first` or the `last`; for `embed`
# Schedule
schedule         | text     | schedule.kind          |                                  | `serial`         | `serial`: one request after the other. `static`: all at once. `continuous`: each at its arrival
layout           | text     | schedule.layout        |                                  | `padded`         | `padded`: batch × length, as mlx-lm does. `packed`: all rows of all requests on one axis, which is what llama.cpp has without being asked, and transformers where the schedule is `continuous`
active           | integer  | schedule.active        | schedule=serial schedule=static  | no limit         | how many requests may run at a time; for `static` the size of each batch, which waits until its longest request is through. `static:8` is short for `schedule=static active=8`
row_budget       | integer  | schedule.row_budget    | layout=padded                    | no limit         | how many rows a forward may have; for `packed`
prefill_chunk    | integer  | schedule.prefill_chunk |                                  | 2048             | how many prompt tokens of one request a forward takes at most
# Speculation
draft            | model    | speculation.draft      |                                  | off              | the draft model, named as `model` is: `"builtin-draft"`, a directory, or a hub id
drafts           | integer  | speculation.drafts     | draft=off                        | 4                | how many tokens it proposes at a time; near a request's end, no more than are left
# Teacher forcing
force_tokens     | trace    | force_tokens           |                                  | off              | the directory of a trace; a request is fed the tokens that it generated there under the same id, whatever it would choose here
# Cache
kv_bits          | integer  | cache.kv_bits          |                                  | off              | mlx-lm's quantised cache: 2, 3, 4, 5, 6 or 8 bits; for `padded` and `serial`
kv_group_size    | integer  | cache.kv_group_size    | kv_bits=off                      | 64               | how many values share a scale: 32, 64 or 128; with `kv_bits`
kv_start         | integer  | cache.kv_start         | kv_bits=off                      | 0                | the position from which on the cache is quantised; with `kv_bits`
page_tokens      | integer  | cache.page_tokens      | layout=padded                    | contiguous       | a paged cache, and how many positions a page has; for `packed`
share_prefix     | truth    | cache.share_prefix     | layout=padded                    | false            | a request takes over the keys and values of what an earlier prompt began with, in whole pages if it is paged; for `packed`
reuse_tokens     | integer  | cache.reuse_tokens     | schedule=static schedule=continuous layout=packed | off              | so many tokens of a prompt are in mlx-lm's `prompt_cache` beforehand, from a forward of their own; for `padded` and `serial`
turns            | text     | cache.turns            |                                  | `kept`           | what a later turn of a request finds. `kept`: the cache of the turn before. `reloaded`: that, saved to mlx-lm's prompt cache file and loaded. `fresh`: nothing, so that it runs the whole conversation
max_kv_size      | integer  | cache.max_kv_size      | layout=packed                    | off              | mlx-lm's rotating cache: so many positions are kept, the first four for good, from 5; for `padded`, and for models that make no caches of their own
# Kernel plan
kernels          | profile  | kernels.profile        |                                  | `native`: the backend's own choice | a dispatch profile, or `native`
split_rows       | integer  | kernels.split_rows     |                                  | off              | linear calls of at most so many rows go row by row
# Capture
capture          | text     | capture.level          |                                  | `digest`         | `digest`: a 64-bit digest of each row at each site. `full`: the values too. `window`: the values inside a window
lens             | truth    | capture.lens           |                                  | false            | also the logits that each layer's output gives
top              | integer  | capture.top            |                                  | 8                | how many of the largest logits are kept for each token, from 2
window_requests  | texts    | capture.requests       | capture=digest capture=full      | all              | ids of the requests in the window
window_positions | range    | capture.positions      | capture=digest capture=full      | all              | first and last position in the window, such as `[120, 130]`
window_sites     | texts    | capture.sites          | capture=digest capture=full      | all              | patterns of the sites in the window
digest           | text     | capture.digest         |                                  | `auto`           | where digests are computed: `host`, `device`, or `auto`
memory_mb        | integer  | capture.memory_mb      |                                  | 256              | how many MiB one forward's captured values may take before they are digested
# Requests
id               | text     | id                     |                                  | `r0`, `r1`, ... by place | a name, unique in the scenario
prompt           | text     | prompt                 |                                  | one of `prompt`, `tokens`, `messages` | text, which goes through the model's tokenizer
tokens           | integers | tokens                 |                                  | one of `prompt`, `tokens`, `messages` | token ids, such as `[1, 2, 3]`
messages         | objects  | messages               |                                  | one of `prompt`, `tokens`, `messages` | in the place of a prompt: the turns of a chat, each a table such as `{role = "user", content = "Hello"}`, which go through the model's chat template
continuation     | text     | continuation           | task=generate task=embed         | off              | text after the prompt, whose tokens are scored; for `score`
score_from       | integer  | score_from             | task=generate task=embed         | 1                | the position of the first token that is scored, where there is no `continuation`; for `score`
arrival          | integer  | arrival                | schedule=static                  | 0                | the forward at which the request arrives, from 0; with `static` only 0
# Turns
rewind           | integer  | turn.rewind            |                                  | 0                | how many of the newest tokens of the conversation are taken back before
anew             | truth    | turn.anew              |                                  | false            | the conversation begins anew, in the same slot: nothing of what was before is kept
# Request settings
max_tokens       | integer  | max_tokens             |                                  | 64               | how many tokens are generated at most
temperature      | number   | sampling.temperature   |                                  | 0                | 0 is greedy
top_p            | number   | sampling.top_p         |                                  | 1                | more than 0, at most 1; 1 keeps all tokens
seed             | integer  | sampling.seed          |                                  | 0                | of this request's draws, which do not depend on the other requests
cancel           | integer  | cancel                 |                                  | off              | after how many tokens the request is cancelled
ignore_stop      | truth    | ignore_stop            |                                  | false            | generate on after a stop token
chat             | truth    | chat                   |                                  | false            | put the prompt into the model's chat template; for text only
chat_template_args | object | chat_template_args     |                                  | none             | what the chat template is given beside the messages, such as `{enable_thinking = false}`
stop             | texts    | stop                   |                                  | none             | texts that end the answer: as mlx-lm does, the tokens that the tokenizer makes of each
use_adapter      | truth    | use_adapter            |                                  | true             | whether the adapter of `adapter_path` computes; requests with and without it are for `serial`
# Request sampling
sampler          | text     | sampling.sampler       |                                  | `detdiff`        | what draws: `detdiff`, by `seed` and the token's index alone, or `mlx-lm`, its `make_sampler` over MLX's one random state, which `seed` sets
top_k            | integer  | sampling.top_k         |                                  | all tokens       | keep so many of the likeliest tokens
min_p            | number   | sampling.min_p         |                                  | 0                | keep tokens of at least so much of the likeliest one's probability
min_tokens_to_keep | integer | sampling.min_tokens_to_keep |                            | 1                | how many tokens `min_p` keeps at least
xtc_probability  | number   | sampling.xtc_probability |                                | 0                | how often XTC leaves out the likeliest tokens; with `sampler = "mlx-lm"`
xtc_threshold    | number   | sampling.xtc_threshold |                                  | 0.1              | the probability from which on XTC leaves tokens out, at most 0.5
xtc_special_tokens | integers | sampling.xtc_special_tokens |                           | as mlx-lm's commands | token ids that XTC never leaves out; of itself a line's end and the stop tokens
repetition_penalty | number | sampling.repetition_penalty |                             | off              | what logits of tokens of the context are divided by, or multiplied with where they are negative
repetition_context_size | integer | sampling.repetition_context_size |                  | 20               | how many of the last tokens are that context, the prompt's among them
presence_penalty | number   | sampling.presence_penalty |                               | off              | what is taken off the logits of tokens of the context
presence_context_size | integer | sampling.presence_context_size |                      | 20               | as above
frequency_penalty | number  | sampling.frequency_penalty |                              | off              | what is taken off the logit of a token for each time that it is in the context
frequency_context_size | integer | sampling.frequency_context_size |                    | 20               | as above
logit_bias       | biases   | sampling.logit_bias    |                                  | none             | what is added to the logits of tokens, by id: `{5 = 1.5, 7 = -100}`, and as a flag `5:1.5,7:-100`
# Rules
site             | text     | site                   |                                  | `*`              | a pattern of site names (`*`, `?`, `[...]`)
phase            | text     | phase                  |                                  | `any`            | `prefill`, `decode`, `draft` (all forwards of a draft model), `verify`, `mixed` (several in one forward) or `any`
rows             | text     | rows                   |                                  | `1..`            | how many rows the call has: `4`, `2..8` or `9..`
path             | text     | path                   |                                  | `native`         | `native`, `rows` (row by row), `pad:N`, `tile:N` (calls of N rows, filled up), `cut:N` (calls of N rows, and one of the rest), `keys` (attention: each row alone over the keys it sees), or a reference kernel such as `candle-metal/mv`
second_last      | text     | second_last            |                                  | `1..`            | the second-to-last dimension of the call's input, written as `rows` is. Two rows are [1, 2, K] when packed and [2, 1, K] when padded
"""


def _table() -> dict[str, tuple[Key, ...]]:
    found: dict[str, list[Key]] = {}
    for line in _TABLE.strip().splitlines():
        if line.startswith("# "):
            keys = found[line[2:]] = []
            continue
        name, kind, place, unused, default, value = (cell.strip() for cell in line.split("|"))
        pairs = (pair.partition("=")[::2] for pair in unused.split())
        useless = tuple((other, None if taken == "off" else taken) for other, taken in pairs)
        file = kind if _KINDS[kind] is TEXT and kind != "text" else ""
        keys.append(Key(name, _KINDS[kind], place, useless, default, value, file))
    return {section: tuple(keys) for section, keys in found.items()}


TABLE: Mapping[str, tuple[Key, ...]] = _table()
"""Every key, by the section of docs/scenario.md that its table stands in. The order is the one that ``to_dict`` writes."""


def _of(*sections: str) -> dict[str, Key]:
    return {key.name: key for section in sections for key in TABLE[section]}


RUN_KEYS: Mapping[str, Key] = _of(
    "Model", "Engine", "Task", "Schedule", "Speculation", "Teacher forcing", "Cache", "Kernel plan", "Capture"
)
"""What belongs to the run as a whole."""

SETTING_KEYS: Mapping[str, Key] = _of("Request settings", "Request sampling")
"""What each request has; given for the run, it is the default of every request."""

TURN_KEYS: Mapping[str, Key] = _of("Requests", "Turns", "Request settings", "Request sampling")
"""What a later turn of a request has."""

REQUEST_KEYS: Mapping[str, Key] = {
    **_of("Requests", "Request settings", "Request sampling"),
    "turn": Key("turn", TABLES, "turns"),
}
RULE_KEYS: Mapping[str, Key] = _of("Rules")
ENGINE_SETTING = "engine.KEY"
CHANGE_KEYS: Mapping[str, Key] = {
    **RUN_KEYS,
    **SETTING_KEYS,
    "arrivals": Key("arrivals", INTS, "arrival"),
    ENGINE_SETTING: Key(ENGINE_SETTING, JSON, "engine_settings"),
}
FLAG_KEYS: Mapping[str, Key] = {
    **CHANGE_KEYS,
    "tokens": Key("tokens", TOKEN_LISTS, "tokens"),
    "turn_tokens": Key("turn_tokens", TOKEN_LISTS, "turns"),
    "turn_prompt": Key("turn_prompt", TEXT, "turns"),
}
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
        for key in (*RUN_KEYS.values(), *TURN_KEYS.values())
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
    ``3,9``; ``static:8`` and ``schedule=static:8`` are short for ``schedule=static active=8``; the token ids of several requests are separated by semicolons: ``tokens=1,2,3;4,5``.

    Raises ScenarioFlagError for text that cannot be read so, ScenarioKeyUnknown and ScenarioTypeError.
    """
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise ScenarioFlagError(f"{flags!r} cannot be split into words ({error}); close it.") from None
    result: dict[str, Any] = {}
    for word in _schedules_apart(words):
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


def _schedules_apart(words: Iterable[str]) -> Iterable[str]:
    """``words`` with the number of a schedule as a word of its own."""
    for word in words:
        short = re.fullmatch(r"(?:schedule=)?(serial|static|continuous)(?::([0-9]+))?", word)
        if short is None:
            yield word
            continue
        yield f"schedule={short[1]}"
        if short[2] is not None:
            yield f"active={short[2]}"


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
