"""Sites: found by walking a model's modules, recorded by swapping classes, undone by a context manager."""

from __future__ import annotations

from .plant import Plant
from .session import Session
from .sites import SiteMap, discover

__all__ = ["Plant", "Session", "SiteMap", "discover"]
