"""Engines of a user's own under the check: what is compared, what is named, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest
from tiers import some_now
from toy_engine import Packed

from detdiff.check.invariance import CheckedComposition, check_engine, check_scenario
from detdiff.engines.function import EngineRequest, Generation, Tap
from detdiff.engines.registry import as_engine
from detdiff.errors import (
    CheckSettingInvalid,
    CheckSubjectInvalid,
    EngineAnswerInvalid,
    EngineFailed,
    NothingComparable,
    NothingToCheck,
    ScheduleInvalid,
)
from detdiff.scenario import Request, Scenario, Schedule

REQUESTS = [EngineRequest(f"r{n}", tuple(range(n, n + 3)), 4) for n in range(3)]
SITES = ("embed", "attn", "head")


def tokens(request: EngineRequest) -> list[int]:
    return [(sum(request.tokens) * 5 + k) % 11 for k in range(request.max_tokens)]


class Rich:
    """Gives all that an engine can. ``fault`` changes what it gives for one request among ``beside`` others."""

    name = "rich"

    def __init__(self, fault: Callable[[Generation, int], Generation] | None = None) -> None:
        self.fault = fault
        self.asked: list[tuple[tuple[str, ...], str]] = []

    def generate(self, requests: Sequence[EngineRequest], schedule: Schedule) -> list[Generation]:
        self.asked.append((tuple(each.id for each in requests), schedule.kind))
        return [self._one(each, len(requests)) for each in requests]

    def _one(self, request: EngineRequest, m: int) -> Generation:
        positions = len(request.tokens) + request.max_tokens - 1
        rows = np.arange(2 * positions, dtype=np.float32).reshape(positions, 2) + sum(request.tokens)
        taps = {site: Tap(rows + n + 1, rows + n, m=[m] * positions) for n, site in enumerate(SITES)}
        scores = np.full(request.max_tokens, -1.5, np.float32)
        found = Generation(tokens(request), scores, taps)
        return found if self.fault is None or m == 1 else self.fault(found, m)


def moved(found: Generation, site: str, position: int, inputs: bool = False) -> Generation:
    """One ULP on a site's outputs at a position, and on its inputs where these are asked for."""

    def up(rows: Any) -> Any:
        other = rows.copy()
        other[position, 0] = np.nextafter(other[position, 0], np.float32(1e9))
        return other

    tap = found.taps[site]
    made = Tap(up(tap.out), up(tap.inputs) if inputs else tap.inputs, m=tap.m)
    return Generation(found.tokens, found.log_probabilities, {**found.taps, site: made})


def first(found: CheckedComposition) -> Any:
    """What is known of the first request that is not equal to itself alone."""
    return found.diverged[0]


def test_an_engine_without_a_fault_passes_and_says_what_was_compared() -> None:
    engine = Rich()
    static, late, alone = check_engine(engine, REQUESTS, ["static:2", "continuous:2", "serial"])
    assert static.identical and late.identical and alone.identical
    # Three requests in batches of two: the last batch is filled up from the first. In each row the ports of three sites,
    # and of those that chose a token its log-probability.
    compared = [each.compared for _, each in static.runs]
    assert sum(each.rows for each in compared) == 4 * 6
    assert sum(each.digests for each in compared) == 4 * 6 * 6 + 16
    assert "static:2 of rich: " in static.text()
    # Each request was run alone once, and once more for the serial composition; the first again, after all others.
    ones = [ids for ids, kind in engine.asked if len(ids) == 1]
    assert sorted(ones) == sorted([("r0",), ("r1",), ("r2",)] * 2 + [("r0",)]) and ones[-1] == ("r0",)
    assert (("r0", "r1", "r2"), "continuous") in engine.asked
    with pytest.raises(TypeError, match="ask .identical"):
        bool(static)


def test_the_first_site_in_the_order_of_forwards_is_named_whose_inputs_are_equal() -> None:
    def fault(found: Generation, m: int) -> Generation:
        # Origin in attn at position 1, seen by the head at position 1; and arising in embed one forward later.
        found = moved(found, "attn", 1)
        return moved(moved(found, "head", 1, inputs=True), "embed", 4)

    (found,) = check_engine(Rich(fault), REQUESTS, ["static:3"])
    assert [each.id for each in found.diverged] == ["r0", "r1", "r2"]
    origin = first(found).origin
    assert (origin.site, origin.position, origin.how) == ("attn", 1, "leaf")
    assert (origin.rows_a, origin.rows_b) == (1, 3) and first(found).flip is None


