"""Six faults of samplers and their healthy twins: named as sampling, at the first draw that differs, with the cause that was tried."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command_line
import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, GenerationBatch
from runs import model, patched, prompts, scenario
from tiers import FULL, some_now

from detdiff.engines.base import IMPORTED
from detdiff.engines.mlx.choice_causes import run_choices
from detdiff.engines.mlx.engine import generate
from detdiff.engines.mlx.sampling import TokenDraw
from detdiff.explain import Verdict, explain
from detdiff.explain.case import Case
from detdiff.scenario import Sampling, Scenario

Insert = Callable[..., Any]
DRAWN: dict[str, Any] = {"temperature": 1.0, "max_tokens": 5, "lengths": (4, 2, 3)}


@dataclass(frozen=True)
class SamplerFault:
    """``inject`` puts it in; ``requests`` are what each request asks for beside ``keys``; ``cause`` is in the verdict. ``first`` is
    the first draw that is made of other log-probabilities, as (request, index); None: the first one that gives another token."""

    name: str
    inject: Callable[[], Any]
    keys: dict[str, Any]
    requests: Sequence[dict[str, Any]]
    cause: str
    first: tuple[str, int] | None = None

    def scenario(self, schedule: str, draw: int = 0) -> Scenario:
        """With other prompts and other seeds for each ``draw``."""
        asked = scenario(schedule, **{**DRAWN, **self.keys}).to_dict()
        tokens = prompts(DRAWN["lengths"], seed=1 + draw)
        for request, own, given in zip(asked["request"], self.requests, tokens, strict=True):
            request |= {**own, "tokens": given}
            request["seed"] += 10 * draw
        return Scenario.from_dict(asked)


def inserting(change: Callable[[dict[str, Any]], None]) -> Callable[[], Any]:
    """A fault in what a batch is given."""
    native = BatchGenerator.insert

    def insert(self: Any, *args: Any, **keys: Any) -> Any:
        change(keys)
        return native(self, *args, **keys)

    return lambda: patched(BatchGenerator, "insert", insert)


def not_shortened(name: str) -> Callable[[], Any]:
    """A fault of the batch: one of its lists keeps its first entries when a request leaves."""
    native = GenerationBatch.filter

    def filter_(self: Any, keep: list[int]) -> None:
        before = list(getattr(self, name))
        native(self, keep)
        setattr(self, name, before[: len(keep)])

    return lambda: patched(GenerationBatch, "filter", filter_)


def rolled(name: str) -> Callable[[dict[str, Any]], None]:
    def change(keys: dict[str, Any]) -> None:
        keys[name] = [*keys[name][1:], keys[name][0]]

    return change


def same_object(keys: dict[str, Any]) -> None:
    keys["samplers"] = [keys["samplers"][0]] * len(keys["samplers"])


def counted_together(keys: dict[str, Any]) -> None:
    count = 0

    def sharing(draw: TokenDraw) -> Callable[[mx.array], mx.array]:
        def call(logprobs: mx.array) -> mx.array:
            nonlocal count
            draw.index = count
            count += 1
            return draw(logprobs)

        return call

    keys["samplers"] = [sharing(draw) for draw in keys["samplers"]]


def seed_zero(keys: dict[str, Any]) -> None:
    keys["samplers"] = [TokenDraw(Sampling(temperature=1.0)) for _ in keys["samplers"]]


def seeded_zero(keys: dict[str, Any]) -> None:
    mx.random.seed(0)


def on_padded(keys: dict[str, Any]) -> None:
    def wide(draw: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
        def call(logprobs: mx.array) -> mx.array:
            size = logprobs.shape[-1]
            more = mx.concatenate([logprobs, mx.zeros((1, 128 - size))], axis=-1)
            left = mx.argpartition(-more, kth=39, axis=-1)[..., 40:]
            more = mx.put_along_axis(more, left, mx.array(-float("inf")), axis=-1)
            return draw(more[..., :size])

        return call

    keys["samplers"] = [wide(draw) for draw in keys["samplers"]]


SEEDS = ({"seed": 3}, {"seed": 4}, {"seed": 5})
FIRST_LEAVES = ({"seed": 3, "max_tokens": 2}, {"seed": 4}, {"seed": 5})
PENALTY = {"temperature": 0.0, "repetition_penalty": 2.0}

FAULTS = (
    SamplerFault(
        "list of samplers not shortened", not_shortened("samplers"), {}, FIRST_LEAVES,
        "it was given the sampler at its place in a list that was not shortened when a request left",
    ),
    SamplerFault(
        "penalty history of the neighbour", not_shortened("_token_context"), PENALTY, FIRST_LEAVES,
        "it was given the buffer of tokens at its place in a list that was not shortened when a request left", ("r1", 3),
    ),
    SamplerFault(
        "generator shared", inserting(counted_together), {"seed": 4}, ({}, {"temperature": 0.8}, {}),
        "its generator is shared with other requests, which draw from it in between",
    ),
    SamplerFault(
        "one draw for all", inserting(same_object), {"seed": 4}, ({}, {}, {}),
        "its generator is shared with other requests, for all of which one draw is made",
    ),
    SamplerFault(
        "seed ignored", inserting(seed_zero), {}, SEEDS,
        "the seeds were ignored: every request drew with the seed 0",
    ),
    SamplerFault(
        "logit bias of another request", inserting(rolled("logits_processors")), {"temperature": 0.0},
        ({"logit_bias": {"5": 40.0}}, {"logit_bias": {"6": 40.0}}, {"logit_bias": {"7": 40.0}}),
        "it was given the logit bias of the request after it, in a shifted list", ("r0", 0),
    ),
    SamplerFault(
        "top-k on the padded vocabulary", inserting(on_padded), {"top_k": 40}, SEEDS,
        "top_k was taken on a vocabulary that is padded from 96 to 128 ids",
    ),
    SamplerFault(
        "samplers shifted", inserting(rolled("samplers")), {}, SEEDS,
        "it was given the sampler of the request after it, in a shifted list",
    ),
)  # fmt: skip


@contextmanager
def injected(fault: SamplerFault) -> Iterator[None]:
    undo = fault.inject()
    try:
        yield
    finally:
        undo()


def explained(a: Scenario, b: Scenario) -> Verdict:
    return explain(a, b, loaded=model("llama"))


def first_other(serial: Scenario, batched: Scenario, fault: SamplerFault) -> tuple[str, int]:
    """The first token that a fault changes, in the order in which a batch draws."""
    sound = generate(serial, loaded=model("llama"))
    with injected(fault):
        wrong = generate(batched, loaded=model("llama"))
    differing = [
        (index, id)
        for id in sound
        for index, pair in enumerate(zip(sound[id], wrong[id], strict=True))
        if pair[0] != pair[1]
    ]
    index, id = min(differing)
    return id, index


NOW = ("list of samplers not shortened", "penalty history of the neighbour", "top-k on the padded vocabulary")
FAULT_CASES = [
    pytest.param(fault, id=fault.name, marks=() if fault.name in NOW else pytest.mark.thorough)
    for fault in FAULTS
]


@pytest.mark.parametrize("draw", range(10 if FULL else 1))
@pytest.mark.parametrize("fault", FAULT_CASES)
def test_a_fault_of_a_sampler_is_named_and_its_twin_is_identical(fault: SamplerFault, draw: int) -> None:
    serial, batched = fault.scenario("serial", draw), fault.scenario("static", draw)
    assert explained(serial, batched).kind == "identical"
    with injected(fault):
        verdict = explained(serial, batched)
    assert (verdict.kind, verdict.rule) == ("bug", "choices"), verdict.sentence
    found = verdict.control("choices").detail
    assert (found["run"], found["stage"]) == ("b", "draw" if fault.first is None else "processors")
    assert (found["request"], found["index"]) == (fault.first or first_other(serial, batched, fault)), (
        verdict.sentence
    )
    assert fault.cause in found["cause"], verdict.sentence
    assert fault.cause in verdict.sentence and "The sampling, not the model" in verdict.sentence


def test_a_shared_random_state_is_mlx_lms_own_way_and_no_bug() -> None:
    asked = {**DRAWN, "sampler": "mlx-lm", "seed": 9}
    verdict = explained(scenario(**asked), scenario("static", **asked))
    assert (verdict.kind, verdict.rule) == ("configuration", "random-state"), verdict.sentence
    assert verdict.control("choices").result == "shared"


@pytest.mark.thorough
def test_the_same_order_of_draws_gives_the_same_tokens_whatever_the_layout() -> None:
    asked = {**DRAWN, "sampler": "mlx-lm", "seed": 9}
    assert explained(scenario("static", "packed", **asked), scenario("static", **asked)).kind == "identical"


@pytest.mark.thorough
def test_a_seed_that_mlx_lm_is_not_told_is_named() -> None:
    asked = {**DRAWN, "sampler": "mlx-lm", "seed": 9}
    undo = inserting(seeded_zero)()
    try:
        verdict = explained(scenario("static", "packed", **asked), scenario("static", **asked))
    finally:
        undo()
    found = verdict.control("choices").detail
    assert (verdict.rule, found["run"], found["index"]) == ("choices", "b", 0)
    assert "its seed was ignored: it drew with the seed 0" in verdict.sentence


def test_other_log_probabilities_count_where_no_token_is_another() -> None:
    requests = [{"logit_bias": {str(token): 1e-3}} for token in (5, 6, 7)]
    fault = SamplerFault("", inserting(rolled("logits_processors")), {"temperature": 0.0}, requests, "")
    with injected(fault):
        verdict = explained(fault.scenario("serial"), fault.scenario("static"))
    divergence = verdict.divergence
    assert divergence is not None and not divergence.identical and divergence.stage == "bookkeeping"
    assert all(request.flip is None for request in divergence.requests)
    assert {finding.what for finding in divergence.bookkeeping} == {"processed"}
    assert "the logits of token 0 are bit-equal, and what its sampler was given is not" in str(divergence)
    assert verdict.rule == "choices" and "the logit bias of the request after it" in verdict.sentence


@pytest.mark.thorough
def test_a_draw_that_nothing_explains_is_named_without_a_cause() -> None:
    def odd(keys: dict[str, Any]) -> None:
        keys["samplers"] = [TokenDraw(Sampling(temperature=3.0, seed=77)) for _ in keys["samplers"]]

    fault = SamplerFault("", inserting(odd), {}, SEEDS, "")
    with injected(fault):
        verdict = explained(fault.scenario("serial"), fault.scenario("static"))
    found = verdict.control("choices").detail
    assert verdict.rule == "choices" and found.get("cause") is None
    assert (
        "nothing that was tried instead gives every draw (tried: the sampler of the request after it"
        in verdict.sentence
    )
    assert "one generator for all" in found["tried"] and "the seed 0 for all" in found["tried"]


@pytest.mark.thorough
def test_penalties_that_forget_a_cached_prefix_are_named() -> None:
    keys = {**PENALTY, "max_tokens": 5, "lengths": (12, 6, 9), "repetition_penalty": 4.0}
    verdict = explained(scenario(**keys), scenario(**keys, reuse_tokens=4))
    assert (verdict.kind, verdict.rule) == ("configuration", "uncached-history"), verdict.sentence
    assert "given only the tokens that mlx-lm's generate_step was fed itself" in verdict.sentence


def test_a_batch_that_is_not_told_of_a_kept_turn_is_a_bug() -> None:
    """mlx-lm's batches are given the tokens before, so that one which forgets them is wrong."""
    requests = [{"id": f"r{n}", "tokens": [5 + n, 9, 2, 7], "turn": [{"tokens": [11, 12]}]} for n in range(2)]
    asked = Scenario.from_dict(
        {"model": "tiny", "max_tokens": 5, "repetition_penalty": 4.0, "request": requests}
    )
    asked = asked.with_changes(schedule="static")
    assert explained(asked.with_changes(turns="fresh"), asked).kind == "identical"

    def forget(keys: dict[str, Any]) -> None:
        keys["all_tokens"] = [[] for _ in keys["all_tokens"]]

    undo = inserting(forget)()
    try:
        verdict = explained(asked.with_changes(turns="fresh"), asked)
    finally:
        undo()
    assert (verdict.kind, verdict.rule) == ("bug", "choices"), verdict.sentence
    assert "its processors were given no tokens that came from a cache" in verdict.sentence


