"""Requests that come while a packed run goes on, and its trace, from which the whole run can be had again bit for bit.

A request arrives at the forward that is next when it is taken, as in a scenario. One that was cancelled, or came to a stop string,
stands in the trace's scenario with as many tokens as it had, which gives the same forwards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx

from detdiff.engines.base import request_header
from detdiff.engines.live import LiveToken, TokenScores
from detdiff.engines.mlx.taps.entries import Selection
from detdiff.engines.mlx.taps.forward import TARGET, as_float32
from detdiff.engines.mlx.taps.recorder import Recorder, RecordingSettings
from detdiff.engines.record import header
from detdiff.engines.schedule import Work
from detdiff.errors import EngineRefuses
from detdiff.scenario import GENERATE, Request, Scenario
from detdiff.scenario.sampling import KEYED
from detdiff.trace import Place, TraceWriter

from .model import context_limit, encode, encode_messages
from .requests import prepare
from .run_checks import FirstLogits, compare_logits
from .serve import Sessions, packed_engine, prepared, run_unrecorded, unrecorded_caches

if TYPE_CHECKING:
    from .engine import MlxEngine

_OBSERVED = 4


class PackedLive:
    """A live run of a packed scenario, whose own requests only stand for those that will come. See `LiveRun`.

    Raises EngineRefuses for a scenario that needs its requests beforehand, TraceExists for a ``path`` that is taken, and
    what preparing a run raises.
    """

    def __init__(self, engine: MlxEngine, scenario: Scenario, path: Place | None) -> None:
        self._engine, self._scenario, self._loaded = engine, _checked(scenario), engine.loaded
        models = engine.models(scenario)
        self._sessions = Sessions.of(scenario, models)
        noted = None if path is None else self._on_choice
        self._packed = packed_engine(scenario, self._sessions, self._event, noted)
        self._packed.on_scores = self._on_scores
        self._stack, self._taps = ExitStack(), ExitStack()
        self._works: dict[str, Work] = {}
        self._leaving: set[str] = set()
        self._top: dict[str, int] = {}
        self._logits: dict[str, mx.array] = {}
        self._tokens: list[LiveToken] = []
        self._ids: dict[int, str] = {}
        self._count = 0
        self._requests: list[Request] = []
        self._notes: list[str] = []
        self._writer: TraceWriter | None = None
        self._recorder: Recorder | None = None
        self._seen: FirstLogits | None = None
        if path is not None:
            self._record(path)
        self._started, self._clock = time.time(), time.perf_counter()

    def _record(self, path: Place) -> None:
        scenario, session = self._scenario, self._sessions.target
        own = {"requests": [], **self._sessions.header(scenario, self._engine.models(scenario))}
        head = header(scenario, self._engine, own)
        head["scenario"].pop("request")
        self._notes = head["notes"]
        lens = self._sessions.lens() if scenario.capture.lens else None
        full = scenario.capture.level == "full"
        values = Selection(frozenset(session.sites.ports.values()), None) if full else None
        settings = RecordingSettings(scenario.capture, [], [], self._text, {TARGET: values}, lens)
        self._settings = settings
        self._writer = self._stack.enter_context(TraceWriter(path, head))
        self._recorder = Recorder(self._writer, session.sites, settings)
        self._seen = FirstLogits(_OBSERVED)

    def __enter__(self) -> Self:
        self._stack.enter_context(self._taps)
        self._taps.enter_context(self._sessions.running(self._recorder, self._seen, packed=True))
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._stack.__exit__(*error)

    @property
    def identity(self) -> Mapping[str, Any]:
        return self._loaded.identity

    @property
    def context(self) -> int | None:
        return context_limit(self._loaded)

    @property
    def recorded(self) -> bool:
        return self._writer is not None

    @property
    def steps(self) -> int:
        return self._packed.clock.steps

    @property
    def active(self) -> int:
        return sum(not work.finished for work in self._packed.active)

    def encode(self, text: str) -> list[int]:
        return encode(self._loaded, text, False)

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return encode_messages(self._loaded, messages)

    def decode(self, tokens: Sequence[int], special: bool) -> str:
        told = {} if special else {"skip_special_tokens": True}
        return str(self._loaded.tokenizer.decode(list(tokens), **told))

    def _text(self, token: int) -> str:
        return self.decode([token], True)

    def _event(self, kind: str, **fields: Any) -> None:
        if self._recorder is not None:
            self._recorder.event(kind, **fields)

    def check(self, request: Request) -> None:
        if request.sampling.sampler != KEYED:
            raise EngineRefuses(
                f"Request {request.id!r} draws with the sampler {request.sampling.sampler}, from one random state that whoever came before "
                f"has moved; expected {KEYED}, whose draws depend on seed and index alone. Leave sampler out."
            )
        self._prepared(request)

    def _prepared(self, request: Request) -> Work:
        return prepare(replace(self._scenario, requests=(request,)), self._loaded)[0]

    def admit(self, request: Request, top: int | None) -> int:
        self._release()
        work = self._prepared(request)
        work.index = self._count
        self._count += 1
        self._works[request.id], self._ids[work.index] = work, request.id
        if top is not None:
            self._top[request.id] = top
        if self._writer is not None:
            self._requests.append(request)
            told = replace(self._scenario, requests=(request,)).to_dict()["request"][0]
            self._writer.request(request_header(request, work.prompt), told)
            self._settings.request_ids.append(request.id)
            self._settings.prompt_lengths.append(len(work.prompt))
        self._packed.admit(work)
        return work.done

    def step(self) -> list[LiveToken]:
        self._release()
        self._packed.step(self._scenario.schedule, self._on_token)
        tokens, self._tokens = self._tokens, []
        return tokens

    def _release(self) -> None:
        """Let go of what ended in the last forward, or since: in the order in which a run of the scenario does."""
        for work in self._packed.release():
            self._ended(work)

    def _on_choice(self, number: int, index: int, logprobs: mx.array) -> None:
        if self._requests[number].sampling.beyond_keyed and self._recorder is not None:
            self._recorder.choice(number, index, logprobs)

    def _on_scores(self, work: Work, logits: mx.array) -> None:
        if work.id in self._top:
            self._logits[work.id] = logits

    def _on_token(self, number: int, index: int, token: int) -> None:
        if self._recorder is not None:
            self._recorder.token(number, index, token)
        id = self._ids[number]
        if id in self._leaving:
            return
        work = self._works[id]
        logits, scores = self._logits.pop(id, None), None
        if logits is not None:
            scores = TokenScores.of(as_float32(logits)[0], token, self._top[id])
        last = index + 1 >= work.max_tokens
        finished = "stop" if token in work.stop else "length" if last else None
        self._tokens.append(LiveToken(id, index, token, finished, scores))

    def end(self, request: str, *, cancelled: bool) -> int:
        work = self._works.get(request)
        if work is None or work.finished:
            return 0
        kept = max(1, len(work.generated))
        if cancelled:
            work.cancel = kept
        else:
            work.max_tokens = kept
        if not work.generated:
            self._leaving.add(request)
        return kept

    def _ended(self, work: Work) -> None:
        """Keep of a request what the trace is to say of it."""
        del self._works[work.id], self._ids[work.index]
        self._leaving.discard(work.id)
        self._top.pop(work.id, None)
        if self._recorder is not None:
            asked = self._requests[work.index]
            self._requests[work.index] = replace(asked, max_tokens=work.max_tokens, cancel=work.cancel)
            if not self._scenario.cache.share_prefix:
                self._recorder.forget(work.index)

    def idle(self) -> None:
        self._release()
        if self._recorder is not None:
            self._recorder.finish()

    def finish(self, told: Mapping[str, Any]) -> None:
        """See `LiveRun.finish`. The first forwards are run again without recording, as after every recording."""
        writer, recorder, seen = self._writer, self._recorder, self._seen
        if writer is None or recorder is None or seen is None:
            return
        for request in list(self._works):
            self.end(request, cancelled=True)
        while self.active:
            self.step()
        self.idle()
        self._taps.close()
        seconds = time.perf_counter() - self._clock
        more: dict[str, Any] = {"observer": {"forwards": 0, "equal": None}}
        if self._requests:
            scenario = replace(self._scenario, requests=tuple(self._requests))
            more |= {
                "scenario": scenario.to_dict(),
                "requests": [request_header(each, each.tokens or ()) for each in self._requests],
                "observer": self._observed(scenario, seen),
            }
        if recorder.unrecorded:
            more["lacks"] = {"cache": unrecorded_caches(recorder.unrecorded)}
        more |= {**told, "notes": [*self._notes, *told.get("notes", ())]}
        times = {"started": self._started, "seconds": seconds}
        times |= {"rows": recorder.rows, "forwards": recorder.forwards, **told.get("times", {})}
        writer.finish(**{**more, "times": times})

    def _observed(self, scenario: Scenario, seen: FirstLogits) -> dict[str, Any]:
        models = self._engine.models(scenario)
        sessions = Sessions.of(scenario, models)
        return compare_logits(
            seen, lambda logits: run_unrecorded(scenario, sessions, prepared(scenario, models), logits)
        )


def _checked(scenario: Scenario) -> Scenario:
    """Raises EngineRefuses for what cannot be said of requests that have not come."""
    refused = {
        "layout padded": scenario.schedule.layout != "packed",
        "schedule static": scenario.schedule.kind == "static",
        f"task {scenario.task}": scenario.task != GENERATE,
        "a draft": scenario.speculation is not None,
        "force_tokens": scenario.force_tokens is not None,
        "capture window": scenario.capture.level == "window",
    }
    wrong = next((name for name, asked in refused.items() if asked), None)
    if wrong is not None:
        raise EngineRefuses(
            f"A run whose requests come while it runs cannot have {wrong}; expected layout packed and schedule continuous or serial, with capture "
            "digest or full. Leave it out, and give it to a recording of the trace's scenario."
        )
    return scenario
