"""Adapters beside their weights against adapters that were fused: rounding is none of a bug, and a wrong fuse is named at its layer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import command_line
import mlx.core as mx
import pytest
from adapters import adapted, fused, write_adapter
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear
from runs import patched, scenario
from tiers import some_now
from tiny import tiny

from detdiff.engines.mlx.engine import MlxEngine
from detdiff.engines.mlx.model import LoadedModel, builtin_path, load
from detdiff.explain import Verdict, explain

ASKED = scenario(lengths=(4, 3), max_tokens=2)


def explained(a: LoadedModel, b: LoadedModel) -> Verdict:
    return explain(ASKED, ASKED, engine=(MlxEngine(a), MlxEngine(b)), across_models=True)


def scaled(of: LoadedModel, scale: float) -> LoadedModel:
    for module in of.model.modules():
        if hasattr(module, "lora_a"):
            module.scale = scale
    return of


KINDS = some_now([("f32", False), ("q4", False), ("f32", True), ("bf16", False), ("q4", True)], 0)


@pytest.mark.parametrize(("fmt", "dora"), KINDS)
def test_a_fused_adapter_is_rounding_and_one_of_a_wrong_scale_is_not(
    fmt: str, dora: bool, tmp_path: Path
) -> None:
    def made() -> LoadedModel:
        return tiny("qwen2", fmt)

    folder = write_adapter(made(), tmp_path / "a", dora=dora)
    beside = adapted(made(), folder)
    sound = explained(beside, fused(adapted(made(), folder)))
    assert (sound.kind, sound.rule) == ("numerics", "adapter"), sound.sentence
    assert sound.control("adapters").detail["sites"] == 14
    wrong = explained(beside, fused(scaled(adapted(made(), folder), 10.0), "wrong"))
    assert (wrong.kind, wrong.rule) == ("bug", "adapter-outside"), wrong.sentence
    found = wrong.control("adapters").detail
    assert (found["run"], found["site"]) == ("b", "layers.0.self_attn.q_proj")
    if not dora:
        assert found["as_if"] == "it is as with the scale 10, and the adapter's is 8"
    else:
        assert found.get("as_if") is None and "neither as without the adapter" in wrong.sentence


@pytest.mark.parametrize("dora", some_now([False, True], 0))
def test_an_adapter_that_is_not_applied_is_named(dora: bool, tmp_path: Path) -> None:
    folder = write_adapter(tiny("qwen2"), tmp_path / "a", dora=dora)
    beside, whole = adapted(tiny("qwen2"), folder), fused(adapted(tiny("qwen2"), folder))
    undo = patched(DoRALinear if dora else LoRALinear, "__call__", lambda self, x: self.linear(x))
    try:
        verdict = explained(whole, beside)
    finally:
        undo()
    assert verdict.rule == "adapter-outside"
    found = verdict.control("adapters").detail
    assert (found["run"], found["site"]) == ("b", "layers.0.self_attn.q_proj")
    assert found["as_if"] == "it is as without the adapter" and found["place"] == "first at position 0 of r0"


@pytest.mark.thorough
def test_one_layer_that_was_not_fused_is_named(tmp_path: Path) -> None:
    folder = write_adapter(tiny("qwen2"), tmp_path / "a")
    part = adapted(tiny("qwen2"), folder)
    layer = part.model.model.layers[1].mlp.up_proj
    layer.lora_b = mx.zeros_like(layer.lora_b)
    verdict = explained(adapted(tiny("qwen2"), folder), fused(part, "part"))
    found = verdict.control("adapters").detail
    assert (verdict.kind, found["run"], found["site"]) == ("bug", "b", "layers.1.mlp.up_proj")
    assert found["as_if"] == "it is as without the adapter"


def test_the_model_without_its_adapter_is_another_configuration(tmp_path: Path) -> None:
    folder = write_adapter(tiny("qwen2"), tmp_path / "a")
    plain = tiny("qwen2")
    plain.identity["weights_sha256"] = plain.identity["weights"]  # type: ignore[index]
    verdict = explained(plain, adapted(tiny("qwen2"), folder))
    assert (verdict.kind, verdict.rule) == ("configuration", "adapter-without"), verdict.sentence


@pytest.mark.thorough
def test_other_weights_beside_an_adapter_decide_nothing(tmp_path: Path) -> None:
    folder = write_adapter(tiny("qwen2"), tmp_path / "a")
    other = fused(adapted(tiny("qwen2"), folder))
    other.model.model.embed_tokens.weight = other.model.model.embed_tokens.weight * 1.01
    verdict = explained(adapted(tiny("qwen2"), folder), other)
    assert verdict.kind == "undetermined"
    assert any("the two models differ in embed_tokens.weight" in each for each in verdict.missing), (
        verdict.missing
    )


@pytest.mark.thorough
def test_an_adapter_and_its_fused_model_on_the_command_line(tmp_path: Path) -> None:
    folder = write_adapter(load("builtin"), tmp_path / "adapter", layers=1)
    shutil.copytree(builtin_path(), tmp_path / "fused")
    made = fused(load("builtin", str(folder)))
    mx.save_safetensors(
        str(tmp_path / "fused" / "model.safetensors"), dict(tree_flatten(made.model.parameters()))
    )
    arguments: tuple[Any, ...] = (
        *("--prompt", "In the", "--both", "max_tokens=2"),
        *("--a", f"model=builtin adapter_path={folder}", "--b", f"model={tmp_path / 'fused'}", "--json"),
    )
    refused = command_line.run("compare", *arguments)
    assert refused.exit_code == 3 and "different models" in refused.output
    done = command_line.run("explain", "--across-models", *arguments)
    answer = json.loads(done.stdout)
    assert (answer["verdict"], answer["rule"]) == ("numerics", "adapter"), done.output
