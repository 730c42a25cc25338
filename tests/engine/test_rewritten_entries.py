"""Entries that a cache stores anew after their write: the whole cache, when it is quantised."""

from __future__ import annotations

from typing import Any

import pytest
from runs import Runs, model, scenario

from detdiff.compare import Divergence, compare

HEADS, LAYERS, PROMPT, TOKENS = 2, 2, 12, 4
QUANTISED = {"kv_bits": 8, "kv_group_size": 32}


def compared(runs: Runs, a: dict[str, Any], b: dict[str, Any]) -> Divergence:
    sides = [
        runs.record(model("qwen3"), scenario(lengths=(PROMPT,), max_tokens=TOKENS, **keys)) for keys in (a, b)
    ]
    return compare(*sides)


@pytest.mark.parametrize("quantised", ["a", "b"])
def test_a_cache_that_is_quantised_differs_from_its_first_entry_on(runs: Runs, quantised: str) -> None:
    sides = (QUANTISED, {}) if quantised == "a" else ({}, QUANTISED)
    (request,) = compared(runs, *sides).requests
    entry, differing_entries = request.cache_entry, request.differing_entries
    assert entry is not None and differing_entries is not None
    assert (entry.layer, entry.kind, entry.head, entry.position) == (0, "K", 0, 0)
    rewritten = (entry.rewritten_a, entry.rewritten_b)
    # mlx-lm keeps the last prompt token for a forward of its own and quantises after the one before.
    assert rewritten == ((0, None) if quantised == "a" else (None, 0))
    rows = differing_entries.alive_at + 1
    assert (differing_entries.count, differing_entries.entries) == (
        2 * HEADS * LAYERS * rows,
        2 * HEADS * LAYERS * rows,
    )
    assert differing_entries.positions == ((0, differing_entries.alive_at),)


def test_a_cache_that_both_quantise_alike_differs_nowhere(runs: Runs) -> None:
    found = compared(runs, QUANTISED, QUANTISED)
    assert found.identical and found.requests[0].cache_entry is None


def test_a_quantisation_that_starts_later_leaves_what_was_read_before_alone(runs: Runs) -> None:
    (request,) = compared(runs, {}, {**QUANTISED, "kv_start": PROMPT + TOKENS + 1}).requests
    assert request.identical and request.cache_entry is None
