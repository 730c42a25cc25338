"""llama.cpp and MLX on one GGUF file: numerics with every operation inside its bound, and a fault in llama.cpp named there."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from models import need_llama
from numpy.typing import NDArray
from plugins.small_gguf import small_gguf
from tiers import only_in_full, some_now
from torch_models import torch_or_skip

from detdiff import Scenario, Verdict, compare, explain, record
from detdiff.engines.llama_cpp.context import ContextFault
from detdiff.engines.llama_cpp.known_model import KnownModel
from detdiff.engines.llama_cpp.library import EVAL_CALLBACK, GgmlTensor
from detdiff.engines.mlx.gguf_import import import_gguf
from detdiff.engines.registry import open_engine
from detdiff.explain.controls.roles import RolesFigures

PROMPT = (1, 75, 104, 111, 59, 40, 200, 17)
Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class FaultyFile(KnownModel):
    """A known model whose file has other weights or settings."""

    changed: Callable[[Weights], None] = lambda weights: None
    base: float | None = None

    def weights(self) -> Weights:
        found = super().weights()
        self.changed(found)
        return found

    def write(self, path: Path) -> Path:
        import gguf

        with pytest.MonkeyPatch.context() as patch:
            plain = gguf.GGUFWriter.add_rope_freq_base

            def add(writer: Any, value: float) -> None:
                plain(writer, self.base or value)

            patch.setattr(gguf.GGUFWriter, "add_rope_freq_base", add)
            return super().write(path)


def swapped(weights: Weights) -> None:
    gate, up = (f"blk.1.ffn_{name}.weight" for name in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]


def no_norm_weight(weights: Weights) -> None:
    weights["blk.1.ffn_norm.weight"] = np.ones_like(weights["blk.1.ffn_norm.weight"])


class OtherScale(ContextFault):
    """Attention of every layer with another scale, which is put into the graph's nodes before they are computed."""

    def __init__(self, library: Any) -> None:
        self._library, self._kept = library, []

    def callback(self, function: int, user_data: int) -> tuple[int, int]:
        native = EVAL_CALLBACK(function)

        def on_node(address: int, ask: bool, user: int) -> bool:
            tensor = GgmlTensor.from_address(address)
            if ask and self._library.ggml_op_name(tensor.op) in (b"SOFT_MAX", b"FLASH_ATTN_EXT"):
                c.c_float.from_buffer(tensor.op_params).value = 0.5
            return bool(native(address, ask, user))

        self._kept.append(EVAL_CALLBACK(on_node))
        return int(c.cast(self._kept[-1], c.c_void_p).value or 0), user_data


def scenario(engine: str, model: Path, **changes: Any) -> Scenario:
    asked = Scenario.from_dict(
        {"model": str(model), "request": [{"tokens": list(PROMPT)}], "max_tokens": 4, "ignore_stop": True}
    )
    return asked.with_changes(engine=engine, **changes)


def explained(file: Path, directory: Path, **options: Any) -> Verdict:
    """llama.cpp as a, MLX as b."""
    a, b = scenario("llama.cpp", file, **options), scenario("mlx", directory)
    return explain(a, b, across_engines=True, repeats=1)


def figures(verdict: Verdict) -> RolesFigures:
    control = verdict.control("roles")
    assert control is not None and isinstance(control.detail, RolesFigures), control
    return control.detail


