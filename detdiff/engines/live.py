"""A run whose requests come while it runs: what an engine that can do this gives, and what it is asked for.

Everything but ``encode``, ``encode_messages`` and ``decode`` is called from one thread, between forwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.base import highest
from detdiff.scenario import Request


@dataclass(frozen=True)
class TokenScores:
    """Natural log-probabilities, float32 as Python floats, before any sampling setting: of the chosen token, and of the
    likeliest, which are (token id, log-probability), best first, equal ones by lower id."""

    chosen: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, logits: NDArray[np.float32], token: int, top: int) -> TokenScores:
        """From the logits float32 [vocabulary] that chose ``token``."""
        largest = logits.max()
        total = largest + np.float32(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
        likeliest: tuple[tuple[int, float], ...] = ()
        if top:
            ids, found = highest(logits, top)
            likeliest = tuple(zip(ids.tolist(), (found - total).tolist(), strict=True))
        return cls(float(logits[token] - total), likeliest)


@dataclass(frozen=True)
class LiveToken:
    """Token ``index`` of a request, from 0 on: its id, why it is the last (``stop``: a stop token, ``length``: max_tokens;
    None: it is not), and log-probabilities where they were asked for."""

    request: str
    index: int
    token: int
    finished: str | None
    scores: TokenScores | None


class LiveRun(Protocol):
    """An engine that runs and takes requests between its forwards; entered before the first."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """The model, as in a trace's header."""

    @property
    def context(self) -> int | None:
        """How many positions the model was made for, None where it does not say."""

    @property
    def recorded(self) -> bool:
        """Whether a trace is written, which names every request."""

    @property
    def steps(self) -> int:
        """Forwards of the model so far: what an arrival counts."""

    @property
    def active(self) -> int:
        """Requests that have rows in the next forward."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Raises DetdiffError."""

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a chat, ready for the answer. Raises DetdiffError."""

    def decode(self, tokens: Sequence[int], special: bool) -> str:
        """The text of token ids, with ``special`` tokens or without them."""

    def check(self, request: Request) -> None:
        """Raises DetdiffError for a request, of token ids, that the model cannot run."""

    def admit(self, request: Request, top: int | None) -> int:
        """Begin a request that ``check`` has passed; how many of its prompt's tokens a cache holds already. ``top`` is how many
        likeliest tokens come with each, 0 the chosen one alone, None no log-probabilities. Ids are not repeated."""

    def step(self) -> list[LiveToken]:
        """Run one forward; the tokens that it gave. Raises DetdiffError."""

    def end(self, request: str, *, cancelled: bool) -> int:
        """End a request before its end, as a cancelled one or at its max_tokens; how many tokens it keeps. One without any runs
        to its first and keeps that, which no step tells any more: so a scenario can say what happened."""

    def idle(self) -> None:
        """There is no request: what was held back for the next forward may be finished."""

    def finish(self, told: Mapping[str, Any]) -> None:
        """No request comes any more; finish the trace, with these keys in its header, ``notes`` and ``times`` beside its own."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...
