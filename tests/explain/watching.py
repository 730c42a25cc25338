"""What the leaves of a real forward were given and gave, without the recorder."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from operands import read

from detdiff.engines.mlx.taps.tapping import tapped


class Watching:
    """Taps that keep what every leaf was given and gave, by site name."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[str, dict[str, Any], np.ndarray[Any, Any], str]] = {}
        self.counts: dict[str, int] = {}
        self.where: list[str] = []
        self.offset = 0

    def _name(self, name: str) -> str:
        self.counts[name] = self.counts.get(name, 0) + 1
        return name if self.counts[name] == 1 else f"{name}.{self.counts[name]}"

    def _keep(
        self, name: str, kind: str, captured: dict[str, Any], out: mx.array, moved: bool = False
    ) -> None:
        dtype = str(out.dtype).rpartition(".")[2]
        found = read(out)[0]
        self.seen[name] = (kind, captured, found.swapaxes(0, 1) if moved else found, dtype)

    def leaf(self, name: str, kind: str, native: Any, module: Module, args: Any, kw: Any) -> Any:
        key = self._name(name)
        held = [read(a)[0] for a in args if isinstance(a, mx.array) and a.ndim > 1]
        y = native(*args, **kw)
        if kind == "rope":
            positions = self.offset + np.arange(held[0].shape[1])
            self._keep(key, kind, {"in": held[0].swapaxes(0, 1), "positions": positions}, y, moved=True)
        elif kind == "switch":
            self._keep(key, kind, {"in": held[0], "experts": np.asarray(args[1])[0]}, y)
        else:
            ports = {"in" if i == 0 else f"in.{i + 1}": a for i, a in enumerate(held)}
            self._keep(key, kind, ports, y)
        return y

    def composite(self, name: str, native: Any, args: Any, kw: Any) -> Any:
        self.where.append(name)
        try:
            return native(*args, **kw)
        finally:
            self.where.pop()

    def top(self, native: Any, args: Any, kw: Any) -> Any:
        return native(*args, **kw)

    def attention(self, native: Any, args: Any, kw: Any) -> Any:
        y = native(*args, **kw)
        q, k, v = (read(a)[0] for a in args[:3])
        mask = kw.get("mask")
        held = read(mask)[0, 0] if isinstance(mask, mx.array) and mask.dtype != mx.bool_ else mask
        if isinstance(held, mx.array):
            held = np.array(held).reshape(held.shape[-2:])
        captured = {"in": q.swapaxes(0, 1), "k": k, "v": v, "mask": held, "scale": kw["scale"]}
        self._keep(self._name(f"{self.where[-1]}.attention"), "attention", captured, y, moved=True)
        return y

    def cache(self, native: Any, cache: Any, args: Any) -> Any:
        return native(*args)

    def scan(self, kind: str, native: Any, args: Any, kw: Any) -> Any:
        return native(*args, **kw)

    def all_sum(self, native: Any, args: Any, kw: Any) -> Any:
        return native(*args, **kw)

    def gather_sort(self, native: Any, args: Any) -> Any:
        return native(*args)


def watched(model: Module, length: int = 11) -> Watching:
    """Leaves of a forward of ``length`` tokens that follows one of three."""
    cache = make_prompt_cache(model)
    watching = Watching()
    mx.eval(model(mx.array([[5, 6, 7]]), cache=cache))
    watching.offset = 3
    with tapped(model, watching):
        mx.eval(model(mx.arange(length)[None] + 8, cache=cache))
    return watching
