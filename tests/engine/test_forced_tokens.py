"""A run that is fed another run's tokens is compared to the end, past the first token that it would have chosen otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import QUIET, Runs, digests, model, prompts, scenario
from tiers import some_now
from tiny import tiny

from detdiff.compare import compare
from detdiff.engines.mlx.engine import RecordOptions
from detdiff.engines.mlx.taps.injected import InjectedFault
from detdiff.errors import ForcedTokensMissing
from detdiff.report import divergence_text
from detdiff.scenario import Scenario
from detdiff.trace import Trace

WAYS: dict[str, dict[str, Any]] = {
    "serial padded": {"schedule": "serial"},
    "continuous padded": {"schedule": "continuous", "arrivals": (0, 2, 5), "prefill_chunk": 9},
    "continuous packed": {
        "schedule": "continuous",
        "layout": "packed",
        "arrivals": (0, 2, 5),
        "prefill_chunk": 9,
    },
}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "ignore_stop": True}


@pytest.fixture(scope="module")
def drawn(runs: Runs) -> Trace:
    """A run whose tokens are drawn, so that a greedy model would choose others again and again."""
    return runs.record(model("llama"), scenario(**SAMPLED))


def chosen(trace: Trace, request: int) -> list[int]:
    generated = trace.generated(lens=False)
    mine = generated.request == request
    return generated.token[mine][np.argsort(generated.index[mine])].tolist()


@pytest.mark.parametrize("way", some_now(WAYS, 1, 2))
def test_rows_after_a_flip_are_compared_when_both_runs_were_fed_the_same(
    runs: Runs, drawn: Trace, way: str
) -> None:
    greedy = scenario(**WAYS[way], max_tokens=24, ignore_stop=True, force_tokens=str(drawn.path))
    forced = runs.record(model("llama"), greedy)
    found = compare(drawn, forced)
    assert (
        found.compared.differing == 0
        and found.compared.after_flip_a == 0
        and found.compared.token_differs == 0
    )
    for number, request in enumerate(found.requests):
        given, own = chosen(drawn, number), chosen(forced, number)
        assert len(own) == len(given) == 24
        same = np.array(given) == np.array(own)
        flip = int(np.argmin(same))
        assert request.flip is not None and request.flip.index == flip
        assert (request.flip.a.token, request.flip.b.token) == (given[flip], own[flip])
        # Every row up to the last token that was fed.
        assert request.rows >= request.prompt_tokens + 23
        agreement = request.forced
        assert agreement is not None
        assert (agreement.tokens, agreement.differing) == (24, int((~same).sum()))
        after = [n for n in range(flip, 24) if same[n]]
        assert agreement.again == (after[0] if after else None)
        span = 0
        while after and after[0] + span < 24 and same[after[0] + span]:
            span += 1
        assert agreement.span == span
    # Without forcing, rows after the flips are left out.
    free = compare(drawn, runs.record(model("llama"), scenario(**WAYS[way], max_tokens=24, ignore_stop=True)))
    assert free.compared.after_flip_a > 0 and free.compared.rows < found.compared.rows
    assert all(request.forced is None for request in free.requests)


@pytest.mark.parametrize("drafts", some_now([1, 3], 1))
def test_speculation_is_fed_the_same_tokens(runs: Runs, drawn: Trace, drafts: int) -> None:
    asked = scenario(
        **WAYS["continuous packed"],
        max_tokens=24,
        ignore_stop=True,
        force_tokens=str(drawn.path),
        draft="tiny-draft",
        drafts=drafts,
    )
    forced = runs.record(model("llama"), asked, draft=tiny("llama", seed=5))
    found = compare(drawn, forced)
    assert found.compared.differing == 0 and found.compared.token_differs == 0
    plain = runs.record(
        model("llama"), scenario(max_tokens=24, ignore_stop=True, force_tokens=str(drawn.path))
    )
    for number, request in enumerate(found.requests):
        assert chosen(forced, number) == chosen(plain, number)
        assert request.rows >= request.prompt_tokens + 23


@pytest.mark.parametrize("way", some_now(WAYS, 1, 2))
def test_own_tokens_change_nothing(runs: Runs, way: str) -> None:
    plain = runs.record(model("qwen3"), scenario(**WAYS[way]))
    forced = runs.record(model("qwen3"), scenario(**WAYS[way], force_tokens=str(plain.path)))
    found = compare(plain, forced)
    assert found.identical and digests(plain) == digests(forced)
    assert all(r.forced is not None and r.forced.differing == 0 for r in found.requests)


def test_a_difference_after_the_flip_is_found_at_its_place(runs: Runs, drawn: Trace) -> None:
    flip = (
        compare(
            drawn,
            runs.record(
                model("llama"), scenario(max_tokens=24, ignore_stop=True, force_tokens=str(drawn.path))
            ),
        )
        .requests[0]
        .flip
    )
    assert flip is not None and flip.position < 30
    injected_fault = InjectedFault("layers.1.mlp.up_proj", 0, 33, 7)
    wrong = runs.record(
        model("llama"),
        scenario(max_tokens=24, ignore_stop=True, force_tokens=str(drawn.path)),
        RecordOptions(observe=0, faults=(injected_fault,)),
    )
    (request, *_) = compare(drawn, wrong).requests
    assert request.origin is not None
    assert (request.origin.site, request.origin.position) == ("layers.1.mlp.up_proj", 33)


def test_the_other_runs_end_is_the_end_and_own_stops_are_not(runs: Runs) -> None:
    short = runs.record(model("llama"), scenario(max_tokens=5, ignore_stop=True))
    forced = runs.record(model("llama"), scenario(max_tokens=24, force_tokens=str(short.path)))
    assert [len(chosen(forced, n)) for n in range(3)] == [5, 5, 5]
    found = compare(short, forced)
    assert found.identical and not found.workload


def test_what_does_not_fit_is_refused(runs: Runs, tmp_path: Path) -> None:
    plain = runs.record(model("llama"), scenario(lengths=(12, 3)))
    with pytest.raises(ForcedTokensMissing, match="has no request 'r2'"):
        runs.record(model("llama"), scenario(force_tokens=str(plain.path)))
    other = [{"id": "r0", "tokens": prompts((12,), seed=9)[0]}]
    asked = {"model": "tiny", "max_tokens": 3, "request": other, "force_tokens": str(plain.path)}
    with pytest.raises(ForcedTokensMissing, match="request 'r0' has another prompt"):
        runs.record(model("llama"), Scenario.from_dict(asked), QUIET)


def test_the_report_says_how_choices_agree_again(runs: Runs, drawn: Trace) -> None:
    forced = runs.record(
        model("llama"), scenario(max_tokens=24, ignore_stop=True, force_tokens=str(drawn.path))
    )
    text = divergence_text(compare(drawn, forced), width=200)
    assert "fed the same tokens: of 24 choices" in text and "they agree again" in text
    assert "run b was fed given tokens" in text
    assert "rows after a request's first flip saw other tokens" not in text
