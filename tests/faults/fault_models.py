"""The fixtures of the injected cases: T, S, G and H, random weights in mlx-lm's own classes, and scenarios over them."""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from tiny import CONFIGS, TinyTokenizer

from detdiff.engines.mlx.model import LoadedModel
from detdiff.scenario import Scenario

LENGTHS = (12, 3, 40)
FIXTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "T": ("llama", {**CONFIGS["llama"], "vocab_size": 100}),
    "S": ("llama", {**CONFIGS["llama"], "vocab_size": 512, "num_hidden_layers": 4}),
    "G": ("gemma3_text", CONFIGS["gemma3_text"]),
    "H": ("qwen3_next", CONFIGS["qwen3_next"]),
    # Heads of 64, which MLX's quantised caches can group.
    "wide": ("llama", {**CONFIGS["llama"], "vocab_size": 100, "hidden_size": 256}),
    # A width that is no multiple of 64.
    "odd": ("llama", {**CONFIGS["llama"], "vocab_size": 100, "intermediate_size": 150}),
}
SLIDING = (0, 1, 3, 4)
"""The layers of G that keep a ring of WINDOW entries."""
WINDOW = 16
_DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16, "q4": mx.float32}
_PROFILE = Path(__file__).parent / "threshold.toml"


@lru_cache(maxsize=64)
def fixture(name: str, fmt: str = "f32", seed: int = 0) -> LoadedModel:
    """A fixture with weights of ``seed``; q4 is 4-bit in groups of 32. Injected faults have to leave it as they found it."""
    arch, config = FIXTURES[name]
    module = importlib.import_module(f"mlx_lm.models.{arch}")
    mx.random.seed(seed)
    built = module.Model(module.ModelArgs.from_dict(config))
    # Larger than the default initialisation: logits then differ enough that text is not one repeated token.
    built.update(tree_map(lambda p: p * 2.5 if p.ndim == 2 else p, built.parameters()))
    if fmt == "q4":
        nn.quantize(built, group_size=32, bits=4, class_predicate=_quantisable)
    if _DTYPES[fmt] != mx.float32:
        built.set_dtype(_DTYPES[fmt])
    mx.eval(built.parameters())
    built.eval()
    identity = {
        "name": f"{name}-{fmt}-{seed}",
        "model_type": arch,
        "vocab_size": config["vocab_size"],
        "weights": f"{name}-{fmt}-{seed}",
        "n_layers": config["num_hidden_layers"],
    }
    return LoadedModel(built, TinyTokenizer(), Path(name), identity, config)


def _quantisable(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def threshold(limit: int) -> str:
    """The kernel plan of S: linear calls of at most ``limit`` rows sum K in 32 lanes and a tree, others in one chain."""
    return f"{_PROFILE}:chain_from={limit + 1}"


def prompt(length: int, seed: object, vocab: int = 96) -> list[int]:
    """Random token ids; every fixture's vocabulary has them."""
    draw = random.Random(f"prompt {seed}")
    return [draw.randrange(vocab) for _ in range(length)]


def scenario(
    seed: int,
    schedule: str = "serial",
    layout: str = "padded",
    *,
    lengths: Sequence[int] = LENGTHS,
    arrivals: Sequence[int] = (),
    **keys: Any,
) -> Scenario:
    """Requests r0, r1, ... with random prompts of these lengths; other keys are those of a scenario file."""
    requests = [{"id": f"r{i}", "tokens": prompt(n, (seed, i))} for i, n in enumerate(lengths)]
    for request, arrival in zip(requests, arrivals, strict=False):
        request["arrival"] = arrival
    given = {"model": "fixture", "schedule": schedule, "layout": layout, "max_tokens": 8, "request": requests}
    return Scenario.from_dict({**given, **keys})
