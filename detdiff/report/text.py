"""A Divergence as plain text: a sentence first, then each parted request, then what was compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from detdiff.compare.divergence import (
    Choice,
    Divergence,
    Finding,
    Flip,
    Origin,
    RequestDivergence,
    Run,
)

from .lifecycle import agreement_lines, chunk_lines, event_lines
from .page import Page
from .settings import asked, decisive, sampling
from .speculation import speculation_lines
from .words import birth, composition, count, layer, named, number, passage, runs_of, shown, size, spans


def divergence_text(divergence: Divergence, *, width: int = 100) -> str:
    """The whole answer; lines of prose are at most ``width`` characters, tables as wide as they need."""
    page = Page(width)
    page.prose(headline(divergence))
    for run, name in ((divergence.a, "a"), (divergence.b, "b")):
        page.item(f"{name}: ", _run(run))
    finding_lines(page, divergence)
    for request in divergence.requests:
        if request.rung is not None:
            how = tuple(
                sampling(asked(run.scenario).get(request.id, {})) for run in (divergence.a, divergence.b)
            )
            _request(page, request, how)
    page.blank()
    compared_lines(page, divergence)
    return page.text()


def finding_lines(page: Page, divergence: Divergence) -> None:
    """Differences of the workload, and bookkeeping that contradicts the rows."""
    for title, findings in (("workload", divergence.workload), ("bookkeeping", divergence.bookkeeping)):
        if findings:
            page.blank()
            page.prose(f"{title}:")
            for finding in findings:
                page.item("  - ", _finding(finding))


def compared_lines(page: Page, divergence: Divergence) -> None:
    """What is equal, what was compared and what was not, events of the caches, and notes."""
    alike = [request for request in divergence.requests if request.rung is None]
    if alike:
        names = ", ".join(named(request.id) for request in alike)
        rows = sum(request.rows for request in alike)
        page.item("equal in all that was compared: ", f"{names} ({count(rows, 'row')})")
    for left_out in divergence.not_compared:
        page.item(f"not compared: {named(left_out.id)}: ", passage(left_out.reason))
    page.item("compared: ", _compared(divergence))
    event_lines(page, divergence)
    for note in divergence.notes:
        page.item("note: ", passage(note))


def headline(divergence: Divergence) -> str:
    """The answer in one sentence."""
    compared = divergence.compared
    what = f"{count(compared.requests, 'request')}, {count(compared.rows, 'row')} and {count(compared.digests, 'digest')}"
    if divergence.identical:
        return f"The runs are identical: {what} compared, none differs."
    if divergence.inconclusive:
        return f"Inconclusive: {what} compared and none differs, but not everything could be compared."
    flipped = [request for request in divergence.requests if request.flip is not None]
    if flipped:
        start = f"The runs part: {len(flipped)} of {count(compared.requests, 'request')} flip"
    else:
        start = "The runs part and no token flips"
    first = next((r for r in divergence.requests if r.id == divergence.first), None)
    if first is not None and first.origin is not None:
        origin = first.origin
        return (
            f"{start}; the first difference is born at {named(origin.site)} ({named(origin.kind)}), position "
            f"{origin.position} of {named(first.id)}: {paths_of(origin)}."
        )
    return f"{start}; the earliest rung that parts is {divergence.rung}, and no origin could be named."


def paths_of(origin: Origin) -> str:
    """An origin's kernel paths and rows in both runs, in a clause."""
    a, b = (named(path or "unknown path") for path in (origin.path_a, origin.path_b))
    rows_a, rows_b = (
        count(n, "row") if n is not None else "unknown rows" for n in (origin.rows_a, origin.rows_b)
    )
    if a == b:
        return f"{a} in both, on {rows_a} in a and {rows_b} in b"
    return f"{a} on {rows_a} in a, {b} on {rows_b} in b"


def _run(run: Run) -> str:
    parts = [named(run.trace), *decisive(run.scenario)]
    if "name" in run.model:
        parts.append(f"model {named(str(run.model['name']))}")
    parts.append(count(run.forwards, "forward"))
    if not run.complete:
        parts.append("INCOMPLETE")
    return ", ".join(parts)


