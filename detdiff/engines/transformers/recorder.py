"""What the taps of a torch model saw in padded batches, written as rows by (request, position)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.base import PortRows, RowTable, forward_line, highest
from detdiff.engines.tasks import Pooling, scores
from detdiff.trace import Generated, combine_entries, format_ranges

from .rows import Int64, RowRecorder, UInt64, windowed
from .taps import KeysShown

_SCORED_IN = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}


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


class TorchRecorder(RowRecorder):
    """Writes the forwards of one batch after the other."""

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
        self._shape = len(batch.numbers), self._length
        self._begun()
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

    def written(self, name: str, keys: Any, values: Any) -> None:
        """New entries [requests, heads, columns, size] of an attention module on their way into the cache."""
        cache = self._cache(name)
        cache.before = keys, values

    def attended(self, name: str, keys: Any, values: Any, call: KeysShown) -> None:
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
                    name, rows, self._column, entries[:, head], side[:, at, held - self._length :]
                )
        if cache.before is not None:
            for port_name, side in zip(("k", "v"), cache.before, strict=True):
                port = self._ports.get((write, port_name))
                if port is not None:
                    self._found[port] = self._digested_rows(write, rows, self._column, side.transpose(1, 2))
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
                seen[what][mine] = windowed(np.cumsum(values_, dtype=np.uint64), at, call.window)
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
        self._answered(logits, chosen, self._column[chosen])
        slots = self._table.slot[chosen]
        index = self._table.position[chosen] - prompts[slots] + 1
        given = [batch.scored[slot][n] for slot, n in zip(slots.tolist(), index.tolist(), strict=True)]
        rows = self._picked(chosen, self._column[chosen], logits).float().cpu().numpy()
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
        rows = self._picked(every, self._column, hidden).float().cpu().numpy()
        self._writer.embeddings(pooling.add(self._table.request, self._table.position, rows))
        self._counted()

    def end(self, logits: Any) -> None:
        """The forward ends with logits [requests, columns, vocabulary]."""
        last = logits[:, -1:]
        chosen = np.flatnonzero(self._column == self._length - 1)
        self._answered(last, chosen, np.zeros(len(chosen), np.int64))
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
        if not slots:
            return
        index = np.array([len(batch.tokens[slot]) for slot in slots])
        fresh = [int(tokens[slot]) for slot in slots]
        for slot, token in zip(slots, fresh, strict=True):
            batch.tokens[slot].append(token)
        requests = np.array([batch.numbers[slot] for slot in slots])
        self._chose(requests, index, fresh, positions, (ids[slots], values[slots]))

    # Parts.

    def _cache(self, name: str) -> _Cache:
        empty = np.empty((0, 0), np.uint64)
        return self._caches.setdefault(name, _Cache([empty] * len(self._batch.numbers)))

    def _placed(self, name: str, columns: int) -> tuple[Int64, Int64]:
        first = self._length - columns
        rows = np.flatnonzero(self._column >= first)
        return rows, self._column[rows] - first

    def _line(self, plan: int) -> dict[str, Any]:
        prompts = [0] * len(self._ids)
        for number, prompt in zip(self._batch.numbers, self._batch.prompts, strict=True):
            prompts[number] = len(prompt)
        line = forward_line(self.forwards, self._spans, self._shape, plan, prompts)
        line["caches"] = (
            []
            if self._map.encoder
            else [
                {
                    "layers": format_ranges(
                        [layer for layer, *_ in self._map.caches.values() if layer is not None] or [0]
                    ),
                    "offset": [self._columns] * self._shape[0],
                    "left_padding": list(self._batch.padding),
                    "length": self._columns,
                }
            ]
        )
        return line
