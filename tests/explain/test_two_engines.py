"""Two engines on one model's file: sound ones are numerics, a fault in one of them is a bug at its operation in that engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from decoders import CONFIGS, INNER, WIDTH, directory, in_torch, on_mlx
from numpy.typing import NDArray
from tiers import only_in_full, some_now

from detdiff import Scenario, Verdict, explain, record
from detdiff.engines.base import Engine
from detdiff.explain.controls.roles import RolesFigures

Fault = Callable[[Any], None]
PROMPT = (3, 14, 15, 9, 26, 5, 35)


def explained(a: Engine, b: Engine, **options: Any) -> Verdict:
    asked = Scenario.from_dict(
        {"model": "small", "request": [{"tokens": list(PROMPT)}], "max_tokens": 4, "ignore_stop": True}
    )
    sides = [asked.with_changes(engine=engine.name) for engine in (a, b)]
    return explain(*sides, engine=(a, b), across_engines=True, repeats=1, **options)


def found(verdict: Verdict) -> RolesFigures:
    control = verdict.control("roles")
    assert control is not None and isinstance(control.detail, RolesFigures), control
    return control.detail


def layers(model: Any) -> Any:
    return model.layers if isinstance(model, nn.Module) else model.model.layers


def other_base(model: Any) -> None:
    if isinstance(model, nn.Module):
        for layer in layers(model):
            layer.self_attn.rope.base = 1000000.0
    else:
        import torch

        rotary = model.model.rotary_emb
        rotary.inv_freq = 1000000.0 ** -(torch.arange(0, WIDTH, 2).float() / WIDTH)


def swapped(model: Any) -> None:
    mlp = layers(model)[1].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def no_norm_weight(model: Any) -> None:
    norm = layers(model)[1].post_attention_layernorm
    if isinstance(model, nn.Module):
        norm.weight = mx.ones_like(norm.weight)
    else:
        norm.weight.data.fill_(1.0)


def no_one_more(model: Any) -> None:
    """Gemma's norms multiply by one more than what the file holds."""
    norm = layers(model)[1].post_attention_layernorm
    if isinstance(model, nn.Module):
        norm.weight = norm.weight - 1.0
    else:
        norm.weight.data.sub_(1.0)


def other_scale(model: Any) -> None:
    attention = layers(model)[0].self_attn
    name = "scale" if isinstance(model, nn.Module) else "scaling"
    setattr(attention, name, WIDTH**-1.0)


FAULTS: dict[str, tuple[str, Fault, str, int]] = {
    "another RoPE base": ("llama", other_base, "rope_q", 0),
    "gate and up swapped": ("llama", swapped, "gate", 1),
    "a norm without its weight": ("llama", no_norm_weight, "mlp_norm", 1),
    "a norm without plus one": ("gemma", no_one_more, "mlp_norm", 1),
    "another attention scale": ("llama", other_scale, "attention", 0),
}


@pytest.mark.parametrize(
    ("name", "side"),
    # Each fault in one of the engines; the thorough tier has it in the other one too.
    some_now(
        [(name, side) for name in FAULTS for side in "ab"],
        *range(0, 2 * len(FAULTS), 4),
        *range(3, 2 * len(FAULTS), 4),
    ),
)
def test_a_fault_in_either_engine_is_named_there(name: str, side: str, tmp_path: Path) -> None:
    kind, fault, role, layer = FAULTS[name]
    path = directory(tmp_path / "model", kind)
    make = {"a": on_mlx, "b": in_torch}
    engines = [make[each](path, fault if each == side else None) for each in "ab"]
    verdict = explained(*engines)
    assert (verdict.kind, verdict.rule) == ("bug", "role-outside"), verdict.sentence
    first = found(verdict).outside_where[0]
    assert (first["run"], first["role"], first["layer"]) == (side, role, layer)
    assert first["engine"] == {"a": "mlx", "b": "transformers"}[side]
    assert f"{role} of layer {layer} in run {side}" in verdict.sentence
    assert (found(verdict).outside_a == 0) == (side == "b") and not found(verdict).shared
    said = " ".join(str(verdict).split())
    assert f"outside: {role} of layer {layer} in run {side}" in said and "outside (a / b)" in said
    # Where an operation is right given its inputs, nothing that follows from the fault is blamed.
    assert {each["run"] for each in found(verdict).outside_where} == {side}


