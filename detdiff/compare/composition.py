"""Who was in a forward and on which kernel paths: frozen dataclasses, part of the answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """What one forward held of one request: ``rows`` rows from position ``start`` on."""

    request: str
    phase: str
    start: int
    rows: int


@dataclass(frozen=True)
class Composition:
    """Who was in a forward. ``rows`` is the sum over its members, padding not counted."""

    forward: int
    phase: str
    layout: str
    rows: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class PathUse:
    """One kernel path and the number of sites that took it in a forward."""

    path: str
    sites: int
