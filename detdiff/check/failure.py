"""What a check that fails says and leaves, and what a session has checked.

A failure leaves its text and both traces with a report; golden traces are what a check is held to. Sums over a session are
numbers that workers add up.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from detdiff.compare import Divergence, Flip, RequestDivergence, TokenChoice, compare
from detdiff.errors import CheckSettingInvalid, DetdiffError, NothingComparable
from detdiff.explain import Verdict
from detdiff.report import divergence_text, headline, verdict_text
from detdiff.report.document import Page
from detdiff.report.findings import cache_lines, flip_lines, origin_lines
from detdiff.report.text import plain
from detdiff.report.words import count, escaped
from detdiff.scenario import Scenario
from detdiff.trace import Trace
from detdiff.trace.store import copy_files

from .settings import GOLDEN

WIDTH: Final = 100
_NEAREST: Final = 2
"""Top logits that a small report shows of either run."""


@dataclass(frozen=True)
class CheckFailure:
    """One composition that is not let through: ``why``, what diverged, and what was kept of it.

    ``a`` and ``b`` say in a few words what the two runs are. ``more`` are other runs of the composition, by seed and batch,
    that fail too. ``checked`` is False where it could not be run, and ``why`` says why; ``unkept`` says why nothing was kept.
    """

    name: str
    a: str
    b: str
    why: tuple[str, ...]
    divergence: Divergence | None = None
    verdict: Verdict | None = None
    kept: KeptTraces | None = None
    more: tuple[str, ...] = ()
    checked: bool = True
    unkept: str = ""


def failure_text(
    failures: Sequence[CheckFailure],
    *,
    level: str,
    model: str,
    passed: Sequence[str] = (),
    full: bool = False,
) -> str:
    """The text of a failed check; ``full`` adds everything that is known of each failure."""
    text = f"{_headline(failures, level, escaped(model), len(passed))}\n"
    for failure in failures:
        text += "\n" + _failure(failure, full)
    if passed:
        page = Page()
        page.item("passed: ", ", ".join(map(escaped, passed)))
        text += "\n" + plain(page.blocks, width=WIDTH)
    return text.rstrip("\n")


def _headline(failures: Sequence[CheckFailure], level: str, model: str, passed: int) -> str:
    """Which compositions, and whether they were checked at all."""
    total = count(len(failures) + passed, "composition")
    what = "not the golden trace" if level == GOLDEN else f"not invariant at level {level}"
    endings = []
    for ending, those in (
        (what, [failure for failure in failures if failure.checked]),
        ("not checked", [failure for failure in failures if not failure.checked]),
    ):
        if those:
            who = escaped(those[0].name) if len(failures) + passed == 1 else f"{len(those)} of {total}"
            endings.append(f"{who} of {model} {ending}")
    return "; ".join(endings)


def _failure(failure: CheckFailure, full: bool) -> str:
    page = Page()
    divergence = failure.divergence
    page.item(f"{escaped(failure.name)}: ", "" if divergence is None else headline(divergence))
    page.item("  a: ", failure.a)
    page.item("  b: ", failure.b)
    for why in dict.fromkeys(failure.why):
        page.item("  why: " if failure.checked else "  NOT CHECKED: ", why)
    text = plain(page.blocks, width=WIDTH)
    if full and failure.verdict is not None:
        text += "\n" + verdict_text(failure.verdict, width=WIDTH) + "\n"
    if full and divergence is not None:
        text += "\n" + divergence_text(divergence, width=WIDTH) + "\n"
    page = Page()
    if not full and divergence is not None:
        _small(page, divergence)
        if failure.verdict is not None:
            verdict = failure.verdict
            page.item("  verdict: ", f"{verdict.kind}. {escaped(verdict.sentence)}")
            if verdict.advice:
                page.item("  what to do: ", escaped(verdict.advice))
    if failure.more:
        page.item("  fails too: ", ", ".join(map(escaped, failure.more)))
    if failure.kept is not None:
        page.item("  kept: ", f"{', '.join(failure.kept.names)} in {relative(failure.kept.folder)}")
    if failure.unkept:
        page.item("  kept: ", f"nothing, because it could not be written: {escaped(failure.unkept)}")
    return text + plain(page.blocks, width=WIDTH) + _commands(failure.kept)


def _commands(kept: KeptTraces | None) -> str:
    """Lines to be copied, which are never wrapped."""
    return "" if kept is None else "".join(f"  run: {command}\n" for command in kept.commands)


def _small(page: Page, divergence: Divergence) -> None:
    """The request with the first origin, and the first that flips where that is another one."""
    diverged = [request for request in divergence.requests if request.stage is not None]
    first = [request for request in diverged if request.id == divergence.first]
    flipped = [request for request in diverged if request.flip is not None]
    for request in {request.id: request for request in (*first[:1], *flipped[:1]) or diverged[:1]}.values():
        _request(page, request)
    for finding in divergence.bookkeeping[:2]:
        page.item("  bookkeeping: ", f"in run {finding.run}: {escaped(finding.detail)}")


def _request(page: Page, request: RequestDivergence) -> None:
    ending = "and flips" if request.flip is not None else "and no token flips"
    page.item(f"  request {escaped(request.id)}: ", f"diverges in {request.stage} {ending}")
    if request.flip is not None:
        flip_lines(page, request, _near(request.flip))
    if request.origin is not None:
        origin_lines(page, request.origin)
    cache_lines(page, request)


def _near(flip: Flip) -> Flip:
    """The flip with the nearest tokens alone."""

    def cut(choice: TokenChoice) -> TokenChoice:
        return replace(choice, top=choice.top[:_NEAREST])

    return replace(flip, a=cut(flip.a), b=cut(flip.b))


FOLDER: Final = ".detdiff"
"""Where failures are kept without ``--detdiff-report-dir``, below pytest's root directory."""
REPORT: Final = "report.html"


