"""A close look at single places: which ports part, between which two, by how much, and who was in the forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import B_DTYPE, DTYPE_CODES, Trace

from .alignment import CommonPorts, RowPairs
from .digests import Scanner
from .divergence import CacheEntry, Composition, EntryChange, Origin, SiteDifference
from .flips import Magnitude
from .forwards import KernelCall, RunLog
from .metrics import Values, measure
from .origins import ROOT, FoundOrigin
from .tokens import RequestPair


@dataclass(frozen=True)
class Runs:
    """Both traces and their forwards."""

    a: Trace
    b: Trace
    log_a: RunLog
    log_b: RunLog


class Details:
    """Reads single row pairs again."""

    def __init__(
        self,
        runs: Runs,
        scanner: Scanner,
        ports: CommonPorts,
        pairs: RowPairs,
        requests: Sequence[RequestPair],
    ) -> None:
        self._runs, self._ports, self._pairs, self._requests = runs, ports, pairs, requests
        self._scanner = scanner

    def forwards(self, row: int) -> tuple[int, int]:
        """The forwards of a row pair in each run."""
        rows_a, rows_b = self._runs.a.row_index(), self._runs.b.row_index()
        return int(rows_a.forward[self._pairs.a[row]]), int(rows_b.forward[self._pairs.b[row]])

    def compositions(self, row: int) -> tuple[Composition, Composition]:
        """Who was in the forwards of a row pair."""
        forward_a, forward_b = self.forwards(row)
        return self._runs.log_a.composition(forward_a), self._runs.log_b.composition(forward_b)

    def origin(self, found: FoundOrigin) -> Origin:
        """Everything about one origin."""
        differ = self._ports_that_differ(found.row)
        inside = self._inside(found.place)
        first = next((n for n in inside if differ[n]), None)
        place = found.place
        if place == ROOT:
            assert first is not None
            place = int(self._ports.site[first])
        site = self._ports.sites[place]
        ports = [n for n in (*site.inputs, *site.outputs) if differ[n]]
        between: tuple[str, ...] = ()
        if found.how == "composite" and first is not None:
            between = self._between(found, first, differ)
        port = first if found.how == "composite" and first is not None else ports[0]
        magnitude = self.magnitude(found.row, port)
        forward_a, forward_b = self.forwards(found.row)
        position = int(self._pairs.position[found.row])
        request = self._requests[int(self._pairs.request[found.row])]
        call_a = self._runs.log_a.call(forward_a, site.index_a, (request.a, position))
        call_b = self._runs.log_b.call(forward_b, site.index_b, (request.b, position))
        composition_a, composition_b = self.compositions(found.row)
        rows_a, second_last_a = _saw(call_a, composition_a, self._runs.a, int(self._pairs.a[found.row]))
        rows_b, second_last_b = _saw(call_b, composition_b, self._runs.b, int(self._pairs.b[found.row]))
        return Origin(
            site=site.site.name,
            kind=site.site.kind,
            layer=site.site.layer,
            position=position,
            how=found.how,
            stage=self._stage(found.row, port, magnitude),
            ports=tuple(self._ports.names[n].removeprefix(f"{site.site.name}.") for n in ports),
            between=between,
            forward_a=forward_a,
            forward_b=forward_b,
            rows_a=rows_a,
            rows_b=rows_b,
            second_last_a=second_last_a,
            second_last_b=second_last_b,
            path_a=call_a.path,
            path_b=call_b.path,
            rule_a=call_a.rule,
            rule_b=call_b.rule,
            composition_a=composition_a,
            composition_b=composition_b,
            changes=self._changes(found, site.site.layer) if site.site.kind == "cache_read" else (),
            magnitude=magnitude,
        )

    def cache_entry(self, row: int, place: int, rewritten: tuple[str, int] | None = None) -> CacheEntry:
        """The first entry of a cache or state site that differs in a row pair; of entries that a run has ``rewritten``, by
        its name and the forward after which it did, the first of all."""
        differ = self._ports_that_differ(row)
        site = self._ports.sites[place]
        known = self._scanner.pair(row).columns.pair >= 0
        port = next(n for n in site.outputs if (differ[n] if rewritten is None else known[n]))
        name = self._ports.names[port].removeprefix(f"{site.site.name}.")
        kind, _, head = name.rpartition(".")
        forward_a, forward_b = self.forwards(row)
        composition_a, composition_b = self.compositions(row)
        return CacheEntry(
            layer=site.site.layer,
            kind=kind or "state",
            head=int(head) if head.isdecimal() else 0,
            position=int(self._pairs.position[row]),
            written_a=forward_a,
            written_b=forward_b,
            composition_a=composition_a,
            composition_b=composition_b,
            magnitude=self.magnitude(row, port) if rewritten is None else None,
            rewritten_a=rewritten[1] if rewritten is not None and rewritten[0] == "a" else None,
            rewritten_b=rewritten[1] if rewritten is not None and rewritten[0] == "b" else None,
        )

    def logits(self, row: int) -> Magnitude | None:
        """How far the logits of a row pair are apart, where both traces hold them."""
        for n in range(len(self._ports.names) - 1, -1, -1):
            site = self._ports.sites[self._ports.site[n]]
            if site.site.kind in ("logits", "head") and n in site.outputs:
                found = self.magnitude(row, n, logits=True)
                if found is not None:
                    return found
        return None

    def logits_equal(self, row: int) -> bool | None:
        """Whether the logits of a row pair are bit-equal; None where not both traces have them."""
        known = self._scanner.pair(row).columns.pair >= 0
        differ = self._ports_that_differ(row)
        for kind in ("logits", "head"):
            ports = [
                n for site in self._ports.sites if site.site.kind == kind for n in site.outputs if known[n]
            ]
            if ports:
                return not differ[ports].any()
        return None

    def first_port(self, row: int) -> int:
        """The first port, in execution order, that differs in a row pair, which must have one."""
        return int(np.flatnonzero(self._ports_that_differ(row))[0])

    def site_difference(self, row: int, port: int) -> SiteDifference:
        """A port of a row pair that differs."""
        site = self._ports.sites[int(self._ports.site[port])].site
        return SiteDifference(
            site=site.name,
            kind=site.kind,
            layer=site.layer,
            position=int(self._pairs.position[row]),
            port=self._ports.names[port].removeprefix(f"{site.name}."),
            magnitude=self.magnitude(row, port),
        )

    def layers_read_alike(self, row: int) -> set[int | None]:
        """The layers whose visible cache entries are equal in a row pair, by the digests of what it read."""
        known = self._scanner.pair(row).columns.pair >= 0
        differ = self._ports_that_differ(row)
        alike: dict[int | None, bool] = {}
        for layer, n in self._carrying:
            if known[n]:
                alike[layer] = alike.get(layer, True) and not differ[n]
        return {layer for layer, same in alike.items() if same}

    @cached_property
    def _carrying(self) -> list[tuple[int | None, int]]:
        """(layer, port) of all that stands for cache entries that were read."""
        return [
            (site.site.layer, n)
            for site in self._ports.sites
            for n in (site.inputs if site.carrying else ())
            if self._ports.names[n].endswith((".kv", ".written"))
        ]

    def magnitude(self, row: int, port: int, *, logits: bool = False) -> Magnitude | None:
        """How far the two values of a port are apart; None unless both traces captured it."""
        a = _value(self._runs.a, int(self._pairs.a[row]), int(self._ports.a[port]))
        b = _value(self._runs.b, int(self._pairs.b[row]), int(self._ports.b[port]))
        return None if a is None or b is None else measure(a, b, logits=logits)

    def _ports_that_differ(self, row: int) -> NDArray[np.bool_]:
        block = self._scanner.pair(row)
        pair = block.columns.pair
        differ = np.append(block.differ[0], False)  # the place -1 of absent ports
        return differ[pair]

    def _inside(self, place: int) -> list[int]:
        """Ports in execution order of a composite's sites, its own last; all ports for ROOT."""
        if place == ROOT:
            return list(range(len(self._ports.names)))
        site = self._ports.sites[place]
        inside = [
            n for d in site.descendants for n in (*self._ports.sites[d].inputs, *self._ports.sites[d].outputs)
        ]
        return [*inside, *site.outputs]

    def _between(self, found: FoundOrigin, first: int, differ: NDArray[np.bool_]) -> tuple[str, ...]:
        """The last output before ``first`` that is equal (or the composite's own input), and ``first``."""
        known = self._scanner.pair(found.row).columns.pair >= 0
        outputs = {n for site in self._ports.sites for n in site.outputs}
        inside = self._inside(found.place)
        before = [n for n in inside[: inside.index(first)] if known[n] and not differ[n] and n in outputs]
        if not before and found.place != ROOT:
            before = [n for n in self._ports.sites[found.place].inputs if known[n]]
        return tuple(self._ports.names[n] for n in (*before[-1:], first))

    def _stage(self, row: int, port: int, magnitude: Magnitude | None) -> str:
        if magnitude is not None:
            if magnitude.dtype_a != magnitude.dtype_b:
                return "dtype"
            return "shape" if magnitude.shape_a != magnitude.shape_b else "bits"
        # A digest mixes the dtype in by a sum: equal bytes under two dtypes differ by exactly that.
        a, b = (
            int(digests[trace.tables[int(trace.row_index().table[rows[row]])][ports[port]]])
            for digests, trace, rows, ports in zip(
                self._scanner.digests(row),
                (self._runs.a, self._runs.b),
                (self._pairs.a, self._pairs.b),
                (self._ports.a, self._ports.b),
                strict=True,
            )
        )
        gap = (a - b) % (1 << 64)
        codes = DTYPE_CODES.values()
        known = {B_DTYPE * (x - y) % (1 << 64) for x in codes for y in codes if x != y}
        return "dtype" if gap in known else "bits"

    def _changes(self, found: FoundOrigin, layer: int | None) -> tuple[EntryChange, ...]:
        request = self._requests[int(self._pairs.request[found.row])]
        forward_a, forward_b = self.forwards(found.row)
        return (
            *self._runs.log_a.changes(request.a, layer, forward_a),
            *self._runs.log_b.changes(request.b, layer, forward_b),
        )


def _value(trace: Trace, row: int, port: int) -> Values | None:
    index = trace.row_index()
    table = int(index.table[row])
    column = int(trace.tables[table][port])
    if column < 0:
        return None
    shard = trace.shard(int(index.shard[row]))
    data = shard.value_at(table, column, int(index.row[row]))
    if data is None:
        return None
    return Values(data, shard.tensors[f"value/{table}/{column}"].dtype)


def _saw(call: KernelCall, composition: Composition, trace: Trace, row: int) -> tuple[int | None, int | None]:
    """Rows and second-to-last dimension of a row's call; one made per request saw that request's rows alone."""
    if call.rows is not None or call.path is None:
        return call.rows, call.second_last
    # A row that a later turn kept is one of the turn before.
    request = trace.requests[int(trace.row_index().request[row])]["id"]
    own = sum(member.rows for member in composition.members if member.request == request)
    return own, own
