"""Serving a scenario's requests: the sessions of its models, and the engine of its layout over them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from detdiff.engines import base
from detdiff.engines.mlx.model import LoadedModel, context_limit, load
from detdiff.engines.mlx.taps.forward import DRAFT, TARGET, Forward, Recording, lens_logits
from detdiff.engines.mlx.taps.injected import InjectedFault
from detdiff.engines.mlx.taps.session import Session
from detdiff.engines.mlx.taps.sites import ROLES, SiteMap
from detdiff.engines.schedule import OnEvent, OnToken, Work, silent
from detdiff.engines.speculation import refuse_long_for_draft, refuse_other_vocabulary
from detdiff.errors import LayoutError, ModelRunError
from detdiff.scenario import GENERATE, Scenario

from .adapters import switch_adapter
from .model_directory import config_value
from .packed import DraftSession, PackedEngine
from .padded import (
    OnChoice,
    PaddedComposer,
    PaddedRun,
    Pair,
    SpeculativeComposer,
    run_padded,
    run_speculative,
    run_whole,
)
from .requests import prepare
from .run_checks import refuse_leaks
from .turns import TurnCaches

OnLogits = Callable[[Forward, mx.array], None]
Counts = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Models:
    """A scenario's model, and its draft model where it has one."""

    target: LoadedModel
    draft: LoadedModel | None = None

    @classmethod
    def of(
        cls, scenario: Scenario, loaded: LoadedModel | None = None, draft: LoadedModel | None = None
    ) -> Models:
        """Load what is not loaded yet.

        Raises what ``load`` raises, and DraftMismatch for a draft of another vocabulary.
        """
        found = loaded or load(scenario.model, scenario.adapter_path)
        if scenario.speculation is None:
            return cls(found)
        other = draft or load(scenario.speculation.draft)
        refuse_other_vocabulary(
            (scenario.model, found.identity.get("vocab_size")),
            (scenario.speculation.draft, other.identity.get("vocab_size")),
        )
        return cls(found, other)

    def notes(self) -> list[str]:
        """What a trace should say about the two."""
        if self.draft is None:
            return []
        hashes = [model.identity.get("tokenizer_sha256") for model in (self.target, self.draft)]
        return [] if None in hashes or hashes[0] == hashes[1] else ["the draft's tokenizer is another file"]

    def check(self, work: list[Work]) -> None:
        """Raises ContextExceeded when a request does not fit the draft's context."""
        if self.draft is not None:
            refuse_long_for_draft(work, context_limit(self.draft))


@contextlib.contextmanager
def in_dtype(models: Models, wanted: str | None) -> Iterator[Models]:
    """All floating parameters in a dtype while the block lasts; the very arrays are back afterwards. None: as they are."""
    if wanted is None:
        yield models
        return
    every = [loaded for loaded in (models.target, models.draft) if loaded is not None]
    parameters = [loaded.model.parameters() for loaded in every]
    try:
        for loaded in every:
            loaded.model.set_dtype(getattr(mx, wanted))
        # What kernels made of the weights is of the other dtype.
        yield Models(*(replace(loaded, staged={}, apart=set()) for loaded in every))
    finally:
        for loaded, own in zip(every, parameters, strict=True):
            loaded.model.update(own)


