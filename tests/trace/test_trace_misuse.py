"""The writer refuses what would break a rule of the format, and a refused batch leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trace_samples as samples

from detdiff import errors
from detdiff.trace import Generated, Rows, Site, Trace, TraceWriter, Value


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TraceWriter]:
    """A writer with one plan and one forward."""
    with TraceWriter(tmp_path / "t", samples.HEADER) as writer:
        writer.forward(samples.forward_line(0, writer.plan(samples.CALLS)))
        yield writer


def rows(**changes: Any) -> Callable[[TraceWriter], None]:
    return lambda writer: writer.rows(replace(samples.batch(0), **changes))


def value(value: Value, column: int = 0) -> Callable[[TraceWriter], None]:
    return rows(values={column: value})


def generated(**changes: Any) -> Callable[[TraceWriter], None]:
    return lambda writer: writer.generated(replace(samples.tokens(0), **changes))


def happened(**changes: Any) -> Callable[[TraceWriter], None]:
    return lambda writer: writer.event({**samples.TRIM, "forward": 0, **changes})


def forward(**changes: Any) -> Callable[[TraceWriter], None]:
    return lambda writer: writer.forward({**samples.forward_line(1), **changes})


def twice(writer: TraceWriter) -> None:
    writer.generated(samples.tokens(0))
    writer.generated(samples.tokens(0))


def other_top(writer: TraceWriter) -> None:
    writer.generated(samples.tokens(0))
    none = samples.tokens(0, lens=False)
    writer.generated(replace(none, index=none.index + 1))


def embedded(**changes: Any) -> Callable[[TraceWriter], None]:
    return lambda writer: writer.embeddings(replace(samples.embedding(0), **changes))


def other_width(writer: TraceWriter) -> None:
    writer.embeddings(samples.embedding(0))
    writer.embeddings(replace(samples.embedding(1), vector=np.zeros((1, 2), np.float32)))


def back(writer: TraceWriter) -> None:
    writer.forward(samples.forward_line(1))
    writer.rows(samples.batch(1))
    writer.rows(samples.batch(0))


def two_texts(writer: TraceWriter) -> None:
    writer.text(1, "a")
    writer.text(1, "b")


F32 = np.zeros((1, 2), np.float32)
MISUSES: dict[str, tuple[type[errors.TraceError], Callable[[TraceWriter], None]]] = {
    "rows of a forward not logged": (errors.RowError, lambda writer: writer.rows(samples.batch(1))),
    "rows that go back": (errors.RowError, back),
    "rows of no request": (errors.RowError, rows(request=np.array([0, 2], np.int32))),
    "too few digests": (errors.TensorShapeError, rows(digests=np.zeros((1, 7), np.uint64))),
    "too few positions": (errors.TensorShapeError, rows(position=np.zeros(1, np.int32))),
    "too few columns": (errors.TableError, rows(digests=np.zeros((2, 6), np.uint64), values={})),
    "too few ports": (errors.TableError, rows(table=(0, 1, 2, 3, 4, 5, 6))),
    "values of another dtype": (errors.TensorTypeError, value(Value(np.array([0]), F32, "F16"))),
    "values of no dtype": (errors.TensorTypeError, value(Value(np.array([0]), F32, "float32"))),
    "values for more rows": (errors.TensorShapeError, value(Value(np.array([0, 1]), F32, "F32"))),
    "values of no column": (errors.ValueRowsError, value(Value(np.array([0]), F32, "F32"), 7)),
    "values of no row": (errors.ValueRowsError, value(Value(np.array([2]), F32, "F32"))),
    "a token of no forward": (errors.GeneratedError, generated(forward=np.array([0, 1], np.int32))),
    "a token twice": (errors.GeneratedError, twice),
    "another top-k": (errors.GeneratedError, other_top),
    "an embedding of no request": (errors.EmbeddingError, embedded(request=np.array([2], np.int32))),
    "an embedding twice": (
        errors.EmbeddingError,
        embedded(request=np.array([1, 1], np.int32), vector=np.zeros((2, 3), np.float32)),
    ),
    "another width": (errors.EmbeddingError, other_width),
    "a vector for two requests": (errors.TensorShapeError, embedded(request=np.array([0, 1], np.int32))),
    "too few logits": (errors.TensorShapeError, generated(top_logits=np.zeros((2, 1), np.float32))),
    "a forward twice": (errors.ForwardLineError, forward(forward=0)),
    "a forward of no plan": (errors.ForwardLineError, forward(plan=1)),
    "a forward that JSON cannot hold": (errors.LogLineError, forward(events=[{"x": float("nan")}])),
    "a plan of no site": (
        errors.PlanLineError,
        lambda writer: writer.plan([{"path": "native", "sites": "4"}]) and None,
    ),
    "a plan that JSON cannot hold": (
        errors.LogLineError,
        lambda writer: writer.plan([{"path": b""}]) and None,
    ),
    "an event before its forward": (errors.EventLineError, happened(forward=2)),
    "an event of half a verification": (errors.EventLineError, happened(event="verify")),
    "two texts": (errors.TextLineError, two_texts),
    "a reserved key": (errors.TraceHeaderError, lambda writer: writer.finish(shards=[])),
    "a header that JSON cannot hold": (
        errors.TraceHeaderError,
        lambda writer: writer.finish(observer={"x": {1}}),
    ),
}


@pytest.mark.parametrize("case", MISUSES)
def test_the_writer_refuses_what_would_break_a_rule(case: str, writer: TraceWriter) -> None:
    expected, misuse = MISUSES[case]
    with pytest.raises(errors.TraceError) as caught:
        misuse(writer)
    assert type(caught.value) is expected
    assert samples.one_paragraph(caught.value)
    # What was refused left nothing behind.
    writer.finish()
    samples.read_all(Trace.open(writer.path))


@pytest.mark.parametrize("header", [{"sites": []}, {"sites": [Site("a", "norm", 0, ("x",), ("x",))]}])
def test_the_writer_refuses_bad_sites(header: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(errors.SiteListError):
        TraceWriter(tmp_path / "t", {**samples.HEADER, **header})
    assert not (tmp_path / "t").exists()


def test_a_trace_is_never_written_over(tmp_path: Path) -> None:
    path = samples.write_sample(tmp_path / "t")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    for place in (path, path / "trace.json"):
        with pytest.raises(errors.TraceExists) as caught:
            TraceWriter(place, samples.HEADER)
        assert samples.one_paragraph(caught.value)
    assert before == {file.name: file.read_bytes() for file in path.iterdir()}
    (tmp_path / "empty").mkdir()
    samples.write_sample(tmp_path / "empty")


def test_a_path_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.TraceWriteError, match="Nothing was recorded") as caught:
        TraceWriter(tmp_path / "file" / "t", samples.HEADER)
    assert type(caught.value) is errors.TraceWriteError and samples.one_paragraph(caught.value)


def test_a_finished_writer_is_closed(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", samples.HEADER) as writer:
        writer.finish()
        empty = np.empty(0, np.int32)
        token = Generated(
            empty, empty, empty, empty, empty, empty.reshape(0, 1), np.empty((0, 1), np.float32)
        )
        none = Rows(empty, empty, empty, empty, empty, empty, samples.FULL, np.empty((0, 7), np.uint64))
        uses: list[Callable[[], Any]] = [
            writer.finish,
            lambda: writer.rows(none),
            lambda: writer.generated(token),
            lambda: writer.text(1, ""),
            lambda: writer.forward({}),
            lambda: writer.plan([]),
        ]
        for use in uses:
            with pytest.raises(errors.WriterClosed) as caught:
                use()
            assert samples.one_paragraph(caught.value)
        writer.abort()
    assert Trace.open(tmp_path / "t").complete
