"""What a failure leaves on the disk: both traces, scenario files that run them again, and an HTML report."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from detdiff.compare import Divergence
from detdiff.explain import Verdict
from detdiff.scenario import Scenario
from detdiff.trace import Trace

from .golden import safe

FOLDER: Final = ".detdiff"
"""Where failures are kept without ``--detdiff-report-dir``, below pytest's root directory."""
REPORT: Final = "report.html"


@dataclass(frozen=True)
class Kept:
    """``folder`` holds the traces ``a`` and ``b`` and what else is in ``names``; ``commands`` run on them."""

    folder: Path
    names: tuple[str, ...]
    commands: tuple[str, ...]


class Keeper:
    """Keeps the failures of a test below ``root``; those of its earlier runs go first.

    ``test`` is its file and name; ``composition`` the one that it was parametrised with, if it was.
    """

    def __init__(self, root: Path, test: tuple[str, ...], composition: str | None = None) -> None:
        self._root = root
        self._test = root.joinpath(*map(safe, test))
        shutil.rmtree(
            self._test if composition is None else self._test / safe(composition), ignore_errors=True
        )

    def keep(self, composition: str, run: str, a: Trace, b: Trace, scenarios: Sequence[Scenario]) -> Kept:
        """Copy both traces, and write ``scenarios`` (two, or none where no name loads the model) beside them.

        ``run`` tells runs of one composition apart; it may be empty.
        """
        self._ignored()
        folder = self._test / safe(composition)
        folder = folder / safe(run) if run else folder
        # Where one test fails again and again, as while hypothesis shrinks, the last failure is the one to look at.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, trace in (("a", a), ("b", b)):
            shutil.copytree(trace.path, folder / name)
        names = ["a", "b"]
        for name, scenario in zip(("a.toml", "b.toml"), scenarios, strict=False):
            (folder / name).write_text(scenario.to_toml(), encoding="utf-8")
            names.append(name)
        return Kept(folder, tuple(names), tuple(_commands(folder, bool(scenarios))))

    def _ignored(self) -> None:
        """What is kept is nobody's to commit. A folder that holds other things stays as it is."""
        self._root.mkdir(parents=True, exist_ok=True)
        if not any(self._root.iterdir()):
            (self._root / ".gitignore").write_text("*\n", encoding="utf-8")


def relative(path: Path) -> str:
    """A path as one would type it here: relative where that is no longer way round."""
    try:
        near = os.path.relpath(path)
    except ValueError:  # on another drive
        return str(path)
    return str(path) if near.startswith(os.path.join("..", "..")) else near


def _commands(folder: Path, named: bool) -> list[str]:
    places = [shlex.quote(relative(folder / name)) for name in ("a", "b")]
    if not named:
        return [f"detdiff compare {' '.join(places)}"]
    files = [shlex.quote(relative(folder / name)) for name in ("a.toml", "b.toml")]
    return [f"detdiff compare {' '.join(files)}", f"detdiff explain {' '.join(files)}"]


def write_report(
    kept: Kept, a: Trace, b: Trace, divergence: Divergence, verdict: Verdict | None = None
) -> Kept:
    """Write the HTML report beside the traces; the answer names it too."""
    from detdiff.compare.series import series
    from detdiff.report.build import build
    from detdiff.report.html import write_html

    report = build(divergence, verdict, series(a, b, divergence), kept.commands[-1])
    write_html(report, kept.folder / REPORT)
    return Kept(kept.folder, (*kept.names, REPORT), kept.commands)
