"""The pytest plugin: fixture, marker, options, summary. What they need is imported when a test first asks for it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from detdiff.check.checker import BatchInvariance, RunningTest

MARKER = "batch_invariant"
FIXTURE = "batch_invariance"
PARAMETER = "_detdiff_composition"
OUTPUT = "detdiff"
_CHECKER = pytest.StashKey["BatchInvariance"]()
_ITEM = pytest.StashKey[pytest.Item]()
_CALLED = pytest.StashKey[bool]()
_WORKERS = pytest.StashKey[list[Mapping[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("detdiff", "batch invariance (detdiff)")
    for name, help_ in (
        ("model", "the model of checks that name none: a path, a hub id, or builtin"),
        ("schedules", "the schedules of checks that name none, such as static:2,continuous:4"),
        ("report-dir", "where traces and reports of failed checks are kept (default: .detdiff)"),
        ("level", "the level of checks that name none: exact, tokens, bounded or golden"),
    ):
        group.addoption(f"--detdiff-{name}", default=None, metavar=name.partition("-")[0].upper(), help=help_)
        parser.addini(f"detdiff_{name.replace('-', '_')}", f"{help_}; see --detdiff-{name}", default=None)
    for name, help_ in (
        ("update", "rewrite golden traces that differ; such tests fail once more"),
        ("explain", "ask for a verdict on each failed check"),
    ):
        group.addoption(f"--detdiff-{name}", action="store_true", default=False, help=help_)
        parser.addini(f"detdiff_{name}", f"{help_}; see --detdiff-{name}", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(model=..., op=..., schedules=..., layouts=..., level=..., ...): check that a model's answers, or a "
        "function's rows, do not depend on the batch; one test for each schedule and layout (detdiff)",
    )
    given = any(
        config.getoption(f"detdiff_{name}") is not None for name in ("schedules", "level", "report_dir")
    )
    # An address in an ini file would be told as an error of each test.
    if given or ":/" in (config.getini("detdiff_report_dir") or ""):
        _refuse_wrong(config)


def _refuse_wrong(config: pytest.Config) -> None:
    """A wrong option is said before any test runs."""
    from detdiff.check.settings import CheckSettings, compositions
    from detdiff.errors import DetdiffError

    try:
        asked = CheckSettings.of({}, _defaults(config))
        compositions(asked.schedules, asked.layouts)
    except DetdiffError as error:
        raise pytest.UsageError(f"detdiff: {error}") from None


def _setting(config: pytest.Config, name: str) -> Any:
    given = config.getoption(f"detdiff_{name}")
    return given if given else config.getini(f"detdiff_{name}") or None


def _defaults(config: pytest.Config) -> Any:
    from detdiff.check.failure import FOLDER
    from detdiff.check.settings import Defaults
    from detdiff.trace import local

    named = {name: _setting(config, name) for name in ("model", "schedules", "level", "update", "explain")}
    if named["model"] is not None and not config.getoption("detdiff_model"):
        # An ini file's own folder is where its paths start.
        path = config.rootpath / named["model"]
        named["model"] = str(path) if path.is_dir() else named["model"]
    here, there = config.getoption("detdiff_report_dir"), config.getini("detdiff_report_dir")
    root = config.invocation_params.dir / local(here) if here else config.rootpath / local(there or FOLDER)
    given = {name: value for name, value in named.items() if value is not None}
    # Without pytest's terminal there is no such option.
    return Defaults(root=root, full=config.getoption("verbose", 0) >= 2, **given)


def _checker(config: pytest.Config) -> BatchInvariance:
    if _CHECKER not in config.stash:
        from detdiff.check.checker import BatchInvariance

        config.stash[_CHECKER] = BatchInvariance(_defaults(config))
        if _ITEM in config.stash:
            item = config.stash[_ITEM]
            config.stash[_CHECKER].begin(_test(item))
            if _CALLED in item.stash:
                config.stash[_CHECKER].called(_marked(item) or {})
    return config.stash[_CHECKER]


def _marked(node: pytest.Item | Any) -> dict[str, Any] | None:
    """What the markers of a test say, those of an outer node first; None without one."""
    found: dict[str, Any] | None = None
    for owner in node.listchain():
        taken: set[str] = set()
        for mark in _marks(owner):
            if len(mark.args) > 1:
                pytest.fail(
                    f"detdiff: {MARKER} takes the model and settings by name, not {mark.args!r}.",
                    pytrace=False,
                )
            given = {**({"model": mark.args[0]} if mark.args else {}), **mark.kwargs}
            names = {"model" if name == "op" else name for name in given}
            if taken & names and not isinstance(owner, pytest.Class):
                # One would be dropped in silence.
                pytest.fail(
                    f"detdiff: two {MARKER} markers of {owner.name} say {min(taken & names)}; expected one, which makes the "
                    "tests. Write a test for each.",
                    pytrace=False,
                )
            taken |= names
            found = {**(found or {}), **given}
    return found


def _marks(owner: Any) -> list[pytest.Mark]:
    """A node's own markers; of a class those of its base classes first, which it may override."""
    marks = [each for each in owner.own_markers if each.name == MARKER]
    if len(marks) < 2 or not isinstance(owner, pytest.Class):
        return marks

    def depth(mark: pytest.Mark) -> int:
        for n, each in enumerate(owner.obj.__mro__):
            own = vars(each).get("pytestmark", ())
            if any(getattr(one, "mark", one) is mark for one in (own if isinstance(own, list) else [own])):
                return n
        return -1

    # Which of them pytest gives first depends on its version.
    return sorted(marks, key=depth, reverse=True)