def _finding(finding: Finding) -> str:
    where = "in both runs" if finding.run == "both" else f"in run {finding.run}"
    if finding.forward is not None:
        where += f", forward {finding.forward}"
    request = "" if finding.request is None else f"request {named(finding.request)}: "
    return f"{request}{passage(finding.detail)} ({where})"


def _request(page: Page, request: RequestDivergence, how: Sequence[str | None]) -> None:
    page.blank()
    if request.flip is None:
        end = (
            "no flip: all generated tokens are equal"
            if request.generated_a or request.generated_b
            else "no tokens"
        )
        page.prose(f"request {named(request.id)}: parts in {request.rung}; {end}")
    else:
        page.prose(f"request {named(request.id)}: parts in {request.rung} and flips")
        flip_lines(page, request, request.flip)
        if any(how):
            for run, words in zip("ab", how, strict=True):
                page.item(f"    {run}: ", words or "greedy")
        flip_forward_lines(page, request)
    if request.origin is not None:
        origin_lines(page, request.origin)
        chunk_lines(page, request)
    elif request.differing:
        page.item("  birth: ", "no origin could be named")
    agreement_lines(page, request)
    speculation_lines(page, request)
    cache_lines(page, request)
    origin_count_lines(page, request)
    margin_lines(page, request)


def margin_lines(page: Page, request: RequestDivergence) -> None:
    """The smallest margins of tokens that both runs chose."""
    if request.margins:
        margins = ", ".join(
            f"{number(m.margin_a)} / {number(m.margin_b)} at token {m.index}" for m in request.margins
        )
        page.item("  smallest margins of equal tokens (a / b): ", margins)


def origin_count_lines(page: Page, request: RequestDivergence) -> None:
    """How many origins there are, by kind, layer and pair of kernel paths."""
    if not request.origins:
        return
    page.item("  origins: ", count(sum(found.count for found in request.origins), "in all", "in all"))
    page.table(
        [
            [
                named(found.kind),
                "-" if found.layer is None else str(found.layer),
                named(found.path_a or "-"),
                named(found.path_b or "-"),
                f"{found.count:,}",
            ]
            for found in request.origins[:8]
        ],
        ["kind", "layer", "path in a", "path in b", "origins"],
        "    ",
    )
    if len(request.origins) > 8:
        page.item("    ", f"and {len(request.origins) - 8} more kinds, layers and path pairs")


def cache_lines(page: Page, request: RequestDivergence) -> None:
    """The first cache entry that differs, and the carriers."""
    if request.cache_entry is not None:
        entry = request.cache_entry
        page.item(
            "  first cache entry: ",
            f"{layer(entry.layer)}, {entry.kind}, head {entry.head}, position {entry.position}; written in a by "
            f"{composition(entry.composition_a)}, in b by {composition(entry.composition_b)}",
        )
        if entry.magnitude is not None:
            page.item("    ", size(entry.magnitude))
    if request.carriers is not None:
        carriers = request.carriers
        alive = "alive at the flip" if request.flip is not None else "alive at the end"
        where = (
            f", over positions {spans(carriers.positions)} and layers {spans(runs_of(carriers.layers))}"
            if carriers.count
            else ""
        )
        page.item(
            "  carriers: ",
            f"{carriers.count:,} of {count(carriers.entries, 'cache entry', 'cache entries')} {alive} (position "
            f"{carriers.alive_at}) differ{where}",
        )


def flip_lines(page: Page, request: RequestDivergence, flip: Flip) -> None:
    """The flip: tokens, margins, top-k on both sides."""
    if flip.kind == "length":
        stopped = "a" if flip.a.token is None else "b"
        what = f"run {stopped} stopped after {count(flip.index, 'token')}, the other went on"
    else:
        what = (
            f"generated token {flip.index} is {flip.a.token} {shown(flip.a.text)} in a and {flip.b.token} "
            f"{shown(flip.b.text)} in b"
        )
    swapped = {True: "top two swapped", False: "top two not simply swapped", None: ""}[request.swapped]
    ranks = _outside(flip) or swapped
    page.item("  flip: ", f"{what} (row at position {flip.position}){'; ' if ranks else ''}{ranks}")
    page.item("    ", f"margin {number(flip.a.margin)} in a, {number(flip.b.margin)} in b")
    rows = list(_top_rows(flip.a, flip.b))
    if rows:
        page.table(rows, ["rank", "a token", "a text", "a logit", "b token", "b text", "b logit"], "    ")
    if flip.magnitude is not None:
        page.item("    logits: ", size(flip.magnitude))


