"""MlxEngine: mlx-lm models behind the engine interface."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx

from detdiff.engines import base
from detdiff.engines.base import Begin, RunOptions
from detdiff.errors import EngineRefuses, OracleRefused
from detdiff.scenario import Scenario
from detdiff.trace import Site

from .environment import environment
from .model import LoadedModel, encode, load
from .serve import Models

if TYPE_CHECKING:
    from detdiff.explain.case import Case
    from detdiff.explain.controls.finite import NotFinite
    from detdiff.explain.oracle import Operation
    from detdiff.explain.origins import Captured

    from .cache_patches import Patches
    from .path_changes import PathTrials

_CAPABILITIES: Final = frozenset(
    {
        *base.TRACE_CAPABILITIES,
        base.RESET,
        base.PIN_KERNELS,
        base.MINIMAL_CHANGE,
        base.PATCH,
        base.DTYPE,
        base.ORACLE,
        base.FIRST_NOT_FINITE,
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
    stateless: bool = True
    """Every run makes its caches anew, so that nothing is left of what was served."""
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

        if options.overrides.patches:
            raise EngineRefuses(
                "The mlx engine was asked to put cache entries into a whole recording; expected pin_kernels or dtype. Ask "
                "cache_patches of the engine, which puts them in before one forward."
            )
        return run(scenario, self.models(scenario), begin, options)

    def reset(self) -> None:
        self.loaded.staged.clear()
        mx.clear_cache()

    @property
    def stop_tokens(self) -> Collection[int]:
        """Token ids that end a text."""
        found: Collection[int] = self.loaded.tokenizer.eos_token_ids
        return found

    def draft_identity(self, scenario: Scenario) -> Mapping[str, Any]:
        """The identity of a speculative scenario's draft model."""
        draft = self.models(scenario).draft
        return {} if draft is None else draft.identity

    # What controls ask beside recordings. What it takes is loaded then.

    def path_trials(self, case: Case) -> PathTrials:
        """See ``explain.controls.minimal_change``."""
        from .path_changes import PathTrials
        from .reruns import Reruns

        return PathTrials(Reruns.of(case))

    def cache_patches(self, case: Case) -> Patches:
        """See ``explain.controls.patches``."""
        from .cache_patches import Patches
        from .reruns import Reruns

        return Patches(Reruns.of(case))

    def first_not_finite(self, case: Case, side: str) -> NotFinite | None:
        """See ``explain.controls.finite``."""
        from .first_not_finite import watched_for_values
        from .reruns import Reruns

        return watched_for_values(Reruns.of(case), side).found

    def operation(
        self, site: Site, captured: Captured, request: str, rows: Sequence[int], scenario: Scenario
    ) -> Operation:
        """See ``explain.controls.oracle``."""
        from .oracle_operations import Gathered

        models = self.models(scenario)
        loaded = models.draft if site.name.startswith("draft.") else models.target
        if loaded is None:
            raise OracleRefused("The draft model of the run is not at hand. Judge the target's sites.")
        return Gathered(loaded.model, captured, site, request, list(rows)).operation()


def open_mlx(model: str | None, settings: Mapping[str, Any]) -> MlxEngine:
    """The factory of the mlx engine. Raises EngineRefuses for settings, of which it has none, and what ``load`` raises."""
    if settings:
        raise EngineRefuses(
            f"The mlx engine was given the settings {', '.join(sorted(settings))}, and takes none: a scenario's own keys say "
            "everything of its runs. Leave them out."
        )
    return MlxEngine(load(model or "builtin"))
