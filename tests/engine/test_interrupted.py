"""A run that ends in the middle: what was finished is readable, the trace says so, and the cause is not hidden."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import digests, model, scenario
from tiers import some_now
from tiny import tiny

from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.engines.mlx.taps.recorder import Recorder
from detdiff.errors import TraceExists
from detdiff.trace import Trace, TraceWriter


class Broken(Exception):
    pass


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard after every second forward, so that a short run has several."""
    # The package's own attribute of that name is the function.
    recording = importlib.import_module("detdiff.engines.record")
    monkeypatch.setattr(recording, "TraceWriter", functools.partial(TraceWriter, shard_forwards=2))


def after(tokens: int, error: type[BaseException]) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done == tokens:
            raise error("injected")

    return progress


@pytest.mark.parametrize("error", [KeyboardInterrupt, Broken, MemoryError, SystemExit])
@pytest.mark.parametrize(
    ("schedule", "layout"), some_now([("serial", "padded"), ("static", "padded"), ("static", "packed")], 1, 2)
)
def test_an_interrupted_run_leaves_its_finished_shards(
    tmp_path: Path, error: type[BaseException], schedule: str, layout: str
) -> None:
    of = model("llama")
    whole = record(
        scenario(schedule, layout), tmp_path / "whole", loaded=of, options=RecordOptions(observe=0)
    )
    options = RecordOptions(observe=0, progress=after(15, error))
    with pytest.raises(error, match="injected") as caught:
        record(scenario(schedule, layout), tmp_path / "cut", loaded=of, options=options)
    assert type(caught.value) is error
    cut = Trace.open(tmp_path / "cut")
    assert not cut.complete and whole.complete
    assert len(cut.shards) >= 1 and len(cut.shards) < len(whole.shards)
    left, everything = digests(cut), digests(whole)
    assert left and left.items() <= everything.items()
    rows, all_rows = cut.row_index(), whole.row_index()
    assert np.array_equal(rows.position, all_rows.position[: len(rows.position)])
    assert len(cut.generated().token) > 0
    assert len(cut.forwards()) >= len(set(rows.forward.tolist()))
    cut.verify()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_an_error_in_the_model_is_not_hidden(tmp_path: Path, layout: str) -> None:
    of = tiny("llama")
    module = of.model.model.layers[1].mlp
    original, calls = type(module), [0]

    def fail(self: Any, x: Any) -> Any:
        calls[0] += 1
        # Discovery and the packed layout's check come first.
        if calls[0] > 14:
            raise Broken("in the model")
        return original.__call__(self, x)

    module.__class__ = type(original.__name__, (original,), {"__call__": fail})
    with pytest.raises(Broken, match="in the model"):
        record(scenario("static", layout), tmp_path / "t", loaded=of)
    assert not Trace.open(tmp_path / "t").complete


def test_an_error_while_recording_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, calls = Recorder._finish, [0]

    def finish(self: Recorder, record: Any) -> None:
        calls[0] += 1
        if calls[0] == 6:
            raise Broken("in the recorder")
        sound(self, record)

    monkeypatch.setattr(Recorder, "_finish", finish)
    with pytest.raises(Broken, match="in the recorder"):
        record(scenario("static"), tmp_path / "t", loaded=model("llama"))
    trace = Trace.open(tmp_path / "t")
    assert not trace.complete and len(trace.row_index().request) > 0


def test_a_trace_is_not_written_over(tmp_path: Path) -> None:
    record(scenario(max_tokens=2), tmp_path / "t", loaded=model("llama"))
    before = {path: path.read_bytes() for path in (tmp_path / "t").iterdir()}
    with pytest.raises(TraceExists):
        record(scenario(max_tokens=2), tmp_path / "t", loaded=model("llama"))
    assert {path: path.read_bytes() for path in (tmp_path / "t").iterdir()} == before
