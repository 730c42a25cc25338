"""The picture of a summary: how far log-probabilities drift, by how many requests were sent at once."""

from __future__ import annotations

from detdiff.compare.summary import ArmSummary, Summary

from .svg import Canvas, Log, coordinate, cross, log_range, mark

_LEFT, _STEP, _HEIGHT, _ZERO = 64, 96, 200, 18


def drift_svg(summary: Summary, *, standalone: bool = True) -> str:
    """An SVG, a document of its own where it is ``standalone``: at each level the largest movement (a point) and the mean one (a cross), zero under the scale, and how
    many answers flip. Run to run stands beside each level, drawn hollow."""
    levels = sorted({arm.asked for arm in (*summary.repeats, *summary.arms)})
    width = max(360, _LEFT + _STEP * len(levels) + 24)
    canvas = Canvas()
    title = "Log-probabilities by requests at once"
    top = canvas.heading(title, width, standalone) + 16
    moved = [each for arm in (*summary.repeats, *summary.arms) for each in (arm.largest, arm.mean)]
    low, high = log_range(moved)
    scale = Log(max(low, high * 1e-9), high, top + _HEIGHT, top, top + _HEIGHT + _ZERO)
    canvas.levels(scale, (_LEFT, width - 16), scale.ticks(6))
    canvas.line(_LEFT, scale.floor, width - 16, scale.floor, "dd-axis")
    canvas.text(_LEFT - 6, scale.floor + 4, "0", "dd-t2", "end")
    for place, level in enumerate(levels):
        x = _LEFT + _STEP * (place + 0.5)
        for arm in summary.arms:
            if arm.asked == level:
                _point(canvas, scale, x + 8, arm)
                canvas.text(x, scale.floor + 34, f"{arm.flipped} of {arm.requests} flip", "dd-t2", "middle")
        for arm in summary.repeats:
            if arm.asked == level:
                _hollow(canvas, scale, x - 8, arm)
        canvas.text(x, scale.floor + 18, f"{level:,}", "dd-t", "middle")
    canvas.text(_LEFT, scale.floor + 52, "requests sent at once", "dd-t2")
    items = [
        ((mark(_dot, "dd-margin"),), "a against b: the largest movement of a log-probability"),
        ((mark(lambda x, y: cross(x, y, 3.5), "dd-delta"),), "the mean one, of all that were compared"),
        ((mark(_square, "dd-axis"),), "run to run: the largest movement"),
    ]
    height = canvas.legend(8, scale.floor + 60, width - 16, items) + 6
    return canvas.svg("dd-drift", title, _said(summary), (width, height), standalone)


def _point(canvas: Canvas, scale: Log, x: float, arm: ArmSummary) -> None:
    canvas.path(_dot(x, scale(arm.largest)), "dd-margin")
    canvas.path(cross(x, scale(arm.mean), 3.5), "dd-delta")


def _hollow(canvas: Canvas, scale: Log, x: float, arm: ArmSummary) -> None:
    canvas.path(_square(x, scale(arm.largest)), "dd-axis")


def _dot(x: float, y: float) -> str:
    return f"M{coordinate(x)} {coordinate(y)}h.01"


def _square(x: float, y: float) -> str:
    return f"M{coordinate(x - 4)} {coordinate(y - 4)}h8v8h-8z"


def _said(summary: Summary) -> str:
    parts = [
        f"{arm.asked} at once: {arm.largest:.3g} at most, {arm.mean:.3g} on average" for arm in summary.arms
    ]
    return "; ".join(parts) or "nothing was compared"
