"""Traces of engines that show less than mlx: tokens with or without log-probabilities, texts alone, taps without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from detdiff.trace import Generated, Rows, Site, Trace, TraceWriter

PROMPT = (1, 2, 3)
LACKS = {"sites": "it gives tokens alone", "cache": "it gives tokens alone"}


@dataclass(frozen=True)
class Answered:
    """One request's answer: ``top`` has for each token its (id, logit) pairs, highest first; None: none were recorded."""

    tokens: Sequence[int] = ()
    top: Sequence[Sequence[tuple[int, float]]] | None = None
    text: str | None = None
    prompt: Sequence[int] = PROMPT
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})


def answers(path: Path, *given: Answered, **header: Any) -> Trace:
    """A trace without sites, of requests r0, r1, …; one forward for each generated token of each request."""
    given = tuple(
        each if each.text is None else replace(each, tokens=[ord(c) for c in each.text]) for each in given
    )
    unknown = {} if any(each.top is not None for each in given) else {"logits": "it gives tokens alone"}
    head = {
        "engine": {"name": "mine:engine", "settings": {}},
        "lacks": {**LACKS, **unknown},
        "sites": [],
        "requests": [
            {"id": f"r{n}", "tokens": list(each.prompt), "max_tokens": 64, "sampling": dict(each.sampling)}
            for n, each in enumerate(given)
        ],
        **header,
    }
    with TraceWriter(path, head) as writer:
        for number, each in enumerate(given):
            for index, token in enumerate(each.tokens):
                start = 0 if index == 0 else len(each.prompt) + index - 1
                count = len(each.prompt) if index == 0 else 1
                row = {"request": number, "slot": 0, "start": start, "count": count, "phase": "decode"}
                line = {
                    "phase": "decode",
                    "layout": "padded",
                    "shape": [1, count],
                    "rows": [row],
                    "caches": [],
                }
                made = forwards(writer) + 1
                writer.forward({"forward": made, **line, "plan": writer.plan([])})
                top = () if each.top is None else each.top[index]
                writer.generated(
                    Generated(
                        *(np.array([n], np.int32) for n in (number, index, token, made)),
                        np.array([len(each.prompt) - 1 + index], np.int32),
                        np.array([[id for id, _ in top]], np.int32).reshape(1, len(top)),
                        np.array([[logit for _, logit in top]], np.float32).reshape(1, len(top)),
                    )
                )
        writer.finish()
    return Trace.open(path)


def forwards(writer: TraceWriter) -> int:
    """The number of the last logged forward."""
    return writer._limits.forwards - 1


def taps(
    path: Path, outputs: Mapping[str, Sequence[int]], first: int = 0, inputs: bool = False, **header: Any
) -> Trace:
    """A trace of one request in one forward: each site's digest at each position from ``first`` on, no cache."""
    ports = ("in",) if inputs else ()
    count = len(next(iter(outputs.values())))
    head = {
        "lacks": {"cache": "it has no taps of its cache", "inputs": "it taps outputs", "logits": "no"},
        "sites": [Site(name, "tap", None, ports, ("out",), None) for name in outputs],
        "requests": [
            {"id": "r0", "tokens": list(range(count)), "max_tokens": 1, "sampling": {"temperature": 0}}
        ],
        **header,
    }
    positions = np.arange(first, count, dtype=np.int32)
    n = len(positions)
    with TraceWriter(path, head) as writer:
        row = {"request": 0, "slot": 0, "start": first, "count": n, "phase": "prefill"}
        line = {"phase": "prefill", "layout": "padded", "shape": [1, n], "rows": [row], "caches": []}
        writer.forward({"forward": 0, **line, "plan": writer.plan([])})
        zeros = np.zeros(n, np.int32)
        digests = np.array([list(each)[first:] for each in outputs.values()], np.uint64).T
        writer.rows(
            Rows(zeros, positions, zeros, zeros, zeros, positions, tuple(range(len(outputs))), digests, {})
        )
        one = np.array([0], np.int32)
        writer.generated(
            Generated(one, one, np.array([7], np.int32), one, np.array([count - 1], np.int32), *tops())
        )
        writer.finish()
    return Trace.open(path)


def tops() -> tuple[Any, Any]:
    """The top logits of one token whose engine gives none."""
    return np.zeros((1, 0), np.int32), np.zeros((1, 0), np.float32)
