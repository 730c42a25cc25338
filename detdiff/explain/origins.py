"""Every origin of two traces, the values that a re-run captured of them, and which rows an operation gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.digests import Block, Scanner
from detdiff.compare.forwards import KernelCall
from detdiff.compare.ladder import Aligned, align, scan
from detdiff.compare.metrics import Values
from detdiff.compare.origins import ROOT
from detdiff.errors import OracleRefused
from detdiff.trace import Site, Trace

from .roundings import Float64

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class OriginRow:
    """One origin: ``site`` of the request with id ``request`` at ``position``, in these forwards and calls.

    ``row_a`` and ``row_b`` are places in each trace's row index. ``how`` is as in a divergence's origin; for a difference
    arising between two sites it is ``composite`` and ``site`` the first that shows it.
    """

    site: Site
    how: str
    request: str
    position: int
    row_a: int
    row_b: int
    forward_a: int
    forward_b: int
    call_a: KernelCall
    call_b: KernelCall

    @property
    def group(self) -> tuple[str, str | None, str | None]:
        """Site kind and path pair."""
        return self.site.kind, self.call_a.path, self.call_b.path


class _Claimed:
    """Keeps what a pass says of origins: forward of run a, place in its order, row pair, site that shows it, and site or ROOT."""

    def __init__(self, aligned: Aligned) -> None:
        self._forward = aligned.runs.a.row_index().forward[aligned.pairs.a]
        self.found: list[tuple[int, int, int, int, int]] = []

    def block(self, block: Block) -> None: ...

    def claimed(self, place: int, sites: Int64, rows: Int64, at: Int64) -> None:
        forwards = self._forward[rows].tolist()
        for forward, where, row, site in zip(
            forwards, at.tolist(), rows.tolist(), sites.tolist(), strict=True
        ):
            self.found.append((forward, where, row, site, place))


def origins(a: Trace, b: Trace, *, across_engines: bool = False) -> list[OriginRow]:
    """All of them, in run A's execution order; none where the runs are those of two engines. Raises NothingComparable."""
    aligned = align(a, b, across_engines=across_engines)
    claimed = _Claimed(aligned)
    settled = scan(aligned, claimed).settled
    return [
        _origin_row(aligned, row, site, settled.get((row, place), _how(aligned, place)))
        for _, _, row, site, place in sorted(claimed.found)
    ]


def attention_rows(a: Trace, b: Trace, first: int) -> list[OriginRow]:
    """Of each attention of the target the first and the last compared row from position ``first`` on, whatever it was given."""
    aligned = align(a, b)
    pairs = aligned.pairs
    rows = np.flatnonzero((pairs.position >= first) & (pairs.stream < pairs.requests))
    return [
        _origin_row(aligned, row, place, "own")
        for place, site in enumerate(aligned.ports.sites)
        if site.site.kind == "attention" and not site.site.name.startswith(DRAFT)
        for row in dict.fromkeys(rows[[0, -1]].tolist() if len(rows) else ())
    ]


def _how(aligned: Aligned, place: int) -> str:
    return "leaf" if place != ROOT and not aligned.ports.sites[place].descendants else "composite"


def _origin_row(aligned: Aligned, row: int, place: int, how: str) -> OriginRow:
    runs, pairs, site = aligned.runs, aligned.pairs, aligned.ports.sites[place]
    request = aligned.pairing.pairs[int(pairs.request[row])]
    position = int(pairs.position[row])
    row_a, row_b = int(pairs.a[row]), int(pairs.b[row])
    forward_a = int(runs.a.row_index().forward[row_a])
    forward_b = int(runs.b.row_index().forward[row_b])
    return OriginRow(
        site.site,
        how,
        request.id,
        position,
        row_a,
        row_b,
        forward_a,
        forward_b,
        runs.log_a.call(forward_a, site.index_a, (request.a, position)),
        runs.log_b.call(forward_b, site.index_b, (request.b, position)),
    )


DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DRAFT = "draft."


