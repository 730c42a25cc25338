"""Torch for the tests that need it, and tiny models in it: one as it comes, one whose rows are computed one by one."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

VOCABULARY = 64
PROBLEM = "torch is not installed; `make test EXTRAS=dev,gguf,torch` installs it (on Linux, several GB)"


def need_torch() -> None:
    """Without torch the test is skipped, on CI it fails. Imports nothing."""
    if find_spec("torch") is None:
        if os.environ.get("CI"):
            pytest.fail(PROBLEM)
        pytest.skip(PROBLEM)


def torch_or_skip() -> Any:
    """The torch module; without it the test is skipped, on CI it fails."""
    need_torch()
    torch = import_module("torch")
    # One thread: the workers of a test run share the cores, and threads that wait for one another take them all.
    torch.set_num_threads(1)
    return torch


def tiny_llama(torch: Any) -> Any:
    """A random llama of two layers in transformers, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
        eos_token_id=None,
        bos_token_id=None,
    )
    return _larger(LlamaForCausalLM(config))


def tiny(torch: Any, name: str, **keys: Any) -> Any:
    """A random model of two layers of a class of transformers, float32; ``name`` is that of the class up to Config or ForCausalLM.

    Its inner width is no whole vectors of a processor, so that activations depend on where a row lies.
    """
    transformers = import_module("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=None,
        bos_token_id=None,
        **keys,
    )
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def tiny_moe(torch: Any) -> Any:
    """A random qwen3_moe of two layers with eight experts in transformers, float32."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        eos_token_id=None,
        bos_token_id=None,
    )
    return _larger(Qwen3MoeForCausalLM(config))


def _larger(model: Any) -> Any:
    """Weights larger than they come, so that tokens depend on the prompt."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.mul_(8)
    return model.eval()


def tiny_gemma3(torch: Any) -> Any:
    """A random gemma3 of a layer with a window of four positions and one without, float32."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Gemma3ForCausalLM(config).eval()


def row_by_row(torch: Any, model: Any) -> Any:
    """The model with every linear layer computed one row at a time, whatever the batch."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = _rows(torch, module)
    return model


def _rows(torch: Any, module: Any) -> Any:
    def forward(x: Any) -> Any:
        rows = [
            torch.nn.functional.linear(row[None], module.weight, module.bias)
            for row in x.reshape(-1, x.shape[-1])
        ]
        return torch.cat(rows).reshape(*x.shape[:-1], -1)

    return forward
