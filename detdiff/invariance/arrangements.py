"""Attention in drawn arrangements: in slots with padding on the left, in pages beside other requests, several rows at a time, each row against
itself alone.

Sums of a 16 bit type mostly round alike in whatever order. So half of what is drawn cancels: each key is there twice, with opposite values, and what comes
out is nothing but the roundings of the sums, which are others in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff_kernels.rounding import Float32

from .sampled import OUTPUTS

Seen = NDArray[np.bool_]
Bits = NDArray[Any]

ARRANGED = (
    # slots, columns that are queries, keys
    (1, 9, 9),
    (2, 5, 31),
    (2, 31, 31),
    (3, 1, 40),
    (4, 17, 17),
    (5, 1, 13),
    (16, 1, 33),
    (2, 33, 70),
    (2, 2, 1100),
    (1, 1, 530),
)
PAGED = (
    # of each request: positions that stand in its pages, and its rows
    ((12, 1),),
    ((0, 9), (0, 4), (0, 17)),
    ((31, 1), (5, 1), (12, 1), (40, 1)),
    ((0, 13), (20, 3), (7, 1)),
    ((530, 1), (0, 31)),
    tuple((3 * n, 1) for n in range(16)),
)
EXPERT_OUTPUTS = 4 * OUTPUTS
"""Outputs of experts that are compared for each seed: theirs cannot be made to cancel from outside of a module, so that more are needed."""
RINGS = ((12, 5), (16, 3), (64, 21), (64, 40), (200, 77), (200, 3))
"""Keys of a full window, and by how many columns it is turned."""


@dataclass(frozen=True)
class AttentionHeads:
    """Heads of queries and of keys, and the width of a key and of a value."""

    queries: int
    keys: int
    width: int
    values: int


Attend = Callable[[Float32, Float32, Float32, Seen | None], Bits]
"""``attend(q, k, v, seen)``: an engine's own attention of float32 q [slots, heads, rows, width] over k and v [slots, heads, keys, width],
rounded to its dtype: the bits of what came out [slots, rows, heads, width]. ``seen`` bool [slots, 1, rows, keys] are the keys that rows see:
each the one of its own column and those before, but for padding; None: all of them."""


def differing_row(attend: Attend, heads: AttentionHeads, seed: int) -> str:
    """The first row that is another than alone over the keys that it sees, in words; empty where none is."""
    draw = np.random.default_rng([seed, 2])
    for slots, rows, keys in ARRANGED:
        # Of a prompt in a batch with longer ones, the first columns of queries are padding too.
        padding = [0, *(int(draw.integers(keys)) for _ in range(slots - 1))]
        q = draw.standard_normal((slots, heads.queries, rows, heads.width), dtype=np.float32)
        k, v = cancelling(draw, heads, padding, keys)
        at, columns = np.arange(keys - rows, keys)[:, None], np.arange(keys)[None]
        seen = np.stack([(columns <= at) & (columns >= first) for first in padding])[:, None]
        together = attend(q, k, v, seen)
        for slot, first in enumerate(padding):
            for row in range(max(0, first - (keys - rows)), rows):
                last = keys - rows + row + 1
                own_k, own_v = (each[slot : slot + 1, :, first:last] for each in (k, v))
                alone = attend(q[slot : slot + 1, :, row : row + 1], own_k, own_v, None)
                if not np.array_equal(alone[0, 0], together[slot, row]):
                    return (
                        f"row {row} of {rows} in slot {slot} of {slots}, over {last - first} of {keys} keys with {first} columns of "
                        "padding, is another than alone"
                    )
    return ""


def paged_row_differs(paged: Attend, outside: Attend, heads: AttentionHeads, seed: int) -> str:
    """The same of rows of several requests in one slot, over all their keys one request after the other: ``paged`` computes these, and
    ``outside`` a row alone over its own keys, as a request has it that is in no pages."""
    draw = np.random.default_rng([seed, 5])
    for requests in PAGED:
        ends = [before + rows for before, rows in requests]
        k, v = (
            np.concatenate(each, axis=2)
            for each in zip(*(cancelling(draw, heads, [0], end) for end in ends), strict=True)
        )
        firsts = np.cumsum([0, *ends[:-1]])
        spans = [
            (first, first + end - rows + row + 1)
            for first, end, (_, rows) in zip(firsts, ends, requests, strict=True)
            for row in range(rows)
        ]
        q = draw.standard_normal((1, heads.queries, len(spans), heads.width), dtype=np.float32)
        columns = np.arange(k.shape[2])
        seen = np.stack([(columns >= first) & (columns < last) for first, last in spans])[None, None]
        together = paged(q, k, v, seen)
        for row, (first, last) in enumerate(spans):
            given = q[:, :, row : row + 1], k[:, :, first:last], v[:, :, first:last]
            alone = outside(*given, None)
            if np.array_equal(alone[0, 0], together[0, row]):
                continue
            if not np.array_equal(alone, paged(*given, None)):
                return f"even a row alone, over {last - first} keys, is another in pages than outside of them, so that these have another function"
            return (
                f"row {row} of {len(spans)} of {len(requests)} requests in pages, over {last - first} of {k.shape[2]} keys, is another than "
                "alone"
            )
    return ""


def ring_differs(attend: Callable[[int], Attend], heads: AttentionHeads, seed: int) -> str:
    """The same of full windows whose oldest key lies at another place, as in a ring that others have turned further; ``attend`` is asked for with
    the keys of the ring."""
    draw = np.random.default_rng([seed, 4])
    for keys, turned in RINGS:
        for slots in (1, max(1, OUTPUTS // (len(RINGS) * heads.queries * heads.values))):
            q = draw.standard_normal((slots, heads.queries, 1, heads.width), dtype=np.float32)
            k, v = cancelling(draw, heads, [0] * slots, keys)
            order = np.roll(np.arange(keys), turned)
            run = attend(keys)
            if not np.array_equal(run(q, k, v, None), run(q, k[:, :, order], v[:, :, order], None)):
                return f"a row over the same {keys} keys in another order, as a ring has them, is another"
    return ""


def cancelling(
    draw: np.random.Generator, heads: AttentionHeads, padding: Sequence[int], keys: int
) -> tuple[Float32, Float32]:
    """Normal keys and values [slots, heads, keys, width], of which those behind the padding are there twice: the second half of the width of
    their values cancels."""
    k = draw.standard_normal((len(padding), heads.keys, keys, heads.width), dtype=np.float32)
    v = draw.standard_normal((len(padding), heads.keys, keys, heads.values), dtype=np.float32)
    half = heads.values // 2
    for slot, first in enumerate(padding):
        columns = first + draw.permutation(keys - first)
        count = len(columns) // 2
        one, other = columns[:count], columns[count : 2 * count]
        k[slot, :, other] = k[slot, :, one]
        v[slot, :, other, half:] = -v[slot, :, one, half:]
        v[slot, :, columns[2 * count :], half:] = 0
    return k, v
