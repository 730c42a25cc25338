"""The command line as it is used: exit codes, errors of one paragraph, and answers for people and for programs."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from command_line import FLAGS, PROMPTS, SCENARIO, flags, paragraph, recorded_pair, run
from plugins.small_gguf import small_gguf
from plugins.small_models import write_directory

from detdiff.report import from_json
from detdiff.trace import Trace


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the traces a (serial) and b (continuous) of one scenario."""
    return recorded_pair(tmp_path_factory.mktemp("traces"))


# What works.


def test_a_trace_and_itself_are_identical(traces: Path) -> None:
    result = run("compare", traces / "a", traces / "a")
    assert result.exit_code == 0
    assert result.output.startswith("The runs are identical: 2 requests")


def test_two_schedules_are_different_and_the_answer_is_the_same_from_traces_files_and_flags(
    traces: Path, scenario: Path
) -> None:
    answers = []
    both = ["--both", f"{FLAGS} schedule=serial", "--b", "schedule=continuous"]
    for arguments in (
        ["compare", traces / "a", traces / "b"],
        ["compare", scenario, "--b", "schedule=continuous"],
        ["compare", scenario, traces / "b"],
        [*flags(*PROMPTS), *both],
    ):
        result = run(*arguments, "--json")
        assert result.exit_code == 1, result.output
        answer = json.loads(result.stdout)
        assert answer["schema"] == "detdiff.divergence/2" and not from_json(answer).identical
        for request in answer["requests"]:
            del request["id"]
            for place in (request["origin"], request["cache_entry"]):
                for side in ("composition_a", "composition_b") if place else ():
                    for member in place[side]["members"]:
                        del member["request"]
        answers.append([answer["stage"], answer["compared"], answer["requests"]])
    assert answers[0][2][0]["origin"]["path_a"] != answers[0][2][0]["origin"]["path_b"]
    assert answers == answers[:1] * 4


def test_with_the_path_held_nothing_differs() -> None:
    result = run(*flags(*PROMPTS), "--both", FLAGS, "--split-rows", "1024", "--b", "schedule=continuous")
    assert result.exit_code == 0, result.output


