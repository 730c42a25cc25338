"""Controls on engines that are functions: what repeats, what depends on what was served before, and what cannot be run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detdiff import Scenario, explain, record
from detdiff.compare import compare
from detdiff.engines.function import EngineRequest, Generation, Tap
from detdiff.explain import Verdict
from detdiff.scenario import Schedule

TOKENS = ([1, 2, 3], [4, 5], [6, 7, 8, 9])


class Engine:
    """Counts on from the prompt's sum; one tap shows twice the token, and what ``shift`` adds to it."""

    name = "counting"
    vocab_size = 64

    def __init__(self) -> None:
        self.calls = 0

    def shift(self, batch: int) -> float:
        return 0.0

    def generate(self, requests: Sequence[EngineRequest], schedule: Schedule) -> list[Generation]:
        self.calls += 1
        shift, found = self.shift(len(requests)), []
        for each in requests:
            tokens = [(sum(each.tokens) + n + int(shift)) % 50 for n in range(each.max_tokens)]
            rows = len(each.tokens) + len(tokens) - 1
            x = np.repeat(np.array([*each.tokens, *tokens][:rows], np.float32)[:, None], 4, axis=1)
            found.append(Generation(tokens, taps={"twice": Tap(2 * x + np.float32(shift), x)}))
        return found


class Racing(Engine):
    """Other bits in every batch of two or more, and never alone."""

    def shift(self, batch: int) -> float:
        return float(self.calls) / 64 if batch > 1 else 0.0


class Leaving(Engine):
    """Other bits from the second call on, until it is reset."""

    def shift(self, batch: int) -> float:
        return 0.25 if self.calls > 1 else 0.0

    def reset(self) -> None:
        self.calls = 0


class Resettable(Engine):
    def reset(self) -> None:
        self.calls = 0


class Changed(Resettable):
    """The code of a later day: the same in every run, and not what the trace has."""

    def shift(self, batch: int) -> float:
        return 0.5


def asked(schedule: str, **keys: Any) -> Scenario:
    requests = [{"id": f"r{n}", "tokens": tokens} for n, tokens in enumerate(TOKENS)]
    return Scenario.from_dict(
        {"model": "counting", "request": requests, "max_tokens": 4, "schedule": schedule, **keys}
    )


def explained(path: Path, engine: Engine, then: Engine | None = None, **options: Any) -> Verdict:
    """Each request alone against all in one batch, on one engine, and explained ``then`` on that or on another one."""
    traces = []
    for name, schedule in (("a", "serial"), ("b", "static")):
        if hasattr(engine, "reset") and not isinstance(engine, Leaving):
            engine.reset()
        traces.append(record(asked(schedule), path / name, engine=engine))
    return explain(*traces, engine=then or engine, **options)


def test_a_race_that_needs_a_batch_is_found_on_the_batched_side(tmp_path: Path) -> None:
    verdict = explained(tmp_path, Racing())
    assert (verdict.kind, verdict.rule) == ("nondeterminism", "repeat")
    repeat = verdict.control("repeat")
    assert repeat is not None and repeat.detail["side"] == "b" and repeat.detail["site"] == "twice"
    assert "batch" not in verdict.sentence.partition("Nothing about batching")[0]


def test_what_was_served_before_is_named_and_no_race(tmp_path: Path) -> None:
    verdict = explained(tmp_path, Leaving())
    assert verdict.rule == "served-before" and "what was served before" in verdict.sentence
    fresh = verdict.control("fresh")
    assert fresh is not None and fresh.result == "differs"


def test_code_that_changed_since_the_trace_is_no_race(tmp_path: Path) -> None:
    class Differing(Resettable):
        """Flips in a batch, so that there is something to explain."""

        def shift(self, batch: int) -> float:
            return 1.0 if batch > 1 else 0.0

    verdict = explained(tmp_path, Differing(), Changed())
    assert (verdict.kind, verdict.rule) == ("undetermined", "changed")
    assert "the code or the machine changed" in verdict.sentence and "repeats itself" in verdict.sentence


def test_a_healthy_engine_that_flips_is_none_of_these(tmp_path: Path) -> None:
    class Batched(Resettable):
        def shift(self, batch: int) -> float:
            return 1.0 if batch > 1 else 0.0

    verdict = explained(tmp_path, Batched())
    results = {control.name: control.result for control in verdict.controls}
    assert results["repeat"] == results["fresh"] == "equal"
    assert verdict.kind == "undetermined"
    for name in ("pin_kernels", "oracle", "minimal_change", "patch_in", "dtype"):
        control = verdict.control(name)
        assert control is not None and control.result == "not_run" and "counting" in control.sentence


def test_an_engine_that_cannot_be_reset_says_so(tmp_path: Path) -> None:
    class Batched(Engine):
        def shift(self, batch: int) -> float:
            return 1.0 if batch > 1 else 0.0

    fresh = explained(tmp_path, Batched()).control("fresh")
    assert fresh is not None and fresh.result == "not_run" and "no reset()" in fresh.sentence


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_side_is_repeated_as_often_as_asked_and_the_answer_says_how_often(
    tmp_path: Path, repeats: int
) -> None:
    class Batched(Resettable):
        def shift(self, batch: int) -> float:
            return 1.0 if batch > 1 else 0.0

    verdict = explained(tmp_path, Batched(), repeats=repeats, controls=("repeat",))
    repeat = verdict.control("repeat")
    assert repeat is not None and repeat.detail["repetitions"] == {"a": repeats, "b": repeats}
    assert f"side a {repeats} times" in repeat.sentence


def test_equal_runs_of_a_function_compare_as_such(tmp_path: Path) -> None:
    a, b = (record(asked("serial"), tmp_path / name, engine=Engine()) for name in "ab")
    assert not compare(a, b).compared.differing
