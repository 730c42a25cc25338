"""Pages hold what a contiguous cache holds, bit for bit; pages in two hands are found where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from runs import Runs, content, model, patched, prompts, scenario
from tiers import some_now
from tiny import PACKABLE, tiny

from detdiff.compare import Divergence, compare
from detdiff.engines.mlx import caches
from detdiff.engines.mlx.caches import PagedCache, PagePool, PageTable, PrefixDonor, RequestCaches
from detdiff.engines.mlx.engine import RecordOptions
from detdiff.errors import LayoutError
from detdiff.scenario import CachePlan, Scenario
from detdiff.trace import Trace

PACKED: dict[str, Any] = {
    "schedule": "continuous",
    "layout": "packed",
    "arrivals": (0, 2, 5),
    "prefill_chunk": 9,
}
PAGED = [arch for arch in PACKABLE if arch != "gemma3_text"]


@pytest.mark.parametrize(
    ("arch", "size"), some_now([(arch, size) for arch in PAGED for size in (1, 5, 16)], 0, 4, 8, 9, 14)
)
def test_a_paged_run_is_bit_equal_to_a_contiguous_one(runs: Runs, arch: str, size: int) -> None:
    plain = runs.once(model(arch), scenario(**PACKED))
    paged = runs.record(model(arch), scenario(**PACKED, page_tokens=size))
    assert compare(plain, paged).identical
    digests, noticed, _, answers = content(plain)
    assert (digests, noticed, answers) == tuple(content(paged)[n] for n in (0, 1, 3))
    assert all(note["kind"] == "PagedCache" for line in paged.forwards() for note in line["caches"])
    assert {event["event"] for event in paged.events()} == {"page"}


def test_a_window_cannot_be_paged_and_the_layer_is_named(runs: Runs) -> None:
    with pytest.raises(LayoutError, match=r"layers\.0 keeps its entries in RotatingKVCache"):
        runs.record(model("gemma3_text"), scenario(**PACKED, page_tokens=16))


def test_a_window_cannot_share_a_prefix(runs: Runs) -> None:
    with pytest.raises(LayoutError, match=r"layers\.0 .* Leave share_prefix out"):
        runs.record(model("gemma3_text"), shared(20, 3)[1])


@given(
    size=st.integers(1, 7),
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=12
    ),
)
def test_interleaved_writes_and_trims_read_back_in_order(
    size: int, steps: list[tuple[int, int, int]]
) -> None:
    pool = PagePool(1, size)
    paged = [PagedCache(PageTable(pool, request), 0) for request in range(3)]
    plain = [KVCache() for _ in range(3)]
    count = 0
    for request, rows, trim in steps:
        k = mx.arange(count, count + 2 * rows * 4, dtype=mx.float32).reshape(1, 2, rows, 4)
        count += 2 * rows * 4
        got = paged[request].update_and_fetch(k, -k)
        want = plain[request].update_and_fetch(k, -k)
        assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))
        assert paged[request].trim(trim) == plain[request].trim(trim)
    held = [page for cache in paged for page in cache.table.pages]
    assert len(held) == len(set(held)) and sum(pool.users) == len(held)
    for cache in paged:
        cache.table.free()
    assert not any(pool.users)


def shared(common: int, own: int, **keys: Any) -> tuple[Scenario, Scenario]:
    """The same requests without and with a shared prefix; r1 begins with ``common`` of r0's 32 tokens."""
    first, second = prompts((32, 8))
    requests = [
        {"id": "r0", "tokens": first},
        {"id": "r1", "tokens": [*first[:common], *second[:own]], "arrival": 3},
    ]
    base = {
        "model": "tiny",
        "schedule": "continuous",
        "layout": "packed",
        "max_tokens": 6,
        "request": requests,
    }
    return Scenario.from_dict(base), Scenario.from_dict({**base, "share_prefix": True, **keys})


