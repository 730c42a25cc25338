"""A profile drives every linear, expert and attention site, and each row of the trace says which kernel it took."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from profiles import write_profile
from runs import Runs, model, scenario
from tiers import some_now
from tiny import FORMATS

from detdiff.compare import compare
from detdiff.engines.mlx.engine import RecordOptions
from detdiff.engines.mlx.taps.injected import InjectedFault
from detdiff.trace import Trace

KINDS = ("linear", "head", "switch", "attention")
# Rows at which the profile changes kernels: more than a decode row has alone, few enough for a prompt to pass.
LINEAR, SWITCH, QUERY, KEYS = 4, 9, 6, 16
LENGTHS = (12, 3, 35)  # 35 rows of a prompt at once are enough for an expert model to sort them by expert
CONTINUOUS: dict[str, Any] = {"arrivals": (0, 2, 5), "lengths": LENGTHS, "max_tokens": 6}
CELLS = [(arch, fmt) for arch in ("llama", "qwen3", "gemma3_text", "qwen3_moe", "phi3") for fmt in FORMATS]
OF_EACH = [place for place in range(len(CELLS)) if place % 3 == place // 3 % 3]
"""A format an architecture, and an architecture a format."""


@pytest.fixture(scope="module")
def thresholds(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A profile that changes kernels at LINEAR rows, SWITCH rows, QUERY query rows and KEYS keys."""
    return write_profile(
        tmp_path_factory.mktemp("profiles") / "thresholds.toml",
        {"kernel": "candle-metal/mm", "op": ["linear", "head"], "rows": f"{LINEAR}.."},
        {"kernel": "candle-metal/mv", "op": ["linear", "head"]},
        {"kernel": "candle-metal/mm", "op": "switch", "rows": f"{SWITCH}.."},
        {"kernel": "candle-metal/mv", "op": "switch"},
        {"kernel": "candle-metal/sdpa_full", "op": "attention", "query": f"{QUERY}.."},
        {
            "kernel": "mlx-metal/sdpa_unfused",
            "op": "attention",
            "keys": f"{KEYS}..",
            "query": f"1..{QUERY - 1}",
        },
        {"kernel": "candle-metal/sdpa_vector", "op": "attention"},
    )


