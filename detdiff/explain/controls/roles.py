"""The control ``roles``: every operation of two engines against float64, by its role, as the model's file has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.roles import LAST, Key, named, place
from detdiff.engines.base import MODEL_FILE, SITES, VALUES
from detdiff.errors import OracleRefused

from ..case import Case, Side
from ..control import CannotRun, Figures, Outcome, control

if TYPE_CHECKING:
    # The kernels' orders, which bounds are read from, are loaded when they are asked for.
    from ..facts import Facts
    from ..oracle import Judgement
    from ..role_scores import JudgedRun, RoleScore

_LISTED: Final = 8


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
    from ..decoder import LlamaDecoder, files_apart
    from ..model_file import ModelFile
    from ..role_scores import JudgedRun

    decoders = {}
    for side in "ab":
        engine: Any = case.engine(side)
        try:
            decoders[side] = LlamaDecoder(ModelFile.open(engine.model_file))
        except OracleRefused as error:
            raise CannotRun(str(error)) from error
    request = _request(case)
    sides = [JudgedRun.of(case, side, decoders[side], request) for side in "ab"]
    files = files_apart(decoders["a"], decoders["b"])
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


class _RoleScores:
    """What was judged so far."""

    def __init__(self, request: str, runs: Sequence[JudgedRun], files: str) -> None:
        self._request, self._runs, self._files = request, runs, files
        self._scores: dict[Side, dict[Key, RoleScore]] = {"a": {}, "b": {}}
        self._refused: dict[str, list[str]] = {}
        self._wrong_choice: list[dict[str, Any]] = []

    def judge(self, run: JudgedRun, key: Key) -> None:
        """One operation of one side."""
        from detdiff_kernels import UnsupportedFormat

        from ..role_scores import role_score

        if key[1] is not None:
            run.forget(key[1])
        try:
            self._scores[run.side][key] = role_score(run, key)
        except (OracleRefused, UnsupportedFormat) as error:
            why = str(error).partition(". ")[0].rstrip(".")
            why = why.removeprefix(f"{named(key)}: ")
            self._refused.setdefault(f"run {run.side}: {why}", []).append(named(key))

    def choices(self, run: JudgedRun) -> None:
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


def _judgement(errors: NDArray[np.float64], scale: NDArray[np.float64]) -> Judgement:
    from ..oracle import Judgement

    return Judgement("", "float32", "", 0.0, (), 0.0, 0, 0, errors.size, 0.0, 0.0, "", errors, scale)


def _entry(run: JudgedRun, key: Key, score: RoleScore, request: str) -> dict[str, Any]:
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
