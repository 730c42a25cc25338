"""Which keys a row could see: from the keys and the mask that attention was given, whatever class the cache is of.

A mask is looked at once, however many layers share it. What is seen is said in columns of the keys; which positions these hold is found
by their digests (``entries``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from detdiff.trace import format_ranges

from .forward import KeyReader, Memory, Segment, memory
from .unread import node

Int64 = NDArray[np.int64]

HIDDEN: Final = -1e4
"""What is added to the score of a key that a row must not see is this or less: its softmax is 0 in every dtype."""


@dataclass(frozen=True)
class Sight:
    """The columns that consecutive rows see: those from ``first`` to ``last``, int64 [rows], both included.

    ``seen`` bool [rows, columns] is there where a row does not see all of these.
    """

    first: Int64
    last: Int64
    seen: NDArray[np.bool_] | None = None


class Masks:
    """The masks of one forward, each looked at once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], tuple[Any, Sight | None]] = {}
        self._plain: dict[tuple[int, int], bool] = {}
        self._lines: dict[tuple[int, bytes, Segment], list[dict[str, Any]]] = {}

    def sight(self, reader: KeyReader, segment: Segment, rows: int, packed: bool) -> Sight | None:
        """What a segment's rows see, of ``rows`` of the call; None where the mask has a form that is not known."""
        key = node(reader.mask) or id(reader.mask), reader.columns, id(segment)
        if key not in self._known:
            # The mask is kept, so that no other object has its number.
            self._known[key] = reader.mask, _sight(reader, segment, rows, packed)
        return self._known[key][1]

    def plain(self, sight: Sight, placed: Int64, new: Int64) -> bool:
        """Whether rows whose own entries lie in the columns ``new`` see just those from position 0 to their own, where
        ``placed`` are positions in order."""
        key = id(sight), int(placed[new[-1]]) - int(new[-1])
        if key not in self._plain:
            ends = sight.seen is None and np.array_equal(sight.last, new)
            self._plain[key] = ends and bool((placed[sight.first] == 0).all())
        return self._plain[key]

    def limited(self, sight: Sight, placed: Int64, segment: Segment) -> list[dict[str, Any]]:
        """``limited`` of these, once for all layers that are alike."""
        key = id(sight), placed.tobytes(), segment
        if key not in self._lines:
            self._lines[key] = limited(sight, placed, segment)
        return self._lines[key]


def _sight(reader: KeyReader, segment: Segment, rows: int, packed: bool) -> Sight | None:
    mask, columns, count = reader.mask, reader.columns, segment.count
    if mask is None:
        return Sight(np.zeros(count, np.int64), np.full(count, columns - 1, np.int64))
    if isinstance(mask, str):
        return causal(columns, rows, segment, packed) if mask == "causal" else None
    if not isinstance(mask, mx.array) or mask.ndim > 4 or mask.shape[-1] != columns:
        return None
    slot, row = (0, 0) if packed else (segment.slot, segment.column)
    where = memory(mask)
    masked = where.shape[-2] if mask.ndim > 1 else 1
    if masked != 1 and masked < row + count:
        return None
    view = where.numpy().reshape((1,) * (4 - mask.ndim) + where.shape)
    mine = view[slot if len(view) > 1 else 0]
    mine = mine[:, row : row + count] if masked > 1 else mine[:, :1]
    shown: NDArray[np.bool_] = np.any(_shown(mine, where), axis=0)
    return _columns(shown, count)


def causal(columns: int, rows: int, segment: Segment, packed: bool) -> Sight:
    """What a segment sees of ``columns`` keys where the last of ``rows`` rows sees all and each one before it one less."""
    first = 0 if packed else segment.column
    last = columns - rows + first + np.arange(segment.count, dtype=np.int64)
    return Sight(np.zeros(segment.count, np.int64), last)


def _shown(values: NDArray[Any], where: Memory) -> NDArray[np.bool_]:
    """Whether a mask lets a key be seen: true, or nothing large and negative added."""
    if where.dtype == "BOOL":
        return values.astype(np.bool_)
    if where.dtype == "BF16":
        added = (values.astype(np.uint32) << 16).view(np.float32)
    else:
        kinds: dict[str, Any] = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
        added = np.ascontiguousarray(values).view(kinds[where.dtype])
    shown: NDArray[np.bool_] = ~(added <= HIDDEN)
    return shown


def _columns(shown: NDArray[np.bool_], count: int) -> Sight:
    """The sight of rows by what is shown, bool [rows or 1, columns]."""
    width = shown.shape[1]
    first = shown.argmax(axis=1).astype(np.int64)
    last = width - 1 - shown[:, ::-1].argmax(axis=1).astype(np.int64)
    number = np.count_nonzero(shown, axis=1)
    last = np.where(number == 0, first - 1, last)
    whole = bool((number == last - first + 1).all())
    if len(shown) == count:
        return Sight(first, last, None if whole else shown)
    spread = np.zeros(count, np.int64)
    seen = None if whole else np.broadcast_to(shown, (count, width))
    return Sight(first[spread], last[spread], seen)


def spread(sight: Sight, columns: Int64, width: int) -> Sight:
    """What is seen of ``width`` columns by the sight of keys that lie in ``columns`` int64 [keys] of these."""
    shown = np.zeros((len(sight.first), width), np.bool_)
    for row, (first, last) in enumerate(zip(sight.first.tolist(), sight.last.tolist(), strict=True)):
        mine = columns[first : last + 1]
        shown[row, mine if sight.seen is None else mine[sight.seen[row, first : last + 1]]] = True
    return _columns(shown, len(shown))


def limited(sight: Sight, placed: Int64, segment: Segment) -> list[dict[str, Any]]:
    """What a trace says of the rows of a segment that do not see just the positions from 0 to their own.

    ``placed`` int64 [columns] are the positions that the columns hold, negative for nobody's. Rows that see from one position on, or
    from one that moves on with them (``slides``), share a line.
    """
    lines: list[dict[str, Any]] = []
    for row in range(segment.count):
        position = segment.start + row
        columns = np.arange(sight.first[row], sight.last[row] + 1)
        if sight.seen is not None:
            columns = columns[sight.seen[row, columns]]
        held = placed[columns]
        own = np.sort(held[held >= 0])
        nobody = len(held) - len(own)
        gapless = not nobody and len(own) > 0 and own[-1] == position and own[-1] - own[0] == len(own) - 1
        if not gapless:
            line = {
                "request": segment.request,
                "rows": [position, position],
                "sees": format_ranges(own.tolist()),
            }
            lines.append({**line, "nobody": nobody} if nobody else line)
        elif own[0] and not (lines and _goes_on(lines[-1], position, int(own[0]))):
            lines.append({"request": segment.request, "rows": [position, position], "first": int(own[0])})
    return lines


def _goes_on(line: dict[str, Any], position: int, first: int) -> bool:
    """Whether a row's sight is that of the rows in the line before it, which then has it too."""
    if "first" not in line or line["rows"][1] != position - 1:
        return False
    moved, rows = first - line["first"], position - line["rows"][0]
    slides = line.get("slides", moved == rows if rows == 1 else False)
    if moved != (rows if slides else 0):
        return False
    line["rows"][1] = position
    if slides:
        line["slides"] = True
    return True
