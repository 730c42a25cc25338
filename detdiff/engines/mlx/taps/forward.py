"""One forward pass: whose rows it holds, the arrays that the taps saw in it, and whom a session works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from detdiff.trace import PHASES
from detdiff_kernels import Call

from .arrays import handle
from .kernel_plan import Place, Span, Taken
from .sites import Arrays, SiteMap

TARGET, DRAFT = "target", "draft"
"""The models of a run: the one that is asked, and the one that proposes to it."""


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of one request in a forward.

    The rows (positions ``start`` … ``start + count - 1``) lie in batch slot ``slot`` from ``column`` on.
    """

    request: int
    slot: int
    start: int
    count: int
    phase: str
    column: int = 0


@dataclass(frozen=True)
class Forward:
    """What the engine says about one model call.

    ``shape`` is (batch slots, columns); ``selected`` are the columns whose logits are asked for (packed), or
    None for all; ``logits_used`` is False where the engine throws the logits away (padded prefill), so that
    recording must not compute them. ``model`` is whose call it is.
    """

    index: int
    layout: str
    shape: tuple[int, int]
    segments: tuple[Segment, ...]
    tokens: mx.array
    selected: tuple[int, ...] | None = None
    logits_used: bool = True
    model: str = TARGET

    @property
    def phase(self) -> str:
        phases = {segment.phase for segment in self.segments}
        return phases.pop() if len(phases) == 1 else "mixed"

    @property
    def rows(self) -> int:
        """M: the rows that a linear operation sees, padding included."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class RowTable:
    """The rows of a forward as arrays, in the order of its segments; int64 [n] each."""

    request: NDArray[np.int64]
    position: NDArray[np.int64]
    slot: NDArray[np.int64]
    column: NDArray[np.int64]
    lane: NDArray[np.int64]
    phase: NDArray[np.int64]
    last: NDArray[np.bool_]

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> RowTable:
        counts = [s.count for s in segments]

        def repeat(values: list[int]) -> NDArray[np.int64]:
            return np.repeat(np.array(values, np.int64), counts)

        within = np.concatenate([np.arange(n, dtype=np.int64) for n in counts] or [np.zeros(0, np.int64)])
        return cls(
            repeat([s.request for s in segments]),
            repeat([s.start for s in segments]) + within,
            repeat([s.slot for s in segments]),
            repeat([s.column for s in segments]) + within,
            repeat(list(range(len(segments)))),
            repeat([PHASES.index(s.phase) for s in segments]),
            within == repeat(counts) - 1,
        )


@dataclass
class CacheCall:
    """One ``update_and_fetch``: what came back, for the segments that it served.

    ``parts`` are the returned arrays [slots, heads, T, width] with the entry kind ("K" or "V") each belongs to
    (a quantised cache has several parts a kind); ``segments`` are the forward's segments it served and ``slots``
    where each lies; ``columns`` how many columns were written; ``ring`` is (write index after the update, slots
    kept in front, ring length) where the returned order is a ring's, else None; ``window`` is how many
    positions a row sees, ``chunk`` that it sees those of its own chunk of so many; ``own`` says that the cache holds one request only, whatever column of the forward its
    rows came from. ``device`` holds digests uint64 [slots, T, heads] where MLX computed them. ``stored`` are the cache's own arrays
    in the order of ``parts``, at least as long; empty where the cache does not show them.
    """

    key: str
    layer: int
    parts: tuple[tuple[str, mx.array], ...]
    segments: tuple[int, ...]
    slots: tuple[int, ...]
    columns: int
    ring: tuple[int, int, int] | None
    window: int | None
    own: bool
    chunk: int | None = None
    device: list[mx.array] = field(default_factory=list)
    stored: tuple[mx.array, ...] = ()


@dataclass
class ForwardRecord:
    """Handles on everything that the taps saw in one forward, kept until it is digested.

    ``arrays`` are by port; ``states`` are those of them that are recurrent states (one row a slot, no row
    axis). ``calls`` are the kernel paths taken, by site. ``finished`` and ``events`` hold what was digested before the forward ended, to
    bound memory; ``after`` are the event lines that follow the forward's own, until it is ``written``.
    """

    forward: Forward
    sites: SiteMap
    arrays: dict[int, mx.array] = field(default_factory=dict)
    device: dict[int, mx.array] = field(default_factory=dict)
    states: set[int] = field(default_factory=set)
    caches: list[CacheCall] = field(default_factory=list)
    finished: list[Any] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    calls: dict[int, list[Taken]] = field(default_factory=dict)
    bookkeeping: list[dict[str, Any]] = field(default_factory=list)
    masks: dict[int, str] = field(default_factory=dict)
    logits: mx.array | None = None
    lens: list[mx.array] = field(default_factory=list)
    after: list[dict[str, Any]] = field(default_factory=list)
    written: bool = False

    def axis(self, port: int) -> int | None:
        """The row axis of a port's array; None for a recurrent state, which has one row a slot."""
        return None if port in self.states else self.sites.axes[port]

    def add(self, key: str, ports: Arrays) -> None:
        """Keep the arrays of a site's ports; a site or port unknown to the site map is left out."""
        for name, array in ports:
            port = self.sites.ports.get((key, name))
            if port is not None:
                self.arrays[port] = handle(array)


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
