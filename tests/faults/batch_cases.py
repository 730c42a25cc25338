"""Cases of a batch: what one request sees depends on who is beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from fault_case import Expected, FaultCase, Trial
from fault_models import fixture, prompt, scenario
from injecting import Around, batched, called, replaced, set_entry
from mlx_lm.generate import GenerationBatch
from mlx_lm.models import cache as caches
from mlx_lm.models import llama

from detdiff.scenario import Scenario

Call = Callable[..., Any]


def served(seed: int, **keys: Any) -> tuple[Scenario, Scenario]:
    """The same requests one after the other, and as one batch."""
    return scenario(seed, **keys), scenario(seed, "static", **keys)


def neighbour_leak(seed: int) -> Trial:
    """A millionth of row 1's newest key is added to row 0's, before the next row reads it; once."""
    draw = random.Random(f"leak {seed}")
    layer, head, written = draw.randrange(2), draw.randrange(2), draw.randrange(12, 18)
    of = fixture("T", "f32", seed)

    def call(native: Call, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        if batched(cache) and x.shape[1] == 1 and int(cache.offset[0]) == written + 1:
            newest = cache._idx - 1
            leaked = cache.keys[0, head, newest] + 1e-6 * cache.keys[1, head, newest]
            cache.keys = set_entry(cache.keys, (0, head, newest), leaked)
        return native(x, mask, cache)

    return Trial(
        *served(seed),
        of,
        Expected(
            frozenset({"r0"}),
            site=f"layers.{layer}.self_attn.cache.read",
            kinds=frozenset({"cache_read"}),
            how="changed",
            layer=layer,
            head=head,
            position=written + 1,
            entry="K",
            entry_position=written,
            event="cache_changed",
        ),
        Around(partial(called, of.model.model.layers[layer].self_attn, call)),
    )


def masked_row(seed: int) -> Trial:
    """Prompts of a batch are padded on the right; the mask of the padding's rows forbids everything."""
    of = fixture("T", "f32", seed)

    def attend(native: Call) -> Call:
        def injected(
            queries: mx.array,
            keys: mx.array,
            values: mx.array,
            cache: Any,
            scale: float,
            mask: Any,
            **kw: Any,
        ) -> Any:
            padding, rows = getattr(cache, "_right_padding", None), queries.shape[2]
            if padding is not None and rows > 1:
                pad = mx.arange(rows)[None, None, :, None] >= rows - padding[:, None, None, None]
                mask = mx.where(mask & ~pad, 0.0, -mx.inf)
            return native(queries, keys, values, cache=cache, scale=scale, mask=mask, **kw)

        return injected

    return Trial(
        *served(seed),
        of,
        # The padding's NaN is in the next layer's V, which no weight of zero makes harmless.
        Expected(
            frozenset({"r0", "r1"}),
            site="layers.1.self_attn.attention",
            kinds=frozenset({"attention"}),
            layer=1,
            position=0,
            event="not_finite",
        ),
        Around(partial(replaced, llama, "scaled_dot_product_attention", attend)),
    )


