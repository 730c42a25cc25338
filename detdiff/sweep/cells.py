"""What is done for one cell: its scenario recorded, or two recordings compared, and the answer written and checked."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, Final

from detdiff.commands.sides import Engines, Side, as_given, record_trace
from detdiff.compare import compare
from detdiff.compare.tokens import same_weights
from detdiff.engines.registry import engine_of
from detdiff.errors import AnswerError, DetdiffError, Failure, NothingComparable, TraceError
from detdiff.explain import explain
from detdiff.report.json import to_json, verdict_json
from detdiff.report.saved import SavedAnswer, read_saved
from detdiff.scenario import Scenario
from detdiff.trace import Trace

from .grid import CellPair, HowCompared

TRACES, ANSWERS, FAILURES = "traces", "answers", "failures"
CHECKSUM: Final = ".sha256"
_ENGINES: list[Engines] = []


@dataclass(frozen=True)
class RecordTask:
    """A scenario that is to be recorded as the trace ``name``."""

    name: str
    scenario: Scenario

    @property
    def engine(self) -> str:
        """What has to be opened for it: tasks that share it share a model."""
        return json.dumps(engine_of(self.scenario), sort_keys=True)


@dataclass(frozen=True)
class CompareTask:
    """A pair whose two traces are there."""

    pair: CellPair
    how: HowCompared

    @property
    def name(self) -> str:
        """The pair's."""
        return self.pair.name

    @property
    def engine(self) -> str:
        """What has to be opened for it; "" where nothing is run again."""
        if self.how.verdict == "never":
            return ""
        return json.dumps(engine_of(self.pair.b.scenario), sort_keys=True)


Task = RecordTask | CompareTask