@pytest.fixture(scope="module")
def one_each(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A profile with one kernel for each kind of site."""
    return write_profile(
        tmp_path_factory.mktemp("profiles") / "one-each.toml",
        {"kernel": "candle-metal/mv", "op": ["linear", "head", "switch"]},
        {"kernel": "candle-metal/sdpa_vector", "op": "attention"},
    )


def rows(trace: Trace) -> Iterator[tuple[dict[str, Any], dict[str, Any], int]]:
    """(forward, span of rows of one request, position) of every row."""
    for line in trace.forwards():
        for span in line["rows"]:
            for position in range(span["start"], span["start"] + span["count"]):
                yield line, span, position


def expected(line: dict[str, Any], span: dict[str, Any], kind: str, experts: int) -> str:
    """The kernel that the profile ``thresholds`` has for a row; of attention, by what its request's cache holds."""
    slots, columns = line["shape"]
    if kind == "attention":
        query = span["count"] if line["layout"] == "packed" else columns
        (lane,) = [row for row in line["rows"] if row is span]
        if line["layout"] == "packed":
            keys = lane["start"] + lane["count"]
        else:
            # Padded, all requests are as long as the longest one.
            keys = max(cache["length"] for cache in line["caches"]) + columns
        name = "candle-metal/sdpa_full" if query >= QUERY else "mlx-metal/sdpa_unfused"
        return name if query >= QUERY or keys >= KEYS else "candle-metal/sdpa_vector"
    limit = SWITCH if kind == "switch" else LINEAR
    seen = slots * columns * (experts if kind == "switch" else 1)
    return "candle-metal/mm" if seen >= limit else "candle-metal/mv"


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(("arch", "fmt"), some_now(CELLS, 0, ci=OF_EACH))
def test_every_row_says_which_kernel_it_took(
    runs: Runs, thresholds: str, arch: str, fmt: str, layout: str
) -> None:
    asked = scenario("continuous", layout, kernels=thresholds, prefill_chunk=20, **CONTINUOUS)
    trace = runs.record(model(arch, fmt), asked, RecordOptions(observe=1000))
    assert trace.header["observer"]["equal"] is True
    sites = [(number, site) for number, site in enumerate(trace.sites) if site.kind in KINDS]
    assert {site.kind for _, site in sites} == set(KINDS) - (set() if arch == "qwen3_moe" else {"switch"})
    seen: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for line, span, position in rows(trace):
        for number, site in sites:
            call = trace.call(line["forward"], number, (span["request"], position))
            if site.kind == "head":
                assert call is None or call["path"].startswith("reference/candle-metal/m")
                continue
            assert call is not None
            name = call["path"].removeprefix("reference/")
            assert call["rule"].startswith("thresholds: ") and call["rule"].endswith(f"-> {name}")
            seen[site.kind].add(name)
            # A sliding window's cache holds less than its request has positions.
            if not (site.kind == "attention" and arch == "gemma3_text"):
                assert name == expected(line, span, site.kind, 2), (line["forward"], site.name, position)
    assert seen["linear"] == {"candle-metal/mv", "candle-metal/mm"}
    assert seen["attention"] == {
        "candle-metal/sdpa_full",
        "mlx-metal/sdpa_unfused",
        "candle-metal/sdpa_vector",
    }


@pytest.mark.parametrize(("arch", "fmt"), some_now(CELLS, 0, ci=OF_EACH))
def test_an_origin_is_where_the_paths_part(runs: Runs, thresholds: str, arch: str, fmt: str) -> None:
    of = model(arch, fmt)
    keys = {"kernels": thresholds, "lengths": LENGTHS, "max_tokens": 6}
    serial = runs.record(of, scenario("serial", "packed", **keys))
    for schedule, layout in (("continuous", "packed"), ("static", "padded"), ("continuous", "padded")):
        arrivals = {"arrivals": (0, 2, 5)} if schedule == "continuous" else {}
        found = compare(serial, runs.record(of, scenario(schedule, layout, **keys, **arrivals)))
        # In bfloat16 the rounding of the outputs can hide all that the kernels do otherwise.
        assert fmt == "bf16" or not found.identical
        for request in found.requests:
            for count in request.origins:
                # Padding moves keys to other lanes, which the kernels of attention see.
                moved = layout == "padded" and count.kind == "attention"
                assert count.kind in KINDS and (count.path_a != count.path_b or moved), count
            if request.origin is not None:
                assert request.origin.rule_a and request.origin.rule_b


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(("arch", "fmt"), some_now(CELLS, 11, ci=OF_EACH))
def test_with_one_kernel_each_nothing_parts(
    runs: Runs, one_each: str, arch: str, fmt: str, layout: str
) -> None:
    of = model(arch, fmt)
    # All prompts equally long, so that a padded batch pads nothing, and no sliding window of 16 is full.
    keys = {"kernels": one_each, "lengths": (10, 10, 10), "max_tokens": 5}
    serial = runs.record(of, scenario("serial", layout, **keys))
    other = runs.record(of, scenario("static", layout, **keys))
    assert compare(serial, other).identical


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    "site",
    some_now(
        ["layers.1.mlp.switch_mlp.down_proj", "layers.1.self_attn.attention", "layers.0.self_attn.q_proj"],
        0,
        1,
    ),
)
def test_a_fault_on_a_reference_path_is_found(runs: Runs, one_each: str, layout: str, site: str) -> None:
    of = model("qwen3_moe")
    asked = scenario("continuous", layout, kernels=one_each, **CONTINUOUS)
    base = runs.once(of, asked)
    other = runs.record(of, asked, RecordOptions(observe=0, faults=(InjectedFault(site, 2, 34, 3),)))
    (hit,) = [request for request in compare(base, other).requests if request.origin is not None]
    assert hit.origin is not None and (hit.id, hit.origin.site, hit.origin.position) == ("r2", site, 34)
    assert hit.origin.path_a == hit.origin.path_b
    assert str(hit.origin.path_a).startswith("reference/candle-metal/")


def test_experts_in_bfloat16_run_on_a_reference_kernel(runs: Runs, one_each: str) -> None:
    """MLX's own cannot: test_identity.py."""
    trace = runs.record(model("qwen3_moe", "bf16"), scenario(kernels=one_each, max_tokens=3))
    assert len(trace.generated().token) == 9