@dataclass(frozen=True)
class Sessions:
    """Taps on the models of a scenario."""

    target: Session
    draft: Session | None = None

    @classmethod
    def of(
        cls, scenario: Scenario, models: Models, injected_faults: tuple[InjectedFault, ...] = ()
    ) -> Sessions:
        """Sessions on the models, once they are known to run in the scenario's layout. Raises ModelRunError."""
        draft: Session | None = None
        try:
            target = Session(
                models.target.model,
                scenario.kernels,
                injected_faults,
                models.target.staged,
                alone=models.draft is None,
            )
            if models.draft is not None:
                draft = Session(
                    models.draft.model, scenario.kernels, injected_faults, models.draft.staged, after=target
                )
            if scenario.schedule.layout == "packed":
                for loaded in (models.target, models.draft):
                    if loaded is not None and scenario.kernels.profile not in loaded.apart:
                        refuse_leaks(loaded.model, scenario.kernels, loaded.staged)
                        loaded.apart.add(scenario.kernels.profile)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModelRunError(
                f"The model {scenario.model!r} failed on a first forward of a few tokens: "
                f"{str(error).splitlines()[0].rstrip('.')}. "
                + (
                    _experts(error)
                    or "Expected a model that mlx-lm runs: check its config.json and the dtypes of its weights"
                )
                + "; `--debug` shows where it failed."
            ) from error
        if models.target.share is not None:
            target.sites = models.target.share.placed(target.sites)
        return cls(target, draft)

    @property
    def sites(self) -> dict[str, SiteMap]:
        """The sites by model."""
        found = {TARGET: self.target.sites}
        return found if self.draft is None else {**found, DRAFT: self.draft.sites}

    @contextlib.contextmanager
    def running(
        self, recording: Recording | None, on_logits: OnLogits | None, *, packed: bool = False
    ) -> Iterator[None]:
        """Taps on for the length of the block."""
        with contextlib.ExitStack() as stack:
            for session in (self.target, self.draft):
                if session is not None:
                    stack.enter_context(session.running(recording, packed=packed))
                    session.on_logits = on_logits
            yield

    def header(self, scenario: Scenario, models: Models) -> dict[str, Any]:
        """What a trace's header says of the models' sites and caches, whatever the requests."""
        unknown = self.target.sites.unrecorded
        return {
            "sites": [site.to_json() for each in self.sites.values() for site in each.sites],
            "notes": [*models.notes(), *_without_effect(scenario, models.target)],
            **_roles(models.target),
            **({"lacks": {"cache": unrecorded_caches(unknown)}} if unknown else {}),
        }

    def lens(self) -> Callable[[mx.array], mx.array]:
        """Final norm and head as one function of hidden rows [rows, D], outside the taps. Raises LayoutError."""
        session = self.target
        norm, head = session.module(session.sites.norm), session.module(session.sites.head)
        if norm is None or head is None:
            raise LayoutError(
                "lens needs a final norm and an output projection outside the layers; this model has "
                f"{'no' if norm is None else 'a'} final norm and {'no' if head is None else 'an'} output projection "
                "among its sites. Record without lens."
            )

        def logits(hidden: mx.array) -> mx.array:
            session.paused = True
            try:
                return lens_logits(hidden, norm, head)
            finally:
                session.paused = False

        return logits


def unrecorded_caches(classes: Mapping[int, str]) -> str:
    """Why the cache entries of some layers are not in a trace; ``classes`` has their caches' class by layer."""
    by_class: dict[str, list[int]] = {}
    for layer, name in sorted(classes.items()):
        by_class.setdefault(name, []).append(layer)
    each = [
        f"the cache of layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))} is not recorded: class {name}"
        for name, layers in by_class.items()
    ]
    return "; ".join(each)


def _without_effect(scenario: Scenario, loaded: LoadedModel) -> list[str]:
    """What mlx-lm does not do with this model, whatever it is asked for."""
    if scenario.cache.max_kv_size is None or not hasattr(loaded.model, "make_cache"):
        return []
    return [
        f"max_kv_size has no effect: the model type {loaded.identity.get('model_type')} makes its own caches, and mlx-lm then gives it no other"
    ]


def _roles(loaded: LoadedModel) -> dict[str, Any]:
    config = dict(loaded.config)
    width = config_value(config, "head_dim")
    heads, hidden = config_value(config, "num_attention_heads"), config_value(config, "hidden_size")
    if width is None and heads and hidden:
        width = hidden // heads
    return base.decoder_roles(
        str(loaded.identity.get("model_type")),
        ROLES,
        neighbours=config.get("rope_traditional") is True,
        head_width=width,
    )


