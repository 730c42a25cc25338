"""Servers of the tests' own on free loopback ports: one that answers what it is told to, and a small model that batches."""

from __future__ import annotations

import json
import math
import queue
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


@contextmanager
def serving(replies: dict[str, Reply], *, server: str = "tests", secure: Any = None) -> Iterator[str]:
    """A server that answers each path by its reply, 404 elsewhere; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version, sys_version = server, ""
        disable_nagle_algorithm = True

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._reply()

        def do_POST(self) -> None:
            self._reply()

        def _reply(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            reply = replies.get(self.path)
            if reply is None:
                send_json(self, {"error": "no such path"}, 404)
                return
            try:
                reply(self, json.loads(raw) if raw else {})
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 64

        def handle_error(self, *_: Any) -> None:
            pass

    http = Server(("127.0.0.1", 0), Handler)
    if secure is not None:
        http.socket = secure.wrap_socket(http.socket, server_side=True)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http{'s' if secure else ''}://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def send_json(
    handler: BaseHTTPRequestHandler, value: Any, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    """A whole JSON answer; text is sent as it is."""
    raw = value.encode() if isinstance(value, str) else json.dumps(value).encode()
    handler.send_response(status)
    for name, each in {
        "Content-Type": "application/json",
        "Content-Length": str(len(raw)),
        **(headers or {}),
    }.items():
        handler.send_header(name, each)
    handler.end_headers()
    handler.wfile.write(raw)


def send_events(
    handler: BaseHTTPRequestHandler, events: Iterable[Any], *, cut: int | None = None, done: bool = True
) -> None:
    """A stream of events, chunked; text is sent as it is. ``cut`` ends the connection after so many bytes."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    if cut is None:
        handler.send_header("Transfer-Encoding", "chunked")
    else:
        handler.send_header("Connection", "close")
        handler.close_connection = True
    handler.end_headers()
    sent = 0
    for event in (
        (*events, *(["data: [DONE]\n\n"] if done else []))
        if not isinstance(events, Iterator)
        else _then_done(events, done)
    ):
        raw = event.encode() if isinstance(event, str) else b"data: " + json.dumps(event).encode() + b"\n\n"
        if cut is not None:
            raw = raw[: max(0, cut - sent)]
            sent += len(raw)
            handler.wfile.write(raw)
            continue
        handler.wfile.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
        handler.wfile.flush()
    if cut is None:
        handler.wfile.write(b"0\r\n\r\n")


def _then_done(events: Iterator[Any], done: bool) -> Iterator[Any]:
    yield from events
    if done:
        yield "data: [DONE]\n\n"


def models(*names: str, owner: str = "tests") -> Reply:
    """The reply of ``/v1/models``."""
    data = [{"id": name, "object": "model", "owned_by": owner} for name in names]
    return lambda handler, _: send_json(handler, {"object": "list", "data": data})


WORDS = 16
"""Tokens of the small model; token n is a letter."""


@dataclass
class _Serving:
    """A request that is served: ``batch`` is how many there were in the forward that began it."""

    prompt: tuple[int, ...]
    body: dict[str, Any]
    events: queue.Queue[Any] = field(default_factory=queue.Queue)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    read: tuple[int, ...] = ()


