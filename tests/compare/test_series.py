"""The arrays that a report draws say of every cell what a look at each digest says."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from big_traces import Big, big_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_traces import Ask, Fault, Plan, serial, site_list, together, write_trace
from tiers import examples

from detdiff.compare import Divergence, Grid, RequestSeries, Series, compare, series
from detdiff.errors import AnswerOfOtherTraces
from detdiff.trace import Trace

ASKS = (
    Ask("anchor", tuple(range(10, 20)), (30, 31, 32, 33, 34)),
    Ask("follower", (40, 41, 42, 43, 44), (50, 51, 52)),
)
PLAN = Plan(ASKS, serial(ASKS, chunk=4))
BATCHED = replace(
    PLAN, forwards=together(ASKS), path=lambda rows: "reference/mv" if rows <= 4 else "reference/mm"
)
GOLDEN = Path(__file__).parents[2] / "traces"


def drawn(folder: Path, a: Plan, b: Plan) -> tuple[Trace, Trace, Divergence, Series]:
    one, other = write_trace(folder / "a", a), write_trace(folder / "b", b)
    found = compare(one, other)
    return one, other, found, series(one, other, found)


def lines(grids: tuple[Grid, ...]) -> dict[tuple[str, str], Any]:
    """The states of each row of several grids by the names of grid and row."""
    return {(grid.name, row): grid.state[n] for grid in grids for n, row in enumerate(grid.rows)}


def by_hand(trace: Trace) -> dict[tuple[int, int], dict[tuple[str, str], tuple[int, int]]]:
    """(digest, column) by (request, position), each by (site, port); the last write of a position counts."""
    rows, found = trace.row_index(), {}
    names = [(trace.sites[port.site].name, port.name) for port in trace.ports]
    stored = {
        table: (np.flatnonzero(rows.table == table), trace.digests(np.flatnonzero(rows.table == table)))
        for table in trace.tables
    }
    everything = {
        n: row for places, digests in stored.values() for n, row in zip(places, digests, strict=True)
    }
    for n in range(len(rows.request)):
        table = trace.tables[int(rows.table[n])].tolist()
        found[int(rows.request[n]), int(rows.position[n])] = {
            name: (int(everything[n][column]), column)
            for name, column in zip(names, table, strict=True)
            if column >= 0
        }
    return found


def cell(a: dict[Any, Any], b: dict[Any, Any], sites: set[str]) -> tuple[int, int]:
    """(state without origins, share) of a row's ports of some sites, each array once."""
    common = {
        (a[port][1], b[port][1]): a[port][0] != b[port][0] for port in a.keys() & b.keys() if port[0] in sites
    }
    if not common:
        return 0, 0
    return 1 + any(common.values()), -(-255 * sum(common.values()) // len(common))


def check_against_digests(a: Trace, b: Trace, found: Divergence, drawn: Series) -> None:
    left, right = by_hand(a), by_hand(b)
    for answer, request in zip(found.requests, drawn.requests, strict=True):
        number = [r["id"] for r in a.requests].index(answer.id)
        arising = 0
        for grid in request.sites:
            groups = [{name} for name in grid.rows]
            whole = request.layers.rows.index(grid.name)
            for position in range(request.positions):
                one, other = left[number, position], right[number, position]
                expected = [cell(one, other, group) for group in groups]
                state = grid.state[:, position]
                assert np.where(state == 3, [s for s, _ in expected], state).tolist() == [
                    s for s, _ in expected
                ]
                assert grid.share[:, position].tolist() == [share for _, share in expected]
                together = cell(one, other, set(grid.rows))
                assert request.layers.state[whole, position] == state.max()
                assert request.layers.share[whole, position] == together[1]
            arising += int((grid.state == 3).sum())
        # Each origin that the answer counts has its own cell.
        assert arising == sum(count.count for count in answer.origins)
        sites = {site.name for site in a.sites}
        apart = sum(cell(left[number, p], right[number, p], sites)[0] == 2 for p in range(request.positions))
        assert int((request.layers.state > 1).any(axis=0).sum()) == apart


@settings(max_examples=examples(20))
@given(st.data(), st.booleans())
def test_every_cell_says_what_its_digests_say(data: Any, recurrent: bool) -> None:
    places = [(site.name, port) for site in site_list(2, recurrent) for port in (*site.inputs, *site.outputs)]
    faults = [
        Fault(*data.draw(st.sampled_from(places)), request, data.draw(st.integers(0, 6 if request else 13)))
        for request in data.draw(st.lists(st.integers(0, 1), max_size=3))
    ]
    with tempfile.TemporaryDirectory() as folder:
        a, b = (replace(plan, recurrent=recurrent) for plan in (PLAN, replace(BATCHED, faults=faults)))
        check_against_digests(*drawn(Path(folder), a, b))


def test_the_injected_cell_is_the_origin_and_the_rest_follows(tmp_path: Path) -> None:
    *_, found, made = drawn(
        tmp_path, PLAN, replace(BATCHED, faults=[Fault("layers.0.attn.v_proj", "out", 0, 4)])
    )
    anchor, follower = made.requests
    site, layer = lines(anchor.sites), lines((anchor.layers,))
    assert site["layer 0", "layers.0.attn.v_proj"].tolist() == [1, 1, 1, 1, 3, *[1] * 9]
    # Later rows read its entry.
    assert site["layer 0", "layers.0.attn.attention"].tolist() == [1, 1, 1, 1, *[2] * 10]
    for equal in ("norm1", "attn.q_proj", "attn.k_proj"):
        assert set(site["layer 0", f"layers.0.{equal}"].tolist()) == {1}
    assert layer["layers", "before the layers"].tolist() == [1] * 14
    assert layer["layers", "layer 0"].tolist() == [1, 1, 1, 1, 3, *[2] * 9]
    assert layer["layers", "layer 1"].tolist() == [1, 1, 1, 1, *[2] * 10]
    assert sum(int((grid.state == 3).sum()) for grid in anchor.sites) == 1
    assert all(set(np.unique(grid.state)) <= {0, 1} for grid in (follower.layers, *follower.sites))
    assert made.requests[0].positions == found.request("anchor").rows


def test_rows_and_sites_are_in_execution_order(tmp_path: Path) -> None:
    *_, made = drawn(tmp_path, PLAN, BATCHED)
    request = made.requests[0]
    assert request.layers.rows == ("before the layers", "layer 0", "layer 1", "after the layers")
    assert tuple(grid.name for grid in request.sites) == request.layers.rows
    assert [name for grid in request.sites for name in grid.rows] == [site.name for site in site_list(2)]
    assert request.layers.state.dtype == request.layers.share.dtype == np.uint8
    # The head ran for the last row of each forward that both runs have.
    assert lines(request.sites)["after the layers", "logits"].tolist() == [0] * 9 + [1] * 5


def test_cache_entries_differ_where_they_were_written(tmp_path: Path) -> None:
    fault = Fault("layers.1.attn.cache.write", "V.1", 1, 5)
    *_, made = drawn(tmp_path, PLAN, replace(BATCHED, faults=[fault]))
    follower = made.requests[1]
    entries = lines(follower.entries)
    assert [grid.name for grid in follower.entries] == ["layer 0", "layer 1"]
    assert follower.entries[1].rows == ("K head 0", "K head 1", "V head 0", "V head 1")
    assert entries["layer 1", "V head 1"].tolist() == [1, 1, 1, 1, 1, 2, 1]
    assert sum(int((grid.state > 1).sum()) for grid in follower.entries) == 1
    assert follower.entries[1].share[3].tolist() == [0, 0, 0, 0, 0, 255, 0]
    assert lines(follower.sites)["layer 1", "layers.1.attn.cache.write"].tolist() == [1, 1, 1, 1, 1, 3, 1]


def test_states_are_entries_of_the_rows_that_left_them(tmp_path: Path) -> None:
    fault = Fault("layers.0.mixer.in_proj", "out", 0, 2)
    *_, made = drawn(
        tmp_path, replace(PLAN, recurrent=True), replace(BATCHED, recurrent=True, faults=[fault])
    )
    (first, second) = made.requests[0].entries
    assert (first.rows, second.name) == (("state 0",), "layer 1")
    assert first.state[0].tolist() == [0] * 9 + [2] * 5


def test_positions_end_at_the_flip(tmp_path: Path) -> None:
    flipped = replace(ASKS[0], generated=(30, 31, 99, 98, 97))
    fault = Fault("layers.1.mlp.up", "out", 0, 9)
    *_, made = drawn(tmp_path, PLAN, replace(BATCHED, asks=(flipped, ASKS[1]), faults=[fault]))
    anchor, follower = made.requests
    assert (anchor.prompt, anchor.flip_index, anchor.flip_position, anchor.positions) == (10, 2, 11, 12)
    assert (follower.flip_index, follower.flip_position, follower.positions) == (None, None, 7)
    assert anchor.layers.state.shape == (4, 12)
    # All tokens are there; the other run can say nothing of those after the flip.
    assert [(t.token, t.text) for t in anchor.tokens_b] == [
        (30, " t30"),
        (31, " t31"),
        (99, " t99"),
        (98, " t98"),
        (97, " t97"),
    ]
    assert [t.position for t in anchor.tokens_a] == [9, 10, 11, 12, 13]
    assert [t.delta for t in anchor.tokens_a] == [0.0, 0.0, None, None, None]
    assert [t.margin for t in anchor.tokens_a] == [1.0] * 5
    assert {t.delta for t in anchor.tokens_b} == {None}


def test_a_delta_is_the_movement_of_the_two_highest(tmp_path: Path) -> None:
    a = replace(
        PLAN, logits={(0, 1): [(31, 4.0), (60, 3.5), (61, 1.0)], (0, 2): [(32, 2.0), (33, 1.0), (9, 0.5)]}
    )
    b = replace(
        a, logits={(0, 1): [(31, 4.0), (61, 3.0), (60, 2.5)], (0, 2): [(32, 2.0), (5, 1.0), (6, 0.5)]}
    )
    narrow = [(30, 2.0), (31, 1.0), (7, 0.0)]
    rest = {(r, n): narrow for r, n in ((0, 0), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2))}
    rest = {at: [(ASKS[at[0]].generated[at[1]], 2.0), *top[1:]] for at, top in rest.items()}
    *_, made = drawn(
        tmp_path, replace(a, logits={**a.logits, **rest}), replace(b, logits={**b.logits, **rest})
    )
    tokens = made.requests[0].tokens_a
    # Of the third token the other run did not record the runner-up.
    assert [(t.margin, t.delta) for t in tokens[1:3]] == [(0.5, 1.0), (1.0, None)]


