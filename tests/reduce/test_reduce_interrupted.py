"""Interrupted anywhere, the same command ends in the same pair and runs nothing twice; other folders are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import CASES
from crowded import crowded, reduced
from fault_case import Trial
from tiers import some_now

from detdiff.errors import NothingToReduce, ReductionFolderUnusable, ReductionOfAnotherCase
from detdiff.reduce import ReduceOptions, Reduction, Step
from detdiff.scenario import Scenario

STEPS = 4


def small() -> Trial:
    return crowded(14, 3, lengths=(4,), max_tokens=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Reduction:
    """The reduction that nothing interrupted."""
    return reduced(small(), tmp_path_factory.mktemp("whole") / "smaller")


def lines(found: Path) -> list[Any]:
    return [json.loads(line) for line in (found / "tried.jsonl").read_text().splitlines()]


def check_same(found: Reduction, whole: Reduction) -> None:
    assert (found.steps, found.tried, found.dropped) == (whole.steps, whole.tried, whole.dropped)
    assert (found.scenario_a, found.scenario_b) == (whole.scenario_a, whole.scenario_b)
    assert (found.verdict.kind, found.verdict.rule) == (whole.verdict.kind, whole.verdict.rule)
    for name in ("a.toml", "b.toml", "steps.jsonl", "case.json"):
        assert (found.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    # In the same order, each once.
    assert lines(found.folder) == lines(whole.folder)


def test_there_are_steps_to_interrupt_at(whole: Reduction) -> None:
    assert len(whole.steps) == STEPS and whole.rows_after < whole.rows_before
    assert [step.number for step in whole.steps] == list(range(STEPS))
    rows = [step.rows for step in whole.steps]
    assert rows == sorted(rows, reverse=True)


@pytest.mark.parametrize("at", some_now(range(STEPS), ci=(0, STEPS - 1)))
def test_interrupted_at_a_step_it_goes_on_from_there(at: int, whole: Reduction, tmp_path: Path) -> None:
    def interrupt(step: Step) -> None:
        if step.number == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reduced(small(), tmp_path / "smaller", on_step=interrupt)
    kept = [json.loads(line) for line in (tmp_path / "smaller" / "steps.jsonl").read_text().splitlines()]
    assert kept == [step.to_json() for step in whole.steps[: at + 1]]
    pair = [Scenario.from_toml(tmp_path / "smaller" / f"{name}.toml") for name in "ab"]
    assert sum(len(request.tokens or ()) for request in pair[0].requests) == whole.steps[at].prompt_tokens
    assert [request.id for request in pair[0].requests] == [request.id for request in pair[1].requests]
    before = lines(tmp_path / "smaller")
    told: list[int] = []
    found = reduced(small(), tmp_path / "smaller", on_step=lambda step: told.append(step.number))
    assert told == list(range(at + 1, STEPS)) and lines(tmp_path / "smaller")[: len(before)] == before
    check_same(found, whole)


@pytest.mark.parametrize("tokens", some_now([1, 9, 40, 90], 0, ci=(3,)))
def test_interrupted_in_the_middle_of_a_run(tokens: int, whole: Reduction, tmp_path: Path) -> None:
    count = 0

    def interrupt(done: int, total: int) -> None:
        nonlocal count
        count += 1
        if count == tokens:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reduced(small(), tmp_path / "smaller", progress=interrupt)
    check_same(reduced(small(), tmp_path / "smaller"), whole)


def test_a_half_written_answer_is_run_again(whole: Reduction, tmp_path: Path) -> None:
    shutil.copytree(whole.folder, tmp_path / "smaller")
    tried = tmp_path / "smaller" / "tried.jsonl"
    tried.write_bytes(tried.read_bytes()[:-20])
    check_same(reduced(small(), tmp_path / "smaller"), whole)


def test_what_was_finished_runs_nothing_again(whole: Reduction, tmp_path: Path) -> None:
    shutil.copytree(whole.folder, tmp_path / "smaller")
    told: list[Step] = []
    check_same(reduced(small(), tmp_path / "smaller", on_step=told.append), whole)
    assert told == []


@pytest.mark.thorough
def test_a_budget_ends_it_and_a_larger_one_goes_on(whole: Reduction, tmp_path: Path) -> None:
    found = reduced(small(), tmp_path / "smaller", budget=3)
    assert not found.finished and found.tried == 3
    assert found.rows_after <= found.rows_before and found.steps == whole.steps[: len(found.steps)]
    check_same(reduced(small(), tmp_path / "smaller", budget=1000), whole)
    # What is known costs nothing.
    check_same(reduced(small(), tmp_path / "smaller", budget=1), whole)


def damaged(folder: Path) -> None:
    (folder / "tried.jsonl").write_text('{"key": "x"}\n')


def unreadable(folder: Path) -> None:
    (folder / "case.json").write_text("{")


def half_steps(folder: Path) -> None:
    (folder / "steps.jsonl").write_text('{"number": 0}\n')


@pytest.mark.parametrize("spoil", [damaged, unreadable, half_steps])
def test_a_damaged_folder_is_refused(spoil: Callable[[Path], None], whole: Reduction, tmp_path: Path) -> None:
    shutil.copytree(whole.folder, tmp_path / "smaller")
    spoil(tmp_path / "smaller")
    with pytest.raises(ReductionFolderUnusable, match="is damaged: a line is not what a reduction writes"):
        reduced(small(), tmp_path / "smaller")


def test_the_folder_of_another_case_is_refused(whole: Reduction, tmp_path: Path) -> None:
    shutil.copytree(whole.folder, tmp_path / "smaller")
    with pytest.raises(ReductionOfAnotherCase, match="another case: pair in its case.json"):
        reduced(crowded(14, 3, lengths=(5,), max_tokens=4), tmp_path / "smaller")
    with pytest.raises(ReductionOfAnotherCase, match="another case: options in its case.json"):
        reduced(small(), tmp_path / "smaller", options=ReduceOptions(keep_flip=True))


@pytest.mark.parametrize("full", ["directory", "file"])
def test_a_folder_of_something_else_is_refused(full: str, tmp_path: Path) -> None:
    if full == "directory":
        (tmp_path / "smaller").mkdir()
        (tmp_path / "smaller" / "letter.txt").write_text("Dear all")
    else:
        (tmp_path / "smaller").write_text("Dear all")
    with pytest.raises(ReductionFolderUnusable, match="Choose another directory, or remove it first"):
        reduced(small(), tmp_path / "smaller")


def test_two_runs_that_do_not_part_are_nothing_to_reduce(tmp_path: Path) -> None:
    trial = CASES[20].trial(0)
    with pytest.raises(NothingToReduce, match="There is nothing to reduce: the two runs do not diverge"):
        reduced(trial, tmp_path / "smaller")
    with pytest.raises(NothingToReduce, match="nothing in common that could be compared"):
        reduced(CASES[18].trial(0), tmp_path / "other")


@pytest.mark.thorough
def test_a_flip_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    trial = crowded(9, 3, lengths=(), max_tokens=10)
    found = reduced(trial, tmp_path / "smaller", options=ReduceOptions(keep_flip=True))
    assert found.verdict.divergence is not None
    assert any(request.flip is not None for request in found.verdict.divergence.requests)
    assert found.rows_after < found.rows_before
