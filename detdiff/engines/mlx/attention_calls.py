"""Attention as a model called it: what chosen rows were given, kept during a re-run, and the operation that it should have been.

Scale, mask, sinks and keys are those of the call, whatever a model's attributes are called and however its cache works. What
of the keys is the row's own is what was written for it: a mask that lets others through is a fault, not a parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from detdiff.engines.mlx.taps.forward import Attend, Forward, handle
from detdiff.engines.mlx.taps.operations import ATTENTION_NAMES
from detdiff.engines.mlx.taps.visible import HIDDEN
from detdiff.errors import OracleRefused
from detdiff.explain.attention_bounds import AttentionOperation
from detdiff.explain.bounds import exact_weight, magnitude
from detdiff.explain.origins import Captured, OriginRow
from detdiff.explain.roundings import Float64
from detdiff_kernels import Affine

RowOfSite = tuple[str, int, int]
"""A site's name, a request's number, a position."""
LIMIT = 1 << 29
"""Bytes of queries, keys and values that are kept; a call beyond them is not."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call: its arguments by name, arrays [slots, heads, rows or keys, width], and how to call it ``again``."""

    given: Mapping[str, Any]
    args: int
    attend: Attend
    columns: range | None

    def again(self, **changes: Any) -> mx.array:
        """The output [slots, heads, rows, width] with some arguments changed."""
        given = {**self.given, **changes}
        places = ATTENTION_NAMES[: self.args]
        rest = {name: value for name, value in given.items() if name not in places}
        return self.attend(self.columns, tuple(given[name] for name in places), rest)


@dataclass(frozen=True, eq=False)
class CalledRow:
    """One row of a call: the batch ``slot`` and the ``row`` of the queries that it is."""

    call: AttentionCall
    slot: int
    row: int

    @property
    def query(self) -> mx.array:
        """[1, heads, 1, width]."""
        found: mx.array = self.call.given["queries"][self.slot : self.slot + 1, :, self.row : self.row + 1]
        return found

    def side(self, name: str) -> list[mx.array]:
        """Its slot's keys or values, [heads, keys, width] each: one array, or codes with scales and biases."""
        held = self.call.given[name]
        return [part[self.slot] for part in (held if isinstance(held, tuple | list) else [held])]

    def bias(self) -> Float64:
        """What is added to its scores, [1 or heads, keys], minus infinity where a key is masked."""
        slots, _, rows, _ = self.call.given["queries"].shape
        keys = self.side("keys")[0].shape[1]
        return added(self.call.given.get("mask"), self.slot, self.row, slots, rows, keys)


def added(mask: Any, slot: int, row: int, slots: int, rows: int, keys: int) -> Float64:
    """What a mask adds to the scores of one of ``rows`` rows, [1 or heads, keys], minus infinity where a key is masked."""
    if mask is None:
        return np.zeros((1, keys))
    if isinstance(mask, str):
        return np.where(np.arange(keys) <= keys - rows + row, 0.0, -np.inf)[None]
    heads = mask.shape[-3] if mask.ndim > 2 else 1
    mine = mx.broadcast_to(mask, (slots, heads, rows, keys))[slot, :, row]
    if mine.dtype == mx.bool_:
        return np.where(np.array(mine), 0.0, -np.inf)
    scores = numbers(mine)
    return np.where(scores <= HIDDEN, -np.inf, scores)


