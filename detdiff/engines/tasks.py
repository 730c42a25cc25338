"""What a run is for where it does not generate: log-probabilities of given tokens, and one vector for each prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import EngineRefuses
from detdiff.scenario import EMBED, SCORE, Scenario
from detdiff.trace import Embeddings

from .base import EMBEDS, SCORES, Engine, highest

_NEEDS = {SCORE: SCORES, EMBED: EMBEDS}


def check_task(scenario: Scenario, engine: Engine) -> None:
    """Raises EngineRefuses for a task that the engine has no capability for."""
    needed = _NEEDS.get(scenario.task)
    if needed is not None and needed not in engine.capabilities:
        raise EngineRefuses(
            f"task is {scenario.task}, and {engine.lacks(needed)}. Use an engine that can, such as mlx or transformers, or leave "
            "task out."
        )


def scores(
    logits: NDArray[np.float32], given: Sequence[int], count: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and log-probabilities [rows, count] of the likeliest tokens of logits [rows, vocabulary], and always of ``given``.

    Each row by itself, in float64, so that no other row has a part in it. A given token that is none of the likeliest stands
    in the place of the last of them.
    """
    ids, found = [], []
    for row, token in zip(logits.astype(np.float64), given, strict=True):
        highest_logit = row.max()
        with np.errstate(invalid="ignore"):
            all_scores = (row - highest_logit - np.log(np.exp(row - highest_logit).sum())).astype(np.float32)
        best, _ = highest(all_scores, count)
        if token not in best:
            best[-1] = token
        ids.append(best.astype(np.int32))
        found.append(all_scores[best])
    return np.stack(ids), np.stack(found)


class Pooling:
    """Last hidden states of requests, row by row as they come, made into one vector each.

    ``kind`` is mean, first or last; ``lengths`` are the rows of each request. A mean is summed in float64 in the order of
    positions, so that it does not depend on how the rows were batched.
    """

    def __init__(self, kind: str, lengths: Sequence[int]) -> None:
        self._kind, self._lengths = kind, lengths
        self._sums: dict[int, NDArray[np.float64]] = {}

    def add(
        self, requests: NDArray[np.int64], positions: NDArray[np.int64], hidden: NDArray[np.float32]
    ) -> Embeddings:
        """Take rows [n], whose last hidden states are [n, width]; the vectors of the requests that are whole now."""
        whole: list[int] = []
        for request, position, row in zip(requests.tolist(), positions.tolist(), hidden, strict=True):
            end = position == self._lengths[request] - 1
            wide = row.astype(np.float64)
            if self._kind == "mean" and position:
                self._sums[request] += wide
            elif self._kind == "mean" or (end if self._kind == "last" else position == 0):
                self._sums[request] = wide
            if end:
                whole.append(request)
        count = np.array([self._lengths[n] if self._kind == "mean" else 1 for n in whole], np.float64)
        width = hidden.shape[-1]
        vectors = np.array([self._sums.pop(n) for n in whole]).reshape(len(whole), width) / count[:, None]
        return Embeddings(np.array(whole, np.int32), vectors.astype(np.float32))
