"""Answers that were saved as JSON, read back."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.divergence import Divergence
from detdiff.compare.grids import Grid
from detdiff.compare.series import Series
from detdiff.errors import AnswerError
from detdiff.explain.verdict import Verdict

from .json import DIVERGENCE, REPORT, VERDICT, key_of

if TYPE_CHECKING:
    from detdiff.compare.series import Series

T = TypeVar("T")
SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SHOWN = 200


@dataclass(frozen=True)
class Decoder:
    """Reads the types of one ``schema``; ``again`` says in its errors what to do.

    ``readers`` are functions of a value and of where it stands, for types that JSON holds otherwise than by their fields.
    """

    schema: str
    again: str
    readers: Mapping[Any, Callable[[Any, str], Any]] = field(default_factory=dict)

    def read(self, kind: Any, value: Any, where: str) -> Any:
        """``value`` as a ``kind``. Raises AnswerError for a missing, unknown or ill-typed key."""
        if kind in self.readers:
            return self.readers[kind](value, where)
        if get_origin(kind) is UnionType:
            # Every union of an answer is "something or None".
            (inner,) = (option for option in get_args(kind) if option is not NoneType)
            return None if value is None else self.read(inner, value, where)
        if is_dataclass(kind):
            return self._fields(kind, value, where)
        if get_origin(kind) is tuple:
            return self._tuple(get_args(kind), value, where)
        if get_origin(kind) is Mapping and isinstance(value, Mapping):
            return dict(value)
        if get_origin(kind) is Literal and isinstance(value, str) and value in get_args(kind):
            return value
        if kind is float:
            if isinstance(value, str) and value in SPECIAL:
                return SPECIAL[value]
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        elif type(value) is kind:
            return value
        raise self.error(where, value, f"which is not of the type that {self.schema} gives it")

    def error(self, where: str, value: Any, expected: str) -> AnswerError:
        """What is raised for a ``value`` that is not what was ``expected``."""
        shown = repr(value)
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}…"
        return AnswerError(f"{where} is {shown}, {expected}. {self.again}")

    def keys(self, value: Any, expected: Any, where: str) -> Mapping[str, Any]:
        """``value``, which has exactly the ``expected`` keys."""
        if not isinstance(value, Mapping) or set(value) != set(expected):
            found = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise AnswerError(
                f"{where} has {found!r}; expected exactly the keys {sorted(expected)!r}. {self.again}"
            )
        return value

    def items(self, value: Any, where: str) -> list[Any] | tuple[Any, ...]:
        """``value``, which is a list."""
        if not isinstance(value, list | tuple):
            raise self.error(where, value, "and a list was expected")
        return value

    def _fields(self, kind: Any, value: Any, where: str) -> Any:
        hints = _hints(kind)
        keys = {name: key_of(kind, name) for name in hints}
        found = self.keys(value, keys.values(), where)
        return kind(
            **{name: self.read(hints[name], found[key], f"{where}.{key}") for name, key in keys.items()}
        )

    def _tuple(self, kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
        found = self.items(value, where)
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            kinds = (kinds[0],) * len(found)
        if len(kinds) != len(found):
            raise self.error(where, value, f"and a list of {len(kinds)} was expected")
        return tuple(
            self.read(kind, item, f"{where}[{n}]")
            for n, (kind, item) in enumerate(zip(kinds, found, strict=True))
        )


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


_KEYS = (
    "schema",
    "kind",
    "headline",
    "advice",
    "command",
    "sections",
    "divergence",
    "verdict",
    "series",
)


@dataclass(frozen=True, eq=False)
class SavedAnswer:
    """What a saved answer holds, ready for ``build``. ``command`` is empty where it is not a report's."""

    divergence: Divergence | None
    verdict: Verdict | None = None
    series: Series | None = None
    command: str = ""


def read_saved(path: Path) -> SavedAnswer:
    """A saved comparison, verdict or report. Raises AnswerError for a file that holds none, and OSError."""
    try:
        answer = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise AnswerError(
            f"{path} is not JSON ({error}); expected what `compare`, `explain` or `report` wrote with --json. Save the answer "
            "again."
        ) from error
    try:
        return saved(answer)
    except AnswerError as error:
        raise AnswerError(f"{path}: {error}") from error


def saved(answer: object) -> SavedAnswer:
    """The same of JSON values. Raises AnswerError."""
    schema = answer.get("schema") if isinstance(answer, Mapping) else None
    if schema == DIVERGENCE:
        return SavedAnswer(from_json(answer))
    if schema == VERDICT:
        verdict = verdict_from_json(answer)
        return SavedAnswer(verdict.divergence, verdict)
    if schema == REPORT:
        return _report(answer)
    found = f"schema {schema!r}" if isinstance(answer, Mapping) else f"a {type(answer).__name__}"
    raise AnswerError(
        f"The answer is {found[:200]}; expected {DIVERGENCE!r}, {VERDICT!r} or {REPORT!r}. Save what `compare`, `explain` or "
        "`report` says with --json."
    )


def _report(answer: Any) -> SavedAnswer:
    decoder = Decoder(REPORT, "Make the report again with this version.")
    found = decoder.keys(answer, _KEYS, "report")
    verdict = None if found["verdict"] is None else verdict_from_json(found["verdict"])
    inside = None if verdict is None else verdict.divergence
    divergence = inside if found["divergence"] is None else from_json(found["divergence"])
    drawn = found["series"]
    return SavedAnswer(
        divergence,
        verdict,
        None if drawn is None else series_from_json(drawn, "report.series", REPORT),
        decoder.read(str, found["command"], "report.command"),
    )


