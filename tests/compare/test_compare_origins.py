"""Every kind of injected fault is named at the exact place; what follows from it is not."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_traces import Ask, Fault, Plan, serial, site_list, together, write_trace
from tiers import examples

from detdiff.compare import Divergence, compare

ASKS = (
    Ask("anchor", tuple(range(10, 20)), (30, 31, 32, 33, 34)),
    Ask("follower", (40, 41, 42, 43, 44), (50, 51, 52)),
)
PLAN = Plan(ASKS, serial(ASKS))
BATCHED = replace(
    PLAN, forwards=together(ASKS), path=lambda rows: "reference/mv" if rows <= 4 else "reference/mm"
)


def run(a: Plan, b: Plan) -> Divergence:
    with tempfile.TemporaryDirectory() as work:
        return compare(write_trace(Path(work) / "a", a), write_trace(Path(work) / "b", b))


def injected(*faults: Fault, plan: Plan = BATCHED, base: Plan = PLAN) -> Divergence:
    return run(base, replace(plan, faults=faults))


def counted(divergence: Divergence) -> list[tuple[str, str, int | None, int]]:
    return [(r.id, c.kind, c.layer, c.count) for r in divergence.requests for c in r.origins]


def test_without_a_fault_the_schedules_are_identical() -> None:
    found = run(PLAN, BATCHED)
    assert (found.identical, found.inconclusive, found.stage, found.first) == (True, False, None, None)
    assert counted(found) == [] and all(r.identical and r.origin is None for r in found.requests)
    assert found.compared.rows == 10 + 4 + 5 + 2 and found.compared.differing == 0 < found.compared.digests


def test_a_leaf_is_named_with_both_calls() -> None:
    found = injected(Fault("layers.0.mlp.down", "out", 0, 7))
    assert (found.identical, found.stage, found.first) == (False, "bits", "anchor")
    anchor, follower = found.requests
    origin = anchor.origin
    assert origin is not None and origin.composition_b is not None
    assert (origin.site, origin.kind, origin.layer, origin.position) == ("layers.0.mlp.down", "linear", 0, 7)
    assert (origin.how, origin.stage, origin.ports, origin.between) == ("leaf", "bits", ("out",), ())
    assert (origin.forward_a, origin.forward_b) == (0, 0)
    assert (origin.rows_a, origin.rows_b, origin.second_last_a, origin.second_last_b) == (10, 15, 10, 15)
    assert (origin.path_a, origin.path_b, origin.rule_b) == (
        "native",
        "reference/mm",
        "15 rows -> reference/mm",
    )
    assert [(m.request, m.phase, m.rows) for m in origin.composition_b.members] == [
        ("anchor", "prefill", 10),
        ("follower", "prefill", 5),
    ]
    assert counted(found) == [("anchor", "linear", 0, 1)]
    assert anchor.flip is None and anchor.inherited is None and not anchor.identical
    assert follower.identical and follower.origin is None
    assert [m.index for m in anchor.margins] == [0, 1, 2, 3, 4]


def test_what_comes_through_the_cache_is_not_an_origin() -> None:
    found = injected(Fault("layers.0.attn.v_proj", "out", 0, 3))
    anchor = found.requests[0]
    assert counted(found) == [("anchor", "linear", 0, 1)]
    assert (
        anchor.growth is not None and anchor.differing_entries is not None and anchor.cache_entry is not None
    )
    # Rows 4 to 13 differ by what they read; layer 1 then has differing entries from position 3 on.
    assert sum(g.differing > 0 for g in anchor.growth.positions) == 11
    assert (anchor.cache_entry.layer, anchor.cache_entry.kind, anchor.cache_entry.head) == (0, "V", 0)
    assert (anchor.cache_entry.position, anchor.cache_entry.written_a, anchor.cache_entry.written_b) == (
        3,
        0,
        0,
    )
    assert anchor.differing_entries.layers == (0, 1) and anchor.differing_entries.positions == ((3, 13),)
    assert anchor.differing_entries.count == 2 + 11 * 4 and anchor.differing_entries.entries == 2 * 14 * 4


@pytest.mark.parametrize(
    ("fault", "site", "between"),
    [
        (("layers.1.mlp.down", "in"), "layers.1.mlp", ("layers.1.mlp.up.out", "layers.1.mlp.down.in")),
        (("layers.1.norm2", "in"), "layers.1", ("layers.1.attn.out", "layers.1.norm2.in")),
        (("layers.1.attn", "in"), "layers.1", ("layers.1.norm1.out", "layers.1.attn.q_proj.in")),
        (
            ("layers.1.attn.o_proj", "in"),
            "layers.1.attn",
            ("layers.1.attn.attention.out", "layers.1.attn.o_proj.in"),
        ),
        (("layers.1.attn", "out"), "layers.1.attn", ("layers.1.attn.o_proj.out", "layers.1.attn.out")),
        (("layers.1", "in"), "layers.1.norm1", ("layers.0.out", "layers.1.norm1.in")),
        (("norm", "in"), "norm", ("layers.1.out", "norm.in")),
    ],
)
def test_between_two_sites_the_composite_is_named(
    fault: tuple[str, str], site: str, between: tuple[str, str]
) -> None:
    found = injected(Fault(*fault, 0, 9))
    origin = found.requests[0].origin
    assert origin is not None
    assert (origin.site, origin.position, origin.how, origin.between) == (site, 9, "composite", between)
    assert sum(c.count for c in found.requests[0].origins) == 1


def test_a_cache_that_stores_something_else_is_named() -> None:
    found = injected(Fault("layers.1.attn.cache.write", "V.1", 1, 5)).request("follower")
    assert found.origin is not None and found.cache_entry is not None
    assert (found.origin.site, found.origin.how, found.origin.ports) == (
        "layers.1.attn.cache.write",
        "leaf",
        ("V.1",),
    )
    assert (found.origin.position, found.origin.forward_a, found.origin.forward_b) == (5, 6, 1)
    entry = found.cache_entry
    assert (entry.layer, entry.kind, entry.head, entry.position) == (1, "V", 1, 5)
    assert (entry.written_a, entry.written_b) == (6, 1)
    assert entry.composition_b is not None and entry.composition_b.rows == 2


def changed_entries() -> Plan:
    """From position 12 on run b reads an entry of layer 0 that is not what was written at position 4."""
    event = {"kind": "cache_changed", "request": 0, "layer": 0, "entry": "V", "head": 1, "position": 4}
    faults = [Fault("layers.0.attn.cache.read", "read", 0, position) for position in (12, 13)]
    return replace(PLAN, faults=faults, events={3: [event], 4: [event]})


def test_an_entry_that_changed_after_its_write_is_named_once() -> None:
    found = run(PLAN, changed_entries())
    origin = found.requests[0].origin
    assert origin is not None and counted(found) == [("anchor", "cache_read", 0, 1)]
    assert (origin.site, origin.how, origin.position, origin.ports) == (
        "layers.0.attn.cache.read",
        "changed",
        12,
        ("read",),
    )
    (change,) = origin.changes
    assert (change.run, change.forward, change.layer, change.kind, change.head, change.position) == (
        "b",
        3,
        0,
        "V",
        1,
        4,
    )
    assert found.stage == "bookkeeping"
    assert [(f.run, f.what, f.request, f.forward) for f in found.bookkeeping] == [
        ("b", "cache_changed", "anchor", 3)
    ]


def test_bookkeeping_that_is_wrong_alike_does_not_part() -> None:
    found = run(changed_entries(), changed_entries())
    assert found.identical and [f.run for f in found.bookkeeping] == ["both"]


def test_a_wrong_offset_parts_before_any_bit_does() -> None:
    event = {"kind": "offset", "request": 0, "layer": 1, "expected": 11, "found": 12}
    found = run(PLAN, replace(PLAN, events={2: [event]}))
    assert (found.identical, found.inconclusive, found.stage) == (False, False, "bookkeeping")
    assert found.bookkeeping[0].detail == "the cache of layer 1 is at offset 12, the row at 11"


@pytest.mark.parametrize("port", [("layers.1.attn.cache.read", "written"), ("layers.1.attn.attention", "kv")])
def test_a_row_that_sees_other_entries_is_an_origin(port: tuple[str, str]) -> None:
    found = injected(Fault(*port, 0, 11)).requests[0]
    assert found.origin is not None
    assert (found.origin.site, found.origin.how, found.origin.position) == (port[0], "visible", 11)
    assert sum(c.count for c in found.origins) == 1


def test_what_was_not_recorded_is_never_called_equal() -> None:
    hidden = frozenset({("layers.0.attn.attention", "kv"), ("layers.0.attn.cache.read", "written")})
    blind = replace(BATCHED, absent=hidden | {("layers.0.attn.cache.read", "read")})
    found = injected(Fault("layers.0.attn.attention", "out", 0, 9), plan=blind)
    assert found.stage == "bits" and found.requests[0].origin is None
    assert found.compared.unattributed > 0 and any("without a named origin" in note for note in found.notes)


def test_ports_of_one_run_only_are_counted() -> None:
    found = run(PLAN, replace(PLAN, absent=frozenset({("layers.0.mlp.up", "in")})))
    assert found.identical and found.compared.one_sided == found.compared.rows


RECURRENT = replace(PLAN, recurrent=True)
RECURRENT_BATCHED = replace(BATCHED, recurrent=True)


def test_a_recurrent_state_carries_on() -> None:
    found = injected(Fault("layers.0.mixer.in_proj", "out", 0, 2), plan=RECURRENT_BATCHED, base=RECURRENT)
    assert counted(found) == [("anchor", "linear", 0, 1)]
    assert found.requests[0].origin is not None and found.requests[0].origin.position == 2
    entry, differing_entries = found.requests[0].cache_entry, found.requests[0].differing_entries
    # The prompt's rows share one forward, so the first differing entry is layer 0's state after its last row.
    assert entry is not None and (entry.layer, entry.kind, entry.head, entry.position) == (0, "state", 0, 9)
    # Of the states only the last one is alive; layer 1's entries differ from position 2 on.
    assert differing_entries is not None and differing_entries.count == 1 + 12 * 4


def test_a_difference_arising_in_a_state_is_named_once() -> None:
    found = injected(Fault("layers.0.mixer.state", "0", 0, 11), plan=RECURRENT_BATCHED, base=RECURRENT)
    origin = found.requests[0].origin
    assert origin is not None and counted(found) == [("anchor", "recurrent", 0, 1)]
    assert (origin.site, origin.how, origin.position) == ("layers.0.mixer", "composite", 11)
    assert origin.between == ("layers.0.mixer.in_proj.out", "layers.0.mixer.state.0")


def test_first_is_by_execution_not_by_position_or_name() -> None:
    faults = (
        Fault("layers.1.mlp.up", "out", 0, 2),
        Fault("layers.0.attn.q_proj", "out", 0, 8),
        Fault("layers.0.mlp.up", "out", 1, 6),
    )
    found = injected(*faults)
    origin = found.requests[0].origin
    # Both rows of the first are in one forward, and layer 0 runs before layer 1 does.
    assert origin is not None and (origin.site, origin.position) == ("layers.0.attn.q_proj", 8)
    assert found.first == "anchor"
    assert found.request("follower").origin is not None


def test_shards_do_not_change_the_answer() -> None:
    fault = Fault("layers.1.attn.k_proj", "out", 0, 6)
    small = injected(fault, plan=replace(BATCHED, shard_forwards=1), base=replace(PLAN, shard_forwards=2))
    large = injected(fault)
    assert small.requests == large.requests and small.compared == large.compared


def test_the_first_write_of_a_position_does_not_count() -> None:
    again = replace(PLAN, forwards=[[(0, 0, 10)], [(0, 4, 6)], *PLAN.forwards[1:]])
    found = run(PLAN, again)
    assert found.identical and (found.compared.superseded_a, found.compared.superseded_b) == (0, 6)
    fault = Fault("layers.0.mlp.up", "out", 0, 7, write=0)
    assert run(PLAN, replace(again, faults=[fault])).identical
    surviving = run(PLAN, replace(again, faults=[replace(fault, write=1)])).requests[0].origin
    assert surviving is not None and (surviving.position, surviving.forward_b) == (7, 1)


def places(recurrent: bool) -> list[tuple[str, str]]:
    return [(s.name, p) for s in site_list(2, recurrent) for p in (*s.inputs, *s.outputs)]


def expected(fault: Fault, recurrent: bool) -> tuple[str, str]:
    """(site, how) of the only origin that a fault may cause."""
    sites = {site.name: site for site in site_list(2, recurrent)}
    site = sites[fault.site]
    if (site.kind, fault.port) in {("attention", "kv"), ("cache_read", "written")}:
        return site.name, "visible"
    if site.kind == "cache_read":
        return site.name, "changed"
    composite = any(other.parent == site.name for other in sites.values())
    if fault.port in site.outputs and site.kind != "state":
        return site.name, "composite" if composite else "leaf"
    if site.parent is not None:
        return site.parent, "composite"
    # Between two sites that no composite holds: the first site that saw it.
    return (f"{site.name}.norm1" if site.kind == "block" else site.name), "composite"


@settings(max_examples=examples(60))
@given(st.data(), st.booleans())
def test_any_single_fault_is_the_only_origin(data: Any, recurrent: bool) -> None:
    request = data.draw(st.integers(0, 1), label="request")
    ask = ASKS[request]
    position = data.draw(st.integers(0, len(ask.prompt) + len(ask.generated) - 2), label="position")
    last = position >= len(ask.prompt) - 1
    everywhere = [
        p for p in places(recurrent) if last or p[0] not in ("lm_head", "logits", "layers.0.mixer.state")
    ]
    site, port = data.draw(st.sampled_from(everywhere), label="port")
    fault = Fault(site, port, request, position)
    base, other = (RECURRENT, RECURRENT_BATCHED) if recurrent else (PLAN, BATCHED)
    found = injected(fault, plan=other, base=base)
    assert found.first == ask.id
    origin = found.request(ask.id).origin
    assert origin is not None
    assert (origin.site, origin.how, origin.position) == (*expected(fault, recurrent), position)
    assert sum(c.count for r in found.requests for c in r.origins) == 1
    assert [r.identical for r in found.requests] == [r.id != ask.id for r in found.requests]
