"""llama.cpp and transformers: forwards as simulated, every token timed, answers as recorded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llama.models import need_llama, tiny_gguf
from tiers import only_in_full
from torch_models import need_torch, tiny_llama, torch_or_skip

from detdiff import record
from detdiff.bench.counts import recorded
from detdiff.bench.measure import PolicyResult, answers, measure
from detdiff.bench.policies import policies, with_pins
from detdiff.bench.simulate import simulate
from detdiff.bench.workload import Lengths, WorkItem, Workload, drawn
from detdiff.errors import PolicyUnusable
from detdiff.scenario import Scenario


def measured(engine: Any, name: str, model: str, asked: list[str]) -> list[PolicyResult]:
    workload = drawn(6, Lengths.parse("exponential:8"), Lengths.parse("exponential:5"), seed=3)
    requests = [
        {
            "tokens": [(7 * n + 3 * i) % 50 + 5 for i in range(item.prompt_length)],
            "max_tokens": item.answer_length,
            "ignore_stop": True,
        }
        for n, item in enumerate(workload.items)
    ]
    scenario = Scenario.from_dict(
        {
            "model": model,
            "engine": {"name": name, **engine.settings},
            "schedule": "static",
            "request": requests,
        }
    )
    found = [PolicyResult(policy) for policy in policies(scenario, asked)]
    answers(engine, found, workload)
    measure(engine, found, 1)
    for each in found:
        assert each.simulated is True, (each.policy.name, each.why)
        assert [len(times) for times in each.runs[0].tokens] == [
            item.answer_length for item in workload.items
        ]
        assert all(times == sorted(times) and times[0] >= 0 for times in each.runs[0].tokens)
    return found


@pytest.mark.parametrize("unified", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_llama_cpp_runs_the_graphs_that_are_simulated(tmp_path: Path, unified: bool) -> None:
    need_llama()
    from detdiff.engines.llama_cpp.engine import open_llama

    path = tiny_gguf(tmp_path / "tiny.gguf", "Q4_1")
    engine = open_llama(str(path), {"unified": unified, "ubatch": 16})
    asked = ["static:2", "static", "continuous:3", "continuous:4 row_budget=9 prefill_chunk=5"]
    found = measured(
        engine, "llama.cpp", str(path), [*asked, "continuous:4 split_rows=4", "static split_rows=99"]
    )
    for each in found[-2:]:
        assert each.sameness == "identical" or unified, each.policy.name
    # All rows one by one, and those of small batches beside batches that are as they were.
    assert found[-1].counts is not None and {rows for rows, _ in found[-1].counts.rows_per_forward} == {1}
    assert found[-2].counts is not None and max(rows for rows, _ in found[-2].counts.rows_per_forward) > 4
    assert len({each.counts.forwards for each in found if each.counts is not None}) > 3


def test_transformers_runs_the_batches_that_are_simulated() -> None:
    need_torch()
    from detdiff.engines.transformers import TransformersEngine

    engine = TransformersEngine(tiny_llama(torch_or_skip()))
    asked = ["static:2", "static", "continuous:4 row_budget=7 page_tokens=4"]
    found = measured(engine, "transformers", "tiny", asked)
    assert found[2].counts is not None and found[2].counts.padding > 0
    continuous = found[3].counts
    assert continuous is not None and continuous.padding == 0
    assert max(rows for rows, _ in continuous.rows_per_forward) == 7


def test_transformers_continuous_batches_are_simulated_with_arrivals(tmp_path: Path) -> None:
    need_torch()
    from detdiff.engines.transformers import TransformersEngine

    engine = TransformersEngine(tiny_llama(torch_or_skip()))
    lengths, come = (3, 9, 1, 5, 7), (4, 0, 0, 1, 60)
    items = tuple(WorkItem(n, m, float(at)) for n, m, at in zip(lengths, (4, 2, 6, 1, 3), come, strict=True))
    requests = [
        {
            "tokens": [5 + n] * item.prompt_length,
            "max_tokens": item.answer_length,
            "arrival": int(item.arrival),
        }
        for n, item in enumerate(items)
    ]
    keys = {"model": "tiny", "engine": "transformers", "schedule": "continuous", "request": requests}
    for number, more in enumerate(
        ({"active": 2}, {"active": 3, "row_budget": 4}, {"active": 4, "row_budget": 2}, {})
    ):
        scenario = Scenario.from_dict({**keys, **more, "ignore_stop": True})
        trace = record(scenario, tmp_path / str(number), engine=engine)
        found = [(each.rows, each.shape) for each in simulate(scenario, Workload(items, "these"))]
        assert found == [(each.rows, each.shape) for each in recorded(trace)]


@pytest.mark.thorough
def test_pinned_kernels_answer_as_serial_does_in_transformers_and_others_do_not() -> None:
    torch = torch_or_skip()
    from detdiff.engines.transformers import TransformersEngine

    model = tiny_llama(torch)
    for layer in model.model.layers:
        layer.self_attn.k_proj.forward = partial(halves_from_9_rows, torch, layer.self_attn.k_proj)
    engine = TransformersEngine(model)
    workload = drawn(4, Lengths.parse("5"), Lengths.parse("4"))
    requests = [
        {"tokens": [(7 * n + 3 * i) % 50 + 5 for i in range(5)], "max_tokens": 4, "ignore_stop": True}
        for n in range(4)
    ]
    scenario = Scenario.from_dict(
        {"model": "tiny", "engine": "transformers", "schedule": "static", "request": requests}
    )
    asked = ["static", "static batch-invariant", "continuous:3 batch-invariant"]
    found = [PolicyResult(each) for each in with_pins(engine, policies(scenario, asked), compositions=2)]
    answers(engine, found, workload)
    measure(engine, found, 1)
    serial, plain, *pinned = found
    assert plain.sameness != "identical" and not plain.policy.pinned
    for each in pinned:
        assert each.invariance == "identical" and each.texts == serial.texts
        assert "2 random compositions" in each.policy.pinned and each.runs
    # Nothing of it is left on the model.
    again = [PolicyResult(each) for each in policies(scenario, ["static"])]
    answers(engine, again, workload)
    assert again[1].sameness == plain.sameness


def halves_from_9_rows(torch: Any, module: Any, x: Any) -> Any:
    half, linear = module.weight.shape[1] // 2, torch.nn.functional.linear
    if x.shape[0] * x.shape[1] >= 9:
        return linear(x[..., half:], module.weight[:, half:]) + linear(x[..., :half], module.weight[:, :half])
    flat = x.reshape(-1, x.shape[-1])
    return torch.cat([linear(row[None], module.weight) for row in flat]).reshape(*x.shape[:-1], -1)


def test_an_engine_without_kernels_to_pin_is_refused() -> None:
    engine: Any = SimpleNamespace(name="llama.cpp", capabilities=frozenset())
    asked = policies(Scenario.from_flags("tiny.gguf", ["x"], "engine=llama.cpp"), ["static batch-invariant"])
    with pytest.raises(
        PolicyUnusable, match="engine llama.cpp cannot be pinned; expected mlx or transformers"
    ):
        with_pins(engine, asked)
    with pytest.raises(AssertionError, match="with_pins"), asked[1].held():
        pass


def under_policies(engine: Any, keys: dict[str, Any], asked: list[str], folder: Path) -> list[PolicyResult]:
    """32 requests of drawn lengths: each policy is counted as simulated, and what is identical has serial's text."""
    workload = drawn(32, Lengths.parse("exponential:3"), Lengths.parse("exponential:2"), seed=6)
    requests = [
        {
            "tokens": [(97 * n + 31 * i) % 20000 + 100 for i in range(item.prompt_length)],
            "max_tokens": item.answer_length,
            "ignore_stop": True,
        }
        for n, item in enumerate(workload.items)
    ]
    scenario = Scenario.from_dict({**keys, "schedule": "continuous", "request": requests})
    found = [PolicyResult(policy) for policy in with_pins(engine, policies(scenario, asked), compositions=2)]
    answers(engine, found, workload, folder)
    assert [each.simulated for each in found] == [True] * (len(asked) + 1)
    for each in found:
        assert each.sameness != "identical" or each.texts == found[0].texts, each.policy.name
    return found


