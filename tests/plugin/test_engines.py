"""Engines of a user's own under the check: what is compared, what is named, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest
from toy_engine import Packed

from detdiff.check.engine import (
    EngineRequest,
    Generation,
    Tap,
    as_engine,
    check_engine,
    check_scenario,
)
from detdiff.errors import (
    CheckSettingInvalid,
    CheckSubjectInvalid,
    EngineAnswerInvalid,
    EngineFailed,
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


def test_an_engine_without_a_fault_passes_and_says_what_was_compared() -> None:
    engine = Rich()
    static, late, alone = check_engine(engine, REQUESTS, ["static:2", "continuous:2", "serial"])
    assert static.identical and late.identical and alone.identical
    # Three requests in batches of two: the last batch is filled up from the first.
    assert (static.compared.tokens, static.compared.log_probabilities, static.compared.sites) == (16, 16, 3)
    assert static.compared.rows == 4 * 3 * 6
    assert static.text() == (
        "static:2 of rich:\n  nothing differs: 16 tokens, 16 log-probabilities, 72 rows of 3 sites"
    )
    # Each request was run alone once, and once more for the serial composition.
    ones = [ids for ids, kind in engine.asked if len(ids) == 1]
    assert sorted(ones) == sorted([("r0",), ("r1",), ("r2",)] * 2)
    assert (("r0", "r1", "r2"), "continuous") in engine.asked
    with pytest.raises(TypeError, match="ask .identical"):
        bool(static)


def test_the_first_site_in_the_order_of_forwards_is_named_whose_inputs_are_equal() -> None:
    def fault(found: Generation, m: int) -> Generation:
        # Born in attn at position 1, seen by the head at position 1; and born in embed one forward later.
        found = moved(found, "attn", 1)
        return moved(moved(found, "head", 1, inputs=True), "embed", 4)

    (found,) = check_engine(Rich(fault), REQUESTS, ["static:3"])
    assert [each.request.id for each in found.parted] == ["r0", "r1", "r2"] and found.repeats is True
    site = found.parted[0].site
    assert site is not None and (site.site, site.position, site.birth) == ("attn", 1, True)
    assert (site.alone, site.beside, site.sites, site.tapped) == (1, 3, 3, 3)
    assert found.text().splitlines()[1] == (
        "  r0 beside r1, r2 (seed 0): none of 4 tokens differs; first different site attn, position 1, M = 1 alone and 3 here: "
        "its inputs are bit-equal and its outputs are not; 3 of 3 tapped sites differ"
    )


def test_what_is_known_of_inputs_is_said_and_no_more() -> None:
    def inherited(found: Generation, m: int) -> Generation:
        return moved(found, "head", 2, inputs=True)

    def unknown(found: Generation, m: int) -> Generation:
        other = moved(found, "head", 2)
        bare = {site: tap.out for site, tap in other.taps.items()}
        return Generation(other.tokens, other.log_probabilities, bare)

    (found,) = check_engine(Rich(inherited), REQUESTS[:2], ["static:2"])
    assert found.parted[0].site is not None and found.parted[0].site.birth is False
    assert "its inputs differ too, from something that is not tapped" in found.text()
    (found,) = check_engine(Rich(unknown), REQUESTS[:2], ["static:2"])
    assert found.parted[0].site is not None and found.parted[0].site.birth is None
    assert "whether its inputs are equal is not known" in found.text()


def test_a_log_probability_that_is_one_ulp_off_is_found() -> None:
    def fault(found: Generation, m: int) -> Generation:
        scores = np.array(found.log_probabilities)
        scores[2:] = np.nextafter(scores[2:], np.float32(0))
        return Generation(found.tokens, scores, found.taps)

    (found,) = check_engine(Rich(fault), REQUESTS[:2], ["static:2"])
    score = found.parted[0].score
    assert score is not None and (score.index, score.ulp, score.differing) == (2, 1, 2)
    assert (
        "the log-probability of token 2 is -1.4999998807907104, and -1.5 alone, 1 ULP apart; 2 of 4 differ"
        in found.text()
    )
    assert check_engine(Rich(fault), REQUESTS[:2], ["static:2"], "tokens")[0].identical


def test_what_follows_a_flip_is_not_compared() -> None:
    def fault(found: Generation, m: int) -> Generation:
        scores = np.array(found.log_probabilities)
        scores[2:] = 0
        # The flip is token 1; its row is position 3, and what it leads to from there on is another text.
        found = moved(moved(found, "embed", 4), "attn", 5)
        return Generation([found.tokens[0], 10, 10, 10], scores, found.taps)

    (found,) = check_engine(Rich(fault), REQUESTS[:2], ["static:2"])
    first = found.parted[0]
    assert first.flip is not None and (first.flip.index, first.flip.alone, first.flip.beside) == (1, 5, 10)
    assert first.score is None and first.site is None and first.compared.log_probabilities == 1
    assert first.compared.rows == 3 * 4


def test_an_engine_that_stops_early_flips_to_the_end() -> None:
    def shorter(requests: Sequence[EngineRequest]) -> list[list[int]]:
        return [tokens(each)[: 4 if len(requests) == 1 else 2] for each in requests]

    (found,) = check_engine(shorter, REQUESTS[:2], ["static:2"])
    assert "token 2 is the end, and 6 alone" in found.text() and "of shorter" not in found.parted[0].drawn
    assert found.engine.endswith("shorter")


def test_an_engine_that_does_not_repeat_itself_is_not_blamed_on_the_batch() -> None:
    count = iter(range(100))

    def random(requests: Sequence[EngineRequest]) -> list[list[int]]:
        return [[next(count)] for _ in requests]

    (found,) = check_engine(random, REQUESTS[:2], ["static:2"])
    assert found.repeats is False and found.kernels == ()
    assert "r0 alone gives other bits each time it is run, so this is not about the batch" in found.text()


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
    assert found.identical and found.compared.tokens == 3 * 12

    def only_beside_r0(requests: Sequence[EngineRequest]) -> list[list[int]]:
        ids = [each.id for each in requests]
        return [[int(ids == ["r2", "r0"])] * 2 for _ in requests]

    named = [
        {each.drawn for each in check_engine(only_beside_r0, REQUESTS, ["static:2"], seeds=(seed,))[0].parted}
        for seed in range(6)
    ]
    assert named[0] == {"seed 0"} and set() in named


def test_a_scenario_is_checked_as_it_is() -> None:
    requests = (
        Request("a", tokens=(1, 2, 3), max_tokens=2),
        Request("b", tokens=(4,), max_tokens=3, arrival=1),
    )
    found = check_scenario(
        Packed(), Scenario("any", requests, Schedule("continuous", "packed", row_budget=1))
    )
    assert found.identical and found.compared.tokens == 5 and found.composition == "continuous"


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
            "log-probabilities in one run",
        ),
        (lambda r: [Generation([1], taps={str(len(r)): [1]})] * len(r), "taps of other sites in one run"),
        (lambda r: [Generation([1], taps={"q": [1] * len(r)})] * len(r), "rows of 'q' at other positions"),
    ],
)
def test_an_answer_that_is_none_is_refused(gives: Callable[[Sequence[Any]], Any], says: str) -> None:
    with pytest.raises(EngineAnswerInvalid, match=says):
        check_engine(gives, REQUESTS[:2], ["static:2"])


@pytest.mark.parametrize(
    ("gives", "says"),
    [
        (lambda r: [[1]] * 5, "gave 5 answers for 2 requests"),
        (lambda r: {"other": [1]}, "gave 0 answers for 2 requests"),
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
    engine = Rich()
    assert as_engine(engine) is engine
    assert as_engine(len) is not None
    assert all(as_engine(other) is None for other in (3, None, Rich, nn.Linear(2, 2), {"a": 1}))


@pytest.mark.parametrize("module", ["engine", "torch_engine", "op"])
def test_importing_a_check_of_ones_own_loads_no_model_library(module: str) -> None:
    program = (
        f"import sys, detdiff.check.{module}; "
        "print({'mlx', 'numba', 'torch', 'transformers', 'hypothesis', 'pytest'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    "taps, error, words",
    [
        ({"a": np.zeros((0, 2), np.float32)}, NothingToCheck, "taps without a row"),
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


def test_any_request_that_does_not_repeat_is_said_not_to() -> None:
    calls: list[int] = []

    def generate(requests: Sequence[EngineRequest]) -> list[list[int]]:
        calls.append(1)
        return [[len(requests) if each.id == "r0" else len(calls)] * each.max_tokens for each in requests]

    (found,) = check_engine(generate, REQUESTS[:2], ["static:2"])
    assert found.repeats is False and {each.request.id for each in found.parted} == {"r0", "r1"}
    assert found.said()[0].startswith("r1 alone gives other bits each time")


def test_probes_that_fail_do_not_hide_what_parted() -> None:
    class Failing(Rich):
        def kernels(self, rows: Any, sites: Any) -> Any:
            raise OSError("no such device")

    engine = Failing(
        lambda found, m: Generation([1] * len(found.tokens), found.log_probabilities, found.taps)
    )
    (found,) = check_engine(engine, REQUESTS[:2], ["static:2"])
    assert found.parted and any("kernels raised OSError (no such device)" in line for line in found.said())
