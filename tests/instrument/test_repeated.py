"""Forwards like the one before are digested by what was learnt from it, with the same trace, byte for byte."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from runs import Runs, model, scenario
from test_unread import CASES
from tiers import some_now

from detdiff.engines.mlx.taps import digesting, recorder
from detdiff.engines.mlx.taps.addresses import DIMS, FORMAT, ITEM, NDIM, SHAPE, STRIDES, layouts
from detdiff.engines.mlx.taps.forward import DTYPE_NAMES, CacheCall, Forward, memory
from detdiff.engines.mlx.taps.ledgers import CacheCallRows, Ledgers
from detdiff.engines.mlx.taps.recorder import Recorder
from detdiff.engines.mlx.taps.repeated import Repeated
from detdiff.engines.mlx.taps.visible import Masks
from detdiff.trace import Trace

ALIKE = [
    *CASES,
    ("llama", "f32", "static", "packed", {"max_tokens": 30}),
    ("llama", "bf16", "continuous", "padded", {"arrivals": (0, 9, 5), "max_tokens": 30}),
    ("qwen3_moe", "q4", "serial", "padded", {"kernels": "mlx-metal", "max_tokens": 20}),
]


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each forward that was tried, whether it was like the one before."""
    found: list[bool] = []
    sound = Repeated.digest

    def digest(self: Repeated, *args: Any) -> Any:
        answer = sound(self, *args)
        found.append(answer is not None)
        return answer

    monkeypatch.setattr(Repeated, "digest", digest)
    return found


def _bytes(trace: Trace) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in trace.path.iterdir() if file.name != "trace.json"}


@pytest.mark.parametrize(("arch", "fmt", "schedule", "layout", "keys"), some_now(ALIKE, 1, 2, 7))
def test_a_trace_does_not_depend_on_what_was_learnt(
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    repeated: list[bool],
    arch: str,
    fmt: str,
    schedule: str,
    layout: str,
    keys: dict[str, Any],
) -> None:
    asked = scenario(schedule, layout, **keys)
    trace = runs.record(model(arch, fmt), asked)
    if keys.get("digest") != "device":
        assert repeated.count(True) > repeated.count(False)
    repeated.clear()
    monkeypatch.setattr(digesting, "likeness", lambda record: None)
    assert _bytes(runs.record(model(arch, fmt), asked)) == _bytes(trace) and not repeated


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_what_is_not_as_before_goes_the_general_way(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, repeated: list[bool], layout: str
) -> None:
    sound = Recorder.cache_call

    def cache_call(self: Recorder, key: str, keys: mx.array, values: mx.array, calls: Any) -> None:
        record = self._record
        if record is not None and record.forward.segments[0].start == 20 and "layers.1" in key:
            # The cache holds something else than this.
            keys = mx.where(mx.arange(keys.shape[-1]) == 3, 0, keys)
        sound(self, key, keys, values, calls)

    monkeypatch.setattr(Recorder, "cache_call", cache_call)
    asked = scenario("serial", layout, lengths=(12,), max_tokens=16)
    trace = runs.record(model("llama"), asked)
    assert 1 <= repeated.count(False) <= 2 and repeated.index(False) > 2
    monkeypatch.setattr(digesting, "likeness", lambda record: None)
    assert _bytes(runs.record(model("llama"), asked)) == _bytes(trace)


def test_what_a_window_hides_is_told_once_where_a_later_cache_is_not_as_before(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, repeated: list[bool]
) -> None:
    sound = Ledgers.fold

    def fold(self: Ledgers, call: CacheCall, forward: Forward, masks: Masks) -> CacheCallRows:
        found = sound(self, call, forward, masks)
        if call.layer == 2 and call.fresh is None and forward.segments[0].start > 20:
            found.events.append({"kind": "cache_changed", "request": 0, "layer": 2})
        return found

    monkeypatch.setattr(Ledgers, "fold", fold)
    monkeypatch.setattr(recorder, "READ_ANEW", 5)
    asked = scenario("serial", "padded", lengths=(12,), max_tokens=24)
    trace = runs.record(model("gemma3_text"), asked)
    assert repeated.count(False) > 1
    monkeypatch.setattr(digesting, "likeness", lambda record: None)
    assert _bytes(runs.record(model("gemma3_text"), asked)) == _bytes(trace)


def test_layouts_of_many_arrays_are_those_of_each() -> None:
    base = mx.arange(2 * 3 * 4 * 8).reshape(2, 3, 4, 8)
    arrays = [base.astype(dtype) for dtype in DTYPE_NAMES if dtype != mx.float64]
    arrays += [base.transpose(0, 2, 1, 3)[..., 2:5], mx.array(1.0), mx.zeros((1,) * (DIMS + 1))]
    mx.eval(arrays)
    found = layouts(arrays)
    for array, row in zip(arrays[:-1], found.tolist(), strict=False):
        where = memory(array)
        n = len(where.shape)
        assert (row[0], row[ITEM], row[NDIM]) == (where.address, where.itemsize, n)
        assert (tuple(row[SHAPE : SHAPE + n]), tuple(row[STRIDES : STRIDES + n])) == (
            where.shape,
            where.strides,
        )
    assert found[-1, NDIM] == -1
    # Two dtypes of the same size differ in their format.
    assert (
        len({(row[ITEM], row[FORMAT]) for row in found[: len(DTYPE_NAMES) - 1].tolist()})
        == len(DTYPE_NAMES) - 1
    )
