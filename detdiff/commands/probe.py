"""The `probe` command: what to probe from its options, and the answer as text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from detdiff.commands.sides import Progress
from detdiff.errors import CommandError
from detdiff.probe import Function, Probe, find_target, probe
from detdiff.probe.chart import chart, duration, letter, spans_of
from detdiff.probe.operation import ProbeTarget
from detdiff.probe.run import DEFAULT_ROWS
from detdiff.probe.sweep import ChangedRows
from detdiff.probe.targets import find_function
from detdiff.report.document import Blank, Block, Item, Prose, Table
from detdiff.report.text import plain
from detdiff.report.words import count, escaped

SWEEP = "detdiff.probe-sweep/1"
FEW = 4  # findings that are listed
MODEL_ROWS = "1..8"  # unless others are asked for: a model has many shapes, and a large head
LAYOUTS = {"packed": "[1, M, K]", "batch": "[M, 1, K]", "rows": "[M, K]"}


@dataclass(frozen=True)
class ProbeArguments:
    """The command's options; ``layout`` is packed or batch, ``k`` the width of a function's rows."""

    target: str | None
    model: str | None
    site: str | None
    on: str | None
    layout: str
    rows: str | None
    seeds: int
    array: str | None
    k: int | None
    timed: bool
    custom_code: bool = False

    def check(self) -> None:
        """Raises CommandError for options that contradict one another."""
        own = self.target is not None and not self.target.startswith("linear:")
        problem = None
        if (self.target is None) == (self.model is None):
            problem = "one of the two says what to probe: a TARGET (linear:K,N,dtype or module:function), or --model"
        elif self.site is not None and self.model is None:
            problem = "--site names a site of a model; give --model too, or leave --site out"
        elif own and self.on is not None:
            problem = (
                "a function runs on what it calls itself; leave --on out (--array says which arrays it takes)"
            )
        elif not own and (self.array is not None or self.k is not None):
            problem = "--array and --shape are for a function of your own; leave them out"
        elif self.model is not None and self.on == "numpy":
            problem = (
                "a model's sites run on MLX or torch; leave --on numpy out, or name a profile or a kernel"
            )
        if problem is not None:
            raise CommandError(f"These options do not go together: {problem}.")


@dataclass(frozen=True)
class ShapeProbe:
    """One probe of a model's sweep, and the sites that it stands for."""

    shape: str
    op: str
    sites: tuple[str, ...]
    probe: Probe


def answer(asked: ProbeArguments, progress: Progress) -> Probe | list[ShapeProbe]:
    """Probes what is asked for: one target, or each linear shape of a model. Raises ProbeError and ModelError."""
    asked.check()
    # What a function of the user's prints must not end up in the answer.
    with redirect_stdout(sys.stderr):
        return _answer(asked, progress)


def _answer(asked: ProbeArguments, progress: Progress) -> Probe | list[ShapeProbe]:
    if asked.model is None or asked.site is not None:
        return _run(_target(asked), asked, progress, "probe")
    found = list(_shapes(asked, asked.model))
    return [
        ShapeProbe(shape, op, sites, _run(first, asked, progress, f"probe {place + 1}/{len(found)}"))
        for place, (shape, op, sites, first) in enumerate(found)
    ]


def _shapes(asked: ProbeArguments, model: str) -> Iterator[tuple[str, str, tuple[str, ...], ProbeTarget]]:
    """Each linear shape of a model: as text, its operation, its sites, and what stands for them."""
    if asked.on == "torch":
        from detdiff.engines.mlx.model import locate
        from detdiff.engines.transformers.linear_sites import load_torch, torch_shapes

        found = load_torch(locate(model))
        head = found.get_output_embeddings()
        for shape in torch_shapes(found, name=model):
            yield shape.shape, "head" if shape.module is head else "linear", shape.sites, shape
        return
    from detdiff.engines.mlx.model import load
    from detdiff.engines.mlx.probe_operations import shapes_of

    for one in shapes_of(load(model, custom_code=asked.custom_code), asked.on or "native", asked.layout):
        yield str(one.shape), one.op, one.sites, one.first


def _target(asked: ProbeArguments) -> ProbeTarget:
    if asked.target is None and asked.on == "torch":
        from detdiff.engines.mlx.model import locate
        from detdiff.engines.transformers.linear_sites import load_torch, torch_site

        assert asked.model is not None and asked.site is not None
        return torch_site(load_torch(locate(asked.model)), asked.site, asked.model)
    if asked.target is None:
        from detdiff.engines.mlx.model import load
        from detdiff.engines.mlx.probe_operations import find_site

        assert asked.model is not None and asked.site is not None
        loaded = load(asked.model, custom_code=asked.custom_code)
        return find_site(loaded, asked.site, asked.on or "native", asked.layout)
    found = find_target(asked.target, asked.on or "native", asked.layout)
    if isinstance(found, Function):
        return Function(*find_function(asked.target), asked.k, asked.array or "numpy")
    return found


