from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from runs import Runs, model, scenario
from tiers import some_now
from tiny import tiny

from detdiff.engines.mlx.engine import RecordOptions
from detdiff.engines.mlx.model import LoadedModel
from detdiff.engines.mlx.serve import Models, in_dtype
from detdiff.engines.mlx.taps.injected import InjectedFault
from detdiff.errors import ReplayError
from detdiff.explain import ORDER
from detdiff.explain.case import Case
from detdiff.explain.control import Budget
from detdiff.explain.investigate import run_control

METAL = {"kernels": "mlx-metal", "lengths": (12, 9, 21), "max_tokens": 12}


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def _faulty(fault: Callable[[mx.array], mx.array], place: str = "v_proj", fmt: str = "f32") -> LoadedModel:
    """A model whose second layer has one linear module with a fault in its output."""
    loaded = tiny("llama", fmt)

    class Faulty(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return fault(super().__call__(x))

    loaded.model.layers[1].self_attn[place].__class__ = Faulty
    return loaded


def _case(runs: Runs, loaded: LoadedModel, a: str, b: str, layout: str = "padded", **keys: Any) -> Case:
    traces = [
        runs.record(loaded, scenario(schedule, layout, **{"max_tokens": 10, **keys})) for schedule in (a, b)
    ]
    return Case.of(*traces, loaded=loaded)


def test_a_sound_run_repeats(runs: Runs) -> None:
    control = run_control(_case(runs, model("llama", "bf16"), "serial", "static", **METAL), "repeat")
    assert control.result == "equal"
    assert control.detail["repetitions"] == {"a": 2, "b": 2}


@pytest.mark.parametrize("layout", some_now(["padded", "packed"], 1))
def test_a_random_sum_is_a_race(runs: Runs, layout: str) -> None:
    def shaken(y: mx.array) -> mx.array:
        return y * (1 + 1e-6 * mx.array(np.random.default_rng().standard_normal(), mx.float32))

    case = _case(runs, _faulty(shaken), "serial", "continuous", layout, lengths=(4, 3))
    control = run_control(case, "repeat")
    assert (control.result, control.detail["layer"]) == ("differs", 1)
    assert control.detail["site"].endswith("v_proj")


@pytest.mark.parametrize(
    ("layout", "kernels"), some_now([("padded", "mlx-metal"), ("packed", "candle-metal")], 1)
)
def test_holding_the_path_removes_what_the_path_made(runs: Runs, layout: str, kernels: str) -> None:
    case = _case(runs, model("llama"), "serial", "continuous", layout, **{**METAL, "kernels": kernels})
    assert case.focus.stage is not None
    control = run_control(case, "pin_kernels")
    assert control.result == "removed" and control.detail["bits_equal"]
    assert set(control.detail["seconds_per_forward"]) == {"a", "b"}


def test_holding_the_path_leaves_what_it_did_not_make(runs: Runs) -> None:
    injected_fault = InjectedFault("layers.0.self_attn.k_proj", 0, 4, 7)
    loaded, asked = model("llama"), scenario("continuous", "packed", max_tokens=6)
    b = runs.record(loaded, asked, RecordOptions(observe=0, faults=(injected_fault,)))
    control = run_control(
        Case.of(runs.record(loaded, asked), b, loaded=loaded, injected_faults=((), (injected_fault,))),
        "pin_kernels",
    )
    assert control.result == "remains"
    assert control.detail["tried"][-1]["first"]["position"] == 4


def test_what_neighbours_say_changes_nothing(runs: Runs) -> None:
    case = _case(runs, model("llama"), "serial", "static", **METAL)
    assert run_control(case, "neighbour_content").result == "equal"


def test_a_leak_between_slots_is_named_at_its_place(runs: Runs) -> None:
    def leaks(y: mx.array) -> mx.array:
        return mx.concatenate([y[:1] + 1e-3 * y[1:2], y[1:]]) if y.shape[0] > 1 else y

    case = _case(runs, _faulty(leaks), "serial", "static", lengths=(9, 9, 4))
    assert case.focus.id == "r0"
    control = run_control(case, "neighbour_content")
    assert control.result == "differs"
    assert (control.detail["layer"], control.detail["site"]) == (1, "layers.1.self_attn.v_proj")
    assert control.detail["entry"]["entry_kind"] == "V"
    assert control.detail["entry"]["position"] == 0


def test_neighbours_of_another_length_change_the_path_only_where_it_goes_by_rows(runs: Runs) -> None:
    native = _case(runs, model("llama"), "serial", "continuous", "packed", arrivals=(0, 2, 5))
    assert run_control(native, "neighbour_length").result == "not_run"  # nothing diverges
    case = _case(
        runs, model("llama"), "serial", "continuous", "packed", kernels="candle-metal", arrivals=(0, 2, 5)
    )
    assert run_control(case, "neighbour_length").result in ("equal", "differs")


def test_a_request_alone_has_no_neighbours(runs: Runs) -> None:
    loaded, injected_fault = model("llama"), InjectedFault("layers.0.self_attn.v_proj", 0, 1, 1)
    asked = scenario(lengths=(6,), max_tokens=4)
    b = runs.record(loaded, asked, RecordOptions(observe=0, faults=(injected_fault,)))
    case = Case.of(runs.record(loaded, asked), b, loaded=loaded, injected_faults=((), (injected_fault,)))
    control = run_control(case, "neighbour_content")
    assert control.result == "not_run" and "no neighbours" in control.sentence


def test_rounding_shrinks_in_float32(runs: Runs) -> None:
    loaded = tiny("llama", "bf16")
    before = [(name, array.dtype) for name, array in tree_flatten(loaded.model.parameters())]
    case = _case(runs, loaded, "serial", "static", **{**METAL, "max_tokens": 24})
    control = run_control(case, "dtype")
    assert control.result == "scales", control.sentence
    assert control.detail["difference_other"] < control.detail["difference"]
    assert [(name, array.dtype) for name, array in tree_flatten(loaded.model.parameters())] == before


def test_a_bug_does_not_shrink_in_float32(runs: Runs) -> None:
    def batched(y: mx.array) -> mx.array:
        return y * 1.25 if y.shape[0] > 1 else y

    case = _case(runs, _faulty(batched, fmt="bf16"), "serial", "static")
    control = run_control(case, "dtype")
    assert control.result == "stays", control.sentence
    assert control.detail["difference_other"] == pytest.approx(0.25, rel=1e-3)


def test_a_float32_model_has_no_finer_dtype(runs: Runs) -> None:
    control = run_control(_case(runs, model("llama"), "serial", "static", **METAL), "dtype")
    assert control.result == "not_run" and "float32 already" in control.sentence


def test_parameters_come_back_after_an_exception() -> None:
    loaded = tiny("llama", "bf16")
    before = dict(tree_flatten(loaded.model.parameters()))
    with pytest.raises(ZeroDivisionError), in_dtype(Models(loaded), "float32"):
        raise ZeroDivisionError
    after = dict(tree_flatten(loaded.model.parameters()))
    assert all(after[name] is array for name, array in before.items())


def test_controls_that_do_not_fit_the_budget_say_so(runs: Runs) -> None:
    case = _case(runs, model("llama"), "serial", "static", **METAL)
    case.budget = Budget(reruns=1)
    for name in ORDER:
        assert run_control(case, name).result == "not_run", name


def test_a_trace_of_another_model_is_refused(runs: Runs) -> None:
    loaded = model("llama")
    trace = runs.record(loaded, scenario(max_tokens=2))
    other = replace(loaded, identity={**loaded.identity, "weights_sha256": "0" * 64})
    with pytest.raises(ReplayError, match="weights hash"):
        Case.of(trace, trace, loaded=other)


def test_scenarios_are_recorded_first(runs: Runs) -> None:
    asked = scenario(max_tokens=3, lengths=(4, 3))
    case = Case.of(asked, replace(asked), loaded=model("llama"), budget=5)
    assert case.divergence.identical
    assert case.budget.reruns == 5
    assert run_control(case, "patch_in").sentence == "the two runs do not diverge"


def test_attention_whose_module_calls_its_scale_otherwise_is_judged(runs: Runs) -> None:
    loaded = tiny("llama", "f32")
    for layer in loaded.model.layers:
        native = type(layer.self_attn)

        class Renamed(native):  # type: ignore[misc, valid-type]
            def __call__(self, *args: Any, **kw: Any) -> Any:
                self.scale = self.softmax_scale
                try:
                    return super().__call__(*args, **kw)
                finally:
                    del self.scale

        layer.self_attn.softmax_scale = layer.self_attn.scale
        del layer.self_attn.scale
        layer.self_attn.__class__ = Renamed
    injected_fault = InjectedFault("layers.1.self_attn.attention", 0, 4, 7)
    asked = scenario("serial", max_tokens=4)
    b = runs.record(loaded, asked, RecordOptions(observe=0, faults=(injected_fault,)))
    case = Case.of(runs.record(loaded, asked), b, loaded=loaded, injected_faults=((), (injected_fault,)))
    control = run_control(case, "oracle")
    assert control.result == "inside", control.sentence
    assert [pair["kind"] for pair in control.detail["pairs"]] == ["attention"], dict(
        control.detail["skipped"]
    )
