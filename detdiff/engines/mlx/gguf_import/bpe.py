"""Byte-level BPE tokenizers (GGUF calls them ``gpt2``): vocabulary and merges are in the file, the splitting
rule by name."""

from __future__ import annotations

from typing import Any

from detdiff.engines.mlx.gguf_import.vocabulary import UNUSED, Vocabulary
from detdiff.errors import GgufUnsupported

# The published splitting patterns of the Qwen 2 and Llama 3 tokenizers; they differ in how digits are
# grouped.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "qwen2": _WORDS % r"\p{N}",
    "deepseek-r1-qwen": _WORDS % r"\p{N}",
    "llama-bpe": _WORDS % r"\p{N}{1,3}",
}
SPLITTERS = ("gpt-2", "smollm", *_PATTERNS)


def byte_level_bpe(vocabulary: Vocabulary) -> Any:
    """A ``tokenizers.Tokenizer`` without added tokens.

    Raises:
        GgufUnsupported: the splitting rule is not one of `SPLITTERS`, or there are no merges.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    splitter = vocabulary.metadata.get("tokenizer.ggml.pre")
    merges = vocabulary.metadata.get("tokenizer.ggml.merges")
    if splitter not in SPLITTERS:
        raise GgufUnsupported(
            f"The file's tokenizer splits text by the rule {splitter!r} (tokenizer.ggml.pre); those that can "
            f"be rebuilt are {', '.join(SPLITTERS)}. Convert the original checkpoint with `mlx_lm.convert`."
        )
    if not isinstance(merges, list):
        raise GgufUnsupported(
            "The file's tokenizer has no merges (tokenizer.ggml.merges), so its text cannot be tokenized. "
            "Convert the model again with a current converter."
        )
    ids = {
        token: number for number, token in enumerate(vocabulary.tokens) if vocabulary.types[number] != UNUSED
    }
    pairs = [tuple(merge.split(" ")) for merge in merges]
    # Llama 3 takes a word that is a token as it is, even where no sequence of merges leads there.
    model = models.BPE(vocab=ids, merges=pairs, fuse_unk=False, ignore_merges=splitter == "llama-bpe")
    tokenizer = Tokenizer(model)
    if splitter == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(splitter)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(splitter: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if splitter == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if splitter == "smollm":
        parts = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    else:
        parts = [
            pre_tokenizers.Split(Regex(_PATTERNS[splitter]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    return pre_tokenizers.Sequence(parts)
