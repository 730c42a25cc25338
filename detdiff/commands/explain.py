"""`detdiff explain`: both sides recorded where they are not yet, the controls with a progress bar each, a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from detdiff.commands.sides import Asked, OnToken, Progress, Side, named, recorded, sides
from detdiff.explain import Verdict
from detdiff.scenario import Scenario
from detdiff.trace import Trace

if TYPE_CHECKING:
    from detdiff.engines.mlx.model import LoadedModel

Pair = tuple[Trace, Trace]


def explained(asked: Asked, controls: Sequence[str], budget: int | None, progress: Progress) -> Verdict:
    """The verdict on what was asked for. Raises CommandError and what reading, recording and running raise."""
    found = sides(replace(asked, replay=True))
    loaded = model_of(asked, found)
    with recorded(found, asked.keep, progress, loaded) as traces, Bars(progress) as bars:
        return verdict_on(traces, found, asked, loaded, bars, controls, budget)


def model_of(asked: Asked, found: tuple[Side, Side]) -> LoadedModel | None:
    """The one model of both sides, loaded for all runs that follow; None where traces say themselves what to load.

    Raises what loading raises.
    """
    from detdiff.engines.mlx.model import load

    if asked.files and asked.model is not None:
        return load(asked.model)
    if any(isinstance(side.source, Scenario) for side in found):
        models = {_model(side) for side in found}
        return load(models.pop()) if len(models) == 1 else None
    return None


def verdict_on(
    traces: Pair,
    found: tuple[Side, Side],
    asked: Asked,
    loaded: LoadedModel | None,
    bars: Bars,
    controls: Sequence[str] = (),
    budget: int | None = None,
) -> Verdict:
    """The verdict on two traces, which names both sides as the user did. Raises what ``explain`` raises."""
    from detdiff.explain import explain

    verdict = explain(
        *traces,
        controls=controls or None,
        budget=budget,
        loaded=loaded,
        progress=bars.on_token,
        on_control=bars.next,
    )
    if verdict.divergence is None:
        return _as_given(verdict, found, traces)
    return replace(verdict, divergence=named(verdict.divergence, found, asked.keep))


def _as_given(verdict: Verdict, found: tuple[Side, Side], traces: Pair) -> Verdict:
    """What the user named in the place of temporary paths, which are gone when the verdict is read."""

    def words(text: str) -> str:
        for side, trace in zip(found, traces, strict=True):
            if isinstance(side.source, Scenario):
                text = text.replace(str(trace.path), side.given)
        return text

    evidence = tuple(replace(each, said=words(each.said)) for each in verdict.evidence)
    return replace(verdict, said=words(verdict.said), evidence=evidence)


def _model(side: Side) -> str:
    if isinstance(side.source, Trace):
        return str(side.source.scenario["model"])
    assert isinstance(side.source, Scenario)
    return side.source.model


class Bars:
    """One progress bar after the other."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._stack = ExitStack()
        self._bar: OnToken | None = None

    def __enter__(self) -> Bars:
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
