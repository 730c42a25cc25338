"""The sizes of differences in the arrays that a report draws: where both traces hold the values, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from test_compare_values import OUTPUT, bumped, ports, write

from detdiff.compare import Divergence, Grid, Series, Values, compare, measure, series
from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.engines.mlx.serve import Models
from detdiff.scenario import Scenario
from detdiff.trace import Trace

GOLDEN = Path(__file__).parents[2] / "traces"


def drawn(a: Trace, b: Trace) -> Series:
    return series(a, b, compare(a, b))


def sizes(grid: Grid) -> list[tuple[float, float]]:
    """(ULP, relative) of each row at the only position."""
    assert grid.ulp is not None and grid.rel is not None
    return list(zip(grid.ulp[:, 0].tolist(), grid.rel[:, 0].tolist(), strict=True))


def test_a_cell_has_the_largest_distance_of_what_differs(tmp_path: Path) -> None:
    a = write(tmp_path / "a", ports())
    b = write(tmp_path / "b", ports(out=(bumped(3), "F32"), V=(bumped(2), "F32"), K=(bumped(5), "F32")))
    request = drawn(a, b).requests[0]
    relative = [np.float32(1 - float(OUTPUT[3]) / float(bumped(n)[3])) for n in (3, 5)]
    layer, after = request.sites
    assert layer.rows == ("layers.0.proj", "layers.0.cache.write")
    assert sizes(layer) == [(3, pytest.approx(relative[0])), (5, pytest.approx(relative[1]))]
    assert (after.ulp, after.rel) == (None, None)
    assert request.layers.ulp is not None and request.layers.rows == ("layer 0", "after the layers")
    assert request.layers.ulp[0, 0] == 5 and np.isnan(request.layers.ulp[1, 0])
    assert [ulp for ulp, _ in sizes(request.entries[0])] == [5, 2]


@pytest.mark.parametrize("held", ["a", "b", "neither"])
def test_values_of_one_run_are_no_distance(tmp_path: Path, held: str) -> None:
    a = write(tmp_path / "a", ports(), values=held == "a")
    b = write(tmp_path / "b", ports(out=(bumped(3), "F32")), values=held == "b")
    request = drawn(a, b).requests[0]
    assert request.sites[0].state[0, 0] == 3
    assert all(g.ulp is None and g.rel is None for g in (request.layers, *request.sites, *request.entries))


def test_another_dtype_has_no_ulps_and_another_shape_no_distance(tmp_path: Path) -> None:
    half = (OUTPUT.view(np.uint32) >> 16).astype(np.uint16)
    a = write(tmp_path / "a", ports())
    typed = drawn(a, write(tmp_path / "typed", ports(out=(half, "BF16")))).requests[0].sites[0]
    assert typed.ulp is None and typed.rel is not None and typed.rel[0, 0] == 0 and typed.state[0, 0] == 3
    shaped = drawn(a, write(tmp_path / "shaped", ports(out=(OUTPUT[:4], "F32")))).requests[0].sites[0]
    assert shaped.ulp is None and shaped.rel is None and shaped.state[0, 0] == 3


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    odd = bumped(3)
    odd[0] = np.nan
    mixed = drawn(write(tmp_path / "a", ports()), write(tmp_path / "b", ports(out=(odd, "F32"))))
    assert sizes(mixed.requests[0].sites[0])[0][0] == 3
    nothing = np.full_like(OUTPUT, np.inf)
    none = drawn(write(tmp_path / "c", ports()), write(tmp_path / "d", ports(out=(nothing, "F32"))))
    assert none.requests[0].sites[0].ulp is None and none.requests[0].sites[0].state[0, 0] == 3


@dataclass(frozen=True)
class Pair:
    """Two recorded runs whose kernels change with the number of rows, and their comparison."""

    a: Trace
    b: Trace
    found: Divergence
    series: Series


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    asked = [Scenario.from_toml(GOLDEN / f"{name}.toml") for name in ("serial", "continuous")]
    models, folder = Models.of(asked[0]), tmp_path_factory.mktemp("full")
    a, b = (
        record(
            each.with_changes(capture="full", max_tokens=8),
            folder / str(n),
            loaded=models.target,
            options=RecordOptions(observe=0),
        )
        for n, each in enumerate(asked)
    )
    found = compare(a, b)
    return Pair(a, b, found, series(a, b, found))


def value(trace: Trace, row: int, port: int) -> Values | None:
    index = trace.row_index()
    table, shard = int(index.table[row]), trace.shard(int(index.shard[row]))
    column = int(trace.tables[table][port])
    data = None if column < 0 else shard.value_at(table, column, int(index.row[row]))
    return None if data is None else Values(data, shard.tensors[f"value/{table}/{column}"].dtype)


def by_hand(pair: Pair, request: int, position: int) -> dict[str, list[tuple[float, float]]]:
    """(ULP, relative) of every port that differs and that both runs hold, by site."""
    rows = []
    for trace in (pair.a, pair.b):
        index = trace.row_index()
        rows.append(int(np.flatnonzero((index.request == request) & (index.position == position))[-1]))
    found: dict[str, list[tuple[float, float]]] = {}
    for n, port in enumerate(pair.a.ports):
        x, y = value(pair.a, rows[0], n), value(pair.b, rows[1], n)
        if x is not None and y is not None and not np.array_equal(x.bits(), y.bits()):
            size = measure(x, y)
            assert size.max_ulp is not None and size.max_rel is not None
            found.setdefault(pair.a.sites[port.site].name, []).append((size.max_ulp, size.max_rel))
    return found


def cells(pair: Pair) -> Iterator[tuple[int, Grid, int, str]]:
    for number, request in enumerate(pair.series.requests):
        for grid in request.sites:
            for n, name in enumerate(grid.rows):
                yield number, grid, n, name


def test_every_recorded_cell_has_the_distance_of_its_values(pair: Pair) -> None:
    expected = {
        (number, position): by_hand(pair, number, position)
        for number, request in enumerate(pair.series.requests)
        for position in range(request.positions)
    }
    some = 0
    for number, grid, n, name in cells(pair):
        for position in range(grid.state.shape[1]):
            size = expected[number, position].get(name)
            if size is None:
                assert grid.ulp is None or np.isnan(grid.ulp[n, position])
                continue
            assert grid.ulp is not None and grid.rel is not None and grid.state[n, position] > 1
            assert grid.ulp[n, position] == np.float32(max(ulp for ulp, _ in size))
            assert grid.rel[n, position] == np.float32(max(rel for _, rel in size))
            some += 1
    assert some > 100


def test_every_origin_of_a_full_trace_has_a_size(pair: Pair) -> None:
    arising = [
        float(grid.ulp[n, position])
        for _, grid, n, _ in cells(pair)
        for position in np.flatnonzero(grid.state[n] == 3)
        if grid.ulp is not None
    ]
    assert (
        len(arising) == sum(count.count for request in pair.found.requests for count in request.origins) > 0
    )
    assert np.isfinite(arising).all() and min(arising) > 0


def test_a_layer_has_the_largest_distance_of_its_sites(pair: Pair) -> None:
    for request in pair.series.requests:
        unknown = np.full(request.layers.state.shape, np.nan)
        whole = unknown if request.layers.ulp is None else request.layers.ulp
        for n, grid in enumerate(request.sites):
            most = unknown[n] if grid.ulp is None else np.fmax.reduce(grid.ulp, axis=0)
            assert np.array_equal(whole[n], most, equal_nan=True)


def test_entries_that_differ_have_sizes_and_others_none(pair: Pair) -> None:
    apart = 0
    for request in pair.series.requests:
        for grid in request.entries:
            differs = grid.state == 2
            apart += int(differs.sum())
            found = np.zeros_like(differs) if grid.ulp is None else np.isfinite(grid.ulp)
            assert np.array_equal(found, differs) and np.array_equal(grid.share == 255, differs)
    assert apart > 0


@pytest.mark.thorough
def test_a_window_has_sizes_for_its_positions_alone(pair: Pair, tmp_path: Path) -> None:
    apart = np.concatenate(
        [np.flatnonzero((request.layers.state > 1).any(axis=0)) for request in pair.series.requests]
    )
    first, last = int(apart.min()), int(apart.min()) + 1
    assert last < int(apart.max())
    asked = [Scenario.from_toml(GOLDEN / f"{name}.toml") for name in ("serial", "continuous")]
    loaded = Models.of(asked[0]).target
    few = {"capture": "window", "window_positions": [first, last], "max_tokens": 8}
    a, b = (
        record(each.with_changes(**few), tmp_path / str(n), loaded=loaded, options=RecordOptions(observe=0))
        for n, each in enumerate(asked)
    )
    known: set[int] = set()
    for request in drawn(a, b).requests:
        if request.layers.ulp is not None:
            known |= set(np.flatnonzero(np.isfinite(request.layers.ulp).any(axis=0)).tolist())
    assert first in known and known <= {first, last}