@pytest.mark.thorough
def test_a_small_penalty_that_a_turn_forgets_in_low_precision_is_mlx_lms_own_way_and_not_the_caches() -> None:
    requests = [{"id": "r0", "tokens": [5, 9, 2, 7], "turn": [{"tokens": [11, 12]}]}]
    given = {
        "model": "tiny",
        "max_tokens": 6,
        "temperature": 0.8,
        "presence_penalty": 0.8,
        "presence_context_size": 64,
    }
    asked = Scenario.from_dict({**given, "request": requests})
    verdict = explain(asked.with_changes(turns="fresh"), asked, loaded=model("llama", "bf16"), repeats=1)
    assert (verdict.kind, verdict.rule) == ("configuration", "uncached-history"), verdict.sentence
    assert (
        "of r0/2 in run b are given only the tokens that mlx-lm's generate_step was fed" in verdict.sentence
    )
    whole = asked.with_changes(turns="fresh")
    of_the_cache = explain(whole, asked, loaded=model("llama", "bf16"), controls=["fresh"])
    control = of_the_cache.control("fresh")
    assert control is not None and control.result == "equal" and of_the_cache.rule != "kept", control
    assert run_choices(Case.of(whole, whole, loaded=model("llama", "bf16")), "b", {}).wrong is None


