"""The control ``oracle``: origins computed again in float64 from what they were given, and both sides scored by it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from detdiff.engines.base import ORACLE, VALUES, Overrides
from detdiff.errors import OracleRefused
from detdiff.scenario import GENERATE, Capture, Scenario
from detdiff.trace import Site

from ..case import Case, Side
from ..control import CannotRun, Figures, Outcome, control

if TYPE_CHECKING:
    # The kernels' orders, which bounds are read from, are loaded when they are asked for.
    from ..oracle import JudgedOrigins, Operation, Scores
    from ..origins import Captured, OriginRow

AT_MOST: Final = 40
"""Origins that are judged, if there are more: the first of each site kind and path pair, then evenly spread ones."""
LARGEST: Final = 8
"""Further ones: those with the largest differences among what was captured for the others."""
_LOOKED_AT: Final = 1000
CHOSEN: Final = "its layer chose other entries to attend in the two runs, after something before it differed"
NO_BOUND: Final = "composites have no bound of one operation"


@dataclass(frozen=True, eq=False)
class OracleFigures(Figures):
    """Of ``origins`` origins ``judged`` were judged: rows inside and outside on each side, ``changed`` cache reads.

    ``nearer`` is the side nearer to float64 and ``ratio`` a's error over b's; ``far`` a side that is far worse, by an error
    of the size of a lower precision; ``precision`` what operands of lower precision explain; ``pattern`` which rows are
    outside, in words; ``outside_where`` the first of them; ``pairs`` the figures of each site kind and path pair.
    """

    origins: int
    judged: int
    inside_a: int
    inside_b: int
    outside_a: int
    outside_b: int
    changed: int
    not_finite: int
    skipped: Mapping[str, int]
    nearer: str | None
    ratio: float | None
    pairs: Sequence[Mapping[str, Any]]
    far: Mapping[str, Any] | None
    precision: Mapping[str, Any] | None
    pattern: str
    outside_where: Sequence[Mapping[str, Any]]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))


class KnowsOperations(Protocol):
    """What an engine with the capability ``oracle`` has."""

    def operation(
        self, site: Site, captured: Captured, request: str, rows: Sequence[int], scenario: Scenario
    ) -> Operation:
        """What ``site`` was given in ``rows`` of a captured run, with the parameters of its module.

        Raises OracleRefused where the module's arithmetic is not known.
        """


@control("oracle", after="fresh", needs=(ORACLE, VALUES))
def oracle(case: Case) -> Outcome:
    """Judge the origins of a case on both sides, in units of the rounding bound of each side's path.

    Result ``inside`` or ``outside``. Costs one re-run of each side, which captures the values.
    """
    return judged(case, AT_MOST)


def judged(case: Case, at_most: int) -> Outcome:
    """The same on ``at_most`` origins, spread over all of them, and the largest beside them. Raises CannotRun."""
    from ..handed_on import judged_as_handed_on
    from ..oracle import Scores
    from ..origins import origins, pattern

    origin_rows = origins(case.a, case.b, across_engines=case.divergence.across_engines is not None)
    if not origin_rows:
        raise CannotRun("no operation was found whose inputs are equal and whose outputs are not")
    chosen = sample(origin_rows, at_most)
    scores = Scores(len(origin_rows))
    for each in chosen:
        if each.site.kind == "cache_read":
            scores.changed(each)
    plain = [each for each in chosen if each.how != "composite" and each.site.kind != "cache_read"]
    between = [each for each in chosen if each.how == "composite"]
    known = all(hasattr(case.engine(side), "scanned") for side in "ab")
    handed = {id(each): last for each in between if (last := _handed_site(case, each)) is not None}
    if not known:
        for each in between:
            if id(each) not in handed:
                scores.skip(each, NO_BOUND)
        between = [each for each in between if id(each) in handed]
    if plain or between:
        more = {last.name for last in handed.values()}
        sides = [capture_side(case, side, [*plain, *between], origin_rows, more) for side in "ab"]
        captured = _captured_rows(sides, origin_rows)
        places = {id(each): place for place, each in enumerate(origin_rows)}
        lasts = [handed.get(id(each)) for each in between]
        plain, between = ([captured[places[id(each)]] for each in some] for some in (plain, between))
        origin_rows = captured
        case.known["captured"] = sides, origin_rows
        taken = {id(each) for each in plain}
        plain += [each for each in _largest(origin_rows, sides) if id(each) not in taken]
        for group in _groups(plain):
            judge_rows(case, sides, group, scores, moved=_moved_before(group[0], origin_rows))
        for each, last in zip(between, lasts, strict=True):
            try:
                scores.add(
                    _judged_scan(case, sides, each)
                    if last is None
                    else judged_as_handed_on(sides, each, last)
                )
            except OracleRefused as error:
                scores.skip(each, str(error).partition(". ")[0])
    worst = scores.first_outside()
    affected = "" if worst is None else pattern(case.a, case.b, worst.origin_row.site.name, worst.run)
    return Outcome(scores.result, scores.sentence(), OracleFigures(**scores.detail(affected)))


def sample(origin_rows: Sequence[OriginRow], at_most: int = AT_MOST) -> list[OriginRow]:
    """All origins, or the first of each site kind and path pair and others evenly spread, in execution order."""
    if len(origin_rows) <= at_most:
        return list(origin_rows)
    firsts: dict[tuple[str, str | None, str | None], int] = {}
    for place, each in enumerate(origin_rows):
        firsts.setdefault(each.group, place)
    places = set(list(firsts.values())[:at_most])
    spread = np.linspace(0, len(origin_rows) - 1, at_most).astype(int).tolist()
    for place in spread:
        if len(places) < at_most:
            places.add(place)
    return [origin_rows[place] for place in sorted(places)]


def capture_side(
    case: Case,
    side: Side,
    chosen: Sequence[OriginRow],
    origin_rows: Sequence[OriginRow],
    more: Collection[str] = (),
) -> Captured:
    """A re-run that keeps the values of the chosen sites and ``more``, the cache entries that they need, and attention's calls at its origins."""
    from ..origins import DRAFT, Captured

    scenario = _until_last(case, case.scenario(side), origin_rows)
    layers = {
        (each.site.layer, each.site.name.startswith(DRAFT))
        for each in chosen
        if each.site.kind in ("attention", "rope")
    }
    writes = {
        site.name
        for site in case.a.sites
        if site.kind == "cache_write" and (site.layer, site.name.startswith(DRAFT)) in layers
    }
    positions = [each.position for each in chosen]
    reads = any(each.site.kind == "attention" for each in chosen)
    capture = Capture(
        level="window",
        requests=tuple(
            dict.fromkeys(id for each in chosen for id in sorted(scenario.turns_with(each.request)))
        ),
        positions=(0 if reads else min(positions), max(positions)),
        sites=tuple(sorted({each.site.name for each in chosen} | writes | set(more))),
        digest=scenario.capture.digest,
        memory_mb=scenario.capture.memory_mb,
    )
    engine: Any = case.engine(side)
    number = case.trace(side).row_index().request

    def computed(each: OriginRow) -> tuple[int, int]:
        # A row that a turn kept was computed for the turn before.
        return int(number[each.row_a if side == "a" else each.row_b]), each.position

    rows = {
        (each.site.name, *computed(each))
        for each in origin_rows
        if each.site.kind == "attention" and each.site.name in capture.sites
    }
    scans = {computed(each) for each in chosen if each.how == "composite"}
    watch = engine.watch(rows, scans) if (rows or scans) and hasattr(engine, "watch") else None
    trace = case.record(replace(scenario, capture=capture), side, overrides=Overrides(watch=watch))
    return Captured(trace, watch)


