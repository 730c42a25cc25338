"""A kernel plan decides how each linear site runs, the trace says so, and nothing else changes."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from runs import Runs, model, scenario, values
from tiers import examples, some_now

from detdiff.compare import compare
from detdiff.engines.mlx.taps.kernel_plan import CallSite, PathChooser, weight_of
from detdiff.engines.mlx.taps.operations import Operations
from detdiff.errors import KernelPlanError
from detdiff.scenario import KernelPlan, PathRule
from detdiff.trace import Trace
from detdiff_kernels import Call, kernel

CONTINUOUS: dict[str, Any] = {"arrivals": (0, 2, 5), "max_tokens": 6}


def call(rows: int, second_last: int, op: Any = "linear") -> Call:
    return Call(op, rows, second_last, 64, 64, "float32", None)


def chosen_path(plan: PathChooser, site: str, phase: str, made: Call) -> tuple[str, str]:
    """Name and rule of the one path that all rows of a call take."""
    ((first, last, path),) = plan.choose(CallSite(site, made.op, phase), made)
    assert (first, last) == (0, made.rows)
    return path.name, path.rule


@pytest.mark.parametrize(
    ("site", "phase", "rows", "second_last", "path"),
    [
        ("layers.3.mlp.up_proj", "decode", 2, 2, "forced/pad:8"),
        ("layers.3.mlp.up_proj", "decode", 8, 1, "forced/pad:8"),
        ("layers.3.mlp.up_proj", "decode", 1, 1, "native"),
        ("layers.3.mlp.up_proj", "decode", 9, 9, "native"),
        ("layers.3.mlp.up_proj", "mixed", 2, 2, "native"),
        ("layers.3.self_attn.q_proj", "decode", 2, 2, "native"),
        ("lm_head", "prefill", 3, 3, "forced/rows"),
        ("lm_head", "prefill", 3, 1, "native"),
        ("layers.3.self_attn.o_proj", "prefill", 40, 40, "reference/candle-metal/mm"),
    ],
)
def test_the_first_rule_that_holds_decides(
    site: str, phase: str, rows: int, second_last: int, path: str
) -> None:
    plan = KernelPlan(
        rules=(
            PathRule("layers.*.mlp.*", "decode", "2..8", "pad:8"),
            PathRule("lm_head", "prefill", "1..", "rows", second_last="2.."),
            PathRule("*.o_proj", "any", "9..", "candle-metal/mm"),
            PathRule("*.up_proj", "any", "2..8", "native"),
        )
    )
    name, rule = chosen_path(PathChooser(plan), site, phase, call(rows, second_last))
    assert name == path
    # A native path needs no rule, unless a rule asked for it.
    assert ("rule: site" in rule) == (path != "native" or (phase == "mixed" and rows == 2))


def test_rules_come_before_split_rows_and_split_rows_before_the_profile() -> None:
    rule = PathRule("lm_head", "any", "1..", "native")
    chooser = PathChooser(KernelPlan("candle-metal", 4, (rule,)))
    assert chosen_path(chooser, "lm_head", "decode", call(9, 9, "head"))[0] == "native"
    name, text = chosen_path(chooser, "norm_proj", "decode", call(4, 4))
    assert name == "reference/candle-metal/mv" and "split_rows 4: 4 rows <= 4" in text
    assert chosen_path(chooser, "norm_proj", "decode", call(5, 5))[0] == "reference/candle-metal/mm"
    split = PathChooser(KernelPlan(None, 4))
    assert chosen_path(split, "x", "any", call(4, 4))[0] == "forced/rows"
    assert chosen_path(split, "x", "any", call(1, 1))[0] == "native"
    assert chosen_path(split, "x", "any", call(4, 4, "switch"))[0] == "native"
    assert PathChooser(KernelPlan()).native and PathChooser(KernelPlan("native")).native
    assert not chooser.native


@settings(max_examples=examples(40))
@given(
    st.integers(1, 3), st.integers(1, 9), st.sampled_from(("rows", "pad:1", "pad:4", "pad:64")), st.booleans()
)
def test_forced_paths_give_the_bits_of_the_native_one(slots: int, rows: int, path: str, biased: bool) -> None:
    of = model("qwen2", "q4" if biased else "bf16").model
    module = of.model.layers[0].self_attn.q_proj
    dtype = mx.float32 if biased else mx.bfloat16
    x = mx.random.normal((slots, rows, 64), key=mx.random.key(slots * 16 + rows)).astype(dtype)
    operations = Operations(KernelPlan(rules=(PathRule("*", "any", "1..", path),)))
    place = CallSite("layers.0.self_attn.q_proj", "linear", "decode")
    found, (taken,) = operations.linear.run(place, module, module, x)
    assert (taken.path, taken.rows, taken.second_last) == (f"forced/{path}", slots * rows, rows)
    assert found.shape == module(x).shape and found.dtype == dtype
    assert bool(mx.array_equal(found, module(x)))


def calls(trace: Trace, pattern: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(forward, call) of every forward for the sites that match."""
    found = []
    for line in trace.forwards():
        for number, site in enumerate(trace.sites):
            if site.kind in ("linear", "head", "switch") and fnmatchcase(site.name, pattern):
                made = trace.call(line["forward"], number)
                if made is None:
                    # Only a head whose logits nobody asks for does not run.
                    assert site.kind == "head" and line["phase"] != "decode"
                    continue
                found.append((line, dict(made)))
    return found


