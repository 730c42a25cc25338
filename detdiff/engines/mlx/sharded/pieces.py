"""What each process computed in captured rows, piece by piece: its operation with the whole model's weights, and what it gave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.mlx.oracle_operations import operation_of
from detdiff.errors import OracleRefused
from detdiff.explain.bounds import Linear, Switch
from detdiff.explain.controls.ranks import Piece
from detdiff.explain.oracle import Operation
from detdiff.explain.origins import Captured, dtype_of
from detdiff.explain.reduced_bounds import AllReduce, SharedLinear, columns_of
from detdiff.scenario import Scenario
from detdiff.trace import Site
from detdiff_kernels import UnsupportedFormat

from .shares import SUM, SiteShares

if TYPE_CHECKING:
    from detdiff.engines.mlx.engine import MlxEngine

SUMMED: Final = ".all_sum"
_JUDGED: Final = ("linear", "head", "switch", "embedding", "norm", "rope", "cache_write", "attention")
_ATTENTION_ROWS: Final = 8


@dataclass(frozen=True, eq=False)
class Pieces:
    """The operations of a model over several processes, with the weights of ``whole``."""

    whole: MlxEngine
    shares: Sequence[SiteShares]

    def operation(
        self, site: Site, captured: Captured, request: str, rows: Sequence[int], scenario: Scenario
    ) -> Operation:
        """What ``site`` of a joined trace should give in these rows. Raises OracleRefused."""
        if site.kind == "all_reduce":
            return AllReduce(np.stack([self._stack(captured, site, port, rows) for port in site.inputs]))
        if "@" in site.name:
            return self._own(site, captured, rows)
        if site.kind == "attention" and captured.watch is None:
            return self._attention(site, captured, request, rows)
        found = self.whole.operation(site, captured, request, rows, scenario)
        if isinstance(found, Linear) and any(
            each.name == site.name + SUMMED for each in captured.trace.sites
        ):
            return SharedLinear(found, len(self.shares))
        return found

    def of(
        self, captured: Captured, places: Sequence[tuple[str, int, int]], scenario: Scenario
    ) -> Iterator[Piece | tuple[str, str]]:
        """All of them in execution order, in rows that ``places`` has as (request, position, row); a site and the reason where one
        cannot be judged."""
        everything, sites = places, {site.name: site for site in captured.trace.sites}
        for site in captured.trace.sites:
            if site.kind not in (*_JUDGED, "all_reduce"):
                continue
            # The head runs in rows whose logits are used.
            port = site.outputs[0]
            places = [each for each in everything if captured.value(each[2], site.name, port) is not None]
            rows = [row for _, _, row in places]
            if not places:
                yield site.name, "none of its values was captured"
                continue
            try:
                if site.kind == "all_reduce":
                    yield from self._parts(sites.get(site.name.removesuffix(SUMMED)), site, captured, places)
                if site.kind == "attention":
                    some = np.unique(np.linspace(0, len(places) - 1, _ATTENTION_ROWS).astype(int)).tolist()
                    for place in (places[n] for n in some):
                        operation = self.operation(site, captured, place[0], [place[2]], scenario)
                        yield self._piece(site, captured, operation, [place])
                    continue
                operation = self.operation(site, captured, places[0][0], rows, scenario)
                yield self._piece(site, captured, operation, places)
            except (OracleRefused, UnsupportedFormat) as error:
                yield site.name, str(error).partition(". ")[0]

    def _piece(
        self,
        site: Site,
        captured: Captured,
        operation: Operation,
        places: Sequence[tuple[str, int, int]],
    ) -> Piece:
        output, dtype = captured.output(site, [row for *_, row in places])
        name, _, rank = site.name.partition("@")
        owners = np.full(output.shape[1], int(rank)) if rank else self._owners(site, output.shape[1])
        return Piece(name, owners, operation, output, dtype, places)

    def _parts(
        self,
        site: Site | None,
        reduced: Site,
        captured: Captured,
        places: Sequence[tuple[str, int, int]],
    ) -> Iterator[Piece]:
        """What each process put into the all-reduce of a linear layer, before it."""
        if site is None or site.kind not in ("linear", "head"):
            return
        rows = [row for *_, row in places]
        x = self._stack(captured, site, site.inputs[0], rows)
        whole = operation_of(self.whole.loaded.model, site.name, {"in": x})
        assert isinstance(whole, Linear)
        for rank, port in enumerate(reduced.inputs):
            part = self._columns(site.name, rank)
            narrow = Linear(np.ascontiguousarray(x[:, part]), whole.weight, None, whole.quantised)
            values = [captured.needed(row, reduced, port) for row in rows]
            output = np.stack([value.numbers() for value in values])
            owners = np.full(output.shape[1], rank)
            yield Piece(site.name, owners, columns_of(narrow, part), output, dtype_of(values[0]), places)

    def _own(self, site: Site, captured: Captured, rows: Sequence[int]) -> Operation:
        """What one process makes of its own run of columns, before an all-reduce between layers."""
        name, _, rank = site.name.partition("@")
        part = self._columns(name, int(rank))
        x = self._stack(captured, site, site.inputs[0], rows)
        width = part.stop - part.start
        given: dict[str, Any] = {"in": x.reshape(len(rows), -1, width) if site.kind == "switch" else x}
        if site.kind == "switch":
            given["experts"] = self._stack(captured, site, "experts", rows)
        found = operation_of(self.whole.loaded.model, name, given)
        if not isinstance(found, Linear | Switch):
            raise OracleRefused(
                f"The site {site.name} is no product, so that a process's part of it is not known."
            )
        return columns_of(found, part)

    def _columns(self, name: str, rank: int) -> slice:
        """Which of its inputs' items a process has."""
        share = self.shares[rank]
        port = self._first_port(share, name)
        part = share.ports[port].part
        if part is None or part.axis != len(part.shape) - 1:
            raise OracleRefused(f"What process {rank} is given at {name} is no run of columns.")
        return slice(part.start, part.start + part.count)

    @staticmethod
    def _first_port(share: SiteShares, name: str) -> int:
        port = 0
        for site in share.sites:
            if site.name == name:
                return port
            port += len(site.inputs) + len(site.outputs)
        raise OracleRefused(f"The site {name} is none of a process's.")

    def _owners(self, site: Site, width: int) -> NDArray[np.int64] | None:
        """The process that each item of a row comes from; None where all have it."""
        size = len(self.shares)
        first = self._first_port(self.shares[0], site.name)
        own = next(each for each in self.shares[0].sites if each.name == site.name)
        if site.kind == "cache_write":
            if len(own.outputs) == len(site.outputs):
                return None
            sides = [sum(name[0] == side for name in site.outputs) for side in "KV"]
            ranks = np.concatenate([np.arange(count) * size // count for count in sides if count])
            return np.repeat(ranks, width // len(ranks)) if width % len(ranks) == 0 else None
        port = first + len(own.inputs)
        if self.shares[0].ports[port].how != SUM:
            return None
        parts = [share.ports[port].part for share in self.shares]
        if parts[0] is None or int(np.prod(parts[0].shape)) != width:
            return None
        owners = np.zeros(parts[0].shape, np.int64)
        for rank, part in enumerate(parts):
            if part is not None:
                owners[part.places] = rank
        return owners.reshape(-1)

    def _attention(self, site: Site, captured: Captured, request: str, rows: Sequence[int]) -> Operation:
        """Of one row: its query over all its own entries, where the caches keep all and every row sees what came before it."""
        index = captured.trace.row_index()
        (row,) = rows
        position, forward = int(index.position[row]), int(index.forward[row])
        notes = captured.trace.forwards()[forward]["caches"]
        plain = ("KVCache", "BatchKVCache")
        if any(note.get("kind", "KVCache") not in plain or note.get("sees") for note in notes):
            raise OracleRefused(
                "Attention is judged where every row sees all that came before it, and here some do not."
            )
        written = captured.write_site(site.layer, draft=False)
        keys, values = (
            captured.entries(request, written, side, range(position + 1), forward) for side in "KV"
        )
        width = keys.shape[-1]
        query = self._stack(captured, site, site.inputs[0], rows).reshape(1, -1, width)
        given = {"in": query, "k": keys, "v": values, "mask": None}
        return operation_of(self.whole.loaded.model, site.name, given)

    @staticmethod
    def _stack(captured: Captured, site: Site, port: str, rows: Sequence[int]) -> NDArray[np.float64]:
        return np.stack([captured.needed(row, site, port).numbers() for row in rows])
