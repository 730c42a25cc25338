"""The one place that makes a document of a comparison or a verdict: a headline, what to do, and its sections.

Every format is a pure function of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from detdiff.compare.divergence import Divergence, RequestDivergence
from detdiff.explain.control import NOT_RUN
from detdiff.explain.verdict import Verdict

from .document import Code, Item, Mark, MarkedToken, Page, Report, Section, Texts, View, ViewSubject
from .findings import (
    agreement_lines,
    cache_lines,
    chunk_lines,
    compared_lines,
    finding_lines,
    flip_forward_lines,
    flip_lines,
    float64_lines,
    fragile_lines,
    lacking_lines,
    margin_lines,
    not_run_lines,
    origin_count_lines,
    origin_lines,
    outcome_lines,
    run_line,
    sentence_of,
    speculation_lines,
    verdict_lines,
)
from .headlines import headline
from .roles import role_lines, role_score_lines
from .views import VIEWS
from .words import LONGEST, SENTENCE, asked, count, escaped, named, of_requests, passage, rules, sampling

if TYPE_CHECKING:
    from detdiff.compare.series import RequestSeries, Series, TokenPoint

_LONGEST_SETTING = 400


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
        *([] if divergence is None else _differences(divergence, verdict, series)),
        *([] if verdict is None else _verdict_sections(verdict)),
        *([] if divergence is None else _picture_sections(divergence, verdict, series)),
        *([] if divergence is None else _setting_sections(divergence)),
        *([_reproduce(command)] if command else []),
    ]
    return Report(
        kind=_kind(divergence, verdict),
        headline=headline(divergence, verdict),
        runs=() if divergence is None else _run_items(divergence),
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


def _differences(divergence: Divergence, verdict: Verdict | None, series: Series | None) -> list[Section]:
    """The flip, the origin, the differing cache entries; each page goes through the requests that diverged."""
    diverged = [request for request in divergence.requests if request.stage is not None]
    flip, origin, carried, roles = Page(), Page(), Page(), Page()
    if divergence.across_engines is not None:
        role_lines(roles, divergence.across_engines)
    finding_lines(origin, divergence)
    for request in diverged:
        name = f"request {named(request.id)}"
        if request.text is not None:
            flip.prose(
                f"{name}: diverges in {request.stage}; another text from character {request.text.index} on"
            )
        elif request.scored is not None or request.embedding is not None:
            flip.prose(f"{name}: diverges in {request.stage}")
        elif request.flip is None:
            tokens = count(min(request.generated_a, request.generated_b), "generated token")
            flip.prose(f"{name}: diverges in {request.stage}; no flip within its {tokens}")
        else:
            flip.prose(
                f"{name}: diverges in {request.stage} and flips at generated token {request.flip.index}"
            )
        flip.add(*_side_by_side(series, request))
        if request.flip is not None and request.text is None:
            flip_lines(flip, request, request.flip)
            _sampling(flip, divergence, request)
            flip_forward_lines(flip, request, divergence)
        outcome_lines(flip, request)
        agreement_lines(flip, request)
        for each in () if verdict is None else verdict.evidence:
            if each.fact == "proposals" and each.detail.get("request") == request.id:
                flip.item("  draft: ", passage(each.sentence))
        speculation_lines(flip, request)
        origin.prose(f"{name}:")
        _origin_section(origin, divergence, request, series)
        if request.cache_entry is not None or request.differing_entries is not None:
            carried.prose(f"{name}:")
            cache_lines(carried, request)
    lacking_lines(flip, divergence, "tokens", "logits")
    lacking_lines(origin, divergence, "sites", "inputs", "rows_seen", "kernel_paths")
    lacking_lines(carried, divergence, "cache")
    flips = any(request.flip is not None or request.text is not None for request in diverged)
    given = any(each.scored is not None or each.embedding is not None for each in diverged)
    title = "The flip" if flips else "What came out" if given else "No token flips"
    return [
        Section("flip", title, flip.blocks),
        Section("roles", "By role", roles.blocks),
        Section("origin", "Where it arose", origin.blocks),
        Section("differing_entries", "What carried it", carried.blocks),
    ]


def _run_items(divergence: Divergence) -> tuple[Item, ...]:
    return tuple(Item(f"{name}: ", run_line(run)) for name, run in (("a", divergence.a), ("b", divergence.b)))


def _sampling(page: Page, divergence: Divergence, request: RequestDivergence) -> None:
    """How each side chose, where either sampled."""
    how = [sampling(asked(run.scenario).get(request.id, {})) for run in (divergence.a, divergence.b)]
    if any(how):
        for run, words in zip("ab", how, strict=True):
            page.item(f"    {run}: ", words or "greedy")


def _origin_section(
    page: Page, divergence: Divergence, request: RequestDivergence, series: Series | None
) -> None:
    if request.origin is None:
        if divergence.across_engines is not None:
            page.item("  origin: ", "the engines are two, so nothing is an origin")
        elif divergence.across_models:
            page.item("  origin: ", "the weights are two, so nothing is an origin")
        elif not any("sites" in run.lacks for run in (divergence.a, divergence.b)):
            page.item("  origin: ", "no origin could be named")
    else:
        origin_lines(page, request.origin)
        chunk_lines(page, request)
    origin_count_lines(page, request)
    if series is not None:
        found = [each for each in series.requests if each.id == request.id]
        page.add(*_views("origin", [ViewSubject(series, each, None) for each in found]))


def _verdict_sections(verdict: Verdict) -> list[Section]:
    controls, float64, end = Page(), Page(), Page()
    rows = [
        (
            named(control.name),
            named(control.result),
            named(sentence_of(control.sentence), _LONGEST_SETTING),
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
            controls.item("acceptance: ", passage(each.sentence))
    float64_lines(float64, verdict)
    role_score_lines(float64, verdict)
    verdict_lines(end, verdict)
    return [
        Section("controls", "The controls", controls.blocks),
        Section("float64", "Against float64", float64.blocks),
        Section("verdict", "The verdict", end.blocks),
    ]


def _picture_sections(
    divergence: Divergence, verdict: Verdict | None, series: Series | None
) -> list[Section]:
    """A section for each that a view names, beside those that have words of their own."""
    titles = dict(kind.section for kind in VIEWS.values() if kind.section[0] != "origin")
    pages = {id: Page() for id in titles}
    if series is None:
        for request in divergence.requests:
            if request.margins:
                pages["margins"].prose(f"request {named(request.id)}:")
                margin_lines(pages["margins"], request)
    if verdict is not None:
        fragile_lines(pages["margins"], verdict)
    if series is not None:
        subjects = [ViewSubject(series, each, divergence) for each in (None, *series.requests)]
        if len(series.requests) < len(divergence.requests):
            pages["timeline"].prose(
                f"Drawn are {len(series.requests)} of {count(len(divergence.requests), 'request')}: those that flip first, then "
                "those that differ otherwise; in forwards the rest are told together, as other requests."
            )
        lacking_lines(pages["timeline"], divergence, "forwards")
        for id, page in pages.items():
            page.add(*_views(id, subjects))
    compared = Page()
    compared_lines(compared, divergence)
    return [
        *(Section(id, titles[id], page.blocks) for id, page in pages.items()),
        Section("compared", "What was compared", compared.blocks, folded=True),
    ]


def _views(section: str, subjects: Iterable[ViewSubject]) -> Iterator[View]:
    """The views of a section that have something to show."""
    for subject in subjects:
        for kind in VIEWS.values():
            if kind.section[0] == section and kind.of_request == (subject.request is not None):
                if kind.shows(subject):
                    yield View(
                        kind.name, kind.sentence, None if subject.request is None else subject.request.id
                    )


def _setting_sections(divergence: Divergence) -> list[Section]:
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
    return named(str(value).lower() if isinstance(value, bool) else str(value), _LONGEST_SETTING)


def _reproduce(command: str) -> Section:
    if len(command) > SENTENCE:
        command = f"# too long to be shown: {len(command):,} characters, which the JSON report has"
    # Quotes and backslashes are the shell's, and stay.
    return Section("reproduce", "Run it again", (Code(escaped(command, ""), "sh"),))


def advice(divergence: Divergence | None, verdict: Verdict | None) -> str:
    """What to do about it; empty where there is nothing to do."""
    if verdict is not None and verdict.advice:
        return passage(verdict.advice)
    if verdict is not None and verdict.missing:
        return passage(f"Find out what is missing: {'; '.join(verdict.missing)}.")
    if divergence is None:
        return "Record two runs of the same model that share a request."
    if divergence.inconclusive:
        return "See under `What was compared` what was left out, and record it in both runs."
    if divergence.identical or verdict is not None:
        return ""
    if divergence.across_engines is not None:
        return "`detdiff explain --across-engines` on the same two sides scores each engine's operations against float64."
    return (
        "`detdiff explain` on the same two sides says which kind of difference it is and what takes it away."
    )


def _side_by_side(series: Series | None, request: RequestDivergence) -> list[Texts]:
    """Nothing where the generated tokens are not at hand."""
    found = None if series is None else next((r for r in series.requests if r.id == request.id), None)
    if found is None or not (found.tokens_a or found.tokens_b):
        return []
    moved = _moved(found)
    a, b = (_token_words(tokens, found.flip_index, moved) for tokens in (found.tokens_a, found.tokens_b))
    return [Texts(named(request.id), a, b)]


def _moved(found: RequestSeries) -> float | None:
    """The most that a margin moved between the two runs: a margin below it can be reversed by what was measured."""
    return max((abs(token.delta) for token in found.tokens_a if token.delta is not None), default=None)


def _token_words(
    tokens: Sequence[TokenPoint], flip: int | None, moved: float | None
) -> tuple[MarkedToken, ...]:
    return tuple(
        MarkedToken(
            token.index, token.token, _token_text(token.text), token.margin, _token_mark(token, flip, moved)
        )
        for token in tokens
    )


def _token_mark(token: TokenPoint, flip: int | None, moved: float | None) -> Mark:
    if flip is not None and token.index >= flip:
        return "flip" if token.index == flip else "after"
    # A movement of nothing makes no token fragile, not even a tie.
    near = moved and token.margin is not None and token.margin <= moved
    return "near" if near else ""


def _token_text(text: str) -> str:
    # It stands in no quotes, so that those in it need no escape.
    return escaped(text if len(text) <= LONGEST else f"{text[:LONGEST]}…", "\\")
