"""MlxEngine: mlx-lm models behind the engine interface, how they run a scenario into a trace, and both in one call."""

from __future__ import annotations

import hashlib
import platform
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

import detdiff
from detdiff.engines import base
from detdiff.engines.base import Begin, RunOptions, blas_in_use, chip, flags, imported, version
from detdiff.engines.mlx.taps.entries import Selection
from detdiff.engines.mlx.taps.forward import DRAFT
from detdiff.engines.mlx.taps.recorder import Recorder, RecordingSettings
from detdiff.engines.mlx.taps.tapping import model_modules
from detdiff.engines.record import record as record_engine
from detdiff.engines.schedule import Work
from detdiff.engines.tasks import Pooling
from detdiff.errors import EngineRefuses, LayoutError, OracleRefused, ScenarioError
from detdiff.scenario import EMBED, SCORE, KernelPlan, Scenario
from detdiff.trace import Place, Site, Trace

from .model import LoadedModel, encode, load
from .model_directory import config_value
from .padded import OnChoice, padding_of
from .path_changes import SingleRowPaths
from .run_checks import FirstLogits, compare_logits
from .serve import (
    Models,
    OnLogits,
    Sessions,
    in_dtype,
    prepared,
    run_unrecorded,
    serve,
    unrecorded_caches,
)

