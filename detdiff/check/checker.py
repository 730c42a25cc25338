"""The fixture's object: what a test calls, how a check ends in it, and what was checked in a session."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import pytest

from detdiff.errors import CheckSettingInvalid, CheckSubjectInvalid, DetdiffError
from detdiff.scenario import KernelPlan, nearest

from .failure import CheckCounts, CheckFailure, Keeper, failure_text
from .settings import SCHEDULES_BY_DEFAULT, CheckedSchedule, CheckSettings, Defaults, compositions

if TYPE_CHECKING:
    from _pytest.outcomes import Failed

    from .checked_engines import CheckedEngines, RecordedRuns
    from .op import OpCheck
else:
    Failed = pytest.fail.Exception

_OP: Final = ("shapes", "rows", "dtype", "seeds", "array")
"""What a marker may say of an op."""


@dataclass
class RunningTest:
    """The test that runs: its file, what its markers say, and the composition that it was parametrised with.

    ``module`` is the file as pytest names it, relative to its root directory, and ``name`` the rest of the test's id without
    that composition.
    """

    __test__ = False

    file: Path
    module: str
    name: str
    marked: Mapping[str, Any] = field(default_factory=dict)
    composition: CheckedSchedule | None = None
    checks: int = 0
    before: int | None = None
    """Checks of its fixtures, once its own function runs."""
    covered: bool = False
    """Whether what its marker names has been checked."""


@dataclass(frozen=True)
class PassedCheck:
    """What a check that passed has compared: ``rows`` down to their bits at ``sites``, and generated ``tokens``."""

    compositions: tuple[str, ...]
    rows: int
    sites: int
    tokens: int
    seconds: float


class BatchInvariance:
    """Asserts that a request's answer does not depend on who is in its batch.

    One for a session: models are loaded once, and the run of each request alone is recorded once for all compositions.
    """

    def __init__(self, defaults: Defaults) -> None:
        self._defaults = defaults
        self._test: RunningTest | None = None
        self._keeper: Keeper | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._shared: tuple[CheckedEngines, RecordedRuns] | None = None
        self._written: set[Path] = set()
        """Golden traces of this session: that they are as the run is says nothing."""
        self.tally = CheckCounts()

    def check(
        self,
        model: Any = None,
        prompts: Sequence[Any] | str | None = None,
        *,
        schedules: str | Sequence[str] | None = None,
        layouts: str | Sequence[str] | None = None,
        kernels: str | KernelPlan | None = None,
        max_tokens: int | None = None,
        seeds: int | Sequence[int] | None = None,
        level: str | None = None,
        **settings: Any,
    ) -> PassedCheck:
        """Each prompt alone against the same prompts in every schedule and layout.

        ``model`` is a path, hub id or ``"builtin"``, a LoadedModel, what ``mlx_lm.load`` gives, or an engine: an object or
        function that generates, or a causal language model of transformers. ``prompts`` are texts or lists of token ids. ``schedules`` are written as ``static:2``,
        ``continuous:4`` or ``serial``, with scenario keys after a space; ``layouts`` are ``padded`` and ``packed``. Each of
        ``seeds`` draws other neighbours and arrivals. ``level`` is ``exact``, ``tokens``, ``bounded`` or ``golden``;
        ``settings`` are further scenario keys, and ``explain=True`` asks for a verdict on each failure. What is not given
        comes from the test's marker, the command line, the ini file, or has a default.

        Raises NotInvariant, whose text is the report, and NotChecked where something that was asked for was not compared.
        """
        given = {
            "model": model, "prompts": prompts, "schedules": schedules, "layouts": layouts, "kernels": kernels,
            "max_tokens": max_tokens, "seeds": seeds, "level": level, **settings,
        }  # fmt: skip
        test = self._current()
        test.checks += 1
        # What a fixture checks is the marker's where it takes the model from there.
        test.covered |= "op" not in test.marked and (test.before is not None or model is None)
        try:
            return self._check(test, given)
        except DetdiffError as error:
            self.tally.unchecked += 1
            raise NotChecked(str(error)) from None

    def check_op(
        self,
        fn: Callable[..., Any],
        *,
        shapes: int | Iterable[int | Sequence[int]] | None = None,
        rows: str | Iterable[int] | None = None,
        dtype: str | None = None,
        seeds: int | None = None,
        array: str | None = None,
    ) -> OpCheck:
        """A function of rows: each row alone against the same row among others; see ``detdiff.check.op.check_op``.

        Raises NotInvariant, and NotChecked where nothing was compared.
        """
        from .op import RowsDiffer, check_op

        given: dict[str, Any] = {
            "shapes": shapes,
            "rows": rows,
            "dtype": dtype,
            "seeds": seeds,
            "array": array,
        }
        test = self._current()
        test.checks += 1
        test.covered |= test.marked.get("op") is fn
        started = time.perf_counter()
        try:
            found = check_op(fn, **{name: value for name, value in given.items() if value is not None})
        except DetdiffError as error:
            self.tally.unchecked += 1
            raise NotChecked(str(error)) from None
        except RowsDiffer as error:
            self.tally.failed += 1
            self.tally.operations += 1
            raise NotInvariant(str(error)) from None
        finally:
            self.tally.seconds += time.perf_counter() - started
        self.tally.operations += 1
        return found

    def _check(self, test: RunningTest, given: Mapping[str, Any]) -> PassedCheck:
        asked, wanted = self._wanted(test, given)
        if asked.model is None:
            raise CheckSubjectInvalid(
                "There is no model; expected one in the call, in the marker, with --detdiff-model or as detdiff_model in the "
                "ini file. Name one, such as 'builtin'."
            )
        return self._check_model(test, asked, wanted)

    def _wanted(
        self, test: RunningTest, given: Mapping[str, Any]
    ) -> tuple[CheckSettings, list[CheckedSchedule]]:
        marked = {name: value for name, value in test.marked.items() if name != "op"}
        asked = CheckSettings.of(
            {**marked, **{n: v for n, v in given.items() if v is not None}}, self._defaults
        )
        if test.composition is None:
            return asked, compositions(asked.schedules, asked.layouts)
        for name in ("schedules", "layouts"):
            if given.get(name) is not None:
                raise CheckSettingInvalid(
                    f"{name} are given in the call, and the test's marker has already made one test of each composition (this is "
                    f"{test.composition.name}). Say them in the marker alone."
                )
        return asked, [test.composition]

    def _check_model(
        self, test: RunningTest, asked: CheckSettings, wanted: Sequence[CheckedSchedule]
    ) -> PassedCheck:
        from .invariance import CheckLocation, ModelCheck, prepared

        engines, recorded = self._opened()
        checked = engines.of(asked.model)
        by_default = asked.schedules is SCHEDULES_BY_DEFAULT
        tables, wanted = prepared(checked, asked, wanted, by_default=by_default)
        if self._keeper is None:
            composition = None if test.composition is None else test.composition.name
            self._keeper = Keeper(
                self._defaults.root, (*PurePosixPath(test.module).parts, test.name), composition
            )
        place = CheckLocation(
            test.file,
            f"{test.name}-{test.checks}" if test.checks > 1 else test.name,
            self._defaults.update,
            self._written,
        )
        check = ModelCheck(checked, asked, tables, recorded, self._keeper, place)
        return self._ended(asked, wanted, check.failures(wanted), check.tally, checked.label)

    def _ended(
        self,
        asked: CheckSettings,
        wanted: Sequence[CheckedSchedule],
        failures: Sequence[CheckFailure],
        tally: CheckCounts,
        name: str,
    ) -> PassedCheck:
        self.tally.add(tally)
        names = tuple(each.name for each in wanted)
        if failures:
            failed = {failure.name for failure in failures}
            kind = NotInvariant if any(failure.checked for failure in failures) else NotChecked
            raise kind(
                failure_text(
                    failures,
                    level=asked.level,
                    model=name,
                    passed=[each for each in names if each not in failed],
                    full=self._defaults.full,
                )
            )
        return PassedCheck(names, tally.rows, sum(tally.sites.values()), tally.tokens, tally.seconds)

    def _opened(self) -> tuple[CheckedEngines, RecordedRuns]:
        """What a session shares, made when a model is first checked."""
        if self._shared is None:
            from .checked_engines import CheckedEngines, RecordedRuns

            self._folder = tempfile.TemporaryDirectory(prefix="detdiff-check-", ignore_cleanup_errors=True)
            self._shared = CheckedEngines(), RecordedRuns(Path(self._folder.name))
        return self._shared

    def _current(self) -> RunningTest:
        if self._test is None:
            raise NotChecked(
                "there is no running test that this check could belong to; call it in a test or a fixture"
            )
        return self._test

    # What the plugin calls.

    def begin(self, test: RunningTest) -> None:
        """From here on checks belong to ``test``."""
        self._test = test
        self._keeper = None

    def called(self, marked: Mapping[str, Any]) -> None:
        """The test's own function is about to run, maybe once more. A fixture or another plugin may have ``marked`` it."""
        test = self._current()
        test.marked = marked
        if test.before is None:
            test.before = test.checks
        else:
            test.checks, test.covered = test.before, False

    def finish(self, marked: Mapping[str, Any]) -> None:
        """Check what the test is ``marked`` with, unless the test has checked that itself. Raises what checks raise."""
        test = self._current()
        test.marked = marked
        settings = not {"model", "op"} & marked.keys() and test.checks
        if test.covered or settings:
            return
        if "op" not in test.marked:
            self.check()
            return
        wrong = next((name for name in test.marked if name not in ("op", *_OP)), None)
        if wrong is not None:
            raise NotChecked(
                f"the marker names an op, and {wrong} is none of its settings; {nearest(wrong, _OP)}"
            )
        self.check_op(test.marked["op"], **{name: test.marked[name] for name in _OP if name in test.marked})

    def refuse_none(self) -> None:
        """Raises NotChecked where the test asked for the fixture and has checked nothing."""
        if not self._current().checks:
            raise NotChecked(
                "the test asks for batch_invariance and calls neither check nor check_op; call one of them, or take the fixture "
                "out of its arguments"
            )

    def close(self) -> None:
        """Remove the recorded runs."""
        if self._folder is not None:
            self._folder.cleanup()


# As pytest's own: a summary of one line has no room for a module's name.
_MODULE = "builtins"


class _WithNotes(Failed):
    """What hypothesis notes of the example that failed belongs to the text."""

    __module__ = _MODULE

    def __init__(self, text: str) -> None:
        super().__init__(text, pytrace=False)

    def __str__(self) -> str:
        return "\n".join([self.msg or "", *getattr(self, "__notes__", ())])


class NotInvariant(_WithNotes, AssertionError):
    """A composition is not let through at its level. An AssertionError for whoever catches it, a plain text for pytest."""

    __module__ = _MODULE


class NotChecked(_WithNotes):
    """Nothing was checked, or not all of what was asked for, which is never a pass: not where a failure is expected, either."""

    __module__ = _MODULE
