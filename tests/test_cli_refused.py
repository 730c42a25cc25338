"""Bad input and bad luck on the command line: one paragraph, exit code 2 or 3, and what was recorded is kept."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import PROMPTS, SCENARIO, flags, heard_again, paragraph, run
from plugins.small_models import small_config, write_directory
from tiers import some_now

import detdiff
from detdiff import Scenario
from detdiff.errors import DetdiffError
from detdiff.trace import Trace


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete trace."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "scenario.toml").write_text(SCENARIO)
    result = run("record", folder / "scenario.toml", "-o", folder / "t", "--set", "max_tokens=2")
    assert result.exit_code == 0, result.output
    return folder / "t"


@pytest.fixture
def trace(whole: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "t"))


def refused(folder: Path, scenario: str) -> str:
    """The error of recording a scenario; nothing may have been written."""
    (folder / "scenario.toml").write_text(scenario)
    text = paragraph(run("record", folder / "scenario.toml", "-o", folder / "trace"))
    assert not (folder / "trace").exists()
    return text


# Scenarios.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("max_tokens", "max_token"), "no key 'max_token' here; did you mean 'max_tokens'?"),
        (('prompt = "In', 'promt = "In'), "no key 'promt' here; did you mean 'prompt'?"),
        (("In the beginning God created", ""), "prompt is empty"),
        (("max_tokens = 6", "max_tokens = 0"), "max_tokens is 0; it must be 1 or more"),
        (('prompt = "In the beginning God created"', "tokens = []"), "tokens is empty"),
        (('"follower"', '"anchor"'), "requests 1 and 2 both have the id 'anchor'"),
        (("max_tokens = 6", "max_tokens = 1024"), "the model's context is 1024"),
        (("In the beginning God created", "word " * 1100), "the model's context is 1024"),
        (("candle-metal", "candle-meta"), "candle-metal"),
        (('"packed"', '"pack"'), "did you mean 'packed'?"),
        (('model = "builtin"', 'model = "builtin'), "not a TOML file"),
    ],
)
def test_a_scenario_that_cannot_be_run(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    assert change[0] in SCENARIO
    text = refused(tmp_path, SCENARIO.replace(*change, 1))
    assert words in text
    assert "scenario.toml" in text or "context" in text or "profile" in text


def test_a_scenario_that_is_not_there(tmp_path: Path) -> None:
    assert "cannot be read" in paragraph(run("record", tmp_path / "none.toml", "-o", tmp_path / "t"))
    assert "is not there" in paragraph(run("compare", tmp_path / "none.toml", tmp_path / "other.toml"))


def test_a_change_that_names_no_key(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCENARIO)
    text = paragraph(run("record", tmp_path / "s.toml", "-o", tmp_path / "t", "--set", "shedule=static"))
    assert "no key 'shedule' here; did you mean 'schedule'?" in text


# Models.


def cut_weights(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[: len(data) // 2])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (lambda model: shutil.rmtree(model), "model"),
    "no config": (lambda model: (model / "config.json").unlink(), "config.json"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "safetensors"),
    "half the weights": (cut_weights, "model.safetensors"),
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), "tokenizer"),
    "a tokenizer that does not load": (
        lambda model: (model / "tokenizer.json").write_text("{}"),
        "does not load",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_half_a_model(tmp_path: Path, damage: str) -> None:
    model = write_directory(tmp_path / "model")
    change, words = DAMAGES[damage]
    change(model)
    text = paragraph(run(*flags("In the table", model=f"{model}"), "--a", "max_tokens=1"))
    assert words in text and "model" in text


# Arguments that do not go together.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare"], "There is nothing to compare"),
        (["compare", "TRACE"], "is the only file"),
        (["compare", "TRACE", "TRACE", "--model", "builtin"], "Add --replay, or leave --model out"),
        (["compare", "TRACE", "TRACE", "--prompt", "In"], "and --prompt"),
        (["compare", "SCENARIO", "TRACE", "--replay", "--model", "builtin"], "write --both model=NAME"),
        (flags(*PROMPTS), "Both sides would be the same run"),
        ([*flags(*PROMPTS), "--both", "max_tokens=2"], "Both sides would be the same run"),
        (["compare", "TRACE", "TRACE", "--split-rows", "4"], "was recorded already"),
        (["compare", "TRACE", "TRACE", "--keep", "DIR"], "both sides are traces already"),
        (["compare", "--model", "builtin", "--a", "schedule=static"], "there is no request"),
        (["compare", "--prompt", "In the beginning"], "There is nothing to compare"),
        (
            [*flags(*PROMPTS), "--a", "schedul=serial"],
            "side a: there is no key 'schedul' here; did you mean 'schedule'?",
        ),
        ([*flags(*PROMPTS), "--both", "lens lens"], "--both: lens is given twice"),
        ([*flags(*PROMPTS), "--kernels", "metal", "--a", "max_tokens=2"], "metal"),
        ([*flags(*PROMPTS), "--split-rows", "few", "--a", "max_tokens=2"], "split_rows takes an integer"),
    ],
)
def test_arguments_that_contradict(trace: Path, arguments: list[str], words: str) -> None:
    (trace.parent / "s.toml").write_text(SCENARIO)
    names = {
        "TRACE": str(trace),
        "DIR": str(trace.parent / "kept"),
        "SCENARIO": str(trace.parent / "s.toml"),
    }
    assert words in paragraph(run(*(names.get(word, word) for word in arguments)))


def test_more_than_two_files_is_a_usage_error() -> None:
    result = run("compare", "a", "b", "c")
    assert result.exit_code == 2 and "two files at most" in result.stderr


def test_nothing_is_written_over(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCENARIO)
    before = {path.name: path.read_bytes() for path in trace.iterdir()}
    assert "exists and is not an empty directory" in paragraph(
        run("record", tmp_path / "s.toml", "-o", trace)
    )
    trace.rename(tmp_path / "b")
    text = paragraph(run("compare", tmp_path / "s.toml", "--b", "schedule=static", "--keep", tmp_path))
    assert "exists and is not an empty directory" in text
    assert not (tmp_path / "a").exists()
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == before


# Traces.


@pytest.mark.parametrize("name", ["trace.json", "forwards.jsonl", "texts.jsonl", "shard-00000.safetensors"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_a_trace_that_was_cut(trace: Path, whole: Path, name: str, part: float) -> None:
    data = (trace / name).read_bytes()
    (trace / name).write_bytes(data[: int(len(data) * part)])
    for arguments in (("show", trace), ("compare", trace, whole), ("compare", whole, trace)):
        assert name in paragraph(run(*arguments))


@pytest.mark.parametrize("name", ["trace.json", "forwards.jsonl", "shard-00000.safetensors"])
def test_a_trace_that_lacks_a_file(trace: Path, whole: Path, name: str) -> None:
    (trace / name).unlink()
    for arguments in (("show", trace), ("compare", trace, whole)):
        assert "is not there" in (text := paragraph(run(*arguments))) or "is not a trace" in text


def test_a_shard_that_claims_an_exabyte(trace: Path, whole: Path) -> None:
    shard = trace / "shard-00000.safetensors"
    shard.write_bytes((1 << 60).to_bytes(8, "little") + shard.read_bytes()[8:])
    for arguments in (("show", trace), ("compare", trace, whole)):
        assert shard.name in paragraph(run(*arguments))


def test_what_is_left_of_a_damaged_trace(trace: Path, whole: Path) -> None:
    (trace / "shard-00000.safetensors").unlink()
    result = run("show", trace, "--partial")
    assert result.exit_code == 0 and "INCOMPLETE" in result.output and "shard-00000" in result.output
    text = paragraph(run("compare", trace, whole, "--partial"), 3)
    assert "holds no rows" in text and "shard-00000" in text and "ended" not in text


def test_traces_of_two_models_are_not_comparable(whole: Path, tmp_path: Path) -> None:
    model = write_directory(tmp_path / "model", small_config("llama"))
    kept = run(*flags(PROMPTS[0], model=model), "--a", "max_tokens=1", "--keep", tmp_path / "kept")
    assert kept.exit_code == 3, kept.output
    assert "different models" in paragraph(run("compare", whole, tmp_path / "kept" / "a"), 3)


def test_traces_of_other_prompts_are_not_comparable(whole: Path, tmp_path: Path) -> None:
    other = SCENARIO.replace("God created", "was").replace("Hear ye", "Go ye")
    (tmp_path / "s.toml").write_text(other)
    text = paragraph(run("compare", whole, tmp_path / "s.toml"), 3)
    assert f"Run a ({whole}) and run b ({tmp_path / 's.toml'}) have no request in common" in text


def test_another_version_of_a_library_says_which_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """D26, from the command line and from Python; with what it has, both run."""
    import mlx_lm.utils

    asked = Scenario.from_flags("builtin", PROMPTS[:1], "max_tokens=1")
    command = (*flags(PROMPTS[0]), "--a", "max_tokens=1", "--b", "max_tokens=1")
    assert run(*command).exit_code == 0 and detdiff.explain(asked, asked).kind == "identical"
    # What an import of a name that a version does not have raises.
    monkeypatch.delattr(mlx_lm.utils, "load_model")
    text = paragraph(run(*command))
    assert re.search(r"mlx-lm \d+\.\d+\.\d+ is installed, and detdiff runs with mlx-lm>=\d", text)
    assert (
        "cannot import name 'load_model' from 'mlx_lm.utils'" in text
        and "pip install --upgrade 'mlx-lm>=" in text
    )
    assert "fault of detdiff" not in text
    with pytest.raises(DetdiffError) as raised:
        detdiff.explain(asked, asked)
    assert str(raised.value) in text.removeprefix("detdiff: ")


def test_an_exception_of_a_library_is_not_called_a_fault_of_detdiff(monkeypatch: pytest.MonkeyPatch) -> None:
    # As a list of layer types that is too short for the layers ends.
    library: dict[str, Any] = {"__name__": "mlx_lm.models.some"}
    exec("def layer(*_):\n    return [][0]", library)
    monkeypatch.setattr("detdiff.commands.sides.sides", library["layer"])
    text = paragraph(run(*flags(PROMPTS[0]), "--a", "max_tokens=1"))
    assert "mlx_lm.models.some, line 2, raised IndexError (list index out of range)" in text
    assert "config.json" in text and "fault of detdiff" not in text


def test_an_exception_of_detdiff_is_a_fault_of_detdiff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detdiff.commands.sides.sides", lambda asked: [][0])
    text = paragraph(run(*flags(PROMPTS[0]), "--a", "max_tokens=1"))
    assert "This is a fault of detdiff" in text and "IndexError, list index out of range" in text


@pytest.mark.parametrize("package", some_now(["mlx", "mlx_lm", "numba"], 1))
def test_without_the_packages_that_run_models(trace: Path, package: str) -> None:
    (trace.parent / "s.toml").write_text(SCENARIO)
    program = f"import sys\nsys.modules[{package!r}] = None\nfrom detdiff.cli import main\nmain()"

    def without(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    refused = without("record", trace.parent / "s.toml", "-o", trace.parent / "new")
    text = " ".join(refused.stderr.split())
    assert refused.returncode == 2 and "Traceback" not in text and "fault" not in text
    assert f"the package {package!r} is not installed" in text and "pip install ." in text
    assert not (trace.parent / "new").exists()
    assert without("compare", trace, trace).returncode == 0


# Bad luck in the middle of a run.

# Shards of 4 forwards instead of 512, so that a short run has several.
SMALL_SHARDS = """
from detdiff.trace import TraceWriter
TraceWriter.__init__.__kwdefaults__["shard_forwards"] = 4
from detdiff.cli import main
main()
"""


def long_run(folder: Path) -> Path:
    """A scenario that takes many forwards; its second request has far more prompt rows than the first."""
    requests = "".join(f"\n[[request]]\ntokens = {list(range(5, 5 + n))}\n" for n in (8, 300))
    path = folder / "long.toml"
    path.write_text(f'model = "builtin"\nmax_tokens = 700\nignore_stop = true\n{requests}')
    return path


def begin(*arguments: str | Path, limit: int | None = None, **environment: str) -> subprocess.Popen[str]:
    """The command as its own process, where no file may be larger than ``limit`` bytes."""

    def before() -> None:
        heard_again()
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        [sys.executable, "-c", SMALL_SHARDS, *map(str, arguments)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )


def ended(process: subprocess.Popen[str]) -> str:
    """The paragraph that the process ended with."""
    out, err = process.communicate()
    assert (process.returncode, out) == (2, ""), err
    assert "Traceback" not in err and err.startswith("detdiff: ") and "\n\n" not in err.strip()
    return " ".join(err.split())


def interrupt_when(
    process: subprocess.Popen[str], there: Callable[[], bool], by: signal.Signals = signal.SIGINT
) -> None:
    """Sends Ctrl-C, or another signal, as soon as ``there`` holds."""
    deadline = time.monotonic() + 120
    while not there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(by)


@pytest.mark.thorough
def test_a_full_disk_keeps_the_finished_shards(tmp_path: Path) -> None:
    changes = ["--set", "max_tokens=11"]
    text = ended(begin("record", long_run(tmp_path), "-o", tmp_path / "t", *changes, limit=200_000))
    assert "there is no space left" in text and "shards finished before it stay readable" in text
    trace = Trace.open(tmp_path / "t")
    rows = trace.row_index()
    assert not trace.complete and len(trace.shards) >= 2
    assert set(rows.request.tolist()) == {0} and rows.position.tolist() == list(range(len(rows.position)))
    assert "INCOMPLETE" in run("show", tmp_path / "t").output


@pytest.mark.parametrize("by", some_now([signal.SIGINT, signal.SIGTERM], 0))
def test_an_interrupt_keeps_what_was_recorded(tmp_path: Path, by: signal.Signals) -> None:
    process = begin("record", long_run(tmp_path), "-o", tmp_path / "t")
    interrupt_when(process, (tmp_path / "t" / "shard-00002.safetensors").exists, by)
    text = ended(process)
    assert f"Interrupted; {tmp_path / 't'} keeps what was recorded" in text
    trace = Trace.open(tmp_path / "t")
    assert not trace.complete and len(trace.shards) >= 3
    shown = run("show", tmp_path / "t")
    assert shown.exit_code == 0 and "INCOMPLETE, " in shown.output
    assert "Interrupted" not in shown.output and "request r0:" in shown.output


@pytest.mark.parametrize("by", some_now([signal.SIGINT, signal.SIGTERM]))
def test_an_interrupted_comparison_leaves_nothing_unless_it_is_kept(
    tmp_path: Path, by: signal.Signals
) -> None:
    (tmp_path / "temporary").mkdir()
    arguments = ("compare", long_run(tmp_path), "--b", "schedule=static")
    process = begin(*arguments, TMPDIR=str(tmp_path / "temporary"))
    interrupt_when(process, lambda: any((tmp_path / "temporary").glob("detdiff-*/a/trace.json")), by)
    assert "--keep DIR" in ended(process)
    assert list((tmp_path / "temporary").glob("detdiff-*")) == []
