"""Recording and generating with mlx models by a scenario: what is most often asked of the engine, in one call each."""

from __future__ import annotations

from pathlib import Path

from detdiff.engines.base import RunOptions
from detdiff.engines.mlx.model import LoadedModel, load
from detdiff.engines.record import record as record_engine
from detdiff.scenario import Scenario
from detdiff.trace import Trace

from .engine import MlxEngine
from .serve import Models, OnLogits, Sessions, prepared, run_unrecorded

RecordOptions = RunOptions


def record(
    scenario: Scenario,
    path: Path | str,
    *,
    loaded: LoadedModel | None = None,
    draft: LoadedModel | None = None,
    options: RunOptions | None = None,
) -> Trace:
    """Run ``scenario`` with mlx models and write its trace to the new directory ``path``.

    ``loaded`` and ``draft`` are the scenario's models where they are loaded already. An interrupted run leaves every finished shard
    readable. Raises the subclasses of DetdiffError that loading, preparing, running and writing raise.
    """
    engine = MlxEngine(loaded or load(scenario.model), draft)
    return record_engine(scenario, path, engine=engine, options=options)


def generate(
    scenario: Scenario,
    *,
    loaded: LoadedModel | None = None,
    draft: LoadedModel | None = None,
    on_logits: OnLogits | None = None,
) -> dict[str, list[int]]:
    """Run ``scenario`` without recording; generated token ids by request id.

    With the native plan in the padded layout this is mlx-lm's own engine with only the model call counted.
    ``on_logits(forward, logits)`` sees the logits of every forward whose logits the engine uses.
    """
    models = Models.of(scenario, loaded, draft)
    work = prepared(scenario, models)
    run_unrecorded(scenario, Sessions.of(scenario, models), work, on_logits)
    return {w.id: list(w.generated) for w in work}
