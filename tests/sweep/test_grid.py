"""The grid file: which cells and pairs it makes, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from detdiff.errors import CommandError, GridUnusable, ScenarioError
from detdiff.sweep.grid import Sweep, read_grid

BASE = 'model = "builtin"\nmax_tokens = 4\n[[request]]\nprompt = "In the beginning"\n[[request]]\nprompt = "My son"\n'


def swept(folder: Path, text: str, base: str = BASE) -> Sweep:
    (folder / "grid.toml").write_text(base + text)
    return read_grid(folder / "grid.toml")


def test_cells_are_all_combinations_and_are_paired_with_the_baseline(tmp_path: Path) -> None:
    sweep = swept(
        tmp_path,
        '[axes]\nlayout = ["padded", "packed"]\nschedule = ["serial", "static:2"]\n[pairs]\nbaseline = {schedule = "serial"}\n',
    )
    assert [cell.name for cell in sweep.cells] == [
        "layout=padded,schedule=serial",
        "layout=padded,schedule=static-2",
        "layout=packed,schedule=serial",
        "layout=packed,schedule=static-2",
    ]
    last = sweep.cells[-1].scenario
    assert (last.schedule.layout, last.schedule.kind, last.schedule.active) == ("packed", "static", 2)
    assert [(pair.name, pair.a.name) for pair in sweep.pairs] == [
        ("layout=padded,schedule=static-2", "layout=padded,schedule=serial"),
        ("layout=packed,schedule=static-2", "layout=packed,schedule=serial"),
    ]
    assert list(sweep.recordings) == [cell.name for cell in sweep.cells]


def test_the_grid_of_the_page_makes_the_pairs_that_the_page_tells_of(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/sweeps.md").read_text(encoding="utf-8")
    (tmp_path / "prompts.txt").write_text("In the beginning\nMy son\n")
    sweep = swept(tmp_path, page.partition("```toml\n")[2].partition("```")[0], "")
    # 2 layouts, 4 schedules, 2 plans with native kernels, and packed ones with the other profile.
    assert len(sweep.cells) == 2 * 4 * 2 + 4 * 2
    assert not any(
        cell.labels["layout"] == "padded" and cell.labels["kernels"] == "candle-metal" for cell in sweep.cells
    )
    along = [pair for pair in sweep.pairs if pair.along]
    assert {pair.along for pair in along} == {"kernels"} and len(along) == 4 * 2
    assert len(sweep.pairs) - len(along) == 24 - 6 and sweep.how.verdict == "different"


def test_a_baseline_that_names_one_cell_is_compared_with_all_others(tmp_path: Path) -> None:
    sweep = swept(
        tmp_path,
        '[axes]\nlayout = ["padded", "packed"]\nkernels = ["native", "candle-metal"]\n'
        '[pairs]\nbaseline = {layout = "padded", kernels = "native"}\n',
    )
    assert {pair.a.name for pair in sweep.pairs} == {"layout=padded,kernels=native"} and len(sweep.pairs) == 3


def test_neighbours_along_an_axis_pass_over_what_is_excluded(tmp_path: Path) -> None:
    sweep = swept(
        tmp_path,
        "[axes]\nprefill_chunk = [2, 3, 4]\nseed = [0, 1]\n[[exclude]]\nprefill_chunk = 3\nseed = [1]\n"
        '[pairs]\nalong = "prefill_chunk"\nverdict = "different"\nbudget = 5\n',
    )
    assert len(sweep.cells) == 5
    assert [(pair.a.labels["prefill_chunk"], pair.name) for pair in sweep.pairs] == [
        ("2", "prefill_chunk=3,seed=0~prefill_chunk"),
        ("3", "prefill_chunk=4,seed=0~prefill_chunk"),
        ("2", "prefill_chunk=4,seed=1~prefill_chunk"),
    ]
    assert (sweep.how.verdict, sweep.how.budget) == ("different", 5)


def test_axes_take_engines_flags_and_files_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("In the beginning\n")
    (tmp_path / "more.jsonl").write_text('{"prompt": "My son", "id": "x", "max_tokens": 3}\nAnd God said\n')
    sweep = swept(
        tmp_path,
        'prompts = ["few.txt", "more.jsonl"]\nengine = ["mlx", {name = "transformers", device = "cpu"}]\n'
        'plan = {plain = "", split = "split_rows=4 kernels=candle-metal"}\n[pairs]\nbaseline = {plan = "plain"}\n',
        'model = "builtin"\n[axes]\n',
    )
    assert len(sweep.cells) == 8 and len(sweep.pairs) == 4
    last = sweep.cells[-1]
    assert last.name == "prompts=more.jsonl,engine=transformers-device-cpu,plan=split"
    assert [(r.id, r.max_tokens) for r in last.scenario.requests] == [("x", 3), ("r1", 64)]
    assert last.scenario.engine_settings == {"device": "cpu"} and last.scenario.kernels.split_rows == 4


def test_prompts_and_the_base_may_be_files_beside_the_grid(tmp_path: Path) -> None:
    (tmp_path / "scenario.toml").write_text('model = "builtin"\nmax_tokens = 2\n')
    (tmp_path / "p.txt").write_text("In the beginning\nMy son\n")
    sweep = swept(
        tmp_path,
        'base = "scenario.toml"\nprompts = "p.txt"\n[axes]\nseed = [0, 1]\n[pairs]\nbaseline = {seed = 0}\n',
        "",
    )
    assert [len(cell.scenario.requests) for cell in sweep.cells] == [2, 2]


def test_cells_with_one_scenario_share_a_recording(tmp_path: Path) -> None:
    sweep = swept(
        tmp_path,
        '[axes]\nplan = {none = "kernels=native", same = ""}\nschedule = ["serial", "static"]\n[pairs]\nbaseline = {schedule = "serial"}\n',
    )
    assert len(sweep.cells) == 4 and list(sweep.recordings) == [
        "plan=none,schedule=serial",
        "plan=none,schedule=static",
    ]


def test_names_do_not_depend_on_the_other_cells(tmp_path: Path) -> None:
    few = swept(tmp_path, "[axes]\nseed = [0, 7]\n[pairs]\nbaseline = {seed = 0}\n")
    more = swept(tmp_path, "[axes]\nseed = [0, 1, 2, 7]\n[pairs]\nbaseline = {seed = 0}\n")
    assert {cell.name for cell in few.cells} <= {cell.name for cell in more.cells}
    long = swept(
        tmp_path,
        f"[axes]\nkernels = ['native', './{'x/' * 90}a.toml', './{'x/' * 90}b.toml']\n[pairs]\nbaseline = {{kernels = 'native'}}\n",
    )
    assert len({cell.name for cell in long.cells}) == 3 and max(len(cell.name) for cell in long.cells) < 100


PAIRS = "[pairs]\nbaseline = {seed = 0}\n"
REFUSED = {
    "no axes": (PAIRS, GridUnusable, "has no .axes."),
    "empty axes": ("[axes]\n" + PAIRS, GridUnusable, "has an empty .axes."),
    "axes that are no table": ("axes = 3\n" + PAIRS, GridUnusable, "has axes = 3; expected a table"),
    "an axis of no key": ("[axes]\nshedule = ['serial']\n" + PAIRS, ScenarioError, "did you mean 'schedule'"),
    "an axis of no values": ("[axes]\nseed = []\n" + PAIRS, GridUnusable, "axis seed is"),
    "a value twice": ("[axes]\nseed = [1, 1]\n" + PAIRS, GridUnusable, "has 1 twice"),
    "a value of another type": (
        "[axes]\nseed = [0, 1.5]\n" + PAIRS,
        GridUnusable,
        "1 of 2 cells make no scenario",
    ),
    "one name for two": (
        "[axes]\nseed = [0]\nkernels = ['./a/b.toml', './a-b.toml']\n" + PAIRS,
        GridUnusable,
        "have the same name",
    ),
    "no pairs": ("[axes]\nseed = [0, 1]\n", GridUnusable, "does not say which cells are compared"),
    "no two cells": ("[axes]\nseed = [0]\n" + PAIRS, GridUnusable, "no two cells"),
    "a baseline of no value": (
        "[axes]\nseed = [0, 1]\n[pairs]\nbaseline = {seed = 3}\n",
        GridUnusable,
        "no value '3'",
    ),
    "along no axis": ("[axes]\nseed = [0, 1]\n[pairs]\nalong = 'sed'\n", GridUnusable, "did you mean 'seed'"),
    "an excluded baseline": (
        "[axes]\nseed = [0, 1]\ntop = [2, 3]\n[[exclude]]\nseed = 0\ntop = 2\n" + PAIRS,
        GridUnusable,
        "has no baseline, since seed=0,top=2 is excluded",
    ),
    "all excluded": ("[axes]\nseed = [0, 1]\n[[exclude]]\n" + PAIRS, GridUnusable, "exclude 1 is empty"),
    "an unknown verdict": (
        "[axes]\nseed = [0, 1]\n" + PAIRS + "verdict = 'often'\n",
        GridUnusable,
        "verdict is 'often'",
    ),
    "an unknown key": (
        "[axes]\nseed = [0, 1]\n" + PAIRS + "verdct = 'always'\n",
        GridUnusable,
        "did you mean 'verdict'",
    ),
    "two axes of one key": (
        "[axes]\nseed = [0, 1]\nplan = {x = 'seed=3'}\n" + PAIRS,
        GridUnusable,
        "axis plan sets seed, as another axis does",
    ),
    "base and keys": ("base = 'x.toml'\n[axes]\nseed = [0, 1]\n" + PAIRS, GridUnusable, "Keep one of them"),
    "no prompts": (
        "prompts = 'x.txt'\n[axes]\nseed = [0, 1]\n" + PAIRS,
        CommandError,
        "cannot be read as prompts",
    ),
    "needs": ("[axes]\nseed = [0, 1]\n[needs]\ngpus = -1\n" + PAIRS, GridUnusable, "needs has gpus = -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sweep_is_refused_by_name(tmp_path: Path, name: str) -> None:
    text, error, words = REFUSED[name]
    base = BASE
    if text.startswith(("base", "prompts", "axes")):
        first, _, text = text.partition("\n")
        base = first + "\n" + BASE
    with pytest.raises(error, match=words) as caught:
        swept(tmp_path, text, base)
    assert "\n" not in str(caught.value)