@pytest.mark.parametrize(
    ("arch", "fmt"), some_now([("llama", "bf16"), ("qwen2", "q4"), ("qwen3_moe", "f32")], 0, 2)
)
@pytest.mark.parametrize("path", ["rows", "pad:32"])
@pytest.mark.parametrize("layout", some_now(["padded", "packed"], 0))
def test_a_forced_run_is_bit_equal_here_and_says_what_it_did(
    runs: Runs, arch: str, fmt: str, path: str, layout: str
) -> None:
    rule = {"site": "*_proj", "path": path, "rows": "2.."}
    plain = runs.record(model(arch, fmt), scenario("continuous", layout, **CONTINUOUS))
    forced = runs.record(model(arch, fmt), scenario("continuous", layout, rule=[rule], **CONTINUOUS))
    assert compare(plain, forced).identical
    seen = {made["path"] for _, made in calls(forced, "*_proj")}
    assert seen == {"native", f"forced/{path}"}
    for _, made in calls(forced, "*_proj"):
        assert (made["path"] == f"forced/{path}") == (made["rows"] > 1)
        assert ("*_proj" in made["rule"]) == (made["rows"] > 1)
    assert {made["path"] for _, made in calls(plain, "*")} == {"native"}


def test_candle_metal_looks_at_the_shape_not_at_the_rows(runs: Runs) -> None:
    """[2, 1, K] stays with the vector kernel, [1, 2, K] goes to the matrix kernel."""
    paths: dict[str, set[str]] = {}
    for layout in ("padded", "packed"):
        trace = runs.record(model("llama"), scenario("static", layout, kernels="candle-metal", max_tokens=6))
        decode = [(line, made) for line, made in calls(trace, "*") if line["phase"] == "decode"]
        assert decode and all(made["rows"] in (1, 2, 3) for _, made in decode)
        three = [made for _, made in decode if made["rows"] == 3]
        assert three and {made["second_last"] for made in three} == {1 if layout == "padded" else 3}
        paths[layout] = {made["path"] for made in three}
        for line, made in calls(trace, "*"):
            kernel_name = "mv" if made["second_last"] == 1 else "mm"
            if made["path"] != "native":
                assert made["path"] == f"reference/candle-metal/{kernel_name}"
                assert made["rule"].startswith("candle-metal: second-to-last dimension")
            else:
                # Only logits that nobody asked for may be left to the backend: they are never computed.
                assert line["phase"] == "prefill"
    assert paths == {"padded": {"reference/candle-metal/mv"}, "packed": {"reference/candle-metal/mm"}}


@pytest.mark.parametrize("split", some_now([1, 2, 8, 1000], 1, 3))
def test_split_rows_is_a_limit(runs: Runs, split: int) -> None:
    asked = scenario("continuous", "packed", kernels="candle-metal", split_rows=split, **CONTINUOUS)
    trace = runs.record(model("llama"), asked)
    seen = set()
    for _, made in calls(trace, "*.mlp.*"):
        short = made["rows"] <= split or made["rows"] == 1
        assert made["path"] == f"reference/candle-metal/{'mv' if short else 'mm'}"
        assert ("split_rows" in made["rule"]) == (1 < made["rows"] <= split)
        seen.add(short)
    assert seen == ({True} if split == 1000 else {True, False})


def test_held_to_one_kernel_no_composition_matters(runs: Runs) -> None:
    """What the reference case calls the control: above every number of rows, the split gives one kernel."""
    plan = {"kernels": "candle-metal", "split_rows": 1000, "layout": "packed", "max_tokens": 12}
    of = model("llama", "f32")
    base = runs.record(of, scenario("serial", **plan))
    assert compare(base, runs.record(of, scenario("continuous", arrivals=(0, 2, 5), **plan))).identical
    plan["split_rows"] = 2
    free = compare(
        runs.record(of, scenario("serial", **plan)),
        runs.record(of, scenario("continuous", arrivals=(0, 2, 3), **plan)),
    )
    assert not free.identical and free.stage == "bits"
    origins = [request.origin for request in free.requests if request.origin is not None]
    assert origins
    for origin in origins:
        assert origin.kind in ("linear", "head")
        assert {origin.path_a, origin.path_b} == {"reference/candle-metal/mv", "reference/candle-metal/mm"}
        assert origin.rows_a != origin.rows_b


