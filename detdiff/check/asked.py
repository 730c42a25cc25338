"""What a check is asked for: the arguments of a call, what a marker says, what the command line and ini file say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from detdiff.errors import CheckSettingInvalid, NothingToCheck
from detdiff.scenario import KernelPlan, Scenario, nearest

from .compositions import LAYOUTS_BY_DEFAULT, SCHEDULES_BY_DEFAULT
from .levels import EXACT, LEVELS

_OWN: Final = ("request", "schedule", "layout", "arrivals", "force_tokens", "active")
"""Scenario keys that a check decides itself."""


@dataclass(frozen=True)
class Defaults:
    """What holds where a test says nothing. ``root`` is where failures are kept."""

    root: Path
    model: str | None = None
    schedules: str | Sequence[str] = SCHEDULES_BY_DEFAULT
    level: str = EXACT
    update: bool = False
    explain: bool = False
    full: bool = False


@dataclass(frozen=True)
class Asked:
    """One check. ``settings`` are further keys of a scenario, which hold for the run alone and for every composition."""

    model: Any = None
    prompts: Sequence[Any] | str | None = None
    schedules: str | Sequence[str] = SCHEDULES_BY_DEFAULT
    layouts: str | Sequence[str] = LAYOUTS_BY_DEFAULT
    kernels: str | KernelPlan = "native"
    max_tokens: int = 16
    seeds: Sequence[int] = (0,)
    level: str = EXACT
    explain: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any], defaults: Defaults) -> Asked:
        """The check for arguments by name; those that are None are left to ``defaults``.

        Raises CheckSettingInvalid and NothingToCheck.
        """
        found = {name: value for name, value in given.items() if value is not None}
        fields = cls.__dataclass_fields__.keys() - {"settings"}
        own = {name: found.pop(name) for name in list(found) if name in fields}
        asked = replace(
            cls(
                model=defaults.model,
                schedules=defaults.schedules,
                level=defaults.level,
                explain=defaults.explain,
            ),
            **own,
        )
        taken = next((name for name in found if name in _OWN), None)
        if taken is not None:
            raise CheckSettingInvalid(
                f"{taken} is no setting of a check; it follows from prompts, schedules and layouts. Leave it out, or write it "
                "after a schedule, such as 'continuous:2 arrivals=0,5'."
            )
        if asked.level not in LEVELS:
            raise CheckSettingInvalid(f"level is {asked.level!r}; {nearest(str(asked.level), LEVELS)}")
        drawn: Any = asked.seeds
        seeds = list(drawn) if isinstance(drawn, Iterable) else [drawn]
        if not seeds:
            raise NothingToCheck("There are no seeds, so that nothing would be checked. Give one, such as 0.")
        if not all(type(seed) is int and seed >= 0 for seed in seeds) or len(set(seeds)) < len(seeds):
            raise CheckSettingInvalid(f"seeds are {seeds}; expected whole numbers from 0 on, each once.")
        return replace(asked, seeds=tuple(seeds), settings=found)

    def base(self, model: str, requests: Sequence[Mapping[str, Any]], layout: str) -> Scenario:
        """The serial scenario in a layout. Raises what making a scenario raises."""
        plan = self.kernels if isinstance(self.kernels, KernelPlan) else None
        keys = {
            "model": model,
            "schedule": "serial",
            "layout": layout,
            "kernels": "native" if plan is not None else self.kernels,
            "max_tokens": self.max_tokens,
            **self.settings,
            "request": list(requests),
        }
        scenario = Scenario.from_dict(keys, where="check")
        return scenario if plan is None else replace(scenario, kernels=plan)