def test_traces_of_digests_have_no_sizes() -> None:
    a, b = Trace.open(GOLDEN / "serial"), Trace.open(GOLDEN / "continuous")
    made = series(a, b, compare(a, b))
    grids = [g for r in made.requests for g in (r.layers, *r.sites, *r.entries)]
    assert grids and all(grid.ulp is None and grid.rel is None for grid in grids)


def test_a_comparison_of_other_traces_is_refused(tmp_path: Path) -> None:
    a, b, found, _ = drawn(tmp_path, PLAN, replace(BATCHED, faults=[Fault("layers.0.mlp.up", "out", 0, 9)]))
    with pytest.raises(
        AnswerOfOtherTraces, match="request anchor that .* have 0 of 14, and no token differs"
    ):
        series(a, a, found)
    assert series(a, b, found).requests[0].id == "anchor"


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    return big_pair(tmp_path_factory.mktemp("big"), positions=300, layers=5)


def of_big(pair: tuple[Trace, Trace]) -> tuple[Divergence, RequestSeries]:
    found = compare(*pair)
    return found, series(*pair, found).requests[0]


def test_the_big_pair_has_its_origin_its_flip_and_its_differing_entries(big: tuple[Trace, Trace]) -> None:
    found, anchor = of_big(big)
    sizes = Big(300, 5, 13)
    row, layer = sizes.origin
    assert (anchor.flip_index, anchor.positions) == (sizes.flip, sizes.prompt + sizes.flip)
    where = {(g.name, *at) for g in anchor.sites for at in np.argwhere(g.state == 3).tolist()}
    assert where == {(f"layer {layer}", n, row) for n in (1, 2, 3)}
    assert not (anchor.layers.state[:, :row] > 1).any()
    # It spreads, and not everywhere.
    after = anchor.layers.state[layer + 1 :, row:]
    assert 0.3 < (after[1:] > 1).mean() < 0.95
    assert [request.flip is not None for request in found.requests] == [True, False]
    check_against_digests(*big, found, series(*big, found))


def test_the_lens_shows_both_tokens_in_both_runs(big: tuple[Trace, Trace]) -> None:
    found, anchor = of_big(big)
    assert anchor.flip_index is not None and [point.layer for point in anchor.lens] == [0, 1, 2, 3, 4]
    for trace, run, sign in ((big[0], "a", 1), (big[1], "b", -1)):
        generated = trace.generated()
        (step,) = np.flatnonzero((generated.request == 0) & (generated.index == anchor.flip_index))
        assert generated.lens is not None
        both = generated.lens.contested[step].astype(float)
        assert [getattr(point, run) for point in anchor.lens] == (sign * (both[:, 0] - both[:, 1])).tolist()
    last = anchor.lens[-1]
    assert last.a is not None and last.b is not None and last.a > 0 > last.b
    assert series(*big, found).requests[1].lens == ()
