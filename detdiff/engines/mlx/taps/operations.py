"""Linear and attention calls on the paths that a plan chooses: native, forced, or a reference kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from detdiff.scenario import KernelPlan
from detdiff_kernels import BadOperand, Call, UnsupportedFormat, forced

from .experts import SwitchCalls
from .forward import handle
from .kernel_plan import (
    ROW_BY_ROW,
    TILE,
    CallSite,
    KernelPath,
    Kernels,
    Native,
    Operand,
    PathChooser,
    RowComputation,
    Span,
    StagedKernel,
    StagedWeights,
    TakenPath,
    floats,
    name_of,
    operand,
)
from .visible import HIDDEN

_REMEMBERED = 1 << 14


class _PlannedCall(NamedTuple):
    """What is known of a call before it is made: the dtype it runs in, each span's kernel, what to record."""

    dtype: mx.Dtype
    spans: tuple[tuple[Span, StagedKernel | None], ...]
    taken: tuple[TakenPath, ...]


class LinearCalls:
    """Runs linear, quantised linear and tied-embedding modules."""

    def __init__(self, chooser: PathChooser, kernels: Kernels) -> None:
        self._chooser, self._kernels = chooser, kernels
        self._known: dict[tuple[CallSite, tuple[int, ...], mx.Dtype], _PlannedCall] = {}

    def run(
        self, place: CallSite, native: Native, module: Module, x: mx.array, method: str = "__call__"
    ) -> tuple[mx.array, tuple[TakenPath, ...]]:
        """The output of ``module`` for ``x`` [..., K], and the paths that gave it; ``method`` is what is called."""
        planned = self._planned(place, module, x, method)
        if len(planned.spans) == 1:
            ((span, kernel),) = planned.spans
            return _on_path(span, kernel, native, module, x, planned.dtype), planned.taken
        flat = x.reshape(1, -1, x.shape[-1])
        parts = [
            _on_path(span, kernel, native, module, flat[:, span.first : span.last], planned.dtype)
            for span, kernel in planned.spans
        ]
        return mx.concatenate(parts, axis=1).reshape(*x.shape[:-1], -1), planned.taken

    def paths(
        self, place: CallSite, module: Module, x: mx.array, method: str = "__call__"
    ) -> tuple[TakenPath, ...]:
        """The paths that ``run`` would take; nothing of ``x`` but its shape and dtype is looked at."""
        return self._planned(place, module, x, method).taken

    def _planned(self, place: CallSite, module: Module, x: mx.array, method: str) -> _PlannedCall:
        if self._chooser.override is not None:
            return self._plan(place, module, x, method)
        key = (place, tuple(x.shape), x.dtype)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = self._known[key] = self._plan(place, module, x, method)
        return found

    def _plan(self, place: CallSite, module: Module, x: mx.array, method: str) -> _PlannedCall:
        facts = operand(module, x, method)
        call = linear_call(place.op, x, facts)
        spans = [self._prepared(span, module, facts) for span in self._chooser.choose(place, call)]
        taken = [
            TakenPath(
                call.rows,
                call.second_last,
                span.path.name,
                span.path.rule,
                range(span.first, span.last) if len(spans) > 1 else None,
                None if self._chooser.override is None else _made(span, kernel),
            )
            for span, kernel in spans
        ]
        return _PlannedCall(facts.dtype, tuple(spans), tuple(taken))

    def _prepared(self, span: Span, module: Module, facts: Operand) -> tuple[Span, StagedKernel | None]:
        name = span.path.kernel
        if name is None:
            return span, None
        if facts.problem:
            return span._replace(path=span.path.left_native(facts.problem)), None
        try:
            rows = span.path.rows or span.last - span.first
            return span, self._kernels.linear(name, module, name_of(facts.dtype), rows=rows)
        except (UnsupportedFormat, BadOperand) as error:
            return span._replace(path=span.path.left_native(str(error))), None


