"""From values to pixels: linear, logarithmic, and logarithmic with a floor for zero."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10


@dataclass(frozen=True)
class Linear:
    """``low`` is drawn at ``start`` and ``high`` at ``end``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, x: float) -> float:
        """The pixel of ``x``."""
        reach = self.high - self.low
        return self.start + (self.end - self.start) * ((x - self.low) / reach if reach else 0.5)

    def ticks(self, most: int) -> list[float]:
        """Round values within the range, at most about ``most``."""
        reach = self.high - self.low
        if reach <= 0:
            return [self.low] if reach == 0 else []
        raw = reach / max(1, most)
        ten = 10.0 ** floor(log10(raw))
        step = next(n * ten for n in (1, 2, 5, 10) if n * ten >= raw * 0.999)
        return [step * n for n in range(ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9) + 1)]

    def whole_ticks(self, most: int) -> list[int]:
        """The same, without fractions."""
        return sorted({round(x) for x in self.ticks(most) if abs(x - round(x)) < 1e-9})


@dataclass(frozen=True)
class Log:
    """Powers of ten of ``low`` to ``high`` between ``start`` and ``end``; all below ``low``, such as zero, at ``floor``."""

    low: float
    high: float
    start: float
    end: float
    floor: float

    def __call__(self, x: float) -> float:
        """The pixel of ``x``."""
        if x < self.low:
            return self.floor
        reach = log10(self.high / self.low)
        share = log10(x / self.low) / reach if reach else 0.5
        return self.start + (self.end - self.start) * min(1.0, share)

    def ticks(self, most: int) -> list[float]:
        """Powers of ten within the range, at most about ``most``."""
        first, last = ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9)
        step = max(1, ceil((last - first + 1) / max(1, most)))
        return [10.0**n for n in range(first, last + 1, step)]


def log_range(values: list[float]) -> tuple[float, float]:
    """The whole powers of ten around the positive values; one decade where there are none."""
    positive = [x for x in values if 0 < x < float("inf")]
    if not positive:
        return 0.1, 1.0
    low, high = 10.0 ** floor(log10(min(positive))), 10.0 ** ceil(log10(max(positive)))
    return (low, high) if high > low else (low, low * 10)


def said(x: float) -> str:
    """A value of an axis, short: ``0.01``, ``1e-06``, ``2,500``."""
    if x and abs(x) < 0.001:
        return f"{x:.0e}"
    return f"{x:,.6g}" if x % 1 else f"{int(x):,}"
