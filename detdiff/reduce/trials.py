"""Runs candidates, and keeps what they gave: the pair so far, the steps that led to it, and the outcome of every candidate.

Both sides are recorded without values and compared; a verdict is asked for where that is worth it. The search decides by outcomes
alone. So a search that was interrupted is one that begins anew and finds its outcomes in the folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from detdiff.compare import Divergence, compare
from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.engines.mlx.model_directory import twin_of
from detdiff.engines.mlx.serve import Models
from detdiff.errors import (
    NothingComparable,
    ReductionFolderUnusable,
    ReductionOfAnotherCase,
    ReplayError,
    TraceWriteError,
    words_of,
)
from detdiff.explain import Verdict
from detdiff.explain.case import Case
from detdiff.explain.investigate import judge
from detdiff.scenario import Scenario
from detdiff.trace import Trace
from detdiff.trace.files import replace_file
from detdiff.trace.store import remove_files

from .pair import TWIN, TWIN_DRAFT, Candidate, Twin, short_toml
from .result import Step, TrialOutcome

CASE, TRIED, STEPS = "case.json", "tried.jsonl", "steps.jsonl"
SCHEMA = "detdiff.reduction/2"


class ReductionFolder:
    """A reduction's folder, opened: ``answers`` and ``verdicts`` (kind and rule) by candidate, ``steps`` on disk."""

    def __init__(self, path: Path | str, case: Mapping[str, Any]) -> None:
        """Make the folder, or go on with what is in it; ``case`` says what is reduced, and how.

        Raises ReductionOfAnotherCase where it holds the reduction of another one, and ReductionFolderUnusable where it
        holds something else, or a file of it is damaged.
        """
        self.path = Path(path)
        self.answers: dict[str, TrialOutcome] = {}
        self.verdicts: dict[str, tuple[str, str]] = {}
        self.steps: list[Step] = []
        self._pair: Candidate | None = None
        known = self.path / CASE
        if known.is_file():
            self._check(known, case)
            self._read()
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ReductionFolderUnusable(
                f"{self.path} exists and is neither an empty directory nor one that a reduction was written to. Choose another "
                "directory, or remove it first."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        _write(known, json.dumps({"schema": SCHEMA, **case}, indent=1) + "\n")

    def answer(self, key: str, answer: TrialOutcome) -> None:
        """Keep what a candidate gave."""
        self._append({"key": key, "answer": answer.to_json()})
        self.answers[key] = answer

    def verdict(self, key: str, kind: str, rule: str) -> None:
        """Keep the verdict on a candidate."""
        self._append({"key": key, "verdict": kind, "rule": rule})
        self.verdicts[key] = (kind, rule)

    def step(self, step: Step, pair: Candidate, twins: Callable[[Candidate, Path], None]) -> bool:
        """Keep a step and the pair that it led to; ``twins`` writes a pair's twins below the folder. True: it is new."""
        new = step.number >= len(self.steps)
        if not new and self.steps[step.number] != step:
            self.steps = self.steps[: step.number]
            new = True
        if new:
            self.steps.append(step)
        # What leads up to the pair that lies there is not written again.
        if new or step.number == len(self.steps) - 1:
            self._pair, self._twins = pair, twins
            self.write_pair()
        return new

    def write_pair(self) -> None:
        """The pair of the last step as files, and the steps; also what an interrupt left half done."""
        if self._pair is None:
            return
        if self._pair.twin is not None:
            self._twins(self._pair, self.path)
        else:
            for name in (TWIN, TWIN_DRAFT):
                shutil.rmtree(self.path / name, ignore_errors=True)
        for name in "ab":
            _write(self.path / f"{name}.toml", short_toml(_named(self._pair, name)))
        _write(self.path / STEPS, "".join(json.dumps(step.to_json()) + "\n" for step in self.steps))

    def _check(self, known: Path, case: Mapping[str, Any]) -> None:
        stored = _object(known)
        wanted = json.loads(json.dumps({"schema": SCHEMA, **case}))
        other = [key for key in wanted if stored.get(key) != wanted[key]]
        if other:
            raise ReductionOfAnotherCase(
                f"{self.path} holds the reduction of another case: {', '.join(other)} in its {CASE} is not what is asked for "
                "now. Choose another directory, or remove this one."
            )

    def _read(self) -> None:
        for line in _lines(self.path / TRIED):
            try:
                if "answer" in line:
                    self.answers[line["key"]] = TrialOutcome.from_json(line["answer"])
                else:
                    self.verdicts[line["key"]] = (line["verdict"], line["rule"])
            except (KeyError, TypeError, ValueError):
                raise _damaged(self.path / TRIED) from None
        try:
            self.steps = [Step.from_json(line) for line in _lines(self.path / STEPS)]
        except (KeyError, TypeError):
            raise _damaged(self.path / STEPS) from None

    def _append(self, line: Mapping[str, Any]) -> None:
        with open(self.path / TRIED, "ab") as file:
            # Not synced: what a power cut takes is run again.
            file.write(json.dumps(line).encode() + b"\n")


def _named(pair: Candidate, side: str) -> Scenario:
    """A side's scenario as it lies beside its twins."""
    scenario = pair.side(side)
    if pair.twin is None:
        return scenario
    draft = scenario.speculation and replace(scenario.speculation, draft=TWIN_DRAFT)
    return replace(scenario, model=TWIN, speculation=draft)


def _write(path: Path, text: str) -> None:
    replace_file(path, [text.encode()], durable=False)


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise _damaged(path) from None
    return found if isinstance(found, dict) else {}


def _lines(path: Path) -> Sequence[Any]:
    """The whole lines of a file; one that was cut off at the end is taken away, so that others can follow."""
    if not path.is_file():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError:
        raise _damaged(path) from None


def _damaged(path: Path) -> ReductionFolderUnusable:
    return ReductionFolderUnusable(
        f"{path} is damaged: a line is not what a reduction writes. Expected the file as it was left. Remove the directory "
        "and reduce again."
    )


Progress = Callable[[int, int], None]
_FATAL = (TraceWriteError, OSError, MemoryError, ReplayError)


class ReductionBudgetSpent(Exception):
    """The budget of candidates is spent."""


@dataclass(eq=False)
class _ComparedPair:
    a: Trace
    b: Trace
    divergence: Divergence


class CandidateTrials:
    """Answers about candidates: from the folder where they are known, else by running them.

    ``models`` are the pair's own, used in every run. ``budget`` is how many candidates may be run, those of earlier,
    interrupted runs among them; None: any number. Temporary traces lie below ``scratch``.
    """

    def __init__(
        self,
        folder: ReductionFolder,
        models: Models,
        scratch: Path,
        budget: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._folder = folder
        self._own = models
        self._scratch = scratch
        self._budget = budget
        self._progress = progress
        self._asked: set[str] = set()
        self._count = 0
        self._kept: dict[str, _ComparedPair] = {}
        self._twins: dict[Twin, Models] = {}
        self._verdicts: dict[str, Verdict] = {}

    @property
    def tried(self) -> int:
        """Candidates asked about so far, each once."""
        return len(self._asked)

    def original(self, candidate: Candidate) -> TrialOutcome:
        """What the pair gives that is to be reduced. Raises what recording and comparing raise, but NothingComparable."""
        key = candidate.key
        self._asked.add(key)
        if key not in self._folder.answers:
            try:
                runs = self._record(candidate)
                found = TrialOutcome.of(runs.a, runs.b, runs.divergence)
            except NothingComparable:
                found = TrialOutcome(
                    0, None, why="the two runs have nothing in common that could be compared"
                )
            self._folder.answer(key, found)
        return self._folder.answers[key]

    def answer(self, candidate: Candidate) -> TrialOutcome:
        """What a candidate gives. Raises ReductionBudgetSpent, and what a full disk or spent memory raises."""
        key = candidate.key
        known = key in self._folder.answers
        # What is known costs nothing, so that a smaller budget never leads back to a larger pair.
        if not known and self._budget is not None and len(self._asked) >= self._budget:
            raise ReductionBudgetSpent
        self._asked.add(key)
        if not known:
            self._folder.answer(key, self._run(candidate))
        return self._folder.answers[key]

    def verdict(self, candidate: Candidate) -> tuple[str, str]:
        """Kind and rule of the verdict on a candidate that can be run."""
        key = candidate.key
        if key not in self._folder.verdicts:
            found = self.explained(candidate)
            self._folder.verdict(key, found.kind, found.rule)
        return self._folder.verdicts[key]

    def explained(self, candidate: Candidate) -> Verdict:
        """The verdict on a candidate, with its evidence; run again where it is known from an earlier run only."""
        key = candidate.key
        if key not in self._verdicts:
            runs = self._kept.get(key) or self._record(candidate)
            models = self._models(candidate.twin)
            case = Case.of(
                runs.a,
                runs.b,
                runs.divergence,
                loaded=models.target,
                draft=models.draft,
                progress=self._progress,
            )
            # The traces are gone when this is read.
            self._verdicts = {key: replace(judge(case), divergence=runs.divergence.not_kept("ab"))}
        return self._verdicts[key]

    def write_twins(self, candidate: Candidate, folder: Path) -> None:
        """The directories of a candidate's twins below ``folder``."""
        twin = candidate.twin
        assert twin is not None
        twin_of(self._own.target, folder / TWIN, twin.seed, twin.layers)
        if self._own.draft is not None and candidate.a.speculation is not None:
            twin_of(self._own.draft, folder / TWIN_DRAFT, twin.seed)
        else:
            shutil.rmtree(folder / TWIN_DRAFT, ignore_errors=True)

    def _run(self, candidate: Candidate) -> TrialOutcome:
        try:
            runs = self._record(candidate)
        except _FATAL:
            raise
        except Exception as error:
            # A model's own code may fail in any way on a size that it never met.
            return TrialOutcome(0, None, why=f"{type(error).__name__}: {words_of(error)}")
        return TrialOutcome.of(runs.a, runs.b, runs.divergence)

    def _record(self, candidate: Candidate) -> _ComparedPair:
        models = self._models(candidate.twin)
        options = RecordOptions(observe=0, progress=self._progress, durable=False)
        self._count += 1
        traces = []
        for name in "ab":
            path = self._scratch / f"{self._count}{name}"
            scenario = candidate.side(name)
            traces.append(record(scenario, path, loaded=models.target, draft=models.draft, options=options))
        runs = _ComparedPair(traces[0], traces[1], compare(*traces))
        self._kept[candidate.key] = runs
        while len(self._kept) > 4:
            old = self._kept.pop(next(iter(self._kept)))
            for trace in (old.a, old.b):
                remove_files(trace.path)
        return runs

    def _models(self, twin: Twin | None) -> Models:
        if twin is None:
            return self._own
        if twin not in self._twins:
            from detdiff.engines.mlx.model import load

            # A model's own code is allowed already where that model is loaded.
            root = self._scratch / "twins"
            shutil.rmtree(root, ignore_errors=True)
            target = load(
                str(twin_of(self._own.target, root / TWIN, twin.seed, twin.layers)), custom_code=True
            )
            draft = None
            if self._own.draft is not None:
                draft = load(str(twin_of(self._own.draft, root / TWIN_DRAFT, twin.seed)), custom_code=True)
            with suppress(KeyError):
                # One at a time: a model may be large.
                self._twins.pop(next(iter(self._twins), twin))
            self._twins[twin] = Models(target, draft)
        return self._twins[twin]