@pytest.mark.parametrize("arch", some_now(["llama", "qwen3_moe"], 0))
@pytest.mark.parametrize(
    ("common", "own", "keys", "tokens", "copied"),
    [
        (32, 0, {"page_tokens": 16}, 31, True),
        (20, 3, {"page_tokens": 16}, 16, False),
        (20, 3, {}, 20, False),
        (32, 0, {}, 31, False),
    ],
)
def test_a_shared_prefix_changes_nothing(
    runs: Runs, arch: str, common: int, own: int, keys: dict[str, Any], tokens: int, copied: bool
) -> None:
    alone, together = (runs.record(model(arch), asked) for asked in shared(common, own, **keys))
    found = compare(alone, together)
    assert found.identical, found.notes
    (event,) = [event for event in together.events() if event["event"] == "prefix"]
    assert (event["request"], event["from"], event["tokens"]) == (1, 0, tokens)
    assert any("copied" in event for event in together.events()) == copied
    assert found.compared.reused_b >= tokens


@pytest.mark.parametrize(
    "keys",
    some_now([{"page_tokens": 4}, {"page_tokens": 16, "share_prefix": True}, {"share_prefix": True}], 1),
)
def test_speculation_rewinds_pages_and_shares_them(runs: Runs, keys: dict[str, Any]) -> None:
    plain, _ = shared(32, 0)
    traces = []
    for asked in (plain, plain.with_changes(**keys)):
        asked = asked.with_changes(draft="tiny-draft", drafts=3, max_tokens=16)
        traces.append(runs.record(model("llama"), asked, draft=tiny("llama", seed=5)))
    found = compare(*traces)
    assert found.identical, (found.bookkeeping, found.notes)
    events = traces[1].events()
    if "page_tokens" in keys:
        assert any(event.get("freed") and event["model"] == "draft" for event in events) == (
            "share_prefix" not in keys
        )
    shared_by = {event["model"]: event["tokens"] for event in events if event["event"] == "prefix"}
    assert shared_by == ({"target": 31, "draft": 31} if "share_prefix" in keys else {})


def test_page_tables_that_differ_are_a_note(runs: Runs) -> None:
    small, large = (runs.record(model("llama"), scenario(**PACKED, page_tokens=size)) for size in (4, 16))
    found = compare(small, large)
    assert found.identical and any("page tables differ" in note for note in found.notes)
    again = compare(small, runs.record(model("llama"), scenario(**PACKED, page_tokens=4)))
    assert not any("page tables" in note for note in again.notes)


def test_recording_pages_and_prefixes_changes_no_logits(runs: Runs) -> None:
    for keys in ({"page_tokens": 16}, {}):
        _, asked = shared(32, 0, **keys)
        trace = runs.record(model("llama"), asked, RecordOptions(observe=20))
        assert trace.header["observer"]["equal"] is True and trace.header["observer"]["forwards"] > 6


def test_finished_requests_give_their_pages_back(runs: Runs) -> None:
    trace = runs.record(model("llama"), scenario(**PACKED, page_tokens=4))
    named: set[tuple[int, int]] = set()
    for event in trace.events():
        held = (event["request"], event["page"])
        if event.get("freed"):
            named.remove(held)
        else:
            named.add(held)
    assert not named


def test_a_snapshot_is_not_changed_by_what_follows() -> None:
    of = RequestCaches(model("llama").model, CachePlan(page_tokens=4))
    of.begin(0, ())
    rows = mx.arange(2 * 5 * 16, dtype=mx.float32).reshape(1, 2, 5, 16)
    for cache in of.of(0):
        cache.update_and_fetch(rows, rows)
    kept = of.snapshot()
    for _ in range(2):
        for cache in of.of(0):
            cache.update_and_fetch(-rows, -rows)
            cache.trim(8)
        assert of.of(0)[0].offset == 2
        of.restore(kept)
        for cache in of.of(0):
            assert cache.offset == 5 and mx.array_equal(cache.entries()[0], rows)