def test_short_options_are_flags_for_both_sides_and_a_side_wins(tmp_path: Path) -> None:
    result = run(
        *flags(PROMPTS[0]), "--kernels", "native", "--split-rows", "3", "--both", "max_tokens=2", "--b",
        "split_rows=5", "--keep", tmp_path / "kept",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    a, b = (Trace.open(tmp_path / "kept" / name).scenario for name in "ab")
    assert (a["split_rows"], b["split_rows"], a.get("kernels"), b["request"][0]["max_tokens"]) == (
        3,
        5,
        None,
        2,
    )


def test_recorded_sides_are_gone_unless_they_are_kept(
    tmp_path: Path, scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    done = run("compare", scenario, "--b", "max_tokens=6")
    assert done.exit_code == 0, done.output
    assert "a (not kept)" in done.output
    assert list((tmp_path / "temporary").iterdir()) == []
    kept = run("compare", scenario, "--b", "max_tokens=6", "--keep", tmp_path / "kept")
    assert kept.exit_code == 0 and str(tmp_path / "kept" / "a") in " ".join(kept.output.split())
    assert Trace.open(tmp_path / "kept" / "b").complete


def test_a_replay_gives_units_in_the_last_place(traces: Path) -> None:
    plain = json.loads(run("compare", traces / "a", traces / "b", "--json").stdout)
    result = run("compare", traces / "a", traces / "b", "--replay", "--json")
    assert result.exit_code == 1, result.output
    origins = [
        (before["origin"], after["origin"])
        for before, after in zip(plain["requests"], json.loads(result.stdout)["requests"], strict=True)
        if before["origin"]
    ]
    assert origins
    for before, after in origins:
        assert before["magnitude"] is None and after["magnitude"]["max_ulp"] >= 1
        assert (before["site"], before["position"]) == (after["site"], after["position"])


def test_show_says_what_a_trace_holds(traces: Path) -> None:
    result = run("show", traces / "b")
    assert result.exit_code == 0
    # Where lines break depends on the length of the path.
    shown = " ".join(result.output.split())
    for words in (
        "complete, ", "schedule continuous", "request anchor:", PROMPTS[0], "6 of at most 6 generated",
        "logits bit-equal", "reference/candle-metal/mm", "decode of anchor",
    ):  # fmt: skip
        assert words in shown


def test_show_in_json_counts_what_the_trace_counts(traces: Path) -> None:
    trace = Trace.open(traces / "b")
    found = json.loads(run("show", traces / "b", "--json", "--forwards").stdout)
    assert found["schema"] == "detdiff.trace-summary/1"
    assert (found["complete"], found["rows"]) == (True, len(trace.row_index().request))
    assert [line["forward"] for line in found["each_forward"]] == list(range(found["forwards"]))
    covered = [n for group in found["groups"] for n in range(group["first"], group["last"] + 1)]
    assert covered == list(range(len(trace.forwards())))
    assert sum(g["rows"] * (g["last"] - g["first"] + 1) for g in found["groups"]) == found["rows"]
    texts = trace.texts()
    generated = trace.generated()
    spoken = "".join(texts[t] for t in generated.token[generated.request == 0].tolist())
    assert found["requests"][0]["generated"] == spoken
    assert found["bytes"] == sum(file.stat().st_size for file in trace.path.iterdir())


def test_show_lists_the_sites_that_rules_can_name(traces: Path) -> None:
    trace = Trace.open(traces / "b")
    found = json.loads(run("show", traces / "b", "--sites", "--json").stdout)["each_site"]
    assert found == [{"name": site.name, "kind": site.kind, "layer": site.layer} for site in trace.sites]
    lines = [line.split() for line in run("show", traces / "b", "--sites").output.splitlines()]
    assert ["layers.0.self_attn.q_proj", "linear", "0"] in lines and ["logits", "logits", "-"] in lines
    assert "each_site" not in json.loads(run("show", traces / "b", "--json").stdout)


@pytest.mark.parametrize("width", [70, 80, 200])
def test_the_table_of_forwards_keeps_to_the_width(traces: Path, width: int) -> None:
    lines = run("show", traces / "b", environment={"COLUMNS": str(width)}).output.splitlines()
    table = lines[lines.index("", lines.index("") + 1) + 1 :]
    assert table[0].startswith("forwards") and max(map(len, table)) <= width
    words = " ".join(" ".join(table).split())
    assert "decode" in words and "reference/candle-metal/mm" in words


def test_what_decides_a_run_is_shown(tmp_path: Path, scenario: Path) -> None:
    with scenario.open("a") as file:
        file.write('temperature = 0.5\nseed = 7\n[[rule]]\nsite = "*.o_proj"\nrows = "2.."\npath = "pad:8"\n')
    changes = ["schedule=continuous", "arrivals=0,2", "split_rows=3", "row_budget=9", "active=2", "lens"]
    done = run(
        "record", scenario, "-o", tmp_path / "t", *(word for key in changes for word in ("--set", key))
    )
    shown = " ".join(done.output.split())
    assert "rule: site *.o_proj, rows 2.. -> pad:8" in shown and " lens, " in shown
    assert "arrival 2, sampled at temperature 0.5, top_p 1, seed 7 prompt:" in shown
    assert "generated, arrival 0 prompt:" in shown
    same = " ".join(run("compare", tmp_path / "t", tmp_path / "t").output.split())
    for words in (
        "schedule continuous, layout packed, active 2, row_budget 9, prefill_chunk 4, kernels candle-metal, "
        "split_rows 3, 1 rule, arrivals 0,2,",
        "request anchor greedy, request follower sampled at temperature 0.5, top_p 1, seed 7, model builtin",
    ):
        assert words in same


def test_a_replay_finds_a_model_that_has_moved(tmp_path: Path) -> None:
    model = write_directory(tmp_path / "model")
    arguments = [*flags("In the table", model=model), "--both", "max_tokens=2 kernels=candle-metal"]
    made = run(*arguments, "--a", "split_rows=1", "--b", "split_rows=64", "--keep", tmp_path / "kept")
    assert made.exit_code == 1, made.output
    model.rename(tmp_path / "moved")
    again = ["compare", tmp_path / "kept" / "a", tmp_path / "kept" / "b", "--replay"]
    assert "model" in paragraph(run(*again))
    found = run(*again, "--model", tmp_path / "moved")
    assert found.exit_code == 1 and "ULP" in found.output, found.output


def test_capture_and_set_change_the_scenario(tmp_path: Path, scenario: Path) -> None:
    result = run(
        "record", scenario, "-o", tmp_path / "t", "--capture", "full", "--set", "max_tokens=1", "--set", "top=3", "--json"
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["values"] and found["scenario"]["top"] == 3
    assert [request["generated_tokens"] for request in found["requests"]] == [1, 1]


def test_a_chat_prompt_goes_through_the_template(tmp_path: Path) -> None:
    model = write_directory(tmp_path / "model")
    result = run(
        *flags("In the table", model=model), "--both", "max_tokens=2", "--a", "chat", "--b", "chat", "--keep",
        tmp_path / "kept",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    trace = Trace.open(tmp_path / "kept" / "a")
    texts = trace.texts()
    assert "".join(texts[t] for t in trace.requests[0]["tokens"]).startswith("<|im_start|>user")


def test_import_gguf_writes_a_directory_that_runs(tmp_path: Path) -> None:
    file = small_gguf("llama").write(tmp_path / "m.gguf")
    result = run("import-gguf", file, tmp_path / "m", "--dtype", "f32", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["schema"], found["architecture"], found["dtype"]) == ("detdiff.import/1", "llama", "f32")
    assert run(*flags("In the table", model=tmp_path / "m"), "--a", "max_tokens=2").exit_code == 3
    text = paragraph(run("import-gguf", file, tmp_path / "m"))
    assert "already there" in text


@pytest.mark.parametrize("arguments", [["--help"], ["compare", "--help"], ["--version"]])
def test_help_loads_no_model_library(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom detdiff.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout
    assert "click" in done.stderr.split()
    assert not {"mlx", "mlx_lm", "numba", "tokenizers", "transformers"} & set(done.stderr.split())


@pytest.mark.thorough
def test_the_libraries_stay_quiet_and_there_is_no_bar_off_a_terminal(scenario: Path, tmp_path: Path) -> None:
    loud = dict.fromkeys(("TRANSFORMERS_VERBOSITY", "TOKENIZERS_PARALLELISM"))
    environment = {key: value for key, value in os.environ.items() if key not in loud}
    done = subprocess.run(
        [sys.executable, "-m", "detdiff.cli", "record", str(scenario), "-o", str(tmp_path / "t")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.thorough
def test_there_is_a_bar_on_a_terminal(scenario: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "detdiff.cli", "record", str(scenario), "-o", str(tmp_path / "t")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    # A terminal that the last writer closed ends with an error on Linux and with nothing elsewhere.
    with suppress(OSError):
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait() == 0
    assert b"recording" in shown and b"100%" in shown


def test_an_error_is_wrapped_to_the_terminal(tmp_path: Path) -> None:
    result = run("compare", environment={"COLUMNS": "50"})
    assert "There is nothing to compare" in paragraph(result)
    assert len(result.stderr.splitlines()) > 3 and max(map(len, result.stderr.splitlines())) <= 50


def test_a_reader_that_stops_is_no_error(traces: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "detdiff.cli", "show", str(traces / "a")],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (2, "")


def json_error(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["schema"] == "detdiff.error/1" and set(found) == {"schema", "error", "message", "exit_code"}
    assert found["exit_code"] == result.exit_code
    return found


def test_an_error_is_json_as_well(tmp_path: Path) -> None:
    result = run("show", tmp_path / "nothing", "--json")
    found = json_error(result)
    assert found["error"] == "NotATrace" and "nothing is not there" in found["message"]
    assert "is not a trace" in json_error(run("show", tmp_path, "--json"))["message"]
    assert found["message"].split() == result.stderr.split()[1:]
    assert json_error(run("compare", "a", "b", "c", "--json"))["error"] == "UsageError"


def test_a_fault_of_our_own_asks_for_a_report_and_debug_shows_it(
    monkeypatch: pytest.MonkeyPatch, traces: Path
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr("detdiff.commands.show.summary", broken)
    text = paragraph(run("show", traces / "a"))
    assert "ZeroDivisionError, injected" in text and "detdiff --debug" in text and "report" in text
    result = run("--debug", "show", traces / "a")
    assert result.exit_code == 2 and "Traceback" in result.stderr and "injected" in result.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "not enough memory"),
        (RuntimeError("[malloc] Unable to allocate 1099511627776 bytes."), "not enough memory"),
        (PermissionError(13, "Permission denied", "some/file"), "some/file: Permission denied"),
        (KeyboardInterrupt(), "Interrupted; nothing was written"),
    ],
)
def test_what_the_system_refuses_is_a_paragraph(
    monkeypatch: pytest.MonkeyPatch, traces: Path, error: BaseException, words: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("detdiff.commands.show.summary", broken)
    assert words in paragraph(run("show", traces / "a"))
