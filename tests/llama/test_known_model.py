"""The tiny model whose logits are known: mlx-lm, which knows nothing of them, gives the same from the same file."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models import KINDS, tiny_gguf
from tiers import some_now

from detdiff.engines.llama_cpp.known_model import PROMPT, TOKENS, TOLERANCE, KnownModel
from detdiff.engines.mlx.gguf_import import import_gguf


def in_mlx(file: Path) -> np.ndarray:
    from mlx_lm import load

    directory = file.with_suffix("")
    import_gguf(file, directory, dtype="f32")
    model, tokenizer = load(str(directory))
    for text in ("a b", "é日本\n", "two  spaces, and 123"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    return np.asarray(model(mx.array([PROMPT]))[0].astype(mx.float32), np.float64)


@pytest.mark.parametrize("kind", some_now(KINDS, 0, 1))
@pytest.mark.parametrize("tied", some_now([False, True], 0))
def test_another_engine_gives_the_logits_that_are_known(kind: str, tied: bool, tmp_path: Path) -> None:
    model = KnownModel(layers=2, kind=kind, tied=tied)
    known, found = model.logits(PROMPT), in_mlx(model.write(tmp_path / "m.gguf"))
    assert known.shape == (len(PROMPT), len(TOKENS))
    assert np.abs(found - known).max() < TOLERANCE
    # Logits that say something: far from one another, and another favourite at most positions.
    assert known.std() > 1 and len(set(known.argmax(axis=1).tolist())) > len(PROMPT) // 2


@pytest.mark.parametrize("fault", ["weight", "position", "norm", "pairs"])
def test_a_wrong_computation_gives_others(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from detdiff.engines.llama_cpp import known_model

    model = KnownModel()
    known = model.logits(PROMPT)
    if fault == "weight":
        drawn = KnownModel.weights

        def changed(self: KnownModel) -> dict[str, np.ndarray]:
            found = drawn(self)
            found["blk.0.attn_k.weight"][3, 5] += 1 / 16
            return found

        monkeypatch.setattr(KnownModel, "weights", changed)
    elif fault == "position":
        monkeypatch.setattr(known_model, "_BASE", 5000.0)
    elif fault == "norm":
        monkeypatch.setattr(known_model, "_EPS", 1e-3)
    else:
        monkeypatch.setattr(known_model, "_turned", lambda x: x)
    assert np.abs(model.logits(PROMPT) - known).max() > TOLERANCE


def test_the_same_seed_gives_the_same_file_and_another_one_another(tmp_path: Path) -> None:
    files = [tiny_gguf(tmp_path / f"{n}.gguf", seed=seed).read_bytes() for n, seed in enumerate((0, 0, 1))]
    assert files[0] == files[1] != files[2]