def test_a_drawn_token_is_explained_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_sampler.py").write_text(
        "from mlx_lm.generate import BatchGenerator\n"
        "native = BatchGenerator.insert\n"
        "def insert(self, *args, samplers=None, **keys):\n"
        "    return native(self, *args, samplers=[samplers[0]] * len(samplers), **keys)\n"
        "BatchGenerator.insert = insert\n"
    )
    # What a patch does to a library lasts as long as the process: it is undone with the test.
    monkeypatch.setattr(BatchGenerator, "insert", BatchGenerator.insert)
    monkeypatch.chdir(tmp_path)
    done = command_line.run(
        *(
            "explain",
            "--json",
            "--model",
            "builtin",
            "--prompt",
            "In the",
            "--prompt",
            "My son",
            "--import",
            "one_sampler",
        ),
        *(
            "--both",
            "max_tokens=3 temperature=1 top_k=30 seed=2",
            "--a",
            "serial",
            "--b",
            "static temperature=1",
        ),
    )
    IMPORTED.clear()
    answer = json.loads(done.stdout)
    assert done.exit_code == 1, done.output
    assert done.exit_code == 1 and (answer["verdict"], answer["rule"]) == ("bug", "choices"), done.output


@pytest.mark.thorough
def test_a_report_says_how_tokens_were_chosen() -> None:
    asked = scenario(temperature=0.5, top_k=3, sampler="mlx-lm", lengths=(2, 3), max_tokens=2)
    verdict = explained(asked, asked.with_changes(schedule="static"))
    assert "sampler mlx-lm, top_k 3" in str(verdict.divergence)
    greedy = scenario(logit_bias={"5": 2}, lengths=(2, 3), max_tokens=2)
    assert "greedy with logit_bias" in str(
        explained(greedy, greedy.with_changes(schedule="static")).divergence
    )