@pytest.mark.parametrize(
    ("kind", "flash"),
    some_now([(kind, flash) for kind in ("F32", "F16", "Q8_0", "Q4_1") for flash in ("on", "off")], 0, 3, 6),
)
def test_one_file_in_both_is_numerics_with_every_operation_inside(
    kind: str, flash: str, tmp_path: Path
) -> None:
    need_llama()
    file = KnownModel(layers=2, kind=kind).write(tmp_path / "model.gguf")
    import_gguf(file, tmp_path / "model", dtype="f32", packed=False)
    verdict = explained(file, tmp_path / "model", **{"engine.flash_attention": flash})
    assert (verdict.kind, verdict.rule) == ("numerics", "roles"), (verdict.sentence, verdict.missing)
    found = figures(verdict)
    assert found.operations == {"a": 34, "b": 34} and not found.files
    if kind != "F32":
        # Its rows are staged in less than float32 for each product.
        assert found.nearer == "b" and "run b (mlx) is nearer to float64" in verdict.sentence


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_other_decoders_of_its_kind_are_numerics(architecture: str, tmp_path: Path) -> None:
    need_llama()
    file = small_gguf(architecture).write(tmp_path / "model.gguf")
    import_gguf(file, tmp_path / "model", dtype="f32", packed=False)
    verdict = explained(file, tmp_path / "model")
    assert (verdict.kind, verdict.rule) == ("numerics", "roles"), (verdict.sentence, verdict.missing)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_blocks_that_mlx_keeps_as_groups_are_the_same_model(kind: str, tmp_path: Path) -> None:
    need_llama()
    file = KnownModel(layers=2, kind=kind).write(tmp_path / "model.gguf")
    import_gguf(file, tmp_path / "model", dtype="f32", packed=True)
    verdict = explained(file, tmp_path / "model")
    assert (verdict.kind, verdict.rule) == ("numerics", "roles"), (verdict.sentence, verdict.missing)


