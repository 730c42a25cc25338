"""Cases of a cache's life: cut short by a chunk, read by the wrong head, quantised from another position, not rewound."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from fault_case import Expected, FaultCase, Trial
from fault_models import SLIDING, WINDOW, fixture, scenario
from injecting import Around, replaced
from mlx_lm.models import base
from mlx_lm.models import cache as caches

from detdiff.scenario import Scenario

Call = Callable[..., Any]
CHUNK = 18
"""A prefill chunk that is longer than the window."""
POLICY_CHUNKS = (7, 16, 32)


def short_ring(seed: int) -> Trial:
    """A ring that keeps ``WINDOW`` entries in all when a chunk is written, and not what the chunk's first rows still see."""

    def update(native: Call) -> Call:
        def injected(self: Any, keys: mx.array, values: mx.array) -> Any:
            if self.keys is not None:
                kept = max(0, self.max_size - keys.shape[2])
                for name in ("keys", "values"):
                    ordered = self._temporal_order(getattr(self, name))
                    setattr(self, name, ordered[..., ordered.shape[2] - min(kept, ordered.shape[2]) :, :])
                self._idx = self.keys.shape[2]
            return native(self, keys, values)

        return injected

    def mask(native: Call) -> Call:
        def injected(self: Any, rows: int, *args: Any, **kw: Any) -> Any:
            found = native(self, rows, *args, **kw)
            if rows == 1 or not isinstance(found, mx.array):
                return found
            held = 0 if self.keys is None else min(max(0, self.max_size - rows), self.size())
            return found[..., found.shape[-1] - held - rows :]

        return injected

    asked = scenario(seed, lengths=(55,), max_tokens=4)
    return Trial(
        asked,
        asked.with_changes(prefill_chunk=CHUNK),
        fixture("G", "f32", seed),
        Expected(
            frozenset({"r0"}),
            site="layers.0.self_attn.cache.read",
            kinds=frozenset({"cache_read"}),
            how="visible",
            layer=SLIDING[0],
            position=CHUNK,
            # A later row of the chunk sees nothing from before it.
            queries=(CHUNK, CHUNK + WINDOW - 2),
            chunk=1,
        ),
        Around(
            partial(replaced, caches.RotatingKVCache, "_update_concat", update),
            partial(replaced, caches.RotatingKVCache, "make_mask", mask),
        ),
    )


def other_head(seed: int) -> Trial:
    """Scores against a quantised cache: one head of fewer than eight query rows takes the keys of the next one.

    Both runs quantise the cache at position 16; the rest of the prompt comes in chunks of 16 rows, or of four.
    """
    draw = random.Random(f"head {seed}")
    head = draw.randrange(4)

    def scores(native: Call) -> Call:
        def injected(queries: mx.array, q_keys: Any, q_values: Any, *args: Any, **kw: Any) -> Any:
            # mlx-lm scales its queries in place.
            sound = native(mx.array(queries), q_keys, q_values, *args, **kw)
            if queries.shape[2] >= 8:
                return sound
            turned = tuple(mx.roll(part, -1, axis=1) for part in q_keys)
            wrong = native(mx.array(queries), turned, q_values, *args, **kw)
            places = mx.arange(queries.shape[1])[None, :, None, None]
            return mx.where(places == head, wrong, sound)

        return injected

    keys: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 64, "kv_start": 16, "max_tokens": 6}
    asked = scenario(seed, lengths=(49,), prefill_chunk=16, **keys)
    return Trial(
        asked,
        asked.with_changes(prefill_chunk=4),
        fixture("wide", "f32", seed),
        Expected(
            frozenset({"r0"}),
            site="layers.0.self_attn.attention",
            kinds=frozenset({"attention"}),
            layer=0,
            head=head,
            position=16,
            rows=(1, 7),
        ),
        Around(partial(replaced, base, "quantized_scaled_dot_product_attention", scores)),
    )


def quantised_later(seed: int) -> Trial:
    """The cache is quantised as soon as a chunk ends at 20 or later, so where depends on the chunk."""
    asked = scenario(seed, lengths=(40,), kv_bits=4, kv_group_size=64, kv_start=20, max_tokens=6)
    return Trial(
        asked,
        asked.with_changes(prefill_chunk=POLICY_CHUNKS[seed % 3]),
        fixture("wide", "f32", seed),
        Expected(frozenset({"r0"}), event="quantise"),
    )


def not_rewound(seed: int) -> Trial:
    """Nothing is injected: mlx-lm's speculation, whose rewind does nothing once a sliding window has wrapped."""
    drafts = (1, 2, 4)[seed % 3]
    asked: Scenario = scenario(seed, lengths=(3,), max_tokens=24)
    return Trial(
        asked,
        asked.with_changes(draft="fixture-draft", drafts=drafts),
        fixture("G", "f32", seed),
        Expected(frozenset({"r0"}), event="trim"),
        draft=fixture("G", "f32", seed + 100),
    )


CASES = (
    FaultCase(8, "rewind that does not happen", "bug", "nothing: mlx-lm as it is", not_rewound),
    FaultCase(11, "wrong head read", "bug", "head h + 1's keys for fewer than 8 query rows", other_head),
    FaultCase(12, "prefill chunk", "bug", "a ring without room for a chunk's first rows", short_ring),
    FaultCase(
        13,
        "configuration difference",
        "configuration",
        "nothing: a 4-bit cache from 20 on, other chunks",
        quantised_later,
    ),
)
