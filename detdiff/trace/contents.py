"""What a trace holds: sites and their ports, rows, values and generated tokens, and the rules about what these may say.

The recorder hands them to a writer, which keeps the rules, and a reader, which checks them, hands them back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import EmbeddingError, GeneratedError, LacksError, RowError, SiteListError, TableError


@dataclass(frozen=True)
class Site:
    """A named place in the model; ``parent`` is the composite site that holds it, or None."""

    name: str
    kind: str
    layer: int | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parent: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "layer": self.layer,
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "parent": self.parent,
        }

    @classmethod
    def from_json(cls, item: object) -> Site:
        """Raises SiteListError unless ``item`` has exactly the fields of a site, each of its type."""
        if not isinstance(item, Mapping):
            raise SiteListError(f"A site is {item!r}; expected an object. Record the trace again.")
        found = dict(item)
        name, kind, layer, parent = (found.get(key) for key in ("name", "kind", "layer", "parent"))
        ports = (found.get("inputs"), found.get("outputs"))
        ok = (
            set(found) == {"name", "kind", "layer", "inputs", "outputs", "parent"}
            and isinstance(name, str)
            and name != ""
            and isinstance(kind, str)
            and kind != ""
            and (layer is None or (type(layer) is int and layer >= 0))
            and (parent is None or isinstance(parent, str))
            and all(isinstance(side, list | tuple) for side in ports)
            and all(isinstance(port, str) and port != "" for side in ports for port in side or ())
        )
        if not ok:
            raise SiteListError(
                f"The site {name!r} is written as {str(found)[:200]}; expected exactly the fields name, kind, "
                "layer, inputs, outputs and parent, each of its own type. Record the trace again."
            )
        inputs, outputs = (tuple(side or ()) for side in ports)
        return cls(str(name), str(kind), layer, inputs, outputs, parent)


@dataclass(frozen=True)
class Port:
    """One side of a site: ``site`` is the site's index, ``name`` unique within that site."""

    site: int
    name: str
    is_input: bool


def ports_of(sites: Iterable[Site]) -> tuple[Port, ...]:
    """All ports in the order that tables use: for each site its inputs, then its outputs."""
    ports: list[Port] = []
    for index, site in enumerate(sites):
        ports += [Port(index, name, True) for name in site.inputs]
        ports += [Port(index, name, False) for name in site.outputs]
    return tuple(ports)


def check_sites(sites: Sequence[Site]) -> None:
    """Raises SiteListError for a repeated name, a repeated port, or a parent that is not listed later."""
    place = {site.name: index for index, site in enumerate(sites)}
    for index, site in enumerate(sites):
        if place[site.name] != index:
            raise SiteListError(
                f"The site {site.name!r} is listed twice; expected every site once, in execution order. "
                "Record the trace again."
            )
        names = site.inputs + site.outputs
        if len(set(names)) != len(names):
            raise SiteListError(
                f"The site {site.name!r} has the ports {names}; expected every port name once within a site. "
                "Record the trace again."
            )
        if site.parent is not None and place.get(site.parent, -1) <= index:
            raise SiteListError(
                f"The site {site.name!r} names the parent {site.parent!r}; expected a site that is listed "
                "later, because a composite completes after its children. Record the trace again."
            )


def format_ranges(indices: Iterable[int]) -> str:
    """Ascending indices as text: (0, 1, 2, 5) is "0-2,5"."""
    runs: list[list[int]] = []
    for index in sorted(set(indices)):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_ranges(text: str, limit: int) -> tuple[range, ...]:
    """The runs of ``format_ranges``; raises ValueError unless ascending and all below ``limit``."""
    runs: list[range] = []
    for part in text.split(",") if text else ():
        ends = part.split("-")
        if len(part) > 32 or len(ends) > 2 or not all(end.isascii() and end.isdigit() for end in ends):
            raise ValueError(text)
        run = range(int(ends[0]), int(ends[-1]) + 1)
        if not run or run.stop > limit or (runs and run.start < runs[-1].stop):
            raise ValueError(text)
        runs.append(run)
    return tuple(runs)


Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
UInt64 = NDArray[np.uint64]

PHASES = ("prefill", "decode", "draft", "verify")
"""Phase names; ``row.phase`` is an index into this."""


@dataclass(frozen=True, eq=False)
class Value:
    """Captured values of one column.

    ``rows`` int32 [m] ascending: rows of the batch (when written) or of the shard (when read);
    ``data`` [m, ...] in storage form (BF16 is uint16 bits); ``dtype`` a name in ``DTYPE_CODES``.
    """

    rows: Int32
    data: NDArray[Any]
    dtype: str


