"""What the taps of a torch model saw in a forward, as digests of rows by port; the same for padded batches and for packed rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.base import PortRows, RowTable, WantedValues, write_rows
from detdiff.trace import Generated, TraceWriter, digest_rows, format_ranges, ports_of

from .sites import TorchSite, TorchSites

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]
_BITS = {"torch.bfloat16": ("int16", np.uint16, "BF16")}
_PLAIN = {
    "torch.bool": "BOOL",
    "torch.float16": "F16",
    "torch.float32": "F32",
    "torch.float64": "F64",
    "torch.int64": "I64",
    "torch.int32": "I64",
}


@dataclass(frozen=True, eq=False)
class RowSink:
    """What a recorder writes with: torch, the model's sites, and the trace's writer; the requests' ids, the values that are wanted, how many of
    the highest logits, what is called with each token, and what a token's text is."""

    torch: Any
    sites: TorchSites
    writer: TraceWriter
    ids: Sequence[str]
    wanted: WantedValues | None
    top: int
    on_token: Callable[[int], None]
    text: Callable[[int], str]


class RowRecorder(ABC):
    """Writes forwards, of which a subclass says whose rows they are: ``_table``, ``_column`` int64 [rows], the place of each in
    tensors [requests, columns, ...] (a row's slot is its request's place), and ``_shape``, (requests, columns)."""

    _table: RowTable
    _column: Int64
    _shape: tuple[int, int]

    def __init__(self, into: RowSink) -> None:
        self._torch, self._map, self._writer = into.torch, into.sites, into.writer
        self._ids, self._wanted, self._top = into.ids, into.wanted, into.top
        self._on_token, self._text = into.on_token, into.text
        sites = into.sites
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

    @abstractmethod
    def _placed(self, name: str, columns: int) -> tuple[Int64, Int64] | None:
        """Which rows of the table a tensor [requests, columns, ...] of a site has, and the column of each; None: another number of columns."""

    @abstractmethod
    def _line(self, plan: int) -> dict[str, Any]:
        """The forward's line in the log."""

    def _begun(self) -> None:
        """A forward begins."""
        self._found: dict[int, PortRows] = {}
        self._seen_rows: PortRows | None = None
        self._seen: dict[tuple[int, int], list[int]] = {}

    # What the taps call.

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

    # What a forward ends with.

    def _answered(self, logits: Any, rows: Int64, columns: Int64) -> None:
        """Digest the logits [requests, columns, vocabulary] of the rows that they are asked of, at these columns, and write the forward."""
        number, site = self._sites["logits"]
        head = self._map.head
        self._found[self._ports["logits", "out"]] = self._digested_rows("logits", rows, columns, logits)
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

    def _chose(
        self, requests: Int64, index: Int64, tokens: Sequence[int], positions: Int64, top: tuple[Any, Any]
    ) -> None:
        """Tokens that came of the last forward: of these requests, by their index in the answer, and the highest logits (ids, values) [n, k]."""
        for token in tokens:
            self._see(token)
            self._on_token(token)
        self._writer.generated(
            Generated(
                requests.astype(np.int32),
                index.astype(np.int32),
                np.array(tokens, np.int32),
                np.full(len(tokens), self.forwards - 1, np.int32),
                positions.astype(np.int32),
                top[0].astype(np.int32),
                top[1].astype(np.float32),
            )
        )

    # Parts.

    def _port(self, name: str, port: str, layout: Any, tensor: Any) -> PortRows | None:
        number = self._ports.get((name, port))
        if number is None or layout is None or tensor is None or tensor.dtype not in self._dtypes():
            return None
        laid = layout.rows(tensor, *self._shape)
        placed = None if laid is None else self._placed(name, laid.shape[1])
        if placed is None:
            return None
        self._found[number] = self._digested_rows(name, *placed, laid)
        return self._found[number]

    def _dtypes(self) -> frozenset[Any]:
        return frozenset(getattr(self._torch, name.removeprefix("torch.")) for name in (*_BITS, *_PLAIN))

    def _digested_rows(self, name: str, rows: Int64, columns: Int64, laid: Any) -> PortRows:
        """Rows of a tensor laid out as [requests, columns, ...], at these columns."""
        data, dtype = self._numpy(self._picked(rows, columns, laid))
        kept = self._kept(name, rows)
        digests = digest_rows(data.reshape(len(rows), -1), dtype)
        return PortRows(rows, digests, None if kept is None else data, dtype, kept)

    def _valued(self, name: str, rows: Int64, columns: Int64, digests: UInt64, laid: Any) -> PortRows:
        """Entries [requests, columns, size] of one head, of which the digests are known."""
        kept = self._kept(f"{name}.cache.write", rows)
        if kept is None:
            return PortRows(rows, digests)
        data, dtype = self._numpy(self._picked(rows, columns, laid))
        return PortRows(rows, digests, data, dtype, kept)

    def _picked(self, rows: Int64, columns: Int64, laid: Any) -> Any:
        return laid[
            self._torch.as_tensor(self._table.slot[rows], device=laid.device),
            self._torch.as_tensor(columns, device=laid.device),
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
        if dtype == "torch.int32":
            # Token ids are the same whatever integers they come in.
            return tensor.numpy().astype(np.int64), "I64"
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
        self._writer.forward(self._line(self._writer.plan(calls)))
        write_rows(self._writer, self.forwards, self._table, self._found, len(self._ports))


def windowed(sums: UInt64, at: Int64, window: int | None) -> UInt64:
    """Sums uint64 [n] of all terms up to the places ``at``, or of the newest ``window`` of them, from the cumulative ``sums``."""
    if not window:
        return sums[at]
    return sums[at] - np.where(at >= window, sums[np.maximum(at - window, 0)], np.uint64(0))
