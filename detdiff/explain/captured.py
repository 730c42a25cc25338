"""Captured values of a re-run, put together as what a site's operation was given and gave."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from detdiff.compare.metrics import Values
from detdiff.engines.mlx.instrument.sites import walk
from detdiff.errors import OracleRefused
from detdiff.scenario import CachePlan
from detdiff.trace import Site, Trace

from .oracle import Operation
from .roundoff import Float64
from .site_operation import operation_of

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DRAFT = "draft."


class Captured:
    """The values of one trace by request, position, site and port."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._names = {site.name: site for site in trace.sites}
        self._numbers = {str(request["id"]): number for number, request in enumerate(trace.requests)}
        self._writes: dict[tuple[int, int, bool], list[int]] = {}
        index = trace.row_index()
        draft = index.phase == 2
        for row, key in enumerate(
            zip(index.request.tolist(), index.position.tolist(), draft.tolist(), strict=True)
        ):
            self._writes.setdefault(key, []).append(row)

    def row(
        self, request: str, position: int, *, until: int | None = None, draft: bool = False
    ) -> int | None:
        """The place of the last row of a position, of forwards up to ``until``."""
        rows = self._writes.get((self._numbers[request], position, draft), [])
        forwards = self.trace.row_index().forward
        return next((row for row in reversed(rows) if until is None or forwards[row] <= until), None)

    def value(self, row: int, site: str, port: str) -> Values | None:
        """What a port held in a row of the trace; None where it was not captured."""
        try:
            number = self.trace.port_index(site, port)
        except KeyError:
            return None
        index = self.trace.row_index()
        table = int(index.table[row])
        column = int(self.trace.tables[table][number])
        if column < 0:
            return None
        shard = self.trace.shard(int(index.shard[row]))
        data = shard.value_at(table, column, int(index.row[row]))
        return None if data is None else Values(data, shard.tensors[f"value/{table}/{column}"].dtype)

    def needed(self, row: int, site: Site, port: str) -> Values:
        """The same; raises OracleRefused."""
        found = self.value(row, site.name, port)
        if found is None:
            raise OracleRefused(
                f"The value of {site.name}.{port} was not captured, or the cache holds it in a form that is not; a quantised "
                "cache is one. Judge the sites before and after it."
            )
        return found

    def entries(self, request: str, site: Site, side: str, span: range, until: int) -> Float64:
        """Cache entries (heads, positions of ``span``, width) that ``site`` wrote, as they stood at forward ``until``.

        Raises OracleRefused.
        """
        rows = self._rows_of(request, site, span, until)
        ports = [port for port in site.outputs if port.partition(".")[0] == side]
        return np.stack(
            [np.stack([self.needed(row, site, port).numbers() for row in rows]) for port in ports]
        )

    def written(self, request: str, site: Site, port: str, span: range, until: int) -> Float64:
        """What was given to a cache (positions of ``span``, heads times width), the last of each position."""
        rows = self._rows_of(request, site, span, until)
        return np.stack([self.needed(row, site, port).numbers() for row in rows])

    def _rows_of(self, request: str, site: Site, span: range, until: int) -> list[int]:
        draft = site.name.startswith(DRAFT)
        rows = [self.row(request, position, until=until, draft=draft) for position in span]
        if None in rows:
            raise OracleRefused(
                f"A position before {span.stop} of {request} has no row in this run, as its entries were taken over from "
                "elsewhere. Judge the sites before attention."
            )
        return [row for row in rows if row is not None]

    def write_site(self, layer: int | None, *, draft: bool) -> Site:
        """Where a layer's cache is written; raises OracleRefused."""
        for site in self._names.values():
            if site.kind == "cache_write" and site.layer == layer and site.name.startswith(DRAFT) == draft:
                return site
        raise OracleRefused(
            f"Layer {layer} writes no cache of its own, so what its attention read is not known. Judge the sites around it."
        )


def dtype_of(values: Values) -> str:
    """A dtype's name as the oracle has it; raises OracleRefused for others."""
    if values.dtype not in DTYPES:
        raise OracleRefused(
            f"A value of dtype {values.dtype} was captured; the oracle knows the roundings of {', '.join(DTYPES.values())}."
        )
    return DTYPES[values.dtype]


