"""What a report says, once: a headline, and sections of blocks in the order in which they are read.

Every format is a pure function of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from detdiff.compare.divergence import Divergence, RequestDivergence
from detdiff.explain.control import NOT_RUN
from detdiff.explain.verdict import Verdict

from .blocks import Block, Code, View
from .lifecycle import agreement_lines, chunk_lines
from .page import Page
from .settings import of_requests, rules
from .side_by_side import side_by_side
from .speculation import speculation_lines
from .summary import advice, sentence
from .text import (
    cache_lines,
    compared_lines,
    finding_lines,
    flip_forward_lines,
    flip_lines,
    margin_lines,
    origin_count_lines,
    origin_lines,
)
from .verdict_text import float64_lines, fragile_lines, not_run_lines, sentence_of, verdict_lines
from .words import SENTENCE, count, escaped, named, passage

if TYPE_CHECKING:
    from detdiff.compare.series import Series

_LONGEST = 400


@dataclass(frozen=True)
class Section:
    """``id`` names it in links; ``folded`` says that a reader in a hurry does without it."""

    id: str
    title: str
    blocks: tuple[Block, ...]
    folded: bool = False


@dataclass(frozen=True, eq=False)
class Report:
    """``kind`` is a verdict's, or ``identical``, ``different`` or ``inconclusive`` where no verdict was asked for.

    ``headline`` is one sentence, ``advice`` what to do, empty where there is nothing. ``series`` is None where the traces
    were not at hand. ``command`` runs both sides again.
    """

    kind: str
    headline: str
    advice: str
    sections: tuple[Section, ...]
    divergence: Divergence | None
    verdict: Verdict | None
    series: Series | None
    command: str

    def section(self, id: str) -> Section | None:
        """The section of that name, or None where there was nothing to say."""
        return next((section for section in self.sections if section.id == id), None)


def build(
    divergence: Divergence | None,
    verdict: Verdict | None = None,
    series: Series | None = None,
    command: str = "",
) -> Report:
    """The content of a report on a comparison, or on a verdict, whose divergence is then the default.

    ``series`` is what there is to draw; ``command`` is the command line that runs both sides again.
    """
    if divergence is None and verdict is not None:
        divergence = verdict.divergence
    made = [
        *([] if divergence is None else _differences(divergence, series)),
        *([] if verdict is None else _verdict(verdict)),
        *([] if divergence is None else _pictures(divergence, verdict, series)),
        *([] if divergence is None else _settings(divergence)),
        *([_reproduce(command)] if command else []),
    ]
    return Report(
        kind=_kind(divergence, verdict),
        headline=sentence(divergence, verdict),
        advice=advice(divergence, verdict),
        sections=tuple(section for section in made if section.blocks),
        divergence=divergence,
        verdict=verdict,
        series=series,
        command=command,
    )


def _kind(divergence: Divergence | None, verdict: Verdict | None) -> str:
    if verdict is not None:
        return verdict.kind
    if divergence is None or divergence.inconclusive:
        return "inconclusive"
    return "identical" if divergence.identical else "different"


def _differences(divergence: Divergence, series: Series | None) -> list[Section]:
    """The flip, the birth, the carriers; each page goes through the requests that parted."""
    parted = [request for request in divergence.requests if request.rung is not None]
    flip, birth, carried = Page(), Page(), Page()
    finding_lines(birth, divergence)
    for request in parted:
        name = f"request {named(request.id)}"
        if request.flip is None:
            tokens = count(min(request.generated_a, request.generated_b), "generated token")
            flip.prose(f"{name}: parts in {request.rung}; no flip within its {tokens}")
        else:
            flip.prose(f"{name}: parts in {request.rung} and flips at generated token {request.flip.index}")
        flip.add(*side_by_side(series, request))
        if request.flip is not None:
            flip_lines(flip, request, request.flip)
            flip_forward_lines(flip, request)
        agreement_lines(flip, request)
        speculation_lines(flip, request)
        birth.prose(f"{name}:")
        _birth(birth, request, series)
        if request.cache_entry is not None or request.carriers is not None:
            carried.prose(f"{name}:")
            cache_lines(carried, request)
    title = "The flip" if any(request.flip is not None for request in parted) else "No token flips"
    return [
        Section("flip", title, flip.blocks),
        Section("birth", "Where it was born", birth.blocks),
        Section("carriers", "What carried it", carried.blocks),
    ]


def _birth(page: Page, request: RequestDivergence, series: Series | None) -> None:
    if request.origin is None:
        page.item("  birth: ", "no origin could be named")
    else:
        origin_lines(page, request.origin)
        chunk_lines(page, request)
    origin_count_lines(page, request)
    if series is not None and any(each.id == request.id for each in series.requests):
        said = "Which layers and positions differ, and where differences were born."
        page.add(View("map", said, request.id))


def _verdict(verdict: Verdict) -> list[Section]:
    controls, float64, end = Page(), Page(), Page()
    rows = [
        (
            named(control.name),
            named(control.result),
            named(sentence_of(control.said), _LONGEST),
            f"{control.forwards:,}",
            f"{control.seconds:.1f}",
        )
        for control in verdict.controls
        if control.result != NOT_RUN
    ]
    if rows:
        controls.table(rows, ("control", "result", "what it showed", "forwards", "seconds"), "")
    not_run_lines(controls, verdict)
    if verdict.divergence is None:
        controls.prose("No control was run, as nothing could be compared.")
    elif not verdict.controls:
        controls.prose("No control was needed.")
    for each in verdict.evidence:
        if each.fact == "acceptance":
            controls.item("acceptance: ", passage(each.said))
    float64_lines(float64, verdict)
    verdict_lines(end, verdict)
    return [
        Section("controls", "The controls", controls.blocks),
        Section("float64", "Against float64", float64.blocks),
        Section("verdict", "The verdict", end.blocks),
    ]


def _pictures(divergence: Divergence, verdict: Verdict | None, series: Series | None) -> list[Section]:
    margins, lens, timeline, compared = Page(), Page(), Page(), Page()
    if series is None:
        for request in divergence.requests:
            if request.margins:
                margins.prose(f"request {named(request.id)}:")
                margin_lines(margins, request)
    if verdict is not None:
        fragile_lines(margins, verdict)
    if series is not None:
        for each in series.requests:
            if any(token.margin is not None for token in each.tokens_a):
                margins.add(View("margins", "Each token's margin beside what moved it.", each.id))
            if each.lens:
                lens.add(View("lens", "At which layer the preference turned.", each.id))
        if series.a or series.b:
            said = "Every forward of both runs: its rows, who was in it, and on which kernel path."
            timeline.add(View("timeline", said))
    compared_lines(compared, divergence)
    return [
        Section("timeline", "Forwards in time", timeline.blocks),
        Section("margins", "Margins", margins.blocks),
        Section("lens", "The two tokens, layer by layer", lens.blocks),
        Section("compared", "What was compared", compared.blocks, folded=True),
    ]


def _settings(divergence: Divergence) -> list[Section]:
    environment, scenario = Page(), Page()
    for page, blocks in (
        (environment, (divergence.a.environment, divergence.b.environment)),
        (environment, (divergence.a.model, divergence.b.model)),
        (scenario, (divergence.a.scenario, divergence.b.scenario)),
    ):
        asked = of_requests(*blocks) if page is scenario else ()
        if rows := (*_beside(*blocks), *asked):
            page.table(rows, ("what", "in a", "in b"), "")
    for run in (divergence.a, divergence.b):
        for rule in rules(run.scenario):
            scenario.item(f"rule of {named(run.trace)}: ", rule)
    return [
        Section("scenario", "The two scenarios", scenario.blocks, folded=True),
        Section("environment", "Environment and model", environment.blocks, folded=True),
    ]


def _beside(a: Mapping[str, Any], b: Mapping[str, Any]) -> Sequence[tuple[str, str, str]]:
    """Each setting of either run; requests and rules, which are long, are told of after it."""
    keys = [key for key in dict.fromkeys((*a, *b)) if key not in ("request", "rule")]
    return [(named(str(key)), _value(a, key), _value(b, key)) for key in keys]


def _value(run: Mapping[str, Any], key: str) -> str:
    if key not in run:
        return "-"
    value = run[key]
    return named(str(value).lower() if isinstance(value, bool) else str(value), _LONGEST)


def _reproduce(command: str) -> Section:
    if len(command) > SENTENCE:
        command = f"# too long to be shown: {len(command):,} characters, which the JSON report has"
    # Quotes and backslashes are the shell's, and stay.
    return Section("reproduce", "Run it again", (Code(escaped(command, ""), "sh"),))
