"""Small models in mlx-lm's form. The sound one can be packed; each other one mixes rows in its own way."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from tiny import VOCAB

DIMS, HEADS, WIDTH = 32, 2, 16


class Attention(nn.Module):
    """Sound: position, entries and mask go from the cache to RoPE and attention, nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(DIMS, 3 * DIMS, bias=False)
        self.o_proj = nn.Linear(DIMS, DIMS, bias=False)
        self.rope = nn.RoPE(WIDTH)

    def split(self, x: mx.array) -> list[mx.array]:
        slots, rows, _ = x.shape
        parts = mx.split(self.qkv_proj(x), 3, axis=-1)
        return [part.reshape(slots, rows, HEADS, WIDTH).transpose(0, 2, 1, 3) for part in parts]

    def join(self, y: mx.array) -> mx.array:
        slots, _, rows, _ = y.shape
        return self.o_proj(y.transpose(0, 2, 1, 3).reshape(slots, rows, DIMS))

    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: Any, cache: Any) -> mx.array:
        return scaled_dot_product_attention(q, k, v, cache=cache, scale=WIDTH**-0.5, mask=mask)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        q, k, v = self.split(x)
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        k, v = cache.update_and_fetch(k, v)
        return self.join(self.attend(q, k, v, mask, cache))


class CastAttention(Attention):
    """Sound too: some models attend in another dtype than they store."""

    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: Any, cache: Any) -> mx.array:
        kept = v.dtype
        q, k, v = (part.astype(mx.float32) for part in (q, k, v))
        return super().attend(q, k, v, mask, cache).astype(kept)


class OffsetArithmetic(Attention):
    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        positions = mx.arange(cache.offset, cache.offset + x.shape[1])
        return super().__call__(x + 0.01 * positions[:, None], mask, cache)


class OffsetCompared(Attention):
    """Treats the first rows of a request in another way: a packed offset must not answer such a question."""

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        return super().__call__(x * 2 if cache.offset == 0 else x, mask, cache)


class OffsetTruth(Attention):
    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        return super().__call__(x if cache.offset else x * 2, mask, cache)


class KeysShape(Attention):
    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: Any, cache: Any) -> mx.array:
        return super().attend(q * (k.shape[2] ** 0.01), k, v, mask, cache)


class MaskIgnored(Attention):
    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: Any, cache: Any) -> mx.array:
        return super().attend(q, k, v, "causal" if q.shape[2] > 1 else None, cache)


class MaskCompared(Attention):
    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: Any, cache: Any) -> mx.array:
        return super().attend(q * 2 if mask == "causal" else q, k, v, mask, cache)


class OwnAttention(Attention):
    """Scores by hand: what the cache returns in a packed forward is no array."""

    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: Any, cache: Any) -> mx.array:
        scores = mx.softmax(q @ k.swapaxes(-1, -2), axis=-1)
        out: mx.array = scores @ v
        return out


class RopeBeforeHeads(Attention):
    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        return super().__call__(self.rope(x, offset=cache.offset), mask, cache)


class LocalAttention(nn.Module):
    """Attention among the rows of a forward, without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIMS, DIMS, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.proj(x)
        rows = x.shape[1]
        scores = y @ x.swapaxes(-1, -2) + mx.where(mx.tri(rows) > 0, 0, -1e9)
        out: mx.array = mx.softmax(scores, axis=-1) @ x
        return out


class TokenShift(nn.Module):
    def __call__(self, x: mx.array) -> mx.array:
        return mx.concatenate([mx.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


class ShortConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIMS, DIMS, 3)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.conv(mx.pad(x, [(0, 0), (2, 0), (0, 0)]))
        return out


class Pooling(nn.Module):
    def __call__(self, x: mx.array) -> mx.array:
        return mx.broadcast_to(x.mean(axis=1, keepdims=True), x.shape)


class LastRow(nn.Module):
    """A later row leaks into the earlier ones."""

    def __call__(self, x: mx.array) -> mx.array:
        return mx.broadcast_to(x[:, -1:], x.shape)


class ArangePositions(nn.Module):
    """Positions counted by the forward, not by the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1024, DIMS)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.broadcast_to(self.table(mx.arange(x.shape[1]))[None], x.shape)