def numbers(array: mx.array) -> Float64:
    """An array's numbers in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


@dataclass(eq=False)
class AttentionWatch:
    """Keeps the calls of the ``wanted`` rows while a session runs."""

    wanted: Collection[RowOfSite]
    rows: dict[tuple[str, int, int, int], CalledRow] = field(default_factory=dict)
    """By site, request, position and forward."""
    scans: Any = None
    """What keeps recurrences in the same run."""
    _bytes: int = 0

    def around(self, site: str, forward: Forward, attend: Attend) -> Attend:
        """``attend``, which also keeps what it is given where a wanted row is in it."""
        asked = {(request, position) for name, request, position in self.wanted if name == site}
        if not asked:
            return attend

        def kept(columns: range | None, args: Any, kw: Any) -> mx.array:
            self._keep(site, forward, attend, columns, args, kw, asked)
            return attend(columns, args, kw)

        return kept

    def _keep(
        self,
        site: str,
        forward: Forward,
        attend: Attend,
        columns: range | None,
        args: Sequence[Any],
        kw: Mapping[str, Any],
        asked: Collection[tuple[int, int]],
    ) -> None:
        given = {**dict(zip(ATTENTION_NAMES, args, strict=False)), **kw}
        width = forward.shape[1] if columns is None else len(columns)
        if given["queries"].shape[2] != width or self._bytes > LIMIT:
            return
        call = AttentionCall(
            {name: _held(value) for name, value in given.items()}, len(args), attend, columns
        )
        found = {}
        for segment in forward.segments:
            for position in range(segment.start, segment.start + segment.count):
                column = segment.column + position - segment.start
                if (segment.request, position) not in asked or (
                    columns is not None and column not in columns
                ):
                    continue
                slot, row = (segment.slot, column) if columns is None else (0, column - columns.start)
                found[site, segment.request, position, forward.index] = CalledRow(call, slot, row)
        if found:
            self.rows |= found
            held = (given["queries"], *_parts(given["keys"]), *_parts(given["values"]))
            self._bytes += sum(array.nbytes for array in held)


def _held(value: Any) -> Any:
    """A ring gives itself back, and is written to in place later."""
    if isinstance(value, tuple | list):
        return tuple(map(_held, value))
    return handle(value) if isinstance(value, mx.array) else value


def _parts(held: Any) -> tuple[mx.array, ...]:
    return tuple(held) if isinstance(held, tuple | list) else (held,)


@dataclass(frozen=True, eq=False)
class OwnEntries:
    """What a cache was given for a request's positions: parts [heads, positions, ...] of keys and of values."""

    keys: Sequence[NDArray[Any]]
    values: Sequence[NDArray[Any]]


def operation_as_called(row: CalledRow, own: OwnEntries | None) -> AttentionOperation:
    """The attention of one row as it was called, over those of its visible keys that are its ``own``.

    Where not one key is among the row's own, as where a model expands what it caches, all that it was given counts.
    """
    parts = {name: [_raw(array) for array in row.side(name)] for name in ("keys", "values")}
    bias, seen = row.bias(), None
    if own is not None:
        visible = np.flatnonzero((bias > -np.inf).any(axis=0))
        found = _matched(parts["keys"], own.keys, visible)
        if any(place is not None for place in found):
            seen = tuple(sorted(place for place in found if place is not None))
            bias = bias.copy()
            bias[:, [slot for slot, place in zip(visible, found, strict=True) if place is None]] = -np.inf
            _as_written(parts["values"], own.values, visible, found)
    keys, key_size = _wide(parts["keys"], row.call.given)
    values, value_size = _wide(parts["values"], row.call.given)
    sinks = row.call.given.get("sinks")
    q = numbers(row.query)[:, :, 0]
    return AttentionOperation(
        q,
        keys,
        values,
        float(row.call.given["scale"]),
        bias[:, None],
        None if sinks is None else numbers(sinks).reshape(-1),
        key_size,
        value_size,
        seen=seen,
    )


def _raw(array: mx.array) -> NDArray[Any]:
    """Codes as they are, and floats as float32, which holds them exactly."""
    return np.array(array if array.dtype == mx.uint32 else array.astype(mx.float32))


def _matched(
    given: Sequence[NDArray[Any]], own: Sequence[NDArray[Any]], visible: NDArray[np.int64]
) -> list[int | None]:
    """For each visible key the position whose entry it is, bit for bit; None for one that is nobody's of the row."""
    if len(given) != len(own) or any(
        a.shape[0] != b.shape[0] or a.shape[2:] != b.shape[2:] for a, b in zip(given, own, strict=True)
    ):
        return [None] * len(visible)
    places: dict[bytes, list[int]] = {}
    for position in reversed(range(own[0].shape[1])):
        places.setdefault(_entry(own, position), []).append(position)
    found: list[int | None] = []
    for slot in visible.tolist():
        left = places.get(_entry(given, slot), [])
        found.append(left.pop() if left else None)
    return found


def _entry(parts: Sequence[NDArray[Any]], place: int) -> bytes:
    return b"".join(np.ascontiguousarray(part[:, place]).tobytes() for part in parts)