if TYPE_CHECKING:
    from detdiff.explain.adapted import AdaptedLinear, PlainLinear
    from detdiff.explain.case import Case
    from detdiff.explain.controls.choices import RunChoices
    from detdiff.explain.controls.finite import NotFiniteValue
    from detdiff.explain.oracle import Operation
    from detdiff.explain.origins import Captured, OriginRow
    from detdiff.probe.measures import Clock, RowCosts

    from .attention_calls import AttentionWatch
    from .cache_patches import CachePatches
    from .invariance import MlxPinning
    from .live import PackedLive
    from .path_changes import MinimalChangeTrials
    from .sharded.engine import ShardedEngine


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
        base.MODEL_FILE,
        base.CHOICES,
        base.PADDING,
        base.ADAPTERS,
        base.INVARIANCE,
        base.PACKED,
        base.SPECULATION,
        base.CACHE_SETTINGS,
        base.KERNEL_PLAN,
        base.SPLIT_ROWS,
        base.SAMPLING,
        base.SERIAL,
        base.STATIC,
        base.CONTINUOUS,
        base.PREFILL_CHUNK,
        base.TEXT,
        base.SCORES,
        base.EMBEDS,
        base.TIMED,
        base.LIVE,
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

    @property
    def model_file(self) -> Path:
        """The directory of the model."""
        return self.loaded.path

    def environment(self) -> dict[str, Any]:
        return {**environment(), "sources": sources(self.loaded.model)}

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
            draft = self._drafts.get(name) or load(name, custom_code=self.settings.get("custom_code") is True)
            self._drafts[name] = draft
        return Models.of(scenario, self.loaded, draft)

    def check(self, scenario: Scenario) -> None:
        # What a model, its caches and its context allow is found by preparing the run, before a trace is begun.
        self.models(scenario)

    def run(self, scenario: Scenario, begin: Begin, options: RunOptions) -> Mapping[str, Any]:
        if options.overrides.patches:
            raise EngineRefuses(
                "The mlx engine was asked to put cache entries into a whole recording; expected pin_kernels or dtype. Ask "
                "cache_patches of the engine, which puts them in before one forward."
            )
        return run(scenario, self.models(scenario), begin, options)

    def timed(
        self, scenario: Scenario, on_start: Callable[[], None], on_token: base.OnTimedToken
    ) -> list[float | None]:
        """See ``base.RunsUnrecorded``."""
        models = self.models(scenario)
        work = prepared(scenario, models)
        sessions = Sessions.of(scenario, models)
        on_start()
        run_unrecorded(scenario, sessions, work, None, lambda request, _, token: on_token(request, token))
        return [item.came for item in work]

    def row_costs(self, scenario: Scenario, rows: Sequence[int], now: Clock) -> list[RowCosts]:
        """See ``base.CostsRows``: each linear shape once."""
        from detdiff.probe.measures import costs_of

        from .probe_operations import shapes_of

        layout = "packed" if scenario.schedule.layout == "packed" else "batch"
        shapes = shapes_of(self.loaded, scenario.kernels.profile or "native", layout)
        return costs_of(((str(each.shape), len(each.sites), each.first) for each in shapes), rows, now)

    def reset(self) -> None:
        self.loaded.staged.clear()
        self.loaded.apart.clear()
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

    def live(self, scenario: Scenario, path: Place | None) -> PackedLive:
        """A run of requests that come while it runs, recorded into the new directory ``path``. See `PackedLive`."""
        from .live import PackedLive

        return PackedLive(self, scenario, path)

    def pinning(self, kernels: KernelPlan) -> MlxPinning:
        """See ``invariance.pinning.PinsKernels``."""
        from .invariance import MlxPinning

        return MlxPinning(self.loaded, kernels)

    # What controls ask beside recordings. What it takes is loaded then.

    def path_trials(self, case: Case) -> MinimalChangeTrials:
        """See ``explain.controls.minimal_change``."""
        from .path_changes import MinimalChangeTrials
        from .reruns import Reruns

        return MinimalChangeTrials(Reruns.of(case))

    def cache_patches(self, case: Case) -> CachePatches:
        """See ``explain.controls.patches``."""
        from .cache_patches import CachePatches
        from .reruns import Reruns

        return CachePatches(Reruns.of(case))

    def first_not_finite(self, case: Case, side: str) -> NotFiniteValue | None:
        """See ``explain.controls.finite``."""
        from .rerun_findings import watched_for_values
        from .reruns import Reruns

        return watched_for_values(Reruns.of(case), side).found

    def choices(self, case: Case, side: str, until: Mapping[str, int]) -> RunChoices:
        """See ``explain.controls.choices``."""
        from .choice_causes import run_choices

        return run_choices(case, side, until)

    def adapted(self) -> Mapping[str, AdaptedLinear]:
        """The layers that the model's adapter changes, by site; see ``explain.controls.adapters``."""
        from .adapted_layers import adapted_layers

        return adapted_layers(self.loaded)

    def fused_at(self, site: str) -> PlainLinear | None:
        """The layer of a site where no adapter runs beside its weights."""
        from .adapted_layers import fused_at

        return fused_at(self.loaded, site)

    def weights_beside(self, other: MlxEngine, sites: Collection[str]) -> str:
        """In which weights beside these layers another engine's model differs, in words."""
        from .adapted_layers import weights_beside

        return weights_beside(self.loaded, other.loaded, sites)

    def operation(
        self, site: Site, captured: Captured, request: str, rows: Sequence[int], scenario: Scenario
    ) -> Operation:
        """See ``explain.controls.oracle``."""
        from .oracle_operations import SiteRows

        models = self.models(scenario)
        loaded = models.draft if site.name.startswith("draft.") else models.target
        if loaded is None:
            raise OracleRefused("The draft model of the run is not at hand. Judge the target's sites.")
        return SiteRows(loaded.model, captured, site, request, list(rows)).operation()

    def again(
        self, site: Site, x: NDArray[Any], dtype: str, shape: tuple[int, int], scenario: Scenario
    ) -> NDArray[Any]:
        """See ``explain.controls.place``."""
        from .oracle_operations import called_again

        models = self.models(scenario)
        loaded = models.draft if site.name.startswith("draft.") else models.target
        assert loaded is not None
        return called_again(loaded, site, x, dtype, shape, scenario.kernels)

    def order_moves(self, a: Captured, b: Captured, origin: OriginRow) -> dict[str, bool]:
        """See ``explain.controls.place``."""
        from .attention_calls import order_moves

        return order_moves(a, b, origin)

    def watch(
        self, rows: Collection[tuple[str, int, int]], scans: Collection[tuple[int, int]]
    ) -> AttentionWatch:
        """See ``explain.controls.oracle``."""
        from .attention_calls import AttentionWatch
        from .scan_calls import ScanWatch

        return AttentionWatch(frozenset(rows), scans=ScanWatch(frozenset(scans)) if scans else None)

    def scanned(self, captured: Captured, origin: OriginRow, place: int) -> tuple[Operation, Any, str]:
        """See ``explain.controls.oracle``."""
        from .scan_calls import scanned

        return scanned(captured, origin, place)


