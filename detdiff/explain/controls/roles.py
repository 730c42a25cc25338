"""The control ``roles``: every operation of two engines against float64, by its role, as the model's file has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.roles import LAST, Key, Roles, named, place
from detdiff.engines.base import MODEL_FILE, SITES, VALUES, Engine
from detdiff.errors import OracleRefused
from detdiff.scenario import Capture
from detdiff.trace import PHASES, Trace

from ..case import Case, Side
from ..control import CannotRun, Figures, Outcome, control

if TYPE_CHECKING:
    # The kernels' orders, which bounds are read from, are loaded when they are asked for.
    from ..decoder import LlamaDecoder
    from ..facts import Facts
    from ..oracle import Judgement, Operation
    from ..roundings import Arithmetic

ROWS: Final = 6
"""Rows that are judged: half of them of the prompt, its last one among them."""
BYTES: Final = 512 << 20
"""Values that a re-run captures at most; a prompt whose last row is beyond them is judged as far as they go."""
_LISTED: Final = 8
_SAMPLED: Final = 64
"""Rows of each weight by which two files are compared."""


@dataclass(frozen=True, eq=False)
class RolesFigures(Figures):
    """What was judged in rows ``positions`` of ``request``: ``operations`` by side, those outside their bound
    (``outside_a``, ``outside_b``), and those outside in both (``shared``), which speak of the file rather than an engine.

    ``nearer`` is the side nearer to float64 and ``ratio`` a's error over b's; ``roles`` the figures of each role;
    ``outside_where`` the first operations that are outside, in order; ``not_judged`` which could not be, by the reason;
    ``files`` what the two models' files say differently.
    """

    request: str
    positions: Sequence[int]
    operations: Mapping[Side, int]
    outside_a: int
    outside_b: int
    shared: Sequence[str]
    nearer: str | None
    ratio: float | None
    roles: Sequence[Mapping[str, Any]]
    outside_where: Sequence[Mapping[str, Any]]
    not_judged: Mapping[str, Sequence[str]]
    files: str

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))


class KnowsModelFile(Protocol):
    """What an engine with the capability ``model_file`` has. One whose kernels round otherwise than MLX's on a CPU also has
    ``as_computed(role, operation, dtype)``, which gives the operation with its own roundings."""

    @property
    def model_file(self) -> Path:
        """The directory or file that its weights came from."""


def _across(facts: Facts) -> bool:
    return facts.divergence is not None and facts.divergence.across_engines is not None


@control("roles", after="repeat", needs=(SITES, VALUES, MODEL_FILE), asked_by=_across)
def roles(case: Case) -> Outcome:
    """Judge each engine's operations given its own inputs, with weights and constants of the model's file.

    Result ``inside``, ``outside`` (an operation, in one engine), ``shared`` (in both at once), ``partly`` (inside, and some
    could not be judged), or ``other_files``. Costs one re-run of each side that did not capture all values.
    """
    if case.divergence.across_engines is None:
        raise CannotRun(
            "the two sides are compared site by site, and roles are for two engines (across_engines)"
        )
    from ..decoder import LlamaDecoder
    from ..model_file import ModelFile

    decoders = {}
    for side in "ab":
        engine: Any = case.engine(side)
        try:
            decoders[side] = LlamaDecoder(ModelFile.open(engine.model_file))
        except OracleRefused as error:
            raise CannotRun(str(error)) from error
    request = _request(case)
    sides = [_JudgedRun.of(case, side, decoders[side], request) for side in "ab"]
    files = _files(decoders["a"], decoders["b"])
    found = _RoleScores(request, sides, files)
    keys = sorted({key for each in decoders.values() for key in each.keys()}, key=place)
    for key in keys:
        for run in sides:
            found.judge(run, key)
    for run in sides:
        found.choices(run)
    return Outcome(found.result, found.said(), found.figures())


def _request(case: Case) -> str:
    """The request of the first flip, or of the shortest prompt where that one's is long."""
    common = [each for each in case.ids("a") if each in case.ids("b")]
    lengths = {str(each["id"]): len(each["tokens"]) for each in case.a.requests}
    diverged = any(each.stage is not None for each in case.divergence.requests)
    first = case.focus.id if diverged else common[0]
    return first if lengths[first] <= 256 else min(common, key=lambda id: lengths[id])