def _run(target: ProbeTarget, asked: ProbeArguments, progress: Progress, label: str) -> Probe:
    whole = asked.model is not None and asked.site is None
    rows = asked.rows if asked.rows is not None else MODEL_ROWS if whole else DEFAULT_ROWS
    with progress(label) as on_rows:
        return probe(target, rows=rows, seeds=asked.seeds, timed=asked.timed, progress=on_rows)


def invariant(found: Probe | list[ShapeProbe]) -> bool:
    """Nothing but a row's own content changed its bits, in any probe."""
    return found.invariant if isinstance(found, Probe) else all(one.probe.invariant for one in found)


def write_chart(found: Probe | list[ShapeProbe], path: Path) -> None:
    """Writes the SVG; raises OSError."""
    probes = [found] if isinstance(found, Probe) else [one.probe for one in found]
    path.write_text(chart(probes), encoding="utf-8")


def answer_json(found: Probe | list[ShapeProbe]) -> dict[str, Any]:
    """The answer as JSON values; ``docs/probe.md`` lists the keys."""
    if isinstance(found, Probe):
        return found.to_json()
    shapes = [
        {"shape": one.shape, "op": one.op, "sites": list(one.sites), "probe": one.probe.to_json()}
        for one in found
    ]
    return {"schema": SWEEP, "invariant": invariant(found), "shapes": shapes}


def answer_text(found: Probe | list[ShapeProbe], *, width: int = 100) -> str:
    """The answer as text, at most ``width`` columns wide where tables allow."""
    return plain(_probe(found) if isinstance(found, Probe) else _sweep(found), width=width)


def _probe(found: Probe) -> Iterator[Block]:
    environment = found.environment
    blas = ", ".join(environment.get("blas", ())) or "none seen"
    where = f"; {environment['chip']}, BLAS loaded: {blas}" if environment else ""
    yield Item(
        escaped(f"{found.target} on {found.on}: "),
        escaped(
            f"rows {LAYOUTS[found.layout]}, K {found.k}, {found.n:,} outputs a row, {found.dtype} in, "
            f"{found.output_dtype} out; {count(found.seeds, 'seed')}{where}"
        ),
    )
    yield from (Blank(), _by_rows(found), Blank())
    if found.errors is not None:
        yield from (Prose("error against float64:"), _by_class(found), Blank())
    if paths := list(_paths(found)):
        yield from (Prose("kernel paths:"), *paths, Blank())
    yield from _facts(found)
    yield from (Item("note: ", note) for note in found.notes)


def _by_rows(found: Probe) -> Table:
    home = {m: number for number, members in enumerate(found.classes) for m in members}
    changes = {one.rows: one for one in found.against_one}
    times = {time.rows: time for time in found.times or ()}
    rows = []
    for m in found.rows:
        cells = [str(m), letter(home[m]), "-"]
        if m in changes and changes[m].equal:
            cells[2] = "equal"
        elif m in changes:
            one = changes[m]
            apart = "" if one.max_ulp is None else f", at most {one.max_ulp:,} ULP"
            cells[2] = f"{one.differing:,} of {one.outputs:,} differ{apart}"
        if times:
            time = times[m]
            spread = "-" if m == 1 else f"{time.ratio:.2f} ({time.low:.2f}-{time.high:.2f})"
            cells += [duration(time.seconds), duration(time.per_row), spread]
        rows.append(tuple(cells))
    headers = ["M", "bits", "row 0 against M=1"] + ["time", "per row", "of row by row"] * bool(times)
    return Table(tuple(headers), tuple(rows))


def _by_class(found: Probe) -> Table:
    rows = []
    for number, one in enumerate(found.errors or ()):
        relative = ["-" if x is None else f"{x:.2e}" for x in (one.max_relative, one.mean_relative)]
        odd = [f"{one.non_finite:,}"] if any(e.non_finite for e in found.errors or ()) else []
        sizes = f"{one.max_ulp:,.2f}", f"{one.mean_ulp:,.3f}"
        rows.append((letter(number), spans_of(one.rows), *sizes, *relative, *odd))
    headers = ["bits", "M", "max ULP", "mean ULP", "max of Σ|x||w|", "mean of Σ|x||w|", "not finite"]
    return Table(tuple(headers[: len(rows[0])]), tuple(rows))