@contextmanager
def fault(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    undo = patched(owner, name, value)
    try:
        yield
    finally:
        undo()


def said(found: Divergence, what: str) -> list[tuple[str | None, int | None, str]]:
    return [(f.request, f.forward, f.detail) for f in found.bookkeeping if f.what == what]


def test_a_page_given_out_twice_is_found(runs: Runs) -> None:
    native = PagePool.take

    def take(pool: PagePool) -> int:
        # The fourth page is handed out although the first is still in use.
        return 0 if sum(pool.users) == 3 else native(pool)

    with fault(PagePool, "take", take):
        wrong = runs.record(model("llama"), scenario(**PACKED, page_tokens=8))
    found = compare(runs.once(model("llama"), scenario(**PACKED)), wrong)
    first = said(found, "page")[0]
    (given,) = [e for e in wrong.events() if e["event"] == "page" and not e.get("freed")][3:4]
    assert first[:2] == (wrong.requests[given["request"]]["id"], given["forward"])
    assert first[2].startswith("page 0 was given to ")
    # And by what the rows read, at the entries that were overwritten.
    assert any(
        "is not what was written" in d or "are not what was written" in d
        for *_, d in said(found, "cache_changed")
    )
    assert found.stage == "bookkeeping" and not found.identical


def test_a_shared_page_that_is_not_copied_is_found(runs: Runs) -> None:
    def writable(table: PageTable, index: int) -> int:
        if index == len(table.pages):
            table._name(index, table.pool.take())
        return table.pages[index]

    alone, together = shared(32, 0, page_tokens=16)
    with fault(PageTable, "writable", writable):
        wrong = runs.record(model("llama"), together)
    found = compare(runs.record(model("llama"), alone), wrong)
    (only,) = said(found, "page")
    forward = next(line["forward"] for line in wrong.forwards() if {"r1"} & names(wrong, line))
    assert only == (
        "r1",
        forward,
        "page 1 was written at position 31 by r1 while r0 and r1 share it up to position 30; expected a copy first",
    )


def names(trace: Trace, line: dict[str, Any]) -> set[str]:
    return {trace.requests[row["request"]]["id"] for row in line["rows"]}


def test_a_page_freed_while_in_use_is_found(runs: Runs) -> None:
    def release(pool: PagePool, page: int) -> None:
        pool.users[page] = 0

    first, second = prompts((32, 40))
    requests = [
        {"id": "r0", "tokens": first},
        {"id": "r1", "tokens": [*first[:16], *second[:4]], "arrival": 2, "max_tokens": 2},
        {"id": "r2", "tokens": second, "arrival": 5},
    ]
    asked = Scenario.from_dict(
        {"model": "tiny", "schedule": "continuous", "layout": "packed", "max_tokens": 20, "request": requests}
    )
    plan = {"page_tokens": 16, "share_prefix": True}
    with fault(PagePool, "release", release), fault(RequestCaches, "free", freed):
        wrong = runs.record(model("llama"), asked.with_changes(**plan))
    found = compare(runs.record(model("llama"), asked), wrong)
    request, _, detail = said(found, "page")[0]
    assert request == "r2" and detail.startswith(
        "page 0 was given to r2 for positions 0 to 15 while it held positions 0 to 15 of r0"
    )


def freed(held: RequestCaches, request: int) -> None:
    """Pages of finished requests go back although others may share their prompts."""
    table = held._held.pop(request).table
    assert table is not None
    table.free()


@pytest.mark.parametrize("keys", [{}, {"page_tokens": 16}])
def test_a_prefix_of_other_tokens_is_found(runs: Runs, keys: dict[str, Any]) -> None:
    native = caches.common_prefix

    def common_prefix(
        prompt: Any, donors: list[PrefixDonor], size: int | None
    ) -> tuple[PrefixDonor | None, int]:
        donor, tokens = native(prompt, donors, size)
        return donor, tokens + 16 if donor is not None else 0

    alone, together = shared(16, 8, **keys)
    alone, together = (
        Scenario.from_dict(
            {
                **s.to_dict(),
                "request": [r | {"tokens": r["tokens"] + [1] * 12} for r in s.to_dict()["request"]],
            }
        )
        for s in (alone, together)
    )
    with fault(caches, "common_prefix", common_prefix):
        wrong = runs.record(model("llama"), together)
    found = compare(runs.record(model("llama"), alone), wrong)
    ((request, forward, detail),) = said(found, "prefix")
    own = alone.requests[1].tokens
    assert own is not None
    event = next(e for e in wrong.events() if e["event"] == "prefix")
    assert (request, forward) == ("r1", event["forward"])
    assert (
        f"whose token at position 16 is {alone.requests[0].tokens[16]} where this prompt has {own[16]}"
        in detail
    )  # type: ignore[index]


def test_a_trim_that_a_window_cannot_do_is_refused() -> None:
    of = RequestCaches(model("gemma3_text").model)
    rows = mx.zeros((1, 2, 20, 32))
    for cache in of.of(0):
        cache.update_and_fetch(rows, rows)
    with pytest.raises(LayoutError, match=r"2 rejected rows cannot be taken back from layers\.0"):
        of.trim(0, 2)
