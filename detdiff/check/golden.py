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
from detdiff.errors import CheckSettingInvalid, DetdiffError, NothingComparable
from detdiff.scenario import Scenario
from detdiff.trace import Trace

UPDATE: Final = "--detdiff-update"
_LONGEST: Final = 100
_STRANGE: Final = re.compile(r"[^\w.=+\- :,\[\]]")
"""What no test's or composition's own name has."""


@dataclass(frozen=True)
class Golden:
    """What came of it: ``why`` it fails, empty where it does not, the divergence from the committed trace, and whether a new
    one was written."""

    why: tuple[str, ...]
    divergence: Divergence | None = None
    committed: Trace | None = None
    wrote: bool = False


def place(file: Path, test: str, run: str) -> Path:
    """Where a golden trace lies: in a folder beside the test file that is named after it."""
    return file.parent / file.stem / safe(test) / safe(run)


def safe(name: str) -> str:
    """A name that every file system takes. Names that differ in more than the marks of a test's id stay different."""
    plain = re.sub(r"[^\w.=+-]+", "-", name).strip("-.") or "unnamed"
    if len(plain) <= _LONGEST and not _STRANGE.search(name):
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
            ),
            wrote=True,
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
        (f"{shown} was rewritten; commit it, and run the test again without {UPDATE}",),
        found.divergence,
        wrote=True,
    )


def _put(run: Trace, path: Path) -> None:
    """Copy a trace into place whole: whoever looks meanwhile sees the old one, none, or the new one.

    Raises CheckSettingInvalid where it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}-{os.getpid()}")
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(run.path, fresh)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        fresh.rename(path)
    except OSError as error:
        raise CheckSettingInvalid(
            f"The golden trace could not be written ({error}); expected a folder that can be, beside the test file and named "
            "after it. Make room for it."
        ) from None
