"""What real backends show: NumPy's matmul, stock MLX on a CPU, MLX over OpenBLAS, and profiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiers import some_now

from detdiff.errors import ProbeBackendUnusable
from detdiff.probe import probe

LIBRARY = "/usr/lib/{}-linux-gnu/openblas-pthread/libopenblas.so.0"
PROCESSOR = Path("/proc/cpuinfo")
WORDS = set(PROCESSOR.read_text(encoding="utf-8").split()) if PROCESSOR.is_file() else set[str]()
ON_CPU = sys.platform == "linux" and mx.default_device().type == mx.DeviceType.cpu


def test_numpys_own_matmul_gives_one_row_other_bits_than_many() -> None:
    found = probe("linear:2048,2048,float32", on="numpy", rows="1..4,8", seeds=2, timed=False)
    assert sorted(m for members in found.classes for m in members) == [1, 2, 3, 4, 8]
    assert found.repeat == ()
    if "avx512f" not in WORDS:
        pytest.skip(
            "this processor has no AVX-512, for which the classes are known; they are a partition, and repeats agree"
        )
    # A matrix-vector product for one row, a matrix product from two on.
    assert found.classes == ((1,), (2, 3, 4, 8))
    assert found.bits_change_at == (2,)
    assert found.against_one[0].differing > 0.9 * found.against_one[0].outputs


@pytest.mark.skipif(
    not ON_CPU, reason="MLX runs on a GPU here, or on macOS, where a row's kernel depends on M"
)
@pytest.mark.parametrize(
    "shape",
    some_now(
        [
            "576,576,float32",
            "1536,576,float32",
            "576,1536,float32",
            "576,192,bfloat16",
            "576,192,float16",
            "576,64,float32,4,64",
            "576,64,bfloat16,8,32",
        ],
        0,
        3,
        5,
    ),
)
def test_stock_mlx_on_a_cpu_is_one_class_for_every_shape(shape: str) -> None:
    for layout in ("packed", "batch"):
        found = probe_layout(shape, layout)
        assert found.invariant, found.classes
        assert found.errors is not None and found.errors[0].non_finite == 0
        # float32 sums are off by roundings alone, so the float64 answer is of the same weights.
        assert found.errors[0].max_relative < (1e-5 if "float32" in shape else 0.03)
        assert {route.path for routes in found.paths.values() for route in routes} == {"native"}


def probe_layout(shape: str, layout: str, on: str = "native", rows: str = "1..3,8") -> Any:
    from detdiff.probe import LinearSizes, LinearTarget

    return probe(LinearTarget(LinearSizes.parse(shape), on, layout), rows=rows, seeds=2, timed=False)


def openblas() -> Path:
    for machine in ("x86_64", "aarch64"):
        if Path(LIBRARY.format(machine)).exists():
            return Path(LIBRARY.format(machine))
    problem = "Debian's OpenBLAS is not installed here: apt-get install libopenblas0-pthread"
    if os.environ.get("CI"):
        pytest.fail(problem)
    pytest.skip(problem)


def over_openblas(shape: str, core: str | None) -> dict[str, Any]:
    """The answer of `detdiff probe` on MLX over OpenBLAS with the kernels of one kind of processor."""
    environment = dict(os.environ, LD_PRELOAD=str(openblas()), OPENBLAS_NUM_THREADS="1")
    environment.pop("OPENBLAS_CORETYPE", None)
    if core is not None:
        environment["OPENBLAS_CORETYPE"] = core
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "detdiff.cli",
            "probe",
            f"linear:{shape}",
            "--rows",
            "1..16",
            "--no-time",
            "--json",
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert any("openblas" in name for name in found["environment"]["blas"])
    assert done.returncode == int(not found["invariant"])
    return found


def bits(*starts: int) -> list[list[int]]:
    """Classes of 1 to 16 that begin at these M."""
    return [list(range(a, b)) for a, b in zip(starts, [*starts[1:], 17], strict=True)]


# What Debian's OpenBLAS 0.3.21 shows on one thread with its AVX-512 kernels, and with those for processors that have
# AVX2 alone: these take rows in fours, and rows that are left over are summed in another order.
SHAPES = {
    "576,576,float32": {"SkylakeX": bits(1, 3), "Haswell": bits(1, 4, 8, 12)},
    "1536,576,float32": {"SkylakeX": bits(1, 2), "Haswell": bits(1, 4, 8, 12)},
    "576,1536,float32": {"SkylakeX": bits(1), "Haswell": bits(1, 4, 8, 12)},
}


@pytest.mark.skipif(not ON_CPU, reason="MLX runs on a GPU here, or on macOS, and does not call OpenBLAS")
@pytest.mark.parametrize("shape", some_now(SHAPES, ci=(0,)))
@pytest.mark.parametrize(("core", "needs"), some_now([("SkylakeX", "avx512f"), ("Haswell", "avx2")], 1))
def test_mlx_over_openblas_has_the_thresholds_of_its_kernels(shape: str, core: str, needs: str) -> None:
    if needs not in WORDS:
        found = over_openblas(shape, None)
        assert not found["repeat"]["differs"] and sum(map(len, found["classes"])) == 16
        pytest.skip(f"this processor has no {needs}, which OpenBLAS's {core} kernels need; repeats agree")
    found = over_openblas(shape, core)
    assert found["classes"] == SHAPES[shape][core]
    assert found["thresholds"]["bits"] == [members[0] for members in found["classes"]][1:]
    assert not found["repeat"]["differs"] and not found["neighbours"]["matters"]
    assert found["position"]["matters"] == (core == "Haswell")
    if core == "Haswell":
        assert found["position"]["found"][0] == {"rows": 5, "positions": [4], "seeds": [0, 1, 2]}


def test_a_profile_names_the_kernel_and_the_rule_of_every_m() -> None:
    found = probe("linear:128,48,float32", on="candle-metal", rows="1..4", seeds=2, timed=False)
    assert found.classes == ((1,), (2, 3, 4)) and found.bits_change_at == (2,)
    paths = {m: [route.path for route in routes] for m, routes in found.paths.items()}
    assert paths == {1: ["reference/candle-metal/mv"]} | {m: ["reference/candle-metal/mm"] for m in (2, 3, 4)}
    assert all(route.rule.startswith("candle-metal: ") for routes in found.paths.values() for route in routes)
    assert found.position == found.neighbours == found.repeat == ()


def test_a_profile_that_looks_at_the_second_to_last_size_is_one_class_as_a_batch() -> None:
    assert probe_layout("128,48,float32", "batch", "candle-metal").classes == ((1, 2, 3, 8),)
    assert len(probe_layout("128,48,float32", "packed", "candle-metal").classes) == 2


def test_the_thresholds_of_a_profile_come_out_of_the_bits() -> None:
    found = probe(
        "linear:1024,64,bfloat16,4,64", on="mlx-metal:generation=15", rows="1..3,12..14", seeds=2, timed=False
    )
    assert found.classes == ((1,), (2, 3, 12), (13, 14)) and found.bits_change_at == (2, 13)
    kernels = {m: routes[0].path.rpartition("/")[2] for m, routes in found.paths.items()}
    assert (kernels[1], kernels[2], kernels[13]) == ("qmv_fast", "qmv_wide", "qmm_splitk")


@pytest.mark.parametrize("on", ["candle-metal/mv", "candle-metal/mm", "rows", "pad:4"])
def test_one_kernel_for_every_m_is_one_class(on: str) -> None:
    found = probe("linear:128,48,float32", on=on, rows="1..4", seeds=2, timed=False)
    assert found.invariant
    assert {route.path.partition("/")[2] for routes in found.paths.values() for route in routes} == {on}


@pytest.mark.parametrize("on", ["candle-metl", "candle-metal/mw", "nowhere.toml", "pad:0", "", "a\nb"])
def test_a_backend_that_is_none_is_refused(on: str) -> None:
    with pytest.raises(ProbeBackendUnusable, match="A probe runs on native, numpy"):
        probe("linear:64,8,float32", on=on, rows="1..2", seeds=2, timed=False)


@pytest.mark.parametrize("target", ["linear:64,8,bfloat16", "linear:64,8,float32,4,32"])
def test_numpy_refuses_what_it_does_not_have(target: str) -> None:
    with pytest.raises(ProbeBackendUnusable, match="[Nn]um[Pp]y has no"):
        probe(target, on="numpy", rows="1..2", seeds=2, timed=False)


FOURS = """
name = "fours"
backend = "a backend that takes rows in whole fours"
note = "for this test"

[[rule]]
op = "linear"
rows = "4.."
whole = 4
kernel = "candle-metal/mm"
source = "none"
tag = "inferred"

[[rule]]
op = "linear"
kernel = "candle-metal/mv"
source = "none"
tag = "inferred"
"""


def test_a_kernel_that_depends_on_a_rows_place_is_named_with_its_rows(tmp_path: Path) -> None:
    (tmp_path / "fours.toml").write_text(FOURS)
    on = str(tmp_path / "fours.toml")
    found = probe("linear:128,48,float32", on=on, rows="1..9", seeds=2, timed=False)
    assert found.classes == ((1, 2, 3), (4, 5, 6, 7, 8, 9))
    places = {one.rows: one.positions for one in found.position}
    assert places == {5: (4,), 6: (4, 5), 7: (4, 5, 6), 9: (8,)}
    assert [(route.first, route.last, route.path) for route in found.paths[6]] == [
        (0, 4, "reference/candle-metal/mm"),
        (4, 6, "reference/candle-metal/mv"),
    ]
    assert found.neighbours == found.repeat == ()
