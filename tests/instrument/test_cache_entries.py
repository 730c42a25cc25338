"""Cache entries per position and head, what each row could read, states, and what the caches say of themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from runs import Runs, digests, events, model, scenario, values
from tiers import some_now

from detdiff.trace import Trace, digest_rows, parse_ranges
from detdiff.trace.digest import combine_entries

HEADS, WINDOW = 2, 16
SHAPES: dict[str, dict[str, Any]] = {
    "serial padded": {"prefill_chunk": 5},
    "static padded": {"schedule": "static"},
    "continuous padded": {
        "schedule": "continuous",
        "arrivals": (0, 2, 5),
        "active": 2,
        "prefill_chunk": 4,
    },
    "continuous packed": {
        "schedule": "continuous",
        "layout": "packed",
        "arrivals": (0, 2, 5),
        "row_budget": 7,
    },
}
CASES = [
    (arch, fmt, how)
    for arch, fmt in (("llama", "bf16"), ("gemma3_text", "f32"), ("qwen3_next", "q4"))
    for how in SHAPES
    if not (arch == "qwen3_next" and "packed" in how)
]


def entry_layers(trace: Trace) -> list[int]:
    return [site.layer for site in trace.sites if site.kind == "cache_write" and site.layer is not None]


def by_head(trace: Trace, layer: int, port: str) -> dict[tuple[int, int], NDArray[np.uint64]]:
    """Digests uint64 [heads] of what was written at each (request, position), from the values alone."""
    given = values(trace, f"layers.{layer}.self_attn.cache.write", port)
    dtype = "BF16" if next(iter(given.values())).dtype == np.uint16 else "F32"
    return {key: digest_rows(row.reshape(HEADS, -1), dtype) for key, row in given.items()}


@pytest.mark.parametrize(("arch", "fmt", "how"), some_now(CASES, 3, 6, 10))
def test_entries_are_those_that_were_written(runs: Runs, arch: str, fmt: str, how: str) -> None:
    trace = runs.once(model(arch, fmt), scenario(capture="full", **SHAPES[how]))
    stored = digests(trace)
    layers = entry_layers(trace)
    assert layers
    for layer in layers:
        site = f"layers.{layer}.self_attn.cache.write"
        for port, name in (("k", "K"), ("v", "V")):
            made = by_head(trace, layer, port)
            assert len(made) >= sum(len(r["tokens"]) + r["max_tokens"] - 1 for r in trace.requests)
            for (request, position), heads in made.items():
                found = [stored[request, position, site, f"{name}.{head}"] for head in range(HEADS)]
                assert found == heads.tolist(), (request, position, layer)
    assert events(trace) == []


@pytest.mark.parametrize(("arch", "fmt", "how"), some_now(CASES, 3, 6, 10))
def test_what_a_row_reads_is_the_sum_of_what_it_sees(runs: Runs, arch: str, fmt: str, how: str) -> None:
    trace = runs.once(model(arch, fmt), scenario(capture="full", **SHAPES[how]))
    stored = digests(trace)
    for layer in entry_layers(trace):
        prefix = f"layers.{layer}.self_attn"
        window = WINDOW if arch == "gemma3_text" and layer not in (2, 5) else 1 << 30
        keys, entries = by_head(trace, layer, "k"), by_head(trace, layer, "v")
        for request in range(3):
            positions = sorted(p for r, p in keys if r == request)
            assert positions == list(range(len(positions)))
            rows = [np.concatenate([keys[request, p], entries[request, p]]) for p in positions]
            terms = combine_entries(np.stack(rows), np.array(positions))
            for position in positions:
                seen = int(terms[max(0, position - window + 1) : position + 1].sum(dtype=np.uint64))
                for site, port in (("cache.read", "written"), ("cache.read", "read"), ("attention", "kv")):
                    assert stored[request, position, f"{prefix}.{site}", port] == seen


@pytest.mark.parametrize("arch", ["qwen3_next", "mamba2"])
@pytest.mark.parametrize("how", ["serial padded", "static padded", "continuous padded"])
def test_states_belong_to_the_last_row_of_a_request_in_a_forward(runs: Runs, arch: str, how: str) -> None:
    trace = runs.once(model(arch), scenario(**SHAPES[how]))
    states = [site for site in trace.sites if site.kind == "state"]
    assert states and all(site.inputs == () and site.outputs == ("0", "1") for site in states)
    last = {
        (row["request"], row["start"] + row["count"] - 1) for line in trace.forwards() for row in line["rows"]
    }
    found = digests(trace)
    for site in states:
        for port in site.outputs:
            have = {key[:2] for key in found if key[2:] == (site.name, port)}
            assert have == last
    # A state goes on changing; one that never did would say that the wrong array was taken.
    one = [found[0, p, states[0].name, "0"] for r, p in sorted(last) if r == 0]
    assert len(set(one)) == len(one) > 8


def test_prompt_chunks_end_at_the_same_state(runs: Runs) -> None:
    whole = digests(runs.once(model("qwen3_next"), scenario()))
    parts = digests(runs.once(model("qwen3_next"), scenario(prefill_chunk=4)))
    site = "layers.0.linear_attn.state"
    common = [key for key in whole if key[2] == site and key in parts]
    assert len(common) > 20 and all(whole[key] == parts[key] for key in common)
    assert (0, 3, site, "1") in parts and (0, 3, site, "1") not in whole


WAYS = sorted({(arch, how) for arch, _, how in CASES})


@pytest.mark.parametrize(("arch", "how"), some_now(WAYS, *range(0, len(WAYS), 3)))
def test_bookkeeping_is_what_the_rows_say(runs: Runs, arch: str, how: str) -> None:
    trace = runs.once(model(arch), scenario(**SHAPES[how]))
    checked = 0
    for line in trace.forwards():
        covered: list[int] = []
        for cache in line["caches"]:
            covered += [n for run in parse_ranges(cache["layers"], 99) for n in run]
            if cache["kind"] == "ArraysCache":
                assert cache["offset"] == [] and cache["mask"] == "none"
                continue
            for lane, row in enumerate(line["rows"]):
                slot = lane if line["layout"] == "packed" else row["slot"]
                assert cache["offset"][slot] == row["start"]
                if cache["kind"] == "BatchKVCache":
                    assert cache["left_padding"][slot] + row["start"] == cache["length"]
                checked += 1
            assert cache["mask"] == _mask(line, cache)
        assert sorted(covered) == sorted({s.layer for s in trace.sites if s.layer is not None})
    assert checked > 10


def _mask(line: dict[str, Any], cache: dict[str, Any]) -> str:
    if line["layout"] == "packed":
        return "per request"
    if cache["kind"].startswith("Batch"):
        return "array"
    if line["shape"][1] == 1:
        return "none"
    past = line["rows"][0]["start"]
    # Beyond its window a rotating cache needs a real mask.
    beyond = min(past, WINDOW - 1) + line["shape"][1] > WINDOW
    return "array" if cache["kind"] == "RotatingKVCache" and beyond else "causal"


def test_padding_is_no_row_of_anybody(runs: Runs) -> None:
    trace = runs.once(model("llama"), scenario("static", prefill_chunk=8))
    lines = [line for line in trace.forwards() if line["phase"] == "prefill" and line["shape"][1] > 1]
    counts = [{row["request"]: row["count"] for row in line["rows"]} for line in lines]
    assert counts == [{0: 8, 1: 2, 2: 8}, {0: 3, 2: 8}, {2: 4}]
    assert [line["shape"] for line in lines] == [[3, 8], [2, 8], [1, 4]]
    rows = trace.row_index()
    assert int(np.count_nonzero(rows.phase == 0)) == 12 + 3 + 21
    for request, prompt in enumerate(trace.requests):
        mine = (rows.request == request) & (rows.phase == 0)
        assert rows.token[mine].tolist() == prompt["tokens"]
        assert rows.position[mine].tolist() == list(range(len(prompt["tokens"])))
