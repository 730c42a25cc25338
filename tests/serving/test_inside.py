"""From outside to inside: a flip that a client saw is found in the model, and one that the model did not make is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clients import served
from command_line import run

from detdiff import Scenario, Trace, record
from detdiff.commands.inside import local
from detdiff.engines.mlx.live import PackedLive
from detdiff.errors import CommandError
from detdiff.explain.inside import (
    BITS,
    NO_DIFFERENCE,
    NOTHING,
    SAME,
    InsideAnswer,
    look_inside,
)

PROMPTS = [
    "And it came to pass",
    "In the beginning",
    "Now these are the names of",
    "The king said unto the people",
]
METAL = "kernels=candle-metal prefill_chunk=4"


def asked(address: str, folder: Path, flags: str = "") -> tuple[Trace, Trace]:
    """A client's two runs: one after the other, and all at once."""
    alone = Scenario.from_flags(f"{address}/v1", PROMPTS, f"max_tokens=24 ignore_stop {flags}")
    return record(alone, folder / "a"), record(alone.with_changes(schedule="static"), folder / "b")


def inside(traces: tuple[Trace | None, Trace], where: str, engine: Any, folder: Path) -> InsideAnswer:
    base, recorded = local(where)
    return look_inside(*traces, base, engine, folder / "inside", served=recorded, budget=0)


@pytest.fixture(scope="module")
def metal(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace, Trace]:
    """What candle-metal's kernels served, and a client's traces of it."""
    folder = tmp_path_factory.mktemp("metal")
    with served(engine, METAL, folder / "served") as found:
        return (folder / "served", *asked(found.address, folder))


def test_what_a_client_saw_is_found_where_it_was_born(
    engine: Any, metal: tuple[Path, Trace, Trace], tmp_path: Path
) -> None:
    recorded, a, b = metal
    found = inside((a, b), str(recorded), engine, tmp_path)
    assert found.exact and found.not_carried == ()
    # Who shared a forward is known, so that every answer is what the client got, flip or none.
    for name, trace in (("a", a), ("b", b)):
        own = Trace.open(tmp_path / "inside" / name).generated(lens=False)
        assert {n: own.token[own.request == n].tolist() for n in range(4)} == {
            n: trace.generated(lens=False).token[trace.generated(lens=False).request == n].tolist()
            for n in range(4)
        }
    assert all(each.same and each.alone_equal for each in found.flips)
    if not found.flips:
        pytest.skip("no answer flips with those who met this time")
    assert found.found == SAME and "appears inside at the same place" in found.sentence
    divergence = found.verdict.divergence
    assert divergence is not None
    first = next(each for each in divergence.requests if each.id == found.flips[0].request)
    assert first.origin is not None and first.cache_entry is not None
    assert f"born at {first.origin.site}, position {first.origin.position}" in found.sentence
    assert f"{first.cache_entry.kind}, head {first.cache_entry.head}" in found.sentence


@pytest.mark.thorough
def test_one_run_under_load_is_enough(engine: Any, metal: tuple[Path, Trace, Trace], tmp_path: Path) -> None:
    recorded, _, b = metal
    found = inside((None, b), str(recorded), engine, tmp_path)
    assert found.found in (SAME, BITS) and all(each.same for each in found.flips)


@pytest.mark.thorough
def test_a_model_alone_says_that_who_met_is_not_known(
    engine: Any, metal: tuple[Path, Trace, Trace], tmp_path: Path
) -> None:
    """The model without the server's kernels: alone it answers otherwise, or nothing differs; neither is called found."""
    _, a, b = metal
    found = inside((a, b), "builtin", engine, tmp_path)
    assert found.found != SAME and not found.exact
    assert any("shared a forward is not known" in words for words in found.not_carried)


@pytest.mark.thorough
def test_answers_swapped_outside_of_the_model_are_not_found_inside(
    engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = PackedLive.step

    def swapped(self: PackedLive) -> Any:
        tokens = step(self)
        if len(tokens) < 2:
            return tokens
        (a, b), rest = tokens[:2], tokens[2:]
        return [
            replace(a, token=b.token, scores=b.scores),
            replace(b, token=a.token, scores=a.scores),
            *rest,
        ]

    with served(engine, "", tmp_path / "served") as found:
        with monkeypatch.context() as patched:
            patched.setattr(PackedLive, "step", swapped)
            a, b = asked(found.address, tmp_path)
    answer = inside((a, b), str(tmp_path / "served"), engine, tmp_path)
    assert answer.found == NOTHING and any(each.outside is not None for each in answer.flips)
    assert "is not found inside" in answer.sentence and answer.verdict.kind == "identical"


@pytest.mark.thorough
def test_a_sound_server_differs_nowhere(engine: Any, tmp_path: Path) -> None:
    with served(engine, "", tmp_path / "served") as found:
        a, b = asked(found.address, tmp_path)
    answer = inside((a, b), str(tmp_path / "served"), engine, tmp_path)
    assert answer.found == NO_DIFFERENCE and answer.flips == () and answer.exact


@pytest.mark.thorough
def test_chat_messages_go_through_the_local_template(engine: Any, tmp_path: Path) -> None:
    chats = [json.dumps([{"role": "user", "content": text}]) for text in PROMPTS[:2]]
    with served(engine, "", tmp_path / "served") as found:
        alone = Scenario.from_flags(
            f"{found.address}/v1", [*chats, PROMPTS[2]], "max_tokens=8 ignore_stop chat"
        )
        a, b = record(alone, tmp_path / "a"), record(alone.with_changes(schedule="static"), tmp_path / "b")
    answer = inside((a, b), str(tmp_path / "served"), engine, tmp_path)
    assert answer.found == NO_DIFFERENCE
    own = Trace.open(tmp_path / "inside" / "a")
    assert own.generated(lens=False).token.tolist() == a.generated(lens=False).token.tolist()
    assert [len(each["tokens"]) for each in own.requests] == list(
        a.header["server"]["prompt_tokens"].values()
    )
    (words,) = answer.not_carried
    assert "the local model's chat template stands for that of the server" in words and "there" not in words


@pytest.mark.thorough
def test_the_command_says_it(metal: tuple[Path, Trace, Trace]) -> None:
    recorded, a, b = metal
    found = run("explain", str(a.path), str(b.path), "--inside", str(recorded), "--budget", "0")
    assert found.exit_code == 1, found.output
    assert "composition: who shared a forward is known" in found.stdout and "\nInside:\n" in found.stdout
    assert "a (not kept)" in found.stdout and "/detdiff-" not in found.stdout


def test_what_cannot_be_replayed_is_refused(
    metal: tuple[Path, Trace, Trace], engine: Any, tmp_path: Path
) -> None:
    recorded, a, _ = metal
    own = record(local("builtin")[0], tmp_path / "own", engine=engine)
    with pytest.raises(CommandError, match="--inside expects traces of a server"):
        inside((a, own), "builtin", engine, tmp_path)
    wrong = run("explain", str(a.path), str(a.path), "--inside", str(tmp_path / "nowhere.toml"))
    assert wrong.exit_code == 2 and "cannot be read" in " ".join(wrong.output.split())
