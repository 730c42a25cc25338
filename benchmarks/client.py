"""What the client of servers costs of the processor for a token: 64 requests at once at a server in another process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from detdiff.engines.record import record
from detdiff.engines.registry import open_engine
from detdiff.engines.server.together import at_once
from detdiff.scenario import Scenario

AT_ONCE, TOKENS, STEP = 64, 128, 0.064
SHAPES = {
    "text": "text alone",
    "content": "log-probabilities and ids, llama.cpp's",
    "named": "log-probabilities and ids, vLLM's",
}


@contextmanager
def paced_server(shape: str) -> Iterator[str]:
    """An address that answers each request with a token every STEP seconds: 64 at once are 1,000 tokens a second."""
    words = [sys.executable, "-m", "benchmarks.paced_server", shape, str(TOKENS), str(STEP)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
        finally:
            server.kill()


def _microseconds(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Processor time of this process for a token, the tokens in a second, and what the work gave."""
    spent, began = time.process_time(), time.perf_counter()
    found = work()
    count = AT_ONCE * TOKENS
    return 1e6 * (time.process_time() - spent) / count, count / (time.perf_counter() - began), found


def run() -> list[dict[str, Any]]:
    """A row for each shape: asked and read to the last number, then the same written as a trace."""
    return [_row(shape) for shape in SHAPES]


def _row(shape: str) -> dict[str, Any]:
    with paced_server(shape) as address, tempfile.TemporaryDirectory() as folder:
        scenario = Scenario.from_flags(address, ["a prompt"] * AT_ONCE, f"static max_tokens={TOKENS} top=8")
        engine = open_engine(scenario)
        asking = engine.asking(8)  # type: ignore[attr-defined]
        jobs = [lambda request=each: asking.ask(request, (1, 2, 3)) for each in scenario.requests]

        def asked() -> Any:
            outcome = at_once(jobs)
            assert outcome.failed is None, outcome.failed
            return [each.generation() for each in outcome.done.values()]

        asked_us, pace, _ = _microseconds(asked)
        recorded_us, _, _ = _microseconds(lambda: record(scenario, Path(folder) / "trace", engine=engine))
    return {
        "answers": SHAPES[shape],
        "tokens/s": round(pace),
        "asked, us a token": round(asked_us, 1),
        "of a core at 1,000 tokens/s, %": round(asked_us / 10, 2),
        "recorded as a trace, us a token": round(recorded_us, 1),
    }
