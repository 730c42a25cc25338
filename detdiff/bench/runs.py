"""One timed run, and its figures: throughput, times to the first token and between tokens, goodput; their spread over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

import numpy as np


@dataclass
class TimedRun:
    """One run: ``seconds`` in all, and for each request when it came and when each of its tokens did, in seconds from the start.
    ``answers`` are the tokens themselves, where the engine says them by id."""

    seconds: float
    came: list[float]
    tokens: list[list[float]]
    answers: list[list[int]] = field(default_factory=list)

    @cached_property
    def figures(self) -> RunFigures:
        """Of the run when it is over."""
        return RunFigures.of(self)


@dataclass(frozen=True)
class Goodput:
    """Limits in milliseconds; a request is good where it keeps all that are given."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None


@dataclass(frozen=True)
class RunFigures:
    """Of one run. Times in milliseconds, by request (``itl`` by token): to the first token, between tokens after it, whole.
    ``lengths`` are of the answers, in tokens."""

    tokens: int
    seconds: float
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    itl: tuple[float, ...]
    e2el: tuple[float, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, run: TimedRun) -> RunFigures:
        """Requests without a token are left out."""
        pairs = [(came, each) for came, each in zip(run.came, run.tokens, strict=True) if each]
        return cls(
            sum(map(len, run.tokens)),
            run.seconds,
            tuple((each[0] - came) * 1000 for came, each in pairs),
            tuple((each[-1] - each[0]) / (len(each) - 1) * 1000 for _, each in pairs if len(each) > 1),
            tuple(float(gap) * 1000 for _, each in pairs for gap in np.diff(each)),
            tuple((each[-1] - came) * 1000 for came, each in pairs),
            tuple(len(each) for _, each in pairs),
        )

    @property
    def throughput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def good(self, limits: Goodput) -> float:
        """Requests a second that keep the limits; one of a single token keeps any of ``tpot``, as vLLM counts it."""
        keeps = np.ones(len(self.e2el), bool)
        for name in ("ttft", "e2el"):
            limit = getattr(limits, name)
            if limit is not None:
                keeps &= np.array(getattr(self, name)) <= limit
        if limits.tpot is not None:
            paces = iter(self.tpot)
            keeps &= np.array([next(paces) if n > 1 else 0.0 for n in self.lengths]) <= limits.tpot
        return float(keeps.sum()) / self.seconds


@dataclass(frozen=True)
class Spread:
    """The median over rounds, and the least and largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))