@dataclass(eq=False)
class _JudgedRun:
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
    def of(cls, case: Case, side: Side, decoder: LlamaDecoder, request: str) -> _JudgedRun:
        trace, scenario = case.trace(side), case.scenario(side)
        told = Roles.of(trace)
        if told is None:
            raise CannotRun(f"run {side} does not say the roles of its sites (engine {trace.engine})")
        number = case.number(side, request)
        last = _last(trace, number, decoder)
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
        from ..origins import DTYPES
        from ..roundings import Arithmetic

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


def _last(trace: Trace, request: int, decoder: LlamaDecoder) -> int:
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
class _RoleScore:
    """One operation of one side: errors and scales by position, its worst error in units of its bound."""

    where: str
    errors: Mapping[int, NDArray[np.float64]]
    scale: Mapping[int, NDArray[np.float64]]
    worst: float
    outside: tuple[int, ...]
    said: str


class _RoleScores:
    """What was judged so far."""

    def __init__(self, request: str, runs: Sequence[_JudgedRun], files: str) -> None:
        self._request, self._runs, self._files = request, runs, files
        self._scores: dict[Side, dict[Key, _RoleScore]] = {"a": {}, "b": {}}
        self._refused: dict[str, list[str]] = {}
        self._wrong_choice: list[dict[str, Any]] = []

    def judge(self, run: _JudgedRun, key: Key) -> None:
        """One operation of one side."""
        from detdiff_kernels import UnsupportedFormat

        if key[1] is not None:
            run.forget(key[1])
        try:
            self._scores[run.side][key] = _score(run, key)
        except (OracleRefused, UnsupportedFormat) as error:
            why = str(error).partition(". ")[0].rstrip(".")
            why = why.removeprefix(f"{named(key)}: ")
            self._refused.setdefault(f"run {run.side}: {why}", []).append(named(key))

    def choices(self, run: _JudgedRun) -> None:
        """Whether each token of a greedy request is one of the highest of its own logits."""
        if run.trace.requests[run.request].get("sampling", {}).get("temperature"):
            return
        generated = run.trace.generated(lens=False)
        for n in np.flatnonzero(generated.request == run.request).tolist():
            top = generated.top_logits[n]
            best = set(generated.top_ids[n][top == top.max()].tolist()) if len(top) else set()
            if best and int(generated.token[n]) not in best:
                said = (
                    f"token {int(generated.index[n])} of {self._request} in run {run.side} ({run.trace.engine}) is "
                    f"{int(generated.token[n])}, and its own logits choose {sorted(best)[0]}"
                )
                self._wrong_choice.append(
                    {"run": run.side, "engine": run.trace.engine, "role": "token", "said": said}
                )

    @property
    def _positions(self) -> list[int]:
        return sorted({int(each) for run in self._runs for each in run.judged})

    def _outside(self, side: Side) -> list[Key]:
        return [key for key, score in self._scores[side].items() if score.outside]

    @property
    def _shared(self) -> list[Key]:
        return [key for key in self._outside("a") if key in self._outside("b")]

    @property
    def _where(self) -> list[dict[str, Any]]:
        """The operations that are outside in one side alone, in order; then wrong choices."""
        found = [
            (place(key), run, key, self._scores[run.side][key])
            for run in self._runs
            for key in self._outside(run.side)
            if key not in self._shared
        ]
        found.sort(key=lambda each: (each[0], each[1].side))
        return [_entry(run, key, score, self._request) for _, run, key, score in found] + self._wrong_choice

    @property
    def result(self) -> str:
        if self._where:
            return "outside"
        if self._files:
            return "other_files"
        if self._shared:
            return "shared"
        return "partly" if self._refused or not all(self._scores.values()) else "inside"

    def _sides(self, keys: Sequence[Key]) -> Any:
        """Which side is nearer over some operations, in rows that were judged in both; None where there are none."""
        from ..oracle import compare_sides

        joined: list[list[NDArray[np.float64]]] = [[], [], [], []]
        for key in keys:
            a, b = (self._scores[side].get(key) for side in "ab")
            if a is None or b is None:
                continue
            for position in a.errors.keys() & b.errors.keys():
                if a.errors[position].size != b.errors[position].size:
                    continue  # of one side the highest logits alone
                for n, part in enumerate((a.errors, a.scale, b.errors, b.scale)):
                    joined[n].append(part[position].ravel())
        if not joined[0]:
            return None
        errors_a, scale_a, errors_b, scale_b = (np.concatenate(part) for part in joined)
        return compare_sides(_judgement(errors_a, scale_a), _judgement(errors_b, scale_b))

    def figures(self) -> RolesFigures:
        """As JSON values."""
        keys = sorted({*self._scores["a"], *self._scores["b"]}, key=place)
        whole = self._sides(keys)
        return RolesFigures(
            request=self._request,
            positions=self._positions,
            operations={side: len(self._scores[side]) for side in "ab"},
            outside_a=len(self._outside("a")),
            outside_b=len(self._outside("b")),
            shared=[named(key) for key in self._shared],
            nearer=None if whole is None else whole.nearer,
            ratio=_finite(whole.ratio) if whole is not None else None,
            roles=[self._role(role, keys) for role in dict.fromkeys(role for role, _ in keys)],
            outside_where=self._where[:_LISTED],
            not_judged=self._refused,
            files=self._files,
        )

    def _role(self, role: str, keys: Sequence[Key]) -> dict[str, Any]:
        mine = [key for key in keys if key[0] == role]
        nearer = self._sides(mine)
        found: dict[str, Any] = {"role": role, "layers": len(mine) if role not in (*LAST, "embedding") else 0}
        for side in "ab":
            scores = [self._scores[side][key] for key in mine if key in self._scores[side]]
            found[f"judged_{side}"] = len(scores)
            found[f"outside_{side}"] = sum(bool(each.outside) for each in scores)
            found[f"worst_{side}"] = _finite(max((each.worst for each in scores), default=0.0))
        found["nearer"] = None if nearer is None else nearer.nearer
        found["ratio"] = None if nearer is None else _finite(nearer.ratio)
        return found

    def said(self) -> str:
        """The answer in a few sentences."""
        counts = {side: len(self._scores[side]) for side in "ab"}
        engines = {run.side: run.trace.engine for run in self._runs}
        worst = {
            side: max((each.worst for each in self._scores[side].values()), default=0.0) for side in "ab"
        }
        parts = [
            f"{counts['a']} operations of {engines['a']} (a) and {counts['b']} of {engines['b']} (b) scored against float64 in rows "
            f"{', '.join(map(str, self._positions))} of {self._request}, each on its own inputs with the weights and constants "
            f"of the model's file: outside the rounding bound {len(self._outside('a'))} in a and {len(self._outside('b'))} in b; at "
            f"worst {worst['a']:.3g} of the bound in a, {worst['b']:.3g} in b"
        ]
        parts += [each["said"] for each in self._where[:1]]
        whole = self._sides(sorted(self._scores["a"], key=place))
        if whole is not None and whole.nearer != "equal" and not self._where:
            parts.append(f"run {whole.nearer} ({engines[whole.nearer]}) is nearer to float64")
        if self._files:
            parts.append(self._files)
        if self._shared:
            shared = ", ".join(named(key) for key in self._shared[:4])
            parts.append(f"outside in both: {shared}, so that the reading of the model's file is in question")
        for why, which in list(self._refused.items())[:2]:
            parts.append(f"not judged: {', '.join(which[:4])}{', ...' if len(which) > 4 else ''} ({why})")
        return "; ".join(parts)


