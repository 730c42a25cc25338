"""The operation of a graph node for the float64 oracle: what it was given, as captured, with the weights of the GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from detdiff.errors import OracleRefused
from detdiff.explain.attention_bounds import AttentionOperation
from detdiff.explain.bounds import BoundedOutputs, Copied, Embedding, Linear, Norm, Rope, output_rounded
from detdiff.explain.decoder import GatedActivation
from detdiff.explain.oracle import Operation
from detdiff.explain.origins import DRAFT, DTYPES, Captured
from detdiff.explain.roundings import Arithmetic, Float64
from detdiff.trace import Site
from detdiff_kernels.errors import KernelLibraryError
from detdiff_kernels.gguf_file import open_gguf
from detdiff_kernels.rounding import rounded
from detdiff_kernels.weights import BLOCKS, Blocks, Dense

from .ggml_bounds import Elementwise, StagedLinear, attending

_NEIGHBOURS: Final = ("llama",)
_HALVES: Final = ("qwen2", "qwen3")
"""Architectures by which items rotary positions pair (llama-model.cpp, llama_model_rope_type), and whose scores are what is known here."""
_PLAIN: Final = ("CONT", "CPY", "DUP", "GET_ROWS")
"""Operations that copy their rows."""
_WINDOWS: Final = ("attention.sliding_window", "attention.max_alibi_bias", "attn_logit_softcapping")
"""What makes scores of another form."""


@dataclass(frozen=True, eq=False)
class _Biased:
    """Products of staged rows plus a bias (n,), which is a node of its own."""

    products: StagedLinear
    bias: Float64

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        found = self.products.bounded(arithmetic)
        exact = found.exact + self.bias
        bound, unbounded = output_rounded(exact, found.bound, arithmetic)
        return replace(found, exact=exact, bound=bound, unbounded=found.unbounded | unbounded)


def sums_in_halves(environment: Mapping[str, Any]) -> bool:
    """Whether a processor may sum products of float16 in float16."""
    return bool(re.search(r"arm|aarch64", str(environment.get("os", "")), re.I))


def as_computed(operation: Operation, *, flash: bool, cache: tuple[str, str], half_sums: bool) -> Operation:
    """An operation of the decoder with the roundings of ggml's kernels: over keys and values as they were before a ``cache`` of
    these dtypes. Raises OracleRefused for one that is not known."""
    if isinstance(operation, Linear):
        products = StagedLinear(operation.x, operation.weight, half_sums=half_sums)
        return products if operation.bias is None else _Biased(products, operation.bias)
    if isinstance(operation, Rope):
        return replace(operation, chained=True, frequencies=operation.divisors, divisors=None)
    if isinstance(operation, GatedActivation):
        if operation.form != "silu":
            raise OracleRefused(
                "ggml looks its GELU up in a table of float16, whose error is not known. Judge what is around it."
            )
        return Elementwise("swiglu", operation.gate, operation.up)
    if isinstance(operation, AttentionOperation):
        keys, width = operation.keys.shape[1:]
        own = attending(flash, *cache, keys, width, half_sums=half_sums)
        narrow = [each for each in cache if each != "float32"]
        coarse = min(narrow, key=("bfloat16", "float16").index, default=None)
        staged: tuple[tuple[int, str], ...] = () if coarse is None else ((1, coarse),)
        query: tuple[tuple[int, str], ...] = () if cache[0] == "float32" else ((1, cache[0]),)
        return replace(operation, roundings=replace(own, query=query, cached=staged, rounded=""))
    return operation


@dataclass(frozen=True)
class SiteNode:
    """What the graph says of a site's node: the GGUF name of the ``weight`` among its sources, if any, and its innermost axis."""

    weight: str | None = None
    width: int | None = None


