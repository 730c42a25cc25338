"""What a report draws of a comparison: numbers by position, layer, token and forward, read from the two traces."""

from __future__ import annotations

from dataclasses import dataclass

from detdiff.errors import AnswerOfOtherTraces
from detdiff.trace import Trace

from .answer import Pass
from .distances import Distances
from .divergence import Divergence, RequestDivergence
from .grids import Cells, Grid
from .ladder import Aligned, align, scan
from .points import LensPoint, TokenPoint, lens_points, token_points
from .timeline import ForwardPoint, Threshold, Timeline


@dataclass(frozen=True, eq=False)
class RequestSeries:
    """One request. ``prompt`` is its number of prompt tokens, ``positions`` the last compared position plus one.

    ``flip_index`` is the index of the first token that differs, and ``flip_position`` the row that chose it.
    ``layers`` has a row for what comes before the layers, each layer and what comes after, of the target and then of the
    draft where its rows were compared (``draft: layer 0``); ``sites`` a grid for each of these rows with a row for each
    of its sites, in execution order; ``entries`` a grid for each of them that has cache entries, with rows such as
    ``K head 0`` or ``state 0`` over the positions that wrote them. ``lens`` is empty without a flip or a recorded lens.
    ``birth_forwards`` and ``flip_forwards`` are the forwards of the first origin and of the flip in run a and in run b.
    """

    id: str
    prompt: int
    flip_index: int | None
    flip_position: int | None
    positions: int
    layers: Grid
    sites: tuple[Grid, ...]
    entries: tuple[Grid, ...]
    tokens_a: tuple[TokenPoint, ...]
    tokens_b: tuple[TokenPoint, ...]
    lens: tuple[LensPoint, ...]
    birth_forwards: tuple[int, int] | None = None
    flip_forwards: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True, eq=False)
class Series:
    """The requests of a comparison in its order, the forwards of both runs, and the thresholds seen in them."""

    requests: tuple[RequestSeries, ...]
    a: tuple[ForwardPoint, ...]
    b: tuple[ForwardPoint, ...]
    thresholds: tuple[Threshold, ...]


def series(a: Trace, b: Trace, divergence: Divergence) -> Series:
    """What to draw of ``divergence``, the comparison of ``a`` and ``b``. Needs the traces alone, no model.

    Takes about as long as comparing them, and a few bytes for each site and position; values are read where both traces
    hold them. Raises AnswerOfOtherTraces where ``divergence`` is not theirs, and what ``compare`` raises.
    """
    aligned = align(a, b, [request.id for request in divergence.requests])
    cells = Cells(aligned.ports, aligned.pairs, Distances(a, b, aligned.pairs))
    done = scan(aligned, cells)
    _must_be_theirs(aligned, done, divergence)
    numbers = {request.id: number for number, request in enumerate(aligned.pairing.pairs)}
    texts = a.texts(), b.texts()
    timelines = Timeline.of(a, "a"), Timeline.of(b, "b")
    return Series(
        requests=tuple(
            _request(aligned, cells, numbers[each.id], each, texts) for each in divergence.requests
        ),
        a=timelines[0].forwards,
        b=timelines[1].forwards,
        thresholds=(*timelines[0].thresholds, *timelines[1].thresholds),
    )


def _request(
    aligned: Aligned,
    cells: Cells,
    number: int,
    found: RequestDivergence,
    texts: tuple[dict[int, str], dict[int, str]],
) -> RequestSeries:
    request, runs = aligned.pairing.pairs[number], aligned.runs
    tokens_a, tokens_b = token_points(request, texts)
    return RequestSeries(
        id=request.id,
        prompt=request.prompt,
        flip_index=request.flip,
        flip_position=None if request.flip is None else request.at,
        positions=int(cells.lengths[number]),
        layers=cells.layers(number),
        sites=cells.sites(number),
        entries=cells.entries(number),
        tokens_a=tokens_a,
        tokens_b=tokens_b,
        lens=lens_points(runs.a, runs.b, request, found.flip),
        birth_forwards=None if found.origin is None else (found.origin.forward_a, found.origin.forward_b),
        flip_forwards=(None, None) if found.flip is None else (found.flip.forward_a, found.flip.forward_b),
    )


def _must_be_theirs(aligned: Aligned, done: Pass, divergence: Divergence) -> None:
    """A saved comparison may be older than the traces that lie where its own did."""
    numbers = {request.id: number for number, request in enumerate(aligned.pairing.pairs)}
    for request in divergence.requests:
        number = numbers.get(request.id)
        said = request.rows, request.differing, None if request.flip is None else request.flip.index
        found = None
        if number is not None:
            rows = aligned.pairs.stream == number
            differing = int(done.tally.differing[rows].sum())
            found = int(rows.sum()), differing, aligned.pairing.pairs[number].flip
        if said != found:
            raise AnswerOfOtherTraces(
                f"The comparison says of request {request.id} that {said[1]} digests of {said[0]} rows differ, and that "
                f"{_flip(said[2])}; {aligned.runs.a.path} and {aligned.runs.b.path} "
                + (
                    "do not share that request"
                    if found is None
                    else f"have {found[1]} of {found[0]}, and {_flip(found[2])}"
                )
                + ". Expected the comparison of these two traces. Compare them again."
            )


def _flip(index: int | None) -> str:
    return "no token differs" if index is None else f"token {index} is the first that differs"
