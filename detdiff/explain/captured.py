"""Values that a re-run captured, by request, position, site and port."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.metrics import Values
from detdiff.errors import OracleRefused
from detdiff.trace import Site, Trace

from .roundoff import Float64

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DRAFT = "draft."


class Captured:
    """The values of one trace by request, position, site and port."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._names = {site.name: site for site in trace.sites}
        self._numbers = {str(request["id"]): number for number, request in enumerate(trace.requests)}
        self._writes: dict[tuple[int, int, bool], list[int]] = {}
        index = trace.row_index()
        draft = index.phase == 2
        for row, key in enumerate(
            zip(index.request.tolist(), index.position.tolist(), draft.tolist(), strict=True)
        ):
            self._writes.setdefault(key, []).append(row)

    def row(
        self, request: str, position: int, *, until: int | None = None, draft: bool = False
    ) -> int | None:
        """The place of the last row of a position, of forwards up to ``until``."""
        rows = self._writes.get((self._numbers[request], position, draft), [])
        forwards = self.trace.row_index().forward
        return next((row for row in reversed(rows) if until is None or forwards[row] <= until), None)

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
        for site in self._names.values():
            if site.kind == "cache_write" and site.layer == layer and site.name.startswith(DRAFT) == draft:
                return site
        raise OracleRefused(
            f"Layer {layer} writes no cache of its own, so what its attention read is not known. Judge the sites around it."
        )

    def output(self, site: Site, rows: Sequence[int]) -> tuple[Float64, str]:
        """What ``site`` gave in these rows (rows, width), and its dtype's name; raises OracleRefused."""
        if site.kind == "cache_write":
            values = [[self.needed(row, site, port) for port in site.outputs] for row in rows]
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
