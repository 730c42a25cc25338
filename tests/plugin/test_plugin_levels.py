"""What each level lets through, by every reason that there is for not doing so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from detdiff.check.levels import rule
from detdiff.check.settings import BOUNDED, EXACT, TOKENS
from detdiff.compare import Divergence, NotCompared, compare
from detdiff.compare.divergence import Finding
from detdiff.explain import Control

for folder in ("compare", "report"):
    sys.path.append(str(Path(__file__).resolve().parent.parent / folder))

from answers import flips  # noqa: E402
from synthetic_traces import Ask, Plan, serial, write_trace  # noqa: E402

EVERY = (EXACT, TOKENS, BOUNDED)


def never() -> Control:
    raise AssertionError("this level asks for no float64")


def said(result: str = "inside", **detail: Any) -> Callable[[], Control]:
    return lambda: Control("oracle", result, "no operation was found", 0, 0.0, detail)


@pytest.fixture(scope="module")
def identical(tmp_path_factory: pytest.TempPathFactory) -> Divergence:
    asks = (Ask("r0", (1, 2, 3), (4, 5)),)
    traces = [
        write_trace(tmp_path_factory.mktemp("levels") / name, Plan(asks, serial(asks))) for name in "ab"
    ]
    return compare(*traces)


@pytest.fixture(scope="module")
def diverged() -> Divergence:
    """Bits differ, and a near tie is decided otherwise."""
    found = flips()
    swapped = tuple(
        replace(request, swapped=None if request.flip is None else True) for request in found.requests
    )
    return replace(found, stage="bits", requests=swapped, workload=(), bookkeeping=())


def with_stage(found: Divergence, stage: str | None) -> Divergence:
    return replace(
        found,
        stage=stage,
        requests=tuple(replace(r, stage=None if r.stage is None else stage) for r in found.requests),
    )


@pytest.mark.parametrize("level", EVERY)
def test_what_is_identical_passes(identical: Divergence, level: str) -> None:
    assert identical.identical
    assert rule(level, identical, never).passes


LEFT_OUT: dict[str, Callable[[Divergence], Divergence]] = {
    "r9 was not compared: only run a has it": lambda d: replace(
        d, not_compared=(NotCompared("r9", "only run a has it"),)
    ),
    "asked for other things: other sampling": lambda d: replace(
        d, workload=(Finding("both", "settings", "r0", None, "other sampling"),)
    ),
    "run b is incomplete": lambda d: replace(d, b=replace(d.b, complete=False)),
    "recording changed the logits of run a": lambda d: replace(d, a=replace(d.a, observer={"equal": False})),
    "r0 was not compared in whole": lambda d: replace(
        d, requests=tuple(replace(request, identical=False) for request in d.requests)
    ),
    "nothing was compared": lambda d: replace(d, compared=replace(d.compared, rows=0)),
}


@pytest.mark.parametrize("level", EVERY)
@pytest.mark.parametrize("words", LEFT_OUT)
def test_what_was_not_compared_in_whole_passes_at_no_level(
    identical: Divergence, level: str, words: str
) -> None:
    found = rule(level, replace(LEFT_OUT[words](identical), identical=False), never)
    assert not found.passes and words in " ".join(found.why)


def test_tokens_alone_let_bits_differ(diverged: Divergence) -> None:
    equal = tuple(replace(request, flip=None, generated_a=3, generated_b=3) for request in diverged.requests)
    assert rule(TOKENS, replace(diverged, requests=equal), never).passes
    assert rule(EXACT, replace(diverged, requests=equal), never).why == ("bits of the same rows differ",)
    flipped = [request.id for request in diverged.requests if request.flip is not None]
    assert flipped
    assert rule(TOKENS, diverged, never).why == tuple(f"{id} generates other tokens" for id in flipped)


def test_fewer_tokens_are_other_tokens(diverged: Divergence) -> None:
    fewer = tuple(replace(r, flip=None, generated_a=3, generated_b=2) for r in diverged.requests)
    assert len(rule(TOKENS, replace(diverged, requests=fewer), never).why) == len(diverged.requests)


def test_a_near_tie_that_rounding_decides_is_bounded(diverged: Divergence) -> None:
    found = rule(BOUNDED, diverged, said(skipped={}, outside_where=()))
    assert found.passes and found.oracle is not None and found.oracle.result == "inside"


@pytest.mark.parametrize("stage", ["workload", "bookkeeping", "dtype", "shape", "tokens"])
def test_what_no_rounding_does_is_not_bounded(diverged: Divergence, stage: str) -> None:
    assert rule(BOUNDED, with_stage(diverged, stage), never).why == (
        f"the runs diverge in {stage}, which no rounding does",
    )


OUTSIDE = {"said": "layers.0.x (linear), position 3 of r0, is off float64 by 7 times its rounding bound"}


@pytest.mark.parametrize(
    "oracle, words",
    [
        (said("not_run"), "could not be judged: no operation was found"),
        (
            said("outside", outside_where=[OUTSIDE], outside_a=0, outside_b=3),
            "by 7 times its rounding bound; and 2 more",
        ),
        (said("outside", changed=2), "2 cache reads gave other entries than were written there"),
        (
            said("inside", skipped={"composites have no bound": 4}),
            "4 origins could not be judged: composites",
        ),
    ],
)
def test_what_rounding_does_not_explain_is_not_bounded(
    diverged: Divergence, oracle: Callable[[], Control], words: str
) -> None:
    found = rule(BOUNDED, diverged, oracle)
    assert not found.passes and words in " ".join(found.why)


@pytest.mark.parametrize("swapped, kind", [(False, "token"), (None, "token"), (True, "length")])
def test_a_flip_to_a_far_token_is_not_bounded(diverged: Divergence, swapped: bool | None, kind: str) -> None:
    far = tuple(
        replace(request, swapped=swapped, flip=request.flip and replace(request.flip, kind=kind))
        for request in diverged.requests
    )
    found = rule(BOUNDED, replace(diverged, requests=far), said())
    assert not found.passes and "which were not the two highest logits of both runs" in " ".join(found.why)
