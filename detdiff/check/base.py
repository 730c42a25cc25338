"""The run alone: recorded once a session for each model and workload, and shared by all compositions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detdiff.engines.mlx.record import RecordOptions, record
from detdiff.scenario import Scenario
from detdiff.trace import Trace

from .subject import Subject

_OPTIONS = RecordOptions(observe=1)


@dataclass(frozen=True, eq=False)
class Base:
    """The serial run of a workload. ``fresh`` says that it was recorded for the check that asked for it."""

    trace: Trace
    fresh: bool


class Recorded:
    """All runs of a session, in one directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._bases: dict[tuple[Any, str], Trace] = {}

    def base(self, subject: Subject, scenario: Scenario, *, again: bool = False) -> Base:
        """The run of ``scenario``, from an earlier check where there is one, unless it is to be recorded ``again``."""
        key = (subject.key, scenario.to_toml())
        known = self._bases.get(key)
        if known is not None and not again:
            return Base(known, False)
        self._bases[key] = self.run(subject, scenario)
        return Base(self._bases[key], True)

    def run(self, subject: Subject, scenario: Scenario) -> Trace:
        """Record ``scenario``. Raises what recording raises."""
        self._count += 1
        return record(scenario, self._folder / str(self._count), loaded=subject.loaded, options=_OPTIONS)
