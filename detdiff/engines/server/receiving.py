"""What many answers send, received by one thread: a thread for each costs three times as much of the processor for a token.

Parts are kept as they come, each with its time. They are read when the answer has ended, all at once, which costs a third of
reading them one by one.
"""

from __future__ import annotations

import bisect
import http.client
import io
import itertools
import re
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

_PART: Final = 1 << 16
_TAIL: Final = 64
_LAST_CHUNK: Final = b"\n0\r\n\r\n"
_DONE: Final = re.compile(rb"(?:^|\n)data: ?\[DONE\]\r?\n")


class AnswerParts:
    """The parts of one answer behind its headers, and the ``times`` at which they came.

    ``failed`` is None for an answer that came to an end; whether that is all of it is for its reader to say.
    """

    def __init__(self, first: bytes, timeout: float, limit: int) -> None:
        now = time.perf_counter()
        self._parts, self.times, self._size = [first], [now], len(first)
        self.failed: BaseException | None = None
        self.ended = threading.Event()
        self._timeout, self._limit, self._said, self._seen = timeout, limit, now, 0
        if self._ends(first):
            self.ended.set()

    def receive(self, connection: socket.socket, now: float) -> bool:
        """Take what has come; whether the answer has ended."""
        while True:
            try:
                part = connection.recv(_PART)
            except (BlockingIOError, ssl.SSLWantReadError):
                return False
            except OSError as error:
                self.failed = error
                return True
            self._parts.append(part)
            self.times.append(now)
            self._size += len(part)
            if not part or self._size >= self._limit or self._ends(part):
                return True
            # TLS may have read further than it gave, of which the socket says nothing.
            if not isinstance(connection, ssl.SSLSocket):
                return False

    def _ends(self, part: bytes) -> bool:
        """Whether a part ends the answer: the last chunk, the end of the events, or an error in place of one."""
        tail = part[-_TAIL:]
        if len(tail) < _TAIL:
            tail = b"".join(self._parts[-3:])[-_TAIL:]
        if tail.endswith(_LAST_CHUNK) or (b"[DONE]" in tail and _DONE.search(tail) is not None):
            return True
        return b'"error":' in part and b'"error":null' not in part.replace(b" ", b"")

    def waits(self, now: float) -> float:
        """How many seconds it may still say nothing. Comments keep a connection open without saying anything."""
        if self._said + self._timeout <= now:
            new = b"".join(self._parts[self._seen :])
            self._seen = len(self._parts)
            if b"data" in new:
                self._said = self.times[-1]
        return self._said + self._timeout - now

    def lines(self, answer: http.client.HTTPResponse) -> Iterator[tuple[float, bytes]]:
        """The lines of the answer whose headers were read, each with the time at which it had come.

        Raises http.client.HTTPException where it was cut.
        """
        file, ends = io.BytesIO(b"".join(self._parts)), [*itertools.accumulate(map(len, self._parts))]
        answer.fp = file  # type: ignore[assignment]
        rest, at, place = b"", 0, 0
        while True:
            place = min(bisect.bisect_right(ends, at, place), len(ends) - 1)
            part = answer.read1(max(1, ends[place] - at))
            if not part:
                if rest:
                    yield self.times[-1], rest
                return
            at = file.tell()
            *lines, rest = (rest + part).split(b"\n")
            if lines:
                when = self.times[bisect.bisect_left(ends, at, place)]
                for line in lines:
                    yield when, line


class AnswerReceiver:
    """Receives the answers of one client. Its thread is there while answers come."""

    def __init__(self) -> None:
        self._lock, self._running = threading.Lock(), False
        self._new: deque[tuple[Any, AnswerParts]] = deque()
        self._tell: socket.socket
        self._stopped = False

    def whole(
        self, answer: http.client.HTTPResponse, connection: socket.socket, timeout: float, limit: int
    ) -> AnswerParts:
        """Wait for the end of an answer whose headers were read. ``timeout`` is for the next event, ``limit`` in bytes.

        What failed is raised: OSError, TimeoutError for silence, InterruptedError after `stop`.
        """
        connection.setblocking(False)
        try:
            first = answer.fp.read1(_PART)
        except ssl.SSLWantReadError:
            first = b""
        parts = AnswerParts(first, timeout, min(limit, answer.length or limit))
        # What TLS has read already comes without a sign from the socket.
        if not parts.ended.is_set() and not (
            isinstance(connection, ssl.SSLSocket)
            and connection.pending()
            and parts.receive(connection, time.perf_counter())
        ):
            with self._lock:
                self._new.append((connection, parts))
                if self._running:
                    self._tell.send(b".")
                else:
                    self._running, self._stopped = True, False
                    told, self._tell = socket.socketpair()
                    threading.Thread(target=self._receive, args=(told,), daemon=True).start()
            parts.ended.wait()
        if parts.failed is not None:
            raise parts.failed
        return parts

    def stop(self) -> None:
        """Leave every answer that is being received."""
        with self._lock:
            self._stopped = True
            if self._running:
                self._tell.send(b".")

    def _receive(self, told: socket.socket) -> None:
        with told, selectors.DefaultSelector() as selector:
            selector.register(told, selectors.EVENT_READ)
            while self._adopted(selector):
                now = time.perf_counter()
                channels = [key.data for key in selector.get_map().values() if key.data is not None]
                wait = min(each.waits(now) for each in channels)
                due = now + wait
                while now < due:
                    ready = selector.select(due - now)
                    now = time.perf_counter()
                    for key, _ in ready:
                        if key.data is None or key.data.receive(key.fileobj, now):
                            due = now
                            self._ended(selector, key, None)
                for key in list(selector.get_map().values()):
                    if key.data is not None and key.data.waits(now) <= 0:
                        self._ended(selector, key, TimeoutError())

    def _adopted(self, selector: selectors.BaseSelector) -> bool:
        """Take what is new; whether there is anything to receive."""
        with self._lock:
            while self._new:
                connection, parts = self._new.popleft()
                selector.register(connection, selectors.EVENT_READ, parts)
            if self._stopped:
                for key in list(selector.get_map().values()):
                    if key.data is not None:
                        self._ended(selector, key, InterruptedError())
            self._running = len(selector.get_map()) > 1
            if not self._running:
                self._tell.close()
            return self._running

    def _ended(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, failed: Any) -> None:
        if key.data is None:
            key.fileobj.recv(_PART)  # type: ignore[union-attr]
            return
        selector.unregister(key.fileobj)
        key.data.failed = key.data.failed or failed
        key.data.ended.set()
