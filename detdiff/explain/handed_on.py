"""Composites that hand on their last site's bits in one run, and from equal inputs give others in the other run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from detdiff.compare.alignment import descendants
from detdiff.errors import OracleRefused
from detdiff.trace import Site, Trace

from .bounds import BoundedOutputs
from .oracle import JudgedOrigins, judge
from .origins import Captured, OriginRow, dtype_of
from .roundings import UNIT, Arithmetic, Float64

# A sound composite can add what no site shows, and lose it in rounding in one run alone. What is lost is below half a unit
# of every element, and what the other run makes of it is as far off as that run's own roundings on the way, which are of
# the size of what is summed there: the row's largest, not the element's. bfloat16 is the lowest precision that models
# compute in, whatever dtype their outputs have; four roundings are a product, two sums and the output's own.
ROUNDINGS: Final = 4
ALLOWED: Final = ROUNDINGS * UNIT["bfloat16"]


@dataclass(frozen=True, eq=False)
class HandedOn:
    """What a composite gives that hands on ``expected`` (1, width), the output of the site ``of`` inside it."""

    expected: Float64
    of: str

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        """The same numbers, and what hidden operands can be off by: ``ALLOWED`` of the row's largest element."""
        allowed = np.full(self.expected.shape, ALLOWED * float(np.abs(self.expected).max()))
        text = f"the bits of {self.of}, or {ROUNDINGS} roundings to bfloat16 of its row's largest element"
        scale = np.abs(self.expected) + (self.expected == 0)
        return BoundedOutputs(
            self.expected, allowed, allowed, scale, np.zeros(self.expected.shape, np.bool_), text
        )


def handed_site(a: Trace, b: Trace, origin: OriginRow) -> Site | None:
    """The last site inside a composite, where all that it was given and all inside it is equal in both runs and one of them alone hands
    on that site's bits, by their digests; else None."""
    places = {site.name: place for place, site in enumerate(a.sites)}
    inside = [a.sites[place] for place in descendants(a.sites)[places[origin.site.name]]]
    ports = [
        *((origin.site.name, port) for port in origin.site.inputs),
        *((site.name, port) for site in inside for port in (*site.inputs, *site.outputs)),
    ]
    found_a, found_b = _digests(a, origin.row_a), _digests(b, origin.row_b)
    last = next(
        (site for site in reversed(inside) if any((site.name, port) in found_a for port in site.outputs)),
        None,
    )
    if (
        last is None
        or not origin.site.outputs
        or any(found_a.get(port) != found_b.get(port) for port in ports)
    ):
        return None
    made, given = (origin.site.name, origin.site.outputs[0]), (last.name, last.outputs[0])
    hands = [found.get(made) == found.get(given) is not None for found in (found_a, found_b)]
    return last if hands[0] != hands[1] and made in found_a and made in found_b else None


def _digests(trace: Trace, row: int) -> dict[tuple[str, str], int]:
    """The digest of every port that a row has."""
    columns = trace.tables[int(trace.row_index().table[row])]
    digests = trace.digests(np.array([row]))[0]
    return {
        (trace.sites[port.site].name, port.name): int(digests[int(column)])
        for port, column in zip(trace.ports, columns, strict=True)
        if column >= 0
    }


def judged_as_handed_on(sides: Sequence[Captured], origin: OriginRow, last: Site) -> JudgedOrigins:
    """Both sides by what ``last`` gave them, where one hands it on and the other is off by more than roundings.

    Raises OracleRefused elsewhere, as what no site shows has no bound, and for values that were not captured.
    """
    rows = origin.row_a, origin.row_b
    given, made = (
        [side.needed(row, site, site.outputs[0]) for side, row in zip(sides, rows, strict=True)]
        for site in (last, origin.site)
    )
    name = f"{last.name}.{last.outputs[0]}"
    expected = given[0].numbers()[None]
    same = len({(each.dtype, each.data.size) for each in (*given, *made)}) == 1
    hands = [same and np.array_equal(each.bits(), given[0].bits()) for each in (*made, given[1])]
    if hands[0] == hands[1] or not hands[2] or not np.isfinite(expected).all() or not expected.any():
        raise OracleRefused(
            f"The composite {origin.site.name} has no bound of one operation, and {name}, which it hands on in one run alone, is zero, not finite, "
            "or of another dtype or size. Judge the sites inside it."
        )
    operation = HandedOn(expected, name)
    found = []
    for side, each in zip(sides, made, strict=True):
        backend: Any = side.trace.header["environment"].get("backend", "cpu")
        arithmetic = Arithmetic("native", dtype_of(each), backend)
        output = each.numbers()[None]
        found.append((output, arithmetic, judge(operation, output, arithmetic)))
    if all(judgement.inside for _, _, judgement in found):
        raise OracleRefused(
            f"The composite {origin.site.name} hands on {name} in one run alone and is no further off in the other than rounding "
            "may lose of what no site shows. Judge the sites inside it."
        )
    return JudgedOrigins([origin], operation, found[0], found[1])
