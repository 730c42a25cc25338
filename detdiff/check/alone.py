"""One whole batch of a model against the same requests alone."""

from __future__ import annotations

import tempfile
from pathlib import Path

from detdiff.compare import Divergence, compare
from detdiff.engines.mlx.model import LoadedModel, load
from detdiff.engines.mlx.record import RecordOptions, record
from detdiff.scenario import Scenario

_OPTIONS = RecordOptions(observe=0)


def against_alone(scenario: Scenario, loaded: LoadedModel | None = None) -> Divergence:
    """Record a scenario and its requests one after the other (a), and compare; nothing is kept.

    For compositions that `detdiff.strategies` draws. ``loaded`` is the scenario's model where it is loaded already. Raises
    what recording raises.
    """
    if loaded is None:
        loaded = load(scenario.model)
    with tempfile.TemporaryDirectory(prefix="detdiff-alone-") as folder:
        alone = record(
            scenario.with_changes(schedule="serial", arrivals=None),
            Path(folder, "a"),
            loaded=loaded,
            options=_OPTIONS,
        )
        return compare(alone, record(scenario, Path(folder, "b"), loaded=loaded, options=_OPTIONS))
