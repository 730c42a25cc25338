"""A server that costs next to nothing and sends what it is told to: ``python -m benchmarks.paced_server SHAPE TOKENS SECONDS``.

Each answer has so many tokens, one every so many seconds; all that are being answered get theirs in one step, as those of a
batching model do. Prints its port.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from typing import Any

TOP = 8
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _event(shape: str, number: int, last: bool) -> bytes:
    ids = [100 + number + place for place in range(TOP)]
    scores = [-0.12345678 - place / 10 for place in range(TOP)]
    choice: dict[str, Any] = {"index": 0, "text": " word", "finish_reason": "length" if last else None}
    if shape == "content":
        top = [
            {"id": id, "token": " word", "bytes": [32, 119, 111, 114, 100], "logprob": score}
            for id, score in zip(ids, scores, strict=True)
        ]
        choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    elif shape == "named":
        names = [f"token_id:{id}" for id in ids]
        choice["logprobs"] = {
            "tokens": names[:1],
            "token_logprobs": scores[:1],
            "top_logprobs": [dict(zip(names, scores, strict=True))],
            "text_offset": [number],
        }
        choice["token_ids"] = ids[:1]
    event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    return _chunk(b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(raw: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(raw), raw)


class _PacedServer:
    def __init__(self, shape: str, tokens: int, step: float) -> None:
        owner = {"content": "llamacpp", "named": "vllm"}.get(shape, "tests")
        self._events = [_event(shape, number, number == tokens - 1) for number in range(tokens)]
        self._events[-1] += _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self._step = step
        self._json = {
            b"/v1/models": {"data": [{"id": "m", "owned_by": owner}]},
            b"/props": {"build_info": "b1"},
            b"/version": {"version": "0"},
            b"/tokenize": {"tokens": [1, 2, 3]},
        }
        self._lock = threading.Lock()
        self._answered: list[list[Any]] = []

    def steps(self) -> None:
        due = time.perf_counter()
        while True:
            due += self._step
            time.sleep(max(0.0, due - time.perf_counter()))
            with self._lock:
                now = list(self._answered)
            for each in now:
                connection, number = each
                try:
                    connection.sendall(self._events[number])
                except OSError:
                    number = len(self._events)
                each[1] = number + 1
                if each[1] >= len(self._events):
                    with self._lock:
                        self._answered.remove(each)

    def answer(self, connection: socket.socket) -> None:
        """Read requests of a connection; a POST of completions is answered step by step."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection.makefile("rb") as file:
            while words := file.readline().split():
                length = 0
                while (line := file.readline().lower()) not in (b"\r\n", b""):
                    if line.startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                file.read(length)
                if words[1].endswith(b"completions"):
                    connection.sendall(_STREAM)
                    with self._lock:
                        self._answered.append([connection, 0])
                    continue
                found = self._json.get(words[1])
                raw = json.dumps(found or {}).encode()
                status = b"200 OK" if found else b"404 Not Found"
                head = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(raw)
                connection.sendall(b"HTTP/1.1 " + status + b"\r\n" + head + raw)


def main(shape: str, tokens: int, step: float) -> None:
    server = _PacedServer(shape, tokens, step)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        print(listening.getsockname()[1], flush=True)
        threading.Thread(target=server.steps, daemon=True).start()
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=server.answer, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
