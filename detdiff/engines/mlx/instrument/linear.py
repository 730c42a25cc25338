"""Linear calls on the paths that a plan chooses: native, forced, or a reference kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from detdiff_kernels import BadOperand, Call, UnsupportedFormat, forced
from detdiff_kernels.staging import summed

from .paths import Made, PathChooser, Place, Span, Taken
from .weights import Kernels, Operand, Prepared, floats, name_of, operand

Native = Callable[..., Any]

_REMEMBERED = 1 << 14


class _Planned(NamedTuple):
    """What is known of a call before it is made: the dtype it runs in, each span's kernel, what to record."""

    dtype: mx.Dtype
    spans: tuple[tuple[Span, Prepared | None], ...]
    taken: tuple[Taken, ...]


class LinearCalls:
    """Runs linear, quantised linear and tied-embedding modules."""

    def __init__(self, chooser: PathChooser, kernels: Kernels) -> None:
        self._chooser, self._kernels = chooser, kernels
        self._known: dict[tuple[Place, tuple[int, ...], mx.Dtype], _Planned] = {}

    def run(
        self, place: Place, native: Native, module: Module, x: mx.array, method: str = "__call__"
    ) -> tuple[mx.array, tuple[Taken, ...]]:
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

    def paths(self, place: Place, module: Module, x: mx.array, method: str = "__call__") -> tuple[Taken, ...]:
        """The paths that ``run`` would take; nothing of ``x`` but its shape and dtype is looked at."""
        return self._planned(place, module, x, method).taken

    def _planned(self, place: Place, module: Module, x: mx.array, method: str) -> _Planned:
        if self._chooser.override is not None:
            return self._plan(place, module, x, method)
        key = (place, tuple(x.shape), x.dtype)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = self._known[key] = self._plan(place, module, x, method)
        return found

    def _plan(self, place: Place, module: Module, x: mx.array, method: str) -> _Planned:
        facts = operand(module, x, method)
        call = call_of(place.op, x, facts)
        spans = [self._prepared(span, module, facts) for span in self._chooser.choose(place, call)]
        taken = [
            Taken(
                call.rows,
                call.second_last,
                span.path.name,
                span.path.rule,
                range(span.first, span.last) if len(spans) > 1 else None,
                None if self._chooser.override is None else _made(span, kernel),
            )
            for span, kernel in spans
        ]
        return _Planned(facts.dtype, tuple(spans), tuple(taken))

    def _prepared(self, span: Span, module: Module, facts: Operand) -> tuple[Span, Prepared | None]:
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


def _made(span: Span, kernel: Prepared | None) -> Made:
    # A span is run as a call of its own rows, whatever else is in the call.
    rows = span.path.rows or span.last - span.first
    if kernel is None:
        return Made(span.path, rows)
    order = kernel.kernel.order_for(kernel.staged.weight, kernel.staged.dtype, rows)
    return Made(span.path, rows, order)


def _on_path(
    span: Span, kernel: Prepared | None, native: Native, module: Module, x: mx.array, dtype: mx.Dtype
) -> mx.array:
    y: mx.array
    if kernel is not None:
        y = product(kernel, x, dtype, span.path.rows)
        return y + module["bias"] if "bias" in module else y
    family, _, rest = span.path.name.partition("/")
    if family == "forced" and rest == "rows":
        y = forced.rows(native, x, mx)
        return y
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


def product(kernel: Prepared, x: mx.array, dtype: mx.Dtype, rows: int | None = None) -> mx.array:
    """``x`` [..., K] times a staged weight, as ``dtype`` [..., N]; ``rows``: in the order for that many rows."""
    if x.dtype != dtype:
        x = x.astype(dtype)
    flat = np.ascontiguousarray(floats(x).reshape(-1, x.shape[-1]))
    return mx.array(_summed(kernel, flat, rows)).reshape(*x.shape[:-1], -1).astype(dtype)


def _summed(kernel: Prepared, flat: NDArray[np.float32], rows: int | None) -> NDArray[np.float32]:
    if rows is None or rows == len(flat):
        return kernel(flat)
    # A row's result depends on that row and the order alone, so the order of another call may run these rows.
    out = np.empty((len(flat), kernel.staged.n), np.float32)
    order = kernel.kernel.order_for(kernel.staged.weight, kernel.staged.dtype, rows)
    summed(flat, kernel.staged, order, out)
    return out


def call_of(op: Any, x: mx.array, facts: Operand) -> Call:
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