def from_json(answer: object) -> Divergence:
    """The inverse of ``to_json``. Raises AnswerError for another schema, or a missing, unknown or ill-typed key."""
    if isinstance(answer, Mapping):
        # Answers that were saved before two engines could be compared do not have it.
        answer = {"across_engines": None, **answer}
    return _answer(Divergence, Decoder(DIVERGENCE, "Compare the traces again with this version."), answer)


def verdict_from_json(answer: object) -> Verdict:
    """The inverse of ``verdict_json``; a detail that was a tuple is a list.

    Raises AnswerError for another schema, or a missing, unknown or ill-typed key.
    """
    plain = Decoder(VERDICT, "Explain the runs again with this version.")
    readers: dict[Any, Callable[[Any, str], Any]] = {
        Divergence: lambda value, _: from_json(value),
        Mapping[str, Any]: lambda value, at: _numbers(plain.read(Mapping[str, Any], value, at)),
    }
    return _answer(Verdict, dataclasses.replace(plain, readers=readers), answer)


def _answer(kind: type[T], decoder: Decoder, answer: object) -> T:
    if not isinstance(answer, Mapping) or answer.get("schema") != decoder.schema:
        found = answer.get("schema") if isinstance(answer, Mapping) else type(answer).__name__
        raise AnswerError(f"The answer has schema {found!r}; expected {decoder.schema!r}. {decoder.again}")
    body = {key: value for key, value in answer.items() if key != "schema"}
    decoded: T = decoder.read(kind, body, "answer")
    return decoded


def _numbers(value: Any) -> Any:
    """Details with the numbers that JSON has only as words. No detail says one of these words otherwise."""
    if isinstance(value, str):
        return SPECIAL.get(value, value)
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list) else value


UInt8 = NDArray[np.uint8]
Float32 = NDArray[np.float32]
_AGAIN = "Make the report again with this version."
_STATES, _SHARES = 4, 256
_CELLS = 1 << 28


def series_from_json(value: object, where: str, schema: str) -> Series:
    """A report's series from JSON values. Raises AnswerError for what is no such value."""
    decoder = Decoder(schema, _AGAIN)
    decoder = dataclasses.replace(decoder, readers={Grid: lambda grid, at: _grid(decoder, grid, at)})
    read = decoder.read(Series, value, where)
    assert isinstance(read, Series)
    return read


def _grid(decoder: Decoder, value: Any, where: str) -> Grid:
    found = decoder.keys(value, ("name", "positions", "rows", "state", "share", "ulp", "rel"), where)
    rows = decoder.read(tuple[str, ...], found["rows"], f"{where}.rows")
    positions = decoder.read(int, found["positions"], f"{where}.positions")
    # Runs are short however many cells they stand for.
    if not 0 <= positions <= _CELLS // max(1, len(rows)):
        raise decoder.error(f"{where}.positions", positions, "which is no number of positions of a map")
    shape = len(rows), positions
    return Grid(
        name=decoder.read(str, found["name"], f"{where}.name"),
        rows=rows,
        state=_cells(decoder, found, "state", where, shape, _STATES),
        share=_cells(decoder, found, "share", where, shape, _SHARES),
        ulp=_sizes(decoder, found, "ulp", where, shape),
        rel=_sizes(decoder, found, "rel", where, shape),
    )


def _cells(
    decoder: Decoder, found: Mapping[str, Any], key: str, where: str, shape: tuple[int, int], values: int
) -> UInt8:
    cells = np.zeros(shape, np.uint8)
    at = f"{where}.{key}"
    rows = decoder.items(found[key], at)
    if len(rows) != shape[0]:
        raise decoder.error(at, len(rows), f"and {shape[0]} rows were expected")
    for n, row in enumerate(rows):
        runs = _pairs(row)
        if runs is None or not _covers(runs, shape[1], values):
            raise decoder.error(f"{at}[{n}]", row, f"and runs over {shape[1]} positions were expected")
        cells[n] = np.repeat(runs[:, 0].astype(np.uint8), runs[:, 1])
    return cells


def _pairs(row: Any) -> NDArray[np.int64] | None:
    """Pairs of whole numbers, int64 [pairs, 2], read at once: a map has a million of them. None for anything else."""
    if not isinstance(row, list | tuple):
        return None
    if not row:
        return np.zeros((0, 2), np.int64)
    try:
        pairs = np.array(row)
    except ValueError:
        return None
    return pairs.astype(np.int64) if pairs.dtype == np.int64 and pairs.shape == (len(row), 2) else None


def _covers(runs: NDArray[np.int64], positions: int, values: int) -> bool:
    value, size = runs[:, 0], runs[:, 1]
    fits = np.all((value >= 0) & (value < values) & (size >= 1) & (size <= positions))
    return bool(fits) and int(size.sum()) == positions


def _sizes(
    decoder: Decoder, found: Mapping[str, Any], key: str, where: str, shape: tuple[int, int]
) -> Float32 | None:
    at = f"{where}.{key}"
    if found[key] is None:
        return None
    rows = decoder.items(found[key], at)
    if len(rows) != shape[0]:
        raise decoder.error(at, len(rows), f"and {shape[0]} rows were expected")
    sizes = np.full(shape, np.nan, np.float32)
    for n, row in enumerate(rows):
        for place, size in decoder.read(tuple[tuple[int, float], ...], row, f"{at}[{n}]"):
            if not 0 <= place < shape[1]:
                raise decoder.error(f"{at}[{n}]", place, f"and a position below {shape[1]} was expected")
            sizes[n, place] = size
    return sizes