def _until_last(case: Case, scenario: Scenario, origin_rows: Sequence[OriginRow]) -> Scenario:
    """The scenario with requests that end soon after the last origin of both sides: what comes later is not asked about.

    Nobody ends before the forward of that origin, nor proposes less in it because the end is near.
    """
    if scenario.task != GENERATE or any(request.turn is not None for request in scenario.requests):
        return scenario
    spare = 2 + (0 if scenario.speculation is None else scenario.speculation.drafts)
    needed = dict.fromkeys((request.id for request in scenario.requests), spare)
    sides: tuple[Side, ...] = ("a", "b")
    for side in sides:
        made = case.trace(side).generated(lens=False)
        alone = case.scenario(side).schedule.kind == "serial"
        for number, id in enumerate(case.ids(side)):
            # Who is served alone does not wait for what others come to.
            forwards = [
                each.forward_a if side == "a" else each.forward_b
                for each in origin_rows
                if each.request == id or not alone
            ]
            last = max(forwards, default=-1)
            some = made.index[(made.request == number) & (made.forward <= last)]
            if id in needed and len(some):
                needed[id] = max(needed[id], int(some.max()) + 1 + spare)
    requests = [replace(each, max_tokens=min(each.max_tokens, needed[each.id])) for each in scenario.requests]
    return replace(scenario, requests=tuple(requests))


def _captured_rows(sides: Sequence[Captured], origin_rows: Sequence[OriginRow]) -> list[OriginRow]:
    """The same origins with their rows' places in the captured re-runs. Raises CannotRun where those have other origins."""
    from ..origins import origins

    found = {
        (each.site.name, each.request, each.position): each
        for each in origins(sides[0].trace, sides[1].trace)
    }
    asked = [(each.site.name, each.request, each.position) for each in origin_rows]
    if found.keys() != set(asked):
        raise CannotRun(
            "the re-runs that captured values have other origins than the runs, which do not repeat"
        )
    return [
        replace(each, row_a=found[key].row_a, row_b=found[key].row_b)
        for key, each in zip(asked, origin_rows, strict=True)
    ]


