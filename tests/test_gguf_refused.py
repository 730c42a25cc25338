"""Every kind of GGUF file and target that an import must refuse, leaving nothing behind."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.small_gguf import SmallGguf, add_byte_level, check_refusal, small_gguf
from plugins.small_models import (
    small_tokenizer,
)

import detdiff.engines.mlx.gguf_import as importer
from detdiff.engines.mlx.gguf_import import import_gguf
from detdiff.engines.mlx.gguf_import.metadata import read_gguf
from detdiff.engines.mlx.gguf_import.weights import write_shards
from detdiff.engines.mlx.model import identity
from detdiff.errors import (
    GgufCorrupt,
    GgufMissing,
    GgufPackageMissing,
    GgufUnsupported,
    ImportNotWritten,
    ImportTargetExists,
    ModelError,
)

UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": ("llama", {"general.architecture": "mamba"}, "'mamba'.*llama, qwen2, qwen3, gemma3"),
    "experts": ("llama", {"llama.expert_count": 8}, "mixture of experts"),
    "partial rotation": ("llama", {"llama.rope.dimension_count": 8}, "part of each head"),
    "yarn": ("qwen2", {"qwen2.rope.scaling.type": "yarn"}, "'yarn'"),
    "uneven layers": ("llama", {"llama.attention.head_count_kv": [2, 1]}, "differs by layer"),
    "head length": ("qwen2", {"qwen2.attention.key_length": 32, "qwen2.attention.value_length": 32}, "32"),
    "split file": ("llama", {"split.count": 3}, "one of 3 parts"),
    "splitting rule": ("llama", {"tokenizer.ggml.pre": "tekken"}, "'tekken'.*smollm"),
    "tokenizer kind": ("llama", {"tokenizer.ggml.model": "t5"}, "'t5'"),
    "window pattern": (
        "gemma3",
        {"gemma3.attention.sliding_window_pattern": [1, 0, 0, 1, 1, 0]},
        "follow no period",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported(case: str, tmp_path: Path) -> None:
    architecture, metadata, words = UNSUPPORTED[case]
    small = small_gguf(architecture)
    small.metadata = metadata
    replace_keys(small)
    with pytest.raises(GgufUnsupported, match=words) as caught:
        import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m")
    check_refusal(caught.value, tmp_path)


def replace_keys(small: SmallGguf) -> None:
    """Let the writer take keys of `small.metadata` that it has written before."""
    injected = small.metadata.keys() - {"general.architecture"}

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, small_tokenizer(), "gpt-2")
        for key in injected:
            writer.kv_data[0].pop(key, None)

    small.tokenizer = tokenizer


def test_unknown_tensor(tmp_path: Path) -> None:
    small = small_gguf("llama")
    small.extra["blk.0.attn_sinks.weight"] = np.ones(4, np.float32)
    with pytest.raises(GgufUnsupported, match="blk.0.attn_sinks.weight") as caught:
        import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m")
    check_refusal(caught.value, tmp_path)


def test_divisors_of_another_rule(tmp_path: Path) -> None:
    small = small_gguf("llama")
    small.extra["rope_freqs.weight"] = np.linspace(1, 9, 8, dtype=np.float32)
    with pytest.raises(GgufUnsupported, match="rope_freqs.weight does not follow") as caught:
        import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m")
    check_refusal(caught.value, tmp_path)


def test_missing_tensor(tmp_path: Path) -> None:
    small = small_gguf("qwen3")
    del small.weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(GgufUnsupported, match="layers.1.mlp.up_proj") as caught:
        import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m")
    check_refusal(caught.value, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.block_count", "two", "positive whole number under llama.block_count"),
        ("llama.embedding_length", 0, "positive whole number under llama.embedding_length"),
        ("llama.attention.layer_norm_rms_epsilon", "small", "a number under"),
        ("llama.attention.head_count", 7, "7 heads"),
        ("tokenizer.ggml.token_type", [1, 1], "2 token types"),
        ("tokenizer.ggml.tokens", ["same"] * 320, "contradicts itself"),
    ],
)
def test_contradictions(key: str, value: Any, words: str, tmp_path: Path) -> None:
    small = small_gguf("llama")
    small.metadata = {key: value}
    replace_keys(small)
    with pytest.raises(GgufCorrupt, match=words) as caught:
        import_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "m")
    check_refusal(caught.value, tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return small_gguf("llama").write(tmp_path_factory.mktemp("whole") / "m.gguf").read_bytes()


@given(data=st.data())
def test_cut_anywhere(whole: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cut")
    # The writer pads the end of the last tensor, here to 32 bytes; what is cut there is not missed.
    size = data.draw(st.integers(0, len(whole) - 33))
    (folder / "m.gguf").write_bytes(whole[:size])
    with pytest.raises(GgufCorrupt) as caught:
        import_gguf(folder / "m.gguf", folder / "m")
    check_refusal(caught.value, folder)


@given(data=st.data())
def test_damaged_header_is_an_error_or_a_model(
    whole: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    end = whole.index(b"token_embd.weight") + 200
    place = data.draw(st.integers(0, end - 8))
    content = bytearray(whole)
    content[place : place + 8] = data.draw(st.binary(min_size=8, max_size=8))
    (folder / "m.gguf").write_bytes(content)
    try:
        read_gguf(folder / "m.gguf")
    except ModelError as error:
        check_refusal(error, folder)


@pytest.mark.parametrize("place", [8, 16], ids=["tensors", "keys"])
def test_header_that_claims_a_huge_count(whole: bytes, place: int, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(whole[:place] + struct.pack("<Q", 1 << 60) + whole[place + 8 :])
    with pytest.raises(ModelError) as caught:
        read_gguf(tmp_path / "m.gguf")
    check_refusal(caught.value, tmp_path)


@pytest.mark.parametrize("item", [4, 8, 9], ids=["numbers", "texts", "arrays"])
def test_array_that_claims_a_huge_length(item: int, tmp_path: Path) -> None:
    key = b"a.b"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, item, 1 << 60)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + bytes(64))
    with pytest.raises(GgufCorrupt, match="1152921504606846976|4611686018427387904") as caught:
        read_gguf(tmp_path / "m.gguf")
    check_refusal(caught.value, tmp_path)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def entry(name: bytes, shape: list[int], offset: int = 0) -> bytes:
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name + axes + struct.pack("<IQ", 0, offset)


NESTED = b"".join(struct.pack("<IQ", 9, 1) for _ in range(6))
# Keys, tensors, the header behind their counts, and what is said.
HOSTILE: dict[str, tuple[int, int, bytes, str]] = {
    "more items than any model has": (
        1,
        0,
        key(b"a", 9, struct.pack("<IQ", 0, 1 << 22) + bytes(1 << 22)),
        "4194304 items",
    ),
    "many lists": (
        3,
        0,
        key(b"a", 9, struct.pack("<IQ", 0, 1 << 20) + bytes(1 << 20)) * 3,
        "together may have 2097152",
    ),
    "more keys than any model has": (1 << 17, 0, key(b"", 0, b"x") * (1 << 17), "131072 keys"),
    "lists of lists of lists": (1, 0, key(b"a", 9, NESTED + struct.pack("<IQ", 0, 0)), "metadata type 9"),
    "no such type": (1, 0, key(b"a", 77, bytes(64)), "metadata type 77"),
    "no dimension": (0, 1, entry(b"a", []), "0 dimensions"),
    "many dimensions": (0, 1, entry(b"a", [1] * 9), "9 dimensions"),
    "an empty dimension": (0, 1, entry(b"a", [4, 0]), r"the shape \[0, 4\]"),
    "a product that wraps": (0, 1, entry(b"a", [1 << 32, 1 << 33]), "should end at byte 147573"),
    "an offset that wraps": (0, 1, entry(b"a", [4], (1 << 64) - 64), "should end at byte 184467"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_hostile_never_reaches_the_reader(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(path: Path) -> None:
        raise AssertionError("the reader was asked")

    monkeypatch.setattr(gguf, "GGUFReader", asked)
    keys, tensors, rest, words = HOSTILE[case]
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest + bytes(64))
    with pytest.raises(GgufCorrupt, match=words) as caught:
        import_gguf(tmp_path / "m.gguf", tmp_path / "m")
    check_refusal(caught.value, tmp_path)


TWICE = key(b"a.b", 4, bytes(4)) * 2
READ: dict[str, tuple[int, int, bytes, type[ModelError], str]] = {
    "a key twice": (2, 0, TWICE, GgufCorrupt, "a.b"),
    "a tensor twice": (0, 2, entry(b"w", [4]) * 2, GgufCorrupt, "w"),
    "a name that is no text": (1, 0, key(b"\xff", 4, bytes(4)), GgufCorrupt, "utf-8"),
    "a value that is no text": (1, 0, key(b"a", 8, struct.pack("<Q", 1) + b"\xff"), GgufCorrupt, "UTF-8"),
    "an alignment of three": (
        1,
        0,
        key(b"general.alignment", 4, struct.pack("<I", 3)),
        GgufCorrupt,
        "power of two",
    ),
    "a tensor behind the end": (0, 1, entry(b"w", [64], 64), GgufCorrupt, "'w' should end at byte 384"),
    "half a block": (0, 1, entry(b"w", [33])[:-12] + struct.pack("<IQ", 2, 0), GgufCorrupt, "33"),
    "no such type": (0, 1, entry(b"w", [4])[:-12] + struct.pack("<IQ", 99, 0), GgufUnsupported, "99"),
}


@pytest.mark.parametrize("case", READ)
def test_what_the_reader_refuses_is_one_paragraph(case: str, tmp_path: Path) -> None:
    keys, tensors, rest, error, words = READ[case]
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest + bytes(96))
    with pytest.raises(error, match=words) as caught:
        import_gguf(tmp_path / "m.gguf", tmp_path / "m")
    check_refusal(caught.value, tmp_path)


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (None, GgufMissing, "no file"),
        (b"", GgufCorrupt, "0 bytes"),
        (b"PK\x03\x04 a zip archive", GgufCorrupt, "not a GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), GgufUnsupported, "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), GgufUnsupported, "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), GgufUnsupported, "architecture None"),
    ],
)
def test_not_a_gguf_file(content: bytes | None, error: type[ModelError], words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(error, match=words) as caught:
        import_gguf(tmp_path / "m.gguf", tmp_path / "m")
    check_refusal(caught.value, tmp_path)


def test_missing_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = small_gguf("llama")
    small.kinds = {"model.layers.0.mlp.up_proj.weight": "Q5_0"}
    source = small.write(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(GgufPackageMissing, match=r"pip install '\.\[gguf\]'") as caught:
        import_gguf(source, tmp_path / "m")
    check_refusal(caught.value, tmp_path)


# The target directory


def test_target_that_is_there_is_not_touched(tmp_path: Path) -> None:
    source = small_gguf("llama").write(tmp_path / "m.gguf")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine.txt").write_text("keep")
    with pytest.raises(ImportTargetExists, match="already there"):
        import_gguf(source, tmp_path / "m")
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["mine.txt"]


def test_empty_target_and_missing_parents_are_fine(tmp_path: Path) -> None:
    source = small_gguf("llama").write(tmp_path / "m.gguf")
    (tmp_path / "empty").mkdir()
    import_gguf(source, tmp_path / "empty")
    import_gguf(source, tmp_path / "a" / "b" / "m")
    assert identity(tmp_path / "empty")["weights_sha256"] == identity(tmp_path / "a/b/m")["weights_sha256"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_interrupted_import_leaves_nothing(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small_gguf("llama").write(tmp_path / "m.gguf")
    real: Callable[..., int] = write_shards

    def fails_half_way(*arguments: Any) -> int:
        real(*arguments)
        raise failure

    monkeypatch.setattr(importer, "write_shards", fails_half_way)
    expected = ImportNotWritten if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        import_gguf(source, tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_parent_that_is_a_file(tmp_path: Path) -> None:
    source = small_gguf("llama").write(tmp_path / "m.gguf")
    with pytest.raises(ImportNotWritten, match="could not be written") as caught:
        import_gguf(source, source / "m")
    check_refusal(caught.value, tmp_path)


def test_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bf16, f16, f32"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "m", dtype="f64")
