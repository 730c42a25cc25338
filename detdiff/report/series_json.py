"""What a report draws as JSON values and back; the cells of maps as runs of equal ones. ``docs/json-schema.md`` has the keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.grids import Grid
from detdiff.compare.series import Series

from .decode import Decoder
from .json import encoded

UInt8 = NDArray[np.uint8]
Float32 = NDArray[np.float32]

_AGAIN = "Make the report again with this version."
_STATES, _SHARES = 4, 256
_CELLS = 1 << 28


def series_json(series: Series) -> dict[str, Any]:
    """JSON values only."""
    made = _encoded(series)
    assert isinstance(made, dict)
    return made


def series_from_json(value: object, where: str, schema: str) -> Series:
    """The inverse of ``series_json``. Raises AnswerError for what is no such value."""
    decoder = Decoder(schema, _AGAIN)
    decoder = dataclasses.replace(decoder, readers={Grid: lambda grid, at: _grid(decoder, grid, at)})
    read = decoder.read(Series, value, where)
    assert isinstance(read, Series)
    return read


def _encoded(value: Any) -> Any:
    if isinstance(value, Grid):
        return {
            "name": value.name,
            "positions": value.state.shape[1],
            "rows": list(value.rows),
            "state": [_runs(row) for row in value.state],
            "share": [_runs(row) for row in value.share],
            "ulp": None if value.ulp is None else [_known(row) for row in value.ulp],
            "rel": None if value.rel is None else [_known(row) for row in value.rel],
        }
    if dataclasses.is_dataclass(value):
        return {field.name: _encoded(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_encoded(item) for item in value]
    return encoded(value)


def _runs(row: UInt8) -> list[list[int]]:
    """``[[value, how many], ...]``."""
    starts = np.flatnonzero(np.diff(row, prepend=row[:1] ^ 1))
    runs: list[list[int]] = np.column_stack([row[starts], np.diff(starts, append=len(row))]).tolist()
    return runs


def _known(row: Float32) -> list[list[Any]]:
    """``[[position, value], ...]`` of those that are there, in few digits that give the same float32 again."""
    places = np.flatnonzero(~np.isnan(row)).tolist()
    return [[place, encoded(float(f"{row[place]:.9g}"))] for place in places]


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