class GgufWeights:
    """The tensors and settings of a GGUF file, read when they are asked for.

    Raises OracleRefused where the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._reader = open_gguf(path)
        except KernelLibraryError as error:
            raise OracleRefused(str(error)) from error
        self._tensors: dict[str, Any] = {each.name: each for each in self._reader.tensors}
        self._settings: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def matrix(self, name: str) -> Dense | Blocks:
        """A tensor (n, k) as it is stored, mapped. Raises OracleRefused for another rank and for a type that is not known."""
        tensor = self._tensor(name)
        kind = tensor.tensor_type.name
        if len(tensor.shape) != 2:
            raise OracleRefused(
                f"The tensor {name} has {len(tensor.shape)} axes, and the product with it is known for 2. Judge the sites before and "
                "after it."
            )
        if kind in BLOCKS:
            return Blocks(kind, np.asarray(tensor.data))
        if kind in ("F32", "F16"):
            return Dense(np.asarray(tensor.data), DTYPES[kind])
        if kind == "BF16":
            return Dense(np.ascontiguousarray(tensor.data).view(np.uint16), "bfloat16")
        raise OracleRefused(
            f"The tensor {name} is {kind}, for which ggml's arithmetic is not known; known are F32, F16, BF16, {', '.join(BLOCKS)}. "
            "Judge the sites before and after it."
        )

    def vector(self, name: str) -> Float64:
        """A float32 tensor of one axis, widened. Raises OracleRefused for another one."""
        tensor = self._tensor(name)
        if tensor.tensor_type.name != "F32" or len(tensor.shape) != 1:
            raise OracleRefused(
                f"The tensor {name} is {tensor.tensor_type.name} with {len(tensor.shape)} axes; expected F32 with one. Judge the sites "
                "before and after it."
            )
        return np.asarray(tensor.data, np.float64)

    def setting(self, key: str, default: Any = None) -> Any:
        """What the file says under its architecture's name."""
        name = f"{self.architecture}.{key}"
        if name not in self._settings:
            field = self._reader.fields.get(name)
            self._settings[name] = default if field is None else field.contents()
        return self._settings[name]

    @cached_property
    def architecture(self) -> str:
        return str(self._reader.fields["general.architecture"].contents())

    @property
    def head_width(self) -> int:
        """Items of a key of one head."""
        default = int(self.setting("embedding_length", 0)) // max(
            int(self.setting("attention.head_count", 1)), 1
        )
        return int(self.setting("attention.key_length", default))

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise OracleRefused(
                f"The GGUF file has no tensor {name}, which the graph multiplied with; expected the file that was run. Name that one."
            )
        return self._tensors[name]


def operation_of(
    weights: GgufWeights, node: SiteNode, site: Site, captured: Captured, request: str, rows: Sequence[int]
) -> Operation:
    """The operation of ``site`` in ``rows`` of a captured run, over the weights that the graph's node names.

    Raises OracleRefused for an operation that is not known, and for values that were not captured.
    """
    return _Asked(weights, node, site, captured, request, list(rows)).operation()


