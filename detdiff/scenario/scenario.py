"""The scenario: from files, flags and dictionaries of the same flat keys, to them, and changed by them."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from detdiff.errors import (
    RequestIdRepeated,
    RequestsMissing,
    ScenarioConflict,
    ScenarioError,
    ScenarioFileError,
    ScenarioKeyMissing,
    ScenarioRangeError,
    ScenarioTypeError,
)
from detdiff.scenario.keys import (
    CHANGE_KEYS,
    FILE_KEYS,
    REQUEST_KEYS,
    RULE_KEYS,
    RUN_KEYS,
    SETTING_KEYS,
    TURN_KEYS,
    Key,
    known,
    nearest,
    parse_flags,
    toml_text,
    typed,
    useless,
)
from detdiff.scenario.sampling import MLX_LM, Sampling
from detdiff.scenario.settings import (
    EMBED,
    GENERATE,
    POOLINGS,
    SCORE,
    TASKS,
    CachePlan,
    Capture,
    KernelPlan,
    PathRule,
    Request,
    Schedule,
    Speculation,
    Turn,
    check_name,
    one_of,
)

MLX = "mlx"
LLAMA = "llama.cpp"
SERVER = "server"
TRANSFORMERS = "transformers"
NEED_A_MODEL = (MLX, TRANSFORMERS)
_OF_PACKED_ROWS = frozenset({"row_budget", "page_tokens", "share_prefix"})


@dataclass(frozen=True)
class Scenario:
    """A run, whole. ``task`` is what it is for: to generate, to score given tokens, or to embed prompts by ``pooling``. ``force_tokens`` is a trace's directory: a request is fed what it generated there under the same id.

    ``engine`` is an engine's name or ``package.module:factory``, ``engine_settings`` is what it is given, JSON values
    without null; ``model`` may be "" where the engine has one of its own. A server's address as the model of the engine mlx means
    the engine server. The engine llama.cpp knows no other layout than
    packed, and transformers none where its schedule is continuous, so their schedules have that.

    Raises RequestsMissing, RequestIdRepeated, ScenarioConflict and ScenarioRangeError.
    """

    model: str
    requests: tuple[Request, ...]
    schedule: Schedule = field(default_factory=Schedule)
    kernels: KernelPlan = field(default_factory=KernelPlan)
    capture: Capture = field(default_factory=Capture)
    speculation: Speculation | None = None
    cache: CachePlan = field(default_factory=CachePlan)
    force_tokens: str | None = None
    engine: str = MLX
    # A dictionary has no hash.
    engine_settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    adapter_path: str | None = None
    task: str = GENERATE
    pooling: str = "mean"

    def __post_init__(self) -> None:
        if self.engine == MLX and is_address(self.model):
            object.__setattr__(self, "engine", SERVER)
        check_name("engine", self.engine)
        settings = typed({"engine": {**self.engine_settings, "name": self.engine}}, RUN_KEYS)["engine"]
        if "name" in self.engine_settings:
            raise ScenarioConflict(
                "name is an engine's name, not a setting of it; give that setting another name."
            )
        object.__setattr__(self, "engine_settings", {k: v for k, v in settings.items() if k != "name"})
        if self.schedule.layout == "padded" and _always_packed(self.engine, self.schedule.kind):
            object.__setattr__(self, "schedule", replace(self.schedule, layout="packed"))
        if self.model or self.engine in NEED_A_MODEL:
            check_name("model", self.model)
        if not self.requests:
            raise RequestsMissing("there is no request; give one prompt at least.")
        places: dict[str, int] = {}
        for place, request in enumerate(self.requests, 1):
            if request.id in places:
                raise RequestIdRepeated(
                    f"requests {places[request.id]} and {place} both have the id {request.id!r}; "
                    "give each its own (without one, the first is r0)."
                )
            places[request.id] = place
            if request.turn is not None and (place == 1 or self.requests[place - 2].id != request.turn.after):
                raise ScenarioConflict(
                    f"request {request.id!r} is a turn after {request.turn.after!r}, which is not the request right before it; "
                    "put it there."
                )
            if request.arrival and self.schedule.kind == "static":
                raise ScenarioConflict(
                    f"request {request.id!r} arrives at forward {request.arrival} and schedule is static, "
                    "which starts all at once; remove the arrival, or use schedule continuous."
                )
        one_of("task", self.task, TASKS)
        one_of("pooling", self.pooling, POOLINGS)
        for name in self.capture.requests:
            if name not in places:
                raise ScenarioRangeError(
                    f"window_requests has {name!r}, which is no request; {nearest(name, places)}"
                )
        if self.force_tokens is not None:
            check_name("force_tokens", self.force_tokens)
        _check_uses(self)

    @classmethod
    def from_toml(cls, path: str | Path, requests: Sequence[Mapping[str, Any]] | None = None) -> Scenario:
        """Read a scenario file. A relative model directory, profile file or trace is looked for in the file's own
        folder. ``requests`` stand in the place of the file's.

        Raises ScenarioFileError, and what ``from_dict`` raises, naming the file.
        """
        path = Path(path)
        table = toml_table(path)
        if requests is not None:
            table["request"] = requests
        return cls.from_dict(resolved(table, path.parent), where=str(path))

    @classmethod
    def from_flags(cls, model: str | None, prompts: Sequence[str], flags: str) -> Scenario:
        """A scenario without a file: ``prompts`` in order (ids r0, r1, ...), then the flags' ``tokens``.

        ``flags`` is text for ``detdiff.scenario.keys.parse_flags``; ``arrivals`` has one number for each
        request, and ``turn_tokens`` and ``turn_prompt`` are later turns of every one. ``model`` may be None where the engine has one of its own. Raises what ``parse_flags`` and ``from_dict``
        raise.
        """
        with located("flags"):
            keys = parse_flags(flags)
            requests: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
            requests += [{"tokens": tokens} for tokens in keys.pop("tokens", ())]
            turns: list[dict[str, Any]] = [{"tokens": tokens} for tokens in keys.pop("turn_tokens", ())]
            turns += [{"prompt": keys.pop("turn_prompt")}] if "turn_prompt" in keys else []
            for request in requests if turns else ():
                request["turn"] = turns
            if "arrivals" in keys:
                _set_arrivals(requests, keys.pop("arrivals"))
            keys = _engine_changed({}, keys, keys)
        keys = resolved(keys if model is None else {"model": model, **keys}, Path())
        return cls.from_dict({**keys, "request": requests}, where="flags")

    @classmethod
    def from_dict(cls, values: Any, *, where: str = "scenario") -> Scenario:
        """The scenario that flat keys describe, as in a file. ``where`` opens each error's message.

        Raises ScenarioKeyUnknown (naming the nearest key), ScenarioKeyMissing, ScenarioTypeError, and what
        the dataclasses raise.
        """
        with located(where):
            if not isinstance(values, Mapping):
                raise ScenarioTypeError(f"a {type(values).__name__} is not a table of keys; give one.")
            keys = typed(values, FILE_KEYS)
            if "model" not in keys and _engine_of(keys)[0] in NEED_A_MODEL:
                raise ScenarioKeyMissing(
                    'there is no model; add model = "builtin", or a directory or hub id instead of builtin.'
                )
            defaults = {name: keys[name] for name in SETTING_KEYS if name in keys}
            requests = []
            for place, table in enumerate(keys.get("request", ())):
                with located(f"request {place + 1}" + (f" ({table['id']!r})" if "id" in table else "")):
                    own = typed(table, REQUEST_KEYS)
                    turns = own.pop("turn", ())
                    requests.append(_request(own, defaults, place))
                    requests += _turns(requests[-1], own, defaults, turns)
            rules = []
            for place, table in enumerate(keys.get("rule", ()), 1):
                with located(f"rule {place}"):
                    rules.append(PathRule(**typed(table, RULE_KEYS)))
            return _scenario(keys, tuple(requests), tuple(rules))

    def turns_with(self, id: str) -> frozenset[str]:
        """The ids of all turns of the request that ``id`` is, or is a turn of."""
        first: dict[str, str] = {}
        for request in self.requests:
            first[request.id] = request.id if request.turn is None else first[request.turn.after]
        return frozenset(other for other, of in first.items() if of == first[id])

    def to_dict(self) -> dict[str, Any]:
        """The flat keys, fit for JSON, in one order; ``from_dict`` reads them. None is left to a default, but for those
        of speculation, cache and forcing, which stand here where they are used."""
        keys = _written(RUN_KEYS, self)
        if not self.model:
            del keys["model"]
        if self.engine_settings:
            keys["engine"] = {"name": self.engine, **self.engine_settings}
        elif self.engine == MLX:
            del keys["engine"]
        keys["request"] = tables = list[dict[str, Any]]()
        for request in self.requests:
            written = _written(TURN_KEYS, request)
            if request.turn is None:
                tables.append(written)
            else:
                tables[-1].setdefault("turn", []).append(written)
        keys["rule"] = [_written(RULE_KEYS, rule) for rule in self.kernels.rules]
        return {name: value for name, value in keys.items() if value != []}

    def to_toml(self) -> str:
        """The text of a scenario file that ``from_toml`` reads back to an equal scenario."""
        return toml_text(self.to_dict())

    def with_changes(self, **keys: Any) -> Scenario:
        """A copy with flat keys changed; None sets a key back to its default.

        A setting that the change leaves without a use goes (``active`` under serial, ``row_budget`` when padded, the
        window when another capture is asked for), so that one file serves for both sides of a comparison. What decides
        numbers (a draft, a quantised cache) never goes so: it is removed by name, or is a conflict.
        A request setting (``max_tokens``, ``seed``, ...) changes in every request, ``chat`` only where the
        prompt is text. ``arrivals`` has one number for each request. ``engine.KEY`` changes one setting of the engine;
        another ``engine`` begins without any. Raises what ``from_dict`` raises.
        """
        values = self.to_dict()
        requests = values["request"]
        with located("changes"):
            for name in keys:
                known(name, CHANGE_KEYS)
            changes = typed({name: value for name, value in keys.items() if value is not None}, CHANGE_KEYS)
            if "arrivals" in keys:
                _set_arrivals(requests, changes.pop("arrivals", [0] * len(requests)))
            changes = _engine_changed(values, keys, changes)
        engine = _engine_of({**values, **changes})[0]
        gone: set[str] = set()
        if "layout" not in keys and (
            engine == LLAMA or (engine == TRANSFORMERS and keys.keys() & {"schedule", "engine"})
        ):
            del values["layout"]
            kind = (changes if "schedule" in keys else values).get("schedule", "serial")
            if not _always_packed(engine, kind):
                gone |= _OF_PACKED_ROWS - keys.keys()
        changes = resolved(changes, Path())
        gone |= useless(keys, changes)
        for table in (values, *requests, *(turn for request in requests for turn in request.get("turn", ()))):
            for name in (*keys, *gone):
                table.pop(name, None)
        return Scenario.from_dict({**values, **changes}, where="changes")


def toml_table(path: Path) -> dict[str, Any]:
    """The keys of a TOML file, not yet looked at. Raises ScenarioFileError."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ScenarioFileError(f"{path}: cannot be read ({error.strerror}); name a scenario file.") from None
    except UnicodeDecodeError as error:
        raise ScenarioFileError(
            f"{path}: byte {error.start} is not UTF-8, which a scenario file must be; save it as UTF-8."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ScenarioFileError(f"{path}: this is not a TOML file ({error}); correct it there.") from None


@contextmanager
def located(where: str) -> Iterator[None]:
    """Puts ``where`` before the message of a ScenarioError that the block raises."""
    try:
        yield
    except ScenarioError as error:
        raise type(error)(f"{where}: {error}") from None


def is_address(model: str) -> bool:
    """Whether a model is named by a server's address, which the engine server asks."""
    return model.startswith(("http://", "https://"))


def _always_packed(engine: str, kind: str) -> bool:
    """Whether an engine packs the rows of such a schedule, whatever layout it is asked for."""
    return engine == LLAMA or (engine == TRANSFORMERS and kind == "continuous")


def _model_path(model: str, folder: Path) -> str:
    if not model or is_address(model) or model in ("builtin", "builtin-draft"):
        return model
    path = folder / os.path.expanduser(model)
    # Absolute, so that a trace can be replayed from another folder. What does not exist may be a hub id.
    return os.path.abspath(path) if model.startswith((".", "~")) or path.exists() else model


def _profile_path(kernels: str, folder: Path) -> str:
    """A profile as it is, or the absolute path of a profile's file, with the parameters that follow it."""
    found = re.fullmatch(r"(.*\.toml)((?::.*)?)", kernels, re.DOTALL)
    return os.path.abspath(folder / os.path.expanduser(found[1])) + found[2] if found else kernels


def _trace_path(trace: str, folder: Path) -> str:
    if not trace or "://" in trace:
        return trace
    return os.path.abspath(folder / os.path.expanduser(trace))


_FILES: Mapping[str, Callable[[str, Path], str]] = {
    "model": _model_path,
    "profile": _profile_path,
    "trace": _trace_path,
}


def resolved(keys: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """``keys`` with every relative file and directory looked for in ``folder``."""
    return {
        name: _FILES[RUN_KEYS[name].file](value, folder)
        if name in RUN_KEYS and RUN_KEYS[name].file and isinstance(value, str)
        else value
        for name, value in keys.items()
    }


def _engine_of(values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the settings that flat keys say."""
    given = values.get("engine", MLX)
    table = {"name": given} if isinstance(given, str) else {"name": MLX, **given}
    return table.pop("name"), table


def _engine_changed(
    values: Mapping[str, Any], asked: Iterable[str], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """``changes`` with one ``engine`` in the place of all that change ``values``' engine; those that ``changes`` lacks are
    taken back."""
    single = [name for name in asked if name.startswith("engine.")]
    if not single and "engine" not in asked:
        return dict(changes)
    if "engine.name" in single:
        raise ScenarioConflict("engine.name says which engine; write engine=NAME instead.")
    name, settings = _engine_of(values)
    if "engine" in asked:
        other, given = _engine_of(changes)
        # By its name alone, the engine that is there keeps its settings.
        keeps = other == name and isinstance(changes.get("engine"), str)
        name, settings = other, settings if keeps else given
    for key in single:
        settings.pop(key.partition(".")[2], None)
        if key in changes:
            settings[key.partition(".")[2]] = changes[key]
    rest = {key: value for key, value in changes.items() if key not in single}
    return {**rest, "engine": {"name": name, **settings}}


def _set_arrivals(requests: Sequence[dict[str, Any]], arrivals: Sequence[int]) -> None:
    if len(arrivals) != len(requests):
        raise ScenarioConflict(
            f"arrivals has {len(arrivals)} numbers and there are {len(requests)} requests; give one for each."
        )
    for request, arrival in zip(requests, arrivals, strict=True):
        request["arrival"] = arrival


def _fields(keys: Mapping[str, Key], values: Mapping[str, Any], part: str) -> dict[str, Any]:
    """The fields of ``part`` that ``values`` give."""
    return {key.attribute: values[name] for name, key in keys.items() if key.part == part and name in values}


def _written(keys: Mapping[str, Key], whole: Scenario | Request | PathRule) -> dict[str, Any]:
    """The values that ``whole`` has under ``keys``, fit for JSON, without those that say nothing."""
    found: dict[str, Any] = {}
    for name, key in keys.items():
        holder = getattr(whole, key.part) if key.part else whole
        value = None if holder is None else getattr(holder, key.attribute)
        if (
            value is None
            or value == ()
            or value == {}
            or (key.sparse and value == getattr(type(holder), key.attribute))
        ):
            continue
        found[name] = key.kind.write(value)
    return found


def _request(own: Mapping[str, Any], defaults: Mapping[str, Any], place: int) -> Request:
    values = {"id": f"r{place}", **defaults, **own}
    if "prompt" not in own:
        # Defaults of the run; token ids are what they are.
        for name in ("chat", *(() if "messages" in own else ("chat_template_args",))):
            if name not in own:
                values.pop(name, None)
    sampling = Sampling(**_fields(REQUEST_KEYS, values, "sampling"))
    return Request(**_fields(REQUEST_KEYS, values, ""), sampling=sampling)


def _turns(
    first: Request, own: Mapping[str, Any], defaults: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]
) -> Iterator[Request]:
    """The later turns of a request, whose settings are their defaults."""
    # That a request is cancelled says nothing of what comes after it.
    given = {**defaults, **{n: value for n, value in own.items() if n in SETTING_KEYS and n != "cancel"}}
    before = first.id
    for number, table in enumerate(tables, 2):
        with located(f"turn {number}"):
            values = {"id": f"{first.id}/{number}", **typed(table, TURN_KEYS)}
            turn = Turn(before, **_fields(TURN_KEYS, values, "turn"))
            request = _request(values, given, number)
            yield replace(request, arrival=max(first.arrival, request.arrival), turn=turn)
            before = request.id


def _scenario(
    values: Mapping[str, Any], requests: tuple[Request, ...], rules: tuple[PathRule, ...]
) -> Scenario:
    def part(name: str) -> dict[str, Any]:
        return _fields(RUN_KEYS, values, name)

    engine, settings = _engine_of(values)
    if _always_packed(engine, values.get("schedule", "serial")):
        if engine == LLAMA and values.get("layout") == "padded":
            raise ScenarioConflict(
                "layout is padded and engine is llama.cpp, whose batches are rows of all requests on one axis; leave layout out."
            )
        values = {**values, "layout": "packed"}
    if "drafts" in values and "draft" not in values:
        raise ScenarioConflict(
            f"drafts is {values['drafts']} and there is no draft model that could propose them; add draft, or remove drafts."
        )
    return Scenario(
        requests=requests,
        schedule=Schedule(**part("schedule")),
        kernels=KernelPlan(**part("kernels"), rules=rules),
        capture=Capture(**part("capture")),
        speculation=Speculation(**part("speculation")) if "draft" in values else None,
        cache=CachePlan(**part("cache")),
        **{"model": "", **part(""), "engine": engine, "engine_settings": settings},
    )


def _check_uses(scenario: Scenario) -> None:
    """Raises ScenarioConflict for a setting that the engine, the task, the schedule or the layout have no use for."""
    schedule, cache = scenario.schedule, scenario.cache
    _check_mlx_lm(scenario)
    _check_task(scenario)
    padded, serial = schedule.layout == "padded", schedule.kind == "serial"
    for name in ("page_tokens", "share_prefix"):
        if padded and getattr(cache, name):
            raise ScenarioConflict(
                f"{name} is {str(getattr(cache, name)).lower()} and layout is padded, whose caches are mlx-lm's own; "
                f"remove {name}, or use layout packed."
            )
    for name in ("kv_bits", "reuse_tokens"):
        value = getattr(cache, name)
        # llama.cpp's own cache is none of mlx-lm's; the engine says so.
        if value is not None and not (padded and serial) and scenario.engine != LLAMA:
            raise ScenarioConflict(
                f"{name} is {value}, layout is {schedule.layout} and schedule is {schedule.kind}, and mlx-lm does that "
                f"for one request at a time only; remove {name}, or use layout padded and schedule serial."
            )
    if cache.turns == "reloaded" and cache.page_tokens is not None:
        raise ScenarioConflict(
            "turns is reloaded and there are page_tokens, and mlx-lm's prompt cache files hold no pages; remove one of them."
        )
    turn = next((request.id for request in scenario.requests if request.turn is not None), None)
    if len({request.use_adapter for request in scenario.requests}) > 1 and not serial:
        raise ScenarioConflict(
            f"use_adapter is not the same in all requests and schedule is {schedule.kind}, and a model computes with its adapter or "
            "without; use schedule serial, or say the same in all."
        )
    if turn is not None and scenario.task != GENERATE:
        raise ScenarioConflict(
            f"task is {scenario.task} and request {turn!r} is a later turn, which only goes on from an answer; remove one of them."
        )
    if turn is not None and scenario.speculation is not None and padded:
        raise ScenarioConflict(
            f"there is a draft, layout is padded, and request {turn!r} is a later turn, which mlx-lm's own speculation is not run "
            "with here; use layout packed, or remove one of them."
        )
    if scenario.speculation is None:
        return
    for request in scenario.requests:
        if request.sampling.draws or request.sampling.processed:
            raise ScenarioConflict(
                f"there is a draft, and request {request.id!r} {'draws its tokens' if request.sampling.draws else 'changes its logits'}; "
                "speculation is greedy here, so remove draft, or set temperature 0 and no penalty or bias."
            )
    if cache.max_kv_size is not None:
        raise ScenarioConflict(
            f"there is a draft, and max_kv_size is {cache.max_kv_size}, and rejected rows cannot be taken off a rotating cache; remove "
            "one of them."
        )
    if padded and not serial:
        raise ScenarioConflict(
            f"there is a draft, layout is padded and schedule is {schedule.kind}, and mlx-lm speculates for one request "
            "at a time; use schedule serial, or layout packed."
        )
    if padded and scenario.force_tokens is not None:
        raise ScenarioConflict(
            "there are draft and force_tokens, and mlx-lm's own speculation cannot be told its tokens; remove one of "
            "them, or use layout packed."
        )


def _check_mlx_lm(scenario: Scenario) -> None:
    """Raises ScenarioConflict for what is mlx-lm's own with another engine, and for what its one random state cannot give."""
    own = {"adapter_path": scenario.adapter_path, "max_kv_size": scenario.cache.max_kv_size}
    for request in scenario.requests:
        own |= {name: True for name in ("messages", "chat_template_args", "stop") if getattr(request, name)}
        own |= dict.fromkeys(request.sampling.beyond_keyed, True)
    asked = next((name for name, value in own.items() if value), None)
    if asked is not None and scenario.engine != MLX:
        instead = (
            "put it into engine.body as the server names it"
            if scenario.engine == SERVER
            else "use engine mlx"
        )
        raise ScenarioConflict(
            f"{asked} is mlx-lm's own, and engine is {scenario.engine}; remove {asked}, or {instead}."
        )
    if scenario.cache.max_kv_size is not None and scenario.schedule.layout == "packed":
        raise ScenarioConflict(
            f"max_kv_size is {scenario.cache.max_kv_size} and layout is packed, whose caches are detdiff's; remove max_kv_size, or use "
            "layout padded."
        )
    drawing = [r for r in scenario.requests if r.sampling.sampler == MLX_LM and r.sampling.draws]
    other = next((r for r in drawing if r.sampling.seed != drawing[0].sampling.seed), None)
    if other is not None and scenario.schedule.kind != "serial":
        raise ScenarioConflict(
            f"request {drawing[0].id!r} has the seed {drawing[0].sampling.seed}, request {other.id!r} has {other.sampling.seed}, and "
            f"schedule is {scenario.schedule.kind}: mlx-lm draws for a whole batch from MLX's one random state, which has one seed (its "
            "server runs requests with a seed one by one). Give them one seed, use schedule serial, or sampler detdiff."
        )


def _check_task(scenario: Scenario) -> None:
    task, generates = scenario.task, scenario.task == GENERATE
    scored = next((r.id for r in scenario.requests if r.continuation is not None or r.score_from != 1), None)
    if scored is not None and task != SCORE:
        raise ScenarioConflict(
            f"request {scored!r} says which tokens are scored, and task is {task}; remove that, or set task to score."
        )
    if scenario.pooling != Scenario.pooling and task != EMBED:
        raise ScenarioConflict(
            f"pooling is {scenario.pooling} and task is {task}; remove pooling, or set task to embed."
        )
    wrong = {
        "a draft": scenario.speculation is not None,
        "force_tokens": scenario.force_tokens is not None,
        "lens": scenario.capture.lens,
        "settings of the cache": scenario.cache != CachePlan(),
        "a setting of sampling": any(r.sampling != Sampling() for r in scenario.requests),
        "a stop text": any(r.stop for r in scenario.requests),
        "a later turn": any(r.turn is not None for r in scenario.requests),
        "a request that is cancelled": any(r.cancel is not None for r in scenario.requests),
    }
    found = next((name for name, there in wrong.items() if there), None)
    if not generates and found is not None:
        raise ScenarioConflict(f"there is {found}, and task is {task}, which generates nothing; remove it.")
    if not generates and scenario.schedule.kind == "continuous" and scenario.schedule.layout == "padded":
        raise ScenarioConflict(
            f"schedule is continuous and task is {task}, whose batches run one after the other; use serial, static or "
            "static:N, or layout packed."
        )