def _as_written(
    given: list[NDArray[Any]],
    own: Sequence[NDArray[Any]],
    visible: NDArray[np.int64],
    found: Sequence[int | None],
) -> None:
    """Values of matched keys as they were written, where the call's values are entries of the cache at all."""
    pairs = [(int(slot), place) for slot, place in zip(visible, found, strict=True) if place is not None]
    alike = len(given) == len(own) and all(
        a.shape[0] == b.shape[0] and a.shape[2:] == b.shape[2:] for a, b in zip(given, own, strict=True)
    )
    if not alike or not any(_entry(given, slot) == _entry(own, place) for slot, place in pairs):
        return
    for number, part in enumerate(given):
        changed = part.copy()
        for slot, place in pairs:
            changed[:, slot] = own[number][:, place]
        given[number] = changed


def _wide(parts: Sequence[NDArray[Any]], given: Mapping[str, Any]) -> tuple[Float64, Float64 | None]:
    """Keys or values (heads, keys, width), and for codes |scale| code + |bias|."""
    if len(parts) == 1:
        return parts[0].astype(np.float64), None
    shape = parts[0].shape[:2]
    packed, scales, biases = (part.reshape(-1, part.shape[-1]) for part in parts)
    cache = given["cache"]
    codes = Affine(packed, scales, biases, int(cache.bits), int(cache.group_size))
    return exact_weight(codes).reshape(*shape, -1), magnitude(codes).reshape(*shape, -1)


def order_moves(a: Captured, b: Captured, origin: OriginRow) -> dict[str, bool]:
    """Whether the ``order`` of the keys moves the bits of one row alone, and whether the ``rows`` of its call do.

    Raises OracleRefused where a call was not kept, or the rows did not see the same entries.
    """
    rows = []
    for captured, place in ((a, origin.row_a), (b, origin.row_b)):
        key = (
            origin.site.name,
            captured.computed_for(place),
            origin.position,
            captured.forward(place),
        )
        found = None if captured.watch is None else captured.watch.rows.get(key)
        if found is None:
            raise OracleRefused(f"The call of {origin.site.name} was not kept. Judge the sites around it.")
        rows.append(found)
    own, turned = alone(rows[0]), in_order_of(*rows)
    if turned is None:
        raise OracleRefused(
            f"The rows of {origin.site.name} did not see the same entries in both runs. Compare their masks."
        )
    # Where another number of rows moves the bits, it does so in one of the two calls.
    crowd = [each.call.again()[each.slot, :, each.row] for each in rows]
    single = [own, alone(rows[1])]
    return {
        "order": not _same(own, turned),
        "rows": not all(_same(*pair) for pair in zip(crowd, single, strict=True)),
    }


def _same(a: mx.array, b: mx.array) -> bool:
    return _raw(a).tobytes() == _raw(b).tobytes()


def in_order_of(row: CalledRow, other: CalledRow) -> mx.array | None:
    """``row``'s output [heads, width] alone, over the keys that it sees in the order in which ``other``, of equal visible
    entries, has them; None where the two do not see the same keys."""
    mine, theirs = (_visible(each) for each in (row, other))
    places: dict[bytes, list[int]] = {}
    for slot, entry in reversed(mine):
        places.setdefault(entry, []).append(slot)
    order = []
    for _, entry in theirs:
        left = places.get(entry, [])
        if not left:
            return None
        order.append(left.pop())
    return alone(row, order) if len(order) == len(mine) else None


def alone(row: CalledRow, order: Sequence[int] | None = None) -> mx.array:
    """``row``'s output [heads, width] as a call of its own over the keys that it sees, in the order of ``order``."""
    index = mx.array([slot for slot, _ in _visible(row)] if order is None else list(order))

    def part(name: str) -> Any:
        held = [array[None][:, :, index] for array in row.side(name)]
        return held[0] if len(held) == 1 else tuple(held)

    bias = row.bias()[:, np.array(index)]
    mask = (
        None if not bias.any() else mx.array(bias[None, :, None].astype(np.float32)).astype(row.query.dtype)
    )
    call = replace(row.call, columns=None)
    return call.again(queries=row.query, keys=part("keys"), values=part("values"), mask=mask)[0, :, 0]


def _visible(row: CalledRow) -> list[tuple[int, bytes]]:
    """The slots that a row sees, each with its key's and value's bytes."""
    parts = [_raw(array) for name in ("keys", "values") for array in row.side(name)]
    slots = np.flatnonzero((row.bias() > -np.inf).any(axis=0)).tolist()
    return [(slot, _entry(parts, slot)) for slot in slots]
