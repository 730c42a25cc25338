"""What a comparison says of speculation: frozen dataclasses, part of the answer."""

from __future__ import annotations

from dataclasses import dataclass


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
