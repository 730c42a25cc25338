"""Measuring policies: counts are what is simulated, answers stand beside figures, and bad input is a paragraph; never seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import FULL, THOROUGH, examples

from detdiff.bench import measure as measuring
from detdiff.bench.counts import Counts, cache_memory, recorded
from detdiff.bench.figures import vllm_json
from detdiff.bench.measure import Measurement, PolicyResult
from detdiff.bench.policies import policies, with_pins
from detdiff.bench.runs import Goodput, TimedRun
from detdiff.bench.simulate import packed, padded_batches, simulate, work_of
from detdiff.bench.workload import Lengths, WorkItem, Workload, drawn, read
from detdiff.cli import main
from detdiff.engines.base import RunOptions
from detdiff.engines.record import record
from detdiff.engines.registry import open_named
from detdiff.errors import PolicyUnusable, WorkloadUnusable
from detdiff.scenario import Scenario
from detdiff.trace import Trace

POLICIES = [
    "serial",
    "static",
    "static:3",
    "continuous:3",
    "continuous:3 prefill_chunk=4",
    "serial layout=packed",
    "static:3 layout=packed",
    "continuous:3 layout=packed row_budget=6",
]
# The keys of a result file that vLLM wrote, and those that its source adds with --save-detailed, with the types of their values.
VLLM_KEYS = Path(__file__).parent / "vllm_result.json"
TYPES = {"str": str, "int": int, "float": (int, float), "list": list}


def scenario_of(workload: Workload, **keys: Any) -> Scenario:
    requests = [
        {
            "tokens": [(7 * n + 3 * i) % 200 + 5 for i in range(item.prompt_length)],
            "max_tokens": item.answer_length,
            "arrival": round(item.arrival),
            "ignore_stop": True,
        }
        for n, item in enumerate(workload.items)
    ]
    return Scenario.from_dict({"model": "builtin", "schedule": "continuous", "request": requests, **keys})


@pytest.fixture(scope="module")
def engine() -> Any:
    return open_named("mlx", "builtin", {})


@pytest.mark.thorough
def test_recorded_forwards_are_the_simulated_ones(engine: Any, tmp_path: Path) -> None:
    workload = drawn(7, Lengths.parse("exponential:8"), Lengths.parse("exponential:5"), "poisson:0.5", seed=3)
    seen = set()
    for number, policy in enumerate(policies(scenario_of(workload), POLICIES)):
        trace = record(policy.scenario, tmp_path / str(number), engine=engine, options=RunOptions(observe=0))
        found, expected = recorded(trace), simulate(policy.scenario, workload)
        assert [(each.rows, each.shape) for each in found] == [
            (each.rows, each.shape) for each in expected
        ], policy.name
        assert Counts.of(found, policy.at_once) == Counts.of(expected, policy.at_once)
        seen.add(len(found))
    assert len(seen) > 4


def test_another_scheduler_is_told_from_the_simulated_one(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = drawn(4, Lengths.parse("4"), Lengths.parse("uniform:2-6"), seed=1)
    found = [
        PolicyResult(policy) for policy in policies(scenario_of(workload), ["continuous:2 layout=packed"])
    ]
    sound = measuring.simulate
    monkeypatch.setattr(measuring, "simulate", lambda scenario, workload: sound(scenario, workload)[1:])
    measuring.answers(engine, found, workload)
    assert [each.simulated for each in found] == [False, False]
    monkeypatch.setattr(measuring, "simulate", sound)
    measuring.answers(engine, found, workload)
    assert [each.simulated for each in found] == [True, True]
    assert found[1].sameness == "identical" and found[0].texts == found[1].texts


INVARIANT = [
    "static:8",
    "continuous:8",
    "continuous:8 layout=packed",
    "continuous:8 layout=packed batch-invariant",
    "continuous:8 layout=packed kernels=candle-metal batch-invariant",
    # Above every forward's rows: linear calls go row by row, whoever is beside.
    "continuous:8 layout=packed kernels=candle-metal split_rows=999",
]


def test_six_policies_are_counted_as_simulated_and_answer_as_serial_does(engine: Any, tmp_path: Path) -> None:
    count = 32 if FULL else 10 if THOROUGH else 4
    workload = drawn(count, Lengths.parse("exponential:6"), Lengths.parse("exponential:4"), seed=5)
    asked = [*INVARIANT, "continuous:8 layout=packed kernels=candle-metal"]
    under = with_pins(engine, policies(scenario_of(workload), asked), compositions=1)
    found = [PolicyResult(policy) for policy in under]
    measuring.answers(engine, found, workload, tmp_path)
    assert [each.simulated for each in found] == [True] * 8
    for number, each in enumerate(found[:-1]):
        assert each.invariance == "identical", each.policy.name
        alone = tmp_path / f"{number}-alone"
        # Native kernels compute a row alike for every number of rows here; others are compared with themselves, alone.
        assert alone.exists() == (number > 3), each.policy.name
        # Stock MLX computes a row alike in calls of any size here, pinned or not.
        if number <= 4:
            assert each.sameness == "identical" and each.texts == found[0].texts, each.policy.name
        else:
            assert each.texts == texts_of(engine, alone), each.policy.name
        assert bool(each.policy.pinned) == ("batch-invariant" in each.policy.name)
    # The kernels of the last change with the rows beside, and it is told from those.
    assert found[-1].invariance != "identical"


def texts_of(engine: Any, path: Path) -> list[str]:
    trace = Trace.open(path)
    tokens = trace.generated(lens=False)
    return [
        engine.decode([int(t) for t in tokens.token[tokens.request == n]]) for n in range(len(trace.requests))
    ]


@pytest.mark.parametrize(
    ("asked", "paths"),
    [
        ("continuous:3 pad:8", {"forced/pad:8"}),
        ("continuous:3 pad:1", {"forced/pad:1"}),
        ("static:3 split_rows=3", {"forced/rows"}),
        ("continuous:3 layout=packed page_tokens=4 row_budget=5 prefill_chunk=3", set()),
    ],
)
def test_a_policy_is_what_it_says(engine: Any, asked: str, paths: set[str]) -> None:
    workload = drawn(4, Lengths.parse("5"), Lengths.parse("2"))
    found = [PolicyResult(policy) for policy in policies(scenario_of(workload), [asked])]
    measuring.answers(engine, found, workload)
    counts = found[1].counts
    assert counts is not None and {path for path, _ in counts.paths} == {"native", *paths}
    assert found[1].simulated is True and found[1].sameness == "identical"


def test_a_draft_is_counted_beside_and_shared_prefixes_are_not_simulated(engine: Any) -> None:
    workload = drawn(3, Lengths.parse("8"), Lengths.parse("6"))
    scenario = scenario_of(workload)
    alike = replace(scenario.requests[1], tokens=scenario.requests[0].tokens)
    scenario = replace(scenario, requests=(scenario.requests[0], alike, scenario.requests[2]))
    asked = [
        "continuous:3 layout=packed draft=builtin-draft",
        "continuous:1 layout=packed page_tokens=4 share_prefix=true",
    ]
    found = [PolicyResult(policy) for policy in policies(scenario, asked)]
    measuring.answers(engine, found, workload)
    serial, drafted, shared = (each.counts for each in found)
    assert serial is not None and drafted is not None and shared is not None
    assert drafted.drafted > 0 and drafted.forwards < serial.forwards and serial.drafted == 0
    # A page of the second prompt was there already, and another one; its last row always runs.
    assert serial.rows - shared.rows >= 4
    assert ["cannot be simulated" in each.why for each in found] == [False, True, True]
    assert [each.sameness for each in found[1:]] == ["identical", "identical"]


lengths = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12)


@given(lengths, st.integers(1, 8), st.sampled_from(["serial", "static", "continuous"]))
@settings(max_examples=examples(60), deadline=None)
def test_simulated_rows_are_the_lengths(given_lengths: list[tuple[int, int]], size: int, kind: str) -> None:
    workload = Workload(tuple(WorkItem(*each) for each in given_lengths), "drawn")
    active = {} if kind == "serial" else {"active": size}
    scenario = scenario_of(workload, schedule=kind, layout="packed", **active)
    forwards = list(packed(scenario, work_of(workload, scenario)))
    for number, (prompt, answer) in enumerate(given_lengths):
        assert sum(each.rows.get(number, 0) for each in forwards) == prompt + answer - 1
    limit = 1 if kind == "serial" else min(size, len(given_lengths))
    assert max(len(each.rows) for each in forwards) <= limit
    counts = Counts.of(forwards, limit)
    assert counts.rows == sum(p + a - 1 for p, a in given_lengths) and counts.padding == 0
    if kind == "serial":
        assert counts.forwards == sum(a for _, a in given_lengths)
    padded = padded_batches(scenario, work_of(workload, scenario))
    assert sum(each.useful for each in padded) == counts.rows
    memory = cache_memory(given_lengths, forwards)
    assert memory.held <= memory.paged and memory.held <= memory.contiguous


def test_waiting_for_the_longest_is_seen_in_counts() -> None:
    workload = Workload(
        tuple(WorkItem(4, 100 if n % 8 == 0 else 5) for n in range(32)), "one long answer in eight"
    )
    scenario = scenario_of(workload, layout="packed")
    counts = {
        policy.name: Counts.of(simulate(policy.scenario, workload), policy.at_once)
        for policy in policies(scenario, ["static:8 layout=packed", "continuous:8 layout=packed"])[1:]
    }
    static, continuous = counts["static:8 layout=packed"], counts["continuous:8 layout=packed"]
    assert static.forwards == 400 and static.idle_share > 0.7
    assert continuous.forwards < static.forwards / 1.5 and continuous.rows == static.rows


def test_the_cache_holds_more_requests_in_pages() -> None:
    items = [(100, 900), *[(10, 10)] * 15]
    workload = Workload(tuple(WorkItem(*each) for each in items), "one long")
    scenario = scenario_of(workload, layout="packed", schedule="static")
    memory = cache_memory(items, packed(scenario, work_of(workload, scenario)), page=16, budget=4000)
    assert memory.contiguous == 16 * 1000 and memory.paged < memory.contiguous / 8
    assert memory.most_contiguous == 4 and memory.most_paged is not None and memory.most_paged > 40


def test_figures_are_those_of_the_times() -> None:
    run = TimedRun(4.0, [0.0, 1.0], [[0.5, 0.6, 0.8], [1.25]])
    found = run.figures
    assert found.throughput == 1.0
    assert found.ttft == (500.0, 250.0) and found.e2el == (800.0, 250.0)
    assert found.tpot == (pytest.approx(150.0),) and found.itl == (pytest.approx(100.0), pytest.approx(200.0))
    assert found.good(Goodput(ttft=300)) == 0.25 and found.good(Goodput(e2el=1000)) == 0.5
    # The request of a single token has no pace, and does not hide that the other one is too slow.
    assert found.good(Goodput(tpot=100)) == 0.25 and found.good(Goodput(tpot=200)) == 0.5


def test_the_result_has_the_keys_of_vllms(engine: Any) -> None:
    workload = drawn(3, Lengths.parse("4"), Lengths.parse("3"), seed=2)
    result = PolicyResult(policies(scenario_of(workload), ["static"])[1])
    result.runs.append(measuring.timed(engine, result.policy.scenario))
    result.texts = ["a", "b", "c"]
    written = json.loads(json.dumps(vllm_json(result, Measurement(workload, [result], 1, {"date": "now"}))))
    theirs = json.loads(VLLM_KEYS.read_text())
    assert len(theirs["recorded"]["types"]) == 38
    for part in theirs.values():
        assert part["types"].keys() - written.keys() == set()
        for key, kind in part["types"].items():
            whole, _, inner = kind.partition(" of ")
            assert whole == "null" or isinstance(written[key], TYPES[whole]), key
            assert not inner or all(isinstance(each, TYPES[inner]) for each in written[key]), key
    assert written["output_lens"] == [3, 3, 3] and written["total_output_tokens"] == 9
    assert [len(each) for each in written["itls"]] == [2, 2, 2]


def test_the_command_measures_and_writes(tmp_path: Path) -> None:
    words = [
        "bench",
        "--model",
        "builtin",
        "--requests",
        "4",
        "--prompt-lengths",
        "6",
        "--answer-lengths",
        "exponential:6",
    ]
    words += [
        "--rounds",
        "1",
        "--policy",
        "static:2",
        "--policy",
        "continuous:4 layout=packed kernels=candle-metal",
    ]
    done = CliRunner().invoke(main, [*words, "-o", str(tmp_path / "m")], catch_exceptions=False)
    assert done.exit_code == 0 and "identical" in done.output
    answer = json.loads((tmp_path / "m" / "bench.json").read_text())
    assert answer["finished"] and [each["label"] for each in answer["policies"]][0] == "serial"
    assert [each["detdiff"]["answers"] == "identical" for each in answer["policies"]] == [True, True, False]
    for each in answer["policies"]:
        assert each["detdiff"]["counts_as_simulated"] is True and each["detdiff"]["throughput"]["median"] > 0
        assert (
            each["detdiff"]["answers"] in ("identical", "diverges, no flip")
            or "flips" in each["detdiff"]["answers"]
        )
    page = (tmp_path / "m" / "bench.html").read_text()
    for name in ("dd-throughput", "dd-latency", "dd-flips"):
        assert f"dd-plot {name}" in page
    link = next((tmp_path / "m").glob("divergence-*.html"))
    assert f'href="{link.name}"' in page


def test_from_lengths_alone_no_model_is_needed(tmp_path: Path) -> None:
    lines = [{"prompt_len": 10 + n, "output_len": 5 * n + 1, "timestamp": n} for n in range(6)]
    (tmp_path / "real.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = [
        "bench",
        "--model",
        "nowhere/at-all",
        "--simulate",
        "--workload",
        str(tmp_path / "real.jsonl"),
        "--budget",
        "500",
    ]
    done = CliRunner().invoke(main, [*words, "--policy", "continuous:2", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["policies"][0]["detdiff"]["counts"]["rows"] >= sum(each["prompt_len"] for each in lines)
    assert (
        found["policies"][1]["detdiff"]["cache"]["most_paged"]
        > found["policies"][1]["detdiff"]["cache"]["most_contiguous"]
    )


def test_seconds_are_those_of_the_clock_that_was_asked_for(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(measuring, "CLOCKS", {"wall": lambda: 7.0, "processor": lambda: float(next(ticks))})
    scenario = scenario_of(drawn(1, Lengths.parse("3"), Lengths.parse("4")))
    # Asked when this begins, when the engine is ready, for each token, and at the end.
    run = measuring.timed(engine, scenario, "processor")
    assert run.tokens == [[1.0, 2.0, 3.0, 4.0]] and run.seconds == 5.0
    assert measuring.timed(engine, scenario).seconds == 0.0


INTERRUPTED = """
import os, signal, sys
# Whoever started this may ignore the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
from detdiff.bench import measure
from detdiff.cli import main
calls, sound = [0], getattr(measure, sys.argv[1])
def counted(*given, **more):
    calls[0] += 1
    if calls[0] == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGINT)
    return sound(*given, **more)