def in_another_order(model: Any) -> None:
    """The activation of up times gate: every matrix is right, and each is given what it should be."""

    class Other(type(layers(model)[0].mlp)):  # type: ignore[misc]
        def __call__(self, x: Any) -> Any:
            return self.down_proj(nn.silu(self.up_proj(x)) * self.gate_proj(x))

    layers(model)[0].mlp.__class__ = Other


def no_skip(model: Any) -> None:
    """The stream after attention lacks what came before it."""

    class Other(type(layers(model)[0])):  # type: ignore[misc]
        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            h = self.self_attn(self.input_layernorm(x), mask, cache)
            return h + self.mlp(self.post_attention_layernorm(h))

    layers(model)[0].__class__ = Other


def late(model: Any) -> None:
    """Positions counted from one."""
    rope = layers(model)[0].self_attn.rope

    class Other(type(rope)):  # type: ignore[misc]
        def __call__(self, x: Any, offset: Any = 0) -> Any:
            return super().__call__(x, offset=offset + 1)

    rope.__class__ = Other


@pytest.mark.parametrize(
    ("fault", "role"), [(in_another_order, "activation"), (no_skip, "residual"), (late, "rope_q")]
)
def test_a_fault_between_operations_is_named(fault: Fault, role: str, tmp_path: Path) -> None:
    path = directory(tmp_path / "model")
    verdict = explained(on_mlx(path), on_mlx(path, fault))
    assert verdict.kind == "bug", verdict.sentence
    first = found(verdict).outside_where[0]
    assert (first["run"], first["role"], first["layer"]) == ("b", role, 0)


@pytest.mark.parametrize("dtype", some_now(["float32", "bfloat16"], 1))
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gemma"])
def test_sound_engines_are_numerics_with_every_operation_inside(
    name: str, dtype: str, tmp_path: Path
) -> None:
    path = directory(tmp_path / "model", name, dtype)
    verdict = explained(on_mlx(path), in_torch(path))
    assert (verdict.kind, verdict.rule) == ("numerics", "roles"), (verdict.sentence, verdict.missing)
    roles = found(verdict)
    assert roles.operations == dict.fromkeys("ab", 38 if name == "qwen3" else 34)
    assert roles.outside_a == roles.outside_b == 0 and not roles.not_judged
    # The last row of the prompt is the first that has logits, and rows that decode are judged too.
    assert {len(PROMPT) - 1, len(PROMPT)} <= set(roles.positions)
    assert all(each["worst_a"] <= 1 and each["worst_b"] <= 1 for each in roles.roles)


def test_gemma_is_numerics_where_its_file_says_which_activation(tmp_path: Path) -> None:
    told = directory(tmp_path / "told", "gemma", hidden_activation="gelu_pytorch_tanh")
    verdict = explained(in_torch(told), in_torch(told, attention="sdpa"))
    assert verdict.kind == "numerics", (verdict.sentence, verdict.missing)
    # The file says gelu, and engines take that for two things: neither is blamed.
    other = directory(tmp_path / "other", "gemma")
    verdict = explained(on_mlx(other), in_torch(other))
    assert (verdict.kind, verdict.rule) == ("undetermined", "engines")
    assert found(verdict).operations == {"a": 32, "b": 32} and "says gelu" in verdict.missing[0]


def test_another_attention_kernel_and_another_dtype_are_inside_too(tmp_path: Path) -> None:
    whole, half = directory(tmp_path / "whole"), directory(tmp_path / "half", dtype="bfloat16")
    verdict = explained(on_mlx(whole), in_torch(half, attention="sdpa"))
    assert verdict.kind == "numerics", (verdict.sentence, verdict.missing)
    assert found(verdict).nearer == "a" and "run a (mlx) is nearer to float64" in verdict.sentence


