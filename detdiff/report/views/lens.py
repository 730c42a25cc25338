"""The lens: which of the two contested tokens each layer preferred, in both runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Final, Literal

from ..document import Block, Item, Table, ViewSubject
from ..svg import (
    AREA,
    Axis,
    Canvas,
    CursorJump,
    CursorPlaces,
    Drawing,
    LinearScale,
    Symbol,
    coordinate,
    shortened,
    text_width,
    triangle,
)
from ..words import shown

if TYPE_CHECKING:
    from detdiff.compare.series import LensPoint, RequestSeries

_HEIGHT: Final = 220
_LAYERS: Final = 12
_AROUND: Final = 2
Run = Literal["a", "b"]
_RUNS: Final[tuple[Run, ...]] = ("a", "b")
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
    canvas = Canvas()
    title = f"The two contested tokens of {shortened(request.id)}, layer by layer"
    top = canvas.heading(title, width, standalone)
    tokens = _tokens(request)
    canvas.text(left, top + 14, _cut(f"above 0: run a's token {tokens['a']}", width - left))
    top += 46
    bottom = top + _HEIGHT
    value = LinearScale(-reach, reach, bottom, top)
    x = LinearScale(0, layers - 1, left + 12, right - 4)
    canvas.levels(value, (left, right), value.ticks(6))
    canvas.line(left, value(0), right, value(0), "dd-zero")
    for run, points in runs.items():
        _line(canvas, run, [(x(layer), value(y)) for layer, y in points])
    _ends(canvas, {run: points[-1] for run, points in runs.items() if points}, x, value, right)
    _turns(canvas, runs, x, value, (top, width))
    canvas.text(left, bottom + 14, _cut(f"below 0: run b's token {tokens['b']}", width - left))
    step = x(1) - x(0) if layers > 1 else right - left
    places = CursorPlaces(x(0) - step / 2, step, [(top - 4, bottom - top + 8)])
    axis = bottom + 22
    canvas.line(left, axis, right, axis, "dd-axis")
    canvas.axis(x, (left, right), axis, 40, "after layer; difference of the two logits")
    height = canvas.legend(8, axis + 40, width - 16, _legend()) + 6
    return canvas.svg("dd-lens", title, _said(request, runs), (width, height), standalone, places)


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


def _ends(
    canvas: Canvas, ends: dict[Run, tuple[int, float]], x: LinearScale, value: LinearScale, right: float
) -> None:
    """Each line's name at its end, kept apart from the other's."""
    at = {run: value(y) + 4 for run, (_, y) in ends.items()}
    if len(at) == 2 and abs(at["a"] - at["b"]) < 14:
        middle = (at["a"] + at["b"]) / 2
        above = 7 if at["a"] <= at["b"] else -7
        at = {"a": middle - above, "b": middle + above}
    for run, y in at.items():
        canvas.text(right + 8, y, run, f"dd-t dd-{run}-text")


def _turns(
    canvas: Canvas, runs: dict[Run, Points], x: LinearScale, value: LinearScale, within: tuple[float, float]
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


def lens_drawing(request: RequestSeries) -> Drawing:
    """The picture with what is told of each layer."""
    points = {point.layer: point for point in request.lens}
    layers = range(max(points, default=0) + 1)
    turns = {run: turn(run, _known(request.lens, run)) for run in _RUNS}
    about: list[tuple[str, list[str | None]]] = [
        (f"in {run}", [_signed(getattr(points.get(layer), run, None)) for layer in layers]) for run in _RUNS
    ]
    about.append(
        ("here", [" and ".join(f"{run} turns" for run in _RUNS if turns[run] == n) or None for n in layers])
    )
    stops = sorted({(0, n) for n in turns.values() if n is not None})
    jumps = [CursorJump("t", "Next turn", stops)] if stops else []
    axis = Axis([f"After layer {layer}" for layer in layers], about)
    return Drawing(lens_svg(request), [""], axis, (), jumps, (), (0, len(layers) - 1))


class LensView:
    """The two contested tokens by layer."""

    name = "lens"
    title = "Preference by layer"
    sentence = "At which layer the preference turned."
    section = "lens", "The two tokens, layer by layer"
    of_request = True

    def shows(self, subject: ViewSubject) -> bool:
        return subject.request is not None and bool(subject.request.lens)

    def picture(self, subject: ViewSubject, *, columns: int, standalone: bool) -> str:
        return lens_svg(subject.one, columns=columns, standalone=standalone)

    def drawings(self, subject: ViewSubject) -> Sequence[tuple[str, Callable[[], Drawing]]]:
        return [("all layers", partial(lens_drawing, subject.one))]

    def table(self, subject: ViewSubject, most: int) -> Table:
        """All of few layers; of many the first, the last and those around a turn."""
        points = subject.one.lens
        turns = {run: turn(run, _known(points, run)) for run in _RUNS}
        kept = list(range(len(points)))
        if len(points) > most:
            around = {n for at in turns.values() if at for n in range(at - _AROUND, at + _AROUND + 1)}
            kept = sorted(n for n in around | {0, len(points) - 1} if 0 <= n < len(points))[:most]
        caption = "Logit of a's token minus logit of b's, at the flip"
        if len(kept) < len(points):
            caption += f"; {len(points) - len(kept):,} more layers are left out"
        return Table(
            ("layer", "in a", "in b", ""), tuple(_row(points[n], n, turns) for n in kept), 2, caption
        )

    def words(self, subject: ViewSubject, columns: int) -> Iterator[Block]:
        table = self.table(subject, _LAYERS)
        if table.rows:
            yield Item("  the two tokens by layer: ", table.caption)
            yield replace(table, caption="")


def _row(point: LensPoint, n: int, turns: Mapping[Run, int | None]) -> tuple[str, ...]:
    turned = [run for run, at in turns.items() if at == n and n]
    note = f"the preference turns in {' and '.join(turned)}" if turned else ""
    return f"{point.layer}", _signed(point.a), _signed(point.b), note


def _signed(x: float | None) -> str:
    return "-" if x is None else f"{x:+.6f}"
