"""`detdiff probe` from outside: what it prints, its exit codes, and what it says to bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from command_line import paragraph, run

OPERATIONS = """
import numpy as np


def sound(x):
    return np.rint(x * 64).astype(np.int64).sum(axis=1, keepdims=True).astype(np.float32)


def late(x):
    y = sound(x)
    y[:1] += len(x) >= 3
    return y


def last(x):
    y = sound(x)
    if len(x) % 4 == 1:
        y[-1] += 1
    return y


def narrow(x):
    assert x.shape[1] == 12 and x.dtype == np.float16
    return x


narrow.k, narrow.dtype = 12, "float16"


def in_mlx(x):
    return x * 2


def fewer(x):
    return x[1:]


def scalar(x):
    return x.sum()


def growing(x):
    return np.zeros((len(x), len(x)), np.float32)


def words(x):
    return [["a"]] * len(x)


def texts(x):
    return np.full(len(x), "a")


def nothing(x):
    return None


def chatty(x):
    print("a word from the operation")
    return sound(x)


def fails(x):
    if len(x) == 3:
        raise ValueError("three\\nrows")
    return x


class Layer:
    def __call__(self, x):
        return x

    k = 0


layer = Layer()
number = 3
"""


@pytest.fixture
def operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of operations in the working directory."""
    name = f"operations_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(OPERATIONS)
    (tmp_path / f"{name}_broken.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / f"{name}_leaves.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


QUICK = ("--rows", "1..5", "--no-time")


def test_a_function_of_the_users_own_is_named_with_its_threshold(operations: str) -> None:
    result = run("probe", f"{operations}:late", *QUICK)
    assert result.exit_code == 1
    assert "bits: 2 classes, A = {1-2} B = {3-5}; they change at M = 3" in result.output
    rows = dict(re.findall(r"^ +(\d)  ([AB]) ", result.stdout, re.MULTILINE))
    assert rows == {"1": "A", "2": "A", "3": "B", "4": "B", "5": "B"}
    assert "seeds: 3" in result.output


def test_a_position_is_named(operations: str) -> None:
    result = run("probe", f"{operations}:last", *QUICK)
    assert result.exit_code == 1
    assert "position: MATTERS: other bits at M = 5, position 4 (seed 0-2)" in result.output


def test_a_sound_function_ends_with_0_and_json_has_every_key(operations: str) -> None:
    result = run("probe", f"{operations}:sound", "--rows", "1..3", "--shape", "7", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    found = json.loads(result.stdout)
    assert (found["schema"], found["k"], found["n"], found["seeds"]) == ("detdiff.probe/1", 7, 1, 3)
    assert found["classes"] == [[1, 2, 3]] and found["invariant"] is True
    assert [one["rows"] for one in found["times"]] == [1, 2, 3]
    documented = set(
        re.findall(
            r"^\| `(\w+)` \|", (Path(__file__).parents[2] / "docs" / "probe.md").read_text(), re.MULTILINE
        )
    )
    assert set(found) <= documented


def test_what_a_function_prints_is_not_in_the_answer(operations: str) -> None:
    result = run("probe", f"{operations}:chatty", *QUICK, "--json")
    assert json.loads(result.stdout)["invariant"] and "a word from the operation" in result.stderr


def test_a_functions_own_width_and_dtype_are_taken(operations: str) -> None:
    found = json.loads(run("probe", f"{operations}:narrow", *QUICK, "--json").stdout)
    assert (found["k"], found["dtype"], found["output_dtype"]) == (12, "float16", "F16")


def test_a_function_may_take_mlx_arrays(operations: str) -> None:
    result = run("probe", f"{operations}:in_mlx", *QUICK, "--array", "mlx", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["on"] == "mlx"


@pytest.mark.parametrize(
    ("function", "options", "error", "says"),
    [
        ("fewer", (), "ProbeResultUnusable", "shape (0, 576)"),
        ("scalar", (), "ProbeResultUnusable", "shape ()"),
        ("growing", (), "ProbeResultUnusable", "2 values a row for 2 rows and 1 for 1"),
        ("words", (), "ProbeResultUnusable", "returned a list"),
        ("texts", (), "ProbeResultUnusable", "of <U1"),
        ("nothing", (), "ProbeResultUnusable", "returned a NoneType"),
        ("fails", (), "ProbeFunctionFailed", "ValueError (three rows)"),
        ("in_mlx", ("--array", "cupy"), "ProbeBackendUnusable", "numpy, mlx, torch"),
        ("in_mlx", ("--shape", "0"), "ProbeTargetInvalid", "k = 0"),
        ("layer", (), "ProbeTargetInvalid", "k = 0"),
        ("number", (), "ProbeFunctionMissing", "int, which cannot be called"),
        ("soundd", (), "ProbeFunctionMissing", "fails, fewer"),
        ("sound.x.y", (), "ProbeFunctionMissing", "has no 'sound.x.y'"),
        ("in_mlx", ("--on", "native"), "CommandError", "leave --on out"),
        ("sound", ("--seeds", "1"), "ProbeRowsInvalid", "2 or more"),
        ("sound", ("--shape", "16777216", "--rows", "1..2,512"), "ProbeRowsInvalid", "268,435,456 at most"),
    ],
)
def test_what_a_function_does_wrong_is_one_paragraph(
    operations: str, function: str, options: tuple[str, ...], error: str, says: str
) -> None:
    command = ("probe", f"{operations}:{function}", *QUICK, *options)
    assert says in paragraph(run(*command))
    found = json.loads(run(*command, "--json").stdout)
    assert (found["schema"], found["error"]) == ("detdiff.error/1", error)


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ("_missing:f", "ModuleNotFoundError"),
        ("_broken:f", "a_package_that_is_not_there"),
        ("_leaves:f", "SystemExit, 7"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_paragraph(operations: str, ending: str, says: str) -> None:
    assert says in paragraph(run("probe", f"{operations}{ending}", *QUICK))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("linear:64",), "linear:576,576,float32"),
        (("linear:64,8",), "linear:576,576,float32"),
        (("linear:64,8,float64",), "float32, float16, bfloat16"),
        (("linear:0,8,float32",), "at least 1"),
        (("linear:-4,8,float32",), "expected linear:K,N,dtype"),
        (("linear:999999999,999999999,float32",), "2^31"),
        (("linear:64,8,float32,7",), "2, 3, 4, 5, 6, 8"),
        (("linear:64,8,float32,4,48",), "32, 64, 128"),
        (("linear:96,8,float32,4,64",), "do not divide"),
        (("linear:64,8,float32,4,32,1",), "expected linear:K,N,dtype"),
        (("nothing",), "neither linear"),
        (("a b:c",), "neither linear"),
        (("linear:",), "neither linear"),
        ((), "one of the two"),
        (("linear:64,8,float32", "--model", "builtin"), "one of the two"),
        (("linear:64,8,float32", "--site", "x"), "--site names a site of a model"),
        (("linear:64,8,float32", "--array", "mlx"), "for a function of your own"),
        (("linear:64,8,float32", "--rows", "8..1"), "a range goes upwards"),
        (("linear:512,8,float32", "--on", "mlx-metal/qmv"), "cannot run this operation"),
        (("linear:64,8,float32", "--on", "candle-metl"), "did you mean candle-metal"),
        (("--model", "builtin", "--site", "layers.0.mlp.down"), "layers.0.mlp.down_proj"),
        (("--model", "builtin", "--on", "numpy"), "a model's sites run on MLX or torch"),
        (("--model", "builtin", "--site", "norm", "--on", "candle-metal"), "is a norm"),
        (("--model", "./nowhere"), "nowhere"),
    ],
)
def test_bad_input_is_one_paragraph(words: tuple[str, ...], says: str) -> None:
    assert says in paragraph(run("probe", *words, *(() if "--rows" in words else QUICK)))


def test_torch_is_asked_for_by_name_and_said_to_be_missing() -> None:
    words = ("probe", "linear:8,4,float32", "--on", "torch", *QUICK)
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError:
        assert "torch was asked for and cannot be imported" in paragraph(run(*words))
    else:
        assert run(*words).exit_code in (0, 1)


def test_a_model_is_swept_once_a_shape() -> None:
    result = run(
        "probe", "--model", "builtin", "--rows", "1..2", "--no-time", "--json", "--on", "candle-metal"
    )
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert found["schema"] == "detdiff.probe-sweep/1" and found["invariant"] is False
    sizes = {(one["shape"], one["op"]): len(one["sites"]) for one in found["shapes"]}
    # q and o; k and v; gate and up; down: each in four layers; and the tied head.
    assert list(sizes.values()) == [8, 8, 8, 4, 1]
    assert sizes["192,1280,bfloat16", "head"] == 1
    assert all(one["probe"]["classes"] == [[1], [2]] for one in found["shapes"])
    text = run("probe", "--model", "builtin", "--rows", "1..2", "--no-time", "--seeds", "2")
    assert text.exit_code == 0
    lines = [line.split() for line in text.stdout.splitlines() if "bfloat16" in line]
    assert len(lines) == 5
    assert lines[0][:5] == ["192,192,bfloat16", "8", "layers.0.self_attn.q_proj", "never", "-"]


@pytest.mark.parametrize(
    ("site", "k", "n"),
    [("layers.1.mlp.down_proj", 416, 192), ("embed_tokens.as_linear", 192, 1280), ("norm", 192, 192)],
)
def test_a_site_runs_with_the_models_own_weights(site: str, k: int, n: int) -> None:
    result = run("probe", "--model", "builtin", "--site", site, "--rows", "1..3", "--no-time", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["k"], found["n"], found["dtype"]) == (k, n, "bfloat16")
    assert found["target"] == f"builtin {site}"


def test_the_chart_is_written_and_a_place_that_is_none_is_one_paragraph(tmp_path: Path) -> None:
    words = ("probe", "linear:64,8,float32", "--on", "numpy", "--rows", "1..3", "--plot")
    assert run(*words, tmp_path / "a.svg").exit_code in (0, 1)
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert "nowhere" in run(*words, tmp_path / "nowhere" / "a.svg").stderr


def test_importing_the_probe_and_probing_numpy_load_no_model_library() -> None:
    program = """
import sys
from detdiff.probe import Function, probe
heavy = {"mlx", "mlx_lm", "numba", "torch", "click"}
assert not heavy & {name.partition(".")[0] for name in sys.modules}
found = probe("linear:16,4,float32", on="numpy", rows="1..3", seeds=2)
assert not heavy & {name.partition(".")[0] for name in sys.modules}
print(len(found.rows), *sorted(found.environment))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "blas", "chip", "detdiff", "flags", "numpy", "os", "python"]
