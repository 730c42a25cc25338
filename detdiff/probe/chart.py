"""How a probe's figures read, and their chart: which M share their bits, and what a row costs at each M.

SVG, readable without hovering.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from detdiff.report.words import runs_of

from .run import Probe

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def letter(number: int) -> str:
    """A class's name: A to Z, then AA, AB and so on."""
    name = ""
    number += 1
    while number:
        number, place = divmod(number - 1, 26)
        name = chr(ord("A") + place) + name
    return name


def duration(seconds: float) -> str:
    """Three digits and a unit, such as ``1.23 ms``."""
    unit, name = next(((unit, name) for unit, name in UNITS if seconds >= unit), UNITS[-1])
    scaled = seconds / unit
    return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {name}"


def spans_of(values: Sequence[int]) -> str:
    """Ascending whole numbers, such as ``1-3, 5``; nothing for none."""
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs_of(values))


# Okabe and Ito's colours, which differ for every kind of colour vision; shapes tell classes apart without colour.
COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00", "#0072b2", "#999999")
CELL, LEFT, RIGHT = 52, 118, 24
BANDS, LINE, PANEL = 40, 150, 330  # heights: of the bits' band, of the times' plot, of one probe in all
TICK = 9  # pixels of a class's shape


def chart(probes: Sequence[Probe]) -> str:
    """An SVG document with one panel a probe, one under the other."""
    longest = max(len(line) for probe in probes for line in _headings(probe))
    columns = max(len(probe.rows) for probe in probes)
    width = max(LEFT + columns * CELL + RIGHT, LEFT + RIGHT + 7 * longest)
    height = PANEL * len(probes)
    body = "\n".join(
        f'<g transform="translate(0 {PANEL * place})">\n{"".join(_panel(probe))}</g>'
        for place, probe in enumerate(probes)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">\n'
        f"<title>{_text('probe of ' + ', '.join(probe.target for probe in probes))}</title>\n"
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _headings(probe: Probe) -> list[str]:
    changes = ", ".join(map(str, probe.bits_change_at))
    facts = [f"bits change at M = {changes}" if changes else "bits do not change with M"]
    if probe.times is not None:
        crossing = probe.time_crosses_at
        facts.append(
            "one call is nowhere cheaper than row by row"
            if crossing is None
            else f"one call is cheaper than row by row from M = {crossing}"
        )
    for what, found in (("position", probe.position), ("neighbours", probe.neighbours)):
        if found:
            facts.append(f"{what} matter" + ("s" if what == "position" else ""))
    if probe.repeat:
        facts.append("a repeat differs")
    return [f"{probe.target} on {probe.on}, {probe.seeds} seeds", "; ".join(facts)]


def _panel(probe: Probe) -> Iterator[str]:
    heading, facts = _headings(probe)
    yield _label(16, 24, heading, size=15, weight="bold")
    yield _label(16, 44, facts)
    top = 84
    yield _label(16, top + BANDS / 2 + 4, "row 0's bits")
    yield from _bands(probe, top)
    bottom = top + BANDS + 28 + LINE
    if probe.times is None:
        bottom = top + BANDS
    else:
        yield from _times(probe, top + BANDS + 28)
    for place, m in enumerate(probe.rows):
        yield _label(_middle(place), bottom + 18, str(m), anchor="middle")
    yield _label(16, bottom + 18, "rows M")
    yield from _thresholds(probe, top, bottom)


def _middle(place: float) -> float:
    return LEFT + (place + 0.5) * CELL


def _bands(probe: Probe, top: float) -> Iterator[str]:
    home = {m: number for number, members in enumerate(probe.classes) for m in members}
    for place, m in enumerate(probe.rows):
        number = home[m]
        colour = COLOURS[number % len(COLOURS)]
        yield (
            f'<rect x="{LEFT + place * CELL}" y="{top}" width="{CELL}" height="{BANDS}" fill="{colour}" stroke="#ffffff"/>\n'
        )
        yield _shape(number, _middle(place) - 10, top + BANDS / 2)
        yield _label(_middle(place) + 3, top + BANDS / 2 + 4, letter(number), weight="bold")


def _shape(number: int, x: float, y: float) -> str:
    """One of four shapes, hollow in every second turn of the colours."""
    r = TICK / 2
    fill = "#000000" if number // len(COLOURS) % 2 == 0 else "none"
    kind = number % 4
    if kind == 0:
        return f'<circle cx="{x}" cy="{y}" r="{r}" fill="{fill}" stroke="#000000"/>\n'
    corners = {
        1: ((-r, -r), (r, -r), (r, r), (-r, r)),
        2: ((0, -r), (r, r), (-r, r)),
        3: ((0, -r), (r, 0), (0, r), (-r, 0)),
    }[kind]
    points = " ".join(f"{x + dx},{y + dy}" for dx, dy in corners)
    return f'<polygon points="{points}" fill="{fill}" stroke="#000000"/>\n'


def _times(probe: Probe, top: float) -> Iterator[str]:
    assert probe.times is not None
    most = max(time.per_row for time in probe.times) or 1e-9
    yield _label(16, top + LINE / 2 - 4, "time per row")
    yield _label(16, top + LINE / 2 + 12, "(from 0)")
    yield f'<line x1="{LEFT}" y1="{top + LINE}" x2="{LEFT + len(probe.rows) * CELL}" y2="{top + LINE}" stroke="#666666"/>\n'
    # Room above the highest point for its value.
    points = [
        (_middle(place), top + LINE - (LINE - 20) * time.per_row / most)
        for place, time in enumerate(probe.times)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{line}" fill="none" stroke="#000000" stroke-width="1.5"/>\n'
    for (x, y), time in zip(points, probe.times, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#000000"/>\n'
        yield _label(x, y - 7, duration(time.per_row), anchor="middle", size=10, halo=3)


def _thresholds(probe: Probe, top: float, bottom: float) -> Iterator[str]:
    places = {m: place for place, m in enumerate(probe.rows)}
    for m in probe.bits_change_at:
        x = LEFT + places[m] * CELL
        yield f'<line x1="{x}" y1="{top - 12}" x2="{x}" y2="{bottom}" stroke="#b00020" stroke-width="2"/>\n'
        yield _label(x, top - 16, "bits", anchor="middle", size=10, fill="#b00020")
    crossing = probe.time_crosses_at
    if crossing is not None:
        x = LEFT + places[crossing] * CELL + 4
        yield (
            f'<line x1="{x}" y1="{top - 12}" x2="{x}" y2="{bottom}" stroke="#00509d" stroke-width="2" '
            'stroke-dasharray="5 4"/>\n'
        )
        yield _label(x + 13, top - 16, "time", size=10, fill="#00509d")


def _label(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    anchor: str = "start",
    weight: str = "normal",
    fill: str = "#000000",
    halo: int = 0,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{fill}" stroke="#ffffff" stroke-width="{halo}" paint-order="stroke">{_text(words)}</text>\n'
    )


def _text(words: str) -> str:
    """``words`` as XML text; what XML cannot hold is replaced."""
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words))