@dataclass(frozen=True)
class KeptTraces:
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

    def keep(
        self, composition: str, run: str, a: Trace, b: Trace, scenarios: Sequence[Scenario]
    ) -> KeptTraces:
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
            copy_files(trace.path, folder / name)
        names = ["a", "b"]
        for name, scenario in zip(("a.toml", "b.toml"), scenarios, strict=False):
            (folder / name).write_text(scenario.to_toml(), encoding="utf-8")
            names.append(name)
        return KeptTraces(folder, tuple(names), tuple(_to_run(folder, bool(scenarios))))

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


def _to_run(folder: Path, named: bool) -> list[str]:
    places = [shlex.quote(relative(folder / name)) for name in ("a", "b")]
    if not named:
        return [f"detdiff compare {' '.join(places)}"]
    files = [shlex.quote(relative(folder / name)) for name in ("a.toml", "b.toml")]
    return [f"detdiff compare {' '.join(files)}", f"detdiff explain {' '.join(files)}"]


def write_report(
    kept: KeptTraces, a: Trace, b: Trace, divergence: Divergence, verdict: Verdict | None = None
) -> KeptTraces:
    """Write the HTML report beside the traces; the answer names it too."""
    from detdiff.compare.series import series
    from detdiff.report.build import build
    from detdiff.report.html import write_html

    report = build(divergence, verdict, series(a, b, divergence), kept.commands[-1])
    write_html(report, kept.folder / REPORT)
    return KeptTraces(kept.folder, (*kept.names, REPORT), kept.commands)


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


def against_committed(path: Path, run: Trace, *, update: bool, shown: str) -> Golden:
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
        copy_files(run.path, fresh)
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


@dataclass
class CheckCounts:
    """Sums over the checks of a session, or of one worker of it.

    ``compositions`` are schedules in layouts, ``rows`` compared down to their bits in ``sites`` (by model), ``tokens`` generated
    and compared, ``operations`` functions that were checked, ``failed`` those of either that failed. ``unchecked`` counts
    compositions and calls that could not be checked, ``skipped`` marked tests that were skipped.
    """

    compositions: int = 0
    operations: int = 0
    failed: int = 0
    unchecked: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    sites: dict[str, int] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.compositions or self.operations or self.unchecked or self.skipped)

    def add(self, other: CheckCounts) -> None:
        """Add what another worker checked."""
        for name, value in asdict(other).items():
            if name == "sites":
                for model, sites in value.items():
                    self.sites[model] = max(sites, self.sites.get(model, 0))
            else:
                setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which one process can send to another."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CheckCounts:
        return cls(**values)

    def lines(self) -> Iterator[str]:
        """The summary, line by line."""
        checked = [
            count(n, noun)
            for n, noun in ((self.compositions, "composition"), (self.operations, "operation"))
            if n
        ]
        if checked or self.unchecked:
            lacking = f", {self.unchecked:,} NOT CHECKED" if self.unchecked else ""
            yield f"{' and '.join(checked) or 'nothing'} checked, {_failed(self.failed)}{lacking}, {self.seconds:.1f} s"
        if self.compositions:
            yield (
                f"{count(self.rows, 'row')} at {count(sum(self.sites.values()), 'site')} of "
                f"{count(len(self.sites), 'model')}, {count(self.tokens, 'token')}"
            )
        if self.skipped:
            yield f"{count(self.skipped, 'marked test')} skipped, so not checked"


def _failed(n: int) -> str:
    return "none failed" if not n else f"{n:,} FAILED"
