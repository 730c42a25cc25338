"""Pictures of a measurement of policies: throughput against requests at once, latency, and throughput against flips."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from detdiff.bench.figures import throughput
from detdiff.bench.measure import Measurement, PolicyResult
from detdiff.bench.runs import Spread
from detdiff.bench.split import SplitSearch

from .svg import Canvas, LinearScale, Log, Symbol, coordinate, log_range, mark
from .words import escaped

_LEFT, _WIDTH, _TOP, _HEIGHT = 64, 620, 20.0, 190
_ENDS: Final = (_LEFT, _WIDTH - 16)
_FLOOR: Final = _TOP + _HEIGHT
_SERIES: Final = ("dd-r0", "dd-r1", "dd-r2", "dd-r3", "dd-r4", "dd-rx")


class _PolicyPlot:
    """A picture with values upwards and, where there are ``columns``, a place for each along the floor."""

    def __init__(self, scale: LinearScale | Log, columns: Sequence[str] = ()) -> None:
        self.canvas, self.scale = Canvas(), scale
        self.canvas.levels(scale, _ENDS, scale.ticks(6))
        self._step = (_WIDTH - _LEFT - 32) / max(1, len(columns))
        for place, words in enumerate(columns):
            self.canvas.text(self.across(place, 0.5), _FLOOR + 18, words, "dd-t", "middle")

    def across(self, column: int, share: float) -> float:
        """The x at a share of a column's width."""
        return _LEFT + self._step * (column + share)

    def point(self, x: float, low: float, middle: float, high: float, number: int) -> None:
        """A policy's dot on a line from the least to the largest."""
        self.canvas.line(x, self.scale(low), x, self.scale(high), series(number))
        self.canvas.path(_dot(x, self.scale(middle)), series(number))

    def drawn(self, name: str, title: str, said: str, what: str, legend: Iterable[tuple[int, str]]) -> str:
        """The picture with ``what`` its axes are, and a legend by policies' numbers."""
        self.canvas.text(_LEFT, _FLOOR + 36, what, "dd-t2")
        items: list[tuple[Sequence[Symbol], str]] = [
            ((mark(_dot, series(number)),), escaped(words)) for number, words in legend
        ]
        height = self.canvas.legend(8, _FLOOR + 44, _WIDTH - 16, items) + 6
        return self.canvas.svg(f"dd-{name}", title, said, (_WIDTH, height), False)


def series(number: int) -> str:
    """The class of a policy's marks, the same in all pictures; those beyond the colours share the last."""
    return _SERIES[min(number, len(_SERIES) - 1)]


def _dot(x: float, y: float) -> str:
    return f"M{coordinate(x - 4)} {coordinate(y)}a4 4 0 1 0 8 0a4 4 0 1 0-8 0z"


def _points(measured: Measurement) -> list[tuple[PolicyResult, Spread]]:
    return [(result, spread) for result in measured.results if (spread := throughput(result)) is not None]


def _said(points: Iterable[tuple[PolicyResult, Spread]]) -> str:
    return "; ".join(f"{r.policy.name}: {s.median:.1f} tokens/s, {r.sameness}" for r, s in points)


def _from_zero(points: Iterable[tuple[PolicyResult, Spread]]) -> LinearScale:
    return LinearScale(0, 1.05 * max(spread.high for _, spread in points), _FLOOR, _TOP)


def _family(result: PolicyResult) -> str:
    """A policy without how many requests it lets run at a time."""
    return re.sub(r"^(static|continuous):\d+", r"\1", result.policy.name)


def _families(results: Iterable[PolicyResult]) -> dict[str, list[PolicyResult]]:
    """Policies that differ in the number at once alone, which share a colour in all pictures."""
    found: dict[str, list[PolicyResult]] = {}
    for result in results:
        found.setdefault(_family(result), []).append(result)
    return found


def _answers(results: Sequence[PolicyResult]) -> str:
    """What the policies of a family answer."""
    said: dict[str, list[str]] = {}
    for result in results:
        said.setdefault(result.sameness, []).append(f"{result.policy.at_once}")
    if len(said) == 1:
        return next(iter(said))
    return "; ".join(f"{words} at {', '.join(at)}" for words, at in said.items())


def _legend(families: Mapping[str, list[PolicyResult]]) -> list[tuple[int, str]]:
    return [(n, f"{name}: {_answers(results)}") for n, (name, results) in enumerate(families.items())]