def serve(
    scenario: Scenario,
    sessions: Sessions,
    work: list[Work],
    on_token: OnToken,
    event: OnEvent = silent,
    on_choice: OnChoice | None = None,
) -> Counts:
    """Run all requests to their ends; the engine's own counts of proposals by request id.

    Raises ModelRunError for what mlx or mlx-lm cannot do with the model.
    """
    try:
        return _serve(scenario, sessions, work, on_token, event, on_choice)
    except (RuntimeError, ValueError) as error:
        # How mlx and mlx-lm say that a class cannot do something: be batched, or run in this dtype on this device.
        if "Unable to allocate" in str(error):
            raise
        raise ModelRunError(
            f"The model {scenario.model!r} failed while {len(work)} requests ran with schedule {scenario.schedule.kind} "
            f"in the {scenario.schedule.layout} layout: {str(error).rstrip('.')}. "
            + (
                _experts(error)
                or "Expected a model that mlx-lm runs so on this machine. Try schedule serial, another dtype or another device"
            )
            + "; `--debug` shows where it failed."
        ) from error


def _experts(error: Exception) -> str:
    """What to do about mlx's one limit that no schedule or layout gets around; empty for other errors."""
    if "[GatherMM::eval]" not in str(error):
        return ""
    # Shown in docs/findings.md, whose examples are run as tests.
    return (
        "On a processor mlx multiplies the weights of experts that are not quantised in float32 alone; expected experts in float32, quantised "
        "ones (mlx_lm.convert --dtype float32, or --quantize), or a GPU. No schedule or layout changes that"
    )


def packed_engine(
    scenario: Scenario, sessions: Sessions, event: OnEvent = silent, on_choice: OnChoice | None = None
) -> PackedEngine:
    """The engine that a packed scenario runs on."""
    speculation, drafting = scenario.speculation, None
    if speculation is not None and sessions.draft is not None:
        drafting = DraftSession(sessions.draft, speculation.drafts)
    return PackedEngine(sessions.target, drafting, plan=scenario.cache, event=event, on_choice=on_choice)


def _serve(
    scenario: Scenario,
    sessions: Sessions,
    work: list[Work],
    on_token: OnToken,
    event: OnEvent,
    on_choice: OnChoice | None,
) -> Counts:
    if scenario.schedule.layout == "packed":
        engine = packed_engine(scenario, sessions, event, on_choice)
        engine.run(work, scenario.schedule, on_token)
        return engine.counts()
    target, settings = sessions.target, (scenario.schedule, scenario.cache)
    if scenario.speculation is not None and sessions.draft is not None:
        speculative = SpeculativeComposer(event)
        target.compose, sessions.draft.compose = speculative.compose(TARGET), speculative.compose(DRAFT)
        pair = Pair(target.model, sessions.draft.model, scenario.speculation.drafts)
        run_speculative(pair, work, settings, speculative, on_token)
        return {
            item.id: dict(vars(speculative.counts[item.index]))
            for item in work
            if item.index in speculative.counts
        }
    composer = PaddedComposer(work)
    target.compose = composer.compose
    make = partial(make_prompt_cache, target.model, scenario.cache.max_kv_size)
    switch = partial(switch_adapter, target.model)
    with contextlib.closing(TurnCaches(work, scenario.cache.turns, event, make, switch)) as turns:
        run = PaddedRun(
            target.model, scenario.schedule, composer, on_token, turns, scenario.cache, event, on_choice
        )
        (run_padded if scenario.task == GENERATE else run_whole)(run, work)
    return {}


def prepared(scenario: Scenario, models: Models) -> list[Work]:
    """The scenario's requests, checked against its models. Raises what ``prepare`` and ``Models.check`` raise."""
    work = prepare(scenario, models.target)
    models.check(work)
    return work


def run_unrecorded(
    scenario: Scenario,
    sessions: Sessions,
    work: list[Work],
    on_logits: OnLogits | None,
    on_token: OnToken = lambda *_: None,
) -> None:
    """Serve the requests without recording; ``on_logits`` sees the logits of every forward that are used."""
    with sessions.running(None, on_logits, packed=scenario.schedule.layout == "packed"):
        serve(scenario, sessions, work, on_token)
