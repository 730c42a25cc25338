"""When a rotating cache first lets go of an entry: worked out from positions, without asking the cache's arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache

from detdiff.trace import format_ranges

from .entries import cache_kind
from .forward import Forward

_ROTATING = (RotatingKVCache, BatchRotatingKVCache)


def wraps(forward: Forward, cache: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """One ``wrap`` for each request and window size that this forward's rows reach the end of.

    ``position`` is the first row that no longer sees the request's first token; ``layers`` are those of this window.
    """
    windows: dict[int, list[int]] = {}
    for layer, entry in enumerate(cache):
        held = entry.lanes[0] if hasattr(entry, "lanes") else entry
        if cache_kind(held) in _ROTATING:
            windows.setdefault(int(held.max_size), []).append(layer)
    for window, layers in windows.items():
        for segment in forward.segments:
            if segment.start <= window < segment.start + segment.count:
                yield {
                    "request": segment.request,
                    "position": window,
                    "rows": segment.count,
                    "start": segment.start,
                    "window": window,
                    "layers": format_ranges(layers),
                }