def _outside(flip: Flip) -> str:
    """Says which tokens are not among the recorded ones, or nothing."""
    places = [
        f"{run}'s token is outside its top {len(choice.top)}"
        for run, choice in (("a", flip.a), ("b", flip.b))
        if choice.token is not None and choice.logit is None and choice.top
    ]
    return ", ".join(places)


def flip_forward_lines(page: Page, request: RequestDivergence) -> None:
    """Who was in the flip's own forward, on which paths, and what was born there."""
    forward = request.flip_forward
    if forward is None:
        return
    paths = {
        True: "kernel paths equal on both sides",
        False: "kernel paths differ",
        None: "kernel paths not recorded on both sides",
    }[forward.paths_equal]
    page.item(
        "  the flip's forward: ",
        f"a: {composition(forward.composition_a)}; b: {composition(forward.composition_b)}; {paths} "
        f"(a: {_uses(forward.paths_a)}; b: {_uses(forward.paths_b)}); {count(forward.origins, 'origin')} there"
        + (": inherited" if request.inherited else "" if forward.differing else ", and no difference either"),
    )


def _uses(paths: Sequence[Any]) -> str:
    return ", ".join(f"{named(use.path)} at {count(use.sites, 'site')}" for use in paths) or "unknown"


def _top_rows(a: Choice, b: Choice) -> Iterator[list[str]]:
    for rank in range(max(len(a.top), len(b.top))):
        row = [str(rank + 1)]
        for choice in (a, b):
            if rank < len(choice.top):
                candidate = choice.top[rank]
                row += [str(candidate.token), shown(candidate.text), number(candidate.logit)]
            else:
                row += ["-", "-", "-"]
        yield row


def origin_lines(page: Page, origin: Origin) -> None:
    """The birth: site, forwards, kernel paths and the rules that chose them."""
    page.item(
        "  birth: ",
        f"{named(origin.site)} ({named(origin.kind)}, {layer(origin.layer)}), position {origin.position}: {birth(origin)}",
    )
    for run, found, path, rule, rows, second_last in (
        ("a", origin.composition_a, origin.path_a, origin.rule_a, origin.rows_a, origin.second_last_a),
        ("b", origin.composition_b, origin.path_b, origin.rule_b, origin.rows_b, origin.second_last_b),
    ):
        seen = (
            ""
            if rows is None
            else f", which saw {count(rows, 'row')} (second-to-last dimension {second_last})"
        )
        because = f"; rule: {passage(rule.removeprefix('rule: '))}" if rule else ""
        page.item(f"    {run}: ", f"{composition(found)}; path {named(path or 'unknown')}{seen}{because}")
    for change in origin.changes[:4]:
        page.item(
            "    changed entry: ",
            f"in {change.run}, forward {change.forward}: {layer(change.layer)}, {change.kind}, head {change.head}, "
            f"position {change.position}",
        )
    if origin.magnitude is not None:
        page.item("    ", size(origin.magnitude))


def _compared(divergence: Divergence) -> str:
    c = divergence.compared
    parts = [
        f"{count(c.requests, 'request')}, {count(c.rows, 'row')}, {count(c.ports, 'port')}, {count(c.digests, 'digest')}; "
        f"{c.differing:,} differ"
    ]
    for n, what in (
        (c.only_a, "rows in a only"),
        (c.only_b, "rows in b only"),
        (c.superseded_a, "rows of a written again later"),
        (c.superseded_b, "rows of b written again later"),
        (c.after_flip_a, "rows of a after the flip"),
        (c.after_flip_b, "rows of b after the flip"),
        (c.token_differs, "rows fed different tokens"),
        (c.one_sided, "digests in one run only"),
        (c.ports_only_a, "ports in a only"),
        (c.ports_only_b, "ports in b only"),
    ):
        if n:
            parts.append(f"{n:,} {what}")
    return "; ".join(parts)