class Captured:
    """The values of one trace by request, position, site and port."""

    def __init__(self, trace: Trace, watch: Any = None) -> None:
        """``watch`` is the engine's own object that saw operations as they were called."""
        self.trace, self.watch = trace, watch
        self._names = {site.name: site for site in trace.sites}
        self._numbers = {str(request["id"]): number for number, request in enumerate(trace.requests)}
        self._writes: dict[tuple[int, int, bool], list[int]] = {}
        self._before = {e["request"]: (e["from"], e["kept"]) for e in trace.events() if e["event"] == "turn"}
        index = trace.row_index()
        draft = index.phase == 2
        for row, key in enumerate(
            zip(index.request.tolist(), index.position.tolist(), draft.tolist(), strict=True)
        ):
            self._writes.setdefault(key, []).append(row)

    def number(self, request: str) -> int:
        """A request's number by its id."""
        return self._numbers[request]

    def row(
        self, request: str, position: int, *, until: int | None = None, draft: bool = False
    ) -> int | None:
        """The place of the last row of a position, of forwards up to ``until``; of one that a turn kept, that of the turn
        before."""
        number, kept = self._numbers[request], position + 1
        rows = self._writes.get((number, position, draft), [])
        while not rows and number in self._before and position < kept:
            number, kept = self._before[number]
            rows = self._writes.get((number, position, draft), []) if position < kept else []
        forwards = self.trace.row_index().forward
        return next((row for row in reversed(rows) if until is None or forwards[row] <= until), None)

    def computed_for(self, row: int) -> int:
        """The number of the request that a row was computed for: of one that a turn kept, the turn before."""
        return int(self.trace.row_index().request[row])

    def forward(self, row: int) -> int:
        """The forward of a row in this run, which may have fewer of them than the run that it repeats."""
        return int(self.trace.row_index().forward[row])

    def value(self, row: int, site: str, port: str) -> Values | None:
        """What a port held in a row of the trace; None where it was not captured."""
        try:
            number = self.trace.port_index(site, port)
        except KeyError:
            return None
        index = self.trace.row_index()
        table = int(index.table[row])
        column = int(self.trace.tables[table][number])
        if column < 0:
            return None
        shard = self.trace.shard(int(index.shard[row]))
        data = shard.value_at(table, column, int(index.row[row]))
        return None if data is None else Values(data, shard.tensors[f"value/{table}/{column}"].dtype)

    def needed(self, row: int, site: Site, port: str) -> Values:
        """The same; raises OracleRefused."""
        found = self.value(row, site.name, port)
        if found is None:
            raise OracleRefused(
                f"The value of {site.name}.{port} was not captured, or the cache holds it in a form that is not; a quantised "
                "cache is one. Judge the sites before and after it."
            )
        return found

    def entries(self, request: str, site: Site, side: str, span: range, until: int) -> Float64:
        """Cache entries (heads, positions of ``span``, width) that ``site`` wrote, as they stood at forward ``until``.

        Raises OracleRefused.
        """
        rows = self._rows_of(request, site, span, until)
        ports = [port for port in site.outputs if port.partition(".")[0] == side]
        return np.stack(
            [np.stack([self.needed(row, site, port).numbers() for row in rows]) for port in ports]
        )

    def written(self, request: str, site: Site, port: str, span: range, until: int) -> Float64:
        """What was given to a cache (positions of ``span``, heads times width), the last of each position."""
        rows = self._rows_of(request, site, span, until)
        return np.stack([self.needed(row, site, port).numbers() for row in rows])

    def _rows_of(self, request: str, site: Site, span: range, until: int) -> list[int]:
        draft = site.name.startswith(DRAFT)
        rows = [self.row(request, position, until=until, draft=draft) for position in span]
        if None in rows:
            raise OracleRefused(
                f"A position before {span.stop} of {request} has no row in this run, as its entries were taken over from "
                "elsewhere. Judge the sites before attention."
            )
        return [row for row in rows if row is not None]

    def write_site(self, layer: int | None, *, draft: bool) -> Site:
        """Where a layer's cache is written; raises OracleRefused."""
        found = [
            site
            for site in self._names.values()
            if site.kind == "cache_write" and site.layer == layer and site.name.startswith(DRAFT) == draft
        ]
        if found:
            # What an indexer keeps beside it are keys alone.
            return max(found, key=lambda site: len({port.partition(".")[0] for port in site.outputs}))
        raise OracleRefused(
            f"Layer {layer} writes no cache of its own, so what its attention read is not known. Judge the sites around it."
        )

    def output(self, site: Site, rows: Sequence[int]) -> tuple[Float64, str]:
        """What ``site`` gave in these rows (rows, width), and its dtype's name; raises OracleRefused."""
        if site.kind == "cache_write":
            values = [[self.needed(row, site, port) for port in site.outputs] for row in rows]
            kinds = sorted({dtype_of(value) for value in values[0]})
            if len(kinds) > 1:
                raise OracleRefused(
                    f"The entries of {site.name} are {' and '.join(kinds)}, and one bound is of one dtype."
                )
            joined = np.stack([np.concatenate([value.numbers() for value in each]) for each in values])
            return joined, dtype_of(values[0][0])
        found = [self.needed(row, site, site.outputs[0]) for row in rows]
        return np.stack([value.numbers() for value in found]), dtype_of(found[0])


def dtype_of(values: Values) -> str:
    """A dtype's name as the oracle has it; raises OracleRefused for others."""
    if values.dtype not in DTYPES:
        raise OracleRefused(
            f"A value of dtype {values.dtype} was captured; the oracle knows the roundings of {', '.join(DTYPES.values())}."
        )
    return DTYPES[values.dtype]


def significant(x: Float64, bits: int, *, nearest: bool = True) -> Float64:
    """``x`` with ``bits`` significant bits, rounded to nearest even or cut off."""
    fraction, exponent = np.frexp(x)
    scaled = np.ldexp(fraction, bits)
    whole: NDArray[np.float64] = np.rint(scaled) if nearest else np.trunc(scaled)
    found: Float64 = np.ldexp(whole, exponent - bits)
    return found


