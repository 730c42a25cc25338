"""The demonstration: a request's text flips because another request shared a forward with it.

Everything runs on the built-in model under the profile `candle-metal`, where one row takes the matrix-vector kernel and
more rows the matrix-matrix kernel.
"""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from detdiff.commands.sides import Engines, Progress, record_trace
from detdiff.compare import Divergence, compare
from detdiff.report import divergence_text, to_json
from detdiff.report.words import shown
from detdiff.scenario import Scenario
from detdiff.trace import Trace

SCHEMA = "detdiff.demo/2"
BASE = "layout=packed kernels=candle-metal prefill_chunk=4 split_rows=4"
SERIAL, CONTINUOUS = "schedule=serial", "schedule=continuous arrivals=0,4"
FOLLOWER = (
    "And it came to pass, when all the kings of the Amorites, which were on the side of Jordan westward, heard that the "
    "LORD had dried up the waters of Jordan from before the children of Israel,"
)
# Tried in order until one flips: a run's last bits, and with them the flip, depend on the processor.
ANCHORS = (
    ("And Moses spake unto the children of Israel, saying,", 52),
    ("In the beginning", 64),
    ("Now these are the names of", 128),
)
QUIET = ("And it came to pass in those days,", 32)
QUIET_FOLLOWER = "And the king said unto the people, Hear ye the word of the LORD, and"
HELD = 1024
OWN = """\
On your own model, a directory that mlx-lm can load:

    detdiff compare --model DIR --prompt "..." --prompt "..." \\
      --both "layout=packed kernels=candle-metal split_rows=4 chat" \\
      --a schedule=serial --b "schedule=continuous arrivals=0,4"
"""
INTRODUCTION = (
    "The built-in model answers two requests, greedily: an anchor, and a follower. Run a is serial, one request after the "
    "other. Run b is continuous: the follower arrives at forward 4, while the anchor is decoding, and its prompt shares "
    "forwards with the anchor's next tokens. The profile candle-metal takes one kernel for a single row and another for "
    "more rows; with split_rows=4, calls of at most 4 rows go row by row through the first. Prompts come in chunks of 4 "
    "tokens: 4 rows alone, 5 with the anchor's."
)


@dataclass(frozen=True)
class DemoCase:
    """One comparison of the demonstration. ``excerpts`` is the first flipped request's text around its flip, a and b."""

    title: str
    anchor: str
    divergence: Divergence
    excerpts: tuple[str, str] | None

    @property
    def flips(self) -> bool:
        return any(request.flip is not None for request in self.divergence.requests)


def run_demo(progress: Progress) -> Iterator[DemoCase]:
    """Runs and yields the cases one by one: a flip (or every try at one), the kernels pinned, a divergence without a flip.

    Raises the DetdiffError of a run that fails.
    """
    case, engines = None, Engines()
    for anchor, tokens in ANCHORS:
        case = _case(
            "serial against continuous", (anchor, FOLLOWER), f"{BASE} max_tokens={tokens}", progress, engines
        )
        yield case
        if case.flips:
            break
    assert case is not None
    flags = f"{BASE.replace('split_rows=4', f'split_rows={HELD}')} max_tokens={tokens}"
    yield _case(
        f"the same with the kernels pinned, split_rows={HELD}", (anchor, FOLLOWER), flags, progress, engines
    )
    anchor, tokens = QUIET
    yield _case("other prompts", (anchor, QUIET_FOLLOWER), f"{BASE} max_tokens={tokens}", progress, engines)


def _case(title: str, prompts: tuple[str, str], flags: str, progress: Progress, engines: Engines) -> DemoCase:
    with tempfile.TemporaryDirectory(prefix="detdiff-demo-") as folder:
        traces = []
        for name, schedule in (("serial", SERIAL), ("continuous", CONTINUOUS)):
            scenario = _named(Scenario.from_flags("builtin", prompts, f"{flags} {schedule}"))
            with progress(name) as on_token:
                traces.append(record_trace(scenario, Path(folder) / name, on_token, engines, kept=False))
        found = compare(*traces)
        return DemoCase(title, prompts[0], _without_paths(found), _excerpts(found, traces))


def _named(scenario: Scenario) -> Scenario:
    values = scenario.to_dict()
    for request, id in zip(values["request"], ("anchor", "follower"), strict=True):
        request["id"] = id
    return Scenario.from_dict(values)


def _without_paths(found: Divergence) -> Divergence:
    return replace(found, a=replace(found.a, trace="serial"), b=replace(found.b, trace="continuous"))


def _excerpts(
    found: Divergence, traces: list[Trace], before: int = 10, after: int = 6
) -> tuple[str, str] | None:
    flipped = next((request for request in found.requests if request.flip is not None), None)
    if flipped is None or flipped.flip is None:
        return None
    texts = []
    for side, trace in zip("ab", traces, strict=True):
        number = next(n for n, request in enumerate(trace.requests) if request["id"] == flipped.id)
        generated, words = trace.generated(lens=False), trace.texts()
        tokens = generated.token[generated.request == number].tolist()
        at = flipped.flip.index
        texts.append(
            f"{flipped.id} in {side}: {shown(''.join(words[t] for t in tokens[max(0, at - before) : at]))} then "
            f"{shown(''.join(words[t] for t in tokens[at : at + after]))}"
        )
    return texts[0], texts[1]


def text(cases: Iterable[DemoCase], *, width: int = 100) -> Iterator[str]:
    """The demonstration as text, piece by piece as the cases are run."""
    yield _prose(INTRODUCTION, width)
    flipped = False
    for number, case in enumerate(cases, 1):
        flipped = flipped or case.flips
        yield f"\n{'-' * width}\n{number}. {case.title}; anchor {shown(case.anchor)}\n\n"
        yield divergence_text(case.divergence, width=width)
        if case.excerpts is not None:
            yield "\n" + "\n".join(case.excerpts) + "\n"
    yield f"\n{'-' * width}\n"
    if not flipped:
        yield _prose(
            "No token flipped in any of these runs on this machine, although the profile changed the kernels: the margins "
            "were all larger than the difference. That happens; the last bits depend on the processor.",
            width,
        )
    yield OWN


def _prose(words: str, width: int) -> str:
    return textwrap.fill(words, width, break_long_words=False, break_on_hyphens=False) + "\n"


def cases_json(cases: Iterable[DemoCase]) -> dict[str, Any]:
    """The demonstration as JSON values; each divergence has the schema of ``compare --json``."""
    return {
        "schema": SCHEMA,
        "cases": [
            {"title": case.title, "anchor": case.anchor, "divergence": to_json(case.divergence)}
            for case in cases
        ],
    }