class LengthScale(nn.Module):
    """Depends on how many rows the forward has, and on nothing else of the others."""

    def __call__(self, x: mx.array) -> mx.array:
        return x * (x.shape[1] ** 0.5)


class DecodeBranch(nn.Module):
    """Another computation for a single row: packed decode rows are never single."""

    def __call__(self, x: mx.array) -> mx.array:
        return x * 0.5 if x.shape[1] == 1 else x


class Remembers(nn.Module):
    """Keeps the last row of a forward in the module instead of in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self._last: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        last, self._last = self._last, mx.stop_gradient(x[:1, -1:])
        return x if last is None else x + last


class FirstServed(nn.Module):
    """Rows beyond a capacity are left out, as experts with a limit do it."""

    def __call__(self, x: mx.array) -> mx.array:
        wants = (x[..., :1] > 0).astype(mx.int32)
        return mx.where((wants > 0) & (mx.cumsum(wants, axis=1) <= 2), x, 0)


class Block(nn.Module):
    def __init__(self, attention: type[Attention], mixer: type[nn.Module] | None) -> None:
        super().__init__()
        self.self_attn = attention()
        self.mixer = None if mixer is None else mixer()
        self.norm = nn.RMSNorm(DIMS)
        self.up_proj = nn.Linear(DIMS, DIMS, bias=False)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        x = x + self.self_attn(self.norm(x), mask, cache)
        if self.mixer is not None:
            x = x + 0.5 * self.mixer(self.norm(x))
        return x + nn.silu(self.up_proj(x))


class Toy(nn.Module):
    """Two layers; ``mixer`` mixes rows beside attention, ``attention`` is one of the classes above."""

    def __init__(self, attention: type[Attention] = Attention, mixer: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIMS)
        self.layers = [Block(attention, mixer) for _ in range(2)]
        self.norm = nn.RMSNorm(DIMS)
        self.lm_head = nn.Linear(DIMS, VOCAB, bias=False)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        x = self.embed_tokens(inputs)
        mask = create_attention_mask(x, cache[0])
        for layer, entry in zip(self.layers, cache, strict=True):
            x = layer(x, mask, entry)
        out: mx.array = self.lm_head(self.norm(x))
        return out


class Looped(Toy):
    """Runs its layers twice, each time with caches of their own."""

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in range(2 * len(self.layers))]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        x = self.embed_tokens(inputs)
        mask = create_attention_mask(x, cache[0])
        for layer, entry in zip(2 * self.layers, cache, strict=True):
            x = layer(x, mask, entry)
        out: mx.array = self.lm_head(self.norm(x))
        return out


class Keyworded(Toy):
    """Calls its blocks by keyword."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        x = self.embed_tokens(inputs)
        mask = create_attention_mask(x, cache[0])
        for layer, entry in zip(self.layers, cache, strict=True):
            x = layer(x=x, mask=mask, cache=entry)
        out: mx.array = self.lm_head(self.norm(x))
        return out


class Listing(nn.Module):
    """A projection that gives a list, as fused ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = FusedLinear(DIMS, 2 * DIMS, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = self.proj(x)
        return nn.silu(gate) * up


class FusedLinear(nn.Linear):
    def __call__(self, x: mx.array) -> Any:
        return mx.split(super().__call__(x), 2, axis=-1)


NAMED = (
    OffsetArithmetic,
    OffsetCompared,
    OffsetTruth,
    KeysShape,
    MaskIgnored,
    MaskCompared,
    OwnAttention,
    RopeBeforeHeads,
)
LEAKS = (
    LocalAttention,
    TokenShift,
    ShortConv,
    Pooling,
    LastRow,
    ArangePositions,
    LengthScale,
    DecodeBranch,
    Remembers,
    FirstServed,
)