def masked_value(seed: int) -> Trial:
    """A V of the padding, which every mask forbids, is NaN."""
    draw = random.Random(f"masked value {seed}")
    layer, head = draw.randrange(2), draw.randrange(2)
    of = fixture("T", "f32", seed)

    def call(native: Call, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        if batched(cache) and x.shape[1] == 1 and int(cache.offset[0]) == 14:
            cache.values = set_entry(cache.values, (0, head, 1), mx.nan)
        return native(x, mask, cache)

    return Trial(
        *served(seed),
        of,
        Expected(
            frozenset({"r0"}),
            site=f"layers.{layer}.self_attn.attention",
            kinds=frozenset({"attention"}),
            layer=layer,
            position=14,
            event="not_finite",
        ),
        Around(partial(called, of.model.model.layers[layer].self_attn, call)),
    )


def masked(seed: int) -> Trial:
    """Both kinds in turn."""
    return masked_value(seed) if seed % 2 else masked_row(seed)


def lost_rows(seed: int) -> Trial:
    """RoPE of one token gives zeros in every row of the batch but the first."""
    of = fixture("T", "f32", seed)

    def call(native: Call, x: mx.array, *args: Any, **kw: Any) -> Any:
        y = native(x, *args, **kw)
        if x.shape[0] > 1 and x.shape[2] == 1:
            y = mx.concatenate([y[:1], mx.zeros_like(y[1:])])
        return y

    ropes = [layer.self_attn.rope for layer in of.model.model.layers]
    return Trial(
        *served(seed),
        of,
        Expected(
            frozenset({"r1", "r2"}),
            site="layers.0.self_attn.rope.q",
            kinds=frozenset({"rope"}),
            layer=0,
            rows=(2, 3),
        ),
        Around(*(partial(called, rope, call) for rope in ropes)),
    )


def unwritten_columns(seed: int) -> Trial:
    """A linear layer of N outputs leaves those from 64 * (N // 64) on at zero for 2 to 7 rows."""
    draw = random.Random(f"columns {seed}")
    layer, name = draw.randrange(2), draw.choice(("gate_proj", "up_proj"))
    of = fixture("odd", "f32", seed)

    def call(native: Call, x: mx.array) -> Any:
        y = native(x)
        if 2 <= x.size // x.shape[-1] < 8:
            whole = y.shape[-1] // 64 * 64
            y = mx.concatenate([y[..., :whole], mx.zeros_like(y[..., whole:])], axis=-1)
        return y

    # Prompts that alone are more than seven rows, so that only decode rows of the batch are few enough.
    return Trial(
        *served(seed, lengths=(12, 9, 40)),
        of,
        Expected(
            frozenset({"r0", "r1", "r2"}),
            site=f"layers.{layer}.mlp.{name}",
            kinds=frozenset({"linear"}),
            layer=layer,
            rows=(2, 7),
            columns=(128, 149),
        ),
        Around(partial(called, of.model.model.layers[layer].mlp[name], call)),
    )


def shared_position(seed: int) -> Trial:
    """After the prompts, every row of a batch is at row 0's position."""
    of = fixture("T", "f32", seed)

    def forget(native: Call) -> Call:
        def injected(self: Any, *args: Any) -> Any:
            result = native(self, *args)
            self.offset = mx.broadcast_to(self.offset[:1], self.offset.shape)
            return result

        return injected

    return Trial(
        *served(seed),
        of,
        Expected(
            frozenset({"r1", "r2"}),
            site="layers.0.self_attn.rope.q",
            kinds=frozenset({"rope"}),
            layer=0,
            stage="bookkeeping",
            event="offset",
        ),
        Around(
            partial(replaced, caches.BatchKVCache, "update_and_fetch", forget),
            partial(replaced, caches.BatchKVCache, "finalize", forget),
        ),
    )


def shifted_samplers(seed: int) -> Trial:
    """When a request of a batch ends, the others get each other's samplers."""

    def filtering(native: Call) -> Call:
        def injected(self: Any, keep: list[int]) -> Any:
            shrinks = 1 < len(keep) < len(self.uids)
            result = native(self, keep)
            if shrinks:
                self.samplers = [*self.samplers[1:], self.samplers[0]]
            return result

        return injected

    requests = [
        {
            "id": f"r{i}",
            "tokens": prompt(n, (seed, i)),
            "max_tokens": tokens,
            "temperature": 1.0,
            "seed": seed + i,
        }
        for i, (n, tokens) in enumerate(((12, 4), (3, 12), (40, 12)))
    ]
    asked = Scenario.from_dict({"model": "fixture", "request": requests})
    return Trial(
        asked,
        asked.with_changes(schedule="static"),
        fixture("T", "f32", seed),
        Expected(frozenset({"r1", "r2"}), stage="tokens"),
        Around(partial(replaced, GenerationBatch, "filter", filtering)),
    )


CASES = (
    FaultCase(
        6, "leak between neighbours", "bug", "1e-6 of row 1's K in row 0's cache, once", neighbour_leak
    ),
    FaultCase(
        7, "wholly masked query row", "bug", "-inf over a padded row's mask; NaN in a masked V", masked
    ),
    FaultCase(9, "one-token kernel corrupts rows", "bug", "RoPE of T=1 gives zeros from row 1 on", lost_rows),
    FaultCase(
        10, "part of the output unwritten", "bug", "last columns zero for 2 <= M < 8", unwritten_columns
    ),
    FaultCase(14, "position shared by the batch", "bug", "every row takes row 0's offset", shared_position),
    FaultCase(16, "sampling differs", "bug", "the sampler list shifts when a request ends", shifted_samplers),
)
