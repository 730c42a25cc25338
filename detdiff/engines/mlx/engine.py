"""MlxEngine: mlx-lm models behind the engine interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import mlx.core as mx

from detdiff.engines import base
from detdiff.engines.base import Begin, RunOptions
from detdiff.errors import EngineRefuses
from detdiff.scenario import KernelPlan, PathRule, Scenario

from .environment import environment
from .model import LoadedModel, encode, load
from .serve import Models

_CAPABILITIES: Final = frozenset(
    {
        *base.TRACE_CAPABILITIES,
        base.RESET,
        base.PIN_KERNELS,
        base.MINIMAL_CHANGE,
        base.PATCH,
        base.DTYPE,
        base.ORACLE,
        base.RESUME,
        base.PACKED,
        base.SPECULATION,
        base.CACHE_SETTINGS,
        base.KERNEL_PLAN,
        base.SAMPLING,
        base.SERIAL,
        base.STATIC,
        base.CONTINUOUS,
        base.PREFILL_CHUNK,
        base.TEXT,
    }
)


@dataclass(eq=False)
class MlxEngine:
    """A model of mlx-lm, loaded. ``draft`` is that of speculative scenarios; without one the scenario's is loaded when it
    is first asked for, and kept by its name."""

    loaded: LoadedModel
    draft: LoadedModel | None = None
    name: str = "mlx"
    settings: Mapping[str, Any] = field(default_factory=dict)
    capabilities: frozenset[str] = _CAPABILITIES
    _drafts: dict[str, LoadedModel] = field(default_factory=dict)

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.loaded.identity

    def environment(self) -> dict[str, Any]:
        return environment()

    def lacks(self, capability: str) -> str:
        return f"the mlx engine has no {capability}"

    def encode(self, text: str, chat: bool) -> list[int]:
        return encode(self.loaded, text, chat)

    def decode(self, ids: list[int]) -> str:
        return str(self.loaded.tokenizer.decode(ids))

    def models(self, scenario: Scenario) -> Models:
        """The scenario's models. Raises DraftMismatch, and what loading a draft raises."""
        draft = self.draft
        if scenario.speculation is not None and draft is None:
            name = scenario.speculation.draft
            draft = self._drafts.get(name) or load(name)
            self._drafts[name] = draft
        return Models.of(scenario, self.loaded, draft)

    def check(self, scenario: Scenario) -> None:
        # What a model, its caches and its context allow is found by preparing the run, before a trace is begun.
        self.models(scenario)

    def run(self, scenario: Scenario, begin: Begin, options: RunOptions) -> Mapping[str, Any]:
        from .record import run

        return run(self._overridden(scenario, options), self.models(scenario), begin, options)

    def reset(self) -> None:
        self.loaded.staged.clear()
        mx.clear_cache()

    def _overridden(self, scenario: Scenario, options: RunOptions) -> Scenario:
        overrides = options.overrides
        for name, given in (("dtype", overrides.dtype), ("patches", overrides.patches)):
            if given:
                raise EngineRefuses(
                    f"The mlx engine was asked for the override {name} in a whole recording; expected pin_kernels alone. Ask "
                    "the controls of detdiff.engines.mlx for it."
                )
        if not overrides.pin_kernels:
            return scenario
        return replace(scenario, kernels=KernelPlan(rules=(PathRule(path="rows"),)))


def open_mlx(model: str | None, settings: Mapping[str, Any]) -> MlxEngine:
    """The factory of the mlx engine. Raises EngineRefuses for settings, of which it has none, and what ``load`` raises."""
    if settings:
        raise EngineRefuses(
            f"The mlx engine was given the settings {', '.join(sorted(settings))}, and takes none: a scenario's own keys say "
            "everything of its runs. Leave them out."
        )
    return MlxEngine(load(model or "builtin"))
