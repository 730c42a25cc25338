"""Attention over latents: one row's form and that of several are the same sums, and what is neither is a bug at its layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from every_model import build
from mlx_lm.models import deepseek_v32
from mlx_lm.models.mla import MultiLinear
from runs import Runs, scenario
from tiers import some_now

from detdiff.compare import compare
from detdiff.explain import explain

FORMS = {"deepseek_v3": 1e-3, "mistral4": 1e-3}  # mistral4 rotates beside, not apart
KEYS: dict[str, Any] = {"lengths": (8,), "max_tokens": 1}


@pytest.mark.parametrize("name", some_now(FORMS, 0))
def test_rows_alone_and_together_are_one_rounding_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    runs = Runs(tmp_path)
    of = build(name, num_hidden_layers=2)
    whole = runs.record(of, scenario(**KEYS))
    verdict = explain(whole, runs.record(of, scenario(prefill_chunk=1, **KEYS)), loaded=of)
    assert (verdict.kind, verdict.rule) == ("numerics", "path"), verdict.sentence
    assert "layers.0.self_attn" in verdict.sentence
    native = MultiLinear.__call__

    def off(self: Any, x: mx.array, transpose: bool = True) -> mx.array:
        # One row's query and output alone are not as wide as the latents of several.
        y = native(self, x, transpose)
        return y * (1 + FORMS[name]) if transpose and x.shape[2] == 1 and x.shape[1] > 1 else y

    monkeypatch.setattr(MultiLinear, "__call__", off)
    sides = [runs.record(of, scenario(prefill_chunk=n, **KEYS)) for n in (2048, 1)]
    wrong = explain(*sides, loaded=of)
    assert (wrong.kind, wrong.rule) == ("bug", "outside"), wrong.sentence
    assert "layers.0.self_attn" in wrong.sentence


def test_keys_that_a_model_chooses_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """deepseek_v32 masks what several rows do not attend, and gathers what one row does: both are read off what attention was given."""
    runs, of = Runs(tmp_path), build("deepseek_v32", num_hidden_layers=1)
    whole, single = (runs.record(of, scenario(prefill_chunk=n, **KEYS)) for n in (2048, 1))

    def sees(trace: Any) -> dict[int, str]:
        lines = [row for line in trace.forwards() for note in line["caches"] for row in note.get("sees", ())]
        return {
            row["rows"][0]: row.get("sees", f"{row.get('first')}-{row['rows'][0]}")
            for row in lines
            if row["rows"][0] == row["rows"][1]
        }

    assert sees(whole) == sees(single) and set(sees(single)) >= {6, 7}
    native = deepseek_v32.Indexer.__call__

    def other(self: Any, *args: Any, **kw: Any) -> Any:
        found = native(self, *args, **kw)
        if found is None or found.shape[2] > 1:
            return found
        absent = next(n for n in range(7) if n not in found.flatten().tolist())
        return mx.concatenate([found[..., 1:], mx.full((1, 1, 1, 1), absent, found.dtype)], axis=-1)

    monkeypatch.setattr(deepseek_v32.Indexer, "__call__", other)
    origin = compare(whole, runs.record(of, scenario(prefill_chunk=1, **KEYS))).requests[0].origin
    assert origin is not None
    found = compare(single, runs.record(of, scenario(prefill_chunk=1, **KEYS))).requests[0].origin
    assert found is not None and (found.how, found.position, found.layer) == ("visible", 6, 0)
