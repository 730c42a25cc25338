"""A forward like the one before it, one row later of each request: digested by what was learnt from that one.

Decoding is made of such forwards, and most of what digesting costs is finding out anew what is the same each time: which ports hold
one array, how a row lies in it, which columns of keys a row sees. Here all of that is compared with what it was, in a few compiled
loops, and of a cache whose older columns need no reading (``unread``) only the new entry is added to the sums. Whatever is not as it
was sends the forward the general way (``digesting``), whose answer is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Rows

from .addresses import ADDRESS, NDIM, layouts
from .appended import Appended
from .digests import Jobs, layout_job
from .forward import DTYPE_NAMES, ForwardRecord, memory
from .ledgers import CacheCallRows, Ledgers

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]
Event = dict[str, Any]
Places = Callable[[int], tuple[str, Int64, Int64, Int64]]
"""Of a port: what kind of rows it has, which rows of the forward these are, and the slot and column of each."""


def likeness(record: ForwardRecord) -> tuple[Any, ...] | None:
    """What forwards have in common that may be alike; None where a request has several rows, or digests are there already."""
    forward = record.forward
    if record.finished or record.device or any(s.count != 1 for s in forward.segments):
        return None
    if forward.layout != "packed" and forward.shape[1] != 1:
        return None
    rows = tuple((s.request, s.slot, s.column, s.phase) for s in forward.segments)
    return forward.layout, forward.shape, forward.selected, forward.logits_used, rows


class _ArrayGroup(NamedTuple):
    """Arrays whose rows lie in the same slots and places: their columns of digests, one port of each, and how it is walked."""

    columns: Int64
    ports: Int64
    jobs: Jobs
    slots: Int64
    places: Int64


class _SharedArrays(NamedTuple):
    """The arrays of a forward: its ports, how each lies, and which of them hold one array.

    ``stands`` has for every port the one that stands for it, by their numbers in ``ports``; ``chosen`` are those that stand for some, and
    ``walks`` says of each of these, in its highest bits, how it is walked.
    """

    ports: list[int]
    layouts: Int64
    groups: list[_ArrayGroup]
    stands: Int64
    chosen: Int64
    walks: Int64

    @classmethod
    def of(cls, record: ForwardRecord, rows: Rows, places_of: Places) -> _SharedArrays | None:
        found = layouts(list(record.arrays.values()))
        stands: dict[int, int] = {}
        groups: dict[str, tuple[list[int], list[tuple[int, ...]], list[str], Int64, Int64]] = {}
        walks: dict[tuple[Any, ...], int] = {}
        numbers: list[int] = []
        for number, (port, array) in enumerate(record.arrays.items()):
            column = rows.table[port]
            if column in stands:
                continue
            stands[column] = number
            kind, present, slots, places = places_of(port)
            job = layout_job(memory(array), record.axis(port))
            whole = np.array_equal(present, np.arange(len(rows.request)))
            if job is None or not whole or array.size == 0 or found[number, NDIM] < 0:
                return None
            mine, jobs, dtypes, _, _ = groups.setdefault(kind, ([], [], [], slots, places))
            mine.append(column)
            jobs.append(job)
            dtypes.append(DTYPE_NAMES[array.dtype])
            numbers.append(walks.setdefault((kind, dtypes[-1], job[1:]), len(walks)))
        made = [
            _ArrayGroup(
                np.array(mine), np.array([stands[c] for c in mine]), Jobs.of(jobs, dtypes), slots, places
            )
            for mine, jobs, dtypes, slots, places in groups.values()
        ]
        chosen = np.array(list(stands.values()), np.int64)
        shared = np.array([stands[rows.table[port]] for port in record.arrays], np.int64)
        # Addresses have 48 bits at most.
        arrays = cls(list(record.arrays), found, made, shared, chosen, np.array(numbers, np.int64) << 48)
        return arrays if arrays.alike(found) else None

    def alike(self, found: Int64) -> bool:
        """Whether arrays lie as they did, and ports share them as they did, no fewer and no more."""
        addresses = found[:, ADDRESS]
        if not np.array_equal(found[:, 1:], self.layouts[:, 1:]):
            return False
        if not np.array_equal(addresses, addresses[self.stands]):
            return False
        apart = np.sort(addresses[self.chosen] ^ self.walks)
        return not (apart[1:] == apart[:-1]).any()

    def digest(self, addresses: Int64, out: UInt64) -> None:
        for group in self.groups:
            group.jobs.table[:, 0] = addresses[group.ports]
            out[:, group.columns] = group.jobs.digest(group.slots, group.places)


class Repeated:
    """What was learnt from one forward; digests those that are like it, one after the other."""

    def __init__(self, key: tuple[Any, ...], rows: Rows, arrays: _SharedArrays, caches: Appended) -> None:
        self.key = key
        self._rows, self._arrays, self._caches = rows, arrays, caches
        self.forwards = 0

    @classmethod
    def learnt(
        cls,
        key: tuple[Any, ...],
        record: ForwardRecord,
        rows: Sequence[Rows],
        folded: Sequence[CacheCallRows],
        places: Places,
        ledgers: Ledgers,
    ) -> Repeated | None:
        """From a forward that was digested the general way, its rows and its cache calls; None where no other can be told to be like
        it."""
        if (
            len(rows) != 1
            or rows[0].values
            or rows[0].slot.tolist() != [*range(len(record.forward.segments))]
        ):
            return None
        arrays = _SharedArrays.of(record, rows[0], places)
        if arrays is None:
            return None
        return cls(key, rows[0], arrays, Appended(record, rows[0], folded, ledgers))

    @property
    def folded(self) -> dict[int, CacheCallRows]:
        """What was read in full of a forward that was then found not to be alike, by the number of the cache call."""
        return self._caches.folded

    def settle(self) -> None:
        """Tell the ledgers what was added."""
        self._caches.settle()

    def digest(self, record: ForwardRecord) -> tuple[list[Rows], list[Event]] | None:
        """As ``Digester.digest``; None where the forward is not alike."""
        forward, before, n = record.forward, self._rows, len(self._arrays.ports)
        if list(record.arrays) != self._arrays.ports or not self._caches.alike(record):
            return None
        found = layouts([*record.arrays.values(), *self._caches.parts(record)])
        if not self._arrays.alike(found[:n]):
            return None
        out = np.empty(before.digests.shape, np.uint64)
        self._arrays.digest(found[:, ADDRESS], out)
        events = self._caches.digest(record, found, out)
        if events is None:
            return None
        self.forwards += 1
        tokens = np.asarray(forward.tokens)
        slots, columns = zip(*((segment.slot, segment.column) for segment in forward.segments), strict=True)
        rows = Rows(
            before.request,
            np.array([segment.start for segment in forward.segments], np.int32),
            np.full(len(before.request), forward.index, np.int32),
            before.slot,
            before.phase,
            tokens[slots, columns].astype(np.int32),
            before.table,
            out,
        )
        return [rows], events