def test_what_is_known_of_inputs_is_said_and_no_more() -> None:
    def inherited(found: Generation, m: int) -> Generation:
        return moved(found, "head", 2, inputs=True)

    def unknown(found: Generation, m: int) -> Generation:
        return moved(found, "head", 2)

    class Bare(Rich):
        def _one(self, request: EngineRequest, m: int) -> Generation:
            found = super()._one(request, m)
            taps = {site: tap.out for site, tap in found.taps.items()}
            return Generation(found.tokens, found.log_probabilities, taps)

    for engine in (Rich(inherited), Bare(unknown)):
        (found,) = check_engine(engine, REQUESTS[:2], ["static:2"])
        # Something between the taps, and no leaf that was given the same.
        assert first(found).origin.how == "composite" and first(found).stage == "bits"


def test_a_log_probability_that_is_one_ulp_off_is_found_with_its_size() -> None:
    def fault(found: Generation, m: int) -> Generation:
        scores = np.array(found.log_probabilities)
        scores[2:] = np.nextafter(scores[2:], np.float32(0))
        return Generation(found.tokens, scores, found.taps)

    (found,) = check_engine(Rich(fault), REQUESTS[:2], ["static:2"])
    origin = first(found).origin
    assert (origin.site, origin.position) == ("log_probabilities", 4)
    assert origin.magnitude.max_ulp == 1
    assert check_engine(Rich(fault), REQUESTS[:2], ["static:2"], "tokens")[0].identical


def test_what_follows_a_flip_is_not_compared() -> None:
    def fault(found: Generation, m: int) -> Generation:
        scores = np.array(found.log_probabilities)
        scores[2:] = 0
        # The flip is token 1; its row is position 3, and what it leads to from there on is another text.
        found = moved(moved(found, "embed", 4), "attn", 5)
        return Generation([found.tokens[0], 10, 10, 10], scores, found.taps)

    (found,) = check_engine(Rich(fault), REQUESTS[:2], ["static:2"])
    request = first(found)
    assert (request.flip.index, request.flip.a.token, request.flip.b.token) == (1, 5, 10)
    assert request.origin is None and request.stage == "tokens" and request.rows == 4


def test_an_engine_that_stops_early_flips_to_the_end() -> None:
    def shorter(requests: Sequence[EngineRequest]) -> list[list[int]]:
        return [tokens(each)[: 4 if len(requests) == 1 else 2] for each in requests]

    (found,) = check_engine(shorter, REQUESTS[:2], ["static:2"])
    flip = first(found).flip
    assert (flip.index, flip.kind, flip.a.token, flip.b.token) == (2, "length", 6, None)
    assert found.engine.endswith("shorter")


def test_an_engine_that_does_not_repeat_itself_is_not_blamed_on_the_batch() -> None:
    count = iter(range(100))

    def random(requests: Sequence[EngineRequest]) -> list[list[int]]:
        return [[next(count)] for _ in requests]

    (found,) = check_engine(random, REQUESTS[:2], ["static:2"])
    assert len(found.why) == 1 and "alone it gives other bits each time it is run" in found.why[0]


def test_a_race_that_needs_a_batch_is_not_blamed_on_the_batch() -> None:
    count = iter(range(100))

    def racing(requests: Sequence[EngineRequest]) -> list[list[int]]:
        return [[next(count) if len(requests) > 1 else 0] for _ in requests]

    (found,) = check_engine(racing, REQUESTS[:2], ["static:2"])
    assert "the batch, run again, gives other bits: it does not repeat" in found.why[0]


class Remembering(Rich):
    """Serves a prompt that it has seen by another path; ``after`` prompts at the earliest."""

    def __init__(self, after: int = 1) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []
        self.after = after

    def _one(self, request: EngineRequest, m: int) -> Generation:
        known = request.tokens in self.seen and len(self.seen) >= self.after
        self.seen.append(request.tokens)
        found = super()._one(request, m)
        return moved(found, "attn", 2) if known else found


class Forgetting(Remembering):
    def reset(self) -> None:
        self.seen.clear()


