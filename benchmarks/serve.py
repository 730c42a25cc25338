"""What serving costs: 32 requests on the packed engine driven directly, behind `detdiff serve`, streamed, and recorded with digests.

All requests are there at the start. The client is a process of its own, and its time is from the first request sent to the last
answer read; the engine's from the first forward to the last. Starting and ending a server are not in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from detdiff.commands.serve import serve_scenario
from detdiff.engines.mlx.engine import MlxEngine
from detdiff.engines.mlx.model import LoadedModel, load
from detdiff.engines.mlx.serve import Models, Sessions, prepared, run_unrecorded
from detdiff.scenario import Scenario
from detdiff.serving.server import ServeOptions, serving

from .decoding import PROMPTS
from .paired import alternate, ratio, spread

REQUESTS = 32
ROUNDS = 4
STEPS = 24
CLIENT = """
import http.client, json, sys, threading, time
port, bodies = int(sys.argv[1]), json.loads(sys.stdin.read())
ready, answered = threading.Barrier(len(bodies) + 1), []
def ask(body):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.connect()
    raw = json.dumps(body).encode()
    ready.wait()
    connection.request("POST", "/v1/completions", raw, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answered.append(bool(answer.read()) and answer.status == 200)
threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
for thread in threads:
    thread.start()
ready.wait()
start = time.perf_counter()
for thread in threads:
    thread.join()
assert len(answered) == len(bodies) and all(answered)
print(time.perf_counter() - start)
"""


class _ServingSides:
    """The ways to have one set of requests answered; each returns seconds."""

    def __init__(self, loaded: LoadedModel, steps: int) -> None:
        self._engine = MlxEngine(loaded)
        texts = [f"{n}. {PROMPTS[n % len(PROMPTS)]}" for n in range(REQUESTS)]
        self._prompts = [self._engine.encode(text, False) for text in texts]
        self._steps = steps
        self._scenario = serve_scenario(str(loaded.path), "")

    def direct(self) -> float:
        requests = [
            {"tokens": prompt, "max_tokens": self._steps, "ignore_stop": True} for prompt in self._prompts
        ]
        scenario = Scenario.from_dict({**self._scenario.to_dict(), "request": requests})
        models = Models.of(scenario, self._engine.loaded)
        sessions, work = Sessions.of(scenario, models), prepared(scenario, models)
        start = perf_counter()
        run_unrecorded(scenario, sessions, work, None)
        return perf_counter() - start

    def served(self, *, trace: bool = False, **keys: Any) -> float:
        with tempfile.TemporaryDirectory() as folder:
            options = ServeOptions(port=0, trace=Path(folder) / "trace" if trace else None, grace=0)
            with serving(self._engine, self._scenario, options) as server:
                bodies = [
                    {"prompt": prompt, "max_tokens": self._steps, "ignore_eos": True, **keys}
                    for prompt in self._prompts
                ]
                done = subprocess.run(
                    [sys.executable, "-c", CLIENT, server.address.rpartition(":")[2]],
                    input=json.dumps(bodies),
                    text=True,
                    capture_output=True,
                    check=True,
                )
        return float(done.stdout)


def run() -> list[dict[str, Any]]:
    """One row a way: medians of seconds, and medians of the rounds' ratios to the engine driven directly."""
    sides = _ServingSides(load("builtin"), STEPS)
    ways = {
        "direct": sides.direct,
        "served": sides.served,
        "streamed": lambda: sides.served(stream=True),
        "recorded": lambda: sides.served(trace=True),
    }
    alternate(ways, 1)
    times = alternate(ways, ROUNDS)
    return [
        {
            "way": name,
            "s": round(median(times[name]), 2),
            "/ direct": round(ratio(times[name], times["direct"]), 3),
            "its rounds": spread(times[name], times["direct"]),
        }
        for name in ways
    ]
