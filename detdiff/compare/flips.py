"""The part of a comparison's answer about tokens, texts and scores: frozen dataclasses, as in `divergence`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UlpBucket:
    """``count`` differing elements with ``first`` <= ULP distance <= ``last``."""

    first: int
    last: int
    count: int


@dataclass(frozen=True)
class Magnitude:
    """How far two arrays of values are apart.

    ULP, absolute and relative figures are over elements finite in both runs; ``non_finite`` counts the others, which
    are never called equal unless their bits are. ``differing`` counts elements whose bits differ, so -0.0 against
    0.0 is differing at 0 ULP. Figures are None where dtypes or shapes differ or nothing finite is left; ``kl`` is
    in nats and given for logits only.
    """

    dtype_a: str
    dtype_b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    elements: int
    differing: int
    nan_a: int
    nan_b: int
    inf_a: int
    inf_b: int
    non_finite: int
    max_ulp: int | None
    mean_ulp: float | None
    ulp_histogram: tuple[UlpBucket, ...]
    max_abs: float | None
    max_rel: float | None
    worst: int | None
    cosine: float | None
    kl: float | None


@dataclass(frozen=True)
class Proposed:
    """One verification's proposals, and what the target chose after each of its rows."""

    proposals: tuple[int, ...]
    choices: tuple[int, ...]


@dataclass(frozen=True)
class Verified:
    """Where one generated token came from: a forward's verification, its place in it, and both models' tokens there.

    ``proposal`` is None for a token after the last proposal.
    """

    forward: int
    block: Proposed
    place: int
    proposal: int | None
    choice: int | None


@dataclass(frozen=True)
class Acceptance:
    """A run's proposals of one request, summed over its verifications, and the engine's own counts.

    ``own_*`` and ``agrees`` are None where the trace has no count by the engine.
    """

    verifications: int
    proposed: int
    accepted: int
    own_proposed: int | None
    own_accepted: int | None
    agrees: bool | None


@dataclass(frozen=True)
class Verification:
    """Speculation in both runs, over the ``tokens`` up to the flip that a verification gave in both.

    The first token for which another one was proposed, or chosen by the target, is named by its index. ``flip_*`` is how
    the flip's own token came about. ``a`` and ``b`` are None for a run without a draft.
    """

    tokens: int
    proposals_equal: bool | None
    first_other_proposal: int | None
    choices_equal: bool | None
    first_other_choice: int | None
    flip_a: Verified | None
    flip_b: Verified | None
    a: Acceptance | None
    b: Acceptance | None


@dataclass(frozen=True)
class TopToken:
    """One of the top-k tokens of a step."""

    token: int
    text: str
    logit: float


@dataclass(frozen=True)
class TokenChoice:
    """What one run chose at the flip; ``token`` is None where that run had already stopped.

    ``logit`` is None where the token is not among the recorded top-k. ``margin`` is top-1 minus top-2 logit.
    """

    token: int | None
    text: str
    logit: float | None
    margin: float | None
    top: tuple[TopToken, ...]


@dataclass(frozen=True)
class Flip:
    """The first generated token that differs; ``kind`` is ``token``, or ``length`` where one run stopped earlier.

    ``position`` is that of the row that chose the token. Its forwards are None on a side that had stopped.
    """

    index: int
    kind: str
    position: int
    forward_a: int | None
    forward_b: int | None
    a: TokenChoice
    b: TokenChoice
    magnitude: Magnitude | None


@dataclass(frozen=True)
class TextFlip:
    """The flip of two texts without token ids: its character, counted from 0; ``a`` and ``b`` go on from it."""

    index: int
    a: str
    b: str


@dataclass(frozen=True)
class ScoreDifference:
    """Logits, or log-probabilities, of the same tokens at the same step, up to the flip.

    ``compared`` and ``differing`` count them; ``index`` is the first step with one that differs, there of ``token``, in each
    run. ``max_abs`` and ``max_ulp`` are over all, None where none is finite; ULPs are those of ``dtype``, the narrowest that
    holds all of them, as a trace has float32 whatever was computed; for scores that of the logits.
    """

    compared: int
    differing: int
    index: int | None
    token: int | None
    a: float | None
    b: float | None
    max_abs: float | None
    max_ulp: int | None
    dtype: str


@dataclass(frozen=True)
class ScoredText:
    """The log-probabilities of a text's ``tokens`` given tokens, where both runs scored.

    ``a`` and ``b`` are their sums, ``likeliest_a`` and ``likeliest_b`` count those that no other token is above; ``max_abs`` is
    the largest difference, that of token ``index`` (None where none differs).
    """

    tokens: int
    a: float
    b: float
    likeliest_a: int
    likeliest_b: int
    max_abs: float
    index: int | None


@dataclass(frozen=True)
class EmbeddingDifference:
    """A request's vectors of ``width`` numbers, of which ``differing`` are not bit-equal; ``max_abs`` and ``cosine`` are None
    where not all are finite."""

    width: int
    differing: int
    max_abs: float | None
    cosine: float | None
    not_finite_a: int
    not_finite_b: int


@dataclass(frozen=True)
class NotFiniteLogits:
    """The first token of a run whose logits are not finite, and how many of those recorded are NaN and infinite."""

    run: str
    index: int
    nan: int
    inf: int
