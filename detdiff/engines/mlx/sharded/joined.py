"""One trace of what several processes recorded: rows of the whole model, each process's own sums beside them, and where they disagree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import EngineRefuses
from detdiff.trace import Generated, Rows, Site, Trace, TraceWriter, Value, format_ranges, parse_ranges

from .shares import OWN, SAME, SUM, SiteShares

_ROWS: Final = 4096
_FIELDS: Final = ("request", "position", "forward", "slot", "phase")
_ANY: Final = 1 << 31
Source = tuple[str, tuple[int, ...]]
"""How a port of the joined trace is made, and of which port of each process; of OWN, (process, port)."""


@dataclass(frozen=True)
class JoinedSites:
    """The sites of a joined trace; for each port how it is made; and for each site of a process its places among them.

    Sites of which each process has its own output are there once a process, as ``NAME@RANK``; an all-reduce has an input for each
    process, ``rank.0`` and so on.
    """

    sites: tuple[Site, ...]
    sources: tuple[Source, ...]
    names: tuple[tuple[str, str], ...]
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, shares: Sequence[SiteShares]) -> JoinedSites:
        first, size = shares[0], len(shares)
        for rank, each in enumerate(shares):
            unlike = {site.name for site in first.sites} ^ {site.name for site in each.sites}
            if unlike:
                name = min(unlike)
                with_it = 0 if any(site.name == name for site in first.sites) else rank
                raise EngineRefuses(
                    f"Process {rank} runs other operations than process 0: {name} is in process {with_it} alone. Expected the same model in "
                    "all of them, as each sum waits for every process. Correct what one of them is told to run."
                )
        split: dict[str, bool] = {}
        starts, port = [], 0
        for site in first.sites:
            starts.append(port)
            inputs, port = port + len(site.inputs), port + len(site.inputs) + len(site.outputs)
            split[site.name] = (
                site.kind != "cache_write"
                and port > inputs
                and all(first.ports[each].how == OWN for each in range(inputs, port))
            )
        parents = {site.name: site.parent for site in first.sites}
        sites: list[Site] = []
        sources: list[Source] = []
        names: list[tuple[str, str]] = []
        places: list[tuple[int, ...]] = []
        for site, start in zip(first.sites, starts, strict=True):
            count = len(site.inputs) + len(site.outputs)
            parent = site.parent
            if split[site.name]:
                places.append(tuple(range(len(sites), len(sites) + size)))
                for rank in range(size):
                    above = f"{parent}@{rank}" if parent is not None and split[parent] else parent
                    sites.append(replace(site, name=f"{site.name}@{rank}", parent=above))
                    sources += [(OWN, (rank, start + n)) for n in range(count)]
                    names += [(sites[-1].name, name) for name in (*site.inputs, *site.outputs)]
                continue
            while parent is not None and split[parent]:
                parent = parents[parent]
            places.append((len(sites),))
            ports: list[list[tuple[str, Source]]] = [[], []]
            for side, given in enumerate((site.inputs, site.outputs)):
                for n in range(start + side * len(site.inputs), start + side * len(site.inputs) + len(given)):
                    how = first.ports[n].how
                    if how != OWN:
                        ports[side].append((first.ports[n].name, (how, (n,) * size)))
                    elif site.kind == "cache_write":
                        ports[side] += [
                            (each.ports[n].name, (OWN, (rank, n))) for rank, each in enumerate(shares)
                        ]
                    else:
                        ports[side] += [(f"rank.{rank}", (OWN, (rank, n))) for rank in range(size)]
            # Heads of a cache as the whole model counts them.
            ports[1].sort(key=lambda each: _head(each[0]))
            inputs_, outputs_ = (tuple(name for name, _ in side) for side in ports)
            sites.append(replace(site, inputs=inputs_, outputs=outputs_, parent=parent))
            sources += [source for side in ports for _, source in side]
            names += [(site.name, name) for name in (*inputs_, *outputs_)]
        return cls(tuple(sites), tuple(sources), tuple(names), tuple(places))

    def calls(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The calls of a process's plan, of the joined sites."""
        return [
            {
                **call,
                "sites": format_ranges(
                    place
                    for run in parse_ranges(call["sites"], _ANY)
                    for site in run
                    for place in self.places[site]
                ),
            }
            for call in calls
        ]


def _head(name: str) -> tuple[str, int]:
    side, _, number = name.partition(".")
    return (side, int(number)) if side in ("K", "V") and number.isdigit() else ("", 0)


def join(writer: TraceWriter, traces: Sequence[Trace], shares: Sequence[SiteShares]) -> None:
    """Write into ``writer`` what is in all of ``traces``, one of each process; unfinished ones as far as all of them go.

    Where processes that should hold the same values do not, the forward's events say so: the first place of each, by process.
    """
    _JoinedRun(writer, traces, shares).write()


