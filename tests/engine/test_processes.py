"""A model over several processes: against the whole model, with faults in single processes, and with processes that end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_faults import (
    BiasTwice,
    Dies,
    HeadsOfAnother,
    NoAllReduce,
    OtherToken,
    StaleShard,
    model_directory,
)
from tiers import FULL, only_in_full, some_now

from detdiff.compare import compare
from detdiff.engines.mlx.sharded import processes
from detdiff.engines.mlx.sharded.engine import ShardedEngine
from detdiff.engines.mlx.taps.sites import RowPart
from detdiff.engines.record import record
from detdiff.engines.registry import open_engine
from detdiff.errors import EngineRefuses, ProcessLost
from detdiff.explain.case import Case
from detdiff.explain.investigate import judge
from detdiff.explain.verdict import Verdict
from detdiff.scenario import Capture, Request, Scenario, Schedule
from detdiff.trace import Trace, digest_rows

MODELS = some_now(("llama", "llama bfloat16"), 0)
if FULL:
    # MLX multiplies by experts on a processor in float32 alone.
    MODELS += ["qwen3", "qwen3 bfloat16", "qwen3_moe", "qwen2"]


@dataclass
class Pair:
    """A model in one process and over two, kept for all tests of it."""

    name: str
    directory: Path
    whole: Any
    sharded: ShardedEngine

    def scenarios(self, max_tokens: int = 4, kind: str = "static") -> tuple[Scenario, Scenario]:
        requests = (
            Request("r0", tokens=(5, 6, 7, 8), max_tokens=max_tokens, ignore_stop=True),
            Request("r1", tokens=(15, 16, 17), max_tokens=max_tokens, ignore_stop=True),
        )
        whole = Scenario(str(self.directory), requests, Schedule(kind))
        return whole, replace(whole, engine_settings={"processes": 2})

    def verdict(self, *faults: Any) -> Verdict:
        a, b = self.scenarios()
        return judge(Case.of(a, b, engine=(self.whole, self.sharded), injected_faults=((), faults)))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    opened: dict[str, Pair] = {}
    folder = tmp_path_factory.mktemp("models")

    def pair(name: str) -> Pair:
        if name not in opened:
            architecture, _, dtype = name.partition(" ")
            directory = model_directory(folder, architecture, dtype=dtype or "float32")
            a, b = Pair(name, directory, None, None).scenarios()  # type: ignore[arg-type]
            engine = open_engine(b)
            assert isinstance(engine, ShardedEngine)
            opened[name] = Pair(name, directory, open_engine(a), engine)
        return opened[name]

    yield pair
    for each in opened.values():
        each.sharded.close()


@pytest.mark.parametrize("name", MODELS)
def test_a_sharded_model_differs_by_rounding_from_the_first_all_reduce_on(pairs: Any, name: str) -> None:
    verdict = pairs(name).verdict()
    assert (verdict.kind, verdict.rule) == ("numerics", "ranks"), verdict.sentence
    divergence = verdict.divergence
    assert divergence is not None
    for request in divergence.requests:
        assert request.origin is not None
        assert (request.origin.site, request.origin.position) == ("layers.0.self_attn.o_proj", 0)
    assert not divergence.bookkeeping
    assert "were not judged" in verdict.sentence


@pytest.mark.real_model
@only_in_full("SmolLM2 over three processes takes a minute or more")
def test_smollm2_over_three_processes_differs_by_rounding(smollm2_bf16: Path) -> None:
    """It has 9 and 3 heads, so that two processes cannot have it."""
    request = Request("r0", tokens=(504, 3575, 282, 4649), max_tokens=2, ignore_stop=True)
    whole = Scenario(str(smollm2_bf16), (request,), Schedule("serial"))
    sharded = replace(whole, engine_settings={"processes": 3})
    engine = open_engine(sharded)
    assert isinstance(engine, ShardedEngine)
    try:
        verdict = judge(Case.of(whole, sharded, engine=(open_engine(whole), engine)))
    finally:
        engine.close()
    assert (verdict.kind, verdict.rule) == ("numerics", "ranks"), verdict.sentence
    assert verdict.divergence is not None and verdict.divergence.requests[0].origin is not None
    assert verdict.divergence.requests[0].origin.site == "layers.0.self_attn.o_proj"


def _fault(kind: str, pair: Pair, seed: int) -> tuple[Any, dict[str, Any]]:
    """A fault at a place that the seed chooses, and what is to be said of it."""
    rng = random.Random(f"{kind}-{seed}")
    layer, rank = rng.randrange(2), rng.randrange(2)
    attention = f"layers.{layer}.self_attn"
    if kind == "stale":
        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        paths = [f"{attention}.{name}" for name in names]
        mlp = "mlp.switch_mlp" if pair.name == "qwen3_moe" else "mlp"
        paths += [f"layers.{layer}.{mlp}.{name}_proj" for name in ("gate", "up", "down")]
        path = rng.choice(paths)
        return StaleShard(path, rank, seed), {"site": path, "ranks": [rank]}
    if kind == "bias":
        return BiasTwice(f"{attention}.o_proj", rank), {"site": f"{attention}.o_proj", "ranks": [rank]}
    if kind == "reduce":
        return NoAllReduce(f"{attention}.o_proj"), {
            "detail": f"process 1 holds other bits than process 0 at {attention}.o_proj.out, position 0"
        }
    if kind == "token":
        request, index = rng.randrange(2), rng.randrange(3)
        position = (4, 3)[request] - 1 + index
        return OtherToken(rank, request, index), {
            "detail": f"process {rank} chose token",
            "position": position,
            "request": f"r{request}",
        }
    assert kind == "heads"
    fault = HeadsOfAnother(layer, rank, 1 - rank, str(pair.directory))
    return fault, {"site": f"{attention}.k_proj", "ranks": [rank], "share_of": 1 - rank}


KINDS = ("stale", "bias", "reduce", "token", "heads")
SEEDS = range(10 if FULL else 1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", some_now(KINDS, 0))
@pytest.mark.parametrize("name", ("llama", "qwen3", "qwen3_moe") if FULL else ("llama",))
def test_a_fault_of_one_process_is_a_bug_at_its_process_site_and_position(
    pairs: Any, name: str, kind: str, seed: int
) -> None:
    if kind == "bias" and name != "llama":
        pytest.skip("the layer has no bias")
    pair = pairs(name)
    fault, expected = _fault(kind, pair, seed)
    verdict = pair.verdict(fault)
    assert verdict.kind == "bug", verdict.sentence
    if "detail" in expected:
        assert verdict.rule == "bookkeeping"
        assert expected["detail"] in verdict.sentence
        if "position" in expected:
            assert f"after position {expected['position']} " in verdict.sentence
            assert f"of request {expected['request']}" in verdict.sentence
        return
    assert verdict.rule == "rank-outside"
    control = next(each for each in verdict.controls if each.name == "ranks")
    first = control.detail["outside_where"][0]
    assert {key: first[key] for key in expected} == expected
    assert (first["request"], first["position"]) == ("r0", 0)
    assert f"{expected['site']} of process {expected['ranks'][0]}, position 0 of r0" in verdict.sentence


@pytest.mark.thorough
def test_values_and_digests_of_parts_are_those_of_whole_rows(pairs: Any, tmp_path: Path) -> None:
    pair = pairs("llama")
    a, b = (replace(each, capture=Capture(level="full")) for each in pair.scenarios(2))
    whole, joined = (
        record(each, tmp_path / side, engine=engine)
        for each, side, engine in ((a, "a", pair.whole), (b, "b", pair.sharded))
    )
    joined.verify()
    assert joined.complete
    first = "layers.0.self_attn."
    for site, port in (
        (f"{first}q_proj", "out"),
        (f"{first}cache.write", "V.1"),
        (f"{first}attention", "kv"),
        (f"{first}o_proj", "in"),
    ):
        mine, theirs = (_digests(trace, site, port) for trace in (whole, joined))
        np.testing.assert_array_equal(mine, theirs)
    place = joined.port_index(f"{first}q_proj", "out")
    for shard in joined.shards:
        for table, columns in joined.tables.items():
            value = shard.values(table, int(columns[place])) if columns[place] >= 0 else None
            if value is not None:
                places = [int(np.flatnonzero(shard.table_rows(table) == row)[0]) for row in value.rows]
                held = shard.digests(table)[places][:, int(columns[place])]
                np.testing.assert_array_equal(digest_rows(value.data, value.dtype), held)
    assert compare(joined, record(b, tmp_path / "again", engine=pair.sharded)).identical


def _digests(trace: Trace, site: str, port: str) -> Any:
    place, rows = trace.port_index(site, port), trace.row_index()
    found = []
    for row in range(len(rows.forward)):
        column = int(trace.tables[int(rows.table[row])][place])
        found.append(int(trace.digests(np.array([row]))[0, column]))
    return np.array(found, np.uint64)


@pytest.mark.parametrize(("dtype", "code"), [(np.float32, "F32"), (np.float16, "F16")])
def test_digests_of_parts_add_up(dtype: Any, code: str) -> None:
    from detdiff.trace.digest import coefficients, digest_bias, words_of

    rows = np.random.default_rng(0).standard_normal((3, 4, 12)).astype(dtype)
    for axis, size in ((0, 2), (1, 3)):
        total = np.zeros(3, np.uint64)
        for rank in range(size):
            count = rows.shape[axis + 1] // size
            part = RowPart(rows.shape[1:], axis, rank * count, count, rank == 0)
            held = np.ascontiguousarray(rows[(slice(None), *part.places)]).reshape(3, -1)
            places = part.words(rows.itemsize)
            weights = coefficients(int(places.max()) + 1)[places]
            total += (words_of(held).astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
        total += np.uint64(digest_bias(code, rows[0].nbytes))
        np.testing.assert_array_equal(total, digest_rows(rows.reshape(3, -1), code))
    with pytest.raises(ValueError, match="RowPart"):
        RowPart((2, 3), 1, 0, 1, True).words(2)


def _pids(engine: ShardedEngine) -> list[int]:
    return engine.processes.pids


def _gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@only_in_full("a process that stands still takes the seconds in which others wait for it")
def test_a_process_that_stands_still_ends_the_run(
    pairs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from detdiff.engines.base import RunOptions

    pair = pairs("llama")
    _, b = pair.scenarios(12)
    pids = _pids(pair.sharded)
    monkeypatch.setattr(processes, "STALLS", 5.0)
    with pytest.raises(ProcessLost, match="has said nothing for"):
        record(
            b,
            tmp_path / "still",
            engine=pair.sharded,
            options=RunOptions(faults=(Dies(1, 5, signal.SIGSTOP),)),
        )
    assert _gone(pids) and not Trace.open(tmp_path / "still").complete


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1}, "1 n_kv_heads"),
        ("llama", {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3}, "3 n_heads"),
    ],
)
@only_in_full("two more starts of processes")
def test_heads_that_cannot_be_dealt_out_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    directory = model_directory(tmp_path, name, **changes)
    scenario = Scenario(str(directory), (Request("r0", tokens=(1, 2)),), engine_settings={"processes": 2})
    with pytest.raises(EngineRefuses, match=said):
        record(scenario, tmp_path / "trace")


def test_what_is_not_run_over_processes_is_refused(pairs: Any, tmp_path: Path) -> None:
    pair = pairs("llama")
    _, b = pair.scenarios()
    packed = replace(b, schedule=Schedule("continuous", layout="packed"))
    with pytest.raises(EngineRefuses, match="layout packed cannot be run over 2 processes"):
        record(packed, tmp_path / "trace", engine=pair.sharded)
    with pytest.raises(EngineRefuses, match="processes, 1 to 64"):
        open_engine(replace(b, engine_settings={"processes": 0}))


@pytest.mark.thorough
def test_a_killed_process_ends_the_run_with_a_paragraph_and_a_readable_trace(
    pairs: Any, tmp_path: Path
) -> None:
    pair = pairs("llama")
    _, b = pair.scenarios(12)
    pids = _pids(pair.sharded)
    from detdiff.engines.base import RunOptions

    with pytest.raises(ProcessLost, match=r"Process 1 of the 2 .* ended by signal 9") as error:
        record(b, tmp_path / "killed", engine=pair.sharded, options=RunOptions(faults=(Dies(1, 9),)))
    assert "\n" not in str(error.value)
    assert processes.ENDS < 30 and _gone(pids)
    left = Trace.open(tmp_path / "killed")
    assert not left.complete and len(left.row_index().forward) and len(left.forwards()) >= 4
    if FULL:
        # The next run starts others.
        assert record(b, tmp_path / "whole", engine=pair.sharded).complete


def test_a_process_goes_with_the_one_that_started_it() -> None:
    """Whatever ends a run's own process: the others hold its end of a pipe."""
    read, write = os.pipe()
    script = (
        "import sys\nfrom detdiff.engines.mlx.sharded.worker import _ends_with\n_ends_with(int(sys.argv[1]))"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(read)], pass_fds=(read,))
    os.close(read)
    assert process.poll() is None
    os.close(write)
    assert process.wait(60) == 1
