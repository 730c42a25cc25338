"""ggml's arithmetic on a CPU in plain NumPy, float32 step by step, and the graph of a `KnownModel` computed with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from detdiff.compare.metrics import Values
from detdiff.engines.llama_cpp.known_model import KnownModel
from detdiff.engines.llama_cpp.oracle_operations import SiteNode
from detdiff.errors import OracleRefused
from detdiff.trace import Site

Array = np.ndarray[Any, Any]
F = np.float32


def staged(x: Array, kind: str) -> tuple[Array, Array]:
    """Rows (m, k) converted for a weight of a type: values per item before scales, and scales per block of 32."""
    ones = np.ones((len(x), x.shape[1] // 32), F)
    if kind == "F32":
        return x, ones
    if kind == "F16":
        return x.astype(np.float16).astype(F), ones
    parts = x.reshape(len(x), -1, 32)
    most = np.abs(parts).max(axis=2)
    with np.errstate(divide="ignore"):
        inverse = np.where(most > 0, F(127) / most, F(0))
    codes = np.rint(parts * inverse[:, :, None])
    return codes.reshape(x.shape).astype(F), (most / F(127)).astype(F)


def product(x: Array, weight: Array, kind: str, *, lanes: int) -> Array:
    """Rows (m, k) times a float32 weight (n, k) stored as ``kind``: ``lanes`` sums side by side, which are added in turn.

    A matrix-vector kernel has many lanes and a matrix-matrix kernel one: same operands, another order.
    """
    codes, scales = staged(x, kind)
    if kind in ("F32", "F16"):
        w = weight if kind == "F32" else weight.astype(np.float16).astype(F)
        out = np.zeros((len(x), lanes, len(w)), F)
        for at in range(0, x.shape[1], lanes):
            part = codes[:, at : at + lanes, None] * w[:, at : at + lanes].T[None]
            out[:, : part.shape[1]] += part
        return _added(out)
    raw = quantize(weight, GGMLQuantizationType[kind])
    blocks = raw.reshape(len(raw), -1, raw.shape[1] // (weight.shape[1] // 32))
    scale = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0].astype(F)
    minimum = np.zeros_like(scale)
    if kind == "Q8_0":
        own = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).astype(np.int64)
    else:
        packed = blocks[:, :, 2 if kind == "Q4_0" else 4 :].astype(np.int64)
        own = np.concatenate([packed & 15, packed >> 4], axis=2) - (8 if kind == "Q4_0" else 0)
        if kind == "Q4_1":
            minimum = np.ascontiguousarray(blocks[:, :, 2:4]).view(np.float16)[:, :, 0].astype(F)
    theirs = codes.astype(np.int64).reshape(len(x), -1, 32)
    d = scales.astype(np.float16).astype(F)
    sums = (scales * theirs.sum(axis=2).astype(F)).astype(np.float16).astype(F)
    out = np.zeros((len(x), lanes, len(weight)), F)
    for block in range(own.shape[1]):
        whole = (theirs[:, block] @ own[:, block].T).astype(F)
        out[:, block % lanes] += whole * (d[:, block, None] * scale[None, :, block])
        out[:, block % lanes] += sums[:, block, None] * minimum[None, :, block]
    return _added(out)


def _added(out: Array) -> Array:
    total = out[:, 0]
    for lane in range(1, out.shape[1]):
        total = total + out[:, lane]
    return total


def rms_norm(x: Array, eps: float = 1e-5) -> Array:
    mean = ((x * x).astype(np.float64).sum(axis=-1, keepdims=True) / x.shape[-1]).astype(F)
    return x * (F(1) / np.sqrt(mean + F(eps)))


def rope(x: Array, positions: Sequence[int], base: float = 10000.0) -> Array:
    """(rows, heads, width), neighbours as pairs; the angle of a pair is that of the one before times a power."""
    out, width = x.copy(), x.shape[2]
    step = F(base) ** F(-2.0 / width)
    theta = np.array(positions, F)[:, None]
    for i in range(0, width, 2):
        c, s = np.cos(theta), np.sin(theta)
        a, b = x[..., i], x[..., i + 1]
        out[..., i], out[..., i + 1] = a * c - b * s, a * s + b * c
        theta = theta * step
    return out


def swiglu(gate: Array, up: Array) -> Array:
    return gate / (F(1) + np.exp(-gate)) * up


def flash_attention(q: Array, k: Array, v: Array, scale: float, order: Sequence[int]) -> Array:
    """One row q (heads, width) over float16 entries (kv heads, keys, width): key by key in ``order``, the output in float16."""
    out = np.empty(q.shape, F)
    q16 = q.astype(np.float16).astype(F)
    for head in range(len(q)):
        kv = head // (len(q) // len(k))
        held, total, most = np.zeros(q.shape[1], np.float16), F(0), F(-np.inf)
        for key in order:
            s = (q16[head] * k[kv, key].astype(F)).sum(dtype=F) * F(scale)
            ms, vs = F(1), F(1)
            if s > most:
                ms, most = np.exp(most - s), s
                held = (held.astype(F) * ms).astype(np.float16)
            else:
                vs = np.exp(s - most)
            held = (held.astype(F) + v[kv, key].astype(F) * vs).astype(np.float16)
            total = total * ms + vs
        out[head] = held.astype(F) * (F(1) / total)
    return out


def plain_attention(q: Array, k: Array, v: Array, scale: float, order: Sequence[int]) -> Array:
    """The same by two products around a softmax, whose weights are staged as float16."""
    out = np.empty(q.shape, F)
    q16, keys = q.astype(np.float16).astype(F), list(order)
    for head in range(len(q)):
        kv = head // (len(q) // len(k))
        scores = np.array([(q16[head] * k[kv, key].astype(F)).sum(dtype=F) for key in keys]) * F(scale)
        powers = np.exp(scores - scores.max())
        weights = powers * F(1 / powers.sum(dtype=np.float64))
        weights = weights.astype(np.float16).astype(F)
        total = np.zeros(q.shape[1], F)
        for weight, key in zip(weights, keys, strict=True):
            total = total + weight * v[kv, key].astype(F)
        out[head] = total
    return out


@dataclass
class StatedNode:
    """A site with its rows, what it was given, by port, and what the graph says of it."""

    site: Site
    values: Array
    given: dict[str, Array]
    node: SiteNode = field(default_factory=SiteNode)


class StatedRun:
    """One request's prompt through a `KnownModel`, as the oracle is given a captured run; ``fault`` names what is computed wrongly.

    ``lanes`` is the order of sums in products. Has the methods of `Captured` that operations ask for.
    """

    def __init__(
        self,
        model: KnownModel,
        tokens: Sequence[int],
        *,
        fault: str = "",
        lanes: int = 8,
        flash: bool = True,
        system: str = "Linux x86_64",
    ) -> None:
        self.model, self.fault, self.lanes, self.flash = model, fault, lanes, flash
        self.nodes: dict[str, StatedNode] = {}
        self.weights = model.weights()
        rows = np.arange(len(tokens))
        index = SimpleNamespace(
            position=rows,
            forward=np.zeros(len(rows), int),
            token=np.array(tokens),
            request=np.zeros(len(rows), int),
        )
        self.trace = SimpleNamespace(header={"environment": {"os": system}}, row_index=lambda: index)
        self._run(list(tokens))

    def _add(
        self, name: str, kind: str, values: Array, given: dict[str, Array], weight: str | None = None
    ) -> Array:
        layer = int(name.split(".")[0].rpartition("-")[2]) if "-" in name else None
        site = Site(name, kind, layer, tuple(given), ("out",))
        self.nodes[name] = StatedNode(site, values, given, SiteNode(weight))
        return values

    def _linear(self, name: str, x: Array, weight: str) -> Array:
        used = self.weights[weight]
        if self.fault == "weight" and weight == "blk.1.attn_q.weight":
            used = used.copy()
            used[3] = used[4]
        out = product(x, used, self.model.kind, lanes=self.lanes)
        return self._add(f"{name}.MUL_MAT", "linear", out, {"in": x}, weight)

    def _norm(self, name: str, scaled: str, x: Array, weight: str) -> Array:
        eps = 1e-2 if self.fault == "eps" and name == "norm-1.RMS_NORM" else 1e-5
        normed = self._add(name, "norm", rms_norm(x, eps), {"in": x})
        used = self.weights[weight] + (
            F(1) if self.fault == "norm weight" and scaled == "attn_norm-1.MUL" else 0
        )
        return self._add(scaled, "elementwise", normed * used, {"in": normed}, weight)

    def _run(self, tokens: list[int]) -> None:
        model, n = self.model, len(tokens)
        stored = dequantize(
            quantize(self.weights["token_embd.weight"], GGMLQuantizationType[model.kind]),
            GGMLQuantizationType[model.kind],
        )
        ids = [*tokens[:-1], tokens[-1] + (self.fault == "embedding")]
        x = self._add("embd.GET_ROWS", "embedding", stored[ids], {}, "token_embd.weight")
        for layer in range(model.layers):
            at = f"blk.{layer}."
            wrong = layer == 1
            h = self._norm(f"norm-{layer}.RMS_NORM", f"attn_norm-{layer}.MUL", x, f"{at}attn_norm.weight")
            q, k, v = (
                self._linear(f"{name.upper()}cur-{layer}", h, f"{at}attn_{name}.weight") for name in "qkv"
            )
            turned = {}
            for name, flat in (("Q", q), ("K", k)):
                base = 5000.0 if self.fault == "rope base" and wrong and name == "Q" else 10000.0
                whole = rope(flat.reshape(n, -1, model.head_width), range(n), base)
                turned[name] = self._add(
                    f"{name}cur-{layer}.ROPE", "rope", whole.reshape(n, -1), {"in": flat}
                )
            x = self._attended(layer, turned["Q"], turned["K"], v, x)
            h = self._norm(f"norm-{layer}.RMS_NORM#2", f"ffn_norm-{layer}.MUL", x, f"{at}ffn_norm.weight")
            gate, up = (
                self._linear(f"ffn_{name}-{layer}", h, f"{at}ffn_{name}.weight") for name in ("gate", "up")
            )
            pair = (up, gate) if self.fault == "gate and up" and wrong else (gate, up)
            glu = self._add(f"ffn_swiglu-{layer}.GLU", "activation", swiglu(*pair), {"in": gate, "in2": up})
            out = self._linear(f"ffn_out-{layer}", glu, f"{at}ffn_down.weight")
            total = out + x
            if self.fault == "residual" and wrong:
                total = total.copy()
                total[2, 5] = out[2, 5]
            x = self._add(f"l_out-{layer}.ADD", "elementwise", total, {"in": out, "in2": x})
        h = self._norm("norm.RMS_NORM", "result_norm.MUL", x, "output_norm.weight")
        head = "token_embd.weight" if model.tied else "output.weight"
        logits = self._linear("result_output", h, head)
        self._add("logits", "logits", logits, {"in": logits})

    def _attended(self, layer: int, q: Array, k: Array, v: Array, x: Array) -> Array:
        model, n, width = self.model, len(q), self.model.head_width
        wrong = layer == 1
        heads = [each.reshape(n, -1, width).swapaxes(0, 1).astype(np.float16) for each in (k, v)]
        if self.fault == "cache" and wrong:
            heads[1] = heads[1].copy()
            heads[1][1, 0] = heads[1][1, 1]
        names = tuple(f"{side}.{h}" for side in "KV" for h in range(model.kv_heads))
        entries = np.concatenate(heads).swapaxes(0, 1)
        name = f"cache_l{layer}.write"
        site = Site(name, "cache_write", layer, ("k", "v"), names)
        self.nodes[name] = StatedNode(site, entries, {"k": k, "v": v})
        scale = (1.05 if self.fault == "attention scale" and wrong else 1.0) / np.sqrt(width)
        attend = flash_attention if self.flash else plain_attention
        out = np.empty((n, model.width), F)
        for row in range(n):
            # The cells of a cache that was used before do not lie in the order of positions.
            order = list(range(row + 1))[::-1]
            if self.fault == "entry skipped" and wrong and row == n - 1:
                order.remove(row - 1)
            mine = q[row].reshape(-1, width)
            out[row] = attend(mine, heads[0], heads[1], scale, order).reshape(-1)
        op = "FLASH_ATTN_EXT" if self.flash else "MUL_MAT"
        self._add(f"kqv-{layer}.{op}", "attention", out, {"in": q})
        projected = self._linear(f"attn_out-{layer}", out, f"blk.{layer}.attn_output.weight")
        return self._add(f"ffn_inp-{layer}.ADD", "elementwise", projected + x, {"in": projected, "in2": x})

    # What operations ask of a captured run.

    def needed(self, row: int, site: Site, port: str) -> Values:
        node = self.nodes[site.name]
        if site.kind == "cache_write" and port not in node.given:
            return Values(node.values[row, site.outputs.index(port)], "F16")
        if port not in node.given:
            raise OracleRefused(f"The value of {site.name}.{port} was not captured.")
        return Values(node.given[port][row], "F32")

    def entries(self, request: str, site: Site, side: str, span: range, until: int) -> Array:
        places = [n for n, port in enumerate(site.outputs) if port.startswith(side)]
        return self.nodes[site.name].values[span.start : span.stop, places].swapaxes(0, 1).astype(np.float64)

    def write_site(self, layer: int | None, *, draft: bool) -> Site:
        return self.nodes[f"cache_l{layer}.write"].site

    def output(self, name: str, rows: Sequence[int]) -> Array:
        return self.nodes[name].values[list(rows)].astype(np.float64)
