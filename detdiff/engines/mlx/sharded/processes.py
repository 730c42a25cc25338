"""The processes that run a model together, on this machine: started over mlx's ring on loopback, told what to run, and never left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from detdiff import errors
from detdiff.errors import DetdiffError, ModelRunError, ProcessLost

if TYPE_CHECKING:
    from .worker import ModelAsked

STARTS: Final = 300.0
"""Seconds in which all processes have to load the model, on a busy machine."""
STALLS: Final = 600.0
"""Seconds without a word from any process while all of them run, as a long prompt may take."""
ENDS: Final = 15.0
"""Seconds without a word in which the others have to end once one of them is done: each of their sums waits for it."""
GONE: Final = 5.0
"""The same, once one of them has failed or is gone."""
_ATTEMPTS: Final = 3

OnMessage = Callable[[int, tuple[Any, ...]], None]


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path


def _end(workers: Sequence[_Worker], lifeline: int, folder: tempfile.TemporaryDirectory[str]) -> None:
    """End the processes whatever they do, and wait for them."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.wait()
        worker.connection.close()
    os.close(lifeline)
    folder.cleanup()


class Processes:
    """``size`` processes with a share of a model each. They end with this object, and with this process whatever ends it."""

    def __init__(self, asked: ModelAsked, size: int) -> None:
        """Raises what loading and sharding the model raise in a process, and ProcessLost."""
        self.size = size
        for attempt in range(_ATTEMPTS):
            self._start()
            try:
                for worker in self._workers:
                    worker.connection.send(asked)
                self._collect(lambda rank, message: None, STARTS, STARTS)
            except (ModelRunError, ProcessLost):
                # A port that was free may be taken by now.
                self.end()
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            except BaseException:
                self.end()
                raise
            return

    def _start(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="detdiff-ring-", ignore_cleanup_errors=True)
        hosts = Path(folder.name) / "hosts.json"
        with _free_ports(self.size) as ports:
            hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
        held, lifeline = os.pipe()
        self._workers: list[_Worker] = []
        self._ended = weakref.finalize(self, _end, self._workers, lifeline, folder)
        try:
            for rank in range(self.size):
                self._workers.append(_started(rank, hosts, held))
        except BaseException:
            self.end()
            raise
        finally:
            os.close(held)

    @property
    def running(self) -> bool:
        return self._ended.alive

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [worker.process.pid for worker in self._workers]

    def end(self) -> None:
        """End them, whatever they do."""
        self._ended()

    def run(self, asked: Sequence[Any], on_message: OnMessage) -> list[Mapping[str, Any]]:
        """Have process r do ``asked[r]``; what each said at its end. ``on_message(rank, message)`` hears what they say before.

        Whatever goes wrong, all of them are ended. Raises what they raise, and ProcessLost.
        """
        try:
            for worker, each in zip(self._workers, asked, strict=True):
                worker.connection.send(each)
            return [message[1] for message in self._collect(on_message, STALLS, ENDS)]
        except (BrokenPipeError, ConnectionResetError) as error:
            self.end()
            raise self._lost(None, "was gone before it was told what to run") from error
        except BaseException:
            self.end()
            raise

    def _collect(self, on_message: OnMessage, patience: float, after_one: float) -> list[tuple[Any, ...]]:
        """The last word of each process; ``after_one`` are the seconds without a word once one has said its.

        Raises the error of the first that failed or was lost, once the others ended too.
        """
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        found: dict[int, tuple[Any, ...]] = {}
        heard = time.monotonic()
        wrong: list[DetdiffError] = []
        while waiting:
            allowed = GONE if wrong else patience if len(waiting) == self.size else after_one
            left = heard + allowed - time.monotonic()
            ready = wait(list(waiting), max(left, 0.0))
            if not ready:
                rank = min(waiting.values())
                wrong.append(self._lost(rank, f"has said nothing for {time.monotonic() - heard:.0f} seconds"))
                break
            heard = time.monotonic()
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    del waiting[connection]
                    wrong.insert(0, self._lost(rank, self._how_ended(rank)))
                    continue
                if message[0] in ("ready", "done"):
                    del waiting[connection]
                    found[rank] = message
                elif message[0] == "failed":
                    del waiting[connection]
                    wrong.append(_error(rank, *message[1:]))
                else:
                    on_message(rank, message)
        if wrong:
            # A lost connection to a peer is what the others say when one is gone.
            raise next((each for each in wrong if not isinstance(each, ModelRunError)), wrong[0])
        return [found[rank] for rank in range(self.size)]

    def _how_ended(self, rank: int) -> str:
        try:
            code = self._workers[rank].process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def _lost(self, rank: int | None, how: str) -> ProcessLost:
        tail = "" if rank is None else _last_line(self._workers[rank].log)
        who = "A process" if rank is None else f"Process {rank}"
        return ProcessLost(
            f"{who} of the {self.size} that run the model {how}{tail}; expected all of them to run to the end of the scenario. All were "
            "ended. What was recorded before is a readable trace, marked incomplete: look at its last forward, and at the memory of this machine."
        )


def _last_line(log: Path) -> str:
    try:
        lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    except OSError:
        return ""
    said = next((line for line in reversed(lines) if line and not line.startswith("[ring]")), "")
    return f" ({said[:200].rstrip('.')})" if said else ""


def _error(rank: int, name: str, text: str) -> DetdiffError:
    known = getattr(errors, name, None) if name else None
    if isinstance(known, type) and issubclass(known, DetdiffError):
        return known(text)
    first = text.splitlines()[0].rstrip(".") if text else "without a message"
    return ModelRunError(
        f"Process {rank} failed while it ran its share of the model: {first}. Expected a model and a scenario that mlx-lm runs over "
        "several processes. Try it in one process (processes=1)."
    )


def _started(rank: int, hosts: Path, lifeline: int) -> _Worker:
    ours, theirs = socket.socketpair()
    log = hosts.with_name(f"{rank}.log")
    environment = {
        **os.environ,
        "MLX_RANK": str(rank),
        "MLX_HOSTFILE": str(hosts),
        "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path),
    }
    with theirs, log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "detdiff.engines.mlx.sharded.worker", str(theirs.fileno()), str(lifeline)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(), lifeline),
            env=environment,
            # Ctrl-C is this process's to answer.
            process_group=0,
        )
    return _Worker(process, Connection(ours.detach()), log)


@contextmanager
def _free_ports(count: int) -> Iterator[list[int]]:
    """Ports of loopback that nobody listens on, held until the block ends."""
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()
