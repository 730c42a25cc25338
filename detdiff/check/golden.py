"""Golden traces: a run against one that was committed, and how that one comes about and changes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from detdiff.compare import Divergence, compare
from detdiff.errors import DetdiffError, NothingComparable
from detdiff.scenario import Scenario
from detdiff.trace import Trace

UPDATE: Final = "--detdiff-update"
_LONGEST: Final = 100


@dataclass(frozen=True)
class Golden:
    """What came of it: ``why`` it fails, empty where it does not, and the divergence from the committed trace."""

    why: tuple[str, ...]
    divergence: Divergence | None = None
    committed: Trace | None = None


def place(file: Path, test: str, run: str) -> Path:
    """Where a golden trace lies: in a folder beside the test file that is named after it."""
    return file.parent / file.stem / safe(test) / safe(run)


def safe(name: str) -> str:
    """A name that every file system takes, another one for another name as long as they differ in words."""
    plain = re.sub(r"[^\w.=+-]+", "-", name).strip("-.") or "unnamed"
    if len(plain) <= _LONGEST:
        return plain
    return f"{plain[:_LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def portable(scenario: Scenario) -> Scenario:
    """The scenario without a path of this machine."""
    return replace(scenario, model=Path(scenario.model).name or scenario.model)


def check(path: Path, run: Trace, *, update: bool, shown: str) -> Golden:
    """Compare ``run`` with the golden trace at ``path``, named ``shown``.

    Without one it is written, and with ``update`` one that differs is replaced; both fail, so that nobody mistakes what
    was just written for what was checked.
    """
    if not path.exists():
        _put(run, path)
        return Golden(
            (
                f"there was no golden trace, and {shown} was written; look at what the test ran, commit it, and run the test "
                "again",
            )
        )
    try:
        committed = Trace.open(path, checked=True)
        found = compare(committed, run)
    except NothingComparable as error:
        return _changed(path, run, update, shown, Golden((str(error),)))
    except DetdiffError as error:
        return _changed(path, run, update, shown, Golden((f"the golden trace cannot be read: {error}",)))
    if found.identical:
        return Golden((), found, committed)
    return _changed(
        path, run, update, shown, Golden((f"the run is not the golden trace {shown}",), found, committed)
    )


def _changed(path: Path, run: Trace, update: bool, shown: str, found: Golden) -> Golden:
    if not update:
        return replace(
            found, why=(*found.why, f"if the change is meant, run with {UPDATE} and commit {shown}")
        )
    _put(run, path)
    return Golden(
        (f"{shown} was rewritten; commit it, and run the test again without {UPDATE}",), found.divergence
    )


def _put(run: Trace, path: Path) -> None:
    """Copy a trace into place whole: whoever looks meanwhile sees the old one, none, or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(run.path, fresh)
    if path.exists():
        shutil.rmtree(path)
    fresh.rename(path)