def test_plans_stay_few_while_the_keys_grow(runs: Runs, thresholds: str) -> None:
    asked = scenario(
        "continuous", "packed", kernels=thresholds, lengths=(5, 3), max_tokens=60, arrivals=(0, 3)
    )
    trace = runs.record(model("llama"), asked)
    lines = (Path(trace.path) / "forwards.jsonl").read_text().splitlines()
    assert len(trace.forwards()) > 60
    assert sum(line.startswith('{"plan"') for line in lines) <= 12


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_rules_can_name_experts_and_attention(runs: Runs, layout: str) -> None:
    given = [
        {"site": "layers.0.*.attention", "path": "candle-metal/sdpa_vector"},
        {"site": "layers.1.mlp.switch_mlp.*", "path": "pad:64", "rows": "2..30"},
        {"site": "*", "path": "candle-metal/mm", "phase": "prefill"},
    ]
    trace = runs.record(model("qwen3_moe"), scenario("continuous", layout, rule=given, **CONTINUOUS))
    paths: dict[str, set[str]] = {}
    for line, span, position in rows(trace):
        for number, site in enumerate(trace.sites):
            call = trace.call(line["forward"], number, (span["request"], position))
            if call is not None:
                paths.setdefault(site.name, set()).add(call["path"])
    assert paths["layers.0.self_attn.attention"] == {"reference/candle-metal/sdpa_vector"}
    # A linear kernel is nothing for attention, so the last rule leaves it alone.
    assert paths["layers.1.self_attn.attention"] == {"native"}
    assert (
        {"forced/pad:64"}
        < paths["layers.1.mlp.switch_mlp.up_proj"]
        <= {
            "forced/pad:64",
            "reference/candle-metal/mm",
            "native",
        }
    )
    assert paths["layers.0.self_attn.q_proj"] == {"reference/candle-metal/mm", "native"}


@pytest.mark.parametrize("schedule", ["static", "continuous"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_kernel_by_the_place_of_a_row_is_told_row_by_row(
    runs: Runs, tmp_path: Path, schedule: str, layout: str
) -> None:
    """Whole groups of four rows take one kernel and what is left over another, as ggml's repacked weights have it."""
    fours = write_profile(
        tmp_path / "fours.toml",
        {"kernel": "candle-metal/mm", "op": ["linear", "head"], "whole": 4},
        {"kernel": "candle-metal/mv", "op": ["linear", "head"]},
    )
    arrivals = {"arrivals": (0, 2, 5)} if schedule == "continuous" else {}
    keys = {"kernels": fours, "lengths": (7, 3, 9), "max_tokens": 5}
    trace = runs.record(model("qwen2"), scenario(schedule, layout, **keys, **arrivals))
    numbers = [n for n, site in enumerate(trace.sites) if site.kind == "linear"]
    (head,) = [n for n, site in enumerate(trace.sites) if site.kind == "head"]
    seen = set()
    tokens = trace.generated()
    answering = list(
        zip(tokens.forward.tolist(), tokens.request.tolist(), tokens.position.tolist(), strict=True)
    )
    for line, span, position in rows(trace):
        slots, columns = line["shape"]
        packed = layout == "packed"
        before = sum(row["count"] for row in line["rows"] if row["slot"] < span["slot"])
        place = (before if packed else span["slot"] * columns) + position - span["start"]
        whole = slots * columns - slots * columns % 4
        row = (span["request"], position)
        for number in numbers:
            call = trace.call(line["forward"], number, row)
            assert call is not None and call["rows"] == slots * columns
            assert call["path"] == f"reference/candle-metal/{'mm' if place < whole else 'mv'}"
            seen.add(call["path"])
        asked = [item[1:] for item in answering if item[0] == line["forward"]]
        if packed and row in asked:
            # The head sees only the rows that answer, in the order of their requests' rows in the forward.
            order = [(s["request"], p) for s in line["rows"] for q, p in asked if q == s["request"]]
            call = trace.call(line["forward"], head, row)
            assert call is not None and call["rows"] == len(order)
            limit = len(order) - len(order) % 4
            assert call["path"].endswith("mm" if order.index(row) < limit else "mv")
    assert len(seen) == 2
    serial = runs.once(model("qwen2"), scenario("serial", layout, **keys))
    found = compare(serial, trace)
    for request in found.requests:
        assert all(count.path_a != count.path_b for count in request.origins)
    # Arriving one by one, padded prompts are prefilled as alone, and three rows to decode are never four.
    assert (schedule, layout) == ("continuous", "padded") or not found.identical
