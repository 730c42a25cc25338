"""What was found, as blocks: flips, origins, cache entries, drafts, controls, verdicts. ``build`` puts them in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from detdiff.compare import Acceptance, Verified
from detdiff.compare.divergence import Divergence, Finding, Origin, RequestDivergence, RunIdentity
from detdiff.compare.flips import Flip, TokenChoice
from detdiff.explain.control import NOT_RUN, Control
from detdiff.explain.verdict import Verdict

from .document import Page
from .words import (
    composition,
    count,
    decisive,
    distance,
    layer,
    named,
    number,
    origin_words,
    passage,
    runs_of,
    shown,
    size,
    spans,
)


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
    alike = [request for request in divergence.requests if request.stage is None]
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


def run_line(run: RunIdentity) -> str:
    unknown = "forwards" in run.lacks
    # Of an engine that shows answers alone nobody knows how it lays rows out.
    settings = [
        each
        for each in decisive(run.scenario)
        if not (unknown and each.startswith(("layout ", "prefill_chunk ")))
    ]
    parts = [named(run.trace), *settings]
    if "name" in run.model:
        parts.append(f"model {named(str(run.model['name']))}")
    if run.engine != "mlx" and "engine" not in run.scenario:
        # An engine that was given as an object.
        parts.append(f"engine {named(run.engine)}")
    if not unknown:
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
    """The first cache entry that differs, and the differing cache entries."""
    if request.cache_entry is not None:
        entry = request.cache_entry
        page.item(
            "  first cache entry: ",
            f"{layer(entry.layer)}, {entry.kind}, head {entry.head}, position {entry.position}; written in a by "
            f"{composition(entry.composition_a)}, in b by {composition(entry.composition_b)}",
        )
        for run, forward in (("a", entry.rewritten_a), ("b", entry.rewritten_b)):
            if forward is not None:
                page.item("    ", f"stored anew in another form in {run}, after forward {forward}")
        if entry.magnitude is not None:
            page.item("    ", size(entry.magnitude))
    if request.differing_entries is not None:
        differing_entries = request.differing_entries
        alive = "alive at the flip" if request.flip is not None else "alive at the end"
        where = (
            f", over positions {spans(differing_entries.positions)} and layers {spans(runs_of(differing_entries.layers))}"
            if differing_entries.count
            else ""
        )
        page.item(
            "  differing cache entries: ",
            f"{differing_entries.count:,} of {count(differing_entries.entries, 'cache entry', 'cache entries')} {alive} (position "
            f"{differing_entries.alive_at}) differ{where}",
        )


def lacking_lines(page: Page, divergence: Divergence, *what: str) -> None:
    """What the engines could not show, of what a section would tell."""
    for name, run in (("a", divergence.a), ("b", divergence.b)):
        for each in what:
            if each in run.lacks:
                page.item(
                    f"  {each.replace('_', ' ')} of {name}: ",
                    f"not shown by {named(run.engine)}: {passage(run.lacks[each])}",
                )


def outcome_lines(page: Page, request: RequestDivergence) -> None:
    """Where texts diverge that have no tokens, how far the scores of equal tokens are apart, and what is not finite."""
    if request.text is not None:
        text = request.text
        page.item(
            "  text: ",
            f"differs from character {text.index} on: {shown(text.a)} in a, {shown(text.b)} in b",
        )
    if request.logits_equal:
        page.item(
            "  logits: ",
            "bit-equal where the token differs: the model agrees, and the token was only chosen otherwise",
        )
    scores = request.scores
    if scores is not None and scores.differing:
        first = ""
        if scores.index is not None:
            first = f"; first at token {scores.index}, {number(scores.a)} in a and {number(scores.b)} in b for token {scores.token}"
        page.item(
            "  scores: ",
            f"{scores.differing:,} of {scores.compared:,} of equal tokens differ{distance(scores.max_abs, scores.max_ulp, scores.dtype)}{first}",
        )
    scored = request.scored
    if scored is not None:
        apart = (
            ""
            if scored.index is None
            else f"; most apart by {number(scored.max_abs)}, at token {scored.index}"
        )
        page.item(
            f"  log-probability of the {count(scored.tokens, 'given token')}: ",
            f"{number(scored.a)} in a and {number(scored.b)} in b{apart}; the likeliest in {scored.likeliest_a} places in a, {scored.likeliest_b} in b",
        )
    vectors = request.embedding
    if vectors is not None and vectors.differing:
        wrong = vectors.not_finite_a or vectors.not_finite_b
        page.item(
            "  embedding: ",
            f"{vectors.differing:,} of {vectors.width:,} numbers differ"
            + (
                f"; {vectors.not_finite_a:,} are not finite in a, {vectors.not_finite_b:,} in b"
                if wrong
                else f", by at most {number(vectors.max_abs)}; cosine {vectors.cosine:.9g}"
            ),
        )
    for each in request.not_finite:
        page.item(
            f"  not finite in {each.run}: ",
            f"{each.nan:,} NaN and {each.inf:,} Inf among the logits of token {each.index}",
        )
    site = request.first_site
    if site is not None:
        page.item(
            "  first site that differs: ",
            f"{named(site.site)} ({named(site.kind)}, {layer(site.layer)}), {site.port} at position {site.position}; no origin, as the weights are two",
        )
        if site.magnitude is not None:
            page.item("    ", size(site.magnitude))


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


def flip_forward_lines(page: Page, request: RequestDivergence, divergence: Divergence) -> None:
    """Who was in the flip's own forward, on which paths, and what arose there."""
    forward = request.flip_forward
    if forward is None:
        return
    paths = {
        True: "kernel paths equal on both sides",
        False: "kernel paths differ",
        None: "kernel paths not recorded on both sides",
    }[forward.paths_equal]
    uses = f" (a: {_uses(forward.paths_a)}; b: {_uses(forward.paths_b)})"
    if any("kernel_paths" in run.lacks for run in (divergence.a, divergence.b)):
        # What is written there is one word for whatever computed it.
        paths, uses = "kernel paths not shown", ""
    page.item(
        "  the flip's forward: ",
        f"a: {composition(forward.composition_a)}; b: {composition(forward.composition_b)}; {paths}{uses}; "
        f"{count(forward.origins, 'origin')} there"
        + (": inherited" if request.inherited else "" if forward.differing else ", and no difference either"),
    )


