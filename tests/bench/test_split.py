"""The threshold at which one batch pays: named from what was measured, and what engines say calls of M rows cost; never seconds."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from click.testing import CliRunner
from llama.models import need_llama, tiny_gguf
from torch_models import need_torch, tiny_llama, torch_or_skip

from detdiff.bench import measure as measuring
from detdiff.bench.runs import TimedRun
from detdiff.bench.split import SplitSearch, find_split, other_answers, split_levels
from detdiff.cli import main
from detdiff.engines.registry import open_named
from detdiff.errors import PolicyUnusable
from detdiff.probe import measures
from detdiff.probe.measures import CallTime, RowCosts, joined_ratio
from detdiff.report.split import headline, split_html, split_text
from detdiff.scenario import Scenario

MACHINE = {"chip": "a chip", "cores": 2, "load": 0.0, "load_after": 0.0, "clock": "wall"}


def scenario_of(count: int, **keys: Any) -> Scenario:
    requests = [{"tokens": [7 * n + 3, 9], "max_tokens": 2, "ignore_stop": True} for n in range(count)]
    return Scenario.from_dict({"model": "builtin", "schedule": "continuous", "request": requests, **keys})


@pytest.fixture(scope="module")
def engine() -> Any:
    return open_named("mlx", "builtin", {})


def searched(engine: Any, monkeypatch: pytest.MonkeyPatch, seconds: Any) -> SplitSearch:
    """A search whose runs take ``seconds(requests at once, how)``."""

    def timed(_: Any, scenario: Scenario, clock: str) -> TimedRun:
        count = len(scenario.requests)
        serial = scenario.schedule.kind == "serial"
        how = "serial" if serial else "split" if scenario.kernels.split_rows else "whole"
        answers = [[1, 2 if how == "whole" and count == 4 and n == 1 else 3] for n in range(count)]
        return TimedRun(seconds(count, how), [0.0] * count, [[0.1, 0.2]] * count, answers)

    monkeypatch.setattr(measuring, "timed", timed)
    monkeypatch.setattr(measures, "BUDGET", 0.0)
    found = SplitSearch(split_levels(scenario_of(8), engine, 8), 1, "eight", dict(MACHINE))
    said: list[tuple[str, int, int]] = []
    find_split(engine, found, progress=lambda *told: said.append(told))
    # Of what calls cost, and of each run of the round that warms up and of the other one.
    assert len(said) == 1 + 2 * 3 * len(found.levels) and "round 1 of 1" in said[-1][0]
    return found


@pytest.mark.parametrize(
    ("whole", "pays", "rows", "says"),
    [
        (lambda n: 0.5 * n, 2, None, "pays from 2 requests at once"),
        (lambda n: 4.5, 5, 4, "starts to pay at 5 requests at once: split_rows=4"),
        (lambda n: 2.0 * n, None, 8, "never pays: split_rows=8"),
        # Faster at three, but not from there on.
        (lambda n: 0.5 if n in (3, 8) else 2.0 * n, 8, 7, "starts to pay at 8 requests at once"),
    ],
)
def test_the_threshold_is_where_a_batch_is_faster_from_then_on(
    engine: Any, monkeypatch: pytest.MonkeyPatch, whole: Any, pays: int | None, rows: int | None, says: str
) -> None:
    found = searched(engine, monkeypatch, lambda n, how: whole(n) if how == "whole" else 1.0 * n)
    assert (found.pays_from, found.split_rows) == (pays, rows) and found.finished
    assert says in headline(found)
    assert [level.at_once for level in found.levels] == [2, 3, 4, 5, 6, 7, 8]
    # A figure whose text is another one says so.
    assert [other_answers(level.whole, level.serial) for level in found.levels] == [0, 0, 1, 0, 0, 0, 0]
    assert "flips 1 of 4" in split_text(found) and "dd-split" in split_html(found)


def test_a_difference_that_changes_its_sign_is_none(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = searched(engine, monkeypatch, lambda n, how: 0.9 * n if how == "whole" and n > 2 else 1.0 * n)
    assert found.pays_from == 3 and found.levels[0].gain is not None
    for level in found.levels[:1]:
        level.whole.runs.append(TimedRun(1.0, [0.0] * level.at_once, [[0.1, 0.2]] * level.at_once))
        for other in (level.serial, level.split):
            assert other is not None
            other.runs.append(TimedRun(2.0, [0.0] * level.at_once, [[0.1, 0.2]] * level.at_once))
    assert found.pays_from == 2 and found.split_rows is None


def test_an_engine_that_cannot_split_is_measured_against_one_after_the_other(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Whole:
        name, capabilities = "mlx", frozenset({"static"})

    monkeypatch.setattr(
        measuring,
        "timed",
        lambda _, s, clock: TimedRun(
            3.5 if len(s.requests) > 1 and s.schedule.kind != "serial" else len(s.requests), [0.0], [[0.1]]
        ),
    )
    found = SplitSearch(split_levels(scenario_of(8), Whole(), 8), 2, "eight", dict(MACHINE))  # type: ignore[arg-type]
    find_split(Whole(), found)  # type: ignore[arg-type]
    assert found.pays_from == 4 and "below it one after the other is faster" in headline(found)
    assert "no way to split rows" in split_text(found) and not found.costs
    with pytest.raises(PolicyUnusable, match="expected 2 at least"):
        split_levels(scenario_of(1), engine, 1)


def test_costs_are_joined_by_how_often_a_shape_is_called() -> None:
    def costs(what: str, count: int, alone: float, four: float) -> RowCosts:
        return RowCosts(what, count, tuple(CallTime(m, t, 1, 1, 1, 5) for m, t in ((1, alone), (4, four))))

    found = [costs("a", 3, 1.0, 8.0), costs("b", 1, 2.0, 2.0)]
    assert joined_ratio(found, 4) == (3 * 8 + 2) / (4 * (3 + 2))


def test_every_engine_says_what_rows_cost(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "BUDGET", 0.0)
    rows = (1, 2, 3)
    found = engine.row_costs(scenario_of(3, layout="packed", kernels="candle-metal"), rows, perf_counter)
    assert {each.count for each in found} > {1} and all(
        [t.rows for t in each.times] == [1, 2, 3] for each in found
    )
    need_torch()
    from detdiff.engines.transformers import TransformersEngine

    torch = TransformersEngine(tiny_llama(torch_or_skip()))
    assert len(torch.row_costs(scenario_of(3), rows, perf_counter)) > 2
    need_llama()
    from detdiff.engines.llama_cpp.engine import open_llama

    whole = open_llama(str(tiny_gguf(tmp_path / "tiny.gguf")), {}).row_costs(
        scenario_of(3), rows, perf_counter
    )
    assert [(each.what, each.count) for each in whole] == [("the whole forward", 1)] and len(
        whole[0].times
    ) == 3


def test_the_command_finds_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "BUDGET", 0.0)
    words = [
        "bench",
        "--model",
        "builtin",
        "--find-split",
        "--requests",
        "3",
        "--answer-lengths",
        "2",
        "--rounds",
        "1",
    ]
    kernels = ["--set", "layout=packed", "--set", "kernels=candle-metal"]
    done = CliRunner().invoke(main, [*words, *kernels, "-o", str(tmp_path), "--json"], catch_exceptions=False)
    found = json.loads(done.output)
    assert done.exit_code == 0 and found == json.loads((tmp_path / "split.json").read_text())
    assert [each["at_once"] for each in found["levels"]] == [2, 3] and found["finished"]
    for level in found["levels"]:
        assert level["split"]["throughput"]["median"] > 0 and level["split"]["other_answers"] == 0
        assert level["calls_to_row_by_row"] > 0 and level["gain"]["low"] <= level["gain"]["high"]
    assert "reference kernels ran" in (tmp_path / "split.html").read_text()
    for wrong in (["--policy", "static"], ["--simulate"], ["--arrivals", "poisson:1"]):
        done = CliRunner().invoke(main, [*words, *wrong])
        assert done.exit_code == 2 and f"{wrong[0]} says nothing to --find-split" in " ".join(
            done.output.split()
        )
