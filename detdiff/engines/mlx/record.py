"""record: scenario in, trace out; and the same engines without recording."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from detdiff.engines.base import Begin, RunOptions
from detdiff.engines.mlx.model import LoadedModel, load
from detdiff.engines.mlx.taps.arrays import lens_logits
from detdiff.engines.mlx.taps.entries import Selection
from detdiff.engines.mlx.taps.forward import DRAFT
from detdiff.engines.mlx.taps.recorder import Recorder, Subject
from detdiff.engines.mlx.taps.session import Session
from detdiff.engines.record import record as record_engine
from detdiff.errors import LayoutError, ScenarioError
from detdiff.scenario import Scenario
from detdiff.trace import Trace

from .engine import MlxEngine
from .path_changes import Held
from .requests import Work, prepare
from .run_checks import FirstLogits, compare_logits
from .serve import Models, OnLogits, Sessions, in_dtype, serve

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


def run(scenario: Scenario, models: Models, begin: Begin, options: RunOptions) -> dict[str, Any]:
    """Run ``scenario`` into the writer that ``begin`` gives; what ``finish`` is told. See `base.Engine.run`."""
    with in_dtype(models, options.overrides.dtype) as models:
        return _run(scenario, models, begin, options)


def _run(scenario: Scenario, models: Models, begin: Begin, options: RunOptions) -> dict[str, Any]:
    work = _prepared(scenario, models)
    sessions = Sessions.of(scenario, models, options.faults)
    if options.overrides.pin_kernels:
        for session in (sessions.target, sessions.draft):
            if session is not None:
                session.steer(Held(session.operations.chooser.planned))
    # What cannot be recorded is said before there is a trace.
    subject = _subject(scenario, models.target, work, sessions, options)
    total = sum(w.max_tokens for w in work)
    seen = FirstLogits(_observed(scenario, options))
    started, clock = time.time(), time.perf_counter()
    writer = begin(_header(scenario, models, work, sessions))
    recorder = Recorder(writer, sessions.target.sites, subject, sessions.sites.get(DRAFT))
    count = 0

    def on_token(request: int, index: int, token: int) -> None:
        nonlocal count
        recorder.token(request, index, token)
        count += 1
        if options.progress is not None:
            options.progress(count, total)

    with sessions.running(recorder, seen):
        counts = serve(scenario, sessions, work, on_token, recorder.event)
        recorder.finish()
    seconds = time.perf_counter() - clock
    observer = compare_logits(
        seen, lambda logits: _unrecorded(scenario, sessions, _prepared(scenario, models), logits)
    )
    times = {"started": started, "seconds": seconds, "rows": recorder.rows, "forwards": recorder.forwards}
    more: dict[str, Any] = {} if scenario.speculation is None else {"speculation": counts}
    if recorder.unrecorded:
        more["lacks"] = {"cache": unrecorded_caches(recorder.unrecorded)}
    return {"times": times, "observer": observer, **more}


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
    work = _prepared(scenario, models)
    _unrecorded(scenario, Sessions.of(scenario, models), work, on_logits)
    return {w.id: list(w.generated) for w in work}


def _prepared(scenario: Scenario, models: Models) -> list[Work]:
    work = prepare(scenario, models.target)
    models.check(work)
    return work


def _unrecorded(scenario: Scenario, sessions: Sessions, work: list[Work], on_logits: OnLogits | None) -> None:
    with sessions.running(None, on_logits, packed=scenario.schedule.layout == "packed"):
        serve(scenario, sessions, work, lambda *_: None)


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


def _observed(scenario: Scenario, options: RunOptions) -> int:
    """Forwards to check: under speculation so many of the target's, with the draft's before each."""
    return options.observe * (1 if scenario.speculation is None else 1 + scenario.speculation.drafts)


def _header(scenario: Scenario, models: Models, work: list[Work], sessions: Sessions) -> dict[str, Any]:
    unknown = sessions.target.sites.unrecorded
    return {
        **({} if models.draft is None else {"draft": dict(models.draft.identity)}),
        "requests": [
            {
                "id": w.id,
                "tokens": list(w.prompt),
                "max_tokens": w.max_tokens,
                "arrival": w.arrival,
                "ignore_stop": request.ignore_stop,
                "sampling": asdict(request.sampling),
            }
            for w, request in zip(work, scenario.requests, strict=True)
        ],
        "sites": [site.to_json() for each in sessions.sites.values() for site in each.sites],
        "notes": models.notes(),
        **({"lacks": {"cache": unrecorded_caches(unknown)}} if unknown else {}),
    }


def _subject(
    scenario: Scenario, loaded: LoadedModel, work: list[Work], sessions: Sessions, options: RunOptions
) -> Subject:
    def text(token: int) -> str:
        return str(loaded.tokenizer.decode([token]))

    ids = [w.id for w in work]
    span, last = scenario.capture.positions, max(len(w.prompt) + w.max_tokens - 1 for w in work)
    if scenario.capture.level == "window" and span is not None and span[0] > last:
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
    lens = _lens(loaded.model, sessions.target) if scenario.capture.lens else None
    return Subject(scenario.capture, ids, [len(w.prompt) for w in work], text, selection, lens)


def _lens(model: Module, session: Session) -> Callable[[mx.array], mx.array]:
    """Final norm and head as one function of hidden rows [rows, D], outside the taps."""
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
