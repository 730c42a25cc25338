"""The metadata keys of a GGUF file's own architecture, read with their kinds checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from detdiff.engines.mlx.gguf_import.container import GgufFile
from detdiff.errors import GgufCorrupt, GgufUnsupported

# Architecture as GGUF names it: (model_type in mlx-lm, class name in config.json).
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}


class Metadata:
    """The keys of a file's own architecture, with their kinds checked."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        named = file.metadata.get("general.architecture")
        if not isinstance(named, str) or named not in ARCHITECTURES:
            raise GgufUnsupported(
                f"{str(file.path)!r} has the architecture {named!r}. Those that can be imported "
                f"are {', '.join(ARCHITECTURES)}. For another one, convert its original checkpoint with "
                f"`mlx_lm.convert`."
            )
        self.architecture = named

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number that is the same for all layers."""
        value = self.get(key, default)
        if isinstance(value, list):
            raise self.unsupported(f"its {key} differs by layer")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.corrupt(key, "a positive whole number", value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A real number: the shortest decimal that gives the file's float32, so 1e-05 and not
        9.9999997e-06."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.corrupt(key, "a number", value)
        return float(str(np.float32(value)))

    def corrupt(self, key: str, expected: str, found: Any) -> GgufCorrupt:
        state = "there is none" if found is None else f"it says {found!r}"
        return GgufCorrupt(
            f"{str(self.file.path)!r} should give {expected} under {self.architecture}.{key}, and {state}. "
            f"Convert the model again with a current converter."
        )

    def unsupported(self, what: str) -> GgufUnsupported:
        return GgufUnsupported(
            f"{str(self.file.path)!r} ({self.architecture}) cannot be imported exactly: {what}, and mlx-lm's "
            f"{ARCHITECTURES[self.architecture][0]} has no counterpart. Convert the original checkpoint with "
            f"`mlx_lm.convert`."
        )
