"""explain: two runs in, a verdict out. Records what has to be recorded, runs the controls, asks the rules."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from detdiff.compare import Divergence, compare
from detdiff.engines.base import ADDRESS
from detdiff.errors import CommandError, DetdiffError, Interrupted, NothingComparable, ReplayError
from detdiff.scenario import Scenario
from detdiff.trace import Place, Trace

from .case import REPEATS, Case, opened_run
from .control import NOT_RUN, Budget, CannotRun, Control, Outcome, Registered, registered
from .controls.invariant import fix_of
from .facts import Facts, RecordedFacts
from .rules import RULES, decide, deciding
from .verdict import Fragility, Verdict, fragility

Progress = Callable[[int, int], None]
OnControl = Callable[[str], None]
Run = Trace | Scenario | Place | str

CONTROLS: Final = registered()
ORDER: Final = tuple(CONTROLS)
"""What is run, in order. Some only where something speaks for them, unless they are asked for."""
_CAN_DECIDE: Final = tuple(
    dict.fromkeys(name for rule in RULES for name in rule.because if name in ORDER and name != "roles")
)
DECIDING: Final = tuple(
    name for name in _CAN_DECIDE if name != "fresh" and ADDRESS not in CONTROLS[name].needs
)
"""The controls that a verdict on an engine without state can rest on, which is no server; the others say more of what it is about."""
FIX: Final = "invariant"
"""The control that tries and prices what the verdict advises; it decides nothing."""
ACROSS_ENGINES: Final = ("repeat", "roles")
"""The controls for two engines, which have no operation in common that could be held or put in."""
ACROSS_MODELS: Final = ("repeat", "adapters")
"""The controls for two sets of weights, of which no operation has to agree with its twin."""
_TEMPORARY: Final = re.compile(r"[^\s()]*detdiff-explain-[^\s()/]+/([ab])\b")
"""Where a side was recorded, which is gone when a message is read."""


def explain(
    a: Run,
    b: Run,
    *,
    controls: Sequence[str] | None = None,
    budget: int | Budget | None = None,
    engine: Any = None,
    loaded: Any = None,
    draft: Any = None,
    repeats: int | None = None,
    across_engines: bool = False,
    across_models: bool = False,
    measure_fix: bool = False,
    progress: Progress | None = None,
    on_control: OnControl | None = None,
) -> Verdict:
    """Why run ``b`` diverges from run ``a``: traces, which are run again where a control needs it, or scenarios.

    ``controls`` names those to run, all of them whatever the first ones give; None runs them in ``ORDER`` and ends where
    the rules are sure. ``budget`` limits the re-runs. ``engine`` runs both sides, where it is opened already: an engine, a pair of them, an
    object or function with generate(requests, schedule); ``loaded`` and ``draft`` are models of mlx-lm that are loaded already.
    ``repeats`` is how often the control ``repeat`` runs each side; given, it runs where nothing differs too, as a rare change is in
    no run of two. ``across_models``: the sides may have different weights. ``across_engines``: the sides are two engines, whose operations
    are judged by themselves, by the role of their sites. ``measure_fix``: where kernel paths make the difference, pin them as
    `detdiff.invariant` does, on both sides, and measure what that costs. ``progress`` is called with tokens so far and at most, ``on_control`` before each
    control. Raises CommandError for an unknown control, and what reading, loading and running raise.
    """
    wanted = _wanted(controls)
    try:
        sides = [opened_run(run) for run in (a, b)]
        sure = (
            _without_model(sides, across_engines, across_models)
            if controls is None and repeats is None
            else None
        )
        if sure is not None:
            return decide(sure)
        case = Case.of(
            sides[0],
            sides[1],
            engine=engine,
            loaded=loaded,
            draft=draft,
            budget=budget,
            progress=progress,
            repeats=REPEATS if repeats is None else repeats,
            across_engines=across_engines,
            across_models=across_models,
        )
    except NothingComparable as error:
        return decide(Facts(None, why=_TEMPORARY.sub(r"side \1", str(error))))
    divergence = _named(case.divergence, sides)
    facts = _facts(case, divergence)
    if controls is None:
        wanted = tuple(name for name in wanted if name != "roles")
        wanted = ACROSS_ENGINES if across_engines else ACROSS_MODELS if across_models else wanted
    if (
        controls is None
        and repeats is not None
        and deciding(facts).stops == ()
        and facts.divergence is not None
    ):
        wanted = ("repeat",)
        facts = _run(case, facts, wanted, True, on_control)
    else:
        facts = _run(case, facts, wanted, controls is not None, on_control)
    verdict = decide(_with_fix(case, facts, on_control) if measure_fix else facts)
    return verdict if divergence.identical else replace(verdict, fragile=_fragile(case))


def judge(case: Case, on_control: OnControl | None = None) -> Verdict:
    """The verdict on a case by the controls that it can rest on, ended where the rules are sure: ``explain`` without what
    only says more."""
    facts = _facts(case, case.divergence)
    return decide(_run(case, facts, _CAN_DECIDE, False, on_control))


def _wanted(controls: Sequence[str] | None) -> tuple[str, ...]:
    unknown = [name for name in controls or () if name not in ORDER]
    if unknown:
        raise CommandError(
            f"There is no control {unknown[0]!r}; expected one of {', '.join(ORDER)}. Correct the name."
        )
    return ORDER if controls is None else tuple(name for name in ORDER if name in controls)


def _fragile(case: Case) -> tuple[Fragility, ...]:
    try:
        return fragility(case.a, case.b)
    except NothingComparable:
        return ()


def _without_model(
    sides: Sequence[Trace | Scenario], across_engines: bool, across_models: bool
) -> Facts | None:
    """What two traces say, where that decides at once."""
    a, b = sides
    if not (isinstance(a, Trace) and isinstance(b, Trace)):
        return None
    divergence = compare(a, b, across_models=across_models, across_engines=across_engines)
    facts = Facts(divergence, RecordedFacts.of(a, b))
    return facts if deciding(facts).stops == () else None


def _named(divergence: Divergence, given: Sequence[Trace | Scenario]) -> Divergence:
    """The answer without paths of traces that are gone when it is read."""
    return divergence.not_kept(
        side for side, run in zip("ab", given, strict=True) if isinstance(run, Scenario)
    )


def _facts(case: Case, divergence: Divergence) -> Facts:
    stateless = all(getattr(engine, "stateless", False) for engine in case.engines.values())
    return Facts(divergence, RecordedFacts.of(case.a, case.b), stateless=stateless, fix=fix_of(case))


def _with_fix(case: Case, facts: Facts, on_control: OnControl | None) -> Facts:
    """The same after the control ``invariant``, where kernel paths make the difference."""
    if FIX in facts.controls:
        return facts
    if facts.held:
        if on_control is not None:
            on_control(FIX)
        found = run_control(case, FIX)
    else:
        found = Control(FIX, NOT_RUN, "it is not shown that kernel paths make the difference", 0, 0.0)
    return replace(facts, controls={**facts.controls, FIX: found})


def _run(
    case: Case, facts: Facts, wanted: Sequence[str], all_of_them: bool, on_control: OnControl | None
) -> Facts:
    done: dict[str, Control] = {}
    considered: set[str] = set()
    if not all_of_them and deciding(facts).stops == ():
        return facts
    for name in wanted:
        rule = deciding(facts)
        if not all_of_them:
            considered |= {each for each in wanted if _spared(each, facts) is not None}
            if rule.stops is not None and all(
                each in considered or each not in wanted for each in rule.stops
            ):
                done[name] = Control(name, NOT_RUN, f"the rule {rule.name} decides without it", 0, 0.0)
                continue
            spared = _spared(name, facts)
            if spared:
                done[name] = Control(name, NOT_RUN, spared, 0, 0.0)
            if spared is not None:
                continue
        if on_control is not None:
            on_control(name)
        done[name] = run_control(case, name)
        considered.add(name)
        facts = replace(facts, controls=dict(done))
    return replace(facts, controls=done)


def _spared(name: str, facts: Facts) -> str | None:
    """Why a control is not worth its re-runs, empty where that need not be said; None: it is."""
    asked = CONTROLS[name].asked_by(facts)
    if isinstance(asked, str):
        return asked
    return None if asked else ""


def judged_origins(case: Case, at_most: int) -> Control:
    """The control ``oracle`` on at most so many origins, and the largest beside them."""
    from .controls.oracle import judged

    return _told(case, CONTROLS["oracle"], lambda case: judged(case, at_most))


def run_control(case: Case, name: str) -> Control:
    """One control, with what it took; ``not_run`` with the reason where it does not apply, an engine cannot run so, or the
    budget is spent.

    Raises ReplayError where a trace is not that of this machine, which no control can make up for.
    """
    return _told(case, CONTROLS[name], CONTROLS[name].run)


def _told(case: Case, asked: Registered, run: Callable[[Case], Outcome]) -> Control:
    started, before = time.perf_counter(), case.budget.forwards_spent
    try:
        lacking = case.lacking(asked.needs)
        if lacking is not None:
            raise CannotRun(lacking)
        outcome = run(case)
    except (ReplayError, Interrupted):
        raise
    except (CannotRun, DetdiffError) as error:
        outcome = Outcome(NOT_RUN, str(error))
    seconds, forwards = time.perf_counter() - started, case.budget.forwards_spent - before
    return Control(asked.name, outcome.result, outcome.sentence, forwards, seconds, outcome.figures)
