"""Ten injected cases: each ends at a quarter of the original's rows or less, with the same verdict and the same site."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import CASES
from crowded import crowded, reduced
from tiers import only_in_full, some_now
from trials import Recorded

from detdiff.compare import Divergence
from detdiff.explain import DECIDING, explain

INJECTED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "kernel-switch": (1, 3, {"max_tokens": 6}),
    "narrow-sums": (4, 3, {}),
    "leak-between-rows": (6, 3, {}),
    "masked-row": (7, 4, {}),
    "rope-of-one-token": (9, 3, {}),
    "columns-unwritten": (10, 3, {}),
    "ring-too-short": (12, 3, {}),
    "quantised-later": (13, 3, {}),
    "shared-position": (14, 3, {}),
    "samplers-shifted": (16, 3, {}),
}


def first_site(divergence: Divergence | None) -> str | None:
    assert divergence is not None
    diverged = [request for request in divergence.requests if request.stage is not None]
    first = next((request for request in diverged if request.id == divergence.first), diverged[0])
    return None if first.origin is None else first.origin.site


LONGEST = ("ring-too-short", "quantised-later", "narrow-sums")


@pytest.mark.parametrize(
    "name",
    [
        *some_now([name for name in INJECTED if name not in LONGEST], 5, ci=(0,)),
        *(pytest.param(name, marks=only_in_full("the longest of ten cases")) for name in LONGEST),
    ],
)
def test_a_quarter_of_the_rows_or_less_parts_in_the_same_way(
    name: str, tmp_path: Path, recorded: Recorded
) -> None:
    number, seed, keys = INJECTED[name]
    trial = crowded(number, seed, **keys)
    before = recorded.compare(trial)
    found = reduced(trial, tmp_path / "smaller")
    assert found.finished and found.rows_after * 4 <= found.rows_before == found.steps[0].rows
    assert found.verdict.kind == CASES[number].verdict and found.tried <= 100
    # What is on the disk, recorded and asked anew.
    small = replace(trial, scenario_a=found.scenario_a, scenario_b=found.scenario_b)
    after = recorded.compare(small)
    assert first_site(after) == first_site(found.verdict.divergence) == first_site(before)
    assert after.stage == before.stage
    with trial.around:
        again = explain(recorded.a, recorded.b, controls=DECIDING, loaded=trial.loaded, draft=trial.draft)
    assert again.kind == found.verdict.kind
    rows = [len(trace.row_index().request) for trace in (recorded.a, recorded.b)]
    assert sum(rows) == found.rows_after
