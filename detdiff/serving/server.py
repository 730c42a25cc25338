"""A served model on an address: the socket, uvicorn on it, and the end of it all, after which the trace is whole."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import uvicorn

import detdiff
from detdiff.engines.base import LIVE, Engine
from detdiff.engines.live import LiveRun
from detdiff.errors import EngineRefuses, ServeFailed
from detdiff.scenario import Scenario
from detdiff.trace import Place

from .app import ModelServer, ServerBounds

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ServeOptions:
    """Where and how to serve: ``trace`` is the new directory of the recording, ``grace`` are seconds for what runs when the
    server is to end."""

    host: str = LOOPBACK
    port: int = 8000
    bounds: ServerBounds = field(default_factory=ServerBounds)
    trace: Place | None = None
    grace: float = 5.0


class RunningServer(uvicorn.Server):
    """uvicorn's server, which has the driver end what runs before it waits for connections to close."""

    def __init__(self, engine: Engine, scenario: Scenario, options: ServeOptions) -> None:
        """Raises EngineRefuses, ServeFailed where the address is taken, and what opening a live run raises."""
        if LIVE not in engine.capabilities:
            raise EngineRefuses(
                f"The engine {engine.name} was asked to serve; expected one that takes requests while it runs, as mlx does: "
                f"{engine.lacks(LIVE)}. Serve the model with its own server, and compare that with --engine server."
            )
        self._socket = _listening(options.host, options.port)
        try:
            live: Any = engine
            opened: LiveRun = live.live(scenario, options.trace)
        except BaseException:
            self._socket.close()
            raise
        self.model = ModelServer(opened, scenario, options.bounds)
        self._grace, self._hurried = options.grace, False
        super().__init__(
            uvicorn.Config(
                self.model.app(),
                log_level="warning",
                access_log=False,
                lifespan="off",
                loop="asyncio",
                http="h11",
                ws="none",
                server_header=False,
                headers=[("server", f"detdiff/{detdiff.__version__}")],
                timeout_graceful_shutdown=int(options.grace) + 5,
            )
        )

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def serve_all(self) -> None:
        """Serve until a signal or ``should_exit``; afterwards the trace is finished. Raises what ended the driver."""
        driver = self.model.driver
        driver.start()
        try:
            self.run([self._socket])
        finally:
            driver.stop(0.0)
            driver.join()
        if driver.failure is not None:
            raise driver.failure

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal ends what runs without any grace, each answer with its reason; a third leaves them."""
        if self.should_exit and not self._hurried:
            self._hurried = True
            self.model.driver.stop(0.0)
            return
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.model.driver.stop(self._grace)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or not self.model.driver.alive


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # It listens from now on: who comes before the first answer can be given waits.
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ServeFailed(
            f"{host} port {port} cannot be listened on ({getattr(error, 'strerror', None) or error}); expected a free port of this "
            "machine. Say another with --port, or 0 for any that is free."
        ) from None


@contextlib.contextmanager
def serving(engine: Engine, scenario: Scenario, options: ServeOptions) -> Iterator[RunningServer]:
    """A server in a thread of this process while the block lasts; its trace is finished afterwards."""
    server = RunningServer(engine, scenario, options)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.serve_all()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="detdiff-http")
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join()
    if failures:
        raise failures[0]