def test_what_depends_on_what_was_served_before_is_not_blamed_on_the_batch() -> None:
    (found,) = check_engine(Remembering(), REQUESTS[:2], ["static:2"])
    assert len(found.why) == 1 and "depends on what was served before" in found.why[0]
    # One that remembers only later lets every comparison pass but that with the first request asked again.
    (late,) = check_engine(Remembering(after=4), REQUESTS[:2], ["static:2"])
    assert not late.identical and "r0 alone, asked again after the others, is another answer" in late.why[0]


def test_an_engine_that_is_reset_is_compared_cold_and_its_memory_is_told() -> None:
    (found,) = check_engine(Forgetting(), REQUESTS[:2], ["static:2"])
    assert [each.identical for _, each in found.runs] == [True]
    assert "depends on what was served before" in found.why[0]


def test_a_warm_run_without_rows_for_the_prefix_is_no_fault() -> None:
    class Prefix(Rich):
        """A batch takes the first rows of a prompt from a cache: no taps for them."""

        def _one(self, request: EngineRequest, m: int) -> Generation:
            found = super()._one(request, m)
            if m == 1:
                return found
            taps = {
                site: Tap(tap.out[2:], tap.inputs[2:], np.arange(2, len(tap.out)), tap.m[2:])
                for site, tap in found.taps.items()
            }
            return Generation(found.tokens, found.log_probabilities, taps)

    (found,) = check_engine(Prefix(), REQUESTS[:2], ["static:2"])
    assert [each.identical for _, each in found.runs] == [True] and found.identical


def test_equal_logits_and_another_token_are_the_choice_of_the_token() -> None:
    def sampled(found: Generation, m: int) -> Generation:
        return Generation([found.tokens[0], 10, 10, 10], found.log_probabilities, found.taps)

    (found,) = check_engine(Rich(sampled), REQUESTS[:2], ["static:2"])
    assert first(found).stage == "tokens" and first(found).origin is None
    assert any("the choice of the token differs" in note for note in found.runs[0][1].notes)


def test_functions_are_engines_with_and_without_a_schedule() -> None:
    def whole(requests: Sequence[EngineRequest]) -> list[list[int]]:
        return [tokens(each) for each in requests]

    def told(requests: Sequence[EngineRequest], schedule: Schedule) -> dict[str, list[int]]:
        wrong = schedule.kind == "continuous" and schedule.active == 2
        return {each.id: [n + wrong for n in tokens(each)] for each in reversed(requests)}

    assert check_engine(whole, REQUESTS, ["static:2"])[0].identical
    with pytest.raises(EngineFailed, match="takes requests alone.*schedule continuous was asked for"):
        check_engine(whole, REQUESTS, ["continuous:2"])
    found = check_engine(told, REQUESTS, ["static:2", "continuous:2", "continuous"])
    assert [each.identical for each in found] == [True, False, True]


def test_seeds_draw_other_neighbours() -> None:
    engine = Packed()
    (found,) = check_engine(engine, REQUESTS, ["continuous:2"], seeds=(0, 1, 2))
    assert found.identical and len(found.runs) == 3

    def only_beside_r0(requests: Sequence[EngineRequest]) -> list[list[int]]:
        ids = [each.id for each in requests]
        return [[int(ids == ["r2", "r0"])] * 2 for _ in requests]

    named = [
        check_engine(only_beside_r0, REQUESTS, ["static:2"], seeds=(seed,))[0].identical for seed in range(6)
    ]
    assert not named[0] and True in named


def test_a_scenario_is_checked_as_it_is() -> None:
    requests = (
        Request("a", tokens=(1, 2, 3), max_tokens=2),
        Request("b", tokens=(4,), max_tokens=3, arrival=1),
    )
    found = check_scenario(
        Packed(), Scenario("any", requests, Schedule("continuous", "packed", row_budget=1))
    )
    assert found.identical and found.name == "continuous"
    assert sum(each.generated_b for each in found.runs[0][1].requests) == 5


