"""A composite that hands on its last site's bits in one run and not in the other: a bug by its size, nothing said below that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.llama import MLP
from tiers import some_now
from torch_models import VOCABULARY, row_by_row, tiny_llama, torch_or_skip

from detdiff import Scenario, explain
from detdiff.engines.mlx.model import load
from detdiff.engines.transformers import TransformersEngine
from detdiff.explain import Verdict

SITE = "layers.0.mlp"


def explained(swapped: bool = False) -> Verdict:
    flags = "max_tokens=4 ignore_stop=true schedule="
    serial, static = (
        Scenario.from_flags("builtin", ("In the beginning", "My son"), flags + kind)
        for kind in ("serial", "static")
    )
    sides = (static, serial) if swapped else (serial, static)
    return explain(*sides, loaded=load("builtin"), controls=("repeat", "oracle"))


def with_output(patch: pytest.MonkeyPatch, changed: Callable[[mx.array], mx.array]) -> None:
    """The MLPs' outputs in decode rows of a batch are ``changed``, between sites."""
    native = MLP.__call__

    def wrong(self: Any, x: mx.array) -> mx.array:
        y = native(self, x)
        return changed(y) if x.shape[0] > 1 and x.shape[1] == 1 else y

    patch.setattr(MLP, "__call__", wrong)


def one_column(y: mx.array) -> mx.array:
    return y * mx.where(mx.arange(y.shape[-1]) == 7, 1.2, 1.0).astype(y.dtype)


@pytest.mark.parametrize("swapped", some_now((False, True), 0))
def test_a_column_that_one_run_changes_behind_the_last_site_is_a_bug(
    monkeypatch: pytest.MonkeyPatch, swapped: bool
) -> None:
    with_output(monkeypatch, one_column)
    verdict = explained(swapped)
    assert (verdict.kind, verdict.rule) == ("bug", "outside"), verdict.sentence
    ill, well = ("a", "b") if swapped else ("b", "a")
    oracle = verdict.control("oracle")
    assert oracle is not None
    first = oracle.detail["outside_where"][0]
    assert (first["site"], first["run"], first["columns"]) == (SITE, ill, [7, 7]), first
    assert f"position {first['position']} of {first['request']}" in verdict.sentence
    assert f"hands on the bits of {SITE}.down_proj.out in run {well}" in verdict.sentence
    assert f"others in run {ill}" in verdict.sentence
    assert "only where a forward has one token a row" in verdict.sentence
    assert oracle.detail[f"outside_{well}"] == 0


@pytest.mark.thorough
def test_what_may_have_been_lost_in_rounding_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that no site shows, which one run's rounding loses whole and the other's roundings bring up to the row's own size."""
    signs = mx.array(np.random.default_rng(0).choice([-1.0, 1.0], 4096))

    def hidden(y: mx.array) -> mx.array:
        size = mx.abs(y).max(axis=-1, keepdims=True) * 2.0**-8
        return (y + size * signs[: y.shape[-1]]).astype(y.dtype)

    with monkeypatch.context() as patch:
        with_output(patch, hidden)
        verdict = explained()
    assert verdict.divergence is not None and verdict.divergence.requests[0].origin is not None
    assert verdict.divergence.requests[0].origin.site == SITE
    oracle = verdict.control("oracle")
    assert oracle is not None and verdict.kind == "undetermined" and oracle.result == "not_run", (
        verdict.sentence
    )


@pytest.mark.thorough
def test_a_healthy_pair_is_identical() -> None:
    assert explained().kind == "identical"


@pytest.mark.thorough
@pytest.mark.parametrize(("factor", "kind"), [(1.2, "bug"), (1 + 2**-9, "undetermined"), (1.0, "identical")])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_model_in_torch_likewise(factor: float, kind: str, swapped: bool) -> None:
    torch = torch_or_skip()
    model = row_by_row(torch, tiny_llama(torch))
    mlp = model.model.layers[0].mlp
    native = mlp.forward

    def wrong(x: Any) -> Any:
        y = native(x)
        if x.shape[0] > 1 and x.shape[1] == 1:
            y = y.clone()
            y[..., 3] *= factor
        return y

    mlp.forward = wrong
    prompts = [[(7 * i + 5 * k) % VOCABULARY for k in range(6)] for i in range(2)]
    table = {"model": "tiny", "engine": "transformers", "request": [{"tokens": p} for p in prompts]}
    asked = Scenario.from_dict({**table, "max_tokens": 4})
    sides = asked, asked.with_changes(schedule="static")
    engine = TransformersEngine(model, name="tiny")
    verdict = explain(*(reversed(sides) if swapped else sides), engine=engine, controls=("repeat", "oracle"))
    assert verdict.kind == kind, verdict.sentence
    if kind == "bug":
        assert "model.layers.0.mlp (mlp, columns 3 to 3)" in verdict.sentence
        assert f"gives others in run {'a' if swapped else 'b'}" in verdict.sentence
