"""The two sides of a comparison: traces that are there, or scenarios to record first."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from detdiff.errors import CommandError, DetdiffError, Interrupted, TraceExists
from detdiff.scenario import Scenario, located, parse_flags
from detdiff.trace import Trace

if TYPE_CHECKING:
    from detdiff.compare import Divergence
    from detdiff.engines.mlx.model import LoadedModel

OnToken = Callable[[int, int], None]
Progress = Callable[[str], AbstractContextManager[OnToken | None]]
"""Opens a progress bar of that label; what it gives is called with tokens so far and tokens at most."""


@dataclass(frozen=True)
class Asked:
    """The arguments of a comparison; ``both``, ``a`` and ``b`` are flags, ``a`` and ``b`` win over ``both``.

    ``force_tokens`` is "a" or a trace's directory.
    """

    files: tuple[Path, ...] = ()
    model: str | None = None
    prompts: tuple[str, ...] = ()
    both: str = ""
    a: str = ""
    b: str = ""
    partial: bool = False
    keep: Path | None = None
    replay: bool = False
    force_tokens: str | None = None


@dataclass(frozen=True)
class Side:
    """``name`` is a or b; ``source`` is the trace, or what to record; ``given`` is what the user named it by.

    A side that is ``fed`` gets the tokens that side a generated.
    """

    name: str
    source: Trace | Scenario
    given: str
    fed: bool = False


def sides(asked: Asked) -> tuple[Side, Side]:
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


def _check_files(asked: Asked) -> None:
    for path in asked.files:
        if not path.exists():
            raise CommandError(
                f"{path} is not there; expected a trace, which is a directory that `detdiff record` wrote, or a "
                "scenario file. Check the spelling."
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


def _from_flags(asked: Asked) -> tuple[Side, Side]:
    if asked.model is None:
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
    made = []
    for name, own in (("a", asked.a), ("b", asked.b)):
        with located(f"side {name}"):
            flags = merged(asked.both, own)
            scenario = Scenario.from_flags(asked.model, asked.prompts, flags)
            made.append(Side(name, scenario, f"side {name}"))
    return made[0], made[1]


def _from_files(asked: Asked) -> tuple[Side, Side]:
    if len(asked.files) == 1:
        path = asked.files[0]
        if path.is_dir() or not (asked.a or asked.b):
            raise CommandError(
                f"{path} is the only file, and a comparison has two sides. Name the second trace or scenario file, or "
                "give one scenario file and say with --a and --b what differs."
            )
    first, second = asked.files[0], asked.files[-1]
    return _from_file("a", first, asked, asked.a), _from_file("b", second, asked, asked.b)


def _from_file(name: str, path: Path, asked: Asked, own: str) -> Side:
    with located(f"side {name}"):
        flags = merged(asked.both, own)
    if path.is_dir():
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
    shared = [word for word in shlex.split(both) if word.partition("=")[0] not in given]
    return f"{shlex.join(shared)} {own}"


def _check_keep(keep: Path, found: tuple[Side, Side]) -> None:
    to_record = [side.name for side in found if isinstance(side.source, Scenario)]
    if not to_record:
        raise CommandError("--keep says where to record, and both sides are traces already. Leave it out.")
    for name in to_record:
        # Before the first run, not after it.
        path = keep / name
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise TraceExists(
                f"{path} exists and is not an empty directory; expected a new path for the trace. Choose another "
                "directory to keep the traces in, or remove it first."
            )


@contextmanager
def recorded(
    found: tuple[Side, Side], keep: Path | None, progress: Progress, loaded: LoadedModel | None = None
) -> Iterator[tuple[Trace, Trace]]:
    """Both sides as traces; scenarios are recorded, below ``keep`` or in a directory that is removed at the end.

    ``loaded`` is the model of both where it is loaded already.
    """
    if all(isinstance(side.source, Trace) for side in found):
        yield _trace(found[0]), _trace(found[1])
        return
    with tempfile.TemporaryDirectory(prefix="detdiff-") as folder:
        loaded = loaded or _shared_model(found)
        traces: list[Trace] = []
        for side in found:
            source = side.source
            if isinstance(source, Scenario):
                path = (keep or Path(folder)) / side.name
                if side.fed:
                    source = source.with_changes(force_tokens=str(traces[0].path))
                with progress(f"run {side.name}") as on_token:
                    traces.append(record_trace(source, path, loaded, on_token, kept=keep is not None))
            else:
                traces.append(_trace(side))
        try:
            yield traces[0], traces[1]
        except DetdiffError as error:
            if keep is None:
                _name_as_given(error, found, traces)
            raise


def _name_as_given(error: DetdiffError, found: tuple[Side, Side], traces: list[Trace]) -> None:
    """Puts what the user named in the place of temporary paths, which are gone when the message is read."""
    message = str(error)
    for side, trace in zip(found, traces, strict=True):
        message = message.replace(str(trace.path), side.given)
    error.args = (message,)


def named(divergence: Divergence, found: tuple[Side, Side], keep: Path | None) -> Divergence:
    """The answer without paths of traces that are gone when it is read."""
    if keep is not None:
        return divergence
    runs = {}
    for side in found:
        if isinstance(side.source, Scenario):
            run = replace(getattr(divergence, side.name), trace=f"{side.name} (not kept)")
            if side.fed:
                run = replace(run, scenario={**run.scenario, "force_tokens": found[0].given})
            runs[side.name] = run
    return replace(divergence, **runs)


def record_trace(
    scenario: Scenario, path: Path, loaded: LoadedModel | None, on_token: OnToken | None, *, kept: bool = True
) -> Trace:
    """Record, and say after an interrupt what stays readable. Raises Interrupted and what ``record`` raises."""
    try:
        from detdiff.engines.mlx.record import RecordOptions, record

        return record(scenario, path, loaded=loaded, options=RecordOptions(progress=on_token))
    except KeyboardInterrupt:
        raise Interrupted(_left(path, kept)) from None


def _left(path: Path, kept: bool) -> str:
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


def _shared_model(found: tuple[Side, Side]) -> LoadedModel | None:
    """One load for both sides; None where it would serve one alone, which ``record`` then loads itself."""
    models = [side.source.model for side in found if isinstance(side.source, Scenario)]
    if models != models[:1] * 2:
        return None
    from detdiff.engines.mlx.model import load

    return load(models[0])


def _trace(side: Side) -> Trace:
    assert isinstance(side.source, Trace)
    return side.source