def _score(run: _JudgedRun, key: Key) -> _RoleScore:
    from ..oracle import judge

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
    return _RoleScore(run.roles.where(key), errors, scale, worst, tuple(sorted(outside)), first)


def _highest(run: _JudgedRun, key: Key) -> _RoleScore:
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
    return _RoleScore(
        run.roles.where(key), errors, scale, np.inf if outside else 0.0, outside, "among the highest logits"
    )


def _beyond(operation: Operation, judgement: Judgement, arithmetic: Arithmetic) -> NDArray[np.bool_]:
    if judgement.inside:
        return np.zeros(judgement.errors.shape, np.bool_)
    found = operation.bounded(arithmetic)
    allowed = found.unbounded & ~np.isfinite(judgement.errors)
    return np.asarray(~(judgement.errors <= found.bound) & ~allowed, np.bool_)


def _judgement(errors: NDArray[np.float64], scale: NDArray[np.float64]) -> Judgement:
    from ..oracle import Judgement

    return Judgement("", "float32", "", 0.0, (), 0.0, 0, 0, errors.size, 0.0, 0.0, "", errors, scale)


def _entry(run: _JudgedRun, key: Key, score: _RoleScore, request: str) -> dict[str, Any]:
    size = f"{score.worst:.3g} times its rounding bound" if np.isfinite(score.worst) else "beyond any bound"
    said = (
        f"{named(key)} in run {run.side} ({run.trace.engine}, {score.where}), position {score.outside[0]} of {request}, is off float64 "
        f"by {size} ({score.said}), given its own inputs and what the model's file says"
    )
    return {
        "run": run.side,
        "engine": run.trace.engine,
        "role": key[0],
        "layer": key[1],
        "site": score.where,
        "request": request,
        "positions": list(score.outside),
        "worst": _finite(score.worst),
        "said": said,
    }


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _files(a: LlamaDecoder, b: LlamaDecoder) -> str:
    """What two models' files say differently, in a clause: a setting, or a weight by more than its dtype's rounding."""
    if a.file.path == b.file.path:
        return ""
    one, other = vars(a.configuration), vars(b.configuration)
    # The same checkpoint may be of another type, and hold its norms' weights less one.
    for name in one.keys() - {"model_type", "unknown", "norm_offset", "tied"}:
        if not _alike(one[name], other[name]):
            return f"the models' files differ: {name} is {one[name]} in a and {other[name]} in b"
    for key in a.keys():
        apart = _weights_apart(a, b, key)
        if apart:
            return f"the models' files differ: {apart}"
    return ""


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        # A file may hold its settings in float32.
        return bool(abs(a - b) <= 1e-6 * max(abs(a), abs(b)))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    return bool(a == b)


