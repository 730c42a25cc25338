"""Expert layers: mlx-lm sorts many rows by expert, a trace wants them as the model's rows, and a plan chooses their paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from detdiff_kernels import BadOperand, Call, UnsupportedFormat

from .kernel_plan import (
    TILE,
    CallSite,
    KernelPath,
    Kernels,
    Native,
    PathChooser,
    RowComputation,
    Span,
    TakenPath,
    floats,
    name_of,
    operand,
)
from .sites import Arrays


@dataclass(frozen=True)
class ExpertOrder:
    """One sorting by expert, as ``_gather_sort`` of mlx-lm's switch layers did it.

    ``given`` [slots, columns, 1, 1, D] is what the layer got and ``gathered`` what it made of that, a copy for each
    of a row's experts, in expert order; ``indices`` are the experts in that order and ``back`` undoes it;
    ``shape`` is (slots, columns, experts a row).
    """

    given: mx.array
    gathered: mx.array
    indices: mx.array
    back: mx.array
    shape: tuple[int, ...]

    @classmethod
    def of(cls, args: Any, result: Any) -> ExpertOrder:
        """From the arguments (x, experts [slots, columns, k]) and the result of ``_gather_sort``."""
        return cls(args[0], result[0], result[1], result[2], tuple(args[1].shape))

    def rows(self, array: mx.array) -> mx.array:
        """``array`` [n, ...] in expert order as [slots, columns, k, ...]."""
        return array[self.back].reshape(*self.shape, *array.shape[1:])

    def sorted(self, rows: mx.array) -> mx.array:
        """``rows`` [slots, columns, k, ...] in expert order again."""
        flat = rows.reshape(-1, *rows.shape[len(self.shape) :])
        return flat[mx.argsort(self.back)]

    def ports(self, x: Any, y: mx.array) -> tuple[Arrays, Arrays]:
        """The ports of an expert linear that was called with ``x`` and answered ``y``."""
        # Before the first expert layer a row has one value for all its experts, and that is what it is recorded as
        # when mlx-lm does not sort.
        given = self.given if x is self.gathered else self.rows(x)
        return [("in", given), ("experts", self.rows(self.indices))], [("out", self.rows(y))]


class SwitchCalls:
    """Runs switch linear modules, dense or quantised."""

    def __init__(self, chooser: PathChooser, kernels: Kernels) -> None:
        self._chooser, self._kernels = chooser, kernels
        self.order: ExpertOrder | None = None  # how the rows of the next call are sorted

    def run(
        self, place: CallSite, native: Native, module: Module, args: Any, kw: Any
    ) -> tuple[mx.array, list[TakenPath]]:
        """The output of ``module`` for rows x [..., m, K] and their experts, whose shape the leading one of x has or
        is repeated to; and the path that gave it."""
        x, experts, in_order = _named(*args, **kw)
        facts = operand(module, x)
        lead = np.broadcast_shapes(x.shape[:-2], experts.shape)
        rows = int(np.prod(lead)) * x.shape[-2]
        call = Call(
            "switch",
            rows,
            second_last=x.shape[-2],
            k=x.shape[-1],
            n=facts.n,
            dtype=name_of(facts.dtype),
            bits=facts.bits,
            group_size=facts.group_size,
            format=facts.format,
            experts=int(module["weight"].shape[0]),
            sorted=in_order,
        )

        def on(path: KernelPath) -> tuple[mx.array, KernelPath]:
            if path.kernel is not None and facts.problem:
                path = path.left_native(facts.problem)
            elif path.kernel is not None:
                try:
                    return self._by_expert(path, module, x, experts, lead, facts.dtype), path
                except (UnsupportedFormat, BadOperand) as error:
                    path = path.left_native(str(error))
            return _native(path, native, x, experts, lead, in_order), path

        spans = self._chooser.choose(place, call)
        planned = spans if self._chooser.override is None else self._chooser.planned(place, call)
        path = spans[0].path
        if len(spans) > 1 and spans != planned:
            y = self._mixed(spans, {span.path: on(span.path)[0] for span in spans})
        else:
            if len(spans) > 1:
                path = path.left_native(
                    "the path of an expert's row cannot depend on its place among the others."
                )
            y, path = on(path)
        made = None if self._chooser.override is None else RowComputation(path, 0)
        return y, [TakenPath(rows, x.shape[-2], path.name, path.rule, made=made)]

    def _mixed(self, spans: tuple[Span, ...], done: dict[KernelPath, mx.array]) -> mx.array:
        """Each of the gathered rows, in the order of the model's rows, as its path gives it."""
        shape = next(iter(done.values())).shape
        flat = {path: y.reshape(-1, *shape[-2:]) for path, y in done.items()}
        if self.order is not None:
            flat = {path: y[self.order.back] for path, y in flat.items()}
        y = mx.concatenate([flat[path][first:last] for first, last, path in spans], axis=0)
        return (y if self.order is None else y[mx.argsort(self.order.back)]).reshape(shape)

    def _by_expert(
        self,
        path: KernelPath,
        module: Module,
        x: mx.array,
        experts: mx.array,
        lead: tuple[int, ...],
        dtype: mx.Dtype,
    ) -> mx.array:
        m, width = x.shape[-2:]
        given = floats(x if x.dtype == dtype else x.astype(dtype)).reshape(-1, m, width)
        chosen, source = _gathered(x, experts, lead)
        out = np.empty((len(chosen), m, module["weight"].shape[-2]), np.float32)
        for expert in np.unique(chosen).tolist():
            mine = np.flatnonzero(chosen == expert)
            rows = path.rows or len(mine) * m
            kernel = self._kernels.linear(path.kernel or "", module, name_of(dtype), rows=rows, expert=expert)
            out[mine] = kernel(given[source[mine]].reshape(-1, width), rows).reshape(len(mine), m, -1)
        y = mx.array(out).reshape(*lead, m, -1).astype(dtype)
        return y + mx.expand_dims(module["bias"][experts], -2) if "bias" in module else y


