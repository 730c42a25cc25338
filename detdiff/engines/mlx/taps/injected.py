"""Faults injected into the values of a model's sites on purpose: the twin of every check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from .forward import Forward
from .sites import SiteMap

_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}


@dataclass(frozen=True)
class InjectedFault:
    """Moves one element of one row of a site's output by one unit in the last place.

    ``request`` is an index, ``position`` a row position; ``element`` counts within the row's values in row
    order and wraps at their number. The bit pattern is increased by one (decreased where that would be an
    infinity), so the value is the next one away from zero.
    """

    site: str
    request: int
    position: int
    element: int = 0
    port: str = "out"

    def apply(self, site: str, port: str, value: mx.array, axis: int, forward: Forward) -> mx.array:
        """``value`` unchanged, or a copy with the one element moved where this forward holds the row."""
        if site != self.site or port != self.port:
            return value
        for segment in forward.segments:
            if segment.request == self.request and 0 <= self.position - segment.start < segment.count:
                column = segment.column + self.position - segment.start
                return _moved(value, segment.slot, column, axis, self.element)
        return value


def _moved(value: mx.array, slot: int, column: int, axis: int, element: int) -> mx.array:
    shape = [n for i, n in enumerate(value.shape) if i not in (0, axis)]
    index: list[int] = []
    rest = element
    for n in reversed(shape):
        index.append(rest % n)
        rest //= n
    index.reverse()
    full = [slot, *index]
    full.insert(axis, column)
    key = tuple(full)
    # view() needs a whole array; contiguity keeps the element order of the logical shape.
    bits = mx.contiguous(value).view(_BITS[value.itemsize])
    old = bits[key]
    largest = mx.abs(value[key]) == mx.finfo(value.dtype).max
    bits[key] = mx.where(largest, old - 1, old + 1)
    return bits.view(value.dtype)


class Injector:
    """Applies injected faults to what the sites of a model give."""

    def __init__(self, injected_faults: Iterable[InjectedFault] = ()) -> None:
        self._injected_faults = tuple(injected_faults)

    def __bool__(self) -> bool:
        return bool(self._injected_faults)

    def apply(self, sites: SiteMap, key: str, port: str, value: Any, forward: Forward) -> Any:
        """``value``, with the elements moved that injected faults of this port name; no array is left as it is."""
        if not isinstance(value, mx.array):
            return value
        place = sites.index.get(key)
        axis = sites.axes.get(sites.ports.get((key, port), -1))
        if place is None or axis is None:
            return value
        if key in ("logits", sites.head) and forward.selected is not None:
            forward = _compact(forward)
        for injected_fault in self._injected_faults:
            value = injected_fault.apply(sites.sites[place].name, port, value, axis, forward)
        return value


def _compact(forward: Forward) -> Forward:
    """The forward as the head sees it: one column per selected row."""
    assert forward.selected is not None
    segments = []
    for segment in forward.segments:
        for i, column in enumerate(forward.selected):
            if 0 <= column - segment.column < segment.count:
                start = segment.start + column - segment.column
                segments.append(replace(segment, start=start, count=1, column=i))
    return replace(forward, segments=tuple(segments))
