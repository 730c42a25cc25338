"""Real servers: each passes the same tests of a client, and what is known of llama.cpp's and mlx_lm.server shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from real_servers import SERVERS, llama_server, mlx_server
from tiers import only_in_full

from detdiff import Scenario, Trace, compare, record
from detdiff.commands.inside import local
from detdiff.engines.llama_cpp.known_model import KnownModel
from detdiff.engines.registry import open_engine
from detdiff.explain.inside import ANOTHER_MODEL, look_inside

TEXTS = [
    "The capital of France is", "def add(a, b):", "Once upon a time there was a king who", "Water boils at",
    "My son, do not forget", "In the beginning", "Two and two are", "The cat sat on the",
]  # fmt: skip


def summary(address: str, folder: Path, *more: str, texts: int = 8) -> tuple[int, dict[str, Any]]:
    (folder / "prompts.txt").write_text("\n".join(TEXTS[:texts]))
    found = run(
        "compare", "--model", f"{address}/v1", "--prompts", str(folder / "prompts.txt"), "--a", "schedule=serial",
        "--b", f"static:{texts}", "--repeats", "2", "--json", *more,
    )  # fmt: skip
    return found.exit_code, json.loads(found.stdout)


def test_llama_cpp_with_a_tiny_model(tmp_path: Path) -> None:
    """Shapes, ids, values and schedules of the real server; what its kernels do to so small a model is not asserted."""
    model = KnownModel(layers=2, kind="F16").write(tmp_path / "tiny.gguf")
    with llama_server(model) as address:
        code, found = summary(address, tmp_path, "--both", "max_tokens=8")
        chat = record(
            Scenario.from_flags(f"{address}/v1", ["hello", "there"], "chat static max_tokens=6"),
            tmp_path / "chat",
        )
        alone, together = (
            record(
                Scenario.from_flags(f"{address}/v1", TEXTS[:3], f"{schedule} max_tokens=8 ignore_stop"),
                tmp_path / schedule,
            )
            for schedule in ("serial", "static")
        )
    load = chat.header["times"]["together"]["load"]
    assert load["by"] == "/metrics" and 1 < load["shared"] <= 2
    _found_inside(model, alone, together, tmp_path)
    assert chat.complete and "logits" not in chat.lacks and len(chat.generated(lens=False).token) >= 2
    assert code in (0, 1, 3)
    (arm,) = found["arms"]
    assert arm["requests"] == 16 and arm["left_out"] == 0 and arm["cached_a"] == arm["cached_b"] == 0
    assert found["repeats"][0]["name"] == "side a" and found["repeats"][0]["differing"] == 0
    assert (code == 0) == (arm["differing"] == 0 and arm["met"] is True)
    assert arm["flipped"] or arm["largest"] < 0.1


def _found_inside(model: Path, alone: Trace, together: Trace, folder: Path) -> None:
    """The same file in llama.cpp itself answers as its server did, each request alone; what flips there when together may differ."""
    base, _ = local(str(model))
    found = look_inside(alone, together, base, open_engine(base), folder / "inside", budget=0)
    # Parts of characters, of which a model of random weights writes many, are left out by the server.
    own, theirs = (trace.generated(lens=False) for trace in (Trace.open(folder / "inside" / "a"), alone))
    for number in range(len(alone.requests)):
        rest = iter(own.token[own.request == number].tolist())
        assert all(token in rest for token in theirs.token[theirs.request == number].tolist())
    assert found.found != ANOTHER_MODEL and not found.exact
    assert any("shared a forward is not known" in words for words in found.not_carried)


@pytest.mark.thorough
@pytest.mark.real_model
@pytest.mark.parametrize("kind", ["f16", "q4_1"])
def test_llama_cpp_with_smollm2(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    """F16 differs where this processor's kernels for one row and for eight do; Q4_1 is the same everywhere here."""
    model = request.getfixturevalue(f"smollm2_{kind}_gguf")
    with llama_server(model) as address:
        code, found = summary(address, tmp_path, "--both", "max_tokens=16")
    (arm,) = found["arms"]
    alone, together = found["repeats"]
    assert alone["differing"] == 0, "run to run is not zero"
    # Which requests meet in a forward may be another matter from run to run.
    assert together["largest"] < 0.1
    assert arm["most"] >= 2 and arm["requests"] == 16
    if kind == "q4_1":
        assert (code, arm["differing"], together["differing"]) == (0, 0, 0)
        return
    if code == 0:
        pytest.skip("this processor's F16 kernels give one row and eight the same bits")
    assert code == 1 and arm["differing"] > 0 and 0 < arm["largest"] < 0.1