def _named(x: mx.array, indices: mx.array, sorted_indices: bool = False) -> tuple[mx.array, mx.array, bool]:
    return x, indices, bool(sorted_indices)


def _gathered(
    x: mx.array, experts: mx.array, lead: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each gathered row, in row order: its expert, and its place among the rows of ``x``."""
    chosen = np.broadcast_to(np.asarray(experts).astype(np.int64), lead).reshape(-1)
    places = np.arange(x.size // (x.shape[-1] * x.shape[-2])).reshape(x.shape[:-2])
    return chosen, np.broadcast_to(places, lead).reshape(-1)


def _native(
    path: KernelPath, native: Native, x: mx.array, experts: mx.array, lead: tuple[int, ...], in_order: bool
) -> mx.array:
    """The module's own operation: once, row by row, or with more rows than there are."""
    family, _, rest = path.name.partition("/")
    y: mx.array
    size = int(np.prod(lead))
    wanted = int(rest.removeprefix("pad:")) if rest.startswith("pad:") else 0
    tile = int(rest.removeprefix(TILE)) if rest.startswith(TILE) else 1
    if family != "forced" or (wanted and size * x.shape[-2] >= wanted):
        y = native(x, experts, sorted_indices=in_order)
        return y
    rows = mx.broadcast_to(x, (*lead, *x.shape[-2:])).reshape(size, *x.shape[-2:])
    chosen = mx.broadcast_to(experts, lead).reshape(-1)
    if not wanted:
        in_order = in_order and rest == "rows"
        more = -size % tile
        if more:
            rows = mx.concatenate([rows, mx.zeros((more, *x.shape[-2:]), x.dtype)], axis=0)
            chosen = mx.concatenate([chosen, mx.broadcast_to(chosen[-1:], (more,))], axis=0)
        parts = [
            native(rows[i : i + tile], chosen[i : i + tile], sorted_indices=in_order)
            for i in range(0, size, tile)
        ]
        y = mx.concatenate(parts, axis=0)[:size]
    else:
        more = -(-wanted // x.shape[-2]) - size
        # The last row's expert keeps sorted experts sorted.
        rows = mx.concatenate([rows, mx.zeros((more, *x.shape[-2:]), x.dtype)], axis=0)
        chosen = mx.concatenate([chosen, mx.broadcast_to(chosen[-1:], (more,))], axis=0)
        y = native(rows, chosen, sorted_indices=in_order)[:size]
    return y.reshape(*lead, *y.shape[-2:])
