"""Cases of single values: a sign of zero, a dtype, a payload, one unit in the last place."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
from fault_case import Expected, FaultCase, Trial
from fault_models import LENGTHS, fixture, scenario
from injecting import Among, Around, Put, sites_injected

from detdiff.engines.mlx.taps.session import Session
from detdiff.scenario import Scenario

Change = Callable[[mx.array], mx.array]


def _first(bits: int) -> Change:
    """The row's first element as this float32 bit pattern."""

    def change(row: mx.array) -> mx.array:
        flat = mx.contiguous(row).view(mx.uint32).reshape(-1)
        flat[0] = mx.array(bits, mx.uint32)
        return flat.view(mx.float32).reshape(row.shape)

    return change


def _rounded(row: mx.array) -> mx.array:
    return row.astype(mx.float16).astype(mx.float32)


def _narrow(row: mx.array) -> mx.array:
    return row.astype(mx.float16)


def _same(row: mx.array) -> mx.array:
    return row


VALUES: dict[str, tuple[Change, Change]] = {
    "negative zero": (_first(0), _first(0x80000000)),
    "float16 and back": (_same, _rounded),
    "float16": (_same, _narrow),
    "NaN payload": (_first(0x7FC00001), _first(0x7FC00002)),
}
"""What becomes of a row alone and among others."""


def other_value(seed: int) -> Trial:
    """One row of one site holds other bits in a batch, or the site another dtype."""
    kind = tuple(VALUES)[seed % len(VALUES)]
    draw = random.Random(f"value {seed}")
    request, layer, name = draw.randrange(3), draw.randrange(2), draw.choice(("mlp", "self_attn.v_proj"))
    site = f"layers.{layer}.{name}"
    # The first row of a decode step, whose forward holds one row of each request.
    position = LENGTHS[request] + draw.randrange(3)
    alone, among = VALUES[kind]
    injected_fault = Put(site, request, position, alone=alone, among=among)
    everyone = kind == "float16"
    return Trial(
        scenario(seed),
        scenario(seed, "static"),
        fixture("T", "f32", seed),
        Expected(
            frozenset({"r0", "r1", "r2"} if everyone else {f"r{request}"}),
            site=site,
            position=position,
            stage="dtype" if everyone else "bits",
        ),
        Around(partial(sites_injected, injected_fault)),
    )


GROUNDS: tuple[tuple[str, str, str], ...] = (
    ("T", "f32", "padded"),
    ("S", "bf16", "packed"),
    ("G", "f32", "packed"),
    ("H", "f32", "padded"),
    ("T", "f16", "packed"),
    ("S", "q4", "padded"),
    ("G", "bf16", "packed"),
    ("H", "q4", "padded"),
    ("T", "bf16", "padded"),
    ("T", "q4", "packed"),
)


@lru_cache(maxsize=32)
def _sites(name: str, fmt: str, seed: int) -> tuple[str, ...]:
    sites = Session(fixture(name, fmt, seed).model).sites.sites
    return tuple(site.name for site in sites if "out" in site.outputs)


def one_unit(seed: int) -> Trial:
    """One element of one row of one site is the next number, where the row's forward holds other requests too."""
    name, fmt, layout = GROUNDS[seed % len(GROUNDS)]
    draw = random.Random(f"unit {seed}")
    weights = seed // len(GROUNDS)
    keys: dict[str, Any] = {"max_tokens": 6}
    a: Scenario = scenario(seed, "serial", layout, **keys)
    b = scenario(seed, "static", layout, **keys)
    request = draw.randrange(3)
    site = draw.choice(_sites(name, fmt, weights))
    # Prompt rows have no logits when padded, and of packed ones the last only.
    first = LENGTHS[request] if layout == "padded" else LENGTHS[request] - 1
    anywhere = site not in ("logits", "lm_head", "embed_tokens.as_linear")
    position = draw.randrange(0 if anywhere else first, LENGTHS[request] + 5)
    injected_fault = Among(site, request, position, draw.randrange(1 << 16))
    return Trial(
        a,
        b,
        fixture(name, fmt, weights),
        Expected(frozenset({f"r{request}"}), site=site, position=position, stage="bits"),
        Around(partial(sites_injected, injected_fault)),
    )


CASES = (
    FaultCase(17, "negative zero, dtype, NaN payload", None, "other bits of the same number", other_value),
    FaultCase(19, "one unit in the last place", None, "one element of one row of one site", one_unit),
)
