"""Two engines beside each other: bits never agree between them, so values are compared by the role of their sites.

Relative to their size, and with the growth from what a value is computed from: rounding grows through a model, and a role
that departs by more than that is worth a look. It is no verdict; ``explain`` scores each engine's operations by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import NothingComparable
from detdiff.trace import Trace

from .alignment import RowPairs
from .divergence import AcrossEngines, RoleDifference
from .roles import FEEDS, Key, Roles, fed_by, named, place
from .tokens import RequestPair

DEPARTS: Final = 10.0
"""How many times the usual growth from its inputs makes a role depart."""
_FLOOR: Final = 4.0  # roundings: what two sums in other orders differ by anyway
_UNITS: Final[Mapping[str, float]] = {"F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}


def check_asked(a: Trace, b: Trace) -> None:
    """Raises NothingComparable for two engines that each name sites of their own: none but the logits has one name."""
    shown = a.sites and b.sites and "sites" not in (*a.lacks, *b.lacks)
    common = {site.name for site in a.sites if site.kind != "logits"} & {site.name for site in b.sites}
    if a.engine != b.engine and shown and not common:
        raise NothingComparable(other_engines(f"run a ({a.path})", a.engine, f"run b ({b.path})", b.engine))


def other_engines(name_a: str, engine_a: str, name_b: str, engine_b: str) -> str:
    """Why two engines are not compared unless that is asked for."""
    return (
        f"These are different engines: {name_a} is of {engine_a!r} and {name_b} of {engine_b!r}. Each names sites of its own "
        "and their bits never agree, so expected is one engine on both sides, or to be asked for another comparison: with "
        "--across-engines (across_engines=True) sites are aligned by role, and explain scores each engine's operations by "
        "themselves."
    )


def across_engines(a: Trace, b: Trace, pairs: RowPairs, requests: tuple[RequestPair, ...]) -> AcrossEngines:
    """Compare the values of roles that both runs have, in the rows that both computed up to each flip."""
    found = Roles.of(a), Roles.of(b)
    silent = [
        f"run {run} does not say the roles of its sites (engine {trace.engine}, model {trace.model.get('model_type')})"
        for run, trace, roles in (("a", a, found[0]), ("b", b, found[1]))
        if roles is None
    ]
    if found[0] is None or found[1] is None:
        return AcrossEngines((), None, 0, (), (), *_unnamed(found), why="; ".join(silent))
    roles_a, roles_b = found[0], found[1]
    common = [key for key in roles_a.places if key in roles_b.places]
    maker = _Differences(a, b, pairs, requests, roles_a, roles_b)
    differences = [each for key in common if (each := maker.of(key)) is not None]
    graded = _graded({(each.role, each.layer): each for each in differences}, maker.units, roles_a.layers)
    return AcrossEngines(
        roles=tuple(graded),
        first=_first(graded),
        aligned=len(common),
        only_a=tuple(named(key) for key in roles_a.places if key not in roles_b.places),
        only_b=tuple(named(key) for key in roles_b.places if key not in roles_a.places),
        without_role_a=roles_a.without,
        without_role_b=roles_b.without,
        why="" if differences else _no_values(a, b, len(pairs)),
    )


def _unnamed(found: tuple[Roles | None, Roles | None]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    a, b = (() if roles is None else roles.without for roles in found)
    return a, b


def _no_values(a: Trace, b: Trace, rows: int) -> str:
    if not rows:
        return "the runs have no row in common"
    levels = [str(trace.scenario.get("capture", "digest")) for trace in (a, b)]
    return (
        f"no value of a role is recorded in both runs (capture {levels[0]} in a, {levels[1]} in b), so nothing can be said of "
        "roles; record both with capture=full, or with capture=window and the same window"
    )


class _Differences:
    def __init__(
        self,
        a: Trace,
        b: Trace,
        pairs: RowPairs,
        requests: tuple[RequestPair, ...],
        roles_a: Roles,
        roles_b: Roles,
    ) -> None:
        own = np.flatnonzero(pairs.stream < pairs.requests)
        self._a, self._b, self._requests = a, b, requests
        self._rows_a, self._rows_b = pairs.a[own], pairs.b[own]
        self._request, self._position = pairs.request[own], pairs.position[own]
        self._roles = roles_a, roles_b
        self.units: dict[Key, float] = {}
        """The unit roundoff of the coarser side's dtype, by role."""

    def of(self, key: Key) -> RoleDifference | None:
        """None where no row has the value in both runs, or where their sizes differ."""
        one = self._roles[0].values(self._a, key, self._rows_a)
        other = self._roles[1].values(self._b, key, self._rows_b)
        both = one.known & other.known
        if not both.any() or one.numbers.shape[1] != other.numbers.shape[1]:
            return None
        x, y = one.numbers[both[one.known]], other.numbers[both[other.known]]
        apart = _apart(x, y)
        worst = int(np.argmax(apart))
        rows = np.flatnonzero(both)
        self.units[key] = max(_UNITS.get(one.dtype, 0.0), _UNITS.get(other.dtype, 0.0))
        with np.errstate(all="ignore"):
            typical = float(np.sqrt(np.mean(np.square(apart))))
        return RoleDifference(
            role=key[0],
            layer=key[1],
            site_a=self._roles[0].where(key),
            site_b=self._roles[1].where(key),
            rows=len(rows),
            typical=typical,
            largest=float(apart[worst]),
            request=self._requests[int(self._request[rows[worst]])].id,
            position=int(self._position[rows[worst]]),
            growth=1.0,
        )


def _apart(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """The length of the difference of each row over that of the longer one, float64 [rows]; inf where not finite."""
    with np.errstate(all="ignore"):
        gap = np.linalg.norm(np.where(x == y, 0.0, x - y), axis=1)
        size = np.maximum(np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1))
        found = np.divide(gap, size, out=np.where(gap > 0, np.inf, 0.0), where=size > 0)
    return np.asarray(np.where(np.isfinite(found), found, np.inf), np.float64)


def _graded(
    found: Mapping[Key, RoleDifference], units: Mapping[Key, float], layers: int
) -> list[RoleDifference]:
    """Each with its growth: over the largest of what it is computed from, or over a few roundings."""
    graded = []
    for key in sorted(found, key=place):
        before = [found[other].typical for other in fed_by(key, found, layers).values()]
        # Where an input is not recorded, nothing is known of the growth.
        known = bool(before) or not FEEDS[key[0]]
        floor = max(before, default=0.0) + _FLOOR * units[key]
        graded.append(replace(found[key], growth=found[key].typical / floor if known and floor else 1.0))
    return graded


def _first(graded: list[RoleDifference]) -> RoleDifference | None:
    usual = max(1.0, float(np.median([each.growth for each in graded]))) if graded else 1.0
    return next((each for each in graded if each.growth > DEPARTS * usual), None)
