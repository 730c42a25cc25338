"""Cases 8, 11, 12 and 13: what becomes of a cache, found in its events and in what rows read of it."""

from __future__ import annotations

import pytest
from cache_cases import POLICY_CHUNKS
from cases import CASES
from runs import digests
from trials import SEEDS, Recorded, check_named, diverged


@pytest.mark.parametrize("seed", SEEDS)
def test_a_short_ring_is_seen_by_the_rows_that_miss_an_entry(recorded: Recorded, seed: int) -> None:
    trial = CASES[12].trial(seed)
    divergence = recorded.compare(trial)
    check_named(divergence, trial.expected)
    (request,) = diverged(divergence)
    # The first chunk is exact, and the rows that read too little are those whose window begins before their chunk.
    a, b = digests(recorded.a), digests(recorded.b)
    site = ("layers.0.self_attn.cache.read", "read")
    read = sorted(key[1] for key in a if key[2:] == site and a[key] != b[key])
    assert trial.expected.queries is not None
    first, last = trial.expected.queries
    assert [position for position in read if position < 36] == list(range(first, last + 1))
    earlier = [key for key in a if key[1] < first]
    assert earlier and all(a[key] == b[key] for key in earlier)
    assert request.origin is not None and request.origin.composition_b is not None
    (member,) = request.origin.composition_b.members
    assert (member.start, member.rows) == (first, 18)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_head_is_the_attention_of_few_rows(recorded: Recorded, seed: int) -> None:
    trial = CASES[11].trial(seed)
    divergence = recorded.compare(trial, capture="full")
    check_named(divergence, trial.expected)
    (request,) = diverged(divergence)
    origin, head = request.origin, trial.expected.head
    assert origin is not None and origin.magnitude is not None and head is not None
    assert (origin.rows_a, origin.rows_b) == (16, 4)
    # One head of 64 values, and none of them by rounding.
    assert origin.magnitude.elements == 256 and origin.magnitude.differing == 64
    assert (origin.magnitude.worst or 0) // 64 == head
    assert (origin.magnitude.max_abs or 0) > 1e-2
    # The cache was quantised alike, which is no difference of configuration.
    assert {e["position"] for e in recorded.b.events() if e["event"] == "quantise"} == {16}
    assert [e["event"] for e in recorded.a.events()] == ["quantise"] and divergence.bookkeeping == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cache_quantised_from_elsewhere_is_bookkeeping(recorded: Recorded, seed: int) -> None:
    trial = CASES[13].trial(seed)
    divergence = recorded.compare(trial)
    chunk = POLICY_CHUNKS[seed % 3]
    at = next(end for end in range(chunk, 40, chunk) if end >= 20)
    for trace, position in ((recorded.a, 39), (recorded.b, at)):
        (event,) = trace.events()
        assert (event["event"], event["position"], event["layers"]) == ("quantise", position, "0-1")
    (finding,) = divergence.bookkeeping
    assert (finding.what, finding.request) == ("quantise", "r0")
    assert "from position 39 on" in finding.detail and f"from position {at} on" in finding.detail
    (request,) = diverged(divergence)
    # Nothing differs before a row could see a quantised entry.
    assert request.origin is not None and request.origin.position == at


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reused_prefix_is_equal_and_its_suffix_takes_another_path(recorded: Recorded, seed: int) -> None:
    trial = CASES[2].trial(seed)
    divergence = recorded.compare(trial)
    check_named(divergence, trial.expected)
    assert divergence.request("r0").identical
    request = divergence.request("r1")
    assert request.origin is not None and request.cache_entry is not None
    suffix = 1 + seed % 3
    assert (request.origin.rows_a, request.origin.rows_b) == (16 + suffix, suffix)
    assert request.origin.path_a == "reference/mlx-cuda/gemm"
    assert request.origin.path_b == "reference/mlx-cuda/gemv"
    # What was reused is what the whole prefill wrote.
    assert request.cache_entry.position >= 16
    shared = [e for e in recorded.b.events() if e["event"] == trial.expected.event]
    assert [(e["request"], e["from"], e["tokens"]) for e in shared] == [(1, 0, 16)]


@pytest.mark.parametrize("seed", SEEDS)
def test_verification_in_a_block_takes_another_path(recorded: Recorded, seed: int) -> None:
    trial = CASES[3].trial(seed)
    divergence = recorded.compare(trial)
    check_named(divergence, trial.expected)
    for request, prompt in zip(divergence.requests, (12, 5), strict=True):
        origin = request.origin
        # The first row that is verified.
        assert origin is not None and origin.position == prompt
        assert (origin.rows_a, origin.rows_b) == (4, 4)
        assert origin.path_a == "reference/mlx-cuda/gemv" and origin.path_b == "reference/mlx-cuda/gemm"
        assert str(origin.rule_a).startswith("rule: site *, phase verify")
    a, b = ([e for e in trace.events() if e["event"] == "verify"] for trace in (recorded.a, recorded.b))
    # The draft proposes alike as long as the texts are.
    assert (a[0]["proposals"], b[0]["proposals"]) == (a[0]["proposals"],) * 2 and len(a[0]["proposals"]) == 4
    for trace, found in ((recorded.a, a), (recorded.b, b)):
        for number, request in enumerate(trace.requests):
            mine = [e for e in found if e["request"] == number]
            counts = trace.header["speculation"][request["id"]]
            assert sum(len(e["proposals"]) for e in mine) == counts["proposed"] > 0
            assert sum(e["accepted"] for e in mine) == counts["accepted"]


@pytest.mark.parametrize("seed", SEEDS)
def test_mlx_lm_does_not_rewind_behind_a_window(recorded: Recorded, seed: int) -> None:
    """docs/findings.md has this without detdiff. Nothing is injected."""
    trial = CASES[8].trial(seed)
    drafts = trial.scenario_b.speculation.drafts if trial.scenario_b.speculation else 0
    divergence = recorded.compare(trial)
    assert {request.id for request in diverged(divergence)} == trial.expected.requests
    assert divergence.stage == "bookkeeping"
    trims = [e for e in recorded.b.events() if e["event"] == "trim" and e["model"] == "target"]
    failed = [e for e in trims if e["done"] < e["asked"]]
    # Right as long as there is room; from the wrap on, never again, and blamed on the layers that slide.
    assert failed and all(e["done"] == e["asked"] for e in trims[: trims.index(failed[0])])
    assert all((e["done"], e["layers"]) == (0, "0-1,3-4") for e in failed)
    assert failed[0]["asked"] == drafts == max(e["asked"] for e in trims)
    # The rejected rows stay in every layer, also in those that do not slide.
    found = {finding.what: finding for finding in reversed(divergence.bookkeeping) if finding.run == "b"}
    assert f"took 0 of {drafts} row" in found["trim"].detail and "layers 0-1,3-4" in found["trim"].detail
    assert f"{drafts} rejected row" in found["stale"].detail and "layers 0-5" in found["stale"].detail
    assert found["trim"].forward is not None and found["stale"].forward is not None
    assert found["trim"].forward < found["stale"].forward
    # It is there before any token shows it.
    (request,) = divergence.requests
    assert request.flip is not None and request.flip.forward_b is not None
    assert found["trim"].forward < request.flip.forward_b
