"""Attention that somebody has wrapped, with parameters of other names, is tapped like mlx-lm's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models import llama
from tiers import some_now
from tiny import tiny

from detdiff import Scenario, compare
from detdiff.engines.base import Overrides, RunOptions
from detdiff.engines.mlx.engine import record


@pytest.mark.parametrize(
    ("layout", "pinned"), some_now([(a, b) for a in ("padded", "packed") for b in (False, True)], 1, 2)
)
def test_parameters_of_other_names_are_passed_on_as_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, pinned: bool
) -> None:
    asked = Scenario.from_dict(
        {
            "model": "tiny",
            "schedule": "static",
            "layout": layout,
            "request": [{"tokens": [1, 2, 3]}, {"tokens": [4, 5]}],
            "max_tokens": 3,
        }
    )
    loaded = tiny("llama")
    options = RunOptions(overrides=Overrides(pin_kernels=pinned))
    plain = record(asked, tmp_path / "plain", loaded=loaded, options=options)
    native = llama.scaled_dot_product_attention

    def wrapped(q: Any, k: Any, v: Any, c: Any = None, *, scale: float, mask: Any) -> Any:
        return native(q, k, v, cache=c, scale=scale, mask=mask)

    monkeypatch.setattr(
        llama,
        "scaled_dot_product_attention",
        lambda q, k, v, cache=None, **named: wrapped(q, k, v, cache, **named),
    )
    assert compare(plain, record(asked, tmp_path / "wrapped", loaded=loaded, options=options)).identical
