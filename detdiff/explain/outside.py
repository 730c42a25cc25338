"""What can be seen of answers alone: whether a difference looks as rounding would, and whose answer one is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from detdiff.compare.tokens import RequestPair, Steps, pair_requests
from detdiff.errors import NothingComparable
from detdiff.trace import Trace

FAR: Final = 0.7
"""Log-probabilities that move further than this are not taken for rounding. The largest movement that was seen of rounding alone,
over llama.cpp, transformers, OpenVINO and CTranslate2 in their lowest precisions, is 0.65."""
_ENOUGH: Final = 3
"""Answers that are equal in fewer steps than this may be equal by chance."""


@dataclass(frozen=True)
class AnswerDifferences:
    """Answers of two runs side by side: ``requests`` compared, ``flips`` of them. Log-probabilities of equal tokens moved by
    ``before`` at most before the flips (None: none is known) and by ``largest`` with the flips' own steps. The flip that was
    least likely by that has the ``margin`` and is of ``request`` at ``index``."""

    requests: int
    flips: int
    before: float | None
    largest: float | None
    margin: float | None = None
    request: str | None = None
    index: int | None = None

    @property
    def far(self) -> bool:
        """Whether it is further than rounding was ever seen to go."""
        return max(self.largest or 0.0, self.margin or 0.0) > FAR

    @property
    def rounding(self) -> bool | None:
        """Whether it looks as rounding would: small movements, and flips only where two tokens were that near. None where
        there are no numbers to say it by."""
        if self.far:
            return False
        if self.largest is None or (self.flips and (self.margin is None or self.before is None)):
            return None
        return self.margin is None or self.margin <= 2 * (self.before or 0.0)

    @property
    def said(self) -> str:
        """The numbers in words."""
        if self.largest is None:
            return f"{self.flips} of {self.requests} answers flip, and no log-probabilities are known"
        flips = f"{self.flips} of {self.requests} answers flip"
        if self.margin is not None:
            flips += f", where the margin is {self.margin:.3g} at most (token {self.index} of {self.request})"
        return f"log-probabilities move by {self.largest:.3g} at most up to the flips and at them; {flips}"


def differences(a: Trace, b: Trace, only: str | None = None) -> AnswerDifferences | None:
    """The answers of two runs, or those to one request; None where they share none."""
    try:
        pairs = pair_requests(a, b, None if only is None else {only}).pairs
    except NothingComparable:
        return None
    moves = [_largest(pair, len(pair.steps_a)) for pair in pairs]
    before = [_largest(pair, pair.common if pair.flip is None else pair.flip) for pair in pairs]
    flips = [(_margin(pair), pair) for pair in pairs if pair.flip is not None]
    known = [(margin, pair) for margin, pair in flips if margin is not None]
    worst = max(known, key=lambda each: each[0], default=None)
    place = (None, None, None) if worst is None else (worst[0], worst[1].id, worst[1].flip)
    return AnswerDifferences(len(pairs), len(flips), _most(before), _most(moves), *place)


def _most(found: Iterable[float | None]) -> float | None:
    return max((each for each in found if each is not None), default=None)


def _largest(pair: RequestPair, steps: int) -> float | None:
    """The largest movement of tokens that both runs recorded in the first ``steps``, up to the flip's own at most."""
    steps = min(steps, pair.common if pair.flip is None else pair.flip + 1)
    a, b = pair.steps_a, pair.steps_b
    step, i, j = np.nonzero(a.top_ids[:steps, :, None] == b.top_ids[: min(steps, len(b)), None, :])
    if not len(step):
        return None
    with np.errstate(invalid="ignore"):
        moved = np.abs(a.top_logits[step, i].astype(np.float64) - b.top_logits[step, j])
    return float(np.nanmax(np.where(np.isfinite(moved), moved, 0.0)))


def _margin(pair: RequestPair) -> float | None:
    """By how much the flipped token was chosen, in the run where it was by more."""
    assert pair.flip is not None
    margins = [
        float(steps.margins()[pair.flip]) for steps in (pair.steps_a, pair.steps_b) if pair.flip < len(steps)
    ]
    known = [each for each in margins if np.isfinite(each)]
    return max(known, default=None)


