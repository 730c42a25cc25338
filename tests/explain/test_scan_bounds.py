"""Recurrences stay inside their bounds in every form that mlx-lm computes them in, and not where a row too many has a part in the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import bailing_hybrid, mamba2
from mlx_lm.models.gated_delta import gated_delta_ops, normalize_qk
from mlx_lm.models.ssm import ssm_update
from runs import Runs, model, scenario
from tiers import some_now

from detdiff.engines.mlx.scan_calls import ScannedRow
from detdiff.explain import explain
from detdiff.explain.oracle import Judgement, judge
from detdiff.explain.roundings import Arithmetic
from detdiff.scenario import Scenario

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
ROWS = (1, 7, 300)  # more than a chunk of ssm_attn


def gated_delta(rows: int, dtype: Any, vector: bool) -> dict[str, Any]:
    mx.random.seed(rows)
    q, k, v = (mx.random.normal((2, rows, heads, 16)).astype(dtype) for heads in (1, 1, 2))
    q, k = normalize_qk(q, k, inv_scale=16**-0.5, eps=1e-6)
    g = mx.random.uniform(0.5, 1.0, (2, rows, 2, 16) if vector else (2, rows, 2))
    beta = mx.sigmoid(mx.random.normal((2, rows, 2))).astype(dtype)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": mx.random.normal((2, 2, 16, 16))}


def state_space(rows: int, dtype: Any, started: bool) -> dict[str, Any]:
    mx.random.seed(rows)
    given = {
        name: mx.random.normal((2, rows, n, 8)).astype(dtype)
        for name, n in (("hidden_states", 4), ("B", 2), ("C", 2))
    }
    given |= {"A_log": mx.log(mx.arange(1, 5)), "D": mx.ones(4), "dt_bias": mx.random.normal((4,))}
    given["dt"] = mx.random.normal((2, rows, 4)).astype(dtype)
    return given | {"state": mx.random.normal((2, 4, 8, 8)) if started else None}


def gated_linear(rows: int, dtype: Any, started: bool) -> dict[str, Any]:
    mx.random.seed(rows)
    given: dict[str, Any] = {name: mx.random.normal((2, 4, rows, 16)).astype(dtype) for name in "qkv"}
    given |= {"g": -mx.array([0.001, 0.05, 0.3, 0.9]), "scale": 0.25}
    return given | {"h": mx.random.normal((2, 4, 16, 16)) if started else None}


def judged(given: dict[str, Any], rows: int, computed: int) -> Judgement:
    """The last of ``rows`` rows, as the scan over ``computed`` of them gives it."""
    linear = "scale" in given
    scan: Any = bailing_hybrid.recurrent_gla if linear else ssm_update if "dt" in given else gated_delta_ops
    timed = [
        name
        for name, value in given.items()
        if isinstance(value, mx.array) and value.ndim > 2 and name not in ("state", "h")
    ]
    some = (slice(None), slice(None), slice(computed)) if linear else (slice(None), slice(computed))
    y, state = scan(**{**given, **{name: given[name][some] for name in timed}})
    row = ScannedRow(given, 1, 0, rows - 1, True, y, state)
    return judge(row.operation(), row.output(), Arithmetic("native", "float32"))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", some_now(DTYPES, 0, 1))
@pytest.mark.parametrize("other", [True, False])
@pytest.mark.parametrize("make", [gated_delta, state_space, gated_linear])
def test_a_recurrence_is_inside_and_a_row_too_many_is_not(
    make: Any, dtype: str, rows: int, other: bool
) -> None:
    given = make(rows + 1, DTYPES[dtype], other)
    sound = judged(given, rows, rows)
    assert sound.inside and sound.elements > 64, sound.worst
    # One more row in the state: what a neighbour's length, or padding, does.
    wrong = judged(given, rows, rows + 1)
    assert wrong.outside > 0 and wrong.worst > 100


def test_a_state_in_another_dtype_is_not_judged() -> None:
    given = gated_delta(3, mx.float32, False)
    y, state = gated_delta_ops(**given)
    with pytest.raises(Exception, match="held in bfloat16"):
        ScannedRow(given, 0, 0, 2, True, y, state.astype(mx.bfloat16)).operation()
    assert np.isfinite(ScannedRow(given, 0, 0, 2, False, y, state).output()).all()


@pytest.mark.parametrize(("factor", "found"), [(1.0, "inside"), (1.01, "outside")])
def test_a_state_that_is_written_over_is_judged_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, found: str
) -> None:
    """One buffer for a state, which each chunk writes over, is sound; one that is not what the chunk before left is a bug."""

    def in_place(*args: Any) -> Any:
        state = args[7]
        y, new = ssm_update(*args[:7], None if state is None else state * factor, *args[8:])
        if state is None:
            return y, new
        state[...] = new
        return y, state

    monkeypatch.setattr(mamba2, "ssm_update", in_place)
    runs, loaded = Runs(tmp_path), model("mamba2")
    a, b = (runs.record(loaded, scenario(lengths=(12,), max_tokens=1, prefill_chunk=n)) for n in (2048, 4))
    verdict = explain(a, b, loaded=loaded, controls=("repeat", "oracle"))
    assert {each.fact: each.detail.get("result") for each in verdict.evidence}["oracle"] == found
    assert (verdict.kind == "bug") == (found == "outside"), verdict.sentence


def test_rows_that_a_turn_kept_are_judged_where_they_were_computed(tmp_path: Path) -> None:
    """A conversation of mamba2 from scratch beside a kept one: chunks of the prompt end elsewhere."""
    loaded = model("mamba2")
    turn = [{"tokens": [3, 4]}, {"tokens": [5, 6, 7]}]
    request = [{"id": "r0", "tokens": [1, 2, 3, 4, 5], "turn": turn}]
    runs = Runs(tmp_path)
    a, b = (
        runs.record(
            loaded, Scenario.from_dict({"model": "tiny", "max_tokens": 4, "turns": turns, "request": request})
        )
        for turns in ("fresh", "kept")
    )
    verdict = explain(a, b, loaded=loaded)
    assert (verdict.kind, verdict.rule) == ("numerics", "path"), verdict.sentence
    assert verdict.advice and "pin the kernels: every linear" in verdict.advice, verdict.advice