setattr(measure, sys.argv[1], counted)
main(sys.argv[3:])
"""


@pytest.mark.parametrize(
    ("stage", "at", "runs", "counted"),
    # One round to warm up, one whole and half of the next; and the second recording, before anything is timed.
    [("timed", 6, [2, 1], 2), pytest.param("record", 2, [0, 0], 1, marks=pytest.mark.thorough)],
)
def test_ctrl_c_keeps_what_was_measured(
    tmp_path: Path, stage: str, at: int, runs: list[int], counted: int
) -> None:
    words = [
        "bench",
        "--model",
        "builtin",
        "--requests",
        "2",
        "--prompt-lengths",
        "3",
        "--answer-lengths",
        "2",
    ]
    words += ["--policy", "static", "--rounds", "5", "-o", str(tmp_path / "m"), "--json"]
    given = [sys.executable, "-c", INTERRUPTED, stage, str(at), *words]
    done = subprocess.run(given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    for text in (done.stdout, (tmp_path / "m" / "bench.json").read_text()):
        found = json.loads(text)
        assert found["finished"] is False
        own = [each["detdiff"] for each in found["policies"]]
        assert sorted(each["rounds"] for each in own) == sorted(runs)
        assert sum(each["counts"] is not None for each in own) == counted
    assert f"interrupted after {min(runs)} of 5 rounds" in (tmp_path / "m" / "bench.html").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policy", "fastest"], "is none that this workload can have"),
        (["--policy", "static:0"], "is none that this workload can have"),
        (["--policy", "pad:0"], "is none that this workload can have"),
        (["--policy", "static max_tokens=3"], "it says max_tokens, and policies differ in schedule"),
        (["--policy", "static engine=llama.cpp"], "it says engine, and policies differ in schedule"),
        (["--prompt-lengths", "normal:3"], "is no distribution of lengths"),
        (["--answer-lengths", "uniform:9-3"], "run from 9 to 3"),
        (["--arrivals", "poisson:0"], "is no way to arrive"),
        (["--goodput", "speed:3"], "expected ttft:MS"),
        (["--clock", "processor", "--arrivals", "poisson:1"], "nor of waiting for arrivals"),
        (["--workload", "none.jsonl"], "cannot be read"),
    ],
)
def test_bad_input_is_a_paragraph(words: list[str], says: str) -> None:
    done = CliRunner().invoke(main, ["bench", "--model", "builtin", "--simulate", *words])
    assert done.exit_code == 2 and says in " ".join(done.output.split()), done.output
    assert "Traceback" not in done.output


def test_a_workload_without_lengths_is_refused_at_its_line(tmp_path: Path) -> None:
    for text, says in (
        (
            '{"prompt_length": 3, "answer_length": 2}\n{"prompt_length": 3}',
            "line 2 has a prompt of 3 and an answer of None",
        ),
        ("[1]", "line 1 is"),
        ("{", "line 1 is no JSON"),
        ("", "has no request"),
        ('{"prompt_length": 3, "answer_length": 2, "arrival": -1}', "the arrival -1"),
    ):
        (tmp_path / "w.jsonl").write_text(text)
        with pytest.raises(WorkloadUnusable, match=says):
            read(tmp_path / "w.jsonl")


def test_what_cannot_be_simulated_says_why() -> None:
    workload = drawn(2, Lengths.parse("3"), Lengths.parse("2"))
    drafted = scenario_of(workload, layout="packed", draft="builtin-draft")
    with pytest.raises(PolicyUnusable, match="depends on what the model accepts"):
        simulate(drafted, workload)
    served = scenario_of(workload, engine="server", model="http://127.0.0.1:1/v1")
    with pytest.raises(PolicyUnusable, match="not at hand"):
        simulate(served, workload)
