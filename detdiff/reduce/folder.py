"""Where a reduction is kept: the pair so far, the steps that led to it, and the answer of every candidate that was run.

The search decides by answers alone. So a search that was interrupted is one that begins anew and finds its answers here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from detdiff.errors import ReductionFolderUnusable, ReductionOfAnotherCase
from detdiff.scenario import Scenario
from detdiff.trace.files import replace_file

from .answer import Answer
from .candidate import TWIN, TWIN_DRAFT, Candidate
from .reduction import Step
from .settings import short_toml

CASE, TRIED, STEPS = "case.json", "tried.jsonl", "steps.jsonl"
SCHEMA = "detdiff.reduction/1"


class Folder:
    """A reduction's folder, opened: ``answers`` and ``verdicts`` (kind and rule) by candidate, ``steps`` on disk."""

    def __init__(self, path: Path | str, case: Mapping[str, Any]) -> None:
        """Make the folder, or go on with what is in it; ``case`` says what is reduced, and how.

        Raises ReductionOfAnotherCase where it holds the reduction of another one, and ReductionFolderUnusable where it
        holds something else, or a file of it is damaged.
        """
        self.path = Path(path)
        self.answers: dict[str, Answer] = {}
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

    def answer(self, key: str, answer: Answer) -> None:
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
                    self.answers[line["key"]] = Answer.from_json(line["answer"])
                else:
                    self.verdicts[line["key"]] = (line["verdict"], line["rule"])
            except (KeyError, TypeError, ValueError):
                raise _damaged(self.path / TRIED) from None
        try:
            self.steps = [Step.from_json(line) for line in _lines(self.path / STEPS)]
        except TypeError:
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
