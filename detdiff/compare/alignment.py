"""What belongs together in two traces: rows by model, request and position, sites and ports by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import NothingComparable
from detdiff.trace import PHASES, Site, Trace
from detdiff.trace.contents import grouped

from .divergence import Finding
from .events import reused
from .tokens import RequestPair

Int64 = NDArray[np.int64]

_LISTED = 8


@dataclass(frozen=True, eq=False)
class RowPairs:
    """Rows to compare, in run A's execution order: int64 [n] each.

    ``request`` is the place among the compared requests; ``stream`` is that for rows of the target, and more by the
    number of ``requests`` for rows of the draft; ``streams`` is how many there are. ``a`` and ``b`` index each trace's
    ``rows``.
    ``lacking`` int64 [requests] counts rows that fed or chose a common token and that only one run has; of these,
    ``reused_a`` and ``reused_b`` int64 [requests] are not: the first rows of a prompt, which that run did not compute.
    """

    request: Int64
    stream: Int64
    requests: int
    streams: int
    position: Int64
    a: Int64
    b: Int64
    only_a: int
    only_b: int
    superseded_a: int
    superseded_b: int
    after_flip_a: int
    after_flip_b: int
    token_differs: int
    lacking: Int64
    reused_a: Int64
    reused_b: Int64
    findings: tuple[Finding, ...]

    def __len__(self) -> int:
        return len(self.a)

    def of(self, stream: int) -> Int64:
        """The row pairs of a stream, ascending; looked up, since a look at all rows for each request takes the square of time."""
        order, starts = self._by_stream
        if stream >= self.streams:
            return np.empty(0, dtype=np.int64)
        found: Int64 = order[starts[stream] : starts[stream + 1]].astype(np.int64)
        return found

    @cached_property
    def _by_stream(self) -> tuple[NDArray[np.int32], Int64]:
        order = grouped(self.stream).astype(np.int32)
        return order, np.searchsorted(self.stream[order], np.arange(self.streams + 1))


def pair_rows(a: Trace, b: Trace, requests: tuple[RequestPair, ...], *, may_lack: bool = False) -> RowPairs:
    """Align by (model, request, position). Raises NothingComparable where no row is left, unless runs ``may_lack`` rows."""
    limits = _LastPositions.of(requests)
    drafts = same_drafts(a, b)
    side_a = _surviving(a, [pair.a for pair in requests], limits, drafts)
    side_b = _surviving(b, [pair.b for pair in requests], limits, drafts)
    side_a, side_b = side_a.without_kept_twice(side_b), side_b.without_kept_twice(side_a)
    # Keys ascend on both sides, so looking one up in the other is cheaper than sorting both together.
    alike = np.array_equal(side_a.key, side_b.key)
    found = np.arange(len(side_a.key)) if alike else np.searchsorted(side_b.key, side_a.key)
    common = np.append(side_b.key, -1)[found] == side_a.key
    at_a, at_b = np.flatnonzero(common), found[common]
    rows_a, rows_b = side_a.row[at_a], side_b.row[at_b]
    same = a.row_index().token[rows_a] == b.row_index().token[rows_b]
    findings = _token_findings(a, b, requests, rows_a[~same], rows_b[~same])
    stream = (side_a.key[at_a] >> 32)[same]
    position = (side_a.key[at_a] & 0xFFFFFFFF)[same]
    rows_a, rows_b = rows_a[same], rows_b[same]
    if not len(rows_a) and not may_lack:
        raise NothingComparable(_no_row(a, b, len(same)))
    only_a, only_b = side_a.key[~common], np.delete(side_b.key, at_b)
    reused_b, only_a = _reused(only_a, side_a.key[at_a], requests)
    reused_a, only_b = _reused(only_b, side_a.key[at_a], requests)
    order = in_order(rows_a, len(a.row_index().request))
    return RowPairs(
        request=(stream % len(requests))[order],
        stream=stream[order],
        requests=len(requests),
        streams=2 * len(requests) if len(stream) and int(stream.max()) >= len(requests) else len(requests),
        position=position[order],
        a=rows_a[order],
        b=rows_b[order],
        only_a=len(side_a.key) - len(at_a) - int(reused_b.sum()),
        only_b=len(side_b.key) - len(at_b) - int(reused_a.sum()),
        superseded_a=side_a.superseded,
        superseded_b=side_b.superseded,
        after_flip_a=side_a.after,
        after_flip_b=side_b.after,
        token_differs=int(np.count_nonzero(~same)),
        lacking=_lacking(
            requests,
            _not_reused(only_a, b, [pair.b for pair in requests]),
            _not_reused(only_b, a, [pair.a for pair in requests]),
        )
        if len(rows_a) or not may_lack
        else np.zeros(len(requests), dtype=np.int64),
        reused_a=reused_a,
        reused_b=reused_b,
        findings=findings,
    )


@dataclass(frozen=True, eq=False)
class _SideRows:
    """One trace's surviving rows up to each flip: ``key`` = stream << 32 | position, ascending.

    ``kept`` bool [n] are rows of an earlier turn, at the positions where a later one went on over them.
    """

    key: Int64
    row: Int64
    kept: NDArray[np.bool_]
    superseded: int
    after: int

    def without_kept_twice(self, other: _SideRows) -> _SideRows:
        """Without the rows that a turn kept and the other run has no row of its own for: those of the turn before are compared."""
        if not self.kept.any():
            return self
        own = np.isin(self.key, other.key[~other.kept])
        stay = ~self.kept | own
        return _SideRows(self.key[stay], self.row[stay], self.kept[stay], self.superseded, self.after)


@dataclass(frozen=True, eq=False)
class _LastPositions:
    """The last position to compare of each request, int64 [requests]: of ``all`` rows, and of those that ``speculate``.

    A rejected proposal is written over by the token that took its place, but not where a request ends.
    """

    all: Int64
    speculate: Int64

    @classmethod
    def of(cls, requests: tuple[RequestPair, ...]) -> _LastPositions:
        limits = np.array([pair.limit for pair in requests], dtype=np.int64)
        return cls(limits, np.minimum(limits, _last_needed(requests)))


def same_drafts(a: Trace, b: Trace) -> bool:
    """Whether the rows of draft models can be compared: both runs have one, and nothing says that it is another."""
    of_a, of_b = a.header.get("draft"), b.header.get("draft")
    if not (isinstance(of_a, dict) and isinstance(of_b, dict)):
        return False
    return all(
        None in (found := (of_a.get(key), of_b.get(key))) or found[0] == found[1]
        for key in ("config_sha256", "weights_sha256")
    )


def _kept(trace: Trace, numbers: list[int], drafts: bool) -> tuple[Int64, Int64]:
    """(keys, rows) of the rows that later turns kept of earlier ones, under the later turn; the target's, and those of ``drafts``."""
    rows = trace.row_index()
    drafted = rows.phase == PHASES.index("draft")
    found = [_kept_rows(trace, numbers, np.flatnonzero(~drafted), 0)]
    if drafts:
        found.append(_kept_rows(trace, numbers, np.flatnonzero(drafted), len(numbers)))
    keys, kept = (np.concatenate(each) for each in zip(*found, strict=True))
    return keys, kept


