"""Faults that a model can have, injected in the classes that mlx-lm models are made of; needs nothing but mlx and mlx-lm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as caches

Native = Callable[..., Any]


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Native], Native]) -> Iterator[None]:
    """``make(native)`` stands for an attribute of a class."""
    native = vars(owner)[name]
    setattr(owner, name, make(native))
    try:
        yield
    finally:
        setattr(owner, name, native)


@contextlib.contextmanager
def kernel_switch() -> Iterator[None]:
    """From two rows on, a linear layer that widens (gate_proj, up_proj) adds the products of K in two halves."""

    def make(native: Native) -> Native:
        def call(self: Any, x: mx.array) -> Any:
            n, k = self.weight.shape
            if n <= k or x.size // x.shape[-1] == 1:
                return native(self, x)
            half = k // 2
            return x[..., :half] @ self.weight[:, :half].T + x[..., half:] @ self.weight[:, half:].T

        return call

    with replaced(nn.Linear, "__call__", make):
        yield


@contextlib.contextmanager
def leak() -> Iterator[None]:
    """A hundredth of the newest key of row 1 gets into that of row 0, before the next row reads it."""

    def make(native: Native) -> Native:
        def update(self: Any, keys: mx.array, values: mx.array) -> Any:
            if keys.shape[0] > 1 and keys.shape[2] == 1:
                newest = self._idx - 1
                mixed = mx.array(self.keys)
                mixed[0, :, newest] = self.keys[0, :, newest] + 0.01 * self.keys[1, :, newest]
                self.keys = mixed
            return native(self, keys, values)

        return update

    with replaced(caches.BatchKVCache, "update_and_fetch", make):
        yield


@contextlib.contextmanager
def wrong_offset() -> Iterator[None]:
    """After the prompts, every row of a batch is at row 0's position."""

    def make(native: Native) -> Native:
        def forget(self: Any, *args: Any) -> Any:
            result = native(self, *args)
            self.offset = mx.broadcast_to(self.offset[:1], self.offset.shape)
            return result

        return forget

    with (
        replaced(caches.BatchKVCache, "update_and_fetch", make),
        replaced(caches.BatchKVCache, "finalize", make),
    ):
        yield


@contextlib.contextmanager
def lost_rows() -> Iterator[None]:
    """RoPE of one token gives zeros in every row of the batch but the first."""

    def make(native: Native) -> Native:
        def call(self: Any, x: mx.array, *args: Any, **kw: Any) -> Any:
            y = native(self, x, *args, **kw)
            if x.shape[0] > 1 and x.shape[2] == 1:
                y = mx.concatenate([y[:1], mx.zeros_like(y[1:])])
            return y

        return call

    with replaced(nn.RoPE, "__call__", make):
        yield


INJECTED_FAULTS = {
    "kernel_switch": kernel_switch,
    "leak": leak,
    "wrong_offset": wrong_offset,
    "lost_rows": lost_rows,
}
NAMED = {
    "kernel_switch": "origin: layers.0.mlp.gate_proj (linear, layer 0)",
    "leak": "origin: layers.0.self_attn.cache.read (cache_read, layer 0)",
    "wrong_offset": "origin: layers.0.self_attn.rope.q (rope, layer 0)",
    "lost_rows": "origin: layers.0.self_attn.rope.q (rope, layer 0)",
}
"""What the failure has to name."""
