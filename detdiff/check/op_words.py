"""How what was found of a function of rows reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from detdiff.probe import Probe
from detdiff.probe.chart import spans_of
from detdiff.probe.sweep import Finding
from detdiff.report.words import count

from .op_difference import ElementDifference

_FEW = 3


def said(found: Probe, elements: Sequence[ElementDifference]) -> Iterator[str]:
    """One line for each fact."""
    swept = f"M = {spans_of(found.rows)}, {count(found.seeds, 'seed')}"
    if found.invariant:
        outputs = max(each.outputs for each in found.against_one)
        yield f"nothing changes a row's bits: {swept}, {count(outputs, 'output')} of row 0"
        return
    first = {each.kind: each for each in elements}
    changed = [each for each in found.against_one if not each.equal]
    if changed:
        groups = " | ".join(spans_of(members) for members in found.classes)
        seeds = sorted({seed for each in changed for seed in each.seeds})
        yield (
            f"M matters: row 0's bits change at M = {', '.join(map(str, found.bits_change_at))} (alike: {groups}; {swept}; other "
            f"than alone with seeds {spans_of(seeds)}){_element(first.get('rows'), 'alone')}"
        )
    for kind, what, than, places in (
        ("position", "position matters, all rows alike", "at position 0", found.position),
        ("neighbours", "what is in other rows matters", "beside other content", found.neighbours),
        ("repeat", "the same call again differs", "", found.repeat),
    ):
        if places:
            yield f"{what}: {_places(places)}{_element(first.get(kind), than)}"
    yield from (f"note: {each}" for each in found.notes if "float64" not in each)


def _places(found: Sequence[Finding]) -> str:
    few = "; ".join(
        f"M = {each.rows}, position {spans_of(each.positions)}, seed {spans_of(each.seeds)}"
        for each in found[:_FEW]
    )
    more = len(found) - _FEW
    return few + (f"; and at {count(more, 'more M', 'more M')}" if more > 0 else "")


def _element(found: ElementDifference | None, than: str) -> str:
    if found is None:
        return ""
    apart = "" if found.ulp is None else f", {found.ulp:,} ULP apart"
    return (
        f"; first at M = {found.rows}, position {found.position}, element {found.element}: {found.found!r}, and {found.alone!r} "
        f"{than}{apart} ({found.differing:,} of {found.outputs:,} elements differ)"
    )
