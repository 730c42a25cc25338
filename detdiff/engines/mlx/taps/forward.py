"""One forward pass: whose rows it holds, the arrays that the taps saw in it, where these lie, and whom a session works with.

NumPy cannot import bfloat16 from the buffer protocol, and makes no view of a strided buffer whose format it
does not know; so an array's address is read through the C buffer interface itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from detdiff.trace import PHASES
from detdiff_kernels import Call

from .kernel_plan import CallSite, Span, TakenPath
from .sites import Arrays, SiteMap
from .unread import CacheUpdate, ColumnDigests

STRIDED_READ_ONLY = 0x11C  # PyBUF_FULL_RO of CPython's object.h

DTYPE_NAMES: dict[Any, str] = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.float64: "F64",
    mx.complex64: "C64",
}

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_get_buffer.restype = ctypes.c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = [ctypes.POINTER(_PyBuffer)]
_release.restype = None


# One is made at every port of every forward, and a frozen dataclass takes three times as long to make.
class Memory(NamedTuple):
    """Address (bytes), shape (elements), strides (bytes) and dtype name of one evaluated array."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str

    def numpy(self) -> NDArray[Any]:
        """A read-only view as unsigned integers of the item size; valid while the MLX array lives."""
        if 0 in self.shape:
            return np.zeros(self.shape, _UNSIGNED[self.itemsize])
        span = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.itemsize
        raw = (ctypes.c_char * span).from_address(self.address)
        view: NDArray[Any] = np.ndarray(
            self.shape, _UNSIGNED[self.itemsize], memoryview(raw), strides=self.strides
        )
        view.flags.writeable = False
        return view


def memory(array: mx.array) -> Memory:
    """Memory of ``array``, evaluating it first when that has not happened yet."""
    shape = tuple(array.shape)
    if array.size == 0:
        return Memory(0, shape, (0,) * len(shape), array.itemsize, DTYPE_NAMES[array.dtype])
    view = _PyBuffer()
    if _get_buffer(array, ctypes.byref(view), STRIDED_READ_ONLY) != 0:
        raise BufferError("MLX gave no buffer for an evaluated array")
    try:
        strides = tuple(view.strides[: view.ndim])
        return Memory(int(view.buf or 0), shape, strides, array.itemsize, DTYPE_NAMES[array.dtype])
    finally:
        _release(ctypes.byref(view))


def handle(array: mx.array) -> mx.array:
    """A second Python handle on the same array.

    Models change arrays in place (``h *= scale`` in gemma), which rebinds the Python object; the handle keeps
    pointing at the value that was recorded. ``astype`` to the same dtype adds no operation to the graph.
    """
    return array.astype(array.dtype)


Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


def top(logits: Float32, k: int) -> tuple[Int32, Float32]:
    """Ids int32 [rows, k] and logits float32 [rows, k] of the largest of ``logits`` [rows, V].

    Descending; equal logits by lower id, NaN last.
    """
    k = min(k, logits.shape[-1])
    ids = np.empty((len(logits), k), np.int32)
    for row, values in enumerate(logits):
        ranked = np.where(np.isnan(values), -np.inf, values)
        kth = np.partition(ranked, len(ranked) - k)[len(ranked) - k]
        candidates = np.flatnonzero(ranked >= kth)
        order = np.lexsort((candidates, np.isnan(values[candidates]), -ranked[candidates]))
        ids[row] = candidates[order[:k]]
    return ids, np.take_along_axis(logits, ids, axis=1)


def as_float32(logits: mx.array) -> Float32:
    """An evaluated MLX array as float32, exactly (half and bfloat16 are subsets of float32)."""
    where = memory(logits)
    bits = where.numpy()
    if where.dtype == "BF16":
        return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)
    kinds = {"F16": np.float16, "F32": np.float32}
    return np.ascontiguousarray(bits).view(kinds[where.dtype]).astype(np.float32)


def lens_logits(
    hidden: mx.array, norm: Callable[[mx.array], mx.array], head: Callable[[mx.array], mx.array]
) -> mx.array:
    """Logits [rows, V] of ``hidden`` [rows, D] as if the model ended after this layer (lazy)."""
    return head(norm(hidden[None]))[0]


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
class ForwardRows:
    """The rows of a forward as arrays, in the order of its segments; int64 [n] each."""

    request: NDArray[np.int64]
    position: NDArray[np.int64]
    slot: NDArray[np.int64]
    column: NDArray[np.int64]
    lane: NDArray[np.int64]
    phase: NDArray[np.int64]
    last: NDArray[np.bool_]

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> ForwardRows:
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


@dataclass(frozen=True)
class KeyReader:
    """An attention call of the site ``key`` on what a cache gave back: ``columns`` keys, under ``mask``; ``chosen`` are the keys where a
    model gave it fewer than came back."""

    key: str
    columns: int
    mask: Any
    chosen: mx.array | None = None


