"""Runs that score given tokens or embed prompts: the same numbers in every composition, the model's own, and faults at their place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from runs import Runs, model, scenario
from tiers import some_now

from detdiff.compare import compare
from detdiff.engines.mlx.engine import MlxEngine, RecordOptions
from detdiff.engines.mlx.taps.injected import InjectedFault
from detdiff.errors import ContextExceeded, NothingComparable, NothingToCheck, ScenarioConflict
from detdiff.explain import explain
from detdiff.report import divergence_text, verdict_text
from detdiff.scenario import Scenario

COMPOSITIONS: list[dict[str, Any]] = [
    {"schedule": "static"},
    {"schedule": "static", "active": 2, "prefill_chunk": 5},
    {"schedule": "serial", "prefill_chunk": 7},
    {"schedule": "continuous", "layout": "packed", "row_budget": 9, "arrivals": (0, 1, 1)},
]


def scored(**keys: Any) -> Scenario:
    """Requests of 12, 3 and 21 tokens, scored from position 1 on."""
    return scenario(**{"task": "score", **keys})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("scores"))


@pytest.mark.parametrize("task", ["score", "embed"])
@pytest.mark.parametrize("arch", some_now(["llama", "gemma3_text", "qwen3_moe", "qwen3_next"], 0, 1))
def test_every_composition_gives_the_same_numbers(runs: Runs, arch: str, task: str) -> None:
    alone = runs.once(model(arch), scored(task=task))
    for composition in COMPOSITIONS:
        if arch == "qwen3_next" and composition.get("layout") == "packed":
            continue
        # A window's ring holds keys in the order in which chunks came, which attention sums in (docs/findings.md).
        if arch == "gemma3_text" and "prefill_chunk" in composition:
            continue
        other = runs.record(model(arch), scored(task=task, **composition))
        found = compare(alone, other)
        assert found.identical, (composition, divergence_text(found))
        assert found.compared.rows > 30
        assert np.array_equal(sorted_vectors(alone), sorted_vectors(other))


def sorted_vectors(trace: Any) -> Any:
    found = trace.embeddings()
    return found.vector[np.argsort(found.request)].view(np.uint32)


def test_scores_are_the_models_own(runs: Runs) -> None:
    loaded = model("llama")
    trace = runs.once(loaded, scored(schedule="static"))
    generated = trace.generated()
    for number, request in enumerate(trace.requests):
        mine = generated.request == number
        tokens = request["tokens"] + generated.token[mine].tolist()
        logits = loaded.model(mx.array([tokens[:-1]]))[0].astype(mx.float32)
        expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        rows = np.arange(len(request["tokens"]) - 1, len(tokens) - 1)
        own = generated.top_ids[mine] == generated.token[mine][:, None]
        assert own.sum() == len(rows) == len(tokens) - 1
        np.testing.assert_allclose(
            generated.top_logits[mine][own], expected[rows, generated.token[mine]], rtol=2e-6, atol=2e-6
        )


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_embeddings_are_pooled_last_hidden_states(runs: Runs, pooling: str) -> None:
    loaded = model("llama")
    trace = runs.record(loaded, scored(task="embed", schedule="static", pooling=pooling))
    found = trace.embeddings()
    for request, vector in zip(found.request.tolist(), found.vector, strict=True):
        hidden = np.array(loaded.model.model(mx.array([trace.requests[request]["tokens"]]))[0]).astype(
            np.float64
        )
        expected = {"mean": hidden.mean(axis=0), "first": hidden[0], "last": hidden[-1]}[pooling]
        assert np.array_equal(vector, expected.astype(np.float32))


@pytest.mark.parametrize("task", ["score", "embed"])
def test_an_injected_fault_is_named_where_it_is(runs: Runs, task: str) -> None:
    loaded, asked = model("llama", "bf16"), scored(task=task, schedule="static")
    fault = InjectedFault("layers.1.mlp.down_proj", 2, 17, 3)
    other = runs.record(loaded, asked, RecordOptions(observe=0, faults=(fault,)))
    found = compare(runs.once(loaded, asked), other)
    named = [(r.id, r.origin.site, r.origin.position) for r in found.requests if r.origin is not None]
    assert named == [("r2", "layers.1.mlp.down_proj", 17)]
    moved = next(r for r in found.requests if r.id == "r2")
    if task == "score":
        assert moved.scored is not None and moved.scored.tokens == 20 and moved.scored.a != moved.scored.b
        assert moved.scored.index == 17
        assert "log-probabilities of given tokens move by at most" in divergence_text(found)
    else:
        assert moved.embedding is not None and moved.embedding.differing > 0
        assert "the least cosine of two embeddings is" in divergence_text(found)
    assert "no token flips" not in divergence_text(found) and "generated token" not in divergence_text(found)


def test_a_composition_that_moves_scores_is_rounding(runs: Runs) -> None:
    loaded = model("llama", "bf16")
    serial, static = (
        runs.record(loaded, scored(kernels="candle-metal", layout="packed", **keys))
        for keys in ({"schedule": "serial", "row_budget": 1}, {"schedule": "static"})
    )
    verdict = explain(serial, static, engine=MlxEngine(loaded))
    assert verdict.kind == "numerics", verdict_text(verdict)
    assert verdict.divergence is not None
    sizes = [request.scores for request in verdict.divergence.requests if request.scores is not None]
    assert {size.dtype for size in sizes} == {"BF16"} and all((size.max_ulp or 0) < 64 for size in sizes), (
        sizes
    )
    assert any(s.differing for s in sizes)
    content = verdict.control("neighbour_content")
    assert content is not None and content.result == "equal"


def test_a_pad_token_that_is_no_number_is_named_as_padding(runs: Runs) -> None:
    loaded = model("qwen2")
    table = loaded.model.model.embed_tokens.weight
    broken = mx.array(table)
    broken[0] = mx.nan
    lengths = (12, 3)
    asked = {"task": "embed", "lengths": lengths}
    tokens = scenario(lengths=lengths).requests
    assert not any(0 in (request.tokens or ()) for request in tokens)
    loaded.model.model.embed_tokens.weight = broken
    try:
        serial, static = (runs.record(loaded, scored(**asked, schedule=s)) for s in ("serial", "static"))
        verdict = explain(serial, static, engine=MlxEngine(loaded))
    finally:
        loaded.model.model.embed_tokens.weight = table
    assert verdict.kind == "bug", verdict_text(verdict)
    finite = verdict.control("finite")
    assert finite is not None and finite.detail["first"]["site"] == "embed_tokens"
    assert finite.detail["first"]["padding"] is True
    vectors = next(r.embedding for r in compare(serial, static).requests if r.id == "r1")
    assert vectors is not None and vectors.not_finite_b and not vectors.not_finite_a


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        (
            {"task": "generate", "request": [{"tokens": [1, 2], "score_from": 2}]},
            ScenarioConflict,
            "set task to score",
        ),
        (
            {"task": "score", "request": [{"tokens": [1, 2], "score_from": 2}]},
            NothingToCheck,
            "lower score_from",
        ),
        ({"task": "score", "temperature": 0.5}, ScenarioConflict, "generates nothing"),
        ({"task": "score", "schedule": "continuous"}, ScenarioConflict, "layout packed"),
        ({"task": "score", "pooling": "last"}, ScenarioConflict, "set task to embed"),
        ({"task": "embed", "lengths": (600,)}, ContextExceeded, "Shorten the prompt"),
        (
            {"task": "embed", "request": [{"tokens": [1], "continuation": " a"}]},
            ScenarioConflict,
            "remove one of them",
        ),
    ],
)
def test_what_cannot_be_scored_or_embedded_is_refused(
    runs: Runs, keys: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        runs.record(model("llama"), scored(**keys))


def test_two_tasks_are_not_compared(runs: Runs) -> None:
    traces = [runs.once(model("llama"), scored(task=task)) for task in ("score", "embed")]
    with pytest.raises(NothingComparable, match="one task in both"):
        compare(*traces)


def test_a_continuation_is_tokenised_with_its_prompt(tmp_path: Path) -> None:
    from detdiff.engines.record import record

    asked = {"prompt": "In the beginning God created", "continuation": " the heaven"}
    trace = record(
        Scenario.from_dict({"model": "builtin", "task": "score", "request": [asked]}), tmp_path / "t"
    )
    generated = trace.generated()
    text = "".join(trace.texts()[token] for token in generated.token.tolist())
    assert text == " the heaven"
    assert len(generated.token) < 6
