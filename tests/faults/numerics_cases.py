"""Cases of rounding: a kernel that is chosen by the number of rows, an accumulator and operands of less precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from fault_case import Expected, FaultCase, Trial
from fault_models import fixture, scenario, threshold
from injecting import Around, called, kernel_known

from detdiff.scenario import Scenario
from detdiff_kernels import Kernel
from detdiff_kernels.order import Order, lanes_of

LINEAR = frozenset({"linear", "head"})
ALL = frozenset({"r0", "r1", "r2"})


def kernel_switch(seed: int) -> Trial:
    """At most R rows take one kernel: three decode rows batched are more than R, one alone is not."""
    # Long enough for a difference to reach a cache or a logit in all trials, and a token in some.
    tokens = 100 if seed < 3 else 60
    limit = 1 + seed % 2
    keys: dict[str, Any] = {"kernels": threshold(limit), "max_tokens": tokens}
    return Trial(
        scenario(seed, "serial", **keys),
        scenario(seed, "static", **keys),
        fixture("S", "bf16", seed),
        Expected(ALL, kinds=LINEAR, stage="bits", rows=(limit + 1, 3)),
    )


def prefix_reuse(seed: int) -> Trial:
    """The second prompt is 16 tokens of the first and a suffix of 1 to 3 rows, fewer than the kernel's limit."""
    suffix = 1 + seed % 3
    asked = scenario(seed, "serial", "packed", lengths=(20,), kernels=threshold(3), max_tokens=6)
    first = list(asked.requests[0].tokens or ())
    own = [(token + 1) % 96 for token in first[16 : 16 + suffix]]
    requests = [{"id": "r0", "tokens": first}, {"id": "r1", "tokens": first[:16] + own}]
    keys = {**asked.to_dict(), "request": [{**request, "max_tokens": 6} for request in requests]}
    whole = Scenario.from_dict(keys)
    return Trial(
        whole,
        whole.with_changes(page_tokens=16, share_prefix=True),
        fixture("S", "f32", seed),
        Expected(
            frozenset({"r1"}), kinds=LINEAR, site="layers.0.self_attn.q_proj", position=16, event="prefix"
        ),
    )


def speculation(seed: int) -> Trial:
    """The same four drafts verified in one block, more rows than the limit, and one by one, by a rule for that phase."""
    keys: dict[str, Any] = {"kernels": threshold(1), "max_tokens": 9, "draft": "fixture-draft", "drafts": 4}
    block = scenario(seed, "serial", "packed", lengths=(12, 5), **keys)
    rule = {"site": "*", "phase": "verify", "rows": "2..4", "path": "mlx-cuda/gemv"}
    return Trial(
        Scenario.from_dict({**block.to_dict(), "rule": [rule]}),
        block,
        fixture("S", "f32", seed),
        Expected(
            frozenset({"r0", "r1"}), kinds=LINEAR, site="layers.0.self_attn.q_proj", stage="bits", rows=(2, 4)
        ),
        draft=fixture("S", "q4", seed),
    )


NARROW = Kernel(
    "fixture/narrow",
    lambda shape: (
        Order(lanes_of(1, 1), weight="dtype", accumulate="dtype") if shape.format == "dense" else None
    ),
    "one ascending chain, rounded to the activation's dtype at each step",
    "inferred",
)


def narrow_sums(seed: int) -> Trial:
    """The kernel of one row rounds its sum to bfloat16 at each step, that of more rows keeps float32."""
    rules = [{"rows": "1", "path": NARROW.name}, {"rows": "2..", "path": "mlx-cuda/gemm"}]
    return Trial(
        scenario(seed, "serial", rule=rules, max_tokens=8),
        scenario(seed, "static", rule=rules, max_tokens=8),
        fixture("S", "bf16", seed),
        Expected(ALL, kinds=LINEAR, site="layers.0.self_attn.q_proj", stage="bits", nearer="b"),
        Around(partial(kernel_known, NARROW)),
    )


def narrow_inputs(seed: int) -> Trial:
    """Linear layers round their inputs to 11 significant bits as soon as there are two rows."""
    of = fixture("S", "f32", seed)
    linear = [module for _, module in of.model.named_modules() if isinstance(module, nn.Linear)]
    return Trial(
        scenario(seed, "serial", lengths=(12, 9, 40), max_tokens=12),
        scenario(seed, "static", lengths=(12, 9, 40), max_tokens=12),
        of,
        Expected(
            ALL,
            kinds=frozenset({"linear"}),
            site="layers.0.self_attn.q_proj",
            stage="bits",
            rows=(2, 4096),
            nearer="a",
            precision="float16 or tf32",
        ),
        Around(*(partial(called, module, narrowing) for module in linear)),
    )


def narrowing(native: Callable[..., Any], x: mx.array) -> Any:
    return native(_eleven_bits(x) if x.size // x.shape[-1] > 1 else x)


def _eleven_bits(x: mx.array) -> mx.array:
    """Rounded to nearest even; the exponent keeps its range."""
    bits = x.view(mx.uint32)
    half = mx.array((1 << 12) - 1, mx.uint32) + ((bits >> 13) & 1)
    return (((bits + half) >> 13) << 13).view(mx.float32)


CASES = (
    FaultCase(1, "kernel switch", "numerics", "at most R rows take another kernel than more", kernel_switch),
    FaultCase(2, "prefix reuse", "numerics", "a suffix of a few rows behind 16 reused tokens", prefix_reuse),
    FaultCase(3, "speculation", "numerics", "drafts verified in one block against one by one", speculation),
    FaultCase(4, "low-precision accumulation", "numerics", "sums in bfloat16 up to R rows", narrow_sums),
    FaultCase(5, "lower-precision operands", "numerics", "inputs in 11 bits from two rows on", narrow_inputs),
)