class _JoinedRun:
    def __init__(self, writer: TraceWriter, traces: Sequence[Trace], shares: Sequence[SiteShares]) -> None:
        self._writer, self._traces, self._shares = writer, traces, shares
        self._joined = JoinedSites.of(shares)
        self._rows = [trace.row_index() for trace in traces]
        self._count = _alike(self._rows)
        self._cut = any(len(each.forward) > self._count for each in self._rows)

    def write(self) -> None:
        for token, text in self._traces[0].texts().items():
            self._writer.text(token, text)
        self._forwards(self._disagreements())
        for batch in self._batches():
            self._writer.rows(self._joined_rows(batch))
        forwards = self._forward_count()
        made = self._traces[0].generated()
        keep = made.forward < forwards
        if keep.any():
            lens = made.lens
            if lens is not None:
                lens = replace(
                    lens,
                    top_ids=lens.top_ids[keep],
                    top_logits=lens.top_logits[keep],
                    contested=lens.contested[keep],
                )
            fields = ("request", "index", "token", "forward", "position", "top_ids", "top_logits")
            self._writer.generated(
                Generated(**{name: getattr(made, name)[keep] for name in fields}, lens=lens)
            )
        embedded = self._traces[0].embeddings()
        if len(embedded.request):
            self._writer.embeddings(embedded)

    def _forward_count(self) -> int:
        return min(len(trace.forwards()) for trace in self._traces)

    def _forwards(self, disagreements: Mapping[int, list[dict[str, Any]]]) -> None:
        """The lines of process 0, with what the others noticed and where they disagree, and its events."""
        logs = [trace.forwards() for trace in self._traces]
        after: dict[int, list[dict[str, Any]]] = {}
        for event in self._traces[0].events():
            after.setdefault(int(event["forward"]), []).append(event)
        self._events(after.get(-1, ()))
        for number in range(self._forward_count()):
            lines = [log[number] for log in logs]
            line = {
                key: value for key, value in lines[0].items() if key not in ("forward", "calls", "events")
            }
            line["plan"] = self._writer.plan(self._joined.calls(lines[0]["calls"]))
            events = list(lines[0]["events"])
            for rank, other in enumerate(lines[1:], 1):
                events += [
                    {**each, "rank": rank} for each in other["events"] if each not in lines[0]["events"]
                ]
            events += disagreements.get(number, [])
            if events:
                line["events"] = events
            self._writer.forward({"forward": number, **line})
            self._events(after.get(number, ()))

    def _events(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            self._writer.event(event)

    def _batches(self) -> Iterator[NDArray[np.int64]]:
        """Places of rows that follow each other and share their tables in every process."""
        if not self._count:
            return
        tables = np.stack([each.table[: self._count] for each in self._rows])
        shards = np.stack([each.shard[: self._count] for each in self._rows])
        keys = np.concatenate([tables, shards])
        ends = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
        for first, last in zip([0, *ends.tolist()], [*ends.tolist(), self._count], strict=True):
            for start in range(first, last, _ROWS):
                yield np.arange(start, min(start + _ROWS, last))

    def _digests(self, batch: NDArray[np.int64]) -> tuple[list[NDArray[np.uint64]], list[NDArray[np.int32]]]:
        """Each process's digests [rows, columns] of a batch, and the column of each of its ports."""
        digests = [trace.digests(batch) for trace in self._traces]
        tables = [
            trace.tables[int(rows.table[batch[0]])]
            for trace, rows in zip(self._traces, self._rows, strict=True)
        ]
        return digests, tables

    def _disagreements(self) -> dict[int, list[dict[str, Any]]]:
        """By forward: the first place of each process at which it holds other bits than process 0, or fed or chose another token."""
        found: dict[int, list[dict[str, Any]]] = {}
        seen: set[tuple[int, int]] = set()

        def add(rank: int, row: int, **event: Any) -> None:
            forward = int(self._rows[0].forward[row])
            if (forward, rank) not in seen:
                seen.add((forward, rank))
                where = {
                    "request": int(self._rows[0].request[row]),
                    "position": int(self._rows[0].position[row]),
                    "rank": rank,
                }
                found.setdefault(forward, []).append({"kind": "rank_differs", **where, **event})

        same = [(port, ports[0]) for port, (how, ports) in enumerate(self._joined.sources) if how == SAME]
        for batch in self._batches():
            digests, tables = self._digests(batch)
            for rank in range(1, len(self._traces)):
                first: dict[int, tuple[int, int]] = {}
                for port, own in same:
                    mine, theirs = int(tables[0][own]), int(tables[rank][own])
                    if mine < 0 or theirs < 0:
                        continue
                    unlike = np.flatnonzero(digests[0][:, mine] != digests[rank][:, theirs])
                    for row in unlike.tolist():
                        forward = int(self._rows[0].forward[batch[row]])
                        first.setdefault(forward, (port, row))
                for port, row in first.values():
                    site, name = self._joined.names[port]
                    add(rank, int(batch[row]), site=site, port=name)
        self._choices(found)
        if self._cut and self._count and self._count < min(len(each.forward) for each in self._rows):
            for rank in range(1, len(self._traces)):
                add(rank, self._count - 1, site="rows", port="after")
        return found

    def _choices(self, found: dict[int, list[dict[str, Any]]]) -> None:
        """Tokens that a process chose otherwise than process 0."""
        first = self._traces[0].generated(lens=False)
        mine = _tokens(first)
        forwards = self._forward_count()
        for rank, trace in enumerate(self._traces[1:], 1):
            for key, (token, position, forward, best) in _tokens(trace.generated(lens=False)).items():
                other = mine.get(key)
                if other is None or other[0] == token or forward >= forwards:
                    continue
                wrong = rank if token not in best or other[0] in other[3] else 0
                found.setdefault(forward, []).insert(
                    0,
                    {
                        "kind": "rank_token", "request": key[0], "position": position, "index": key[1],
                        "rank": wrong, "found": token if wrong else other[0], "expected": other[0] if wrong else token,
                    },
                )  # fmt: skip
                break

    def _joined_rows(self, batch: NDArray[np.int64]) -> Rows:
        digests, tables = self._digests(batch)
        columns: dict[Source, int] = {}
        table: list[int] = []
        made: list[NDArray[np.uint64]] = []
        held: list[Source] = []
        for how, ports in self._joined.sources:
            if how == OWN:
                at: tuple[int, ...] = (ports[0], int(tables[ports[0]][ports[1]]))
                there = at[1] >= 0
            else:
                at = tuple(int(each[port]) for each, port in zip(tables, ports, strict=True))
                there = min(at) >= 0
            if not there:
                table.append(-1)
                continue
            key = (how, at[:1] if how == SAME else at)
            if key not in columns:
                columns[key] = len(made)
                held.append((how, ports))
                made.append(_made(how, at, digests))
            table.append(columns[key])
        index = self._rows[0]
        fields = {
            name: getattr(index, name)[batch]
            for name in ("request", "position", "forward", "slot", "phase", "token")
        }
        values: dict[int, Value] = {}
        for column, (how, ports) in enumerate(held):
            value = self._value(how, ports, tables, batch)
            if value is not None:
                values[column] = value
        stacked = np.stack(made, axis=1) if made else np.zeros((len(batch), 0), np.uint64)
        return Rows(**fields, table=tuple(table), digests=stacked, values=values)

    def _value(
        self, how: str, ports: tuple[int, ...], tables: Sequence[NDArray[np.int32]], batch: NDArray[np.int64]
    ) -> Value | None:
        """Captured values of a joined port; None where not every process that has a part of it kept it."""
        if how == OWN:
            return self._kept(ports[0], int(tables[ports[0]][ports[1]]), batch)
        if how == SAME:
            return self._kept(0, int(tables[0][ports[0]]), batch)
        pieces = []
        for rank, (table, port) in enumerate(zip(tables, ports, strict=True)):
            part, kept = self._shares[rank].ports[port].part, self._kept(rank, int(table[port]), batch)
            if part is None or kept is None:
                return None
            pieces.append((part, kept))
        rows, dtype = pieces[0][1].rows, pieces[0][1].dtype
        if any(not np.array_equal(kept.rows, rows) or kept.dtype != dtype for _, kept in pieces):
            return None
        whole = np.empty((len(rows), *pieces[0][0].shape), pieces[0][1].data.dtype)
        for part, kept in pieces:
            into = whole[(slice(None), *part.places)]
            into[...] = kept.data.reshape(into.shape)
        return Value(rows, whole.reshape(len(rows), -1), dtype)

    def _kept(self, rank: int, column: int, batch: NDArray[np.int64]) -> Value | None:
        index, trace = self._rows[rank], self._traces[rank]
        shard = trace.shard(int(index.shard[batch[0]]))
        value = shard.values(int(index.table[batch[0]]), column)
        if value is None:
            return None
        own = index.row[batch]
        mine = np.isin(value.rows, own)
        if not mine.any():
            return None
        return Value(np.searchsorted(own, value.rows[mine]).astype(np.int32), value.data[mine], value.dtype)


def _made(how: str, at: tuple[int, ...], digests: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    if how == OWN:
        return digests[at[0]][:, at[1]]
    if how == SAME:
        return digests[0][:, at[0]]
    assert how == SUM
    found = np.zeros(len(digests[0]), np.uint64)
    for each, column in zip(digests, at, strict=True):
        found = found + each[:, column]
    return found


def _alike(rows: Sequence[Any]) -> int:
    """How many rows all processes have in common from the start on."""
    count = min(len(each.forward) for each in rows)
    unlike = np.zeros(count, np.bool_)
    for name in _FIELDS:
        first = getattr(rows[0], name)[:count]
        for each in rows[1:]:
            unlike |= getattr(each, name)[:count] != first
    return int(np.argmax(unlike)) if unlike.any() else count


def _tokens(made: Generated) -> dict[tuple[int, int], tuple[int, int, int, set[int]]]:
    """By request and index: token, position, forward, and the highest of the token's logits."""
    found = {}
    for n in range(len(made.token)):
        top = made.top_logits[n]
        best = set(made.top_ids[n][top == top[0]].tolist()) if len(top) else set()
        key = int(made.request[n]), int(made.index[n])
        found[key] = int(made.token[n]), int(made.position[n]), int(made.forward[n]), best
    return found