@dataclass(frozen=True)
class TaskResult:
    """What came of a task: the answer's text for a comparison, a failure, or neither for a recording. ``seconds`` it took."""

    text: str = ""
    failure: Failure | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class SweepFolder:
    """Where a sweep keeps its traces, answers and failures, each under its cell's name."""

    path: Path

    def trace(self, name: str) -> Path:
        return self.path / TRACES / name

    def answer(self, name: str) -> Path:
        return self.path / ANSWERS / f"{name}.json"

    def failure(self, name: str) -> Path:
        return self.path / FAILURES / f"{name}.json"

    def recorded(self, name: str, scenario: Scenario) -> bool:
        """Whether the whole trace of this scenario is there, by its checksums."""
        try:
            trace = Trace.open(self.trace(name), checked=True)
        except (TraceError, OSError):
            return False
        return trace.complete and trace.scenario == scenario.to_dict()

    def answered(self, pair: CellPair, how: HowCompared) -> SavedAnswer | None:
        """The pair's answer, where it is there, whole, and of these scenarios; None otherwise."""
        path = self.answer(pair.name)
        try:
            text = path.read_bytes()
            said = path.with_suffix(CHECKSUM).read_text(encoding="ascii").split()
            if said[:1] != [hashlib.sha256(text).hexdigest()]:
                return None
            saved = read_saved(path)
        except (OSError, ValueError, AnswerError):
            return None
        divergence = saved.divergence
        if divergence is None:
            return None
        wanted = how.verdict == "always" or (how.verdict == "different" and not divergence.identical)
        of = [dict(run.scenario) for run in (divergence.a, divergence.b)]
        same = of == [pair.a.scenario.to_dict(), pair.b.scenario.to_dict()]
        return saved if same and wanted == (saved.verdict is not None) else None

    def failed(self, name: str) -> Failure | None:
        """Why the pair has no answer, where that was told."""
        try:
            found = json.loads(self.failure(name).read_text(encoding="utf-8"))
            return Failure(found["error"], found["message"], found["exit_code"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, name: str, text: str) -> None:
        """Write an answer, checked before its checksum says that it is there. Raises OSError and AnswerError."""
        path = self.answer(name)
        data = text.encode()
        put(path, data)
        read_saved(path)
        if path.read_bytes() != data:
            raise OSError(0, "what was written is read back as something else", str(path))
        line = f"{hashlib.sha256(data).hexdigest()}  {path.name}\n"
        put(path.with_suffix(CHECKSUM), line.encode())
        self.failure(name).unlink(missing_ok=True)

    def tell(self, name: str, failure: Failure) -> None:
        """Write why a pair has no answer. Raises OSError."""
        put(self.failure(name), (json.dumps(failure.to_json(), indent=1) + "\n").encode())
        for path in (self.answer(name), self.answer(name).with_suffix(CHECKSUM)):
            path.unlink(missing_ok=True)


def put(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, through to the disk. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def run_task(task: Task, folder: Path) -> TaskResult:
    """Do one task in this process, whose engines stay open for the next; whatever goes wrong is the result's failure."""
    begun = monotonic()
    if not _ENGINES:
        _ENGINES.append(Engines())
    text, failure = "", None
    try:
        if isinstance(task, RecordTask):
            _record(task, SweepFolder(folder), _ENGINES[0])
        else:
            text = _compare(task, SweepFolder(folder), _ENGINES[0])
    except Exception as error:
        failure = without_places(Failure.of(error), {f"{folder}{os.sep}": ""})
    return TaskResult(text, failure, monotonic() - begun)


def without_places(failure: Failure, places: Mapping[str, str]) -> Failure:
    """The same failure wherever the sweep's folder is."""
    message = failure.message
    for place, name in places.items():
        message = message.replace(place, name)
    return Failure(failure.error, message, failure.exit_code)


def _record(task: RecordTask, folder: SweepFolder, engines: Engines) -> None:
    final = folder.trace(task.name)
    final.parent.mkdir(parents=True, exist_ok=True)
    with _aside(final) as temporary:
        engines.only_for(task.scenario)
        try:
            record_trace(task.scenario, temporary, None, engines)
        except DetdiffError as error:
            error.args = (str(error).replace(str(temporary), f"{TRACES}/{task.name}"),)
            raise
        shutil.rmtree(final, ignore_errors=True)
        # Under another name than it was recorded by: a verdict is the same whoever recorded.
        os.replace(temporary, final)


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _compare(task: CompareTask, folder: SweepFolder, engines: Engines) -> str:
    pair, how = task.pair, task.how
    if pair.a.recording == pair.b.recording:
        raise NothingComparable(
            f"{pair.a.name} and {pair.b.name} are the same run, as their values change nothing that the scenario says; expected two "
            "runs. Exclude one of the cells."
        )
    names = [cell.recording for cell in (pair.a, pair.b)]
    a, b = (Trace.open(folder.trace(name), checked=True) for name in names)
    # Cells that are neighbours along another axis are of one model, or one engine, and say more to each other.
    models, across = how.across_models and not same_weights(a, b), how.across_engines and a.engine != b.engine
    answer: Any = compare(a, b, across_models=models, across_engines=across)
    told: Callable[[Any], dict[str, Any]] = to_json
    if how.verdict == "always" or (how.verdict == "different" and not answer.identical):
        scenarios = pair.a.scenario, pair.b.scenario
        engines.only_for(*scenarios)
        opened = engines.of(scenarios[0]), engines.of(scenarios[1])
        told = verdict_json
        verdict = explain(a, b, budget=how.budget, engine=opened, across_models=models, across_engines=across)
        # Answers hold no times: the same sweep twice gives the same bytes.
        answer = replace(verdict, controls=tuple(replace(each, seconds=0.0) for each in verdict.controls))
    sides = (
        Side("a", pair.a.scenario, f"{TRACES}/{names[0]}"),
        Side("b", pair.b.scenario, f"{TRACES}/{names[1]}"),
    )
    return json.dumps(told(as_given(answer, sides, (a, b))), indent=1, allow_nan=False) + "\n"


_PROCESS: Final = 700 << 20
"""Bytes of a process with mlx-lm imported and nothing loaded, on the wide side."""
_WEIGHTS: Final = (".safetensors", ".gguf", ".bin", ".npz")


def memory_of(scenario: Scenario) -> int:
    """About how many bytes a worker takes that runs ``scenario``: its models' weights, what a forward may capture, the process."""
    models = [scenario.model, *([scenario.speculation.draft] if scenario.speculation is not None else [])]
    weights = sum(map(_weights, models))
    return int(1.2 * weights) + 2 * (scenario.capture.memory_mb << 20) + _PROCESS


def _weights(model: str) -> int:
    path = Path(model)
    if path.is_file():
        return path.stat().st_size
    if not path.is_dir():
        hub = Path(
            os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub"
        )
        snapshots = sorted((hub.expanduser() / f"models--{model.replace('/', '--')}" / "snapshots").glob("*"))
        if "/" not in model or not snapshots:
            return 0
        path = snapshots[-1]
    return sum(each.stat().st_size for each in path.iterdir() if each.suffix in _WEIGHTS)