def _weights_apart(a: LlamaDecoder, b: LlamaDecoder, key: Key) -> str:
    from ..bounds import exact_weight
    from ..model_file import NORMS, WEIGHTS
    from ..roundings import UNIT

    role, layer = key
    if role not in WEIGHTS:
        return ""
    if role in NORMS:
        found = [each.file.norm(role, layer) for each in (a, b)]
        if None in found:
            return "" if found[0] is found[1] else f"only one has a weight for {named(key)}"
        (x, dtype_x), (y, dtype_y) = (each for each in found if each is not None)
        room = 2 * max(UNIT[dtype_x], UNIT[dtype_y]) * (1 + np.maximum(np.abs(x), np.abs(y)))
    else:
        one, other = a.file.weight(role, layer), b.file.weight(role, layer)
        if (one.n, one.k) != (other.n, other.k):
            return f"the weight of {named(key)} is {one.n} by {one.k} in a and {other.n} by {other.k} in b"
        rows = np.unique(np.linspace(0, one.n - 1, _SAMPLED).astype(np.int64))
        x, y = exact_weight(one, rows), exact_weight(other, rows)
        unit = max(UNIT.get(getattr(each, "dtype", ""), UNIT["bfloat16"]) for each in (one, other))
        room = 2 * unit * np.maximum(np.abs(x), np.abs(y)) + 2.0**-24
    return "" if (np.abs(x - y) <= room).all() else f"the weights of {named(key)} are not the same numbers"
