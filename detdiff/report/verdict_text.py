"""A Verdict as plain text: the verdict in a sentence, then what an investigation by hand would have written down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from detdiff.compare.divergence import Divergence, RequestDivergence
from detdiff.explain.control import NOT_RUN, Control
from detdiff.explain.verdict import Evidence, Verdict

from .lifecycle import agreement_lines, chunk_lines
from .page import Page
from .speculation import speculation_lines
from .text import cache_lines, flip_forward_lines, flip_lines, headline, origin_lines
from .words import count, named, passage

TITLES = (
    "the flip",
    "the flip's forward",
    "the birth",
    "the first cache entry and the carriers",
    "the controls",
    "against float64",
    "the verdict",
)
"""What stands under each number, 1 to 7."""
HOLD = "hold_path"
_NEAREST = 5


def verdict_text(verdict: Verdict, *, width: int = 100) -> str:
    """The whole answer; lines of prose are at most ``width`` characters, tables as wide as they need."""
    page = Page(width)
    divergence = verdict.divergence
    page.prose(f"Verdict: {verdict.kind}. {'' if divergence is None else headline(divergence)}")
    if divergence is not None:
        _runs(page, divergence)
        parted = [request for request in divergence.requests if request.rung is not None]
        if parted:
            _flips(page, verdict, divergence)
            fragile_lines(page, verdict)
            _forwards(page, parted)
            _births(page, verdict, parted)
            _caches(page, parted)
    _title(page, 5)
    control_lines(page, verdict)
    if verdict.control("oracle") is not None:
        _title(page, 6)
        float64_lines(page, verdict)
    _title(page, 7)
    verdict_lines(page, verdict)
    return page.text()


def _title(page: Page, number: int) -> None:
    page.blank()
    page.prose(f"{number}. {TITLES[number - 1]}")


def _runs(page: Page, divergence: Divergence) -> None:
    for run, found in (("a", divergence.a), ("b", divergence.b)):
        page.item(f"{run}: ", f"{named(found.trace)}, {count(found.forwards, 'forward')}")


def _flips(page: Page, verdict: Verdict, divergence: Divergence) -> None:
    _title(page, 1)
    for request in divergence.requests:
        page.prose(f"request {named(request.id)}: {_end(request)}")
        if request.flip is not None:
            flip_lines(page, request, request.flip)
            agreement_lines(page, request)
            for each in verdict.evidence:
                if each.fact == "proposals" and each.detail.get("request") == request.id:
                    page.item("  draft: ", passage(each.said))
            speculation_lines(page, request)


def fragile_lines(page: Page, verdict: Verdict) -> None:
    """The tokens nearest to another choice, and how many such changes would flip on average."""
    if not verdict.fragile:
        return
    nearest = [
        f"token {each.index} of {named(each.request)} (margin {each.margin:.6f}"
        + (f", moved by {each.delta:+.6f}" if each.delta is not None else "")
        + f", chance {each.chance:.3f})"
        for each in verdict.fragile[:_NEAREST]
    ]
    expected = sum(each.chance for each in verdict.fragile)
    page.item(
        "  nearest to another choice: ",
        f"{', '.join(nearest)}; by what moved between these runs, {expected:.1f} of {count(len(verdict.fragile), 'token')} flip on "
        "average under such a change",
    )


def _end(request: RequestDivergence) -> str:
    if request.flip is not None:
        return f"flips at generated token {request.flip.index}"
    generated = min(request.generated_a, request.generated_b)
    bits = "every compared digest is equal" if request.rung is None else f"it parts in {request.rung}"
    return f"no flip within its {count(generated, 'token')}; {bits}"


def _forwards(page: Page, parted: list[RequestDivergence]) -> None:
    flipped = [request for request in parted if request.flip_forward is not None]
    if not flipped:
        return
    _title(page, 2)
    for request in flipped:
        page.prose(f"request {named(request.id)}:")
        flip_forward_lines(page, request)


def _births(page: Page, verdict: Verdict, parted: list[RequestDivergence]) -> None:
    _title(page, 3)
    for request in parted:
        page.prose(f"request {named(request.id)}:")
        if request.origin is None:
            page.item("  birth: ", "no origin could be named")
        else:
            origin_lines(page, request.origin)
            chunk_lines(page, request)
        total = sum(found.count for found in request.origins)
        if total:
            page.item("  origins: ", count(total, "in all", "in all"))
    for each in verdict.evidence:
        if each.fact in ("contradiction", "settings", "quantised", "not_finite"):
            page.item("  - ", f"{passage(each.said)}{_where(each)}")


def _where(evidence: Evidence) -> str:
    run, forward = evidence.detail.get("run"), evidence.detail.get("forward")
    if run is None:
        return ""
    where = "in both runs" if run == "both" else f"run {named(str(run))}"
    return f" ({where}{'' if forward is None else f', forward {named(str(forward))}'})"


def _caches(page: Page, parted: list[RequestDivergence]) -> None:
    _title(page, 4)
    for request in parted:
        page.prose(f"request {named(request.id)}:")
        if request.cache_entry is None and request.carriers is None:
            page.item("  ", "no compared cache entry differs")
        cache_lines(page, request)


def control_lines(page: Page, verdict: Verdict) -> None:
    """Every control with its result, those that were not run with the reason, and the acceptance of drafts."""
    ran = [control for control in verdict.controls if control.result != NOT_RUN]
    # What was done by hand came to rest on this one, so it is read first.
    for control in sorted(ran, key=lambda control: control.name != HOLD):
        page.item(f"  {named(control.name)}: ", f"{named(control.result)}. {_control(control)}")
    not_run_lines(page, verdict)
    if not verdict.controls:
        page.item("  ", "none was needed")
    for each in verdict.evidence:
        if each.fact == "acceptance":
            page.item("  acceptance: ", passage(each.said))


def _control(control: Control) -> str:
    forwards = count(control.forwards, "forward")
    return f"{passage(sentence_of(control.said))} ({forwards}, {control.seconds:.1f} s)"


def sentence_of(words: str) -> str:
    """A clause with a capital and a full stop; a site's name stays as it is."""
    if not words:
        return ""
    start = words[0].upper() if words.partition(" ")[0].isalpha() else words[0]
    return f"{start}{words[1:].rstrip('.')}."


