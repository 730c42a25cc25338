"""Attention in drawn arrangements: in slots with padding on the left, several rows at a time, each row against itself alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff_kernels.rounding import Float32

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

    def drawn(slots: int, count: int, length: int, width: int) -> Float32:
        return draw.standard_normal((slots, count, length, width), dtype=np.float32)

    for slots, rows, keys in ARRANGED:
        # Of a prompt in a batch with longer ones, the first columns of queries are padding too.
        padding = [0, *(int(draw.integers(keys)) for _ in range(slots - 1))]
        q = drawn(slots, heads.queries, rows, heads.width)
        k, v = drawn(slots, heads.keys, keys, heads.width), drawn(slots, heads.keys, keys, heads.values)
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
