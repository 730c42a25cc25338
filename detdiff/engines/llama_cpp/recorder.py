"""What the callback digested of a batch, written as rows by (request, position)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.base import WantedValues
from detdiff.engines.schedule import Share
from detdiff.trace import PHASES, Generated, TraceWriter, Value, coefficients, format_ranges, ports_of
from detdiff.trace import Rows as TraceRows
from detdiff.trace.digest import STORAGE

from .node_loops import CHANGED, EVENTS, FOREIGN, KEEP, MISSING, SPLIT, Int64
from .nodes import NodeRecorder, digest_floats
from .sites import GraphSites, NodeSite

_MOST_TOLD = 64


@dataclass(frozen=True)
class ChosenToken:
    """A row that chose a token: its logits float32 [vocabulary] and what was chosen."""

    request: int
    index: int
    position: int
    batch_row: int
    token: int
    logits: NDArray[np.float32]


class LlamaRecorder:
    """Writes batch after batch. ``sequences`` maps a sequence of the cache to its request while that is served."""

    def __init__(
        self,
        graph: GraphSites,
        nodes: NodeRecorder,
        writer: TraceWriter,
        ids: Sequence[str],
        wanted: WantedValues | None,
        top: int,
    ) -> None:
        self._graph, self._nodes, self._writer = graph, nodes, writer
        self._ids, self._wanted, self._top = ids, wanted, top
        self.sequences: dict[int, int] = {}
        self.forwards = 0
        self.rows = 0
        self._coefficients = coefficients(1 << 18)
        self._ports = ports_of(each.site for each in graph.sites)
        outputs = np.array([_outputs_only(each) for each in graph.sites])
        self._of_outputs = outputs[[port.site for port in self._ports]]
        self._logits_column = int(graph.columns[-1])
        self._tables = {answering: self._table(answering) for answering in (False, True)}

    def _table(self, answering: bool) -> tuple[tuple[int, ...], Int64]:
        """The order of ports for rows with or without logits, and the digest columns that they come from."""
        shown = np.ones(len(self._ports), np.bool_) if answering else ~self._of_outputs
        columns = np.unique(self._graph.columns[shown])
        places = np.searchsorted(columns, self._graph.columns)
        return tuple(int(p) if s else -1 for p, s in zip(places, shown, strict=True)), columns

    def begin(self, shares: Sequence[Share]) -> None:
        """The next batch has the rows of these shares, one after the other."""
        rows = [(self._sequence(share), p) for share in shares for p in _positions(share)]
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

    def _sequence(self, share: Share) -> int:
        return next(sequence for sequence, request in self.sequences.items() if request == share.work.index)

    def end(
        self, shares: Sequence[Share], answers: Sequence[ChosenToken], texts: Callable[[int], str]
    ) -> None:
        """The batch was computed, and its answers chosen."""
        table = self._rows(shares)
        nodes = self._nodes
        asked = nodes.observed[: len(table), 2] == 1
        at = {(request, position): n for n, (request, position, *_) in enumerate(table[:, :2].tolist())}
        for answer in answers:
            row = at[answer.request, answer.position]
            nodes.digests[row, self._logits_column] = digest_floats(
                answer.logits.ctypes.data, len(answer.logits), self._coefficients
            )
        told = self._told(table)
        graphs = nodes.rows[: len(table), 2]
        first = self.forwards
        for graph in range(int(graphs.max()) + 1):
            mine = np.flatnonzero(graphs == graph)
            self._log(table[mine], asked[mine], [event for row, event in told if graphs[row] == graph])
            self._write(table, mine, asked)
            self.forwards += 1
        self.rows += len(table)
        self._answered(answers, first + graphs[[at[a.request, a.position] for a in answers]], texts)

    def _rows(self, shares: Sequence[Share]) -> Int64:
        """Request, position, phase and token of each row, int64 [rows, 4], in the order in which they were computed."""
        rows = [
            (share.work.index, share.start + n, PHASES.index(share.phase), token)
            for share in shares
            for n, token in enumerate(share.tokens)
        ]
        found = np.array(rows, np.int64).reshape(-1, 4)
        if not self._nodes.state[SPLIT]:
            return found
        # Streams come in an order of their own, each with its rows in order.
        requests = np.array([self.sequences[int(s)] for s in self._nodes.rows[: len(found), 0]])
        order = np.empty(len(found), np.int64)
        for request in dict.fromkeys(requests.tolist()):
            order[np.flatnonzero(requests == request)] = np.flatnonzero(found[:, 0] == request)
        return found[order]

    def _told(self, table: Int64) -> list[tuple[int, dict[str, Any]]]:
        """What contradicts the rows: other tokens or positions than they should have, and cache entries that are not theirs."""
        nodes, count = self._nodes, len(table)
        told: list[tuple[int, dict[str, Any]]] = []
        observed = nodes.observed[:count]
        for row in np.flatnonzero((observed[:, 1] >= 0) & (observed[:, 1] != table[:, 1])).tolist():
            told += [
                (
                    row,
                    {
                        "kind": "offset",
                        "request": int(table[row, 0]),
                        "found": int(observed[row, 1]),
                        "expected": int(table[row, 1]),
                    },
                )
            ]
        for row in np.flatnonzero((observed[:, 0] >= 0) & (observed[:, 0] != table[:, 3])).tolist():
            told.append(
                (
                    row,
                    {
                        "kind": "token_fed",
                        "request": int(table[row, 0]),
                        "position": int(table[row, 1]),
                        "found": int(observed[row, 0]),
                        "expected": int(table[row, 3]),
                    },
                )
            )
        layers = [each.layer for each in self._graph.caches]
        heads = {each.layer: each.heads[0] for each in self._graph.caches}
        for kind, place, row, third, position, last in nodes.events[:_MOST_TOLD].tolist():
            layer = layers[place]
            if kind == CHANGED:
                owner = next((r for s, r in self.sequences.items() if (last >> s) & 1), None)
                side = "K" if third < heads[layer] else "V"
                head = third if side == "K" else third - heads[layer]
                event = {
                    "kind": "cache_changed",
                    "layer": layer,
                    "entry": side,
                    "head": head,
                    "position": position,
                }
                if owner is not None:
                    event["request"] = owner
                told.append((0, event))
                continue
            event = {"layer": layer, "request": int(table[row, 0]), "position": int(table[row, 1])}
            if kind == FOREIGN:
                owner = next((r for s, r in self.sequences.items() if last >= 0 and (last >> s) & 1), None)
                event |= {
                    "kind": "cache_foreign",
                    "cell": third,
                    "at": position,
                    "of": -1 if owner is None else owner,
                }
            elif kind == MISSING:
                event |= {"kind": "cache_missing", "entries": last}
            told.append((row, event))
        if int(nodes.state[EVENTS]) > _MOST_TOLD:
            told.append((0, {"kind": "cache_more", "entries": int(nodes.state[EVENTS]) - _MOST_TOLD}))
        return told

    def _log(self, table: Int64, asked: NDArray[np.bool_], events: list[dict[str, Any]]) -> None:
        """The line of one graph's forward, with how many rows each site saw."""
        count, answering = len(table), int(asked.sum())
        sites: dict[int, list[int]] = {}
        for n, each in enumerate(self._graph.sites):
            sites.setdefault(answering if _outputs_only(each) else count, []).append(n)
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
            "forward": self.forwards,
            "phase": phases.pop() if len(phases) == 1 else "mixed",
            "layout": "packed",
            "shape": [1, count],
            "rows": spans,
            "plan": self._writer.plan(calls),
            "caches": [],
        }
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
                    np.full(len(rows), self.forwards, np.int32),
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
        if not answers:
            return
        top = [highest(answer.logits, self._top) for answer in answers]
        for token in dict.fromkeys(answer.token for answer in answers):
            self._writer.text(token, texts(token))
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


def highest(logits: NDArray[np.float32], count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids and logits [count] of the highest, equal ones by lower id."""
    count = min(count, len(logits))
    least = np.partition(logits, -count)[-count] if not np.isnan(logits).any() else -np.inf
    near = np.flatnonzero(~(logits < least))
    ids = near[np.lexsort((near, -logits[near]))][:count]
    return ids, logits[ids]
