"""What the taps of a torch model saw, written as rows by (request, position)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.base import PortRows, RowTable, WantedValues, forward_line, highest, write_rows
from detdiff.engines.tasks import Pooling, scores
from detdiff.trace import (
    Generated,
    TraceWriter,
    combine_entries,
    digest_rows,
    format_ranges,
    ports_of,
)

from .sites import TorchSite, TorchSites

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]
_BITS = {"torch.bfloat16": ("int16", np.uint16, "BF16")}
_SCORED_IN = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}
_PLAIN = {
    "torch.bool": "BOOL",
    "torch.float16": "F16",
    "torch.float32": "F32",
    "torch.float64": "F64",
    "torch.int64": "I64",
    "torch.int32": "I32",
}


@dataclass(eq=False)
class Batch:
    """Requests that run together: their numbers, prompts, limits and ends, and what each generated so far.

    Where they are scored, ``scored`` are the given tokens of each; ``right`` says that padding is on the right.
    """

    numbers: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    ends: tuple[frozenset[int], ...]
    tokens: list[list[int]] = field(default_factory=list)
    scored: tuple[tuple[int, ...], ...] = ()
    right: bool = False

    @property
    def given(self) -> tuple[tuple[int, ...], ...]:
        """The tokens that each is fed at first; no row is needed for the last scored one."""
        if not self.scored:
            return self.prompts
        return tuple(
            (*prompt, *scored[:-1]) for prompt, scored in zip(self.prompts, self.scored, strict=True)
        )

    @property
    def missing(self) -> tuple[int, ...]:
        """How many columns each has of padding."""
        longest = max(map(len, self.given))
        return tuple(longest - len(each) for each in self.given)

    @property
    def padding(self) -> tuple[int, ...]:
        """How many of them are before its first row."""
        return (0,) * len(self.prompts) if self.right else self.missing

    def finished(self, slot: int) -> bool:
        tokens = self.tokens[slot]
        return len(tokens) >= self.limits[slot] or bool(tokens and tokens[-1] in self.ends[slot])


@dataclass(eq=False)
class _Cache:
    """Digests of the entries of one attention module as they were written, uint64 [columns, heads] a request."""

    written: list[UInt64]
    before: tuple[Any, Any] | None = None


class TorchRecorder:
    """Writes the forwards of one batch after the other."""

    def __init__(
        self,
        torch: Any,
        sites: TorchSites,
        writer: TraceWriter,
        ids: Sequence[str],
        wanted: WantedValues | None,
        top: int,
        on_token: Callable[[int], None],
        text: Callable[[int], str],
    ) -> None:
        self._torch, self._map, self._writer = torch, sites, writer
        self._ids, self._wanted, self._top = ids, wanted, top
        self._on_token, self._text = on_token, text
        self._sites = {each.site.name: (n, each) for n, each in enumerate(sites.sites)}
        self._ports = {
            (sites.sites[port.site].site.name, port.name): n
            for n, port in enumerate(ports_of(each.site for each in sites.sites))
        }
        self._texts: set[int] = set()
        self.scored_in: str | None = None
        """The dtype of the logits that log-probabilities of given tokens were made of."""
        self.forwards = 0
        self.rows = 0

    def start(self, batch: Batch) -> None:
        self._batch = batch
        self._columns = 0
        self._length = 0
        self._caches: dict[str, _Cache] = {}
        self._pending: tuple[list[int], Any, Int64, Any] | None = None

    # What the taps call.

    def begin(self, fed: NDArray[np.int64]) -> None:
        """A forward begins that is fed ids int64 [requests, columns]."""
        self.chosen(fed[:, -1])
        batch = self._batch
        self._columns += self._length
        self._length = fed.shape[1]
        self._found: dict[int, PortRows] = {}
        self._seen_rows: PortRows | None = None
        self._seen: dict[tuple[int, int], list[int]] = {}
        live = [slot for slot in range(len(batch.numbers)) if not batch.finished(slot)]
        rows, spans = [], []
        for slot in live:
            first = max(0, self._columns - batch.padding[slot])
            last = self._columns + self._length - batch.padding[slot]
            if batch.right:
                last = min(last, len(batch.given[slot]))
            if last > first:
                spans.append((batch.numbers[slot], slot, first, last - first))
            for position in range(first, last):
                column = position + batch.padding[slot] - self._columns
                prompt = len(batch.prompts[slot])
                rows.append(
                    (
                        batch.numbers[slot],
                        position,
                        slot,
                        int(first >= prompt),
                        int(fed[slot, column]),
                        column,
                    )
                )
        table = np.array(rows, np.int64).reshape(len(rows), 6)
        self._table = RowTable(*(table[:, n] for n in range(5)))
        self._column = table[:, 5]
        self._spans, self._live = spans, live

    def site(self, name: str, given: Any, made: Any) -> None:
        number, found = self._sites.get(name, (-1, None))
        if found is None:
            return
        out = self._port(name, "out", found.made, made)
        if out is None:
            return
        if found.given is not None:
            self._port(name, "in", found.given, given)
        if found.site.kind == "attention":
            read = self._found.get(self._ports.get((self._read(name), "read"), -1), self._seen_rows)
            if read is not None and (name, "kv") in self._ports:
                self._found[self._ports[name, "kv"]] = read
            self._seen_rows = None
        self._saw(number, found, made)

    def _read(self, attention: str) -> str:
        return f"{attention.removesuffix('.attention')}.cache.read"

    def written(self, name: str, keys: Any, values: Any) -> None:
        """New entries [requests, heads, columns, size] of an attention module on their way into the cache."""
        cache = self._cache(name)
        cache.before = keys, values

    def attended(self, name: str, keys: Any, values: Any, _: bool) -> None:
        """The keys and values that an attention module reads, [requests, heads, columns, size]."""
        if self._map.encoder:
            self._seen_rows = self._own_rows(keys, values)
            return
        write, read = f"{name}.cache.write", f"{name}.cache.read"
        whole = self._columns + self._length
        held = keys.shape[2]
        if write not in self._sites or held > whole or held < self._length:
            return
        cache = self._cache(name)
        digests = np.concatenate([self._entries(keys), self._entries(values)], axis=1).transpose(0, 2, 1)
        lost = whole - held
        rows = np.arange(len(self._table))
        slots, columns = self._table.slot, self._column
        entries = digests[slots, columns + held - self._length]
        for head in range(entries.shape[1]):
            port = self._ports.get((write, self._sites[write][1].site.outputs[head]))
            if port is not None:
                side, at = (keys, head) if head < keys.shape[1] else (values, head - keys.shape[1])
                self._found[port] = self._valued(
                    name, rows, entries[:, head], side[:, at, held - self._length :]
                )
        if cache.before is not None:
            for port_name, side in zip(("k", "v"), cache.before, strict=True):
                port = self._ports.get((write, port_name))
                if port is not None:
                    self._found[port] = self._digested_rows(write, rows, side.transpose(1, 2))
        seen: dict[str, UInt64] = {
            "written": np.zeros(len(rows), np.uint64),
            "read": np.zeros(len(rows), np.uint64),
        }
        for slot in dict.fromkeys(slots.tolist()):
            mine = np.flatnonzero(slots == slot)
            pad = self._batch.padding[slot]
            ledger = cache.written[slot]
            new = digests[slot, held - self._length :]
            cache.written[slot] = np.concatenate([ledger[: self._columns], new]) if len(ledger) else new
            if lost > 0:
                pad = max(pad, lost)
            position = np.arange(pad, whole) - self._batch.padding[slot]
            terms = {
                "written": combine_entries(cache.written[slot][pad:], position),
                "read": combine_entries(digests[slot, pad - lost :], position),
            }
            at = self._columns + columns[mine] - pad
            for what, values_ in terms.items():
                seen[what][mine] = np.cumsum(values_, dtype=np.uint64)[at]
        for what, sums in seen.items():
            self._found[self._ports[read, what]] = PortRows(rows, sums)
        number, site = self._sites[write]
        self._saw(number, site, keys[:, :, held - self._length :].transpose(1, 2)[..., 0])
        self._saw(*self._sites[read], keys[:, :, held - self._length :].transpose(1, 2)[..., 0])

    def _own_rows(self, keys: Any, values: Any) -> PortRows:
        """What each row of an encoder sees: the keys and values of all its request's rows."""
        digests = np.concatenate([self._entries(keys), self._entries(values)], axis=1).transpose(0, 2, 1)
        sums = np.zeros(len(self._table), np.uint64)
        for slot in dict.fromkeys(self._table.slot.tolist()):
            mine = np.flatnonzero(self._table.slot == slot)
            terms = combine_entries(digests[slot, self._column[mine]], self._table.position[mine])
            sums[mine] = terms.sum(dtype=np.uint64)
        return PortRows(np.arange(len(sums)), sums)

    def end_scored(self, logits: Any) -> None:
        """The forward over whole texts ends with logits [requests, columns, vocabulary]: given tokens are scored."""
        batch = self._batch
        prompts = np.array([len(each) for each in batch.prompts])
        chosen = np.flatnonzero(self._table.position >= prompts[self._table.slot] - 1)
        self._answered(logits, chosen)
        slots = self._table.slot[chosen]
        index = self._table.position[chosen] - prompts[slots] + 1
        given = [batch.scored[slot][n] for slot, n in zip(slots.tolist(), index.tolist(), strict=True)]
        rows = self._picked(chosen, logits).float().cpu().numpy()
        self.scored_in = _SCORED_IN.get(str(logits.dtype))
        ids, found = scores(rows, given, self._top)
        for token in dict.fromkeys(given):
            self._see(token)
        self._writer.generated(
            Generated(
                self._table.request[chosen].astype(np.int32),
                index.astype(np.int32),
                np.array(given, np.int32),
                np.full(len(given), self.forwards, np.int32),
                self._table.position[chosen].astype(np.int32),
                ids,
                found,
            )
        )
        self._counted()

    def end_embedded(self, hidden: Any, pooling: Pooling) -> None:
        """The forward over whole prompts ends with last hidden states [requests, columns, width]."""
        self._log()
        every = np.arange(len(self._table))
        rows = self._picked(every, hidden).float().cpu().numpy()
        self._writer.embeddings(pooling.add(self._table.request, self._table.position, rows))
        self._counted()

    def _answered(self, logits: Any, chosen: Int64) -> None:
        """Digest the logits [requests, last columns, vocabulary] of the rows that they are asked of, and write the forward."""
        number, site = self._sites["logits"]
        head = self._map.head
        self._found[self._ports["logits", "out"]] = self._digested_rows("logits", chosen, logits)
        before = None if head is None else self._found.get(self._ports.get((head, "out"), -1))
        if before is not None:
            self._found[self._ports["logits", "in"]] = before
        self._saw(number, site, logits[..., 0])
        self._log()

    def _counted(self) -> None:
        self.forwards += 1
        self.rows += len(self._table)

    def _see(self, token: int) -> None:
        if token not in self._texts:
            self._texts.add(token)
            self._writer.text(token, self._text(token))

    def end(self, logits: Any) -> None:
        """The forward ends with logits [requests, columns, vocabulary]."""
        last = logits[:, -1:]
        chosen = np.flatnonzero(self._column == self._length - 1)
        self._answered(last, chosen)
        pairs = [highest(row, self._top) for row in last[:, 0].float().cpu().numpy()]
        ids, values = (np.stack(each) for each in zip(*pairs, strict=True))
        slots = self._table.slot[chosen]
        self._pending = slots.tolist(), ids, self._table.position[chosen], values
        self._counted()

    def chosen(self, tokens: NDArray[np.int64]) -> None:
        """The tokens int64 [requests] that the last forward's logits led to."""
        if self._pending is None:
            return
        slots, ids, positions, values = self._pending
        self._pending = None
        batch = self._batch
        fresh = []
        for slot in slots:
            token = int(tokens[slot])
            batch.tokens[slot].append(token)
            fresh.append(token)
            self._see(token)
            self._on_token(token)
        if not slots:
            return
        self._writer.generated(
            Generated(
                np.array([batch.numbers[slot] for slot in slots], np.int32),
                np.array([len(batch.tokens[slot]) - 1 for slot in slots], np.int32),
                np.array(fresh, np.int32),
                np.full(len(slots), self.forwards - 1, np.int32),
                positions.astype(np.int32),
                ids[slots].astype(np.int32),
                values[slots].astype(np.float32),
            )
        )

    # Parts.

    def _cache(self, name: str) -> _Cache:
        empty = np.empty((0, 0), np.uint64)
        return self._caches.setdefault(name, _Cache([empty] * len(self._batch.numbers)))

    def _port(self, name: str, port: str, layout: Any, tensor: Any) -> PortRows | None:
        number = self._ports.get((name, port))
        if number is None or layout is None or tensor is None or tensor.dtype not in self._dtypes():
            return None
        laid = layout.rows(tensor, len(self._batch.numbers), self._length)
        if laid is None:
            return None
        first = self._length - laid.shape[1]
        rows = np.flatnonzero(self._column >= first)
        self._found[number] = self._digested_rows(name, rows, laid)
        return self._found[number]

    def _dtypes(self) -> frozenset[Any]:
        return frozenset(getattr(self._torch, name.removeprefix("torch.")) for name in (*_BITS, *_PLAIN))

    def _digested_rows(self, name: str, rows: Int64, laid: Any) -> PortRows:
        """Rows of a tensor laid out as [requests, last columns, ...]."""
        data, dtype = self._numpy(self._picked(rows, laid))
        kept = self._kept(name, rows)
        digests = digest_rows(data.reshape(len(rows), -1), dtype)
        return PortRows(rows, digests, None if kept is None else data, dtype, kept)

    def _valued(self, name: str, rows: Int64, digests: UInt64, laid: Any) -> PortRows:
        kept = self._kept(f"{name}.cache.write", rows)
        if kept is None:
            return PortRows(rows, digests)
        data, dtype = self._numpy(self._picked(rows, laid))
        return PortRows(rows, digests, data, dtype, kept)

    def _picked(self, rows: Int64, laid: Any) -> Any:
        first = self._length - laid.shape[1]
        return laid[
            self._torch.as_tensor(self._table.slot[rows], device=laid.device),
            self._torch.as_tensor(self._column[rows] - first, device=laid.device),
        ]

    def _kept(self, name: str, rows: Int64) -> NDArray[np.bool_] | None:
        if self._wanted is None:
            return None
        return np.array(
            [
                self._wanted(self._ids[request], position, name)
                for request, position in zip(
                    self._table.request[rows].tolist(), self._table.position[rows].tolist(), strict=True
                )
            ],
            np.bool_,
        )

    def _entries(self, side: Any) -> UInt64:
        """Digests uint64 [requests, heads, columns] of keys or values."""
        data, dtype = self._numpy(side)
        shape = data.shape[:3]
        return digest_rows(data.reshape(int(np.prod(shape)), -1), dtype).reshape(shape)

    def _numpy(self, tensor: Any) -> tuple[NDArray[Any], str]:
        dtype = str(tensor.dtype)
        tensor = tensor.detach().cpu().contiguous()
        if dtype in _BITS:
            bits, storage, name = _BITS[dtype]
            return tensor.view(getattr(self._torch, bits)).numpy().view(storage), name
        return tensor.numpy(), _PLAIN[dtype]

    def _saw(self, number: int, site: TorchSite, tensor: Any) -> None:
        """A call of a site with M rows: all but the last axis of what it made."""
        shape = tuple(tensor.shape)
        if site.made is not None and not site.made.flat:
            layout = site.made
            m = shape[layout.length] * (1 if layout.batch is None else shape[layout.batch])
            second = shape[layout.length]
        else:
            m = shape[0] * (shape[1] if site.made is None else 1)
            second = shape[1] if site.made is None else shape[0]
        self._seen.setdefault((m, second), []).append(number)

    def _log(self) -> None:
        calls = [
            {"path": "native", "rule": "", "rows": m, "second_last": second, "sites": format_ranges(sites)}
            for (m, second), sites in self._seen.items()
        ]
        plan = self._writer.plan(calls)
        shape = (len(self._batch.numbers), self._length)
        prompts = [0] * len(self._ids)
        for number, prompt in zip(self._batch.numbers, self._batch.prompts, strict=True):
            prompts[number] = len(prompt)
        line = forward_line(self.forwards, self._spans, shape, plan, prompts)
        line["caches"] = (
            []
            if self._map.encoder
            else [
                {
                    "layers": format_ranges(
                        [layer for layer, *_ in self._map.caches.values() if layer is not None] or [0]
                    ),
                    "offset": [self._columns] * shape[0],
                    "left_padding": list(self._batch.padding),
                    "length": self._columns,
                }
            ]
        )
        self._writer.forward(line)
        write_rows(self._writer, self.forwards, self._table, self._found, len(self._ports))