def _uses(paths: Sequence[Any]) -> str:
    return ", ".join(f"{named(use.path)} at {count(use.sites, 'site')}" for use in paths) or "unknown"


def _top_rows(a: TokenChoice, b: TokenChoice) -> Iterator[list[str]]:
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
    """The origin: site, forwards, kernel paths and the rules that chose them."""
    page.item(
        "  origin: ",
        f"{named(origin.site)} ({named(origin.kind)}, {layer(origin.layer)}), position {origin.position}: {origin_words(origin)}",
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
        (c.reused_a, "rows that a took from a cache"),
        (c.reused_b, "rows that b took from a cache"),
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


def event_lines(page: Page, divergence: Divergence) -> None:
    """How often caches were changed in each run, and what a setting did to them."""
    events = divergence.events
    if events.counts:
        counts = ", ".join(
            f"{named(of.event)}{'' if of.model == 'target' else f' ({of.model})'} {of.a:,} / {of.b:,}"
            for of in events.counts
        )
        page.item("events (a / b): ", counts)
    for found in events.listed:
        where = f"run {found.run}, forward {found.forward}, request {named(found.request or '')}"
        page.item("  - ", f"{where}: {passage(found.detail)}")


def chunk_lines(page: Page, request: RequestDivergence) -> None:
    """The part of the prompt that the first origin lies in."""
    for chunk in request.chunks:
        if chunk.first == chunk.last:
            where, differing = (
                f"position {chunk.first}",
                "which differs" if chunk.differing else "which is equal",
            )
        else:
            where = f"positions {chunk.first} to {chunk.last}"
            one = len(chunk.differing) == 1 and chunk.differing[0][0] == chunk.differing[0][1]
            ends, verb = ("position", "differs") if one else ("positions", "differ")
            differing = (
                f"of which {ends} {spans(chunk.differing)} {verb}"
                if chunk.differing
                else "of which none differs"
            )
        earlier = (
            ""
            if chunk.index == 0
            else "; earlier ones are equal"
            if chunk.earlier_equal
            else "; so do earlier ones"
        )
        page.item(
            f"    {chunk.run}: ",
            f"prefill chunk {chunk.index}, {where}, {differing}{earlier}",
        )


def agreement_lines(page: Page, request: RequestDivergence) -> None:
    """How the choices agree after the first that differs, where a run was fed the other's tokens."""
    forced = request.forced
    if forced is None:
        return
    text = f"of {count(forced.tokens, 'choice')} {forced.differing:,} differ"
    if request.flip is not None:
        if forced.again is None:
            text += "; after the flip they never agree again"
        else:
            after = forced.again - request.flip.index
            text += (
                f"; they agree again {count(after, 'token')} after the flip (token {forced.again}), for "
                f"{count(forced.span, 'token')} in a row"
            )
    page.item("  fed the same tokens: ", text)


def speculation_lines(page: Page, request: RequestDivergence) -> None:
    """Acceptance in both runs, whether proposals and choices are equal, and where the flip's own token came from."""
    found = request.verification
    if found is None:
        return
    page.item("  acceptance: ", f"{_acceptance(found.a)} in a, {_acceptance(found.b)} in b")
    if found.tokens:
        compared = [
            f"{what} {'equal' if first is None else f'differ from token {first} on'}"
            for what, first in (
                ("proposals", found.first_other_proposal),
                ("the target's choices", found.first_other_choice),
            )
        ]
        until = " up to the flip" if request.flip is not None else ""
        page.item("  speculation: ", f"over {count(found.tokens, 'token')}{until}, {' and '.join(compared)}")
    for run, verified in (("a", found.flip_a), ("b", found.flip_b)):
        if verified is not None:
            page.item(f"    {run}: ", _verified(verified))
    draft = request.draft
    if draft is not None and draft.differing:
        first = "; arising there before the target differs" if draft.first else ""
        page.item("  draft model: ", f"{count(draft.differing, 'digest')} of its rows differ{first}")
        if draft.origin is not None and draft.origin != request.origin:
            origin = draft.origin
            page.item(
                "    origin: ",
                f"{named(origin.site)} ({named(origin.kind)}), position {origin.position}: {origin_words(origin)}",
            )


def _acceptance(found: Acceptance | None) -> str:
    if found is None:
        return "no draft"
    text = f"{found.accepted} of {found.proposed} in {count(found.verifications, 'verification')}"
    if found.agrees is None:
        return f"{text} (no count by the engine)"
    if found.agrees:
        return f"{text} (the engine counts the same)"
    return f"{text} (THE ENGINE COUNTS {found.own_accepted} of {found.own_proposed})"


def _verified(found: Verified) -> str:
    proposal = "none was proposed" if found.proposal is None else f"{found.proposal} was proposed"
    proposals, choices = (
        " ".join(map(str, tokens)) for tokens in (found.block.proposals, found.block.choices)
    )
    return (
        f"{proposal} and the target chose {found.choice} (token {found.place + 1} of the verification in forward "
        f"{found.forward}: proposals {proposals}; choices {choices})"
    )


_FRAGILE = 5


def fragile_lines(page: Page, verdict: Verdict) -> None:
    """The tokens nearest to another choice, and how many such changes would flip on average."""
    if not verdict.fragile:
        return
    nearest = [
        f"token {each.index} of {named(each.request)} (margin {each.margin:.6f}"
        + (f", moved by {each.delta:+.6f}" if each.delta is not None else "")
        + f", chance {each.chance:.3f})"
        for each in verdict.fragile[:_FRAGILE]
    ]
    expected = sum(each.chance for each in verdict.fragile)
    page.item(
        "  nearest to another choice: ",
        f"{', '.join(nearest)}; by what moved between these runs, {expected:.1f} of {count(len(verdict.fragile), 'token')} flip on "
        "average under such a change",
    )


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
            left_out.setdefault(control.sentence, []).append(named(control.name))
    for why, names in left_out.items():
        page.item("  not run: ", f"{', '.join(names)}: {passage(why)}")


def float64_lines(page: Page, verdict: Verdict) -> None:
    """How far both runs' operations are from float64, in units of their rounding bounds."""
    control = verdict.control("oracle")
    if control is None:
        return
    if control.result == NOT_RUN:
        page.item("  not run: ", passage(control.sentence))
        return
    page.item("  ", passage(sentence_of(control.sentence)))
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
        *(_rounded(pair.get(f"worst_{run}")) for run in "ab"),
        {"equal": "neither"}.get(str(pair.get("nearer")), named(str(pair.get("nearer")))),
    ]


def _rounded(found: object) -> str:
    return f"{found:.3g}" if isinstance(found, int | float) else "-"


def verdict_lines(page: Page, verdict: Verdict) -> None:
    """The verdict, the evidence that decided, what is missing and what to do."""
    page.item("  ", f"{verdict.kind}, by the rule `{named(verdict.rule)}`. {passage(verdict.sentence)}")
    for each in verdict.deciding:
        page.item("  because: ", passage(each.sentence))
    for what in verdict.missing:
        page.item("  missing: ", passage(what))
    if verdict.advice:
        page.item("  what to do: ", passage(verdict.advice))
    elif verdict.kind == "identical":
        page.item("  what to do: ", "nothing.")
