"""Rebuild a GGUF file's tokenizer as the files that mlx-lm loads, chat template included.

Byte-level BPE (GGUF calls it ``gpt2``): vocabulary and merges are in the file, the splitting rule by name. SentencePiece BPE
(``llama``): the file has pieces and scores, the merges are rebuilt. transformers' own converters give other ids, see
docs/decisions/0011-gguf-tokenizers.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from detdiff.engines.mlx.gguf_import.metadata import GgufFile
from detdiff.errors import GgufCorrupt, GgufUnsupported, words_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# How the models of the importable architectures end a turn or a text, besides what the metadata names.
TURN_ENDS = ("<|endoftext|>", "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end_of_text|>")
# Byte-level rules whose engines put the begin token before every text unless the file says otherwise.
BEGIN_BY_DEFAULT = ("llama-bpe",)
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
SPACE = "\u2581"


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


def write_tokenizer(file: GgufFile, directory: Path) -> bool:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json; returns whether there is a chat
    template.

    Raises:
        GgufUnsupported: the kind of tokenizer cannot be rebuilt.
        GgufCorrupt: the vocabulary contradicts itself.
    """
    vocabulary = read_vocabulary(file)
    tokenizer = _build(file, vocabulary)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        # A model-specific class would build its own pipeline in place of tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.metadata.get(f"{file.metadata['general.architecture']}.context_length"),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (number := vocabulary.special(theirs)) is not None:
            settings[f"{ours}_token"] = vocabulary.tokens[number]
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        settings["chat_template"] = template
    generation: dict[str, Any] = {"eos_token_id": vocabulary.stop_tokens()}
    if (begin := vocabulary.special("bos")) is not None:
        generation["bos_token_id"] = begin
    for name, content in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (directory / name).write_text(text + "\n", encoding="utf-8")
    return "chat_template" in settings


def _build(file: GgufFile, vocabulary: Vocabulary) -> Any:
    kind = file.metadata.get("tokenizer.ggml.model")
    try:
        if kind == "gpt2":
            tokenizer = byte_level_bpe(vocabulary)
            begin = file.metadata.get("tokenizer.ggml.pre") in BEGIN_BY_DEFAULT
        elif kind == "llama":
            gemma = file.metadata["general.architecture"] == "gemma3"
            vocabulary = visible_spaces(vocabulary)
            tokenizer, begin = sentencepiece_bpe(vocabulary, by_score=not gemma), True
        else:
            raise GgufUnsupported(
                f"{str(file.path)!r} has a tokenizer of the kind {kind!r}; `gpt2` (byte-level BPE) and "
                f"`llama` (SentencePiece BPE) can be rebuilt. Convert the original checkpoint with "
                f"`mlx_lm.convert`."
            )
        _add_tokens(tokenizer, vocabulary)
    except GgufUnsupported:
        raise
    except Exception as error:  # what the tokenizers library raises for lists that contradict each other
        raise GgufCorrupt(
            f"The tokenizer in {str(file.path)!r} contradicts itself: {words_of(error)}. "
            f"Fetch the file again, or convert the model again with a current converter."
        ) from error
    if vocabulary.flag("add_bos_token", begin):
        _begin_every_text(tokenizer, vocabulary)
    return tokenizer


def _add_tokens(tokenizer: Any, vocabulary: Vocabulary) -> None:
    from tokenizers import AddedToken

    before = tokenizer.get_vocab_size(with_added_tokens=False)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in vocabulary.of_type(CONTROL)]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in vocabulary.of_type(USER_DEFINED)]
    )
    if tokenizer.get_vocab_size(with_added_tokens=True) != before:
        raise ValueError("a control token is not in the vocabulary")


def _begin_every_text(tokenizer: Any, vocabulary: Vocabulary) -> None:
    from tokenizers import processors

    number = vocabulary.special("bos")
    if number is None:
        return
    token = vocabulary.tokens[number]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, number)]
    )


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


def visible_spaces(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary with runs of spaces, which gemma's files write with real spaces, spelled as they are met after
    normalising."""
    pieces = [SPACE * len(piece) if piece.strip(" ") == "" else piece for piece in vocabulary.tokens]
    return replace(vocabulary, tokens=pieces)


def sentencepiece_bpe(vocabulary: Vocabulary, by_score: bool) -> Any:
    """A ``tokenizers.Tokenizer`` without added tokens.

    With `by_score` a merge that makes a better-scored piece comes first, which is SentencePiece's own rule.
    Without, file order decides: gemma's scores are no merge order.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = vocabulary.tokens
    ids = {piece: number for number, piece in enumerate(pieces)}
    unknown = vocabulary.special("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=list(_merges(vocabulary, pieces, ids, by_score)),
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
            unk_token=None if unknown is None else pieces[unknown],
        )
    )
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
        decoding.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges(
    vocabulary: Vocabulary, pieces: list[str], ids: dict[str, int], by_score: bool
) -> Iterator[tuple[str, str]]:
    scores = vocabulary.metadata.get("tokenizer.ggml.scores")
    order = list(range(len(pieces)))
    if by_score and isinstance(scores, list) and len(scores) == len(pieces):
        order.sort(key=lambda number: -scores[number])
    for number in order:
        if vocabulary.types[number] in (CONTROL, BYTE, UNUSED):
            continue
        piece = pieces[number]
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        # Several splits of one piece: SentencePiece would meet the better, that is earlier, parts first.
        yield from sorted(
            ((left, right) for left, right in halves if left in ids and right in ids),
            key=lambda pair: (ids[pair[0]], ids[pair[1]]),
        )