class IdsAlone:
    """Stands for the tokenizer of a model that is only given token ids."""

    eos_token_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def engine_of_objects(given: Any, *, without_tokenizer: bool = False) -> MlxEngine | str:
    """The engine of a LoadedModel, or of the pair that ``mlx_lm.load`` gives, or ``without_tokenizer`` of a model alone; what it is
    in words where it is neither."""
    if isinstance(given, LoadedModel):
        # Whoever owns an object may have changed its weights, and what kernels made of them before would hide that.
        return MlxEngine(replace(given, staged={}, apart=set()))
    if isinstance(given, Module) and without_tokenizer:
        given = (given, IdsAlone())
    if not (isinstance(given, tuple | list) and len(given) in (2, 3) and isinstance(given[0], Module)):
        return (
            "an mlx module without its tokenizer"
            if isinstance(given, Module)
            else f"a {type(given).__name__}"
        )
    module, tokenizer = given[0], given[1]
    if not hasattr(tokenizer, "eos_token_ids"):
        from mlx_lm.tokenizer_utils import TokenizerWrapper

        tokenizer = TokenizerWrapper(tokenizer)
    config = dict(vars(module.args)) if hasattr(getattr(module, "args", None), "__dict__") else {}
    kind = str(getattr(module, "model_type", None) or type(module).__module__.rpartition(".")[2])
    identity = {"name": kind, "model_type": kind, "vocab_size": config_value(config, "vocab_size")}
    return MlxEngine(LoadedModel(module, tokenizer, Path(kind), identity, config))


def open_mlx(model: str | None, settings: Mapping[str, Any]) -> MlxEngine | ShardedEngine:
    """The factory of the mlx engine. Its settings are ``custom_code``, true to let a model's own Python file run, ``processes``, over how
    many the model is dealt out, and what a scenario says as ``adapter_path``.

    Raises EngineRefuses for other settings, and what ``load`` raises.
    """
    allowed, processes = settings.get("custom_code", False), settings.get("processes", 1)
    wrong = not isinstance(allowed, bool) or type(processes) is not int or not 1 <= processes <= 64
    if set(settings) - {"custom_code", "adapter_path", "processes"} or wrong:
        raise EngineRefuses(
            f"The mlx engine was given the settings {', '.join(f'{k}={v!r}' for k, v in sorted(settings.items()))}; expected none but "
            "custom_code, true or false, and processes, 1 to 64: a scenario's own keys say everything else of its runs. Leave the others out."
        )
    loaded = load(model or "builtin", settings.get("adapter_path"), custom_code=allowed)
    engine = MlxEngine(loaded, settings=dict(settings))
    if processes == 1:
        return engine
    from .sharded.engine import ShardedEngine

    return ShardedEngine(engine, processes, dict(settings))


def environment() -> dict[str, Any]:
    """The environment block of a trace; no paths, no times."""
    device = mx.default_device()
    info = mx.device_info() if hasattr(mx, "device_info") else {}
    return {
        "detdiff": detdiff.__version__,
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "numpy": version("numpy"),
        "numba": version("numba"),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.machine()}",
        "chip": chip(),
        "device": str(device.type).rpartition(".")[2],
        "backend": _backend(device),
        "architecture": str(info.get("architecture", "")),
        "blas": blas_in_use(),
        "flags": flags(),
        **imported(),
    }


SOURCES = ("mlx_lm.generate", "mlx_lm.models.base", "mlx_lm.models.cache")
"""Modules of mlx-lm that every model runs beside those of its own classes."""


def sources(model: Module) -> dict[str, str]:
    """The Python modules that a model runs, but MLX's own: name to the first 16 digits of its source's sha256.

    Version strings stay when an editable installation is changed; these do not.
    """
    modules = {each.__name__: each for each in model_modules(model) if not each.__name__.startswith("mlx.")}
    modules |= {name: sys.modules[name] for name in SOURCES}
    found = {name: getattr(module, "__file__", None) for name, module in modules.items()}
    return {
        name: hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
        for name, file in sorted(found.items())
        if file is not None and Path(file).is_file()
    }


def _backend(device: Any) -> str:
    if device.type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def run(scenario: Scenario, models: Models, begin: Begin, options: RunOptions) -> dict[str, Any]:
    """Run ``scenario`` into the writer that ``begin`` gives; what ``finish`` is told. See `base.Engine.run`."""
    with in_dtype(models, options.overrides.dtype) as models, padding_of(options.overrides.padding):
        return _run(scenario, models, begin, options)


