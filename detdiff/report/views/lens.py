"""The lens: which of the two contested tokens each layer preferred, in both runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Final, Literal

from ..document import Block, Item, Table
from ..svg import (
    AREA,
    Canvas,
    Linear,
    Symbol,
    axis_label,
    coordinate,
    fitted,
    shortened,
    text_width,
    triangle,
)
from ..words import named, shown

if TYPE_CHECKING:
    from detdiff.compare.series import LensPoint, RequestSeries

_HEIGHT: Final = 220
Run = Literal["a", "b"]
Points = list[tuple[int, float]]


def lens_svg(request: RequestSeries, *, columns: int = 240, standalone: bool = False) -> str:
    """By layer the logit of run a's token minus that of run b's at the flip; a line for each run, and where it turned."""
    runs: dict[Run, Points] = {"a": _known(request.lens, "a"), "b": _known(request.lens, "b")}
    layers = max((point.layer for point in request.lens), default=0) + 1
    left, area = 58.0, AREA * columns
    right = left + min(area, max(240.0, 36.0 * layers)) - 24
    width = max(right + 24, left + min(area, 420)) + 14
    values = [value for points in runs.values() for _, value in points]
    reach = max((abs(value) for value in values), default=1.0) * 1.08 or 1.0
    canvas, top = Canvas(), 4.0
    title = f"The two contested tokens of {shortened(request.id)}, layer by layer"
    if standalone:
        canvas.text(8, top + 16, fitted(title, width - 16, 15), "dd-t dd-h")
        top += 26
    tokens = _tokens(request)
    canvas.text(left, top + 14, _cut(f"above 0: run a's token {tokens['a']}", width - left))
    top += 46
    bottom = top + _HEIGHT
    value = Linear(-reach, reach, bottom, top)
    x = Linear(0, layers - 1, left + 12, right - 4)
    for tick in value.ticks(6):
        canvas.line(left, value(tick), right, value(tick), "dd-grid")
        canvas.text(left - 6, value(tick) + 4, axis_label(tick), "dd-t2", "end")
    canvas.line(left, value(0), right, value(0), "dd-zero")
    for run, points in runs.items():
        _line(canvas, run, [(x(layer), value(y)) for layer, y in points])
    _ends(canvas, {run: points[-1] for run, points in runs.items() if points}, x, value, right)
    _turns(canvas, runs, x, value, (top, width))
    canvas.text(left, bottom + 14, _cut(f"below 0: run b's token {tokens['b']}", width - left))
    axis = bottom + 22
    canvas.line(left, axis, right, axis, "dd-axis")
    for layer in x.whole_ticks(max(1, int((right - left) / 40))):
        canvas.line(x(layer), axis, x(layer), axis + 4, "dd-axis")
        canvas.text(x(layer), axis + 16, str(layer), "dd-t2", "middle")
    canvas.text(left, axis + 32, "after layer; difference of the two logits", "dd-t2")
    height = canvas.legend(8, axis + 40, width - 16, _legend()) + 6
    return canvas.svg("dd-lens", title, _said(request, runs), (width, height), standalone)


def _known(lens: Sequence[LensPoint], run: Run) -> Points:
    both = [(point.layer, point.a if run == "a" else point.b) for point in lens]
    return [(layer, value) for layer, value in both if value is not None and isfinite(value)]


def turn(run: Run, points: Points) -> int | None:
    """The layer from which on a run prefers the token that it chose, or ties; None where it does not in the end."""
    sign = 1 if run == "a" else -1
    since = None
    for layer, value in points:
        if sign * value < 0:
            since = None
        elif since is None:
            since = layer
    return since


def _tokens(request: RequestSeries) -> dict[Run, str]:
    """The two tokens at the flip, as far as they are at hand."""
    found: dict[Run, str] = {"a": "", "b": ""}
    for run, tokens in (("a", request.tokens_a), ("b", request.tokens_b)):
        for token in tokens:
            if token.index == request.flip_index:
                found["a" if run == "a" else "b"] = shown(token.text[:24])
    return found


def _cut(words: str, width: float) -> str:
    while text_width(words) > width:
        words = f"{words[:-2]}…"
    return words


def _line(canvas: Canvas, run: Run, points: list[tuple[float, float]]) -> None:
    data = " ".join(f"{coordinate(x)} {coordinate(y)}" for x, y in points)
    canvas.path(f"M{data}" if data else "", f"dd-{run}")
    near = len(points) > 1 and points[1][0] - points[0][0] < 14
    canvas.path("".join(_mark_at(run, x, y, 2.5 if near else 4) for x, y in points), f"dd-{run}-mark")


def _mark_at(run: Run, x: float, y: float, r: float) -> str:
    """A disc for run a, a square for run b."""
    if run == "a":
        arc, wide = f"a{coordinate(r)} {coordinate(r)} 0 1 0 ", coordinate(2 * r)
        return f"M{coordinate(x - r)} {coordinate(y)}{arc}{wide} 0{arc}-{wide} 0z"
    side = coordinate(1.8 * r)
    return f"M{coordinate(x - 0.9 * r)} {coordinate(y - 0.9 * r)}h{side}v{side}h-{side}z"


def _ends(canvas: Canvas, ends: dict[Run, tuple[int, float]], x: Linear, value: Linear, right: float) -> None:
    """Each line's name at its end, kept apart from the other's."""
    at = {run: value(y) + 4 for run, (_, y) in ends.items()}
    if len(at) == 2 and abs(at["a"] - at["b"]) < 14:
        middle = (at["a"] + at["b"]) / 2
        above = 7 if at["a"] <= at["b"] else -7
        at = {"a": middle - above, "b": middle + above}
    for run, y in at.items():
        canvas.text(right + 8, y, run, f"dd-t dd-{run}-text")


def _turns(
    canvas: Canvas, runs: dict[Run, Points], x: Linear, value: Linear, within: tuple[float, float]
) -> None:
    top, width = within
    for run, points in runs.items():
        layer = turn(run, points)
        if layer is None or layer == points[0][0]:
            continue
        # One line for each run, so that turns in one layer do not hide each other.
        y = top - (12 if run == "a" else -4)
        canvas.line(x(layer), y, x(layer), value(0), "dd-axis")
        canvas.path(triangle(x(layer), y, 5), "dd-flip-mark")
        words = f"{run} turns in layer {layer}"
        left = x(layer) + 9 + text_width(words) > width
        at = x(layer) - 9 if left else x(layer) + 9
        canvas.text(at, y - 1, words, "dd-t", "end" if left else "start", halo=True)


def _legend() -> list[tuple[Sequence[Symbol], str]]:
    def line(run: Run) -> Symbol:
        def draw(canvas: Canvas, x: float, y: float) -> None:
            canvas.line(x - 7, y, x + 8, y, f"dd-{run}")
            canvas.path(_mark_at(run, x, y, 4), f"dd-{run}-mark")

        return draw

    def turned(canvas: Canvas, x: float, y: float) -> None:
        canvas.path(triangle(x, y + 4, 5), "dd-flip-mark")

    return [
        ((line("a"),), "run a"),
        ((line("b"),), "run b"),
        ((turned,), "from here on the run prefers what it chose"),
    ]


def _said(request: RequestSeries, runs: dict[Run, Points]) -> str:
    """The picture in words."""
    tokens = _tokens(request)
    parts = [f"Logit of run a's token {tokens['a']} minus that of run b's token {tokens['b']}, by layer"]
    for run, points in runs.items():
        if not points:
            parts.append(f"run {run} recorded none")
            continue
        layer = turn(run, points)
        since = "not even in the end" if layer is None else f"from layer {layer} on"
        parts.append(f"run {run} ends at {points[-1][1]:.6g} and prefers its own token {since}")
    return "; ".join(parts) + "."


def lens_table(request: RequestSeries, most: int) -> Table:
    # The last layers are where it is decided.
    rows = tuple((str(point.layer), _signed(point.a), _signed(point.b)) for point in request.lens[-most:])
    caption = "Logit of a's token minus logit of b's, at the flip"
    if len(request.lens) > most:
        caption += f"; the last {most} of {len(request.lens):,} layers"
    return Table(("after layer", "in a", "in b"), rows, caption=caption)


def _signed(x: float | None) -> str:
    return "-" if x is None else f"{x:+.6f}"


_LAYERS = 12
_AROUND = 2


def lens_blocks(request: RequestSeries) -> Iterator[Block]:
    points = request.lens
    if not points:
        return
    turns = {"a": _turn([point.a for point in points]), "b": _turn([point.b for point in points])}
    yield Item(
        "  the two tokens by layer: ",
        f"{named(request.id)}, logit of a's token minus logit of b's at the flip, in both runs",
    )
    rows = [_point(point, n, turns) for n, point in enumerate(points)]
    kept = _kept(len(points), turns.values())
    yield Table(("layer", "in a", "in b", ""), tuple(rows[n] for n in kept), 2)
    if len(kept) < len(points):
        yield Item("    ", f"and {len(points) - len(kept)} more layers")


def _point(point: LensPoint, n: int, turns: dict[str, int | None]) -> tuple[str, ...]:
    turned = [run for run, at in turns.items() if at == n]
    return (
        f"{point.layer}",
        *("-" if x is None else f"{x:+.6f}" for x in (point.a, point.b)),
        f"the preference turns in {' and '.join(turned)}" if turned else "",
    )


def _turn(values: Sequence[float | None]) -> int | None:
    """Where the last value's preference began, if there was another one before. A tie is no preference."""
    known = [(n, x > 0) for n, x in enumerate(values) if x]
    for (_, before), (n, after) in zip(reversed(known[:-1]), reversed(known[1:]), strict=True):
        if before != after:
            return n
    return None


def _kept(layers: int, turns: Iterable[int | None]) -> list[int]:
    """All of few layers; of many the first, the last and those around a turn."""
    if layers <= _LAYERS:
        return list(range(layers))
    near = {n for turn in turns if turn is not None for n in range(turn - _AROUND, turn + _AROUND + 1)}
    return sorted(n for n in near | {0, layers - 1} if 0 <= n < layers)
