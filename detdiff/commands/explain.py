"""`detdiff explain`: both sides recorded where they are not yet, the controls with a progress bar each, a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from detdiff.commands.sides import (
    ComparisonArguments,
    Engines,
    OnToken,
    Progress,
    Side,
    as_given,
    named,
    recorded,
    sides,
)
from detdiff.engines.base import Engine
from detdiff.engines.registry import same_engine
from detdiff.explain import Verdict
from detdiff.scenario import Scenario
from detdiff.trace import Trace

if TYPE_CHECKING:
    from detdiff.engines.mlx.model import LoadedModel

Pair = tuple[Trace, Trace]


def explained(
    asked: ComparisonArguments,
    controls: Sequence[str],
    budget: int | None,
    progress: Progress,
    repeats: int | None = None,
    measure_fix: bool = False,
) -> Verdict:
    """The verdict on what was asked for. Raises CommandError and what reading, recording and running raise."""
    found = sides(replace(asked, replay=True))
    engines = Engines()
    across = {"across_models": asked.across_models, "across_engines": asked.across_engines}
    with (
        recorded(found, asked.keep, progress, engines, **across) as traces,
        ProgressBars(progress) as bars,
    ):
        return verdict_on(traces, found, asked, engines, bars, controls, budget, repeats, measure_fix)


def engines_of(
    asked: ComparisonArguments, found: tuple[Side, Side], engines: Engines
) -> tuple[Engine, Engine] | None:
    """The engines of both sides, opened for all runs that follow; None where traces say themselves what to open.

    Raises what opening an engine raises.
    """
    scenarios = _to_open(asked, found)
    return None if scenarios is None else (engines.of(scenarios[0]), engines.of(scenarios[1]))


def model_of(asked: ComparisonArguments, found: tuple[Side, Side], engines: Engines) -> LoadedModel | None:
    """The one model of both sides, loaded for all runs that follow; None where traces say themselves what to load.

    Raises what opening an engine raises.
    """
    scenarios = _to_open(asked, found)
    if scenarios is None or not same_engine(*scenarios):
        return None
    return getattr(engines.of(scenarios[0]), "loaded", None)


def _to_open(asked: ComparisonArguments, found: tuple[Side, Side]) -> tuple[Scenario, Scenario] | None:
    a, b = (_scenario(side) for side in found)
    if asked.files and asked.model is not None:
        return replace(a, model=asked.model), replace(b, model=asked.model)
    return (a, b) if any(isinstance(side.source, Scenario) for side in found) else None


def verdict_on(
    traces: Pair,
    found: tuple[Side, Side],
    asked: ComparisonArguments,
    engines: Engines,
    bars: ProgressBars,
    controls: Sequence[str] = (),
    budget: int | None = None,
    repeats: int | None = None,
    measure_fix: bool = False,
) -> Verdict:
    """The verdict on two traces, which names both sides as the user did. Raises what ``explain`` raises."""
    from detdiff.explain import explain

    verdict = explain(
        *traces,
        controls=controls or None,
        budget=budget,
        engine=engines_of(asked, found, engines),
        repeats=repeats,
        measure_fix=measure_fix,
        across_engines=asked.across_engines,
        across_models=asked.across_models,
        progress=bars.on_token,
        on_control=bars.next,
    )
    if verdict.divergence is not None:
        verdict = replace(verdict, divergence=named(verdict.divergence, found, asked.keep))
    return verdict if asked.keep is not None else as_given(verdict, found, traces)


def _scenario(side: Side) -> Scenario:
    if isinstance(side.source, Scenario):
        return side.source
    return Scenario.from_dict(side.source.scenario, where=f"the scenario of {side.given}")


class ProgressBars:
    """One progress bar after the other."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._stack = ExitStack()
        self._bar: OnToken | None = None

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def next(self, label: str) -> None:
        """The bar of a control; the one before ends."""
        self._stack.close()
        self._bar = self._stack.enter_context(self._progress(label))

    def on_token(self, count: int, total: int) -> None:
        """What a run calls after each token."""
        if self._bar is not None:
            self._bar(count, total)