@dataclass(frozen=True, eq=False)
class Rows:
    """A batch of rows that share one table, in execution order.

    ``request``, ``position``, ``forward``, ``slot``, ``phase`` (index into PHASES), ``token`` (input id):
    int32 [n]. ``table`` has one int per port: its column of ``digests`` or -1 = absent.
    ``digests`` is uint64 [n, columns]. ``values`` maps a column to its captured values.
    """

    request: Int32
    position: Int32
    forward: Int32
    slot: Int32
    phase: Int32
    token: Int32
    table: tuple[int, ...]
    digests: UInt64
    values: Mapping[int, Value] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Lens:
    """Each layer's logits: ``top_ids`` int32 and ``top_logits`` float32 [g, layers, k], ``contested``
    float32 [g, layers, 2] = that layer's logits of the final top two."""

    top_ids: Int32
    top_logits: Float32
    contested: Float32


@dataclass(frozen=True, eq=False)
class Generated:
    """Generated tokens: int32 [g] each, ``top_ids`` int32 [g, k] and ``top_logits`` float32 [g, k],
    descending, equal logits by lower id.

    ``index`` counts the generated tokens of a request from 0; ``position`` is the row that produced it.
    """

    request: Int32
    index: Int32
    token: Int32
    forward: Int32
    position: Int32
    top_ids: Int32
    top_logits: Float32
    lens: Lens | None = None