@dataclass(frozen=True)
class _Asked:
    weights: GgufWeights
    node: SiteNode
    site: Site
    captured: Captured
    request: str
    rows: list[int]

    def operation(self) -> Operation:
        name = self.site.name.removeprefix(DRAFT)
        op = re.sub(r"#\d+$", "", name.rpartition(".")[2])
        if self.site.kind == "cache_write":
            return self._written()
        if self.site.kind == "attention":
            return self._attention(op)
        if self.site.kind == "logits" or (op in _PLAIN and self.node.weight is None):
            return Copied(self._given("in"))
        if op == "MUL_MAT" and self.node.weight is not None:
            weight = self.weights.matrix(self.node.weight)
            return StagedLinear(self._given("in"), weight, half_sums=self._arm)
        if op == "GET_ROWS" and self.node.weight is not None:
            weight = self.weights.matrix(self.node.weight)
            tokens = self.captured.trace.row_index().token[self.rows].astype(np.int64)
            return Embedding(tokens, weight, isinstance(weight, Blocks))
        if op in ("RMS_NORM", "NORM"):
            return self._norm(op)
        if op == "ROPE":
            return self._rope()
        if op in ("ADD", "MUL"):
            return self._pair("sum" if op == "ADD" else "product")
        if op == "GLU" and "swiglu" in name and len(self.site.inputs) == 2:
            return Elementwise("swiglu", self._given("in"), self._given("in2"))
        raise OracleRefused(
            f"The site {self.site.name} is a {op} in a form whose arithmetic is not known. Judge the sites before and after it."
        )

    @property
    def _arm(self) -> bool:
        """Whether the run's processor may sum products of float16 in float16."""
        return sums_in_halves(self.captured.trace.header["environment"])

    def _given(self, port: str) -> Float64:
        """(rows, width) of an input."""
        if port not in self.site.inputs:
            raise OracleRefused(
                f"What {self.site.name} was given as {port} is no site of this trace, so it cannot be computed again. Judge the sites "
                "before and after it."
            )
        values = [self.captured.needed(row, self.site, port).numbers().reshape(-1) for row in self.rows]
        return np.stack(values)

    def _pair(self, form: Any) -> Operation:
        a = self._given("in")
        if self.node.weight is None:
            return Elementwise(form, a, self._given("in2"))
        weight = self.weights.vector(self.node.weight)
        if a.shape[1] % len(weight):
            raise OracleRefused(
                f"{self.site.name} has rows of {a.shape[1]} numbers, and {self.node.weight} has {len(weight)}. Judge the sites before and "
                "after it."
            )
        # Heads share a weight of one head.
        return Elementwise(form, a, np.tile(weight, a.shape[1] // len(weight))[None])

    def _norm(self, op: str) -> Operation:
        x = self._given("in")
        width = self.node.width
        if width is None and any(f"blk.0.attn_{each}_norm.weight" in self.weights for each in "qk"):
            raise OracleRefused(
                f"{self.site.name} may be over whole rows or over heads, and the graph's axis was not kept. Judge the sites around it."
            )
        width = width or x.shape[1]
        key = "layer_norm_rms_epsilon" if op == "RMS_NORM" else "layer_norm_epsilon"
        eps = self.weights.setting(f"attention.{key}")
        if eps is None or x.shape[1] % width:
            raise OracleRefused(
                f"The GGUF file says no {key} for {self.site.name}, or its rows of {x.shape[1]} are no multiple of {width}. Judge the "
                "sites before and after it."
            )
        shaped = x.reshape(len(x), -1, width)
        return Norm(shaped, float(np.float32(eps)), "rms" if op == "RMS_NORM" else "layer")

    def _known(self, what: str) -> None:
        if self.weights.architecture not in _NEIGHBOURS + _HALVES:
            raise OracleRefused(
                f"{what} of the architecture {self.weights.architecture!r} are not known; known are those of "
                f"{', '.join(_NEIGHBOURS + _HALVES)}. Judge the sites around {self.site.name}."
            )

    def _rope(self) -> Operation:
        self._known("Rotary positions")
        weights = self.weights
        scaling = weights.setting("rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise OracleRefused(
                f"{self.site.name} scales positions by {scaling!r}, whose angles are not known here. Judge the sites around it."
            )
        factor = float(weights.setting("rope.scaling.factor", 1.0)) if scaling == "linear" else 1.0
        divisors = weights.vector("rope_freqs.weight") if "rope_freqs.weight" in weights else None
        x = self._given("in")
        if x.shape[1] % weights.head_width:
            raise OracleRefused(
                f"{self.site.name} turns {x.shape[1]} numbers, which are no whole heads of {weights.head_width}. Judge the sites around it."
            )
        return Rope(
            x.reshape(len(x), -1, weights.head_width),
            self.captured.trace.row_index().position[self.rows].astype(np.float64),
            int(weights.setting("rope.dimension_count", weights.head_width)),
            traditional=weights.architecture in _NEIGHBOURS,
            base=float(weights.setting("rope.freq_base", 10000.0)),
            frequencies=divisors,
            scale=1.0 / factor,
            chained=True,
        )

    def _cache_dtype(self, site: Site, port: str) -> str:
        dtype = self.captured.needed(self.rows[0], site, port).dtype
        if dtype not in DTYPES:
            raise OracleRefused(
                f"{site.name} keeps entries in a form that the trace holds as bytes; known are {', '.join(DTYPES)}. Run with a cache of "
                "one of these, or judge the sites before attention."
            )
        return DTYPES[dtype]

    def _written(self) -> Operation:
        """Entries are the keys and values, rounded to the cache's types."""
        parts = []
        for side in ("k", "v"):
            port = next(name for name in self.site.outputs if name.startswith(f"{side.upper()}."))
            values = self._given(side).astype(np.float32)
            parts.append(rounded(values, self._cache_dtype(self.site, port)).astype(np.float64))
        return Copied(np.concatenate(parts, axis=1))

    def _attention(self, op: str) -> Operation:
        """Of one row: its query over the entries of its own sequence up to its position."""
        self._known("Scores")
        if len(self.rows) != 1:
            raise OracleRefused("Attention is judged row by row, as each row sees other entries.")
        said = [key for key in _WINDOWS if self.weights.setting(key)]
        if said:
            raise OracleRefused(
                f"{self.site.name} computes scores in a form that is not known: the file says {said[0]}. Judge the sites around it."
            )
        index = self.captured.trace.row_index()
        row = self.rows[0]
        span = range(int(index.position[row]) + 1)
        written = self.captured.write_site(self.site.layer, draft=self.site.name.startswith(DRAFT))
        keys, values = (self._cache_dtype_of(written, side) for side in "KV")
        k, v = (
            self.captured.entries(self.request, written, side, span, int(index.forward[row])) for side in "KV"
        )
        q = self._given("in").reshape(1, -1, k.shape[2])
        scale = float(np.float32(self.weights.setting("attention.scale", 0.0) or 1 / np.sqrt(k.shape[2])))
        own = attending(op == "FLASH_ATTN_EXT", keys, values, len(span), k.shape[2], half_sums=self._arm)
        return AttentionOperation(q, k, v, scale, np.zeros((1, 1, len(span))), roundings=own)

    def _cache_dtype_of(self, written: Site, side: str) -> str:
        return self._cache_dtype(
            written, next(each for each in written.outputs if each.startswith(f"{side}."))
        )
