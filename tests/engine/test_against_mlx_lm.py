"""The engines give the tokens that mlx-lm itself gives, stop where they should, and sample by request alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator, generate_step
from runs import PACKABLE, model, prompts, scenario
from test_observer import Answers
from tiers import examples, some_now
from tiny import VOCAB, TinyTokenizer

from detdiff.engines.mlx.engine import generate
from detdiff.engines.mlx.model import LoadedModel
from detdiff.engines.mlx.sampling import sampler
from detdiff.scenario import Sampling, Scenario

TOKENS = 10
LAYOUTS: dict[str, dict[str, Any]] = {
    "serial padded": {},
    "static padded": {"schedule": "static"},
    "continuous padded": {"schedule": "continuous", "arrivals": (0, 3, 4), "active": 2},
    "serial packed": {"layout": "packed"},
    "continuous packed": {
        "schedule": "continuous",
        "layout": "packed",
        "arrivals": (0, 3, 4),
        "row_budget": 7,
    },
}


def plain(of: LoadedModel, prompt: list[int], count: int = TOKENS) -> list[int]:
    steps = generate_step(mx.array(prompt), of.model, max_tokens=count)
    return [int(token) for token, _ in steps]


def batched(of: LoadedModel, given: list[list[int]], count: int = TOKENS) -> list[list[int]]:
    generator = BatchGenerator(of.model, max_tokens=count)
    uids = generator.insert(given)
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid].append(int(response.token))
    generator.close()
    return [found[uid] for uid in uids]


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_tokens_are_those_of_mlx_lm(arch: str) -> None:
    of = model(arch)
    expected = [plain(of, prompt) for prompt in prompts()]
    assert batched(of, prompts()) == expected
    assert len({tuple(tokens) for tokens in expected}) == 3
    for keys in LAYOUTS.values():
        if keys.get("layout") != "packed" or arch in PACKABLE:
            found = generate(scenario(max_tokens=TOKENS, **keys), loaded=of)
            assert list(found.values()) == expected, keys


class Stopping(TinyTokenizer):
    def __init__(self, *ids: int) -> None:
        self.eos_token_ids = frozenset(ids)


@pytest.mark.parametrize("keys", LAYOUTS.values(), ids=list(LAYOUTS))
def test_stop_tokens_end_a_request_unless_ignored(keys: dict[str, Any]) -> None:
    of = model("llama")
    whole = generate(scenario(max_tokens=TOKENS), loaded=of)
    stop = whole["r2"][3]
    stopping = replace(of, tokenizer=Stopping(stop, VOCAB - 1))
    found = generate(scenario(max_tokens=TOKENS, **keys), loaded=stopping)
    for id, tokens in whole.items():
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert found[id] == tokens[:end]
    assert len(found["r2"]) <= 4
    ignoring = generate(scenario(max_tokens=TOKENS, ignore_stop=True, **keys), loaded=stopping)
    assert ignoring == whole


def sampled(of: LoadedModel, seeds: tuple[int, ...], keys: dict[str, Any], **how: Any) -> list[list[int]]:
    asked = scenario(max_tokens=TOKENS, **keys, **how)
    own = [
        replace(request, sampling=replace(request.sampling, seed=seed))
        for request, seed in zip(asked.requests, seeds, strict=True)
    ]
    return list(generate(replace(asked, requests=tuple(own)), loaded=of).values())


@pytest.mark.parametrize("how", some_now([{"temperature": 0.8}, {"temperature": 1.5, "top_p": 0.7}], 0))
def test_a_request_s_draws_depend_on_its_seed_alone(how: dict[str, float]) -> None:
    of = model("qwen3")
    base = sampled(of, (5, 6, 7), {}, **how)
    for keys in LAYOUTS.values():
        assert sampled(of, (5, 6, 7), keys, **how) == base, keys
    other = sampled(of, (5, 8, 7), LAYOUTS["continuous packed"], **how)
    assert (other[0], other[2]) == (base[0], base[2])
    assert other[1] != base[1]
    # Neighbours: gone, greedy, or of other length.
    alone = scenario(max_tokens=TOKENS, **how)
    first = replace(alone.requests[0], sampling=replace(alone.requests[0].sampling, seed=5))
    assert generate(replace(alone, requests=(first,)), loaded=of) == {"r0": base[0]}
    greedy = [replace(request, sampling=Sampling()) for request in alone.requests[1:]]
    for keys in ({"schedule": "static"}, {"schedule": "static", "layout": "packed"}):
        mixed = replace(scenario(max_tokens=TOKENS, **keys), requests=(first, *greedy))
        assert generate(mixed, loaded=of)["r0"] == base[0]


@pytest.mark.thorough
def test_temperature_and_top_p_have_their_meaning() -> None:
    of = model("qwen3")
    greedy = list(generate(scenario(max_tokens=TOKENS), loaded=of).values())
    seeds = (1, 2, 3)
    assert sampled(of, seeds, {}, temperature=1e-4) == greedy
    assert sampled(of, seeds, {}, temperature=3.0, top_p=1e-6) == greedy
    assert sampled(of, seeds, {}, temperature=3.0) != greedy
    inside = outside = 0
    for top_p in (0.3, 1.0):
        seen = Answers()
        asked: Scenario = scenario(max_tokens=TOKENS, temperature=2.0, top_p=top_p)
        found = list(generate(asked, loaded=of, on_logits=seen).values())
        for request, tokens in enumerate(found):
            for index, token in enumerate(tokens):
                row = seen.rows[request, len(prompts()[request]) - 1 + index].view(np.float32)
                nucleus = token in _nucleus(row.astype(np.float64), 0.3)
                if top_p == 0.3:
                    assert nucleus
                inside, outside = inside + nucleus, outside + (not nucleus)
    assert inside and outside, "without top_p some draws must fall outside its nucleus"


def _nucleus(logits: np.ndarray[Any, np.dtype[np.float64]], top_p: float) -> set[int]:
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    # One more than the definition asks for: the edge is decided by rounding.
    return {int(i) for i in order[: int(np.count_nonzero(before < top_p)) + 1]}


@settings(max_examples=examples(10))
@given(st.integers(0, 2**63 - 1), st.integers(2, 12))
def test_draws_follow_the_distribution(seed: int, classes: int) -> None:
    draw = sampler(Sampling(temperature=1.0, seed=seed))
    logprobs = mx.log(mx.arange(1, classes + 1) / (classes * (classes + 1) / 2))[None]
    tokens = np.array(mx.concatenate([draw(logprobs) for _ in range(400)]))
    expected = 400 * np.arange(1, classes + 1) / (classes * (classes + 1) / 2)
    deviation = (np.bincount(tokens, minlength=classes) - expected) / np.sqrt(expected)
    # Seven standard deviations: by chance less than once in 10^10 draws of this test.
    assert np.abs(deviation).max() < 7
    again = sampler(Sampling(temperature=1.0, seed=seed))
    assert [int(again(logprobs).item()) for _ in range(20)] == tokens[:20].tolist()
