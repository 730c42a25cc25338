"""Compares two traces: alignment, flips, origins, carriers, metrics. Needs no model and no mlx."""

from detdiff.compare.composition import Composition, Member
from detdiff.compare.divergence import (
    Agreement,
    CacheEntry,
    Carriers,
    Choice,
    Chunk,
    Compared,
    Divergence,
    DraftDivergence,
    EventCount,
    Events,
    Finding,
    Flip,
    FlipForward,
    Growth,
    Margin,
    NotCompared,
    Origin,
    OriginCount,
    RequestDivergence,
    Run,
)
from detdiff.compare.grids import Grid
from detdiff.compare.ladder import RUNGS, compare
from detdiff.compare.magnitude import Magnitude
from detdiff.compare.metrics import Values, kl_divergence, measure, ulp_distance
from detdiff.compare.points import LensPoint, TokenPoint
from detdiff.compare.series import RequestSeries, Series, series
from detdiff.compare.speculated import Acceptance, Proposed, Verification, Verified
from detdiff.compare.timeline import ForwardPoint, Threshold

__all__ = [
    "RUNGS",
    "Acceptance",
    "Agreement",
    "CacheEntry",
    "Carriers",
    "Choice",
    "Chunk",
    "Compared",
    "Composition",
    "Divergence",
    "DraftDivergence",
    "EventCount",
    "Events",
    "Finding",
    "Flip",
    "FlipForward",
    "ForwardPoint",
    "Grid",
    "Growth",
    "LensPoint",
    "Magnitude",
    "Margin",
    "Member",
    "NotCompared",
    "Origin",
    "OriginCount",
    "Proposed",
    "RequestDivergence",
    "RequestSeries",
    "Run",
    "Series",
    "Threshold",
    "TokenPoint",
    "Values",
    "Verification",
    "Verified",
    "compare",
    "kl_divergence",
    "measure",
    "series",
    "ulp_distance",
]
