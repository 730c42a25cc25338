"""In which way two runs part: what has to stay while everything else is cut down."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from detdiff.compare import Divergence, RequestDivergence
from detdiff.explain.evidence import Facts

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Parting:
    """The rung, the site of the first origin with the kernel path of each side (None: no origin was found), the first
    finding of the bookkeeping that no rounding can make, whether a token flipped, and whether anything that is compared of
    re-runs differs (a cache entry, a logit, a token)."""

    rung: str
    site: str | None
    kind: str | None
    path_a: str | None
    path_b: str | None
    contradiction: str | None
    flip: bool
    shows: bool

    @classmethod
    def of(cls, divergence: Divergence) -> Parting | None:
        """None where nothing parted."""
        if divergence.rung is None:
            return None
        found = focus(divergence)
        origin = None if found is None else found.origin
        facts = Facts(divergence)
        contradictions = facts.contradictions
        return cls(
            divergence.rung,
            None if origin is None else origin.site,
            None if origin is None else origin.kind,
            None if origin is None else origin.path_a,
            None if origin is None else origin.path_b,
            contradictions[0].what if contradictions else None,
            any(request.flip is not None for request in divergence.requests),
            facts.shows,
        )

    def alike(self, other: Parting, *, flip: bool, layers: bool) -> bool:
        """Whether ``other`` parts in the same way: with a flip if ``flip`` asks for one; with ``layers`` in whatever layer."""
        sites = (self.site, other.site)
        if layers:
            sites = tuple(None if site is None else _LAYER.sub("*", site) for site in sites)  # type: ignore[assignment]
        same = (self.rung, self.path_a, self.path_b, self.contradiction)
        if same != (other.rung, other.path_a, other.path_b, other.contradiction) or sites[0] != sites[1]:
            return False
        if self.shows and not other.shows:
            return False
        # Where no value differs, a flip is all that there is.
        return other.flip or not (flip or (self.site is None and self.flip))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Parting:
        return cls(**{field.name: values[field.name] for field in fields(cls)})


def focus(divergence: Divergence) -> RequestDivergence | None:
    """The request with the earliest origin, or else the first that parts; None where none does."""
    parted = [request for request in divergence.requests if request.rung is not None]
    first = next((request for request in parted if request.id == divergence.first), None)
    return first or next(iter(parted), None)