def throughput_svg(measured: Measurement) -> str:
    """Tokens a second of each policy, by how many requests it lets run at a time; a line from the least round to the largest."""
    points = _points(measured)
    if not points:
        return ""
    levels = sorted({result.policy.at_once for result, _ in points})
    families = _families(result for result, _ in points)
    frame = _PolicyPlot(_from_zero(points), [f"{level:,}" for level in levels])
    for number, name in enumerate(families):
        before: tuple[float, float] | None = None
        for result, spread in sorted(points, key=lambda point: point[0].policy.at_once):
            if _family(result) == name:
                level = levels.index(result.policy.at_once)
                same = [_family(r) for r, _ in points if r.policy.at_once == result.policy.at_once]
                x = frame.across(level, (same.index(name) + 1) / (len(same) + 1))
                y = frame.scale(spread.median)
                if before is not None:
                    frame.canvas.line(*before, x, y, series(number))
                frame.point(x, spread.low, spread.median, spread.high, number)
                before = (x, y)
    title = "Throughput against requests at once"
    return frame.drawn("throughput", title, _said(points), "requests at once; tokens/s", _legend(families))


def latency_svg(measured: Measurement) -> str:
    """Medians and 99th percentiles of the times to the first token, between tokens, and per token, of each policy."""
    names = (("ttft", "to the first token"), ("tpot", "per token after it"), ("itl", "between two tokens"))
    found: list[tuple[PolicyResult, list[tuple[float, float]]]] = []
    for result in measured.results:
        pairs = []
        for name, _ in names:
            values = result.pooled(name) or [0.0]
            pairs.append((float(np.median(values)), float(np.percentile(values, 99))))
        found += [(result, pairs)] if result.runs else []
    if not found:
        return ""
    low, high = log_range([x for _, pairs in found for pair in pairs for x in pair])
    frame = _PolicyPlot(Log(low, high, _FLOOR - 14, _TOP, _FLOOR), [words for _, words in names])
    families = _families(result for result, _ in found)
    for place in range(len(names)):
        for number, (result, pairs) in enumerate(found):
            half, most = pairs[place]
            x = frame.across(place, (number + 1) / (len(found) + 1))
            frame.point(x, half, half, most, list(families).index(_family(result)))
    said = "; ".join(f"{r.policy.name}: {pairs[0][0]:.1f} ms to the first token" for r, pairs in found)
    what = "milliseconds: the median, and up to the 99th percentile; policies as in the table, from left to right"
    return frame.drawn("latency", "Latency by policy", said, what, _legend(families))


def split_svg(found: SplitSearch) -> str:
    """Tokens a second of each way to run so many requests, with a line where one batch starts to pay."""
    levels = [level for level in found.levels if level.whole.runs]
    if not levels:
        return ""
    names = ("one after the other", "one batch", "rows split")
    points = [[(result, throughput(result)) for result in level.results] for level in levels]
    known = [(result, spread) for level in points for result, spread in level if spread is not None]
    frame = _PolicyPlot(_from_zero(known), [f"{level.at_once}" for level in levels])
    for place, level in enumerate(points):
        if levels[place].at_once == found.pays_from:
            frame.canvas.line(frame.across(place, 0), _TOP, frame.across(place, 0), _FLOOR, "dd-axis")
            frame.canvas.text(frame.across(place, 0) + 4, _TOP + 10, "pays from here", "dd-t2", halo=True)
        for number, (_, spread) in enumerate(level):
            if spread is not None:
                frame.point(
                    frame.across(place, 0.3 + 0.2 * number), spread.low, spread.median, spread.high, number
                )
    legend = list(enumerate(names[: len(points[0])]))
    said = "; ".join(
        f"{level.at_once} at once: "
        + ", ".join(
            f"{name} {spread.median:.1f} tokens/s"
            for name, (_, spread) in zip(names, at, strict=False)
            if spread
        )
        for level, at in zip(levels, points, strict=True)
    )
    return frame.drawn("split", "Where one batch pays", said, "requests at once; tokens/s", legend)


def flips_svg(measured: Measurement) -> str:
    """One point a policy: tokens a second against how many of its answers flip beside serial's."""
    points = _points(measured)
    if not points:
        return ""
    frame = _PolicyPlot(_from_zero(points))
    families = _families(result for result, _ in points)
    # Families stand side by side, so that those of as many flips do not hide one another.
    beside = min(24.0, 240 / len(families))
    most = max(1, max(result.flips for result, _ in points))
    across = LinearScale(0, most, _LEFT + 24, _WIDTH - 40 - beside * len(families))
    frame.canvas.axis(across, _ENDS, _FLOOR, 60, "")
    for result, spread in points:
        number = list(families).index(_family(result))
        x = across(result.flips) + beside * number
        frame.point(x, spread.median, spread.median, spread.median, number)
        frame.canvas.text(x + 8, frame.scale(spread.median) + 4, f"{result.policy.at_once}", "dd-t2")
    what = f"answers that flip, of {len(measured.workload):,}; tokens/s; beside a point how many requests run at a time"
    return frame.drawn("flips", "Throughput against flips", _said(points), what, _legend(families))
