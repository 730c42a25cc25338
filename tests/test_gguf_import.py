"""The GGUF import against models that mlx-lm builds directly from the same weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from plugins.small_gguf import check_refusal, small_gguf
from plugins.small_models import (
    CONFIGS,
    build,
    logits,
)

import detdiff.engines.mlx.gguf_import as importer
from detdiff.engines.mlx.gguf_import import import_gguf
from detdiff.engines.mlx.gguf_import.metadata import llama3_divisors
from detdiff.engines.mlx.gguf_import.weights import half_split, write_shards
from detdiff.engines.mlx.model import encode, identity, load
from detdiff.errors import (
    GgufUnsupported,
)
from detdiff_kernels.rounding import narrow

TOKENS = [5, 40, 77, 12, 200, 3, 99, 140, 7, 8, 9, 61]


def imported_logits(path: Path) -> np.ndarray[Any, Any]:
    return logits(load(str(path)).model, TOKENS)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_equal_a_model_built_directly(architecture: str, tmp_path: Path) -> None:
    small = small_gguf(architecture)
    summary = import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m", dtype="f32", packed=False)
    assert summary.architecture == architecture
    assert summary.model_type == small.config["model_type"]
    assert summary.tensors == len(small.weights)
    assert summary.packed == 0
    assert summary.bytes == sum(values.nbytes for values in small.weights.values())
    np.testing.assert_array_equal(
        imported_logits(tmp_path / "m"), logits(build(small.config, small.weights), TOKENS)
    )


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_logits_equal_in_half_precision(dtype: str, tmp_path: Path) -> None:
    small = small_gguf("llama")
    import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m", dtype=dtype)
    direct = build(small.config, small.weights)
    direct.set_dtype({"bf16": mx.bfloat16, "f16": mx.float16}[dtype])
    np.testing.assert_array_equal(imported_logits(tmp_path / "m"), logits(direct, TOKENS))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_0"])
def test_unpacked_blocks_equal_the_reference_package(kind: str, tmp_path: Path) -> None:
    small = small_gguf("llama")
    matrices = [name for name, values in small.weights.items() if values.ndim == 2]
    small.kinds = dict.fromkeys(matrices, kind)
    import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m", dtype="f32")
    number = gguf.GGMLQuantizationType[kind]
    rounded = small.weights | {
        name: dequantize(quantize(small.weights[name], number), number) for name in matrices
    }
    # Whole rows are blocks of their own, so moving rows and rounding them commute.
    np.testing.assert_array_equal(
        imported_logits(tmp_path / "m"), logits(build(small.config, rounded), TOKENS)
    )


def test_a_llama_that_is_not_interleaved_comes_out_wrong(tmp_path: Path) -> None:
    small = small_gguf("llama")
    small.interleave = False
    import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m", dtype="f32")
    expected = logits(build(small.config, small.weights), TOKENS)
    assert not np.array_equal(imported_logits(tmp_path / "m"), expected)


def test_leaving_out_the_half_split_changes_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = small_gguf("llama")
    monkeypatch.setattr("detdiff.engines.mlx.gguf_import.weights.half_split", lambda values, heads: values)
    import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m", dtype="f32")
    expected = logits(build(small.config, small.weights), TOKENS)
    assert not np.array_equal(imported_logits(tmp_path / "m"), expected)


def test_half_split_of_one_head() -> None:
    assert half_split(np.arange(6), 1).tolist() == [0, 2, 4, 1, 3, 5]
    assert half_split(np.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_llama_with_biases(tmp_path: Path) -> None:
    small = small_gguf("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    assert "model.layers.0.self_attn.q_proj.bias" in small.weights
    import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m", dtype="f32")
    np.testing.assert_array_equal(
        imported_logits(tmp_path / "m"), logits(build(small.config, small.weights), TOKENS)
    )


@pytest.mark.parametrize("architecture", CONFIGS)
def test_packed_equals_unpacked(architecture: str, tmp_path: Path) -> None:
    small = small_gguf(architecture)
    matrices = [name for name, values in small.weights.items() if values.ndim == 2]
    kinds = ["Q4_1", "Q4_0", "Q8_0", "F16"]
    small.kinds = {name: kinds[place % 4] for place, name in enumerate(matrices)}
    source = small.write(tmp_path / "m.gguf")
    summary = import_gguf(source, tmp_path / "packed", dtype="f32", packed=True)
    import_gguf(source, tmp_path / "plain", dtype="f32")
    assert summary.packed == sum(small.kinds[name] != "F16" for name in matrices)
    packed, plain = load(str(tmp_path / "packed")).model, load(str(tmp_path / "plain")).model
    modules = {name: module for name, module in packed.named_modules() if "scales" in module}
    assert len(modules) == summary.packed
    dense = dict(plain.named_modules())
    for name, module in modules.items():
        values = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
        np.testing.assert_array_equal(np.array(values), np.array(dense[name].weight), err_msg=name)
        assert module.bits == (8 if small.kinds[f"{name}.weight"] == "Q8_0" else 4)


@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["Q4_0", "Q4_1", "Q8_0"]))
def test_any_block_bits_keep_their_value(seed: int, kind: str) -> None:
    from detdiff.engines.mlx.gguf_import.metadata import GgufTensor
    from detdiff.engines.mlx.gguf_import.weights import pack

    rng = np.random.default_rng(seed)
    number = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[number][1]
    data = rng.integers(0, 256, (2, 3 * size), dtype=np.uint8)
    for offset in (0, 2) if kind == "Q4_1" else (0,):
        halves = rng.normal(0, 1, (2, 3)).astype(np.float16)
        data.reshape(2, 3, size)[..., offset : offset + 2] = halves[..., None].view(np.uint8)
    packed = pack(GgufTensor("x.weight", kind, (2, 96), data))
    words, factors, offsets = mx.array(packed.packed), mx.array(packed.scales), mx.array(packed.biases)
    values = mx.dequantize(words, factors, offsets, 32, packed.bits)
    np.testing.assert_array_equal(np.array(values), dequantize(data, number))


def test_packing_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GgufUnsupported, match="without packing") as caught:
        import_gguf(small_gguf("qwen3").write(tmp_path / "m.gguf"), tmp_path / "m", packed=True)
    check_refusal(caught.value, tmp_path)


def test_the_same_import_gives_the_same_bytes(tmp_path: Path) -> None:
    source = small_gguf("gemma3").write(tmp_path / "m.gguf")
    for name in ("a", "b"):
        import_gguf(source, tmp_path / name)
    first, second = identity(tmp_path / "a"), identity(tmp_path / "b")
    assert first | {"name": ""} == second | {"name": ""}


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = small_gguf("llama")
    monkeypatch.setattr(importer, "write_shards", partial(write_shards, shard_bytes=50_000))
    import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m", dtype="f32")
    files = sorted(file.name for file in (tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == small.weights.keys()
    np.testing.assert_array_equal(
        imported_logits(tmp_path / "m"), logits(build(small.config, small.weights), TOKENS)
    )


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_bfloat16_rounding_equals_mlx(bits: list[int]) -> None:
    values = np.array(bits, dtype=np.uint32).view(np.float32)
    ours = narrow(values, "bfloat16")
    theirs = np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16))
    nan = np.isnan(values)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    assert np.isnan((ours[nan].astype(np.uint32) << 16).view(np.float32)).all()


def test_value_too_large_for_float16(tmp_path: Path) -> None:
    small = small_gguf("llama")
    small.weights["model.norm.weight"][3] = 70000
    with pytest.raises(GgufUnsupported, match=r"model.norm.weight holds 70000.*bf16 or f32") as caught:
        import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m", dtype="f16")
    check_refusal(caught.value, tmp_path)


# Rotary scaling


def test_llama3_scaling_is_recovered(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    small = small_gguf("llama", rope_theta=500000.0, rope_scaling=scaling)
    small.extra["rope_freqs.weight"] = llama3_divisors(500000.0, 16, 32.0).astype(np.float32)
    import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m", dtype="f32")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["rope_scaling"] == scaling
    scaled = logits(build(small.config, small.weights), TOKENS)
    np.testing.assert_array_equal(imported_logits(tmp_path / "m"), scaled)
    plain = logits(build(small.config | {"rope_scaling": None}, small.weights), TOKENS)
    assert not np.array_equal(scaled, plain)


def test_llama3_divisors_are_those_that_mlx_lm_applies() -> None:
    from mlx_lm.models.rope_utils import Llama3RoPE

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    periods = Llama3RoPE(128, base=500000.0, scaling_config=scaling)._freqs
    unscaled = 500000.0 ** (np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(np.array(periods) / unscaled, llama3_divisors(500000.0, 128, 8.0), rtol=1e-5)


def test_linear_scaling(tmp_path: Path) -> None:
    small = small_gguf("qwen3", rope_scaling={"rope_type": "linear", "factor": 4.0})
    small.metadata = {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 4.0}
    import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m", dtype="f32")
    np.testing.assert_array_equal(
        imported_logits(tmp_path / "m"), logits(build(small.config, small.weights), TOKENS)
    )


def answer(path: Path, prompt: str, count: int) -> str:
    from mlx_lm import generate

    loaded = load(str(path))
    text: str = generate(loaded.model, loaded.tokenizer, encode(loaded, prompt, chat=True), max_tokens=count)
    return text


@pytest.mark.thorough
def test_real_model_knows_the_capital_of_france(smollm2_packed_f32: Path) -> None:
    assert "Paris" in answer(smollm2_packed_f32, "What is the capital of France?", 16)


@pytest.mark.thorough
def test_real_packed_blocks_equal_the_unpacked_ones(smollm2_packed_f32: Path, smollm2_bf16: Path) -> None:
    packed, plain = load(str(smollm2_packed_f32)), load(str(smollm2_bf16))
    assert packed.identity["quantization"] == "affine 4-bit group 32; 1 module(s) affine 8-bit group 32"
    assert packed.identity["tokenizer_sha256"] == plain.identity["tokenizer_sha256"]
    dense = dict(plain.model.named_modules())
    modules = [(name, module) for name, module in packed.model.named_modules() if "scales" in module]
    assert len(modules) == 211
    for name, module in modules:
        values = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
        assert mx.array_equal(values.astype(mx.bfloat16), dense[name].weight), name