def _run(scenario: Scenario, models: Models, begin: Begin, options: RunOptions) -> dict[str, Any]:
    work = prepared(scenario, models)
    sessions = Sessions.of(scenario, models, options.faults)
    for session in (sessions.target, sessions.draft):
        if session is not None:
            session.watch = options.overrides.watch
            session.scans = getattr(options.overrides.watch, "scans", None)
            if options.overrides.pin_kernels:
                session.override_paths(SingleRowPaths(session.operations.chooser.planned))
    # What cannot be recorded is said before there is a trace.
    settings = _recording_settings(scenario, models.target, work, sessions, options)
    total = sum(w.max_tokens for w in work)
    seen = FirstLogits(_observed(scenario, options))
    started, clock = time.time(), time.perf_counter()
    writer = begin(_header(scenario, models, work, sessions))
    recorder = Recorder(writer, sessions.target.sites, settings, sessions.sites.get(DRAFT))
    count = 0

    def on_token(request: int, index: int, token: int) -> None:
        nonlocal count
        recorder.token(request, index, token)
        count += 1
        if options.progress is not None:
            options.progress(count, total)

    with sessions.running(recorder, seen):
        counts = serve(scenario, sessions, work, on_token, recorder.event, _chosen(scenario, recorder))
        recorder.finish()
    seconds = time.perf_counter() - clock
    observer = compare_logits(
        seen, lambda logits: run_unrecorded(scenario, sessions, prepared(scenario, models), logits)
    )
    times = {"started": started, "seconds": seconds, "rows": recorder.rows, "forwards": recorder.forwards}
    more: dict[str, Any] = {} if scenario.speculation is None else {"speculation": counts}
    if any(item.before for item in work):
        # The conversations of later turns were not known when the trace was begun.
        more["requests"] = _requests(scenario, work)
    if recorder.scored_in is not None:
        more["scored_in"] = recorder.scored_in
    if recorder.unrecorded:
        more["lacks"] = {"cache": unrecorded_caches(recorder.unrecorded)}
    return {"times": times, "observer": observer, **more}


def _chosen(scenario: Scenario, recorder: Recorder) -> OnChoice | None:
    """Who notes what tokens were chosen from, of requests whose sampling is more than a keyed draw."""
    told = [bool(request.sampling.beyond_keyed) for request in scenario.requests]

    def on_choice(request: int, index: int, logprobs: mx.array) -> None:
        if told[request]:
            recorder.choice(request, index, logprobs)

    return on_choice if any(told) else None


def _observed(scenario: Scenario, options: RunOptions) -> int:
    """Forwards to check: under speculation so many of the target's, with the draft's before each."""
    return options.observe * (1 if scenario.speculation is None else 1 + scenario.speculation.drafts)


def _header(scenario: Scenario, models: Models, work: list[Work], sessions: Sessions) -> dict[str, Any]:
    return {
        **({} if models.draft is None else {"draft": dict(models.draft.identity)}),
        "requests": _requests(scenario, work),
        **sessions.header(scenario, models),
    }


def _requests(scenario: Scenario, work: list[Work]) -> list[dict[str, Any]]:
    return [
        base.request_header(request, w.prompt) for w, request in zip(work, scenario.requests, strict=True)
    ]


def _recording_settings(
    scenario: Scenario, loaded: LoadedModel, work: list[Work], sessions: Sessions, options: RunOptions
) -> RecordingSettings:
    def text(token: int) -> str:
        return str(loaded.tokenizer.decode([token]))

    ids = [w.id for w in work]
    span, last = scenario.capture.positions, max(len(w.prompt) + w.max_tokens - 1 for w in work)
    turns = any(w.before for w in work)  # which are as long as they become
    if scenario.capture.level == "window" and span is not None and span[0] > last and not turns:
        raise ScenarioError(
            f"window_positions starts at {span[0]}, and the longest request has positions 0 to {last}; nothing would be "
            "captured. Start it earlier."
        )
    maps = sessions.sites
    selection: dict[str, Selection | None] = {}
    for model, sites in maps.items():
        beside = [other for name, other in maps.items() if name != model]
        if options.values is None:
            selection[model] = Selection.of(scenario.capture, sites, ids, beside)
        else:
            selection[model] = Selection.at(options.values, sites, ids, beside=beside)
    lens = sessions.lens() if scenario.capture.lens else None
    lengths = [len(w.prompt) for w in work]
    pooling = None
    if scenario.task == EMBED:
        if sessions.target.sites.norm is None:
            raise LayoutError(
                "task embed needs a final norm outside the layers, whose output is pooled; this model has none among its sites. "
                "Embed with another model."
            )
        pooling = Pooling(scenario.pooling, lengths)
    scored = [w.scored for w in work] if scenario.task == SCORE else []
    return RecordingSettings(scenario.capture, ids, lengths, text, selection, lens, scored, pooling)


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
    engine = MlxEngine(loaded or load(scenario.model, scenario.adapter_path), draft)
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
