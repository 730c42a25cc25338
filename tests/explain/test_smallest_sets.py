"""Injected path changes and units in the last place: minimal_change and patch must name exactly what was injected."""

from __future__ import annotations

from pathlib import Path

import pytest
from control_trials import Series, Tried
from tiers import some_now

PATHS, ULPS = 10, 10


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    return Series(tmp_path_factory.mktemp("trials"), tokens=10)


@pytest.mark.parametrize("number", some_now(range(PATHS), 0, ci=range(1, PATHS, 2)))
def test_minimal_change_names_the_one_call_that_matters(series: Series, number: int) -> None:
    tried = series.path_change(number)
    assert tried.candidates > 100
    _exact(tried)


@pytest.mark.parametrize("number", some_now(range(ULPS), 2, ci=range(1, ULPS, 2)))
def test_patch_names_the_one_entry_that_carries(series: Series, number: int) -> None:
    _exact(series.one_ulp(number))


def _exact(tried: Tried) -> None:
    assert tried.named == tried.injected, [control.sentence for control in tried.controls.values()]
    assert tried.forwards <= 0.1 * tried.reruns * tried.length


def test_trials_can_be_repeated(tmp_path: Path) -> None:
    first, second = (Series(tmp_path / name, tokens=6).path_change(3) for name in "xy")
    assert (first.injected, first.named) == (second.injected, second.named)