def _made(span: Span, kernel: StagedKernel | None) -> RowComputation:
    # A span is run as a call of its own rows, whatever else is in the call.
    rows = span.path.rows or span.last - span.first
    if kernel is None:
        return RowComputation(span.path, rows)
    order = kernel.kernel.order_for(kernel.staged.weight, kernel.staged.dtype, rows)
    return RowComputation(span.path, rows, order)


def _on_path(
    span: Span, kernel: StagedKernel | None, native: Native, module: Module, x: mx.array, dtype: mx.Dtype
) -> mx.array:
    y: mx.array
    if kernel is not None:
        y = product(kernel, x, dtype, span.path.rows)
        return y + module["bias"] if "bias" in module else y
    family, _, rest = span.path.name.partition("/")
    if family == "forced" and rest == "rows":
        y = forced.rows(native, x, mx)
        return y
    if family == "forced" and rest.startswith(TILE):
        return _tiles(native, x, int(rest.removeprefix(TILE)))
    if family == "forced":
        y = forced.padded(native, x, int(rest.removeprefix("pad:")), mx)
    else:
        y = native(x) if span.path.rows is None else _as_rows(native, x, span.path.rows)
    return y


def _as_rows(native: Native, x: mx.array, rows: int) -> mx.array:
    """``x`` [..., K] in calls of ``rows`` rows each, the last one filled up."""
    flat = x.reshape(1, -1, x.shape[-1])
    count = flat.shape[1]
    if count == rows:
        whole: mx.array = native(x)
        return whole
    if rows == 1:
        alone: mx.array = forced.rows(native, x, mx)
        return alone
    parts = [forced.padded(native, flat[:, i : i + rows], rows, mx) for i in range(0, count, rows)]
    return mx.concatenate(parts, axis=1).reshape(*x.shape[:-1], -1)


def _tiles(native: Native, x: mx.array, rows: int) -> mx.array:
    """``x`` [..., K] in calls [1, rows, K] whose rows follow each other, whatever its shape and however it lies."""
    flat = mx.contiguous(x.reshape(1, -1, x.shape[-1]))
    count = flat.shape[1]
    parts = [forced.padded(native, flat[:, i : i + rows], rows, mx) for i in range(0, count, rows)]
    whole = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
    return whole.reshape(*x.shape[:-1], -1)


def product(kernel: StagedKernel, x: mx.array, dtype: mx.Dtype, rows: int | None = None) -> mx.array:
    """``x`` [..., K] times a staged weight, as ``dtype`` [..., N]; ``rows``: in the order for that many rows."""
    if x.dtype != dtype:
        x = x.astype(dtype)
    flat = np.ascontiguousarray(floats(x).reshape(-1, x.shape[-1]))
    return mx.array(kernel(flat, rows)).reshape(*x.shape[:-1], -1).astype(dtype)


def linear_call(op: Any, x: mx.array, facts: Operand) -> Call:
    """The dispatch facts of a linear call with ``x`` [..., K]."""
    width = x.shape[-1]
    return Call(
        op,
        x.size // width,
        second_last=x.shape[-2] if x.ndim > 1 else 1,
        k=width,
        n=facts.n,
        dtype=name_of(facts.dtype),
        bits=facts.bits,
        group_size=facts.group_size,
        format=facts.format,
    )


Given = dict[str, Any]
"""The arguments of a call by name."""

Attended = Callable[[Given], mx.array]

ATTENTION_NAMES = ("queries", "keys", "values", "cache", "scale", "mask", "sinks")


