"""Margins beside movements: what counts as a flip that rounding could make."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from detdiff.compare import compare
from detdiff.errors import NothingComparable
from detdiff.explain.verdict import MarginMovements, fragility
from detdiff.trace import Trace

GOLDEN = Path(__file__).parents[2] / "traces"
sizes = arrays.arrays(np.float64, st.integers(1, 50), elements=st.floats(0, 8))


def moved(*sizes: float) -> MarginMovements:
    return MarginMovements(np.sort(np.array(sizes, np.float64)))


@given(sizes, st.floats(0, 9), st.floats(0, 9))
def test_a_smaller_margin_is_never_safer(movements: np.ndarray, one: float, other: float) -> None:
    found = MarginMovements(np.sort(movements))
    low, high = sorted((one, other))
    assert 0 < found.chance(high) <= found.chance(low) or low == 0
    assert found.chance(low) <= 0.5


@pytest.mark.parametrize(
    ("margin", "expected"),
    [
        (3.0, 1 / 12),  # nothing moved that far
        (1.5, 2 / 12),  # one of four did, to either side alike
        (1.0, 3 / 12),  # two make a tie, won half the time
        (0.0, 4 / 12),  # a tie is kept unless something moves
    ],
)
def test_the_chance_counts_movements_beyond_the_margin(margin: float, expected: float) -> None:
    assert moved(0.0, 1.0, 1.0, 2.0).chance(margin) == pytest.approx(expected)


@pytest.fixture(scope="module")
def pair() -> tuple[Trace, Trace]:
    return Trace.open(GOLDEN / "serial"), Trace.open(GOLDEN / "continuous")


def test_every_token_up_to_the_flip_is_judged(pair: tuple[Trace, Trace]) -> None:
    flips = {r.id: r.flip for r in compare(*pair).requests}
    found = fragility(*pair)
    for request, flip in flips.items():
        mine = sorted(token.index for token in found if token.request == request)
        assert mine == list(range(20 if flip is None else flip.index + 1))
    (flipped,) = [flip for flip in flips.values() if flip is not None]
    (token,) = [t for t in found if (t.request, t.index) == ("follower", flipped.index)]
    assert token.token == flipped.a.token and token.margin == pytest.approx(flipped.a.margin)
    # The movement turned the order round.
    assert token.delta is not None and token.margin + token.delta <= 0
    assert [t.chance for t in found] == sorted((t.chance for t in found), reverse=True)


def test_equal_runs_have_no_movement(pair: tuple[Trace, Trace]) -> None:
    assert not MarginMovements.between(pair[0], pair[0]).sizes.any()
    assert {token.delta for token in fragility(pair[0], pair[0])} == {0.0}


def test_other_prompts_may_be_the_measure(pair: tuple[Trace, Trace]) -> None:
    still, restless = moved(0.0), moved(100.0)
    (calm, *_), (wild, *_) = (fragility(*pair, movements) for movements in (still, restless))
    assert calm.chance < wild.chance


def test_runs_without_a_common_token_are_refused(pair: tuple[Trace, Trace], tmp_path: Path) -> None:
    import json
    import shutil

    shutil.copytree(GOLDEN / "serial", tmp_path / "other")
    header = json.loads((tmp_path / "other" / "trace.json").read_text())
    for request in header["requests"]:
        request["id"] += "-other"
    (tmp_path / "other" / "trace.json").write_text(json.dumps(header))
    with pytest.raises(NothingComparable, match="share no generated token"):
        MarginMovements.between(pair[0], Trace.open(tmp_path / "other"))
