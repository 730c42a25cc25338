"""One HTTP client for a server: JSON asked and answered, events of a stream with their times, retries counted, each failure a
paragraph."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, Final, NoReturn
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from detdiff.errors import ServerAnswerInvalid, ServerRefused, ServerUnreachable

from .receiving import AnswerReceiver
from .settings import ServerAddress, ServerSettings, token_of

LINE_LIMIT: Final = 4 << 20
"""Bytes of one line of a stream, at most."""
BODY_LIMIT: Final = 64 << 20
"""Bytes of a whole answer, at most."""
WAIT_LIMIT: Final = 30.0
"""Seconds to wait at most where a server says when to come again."""
_AGAIN: Final = (429, 502, 503, 504)
_CONNECT: Final = 10.0
_JSON: Final = {"Content-Type": "application/json"}


class ServerClient:
    """Asks one address. Threads may share it; ``again`` counts the requests that were sent again, by reason.

    Each request has a connection of its own: on one that was used before, Linux acknowledges late, and a server that waits for it
    (Nagle) sends its tokens 40 ms later than others' in one piece, so that they would seem to come after those, not between them.
    """

    def __init__(self, address: ServerAddress, settings: ServerSettings) -> None:
        self._token = token_of(settings, address)
        self._address, self._settings = address, settings
        self._lock = threading.Lock()
        self.again: dict[str, int] = {}
        self.stopped = False
        # Python's threads that wait for each other to compute wake up all the time; for a lock they sleep.
        self.reading = threading.Lock()
        self._receiver = AnswerReceiver()
        self._headers = {"Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
        if self._token is not None:
            self._headers["Authorization"] = f"Bearer {self._token}"
        self._where = urlsplit(address.root)
        self._context = self._certificates() if address.secure else None
        self._proxy = self._proxied()

    def _certificates(self) -> ssl.SSLContext:
        verify = self._settings.verify
        try:
            context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
        except (OSError, ssl.SSLError) as error:
            raise ServerUnreachable(
                f"engine.verify names {verify!r}, which is no file of certificates ({error}); name one in PEM form."
            ) from None
        if verify is False:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def _proxied(self) -> Any:
        """The proxy that the environment names for the address, or None: none is to stand before a server on the same machine."""
        host, proxies = self._where.hostname or "", getproxies()
        named = proxies.get(self._where.scheme) or proxies.get("all")
        if self._address.loopback or not named or proxy_bypass(host):
            return None
        return urlsplit(named if "://" in named else f"http://{named}")

    def _connection(self, timeout: float) -> tuple[http.client.HTTPConnection, dict[str, str], str]:
        """A new connection, the headers for it, and what its paths begin with."""
        where, proxy, headers = self._where, self._proxy, dict(self._headers)
        before = quote(where.path, safe="/%")
        host, port = where.hostname or "", where.port or (443 if self._address.secure else 80)
        to, at = (host, port) if proxy is None else (proxy.hostname, proxy.port or 80)
        connection = (
            http.client.HTTPSConnection(to, at, timeout=timeout, context=self._context)
            if self._address.secure
            else http.client.HTTPConnection(to, at, timeout=timeout)
        )
        if proxy is not None:
            own = {}
            if proxy.username is not None:
                pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
                own["Proxy-Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
            if self._address.secure:
                connection.set_tunnel(host, port, own)
            else:
                headers |= own
                before = f"http://{where.netloc}{before}"
        return connection, headers, before

    @contextmanager
    def _asked(
        self,
        path: str,
        content: bytes | None = None,
        *,
        timeout: float | None = None,
        name: str = "",
    ) -> Iterator[tuple[http.client.HTTPResponse, socket.socket]]:
        """An answer whose headers were read, and its socket. Raises ServerUnreachable and ServerAnswerInvalid."""
        timeout = self._settings.timeout if timeout is None else timeout
        connection, headers, before = self._connection(min(timeout, _CONNECT))
        with closing(connection), self._told(path):
            with self._connected():
                connection.connect()
            # A response gives up the connection's socket where the server closes it; its own file holds it open.
            connected = connection.sock
            connected.settimeout(timeout)
            headers |= {} if content is None else _JSON
            headers |= {"X-Request-Id": name} if name else {}
            connection.request("GET" if content is None else "POST", before + path, content, headers)
            with connection.getresponse() as answer:
                yield answer, connected

    def get(self, path: str) -> tuple[int, Mapping[str, str], Any]:
        """The status, the headers and the JSON answer, None where it is none. Raises ServerUnreachable."""
        status, headers, raw = self.get_text(path)
        return status, headers, _json(raw)

    def get_text(self, path: str) -> tuple[int, Mapping[str, str], bytes]:
        """The status, the headers with names in lower case, and the answer as it is. Raises ServerUnreachable."""
        with self._asked(path, timeout=min(self._settings.timeout, 30.0)) as (answer, _):
            raw = answer.read(BODY_LIMIT)
            return answer.status, {name.lower(): value.strip() for name, value in answer.getheaders()}, raw

    def post(self, path: str, body: Mapping[str, Any], name: str = "") -> bytes:
        """The answer; ``name`` is the request's, for servers that keep it. Raises ServerUnreachable, ServerRefused and ServerAnswerInvalid."""
        with self._sent(path, body, name) as (answer, _):
            raw = answer.read(BODY_LIMIT + 1)
        if len(raw) > BODY_LIMIT:
            self.invalid(f"more than {BODY_LIMIT >> 20} MB in one answer", "an answer of some KB")
        return raw

    def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer. Raises what `post` raises."""
        raw = self.post(path, body)
        found = _json(raw)
        if found is None:
            self.invalid(f"{self._shown(raw)!r}, which is no JSON", "a JSON answer")
        return found

    def stop(self) -> None:
        """Leave every answer that is being read."""
        self.stopped = True
        self._receiver.stop()

    def events(
        self, path: str, body: Mapping[str, Any], name: str = ""
    ) -> tuple[list[tuple[float, bytes]], bool]:
        """The events of a stream when it has ended, each with the time at which it came, and whether the stream says that it is done.

        Raises ServerUnreachable, ServerRefused (an error in the middle of the stream, too) and ServerAnswerInvalid (a stream that is cut, or
        too long).
        """
        with self._sent(path, body, name) as (answer, connected):
            kind = answer.headers.get("content-type", "")
            if "event-stream" not in kind:
                self.invalid(
                    f"an answer of type {kind or 'unknown'!r} ({self._shown(answer.read(4096))!r}) where a stream was asked for",
                    "text/event-stream",
                )
            if self.stopped:
                raise InterruptedError
            parts = self._receiver.whole(answer, connected, self._settings.timeout, BODY_LIMIT)
            with self.reading:
                return self._events(parts.lines(answer))

    def _events(self, lines: Iterable[tuple[float, bytes]]) -> tuple[list[tuple[float, bytes]], bool]:
        events: list[tuple[float, bytes]] = []
        for at, line in lines:
            if len(line) > LINE_LIMIT:
                self.invalid(f"a line of more than {LINE_LIMIT >> 20} MB in a stream", "events of some KB")
            if not line.startswith(b"data:"):
                continue
            line = line[5:].strip()
            if line == b"[DONE]":
                return events, True
            if b'"error"' in line:
                self._told_error(line)
            events.append((at, line))
        return events, False

    def _told_error(self, line: bytes) -> None:
        event = _json(line)
        if isinstance(event, Mapping) and (event.get("error") or event.get("object") == "error"):
            raise ServerRefused(
                f"{self._address.root} ended a stream with an error ({self._shown(line)}); expected the answer to its end. "
                "What was received until then is not used; see the server's own log."
            )

    def cut(self) -> NoReturn:
        """Raises ServerAnswerInvalid for a stream that ended before its answer did."""
        raise ServerAnswerInvalid(
            f"{self._address.root} closed a stream before it said that the answer had ended; expected all of it. What was "
            "received until then is not used. Look whether the server stopped or a proxy cut the connection."
        )

    @contextmanager
    def _sent(
        self, path: str, body: Mapping[str, Any], name: str
    ) -> Iterator[tuple[http.client.HTTPResponse, socket.socket]]:
        """Post, again where the server says so or does not listen, until it answers."""
        content = json.dumps(body, ensure_ascii=False).encode()
        tries = 0
        while True:
            wait = 0.1 * 4**tries
            try:
                with self._asked(path, content, name=name) as (answer, connected):
                    if answer.status == 200:
                        yield answer, connected
                        return
                    raw = answer.read(BODY_LIMIT)
                    if answer.status not in _AGAIN or tries >= self._settings.retries:
                        self._refused(answer.status, path, raw, tries)
                    asked = _seconds(answer.headers.get("retry-after", ""))
                    if asked is not None:
                        if asked > WAIT_LIMIT:
                            self._refused(answer.status, path, raw, tries, asked)
                        wait = asked
                    reason = f"status {answer.status}"
            except ServerUnreachable as error:
                if not error.unsent or tries >= self._settings.retries:
                    raise
                reason = "no connection"
            tries += 1
            with self._lock:
                self.again[reason] = self.again.get(reason, 0) + 1
            time.sleep(wait)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Turns failures before anything was sent into a paragraph; a connection that there is not is ``unsent``."""
        where = self._address.root
        try:
            yield
        except ssl.SSLError as error:
            raise ServerUnreachable(
                f"The TLS connection to {where} failed ({self._shown(str(error).encode())}); expected a certificate that this machine trusts. Name the "
                "file of certificates with engine.verify=FILE, or, for a server of your own, say engine.verify=false."
            ) from None
        except TimeoutError:
            raise ServerUnreachable(
                f"{where} did not answer within {min(_CONNECT, self._settings.timeout):g} s; expected a connection. Look whether the server runs, or "
                "correct the address."
            ) from None
        except OSError as error:
            found = ServerUnreachable(
                f"{where} cannot be reached ({self._shown(str(error).encode())}); expected a server that listens there. Start it, or correct the address."
            )
            found.unsent = True
            raise found from None

    @contextmanager
    def _told(self, path: str) -> Iterator[None]:
        """Turns failures of a connection into a paragraph."""
        where = self._address.root
        try:
            yield
        except TimeoutError:
            raise ServerUnreachable(
                f"{where}{path} sent no token for {self._settings.timeout:g} s; expected one. Raise engine.timeout where the "
                "server is that slow."
            ) from None
        except InterruptedError:
            raise ServerUnreachable(f"{where} was left before its answer had ended.") from None
        except http.client.HTTPException as error:
            raise ServerAnswerInvalid(
                f"{where}{path} broke off in the middle of an answer ({self._shown((str(error) or type(error).__name__).encode())}); expected all of it. "
                "What was received until then is not used. Look whether the server stopped or a proxy cut the connection."
            ) from None
        except OSError as error:
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
