"""Runs candidates: records both sides without values, compares them, and asks for a verdict where that is worth it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from detdiff.compare import Divergence, compare
from detdiff.engines.mlx.record import RecordOptions, record
from detdiff.engines.mlx.serve import Models
from detdiff.engines.mlx.twin import twin_of
from detdiff.errors import NothingComparable, ReplayError, TraceWriteError
from detdiff.explain import Verdict
from detdiff.explain.case import Case
from detdiff.explain.investigate import judge
from detdiff.trace import Trace

from .answer import Answer
from .candidate import TWIN, TWIN_DRAFT, Candidate, Twin
from .folder import Folder

Progress = Callable[[int, int], None]
_FATAL = (TraceWriteError, OSError, MemoryError, ReplayError)


class Enough(Exception):
    """The budget of candidates is spent."""


@dataclass(eq=False)
class _Recorded:
    a: Trace
    b: Trace
    divergence: Divergence


class Trials:
    """Answers about candidates: from the folder where they are known, else by running them.

    ``models`` are the pair's own, used in every run. ``budget`` is how many candidates may be run, those of earlier,
    interrupted runs among them; None: any number. Temporary traces lie below ``scratch``.
    """

    def __init__(
        self,
        folder: Folder,
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
        self._kept: dict[str, _Recorded] = {}
        self._twins: dict[Twin, Models] = {}
        self._verdicts: dict[str, Verdict] = {}

    @property
    def tried(self) -> int:
        """Candidates asked about so far, each once."""
        return len(self._asked)

    def original(self, candidate: Candidate) -> Answer:
        """What the pair gives that is to be reduced. Raises what recording and comparing raise, but NothingComparable."""
        key = candidate.key
        self._asked.add(key)
        if key not in self._folder.answers:
            try:
                runs = self._record(candidate)
                found = Answer.of(runs.a, runs.b, runs.divergence)
            except NothingComparable:
                found = Answer(0, None, why="the two runs have nothing in common that could be compared")
            self._folder.answer(key, found)
        return self._folder.answers[key]

    def answer(self, candidate: Candidate) -> Answer:
        """What a candidate gives. Raises Enough, and what a full disk or spent memory raises."""
        key = candidate.key
        known = key in self._folder.answers
        # What is known costs nothing, so that a smaller budget never leads back to a larger pair.
        if not known and self._budget is not None and len(self._asked) >= self._budget:
            raise Enough
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
            named = {
                name: replace(getattr(runs.divergence, name), trace=f"{name} (not kept)") for name in "ab"
            }
            found = judge(case)
            self._verdicts = {key: replace(found, divergence=replace(runs.divergence, **named))}
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

    def _run(self, candidate: Candidate) -> Answer:
        try:
            runs = self._record(candidate)
        except _FATAL:
            raise
        except Exception as error:
            # A model's own code may fail in any way on a size that it never met.
            return Answer(0, None, why=f"{type(error).__name__}: {' '.join(str(error).split())}")
        return Answer.of(runs.a, runs.b, runs.divergence)

    def _record(self, candidate: Candidate) -> _Recorded:
        models = self._models(candidate.twin)
        options = RecordOptions(observe=0, progress=self._progress, durable=False)
        self._count += 1
        traces = []
        for name in "ab":
            path = self._scratch / f"{self._count}{name}"
            scenario = candidate.side(name)
            traces.append(record(scenario, path, loaded=models.target, draft=models.draft, options=options))
        runs = _Recorded(traces[0], traces[1], compare(*traces))
        self._kept[candidate.key] = runs
        while len(self._kept) > 4:
            old = self._kept.pop(next(iter(self._kept)))
            for trace in (old.a, old.b):
                shutil.rmtree(trace.path, ignore_errors=True)
        return runs

    def _models(self, twin: Twin | None) -> Models:
        if twin is None:
            return self._own
        if twin not in self._twins:
            from detdiff.engines.mlx.model import load

            root = self._scratch / "twins"
            shutil.rmtree(root, ignore_errors=True)
            target = load(str(twin_of(self._own.target, root / TWIN, twin.seed, twin.layers)))
            draft = None
            if self._own.draft is not None:
                draft = load(str(twin_of(self._own.draft, root / TWIN_DRAFT, twin.seed)))
            with suppress(KeyError):
                # One at a time: a model may be large.
                self._twins.pop(next(iter(self._twins), twin))
            self._twins[twin] = Models(target, draft)
        return self._twins[twin]
