"""The values of one engine's run by role, and one operation of it against float64 as the model's file has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.roles import Key, Roles, named
from detdiff.engines.base import Engine
from detdiff.errors import OracleRefused
from detdiff.scenario import Capture
from detdiff.trace import PHASES, Trace

from .control import CannotRun
from .decoder import LlamaDecoder
from .oracle import Judgement, Operation, judge
from .origins import DTYPES
from .roundings import Arithmetic

if TYPE_CHECKING:
    from .case import Case, Side

ROWS: Final = 6
"""Rows that are judged: half of them of the prompt, its last one among them."""
BYTES: Final = 512 << 20
"""Values that a re-run captures at most; a prompt whose last row is beyond them is judged as far as they go."""


@dataclass(eq=False)
class JudgedRun:
    """One side's captured run."""

    side: Side
    engine: Engine
    trace: Trace
    roles: Roles
    decoder: LlamaDecoder
    request: int
    rows: NDArray[np.int64]
    """Places in the row index by position: the last write of each."""
    judged: NDArray[np.int64]
    """Positions that are judged."""
    kept: dict[Key, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, side: Side, decoder: LlamaDecoder, request: str) -> JudgedRun:
        """The side's own run where it kept all values, else one that captures them. Raises CannotRun."""
        trace, scenario = case.trace(side), case.scenario(side)
        told = Roles.of(trace)
        if told is None:
            raise CannotRun(f"run {side} does not say the roles of its sites (engine {trace.engine})")
        number = case.number(side, request)
        last = last_position(trace, number, decoder)
        if scenario.capture.level != "full":
            sites = tuple(sorted({site.name for site, _ in told.places.values()}))
            capture = Capture(
                level="window",
                requests=(request,),
                positions=(0, last),
                sites=sites,
                digest=scenario.capture.digest,
                memory_mb=scenario.capture.memory_mb,
            )
            trace = case.record(replace(scenario, capture=capture), side)
        index = trace.row_index()
        mine = np.flatnonzero((index.request == number) & (index.phase != PHASES.index("draft")))
        rows = np.full(last + 1, -1, np.int64)
        for row in mine.tolist():
            if index.position[row] <= last:
                rows[index.position[row]] = row
        prompt = len(trace.requests[number]["tokens"])
        return cls(
            side, case.engine(side), trace, told, decoder, number, rows, _chosen(min(prompt - 1, last), last)
        )

    def operation_rows(self, key: Key) -> tuple[NDArray[np.int64], dict[str, Any], Any]:
        """The positions whose value and inputs were captured, the inputs by role, and the output. Raises OracleRefused."""
        feeds = self.decoder.feeds(key)
        for each in (*feeds.values(), key):
            if each not in self.roles.places:
                raise OracleRefused(f"{named(each)} is at no site of {self.trace.engine}.")
        positions = self.judged[self.rows[self.judged] >= 0]
        needed = [key, *(each for name, each in feeds.items() if key[0] != "attention" or name == "rope_q")]
        for each in needed:
            positions = positions[self._known(each)[positions]]
        if not len(positions):
            raise OracleRefused(f"{named(key)}: no row of it was captured with its inputs.")
        given = {name: self.numbers(each, positions) for name, each in feeds.items() if each in needed}
        return positions, given, self.numbers(key, positions)

    def cached(self, key: Key, position: int) -> NDArray[np.float64]:
        """The keys or values of all positions up to one, (positions, width). Raises OracleRefused."""
        before = np.arange(position + 1)
        if not self._known(key)[before].all():
            raise OracleRefused(
                f"{named(key)}: a position before {position} was not captured, so what attention read is not known."
            )
        return self.numbers(key, before)

    def has(self, key: Key) -> bool:
        """Whether any row of a role was captured."""
        return key in self.roles.places and bool(self._known(key).any())

    def _values(self, key: Key) -> Any:
        if key not in self.kept:
            there = np.flatnonzero(self.rows >= 0)
            self.kept[key] = there, self.roles.values(self.trace, key, self.rows[there])
        return self.kept[key]

    def captured(self, key: Key, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """At which positions a role's value was captured."""
        return self._known(key)[positions]

    def _known(self, key: Key) -> NDArray[np.bool_]:
        there, values = self._values(key)
        known = np.zeros(len(self.rows), np.bool_)
        known[there[values.known]] = True
        return known

    def numbers(self, key: Key, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """The values of a role at positions that were captured, (positions, width)."""
        there, values = self._values(key)
        at = np.searchsorted(there[values.known], positions)
        found: NDArray[np.float64] = values.numbers[at]
        return found

    def forget(self, layer: int) -> None:
        """Values of layers before one are not asked for again."""
        self.kept = {key: each for key, each in self.kept.items() if key[1] is None or key[1] >= layer - 1}

    def arithmetic(self, key: Key, position: int) -> Arithmetic:
        """How the engine computed a role at a position. Raises OracleRefused."""
        dtype = self._values(key)[1].dtype
        if dtype not in DTYPES:
            raise OracleRefused(f"{named(key)} is of dtype {dtype}, whose roundings are not known.")
        environment = self.trace.header["environment"]
        backend = str(environment.get("backend", environment.get("device", "cpu")))
        if backend != "cpu" and "backend" not in environment:
            raise OracleRefused(f"{self.trace.engine} ran on {backend}, whose roundings are not known.")
        forward = int(self.trace.row_index().forward[self.rows[position]])
        site = [each.name for each in self.trace.sites].index(self.roles.places[key][0].name)
        call = self.trace.call(forward, site, (self.request, position)) or {}
        path = str(call.get("path") or "native")
        # What a site is given was computed before it, and by no kernel of its.
        path = path if self.roles.places[key][1] in self.roles.places[key][0].outputs else "native"
        rows = call.get("rows") if backend != "cpu" or path != "native" else None
        return Arithmetic(path, DTYPES[dtype], backend, rows)  # type: ignore[arg-type]

    def tokens(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """What the request's rows had to be fed: its prompt, and what it generated, or the tokens that it was given."""
        if self.trace.scenario.get("force_tokens") is not None:
            return self.trace.row_index().token[self.rows[positions]].astype(np.int64)
        generated = self.trace.generated(lens=False)
        mine = generated.request == self.request
        made = generated.token[mine][np.argsort(generated.index[mine])]
        fed = np.concatenate([np.array(self.trace.requests[self.request]["tokens"], np.int64), made])
        return fed[positions].astype(np.int64)


def last_position(trace: Trace, request: int, decoder: LlamaDecoder) -> int:
    """The last position that is captured."""
    config = decoder.configuration
    attended = (2 * config.heads + 3 * config.kv_heads) * config.head_width
    row = 4 * (config.layers * (7 * config.hidden + attended + 3 * config.inner) + 2 * config.vocabulary)
    index = trace.row_index()
    most = int(index.position[index.request == request].max(initial=0))
    if config.window is not None:
        # Which layers see less than all is another matter for each type of model.
        most = min(most, config.window - 1)
    return min(most, max(ROWS, BYTES // row))


def _chosen(prompt: int, last: int) -> NDArray[np.int64]:
    """Positions to judge: of the prompt, whose last row is ``prompt``, and of what follows. The first one alone says little:
    it is turned by no angle and attends itself."""
    half = ROWS // 2
    places = [
        *np.linspace(min(1, prompt), prompt, half),
        *np.linspace(min(prompt + 1, last), last, ROWS - half),
    ]
    return np.unique(np.array(places).astype(np.int64))


@dataclass(frozen=True, eq=False)
class RoleScore:
    """One operation of one side: errors and scales by position, its worst error in units of its bound."""

    where: str
    errors: Mapping[int, NDArray[np.float64]]
    scale: Mapping[int, NDArray[np.float64]]
    worst: float
    outside: tuple[int, ...]
    said: str


def role_score(run: JudgedRun, key: Key) -> RoleScore:
    """One operation in the rows that are judged. Raises OracleRefused, and UnsupportedFormat for a weight that no bound is of."""
    if key[0] == "logits" and not run.has(key):
        return _highest(run, key)
    positions, given, output = run.operation_rows(key)
    feeds = run.decoder.feeds(key)
    groups: dict[Any, list[int]] = {}
    for n, position in enumerate(positions.tolist()):
        arithmetic = run.arithmetic(key, position)
        groups.setdefault((arithmetic, position if key[0] == "attention" else None), []).append(n)
    errors: dict[int, NDArray[np.float64]] = {}
    scale: dict[int, NDArray[np.float64]] = {}
    outside: list[int] = []
    worst, first = 0.0, ""
    for (arithmetic, _), members in groups.items():
        at = positions[members]
        values = {name: numbers[members] for name, numbers in given.items()}
        if key[0] == "attention":
            values |= {name: run.cached(feeds[name], int(at[0])) for name in ("rope_k", "v")}
            if run.trace.scenario.get("kv_bits") is not None:
                raise OracleRefused(f"{named(key)} reads a quantised cache.")
        operation = run.decoder.operation(key, values, run.tokens(at), at, arithmetic.dtype)
        own: Any = getattr(run.engine, "as_computed", None)
        if own is not None:
            operation = own(key[0], operation, arithmetic.dtype)
        judgement = judge(operation, output[members], arithmetic)
        worst = max(worst, judgement.worst)
        beyond = _beyond(operation, judgement, arithmetic).reshape(len(members), -1)
        for n, position in enumerate(at.tolist()):
            errors[position] = judgement.errors.reshape(len(members), -1)[n]
            scale[position] = judgement.scale.reshape(len(members), -1)[n]
            if beyond[n].any():
                outside.append(position)
                columns = np.flatnonzero(beyond[n])
                first = (
                    first
                    or f"{len(columns)} of {beyond.shape[1]} elements, columns {columns[0]} to {columns[-1]}"
                )
    return RoleScore(run.roles.where(key), errors, scale, worst, tuple(sorted(outside)), first)


def _highest(run: JudgedRun, key: Key) -> RoleScore:
    """The logits that tokens were chosen from, where an engine shows the highest alone: those of the head. Raises OracleRefused."""
    generated = run.trace.generated(lens=False)
    head: Key = ("head", None)
    mine = np.flatnonzero((generated.request == run.request) & (generated.position < len(run.rows)))
    known = run.has(head) and generated.top_ids.shape[1] > 0
    errors: dict[int, NDArray[np.float64]] = {}
    for n in mine.tolist():
        at = np.array([int(generated.position[n])])
        if not known or not run.captured(head, at).all():
            continue
        expected = run.numbers(head, at)[0][generated.top_ids[n]]
        errors[int(at[0])] = np.abs(generated.top_logits[n].astype(np.float64) - expected)
    if not errors:
        raise OracleRefused(f"{named(key)}: no row of it was captured with its inputs.")
    outside = tuple(position for position, each in errors.items() if not (each == 0).all())
    scale = {position: np.ones_like(each) for position, each in errors.items()}
    return RoleScore(
        run.roles.where(key), errors, scale, np.inf if outside else 0.0, outside, "among the highest logits"
    )


def _beyond(operation: Operation, judgement: Judgement, arithmetic: Arithmetic) -> NDArray[np.bool_]:
    if judgement.inside:
        return np.zeros(judgement.errors.shape, np.bool_)
    found = operation.bounded(arithmetic)
    allowed = found.unbounded & ~np.isfinite(judgement.errors)
    return np.asarray(~(judgement.errors <= found.bound) & ~allowed, np.bool_)