def not_run_lines(page: Page, verdict: Verdict) -> None:
    """The controls that were not run, those of one reason together."""
    left_out: dict[str, list[str]] = {}
    for control in verdict.controls:
        if control.result == NOT_RUN:
            left_out.setdefault(control.said, []).append(named(control.name))
    for why, names in left_out.items():
        page.item("  not run: ", f"{', '.join(names)}: {passage(why)}")


def float64_lines(page: Page, verdict: Verdict) -> None:
    """How far both runs' operations are from float64, in units of their rounding bounds."""
    control = verdict.control("oracle")
    if control is None:
        return
    if control.result == NOT_RUN:
        page.item("  not run: ", passage(control.said))
        return
    page.item("  ", passage(sentence_of(control.said)))
    pairs = _listed(control, "pairs")
    if pairs:
        page.table(
            [_pair(pair) for pair in pairs],
            ["kind", "path in a", "path in b", "judged", "a worst", "b worst", "nearer"],
            "    ",
        )
        for pair in pairs[:2]:
            for run in "ab":
                kind, bound = (str(pair.get(key)) for key in ("kind", f"bound_{run}"))
                page.item(f"    bound of {run}, {named(kind)}: ", passage(bound))
    for each in _listed(control, "outside_where")[:4]:
        page.item("  outside: ", passage(str(each.get("said"))))
    if control.detail.get("pattern"):
        page.item("  affected: ", passage(str(control.detail["pattern"])))


def _listed(control: Control, key: str) -> list[Mapping[str, Any]]:
    """The figures under ``key``; a saved verdict may hold anything there."""
    found = control.detail.get(key)
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list | tuple) else []


def _pair(pair: Mapping[str, Any]) -> list[str]:
    judged = pair.get("judged")
    return [
        named(str(pair.get("kind"))),
        named(str(pair.get("path_a") or "native")),
        named(str(pair.get("path_b") or "native")),
        f"{judged:,}" if isinstance(judged, int) else "-",
        *(_size(pair.get(f"worst_{run}")) for run in "ab"),
        {"equal": "neither"}.get(str(pair.get("nearer")), named(str(pair.get("nearer")))),
    ]


def _size(found: object) -> str:
    return f"{found:.3g}" if isinstance(found, int | float) else "-"


def verdict_lines(page: Page, verdict: Verdict) -> None:
    """The verdict, the evidence that decided, what is missing and what to do."""
    page.item("  ", f"{verdict.kind}, by the rule `{named(verdict.rule)}`. {passage(verdict.said)}")
    for each in verdict.deciding:
        page.item("  because: ", passage(each.said))
    for what in verdict.missing:
        page.item("  missing: ", passage(what))
    if verdict.advice:
        page.item("  what to do: ", passage(verdict.advice))
    elif verdict.kind == "identical":
        page.item("  what to do: ", "nothing.")
