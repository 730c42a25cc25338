"""The two sides of a comparison: traces that are there, or scenarios to record first."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from detdiff.commands.prompts import read_prompts, with_prompts
from detdiff.commands.start import settled, wait_for_use
from detdiff.compare.across import other_engines
from detdiff.engines.base import RESET, SITES, Engine, RunOptions
from detdiff.engines.record import record
from detdiff.engines.registry import BUILT_IN, DEFAULT, open_engine, same_engine
from detdiff.errors import CommandError, DetdiffError, Interrupted, NothingComparable, TraceExists
from detdiff.scenario import Scenario, located, parse_flags
from detdiff.trace import Address, Place, Trace
from detdiff.trace.files import reading
from detdiff.trace.store import is_taken

if TYPE_CHECKING:
    from detdiff.compare import Divergence

T = TypeVar("T")

OnToken = Callable[[int, int], None]
Progress = Callable[[str], AbstractContextManager[OnToken | None]]
"""Opens a progress bar of that label; what it gives is called with tokens so far and tokens at most."""


@dataclass(frozen=True)
class ComparisonArguments:
    """The arguments of a comparison; ``both``, ``a`` and ``b`` are flags, ``a`` and ``b`` win over ``both``.

    ``force_tokens`` is "a" or a trace's directory. ``across_models``: two sets of weights may be compared; ``across_engines``: two engines may. ``imports`` are the
    modules that were imported before.
    """

    files: tuple[Place, ...] = ()
    model: str | None = None
    prompts: tuple[str, ...] = ()
    prompts_file: Path | None = None
    both: str = ""
    a: str = ""
    b: str = ""
    partial: bool = False
    keep: Place | None = None
    replay: bool = False
    force_tokens: str | None = None
    across_models: bool = False
    across_engines: bool = False
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Side:
    """``name`` is a or b; ``source`` is the trace, or what to record; ``given`` is what the user named it by.

    A side that is ``fed`` gets the tokens that side a generated.
    """

    name: str
    source: Trace | Scenario
    given: str
    fed: bool = False


def sides(asked: ComparisonArguments) -> tuple[Side, Side]:
    """Read what was asked for; nothing is run yet.

    Raises CommandError for arguments that do not go together, and what reading traces and scenarios raises.
    """
    _check_files(asked)
    with located("--both"):
        parse_flags(asked.both)
    found = _from_flags(asked) if not asked.files else _from_files(asked)
    if asked.force_tokens is not None:
        found = _forced(found, asked.force_tokens)
    if asked.keep is not None:
        _check_keep(asked.keep, found)
    return found


def read_scenario(path: Place) -> Scenario:
    """The scenario of a TOML file, or of a trace. Raises what reading either raises."""
    if isinstance(path, Address) or path.is_dir():
        return Scenario.from_dict(Trace.open(path).scenario, where=f"the scenario of {path}")
    return Scenario.from_toml(path)


def check_replay(asked: ComparisonArguments, replay: bool) -> None:
    """Raises CommandError where two engines are to be replayed."""
    if replay and asked.across_engines:
        raise CommandError(
            "--replay captures values around each origin, and --across-engines compares two engines, which have no origin in "
            "common. Leave --replay out, and record values with --both capture=full."
        )


def _forced(found: tuple[Side, Side], tokens: str) -> tuple[Side, Side]:
    """Side b fed the tokens of side a, or every side that is to be recorded those of a trace. Raises CommandError."""
    a, b = found
    if not isinstance(b.source, Scenario):
        raise CommandError(
            f"--force-tokens says what side b is fed, and {b.given} was recorded already. Give side b as a scenario, or leave "
            "--force-tokens out."
        )
    if tokens == "a":
        return a, replace(b, fed=True)
    given = Trace.open(tokens)
    a, b = (
        replace(side, source=side.source.with_changes(force_tokens=str(given.path)))
        if isinstance(side.source, Scenario)
        else side
        for side in found
    )
    return a, b


def _check_files(asked: ComparisonArguments) -> None:
    for path in asked.files:
        if isinstance(path, Path) and not path.exists():
            raise CommandError(
                f"{path} is not there; expected a trace, which is a directory that `detdiff record` wrote, or a "
                "scenario file. Check the spelling."
            )
    if asked.files and asked.prompts_file is not None:
        raise CommandError(
            f"There are both {asked.files[0]} and --prompts. --prompts says what to run where there are no files; give either."
        )
    if not asked.files or (asked.model is None and not asked.prompts):
        return
    first = asked.files[0]
    if asked.prompts:
        raise CommandError(
            f"There are both {first} and --prompt. --model and --prompt say what to run where there are no files; give "
            "either."
        )
    scenarios = [path for path in asked.files if not path.is_dir()]
    if scenarios:
        raise CommandError(
            f"There are both the scenario file {scenarios[0]} and --model. A scenario file names its own model; to change "
            "it, or any other key, for both sides, write --both model=NAME."
        )
    if not asked.replay:
        raise CommandError(
            f"There are both the trace {first} and --model. Comparing traces runs no model; --model says with --replay "
            "where the traces' model is now. Add --replay, or leave --model out."
        )


def _from_flags(asked: ComparisonArguments) -> tuple[Side, Side]:
    flags = {}
    for name, own in (("a", asked.a), ("b", asked.b)):
        with located(f"side {name}"):
            flags[name] = merged(asked.both, own)
    if asked.model is None and not all(
        parse_flags(own).keys() & {"model", "engine"} for own in flags.values()
    ):
        raise CommandError(
            "There is nothing to compare: give two traces or two scenario files, one scenario file with --a and --b, "
            "or --model and --prompt with --a and --b, such as --model builtin --prompt 'In the beginning' --a "
            "schedule=serial --b schedule=static."
        )
    if not (asked.a or asked.b):
        raise CommandError(
            "Both sides would be the same run. Say with --a and --b what differs, such as --a schedule=serial --b "
            "schedule=static, or with one of them alone."
        )
    if asked.prompts_file is not None and asked.prompts:
        raise CommandError(
            "There are both --prompts and --prompt; put all prompts into the file, or leave it out."
        )
    given = () if asked.prompts_file is None else read_prompts(asked.prompts_file)
    made = []
    for name, own in flags.items():
        with located(f"side {name}"):
            texts = [each["prompt"] for each in given] or asked.prompts
            scenario = Scenario.from_flags(asked.model, texts, own)
            if given:
                scenario = with_prompts(scenario, given)
            made.append(Side(name, scenario, f"side {name}"))
    return made[0], made[1]


def _from_files(asked: ComparisonArguments) -> tuple[Side, Side]:
    if len(asked.files) == 1:
        path = asked.files[0]
        if path.is_dir() or not (asked.a or asked.b):
            raise CommandError(
                f"{path} is the only file, and a comparison has two sides. Name the second trace or scenario file, or "
                "give one scenario file and say with --a and --b what differs."
            )
    first, second = asked.files[0], asked.files[-1]
    return _from_file("a", first, asked, asked.a), _from_file("b", second, asked, asked.b)


def _from_file(name: str, path: Place, asked: ComparisonArguments, own: str) -> Side:
    with located(f"side {name}"):
        flags = merged(asked.both, own)
    if isinstance(path, Address) or path.is_dir():
        if flags.strip():
            raise CommandError(
                f"{path} is a trace, which was recorded already, and {flags.strip()!r} would change how it is "
                f"recorded. Leave that out, or give side {name} as a scenario file."
            )
        return Side(name, Trace.open(path, partial=asked.partial, checked=True), str(path))
    scenario = Scenario.from_toml(path)
    with located(f"side {name}"):
        return Side(name, scenario.with_changes(**parse_flags(flags)), str(path))


def merged(both: str, own: str) -> str:
    """The flags of one side: all of its own, and those for both sides that it does not give itself.

    Raises ScenarioFlagError, ScenarioKeyUnknown and ScenarioTypeError.
    """
    given = parse_flags(own)
    shared = [word for word in shlex.split(both) if not parse_flags(shlex.quote(word)).keys() <= given.keys()]
    return f"{shlex.join(shared)} {own}"


def _check_keep(keep: Place, found: tuple[Side, Side]) -> None:
    to_record = [side.name for side in found if isinstance(side.source, Scenario)]
    if not to_record:
        raise CommandError("--keep says where to record, and both sides are traces already. Leave it out.")
    for name in to_record:
        # Before the first run, not after it.
        path = keep / name
        with reading(path):
            taken = is_taken(path)
        if taken:
            raise TraceExists(
                f"{path} exists and is not an empty directory; expected a new path for the trace. Choose another "
                "directory to keep the traces in, or remove it first."
            )


class Engines:
    """Engines that are opened, each for all sides that ask for the same."""

    def __init__(self) -> None:
        self._opened: list[tuple[Scenario, Engine]] = []
        self._ran: list[Engine] = []

    def of(self, scenario: Scenario) -> Engine:
        """The engine that ``scenario`` names. Raises what opening it raises."""
        for other, engine in self._opened:
            if same_engine(other, scenario):
                return engine
        if scenario.engine == DEFAULT:
            wait_for_use("torch")
        engine = open_engine(scenario)
        settled()
        self._opened.append((scenario, engine))
        return engine

    def to_run(self, scenario: Scenario) -> Engine:
        """The same, as if nothing had been run on it: mlx keeps nothing from run to run, others are reset or opened again."""
        engine = self.of(scenario)
        if engine.name != DEFAULT and engine in self._ran:
            if RESET in engine.capabilities:
                engine.reset()
            else:
                self._opened = [each for each in self._opened if each[1] is not engine]
                engine = self.of(scenario)
        self._ran.append(engine)
        return engine

    def only_for(self, *scenarios: Scenario) -> None:
        """Let go of every engine that none of ``scenarios`` names: two models may not fit into memory."""
        self._opened = [
            each for each in self._opened if any(same_engine(each[0], scenario) for scenario in scenarios)
        ]
        self._ran = [engine for engine in self._ran if any(engine is each[1] for each in self._opened)]


@contextmanager
def recorded(
    found: tuple[Side, Side],
    keep: Place | None,
    progress: Progress,
    engines: Engines | None = None,
    *,
    across_models: bool = False,
    across_engines: bool = False,
) -> Iterator[tuple[Trace, Trace]]:
    """Both sides as traces; scenarios are recorded, below ``keep`` or in a directory that is removed at the end.

    Raises NothingComparable, before anything is recorded, for two engines with sites of their own unless
    ``across_engines``, for two sets of weights unless that or ``across_models``, and what opening engines and running raise.
    """
    if all(isinstance(side.source, Trace) for side in found):
        yield _trace(found[0]), _trace(found[1])
        return
    engines = engines or Engines()
    if not across_engines:
        _check_one_engine(found, engines)
    if not (across_models or across_engines):
        _check_one_model(found, engines)
    with tempfile.TemporaryDirectory(prefix="detdiff-") as folder:
        traces: list[Trace] = []
        for side in found:
            source = side.source
            if isinstance(source, Scenario):
                path = (keep or Path(folder)) / side.name
                if side.fed:
                    source = source.with_changes(force_tokens=str(traces[0].path))
                if across_models:
                    engines.only_for(source)
                with progress(f"run {side.name}") as on_token:
                    traces.append(record_trace(source, path, on_token, engines, kept=keep is not None))
            else:
                traces.append(_trace(side))
        try:
            yield traces[0], traces[1]
        except DetdiffError as error:
            if keep is None:
                error.args = (as_given(str(error), found, traces),)
            raise


def _check_one_engine(found: tuple[Side, Side], engines: Engines) -> None:
    """Raises NothingComparable for two engines that both show sites, each by names of its own."""
    sources = [side.source for side in found]
    opened = [None if isinstance(source, Trace) else engines.of(source) for source in sources]
    names, shown = [], []
    for source, engine in zip(sources, opened, strict=True):
        if isinstance(source, Trace):
            names.append(source.engine)
            shown.append("sites" not in source.lacks)
        elif engine is not None:
            names.append(engine.name)
            shown.append(SITES in engine.capabilities)
    if None in opened and not set(names) <= BUILT_IN.keys():
        return  # what the sites of a user's engine are called is known when it has run
    # A factory of the user's may give an engine that is there already, whose sites have the same names then.
    if names[0] != names[1] and type(opened[0]) is not type(opened[1]) and all(shown):
        said = other_engines(found[0].given, names[0], found[1].given, names[1])
        raise NothingComparable(f"{said} Nothing was recorded.")


def _check_one_model(found: tuple[Side, Side], engines: Engines) -> None:
    """Raises NothingComparable for two sides whose configurations or weights differ."""
    a, b = (side.source for side in found)
    if isinstance(a, Scenario) and isinstance(b, Scenario) and same_engine(a, b):
        return
    models = [
        dict(source.model) if isinstance(source, Trace) else dict(engines.of(source).identity)
        for source in (a, b)
    ]
    for key, what in (("config_sha256", "configuration"), ("weights_sha256", "weights")):
        first, second = (model.get(key) for model in models)
        if None not in (first, second) and first != second:
            names = " and ".join(
                f"{side.given} is of {model.get('name')!r}" for side, model in zip(found, models, strict=True)
            )
            raise NothingComparable(
                f"These are different models: {names}, and their {what} hashes differ ({str(first)[:12]} and "
                f"{str(second)[:12]}). Nothing was recorded. Give both sides one model, or compare two models' tokens, logits "
                "and sites of the same name with --across-models."
            )


def as_given(value: T, found: tuple[Side, Side], traces: tuple[Trace, Trace] | list[Trace]) -> T:
    """``value`` (text, or an answer with texts inside) with what the user named in the place of recordings' paths."""
    paths = {
        str(trace.path): side.given
        for side, trace in zip(found, traces, strict=True)
        if isinstance(side.source, Scenario)
    }
    return with_names(value, paths)


