"""What the caches say of themselves at the start of a forward, beside what the engine knows to be true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from detdiff.trace import format_ranges

from .entries import cache_kind
from .forward import Forward


def describe(cache: Sequence[Any]) -> list[dict[str, Any]]:
    """One note per layer: kind, offset and left padding per slot, length; arrays stay MLX arrays for now.

    ``known`` is False where nothing is known of how the cache counts its offset.

    Reading an offset here would wait for the forward that is still running, so only left padding, which some
    caches change in place, is copied at once.
    """
    return [_note(entry) for entry in cache]


def _note(cache: Any) -> dict[str, Any]:
    lanes = getattr(cache, "lanes", None)
    if lanes is not None:
        return {
            "kind": type(lanes[0]).__name__,
            "known": cache_kind(lanes[0]) is not None,
            "offset": [int(lane.offset) for lane in lanes],
            "left_padding": [],
            "length": max(int(lane.offset) for lane in lanes),
        }
    note: dict[str, Any] = {
        "kind": type(cache).__name__,
        "known": cache_kind(cache) is not None,
        "offset": [],
        "left_padding": [],
        "length": 0,
    }
    offset = getattr(cache, "offset", None)
    if isinstance(offset, mx.array):
        note["offset"] = offset.astype(offset.dtype)
    elif isinstance(offset, int):
        note["offset"] = [offset]
    padding = getattr(cache, "left_padding", None)
    if isinstance(padding, mx.array):
        note["left_padding"] = [int(p) for p in np.asarray(padding)]
    index = getattr(cache, "_idx", None)
    note["length"] = index if isinstance(index, int) else (offset if isinstance(offset, int) else 0)
    return note


def summarise(
    notes: Sequence[dict[str, Any]], masks: dict[int, str], forward: Forward
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(cache lines, events): layers that say the same share a line; a wrong offset is an event.

    The offset of a slot is the position that its column 0 takes, so it must equal the segment's start less its
    column. A cache whose class is not known may count otherwise, and is not checked.
    """
    groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
    events: list[dict[str, Any]] = []
    for layer, note in enumerate(notes):
        offset = note["offset"]
        if isinstance(offset, mx.array):
            offset = [int(o) for o in np.asarray(offset)]
        said = {key: value for key, value in note.items() if key != "known"}
        line = {**said, "offset": offset, "mask": masks.get(layer, "none")}
        groups.setdefault(repr(line), (line, []))[1].append(layer)
        for lane, segment in enumerate(forward.segments if note["known"] else ()):
            place = lane if forward.layout == "packed" else segment.slot
            if place < len(offset) and offset[place] != segment.start - segment.column * (
                forward.layout == "padded"
            ):
                events.append(
                    {
                        "kind": "offset",
                        "request": segment.request,
                        "layer": layer,
                        "expected": segment.start,
                        "found": offset[place],
                    }
                )
    return [{"layers": format_ranges(layers), **line} for line, layers in groups.values()], events
