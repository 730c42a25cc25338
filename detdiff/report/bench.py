"""A measurement of policies as text and as a page: a table, what the counts explain, and three pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from detdiff.bench.figures import factor, good, throughput
from detdiff.bench.measure import INCONCLUSIVE, WALL, Measurement, PolicyResult
from detdiff.bench.runs import Goodput, Spread

from .bench_pictures import flips_svg, latency_svg, throughput_svg
from .document import Block, Item, Prose, Table
from .text import plain
from .words import count, escaped


def bench_text(measured: Measurement, goodput: Goodput | None = None, *, width: int = 100) -> str:
    """The measurement in lines of at most ``width`` characters."""
    return plain(bench_blocks(measured, goodput), width=width)


def bench_html(measured: Measurement, links: Mapping[str, str], goodput: Goodput | None = None) -> str:
    """The measurement as a page. ``links`` are the pages of divergences by policy."""
    pictures = [
        ("throughput", "Throughput against requests at once", throughput_svg(measured)),
        ("latency", "Latency by policy", latency_svg(measured)),
        ("flips", "Throughput against flips", flips_svg(measured)),
    ]
    return measured_page(_headline(measured), bench_blocks(measured, goodput), pictures, links)


def measured_page(
    title: str,
    blocks: Sequence[Block],
    pictures: Sequence[tuple[str, str, str]],
    links: Mapping[str, str] | None = None,
) -> str:
    """A page of blocks and pictures (name, heading, SVG; empty ones are left out)."""
    from markupsafe import Markup

    from .html import render

    return render(
        "bench.html",
        ("page.js",),
        title=title,
        pictures=[(name, heading, Markup(drawn)) for name, heading, drawn in pictures if drawn],
        tables=[block for block in blocks if isinstance(block, Table)],
        items=[block for block in blocks if isinstance(block, Item)],
        links=sorted((links or {}).items()),
    )


def bench_blocks(measured: Measurement, goodput: Goodput | None = None) -> list[Block]:
    """What is said of a measurement: each figure beside what the policy answered."""
    baseline = measured.results[0]
    blocks: list[Block] = [Prose(_headline(measured))]
    blocks.append(Item("workload: ", escaped(measured.workload.source)))
    if measured.rounds:
        blocks.append(machine_item(measured.rounds, measured.environment))
    if any(result.runs for result in measured.results):
        blocks.append(_measured_table(measured.results, goodput))
    if any(result.own is not None for result in measured.results):
        words = "its answers beside those of one request after the other with its own kernels, draft and quantised cache"
        blocks.append(Item("alone: ", words))
    blocks += [
        Item(f"inconclusive: {escaped(result.policy.name)}: ", _left_open(result))
        for result in measured.results
        if result.sameness == INCONCLUSIVE
    ]
    counted = [result for result in measured.results if result.counts is not None]
    if counted:
        headers = ("policy", "forwards", "rows", "padding", "idle slots", "rows a forward", "as simulated")
        blocks.append(
            Table(
                headers,
                tuple(map(_counted_row, counted)),
                caption="where the time goes, in counts that no machine changes",
            )
        )
        blocks += [Item(f"{escaped(r.policy.name)}: ", explained(r, baseline)) for r in counted[1:]]
    remembered = [result for result in measured.results if result.memory is not None]
    if remembered:
        held = tuple(map(_memory_row, remembered))
        names = ("policy", "held", "contiguous", "paged")
        blocks.append(Table(names, held, caption="positions of the KV cache at the worst"))
    for result in measured.results:
        paths = () if result.counts is None else result.counts.paths
        if len(paths) > 1:
            whole = sum(n for _, n in paths)
            shares = ", ".join(f"{escaped(path)} {n / whole:.0%}" for path, n in paths)
            blocks.append(Item(f"kernel paths of {escaped(result.policy.name)}: ", shares))
    for pinned in dict.fromkeys(r.policy.pinned for r in measured.results if r.policy.pinned):
        under = ", ".join(escaped(r.policy.name) for r in measured.results if r.policy.pinned == pinned)
        blocks.append(Item(f"pinned for {under}: ", escaped("; ".join(pinned.splitlines()))))
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in measured.results:
        if result.why:
            what = "not simulated" if result.counts is not None or not result.runs else "not counted"
            reasons.setdefault((what, result.why), []).append(escaped(result.policy.name))
    blocks += [
        Item(f"{what}: ", f"{', '.join(names)}: {escaped(why)}") for (what, why), names in reasons.items()
    ]
    if not measured.finished:
        blocks.append(interrupted([result.runs for result in measured.results], measured.rounds))
    return blocks


def machine_item(rounds: int, machine: Mapping[str, Any]) -> Item:
    """Where and how often was measured."""
    clock = "" if machine["clock"] == WALL else "seconds of this process's threads, "
    return Item(
        "measured: ",
        f"{clock}{count(rounds, 'round')} in changing order after one to warm up, medians (least to largest); {escaped(str(machine['chip']))}, "
        f"{machine['cores']} cores, load {machine['load']:.2f} before and {machine['load_after']:.2f} after",
    )


def interrupted(runs: Sequence[Sequence[object]], rounds: int) -> Item:
    """What a measurement that did not end has, of its runs by policy."""
    whole = min(map(len, runs), default=0)
    return Item(
        "note: ",
        f"interrupted after {whole} of {count(rounds, 'round')}; what was measured until then is shown",
    )


def _left_open(result: PolicyResult) -> str:
    """Why nothing differs and the answers are not called identical all the same."""
    assert result.divergence is not None
    found = result.divergence
    reasons = [f"{each.id}: {each.reason}" for each in found.not_compared]
    reasons += [note.removeprefix("run b: ") for note in found.notes if note.startswith("run b: ")]
    return f"nothing that was compared differs, but not all was seen: {escaped('; '.join(reasons))}"


def explained(result: PolicyResult, baseline: PolicyResult) -> str:
    """What part of a policy's factor over serial its forwards explain: the rest is what a forward of more rows costs."""
    assert result.counts is not None and baseline.counts is not None
    fewer = baseline.counts.forwards / max(1, result.counts.forwards)
    drafts = f" (beside {counts.drafted:,} of the draft)" if (counts := result.counts).drafted else ""
    words = f"{fewer:.2f} times fewer forwards than serial{drafts}"
    found = factor(result, baseline)
    if found is not None:
        cost = fewer / found.median
        drafted = ", the draft's included," if counts.drafted else ""
        words += f", measured {found.median:.2f} times its throughput: a forward{drafted} took {cost:.2f} times as long"
    return words