def _paths(found: Probe) -> Iterator[Block]:
    def taken(m: int) -> list[tuple[str, str]]:
        return [(route.path, route.rule) for route in found.paths[m]]

    if all(taken(m) == [("native", "")] for m in found.paths):
        return
    for routes, group in groupby(found.paths, key=taken):
        # The bounds of parts are those of the first M.
        members = list(group)
        for (path, rule), route in zip(routes, found.paths[members[0]], strict=True):
            part = f", rows from {route.first} on" if len(routes) > 1 else ""
            lead = f"  M {spans_of(members)}{part}: "
            yield Item(lead, f"{path}{f' ({_printable(rule)})' if rule else ''}")


def _printable(rule: str) -> str:
    # A rule may compare with a text, whose quotes are no trouble inside of parentheses.
    return escaped(rule).replace('\\"', '"')


def _facts(found: Probe) -> Iterator[Block]:
    names = " ".join(
        f"{letter(place)} = {{{spans_of(members)}}}" for place, members in enumerate(found.classes)
    )
    if len(found.classes) == 1:
        outputs = max(one.outputs for one in found.against_one)
        over = f"one class over M = {spans_of(found.rows)}"
        yield Item("bits: ", f"{over}; none of row 0's {outputs:,} outputs changes with M")
    else:
        classes = f"{len(found.classes)} classes, {names}"
        yield Item("bits: ", f"{classes}; they change at M = {_listed(found.bits_change_at)}")
    for what, changed, nothing in (
        ("position", found.position, "the same row, all rows alike, has the same bits at every position"),
        ("neighbours", found.neighbours, "no row's bits change when the content of any other row does"),
        ("repeat", found.repeat, f"{found.runs} runs of every M agree"),
    ):
        yield Item(f"{what}: ", _matter(what, changed) if changed else nothing)
    yield Item("seeds: ", f"{found.seeds}; classes are joined only where all of them agree")
    if found.times is not None:
        yield Item("time: ", _time_fact(found))


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _matter(what: str, found: Sequence[ChangedRows]) -> str:
    parts = [
        f"M = {one.rows}, position {spans_of(one.positions)} (seed {spans_of(one.seeds)})"
        for one in found[:FEW]
    ]
    more = f"; {count(len(found) - FEW, 'more M', 'more M')}" if len(found) > FEW else ""
    verb = "DIFFERS" if what == "repeat" else "MATTERS" if what == "position" else "MATTER"
    return f"{verb}: other bits at {'; '.join(parts)}{more}"


def _time_fact(found: Probe) -> str:
    times = found.times or ()
    crossing = found.time_crosses_at
    slower = [time.rows for time in times if time.costs]
    fact = (
        "no M from which on one call is cheaper than row by row"
        if crossing is None
        else f"from M = {crossing} on, one call is cheaper than row by row"
    )
    dearer = f"; dearer at M = {spans_of(slower)}" if slower else ""
    return f"{fact}{dearer} ({times[0].rounds} rounds, all M taking turns)"


def _sweep(found: Sequence[ShapeProbe]) -> Iterator[Block]:
    first = found[0].probe
    yield Prose(
        f"{count(len(found), 'linear shape')} on {escaped(first.on)}, rows {LAYOUTS[first.layout]}, M = "
        f"{spans_of(first.rows)}, {count(first.seeds, 'seed')}"
    )
    rows = []
    for one in found:
        probe = one.probe
        odd = [name for name in ("position", "neighbours", "repeat") if getattr(probe, name)]
        crossing = probe.time_crosses_at
        rows.append(
            (
                one.shape + (" (head)" if one.op == "head" else ""),
                str(len(one.sites)),
                escaped(one.sites[0]),
                _listed(probe.bits_change_at) or "never",
                ", ".join(odd) or "-",
                " ".join(f"{error.mean_ulp:.3f}" for error in probe.errors or ()) or "-",
                "-" if probe.times is None else "never" if crossing is None else f"{crossing}",
            )
        )
    headers = (
        "K,N,dtype",
        "sites",
        "first",
        "bits change at M",
        "also",
        "mean ULP by class",
        "time pays from M",
    )
    yield from (Blank(), Table(headers, tuple(rows)))
    if notes := dict.fromkeys(note for one in found for note in one.probe.notes):
        yield Blank()
        yield from (Item("note: ", note) for note in notes)
