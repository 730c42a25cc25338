"""Pages for the browser: those of the golden reports, and every view of series that were made by hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from detdiff.compare.series import Series
from detdiff.report.build import build
from detdiff.report.document import Report, Section, View
from detdiff.report.html import html
from detdiff.report.saved import read_saved

GOLDEN = Path(__file__).resolve().parent.parent / "report" / "golden"
NAMES = ("reference", "kernel-switch", "bug", "configuration", "identical", "inconclusive")


def report(name: str) -> Report:
    """A golden report."""
    saved = read_saved(GOLDEN / name / "report.json")
    return build(saved.divergence, saved.verdict, saved.series, saved.command)


@cache
def page(name: str) -> str:
    """Its page."""
    return html(report(name))


def drawing(series: Series) -> Report:
    """A report that has nothing but the views: of each request a map, its margins, its layers, and the timeline."""
    views = [View("timeline", "Every forward of both runs.")]
    for request in series.requests:
        views.append(View("map", "Which layers and positions differ.", request.id))
        views.append(View("margins", "Each token's margin.", request.id))
        if request.lens:
            views.append(View("lens", "Where the preference turned.", request.id))
    sections = (Section("origin", "Where it arose", tuple(views)),)
    return Report("different", "The runs diverge", "", sections, None, None, series, "")
