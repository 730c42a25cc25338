"""What servers say of their load: read in each kind's words, beside the tokens' times, and against them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from local_servers import SmallModel
from test_server_engine import scenario, together

from detdiff import Trace, compare, record
from detdiff.engines.server.kinds import KINDS
from detdiff.engines.server.load import prometheus_load, slots_load

TEXTS = {
    "vllm": """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_running_peak{engine="0"} 99
""",
    "sglang": """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="a {strange} \\"name\\""} 8.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.28
""",
    "tgi": """# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 8
# TYPE tgi_queue_size gauge
tgi_queue_size 2
""",
}


@pytest.mark.parametrize("kind", TEXTS)
def test_the_texts_of_each_kind_are_read(kind: str) -> None:
    names = KINDS[kind].load
    assert names is not None and prometheus_load(TEXTS[kind], names) == {"running": 8, "waiting": 2}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>",
        "vllm:num_requests_running",
        "vllm:num_requests_running{} NaN",
        "vllm:num_requests_running -1",
    ],
)
def test_what_is_no_figure_is_none(text: str) -> None:
    names = KINDS["vllm"].load
    assert names is not None and prometheus_load(text, names) == {}
    assert slots_load(text) == {}


def batch(folder: Path, flags: str = "", **how: Any) -> Trace:
    with SmallModel(pace=0.03, **how).at() as address:
        alone = scenario(address, flags)
        b = record(together(alone), folder / "b")
        assert compare(record(alone, folder / "a"), b).inconclusive == (not b.header["server"]["met"])
    return b


@pytest.mark.parametrize("path", ["/metrics", "/slots"])
def test_the_load_stands_beside_the_tokens(tmp_path: Path, path: str) -> None:
    load = batch(tmp_path, tells=path).header["times"]["together"]["load"]
    assert (load["by"], load["before"], load["running"]) == (path, 0, 4) and load["readings"] >= 1
    assert load["shared"] == (4 if path == "/metrics" else None)


def test_it_is_all_there_is_where_answers_do_not_stream(tmp_path: Path) -> None:
    flags = "engine.stream=false engine.rehearse=false"
    found = batch(tmp_path / "told", flags, tells="/metrics").header["times"]["together"]
    assert (found["met"], found["most"], found["by"]) == (True, 4, "the server's /metrics")
    silent = batch(tmp_path / "silent", flags)
    assert silent.header["times"]["together"]["met"] is None
    assert any("was not seen" in note for note in silent.header["notes"])


def test_several_servers_behind_an_address_are_not_one_batch(tmp_path: Path) -> None:
    found = batch(tmp_path, tells="/metrics", replicas=True)
    assert found.header["times"]["together"]["interleaved"] == 6 and found.header["server"]["met"] is False
    assert any("several servers stand behind the address" in note for note in found.header["notes"])


def test_a_server_without_is_said(tmp_path: Path) -> None:
    found = batch(tmp_path)
    assert "load" not in found.header["times"]["together"] and found.header["server"]["met"]
    assert any(
        "it has none at /metrics and /slots; --metrics switches them on" in note
        for note in found.header["notes"]
    )
