"""Random damage of any kind gives a TraceError or a trace, never another exception.

Each test counts what could be read and what was refused: where either is rare, nothing was tried.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trace_samples as samples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import THOROUGH

from detdiff.errors import TraceError
from detdiff.trace import Trace, TraceWriter


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("complete") / "t"
    with TraceWriter(path, samples.HEADER, shard_forwards=1) as writer:
        samples.fill(writer, 3, after=lambda number: happened(writer, number))
        writer.finish()
    return path


def happened(writer: TraceWriter, number: int) -> None:
    for line in (samples.VERIFY, samples.TRIM, {"event": "merge", "requests": [0, 1]}):
        writer.event({**line, "forward": number})


class Readings:
    """How often damaged traces could be read, and how often they were refused."""

    def __init__(self) -> None:
        self.read = self.refused = 0

    def tolerate(self, path: Path) -> None:
        """Reads what can be read, in both ways; anything but a TraceError escapes."""
        for partial in (False, True):
            try:
                rows = samples.read_all(Trace.open(path, partial=partial))
            except TraceError:
                self.refused += 1
            else:
                self.read += rows > 0


@pytest.fixture
def readings() -> Iterator[Readings]:
    """Counts the readings of a test's examples; fails it where fewer than ten ended in either way."""
    found = Readings()
    yield found
    assert found.read >= 10 and found.refused >= 10, vars(found)


@settings(
    max_examples=150 if THOROUGH else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_random_bytes_give_an_error_or_a_trace(
    complete: Path, readings: Readings, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        shutil.copytree(complete, path)
        if data.draw(st.booleans()):
            samples.edit_json(path, lambda header: header.update(complete=False))
        names = sorted(file.name for file in path.iterdir())
        for _ in range(data.draw(st.integers(1, 3))):
            file = path / data.draw(st.sampled_from(names))
            raw = bytearray(file.read_bytes())
            place = data.draw(st.integers(0, max(0, len(raw) - 1)))
            raw[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
            file.write_bytes(raw)
        if data.draw(st.booleans()):
            with suppress(ValueError, KeyError, TypeError, AttributeError, OSError):
                samples.reseal(path)
        readings.tolerate(path)


JSON = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 1 << 31, 1 << 61, 1 << 64, 10**30, 0.5, 1e300]),
    st.sampled_from(["", "a", "0-1", "../x", "I32", "F32", "BF16", "\ud800", "layers.0.mlp"]),
    st.sampled_from([[], {}, [[]], [{}], [0, 0], [1 << 61, 0], {"id": 1}, [0, 1 << 62]]),
)


def mutate(value: Any, data: st.DataObject) -> Any:
    """The same JSON with one place replaced, removed or added to."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 5)):
        key: Any = data.draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
        if data.draw(st.integers(0, 7)):
            value[key] = mutate(value[key], data)
        else:
            del value[key]
        return value
    return data.draw(JSON)


@settings(
    max_examples=250 if THOROUGH else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_json_that_says_something_else_gives_an_error_or_a_trace(
    complete: Path, readings: Readings, data: st.DataObject
) -> None:
    """Valid JSON with a wrong meaning gets past the parser and must be stopped by the rules."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        shutil.copytree(complete, path)
        kind = data.draw(st.sampled_from(["header", "shard", "forwards.jsonl", "texts.jsonl"]))
        if kind == "header":
            header = json.loads((path / "trace.json").read_text())
            (path / "trace.json").write_text(json.dumps(mutate(header, data)))
        elif kind == "shard":
            found, rest = samples.split_shard(path)
            samples.join_shard(path, mutate(found, data), rest)
        else:
            samples.edit_lines(path, kind, lambda lines: mutate(lines, data))
        readings.tolerate(path)


@settings(
    max_examples=150 if THOROUGH else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_arrays_that_say_something_else_give_an_error_or_a_trace(
    complete: Path, readings: Readings, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        shutil.copytree(complete, path)
        header, _ = samples.split_shard(path)
        names = sorted(name for name, entry in header.items() if entry["dtype"] == "I32")
        value = data.draw(st.sampled_from([-(1 << 31), -2, -1, 0, 1, 2, 5, 7, (1 << 31) - 1]))
        samples.set_element(path, data.draw(st.sampled_from(names)), 0, value)
        readings.tolerate(path)
