"""What a change of the code's shape must not change: stored traces, the cases and architectures that are tried, the answers.

The bytes of golden traces, the answer to the reference case and which cases and architectures there are stand here; what
the tests named below compute is not computed again.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from runs import ARCHITECTURES, PACKABLE

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
sys.path.append(str(TESTS / "faults"))

from cases import CASES  # noqa: E402

# Recorded on one processor, so another one's recording has other bits; the format of the bytes is the same.
TRACES = {
    "serial/forwards.jsonl": "29118ec195c328db143c0a8b2e06096e395809ea23b42b1edaee327de3852248",
    "serial/shard-00000.safetensors": "3cae38e00173eae4528219c54420c51d91ccedd3bd7bbf2f2bd8604fa1df477b",
    "serial/texts.jsonl": "a9b068c232c8033f231743fddc5ed0ac17de966a4be438c75c782da260ecdaa1",
    "serial/trace.json": "5fc108a5e3563fbea83aece526358bf8f0c8aacc5d9ded98a769b34f18b7d3f3",
    "continuous/forwards.jsonl": "7f0d98dd73d8d1d3c0783153355de66a5d375cd687fbcf953607a42ae4eb3769",
    "continuous/shard-00000.safetensors": "61336b79dd9e5f664b08b8e469b3ca8144275e92fd7d2f0e34b8677799a1e9f7",
    "continuous/texts.jsonl": "e5d7415d16463d32b2c9fefd8c71aac31e4f5086c95acac91b0ebd0703fb0fca",
    "continuous/trace.json": "b58ca65cc7e48beba9b73a9c4750e9c846324043b08bdc66b21cdd3ac9fdb168",
}

# Who checks the rest; a file that is renamed is renamed here.
HELD_BY = {
    "the stored pair's answer": "test_golden_traces.py::test_the_stored_pair_gives_the_stored_answer",
    "the same run twice, the same bytes": "trace/test_trace_roundtrip.py::",
    "the reference case": "test_reference_case.py::test_one_request_flips_and_the_other_does_not",
    "its first origin": "test_reference_case.py::test_the_origin_is_the_first_shared_forward",
    "the fault matrix": "faults/test_verdicts.py::test_verdict",
    "the page of the matrix": "test_verdict_matrix.py::",
    "tapped equals untapped, by architecture": "engine/test_observer.py::",
    "schedules and layouts, by architecture": "engine/test_identity.py::",
    "one golden report a format": "report/test_report_golden.py::test_every_format_gives_exactly_the_golden_text",
}


@pytest.mark.parametrize("name", TRACES)
def test_a_stored_trace_keeps_its_bytes(name: str) -> None:
    assert sha256((ROOT / "traces" / name).read_bytes()).hexdigest() == TRACES[name]


def test_every_stored_file_is_held() -> None:
    folders = (ROOT / "traces" / name for name in ("serial", "continuous"))
    assert {f"{folder.name}/{file.name}" for folder in folders for file in folder.iterdir()} == set(TRACES)


def test_as_many_kinds_of_faults_are_tried() -> None:
    assert sorted(CASES) == list(range(1, 21))
    undecided = {17, 19}
    assert {number for number, case in CASES.items() if case.verdict is None} == undecided
    assert {n for n, case in CASES.items() if case.verdict == "bug"} == {6, 7, 8, 9, 10, 11, 12, 14, 16}
    assert {n for n, case in CASES.items() if case.verdict == "numerics"} == {1, 2, 3, 4, 5}


def test_as_many_architectures_are_tried() -> None:
    assert {"llama", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "qwen3_next", "phi3", "mamba2"} <= set(
        ARCHITECTURES
    )
    assert {"llama", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "phi3"} <= set(PACKABLE)


def test_the_stored_answer_flips_where_it_did() -> None:
    answer = json.loads((ROOT / "traces" / "answer.json").read_text(encoding="utf-8"))
    requests = {request["id"]: request for request in answer["requests"]}
    assert requests["anchor"]["flip"] is None and requests["follower"]["flip"]["index"] == 16
    assert not answer["identical"]


@pytest.mark.parametrize("what", HELD_BY)
def test_there_is_who_holds_it(what: str) -> None:
    file, _, name = HELD_BY[what].partition("::")
    assert f"def {name or 'test_'}" in (TESTS / file).read_text(encoding="utf-8")