@pytest.mark.thorough
def test_a_head_that_the_file_holds_beside_a_tied_one_is_not_what_is_judged_by(tmp_path: Path) -> None:
    def untied(made: dict[str, NDArray[np.float32]]) -> None:
        made["lm_head.weight"] = made["model.embed_tokens.weight"] * 2

    path = directory(tmp_path / "model", "tied", changed=untied)
    verdict = explained(on_mlx(path), on_mlx(path, swapped))
    assert [each["role"] for each in found(verdict).outside_where] == ["gate", "up"]


@pytest.mark.thorough
def test_a_run_that_was_fed_given_tokens_is_judged_by_what_it_was_fed(tmp_path: Path) -> None:
    path = directory(tmp_path / "model")
    other = directory(tmp_path / "other", changed=larger)
    asked = Scenario.from_dict(
        {"model": "small", "request": [{"tokens": list(PROMPT)}], "max_tokens": 6, "ignore_stop": True}
    )
    engines = on_mlx(path), on_mlx(path)
    fed = record(asked, tmp_path / "fed", engine=on_mlx(other, swapped))
    own = record(asked, tmp_path / "own", engine=engines[0])
    assert fed.generated().token.tolist() != own.generated().token.tolist()
    forced = asked.with_changes(force_tokens=str(tmp_path / "fed"), layout="packed")
    verdict = explain(
        forced, forced, engine=(engines[0], on_mlx(path, other_scale)), across_engines=True, repeats=1
    )
    assert {(each["run"], each["role"]) for each in found(verdict).outside_where} == {("b", "attention")}


def test_rows_beyond_a_window_are_not_judged(tmp_path: Path) -> None:
    from detdiff.explain.decoder import LlamaDecoder
    from detdiff.explain.model_file import ModelFile
    from detdiff.explain.role_scores import last_position

    path = directory(tmp_path / "model")
    trace = record(
        Scenario.from_dict({"model": "small", "request": [{"tokens": list(PROMPT)}], "max_tokens": 4}),
        tmp_path / "trace",
        engine=on_mlx(path),
    )
    whole = LlamaDecoder(ModelFile.open(path))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"sliding_window": 4, "use_sliding_window": True}))
    assert (last_position(trace, 0, whole), last_position(trace, 0, LlamaDecoder(ModelFile.open(path)))) == (
        10,
        3,
    )


def larger(made: dict[str, NDArray[np.float32]]) -> None:
    made["model.layers.1.mlp.up_proj.weight"] *= np.float32(1.01)


def test_two_files_of_which_one_is_another_model_are_configuration(tmp_path: Path) -> None:
    path = directory(tmp_path / "model")
    for n, (other, said) in enumerate(
        (
            (directory(tmp_path / "base", rope_theta=20000.0), "rope_base is 10000.0 in a and 20000.0 in b"),
            (directory(tmp_path / "up", changed=larger), "the weights of up of layer 1 are not the same"),
            (
                directory(tmp_path / "eps", rms_norm_eps=1e-3),
                "eps is 1e-05 in a and 0.001 in b",
            ),
        )
    ):
        verdict = explained(on_mlx(path), on_mlx(other))
        assert (verdict.kind, verdict.rule) == ("configuration", "other-files"), (n, verdict.sentence)
        assert said in verdict.sentence


def test_what_both_engines_do_otherwise_than_the_file_is_no_bug_of_one(tmp_path: Path) -> None:
    path = directory(tmp_path / "model")
    a, b = on_mlx(path), in_torch(path)
    # Read after both were loaded: as if the oracle took the file for something else than both engines do.
    shutil.rmtree(path)
    directory(path, rope_theta=20000.0)
    verdict = explained(a, b)
    assert (verdict.kind, verdict.rule) == ("undetermined", "engines")
    assert any("rope_q of layer 0" in each and "both engines share" in each for each in verdict.missing)