@dataclass(frozen=True, eq=False)
class Embeddings:
    """One vector for each of some requests: ``request`` int32 [e], ``vector`` float32 [e, width]."""

    request: Int32
    vector: Float32


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Every row of a trace, in execution order: int32 [n] each.

    ``shard`` and ``row`` say where it is stored, ``table`` which table holds its ports, and ``table_row``
    which row of that shard's ``digest/<table>`` has its digests.
    """

    request: Int32
    position: Int32
    forward: Int32
    slot: Int32
    phase: Int32
    token: Int32
    shard: Int32
    row: Int32
    table: Int32
    table_row: Int32


ROW_FIELDS = ("request", "position", "forward", "slot", "phase", "token")
GEN_FIELDS = ("request", "index", "token", "forward", "position")
_ANY = 1 << 31
OUTER_KINDS = ("tokens", "log_probability")
"""Kinds of sites that stand for no place in a model: what was fed, and what is known of the answer."""


@dataclass(frozen=True)
class Limits:
    """How many requests, forwards and ports exist."""

    requests: int
    forwards: int
    ports: int


def check_rows(where: str, rows: Mapping[str, Int32], limits: Limits) -> None:
    """Raises RowError for a field out of range or forwards that go back."""
    above = {"request": limits.requests, "forward": limits.forwards, "phase": len(PHASES)}
    for name in ROW_FIELDS:
        bad = _outside(rows[name], above.get(name, _ANY))
        if bad is not None:
            raise RowError(
                f"{where} has a row with {name} {bad}; expected 0 to {above.get(name, _ANY) - 1}. The trace "
                "is damaged or was recorded by a faulty recorder: record it again."
            )
    forward = rows["forward"]
    if len(forward) > 1 and bool((forward[1:] < forward[:-1]).any()):
        raise RowError(
            f"{where} has rows of an earlier forward after rows of a later one; expected execution order. "
            "Record the trace again."
        )


def check_table(where: str, table: Int32, columns: int, limits: Limits) -> None:
    """Raises TableError unless every port has a column or -1, and every column a port."""
    if len(table) != limits.ports:
        raise TableError(
            f"{where} has {len(table)} ports; expected the {limits.ports} ports of the trace's sites. Record "
            "the trace again."
        )
    used = np.unique(table[table != -1])
    if len(used) != columns or not np.array_equal(used, np.arange(columns)):
        raise TableError(
            f"{where} sends ports to the columns {_short(used)}; expected each of 0 to {columns - 1} at "
            "least once and -1 for absent ports. Record the trace again."
        )


def check_generated(where: str, generated: Generated, limits: Limits) -> None:
    """Raises GeneratedError for a field out of range or top logits out of order."""
    above = {"request": limits.requests, "forward": limits.forwards}
    for name in (*GEN_FIELDS, "top_ids"):
        bad = _outside(getattr(generated, name), above.get(name, _ANY))
        if bad is not None:
            raise GeneratedError(
                f"{where} has a generated token with {name} {bad}; expected 0 to "
                f"{above.get(name, _ANY) - 1}. The trace is damaged or was recorded by a faulty recorder: "
                "record it again."
            )
    ids, logits = generated.top_ids, generated.top_logits
    rises = logits[:, 1:] > logits[:, :-1]
    ties = (logits[:, 1:] == logits[:, :-1]) & (ids[:, 1:] <= ids[:, :-1])
    if bool((rises | ties).any()):
        place = int(np.flatnonzero((rises | ties).any(axis=1))[0])
        raise GeneratedError(
            f"{where} has top logits {_short(logits[place])} of the ids {_short(ids[place])}; expected "
            "descending logits, equal ones by lower id. Record the trace again."
        )


def check_embeddings(where: str, found: Embeddings, limits: Limits, before: Collection[int]) -> None:
    """Raises EmbeddingError for a request that does not exist, or that has a vector already (``before`` are those)."""
    bad = _outside(found.request, limits.requests)
    requests = found.request.tolist()
    if bad is not None or len({*requests, *before}) != len(requests) + len(before):
        raise EmbeddingError(
            f"{where} has embeddings of the requests {_short(found.request)}; expected 0 to {limits.requests - 1}, each once in a "
            "trace. The trace is damaged or was recorded by a faulty recorder: record it again."
        )


def check_lacking_sites(where: str, header: Mapping[str, Any], sites: Sequence[Site]) -> None:
    """Raises LacksError for a site of the model in a trace that says that it has none, and for a prompt of a text-only
    trace that is no text."""
    lacks = header.get("lacks", {})
    inner = next((site.name for site in sites if site.kind not in OUTER_KINDS), None)
    if "sites" in lacks and inner is not None:
        raise LacksError(
            f"{where} says that it lacks sites ({lacks['sites']}) and lists {inner!r}; expected only sites of the kinds "
            f"{' and '.join(OUTER_KINDS)}. Record the trace again."
        )
    for request in header["requests"]:
        _code_points(where, lacks, np.array(request["tokens"], np.int64))


def check_lacking(where: str, lacks: Mapping[str, str], generated: Generated) -> None:
    """Raises LacksError unless top logits are missing just where the header says so, and tokens of a text-only trace are
    code points."""
    if ("logits" in lacks) != (generated.top_ids.shape[1] == 0):
        raise LacksError(
            f"{where} has {generated.top_ids.shape[1]} top logits a token, and the header says that they are "
            f"{'missing' if 'logits' in lacks else 'there'}; expected the two to agree. Record the trace again."
        )
    _code_points(where, lacks, generated.token)


def _code_points(where: str, lacks: Mapping[str, str], tokens: NDArray[Any]) -> None:
    wrong = tokens[(tokens > 0x10FFFF) | ((tokens >= 0xD800) & (tokens < 0xE000))]
    if "tokens" in lacks and len(wrong):
        raise LacksError(
            f"{where} says that it lacks tokens ({lacks['tokens']}) and has the id {int(wrong[0])}; expected code points of "
            "its text. Record the trace again."
        )


class TokenIndices:
    """Which tokens of each request there are. They mostly come in order, and then a request costs one number."""

    def __init__(self) -> None:
        # By request: the index that follows those from 0 on, and those beyond it, where there are any.
        self._next = np.zeros(0, np.int64)
        self._beyond: dict[int, set[int]] = {}

    def add(self, requests: Int32, indices: Int32) -> tuple[int, int] | None:
        """Add tokens, and give None; where a (request, index) comes again, give that, and add nothing."""
        if not len(requests):
            return None
        last = int(requests.max())
        if last >= len(self._next):
            self._next = np.concatenate([self._next, np.zeros(last + 1 - len(self._next), np.int64)])
        order = grouped(requests)
        request, index = requests[order], indices[order]
        starts = np.flatnonzero(np.diff(request, prepend=-1))
        counts = np.diff(np.append(starts, len(request)))
        within = np.arange(len(request)) - np.repeat(starts, counts)
        if not self._beyond and np.array_equal(index, self._next[request] + within):
            self._next[request[starts]] += counts
            return None
        return self._add_others(request[starts].tolist(), np.split(index, starts[1:]))

    def _add_others(self, requests: list[int], indices: list[Int32]) -> tuple[int, int] | None:
        found: dict[int, tuple[int, set[int]]] = {}
        for number, mine in zip(requests, indices, strict=True):
            known, others = int(self._next[number]), set(self._beyond.get(number, ()))
            if not others and np.array_equal(mine, np.arange(known, known + len(mine))):
                found[number] = known + len(mine), others
                continue
            for each in sorted(mine.tolist()):
                if each < known or each in others:
                    return number, each
                others.add(each)
            while known in others:
                others.remove(known)
                known += 1
            found[number] = known, others
        for number, (known, others) in found.items():
            self._next[number] = known
            self._beyond.pop(number, None)
            if others:
                self._beyond[number] = others
        return None


def grouped(numbers: NDArray[np.int32] | NDArray[np.int64]) -> NDArray[np.intp]:
    """Where numbers from 0 on are, in ascending order of them, those of one number ascending. Numbers of 16 bits are sorted in a
    tenth of the time, digit by digit."""
    small = len(numbers) and int(numbers.max()) < 1 << 16
    return np.argsort(numbers.astype(np.uint16) if small else numbers, kind="stable")


def _outside(array: NDArray[Any], above: int) -> int | None:
    if not array.size:
        return None
    low, high = int(array.min()), int(array.max())
    return low if low < 0 else high if high >= above else None


def _short(array: NDArray[Any]) -> str:
    return np.array2string(array, threshold=8, edgeitems=3, separator=", ").replace("\n", "")