def _kept_rows(trace: Trace, numbers: list[int], of: Int64, first: int) -> tuple[Int64, Int64]:
    """The same of one model, whose rows are ``of`` and whose streams begin at ``first``."""
    rows = trace.row_index()
    requests, positions = rows.request[of], rows.position[of]
    tables: dict[int, dict[int, int]] = {}
    keys: list[int] = []
    found: list[int] = []
    for event in trace.events():
        if event["event"] != "turn" or not event["kept"]:
            continue
        number, before = event["request"], event["from"]
        mine = np.flatnonzero(requests == before)
        # The last write of each position.
        table = tables.get(before, {}) | dict(zip(positions[mine].tolist(), of[mine].tolist(), strict=True))
        tables[number] = {at: row for at, row in table.items() if at < event["kept"]}
        if number in numbers:
            stream = first + numbers.index(number)
            keys += [stream << 32 | at for at in tables[number]]
            found += tables[number].values()
    return np.array(keys, dtype=np.int64), np.array(found, dtype=np.int64)


def _surviving(trace: Trace, numbers: list[int], limits: _LastPositions, drafts: bool) -> _SideRows:
    rows = trace.row_index()
    place = np.full(max(int(rows.request.max(initial=0)), *numbers) + 1, -1, dtype=np.int64)
    place[numbers] = np.arange(len(numbers))
    of_row = place[rows.request]
    drafted = rows.phase == PHASES.index("draft")
    of_row = np.where(drafted & (of_row >= 0), of_row + len(numbers) if drafts else -1, of_row)
    mine = np.flatnonzero(of_row >= 0)
    unique, row = _last_of_each(of_row[mine], rows.position[mine].astype(np.int64), mine)
    request, position = (unique >> 32) % len(numbers), unique & 0xFFFFFFFF
    speculative = drafted[row] | (rows.phase[row] == PHASES.index("verify"))
    rejected = speculative & (position > limits.speculate[request]) & (position <= limits.all[request])
    after = position > limits.all[request]
    inside = ~(rejected | after)
    superseded = len(mine) - len(unique) + int(np.count_nonzero(rejected))
    found = _SideRows(
        unique[inside],
        row[inside],
        np.zeros(len(row[inside]), bool),
        superseded,
        int(np.count_nonzero(after)),
    )
    keys, kept = _kept(trace, numbers, drafts)
    if not len(keys):
        return found
    new = ~np.isin(keys, found.key)
    if not new.any():
        return found
    key, row = np.concatenate([found.key, keys[new]]), np.concatenate([found.row, kept[new]])
    order = np.argsort(key, kind="stable")
    return _SideRows(key[order], row[order], order >= len(found.key), found.superseded, found.after)