FAULTS: dict[str, tuple[FaultyFile, str, int]] = {
    "another RoPE base": (FaultyFile(base=500000.0), "rope_q", 0),
    "gate and up swapped": (FaultyFile(changed=swapped), "gate", 1),
    "a norm without its weight": (FaultyFile(changed=no_norm_weight), "mlp_norm", 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_llama_cpp_is_named_there(name: str, tmp_path: Path) -> None:
    need_llama()
    model, role, layer = FAULTS[name]
    path = replace(model, layers=2, kind="F16").write(tmp_path / "model.gguf")
    asked = scenario("llama.cpp", path)
    # What it has mapped is the faulty file; what is there from now on is what it should have loaded.
    engine = open_engine(asked)
    _ = engine.identity
    KnownModel(layers=2, kind="F16").write(tmp_path / "right.gguf").replace(path)
    import_gguf(path, tmp_path / "model", dtype="f32", packed=False)
    other = scenario("mlx", tmp_path / "model")
    verdict = explain(asked, other, engine=(engine, open_engine(other)), across_engines=True, repeats=1)
    assert (verdict.kind, verdict.rule) == ("bug", "role-outside"), verdict.sentence
    first = figures(verdict).outside_where[0]
    assert (first["run"], first["engine"], first["role"], first["layer"]) == ("a", "llama.cpp", role, layer)
    assert figures(verdict).outside_b == 0


@pytest.mark.parametrize("flash", ["on", "off"])
def test_another_attention_scale_in_llama_cpp_is_named_there(flash: str, tmp_path: Path) -> None:
    need_llama()
    file = KnownModel(layers=2, kind="F16").write(tmp_path / "model.gguf")
    import_gguf(file, tmp_path / "model", dtype="f32", packed=False)
    asked = scenario("llama.cpp", file, **{"engine.flash_attention": flash})
    other = scenario("mlx", tmp_path / "model")
    engine: Any = open_engine(asked)
    run, fault = engine.run, OtherScale(engine.library)
    engine.run = lambda scenario, begin, options: run(scenario, begin, replace(options, faults=(fault,)))
    verdict = explain(asked, other, engine=(engine, open_engine(other)), across_engines=True, repeats=1)
    assert (verdict.kind, verdict.rule) == ("bug", "role-outside"), verdict.sentence
    places = {(each["run"], each["role"], each["layer"]) for each in figures(verdict).outside_where}
    assert places == {("a", "attention", 0), ("a", "attention", 1)}


def test_values_are_aligned_by_role_with_heads_in_one_order(tmp_path: Path) -> None:
    need_llama()
    file = KnownModel(layers=2, kind="F32").write(tmp_path / "model.gguf")
    import_gguf(file, tmp_path / "model", dtype="f32", packed=False)
    b = record(scenario("mlx", tmp_path / "model", capture="full"), tmp_path / "b")
    whole = {"engine.cache_type_k": "f32", "engine.cache_type_v": "f32", "engine.flash_attention": "off"}
    found = []
    for n, settings in enumerate((whole, {})):
        a = record(scenario("llama.cpp", file, capture="full", **settings), tmp_path / f"a{n}")
        across = compare(a, b, across_engines=True).across_engines
        assert across is not None and across.aligned == 34 and not across.why
        assert {each.role for each in across.roles} >= {"q", "rope_q", "rope_k", "attention", "gate", "head"}
        assert "norm-*.RMS_NORM (2)" in across.without_role_a
        found.append(across)
    assert found[0].first is None and max(each.largest for each in found[0].roles) < 1e-5
    # As it comes, its cache is float16, and that is where the two depart.
    assert found[1].first is not None and (found[1].first.role, found[1].first.layer) == ("attention", 0)


def test_an_import_that_turned_heads_wrongly_is_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_llama()
    from detdiff.engines.mlx.gguf_import import weights

    file = KnownModel(layers=2, kind="F32").write(tmp_path / "model.gguf")
    monkeypatch.setattr(weights, "half_split", lambda values, heads: values)
    import_gguf(file, tmp_path / "model", dtype="f32", packed=False)
    verdict = explained(file, tmp_path / "model")
    assert (verdict.kind, verdict.rule) == ("configuration", "other-files")
    assert "the weights of q of layer 0 are not the same numbers" in verdict.sentence


@pytest.mark.thorough
@pytest.mark.real_model
def test_smollm2_in_both_is_numerics(smollm2_f16_gguf: Path, tmp_path: Path) -> None:
    need_llama()
    import_gguf(smollm2_f16_gguf, tmp_path / "model", dtype="f32", packed=False)
    sides = (scenario("llama.cpp", smollm2_f16_gguf), scenario("mlx", tmp_path / "model"))
    short = [replace(each.requests[0], tokens=PROMPT[:3], max_tokens=1) for each in sides]
    a, b = (replace(each, requests=(one,)) for each, one in zip(sides, short, strict=True))
    verdict = explain(a, b, across_engines=True, repeats=1)
    assert (verdict.kind, verdict.rule) == ("numerics", "roles"), (verdict.sentence, verdict.missing)
    assert figures(verdict).operations == {"a": 454, "b": 454}


def four_faults(model: Any) -> None:
    """In one layer each: positions, attention, the MLP's weights and a norm."""
    layers = model.layers
    layers[2].self_attn.rope.base = 10000.0
    layers[3].self_attn.scale *= 1.01
    mlp = layers[5].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
    norm = layers[10].post_attention_layernorm
    norm.weight = mx.ones_like(norm.weight)


@only_in_full("the faults that a tiny model has, on SmolLM2")
@pytest.mark.real_model
def test_four_faults_in_smollm2_on_mlx_are_named_and_nothing_else(
    smollm2_f32_gguf: Path, tmp_path: Path
) -> None:
    need_llama()
    import_gguf(smollm2_f32_gguf, tmp_path / "model", dtype="f32", packed=False)
    a, b = scenario("llama.cpp", smollm2_f32_gguf), scenario("mlx", tmp_path / "model")
    engine: Any = open_engine(b)
    four_faults(engine.loaded.model)
    verdict = explain(a, b, engine=(open_engine(a), engine), across_engines=True, repeats=1)
    assert (verdict.kind, verdict.rule) == ("bug", "role-outside"), verdict.sentence
    found = figures(verdict)
    named = [(each["run"], each["role"], each["layer"]) for each in found.outside_where]
    assert named == [
        ("b", "rope_q", 2),
        ("b", "rope_k", 2),
        ("b", "attention", 3),
        ("b", "gate", 5),
        ("b", "up", 5),
        ("b", "mlp_norm", 10),
    ]
    assert (found.outside_a, found.outside_b) == (0, 6)


def test_the_imported_directory_in_transformers_is_numerics_too(tmp_path: Path) -> None:
    need_llama()
    torch_or_skip()
    from transformers import AutoModelForCausalLM

    from detdiff.engines.transformers import TransformersEngine

    file = KnownModel(layers=2, kind="F16").write(tmp_path / "model.gguf")
    import_gguf(file, tmp_path / "model", dtype="f32", packed=False)
    asked = scenario("llama.cpp", file)
    other = TransformersEngine(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto"))
    sides = asked, scenario("transformers", tmp_path / "model")
    verdict = explain(*sides, engine=(open_engine(asked), other), across_engines=True, repeats=1)
    assert (verdict.kind, verdict.rule) == ("numerics", "roles"), (verdict.sentence, verdict.missing)
    assert figures(verdict).operations == {"a": 34, "b": 34}
