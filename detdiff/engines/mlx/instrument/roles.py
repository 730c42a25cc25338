"""Whom a session works with: who records what it saw, who splits a packed forward, who steers the kernel paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from detdiff_kernels import Call

from .forward import Forward
from .paths import Place, Span, Taken
from .sites import Arrays, SiteMap

Attend = Callable[[range | None, Any, Any], mx.array]
"""Runs attention with the given arguments; the range are the columns of a packed forward that it is for."""


class Packing(Protocol):
    """How a packed forward runs what must be done per request."""

    def rope(self, native: Callable[..., Any], args: Any, kw: Any) -> mx.array: ...
    def attention(self, attend: Attend, args: Any, kw: Any) -> mx.array: ...


class Sink(Protocol):
    """Where a session puts what the taps saw."""

    def site(self, key: str, kind: str, inputs: Arrays, outputs: Arrays, parent: str | None) -> None: ...


class Recording(Sink, Protocol):
    """A sink that follows forwards from begin to end."""

    def begin(self, forward: Forward, cache: Sequence[Any]) -> None: ...
    def call(self, key: str, taken: Taken) -> None: ...
    def cache_call(
        self, key: str, keys: mx.array, values: mx.array, calls: list[tuple[Any, Any]]
    ) -> None: ...
    def mask(self, layer: int | None, kind: str) -> None: ...
    def block_done(self, key: str) -> None: ...
    def end(self, forward: Forward, logits: mx.array) -> None: ...


class Steering(Protocol):
    """Takes calls onto other paths than the plan's, and may ask what yet others would have given."""

    doubts: bool
    """Whether ``others`` has other paths than ``spans`` had for the last call."""

    def begin(self, sites: SiteMap, forward: Forward) -> None: ...
    def spans(self, place: Place, call: Call, planned: tuple[Span, ...]) -> tuple[Span, ...]: ...
    def others(self, place: Place, call: Call, planned: tuple[Span, ...]) -> tuple[Span, ...]: ...
    def compare(self, place: Place, taken: mx.array, other: mx.array) -> None: ...
