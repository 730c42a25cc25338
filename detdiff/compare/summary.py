"""Many requests summed up: how many flip, how soon, how far log-probabilities drift, and at which margins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Trace

from .tokens import RequestPair, pair_requests

_Z: Final = 1.959963984540054
"""The 97.5 % point of the standard normal distribution."""


def wilson(count: int, of: int) -> tuple[float, float]:
    """The 95 % interval of Wilson's for a share of ``count`` out of ``of``; (0, 1) of nothing.

    Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    if not of:
        return 0.0, 1.0
    share, z2 = count / of, _Z * _Z
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = _Z / (1 + z2 / of) * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class ArmSummary:
    """Pairs of runs of the same requests, summed up.

    ``asked`` is how many requests were sent at once (1: one after the other) and ``most`` how many were seen to run together,
    None where that is not known. ``requests`` counts compared pairs of answers, ``differing`` those with any other token or
    number, ``flipped`` those with another token, of which ``interval`` is the 95 % interval of the share. ``first`` are the
    indices of the first other token, ascending. ``numbers`` log-probabilities of equal tokens were compared up to the flips as
    float32, ``moved`` of them differ, by ``largest`` at most and ``mean`` on average (of all), both absolute. ``margins_at_flips``
    and ``margins_elsewhere`` are [smallest, median, largest] of the first run, None where none is known. ``characters`` says that tokens are
    characters of a text. ``left_out`` requests could not be compared; ``cached_a`` and ``cached_b`` are prompt tokens from a prefix cache.
    """

    name: str
    asked: int
    most: int | None
    met: bool | None
    requests: int
    differing: int
    flipped: int
    interval: tuple[float, float]
    first: tuple[int, ...]
    numbers: int
    moved: int
    largest: float
    mean: float
    margins_at_flips: tuple[float, float, float] | None
    margins_elsewhere: tuple[float, float, float] | None
    characters: bool
    left_out: int
    cached_a: int | None
    cached_b: int | None

    @property
    def identical(self) -> bool:
        """Whether every answer was compared and is equal."""
        return bool(self.requests) and not (self.differing or self.left_out)


@dataclass(frozen=True)
class Summary:
    """Runs against runs: first each side against itself (``repeats``), then a against b (``arms``), by how many at once."""

    repeats: tuple[ArmSummary, ...]
    arms: tuple[ArmSummary, ...]
    notes: tuple[str, ...]

    @property
    def repeatable(self) -> bool:
        """Whether no run differs from its own repetition; True without any."""
        return all(arm.identical for arm in self.repeats)

    @property
    def unmet(self) -> bool:
        """Whether requests that were to run together did not, so that equality says nothing."""
        return any(arm.met is False for arm in self.arms)


def summed(name: str, asked: int, runs: Sequence[tuple[Trace, Trace]]) -> ArmSummary:
    """One arm: the runs of each pair are compared. Raises NothingComparable where a pair shares no request."""
    pairs: list[RequestPair] = []
    left_out = 0
    for a, b in runs:
        found = pair_requests(a, b)
        pairs += found.pairs
        left_out += len(found.not_compared)
    moved = [_moves(pair) for pair in pairs]
    every = np.concatenate([*moved, np.zeros(0)])
    flips = sorted(pair.flip for pair in pairs if pair.flip is not None)
    together = [_together(b) for _, b in runs]
    at, elsewhere = _margins(pairs)
    return ArmSummary(
        name=name,
        asked=asked,
        most=min((most for most, _ in together if most is not None), default=None),
        met=False if any(met is False for _, met in together) else next((met for _, met in together), None),
        requests=len(pairs),
        differing=sum(
            pair.flip is not None or bool((moves != 0).any())
            for pair, moves in zip(pairs, moved, strict=True)
        ),
        flipped=len(flips),
        interval=wilson(len(flips), len(pairs)),
        first=tuple(flips),
        numbers=len(every),
        moved=int((every != 0).sum()),
        largest=float(every.max(initial=0.0)),
        mean=float(every.mean()) if len(every) else 0.0,
        margins_at_flips=_spread(at),
        margins_elsewhere=_spread(elsewhere),
        characters=any("tokens" in trace.lacks for pair in runs for trace in pair),
        left_out=left_out,
        cached_a=_cached(a for a, _ in runs),
        cached_b=_cached(b for _, b in runs),
    )


def _moves(pair: RequestPair) -> NDArray[np.float64]:
    """How far each log-probability of a token that both runs recorded moved, up to the flip; absolute, float64 [n].

    Bits that differ count, so that a move is never less than the smallest number.
    """
    steps = pair.common if pair.flip is None else min(pair.common, pair.flip + 1)
    a, b = pair.steps_a, pair.steps_b
    step, i, j = np.nonzero(a.top_ids[:steps, :, None] == b.top_ids[:steps, None, :])
    x, y = a.top_logits[step, i], b.top_logits[step, j]
    finite = np.isfinite(x) & np.isfinite(y)
    differs = x.view(np.uint32) != y.view(np.uint32)
    with np.errstate(invalid="ignore"):
        moves = np.abs(x.astype(np.float64) - y.astype(np.float64))
    moves = np.where(differs, np.maximum(moves, np.finfo(np.float64).tiny), 0.0)
    found: NDArray[np.float64] = moves[finite]
    return found


def _margins(pairs: Sequence[RequestPair]) -> tuple[list[float], list[float]]:
    """Margins of the first run at its flips, and at all other tokens before them."""
    at: list[float] = []
    elsewhere: list[float] = []
    for pair in pairs:
        margins = pair.steps_a.margins()
        end = pair.common if pair.flip is None else pair.flip
        elsewhere += margins[:end].tolist()
        if pair.flip is not None and pair.flip < len(margins):
            at.append(float(margins[pair.flip]))
    known = [[each for each in some if math.isfinite(each)] for some in (at, elsewhere)]
    return known[0], known[1]


def _spread(numbers: Sequence[float]) -> tuple[float, float, float] | None:
    if not numbers:
        return None
    return float(min(numbers)), float(np.median(numbers)), float(max(numbers))


def _together(trace: Trace) -> tuple[int | None, bool | None]:
    """How many requests were seen to run together, and whether those that should did."""
    found = trace.header["times"].get("together")
    if not isinstance(found, dict):
        return (1, None) if trace.scenario.get("schedule") == "serial" else (None, None)
    return (int(found["most"]) if found.get("met") is not None else None), not trace.unmet


def _cached(traces: Iterable[Trace]) -> int | None:
    """Prompt tokens that came from a prefix cache; None where no run says."""
    total = None
    for trace in traces:
        server = trace.header.get("server")
        counts = server.get("cached_tokens") if isinstance(server, dict) else None
        if isinstance(counts, dict) and counts:
            total = (total or 0) + sum(counts.values())
    return total
