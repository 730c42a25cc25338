"""Generated tokens one by one, and what each layer preferred at the flip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Generated, Lens, Trace

from .divergence import Flip
from .requests import RequestPair, Steps


@dataclass(frozen=True)
class TokenPoint:
    """A generated token: ``index`` counts a request's tokens from 0, ``position`` is that of the row that chose it.

    ``margin`` is the top logit minus the second one. ``delta`` is by how much the other run moved the difference of
    these two logits, None where it cannot say, as after the flip, and in tokens of run b.
    """

    index: int
    position: int
    token: int
    text: str
    margin: float | None
    delta: float | None


@dataclass(frozen=True)
class LensPoint:
    """At the flip, in layer ``layer``: the logit of run a's token minus that of run b's, in each run.

    None where a run did not record both logits.
    """

    layer: int
    a: float | None
    b: float | None


def token_points(
    request: RequestPair, texts: tuple[Mapping[int, str], Mapping[int, str]]
) -> tuple[tuple[TokenPoint, ...], tuple[TokenPoint, ...]]:
    """All tokens of a request in run a and in run b; ``texts`` are each run's token texts by id."""
    a, b = request.steps_a, request.steps_b
    moved = np.full(len(a), np.nan)
    common = a.moved(b)
    moved[: len(common)] = np.where(a.position[: len(common)] <= request.limit, common, np.nan)
    return _points(a, texts[0], moved), _points(b, texts[1], np.full(len(b), np.nan))


def _points(steps: Steps, texts: Mapping[int, str], moved: NDArray[np.float64]) -> tuple[TokenPoint, ...]:
    columns = steps.position, steps.token, steps.margins(), moved
    return tuple(
        TokenPoint(index, position, token, texts.get(token, ""), _known(margin), _known(delta))
        for index, (position, token, margin, delta) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        )
    )


def _known(number: float) -> float | None:
    return None if np.isnan(number) else number


def lens_points(a: Trace, b: Trace, request: RequestPair, flip: Flip | None) -> tuple[LensPoint, ...]:
    """Empty without a flip of two tokens, and where neither run recorded its layers' logits."""
    if flip is None or flip.a.token is None or flip.b.token is None:
        return ()
    tokens = flip.a.token, flip.b.token
    sides = [
        _preference(trace, number, flip.index, tokens) for trace, number in ((a, request.a), (b, request.b))
    ]
    layers = max(map(len, sides))
    padded = [[*side, *[None] * (layers - len(side))] for side in sides]
    return tuple(LensPoint(layer, *both) for layer, both in enumerate(zip(*padded, strict=True)))


def _preference(trace: Trace, request: int, index: int, tokens: tuple[int, int]) -> list[float | None]:
    """By layer the logit of one token minus that of the other at a step; empty where the trace has none."""
    for shard in reversed(trace.shards):
        generated = shard.generated(lens=False)
        if generated is None:
            continue
        found = np.flatnonzero((generated.request == request) & (generated.index == index))
        if len(found):
            whole = shard.generated()
            assert whole is not None
            return [] if whole.lens is None else _by_layer(whole, whole.lens, int(found[-1]), tokens)
    return []


def _by_layer(generated: Generated, lens: Lens, row: int, tokens: tuple[int, int]) -> list[float | None]:
    contested = generated.top_ids[row, :2].tolist()
    found = []
    for ids, logits, both in zip(lens.top_ids[row], lens.top_logits[row], lens.contested[row], strict=True):
        known = dict(zip(ids.tolist(), logits.tolist(), strict=True))
        known |= dict(zip(contested, both.tolist(), strict=False))
        first, second = (known.get(token) for token in tokens)
        found.append(None if first is None or second is None else first - second)
    return found