def test_an_operation_that_is_at_no_site_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from detdiff.engines.mlx.taps import sites

    monkeypatch.delitem(sites.ROLES, "activation")
    path = directory(tmp_path / "model")
    verdict = explained(on_mlx(path), in_torch(path))
    assert (verdict.kind, verdict.rule) == ("undetermined", "engines")
    assert found(verdict).operations == {"a": 30, "b": 34}
    assert any("activation of layer 0" in each and "no site of mlx" in each for each in verdict.missing)


def test_a_token_that_its_own_logits_do_not_choose_is_a_bug(tmp_path: Path) -> None:
    path = directory(tmp_path / "model")
    engine: Any = in_torch(path)
    whole = engine.model.generate

    def second(*args: Any, **kwargs: Any) -> Any:
        """Takes the second best token once."""

        def lower(so_far: Any, scores: Any) -> Any:
            if so_far.shape[1] != len(PROMPT) + 1:
                return scores
            return scores.scatter(1, scores.argmax(dim=1, keepdim=True), -1e9)

        return whole(*args, **{**kwargs, "logits_processor": [lower]})

    engine.model.generate = second
    verdict = explained(on_mlx(path), engine)
    assert verdict.kind == "bug" and "token 1 of r0 in run b (transformers)" in verdict.sentence


@pytest.mark.thorough
def test_models_and_files_that_are_not_known_are_not_judged(tmp_path: Path) -> None:
    path = directory(tmp_path / "model")
    a, b = on_mlx(path), on_mlx(path, other_scale)
    config = (path / "config.json").read_text()
    for text, why in (
        (config.replace('"llama"', '"phi3"', 1), "of type 'phi3'"),
        (config.replace('"silu"', '"relu"'), "activation is 'relu'"),
        ("{", "cannot be read"),
    ):
        (path / "config.json").write_text(text)
        verdict = explained(a, b)
        assert verdict.kind == "undetermined" and any(why in each for each in verdict.missing), (
            verdict.missing
        )


def test_controls_of_one_engine_are_left_out_and_one_engine_is_not_judged_by_role(tmp_path: Path) -> None:
    path = directory(tmp_path / "model")
    engine, wrong = on_mlx(path), on_mlx(path, other_scale)
    verdict = explained(engine, wrong)
    assert [control.name for control in verdict.controls] == ["repeat", "roles"]
    asked = Scenario.from_dict({"model": "small", "request": [{"tokens": list(PROMPT)}], "max_tokens": 2})
    plain = explain(asked, asked, engine=(engine, wrong), repeats=1, controls=["roles"])
    control = plain.control("roles")
    assert control is not None and control.result == "not_run" and "across_engines" in control.sentence


def test_a_matrix_is_read_as_the_file_has_it(tmp_path: Path) -> None:
    from decoders import weights

    from detdiff.explain.bounds import exact_weight
    from detdiff.explain.model_file import ModelFile

    file = ModelFile.open(directory(tmp_path / "model", "gemma"))
    made = weights("gemma")
    assert (file.configuration.inner, file.configuration.norm_offset) == (INNER, 1.0)
    up = exact_weight(file.weight("up", 1))
    assert np.array_equal(up, made["model.layers.1.mlp.up_proj.weight"].astype(np.float64))
    norm = file.norm("mlp_norm", 0)
    assert norm is not None
    assert np.array_equal(
        norm[0], 1.0 + made["model.layers.0.post_attention_layernorm.weight"].astype(np.float64)
    )


@only_in_full("what a tiny model shows, on SmolLM2 in torch")
@pytest.mark.real_model
def test_smollm2_in_mlx_and_in_torch_is_numerics(smollm2_bf16: Path) -> None:
    verdict = explained(on_mlx(smollm2_bf16), in_torch(smollm2_bf16, attention="sdpa"))
    assert (verdict.kind, verdict.rule) == ("numerics", "roles"), (verdict.sentence, verdict.missing)
    assert found(verdict).operations == {"a": 454, "b": 454}