@dataclass
class CacheCall:
    """One ``update_and_fetch``: what came back, for the segments that it served.

    ``parts`` are the returned arrays [slots, heads, T, width] with the entry kind ("K" or "V") each belongs to
    (a quantised cache has several parts a kind); ``segments`` are the forward's segments it served and ``slots``
    where each lies; ``columns`` how many columns were written; ``window`` is how many positions a row sees where its mask is not
    known; ``own`` says that the cache holds one request only, whatever column of the forward its rows came from. ``stored`` are the
    cache's own arrays in the order of ``parts``, at least as long; empty where the cache does not show them. ``given`` are the keys and
    values [slots, heads, columns, width] to be written, empty where another form of them is stored. ``device`` and ``device_given`` hold
    digests uint64 [slots, T, heads] of ``parts`` and ``given`` where MLX computed them. ``returned`` are the keys as the model got them,
    until the forward ends; ``whole`` says that the cache is of a class that keeps every entry, ``sink`` how many first ones a ring keeps for good; ``readers`` are the attention calls that were given them.
    With ``fresh`` the ``parts`` are copies of these columns only, of ``length``, and ``known`` has the digests of the others.
    """

    key: str
    layer: int
    parts: tuple[tuple[str, mx.array], ...]
    segments: tuple[int, ...]
    slots: tuple[int, ...]
    columns: int
    window: int | None
    own: bool
    stored: tuple[mx.array, ...] = ()
    length: int = 0
    fresh: range | None = None
    known: ColumnDigests | None = None
    given: tuple[mx.array, ...] = ()
    device: list[mx.array] = field(default_factory=list)
    device_given: list[mx.array] = field(default_factory=list)
    returned: Any = None
    whole: bool = False
    sink: int = 0
    readers: list[KeyReader] = field(default_factory=list)


@dataclass
class ForwardRecord:
    """Handles on everything that the taps saw in one forward, kept until it is digested.

    ``arrays`` are by port; ``states`` are those of them that are recurrent states (one row a slot, no row
    axis). ``calls`` are the kernel paths taken, by site. ``limited`` says by layer which rows do not see all up to their own position. ``finished`` and ``events`` hold what was digested before the forward ended, to
    bound memory; ``after`` are the event lines that follow the forward's own, until it is ``written``, and ``ended`` the
    requests that have no rows behind it.
    """

    forward: Forward
    sites: SiteMap
    arrays: dict[int, mx.array] = field(default_factory=dict)
    device: dict[int, mx.array] = field(default_factory=dict)
    states: set[int] = field(default_factory=set)
    caches: list[CacheCall] = field(default_factory=list)
    finished: list[Any] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    calls: dict[int, list[TakenPath]] = field(default_factory=dict)
    bookkeeping: list[dict[str, Any]] = field(default_factory=list)
    limited: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    masks: dict[int, str] = field(default_factory=dict)
    logits: mx.array | None = None
    hidden: mx.array | None = None
    lens: list[mx.array] = field(default_factory=list)
    after: list[dict[str, Any]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    written: bool = False

    def axis(self, port: int) -> int | None:
        """The row axis of a port's array; None for a recurrent state, which has one row a slot."""
        return None if port in self.states else self.sites.axes[port]

    def add(self, key: str, given: Arrays, made: Sequence[tuple[str, mx.array]] = ()) -> None:
        """Keep the arrays of a site's ports; a site or port unknown to the site map is left out.

        Of those that it was ``given`` these are handles already.
        """
        ports, arrays = self.sites.ports, self.arrays
        for name, array in given:
            port = ports.get((key, name))
            if port is not None:
                arrays[port] = array
        for name, array in made:
            port = ports.get((key, name))
            if port is not None:
                arrays[port] = array.astype(array.dtype)


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
    def call(self, key: str, taken: TakenPath) -> None: ...
    def cache_call(self, key: str, keys: mx.array, values: mx.array, calls: list[CacheUpdate]) -> None: ...
    def attended(self, key: str, layer: int | None, keys: Any, mask: Any) -> None: ...
    def block_done(self, key: str) -> None: ...
    def end(self, forward: Forward, logits: mx.array) -> None: ...


class PathOverride:
    """Takes calls onto other paths than the plan's, and may ask what yet others would have given. As it is it follows the plan,
    and only makes a session say how every path was made."""

    single_scans = False
    """Whether recurrences are run row by row."""
    has_others = False
    """Whether ``others`` has other paths than ``spans`` had for the last call."""

    def begin(self, sites: SiteMap, forward: Forward) -> None: ...

    def spans(self, place: CallSite, call: Call, planned: tuple[Span, ...]) -> tuple[Span, ...]:
        return planned

    def others(self, place: CallSite, call: Call, planned: tuple[Span, ...]) -> tuple[Span, ...]:
        return planned

    def compare(self, place: CallSite, taken: mx.array, other: mx.array) -> None: ...
