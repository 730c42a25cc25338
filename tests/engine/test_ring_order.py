"""Differences that native runs really have, each explained down to the operation that makes it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from runs import Runs, bits, digests, events, model, prompts, scenario, values
from tiers import some_now

from detdiff.compare import compare
from detdiff.scenario import Scenario
from detdiff.trace import Trace

SLIDING = (0, 1, 3, 4)  # of the tiny gemma3: sliding_window_pattern 3, window 16
WINDOW = 16
RINGS: dict[str, dict[str, Any]] = {
    "static padded": {"schedule": "static"},
    "continuous padded": {"schedule": "continuous", "arrivals": (0, 2, 5), "active": 2, "prefill_chunk": 4},
    "continuous packed": {"schedule": "continuous", "layout": "packed", "prefill_chunk": 8},
}


@pytest.mark.parametrize("fmt", some_now(["f32", "q4"], 0))
@pytest.mark.parametrize("variant", some_now(RINGS, 0))
def test_a_rotated_cache_changes_attention_and_nothing_else(runs: Runs, fmt: str, variant: str) -> None:
    base = runs.base("gemma3_text", fmt, capture="full")
    other = runs.record(model("gemma3_text", fmt), scenario(capture="full", **RINGS[variant]))
    found = compare(base, other)
    assert not found.identical and found.stage == "bits"
    assert all(request.flip is None for request in found.requests)
    assert events(base) == events(other) == []
    origins = [count for request in found.requests for count in request.origins]
    assert origins and {count.kind for count in origins} == {"attention"}
    assert {count.layer for count in origins} <= set(SLIDING)
    for request in found.requests:
        if request.origin is not None:
            assert request.origin.how == "leaf" and request.origin.magnitude is not None
            assert request.origin.magnitude.max_abs is not None
            # Two orders of one sum of n terms, each within n units of rounding of sum(p * |v|) <= max |v|.
            largest = _largest(base, request.origin.site.replace("attention", "cache.write"))
            assert 0 < request.origin.magnitude.max_abs <= 2 * (WINDOW + 8) * 2.0**-24 * largest


def _largest(trace: Trace, site: str) -> float:
    ports = (f"V.{head}" for head in range(2))
    return max(float(np.abs(v).max()) for port in ports for v in values(trace, site, port).values())


def test_what_the_rings_hold_is_the_same(runs: Runs) -> None:
    """Where the first layer's attention differs, what it read was equal: only the order in memory was not."""
    base = runs.base("gemma3_text", "f32", capture="full")
    other = runs.record(model("gemma3_text", "f32"), scenario("static", capture="full"))
    a, b = digests(base), digests(other)
    site = "layers.0.self_attn.attention"
    differing = [key for key in a if key[2:] == (site, "out") and key in b and a[key] != b[key]]
    assert differing
    for request, position, *_ in differing:
        for port in ("in", "kv"):
            assert a[request, position, site, port] == b[request, position, site, port]


@pytest.mark.thorough
def test_rings_that_turn_alike_are_bit_equal(runs: Runs) -> None:
    """The counter-test: below the window, or with each request's own ring filled alike, nothing differs."""
    of = model("gemma3_text", "f32")
    short = {"lengths": (5, 3, 7), "max_tokens": 8}
    base = runs.record(of, scenario(**short))
    for keys in ({"schedule": "static"}, {"schedule": "static", "layout": "packed"}):
        assert compare(base, runs.record(of, scenario(**keys, **short))).identical
    base = runs.record(of, scenario("serial", "packed"))
    other = scenario("continuous", "packed", arrivals=(0, 2, 5), active=2)
    assert compare(base, runs.record(of, other)).identical


def test_minimal_case_of_the_ring_order() -> None:
    """docs/findings.md quotes this: the same keys and values, rotated in memory, give other f32 bits."""
    mx.random.seed(1)
    q, k, v = (mx.random.normal((1, 1, n, 32)) for n in (1, 16, 16))
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2)
    turned = [mx.roll(array, 5, axis=2) for array in (k, v)]
    again = mx.fast.scaled_dot_product_attention(q, *turned, scale=0.2)
    assert not np.array_equal(bits(out), bits(again))
    assert float(mx.abs(out - again).max()) < 1e-6


@pytest.mark.parametrize("fmt", some_now(["f32", "bf16"], 1))
def test_a_prompt_in_chunks_changes_a_state_space_scan(runs: Runs, fmt: str) -> None:
    """mamba2 sums within a chunk in one form and from chunk to chunk in another: equal chunks, equal bits."""
    of = model("mamba2", fmt)
    whole = runs.base("mamba2", fmt, capture="full")
    chunked = runs.record(of, scenario(prefill_chunk=4, capture="full"))
    found = compare(whole, chunked)
    assert found.stage == "bits" and not found.identical
    for request in found.requests:
        if request.origin is not None:
            assert request.origin.kind == "recurrent" and request.origin.layer == 0
            assert request.origin.position >= 4
            assert request.origin.magnitude is not None and (request.origin.magnitude.max_rel or 1) < 1e-2
    assert events(whole) == events(chunked) == []
    for keys in ({"schedule": "static"}, {"schedule": "continuous", "arrivals": (0, 2, 5), "active": 2}):
        again = runs.record(of, scenario(prefill_chunk=4, capture="full", **keys))
        assert compare(chunked, again).identical


# Requests that join others whose windows have wrapped, one of a single token among them, in the order of a batch's slots.
JOINING = ((16, 1, 6, 23, 12), (4, 3, 4, 2, 2))


@pytest.mark.parametrize("lengths", [JOINING[0], (1, 23, 1, 12, 6)])
def test_who_joins_a_batch_of_rings_reads_what_it_would_alone(runs: Runs, lengths: tuple[int, ...]) -> None:
    of, keys = model("gemma3_text", "bf16"), {"lengths": lengths, "prefill_chunk": 8, "max_tokens": 6}
    alone = runs.record(of, scenario(**keys))
    joined = runs.record(of, scenario("continuous", arrivals=JOINING[1], **keys))
    found = compare(alone, joined)
    assert found.stage in (None, "bits") and not found.bookkeeping
    assert not any(count.kind == "cache_read" for request in found.requests for count in request.origins)
    assert events(joined) == []


def test_padding_that_is_the_bits_of_an_own_entry_is_not_taken_for_it(runs: Runs) -> None:
    """All tokens generated are that of padding, so that columns of padding hold the entries of their rows bit for bit."""
    of, told = model("gemma3_text", "bf16"), [*prompts((28, 3, 21, 7))]
    requests = [
        {"id": f"r{number}", "tokens": tokens, "logit_bias": {"0": 1000.0}, "max_tokens": count}
        for number, (tokens, count) in enumerate(zip(told, (3, 6, 6, 4), strict=True))
    ]
    keys = {"model": "tiny", "prefill_chunk": 8, "request": requests}
    alone = runs.record(of, Scenario.from_dict({**keys, "schedule": "serial"}))
    together = runs.record(of, Scenario.from_dict({**keys, "schedule": "static"}))
    found = compare(alone, together)
    assert events(together) == [] and not found.bookkeeping
    assert not any(count.kind == "cache_read" for request in found.requests for count in request.origins)
