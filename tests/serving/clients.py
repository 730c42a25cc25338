"""A served model and those who ask it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from command_line import run

from detdiff.commands.serve import serve_scenario
from detdiff.invariance.invariant import pinned_scenario
from detdiff.serving.app import ServerBounds
from detdiff.serving.server import RunningServer, ServeOptions, serving

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
PROMPTS = (
    "In the beginning God created", "And the king said unto the people, Hear ye", "My son", "Thou shalt not",
)  # fmt: skip


@dataclass
class Served:
    """A running server and one client's connections to it."""

    server: RunningServer
    http: httpx2.Client

    @property
    def address(self) -> str:
        return self.server.address

    def post(self, path: str, body: Any, **how: Any) -> httpx2.Response:
        return self.http.post(f"{self.address}{path}", json=body, **how)

    def complete(self, prompt: Any, **keys: Any) -> dict[str, Any]:
        """The whole answer to a prompt."""
        answer = self.post("/v1/completions", {"prompt": prompt, **keys})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def events(self, path: str, **keys: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer."""
        answer = self.post(path, {**keys, "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def together(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The whole answers to requests that are sent at once."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self.complete(**body), bodies))

    def metric(self, name: str) -> float:
        text = self.http.get(f"{self.address}/metrics").text
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith(f"detdiff:{name}{{")
        )


class Streamed:
    """A streamed request whose first event has come; close it to go away."""

    def __init__(self, found: Served, **keys: Any) -> None:
        body = {"prompt": PROMPTS[0], "stream": True, "ignore_eos": True, **keys}
        request = found.http.build_request("POST", f"{found.address}/v1/completions", json=body)
        self._answer = found.http.send(request, stream=True)
        self.lines = self._answer.iter_lines()
        next(self.lines)

    def close(self) -> None:
        self._answer.close()


def wait_for(happened: Any) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if happened():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


@contextmanager
def served(
    engine: Any,
    flags: str = "",
    trace: Path | None = None,
    *,
    grace: float = 0.0,
    invariant: bool = False,
    **bounds: int,
) -> Iterator[Served]:
    """The engine's model on a free port of the loopback address while the block lasts; with its kernels pinned where it is to be
    ``invariant``."""
    scenario = serve_scenario("builtin", flags)
    if invariant:
        scenario, _ = pinned_scenario(engine, scenario, compositions=2)
    options = ServeOptions(port=0, bounds=ServerBounds(**bounds), trace=trace, grace=grace)
    with (
        serving(engine, scenario, options) as server,
        httpx2.Client(timeout=60) as http,
    ):
        yield Served(server, http)


def compared(address: str, *more: str, flags: str = "max_tokens=12") -> tuple[int, dict[str, Any]]:
    """detdiff's own client: one request after the other against four at once. The exit code and the answer."""
    prompts = [word for text in PROMPTS for word in ("--prompt", text)]
    found = run(
        "compare", "--model", f"{address}/v1", *prompts, "--a", "schedule=serial", "--b", "static:4", "--both", flags, "--json", *more,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(found.stdout)
    return found.exit_code, answer