class Gathered:
    """What rows of one site were given and gave in one run; ``positions`` int64 [rows]."""

    def __init__(self, model: Any, captured: Captured, site: Site, request: str, rows: list[int]) -> None:
        self._model, self._captured, self._site, self._request = model, captured, site, request
        self._rows = rows
        index = captured.trace.row_index()
        self.positions = index.position[rows].astype(np.int64)
        self._forward = int(index.forward[rows[0]])

    def output(self) -> tuple[Float64, str]:
        """The outputs (rows, width), and their dtype's name."""
        if self._site.kind == "cache_write":
            values = [
                [self._captured.needed(row, self._site, p) for p in self._site.outputs] for row in self._rows
            ]
            joined = np.stack([np.concatenate([v.numbers() for v in each]) for each in values])
            return joined, dtype_of(values[0][0])
        found = [self._captured.needed(row, self._site, self._site.outputs[0]) for row in self._rows]
        return np.stack([value.numbers() for value in found]), dtype_of(found[0])

    def operation(self) -> Operation:
        """The operation with its inputs; raises OracleRefused."""
        kind = self._site.kind
        if kind == "attention":
            return self._attention()
        given: dict[str, Any] = {
            port: self._stack(port) for port in self._site.inputs if port not in ("kv", "written")
        }
        if kind in ("cache_write",):
            return self._of({"expected": np.concatenate([given[port] for port in self._site.inputs], axis=1)})
        if kind == "rope":
            width = self._head_width(given["in"].shape[1])
            given["in"] = given["in"].reshape(len(self._rows), -1, width)
            given["positions"] = self.positions
        if kind == "norm":
            size = self._weight_size(given["in"].shape[1])
            given = {port: array.reshape(len(self._rows), -1, size) for port, array in given.items()}
        if kind == "switch":
            experts = given["experts"]
            shape = self._switch_shape(given["in"].shape[1], experts.shape[1])
            given["in"] = given["in"].reshape(len(self._rows), *shape)
        return self._of(given)

    def _of(self, given: dict[str, Any]) -> Operation:
        return operation_of(self._model, self._site.name.removeprefix(DRAFT), given)

    def _stack(self, port: str) -> Float64:
        return np.stack([self._captured.needed(row, self._site, port).numbers() for row in self._rows])

    def _module(self) -> Module | None:
        model = getattr(self._model, "model", self._model)
        module = model if not isinstance(self._model, Module) else self._model
        name = self._site.name.removeprefix(DRAFT)
        leaves = {found: leaf for found, leaf, _ in walk(module)}
        while name and name not in leaves:
            name = name.rpartition(".")[0]
        return leaves.get(name)

    def _head_width(self, whole: int) -> int:
        """The width of a head, as the layer's cache has it."""
        site = self._captured.write_site(self._site.layer, draft=self._site.name.startswith(DRAFT))
        width = self._captured.needed(self._rows[0], site, "K.0").data.size
        if whole % width:
            raise OracleRefused(
                f"{self._site.name} turns {whole} numbers, which are no whole heads of {width}. Judge the sites around it."
            )
        return width

    def _weight_size(self, whole: int) -> int:
        module = self._module()
        size = int(module["weight"].size) if module is not None and "weight" in module else whole
        return size if whole % size == 0 else whole

    def _switch_shape(self, whole: int, chosen: int) -> tuple[int, ...]:
        module = self._module()
        assert module is not None
        width = int(module["weight"].shape[-1])
        if "scales" in module:
            width = width * 32 // int(module.bits)
        return (whole,) if whole == width else (chosen, whole // chosen)

    def _attention(self) -> Operation:
        """Of one row: its query over the entries that it could see."""
        if len(self._rows) != 1:
            raise OracleRefused("Attention is judged row by row, as each row sees other entries.")
        last = int(self.positions[0])
        span = range(max(0, last + 1 - (self._window() or last + 1)), last + 1)
        written = self._captured.write_site(self._site.layer, draft=self._site.name.startswith(DRAFT))
        q = self._stack("in")
        given: dict[str, Any] = {"mask": None}
        if "Quantized" in self._note("kind"):
            given |= self._quantised(written, span)
        else:
            for side in "KV":
                given[side.lower()] = self._captured.entries(
                    self._request, written, side, span, self._forward
                )
        width = given["k"].shape[2] if "bits" not in given else given.pop("width")
        if q.shape[1] % width:
            raise OracleRefused(
                f"{self._site.name} has queries of {q.shape[1]} numbers and keys of {width}, so heads cannot be told apart. Judge the "
                "sites around it."
            )
        return self._of({**given, "in": q.reshape(1, -1, width)})

    def _quantised(self, written: Site, span: range) -> dict[str, Any]:
        """Keys and values as codes: what was written, quantised as mlx-lm does it, entry by entry."""
        scenario = self._captured.trace.scenario
        bits, group_size = scenario.get("kv_bits"), scenario.get("kv_group_size", CachePlan().kv_group_size)
        if bits is None:
            raise OracleRefused(
                f"{self._site.name} reads a quantised cache of unknown width. Judge the sites before attention."
            )
        heads = sum(port.startswith("K.") for port in written.outputs)
        found: dict[str, Any] = {"bits": bits, "group_size": group_size}
        for side in "kv":
            exact = self._captured.written(self._request, written, side, span, self._forward)
            entries = exact.reshape(len(span), heads, -1).swapaxes(0, 1)
            found["width"] = entries.shape[2]
            dtype = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}[self._dtype(written, side)]
            array = mx.array(entries.astype(np.float32)).astype(dtype)
            packed, scales, biases = mx.quantize(array, group_size=group_size, bits=bits)
            found[side] = (
                np.asarray(packed),
                *(np.asarray(part.astype(mx.float32)) for part in (scales, biases)),
            )
        return found

    def _dtype(self, written: Site, port: str) -> str:
        return self._captured.needed(self._rows[0], written, port).dtype

    def _note(self, key: str) -> str:
        """What the layer's cache said of itself at the start of the forward."""
        line = self._captured.trace.forwards()[self._forward]
        for note in line["caches"]:
            if self._site.layer in _layers(note["layers"]):
                return str(note.get(key, ""))
        return ""

    def _window(self) -> int | None:
        """How many entries a row of this layer sees, None for all; read off the cache's class and the model's settings."""
        if "Rotating" not in self._note("kind"):
            return None
        model = getattr(self._model, "model", self._model)
        arguments = getattr(model, "args", None) or getattr(self._model, "args", None)
        for name in ("sliding_window", "window_size", "sliding_window_size"):
            if isinstance(getattr(arguments, name, None), int):
                return int(getattr(arguments, name))
        raise OracleRefused(
            f"{self._site.name} sees a window of its cache, and its length is not among the model's settings. Judge the sites "
            "before attention."
        )


def _layers(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def significant(x: Float64, bits: int, *, nearest: bool = True) -> Float64:
    """``x`` with ``bits`` significant bits, rounded to nearest even or cut off."""
    fraction, exponent = np.frexp(x)
    scaled = np.ldexp(fraction, bits)
    whole: NDArray[np.float64] = np.rint(scaled) if nearest else np.trunc(scaled)
    found: Float64 = np.ldexp(whole, exponent - bits)
    return found