def test_the_head_sees_only_the_rows_that_answer(runs: Runs) -> None:
    for plan in ({}, {"kernels": "candle-metal"}):
        trace = runs.record(
            model("qwen2"), scenario("continuous", "packed", prefill_chunk=5, **CONTINUOUS, **plan)
        )
        answering: dict[int, int] = {}
        for forward in trace.generated().forward.tolist():
            answering[forward] = answering.get(forward, 0) + 1
        rows = {line["forward"]: made["rows"] for line, made in calls(trace, "lm_head")}
        total = {line["forward"]: line["shape"][1] for line in trace.forwards()}
        assert {forward: rows[forward] for forward in answering} == answering
        assert any(total[forward] > rows[forward] for forward in answering)
        everywhere = {line["forward"]: made["rows"] for line, made in calls(trace, "layers.0.mlp.up_proj")}
        assert everywhere == total


def dense(of: Any, fmt: str) -> NDArray[np.float32]:
    """The weight in float32 by way of MLX's own layer: what the layer gives for each unit vector."""
    if fmt != "q4":
        return np.array(of.weight.astype(mx.float32))
    whole = mx.dequantize(of.weight, of.scales, of.biases, group_size=of.group_size, bits=of.bits)
    return np.array(whole)


@pytest.mark.parametrize("name", some_now(["candle-metal/mv", "candle-metal/mm"], 0))
@pytest.mark.parametrize(("fmt", "site"), [("q4", "q_proj"), ("f32", "k_proj"), ("bf16", "v_proj")])
def test_a_reference_kernel_gets_the_weights_and_the_bias(runs: Runs, name: str, fmt: str, site: str) -> None:
    of = model("qwen2", fmt)
    rule = {"site": f"layers.1.self_attn.{site}", "path": name}
    keys = {"capture": "window", "window_sites": [rule["site"]], "max_tokens": 4}
    trace = runs.record(of, scenario("static", "packed", rule=[rule], **keys))
    module = of.model.model.layers[1].self_attn[site]
    assert "bias" in module and float(mx.abs(module.bias).max()) > 0
    weight = dense(module, fmt)
    # MLX rounds scale times code before it adds the bias; the library rounds once.
    assert np.allclose(weight_of(module).floats(), weight, rtol=1e-6, atol=1e-7)
    reference = kernel(name)
    staged = reference.stage(weight_of(module), "bfloat16" if fmt == "bf16" else "float32")
    given, made = (values(trace, rule["site"], port) for port in ("in", "out"))
    assert len(given) >= 36
    dtype = mx.bfloat16 if fmt == "bf16" else mx.float32
    for key, row in given.items():
        x = mx.array(row[None]).view(dtype)
        product = reference(np.array(x.astype(mx.float32)), staged)
        expected = mx.array(product).astype(dtype) + module.bias
        assert bool(mx.array_equal(expected[0].view(mx.uint8), mx.array(made[key]).view(mx.uint8)))
    paths = {call_["path"] for _, call_ in calls(trace, rule["site"])}
    assert paths == {f"reference/{name}"}


def test_the_tied_head_runs_by_the_plan_too(runs: Runs) -> None:
    trace = runs.record(model("llama", "q4"), scenario("static", kernels="candle-metal", max_tokens=4))
    (head,) = [site for site in trace.sites if site.kind == "head"]
    assert head.name == "embed_tokens.as_linear"
    used = {made["path"] for line, made in calls(trace, head.name) if line["phase"] != "prefill"}
    assert used == {"reference/candle-metal/mv"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"kernels": "candle-mettal"}, "candle-metal"),
        ({"rule": [{"site": "*", "path": "candle-metal/gemv"}]}, "candle-metal/gemv.*candle-metal/mv"),
        (
            {"rule": [{"site": "layers.*.mlp.gate", "path": "rows"}]},
            r"layers\.\*\.mlp\.gate.* matches none of",
        ),
        ({"rule": [{"site": "norm", "path": "rows"}]}, "matches none of"),
        ({"rule": [{"site": "*.attention", "path": "rows"}]}, r"attention\) cannot take; expected native"),
        ({"rule": [{"site": "*.attention", "path": "candle-metal/mm"}]}, r"attention\) cannot take"),
        ({"kernels": "candle-metal:chip=3"}, "chip"),
        ({"kernels": "./not-there.toml"}, r"not-there\.toml.* cannot be read"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(runs: Runs, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(KernelPlanError, match=words) as caught:
        runs.record(model("llama"), scenario(**keys))
    assert "\n" not in str(caught.value)
