"""Event lines of forwards.jsonl: their order, and what is left of them when a run is killed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import trace_samples as samples

from detdiff.trace import Trace, TraceWriter


def test_events_come_back_in_order_whatever_forwards_lie_between(tmp_path: Path) -> None:
    lines = [samples.VERIFY, samples.TRIM, {"event": "merge", "requests": [0], "more": {"of": ["it"]}}]
    expected = [{**samples.TRIM, "forward": -1}]
    with TraceWriter(tmp_path / "t", samples.HEADER, shard_forwards=1) as writer:
        writer.event(expected[0])

        def after(number: int) -> None:
            expected.extend({**line, "forward": number} for line in lines)
            for line in expected[-len(lines) :]:
                writer.event(line)

        samples.fill(writer, 3, after=after)
        writer.finish()
    trace = Trace.open(tmp_path / "t")
    assert trace.events() == tuple(expected)
    assert [line["forward"] for line in trace.forwards()] == [0, 1, 2]
    assert trace.forwards()[2]["calls"] and samples.read_all(trace) == 6
    raw = (tmp_path / "t" / "forwards.jsonl").read_text().splitlines()
    assert [line.partition(":")[0] for line in raw[:3]] == ['{"event"', '{"plan"', '{"forward"']


def test_a_run_that_was_killed_keeps_the_events_of_its_finished_shards(tmp_path: Path) -> None:
    with suppress(KeyboardInterrupt), TraceWriter(tmp_path / "t", samples.HEADER, shard_forwards=1) as writer:

        def after(number: int) -> None:
            writer.event({**samples.TRIM, "forward": number})
            if number == 2:
                raise KeyboardInterrupt

        samples.fill(writer, 3, after=after)
    trace = Trace.open(tmp_path / "t")
    assert not trace.complete and len(trace.events()) == 3
    log = tmp_path / "t" / "forwards.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    assert len(Trace.open(tmp_path / "t").events()) == 2