@dataclass(frozen=True)
class RowPlace:
    """Where a row lay in its forward. ``row`` is its batch row when padded and its column when packed; ``tokens`` the
    columns of each batch row, ``rows`` all rows M, padding included; ``chunk`` counts the request's prefill forwards."""

    row: int
    tokens: int
    rows: int
    padded: bool
    chunk: int
    phase: str


CANDIDATES: tuple[tuple[str, Callable[[RowPlace], bool]], ...] = (
    ("only rows from 1 on", lambda place: place.row >= 1),
    ("only where a forward has one token a row (T = 1)", lambda place: place.tokens == 1),
    ("only padded rows", lambda place: place.padded),
    ("only from the second prefill chunk on", lambda place: place.chunk >= 2),
)


def pattern_of(affected: Iterable[RowPlace], spared: Iterable[RowPlace]) -> str:
    """What all affected rows have in common and not all spared ones; empty where nothing tells them apart.

    Spared rows had equal inputs in both runs too, and equal outputs.
    """
    hit, free = list(affected), list(spared)
    if not hit:
        return ""
    found = [
        (words, holds)
        for words, holds in CANDIDATES
        if all(map(holds, hit)) and not all(map(holds, free)) and free
    ]
    words = [each for each, _ in found]
    low, high = min(place.rows for place in hit), max(place.rows for place in hit)
    others = [place for place in free if all(holds(place) for _, holds in found)]
    within = [place for place in others if low <= place.rows <= high]
    if len(within) < len(others) or not any(low <= place.rows <= high for place in free):
        words.append(f"only M from {low} to {high}" if high > low else f"only M = {low}")
        others = within
    if not words:
        return f"{len(hit)} of {len(hit) + len(free)} rows with equal inputs, in no pattern of rows, lengths or chunks"
    every = "every such row" if not others else f"{len(hit)} of {len(hit) + len(others)} such rows"
    return f"{', '.join(words)} ({every})"


def pattern(a: Trace, b: Trace, site: str, run: str) -> str:
    """The pattern of the rows at which ``site`` has equal inputs and other outputs, as they lay in run ``run``."""
    aligned = align(a, b)
    ports, pairs = aligned.ports, aligned.pairs
    place = next((n for n, common in enumerate(ports.sites) if common.site.name == site), None)
    if place is None:
        return ""
    common = ports.sites[place]
    hit: list[int] = []
    free: list[int] = []
    for block in Scanner(a, b, ports, pairs).blocks():
        given, made = (
            [pair for pair in block.columns.pair[list(numbers)].tolist() if pair >= 0]
            for numbers in (common.inputs, common.outputs)
        )
        if not made:
            continue
        differ = block.differ
        equal = ~differ[:, given].any(axis=1)
        other = differ[:, made].any(axis=1)
        hit += block.rows[equal & other].tolist()
        free += block.rows[equal & ~other].tolist()
    trace, rows = (a, pairs.a) if run == "a" else (b, pairs.b)
    places = _RowPlaces(trace)
    return pattern_of((places.of(int(rows[n])) for n in hit), (places.of(int(rows[n])) for n in free))


class _RowPlaces:
    def __init__(self, trace: Trace) -> None:
        self._forwards = trace.forwards()
        self._index = trace.row_index()
        self._chunks = _chunks(trace)

    def of(self, row: int) -> RowPlace:
        request, forward, position = (
            int(field[row]) for field in (self._index.request, self._index.forward, self._index.position)
        )
        line = self._forwards[forward]
        slots, length = line["shape"]
        column = 0
        for segment in line["rows"]:
            inside = 0 <= position - segment["start"] < segment["count"]
            if segment["request"] == request and inside:
                own = column + position - segment["start"] if line["layout"] == "packed" else segment["slot"]
                return RowPlace(
                    own,
                    int(length),
                    int(slots * length),
                    _padding(line, segment["slot"]),
                    self._chunks.get((request, forward), 0),
                    segment["phase"],
                )
            column += segment["count"]
        raise KeyError((request, position))


def _padding(line: dict[str, object], slot: int) -> bool:
    notes = line["caches"]
    assert isinstance(notes, list)
    return any(slot < len(note["left_padding"]) and note["left_padding"][slot] > 0 for note in notes)


def _chunks(trace: Trace) -> dict[tuple[int, int], int]:
    """Which of a request's prefill forwards each is, from 1."""
    seen: dict[int, int] = {}
    found = {}
    index = trace.row_index()
    prefill = np.flatnonzero(index.phase == 0)
    keys = dict.fromkeys(zip(index.request[prefill].tolist(), index.forward[prefill].tolist(), strict=True))
    for request, forward in keys:
        seen[request] = seen.get(request, 0) + 1
        found[request, forward] = seen[request]
    return found
