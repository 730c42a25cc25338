"""The vocabulary of a GGUF file: tokens, their types and the special ids, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from detdiff.engines.mlx.gguf_import.container import GgufFile
from detdiff.errors import GgufCorrupt, GgufUnsupported

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# How the models of the importable architectures end a turn or a text, besides what the metadata names.
TURN_ENDS = ("<|endoftext|>", "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end_of_text|>")


@dataclass(frozen=True)
class Vocabulary:
    """tokens and types: one per id. metadata: the whole file's."""

    tokens: list[str]
    types: list[int]
    metadata: dict[str, Any]

    def special(self, name: str) -> int | None:
        """The id that the metadata gives as ``tokenizer.ggml.<name>_token_id``."""
        token = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return token if isinstance(token, int) and 0 <= token < len(self.tokens) else None

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{name}", default))

    def of_type(self, kind: int) -> list[str]:
        return [token for token, own in zip(self.tokens, self.types, strict=True) if own == kind]

    def stop_tokens(self) -> list[int]:
        """Every id that ends a generated text, ascending."""
        named = {self.special(name) for name in ("eos", "eot", "eom")} - {None}
        spelled = {
            number
            for number, token in enumerate(self.tokens)
            if token in TURN_ENDS and self.types[number] in (CONTROL, USER_DEFINED)
        }
        return sorted(number for number in named | spelled if number is not None)


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """The vocabulary in `file`.

    Raises:
        GgufUnsupported: the file has no tokenizer.
        GgufCorrupt: its lists do not fit each other or the embedding matrix.
    """
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise GgufUnsupported(
            f"{str(file.path)!r} has no tokenizer (no tokenizer.ggml.tokens). Give the main file of the "
            f"model, not an adapter or a projector."
        )
    types = file.metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    rows = file.tensors["token_embd.weight"].shape[0]
    if not isinstance(types, list) or len(types) != len(tokens) or len(tokens) > rows:
        raise GgufCorrupt(
            f"{str(file.path)!r} does not fit together: {len(tokens)} tokens, "
            f"{len(types) if isinstance(types, list) else 0} token types and {rows} embedding rows. Convert "
            f"the model again with a current converter."
        )
    return Vocabulary(tokens, types, file.metadata)
