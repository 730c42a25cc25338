"""Rebuild a GGUF file's tokenizer as the files that mlx-lm loads, chat template included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from detdiff.engines.mlx.gguf_import.bpe import byte_level_bpe
from detdiff.engines.mlx.gguf_import.container import GgufFile
from detdiff.engines.mlx.gguf_import.spm import sentencepiece_bpe, visible_spaces
from detdiff.engines.mlx.gguf_import.vocabulary import CONTROL, USER_DEFINED, Vocabulary, read_vocabulary
from detdiff.errors import GgufCorrupt, GgufUnsupported

# Byte-level rules whose engines put the begin token before every text unless the file says otherwise.
BEGIN_BY_DEFAULT = ("llama-bpe",)


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
            f"The tokenizer in {str(file.path)!r} contradicts itself: {' '.join(str(error).split())[:300]}. "
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