def _headline(measured: Measurement) -> str:
    results = measured.results
    timed = [(spread.median, result) for result in results if (spread := throughput(result)) is not None]
    if not timed:
        return f"{count(len(results), 'policy', 'policies')} counted for {measured.workload.source}."
    fastest = max(timed, key=lambda pair: pair[0])
    same = max(
        (pair for pair in timed if pair[1].sameness == "identical"), key=lambda pair: pair[0], default=fastest
    )
    words = f"Fastest is {fastest[1].policy.name} with {fastest[0]:.1f} tokens/s ({fastest[1].sameness})"
    if same is fastest:
        return f"{words}; no faster one was given up for sameness."
    return f"{words}; fastest with serial's answers is {same[1].policy.name} with {same[0]:.1f}."


def _spread(found: Spread | None, form: str = ".1f") -> str:
    return "-" if found is None else f"{found.median:{form}} ({found.low:{form}}–{found.high:{form}})"


def _measured_table(results: Sequence[PolicyResult], goodput: Goodput | None) -> Table:
    """Columns that say nothing of any policy are left out."""
    columns: dict[str, list[str]] = {"policy": [escaped(result.policy.name) for result in results]}
    columns["answers"] = [result.sameness for result in results]
    if any(result.own is not None for result in results):
        columns["alone"] = [result.invariance for result in results]
    columns["tokens/s"] = [_spread(throughput(result)) for result in results]
    columns["to serial"] = [_spread(factor(result, results[0]), ".2f") for result in results]
    if goodput is not None:
        columns["good requests/s"] = [_spread(good(result, goodput), ".2f") for result in results]
    for name, of, what in (("TTFT ms", "ttft", 50), ("TPOT ms", "tpot", 50), ("p99 ITL ms", "itl", 99)):
        pooled = [result.pooled(of) for result in results]
        columns[name] = [f"{np.percentile(values, what):.1f}" if values else "-" for values in pooled]
    caption = "what each policy costs, and what it does to the answers"
    return Table(tuple(columns), tuple(zip(*columns.values(), strict=True)), caption=caption)


def _counted_row(result: PolicyResult) -> tuple[str, ...]:
    counts = result.counts
    assert counts is not None
    return (
        escaped(result.policy.name),
        f"{counts.forwards:,}" + (f" + {counts.drafted:,}" if counts.drafted else ""),
        f"{counts.rows:,}",
        f"{counts.padding:,} ({counts.padded_share:.0%})",
        f"{counts.idle_share:.0%}" if counts.slots else "-",
        f"{(counts.rows + counts.padding) / max(1, counts.forwards):.1f}",
        {True: "yes", False: "no", None: "-"}[result.simulated],
    )


def _memory_row(result: PolicyResult) -> tuple[str, ...]:
    memory = result.memory
    assert memory is not None
    return escaped(result.policy.name), f"{memory.held:,}", f"{memory.contiguous:,}", f"{memory.paged:,}"
