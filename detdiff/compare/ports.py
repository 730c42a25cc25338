"""What two traces have in common: sites, ports, and which columns of their digest tables to compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Site, Trace

Int64 = NDArray[np.int64]

# Inputs that stand for what earlier rows left behind: where one differs, a difference came in through the cache.
_CARRYING_INPUTS: Final = {"kv", "written"}


@dataclass(frozen=True)
class CommonSite:
    """A site that both traces list. Port numbers are indices into ``CommonPorts``.

    ``whole`` is False where the traces give the site different inputs. ``descendants`` are the sites inside it.
    ``stateful`` sites carry from row to row what is not recorded as cache entries: a recurrent state, or a cache whose class
    is not known. A difference there is inherited where an earlier row differed at one of the ``before`` sites. ``draft``
    sites are of the draft model.
    """

    site: Site
    index_a: int
    index_b: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    whole: bool
    descendants: tuple[int, ...]
    stateful: bool
    before: tuple[int, ...] = ()
    draft: bool = False

    @property
    def carrying(self) -> bool:
        """Whether the cache comes in here, at this site itself."""
        return any(name in _CARRYING_INPUTS for name in self.site.inputs)


@dataclass(frozen=True)
class CommonPorts:
    """Sites and ports of both traces, in run A's execution order.

    ``a`` and ``b`` int64 [ports] are the port's index in each trace, ``site`` int64 [ports] the place in ``sites``.
    """

    sites: tuple[CommonSite, ...]
    names: tuple[str, ...]
    a: Int64
    b: Int64
    site: Int64
    only_a: int
    only_b: int

    @classmethod
    def of(cls, a: Trace, b: Trace) -> CommonPorts:
        """Match by site and port name."""
        ports_a = {(a.sites[port.site].name, port.name): n for n, port in enumerate(a.ports)}
        ports_b = {(b.sites[port.site].name, port.name): n for n, port in enumerate(b.ports)}
        place_b = {site.name: n for n, site in enumerate(b.sites)}
        common = [site for site in a.sites if site.name in place_b]
        numbers: dict[tuple[str, str], int] = {}
        names: list[str] = []
        at: list[int] = []
        for place, site in enumerate(common):
            for name in site.inputs + site.outputs:
                if (site.name, name) in ports_b:
                    numbers[site.name, name] = len(numbers)
                    names.append(f"{site.name}.{name}")
                    at.append(place)
        inside = _descendants(common)
        drafts = all(isinstance(trace.header.get("draft"), dict) for trace in (a, b))
        stateful = {site.parent for site in common if site.kind == "state"}
        names_of = {site.name: place for place, site in enumerate(common)}
        sites = []
        index_a = {site.name: n for n, site in enumerate(a.sites)}
        for place, site in enumerate(common):
            other = b.sites[place_b[site.name]]
            # Attention without ``kv`` reads what earlier rows left in a cache that nobody recorded.
            blind = site.kind == "attention" and "kv" not in (*site.inputs, *other.inputs)
            around = names_of.get(site.parent or "") if blind else None
            sites.append(
                CommonSite(
                    site=site,
                    index_a=index_a[site.name],
                    index_b=place_b[site.name],
                    inputs=tuple(numbers[site.name, n] for n in site.inputs if (site.name, n) in numbers),
                    outputs=tuple(numbers[site.name, n] for n in site.outputs if (site.name, n) in numbers),
                    whole=set(site.inputs) == set(other.inputs),
                    descendants=tuple(inside[place]),
                    stateful=site.kind in ("recurrent", "stateful") or site.name in stateful or blind,
                    before=(place, *inside[place]) if around is None else tuple(inside[around]),
                    draft=drafts and site.name.startswith("draft."),
                )
            )
        return cls(
            sites=tuple(sites),
            names=tuple(names),
            a=np.array([ports_a[key] for key in numbers], dtype=np.int64),
            b=np.array([ports_b[key] for key in numbers], dtype=np.int64),
            site=np.array(at, dtype=np.int64),
            only_a=len(ports_a) - len(numbers),
            only_b=len(ports_b) - len(numbers),
        )

    def columns(self, table_a: NDArray[np.int32], table_b: NDArray[np.int32]) -> Columns:
        """Which columns of two tables to compare, each pair of columns once."""
        at_a, at_b = table_a[self.a].astype(np.int64), table_b[self.b].astype(np.int64)
        both = (at_a >= 0) & (at_b >= 0)
        width = int(at_b.max(initial=0)) + 1
        pairs, inverse = np.unique(at_a[both] * width + at_b[both], return_inverse=True)
        pair = np.full(len(at_a), -1, dtype=np.int64)
        pair[both] = inverse
        return Columns(pairs // width, pairs % width, pair, int(np.count_nonzero((at_a >= 0) != (at_b >= 0))))


@dataclass(frozen=True)
class Columns:
    """Column pairs of two tables: ``a``, ``b`` int64 [pairs]; ``pair`` int64 [ports], -1 where not in both.

    ``one_sided`` counts the ports that only one of the tables has.
    """

    a: Int64
    b: Int64
    pair: Int64
    one_sided: int

    @property
    def words(self) -> int:
        """How many uint64 hold a bit for each pair."""
        return max(1, -(-len(self.a) // 64))

    def rows_in(self, size: int) -> int:
        """How many rows of digests of one run take ``size`` bytes, at least 1."""
        return max(1, size // (8 * max(1, len(self.a))))

    def differ(self, left: NDArray[np.uint64], right: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Compare digests uint64 [rows, columns] of each run row by row; uint64 [rows, words] with a bit set for
        each pair that differs, the lowest first."""
        a = left if _whole(self.a, left.shape[1]) else left[:, self.a]
        b = right if _whole(self.b, right.shape[1]) else right[:, self.b]
        packed = np.packbits(a != b, axis=1, bitorder="little")
        bits = np.zeros((len(packed), self.words), dtype=np.uint64)
        bits.view(np.uint8)[:, : packed.shape[1]] = packed
        return bits


def _whole(columns: Int64, width: int) -> bool:
    return len(columns) == width and bool(np.array_equal(columns, np.arange(width)))


def _descendants(sites: list[Site]) -> list[list[int]]:
    place = {site.name: n for n, site in enumerate(sites)}
    inside: list[list[int]] = [[] for _ in sites]
    for n, site in enumerate(sites):
        parent, seen = site.parent, {site.name}
        while parent in place and parent not in seen:
            inside[place[parent]].append(n)
            seen.add(parent)
            parent = sites[place[parent]].parent
    return inside