@pytest.mark.parametrize(
    ("gives", "says"),
    [
        (lambda r: [[1.5]] * len(r), "expected a list of the token ids"),
        (lambda r: [["a"]] * len(r), "expected a list of the token ids"),
        (lambda r: [[1] * 9] * len(r), "gave 9 tokens for request 'r0'; expected 4 at most"),
        (lambda r: [Generation([1], [0.5, 0.5])] * len(r), r"expected a float array of shape \(1,\)"),
        (lambda r: [Generation([1], [3])] * len(r), "as log-probabilities"),
        (lambda r: [Generation([1], taps={"q": Tap([1, 2], [1])})] * len(r), "rows of 'q' that do not fit"),
        (lambda r: [Generation([1], taps={"q": Tap([1, 2], positions=[0, 0])})] * len(r), "rows of 'q'"),
        (lambda r: [Generation([1], taps={"q": 3})] * len(r), "rows of 'q'"),
        (
            lambda r: [Generation([1], [0.5] if len(r) == 1 else None)] * len(r),
            "in one run and not in the other",
        ),
        (lambda r: [Generation([1], taps={str(len(r)): [1]})] * len(r), "taps of other sites in one run"),
    ],
)
def test_an_answer_that_is_none_is_refused(gives: Callable[[Sequence[Any]], Any], says: str) -> None:
    with pytest.raises(EngineAnswerInvalid, match=says):
        check_engine(gives, REQUESTS[:2], ["static:2"])


@pytest.mark.parametrize(
    ("gives", "says"),
    [
        (lambda r: [[1]] * 5, "gave 5 answers for 1 requests"),
        (lambda r: {"other": [1]}, "gave 0 answers for 1 requests"),
        (lambda r: None, "gave 0 answers"),
        (
            lambda r: 1 / 0,
            "raised ZeroDivisionError .division by zero. for schedule static and the requests r0",
        ),
    ],
)
def test_an_engine_that_fails_is_one_paragraph(gives: Callable[[Sequence[Any]], Any], says: str) -> None:
    with pytest.raises(EngineFailed, match=says) as caught:
        check_engine(gives, REQUESTS[:2], ["static:2"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ((Rich(), [], ["static:2"]), NothingToCheck),
        ((Rich(), [EngineRequest("r0", (), 2)], ["serial"]), NothingToCheck),
        ((Rich(), REQUESTS, []), NothingToCheck),
        ((Rich(), REQUESTS[:1], ["static:2"]), NothingToCheck),
        ((lambda r: [[]] * len(r), REQUESTS, ["static:2"]), NothingToCheck),
        ((Rich(), REQUESTS, ["statik"]), ScheduleInvalid),
        ((Rich(), REQUESTS, ["static:2"], "bounded"), CheckSettingInvalid),
        ((3, REQUESTS, ["static:2"]), CheckSubjectInvalid),
    ],
    ids=[
        "no-request",
        "no-prompt",
        "no-composition",
        "too-few",
        "no-token",
        "schedule",
        "level",
        "no-engine",
    ],
)
def test_nothing_compared_is_never_a_pass(asked: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        check_engine(*asked)


def test_what_is_an_engine() -> None:
    engine = as_engine(Rich())
    assert engine is not None and as_engine(engine) is engine and engine.name == "function"
    assert as_engine(len) is not None
    assert all(as_engine(other) is None for other in (3, None, Rich, nn.Linear(2, 2), {"a": 1}))


@pytest.mark.parametrize(
    "module", some_now(["check.op", "engines.function", "engines.transformers", "engines.record"], 1)
)
def test_importing_an_engine_of_ones_own_loads_no_model_library(module: str) -> None:
    program = (
        f"import sys, detdiff.{module}; "
        "print({'mlx', 'numba', 'torch', 'transformers', 'hypothesis', 'pytest'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    "taps, error, words",
    [
        ({"a": np.zeros((0, 2), np.float32)}, NothingComparable, "holds no rows"),
        ({"a": np.zeros((3, 0), np.float32)}, EngineAnswerInvalid, "a value at least in each"),
        ({"a": Tap(np.zeros((1, 2), np.float32), positions=[7])}, EngineAnswerInvalid, "at position 7"),
        ({"a": Tap(np.zeros((1, 2), np.float32), positions=[-1])}, EngineAnswerInvalid, "at position -1"),
    ],
    ids=["no rows", "no values", "after the end", "before the start"],
)
def test_taps_that_would_be_compared_with_nothing_are_refused(
    taps: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_engine(
            lambda requests: [Generation(tokens(each), None, taps) for each in requests],
            REQUESTS,
            ["static:2"],
        )
