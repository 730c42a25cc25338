"""From the arrays of one forward to rows of digests: which columns there are, and who shares one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Rows, Value
from detdiff.trace.digest import coefficients, digest_bias, words_of

from .digests import Jobs, layout_job
from .entries import DistinctValue, KeptValues, Selection, Source
from .forward import ForwardRecord, ForwardRows, Memory, memory
from .ledgers import CacheCallRows, Ledgers
from .repeated import Repeated, likeness
from .sites import RowPart, SiteMap
from .unread import node
from .visible import Masks

UInt64 = NDArray[np.uint64]
Event = dict[str, Any]


class Digester:
    """Digests forwards in order; keeps, per request and cache, what was written before."""

    def __init__(self, sites: SiteMap, selection: Selection | None) -> None:
        self._sites = sites
        self._selection = selection
        self._ledgers = Ledgers(sites.head_numbers)
        self._compact = {sites.ports[k, p] for k in (sites.head, "logits") if k for p in ("in", "out")}
        self._last: tuple[Any, ...] | None = None
        self._repeated: Repeated | None = None
        self._folded: list[CacheCallRows] = []
        self._unlike = 0

    def digest(self, record: ForwardRecord) -> tuple[list[Rows], list[Event]]:
        """All rows of ``record``, grouped by which ports they have, and the cache events that were noticed."""
        key = likeness(record) if self._selection is None and not self._sites.parts else None
        known: Mapping[int, CacheCallRows] = {}
        if self._repeated is not None:
            repeated = self._repeated.digest(record) if self._repeated.key == key else None
            if repeated is not None:
                return repeated
            known = self._repeated.folded
            # What often turns out to be unlike is learnt more rarely.
            self._unlike = 0 if self._repeated.forwards else self._unlike + 1
            self._forget_likeness()
        table = ForwardRows.of(record.forward.segments)
        columns = record.finished + self._arrays(record, table)
        entry_columns, events = self._entries(record, table, known)
        columns += entry_columns
        rows = self._rows(record, table, columns)
        if key is not None and key == self._last and record.forward.index % (1 << min(self._unlike, 6)) == 0:
            places = partial(self._kind_and_places, record, table)
            self._repeated = Repeated.learnt(key, record, rows, self._folded, places, self._ledgers)
        self._last = key
        self._folded = []
        return rows, events

    def _forget_likeness(self) -> None:
        if self._repeated is not None:
            self._repeated.settle()
            self._repeated = None

    def share(self, request: int, donor: int, tokens: int) -> None:
        """From now on the first ``tokens`` cache entries of a request are those that ``donor`` wrote."""
        self._forget_likeness()
        self._ledgers.share(request, donor, tokens)

    def forget(self, request: int) -> None:
        """No row of a request comes any more, and nobody shares its entries."""
        self._forget_likeness()
        self._ledgers.forget(request)

    def flush(self, record: ForwardRecord) -> None:
        """Digest what the record holds so far and let go of the arrays, so that a big forward stays small."""
        table = ForwardRows.of(record.forward.segments)
        self._forget_likeness()
        record.finished += self._arrays(record, table)
        entry_columns, events = self._entries(record, table, {})
        record.finished += entry_columns
        record.events += events
        record.arrays.clear()
        record.device.clear()
        record.caches.clear()

    def _places(self, record: ForwardRecord, table: ForwardRows, port: int) -> tuple[NDArray[np.int64], ...]:
        """(rows, slots, columns) that a port covers."""
        everything = np.arange(len(table.request))
        selected = record.forward.selected
        if port in record.states:
            rows = everything[table.last]
            return rows, table.slot[rows], np.zeros(len(rows), np.int64)
        if port in self._compact and selected is not None:
            place = {column: i for i, column in enumerate(selected)}
            rows = np.array([r for r in everything if int(table.column[r]) in place], np.int64)
            columns = np.array([place[int(table.column[r])] for r in rows], np.int64)
            return rows, np.zeros(len(rows), np.int64), columns
        return everything, table.slot, table.column

    def _kind(self, record: ForwardRecord, port: int) -> str:
        return "state" if record.axis(port) is None else "compact" if port in self._compact else "row"

    def _kind_and_places(
        self, record: ForwardRecord, table: ForwardRows, port: int
    ) -> tuple[str, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        rows, slots, columns = self._places(record, table, port)
        return self._kind(record, port), rows, slots, columns

    def _arrays(self, record: ForwardRecord, table: ForwardRows) -> list[DistinctValue]:
        if record.device:
            return [self._device_column(record, table, port) for port in sorted(record.arrays)]
        found: dict[tuple[Any, ...], list[int]] = {}
        memories: dict[int, tuple[Memory, int | None]] = {}
        # Half of the ports hold the very array of another one, and asking where one lies takes longest.
        known: dict[tuple[int, int | None], tuple[Memory, tuple[int, ...]]] = {}
        for port in sorted(record.arrays):
            array = record.arrays[port]
            axis = record.axis(port)
            place = node(array) or id(array), axis
            if place not in known:
                where = memory(array)
                walk = layout_job(where, axis)
                if walk is None:
                    array = record.arrays[port] = mx.contiguous(array)
                    where = memory(array)
                    walk = layout_job(where, axis)
                    assert walk is not None
                known[place] = where, walk
            where, job = known[place]
            key = self._kind(record, port), where.dtype, job, self._sites.parts.get(port)
            found.setdefault(key, []).append(port)
            memories[port] = (where, axis)
        columns: list[DistinctValue] = []
        for kind in ("row", "compact", "state"):
            group = [(key, ports) for key, ports in found.items() if key[0] == kind]
            if not group:
                continue
            rows, slots, cols = self._places(record, table, group[0][1][0])
            digests = Jobs.of([key[2] for key, _ in group], [key[1] for key, _ in group]).digest(slots, cols)
            for i, ((*_, part), ports) in enumerate(group):
                kept = None
                source = Source(*_by_row(*memories[ports[0]]), slots, cols)
                if part is not None:
                    digests[:, i] = _part_digests(source, part)
                if self._wanted(ports):
                    kept = source.take(rows, self._keep(table))
                columns.append(DistinctValue(ports, rows, digests[:, i], kept))
        return columns

    def _device_column(self, record: ForwardRecord, table: ForwardRows, port: int) -> DistinctValue:
        rows, slots, cols = self._places(record, table, port)
        kept = None
        if self._wanted([port]):
            axis = record.axis(port)
            source = Source(*_by_row(memory(record.arrays[port]), axis), slots, cols)
            kept = source.take(rows, self._keep(table))
        return DistinctValue([port], rows, np.asarray(record.device[port])[slots, cols], kept)

    def _entries(
        self, record: ForwardRecord, table: ForwardRows, known: Mapping[int, CacheCallRows]
    ) -> tuple[list[DistinctValue], list[Event]]:
        """Columns of cache entries and of what rows saw of them; ``known`` are calls that were read already, by their number."""
        columns: list[DistinctValue] = []
        events: list[Event] = []
        ports, masks = self._sites.ports, Masks()
        self._folded = []
        for number, call in enumerate(record.caches):
            folded = known.get(number) or self._ledgers.fold(call, record.forward, masks)
            self._folded.append(folded)
            events += folded.events
            if folded.limited:
                record.limited.setdefault(call.layer, []).extend(folded.limited)
            present = folded.rows
            for h, name in enumerate(folded.names):
                port = [ports[f"{call.key}.write", name]]
                kept = None
                if folded.source is not None and self._wanted(port):
                    kept = folded.source(h).take(present, self._keep(table))
                columns.append(DistinctValue(port, present, folded.entries[:, h], kept))
            read = [ports[f"{call.key}.read", "read"]]
            inside, _, again = call.key.rpartition(".cache")  # "#2" and so on where a module runs again
            seen = {f"{inside}.attention{again}": folded.read, **folded.seen}
            for key, digests in seen.items():
                kv = ports.get((key, "kv"))
                if kv is None:
                    continue
                if digests is folded.read or np.array_equal(digests, folded.read):
                    read.append(kv)
                else:
                    columns.append(DistinctValue([kv], present, digests))
            written = ports[f"{call.key}.read", "written"]
            if folded.written is folded.read or np.array_equal(folded.read, folded.written):
                read.append(written)
            else:
                columns.append(DistinctValue([written], present, folded.written))
            columns.append(DistinctValue(read, present, folded.read))
        return columns, events

    def _rows(self, record: ForwardRecord, table: ForwardRows, columns: list[DistinctValue]) -> list[Rows]:
        n = len(table.request)
        n_ports = len(self._sites.ports)
        # Hundreds of columns share a few `present`, so whole blocks are moved instead of columns.
        blocks: dict[int, list[int]] = {}
        for c, column in enumerate(columns):
            blocks.setdefault(id(column.present), []).append(c)
        found = [
            (columns[block[0]].present, block, np.stack([columns[c].digests for c in block], axis=1))
            for block in blocks.values()
        ]
        has = np.zeros((n, len(found)), bool)
        for number, (present, _, _) in enumerate(found):
            has[present, number] = True
        # Groups in the order of their first row, so that the trace does not depend on how patterns sort.
        groups: dict[bytes, list[int]] = {}
        for row, pattern in enumerate(has if not has.all() else ()):
            groups.setdefault(pattern.tobytes(), []).append(row)
        tokens = np.asarray(record.forward.tokens).astype(np.int64)
        result: list[Rows] = []
        for rows in [np.array(each, np.int64) for each in groups.values()] or [np.arange(n)]:
            mine = [found[number] for number in np.flatnonzero(has[rows[0]])] if n else found
            chosen = sorted(c for _, block, _ in mine for c in block)
            places = {c: place for place, c in enumerate(chosen)}
            port_column = [-1] * n_ports
            values: dict[int, Value] = {}
            for place, c in enumerate(chosen):
                for port in columns[c].ports:
                    port_column[port] = place
                kept = columns[c].kept
                if kept is not None:
                    values[place] = _value(kept, rows)
            digests = np.empty((len(rows), len(chosen)), np.uint64)
            for present, block, stacked in mine:
                digests[:, [places[c] for c in block]] = stacked[np.searchsorted(present, rows)]
            result.append(
                Rows(
                    request=table.request[rows].astype(np.int32),
                    position=table.position[rows].astype(np.int32),
                    forward=np.full(len(rows), record.forward.index, np.int32),
                    slot=table.lane[rows].astype(np.int32),
                    phase=table.phase[rows].astype(np.int32),
                    token=tokens[table.slot[rows], table.column[rows]].astype(np.int32),
                    table=tuple(port_column),
                    digests=digests,
                    values={c: v for c, v in values.items() if len(v.rows)},
                )
            )
        return _joined(result)

    def _wanted(self, ports: Sequence[int]) -> bool:
        return self._selection is not None and not self._selection.ports.isdisjoint(ports)

    def _keep(self, table: ForwardRows) -> NDArray[np.bool_]:
        assert self._selection is not None
        return self._selection.rows(table)


def _part_digests(source: Source, part: RowPart) -> UInt64:
    """What a part of each row adds to the digest of the whole row: its words by their places in that row."""
    everything = np.arange(len(source.slots))
    held = source.take(everything, np.ones(len(everything), bool))
    if held is None:
        return np.zeros(0, np.uint64)
    words, itemsize = words_of(held.data), held.data.dtype.itemsize
    places = part.words(itemsize)
    weights = coefficients(int(places.max()) + 1)[places]
    sums: UInt64 = (words.astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
    if part.biased:
        sums += np.uint64(digest_bias(held.dtype, int(np.prod(part.shape)) * itemsize))
    return sums


def _by_row(where: Memory, axis: int | None) -> tuple[NDArray[Any], str]:
    view = where.numpy()
    return (view[:, None] if axis is None else np.moveaxis(view, axis, 1)), where.dtype


def _joined(groups: list[Rows]) -> list[Rows]:
    """One batch, where all groups have their ports in the same columns, as requests with caches of their own."""
    if len(groups) < 2 or len({group.table for group in groups}) > 1 or any(group.values for group in groups):
        return groups
    request, position, forward, slot, phase, token = (
        np.concatenate([getattr(group, name) for group in groups])
        for name in ("request", "position", "forward", "slot", "phase", "token")
    )
    digests = np.concatenate([group.digests for group in groups])
    return [Rows(request, position, forward, slot, phase, token, groups[0].table, digests)]


def _value(kept: KeptValues, rows: NDArray[np.int64]) -> Value:
    """Of the kept values those of ``rows``, addressed within them."""
    inside = np.isin(kept.rows, rows)
    places = np.searchsorted(rows, kept.rows[inside])
    return Value(places.astype(np.int32), kept.data[inside], kept.dtype)
