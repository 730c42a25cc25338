"""One HTTP client for a server: JSON asked and answered, events of a stream one by one, retries counted, each failure a
paragraph."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, Final, NoReturn

import httpx2

from detdiff.errors import ServerAnswerInvalid, ServerRefused, ServerUnreachable

from .settings import ServerAddress, ServerSettings, token_of

LINE_LIMIT: Final = 4 << 20
"""Bytes of one line of a stream, at most."""
BODY_LIMIT: Final = 64 << 20
"""Bytes of a whole answer, at most."""
WAIT_LIMIT: Final = 30.0
"""Seconds to wait at most where a server says when to come again."""
_AGAIN: Final = (429, 502, 503, 504)
_CONNECT: Final = 10.0


class ServerClient:
    """Asks one address. Threads may share it; ``again`` counts the requests that were sent again, by reason."""

    def __init__(self, address: ServerAddress, settings: ServerSettings) -> None:
        self._token = token_of(settings, address)
        self._address, self._settings = address, settings
        self._lock = threading.Lock()
        self.again: dict[str, int] = {}
        self.stopped = False
        headers = {"Accept-Encoding": "identity"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            # Certificates are read only where there is a connection that needs them: it takes longer than a short answer.
            verify: Any = settings.verify if address.secure else False
            if isinstance(verify, str):
                verify = ssl.create_default_context(cafile=verify)
        except (OSError, ssl.SSLError) as error:
            raise ServerUnreachable(
                f"engine.verify names {settings.verify!r}, which is no file of certificates ({error}); name one in PEM form."
            ) from None
        self._http = httpx2.Client(
            headers=headers,
            verify=verify,
            timeout=httpx2.Timeout(settings.timeout, connect=_CONNECT, pool=None),
            # On a connection that was used before, Linux acknowledges late, and a server that waits for it (Nagle) sends its
            # tokens 40 ms later than others' in one piece: they would seem to come after those, not between them.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            # A proxy of the environment must not stand between a measurement and its server on the same machine.
            trust_env=not address.loopback,
        )

    def get(self, path: str) -> tuple[int, Mapping[str, str], Any]:
        """The status, the headers and the JSON answer, None where it is none. Raises ServerUnreachable."""
        with self._told(path):
            answer = self._http.get(self._address.root + path, timeout=min(self._settings.timeout, 30.0))
        return answer.status_code, answer.headers, _json(answer.content)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer. Raises ServerUnreachable, ServerRefused and ServerAnswerInvalid."""
        with self._sent(path, body) as answer:
            raw = b""
            for part in answer.iter_bytes():
                raw += part
                if len(raw) > BODY_LIMIT:
                    self.invalid(f"more than {BODY_LIMIT >> 20} MB in one answer", "an answer of some KB")
        found = _json(raw)
        if found is None:
            self.invalid(f"{self._shown(raw)!r}, which is no JSON", "a JSON answer")
        return found

    def post_empty(self, path: str) -> None:
        """Ask for what has no answer worth reading. Raises ServerUnreachable and ServerRefused."""
        with self._sent(path, {}) as answer:
            answer.read()

    def stop(self) -> None:
        """Leave every answer that is being read at its next part."""
        self.stopped = True

    def events(self, path: str, body: Mapping[str, Any], ends: Callable[[Any], bool]) -> Iterator[Any]:
        """The JSON events of a stream, as they come, to its ``[DONE]`` or to one that ``ends`` it.

        Raises ServerUnreachable, ServerRefused (an error in the middle of the stream, too) and ServerAnswerInvalid (a stream that is cut, or
        a line that is no event).
        """
        with self._sent(path, body) as answer:
            kind = answer.headers.get("content-type", "")
            if "event-stream" not in kind:
                raw = b"".join(part for _, part in zip(range(64), answer.iter_bytes(), strict=False))
                self.invalid(
                    f"an answer of type {kind or 'unknown'!r} ({self._shown(raw)!r}) where a stream was asked for",
                    "text/event-stream",
                )
            for line in self._lines(answer):
                if line == b"[DONE]":
                    return
                event = _json(line)
                if event is None or not isinstance(event, Mapping):
                    self.invalid(f"the line {self._shown(line)!r} in a stream", "a JSON object")
                if event.get("error") or event.get("object") == "error":
                    raise ServerRefused(
                        f"{self._address.root} ended a stream with an error ({self._shown(line)}); expected the answer to its end. "
                        "What was received until then is not used; see the server's own log."
                    )
                yield event
                if ends(event):
                    return
            raise ServerAnswerInvalid(
                f"{self._address.root} closed a stream before it said that the answer had ended; expected all of it. What was "
                "received until then is not used. Look whether the server stopped or a proxy cut the connection."
            )

    def _lines(self, answer: httpx2.Response) -> Iterator[bytes]:
        """What follows ``data:`` in each line."""
        rest, last = b"", time.monotonic()
        for part in answer.iter_bytes():
            if self.stopped:
                raise ServerUnreachable(f"{self._address.root} was left before its answer had ended.")
            lines = (rest + part).split(b"\n")
            rest = lines.pop()
            if max(map(len, (rest, *lines))) > LINE_LIMIT:
                self.invalid(f"a line of more than {LINE_LIMIT >> 20} MB in a stream", "events of some KB")
            now = time.monotonic()
            for line in lines:
                if line.startswith(b"data:"):
                    last = now
                    yield line[5:].strip()
            if now - last > self._settings.timeout:
                # Comments keep a connection open without saying anything.
                raise ServerUnreachable(
                    f"{self._address.root} sent no token for {self._settings.timeout:g} s; expected one. Raise engine.timeout where "
                    "the server is that slow."
                )

    @contextmanager
    def _sent(self, path: str, body: Mapping[str, Any]) -> Iterator[httpx2.Response]:
        """Post, again where the server says so or does not listen, until it answers."""
        content = json.dumps(body, ensure_ascii=False).encode()
        tries = 0
        while True:
            wait = 0.1 * 4**tries
            try:
                with (
                    self._told(path),
                    self._http.stream(
                        "POST",
                        self._address.root + path,
                        content=content,
                        headers={"Content-Type": "application/json"},
                    ) as answer,
                ):
                    if answer.status_code == 200:
                        yield answer
                        return
                    raw = answer.read()
                    if answer.status_code not in _AGAIN or tries >= self._settings.retries:
                        self._refused(answer.status_code, path, raw, tries)
                    asked = _seconds(answer.headers.get("retry-after", ""))
                    if asked is not None:
                        if asked > WAIT_LIMIT:
                            self._refused(answer.status_code, path, raw, tries, asked)
                        wait = asked
                    reason = f"status {answer.status_code}"
            except ServerUnreachable as error:
                if not getattr(error, "unsent", False) or tries >= self._settings.retries:
                    raise
                reason = "no connection"
            tries += 1
            with self._lock:
                self.again[reason] = self.again.get(reason, 0) + 1
            time.sleep(wait)

    @contextmanager
    def _told(self, path: str) -> Iterator[None]:
        """Turns failures of the connection into a paragraph; one before anything was sent is ``unsent``."""
        where = self._address.root
        try:
            yield
        except httpx2.ConnectError as error:
            words = self._shown(str(error).encode())
            if "SSL" in words or "certificate" in words.lower():
                raise ServerUnreachable(
                    f"The TLS connection to {where} failed ({words}); expected a certificate that this machine trusts. Name the "
                    "file of certificates with engine.verify=FILE, or, for a server of your own, say engine.verify=false."
                ) from None
            found = ServerUnreachable(
                f"{where} cannot be reached ({words}); expected a server that listens there. Start it, or correct the address."
            )
            found.unsent = True
            raise found from None
        except (httpx2.ConnectTimeout, httpx2.PoolTimeout):
            raise ServerUnreachable(
                f"{where} did not answer within {_CONNECT:g} s; expected a connection. Look whether the server runs, or "
                "correct the address."
            ) from None
        except httpx2.TimeoutException:
            raise ServerUnreachable(
                f"{where}{path} sent nothing for {self._settings.timeout:g} s; expected a token. Raise engine.timeout where the "
                "server is that slow."
            ) from None
        except httpx2.RemoteProtocolError as error:
            raise ServerAnswerInvalid(
                f"{where}{path} broke off in the middle of an answer ({self._shown(str(error).encode())}); expected all of it. "
                "What was received until then is not used. Look whether the server stopped or a proxy cut the connection."
            ) from None
        except httpx2.HTTPError as error:
            raise ServerUnreachable(
                f"The connection to {where} was lost ({type(error).__name__}: {self._shown(str(error).encode())}); expected an answer. Look whether the server stopped."
            ) from None

    def _refused(
        self, status: int, path: str, raw: bytes, tries: int, asked: float | None = None
    ) -> NoReturn:
        advice = {
            401: "Name the environment variable that holds its token with engine.token_env=NAME.",
            403: "Name the environment variable that holds its token with engine.token_env=NAME.",
            404: "Look whether the address ends before /v1 and names a server of models, and say engine.model=NAME where it has another model.",
            429: "Ask fewer requests at once, or raise engine.retries.",
        }.get(status, "See what it says, and the server's own log.")
        sent = f" after {tries + 1} tries" if tries else ""
        late = "" if asked is None else f", and asks to wait {asked:g} s, more than {WAIT_LIMIT:g}"
        raise ServerRefused(
            f"{self._address.root}{path} answered with the status {status}{sent}{late}: {self._shown(raw) or 'no words'}. Expected 200. {advice}"
        )

    def invalid(self, found: str, expected: str) -> NoReturn:
        """Raises ServerAnswerInvalid."""
        raise ServerAnswerInvalid(
            f"{self._address.root} gave {self._without_token(found)}; expected {expected}. Nothing was made of it. Look whether the address and "
            "engine.kind are right, and report it to the server's authors if they are."
        )

    def _shown(self, raw: bytes) -> str:
        text = " ".join(raw[:2000].decode("utf-8", "replace").split())
        text = self._without_token(text)
        return text if len(text) <= 200 else text[:200] + "..."

    def _without_token(self, text: str) -> str:
        return text if self._token is None else text.replace(self._token, "(token)")

    def close(self) -> None:
        self._http.close()


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode())
    except (ValueError, RecursionError):
        return None


def _seconds(text: str) -> float | None:
    """Retry-After: seconds, or a date."""
    text = text.strip()
    if not text:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
