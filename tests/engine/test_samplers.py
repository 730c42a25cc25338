"""mlx-lm's samplers, logits processors, stop texts and rotating caches give what mlx-lm itself gives, and traces say so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step, make_stop_sequences
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from runs import QUIET, Runs, model, patched, prompts, scenario
from tiers import some_now
from tiny import TinyTokenizer

from detdiff.engines.mlx.engine import generate
from detdiff.engines.mlx.requests import prepare
from detdiff.errors import EngineRefuses, TokenOutOfRange
from detdiff.scenario import Scenario
from detdiff.trace import digest_rows

TOKENS = 8
FILTERS: dict[str, Any] = {"top_p": 0.9, "min_p": 0.01, "top_k": 20}
XTC: dict[str, Any] = {"xtc_probability": 0.5, "xtc_threshold": 0.05}
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "repetition_context_size": 6,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
}
BIAS = {5: 3.0, 7: -100.0}
EVERY: dict[str, Any] = {
    "temperature": 0.8,
    "seed": 11,
    "sampler": "mlx-lm",
    "logit_bias": BIAS,
    **FILTERS,
    **XTC,
    **PENALTIES,
}


def natively() -> dict[str, Any]:
    """The sampler and processors of EVERY, made by mlx-lm."""
    return {
        "sampler": make_sampler(0.8, **FILTERS, **XTC, xtc_special_tokens=[]),
        "logits_processors": make_logits_processors(BIAS, **PENALTIES),
    }


def alone(**keys: Any) -> list[list[int]]:
    found, of = [], model("llama").model
    for prompt in prompts():
        mx.random.seed(11)
        steps = generate_step(mx.array(prompt), of, max_tokens=TOKENS, **keys)
        found.append([int(token) for token, _ in steps])
    return found


def together(**keys: Any) -> list[list[int]]:
    generator = BatchGenerator(model("llama").model, max_tokens=TOKENS, **keys)
    mx.random.seed(11)
    one = [natively() for _ in prompts()]
    uids = generator.insert(
        prompts(),
        samplers=[each["sampler"] for each in one],
        logits_processors=[each["logits_processors"] for each in one],
    )
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid].append(int(response.token))
    generator.close()
    return [found[uid] for uid in uids]


def ran(asked: Scenario) -> list[list[int]]:
    return list(generate(asked, loaded=model("llama")).values())


def test_a_request_alone_draws_what_mlx_lm_draws() -> None:
    expected = alone(**natively())
    assert ran(scenario(max_tokens=TOKENS, **EVERY)) == expected
    assert ran(scenario(max_tokens=TOKENS, layout="packed", **EVERY)) == expected
    assert len({tuple(tokens) for tokens in expected}) == 3


def test_a_batch_draws_what_mlx_lm_draws() -> None:
    expected = together()
    assert ran(scenario("static", max_tokens=TOKENS, **EVERY)) == expected
    assert expected != alone(**natively()), "one random state for all: who is beside a request counts"


@pytest.mark.parametrize("layout", some_now(["packed", "padded"], 0))
def test_a_keyed_draw_with_processors_does_not_depend_on_the_batch(layout: str) -> None:
    keys = {**EVERY, "sampler": "detdiff", "xtc_probability": 0, "xtc_threshold": 0.1}
    serial = ran(scenario(max_tokens=TOKENS, **keys))
    assert ran(scenario("static", layout, max_tokens=TOKENS, **keys)) == serial
    plain = {"temperature": 0.8, "seed": 11}
    for name in ("logit_bias", *FILTERS, "repetition_penalty", "presence_penalty", "frequency_penalty"):
        one: dict[str, Any] = {**plain, name: keys[name]}
        if name == "min_p":
            one[name] = 0.5
        assert ran(scenario(max_tokens=TOKENS, **one)) != ran(scenario(max_tokens=TOKENS, **plain)), name


def test_the_trace_has_what_each_token_was_chosen_from(runs: Runs) -> None:
    of = model("llama")
    seen: dict[str, list[Any]] = {}
    native = make_logits_processors(BIAS, **PENALTIES)
    steps = generate_step(mx.array(prompts()[1]), of.model, max_tokens=3, logits_processors=native)
    seen["r1"] = [np.asarray(logprobs) for _, logprobs in steps]
    for asked in (
        scenario(max_tokens=3, logit_bias=BIAS, **PENALTIES),
        scenario("static", max_tokens=3, logit_bias=BIAS, **PENALTIES),
        scenario("static", "packed", max_tokens=3, logit_bias=BIAS, **PENALTIES),
    ):
        trace = runs.record(of, asked)
        choices = [e for e in trace.events() if e["event"] == "choice" and e["request"] == 1]
        assert [e["index"] for e in choices] == [0, 1, 2]
        for event, logprobs in zip(choices, seen["r1"], strict=True):
            assert event["digest"] == f"{int(digest_rows(logprobs[None], 'F32')[0]):016x}"
            assert event["top_ids"][0] == int(np.argmax(logprobs))
            assert event["top_logprobs"][0] == float(logprobs.max())
        told = trace.requests[1]["sampling"]
        assert told["logit_bias"] == {"5": 3.0, "7": -100.0} and told["repetition_penalty"] == 1.3
    plain = runs.record(of, scenario(max_tokens=3, temperature=1))
    assert not [e for e in plain.events() if e["event"] == "choice"]
    assert plain.requests[0]["sampling"] == {"temperature": 1.0, "top_p": 1.0, "seed": 0}


def test_stop_texts_end_an_answer_where_mlx_lm_ends_it() -> None:
    of = model("llama")
    whole = ran(scenario(max_tokens=20))
    text = "".join(chr(token) for token in whole[0][3:5])
    assert of.tokenizer.encode(text) == whole[0][3:5]
    matcher = make_stop_sequences(of.tokenizer, [text]).matcher()
    end = next(n for n, token in enumerate(whole[0], 1) if matcher.advance(token))
    for keys in (
        {},
        {"schedule": "static"},
        {"layout": "packed"},
        {"layout": "packed", "schedule": "static"},
    ):
        found = ran(scenario(max_tokens=20, stop=[text], **keys))
        assert found[0] == whole[0][:end] and end < 20
        assert found[1] == whole[1]


@pytest.mark.thorough
def test_a_rotating_cache_of_a_size_is_mlx_lms(runs: Runs) -> None:
    of = model("qwen3")
    expected = [
        [int(t) for t, _ in generate_step(mx.array(p), of.model, max_tokens=24, max_kv_size=6)]
        for p in prompts()
    ]
    small, whole = scenario(max_tokens=24, max_kv_size=6), scenario(max_tokens=24)
    assert list(generate(small, loaded=of).values()) == expected
    assert list(generate(whole, loaded=of).values()) != expected
    large = scenario("static", max_tokens=24, max_kv_size=64)
    assert list(generate(large, loaded=of).values()) == list(generate(whole, loaded=of).values())
    # A model with caches of its own is given none of another size by mlx-lm, and the trace says so.
    assert ran(small) == ran(whole)
    assert any(
        "max_kv_size has no effect" in note for note in runs.record(model("llama"), small).header["notes"]
    )
    assert not runs.record(of, small).header["notes"]


class ChatTokenizer(TinyTokenizer):
    """Lays messages out as text, and says in it what the template was given beside."""

    has_chat_template = True

    def apply_chat_template(self, messages: list[dict[str, Any]], **arguments: Any) -> list[int]:
        text = "".join(f"<{each['role']}>{each['content']}" for each in messages)
        return self.encode(f"{text}{sorted(arguments.items())}")


def test_messages_go_through_the_template_with_its_arguments() -> None:
    of = replace(model("llama"), tokenizer=ChatTokenizer())
    turns = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]

    def prompt(**request: Any) -> tuple[int, ...]:
        return prepare(Scenario.from_dict({"model": "m", "request": [request]}), of)[0].prompt

    def laid(text: str) -> tuple[int, ...]:
        return tuple(of.tokenizer.encode(text))

    plain = "[('add_generation_prompt', True)]"
    assert prompt(messages=turns) == laid(f"<system>a<user>b<assistant>c{plain}")
    given = {"enable_thinking": False, "add_generation_prompt": False}
    told = "[('add_generation_prompt', False), ('enable_thinking', False)]"
    assert prompt(messages=turns[:2], chat_template_args=given) == laid(f"<system>a<user>b{told}")
    assert prompt(prompt="b", chat=True, chat_template_args=given) == laid(f"<user>b{told}")
    assert prompt(prompt="b", chat=True) == prompt(messages=turns[1:2])


def test_what_the_vocabulary_has_not_is_refused() -> None:
    with pytest.raises(TokenOutOfRange, match="bias or an exception for the token id 96"):
        ran(scenario(logit_bias={96: 1}))
    with pytest.raises(EngineRefuses, match="top_k 96; expected fewer than the 96 ids"):
        ran(scenario(top_k=96, temperature=1))


@pytest.mark.thorough
def test_a_processor_that_is_not_run_shows(runs: Runs) -> None:
    asked = scenario("static", max_tokens=3, logit_bias={5: 3.0})
    sound = runs.record(model("llama"), asked, QUIET)
    undo = patched(BatchGenerator, "insert", _without_processors(BatchGenerator.insert))
    try:
        wrong = runs.record(model("llama"), asked, QUIET)
    finally:
        undo()
    a, b = ([e["digest"] for e in t.events() if e["event"] == "choice"] for t in (sound, wrong))
    assert len(a) == len(b) == 9 and not set(a) & set(b)


def _without_processors(native: Any) -> Any:
    def insert(self: Any, *args: Any, logits_processors: Any = None, **keys: Any) -> Any:
        return native(self, *args, **keys)

    return insert
