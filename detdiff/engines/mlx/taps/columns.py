"""Columns of a forward: one distinct value of its rows each, and the values that a capture keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import ScenarioError
from detdiff.scenario import Capture
from detdiff.trace.digest import STORAGE

from .forward import RowTable
from .sites import SiteMap

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Kept:
    """Captured values [m, width] in storage form of the rows ``rows`` [m] of the forward's row table."""

    rows: Int64
    data: NDArray[Any]
    dtype: str


@dataclass(frozen=True)
class Column:
    """One distinct value of a row: its digests uint64 [m] for the rows ``present`` [m] of the row table.

    ``ports`` are the ports that hold this value; ``kept`` the captured values, copied out of MLX's memory.
    """

    ports: list[int]
    present: Int64
    digests: UInt64
    kept: Kept | None = None


@dataclass(frozen=True)
class Source:
    """Where values lie: an array as unsigned integers [slots, rows, ...], and each row's slot and column."""

    view: NDArray[Any]
    dtype: str
    slots: Int64
    columns: Int64

    def take(self, present: Int64, keep: NDArray[np.bool_]) -> Kept | None:
        """Copies of the values of the rows ``present`` that ``keep`` (over the row table) wants."""
        wanted = np.flatnonzero(keep[present])
        if not len(wanted):
            return None
        data = self.view[self.slots[wanted], self.columns[wanted]].reshape(len(wanted), -1)
        return Kept(present[wanted], np.ascontiguousarray(data).view(STORAGE[self.dtype]), self.dtype)


@dataclass(frozen=True)
class Selection:
    """Which values a capture keeps: ports, and positions per request index (None: all of that request's)."""

    ports: frozenset[int]
    positions: Mapping[int, Collection[int] | None]

    @classmethod
    def of(
        cls, capture: Capture, sites: SiteMap, request_ids: Sequence[str], beside: Sequence[SiteMap] = ()
    ) -> Selection | None:
        """None for the digest level, everything for ``full``, what the window names for ``window``; ``beside`` as in
        ``at``."""
        if capture.level == "digest":
            return None
        window = capture.level == "window"
        wanted = capture.sites if window and capture.sites else ("*",)
        names = capture.requests if window and capture.requests else request_ids
        span = capture.positions if window else None
        positions = None if span is None else range(span[0], span[1] + 1)
        return cls.at({name: positions for name in names}, sites, request_ids, wanted, beside)

    @classmethod
    def at(
        cls,
        positions: Mapping[str, Collection[int] | None],
        sites: SiteMap,
        request_ids: Sequence[str],
        patterns: Sequence[str] = ("*",),
        beside: Sequence[SiteMap] = (),
    ) -> Selection:
        """Values at ``positions`` by request id, at sites that match one of the fnmatch ``patterns``.

        Raises ScenarioError for a pattern that matches no site of the model or of those ``beside`` it: nothing captured
        is not what was asked for.
        """
        own = [site.name for site in sites.sites]
        names = [*own, *(site.name for other in beside for site in other.sites)]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = (
                    ", ".join(get_close_matches(pattern, names, 3))
                    or f"one of {len(names)}, such as {names[-1]}"
                )
                raise ScenarioError(
                    f"The window site {pattern!r} matches none of this model's {len(names)} sites; expected a site's "
                    f"name or a pattern of it ({near}). `detdiff show TRACE --sites` lists them."
                )
        ports = frozenset(
            port
            for (key, _), port in sites.ports.items()
            if any(fnmatchcase(own[sites.index[key]], pattern) for pattern in patterns)
        )
        return cls(ports, {request_ids.index(name): where for name, where in positions.items()})

    def rows(self, table: RowTable) -> NDArray[np.bool_]:
        """The rows of a forward whose values are kept, bool [n]."""
        keep = np.zeros(len(table.request), bool)
        for request, where in self.positions.items():
            mine = table.request == request
            keep |= mine if where is None else mine & np.isin(table.position, list(where))
        return keep
