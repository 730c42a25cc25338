"""The detector detects: a fault of one unit in the last place is named, at its exact place, and nothing else is.

`python -m benchmarks injected_faults` runs 300 of these trials; this is a sample of the same series.
"""

from __future__ import annotations

import pytest
from injected_fault_trials import SUITES, Trials
from runs import Runs, model, scenario
from tiers import some_now

from detdiff.compare import compare
from detdiff.engines.mlx.engine import RecordOptions
from detdiff.engines.mlx.taps.injected import InjectedFault

SAMPLE = 40


@pytest.fixture(scope="module")
def trials(runs: Runs) -> Trials:
    return Trials(runs)


@pytest.mark.parametrize(
    "suite", some_now(range(len(SUITES)), 0, 3), ids=["-".join(suite) for suite in SUITES]
)
def test_injected_faults_are_found_where_they_are(trials: Trials, suite: int) -> None:
    rows = [trials.run(number) for number in range(suite, SAMPLE, len(SUITES))]
    assert len(rows) == SAMPLE // len(SUITES)
    assert all(row["found"] for row in rows), [row for row in rows if not row["found"]]


@pytest.mark.parametrize("layout", some_now(["padded", "packed"], 1))
@pytest.mark.parametrize(
    "site",
    [
        "embed_tokens",
        "layers.0.self_attn.rope.k",
        "layers.0.self_attn.v_proj",
        "layers.1.self_attn.attention",
        "layers.1.self_attn",
        "layers.1.mlp.switch_mlp.down_proj",
        "layers.1.mlp",
        "layers.1",
        "norm",
        "lm_head",
        "logits",
    ],
)
def test_every_kind_of_site_can_be_the_origin(runs: Runs, layout: str, site: str) -> None:
    of = model("qwen3_moe")
    asked = scenario("continuous", layout, arrivals=(0, 2, 5), lengths=(12, 3, 35), max_tokens=5)
    base = runs.once(of, asked)
    # The last prompt row: fed in every layout, and one whose logits are used.
    injected_fault = InjectedFault(site, 2, 34, 3)
    other = runs.record(of, asked, RecordOptions(observe=0, faults=(injected_fault,)))
    divergence = compare(base, other)
    (hit,) = [request for request in divergence.requests if request.origin is not None]
    assert hit.origin is not None
    assert (hit.id, hit.origin.site, hit.origin.position) == ("r2", site, 34)
    assert sum(count.count for count in hit.origins) == 1
    assert all(r.identical for r in divergence.requests if r.id != "r2")


def test_without_a_injected_fault_nothing_is_found(runs: Runs) -> None:
    of = model("qwen3_moe")
    asked = scenario("continuous", "packed", arrivals=(0, 2, 5), lengths=(12, 3, 35), max_tokens=5)
    off_the_row = InjectedFault("norm", 2, 4000, 3)
    other = runs.record(of, asked, RecordOptions(observe=0, faults=(off_the_row,)))
    assert compare(runs.record(of, asked), other).identical