def _largest(origin_rows: Sequence[OriginRow], sides: Sequence[Captured]) -> list[OriginRow]:
    """Those with the largest differences, over the size of the output, whose values were captured anyway."""
    kept = set(sides[0].trace.scenario["window_sites"])
    places = [
        place
        for place, each in enumerate(origin_rows)
        if each.how == "leaf" and each.site.kind != "cache_write" and each.site.name in kept
    ]
    # Reading values one by one takes longer than comparing all digests.
    places = places[:: -(-len(places) // _LOOKED_AT) or 1]
    sizes: list[tuple[float, int]] = []
    for place in places:
        each = origin_rows[place]
        port = each.site.outputs[0]
        found = [
            side.value(row, each.site.name, port)
            for side, row in zip(sides, (each.row_a, each.row_b), strict=True)
        ]
        if any(value is None for value in found):
            continue
        a, b = (value.numbers() for value in found if value is not None)
        with np.errstate(all="ignore"):
            size = float(np.max(np.abs(a - b)) / max(float(np.sqrt(np.mean(np.square(a)))), 1e-30))
        sizes.append((size if np.isfinite(size) else np.inf, place))
    return [origin_rows[place] for _, place in sorted(sizes, reverse=True)[:LARGEST]]


def _groups(chosen: Sequence[OriginRow]) -> Iterator[list[OriginRow]]:
    """Rows of one site and one forward on each side together; attention row by row."""
    groups: dict[Any, list[OriginRow]] = {}
    for each in chosen:
        key: tuple[Any, ...] = (
            each.site.name,
            each.request,
            each.forward_a,
            each.forward_b,
            each.call_a,
            each.call_b,
        )
        if each.site.kind == "attention":
            key = (*key, each.position)
        groups.setdefault(key, []).append(each)
    yield from groups.values()


def _handed_site(case: Case, origin: OriginRow) -> Site | None:
    """See ``handed_site``; None where the runs are asked for other computations: over other processes, or with an adapter and without."""
    from ..handed_on import handed_site

    one = case.engine("a") is case.engine("b")
    adapted = {request.use_adapter for side in ("a", "b") for request in case.scenario(side).requests}
    return handed_site(case.a, case.b, origin) if one and len(adapted) < 2 else None


def _judged_scan(case: Case, sides: Sequence[Captured], origin: OriginRow) -> JudgedOrigins:
    """A difference that arose between two sites, by the recurrence between them: each side by what its own was given. Raises
    OracleRefused."""
    from ..oracle import JudgedOrigins, judge
    from ..roundings import Arithmetic

    found, operations = [], []
    for name, captured, place in zip("ab", sides, (origin.row_a, origin.row_b), strict=True):
        engine: Any = case.engine(name)
        operation, output, dtype = engine.scanned(captured, origin, place)
        backend: Any = captured.trace.header["environment"].get("backend", "cpu")
        arithmetic = Arithmetic("native", dtype, backend)
        found.append((output, arithmetic, judge(operation, output, arithmetic)))
        operations.append(operation)
    return JudgedOrigins([origin], operations[0], found[0], found[1], operations[1])


def _moved_before(attention: OriginRow, origin_rows: Sequence[OriginRow]) -> bool:
    """Whether something else in the layer of an attention differs up to its row: a model that chooses the entries it attends may then
    choose others."""
    return attention.site.kind == "attention" and any(
        each.site.kind != "attention"
        and (each.site.layer, each.request) == (attention.site.layer, attention.request)
        and each.position <= attention.position
        for each in origin_rows
    )


def judge_rows(
    case: Case,
    sides: Sequence[Captured],
    group: list[OriginRow],
    scores: Scores,
    *,
    moved: bool = False,
    own: bool = False,
) -> None:
    """Score rows of one operation. ``own``: each side by what its own call was given, which need not be equal; ``moved``: so, too,
    where both attend to the same entries."""
    from detdiff_kernels import UnsupportedFormat

    from ..oracle import JudgedOrigins, judge
    from ..roundings import Arithmetic

    first = group[0]
    try:
        found: list[Any] = []
        operations: list[Operation] = []
        # What attention read is not known to be equal where the layer's cache is not recorded.
        own = own or (first.site.kind == "attention" and "kv" not in first.site.inputs)
        both = ([each.row_a for each in group], [each.row_b for each in group])
        for name, captured, call, rows in zip("ab", sides, (first.call_a, first.call_b), both, strict=True):
            engine: Any = case.engine(name)
            # Another engine may round elsewhere, as one over several processes does at each all-reduce.
            if own or moved or not operations or engine is not case.engine("a"):
                asked = first.site, captured, first.request, rows, case.scenario(name)
                operations.append(engine.operation(*asked))
                if moved and not operations[0].attends_as(operations[-1]):  # type: ignore[attr-defined]
                    scores.skip(first, CHOSEN)
                    return
            output, dtype = captured.output(first.site, rows)
            backend = str(captured.trace.header["environment"].get("backend", "cpu"))
            arithmetic = Arithmetic(call.path or "native", dtype, backend, call.rows)  # type: ignore[arg-type]
            found.append((output, arithmetic, judge(operations[-1], output, arithmetic)))
        scores.add(JudgedOrigins(group, operations[0], found[0], found[1], operations[-1]))
    except (OracleRefused, UnsupportedFormat) as error:
        for each in group:
            scores.skip(each, str(error).partition(". ")[0])