@dataclass(frozen=True)
class BorrowedAnswer:
    """``request`` got ``what`` (text, or log-probabilities) of ``other`` for ``steps`` steps."""

    request: str
    other: str
    what: str
    steps: int


def borrowed(a: Trace, b: Trace) -> Iterator[BorrowedAnswer]:
    """Answers in ``b`` that are another request's in ``a``, and not their own there."""
    alone, together = ({id: steps for id, steps in _answers(trace)} for trace in (a, b))
    for id, got in together.items():
        own = alone.get(id)
        if own is None:
            continue
        for other, theirs in alone.items():
            if other == id:
                continue
            count = min(len(got), len(theirs))
            if count < _ENOUGH or len(got) != len(theirs):
                continue
            # Prompts that are the same have either answer by right: which of two it is follows from their places in a batch.
            if not _apart(own, theirs):
                continue
            # Answers of few words may be alike by themselves: it is the numbers behind the first token that tell whose it is.
            near, far = _distance(got, theirs), _distance(got, own)
            mine = near is not None and far is not None and far > FAR and near <= far / 4
            if (
                mine
                and np.array_equal(got.token, theirs.token)
                and not np.array_equal(own.token, theirs.token)
            ):
                yield BorrowedAnswer(id, other, "text", count)
                break
            steps = _same_scores(got, theirs)
            if steps >= _ENOUGH and _same_scores(own, theirs) < steps and _same_scores(got, own) < steps:
                whole = np.array_equal(got.token, theirs.token) and not np.array_equal(
                    own.token, theirs.token
                )
                yield BorrowedAnswer(id, other, "text" if whole else "log-probabilities", steps)
                break


def _answers(trace: Trace) -> Iterator[tuple[str, Steps]]:
    generated = trace.generated(lens=False)
    for number, request in enumerate(trace.requests):
        yield str(request["id"]), Steps.of(generated, number)


def _distance(one: Steps, other: Steps, step: int = 0) -> float | None:
    """The largest difference of the log-probabilities of the same tokens at a step, infinite where none is likely in both; None
    without any."""
    if not (len(one) > step < len(other) and one.top_logits.shape[1] and other.top_logits.shape[1]):
        return None
    same = one.top_ids[step][:, None] == other.top_ids[step][None, :]
    i, j = np.nonzero(same)
    if not len(i):
        return float("inf")
    with np.errstate(invalid="ignore"):
        moved = np.abs(one.top_logits[step][i].astype(np.float64) - other.top_logits[step][j])
    return float(np.nanmax(np.where(np.isfinite(moved), moved, 0.0)))


def _apart(one: Steps, other: Steps) -> bool:
    """Whether two answers are further from each other than rounding goes, up to their first other token: after it the same prompt
    goes on differently, too."""
    count = min(len(one), len(other))
    flip = int(np.argmax(np.append(one.token[:count] != other.token[:count], True)))
    moved = (_distance(one, other, step) for step in range(min(flip + 1, count)))
    return any(each is not None and each > FAR for each in moved)


def _same_scores(one: Steps, other: Steps) -> int:
    """Leading steps whose recorded log-probabilities are bit-equal; 0 where they hold too few different numbers to tell."""
    if not one.top_logits.shape[1] or one.top_logits.shape[1] != other.top_logits.shape[1]:
        return 0
    count = min(len(one), len(other))
    same = one.top_logits[:count].view(np.uint32) == other.top_logits[:count].view(np.uint32)
    steps = int(np.argmin(np.append(same.all(axis=1), False)))
    numbers = one.top_logits[:steps]
    # Tokens that are all but certain have the same log-probability everywhere.
    telling = np.unique(numbers[np.isfinite(numbers) & (np.abs(numbers) > 1e-3)])
    return steps if len(telling) >= _ENOUGH else 0


def cached_tokens(trace: Trace) -> dict[str, int] | None:
    """Prompt tokens of each request that came from a prefix cache; None where the server does not say."""
    server = trace.header.get("server")
    counts = server.get("cached_tokens") if isinstance(server, dict) else None
    return (
        {str(id): int(count) for id, count in counts.items()} if isinstance(counts, dict) and counts else None
    )


def engine_name(scenario: Any) -> str:
    """The engine that a trace's scenario names."""
    given = scenario.get("engine", "mlx")
    return str(given.get("name", "mlx")) if isinstance(given, dict) else str(given)