def in_order(rows: Int64, total: int) -> Int64:
    """The places of ``rows``, of ``total`` there are, in ascending order of them; of the same row those that come first."""
    place = np.full(total, -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    order = place[place >= 0]
    # Writing places down takes an eighth of the time of sorting, but a row that is there twice is lost.
    return order if len(order) == len(rows) else np.argsort(rows, kind="stable")


def _last_of_each(stream: Int64, position: Int64, rows: Int64) -> tuple[Int64, Int64]:
    """(keys, rows): of rows of one stream and position the last in execution order survives; keys ascend."""
    width = int(position.max(initial=0)) + 1
    places = (int(stream.max(initial=0)) + 1) * width
    if places > 4 * len(rows):
        # Search the reversed array.
        unique, last = np.unique(((stream << 32) | position)[::-1], return_index=True)
        return unique, rows[len(rows) - 1 - last]
    # Where nearly every place is taken, writing them down one over the other takes a tenth of the time of sorting.
    table = np.full(places, -1, dtype=np.int64)
    table[stream * width + position] = rows
    taken = np.flatnonzero(table >= 0)
    return (taken // width << 32) | taken % width, table[taken]


def _reused(only: Int64, common: Int64, requests: tuple[RequestPair, ...]) -> tuple[Int64, Int64]:
    """(rows per request, the other keys): of rows that one run alone has those before the first that both have.

    They are rows of a prompt: the other run took them from a cache, as an engine does that is asked again.
    """
    counts = np.zeros(len(requests), dtype=np.int64)
    if not len(only) or not len(common):
        return counts, only
    firsts = np.full(2 * len(requests), -1, dtype=np.int64)
    streams, at = np.unique(common >> 32, return_index=True)
    firsts[streams] = common[at] & 0xFFFFFFFF
    prompts = np.array([request.prompt for request in requests], dtype=np.int64)
    stream, position = only >> 32, only & 0xFFFFFFFF
    taken = (position < firsts[stream]) & (position < prompts[stream % len(requests)])
    np.add.at(counts, stream[taken] % len(requests), 1)
    left: Int64 = only[~taken]
    return counts, left


def _not_reused(keys: Int64, lacks: Trace, numbers: list[int]) -> Int64:
    """Of rows that a trace lacks those that it did not take over from another request.

    Taken over entries are compared where the request's own rows read them.
    """
    taken = reused(lacks)
    if not taken:
        return keys
    first_own = np.array([taken.get(number, 0) for number in numbers], dtype=np.int64)
    own: Int64 = keys[(keys & 0xFFFFFFFF) >= first_own[(keys >> 32) % len(numbers)]]
    return own


def _last_needed(requests: tuple[RequestPair, ...]) -> Int64:
    """The position of the row that chose each request's last common token; engines may run one row more."""
    return np.array(
        [r.prompt + max(1, min(len(r.steps_a), len(r.steps_b))) - 2 for r in requests], dtype=np.int64
    )


def _lacking(requests: tuple[RequestPair, ...], *one_sided_rows: Int64) -> Int64:
    one_sided = np.concatenate(one_sided_rows)
    one_sided = one_sided[(one_sided >> 32) < len(requests)]
    request = one_sided >> 32
    needed = (one_sided & 0xFFFFFFFF) <= _last_needed(requests)[request]
    counts: Int64 = np.bincount(request[needed], minlength=len(requests)).astype(np.int64)
    return counts


def _token_findings(
    a: Trace, b: Trace, requests: tuple[RequestPair, ...], rows_a: Int64, rows_b: Int64
) -> tuple[Finding, ...]:
    ids = {pair.a: pair.id for pair in requests}
    found = []
    order = np.argsort(rows_a, kind="stable")
    for row_a, row_b in zip(rows_a[order][:_LISTED].tolist(), rows_b[order][:_LISTED].tolist(), strict=True):
        position = int(a.row_index().position[row_a])
        detail = (
            f"position {position} was fed token {int(a.row_index().token[row_a])} in run a and "
            f"{int(b.row_index().token[row_b])} in run b, though no generated token before it differs"
        )
        forward = int(a.row_index().forward[row_a])
        found.append(Finding("both", "token_in", ids[int(a.row_index().request[row_a])], forward, detail))
    if len(order) > _LISTED:
        detail = f"{len(order) - _LISTED} more rows were fed different tokens"
        found.append(Finding("both", "token_in", None, None, detail))
    return tuple(found)


def _no_row(a: Trace, b: Trace, other_tokens: int) -> str:
    for trace, run in ((a, "a"), (b, "b")):
        if not len(trace.row_index().request):
            if trace.header["complete"] and trace.problems:
                return (
                    f"What is left of run {run} ({trace.path}) holds no rows; expected at least one forward. "
                    f"{trace.problems[0]}"
                )
            return (
                f"Run {run} ({trace.path}) holds no rows; expected at least one forward. The run ended before its "
                "first shard was written, or recorded nothing. Record it again."
            )
    if other_tokens:
        return (
            f"All {other_tokens} rows that run a ({a.path}) and run b ({b.path}) share were fed different tokens. "
            "Expected rows with the same input. Check that both engines feed the tokens of their own requests."
        )
    return (
        f"Run a ({a.path}) and run b ({b.path}) have requests but no row in common. Expected rows of the same request "
        "and position. Record both runs to the end."
    )


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

    @cached_property
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
        inside = descendants(common)
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

    @classmethod
    def none(cls) -> CommonPorts:
        """No port in common, as between two engines."""
        empty = np.empty(0, dtype=np.int64)
        return cls((), (), empty, empty, empty, 0, 0)

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

    @cached_property
    def _whole(self) -> tuple[int, int]:
        """The width of each run's table where all of its columns are paired in their order, else -1."""
        a, b = (
            len(columns) if np.array_equal(columns, np.arange(len(columns))) else -1
            for columns in (self.a, self.b)
        )
        return a, b

    @property
    def words(self) -> int:
        """How many uint64 hold a bit for each pair."""
        return max(1, -(-len(self.a) // 64))

    def rows_in(self, size: int) -> int:
        """How many rows of digests of one run take ``size`` bytes, at least 1."""
        return max(1, size // (8 * max(1, len(self.a))))

    def differ(
        self, a: NDArray[np.uint64], b: NDArray[np.uint64], out: NDArray[np.bool_] | None = None
    ) -> NDArray[np.bool_]:
        """Compare digests uint64 [rows, columns] of each run row by row: bool [rows, pairs], in ``out`` where it is given."""
        left = a if a.shape[1] == self._whole[0] else a[:, self.a]
        right = b if b.shape[1] == self._whole[1] else b[:, self.b]
        return np.not_equal(left, right, out=out)

    def bits(self, differ: NDArray[np.bool_]) -> NDArray[np.uint64]:
        """What ``differ`` gave as uint64 [rows, words], with a bit for each pair, the lowest first."""
        bits = np.zeros((len(differ), self.words), dtype=np.uint64)
        if not differ.any():
            return bits
        packed = np.packbits(differ, axis=1, bitorder="little")
        bits.view(np.uint8)[:, : packed.shape[1]] = packed
        return bits


def descendants(sites: Sequence[Site]) -> list[list[int]]:
    """For each site the places of those inside it, in execution order."""
    place = {site.name: n for n, site in enumerate(sites)}
    inside: list[list[int]] = [[] for _ in sites]
    for n, site in enumerate(sites):
        parent, seen = site.parent, {site.name}
        while parent in place and parent not in seen:
            inside[place[parent]].append(n)
            seen.add(parent)
            parent = sites[place[parent]].parent
    return inside
