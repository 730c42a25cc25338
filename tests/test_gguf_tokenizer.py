"""The tokenizers that a GGUF import rebuilds, against the libraries that made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.small_gguf import CONTROL, NORMAL, add_byte_level, small_gguf
from plugins.small_models import (
    TEXT,
    small_tokenizer,
)

from detdiff.engines.mlx.gguf_import import import_gguf
from detdiff.engines.mlx.model import encode, load


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("byte_level")
    import_gguf(small_gguf("llama").write(folder / "m.gguf"), folder / "m")
    return load(str(folder / "m"))


@given(st.text(max_size=40) | st.sampled_from(TEXT))
def test_byte_level_tokenizer_has_a_round_trip(byte_level: Any, text: str) -> None:
    ids = byte_level.tokenizer.encode(text)
    assert ids == small_tokenizer().encode(text).ids
    assert byte_level.tokenizer.decode(ids) == text


def test_chat_template_and_stop_tokens(byte_level: Any) -> None:
    ids = encode(byte_level, "Hello", chat=True)
    assert byte_level.tokenizer.decode(ids) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == small_tokenizer().token_to_id("<|im_start|>")
    assert byte_level.tokenizer.eos_token_ids == {0, 2}


@pytest.mark.parametrize(
    ("splitter", "expected"),
    [
        ("gpt-2", ["Ab", "Ġ1234", "Ġit", "'s"]),
        ("smollm", ["Ab", "Ġ", "1", "2", "3", "4", "Ġit", "'s"]),
        ("qwen2", ["Ab", "Ġ", "1", "2", "3", "4", "Ġit", "'s"]),
        ("llama-bpe", ["Ab", "Ġ", "123", "4", "Ġit", "'s"]),
    ],
)
def test_splitting_rules(splitter: str, expected: list[str], tmp_path: Path) -> None:
    small = small_gguf("llama")
    small.splitter = splitter
    import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m")
    backend = load(str(tmp_path / "m")).tokenizer._tokenizer.backend_tokenizer
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("Ab 1234 it's")] == expected


@pytest.mark.parametrize(("flag", "added"), [(True, 1), (False, 0)])
def test_begin_token_is_added_when_the_file_says_so(flag: bool, added: int, tmp_path: Path) -> None:
    def tokenizer(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, small_tokenizer(), "gpt-2")
        writer.add_bos_token_id(1)
        writer.add_add_bos_token(flag)

    small = small_gguf("llama")
    small.tokenizer = tokenizer
    import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m")
    ids = load(str(tmp_path / "m")).tokenizer.encode("word")
    assert ids == [1] * added + small_tokenizer().encode("word").ids


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizer_equals_the_original(prefix: bool, tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text").write_text("\n".join(TEXT * 4))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "spm"),
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    size = original.get_piece_size()

    def kind(number: int) -> int:
        if original.is_unknown(number):
            return 2
        return CONTROL if original.is_control(number) else 6 if original.is_byte(number) else NORMAL

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([original.id_to_piece(number) for number in range(size)])
        writer.add_token_scores([original.get_score(number) for number in range(size)])
        writer.add_token_types([kind(number) for number in range(size)])
        writer.add_unk_token_id(original.unk_id())
        writer.add_bos_token_id(original.bos_id())
        writer.add_eos_token_id(original.eos_id())
        writer.add_add_space_prefix(prefix)

    small = small_gguf("llama", vocab_size=size)
    small.tokenizer = tokenizer
    import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m")
    ours = load(str(tmp_path / "m")).tokenizer
    for text in (*TEXT, "table of bytes", "word  word", "\u0416 unseen", "x"):
        ids = ours.encode(text)
        assert ids == [original.bos_id(), *original.encode(text)], text
        assert ours.decode(ids[1:]) == text


def test_runs_of_spaces_are_one_token_each(tmp_path: Path) -> None:
    """Gemma's files spell them with real spaces and call them user defined."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "   ", "\u2581", "a", "b"]
    kinds = [CONTROL, CONTROL, CONTROL, CONTROL, 4, 4, NORMAL, NORMAL, NORMAL]

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([0.0] * len(pieces))
        writer.add_token_types(kinds)
        writer.add_unk_token_id(3)
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_add_space_prefix(False)

    small = small_gguf("gemma3", vocab_size=len(pieces))
    small.tokenizer = tokenizer
    import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m")
    ours = load(str(tmp_path / "m")).tokenizer
    assert ours.encode("a  b   a b") == [2, 7, 4, 8, 5, 7, 6, 8]
    assert ours.decode([7, 4, 8, 5, 7, 6, 8]) == "a  b   a b"
