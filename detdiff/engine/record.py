"""record: scenario in, trace out; and the same engines without recording."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from detdiff.errors import LayoutError, ModelRunError, ScenarioError
from detdiff.instrument import Plant, Session
from detdiff.instrument.columns import Selection
from detdiff.instrument.forward import Forward
from detdiff.instrument.recorder import Recorder, Subject
from detdiff.instrument.topk import lens_logits
from detdiff.model import LoadedModel, load
from detdiff.scenario import Scenario
from detdiff.trace import Trace, TraceWriter

from .environment import environment
from .leaks import refuse_leaks
from .observer import FirstLogits, compare_logits
from .packed import PackedEngine
from .padded import PaddedComposer, run_padded
from .work import OnToken, Work, prepare

Progress = Callable[[int, int], None]  # tokens generated so far, tokens at most
OnLogits = Callable[[Forward, mx.array], None]


@dataclass(frozen=True)
class RecordOptions:
    """How to record, beyond what the scenario says.

    ``observe`` forwards are run again without recording and their logits compared (0: no check); ``plants`` are
    faults to plant; ``progress`` is called after each generated token; ``values`` keeps the values of these positions
    by request id, whatever the scenario's capture says.
    """

    observe: int = 4
    plants: tuple[Plant, ...] = ()
    progress: Progress | None = None
    values: Mapping[str, Collection[int]] | None = None


def record(
    scenario: Scenario,
    path: Path | str,
    *,
    loaded: LoadedModel | None = None,
    options: RecordOptions | None = None,
) -> Trace:
    """Run ``scenario`` and write its trace to the new directory ``path``.

    ``loaded`` is the scenario's model where it is loaded already. An interrupted run leaves every finished shard
    readable. Raises the subclasses of DetdiffError that loading, preparing, running and writing raise.
    """
    options = options or RecordOptions()
    loaded = loaded or load(scenario.model)
    work = prepare(scenario, loaded)
    session = _session(scenario, loaded, options.plants)
    # What cannot be recorded is said before there is a trace.
    subject = _subject(scenario, loaded, work, session, options)
    total = sum(w.max_tokens for w in work)
    seen = FirstLogits(options.observe)
    started, clock = time.time(), time.perf_counter()
    with TraceWriter(Path(path), _header(scenario, loaded, work, session)) as writer:
        recorder = Recorder(writer, session.sites, subject)
        count = 0

        def on_token(request: int, index: int, token: int) -> None:
            nonlocal count
            recorder.token(request, index, token)
            count += 1
            if options.progress is not None:
                options.progress(count, total)

        with session.running(recorder):
            session.on_logits = seen
            _run(scenario, session, work, on_token)
            recorder.finish()
        seconds = time.perf_counter() - clock
        observer = compare_logits(
            seen, lambda logits: _run_unrecorded(scenario, session, prepare(scenario, loaded), logits)
        )
        times = {"started": started, "seconds": seconds, "rows": recorder.rows, "forwards": recorder.forwards}
        writer.finish(complete=True, times=times, observer=observer)
    return Trace.open(Path(path))


def generate(
    scenario: Scenario, *, loaded: LoadedModel | None = None, on_logits: OnLogits | None = None
) -> dict[str, list[int]]:
    """Run ``scenario`` without recording; generated token ids by request id.

    With the native plan in the padded layout this is mlx-lm's own engine with only the model call counted.
    ``on_logits(forward, logits)`` sees the logits of every forward whose logits the engine uses.
    """
    loaded = loaded or load(scenario.model)
    work = prepare(scenario, loaded)
    _run_unrecorded(scenario, _session(scenario, loaded), work, on_logits)
    return {w.id: list(w.generated) for w in work}


def _run_unrecorded(
    scenario: Scenario, session: Session, work: list[Work], on_logits: OnLogits | None
) -> None:
    with session.running(None, packed=scenario.schedule.layout == "packed"):
        session.on_logits = on_logits
        _run(scenario, session, work, lambda *_: None)


def _session(scenario: Scenario, loaded: LoadedModel, plants: tuple[Plant, ...] = ()) -> Session:
    """A session on the model, once it is known to run in the scenario's layout."""
    try:
        session = Session(loaded.model, scenario.kernels, plants, loaded.staged)
        if scenario.schedule.layout == "packed":
            refuse_leaks(loaded.model, scenario.kernels, loaded.staged)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelRunError(
            f"The model {scenario.model!r} failed on a first forward of a few tokens: {str(error).splitlines()[0].rstrip('.')}. "
            "Expected a model that mlx-lm runs: check its config.json and the dtypes of its weights; `--debug` shows where "
            "it failed."
        ) from error
    return session


def _run(scenario: Scenario, session: Session, work: list[Work], on_token: OnToken) -> None:
    try:
        _serve(scenario, session, work, on_token)
    except (RuntimeError, ValueError) as error:
        # How mlx and mlx-lm say that a class cannot do something: be batched, or run in this dtype on this device.
        if "Unable to allocate" in str(error):
            raise
        raise ModelRunError(
            f"The model {scenario.model!r} failed while {len(work)} requests ran with schedule {scenario.schedule.kind} "
            f"in the {scenario.schedule.layout} layout: {str(error).rstrip('.')}. Expected a model that mlx-lm runs so on "
            "this machine. Try schedule serial, another dtype or another device; `--debug` shows where it failed."
        ) from error


def _serve(scenario: Scenario, session: Session, work: list[Work], on_token: OnToken) -> None:
    if scenario.schedule.layout == "packed":
        PackedEngine(session).run(work, scenario.schedule, on_token)
        return
    composer = PaddedComposer(work)
    session.compose = composer.compose
    run_padded(session.model, work, scenario.schedule, composer, on_token)


def _header(scenario: Scenario, loaded: LoadedModel, work: list[Work], session: Session) -> dict[str, Any]:
    return {
        "scenario": scenario.to_dict(),
        "model": dict(loaded.identity),
        "environment": environment(),
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
        "sites": [site.to_json() for site in session.sites.sites],
    }


def _subject(
    scenario: Scenario, loaded: LoadedModel, work: list[Work], session: Session, options: RecordOptions
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
    if options.values is None:
        selection = Selection.of(scenario.capture, session.sites, ids)
    else:
        selection = Selection.at(options.values, session.sites, ids)
    lens = _lens(loaded.model, session) if scenario.capture.lens else None
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
