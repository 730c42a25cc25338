"""A measurement of policies as text and as a page: a table, what the counts explain, and three pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from detdiff.bench.figures import RunFigures, Spread, factor, throughput
from detdiff.bench.measure import Measurement, PolicyResult

from .document import Block, Item, Prose, Table
from .svg import Canvas, LinearScale, Log, coordinate, fitted, log_range, mark
from .text import plain
from .words import count, escaped

_LEFT, _WIDTH, _HEIGHT = 64, 620, 190
_SERIES: Final = ("dd-r0", "dd-r1", "dd-r2", "dd-r3", "dd-r4", "dd-rx")


def bench_text(measured: Measurement, *, width: int = 100) -> str:
    """The measurement in lines of at most ``width`` characters."""
    return plain(bench_blocks(measured), width=width)


def bench_html(measured: Measurement, links: Mapping[str, str]) -> str:
    """The measurement as a page. ``links`` are the pages of divergences by policy."""
    from markupsafe import Markup

    from .html import render

    blocks = bench_blocks(measured)
    pictures = [
        (name, title, Markup(drawn))
        for name, title, drawn in (
            ("throughput", "Throughput against requests at once", throughput_svg(measured)),
            ("latency", "Latency by policy", latency_svg(measured)),
            ("flips", "Throughput against flips", flips_svg(measured)),
        )
        if drawn
    ]
    return render(
        "bench.html",
        ("page.js",),
        title=_headline(measured),
        pictures=pictures,
        tables=[block for block in blocks if isinstance(block, Table)],
        items=[block for block in blocks if isinstance(block, Item)],
        links=sorted(links.items()),
    )


def bench_blocks(measured: Measurement) -> list[Block]:
    """What is said of a measurement: each figure beside what the policy answered."""
    baseline = measured.results[0]
    blocks: list[Block] = [Prose(_headline(measured))]
    blocks.append(Item("workload: ", escaped(measured.workload.source)))
    machine = measured.environment
    blocks.append(
        Item(
            "measured: ",
            f"{count(measured.rounds, 'round')} in changing order after one to warm up, medians (least to largest); {escaped(str(machine['chip']))}, "
            f"{machine['cores']} cores, load {machine['load']:.2f} before and {machine['load_after']:.2f} after",
        )
    )
    if any(result.runs for result in measured.results):
        rows = tuple(_measured_row(result, baseline) for result in measured.results)
        headers = ("policy", "answers", "tokens/s", "to serial", "TTFT ms", "TPOT ms", "p99 ITL ms")
        blocks.append(Table(headers, rows, caption="what each policy costs, and what it does to the answers"))
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
        if result.why:
            blocks.append(Item(f"not simulated, {escaped(result.policy.name)}: ", escaped(result.why)))
    if not measured.finished:
        blocks.append(Item("note: ", "interrupted; what was measured until then is shown"))
    return blocks


def explained(result: PolicyResult, baseline: PolicyResult) -> str:
    """What part of a policy's factor over serial its forwards explain: the rest is what a forward of more rows costs."""
    assert result.counts is not None and baseline.counts is not None
    fewer = baseline.counts.forwards / max(1, result.counts.forwards)
    words = f"{fewer:.2f} times fewer forwards than serial"
    found = factor(result, baseline)
    if found is not None:
        cost = fewer / found.median
        words += (
            f", measured {found.median:.2f} times its throughput: a forward took {cost:.2f} times as long"
        )
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


def _measured_row(result: PolicyResult, baseline: PolicyResult) -> tuple[str, ...]:
    runs = [RunFigures.of(run) for run in result.runs]
    pooled = {name: [x for each in runs for x in getattr(each, name)] for name in ("ttft", "tpot", "itl")}
    return (
        escaped(result.policy.name),
        result.sameness,
        _spread(throughput(result)),
        _spread(factor(result, baseline), ".2f"),
        f"{np.median(pooled['ttft']):.1f}" if pooled["ttft"] else "-",
        f"{np.median(pooled['tpot']):.1f}" if pooled["tpot"] else "-",
        f"{np.percentile(pooled['itl'], 99):.1f}" if pooled["itl"] else "-",
    )


def _counted_row(result: PolicyResult) -> tuple[str, ...]:
    counts = result.counts
    assert counts is not None
    return (
        escaped(result.policy.name),
        f"{counts.forwards:,}",
        f"{counts.rows:,}",
        f"{counts.padding:,} ({counts.padded_share:.0%})",
        f"{counts.idle_share:.0%}",
        f"{(counts.rows + counts.padding) / max(1, counts.forwards):.1f}",
        {True: "yes", False: "no", None: "-"}[result.simulated],
    )


def _memory_row(result: PolicyResult) -> tuple[str, ...]:
    memory = result.memory
    assert memory is not None
    return escaped(result.policy.name), f"{memory.held:,}", f"{memory.contiguous:,}", f"{memory.paged:,}"


def _points(measured: Measurement) -> list[tuple[PolicyResult, Spread]]:
    return [(result, spread) for result in measured.results if (spread := throughput(result)) is not None]


def _series(number: int) -> str:
    """The class of a policy's marks, the same in all pictures; those beyond the colours share the last."""
    return _SERIES[min(number, len(_SERIES) - 1)]


