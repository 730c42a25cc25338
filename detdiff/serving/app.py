"""The HTTP side: routes of the OpenAI API over a driver, with bounds on what one client can ask of it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import detdiff
from detdiff.engines.live import LiveRun
from detdiff.errors import DetdiffError, words_of
from detdiff.scenario import Request, Scenario

from .driver import Accepted, Driver, News, ServedRequest
from .reading import ApiRefused, ApiRequest, stopping
from .writing import AnswerPiece, AnswerShape, dumped, sent

_ID: Final = re.compile(r"[A-Za-z0-9][\w.:-]{0,63}", re.ASCII)
_BODY_SECONDS: Final = 30.0
_AGAIN_SECONDS: Final = "1"
_UNSAID: Final = 16
"""The tokens of a completion whose request does not say how many, in OpenAI's API."""


@dataclass(frozen=True)
class ServerBounds:
    """``body`` bytes of one request at most, ``queue`` requests that wait at most, ``tokens`` of an answer where the request does not
    say how many (None: what the API has, 16 and for chats what there is room for)."""

    body: int = 4 << 20
    queue: int = 256
    tokens: int | None = None


class ModelServer:
    """A live run behind the API: what answers a request, from its body to the last event."""

    def __init__(self, live: LiveRun, scenario: Scenario, bounds: ServerBounds) -> None:
        self.name = scenario.model
        self._live, self._bounds = live, bounds
        self._shares = scenario.cache.share_prefix
        active = 1 if scenario.schedule.kind == "serial" else scenario.schedule.active
        self.driver = Driver(live, active, self._heard)
        self.version = detdiff.__version__
        weights = str(live.identity.get("weights_sha256") or "")[:12]
        self.fingerprint = "-".join(
            filter(None, ("detdiff", self.version, weights, scenario.kernels.profile))
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._recorded = live.recorded
        self._ids: set[str] = set()
        self._count = 0
        self._created = int(time.time())

    def app(self) -> Starlette:
        """The application, whose answers come in the event loop that first asks it."""
        get, post = ["GET"], ["POST"]
        return Starlette(
            routes=[
                Route("/v1/models", self._told(self._models), methods=get),
                Route("/v1/models/{name:path}", self._told(self._model), methods=get),
                Route("/v1/completions", self._told(self._completions), methods=post),
                Route("/v1/chat/completions", self._told(self._chat), methods=post),
                Route("/tokenize", self._told(self._tokenize), methods=post),
                Route("/version", self._told(self._version), methods=get),
                Route("/health", self._told(self._health), methods=get),
                Route("/metrics", self._told(self._metrics), methods=get),
            ],
            exception_handlers={404: _no_path, 405: _no_path},
        )

    def _told(
        self, answer: Callable[[HttpRequest], Awaitable[Response]]
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        """``answer`` with what it refuses as a response."""

        async def told(http: HttpRequest) -> Response:
            self._loop = asyncio.get_running_loop()
            try:
                return await answer(http)
            except ApiRefused as refused:
                self.driver.counts.refused[str(refused.status)] += 1
                return refusal(refused)
            except DetdiffError as error:
                self.driver.counts.refused["400"] += 1
                return refusal(ApiRefused(str(error)))

        return told

    async def _models(self, _: HttpRequest) -> Response:
        return _json({"object": "list", "data": [self._about()]})

    async def _model(self, http: HttpRequest) -> Response:
        if http.path_params["name"] != self.name:
            raise ApiRefused(
                f"There is no model {http.path_params['name']!r} here; expected {self.name!r}.", status=404
            )
        return _json(self._about())

    def _about(self) -> dict[str, Any]:
        about = {"id": self.name, "object": "model", "created": self._created, "owned_by": "detdiff"}
        return {**about, "max_model_len": self._live.context}

    async def _version(self, _: HttpRequest) -> Response:
        return _json({"version": self.version})

    async def _health(self, _: HttpRequest) -> Response:
        if not self.driver.alive:
            failed = self.driver.failure
            why = "the server has stopped" if failed is None else words_of(failed)
            raise ApiRefused(f"The model does not run any more: {why}. Start the server again.", status=503)
        return _json({"status": "stopping" if self.driver.stopping else "ok"})

    async def _metrics(self, _: HttpRequest) -> Response:
        text = self.driver.counts.prometheus(self.name)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _tokenize(self, http: HttpRequest) -> Response:
        body = await self._body(http)
        if not isinstance(body, Mapping):
            raise ApiRefused("The body is no JSON object; expected one with prompt or messages. Send one.")
        chat = "messages" in body
        rest = {key: value for key, value in body.items() if key != "add_special_tokens"}
        if not chat and body.get("add_special_tokens") is False:
            raise ApiRefused(
                "add_special_tokens is false; expected the tokens that a prompt has here, with what the tokenizer adds. Leave it out.",
                param="add_special_tokens",
            )
        asked = ApiRequest.read(rest, chat, self.name)
        tokens = await self._tokens(asked)
        return _json({"count": len(tokens), "max_model_len": self._live.context, "tokens": list(tokens)})

    async def _completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, chat=False)

    async def _chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, chat=True)

    async def _answer(self, http: HttpRequest, *, chat: bool) -> Response:
        asked = ApiRequest.read(await self._body(http), chat, self.name)
        if asked.uncached and self._shares:
            raise ApiRefused(
                "cache_prompt is false, and this server lets prompts share what earlier ones began with; expected a server "
                "without. Leave cache_prompt out (engine.cache='as it is' for detdiff's client), or serve without share_prefix.",
                param="cache_prompt",
            )
        tokens = await self._tokens(asked)
        self._refuse_more()
        id = self._id(http.headers.get("x-request-id", ""))
        sink: asyncio.Queue[Accepted | AnswerPiece | ApiRefused] = asyncio.Queue()
        served = ServedRequest(self._request(id, asked, tokens), asked.top, asked.stops, asked.stream, sink)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{id}"
        shape = AnswerShape(
            asked, name, self.name, self.fingerprint, int(time.time()), tokens, self._live.decode
        )
        self.driver.ask(served)
        if not self.driver.alive:
            raise stopping()
        return AnswerResponse(self.driver, served, shape)

    async def _tokens(self, asked: ApiRequest) -> tuple[int, ...]:
        """The prompt's token ids, found beside the event loop: a long text takes a while."""
        prompt, live = asked.prompt, self._live
        if isinstance(prompt, tuple):
            return prompt
        work = live.encode if prompt is not None else live.encode_messages
        found = await asyncio.get_running_loop().run_in_executor(None, work, prompt or asked.messages)  # type: ignore[arg-type]
        return tuple(found)

    def _request(self, id: str, asked: ApiRequest, tokens: tuple[int, ...]) -> Request:
        room = (self._live.context or (1 << 20)) - len(tokens)
        unsaid = self._bounds.tokens or (max(1, room) if asked.chat else _UNSAID)
        longest = unsaid if asked.max_tokens is None else asked.max_tokens
        return Request(
            id, tokens=tokens, max_tokens=longest, ignore_stop=asked.ignore_stop, sampling=asked.sampling
        )

    def _refuse_more(self) -> None:
        if not self.driver.alive or self.driver.stopping:
            raise stopping()
        waiting = self.driver.counts.waiting
        if waiting >= self._bounds.queue:
            raise ApiRefused(
                f"{waiting} requests wait already; expected less than {self._bounds.queue}. Ask again when some have been answered.",
                status=429,
                code="queue_full",
            )

    def _id(self, given: str) -> str:
        """The client's own name of a request where there is a trace and it can be one in it and is new, else r0, r1, ..."""
        id = given if self._recorded else ""
        while not _ID.fullmatch(id) or id in self._ids:
            id = f"r{self._count}"
            self._count += 1
        if self._recorded:
            self._ids.add(id)
        return id

    async def _body(self, http: HttpRequest) -> Any:
        """The JSON of a body, which comes in good time and is no larger than it may be."""
        limit, parts, size = self._bounds.body, [], 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in http.stream():
                    parts.append(part)
                    size += len(part)
                    if size > limit:
                        raise ApiRefused(
                            f"The body has more than {limit:,} bytes; expected no more. Shorten the prompt, or serve with a larger "
                            "--body-limit.",
                            status=413,
                        )
        except TimeoutError:
            raise ApiRefused(
                f"The body did not come within {_BODY_SECONDS:g} s; expected all of it. Send it again.",
                status=408,
            ) from None
        except ClientDisconnect:
            raise ApiRefused("The client went away. Nothing was run.", status=400) from None
        try:
            return json.loads(b"".join(parts).decode(), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ApiRefused(
                f"The body is no JSON ({str(error)[:120]}); expected an object. Correct it."
            ) from None

    def _heard(self, news: list[News]) -> None:
        """From the driver's thread into the event loop."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and with it who asked
                self._loop.call_soon_threadsafe(_hand_out, news)


def _hand_out(news: list[News]) -> None:
    for served, what in news:
        served.sink.put_nowait(what)


class AnswerResponse(Response):
    """One answer, whole or as a stream; a client that goes away meanwhile cancels its request."""

    def __init__(self, driver: Driver, served: ServedRequest, shape: AnswerShape) -> None:
        self._driver, self._served, self._shape = driver, served, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnected(receive))
        answer = asyncio.create_task(self._said(scope, receive, send))
        try:
            await asyncio.wait({gone, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self._driver.cancel(self._served, "its client went away")
        finally:
            for task in (gone, answer):
                if not task.done():
                    task.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await answer

    async def _said(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            accepted = await self._next()
            if isinstance(accepted, Accepted):
                self._shape.cached = accepted.cached
            if self._shape.asked.stream:
                await self._streamed(send)
            else:
                await _json(self._shape.whole(await self._whole()))(scope, receive, send)
        except ApiRefused as refused:
            self._driver.counts.refused[str(refused.status)] += 1
            await refusal(refused)(scope, receive, send)

    async def _next(self) -> Accepted | AnswerPiece:
        found: Accepted | AnswerPiece | ApiRefused = await self._served.sink.get()
        if isinstance(found, ApiRefused):
            raise found
        return found

    async def _pieces(self) -> AsyncIterator[AnswerPiece]:
        """The pieces to the last one."""
        while True:
            found = await self._next()
            if isinstance(found, AnswerPiece):
                yield found
                if found.finished is not None:
                    return

    async def _whole(self) -> AnswerPiece:
        pieces = [each async for each in self._pieces()]
        tokens = tuple(token for each in pieces for token in each.tokens)
        return AnswerPiece(tokens, "".join(each.text for each in pieces), pieces[-1].finished)

    async def _streamed(self, send: Send) -> None:
        shape = self._shape
        values = shape.asked.ids or shape.asked.top is not None
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def say(raw: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": raw, "more_body": more})

        first = shape.first()
        if first is not None:
            await say(sent(first))
        try:
            async for piece in self._pieces():
                event = shape.event(piece)
                if piece.text or piece.finished is not None or values:
                    await say(sent(event))
            last = shape.last()
            if last is not None:
                await say(sent(last))
            await say(b"data: [DONE]\n\n", more=False)
        except ApiRefused as refused:
            await say(sent(refused.to_json()), more=False)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumped(value), status, headers, "application/json")


def refusal(refused: ApiRefused) -> Response:
    """An ApiRefused as OpenAI's API says it."""
    again = {"retry-after": _AGAIN_SECONDS} if refused.status in (429, 503) else None
    return _json(refused.to_json(), refused.status, again)


async def _no_path(http: HttpRequest, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return refusal(
        ApiRefused(
            f"{http.method} {http.url.path} is not answered here; expected GET /v1/models, /version, /health or /metrics, or POST "
            "/v1/completions, /v1/chat/completions or /tokenize. Correct the address, which ends before /v1.",
            status=status,
        )
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
