"""Loading a model, its identity, and every way in which a model directory can be wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from plugins.small_models import build, logits, small_config, small_weights, write_directory

from detdiff.engines.mlx.model import LoadedModel, context_limit, encode, identity, load, locate
from detdiff.errors import (
    ChatTemplateUnusable,
    ModelConfigInvalid,
    ModelConfigMissing,
    ModelError,
    ModelNotADirectory,
    ModelNotFound,
    ModelShardMissing,
    ModelTypeUnknown,
    ModelUnreachable,
    ModelWeightsCorrupt,
    ModelWeightsMismatch,
    ModelWeightsMissing,
    PromptWithoutTokens,
    TokenizerInvalid,
    TokenizerMissing,
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("models") / "pristine")


@pytest.fixture(scope="module")
def loaded(pristine: Path) -> LoadedModel:
    return load(str(pristine))


@pytest.fixture
def directory(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def test_loaded_model_computes_what_its_weights_say(loaded: LoadedModel) -> None:
    config = small_config("llama")
    tokens = encode(loaded, "In the beginning", chat=False)
    expected = logits(build(config, small_weights(config)), tokens)
    np.testing.assert_array_equal(logits(loaded.model, tokens), expected)
    assert loaded.path.name == loaded.identity["name"] == "pristine"
    assert context_limit(loaded) == 256


def test_context_limit_is_found_in_a_text_part_and_may_be_unknown(loaded: LoadedModel) -> None:
    assert context_limit(replace(loaded, config={"text_config": {"max_position_embeddings": 7}})) == 7
    assert context_limit(replace(loaded, config={})) is None


def test_encode_and_chat(loaded: LoadedModel) -> None:
    text = "naïve café, 12345"
    assert loaded.tokenizer.decode(encode(loaded, text, chat=False)) == text
    chat = loaded.tokenizer.decode(encode(loaded, text, chat=True))
    assert chat == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_model_module_imports_no_mlx() -> None:
    code = (
        "import sys, detdiff.engines.mlx.model, detdiff.engines.mlx.gguf_import;"
        "print([m for m in ('mlx', 'mlx_lm', 'numba', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_identity_is_the_contents_and_not_the_place(pristine: Path, directory: Path) -> None:
    here, there = identity(pristine), identity(directory)
    assert here.pop("name") == "pristine"
    assert there.pop("name") == "model"
    assert here == there
    assert str(pristine.parent) not in json.dumps(here)
    assert here["model_type"] == "llama"
    assert here["layers"] == 2
    assert here["vocab_size"] == small_config("llama")["vocab_size"]
    assert here["dtypes"] == {"F32": len(small_weights(small_config("llama")))}
    assert here["quantization"] is None


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda path: flip_last_byte(path / "model.safetensors"), {"weights_sha256"}),
        (lambda path: edit_config(path, rope_theta=10001.0), {"config_sha256"}),
        (lambda path: (path / "tokenizer_config.json").write_text("{}"), {"tokenizer_sha256"}),
        (lambda path: (path / "README.md").write_text("hello"), set()),
        (lambda path: (path / "config.json").write_text(json.dumps(read_config(path), indent=4)), set()),
    ],
)
def test_identity_changes_with_what_matters(
    pristine: Path, directory: Path, change: Callable[[Path], Any], differs: set[str]
) -> None:
    change(directory)
    before, after = identity(pristine), identity(directory)
    assert {key for key in before if before[key] != after[key]} - {"name"} == differs


def test_identity_tells_quantisation(tmp_path: Path) -> None:
    config = small_config("llama", quantization={"group_size": 32, "bits": 4, "mode": "affine"})
    config["quantization"]["model.embed_tokens"] = {"group_size": 32, "bits": 8, "mode": "affine"}
    path = write_directory(tmp_path / "quantised", small_config("llama"))
    (path / "config.json").write_text(json.dumps(config))
    assert identity(path)["quantization"] == "affine 4-bit group 32; 1 module(s) affine 8-bit group 32"


def read_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def edit_config(path: Path, **changes: Any) -> None:
    (path / "config.json").write_text(json.dumps(read_config(path) | changes))


def drop_arrays(path: Path) -> None:
    arrays = mx.load(str(path / "model.safetensors"))
    assert isinstance(arrays, dict)
    kept = {name: value for name, value in arrays.items() if "layers.1" not in name}
    mx.eval(kept)
    mx.save_safetensors(str(path / "model.safetensors"), kept)


def truncate(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def claim_huge_header(path: Path) -> None:
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + content[8:])


def write_index(path: Path, **files: str) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


BROKEN: dict[str, tuple[Callable[[Path], Any], type[ModelError], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), ModelConfigMissing, "no config.json"),
    "config not JSON": (
        lambda p: (p / "config.json").write_text('{"model_type": '),
        ModelConfigInvalid,
        "cannot be read as JSON",
    ),
    "config not text": (
        lambda p: (p / "config.json").write_bytes(b"\xff\xfe\x00"),
        ModelConfigInvalid,
        "cannot be read as JSON",
    ),
    "config a list": (lambda p: (p / "config.json").write_text("[]"), ModelConfigInvalid, "a JSON list"),
    "no model type": (lambda p: (p / "config.json").write_text("{}"), ModelConfigInvalid, "`model_type`"),
    "config too short": (
        lambda p: (p / "config.json").write_text('{"model_type": "llama"}'),
        ModelConfigInvalid,
        "hidden_size",
    ),
    "unknown type": (lambda p: edit_config(p, model_type="lama"), ModelTypeUnknown, "nearest is 'llama'"),
    "type is a path": (lambda p: edit_config(p, model_type="../evil"), ModelTypeUnknown, "'../evil'"),
    "no weights": (
        lambda p: (p / "model.safetensors").unlink(),
        ModelWeightsMissing,
        "no model*.safetensors",
    ),
    "weights of another kind": (
        lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"),
        ModelWeightsMissing,
        "pytorch_model.bin",
    ),
    "weights cut": (lambda p: truncate(p / "model.safetensors", 9000), ModelWeightsCorrupt, "9000 bytes"),
    "weights cut in header": (
        lambda p: truncate(p / "model.safetensors", 100),
        ModelWeightsCorrupt,
        "cut short",
    ),
    "weights empty": (lambda p: truncate(p / "model.safetensors", 0), ModelWeightsCorrupt, "0 bytes"),
    "huge header": (claim_huge_header, ModelWeightsCorrupt, "cut short"),
    "half the weights": (drop_arrays, ModelWeightsMismatch, "layers.1"),
    "other shape": (lambda p: edit_config(p, intermediate_size=64), ModelWeightsMismatch, "shape"),
    "extra weights": (lambda p: edit_config(p, num_hidden_layers=1), ModelWeightsMismatch, "layers.1"),
    "shard missing": (
        lambda p: write_index(p, a="model.safetensors", b="model-00002-of-00002.safetensors"),
        ModelShardMissing,
        "model-00002-of-00002.safetensors",
    ),
    "index empty": (
        lambda p: (p / "model.safetensors.index.json").write_text("{}"),
        ModelWeightsCorrupt,
        "weight_map",
    ),
    "index not JSON": (
        lambda p: (p / "model.safetensors.index.json").write_text("{"),
        ModelConfigInvalid,
        "index.json",
    ),
    "no tokenizer": (lambda p: (p / "tokenizer.json").unlink(), TokenizerMissing, "no tokenizer"),
    "tokenizer not JSON": (
        lambda p: (p / "tokenizer.json").write_text("{"),
        TokenizerInvalid,
        "does not load",
    ),
    "tokenizer of nothing": (
        lambda p: (p / "tokenizer.json").write_text("{}"),
        TokenizerInvalid,
        "does not load",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_directory(directory: Path, case: str) -> None:
    injected_fault, error, words = BROKEN[case]
    injected_fault(directory)
    with pytest.raises(error) as caught:
        load(str(directory))
    assert type(caught.value) is error
    assert words in str(caught.value)
    check_paragraph(caught.value)


def check_paragraph(error: ModelError) -> None:
    text = str(error)
    assert "\n" not in text
    assert "Traceback" not in text
    assert text[-1] in ".?"
    assert error.exit_code == 2


def test_missing_directory_names_a_similar_one(directory: Path) -> None:
    with pytest.raises(ModelNotFound, match="Did you mean '.*model'") as caught:
        load(str(directory.parent / "modle"))
    check_paragraph(caught.value)
    with pytest.raises(ModelNotFound, match="parent directory") as caught:
        load(str(directory.parent / "nowhere" / "model"))
    check_paragraph(caught.value)


@pytest.mark.parametrize(("name", "advice"), [("model.gguf", "import-gguf"), ("model.txt", "directory")])
def test_file_in_place_of_a_directory(tmp_path: Path, name: str, advice: str) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(ModelNotADirectory, match=advice) as caught:
        load(str(tmp_path / name))
    check_paragraph(caught.value)


def test_hub_id_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The library's own switch for machines without a network; it must not hide a missing cache entry.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelUnreachable, match="'nobody/no-such-model'") as caught:
        load("nobody/no-such-model")
    check_paragraph(caught.value)


def test_spec_that_looks_like_a_path_never_reaches_for_the_hub(tmp_path: Path) -> None:
    for spec in ("./x", "~/x-not-there", "/x/y", "a/b/c", "..", "x/"):
        assert locate(spec) == Path(spec).expanduser()


@pytest.mark.parametrize("name", ["builtin", "builtin-draft"])
def test_built_in_models_are_found_by_name(name: str) -> None:
    assert identity(locate(name))["name"] == name


def test_existing_directory_wins_over_a_hub_id(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory.parent)
    assert locate("model") == Path("model")
    assert identity(locate("model"))["name"] == "model"


def test_chat_without_template(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    without = load(str(directory))
    assert encode(without, "word", chat=False)
    with pytest.raises(ChatTemplateUnusable, match="no chat template") as caught:
        encode(without, "word", chat=True)
    check_paragraph(caught.value)


def test_template_that_refuses(loaded: LoadedModel, directory: Path) -> None:
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ raise_exception('needs a system message') }}"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ChatTemplateUnusable, match="needs a system message") as caught:
        encode(load(str(directory)), "word", chat=True)
    check_paragraph(caught.value)


def test_prompt_without_tokens(loaded: LoadedModel) -> None:
    with pytest.raises(PromptWithoutTokens) as caught:
        encode(loaded, "", chat=False)
    check_paragraph(caught.value)


def test_tokenizer_of_a_larger_model(loaded: LoadedModel) -> None:
    smaller = replace(loaded, config={**loaded.config, "vocab_size": 10})
    with pytest.raises(TokenizerInvalid, match="0 to 9") as caught:
        encode(smaller, "In the beginning", chat=False)
    check_paragraph(caught.value)