class SmallModel:
    """A model of letters behind llama.cpp's shapes. A request waits until as many are there as its ``size`` says, else
    as many as ``sizes`` has for its batch, else it is alone.

    ``fault`` is one of: "rounding" (no fault: batches round otherwise), "swapped", "neighbour_scores", "state", "random",
    "wrong_page", "no_penalty", "leak", or "" for none. ``alone`` answers one request at a time. ``owner`` "other" is a server
    that gives no ids and whose cache cannot be switched off. ``tells`` is the path at which it tells its load, "/metrics" or "/slots";
    ``replicas`` tells it as one of several servers behind an address would, which runs one request at a time.
    """

    def __init__(
        self,
        fault: str = "",
        *,
        alone: bool = False,
        owner: str = "llamacpp",
        pace: float = 0.004,
        tells: str = "",
        replicas: bool = False,
    ) -> None:
        self.fault, self.alone, self.owner, self._pace = fault, alone, owner, pace
        self._tells, self._replicas = tells, replicas
        self._running = self._busy = self._forwards = 0
        self.sizes: Iterator[int] = iter(())
        self._waiting: queue.Queue[_Serving | None] = queue.Queue()
        self._served: list[tuple[int, ...]] = []
        self._draw = random.Random(5)

    @contextmanager
    def at(self) -> Iterator[str]:
        thread = threading.Thread(target=self._batches, daemon=True)
        thread.start()
        named = "llama.cpp" if self.owner == "llamacpp" else "tests"
        replies = {
            "/v1/models": models("small", owner=self.owner),
            "/props": lambda handler, _: send_json(handler, {"build_info": "b1", "default_generation_settings": {}}),
            "/tokenize": lambda handler, body: send_json(handler, {"tokens": [ord(each) % WORDS for each in body["content"]]}),
            "/v1/completions": self._reply,
            "/v1/chat/completions": self._reply,
        }  # fmt: skip
        if self._tells:
            replies[self._tells] = self._load
        if self.owner != "llamacpp":
            del replies["/props"], replies["/tokenize"]
        try:
            with serving(replies, server=named) as address:
                yield address
        finally:
            self._waiting.put(None)
            thread.join()

    def _load(self, handler: BaseHTTPRequestHandler, _: Any) -> None:
        running = min(self._running, 1) if self._replicas else self._running
        if self._tells == "/slots":
            send_json(handler, [{"id": n, "is_processing": n < running} for n in range(8)])
            return
        forwards = self._busy if self._replicas else self._forwards
        send_json(
            handler,
            f"# HELP llamacpp:requests_processing Number of requests processing.\nllamacpp:requests_processing {running}\n"
            f"llamacpp:requests_deferred 0\nllamacpp:n_decode_total {forwards}\n"
            f"llamacpp:n_busy_slots_per_decode {self._busy / max(forwards, 1):.6g}\n",
        )

    def _reply(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        prompt = body.get("prompt", "".join(each["content"] for each in body.get("messages", ())))
        tokens = tuple(prompt) if isinstance(prompt, list) else tuple(ord(each) % WORDS for each in prompt)
        served = _Serving(tokens, body)
        self._waiting.put(served)
        chat = handler.path.endswith("chat/completions")

        def events() -> Iterator[Any]:
            while True:
                event = served.events.get()
                if event is None:
                    return
                yield self._shaped(event, chat)

        if body.get("stream"):
            send_events(handler, events())
        else:
            send_json(handler, _joined(list(events())))

    def _shaped(self, event: dict[str, Any], chat: bool) -> dict[str, Any]:
        """An event as completions have it or as chat has it, with ids or without."""
        choice = event["choices"][0]
        if chat:
            choice["delta"] = {"content": choice.pop("text")}
        if self.owner != "llamacpp" and choice["logprobs"]:
            content = choice["logprobs"]["content"]
            for each in (*content, *content[0]["top_logprobs"]):
                each.pop("id", None)
            if not chat:
                top = {each["token"]: each["logprob"] for each in content[0]["top_logprobs"]}
                choice["logprobs"] = {
                    "tokens": [content[0]["token"]],
                    "token_logprobs": [content[0]["logprob"]],
                    "top_logprobs": [top],
                }
        return event

    def _batches(self) -> None:
        while True:
            first = self._waiting.get()
            if first is None:
                return
            batch = [first]
            size = first.body.get("size") or next(self.sizes, 1)
            while len(batch) < size:
                more = self._waiting.get()
                if more is None:
                    return
                batch.append(more)
            if self.alone:
                for each in batch:
                    self._serve([each])
                continue
            self._serve(sorted(batch, key=lambda each: each.prompt))

    def _serve(self, batch: list[_Serving]) -> None:
        noise = self._draw.random()
        before = self._served[-1] if self._served else ()
        for each in batch:
            each.read = each.prompt
            off = each.body.get("cache_prompt") is False and self.owner == "llamacpp"
            if each.prompt in self._served and not off:
                each.cached = len(each.prompt) - 1
                if self.fault == "wrong_page":
                    each.read = (*each.prompt[:-4], *self._served[0][:2], *each.prompt[-2:])
        for step in range(max(each.body["max_tokens"] for each in batch)):
            running = [each for each in batch if step < each.body["max_tokens"]]
            self._running, self._forwards = len(running), self._forwards + 1
            self._busy += len(running)
            found = [self._step(each, batch, noise, before) for each in running]
            for n, (each, (token, scores)) in enumerate(zip(running, found, strict=True)):
                each.tokens.append(token)
                if len(batch) > 1 and self.fault == "neighbour_scores":
                    scores = found[n - 1][1]
                to = running[n - 1] if len(batch) > 1 and self.fault == "swapped" else each
                to.events.put(_event(token, scores, int(each.body.get("logprobs") is not None) and 4))
            # The threads that send the tokens of this step, and those that read them, go first.
            while any(not each.events.empty() for each in running):
                time.sleep(0.001)
            time.sleep(self._pace if len(batch) > 1 else 0)
        self._running = 0
        for each in batch:
            each.events.put(_end(len(each.tokens), each.cached))
            each.events.put(None)
            self._served.append(each.prompt)

    def _step(
        self, each: _Serving, batch: Sequence[_Serving], noise: float, before: tuple[int, ...]
    ) -> tuple[int, list[float]]:
        own = [*each.read, *each.tokens]
        draw = random.Random(zlib.crc32(bytes(own)))
        logits = [8 * draw.random() for _ in range(WORDS)]
        together = len(batch) > 1
        if together and self.fault == "rounding":
            logits = [each + 1e-4 * draw.random() for each in logits]
        if together and self.fault == "random":
            logits = [each + 6 * noise * draw.random() for each in logits]
        if self.fault == "state":
            logits[sum(before) % WORDS] += 5
        if together and self.fault == "leak" and len(each.tokens) >= 2:
            logits[sum(batch[batch.index(each) - 1].prompt) % WORDS] += 5
        if each.body.get("repetition_penalty") and not (together and self.fault == "no_penalty"):
            for token in each.tokens:
                logits[token] -= 2
        total = math.log(sum(map(math.exp, logits)))
        scores = [each - total for each in logits]
        return max(range(WORDS), key=scores.__getitem__), scores


def _event(token: int, scores: Sequence[float], top: int) -> dict[str, Any]:
    def named(token: int) -> dict[str, Any]:
        letter = chr(97 + token)
        return {"id": token, "token": letter, "bytes": [97 + token], "logprob": scores[token]}

    best = sorted(range(len(scores)), key=lambda each: -scores[each])[:top]
    content = [{**named(token), "top_logprobs": [named(each) for each in best]}]
    values = {"content": content} if top else None
    return {
        "id": "x",
        "choices": [{"index": 0, "text": chr(97 + token), "logprobs": values, "finish_reason": None}],
    }


def _end(count: int, cached: int) -> dict[str, Any]:
    usage = {"completion_tokens": count, "prompt_tokens_details": {"cached_tokens": cached}}
    choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    return {"id": "x", "choices": [choice], "usage": usage}


def _joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A whole answer of the events of a stream."""
    values: dict[str, list[Any]] = {}
    for event in events:
        for name, each in (event["choices"][0]["logprobs"] or {}).items():
            values.setdefault(name, []).extend(each)
    text = "".join(event["choices"][0].get("text", "") for event in events)
    choice = {"index": 0, "text": text, "logprobs": values, "finish_reason": "length"}
    return {**events[-1], "choices": [choice]}