@pytest.mark.thorough
@pytest.mark.real_model
def test_smollm2_in_llama_cpp_under_six_policies(smollm2_q8_0_gguf: Path, tmp_path: Path) -> None:
    need_llama()
    from detdiff.engines.llama_cpp.engine import open_llama

    engine = open_llama(str(smollm2_q8_0_gguf), {})
    asked = ["static:8", "continuous:8", "continuous:16", "continuous:8 row_budget=9 prefill_chunk=4"]
    keys = {"model": str(smollm2_q8_0_gguf), "engine": "llama.cpp"}
    found = under_policies(engine, keys, [*asked, "continuous:8 split_rows=999"], tmp_path)
    # Each row alone is the same whoever is beside.
    assert found[-1].invariance == "identical"


@pytest.mark.real_model
@only_in_full("SmolLM2 under six policies in MLX takes minutes")
def test_smollm2_in_mlx_under_six_policies(smollm2_bf16: Path, tmp_path: Path) -> None:
    from detdiff.engines.registry import open_named

    asked = [
        "static:8",
        "continuous:8",
        "continuous:8 layout=packed",
        "continuous:8 layout=packed split_rows=4",
    ]
    keys = {"model": str(smollm2_bf16)}
    engine = open_named("mlx", str(smollm2_bf16), {})
    found = under_policies(engine, keys, [*asked, "continuous:8 layout=packed batch-invariant"], tmp_path)
    assert [each.invariance for each in found] == ["identical"] * 6