class AttentionCalls:
    """Runs mlx-lm's ``scaled_dot_product_attention``."""

    def __init__(self, chooser: PathChooser, kernels: Kernels) -> None:
        self._chooser, self._kernels = chooser, kernels
        self.source: Callable[[Any], Any] = lambda keys: None
        """The cache that gave these keys, where a layer reads those of another one."""

    def run(self, place: CallSite, native: Native, args: Any, kw: Any) -> tuple[mx.array, TakenPath]:
        """The output [B, heads, rows, D] of one call, and the path that gave it."""
        given = {**dict(zip(ATTENTION_NAMES, args, strict=False)), **kw}

        def attend(asked: Given) -> mx.array:
            # By place what came by place: who wraps attention may have other names for it.
            places = ATTENTION_NAMES[: len(args)]
            rest = {name: value for name, value in asked.items() if name not in places}
            y: mx.array = native(*(asked[name] for name in places), **rest)
            return y

        call = attention_call(given)
        override = self._chooser.override
        spans = self._chooser.choose(place, call)
        planned = spans if override is None else self._chooser.planned(place, call)
        path = spans[0].path
        if len(spans) > 1 and spans != planned:
            y = self._mixed(spans, place, attend, given)
        else:
            if len(spans) > 1:
                path = path.left_native("the path of attention cannot depend on the place of a row.")
            y, path = self._on_path(path, place, attend, given)
        made = None if override is None else RowComputation(path, 0)
        return y, TakenPath(call.rows * call.batch, call.second_last, path.name, path.rule, made=made)

    def _on_path(
        self, path: KernelPath, place: CallSite, attend: Attended, given: Given
    ) -> tuple[mx.array, KernelPath]:
        if path.name == ROW_BY_ROW:
            return self._row_by_row(place, attend, given), path
        if path.kernel is not None:
            try:
                return self._reference(path.kernel, given, dict(path.arguments)), path
            except (UnsupportedFormat, BadOperand) as error:
                path = path.left_native(str(error))
        return attend(given), path

    def _mixed(self, spans: tuple[Span, ...], place: CallSite, attend: Attended, given: Given) -> mx.array:
        """Each of the flat rows (slot after slot) as its path gives it; every path runs on all rows."""
        done: dict[KernelPath, mx.array] = {}
        parts: list[mx.array] = []
        shape: tuple[int, ...] = ()
        for first, last, path in spans:
            if path not in done:
                y = self._on_path(path, place, attend, given)[0].transpose(0, 2, 1, 3)
                shape = y.shape
                done[path] = y.reshape(-1, *shape[2:])
            parts.append(done[path][first:last])
        return mx.concatenate(parts, axis=0).reshape(shape).transpose(0, 2, 1, 3)

    def _row_by_row(self, place: CallSite, attend: Attended, given: Given) -> mx.array:
        """Every row as a call of its own with the keys that it may see, on the path that the plan has for that; in one order of the
        keys, whatever order a ring has them in."""
        batch, _, rows, _ = given["queries"].shape
        slots = []
        for slot in range(batch):
            done = []
            for row in range(rows):
                alone = _alone(given, slot, row)
                cache = given.get("cache")
                cache = self.source(given["keys"]) if cache is None else cache
                if cache is not None and type(cache).__name__ not in _IN_ORDER:
                    alone = _sorted(alone)
                spans = self._chooser.planned(place, attention_call(alone), alone=True)
                done.append(self._on_path(spans[0].path, place, attend, alone)[0])
            slots.append(mx.concatenate(done, axis=2) if rows > 1 else done[0])
        return mx.concatenate(slots, axis=0) if batch > 1 else slots[0]

    def _reference(self, name: str, given: Given, arguments: dict[str, int]) -> mx.array:
        queries, keys, values = (given[key] for key in ATTENTION_NAMES[:3])
        if not (isinstance(keys, mx.array) and isinstance(values, mx.array)):
            raise UnsupportedFormat(
                "the keys and values are quantised, and reference kernels take plain ones."
            )
        dtype = mx.result_type(mx.result_type(queries, keys), values)
        asked = [
            (array if array.dtype == dtype else array.astype(dtype)).astype(mx.float32)
            for array in (queries, keys, values)
        ]
        mx.eval(asked)  # one wait instead of three
        q, k, v = map(floats, asked)
        mask, sinks = given.get("mask"), given.get("sinks")
        if isinstance(mask, mx.array):
            mask = np.asarray(mask) if mask.dtype == mx.bool_ else floats(mask)
        y = self._kernels.attention(name)(
            q,
            k,
            v,
            float(given["scale"]),
            mask=mask,
            dtype=name_of(dtype),
            sinks=None if sinks is None else floats(sinks),
            **arguments,
        )
        return mx.array(y).astype(dtype)


