"""The control ``place``: the first origin's operation again, alone, with one thing about its call changed.

The number of rows, the row's place among them, and for attention the order in which memory has the keys: whichever moves
the row's bits on the very inputs that it had is a cause of rounding. It is named as one only where it was tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from detdiff.compare import compare
from detdiff.engines.base import ORACLE, VALUES, Overrides
from detdiff.errors import OracleRefused
from detdiff.scenario import Scenario
from detdiff.trace import Site, Trace

from ..case import Case
from ..control import CannotRun, Figures, Outcome, control
from ..facts import Facts

if TYPE_CHECKING:
    from ..origins import Captured, OriginRow

Shape = tuple[int, int]
LINEAR: Final = ("linear", "head")
ATTENTION: Final = ("attention", "attention_scores", "softmax", "attention_values")


@dataclass(frozen=True, eq=False)
class PlaceFigures(Figures):
    """What moved the bits of the operation at ``site``: the number of ``rows``, the row's ``place``, the ``order`` of the keys.

    A cause that was not tried is None. ``place_a`` and ``place_b`` are the row's place among all rows of the call, from 0.
    """

    site: str
    rows: bool | None = None
    place: bool | None = None
    order: bool | None = None
    place_a: int | None = None
    place_b: int | None = None


class CallsAgain(Protocol):
    """What an engine whose operations can be called on their own has."""

    def again(
        self, site: Site, x: NDArray[Any], dtype: str, shape: Shape, scenario: Scenario
    ) -> NDArray[Any]:
        """The output (rows, n) of a linear site for inputs (rows, k) in storage form, laid out as ``shape`` (slots, columns).

        Raises OracleRefused for a site that cannot be called.
        """

    def order_moves(self, a: Captured, b: Captured, origin: OriginRow) -> Mapping[str, bool]:
        """Whether ``order`` moves the bits of attention of one row alone, and whether ``rows`` in its call do."""


def _worth_trying(facts: Facts) -> bool:
    """Pinned kernels take the difference away, and no rule of a kernel plan says why."""
    origin = facts.origin
    if origin is None or facts.result("pin_kernels") != "removed" or facts.result("oracle") != "inside":
        return False
    return origin.kind in ATTENTION or (origin.kind in LINEAR and not (origin.rule_a or origin.rule_b))


@control("place", after="pin_kernels", needs=(ORACLE, VALUES), asked_by=_worth_trying)
def place(case: Case) -> Outcome:
    """Result ``order``, ``place`` or ``rows``, what moves the bits, in this order of rank; ``none`` where nothing of them does.

    Uses what ``oracle`` captured, and re-runs nothing; an engine whose requests share a cache runs each side once more with their
    keys apart. Raises CannotRun where the oracle captured nothing, or the engine can do neither.
    """
    if "captured" not in case.known:
        raise CannotRun("the oracle captured nothing that could be called again")
    sides, origin_rows = case.known["captured"]
    origin: OriginRow = origin_rows[0]
    engine: Any = case.one_engine()
    try:
        if getattr(engine, "keys_apart", None) and origin.site.kind in ATTENTION:
            return _apart(case, engine, origin)
        if origin.site.kind == "attention" and hasattr(engine, "order_moves"):
            figures = PlaceFigures(origin.site.name, **engine.order_moves(*sides, origin))
        elif origin.site.kind in LINEAR and hasattr(engine, "again"):
            figures = _linear(case, engine, sides, origin)
        else:
            raise CannotRun(f"{origin.site.name} cannot be called on its own")
    except OracleRefused as error:
        raise CannotRun(str(error)) from None
    result = next((name for name in ("order", "place", "rows") if getattr(figures, name)), "none")
    return Outcome(result, _sentence(figures, result), figures)


def _apart(case: Case, engine: Any, origin: OriginRow) -> Outcome:
    """Both sides again with each request's keys in an order of their own, and nothing else changed."""
    again = [case.record(case.scenario(side), side, overrides=Overrides(keys_apart=True)) for side in "ab"]
    moves = not any(request.differing for request in compare(*again).requests)
    how = f"with {engine.keys_apart}"
    sentence = (
        f"{how}, nothing differs: the order in which the shared cache has the keys moves the bits of {origin.site.name}"
        if moves
        else f"{how}, the two sides still differ"
    )
    return Outcome("order" if moves else "none", sentence, PlaceFigures(origin.site.name, order=moves))


def _sentence(figures: PlaceFigures, result: str) -> str:
    words = {
        "order": "the order in which memory has the keys moves the bits of its row alone",
        "place": f"the row's place in the call, {figures.place_a} in a and {figures.place_b} in b, moves its bits",
        "rows": "the number of rows in the call moves its bits",
    }
    found = [words[name] for name in words if getattr(figures, name)]
    still = [
        words[name].replace("moves", "does not move") for name in words if getattr(figures, name) is False
    ]
    if result == "none":
        return f"{figures.site}, called again on what it was given: {'; '.join(still) or 'nothing could be tried'}"
    return f"{figures.site}, called again on what it was given: {'; '.join((*found, *still))}"


def _linear(
    case: Case, engine: CallsAgain, sides: tuple[Captured, Captured], origin: OriginRow
) -> PlaceFigures:
    site, port = origin.site, origin.site.inputs[0]
    values = [
        captured.needed(row, site, port)
        for captured, row in zip(sides, (origin.row_a, origin.row_b), strict=True)
    ]
    x = np.ascontiguousarray(values[0].data).reshape(-1)
    calls = [
        _called(captured.trace, row)
        for captured, row in zip(sides, (origin.row_a, origin.row_b), strict=True)
    ]
    dtype = values[0].dtype

    def run(shape: Shape, at: int) -> bytes:
        rows = np.zeros((shape[0] * shape[1], len(x)), x.dtype)
        rows[at] = x
        return bytes(engine.again(site, rows, dtype, shape, case.scenario("a"))[at].tobytes())

    (shape_a, at_a), (shape_b, at_b) = calls
    if shape_a == shape_b:
        moved = {"place": run(shape_b, at_a) != run(shape_b, at_b) if at_a != at_b else False}
    else:
        least = min(at_a, shape_b[0] * shape_b[1] - 1)
        moved = {
            "place": at_b != least and run(shape_b, least) != run(shape_b, at_b),
            "rows": run(shape_a, 0) != run(shape_b, 0),
        }
    return PlaceFigures(site.name, **moved, place_a=at_a, place_b=at_b)


def _called(trace: Trace, row: int) -> tuple[Shape, int]:
    """The shape of a row's forward and its place among all rows of it, padding included."""
    index = trace.row_index()
    request, position = int(index.request[row]), int(index.position[row])
    line = trace.forwards()[int(index.forward[row])]
    slots, columns = (int(n) for n in line["shape"])
    column = 0
    for each in line["rows"]:
        if each["request"] == request and 0 <= position - each["start"] < each["count"]:
            own = position - each["start"]
            return (slots, columns), column + own if line["layout"] == "packed" else each[
                "slot"
            ] * columns + own
        column += each["count"]
    raise OracleRefused(f"Position {position} is in no row of its forward. Judge the sites around it.")
