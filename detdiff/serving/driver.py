"""The one thread that runs the model: it takes requests between forwards, runs a forward, and hands on what it gave."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from detdiff.engines.live import LiveRun, LiveToken
from detdiff.errors import DetdiffError, words_of
from detdiff.scenario import Request

from .reading import ApiRefused, stopping
from .writing import AnswerPiece, StopStrings, TextPieces

News = tuple["ServedRequest", "Accepted | AnswerPiece | ApiRefused"]
"""What there is to say to who asked."""


@dataclass(frozen=True)
class Accepted:
    """A request has its first rows in the next forward, ``cached`` tokens of its prompt being in a cache."""

    cached: int


@dataclass(eq=False)
class ServedRequest:
    """A request on its way. ``sink`` is what its answer goes to; ``times`` are seconds on a monotonic clock: asked, begun, first token, last token."""

    request: Request
    top: int | None
    stops: tuple[str, ...]
    pieces: bool
    sink: Any
    asked: float = field(default_factory=time.monotonic)
    times: dict[str, float] = field(default_factory=dict)
    tokens: list[LiveToken] = field(default_factory=list)
    text: TextPieces | None = None
    stopping: StopStrings | None = None


@dataclass
class ServerCounts:
    """What /metrics tells; counts since the start."""

    asked: int = 0
    taken: int = 0
    running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    forwards: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def waiting(self) -> int:
        """Requests that have no rows yet: each of the two counts is written by one thread alone."""
        return self.asked - self.taken

    def prometheus(self, model: str) -> str:
        """The text of /metrics as Prometheus reads it, named as vLLM names what means the same."""
        label = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines: list[str] = []

        def say(name: str, kind: str, about: str, values: dict[str, float]) -> None:
            lines.append(f"# HELP detdiff:{name} {about}")
            lines.append(f"# TYPE detdiff:{name} {kind}")
            lines.extend(
                f'detdiff:{name}{{model_name="{label}"{more}}} {value}' for more, value in values.items()
            )

        say("num_requests_running", "gauge", "Requests with rows in the next forward.", {"": self.running})
        say("num_requests_waiting", "gauge", "Requests without rows yet.", {"": max(0, self.waiting)})
        say("prompt_tokens_total", "counter", "Tokens of prompts begun.", {"": self.prompt_tokens})
        say("prefix_cache_hits_total", "counter", "Of those, from a cache.", {"": self.cached_tokens})
        say("generation_tokens_total", "counter", "Tokens generated.", {"": self.generated_tokens})
        ended = {f',finished_reason="{reason}"': count for reason, count in sorted(self.ended.items())}
        say("request_success_total", "counter", "Requests ended, by reason.", dict(ended))
        say("forwards_total", "counter", "Forwards of the model.", {"": self.forwards})
        refused = {f',status="{status}"': count for status, count in sorted(self.refused.items())}
        say("requests_refused_total", "counter", "Requests refused, by HTTP status.", dict(refused))
        return "\n".join(lines) + "\n"


class Driver:
    """Serves requests on a live run in a thread of its own, at most ``active`` of them at a time (None: all)."""

    def __init__(self, live: LiveRun, active: int | None, notify: Callable[[list[News]], None]) -> None:
        """``notify`` is called in the driver's thread with what there is to hand on after each forward."""
        self._live, self._most, self._notify = live, active, notify
        self._inbox: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._waiting: deque[ServedRequest] = deque()
        self._active: dict[str, ServedRequest] = {}
        self._out: list[News] = []
        self._told: dict[str, Any] = {}
        self._times: dict[str, list[float | None]] = {}
        self._deadline: float | None = None
        self._began = time.monotonic()
        self.counts = ServerCounts()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="detdiff-serve", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # Called from other threads.

    def ask(self, served: ServedRequest) -> None:
        """Take a request. Its answer, or why it is refused, goes to ``notify``."""
        self.counts.asked += 1
        self._inbox.put(("ask", served))

    def cancel(self, served: ServedRequest, why: str) -> None:
        """Nobody waits for an answer any more."""
        self._inbox.put(("cancel", (served, why)))

    def stop(self, seconds: float) -> None:
        """Take no more requests, and end those that are not through after so many seconds."""
        self._inbox.put(("stop", seconds))

    def join(self) -> None:
        """Wait until the trace is finished."""
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    @property
    def stopping(self) -> bool:
        return self._deadline is not None

    # In the driver's thread.

    def _run(self) -> None:
        try:
            with self._live:
                while self._turn():
                    pass
                self._live.finish(self._all_told())
        except BaseException as error:
            self.failure = error
        finally:
            failed = self.failure
            self._give_up(
                "The server has stopped" if failed is None else f"The server failed: {words_of(failed)}"
            )

    def _turn(self) -> bool:
        """Take what came, run a forward; False where it is time to end."""
        self._take()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            for served in (*self._waiting, *self._active.values()):
                self._cancelled(served, "the server stopped")
        # One that leaves has rows until its first token, and counts in a scenario's limit, too.
        while self._waiting and (self._most is None or self._live.active < self._most):
            self._admit(self._waiting.popleft())
        if self._live.active:
            self._step()
        elif self._deadline is not None and not self._waiting:
            return False
        self._hand_on()
        return True

    def _take(self) -> None:
        busy = bool(self._live.active or self._waiting or self._out or self.stopping)
        if not busy:
            self._live.idle()
        while True:
            try:
                kind, what = self._inbox.get(block=not busy)
            except Empty:
                return
            busy = True
            if kind == "ask":
                self._queue(what)
            elif kind == "cancel":
                self._cancelled(*what)
            else:
                self._deadline = time.monotonic() + what

    def _queue(self, served: ServedRequest) -> None:
        try:
            if self.stopping:
                raise stopping()
            served.request = replace(served.request, arrival=self._live.steps)
            self._live.check(served.request)
        except (ApiRefused, DetdiffError) as error:
            self.counts.taken += 1
            self._say(served, error if isinstance(error, ApiRefused) else ApiRefused(str(error)))
            return
        self._waiting.append(served)

    def _admit(self, served: ServedRequest) -> None:
        request, counts = served.request, self.counts
        assert request.tokens is not None
        cached = self._live.admit(request, served.top)
        self._active[request.id] = served
        counts.taken += 1
        counts.running += 1
        counts.prompt_tokens += len(request.tokens)
        counts.cached_tokens += cached
        served.times["begun"] = time.monotonic()
        if served.pieces or served.stops:
            served.text = TextPieces(self._live.decode, request.tokens)
        if served.stops:
            served.stopping = StopStrings(served.stops)
        self._say(served, Accepted(cached))

    def _step(self) -> None:
        tokens = self._live.step()
        self.counts.forwards += 1
        self.counts.generated_tokens += len(tokens)
        now = time.monotonic()
        for token in tokens:
            served = self._active[token.request]
            served.times.setdefault("first", now)
            finished = self._answered(served, token)
            if finished is not None:
                if token.finished is None:
                    self._live.end(token.request, cancelled=False)
                self._ended(served, finished)

    def _answered(self, served: ServedRequest, token: LiveToken) -> str | None:
        """Hand on one token; why the answer ends with it, which its text may have come to a stop string for."""
        finished = token.finished
        if served.text is None:
            served.tokens.append(token)
            if finished is not None:
                text = TextPieces(self._live.decode, served.request.tokens or ())
                said = [each.token for each in served.tokens if each.finished != "stop"]
                self._say(served, AnswerPiece(tuple(served.tokens), text.add(said) + text.rest(), finished))
            return finished
        piece = served.text.add([token.token]) if finished != "stop" else ""
        if finished is not None:
            piece += served.text.rest()
        if served.stopping is not None:
            piece = served.stopping.add(piece)
            if served.stopping.found is not None:
                finished = "stop"
            elif finished is not None:
                piece += served.stopping.rest()
        self._say(served, AnswerPiece((token,), piece, finished))
        return finished

    def _cancelled(self, served: ServedRequest, why: str) -> None:
        id = served.request.id
        if served in self._waiting:
            self._waiting.remove(served)
            self.counts.taken += 1
            self._tell("not_begun", {"id": id, "why": why})
        elif self._active.get(id) is served:
            kept = self._live.end(id, cancelled=True)
            asked = served.request.max_tokens
            self._ended(served, "cancelled", {"why": why, "tokens": kept, "max_tokens": asked})
        else:
            return
        self._say(served, ApiRefused(f"The request was ended before its end: {why}. Ask again.", status=503))

    def _ended(self, served: ServedRequest, reason: str, more: Mapping[str, Any] | None = None) -> None:
        id = served.request.id
        if self._active.pop(id, None) is None:
            return
        self.counts.running -= 1
        self.counts.ended[reason] += 1
        served.times["last"] = time.monotonic()
        early: dict[str, Any] = dict(more or {})
        if served.stopping is not None and served.stopping.found is not None:
            early = {"stop": served.stopping.found, "max_tokens": served.request.max_tokens}
        if not self._live.recorded:
            return
        self._tell("requests", {"id": id, "finished": reason, **early})
        moments = (served.asked, *(served.times.get(each) for each in ("begun", "first", "last")))
        self._times[id] = [None if each is None else round(each - self._began, 6) for each in moments]

    def _tell(self, what: str, entry: Mapping[str, Any]) -> None:
        """Note something for the trace's header; a server without a trace must not grow with what it has served."""
        if self._live.recorded:
            self._told.setdefault(what, []).append(dict(entry))

    def _all_told(self) -> dict[str, Any]:
        """What the trace's header says of the serving."""
        cancelled = [each for each in self._told.get("requests", ()) if each["finished"] == "cancelled"]
        notes = [
            f"request {each['id']!r} was ended after {each['tokens']} of at most {each['max_tokens']} tokens: {each['why']}"
            for each in cancelled
        ]
        notes += [
            f"request {each['id']!r} was taken back before it had rows, and is not in this trace: {each['why']}"
            for each in self._told.get("not_begun", ())
        ]
        return {"notes": notes, "served": self._told, "times": {"served": self._times}}

    def _say(self, served: ServedRequest, what: Accepted | AnswerPiece | ApiRefused) -> None:
        self._out.append((served, what))

    def _hand_on(self) -> None:
        if self._out:
            out, self._out = self._out, []
            self._notify(out)

    def _give_up(self, words: str) -> None:
        """Nothing waits for an answer that never comes."""
        refused = ApiRefused(f"{words}. Start it again.", status=503)
        left: list[ServedRequest] = [*self._waiting, *self._active.values()]
        while True:
            try:
                kind, what = self._inbox.get_nowait()
            except Empty:
                break
            if kind == "ask":
                left.append(what)
        self._out += [(served, refused) for served in left]
        self._hand_on()