def attention_call(given: Given) -> Call:
    """The dispatch facts of an attention call by its arguments' names; keys may be a quantised cache's triple."""
    queries, keys, mask = given["queries"], given["keys"], given.get("mask")
    batch, heads, rows, width = queries.shape
    held = keys if isinstance(keys, mx.array) else keys[0]
    kind: Any = "none" if mask is None else mask if isinstance(mask, str) else "array"
    return Call(
        "attention",
        rows,
        second_last=rows,
        dtype=name_of(queries.dtype),
        query=rows,
        keys=int(held.shape[-2]),
        head_dim=width,
        heads=heads,
        kv_heads=int(held.shape[1]),
        batch=batch,
        mask=kind,
    )


def _alone(given: Given, slot: int, row: int) -> Given:
    """The call of one row of one slot: its keys end with the last one it may see, and begin with the first."""
    keys, mask = given["keys"], given.get("mask")
    held = keys if isinstance(keys, mx.array) else keys[0]
    rows, length = given["queries"].shape[2], held.shape[-2]
    first, last, own = 0, length, None
    if isinstance(mask, str):
        last = length - rows + row + 1
    elif mask is not None:
        heads = mask.shape[1] if mask.ndim == 4 else 1
        full = mx.broadcast_to(mask, (given["queries"].shape[0], heads, rows, length))
        first, last, own = _seen(full[slot : slot + 1, :, row : row + 1])

    def part(side: Any) -> Any:
        if isinstance(side, mx.array):
            return side[slot : slot + 1, :, first:last]
        return tuple(part(piece) for piece in side)

    return {
        **given,
        "queries": given["queries"][slot : slot + 1, :, row : row + 1],
        "keys": part(keys),
        "values": part(given["values"]),
        "mask": own,
    }


_IN_ORDER = (
    "KVCache",
    "QuantizedKVCache",
    "BatchKVCache",
    "ConcatenateKVCache",
    "ChunkedKVCache",
    "PagedCache",
)
"""Caches that keep their entries in the order of positions."""


def _sorted(alone: Given) -> Given:
    """A row's call over the keys that it sees alone, sorted by their bits and their values': the same for the same entries."""
    parts = [_several(alone[side]) for side in ("keys", "values")]
    mask = alone["mask"]
    seen = np.arange(parts[0][0].shape[2])
    if mask is not None:
        heads = shown(mask)
        seen = np.flatnonzero(heads.any(axis=0))
        added = mask.dtype != mx.bool_ and bool(mx.any(mask[..., mx.array(seen, mx.uint32)] != 0))
        mask = mask if added or not heads[:, seen].all() else None
    raw = [
        np.array(part if part.dtype == mx.uint32 else part.astype(mx.float32))
        for side in parts
        for part in side
    ]
    order = sorted(seen.tolist(), key=lambda at: b"".join(part[:, :, at].tobytes() for part in raw))
    index = mx.array(order, mx.uint32)
    taken = [tuple(part[:, :, index] for part in side) for side in parts]
    keys, values = (side[0] if len(side) == 1 else side for side in taken)
    return {**alone, "keys": keys, "values": values, "mask": None if mask is None else mask[..., index]}


def _several(held: Any) -> tuple[mx.array, ...]:
    return tuple(held) if isinstance(held, tuple | list) else (held,)


def _seen(mask: mx.array) -> tuple[int, int, mx.array | None]:
    """(first, last, mask) for a row's mask [1, heads, 1, keys] where one run of keys is seen whole: none is needed where nothing is added."""
    seen = shown(mask)
    places = np.flatnonzero(seen.any(axis=0))
    if not len(places) or places[-1] - places[0] + 1 != len(places) or not (seen == seen[0]).all():
        return 0, mask.shape[-1], mask
    first, last = int(places[0]), int(places[-1]) + 1
    return first, last, None if mask.dtype == mx.bool_ else mask[..., first:last]


