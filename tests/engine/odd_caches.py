"""Caches of one's own and models around them, as people have them: what nobody can know in advance."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import deepseek_v32, llama4
from mlx_lm.models.cache import KVCache
from runs import loaded
from tiny import VOCAB
from toy_models import DIMS, Attention

from detdiff.engines.mlx.model import LoadedModel

_LLAMA4 = {
    "attention_bias": False,
    "attention_chunk_size": 4,
    "head_dim": 16,
    "hidden_size": 64,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 64,
    "intermediate_size_mlp": 128,
    "max_position_embeddings": 512,
    "model_type": "llama4_text",
    "num_attention_heads": 4,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "use_qk_norm": True,
    "vocab_size": VOCAB,
}


def chunked() -> LoadedModel:
    """A tiny llama4: three layers whose mask sees one chunk of 4 positions, one that sees all."""
    mx.random.seed(0)
    config = {"model_type": "llama4", "text_config": _LLAMA4}
    return loaded(llama4.Model(llama4.ModelArgs.from_dict(config)), "llama4", config)


def indexed() -> LoadedModel:
    """A tiny deepseek_v32, which keeps keys of an indexer beside its latents and overwrites their values."""
    mx.random.seed(0)
    sizes = {
        "hidden_size": 64, "index_head_dim": 32, "index_n_heads": 2, "index_topk": 4, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 32, "qk_nope_head_dim": 32, "first_k_dense_replace": 2, "vocab_size": VOCAB,
    }  # fmt: skip
    return loaded(deepseek_v32.Model(deepseek_v32.ModelArgs(**sizes)), "deepseek_v32", sizes)


class SinkCache(KVCache):  # type: ignore[misc]
    """Keeps all, and gives a row that comes alone the first entry and the ``recent`` newest ones."""

    recent = 4

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        held = super().update_and_fetch(keys, values)
        newest = max(1, self.offset - self.recent)
        if keys.shape[2] > 1:
            return held
        return tuple(mx.concatenate([s[..., :1, :], s[..., newest:, :]], axis=2) for s in held)


class LatentCache:
    """Keeps one array of latents, as caches of compressed attention do; has no ``update_and_fetch``, and its offset
    counts calls."""

    def __init__(self) -> None:
        self.offset = self.seen = 0
        self.latent: mx.array | None = None

    def append(self, latent: mx.array) -> mx.array:
        self.offset += 1
        self.seen += latent.shape[1]
        held = latent if self.latent is None else mx.concatenate([self.latent, latent], axis=1)
        self.latent = held
        return held

    def make_mask(self, rows: int, **_: Any) -> None:
        return None

    @property
    def state(self) -> Any:
        return self.latent

    def empty(self) -> bool:
        return self.latent is None


class LatentAttention(nn.Module):
    """Attends to latents without mlx-lm's attention function: the reading cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(DIMS, DIMS, bias=False)
        self.kv_proj = nn.Linear(DIMS, DIMS, bias=False)
        self.o_proj = nn.Linear(DIMS, DIMS, bias=False)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        rows = x.shape[1]
        start = cache.seen
        held = cache.append(self.kv_proj(x))
        seen = mx.arange(held.shape[1])[None] <= mx.arange(start, start + rows)[:, None]
        scores = mx.where(seen, self.q_proj(x) @ held.swapaxes(1, 2), -1e9)
        # Each row by itself, so that a sound model gives the same bits whatever the chunk.
        reads = [mx.softmax(scores[:, n : n + 1, : start + n + 1], axis=-1) for n in range(rows)]
        y = [read @ held[:, : start + n + 1] for n, read in enumerate(reads)]
        return self.o_proj(mx.concatenate(y, axis=1))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.self_attn = nn.RMSNorm(DIMS), attention
        self.mlp = nn.Linear(DIMS, DIMS, bias=False)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        x = x + self.self_attn(self.norm(x), mask, cache)
        return x + self.mlp(x)


class Model(nn.Module):
    """Layer 0 and 2 of ``kinds`` of their own, layer 1 with mlx-lm's attention and cache."""

    def __init__(self, kind: type, cache: type) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIMS)
        self.layers = [Block(kind()), Block(Attention()), Block(kind())]
        self.norm = nn.RMSNorm(DIMS)
        self.lm_head = nn.Linear(DIMS, VOCAB, bias=False)
        self._cache = cache

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        x = self.embed_tokens(tokens)
        caches = cache or self.make_cache()
        for layer, held in zip(self.layers, caches, strict=True):
            x = layer(x, held.make_mask(x.shape[1], return_array=False, window_size=None), held)
        return self.lm_head(self.norm(x))

    def make_cache(self) -> list[Any]:
        return [self._cache(), KVCache(), self._cache()]


class Narrowing(nn.Module):
    """A layer that sees all and one that sees the 3 newest, under one mask that is narrowed between them; ``in_place``: the
    array itself, where rows come together."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIMS)
        self.layers = [Block(Attention()), Block(Attention())]
        self.norm = nn.RMSNorm(DIMS)
        self.lm_head = nn.Linear(DIMS, VOCAB, bias=False)
        self._in_place = in_place

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        x = self.embed_tokens(tokens)
        wide, narrow = cache or self.make_cache()
        start, end = wide.offset, wide.offset + tokens.shape[1]
        rows, keys = mx.arange(start, end)[:, None], mx.arange(end)[None]
        mask = mx.where(keys <= rows, 0.0, -1e9)
        x = self.layers[0](x, mask, wide)
        window = mx.where(keys > rows - 3, 0.0, -1e9)
        if self._in_place and tokens.shape[1] > 1:
            mask += window
        else:
            mask = mask + window
        return self.lm_head(self.norm(self.layers[1](x, mask, narrow)))

    def make_cache(self) -> list[Any]:
        return [KVCache(), KVCache()]


def narrowing(in_place: bool) -> LoadedModel:
    """That model."""
    mx.random.seed(3)
    return loaded(Narrowing(in_place), "narrowing")


def odd(kind: type = LatentAttention, cache: type = LatentCache) -> LoadedModel:
    """A model of three layers, of which the first and the last keep a cache of their own."""
    mx.random.seed(3)
    return loaded(Model(kind, cache), f"odd-{cache.__name__}")


__all__ = ["LatentAttention", "LatentCache", "SinkCache", "chunked", "indexed", "narrowing", "odd"]
