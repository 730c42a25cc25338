"""What the callback digested of a batch, written as rows by (request, position)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.base import WantedValues, highest
from detdiff.engines.schedule import Share
from detdiff.trace import PHASES, Generated, TraceWriter, Value, coefficients, format_ranges, ports_of
from detdiff.trace import Rows as TraceRows
from detdiff.trace.digest import STORAGE

from .contradictions import SequenceOwners, contradictions, other_logits
from .node_loops import KEEP, Int64
from .nodes import NodeRecorder, digest_floats
from .sites import GraphSites, NodeSite


@dataclass(frozen=True)
class ChosenToken:
    """A row that chose a token: its logits float32 [vocabulary] and what was chosen."""

    request: int
    index: int
    position: int
    token: int
    logits: NDArray[np.float32]


@dataclass
class WrittenCount:
    """How much was written of a run so far, by the recorders of all of its models."""

    forwards: int = 0
    rows: int = 0


@dataclass(frozen=True)
class ModelPart:
    """A model of a run: its name, and where its sites and ports begin among those of all; ``ports`` is how many there are."""

    name: str = "target"
    first_site: int = 0
    first_port: int = 0
    ports: int | None = None
    written: WrittenCount = field(default_factory=WrittenCount)


class LlamaRecorder:
    """Writes batch after batch. ``owners`` are the requests of the cache's sequences."""

    def __init__(
        self,
        graph: GraphSites,
        nodes: NodeRecorder,
        writer: TraceWriter,
        ids: Sequence[str],
        wanted: WantedValues | None,
        top: int,
        part: ModelPart | None = None,
    ) -> None:
        self.part = part or ModelPart()
        self._graph, self._nodes, self._writer = graph, nodes, writer
        self._ids, self._wanted, self._top = ids, wanted, top
        self.owners = SequenceOwners()
        self._places: dict[tuple[int, int], int] = {}
        self._texts: set[int] = set()
        self._coefficients = coefficients(1 << 18)
        self._ports = ports_of(each.site for each in graph.sites)
        outputs = np.array([_outputs_only(each) for each in graph.sites])
        self._of_outputs = outputs[[port.site for port in self._ports]]
        self._logits_column = int(graph.columns[-1])
        # What llama.cpp gives out are that node's rows, of float32.
        named = any(each.site.name.startswith("result_output.") for each in graph.sites)
        self._head_column = int(graph.columns[-2]) if named else None
        self._tables = {answering: self._table(answering) for answering in (False, True)}

    def _table(self, answering: bool) -> tuple[tuple[int, ...], Int64]:
        """The order of ports for rows with or without logits, and the digest columns that they come from."""
        shown = np.ones(len(self._ports), np.bool_) if answering else ~self._of_outputs
        columns = np.unique(self._graph.columns[shown])
        places = np.searchsorted(columns, self._graph.columns)
        own = tuple(int(p) if s else -1 for p, s in zip(places, shown, strict=True))
        part = self.part
        others = 0 if part.ports is None else part.ports - part.first_port - len(own)
        return (-1,) * part.first_port + own + (-1,) * others, columns

    def begin(self, shares: Sequence[Share], held: Sequence[int] | None = None) -> None:
        """The next batch has the rows of these shares, one after the other; ``held`` are the positions that the cache says it has of
        each one's request."""
        self._held = held
        rows = [(self.owners.sequence(share.work.index), p) for share in shares for p in _positions(share)]
        kept = None
        if self._wanted is not None and any(
            self._wanted(self._ids[share.work.index], p, each.site.name)
            for share in shares
            for p in _positions(share)
            for each in self._graph.sites
        ):
            kept = self._graph.plan[:, KEEP] > 0
        self._keeping = kept is not None
        self._nodes.begin(np.array(rows, np.int64).reshape(-1, 2), kept)

    def end(self, shares: Sequence[Share], logits: Mapping[int, NDArray[np.float32]]) -> None:
        """The batch was computed; ``logits`` are those of its rows that asked for them, by their place in the batch."""
        table = self._rows(shares)
        nodes = self._nodes
        asked = nodes.observed[: len(table), 2] == 1
        at = {(request, position): n for n, (request, position, *_) in enumerate(table[:, :2].tolist())}
        told = [*self._ahead(shares, at), *contradictions(nodes, table, self.owners, self._graph.caches)]
        head = self._head_column
        heads = (
            {}
            if head is None
            else {row: int(nodes.digests[row, head]) for row in np.flatnonzero(asked).tolist()}
        )
        fed = [(share.work.index, position) for share in shares for position in _positions(share)]
        for n, scores in logits.items():
            row = at[fed[n]]
            found = digest_floats(scores.ctypes.data, len(scores), self._coefficients)
            nodes.digests[row, self._logits_column] = found
            other = other_logits(table, row, found, heads)
            if other is not None:
                told.append((row, other))
        graphs = nodes.rows[: len(table), 2]
        first = self.part.written.forwards
        for graph in range(int(graphs.max()) + 1):
            mine = np.flatnonzero(graphs == graph)
            self._log(table[mine], asked[mine], [event for row, event in told if graphs[row] == graph])
            self._write(table, mine, asked)
            self.part.written.forwards += 1
        self.part.written.rows += len(table)
        self._places |= {place: first + int(graphs[row]) for place, row in at.items()}

    def chosen(self, answers: Sequence[ChosenToken], texts: Callable[[int], str]) -> None:
        """Tokens that were chosen from rows of the batches since the last that were."""
        places, self._places = self._places, {}
        if answers:
            forwards = [places[answer.request, answer.position] for answer in answers]
            self._answered(answers, np.array(forwards, np.int64), texts)

    def event(self, kind: str, **fields: Any) -> None:
        """What was done after the last batch of any model."""
        self._writer.event({"event": kind, "forward": self.part.written.forwards - 1, **fields})

    def _ahead(
        self, shares: Sequence[Share], at: Mapping[tuple[int, int], int]
    ) -> list[tuple[int, dict[str, Any]]]:
        """Requests of which the cache had more or fewer positions than their rows follow."""
        return [
            (
                at[share.work.index, share.start],
                {
                    "kind": "offset",
                    "request": share.work.index,
                    "layer": each.layer,
                    "found": held,
                    "expected": share.start,
                },
            )
            for share, held in zip(shares, self._held or (), strict=False)
            if held != share.start
            for each in self._graph.caches
        ]

    def _rows(self, shares: Sequence[Share]) -> Int64:
        """Request, position, phase and token of each row, int64 [rows, 4], in the order in which they were computed."""
        rows = [
            (share.work.index, share.start + n, PHASES.index(share.phase), token)
            for share in shares
            for n, token in enumerate(share.tokens)
        ]
        found = np.array(rows, np.int64).reshape(-1, 4)
        return found[self._nodes.rows[: len(found), 3]]

    def _log(self, table: Int64, asked: NDArray[np.bool_], events: list[dict[str, Any]]) -> None:
        """The line of one graph's forward, with how many rows each site saw."""
        count, answering = len(table), int(asked.sum())
        sites: dict[int, list[int]] = {}
        for n, each in enumerate(self._graph.sites):
            rows = answering if _outputs_only(each) else count
            sites.setdefault(rows, []).append(self.part.first_site + n)
        calls = [
            {"path": "native", "rule": "", "rows": m, "second_last": m, "sites": format_ranges(places)}
            for m, places in sites.items()
            if m
        ]
        spans: list[dict[str, Any]] = []
        for request, position, phase, _ in table.tolist():
            last = spans[-1] if spans else None
            if (
                last is not None
                and last["request"] == request
                and last["start"] + last["count"] == position
                and last["phase"] == PHASES[phase]
            ):
                last["count"] += 1
                continue
            spans.append(
                {"request": request, "slot": 0, "start": position, "count": 1, "phase": PHASES[phase]}
            )
        phases = {span["phase"] for span in spans}
        line: dict[str, Any] = {
            "forward": self.part.written.forwards,
            "phase": phases.pop() if len(phases) == 1 else "mixed",
            "layout": "packed",
            "shape": [1, count],
            "rows": spans,
            "plan": self._writer.plan(calls),
            "caches": [],
        }
        if self.part.name != "target":
            line["model"] = self.part.name
        if events:
            line["events"] = events
        self._writer.forward(line)

    def _write(self, table: Int64, mine: Int64, asked: NDArray[np.bool_]) -> None:
        for answering in (False, True):
            rows = mine[asked[mine] == answering]
            if not len(rows):
                continue
            order, columns = self._tables[answering]
            self._writer.rows(
                TraceRows(
                    table[rows, 0].astype(np.int32),
                    table[rows, 1].astype(np.int32),
                    np.full(len(rows), self.part.written.forwards, np.int32),
                    np.zeros(len(rows), np.int32),
                    table[rows, 2].astype(np.int32),
                    table[rows, 3].astype(np.int32),
                    order,
                    self._nodes.digests[rows][:, columns],
                    self._values(table, rows, columns, answering) if self._keeping else {},
                )
            )

    def _values(self, table: Int64, rows: Int64, columns: Int64, answering: bool) -> dict[int, Value]:
        """Values of the ports that are wanted, by their place among ``columns``."""
        found: dict[int, Value] = {}
        count = len(table)
        port = 0
        for each in self._graph.sites:
            ports = range(port, port + len(each.site.inputs) + len(each.site.outputs))
            port = ports.stop
            if _outputs_only(each) and not answering:
                continue
            assert self._wanted is not None
            kept = np.array(
                [self._wanted(self._ids[int(table[r, 0])], int(table[r, 1]), each.site.name) for r in rows]
            )
            if not kept.any():
                continue
            chosen = np.flatnonzero(kept)
            for number in ports:
                column = int(self._graph.columns[number])
                value = self._value(column, rows[chosen], count)
                if value is not None:
                    place = int(np.searchsorted(columns, column))
                    found[place] = Value(chosen.astype(np.int32), *value)
        return found

    def _value(self, column: int, rows: Int64, count: int) -> tuple[NDArray[Any], str] | None:
        form = self._graph.forms.get(column)
        if form is None:
            return None
        node, start, size, dtype, shape = form
        data = self._nodes.values(node, count)[rows, start : start + size]
        return np.ascontiguousarray(data).view(STORAGE[dtype]).reshape(len(rows), *shape), dtype

    def _answered(self, answers: Sequence[ChosenToken], forwards: Int64, texts: Callable[[int], str]) -> None:
        top = [highest(answer.logits, self._top) for answer in answers]
        shown = {int(token) for ids, _ in top for token in ids} | {answer.token for answer in answers}
        for token in sorted(shown - self._texts):
            self._writer.text(token, texts(token))
        self._texts |= shown
        self._writer.generated(
            Generated(
                np.array([answer.request for answer in answers], np.int32),
                np.array([answer.index for answer in answers], np.int32),
                np.array([answer.token for answer in answers], np.int32),
                np.asarray(forwards, np.int32),
                np.array([answer.position for answer in answers], np.int32),
                np.stack([ids for ids, _ in top]).astype(np.int32),
                np.stack([values for _, values in top]).astype(np.float32),
            )
        )


def _positions(share: Share) -> range:
    return range(share.start, share.start + len(share.tokens))


def _outputs_only(site: NodeSite) -> bool:
    return site.rows is not None and site.rows.outputs