def shown(mask: mx.array) -> NDArray[np.bool_]:
    """Which keys a mask [..., keys] shows, bool [rows of it, keys]."""
    values = np.array(mask if mask.dtype == mx.bool_ else mask.astype(mx.float32)).reshape(-1, mask.shape[-1])
    return values if values.dtype == np.bool_ else values > HIDDEN


SCAN_NAMES = {
    "ssm_update": (
        "hidden_states", "A_log", "B", "C", "D", "dt", "dt_bias", "state", "time_step_limit", "mask", "lengths",
    ),
    "gated_delta": ("q", "k", "v", "g", "beta", "state", "mask"),
    "recurrent_gla": ("q", "k", "v", "g", "scale", "h"),
}  # fmt: skip
"""The arguments of mlx-lm's recurrences, in their order."""
SCAN_ROWS = {
    "ssm_update": ("hidden_states", "B", "C", "dt", "mask"),
    "gated_delta": ("q", "k", "v", "g", "beta", "mask"),
    "recurrent_gla": ("q", "k", "v", "mask"),
}
"""Those with a row axis: the second, and of q, k and v of the last the third, as of its output."""
SCAN_STATES = {"ssm_update": "state", "gated_delta": "state", "recurrent_gla": "h"}
"""The argument that is the state before the first row."""


def row_axis(kind: str, name: str) -> int:
    """The axis of the rows of an argument, or of the output ``y``."""
    return 2 if kind == "recurrent_gla" and name != "mask" else 1


def scanned(kind: str, native: Native, args: Any, kw: Any, *, single: bool) -> tuple[Given, mx.array, Any]:
    """The arguments of a recurrence by name as they were before it, y [slots, rows, ...] and the state after the last row;
    ``single``: in calls of one row each."""
    # By place what came by place: who wraps a function may have other names for it.
    names = SCAN_NAMES[kind][: len(args)]
    given: Given = {**dict(zip(names, args, strict=True)), **kw}
    # A recurrence may write its new state over the old one.
    held = {name: handle(value) if isinstance(value, mx.array) else value for name, value in given.items()}

    def call(asked: Given) -> tuple[mx.array, Any]:
        found: tuple[mx.array, Any] = native(
            *(asked[name] for name in names),
            **{name: value for name, value in asked.items() if name not in names},
        )
        return found

    if not single:
        return held, *call(given)
    rows = [name for name in SCAN_ROWS[kind] if given.get(name) is not None]
    before = SCAN_STATES[kind]
    state, lengths, done = given.get(before), given.get("lengths"), []
    for row in range(given[rows[0]].shape[row_axis(kind, rows[0])]):
        one = {
            name: given[name][:, :, row : row + 1]
            if row_axis(kind, name) == 2
            else given[name][:, row : row + 1]
            for name in rows
        }
        # How many of this call's own rows are the request's; below zero: its rows ended before.
        more = {} if lengths is None else {"lengths": mx.minimum(lengths - row, 1)}
        y, state = call({**given, **one, **more, before: state})
        done.append(handle(y))
    return held, mx.concatenate(done, axis=row_axis(kind, "y")), state


class Operations:
    """Linear, expert and attention calls; they share the plan's choices and the staged weights."""

    def __init__(self, plan: KernelPlan, staged: StagedWeights | None = None) -> None:
        """``staged`` keeps what kernels make of weights from one session of a model to the next.

        Raises KernelPlanError for a path or profile that does not exist.
        """
        self.chooser = PathChooser(plan)
        kernels = Kernels(staged)
        self.linear = LinearCalls(self.chooser, kernels)
        self.switch = SwitchCalls(self.chooser, kernels)
        self.attention = AttentionCalls(self.chooser, kernels)

    @property
    def native(self) -> bool:
        """True when every call runs as the backend would run it."""
        return self.chooser.native and self.chooser.override is None
