"""Discovery finds every site whatever numbers a model's configuration holds."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import CONFIGS, TinyTokenizer

from detdiff.compare import compare
from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.engines.mlx.model import LoadedModel
from detdiff.engines.mlx.taps.injected import InjectedFault
from detdiff.engines.mlx.taps.session import Session
from detdiff.scenario import Scenario


def model(arch: str, **changes: Any) -> LoadedModel:
    """A random model of the matrix with some of its configuration changed."""
    module = importlib.import_module(f"mlx_lm.models.{arch}")
    config = {**CONFIGS[arch], **changes}
    mx.random.seed(0)
    made = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(made.parameters())
    identity = {"name": arch, "model_type": arch, "vocab_size": config["vocab_size"]}
    return LoadedModel(made, TinyTokenizer(), Path("tiny"), identity, config)


def kinds(loaded: LoadedModel) -> Counter[str]:
    return Counter(site.kind for site in Session(loaded.model).sites.sites)


def test_layer_numbers_do_not_use_up_the_probe_lengths() -> None:
    """gemma3 keeps its layer's number in every attention: 48 layers take every small number."""
    found = kinds(model("gemma3_text", num_hidden_layers=48))
    assert found["attention"] == found["cache_write"] == found["block"] == 48


@pytest.mark.parametrize("experts", [2, 8, 16])
def test_sorted_experts_are_found(experts: int) -> None:
    """From 64 expert rows on, mlx-lm sorts them; with 16 experts a row that is so for a handful of rows."""
    loaded = model("qwen3_moe", num_experts=16, num_experts_per_tok=experts)
    assert kinds(loaded)["switch"] == 3 * CONFIGS["qwen3_moe"]["num_hidden_layers"]


def test_a_fault_in_a_sorted_expert_linear_is_named_there(tmp_path: Path) -> None:
    loaded = model("qwen3_moe", num_experts=16, num_experts_per_tok=16)
    asked = Scenario.from_flags("tiny", ["abcdefgh"], "max_tokens=4 layout=packed")
    base = record(asked, tmp_path / "base", loaded=loaded)
    for number, name in enumerate(("up_proj", "gate_proj", "down_proj")):
        site = f"layers.1.mlp.switch_mlp.{name}"
        # A row of the prompt, sorted, and a decode row, which is not.
        for position in (3, 9):
            options = RecordOptions(faults=(InjectedFault(site, 0, position, element=5),))
            wrong = record(asked, tmp_path / f"{number}-{position}", loaded=loaded, options=options)
            (request,) = compare(base, wrong).requests
            assert request.origin is not None
            assert (request.origin.site, request.origin.position) == (site, position)
            assert sum(count.count for count in request.origins) == 1


def test_sorting_does_not_show_in_the_digests(tmp_path: Path) -> None:
    """Chunks of 2 rows are not sorted and a chunk of 8 is: the same rows, the same digests."""
    loaded = model("qwen3_moe", num_experts=16, num_experts_per_tok=8)
    traces = [
        record(
            Scenario.from_flags("tiny", ["abcdefgh"], f"max_tokens=4 layout=packed prefill_chunk={chunk}"),
            tmp_path / str(chunk),
            loaded=loaded,
        )
        for chunk in (2, 8)
    ]
    found = compare(*traces)
    assert found.identical, [(r.id, r.origin) for r in found.requests]
