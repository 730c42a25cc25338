"""What the taps of a torch model saw in forwards of packed rows over pages, written as rows by (request, position)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.base import PortRows, RowTable, forward_line, highest
from detdiff.engines.schedule import Share
from detdiff.trace import PHASES, combine_entries

from .pages import HandedKeys, PageLedger, SeenKeys, WrongKeys
from .rows import Int64, RowRecorder, RowSink, UInt64, windowed
from .taps import KeysShown

MOST_TOLD = 64
"""Contradictions of a forward that are told one by one."""
Event = dict[str, Any]


class PagedRecorder(RowRecorder):
    """Writes forwards of rows [1, rows] as transformers' continuous batching composes them."""

    def __init__(self, into: RowSink) -> None:
        super().__init__(into)
        self._ledgers: dict[int, PageLedger] = {}
        self._sums: dict[tuple[str, int], UInt64] = {}
        """By layer and request: cumulative terms of the entries that its rows wrote, uint64 [positions]."""
        self._answers: dict[int, int] = {}
        self._ended: set[int] = set()
        self._asked = np.zeros(0, np.int64)

    def begin(self, shares: Sequence[Share], fed: Mapping[str, Any]) -> None:
        """A forward begins whose rows should be these, one request after the other; ``fed`` is what the model is called with."""
        self._shares = shares
        table = np.array(
            [
                (share.work.index, share.start + n, 0, PHASES.index(share.phase), token)
                for share in shares
                for n, token in enumerate(share.tokens)
            ],
            np.int64,
        ).reshape(-1, 5)
        self._table = RowTable(*table.T)
        self._of = table[:, :2]
        self._column = np.arange(len(table))
        self._shape = 1, len(table)
        self._events: list[Event] = []
        self._untold = 0
        self._begun()
        for kind, name, expected in (
            ("token_fed", "input_ids", table[:, 4]),
            ("offset", "position_ids", table[:, 1]),
        ):
            given = self._ints(fed[name][0])
            for row in np.flatnonzero(given != expected).tolist():
                request, position = self._of[row].tolist()
                self._tell(
                    kind=kind, request=request, position=position, found=int(given[row]), expected=int(expected[row])
                )  # fmt: skip
        self._ask(fed)
        self._cache = fed["cache"]
        self._handed: list[HandedKeys] = []
        self._masks: dict[tuple[int, int], tuple[SeenKeys, list[WrongKeys]]] = {}
        for index, kind in enumerate(self._cache.cache_allocators.values()):
            ledger = self._ledgers.setdefault(index, PageLedger())
            self._handed.append(
                ledger.handed(
                    self._ints(fed["read_index"][index]),
                    self._ints(fed["write_index"][index]),
                    self._of,
                    late=_window(kind) is not None,
                    sentinel=kind.sentinel_index,
                    trash=kind.write_trash_index,
                )
            )
        self._given: dict[str, tuple[Any, Any]] = {}

    def _ask(self, fed: Mapping[str, Any]) -> None:
        """Which rows the head is given, and whether these are the rows that answer."""
        ends = np.cumsum([len(share.tokens) for share in self._shares]) - 1
        answering = np.array([share.answers > 0 for share in self._shares])
        expected = ends[answering]
        self._sliced = fed.get("logits_to_keep") is not None
        self._asked = self._ints(fed["logits_indices"])[: len(expected)]
        for row, other in zip(expected.tolist(), self._asked.tolist(), strict=True):
            if row != other:
                (request, position), (of, at) = self._of[row].tolist(), self._of[other].tolist()
                self._tell(kind="logits_read", request=request, position=position, of=of, at=at)
        self._answering = self._of[expected]

    def written(self, name: str, keys: Any, values: Any) -> None:
        """New entries [1, heads, rows, size] of an attention module on their way into the pages."""
        self._given[name] = keys, values

    def attended(self, name: str, keys: Any, values: Any, call: KeysShown) -> None:
        """The keys and values [1, heads, keys, size] that an attention module is handed, and which of them its mask shows."""
        write, read = f"{name}.cache.write", f"{name}.cache.read"
        given = self._given.pop(name, None)
        if write not in self._sites or given is None or call.mask is None:
            return
        layer = self._map.caches[name][0] or 0
        kind = self._cache.layer_to_allocator[layer]
        ledger, handed = self._ledgers[kind.index], self._handed[kind.index]
        if keys.shape[2] != len(handed):
            return
        own, found = (self._of_heads(*each) for each in (given, (keys, values)))
        if not handed.late:
            ledger.write(name, handed.written, own)
        expected = ledger.expected(name, handed, own)
        self._changed(name, layer, ledger, handed, found != expected, found)
        if handed.late:
            ledger.write(name, handed.written, own)
        rows = self._column
        seen = self._seen_by(call.mask, kind.index, _window(kind), layer)
        # An entry of which nobody knows the position is not what any row wrote, whatever it counts as.
        terms = combine_entries(found, np.maximum(handed.position, 0))
        self._found[self._ports[read, "read"]] = PortRows(rows, seen.sums(terms))
        self._found[self._ports[read, "written"]] = PortRows(rows, self._own_sums(name, own, _window(kind)))
        self._entries_of(name, write, given, (keys, values), handed, own, found)
        number, site = self._sites[write]
        self._saw(number, site, given[0].transpose(1, 2)[..., 0])
        self._saw(*self._sites[read], given[0].transpose(1, 2)[..., 0])

    def end(self, logits: Any) -> None:
        """The forward ends with logits [1, rows or those that answer, vocabulary]."""
        if not len(self._asked):
            self._log()
            self._counted()
            return
        columns = np.arange(len(self._asked)) if self._sliced else self._asked
        self._answered(logits, self._asked, columns)
        picked = logits[0, self._torch.as_tensor(columns, device=logits.device)].float().cpu().numpy()
        pairs = [highest(row, self._top) for row in picked]
        ids, values = (np.stack(each) for each in zip(*pairs, strict=True))
        self._highest = ids, values
        self._counted()

    def chosen(self, tokens: Sequence[int], ended: Sequence[int]) -> None:
        """The tokens that the last forward's logits led to, one for each share that answers; ``ended`` are requests that are through."""
        self._ended.update(ended)
        if not tokens:
            return
        requests = self._answering[:, 0]
        index = np.array([self._answers.get(request, 0) for request in requests.tolist()])
        for request in requests.tolist():
            self._answers[request] = self._answers.get(request, 0) + 1
        self._chose(requests, index, tokens, self._answering[:, 1], self._highest)

    # Parts.

    def _placed(self, name: str, columns: int) -> tuple[Int64, Int64] | None:
        if name == self._map.head and self._sliced:
            return (self._asked, np.arange(len(self._asked))) if len(self._asked) else None
        return (self._column, self._column) if columns == len(self._column) else None

    def _line(self, plan: int) -> dict[str, Any]:
        spans = [(share.work.index, 0, share.start, len(share.tokens)) for share in self._shares]
        prompts = {share.work.index: len(share.work.prompt) for share in self._shares}
        line = forward_line(self.forwards, spans, self._shape, plan, prompts, "packed")
        if self._untold:
            self._events.append({"kind": "cache_more", "entries": self._untold})
        if self._events:
            line["events"] = self._events
        return line

    def _entries_of(
        self,
        name: str,
        write: str,
        given: tuple[Any, Any],
        handed_to: tuple[Any, Any],
        handed: HandedKeys,
        own: UInt64,
        found: UInt64,
    ) -> None:
        """The ports of a cache's write: rows on their way, and each head's entries as attention is handed them."""
        rows = self._column
        for port_name, side in zip(("k", "v"), given, strict=True):
            port = self._ports.get((write, port_name))
            if port is not None:
                self._found[port] = self._digested_rows(write, rows, rows, side.transpose(1, 2))
        missing = bool((handed.places < 0).any())
        sides, places, digests = (
            (given, rows, own) if missing else (handed_to, handed.places, found[handed.places])
        )
        heads = sides[0].shape[1]
        for head, port_name in enumerate(self._sites[write][1].site.outputs):
            side, at = (sides[0], head) if head < heads else (sides[1], head - heads)
            port = self._ports[write, port_name]
            self._found[port] = self._valued(name, rows, places, digests[:, head], side[:, at])

    def _own_sums(self, name: str, own: UInt64, window: int | None) -> UInt64:
        """What each row's request has written up to it, as one digest a row."""
        terms = combine_entries(own, self._of[:, 1])
        found = np.zeros(len(terms), np.uint64)
        first = 0
        for share in self._shares:
            mine = slice(first, first + len(share.tokens))
            key = name, share.work.index
            before = self._sums.get(key, np.zeros(0, np.uint64))[: share.start]
            last = before[-1] if len(before) else np.uint64(0)
            self._sums[key] = np.concatenate([before, np.cumsum(terms[mine], dtype=np.uint64) + last])
            found[mine] = windowed(self._sums[key], self._of[mine, 1], window)
            first = mine.stop
        return found

    def _seen_by(self, mask: Any, index: int, window: int | None, layer: int) -> SeenKeys:
        """Which keys rows see, of each mask once; what is wrong there is told of each layer."""
        key, handed = (index, mask.data_ptr()), self._handed[index]
        if key not in self._masks:
            held = mask[0, 0]
            shown = held if held.dtype == self._torch.bool else held > self._torch.finfo(held.dtype).min / 2
            found = SeenKeys(shown.cpu().numpy(), handed, self._of, window)
            self._masks[key] = found, list(found.wrong())
        seen, wrongs = self._masks[key]
        for wrong in wrongs:
            request, position = self._of[wrong.row].tolist()
            event: Event = {"layer": layer, "request": request, "position": position}
            for place in wrong.foreign.tolist():
                of, at = int(handed.request[place]), int(handed.position[place])
                early = window is not None and of == request and 0 <= at <= position - window
                self._tell(
                    kind="cache_foreign",
                    **({"window": window} if early else {}), **event, cell=int(handed.cell[place]), at=at, of=of, ended=of in self._ended
                )  # fmt: skip
            if wrong.missing:
                self._tell(kind="cache_missing", **event, first=wrong.first, entries=wrong.missing)
        return seen

    def _changed(
        self,
        name: str,
        layer: int,
        ledger: PageLedger,
        handed: HandedKeys,
        differ: NDArray[np.bool_],
        found: UInt64,
    ) -> None:
        """Tell of entries that are not what was written to their cells last."""
        heads = self._map.caches[name][1]
        for place, head in np.argwhere(differ & (handed.request >= 0)[:, None]).tolist():
            other = ledger.whose(name, head, int(found[place, head]))
            self._tell(
                kind="cache_changed",
                layer=layer,
                entry="K" if head < heads else "V",
                head=head if head < heads else head - heads,
                request=int(handed.request[place]),
                position=int(handed.position[place]),
                **({} if other is None else {"of": other[0], "at": other[1]}),
            )

    def _tell(self, **event: Any) -> None:
        if len(self._events) < MOST_TOLD:
            self._events.append(event)
        else:
            self._untold += 1

    def _of_heads(self, keys: Any, values: Any) -> UInt64:
        """Digests uint64 [columns, heads] of the keys and then the values [1, heads, columns, size]."""
        found: UInt64 = np.concatenate([self._entries(keys)[0], self._entries(values)[0]]).T
        return np.ascontiguousarray(found)

    def _ints(self, tensor: Any) -> Int64:
        found: Int64 = tensor.cpu().numpy().astype(np.int64)
        return found


def _window(kind: Any) -> int | None:
    """How many positions a kind of attention layers keeps; None: all."""
    found = getattr(kind, "sliding_window", None)
    return None if found is None else int(found)
