"""What a case is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from injecting import Around

from detdiff.engines.mlx.model import LoadedModel
from detdiff.errors import DetdiffError
from detdiff.scenario import Scenario


@dataclass(frozen=True)
class Expected:
    """What has to be named; None and empty: the case says nothing of it.

    ``requests`` are those that may diverge, all others have to be bit-equal. ``site`` is that of the first origin,
    ``kinds`` the site kinds that may be origins at all. ``position`` is the row of the first origin, ``entry`` and
    ``entry_position`` the cache entry (K or V), ``head`` of the entry or of attention. ``rows`` is the range of M, inclusive,
    in which the fault shows, ``columns`` those of the output that are wrong, ``queries`` the positions of queries that are
    wrong. ``event`` is the kind of a bookkeeping event, ``error`` what comparing raises. ``nearer`` is the side that is
    nearer to float64, ``precision`` the dtype that explains its distance.
    """

    requests: frozenset[str] = frozenset()
    site: str | None = None
    kinds: frozenset[str] = frozenset()
    how: str | None = None
    stage: str | None = None
    layer: int | None = None
    head: int | None = None
    position: int | None = None
    entry: str | None = None
    entry_position: int | None = None
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None
    queries: tuple[int, int] | None = None
    chunk: int | None = None
    event: str | None = None
    nearer: str | None = None
    precision: str | None = None
    error: type[DetdiffError] | None = None


@dataclass(frozen=True)
class Trial:
    """One trial: two runs of one model, and of one ``draft`` model, with the injected faults of ``around`` in place, and what has to
    be named."""

    scenario_a: Scenario
    scenario_b: Scenario
    loaded: LoadedModel
    expected: Expected
    around: Around = field(default_factory=Around)
    draft: LoadedModel | None = None


@dataclass(frozen=True)
class FaultCase:
    """A kind of fault. ``verdict`` is what ``explain`` has to say; None where the case is settled before there is one:
    nothing is comparable, or the finding of ``compare`` is the answer."""

    number: int
    kind: str
    verdict: str | None
    injected_fault: str
    trial: Callable[[int], Trial]
