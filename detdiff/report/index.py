"""Several reports at once: which two runs, what came out, and where to read on; of a sweep also by its axes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from .document import Report, Table
from .text import table_lines
from .words import count, named

KINDS = (
    "failed",
    "bug",
    "nondeterminism",
    "numerics",
    "configuration",
    "undetermined",
    "different",
    "inconclusive",
    "identical",
)
"""What needs attention first comes first."""


@dataclass(frozen=True)
class OriginPlace:
    """Where one request's first origin is, and the position of its flip, None where it has none."""

    request: str
    site: str
    layer: int | None
    position: int
    flip: int | None


@dataclass(frozen=True)
class IndexEntry:
    """One comparison, ``name`` is the user's word for it, ``a`` and ``b`` name its runs.

    ``page`` is the path of its report, relative to the index, None where there is none. ``flips`` of ``requests``
    compared requests flip; ``origin`` is the site of the first origin, empty where there is none. Texts are as they are
    in the trace and the folder, not yet escaped, but for the headline. In a sweep ``labels`` are those of its axes, ``places`` the
    first origins of its requests, and ``since`` says what is other than in the sweep before.
    """

    name: str
    a: str
    b: str
    kind: str
    headline: str
    flips: int
    requests: int
    origin: str
    page: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    places: tuple[OriginPlace, ...] = ()
    since: str = ""

    @classmethod
    def of(cls, name: str, report: Report, page: str | None = None) -> IndexEntry:
        """The line of a report; its runs are called as their traces are."""
        divergence = report.divergence
        if divergence is None:
            return cls(name, "", "", report.kind, report.headline, 0, 0, "", page)
        first = next((each for each in divergence.requests if each.id == divergence.first), None)
        return cls(
            name=name,
            a=divergence.a.trace,
            b=divergence.b.trace,
            kind=report.kind,
            headline=report.headline,
            flips=sum(each.flip is not None for each in divergence.requests),
            requests=divergence.compared.requests,
            origin="" if first is None or first.origin is None else first.origin.site,
            page=page,
            places=tuple(
                OriginPlace(
                    each.id,
                    each.origin.site,
                    each.origin.layer,
                    each.origin.position,
                    None if each.flip is None else each.flip.position,
                )
                for each in divergence.requests
                if each.origin is not None
            ),
        )

    @property
    def link(self) -> str:
        """The page's address: always a relative one, whatever its name is; empty without a page."""
        # A file's name may be bytes that are no text.
        return "" if self.page is None else f"./{quote(os.fsencode(self.page), safe='/')}"

    @property
    def filtered(self) -> dict[str, str]:
        """What a reader chooses it by: its labels, whether it flips, and its first origin."""
        own = {"flips": "some" if self.flips else "none", "first origin": self.origin or "none"}
        return {**self.labels, **own, **({"since": self.since} if self.since else {})}

    @property
    def rank(self) -> int:
        """How soon it is read."""
        return KINDS.index(self.kind) if self.kind in KINDS else len(KINDS)


def index_html(entries: Sequence[IndexEntry]) -> str:
    """A page with a table that can be sorted and filtered, and that is all there without script."""
    # A text needs no templates.
    from .html import render

    ordered = _ordered(entries)
    kinds = Counter(each.kind for each in ordered)
    from .small_multiples import origin_pictures

    return render(
        "index.html",
        ("page.js", "index.js"),
        entries=ordered,
        kinds=kinds,
        title=summary(entries),
        filters=_filters(ordered) if any(each.labels for each in ordered) else {},
        pictures=origin_pictures(ordered) if any(each.labels for each in ordered) else (),
        compared=any(each.since for each in ordered),
    )


def _filters(entries: Sequence[IndexEntry]) -> dict[str, list[str]]:
    """What a sweep's table is filtered by, each with the values that there are."""
    found: dict[str, dict[str, None]] = {}
    for each in entries:
        for name, value in each.filtered.items():
            found.setdefault(name, {})[value] = None
    return {name: sorted(values) for name, values in found.items() if len(values) > 1}


def index_text(entries: Sequence[IndexEntry], *, width: int = 100, most: int | None = None) -> str:
    """The same as a table of text; lines are at most ``width`` characters where that can be. ``most`` is how many are shown."""
    # A sweep's comparisons are named by their second run.
    swept = any(each.labels for each in entries)
    rows = tuple(
        (
            named(each.name),
            *((named(run) or "-") for run in ((each.a,) if swept else (each.a, each.b))),
            each.kind,
            f"{each.flips:,} of {each.requests:,}",
            named(each.origin) or "-",
        )
        for each in _ordered(entries)[:most]
    )
    left_out = len(entries) - len(rows)
    runs = ("against",) if swept else ("a", "b")
    table = Table(("comparison", *runs, "verdict", "flips", "origin at"), rows)
    more = [f"and {left_out:,} more"] if left_out else []
    return "\n".join((summary(entries), "", *table_lines(table, max(40, width)), *more)) + "\n"


def summary(entries: Sequence[IndexEntry]) -> str:
    """How many of which kind, in a sentence."""
    kinds = Counter(each.kind for each in _ordered(entries))
    listed = ", ".join(f"{found:,} {kind}" for kind, found in kinds.items())
    return f"{count(len(entries), 'comparison')}: {listed}." if entries else "No comparison was found."


def _ordered(entries: Sequence[IndexEntry]) -> list[IndexEntry]:
    return sorted(entries, key=lambda each: (each.rank, each.name))