def _test(item: pytest.Item) -> RunningTest:
    from detdiff.check.checker import RunningTest

    composition = getattr(item, "callspec", None) and item.callspec.params.get(PARAMETER)  # type: ignore[attr-defined]
    module, _, name = item.nodeid.partition("::")
    if composition:
        # What is kept is named after test and composition, each once.
        name = name.replace(composition.name, "")
    return RunningTest(item.path, module, name or item.name, _marked(item) or {}, composition)


@pytest.fixture(scope="session")
def batch_invariance(pytestconfig: pytest.Config) -> BatchInvariance:
    """Asserts that answers do not depend on the batch: ``check(model, ...)`` and ``check_op(fn, ...)`` (detdiff)."""
    return _checker(pytestconfig)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marked = _marked(metafunc.definition)
    if marked is None or "op" in marked:
        return
    from detdiff.check.settings import CheckSettings, compositions
    from detdiff.errors import DetdiffError

    wrong = ""
    try:
        asked = CheckSettings.of(
            {name: marked.get(name) for name in ("schedules", "layouts")}, _defaults(metafunc.config)
        )
        wanted = compositions(asked.schedules, asked.layouts if not _is_engine(marked) else None)
    except DetdiffError as error:
        wrong = str(error)
    if wrong:
        # Outside of the handler, whose error would be printed before it.
        pytest.fail(f"detdiff: {metafunc.definition.nodeid}: {wrong}", pytrace=False)
    metafunc.fixturenames.append(PARAMETER)
    metafunc.parametrize(PARAMETER, wanted, ids=[each.name for each in wanted])


def _is_engine(marked: Mapping[str, Any]) -> bool:
    model = marked.get("model")
    if model is None or isinstance(model, str | Path):
        return False
    from detdiff.check.checked_engines import is_engine

    return is_engine(model)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # A test that another plugin runs once more begins anew: it has checked nothing yet.
    item.config.stash[_ITEM] = item
    if _CALLED in item.stash:
        del item.stash[_CALLED]
    if _CHECKER in item.config.stash:
        item.config.stash[_CHECKER].begin(_test(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[_CALLED] = True
    if _CHECKER in item.config.stash:
        item.config.stash[_CHECKER].called(_marked(item) or {})
    result = yield
    marked = _marked(item)
    if marked is not None or _asks(item):
        checker = _checker(item.config)
        if marked is not None:
            checker.finish(marked)
        else:
            checker.refuse_none()
    return result


def _asks(item: pytest.Item) -> bool:
    """Whether the test itself, and not a fixture of it, asks for the fixture."""
    if FIXTURE not in getattr(item, "fixturenames", ()):
        return False
    import inspect

    function = getattr(item, "function", None)  # a doctest has none
    return function is not None and FIXTURE in inspect.signature(function).parameters


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None and _CHECKER in session.config.stash:
        output[OUTPUT] = session.config.stash[_CHECKER].tally.to_dict()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended; what it checked belongs to the summary."""
    output = getattr(node, "workeroutput", {}).get(OUTPUT)
    if output is not None:
        node.config.stash.setdefault(_WORKERS, []).append(output)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    workers = config.stash.get(_WORKERS, [])
    skipped = sum(MARKER in report.keywords for report in terminalreporter.stats.get("skipped", ()))
    if not (workers or skipped or _CHECKER in config.stash):
        return
    from detdiff.check.failure import CheckCounts

    total = CheckCounts(skipped=skipped)
    if _CHECKER in config.stash:
        total.add(config.stash[_CHECKER].tally)
    for output in workers:
        total.add(CheckCounts.from_dict(output))
    if not total.empty:
        terminalreporter.section("detdiff: batch invariance")
        for line in total.lines():
            terminalreporter.line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CHECKER in config.stash:
        config.stash[_CHECKER].close()
