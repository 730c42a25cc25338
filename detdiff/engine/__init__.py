"""Runs a scenario: mlx-lm's own generators (padded) or our iteration-level scheduler (packed)."""

from __future__ import annotations

from .record import RecordOptions, generate, record

__all__ = ["RecordOptions", "generate", "record"]