@only_in_full("what the test of each server shows of a tiny model, on SmolLM2")
def test_mlx_lm_server_gives_each_request_the_same_alone_and_together(
    tmp_path: Path, smollm2_packed_f32: Path
) -> None:
    with mlx_server(smollm2_packed_f32) as address:
        # Whether requests meet is the machine's to say; that they never did is an answer of its own.
        for _ in range(4):
            code, found = summary(address, tmp_path, "--both", "max_tokens=6", texts=4)
            if code != 3:
                break
    (arm,) = found["arms"]
    assert code == 0 and arm["differing"] == 0 and arm["numbers"] == 48 and arm["most"] >= 2
    assert any("names another token than the one it sent" in note for note in found["notes"])
    assert any("cannot be switched off" in note for note in found["notes"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", SERVERS)
def test_each_server_passes_the_same_tests(tmp_path: Path, name: str) -> None:
    """One by one a server repeats itself; what was sent together met, or is no comparison; values and ids are there or said to lack."""
    server = SERVERS[name]
    (tmp_path / "model").mkdir()
    with server.start(server.model(tmp_path / "model")) as address:

        def recorded(what: str, flags: str) -> Trace:
            asked = Scenario.from_flags(f"{address}/v1", TEXTS, f"max_tokens=24 top=5 {flags}")
            return record(asked, tmp_path / what)

        alone, again = recorded("alone", "serial"), recorded("again", "serial")
        for number in range(4):
            together = recorded(f"together{number}", "static")
            if together.header["server"]["met"]:
                break
        later = recorded("later", "continuous engine.rate=40")
        chat = recorded("chat", "chat static") if server.chat else None
        code, found = summary(address, tmp_path, "--both", "max_tokens=8 top=5")
    assert alone.header["model"]["server"] == server.kind
    assert compare(alone, again).identical, "it does not repeat itself"
    assert together.header["server"]["met"] and together.header["times"]["together"]["interleaved"] > 0
    assert not compare(alone, together).inconclusive
    for trace in (alone, together, later, *([chat] if chat else ())):
        assert trace.complete and ("logits" in trace.lacks) == (not server.values)
        assert set(trace.generated(lens=False).request.tolist()) == set(range(len(TEXTS)))
        assert trace.header["server"]["token_ids"] == server.ids
    if server.kind == "transformers":
        (tmp_path / "local.toml").write_text(f'engine = "transformers"\nmodel = "{tmp_path / "model"}"\n')
        base, _ = local(str(tmp_path / "local.toml"))
        inside = look_inside(alone, together, base, open_engine(base), tmp_path / "inside", budget=0)
        assert any("as text" in each for each in inside.not_carried)
        # The same model answers alone as its server did, special tokens left out.
        assert all(each.alone_equal and each.characters for each in inside.flips)
    first = [times[0] for times in later.header["times"]["requests"].values()]
    assert max(first) - min(first) > 0.02
    (arm,) = found["arms"]
    assert found["repeats"][0]["differing"] == 0
    if server.kind == "mlx_lm":
        assert any("cannot be switched off" in note for note in found["notes"])
    assert code == (1 if arm["differing"] else 0 if arm["met"] else 3)
