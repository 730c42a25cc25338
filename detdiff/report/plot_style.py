"""Colours of the pictures, and their CSS: for light and dark, for print, and as one sheet for a file of its own.

Sizes go from ochre over grey to navy on light ground and from blue over grey to yellow on dark ground: along blue and
yellow, which all kinds of colour vision tell apart, and ever further from the ground in lightness.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

STEPS: Final = 8
"""Steps of the scale of sizes: classes ``dd-s0`` to ``dd-s7``."""

REQUESTS: Final = 5
"""Requests with a colour of their own, ``dd-r0`` to ``dd-r4``; all others share ``dd-rx``."""

PATHS: Final = 4
"""Kernel paths with a colour of their own, ``dd-p0`` to ``dd-p3``; the last one is also that of all further ones."""

LIGHT: Final[Mapping[str, str]] = {
    "bg": "#ffffff",
    "ink": "#1b1f24",
    "soft": "#555d68",
    "axis": "#7a828d",
    "grid": "#dfe3e8",
    "equal": "#eff1f4",
    "none": "#8a919b",
    "unsized": "#6f7782",
    "origin": "#c8330a",
    "near": "#c8330a",
    "s0": "#a97c00",
    "s1": "#96762a",
    "s2": "#806d40",
    "s3": "#6b634f",
    "s4": "#56595c",
    "s5": "#404c66",
    "s6": "#283a6b",
    "s7": "#0a1c4f",
    "r0": "#1769aa",
    "r1": "#a06a00",
    "r2": "#0b7d5b",
    "r3": "#9c3f84",
    "r4": "#76624d",
    "rx": "#737b86",
    "p0": "#5b6470",
    "p1": "#7a3ff2",
    "p2": "#0a7a7a",
    "p3": "#8a5a00",
    "a": "#1769aa",
    "b": "#a2470c",
}
DARK: Final[Mapping[str, str]] = {
    "bg": "#14171c",
    "ink": "#e8eaed",
    "soft": "#aab2bd",
    "axis": "#858e9a",
    "grid": "#2f353d",
    "equal": "#22272e",
    "none": "#7f8894",
    "unsized": "#98a1ad",
    "origin": "#ff8552",
    "near": "#ff8552",
    "s0": "#5580c4",
    "s1": "#6e89b2",
    "s2": "#8793a3",
    "s3": "#a09f92",
    "s4": "#b9ab80",
    "s5": "#d2b96a",
    "s6": "#ebca50",
    "s7": "#ffe755",
    "r0": "#6fb4f0",
    "r1": "#e3b04b",
    "r2": "#4fc79b",
    "r3": "#e08fc8",
    "r4": "#c9b39b",
    "rx": "#98a1ad",
    "p0": "#a9b2bd",
    "p1": "#b896ff",
    "p2": "#4cc5c5",
    "p3": "#d9a94a",
    "a": "#6fb4f0",
    "b": "#f0a36b",
}

_RULES: Final = "\n".join(
    (
        ".dd-plot{direction:ltr;font-family:system-ui,sans-serif}",
        ".dd-plot text{font-size:12px;fill:var(--dd-ink);unicode-bidi:isolate;white-space:pre}",
        ".dd-plot .dd-t2{font-size:11px;fill:var(--dd-soft)}",
        ".dd-plot .dd-h{font-size:15px;font-weight:bold}",
        ".dd-plot .dd-h2{font-weight:bold}",
        ".dd-plot .dd-halo{fill:var(--dd-bg);stroke:var(--dd-bg);stroke-width:4px;stroke-linejoin:round}",
        ".dd-plot path,.dd-plot rect{fill:none;stroke:none}",
        ".dd-plot .dd-paper{fill:var(--dd-bg)}",
        ".dd-plot .dd-axis{stroke:var(--dd-axis)}",
        ".dd-plot .dd-grid{stroke:var(--dd-grid)}",
        ".dd-plot .dd-gap{stroke:var(--dd-bg);shape-rendering:crispEdges}",
        # The map.
        ".dd-plot .dd-cells{shape-rendering:crispEdges;stroke-width:1}",
        ".dd-plot .dd-equal{fill:var(--dd-equal);stroke:var(--dd-equal)}",
        ".dd-plot .dd-none{stroke:var(--dd-none)}",
        *(f".dd-plot .dd-s{n}{{fill:var(--dd-s{n});stroke:var(--dd-s{n})}}" for n in range(STEPS)),
        ".dd-plot .dd-unsized{stroke:var(--dd-unsized);stroke-width:6}",
        ".dd-plot .dd-cells.dd-unsized{stroke-width:.4}",
        ".dd-plot .dd-ring{stroke:var(--dd-bg);stroke-width:3px}",
        ".dd-plot .dd-origin{fill:var(--dd-origin)}",
        ".dd-plot .dd-under{stroke:var(--dd-bg);stroke-width:1.5px}",
        ".dd-plot .dd-flip{stroke:var(--dd-ink);stroke-width:1.5px;stroke-dasharray:5 3}",
        ".dd-plot .dd-flip-mark{fill:var(--dd-ink);stroke:var(--dd-bg)}",
        ".dd-plot .dd-prompt{fill:var(--dd-axis)}",
        ".dd-plot .dd-generated{fill:var(--dd-bg);stroke:var(--dd-axis)}",
        ".dd-plot .dd-split{stroke:var(--dd-axis)}",
        # The timeline.
        *(
            f".dd-plot .dd-{r}{{fill:var(--dd-{r});stroke:var(--dd-{r})}}"
            for r in (*(f"r{n}" for n in range(REQUESTS)), "rx")
        ),
        ".dd-plot .dd-decode,.dd-plot .dd-draft{fill-opacity:.3}",
        # Without room for an edge the fill alone has to be seen.
        ".dd-plot .dd-dense{stroke:none}",
        ".dd-plot .dd-dense.dd-decode,.dd-plot .dd-dense.dd-draft{fill-opacity:.65}",
        ".dd-plot .dd-drafted{fill:none}",
        ".dd-plot .dd-verified{stroke:var(--dd-bg)}",
        ".dd-plot .dd-padding{stroke:var(--dd-axis);stroke-dasharray:2 2}",
        ".dd-plot .dd-threshold{stroke:var(--dd-ink);stroke-dasharray:7 3 2 3}",
        *(f".dd-plot .dd-p{n}{{fill:var(--dd-p{n})}}" for n in range(PATHS)),
        ".dd-plot .dd-write{fill:var(--dd-axis)}",
        ".dd-plot .dd-trim{fill:var(--dd-ink)}",
        ".dd-plot .dd-event{stroke:var(--dd-ink);stroke-width:1.5px}",
        ".dd-plot .dd-birth{stroke:var(--dd-origin);stroke-width:1.5px}",
        # Margins and the lens.
        ".dd-plot .dd-margin{stroke:var(--dd-a);stroke-width:6px;stroke-linecap:round}",
        ".dd-plot .dd-small{stroke-width:4px}",
        ".dd-plot .dd-reach{stroke:var(--dd-a)}",
        ".dd-plot .dd-delta{stroke:var(--dd-b);stroke-width:1.3px}",
        ".dd-plot .dd-near{stroke:var(--dd-near);stroke-width:2px;fill:var(--dd-bg)}",
        ".dd-plot .dd-level{stroke:var(--dd-b);stroke-dasharray:7 3 2 3}",
        ".dd-plot .dd-a{stroke:var(--dd-a);stroke-width:2px}",
        ".dd-plot .dd-b{stroke:var(--dd-b);stroke-width:2px;stroke-dasharray:7 4}",
        ".dd-plot .dd-a-mark{fill:var(--dd-a);stroke:var(--dd-bg)}",
        ".dd-plot .dd-b-mark{fill:var(--dd-b);stroke:var(--dd-bg)}",
        ".dd-plot .dd-a-text{fill:var(--dd-a);font-weight:bold}",
        ".dd-plot .dd-b-text{fill:var(--dd-b);font-weight:bold}",
        ".dd-plot .dd-zero{stroke:var(--dd-ink)}",
    )
)

# A file of its own keeps its size, and not every program takes a height of `auto`.
_FITTING: Final = ".dd-plot{max-width:100%;height:auto}"


def style(dark: bool | None = None) -> str:
    """The rules and the custom properties ``--dd-*``: light, dark, or, with None, as the reader's system has it.

    With None an attribute ``data-theme`` of ``light`` or ``dark`` at the root decides, and paper is always light.
    """
    if dark is not None:
        return f":root{{{variables(dark)}}}\n{_FITTING}\n{_RULES}\n"
    light, night = variables(False), variables(True)
    return (
        f":root{{{light}}}\n"
        f"@media screen{{:root[data-theme=dark]{{{night}}}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{night}}}}}\n"
        f"{_FITTING}\n{_RULES}\n"
    )


def variables(dark: bool) -> str:
    """The custom properties alone, as declarations of a rule."""
    return "".join(f"--dd-{name}:{value};" for name, value in (DARK if dark else LIGHT).items())


def standalone_style() -> str:
    """The rules with light colours in their place: many programs that show SVG know no custom properties."""
    return re.sub(r"var\(--dd-([a-z0-9-]+)\)", lambda found: LIGHT[found[1]], _RULES)