def _dot(x: float, y: float) -> str:
    return f"M{coordinate(x - 4)} {coordinate(y)}a4 4 0 1 0 8 0a4 4 0 1 0-8 0z"


def throughput_svg(measured: Measurement) -> str:
    """Tokens a second of each policy, by how many requests it lets run at a time; a line from the least round to the largest."""
    points = _points(measured)
    if not points:
        return ""
    canvas = Canvas()
    top = 20.0
    floor = top + _HEIGHT
    scale = LinearScale(0, 1.05 * max(spread.high for _, spread in points), floor, top)
    canvas.levels(scale, (_LEFT, _WIDTH - 16), scale.ticks(6))
    levels = sorted({result.policy.at_once for result, _ in points})
    step = (_WIDTH - _LEFT - 32) / len(levels)
    items = []
    for number, (result, spread) in enumerate(points):
        cls = _series(number)
        same = [r for r, _ in points if r.policy.at_once == result.policy.at_once]
        x = _LEFT + step * (levels.index(result.policy.at_once) + (same.index(result) + 1) / (len(same) + 1))
        canvas.line(x, scale(spread.low), x, scale(spread.high), cls)
        canvas.path(_dot(x, scale(spread.median)), cls)
        items.append(((mark(_dot, cls),), f"{escaped(result.policy.name)}: {result.sameness}"))
    for place, level in enumerate(levels):
        canvas.text(_LEFT + step * (place + 0.5), floor + 18, f"{level:,}", "dd-t", "middle")
    canvas.text(_LEFT, floor + 36, "requests at once; tokens/s", "dd-t2")
    height = canvas.legend(8, floor + 44, _WIDTH - 16, items) + 6
    said = "; ".join(f"{r.policy.name}: {s.median:.1f} tokens/s, {r.sameness}" for r, s in points)
    return canvas.svg("dd-throughput", "Throughput against requests at once", said, (_WIDTH, height), False)


def latency_svg(measured: Measurement) -> str:
    """Medians and 99th percentiles of the times to the first token, between tokens, and per token, of each policy."""
    results = [result for result in measured.results if result.runs]
    if not results:
        return ""
    names = (("ttft", "to the first token"), ("tpot", "per token after it"), ("itl", "between two tokens"))
    found: list[tuple[PolicyResult, list[tuple[float, float]]]] = []
    for result in results:
        runs = [RunFigures.of(run) for run in result.runs]
        pairs = []
        for name, _ in names:
            values = [x for each in runs for x in getattr(each, name)] or [0.0]
            pairs.append((float(np.median(values)), float(np.percentile(values, 99))))
        found.append((result, pairs))
    canvas = Canvas()
    top = 20.0
    floor = top + _HEIGHT
    low, high = log_range([x for _, pairs in found for pair in pairs for x in pair])
    scale = Log(low, high, floor - 14, top, floor)
    canvas.levels(scale, (_LEFT, _WIDTH - 16), scale.ticks(6))
    step = (_WIDTH - _LEFT - 32) / len(names)
    for place, (_, words) in enumerate(names):
        for number, (_, pairs) in enumerate(found):
            cls = _series(number)
            x = _LEFT + step * (place + (number + 1) / (len(found) + 1))
            half, most = pairs[place]
            canvas.line(x, scale(half), x, scale(most), cls)
            canvas.path(_dot(x, scale(half)), cls)
        canvas.text(_LEFT + step * (place + 0.5), floor + 18, words, "dd-t", "middle")
    canvas.text(_LEFT, floor + 36, "milliseconds: the median, and up to the 99th percentile", "dd-t2")
    items = [((mark(_dot, _series(n)),), escaped(result.policy.name)) for n, (result, _) in enumerate(found)]
    height = canvas.legend(8, floor + 44, _WIDTH - 16, items) + 6
    said = "; ".join(f"{r.policy.name}: {pairs[0][0]:.1f} ms to the first token" for r, pairs in found)
    return canvas.svg("dd-latency", "Latency by policy", said, (_WIDTH, height), False)


def flips_svg(measured: Measurement) -> str:
    """One point a policy: tokens a second against how many of its answers flip beside serial's."""
    points = _points(measured)
    if not points:
        return ""
    canvas = Canvas()
    top = 20.0
    floor = top + _HEIGHT
    scale = LinearScale(0, 1.05 * max(spread.high for _, spread in points), floor, top)
    most = max(1, max(result.flips for result, _ in points))
    across = LinearScale(0, most, _LEFT + 24, _WIDTH - 160)
    canvas.levels(scale, (_LEFT, _WIDTH - 16), scale.ticks(6))
    canvas.axis(
        across, (_LEFT, _WIDTH - 16), floor, 60, f"answers that flip, of {len(measured.workload):,}; tokens/s"
    )
    places: Sequence[tuple[float, float, str]] = [
        (across(result.flips), scale(spread.median), result.policy.name) for result, spread in points
    ]
    for number, (x, y, name) in enumerate(places):
        cls = _series(number)
        canvas.path(_dot(x, y), cls)
        canvas.text(x + 8, y + 4, fitted(escaped(name), _WIDTH - x - 24), "dd-t", halo=True)
    said = "; ".join(f"{r.policy.name}: {s.median:.1f} tokens/s, {r.sameness}" for r, s in points)
    return canvas.svg("dd-flips", "Throughput against flips", said, (_WIDTH, floor + 44), False)