EVERY: dict[str, Any] = {
    **{"temperature": 0.8, "seed": 11, "logit_bias": {"5": 3.0, "7": -100.0}},
    **{"top_p": 0.9, "min_p": 0.01, "top_k": 20},
    **{
        "repetition_penalty": 1.3,
        "repetition_context_size": 6,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    },
}
STATE: dict[str, Any] = {**EVERY, "sampler": "mlx-lm", "xtc_probability": 0.5, "xtc_threshold": 0.05}
JOINING: dict[str, Any] = {"schedule": "continuous", "arrivals": (0, 3, 4), "active": 2}
SOUND = some_now(
    [
        ("llama", STATE, JOINING),
        ("qwen3_next", EVERY, {"prefill_chunk": 2}),
        ("llama", EVERY, {**JOINING, "layout": "packed"}),
        ("gemma3_text", STATE, {"schedule": "static"}),
        ("qwen3_next", STATE, JOINING),
        ("gemma3_text", {**EVERY, "temperature": 0.0}, JOINING),
        ("llama", STATE, {"layout": "packed", "prefill_chunk": 2}),
        ("qwen3_next", {"temperature": 1.5, "seed": 3, "sampler": "mlx-lm"}, {"schedule": "static"}),
    ],
    0,
)


@pytest.mark.parametrize(("arch", "sampling", "run"), SOUND)
def test_every_draw_of_a_sound_run_is_as_asked(
    arch: str, sampling: dict[str, Any], run: dict[str, Any]
) -> None:
    fmt = "f32" if arch == "qwen3_next" else "bf16"  # experts run in float32 only on the CPU
    asked = scenario(max_tokens=4, lengths=(6, 3, 5), **sampling, **run)
    found = run_choices(Case.of(asked, asked, loaded=model(arch, fmt)), "b", {})
    assert found.wrong is None and found.draws == 12