def named(divergence: Divergence, found: tuple[Side, Side], keep: Place | None) -> Divergence:
    """The answer without paths of traces that are gone when it is read."""
    if keep is not None:
        return divergence
    gone = [side for side in found if isinstance(side.source, Scenario)]
    paths = {getattr(divergence, side.name).trace: side.given for side in gone}
    return with_names(divergence.not_kept(side.name for side in gone), paths)


def with_names(value: T, paths: Mapping[str, str]) -> T:
    """A copy of ``value`` with names for paths, wherever they stand; ``value`` itself where there is none."""
    changed: Any = value
    if isinstance(value, str):
        for path, name in paths.items():
            changed = changed.replace(path, name)
    elif isinstance(value, (tuple, list)):
        inner = [with_names(each, paths) for each in value]
        if any(new is not old for new, old in zip(inner, value, strict=True)):
            changed = type(value)(inner)
    elif isinstance(value, Mapping):
        table = {key: with_names(each, paths) for key, each in value.items()}
        if any(new is not value[key] for key, new in table.items()):
            changed = table
    elif is_dataclass(value) and not isinstance(value, type):
        own = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        new = {name: with_names(each, paths) for name, each in own.items()}
        if different := {name: each for name, each in new.items() if each is not own[name]}:
            changed = replace(value, **different)
    result: T = changed
    return result


def record_trace(
    scenario: Scenario,
    path: Place,
    on_token: OnToken | None,
    engines: Engines | None = None,
    *,
    kept: bool = True,
) -> Trace:
    """Record, and say after an interrupt what stays readable. Raises Interrupted and what ``record`` raises."""
    try:
        engine = (engines or Engines()).to_run(scenario)
        return record(scenario, path, engine=engine, options=RunOptions(progress=on_token))
    except KeyboardInterrupt:
        raise Interrupted(_left(path, kept)) from None


def _left(path: Place, kept: bool) -> str:
    if not kept:
        return (
            "Interrupted; the runs were recorded into a temporary directory, which is removed. `detdiff compare` keeps "
            "them with --keep DIR."
        )
    try:
        trace = Trace.open(path)
    except DetdiffError:
        return f"Interrupted before anything was recorded in {path}."
    forwards = len(trace.forwards())
    return (
        f"Interrupted; {path} keeps what was recorded until then ({len(trace.row_index().request)} rows of {forwards} "
        f"forwards) and is marked incomplete. `detdiff show {shlex.quote(str(path))}` reads it."
    )


def _trace(side: Side) -> Trace:
    assert isinstance(side.source, Trace)
    return side.source
