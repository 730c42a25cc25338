"""Torch under the probe: a linear operation with random weights, functions, and the linear sites of a torch model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import paragraph, run
from torch_models import torch_or_skip

from detdiff.engines.transformers.linear_sites import torch_shapes
from detdiff.errors import ProbeBackendUnusable, ProbeSiteUnknown
from detdiff.probe import Function, probe

PROCESSOR = Path("/proc/cpuinfo")
WORDS = set(PROCESSOR.read_text(encoding="utf-8").split()) if PROCESSOR.is_file() else set[str]()


@pytest.fixture
def torch() -> Iterator[Any]:
    yield torch_or_skip()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_linear_operation_of_torch_is_the_same_sum_as_anywhere(torch: Any, dtype: str) -> None:
    found = probe(f"linear:256,64,{dtype}", on="torch", rows="1..8", seeds=2, timed=False)
    assert sorted(m for members in found.classes for m in members) == list(range(1, 9))
    assert found.repeat == found.neighbours == () and found.paths == {}
    assert found.errors is not None and all(each.non_finite == 0 for each in found.errors)
    bound = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 3e-2}[dtype]
    assert all(each.max_relative < bound for each in found.errors if each.max_relative is not None)
    assert found.notes == (
        f"torch {torch.__version__} with 1 thread; with another number of threads its kernels may change at other M.",
    )


def test_one_row_in_float32_is_a_matrix_vector_product_of_its_own(torch: Any) -> None:
    if "avx512f" not in WORDS:
        pytest.skip("this processor has no AVX-512, for which the classes are known")
    found = probe("linear:576,576,float32", on="torch", rows="1..4", seeds=2, timed=False)
    assert found.classes[0] == (1,) and found.bits_change_at[0] == 2


def test_the_command_probes_torch(torch: Any) -> None:
    result = run("probe", "linear:64,8,float32", "--on", "torch", "--rows", "1..4", "--seeds", "2", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == int(not found["invariant"]) and found["on"] == "torch"
    assert found["notes"][0].startswith("torch ") and found["times"]


def test_torch_refuses_what_it_does_not_have(torch: Any) -> None:
    with pytest.raises(ProbeBackendUnusable, match="torch has no quantised matmul"):
        probe("linear:64,8,float32,4,32", on="torch", rows="1..2", seeds=2, timed=False)


def test_a_function_of_torch_arrays_with_a_injected_fault_is_found_at_its_m(torch: Any) -> None:
    def injected(x: Any) -> Any:
        y = 2 * x
        return torch.nextafter(y, torch.full_like(y, 99)) if len(x) >= 6 else y

    found = probe(Function(injected, "injected", 8, "torch"), rows="1..8", seeds=2, timed=False)
    assert found.bits_change_at == (6,) and found.against_one[-1].max_ulp == 1
    sound = probe(Function(lambda x: 2 * x, "sound", 8, "torch"), rows="1..8", seeds=2, timed=False)
    assert sound.invariant


def two_layers(torch: Any, dtype: str = "float32") -> Any:
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(32, 16),
        torch.nn.Linear(16, 32),
        torch.nn.Linear(32, 16),
        torch.nn.LayerNorm(16),
    ]
    return torch.nn.Sequential(*layers).to(getattr(torch, dtype))


def test_a_models_linear_shapes_are_found_once_each_with_their_sites(torch: Any) -> None:
    first, second = torch_shapes(two_layers(torch), name="m")
    assert (first.sites, second.sites) == (("0", "2"), ("1",))
    assert (first.name, second.name, first.weights) == (
        "m 0 and 1 more (32,16,float32)",
        "m 1 (16,32,float32)",
        512,
    )
    (asked,) = torch_shapes(two_layers(torch), {"2", "3"}, "m")
    assert asked.sites == ("2", "0")
    # Where none that was asked for is linear, all are given.
    assert len(list(torch_shapes(two_layers(torch), {"3"}))) == 2
    with pytest.raises(ProbeSiteUnknown, match="no torch.nn.Linear"):
        list(torch_shapes(torch.nn.LayerNorm(4)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_models_own_weights_and_bias_are_probed(torch: Any, dtype: str) -> None:
    shape = next(torch_shapes(two_layers(torch, dtype)))
    found = probe(shape, rows="1..4", seeds=2, timed=False)
    assert (found.k, found.n, found.layout, found.on) == (32, 16, "batch", "torch")
    # The float64 answer is of the same weights: without the bias the error would be as large as the outputs.
    assert found.errors is not None
    assert all(each.max_relative is not None and each.max_relative < 0.01 for each in found.errors)


def test_weights_that_are_no_floats_are_refused(torch: Any) -> None:
    model = two_layers(torch, "float64")
    with pytest.raises(ProbeBackendUnusable, match="has weights of float64 on cpu"):
        probe(next(torch_shapes(model)), rows="1..2", seeds=2, timed=False)


def test_a_model_is_swept_in_torch_once_a_shape(torch: Any) -> None:
    result = run(
        "probe",
        "--model",
        "builtin",
        "--on",
        "torch",
        "--rows",
        "1..3",
        "--seeds",
        "2",
        "--no-time",
        "--json",
    )
    found = json.loads(result.stdout)
    assert result.exit_code == int(not found["invariant"])
    # q and o; k and v; gate and up; down: each in four layers; and the tied head.
    assert [(one["shape"], one["op"], len(one["sites"])) for one in found["shapes"]] == [
        ("192,192,bfloat16", "linear", 8),
        ("192,64,bfloat16", "linear", 8),
        ("192,416,bfloat16", "linear", 8),
        ("416,192,bfloat16", "linear", 4),
        ("192,1280,bfloat16", "head", 1),
    ]
    assert all(one["probe"]["on"] == "torch" and one["probe"]["rows"] == [1, 2, 3] for one in found["shapes"])


def test_one_site_of_a_model_is_probed_in_torch(torch: Any) -> None:
    quick = ("--on", "torch", "--rows", "1..2", "--seeds", "2", "--no-time")
    site = "model.layers.0.mlp.down_proj"
    result = run("probe", "--model", "builtin", "--site", site, *quick)
    assert result.exit_code in (0, 1) and f"builtin {site} (416,192,bfloat16) on torch" in result.stdout
    wrong = paragraph(run("probe", "--model", "builtin", "--site", "layers.0.mlp.down", *quick))
    assert f"the nearest of 29 are {site}" in wrong


def test_weights_that_transformers_does_not_load_are_refused(torch: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    wrong = paragraph(run("probe", "--model", str(tmp_path), "--on", "torch", "--rows", "1..2"))
    assert "transformers does not load the model directory" in wrong and str(tmp_path.name) in wrong
