"""The grid file: a base scenario, axes, exclusions and pairs, and the cells and comparisons that they make."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from detdiff.commands.prompts import read_prompts
from detdiff.errors import GridUnusable, ScenarioError
from detdiff.scenario import Scenario, nearest, parse_flags, resolved, toml_table

Verdicts = Literal["never", "different", "always"]
PROMPTS: Final = "prompts"
_LARGEST: Final = 100_000
_LABEL, _NAME = 48, 180
_GRID_KEYS = ("base", PROMPTS, "axes", "exclude", "pairs", "needs")
_PAIR_KEYS = ("baseline", "along", "verdict", "budget", "across_models", "across_engines")
_NEED_KEYS = ("memory_mb", "gpus", "cpus")
_Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One place of the grid: its label on each axis, and the scenario that this makes.

    ``recording`` is the name of the first cell with the same scenario, whose trace serves all of them.
    """

    name: str
    labels: Mapping[str, str]
    scenario: Scenario
    recording: str


@dataclass(frozen=True)
class CellPair:
    """Two cells that are compared, ``b`` against ``a``; ``along`` is the axis on which they are neighbours, "" where ``a`` is
    the baseline."""

    name: str
    a: Cell
    b: Cell
    along: str = ""


@dataclass(frozen=True)
class HowCompared:
    """What a comparison may be of and how far it goes: which pairs get a verdict, from how many re-runs at most."""

    verdict: Verdicts = "never"
    budget: int | None = None
    across_models: bool = False
    across_engines: bool = False


@dataclass(frozen=True)
class Needs:
    """What a cell takes on a cluster: processors, GPUs, and MiB of memory, None where the model's size says it."""

    cpus: float = 1
    gpus: float = 0
    memory_mb: int | None = None


@dataclass(frozen=True)
class Sweep:
    """A grid, whole: ``axes`` are the labels by axis, ``pairs`` in the order of their cells."""

    axes: Mapping[str, tuple[str, ...]]
    cells: tuple[Cell, ...]
    pairs: tuple[CellPair, ...]
    how: HowCompared = field(default_factory=HowCompared)
    needs: Needs = field(default_factory=Needs)

    @property
    def recordings(self) -> dict[str, Scenario]:
        """What is run, each scenario once, of the cells that are compared."""
        compared = {cell.recording for pair in self.pairs for cell in (pair.a, pair.b)}
        return {
            cell.name: cell.scenario
            for cell in self.cells
            if cell.name == cell.recording and cell.name in compared
        }


def read_grid(path: Path) -> Sweep:
    """The sweep of a grid file. Relative paths are looked for in the file's folder.

    Raises GridUnusable, CommandError for a file of prompts, and what reading a scenario raises.
    """
    try:
        table = toml_table(path)
        return _sweep(path, table)
    except ScenarioError as error:
        raise type(error)(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _sweep(path: Path, table: dict[str, Any]) -> Sweep:
    grid = {name: table.pop(name) for name in _GRID_KEYS if name in table}
    axes = _axes(path, grid.get("axes"))
    bases = _Bases(path, table, grid.get("base"), grid.get(PROMPTS))
    excluded = _rules(path, grid.get("exclude", []), axes)
    cells: dict[tuple[str, ...], Cell] = {}
    first: dict[str, str] = {}
    wrong: list[str] = []
    for labels in itertools.product(*axes.values()):
        at = dict(zip(axes, labels, strict=True))
        if any(all(at[axis] in taken for axis, taken in rule.items()) for rule in excluded):
            continue
        name = _name(at)
        try:
            scenario = bases.scenario(path, {axis: axes[axis][label] for axis, label in at.items()})
        except ScenarioError as error:
            wrong.append(f"{name}: {error}")
            continue
        same = first.setdefault(json.dumps(scenario.to_dict(), sort_keys=True), name)
        cells[labels] = Cell(name, at, scenario, same)
    if wrong:
        raise GridUnusable(
            f"{path}: {len(wrong)} of {len(wrong) + len(cells)} cells make no scenario; the first is {wrong[0]} Change the axes, or leave "
            "such cells out with [[exclude]]."
        )
    if len({cell.name.lower() for cell in cells.values()}) < len(cells):
        raise GridUnusable(
            f"{path}: two values of an axis have the same name in a file's name; expected one for each. Give the axis as a table of "
            "names and flags."
        )
    how, pairs = _pairs(path, grid.get("pairs"), axes, cells)
    return Sweep(
        {axis: tuple(values) for axis, values in axes.items()},
        tuple(cells.values()),
        pairs,
        how,
        _needs(path, grid.get("needs", {})),
    )


def _keys(where: str, table: Any, known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise GridUnusable(f"{where} is {table!r}; expected a table. Write one.")
    for name in table:
        if name not in known:
            raise GridUnusable(f"{where} has no key {name!r}; {nearest(name, known)}")
    return table


def _axes(path: Path, given: Any) -> dict[str, dict[str, _Changes]]:
    """By axis and label, the keys that the value changes."""
    if not isinstance(given, dict) or not given:
        found = (
            "has no [axes]"
            if given is None
            else "has an empty [axes]"
            if given == {}
            else f"has axes = {given!r}"
        )
        raise GridUnusable(
            f'{path} {found}; expected a table of keys with the values of each, such as schedule = ["serial", "static"]. '
            "Write one."
        )
    axes: dict[str, dict[str, _Changes]] = {}
    for axis, values in given.items():
        where = f"{path}: axis {axis}"
        if not isinstance(values, list | dict) or not values:
            raise GridUnusable(
                f"{where} is {values!r}; expected a list of the key's values, or a table of names and flags such as "
                '{split = "split_rows=4"}. Write one.'
            )
        if isinstance(values, dict):
            wrong = [value for value in values.values() if not isinstance(value, str)]
            if wrong:
                raise GridUnusable(
                    f'{where} has {wrong[0]!r}; expected flags as --set takes them, such as "split_rows=4". Write some.'
                )
            axes[axis] = {label: parse_flags(flags) for label, flags in values.items()}
            continue
        axes[axis] = {}
        for value in values:
            label = _label(value)
            if label in axes[axis]:
                raise GridUnusable(f"{where} has {label} twice; expected each value once. Remove one.")
            axes[axis][label] = _changed(axis, value)
    total = math.prod(map(len, axes.values()))
    if total > _LARGEST:
        raise GridUnusable(
            f"{path} has {total:,} cells; expected {_LARGEST:,} at most. Take values from the axes."
        )
    return axes


def _changed(axis: str, value: Any) -> _Changes:
    if axis == PROMPTS or not isinstance(value, str):
        return {axis: value}
    # As a flag, so that static:2 is what it is there.
    return parse_flags(shlex.quote(f"{axis}={value}"))


def _label(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return ",".join(
            f"{key}={_label(item)}" if key != "name" else _label(item) for key, item in value.items()
        )
    return json.dumps(value, separators=(",", ":"), default=str)


def _name(labels: Mapping[str, str]) -> str:
    """A cell's name, fit for a file, which depends on its own labels alone."""
    name = ",".join(f"{_plain(axis)}={_plain(label)}" for axis, label in labels.items())
    return name if len(name) <= _NAME else f"{name[: _NAME - 9]}-{_short_hash(name, 8)}"


def _plain(label: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", label).strip("-.") or _short_hash(label, 6)
    return plain if len(plain) <= _LABEL else f"{plain[-_LABEL + 7 :]}-{_short_hash(label, 6)}"


def _short_hash(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


class _Bases:
    """The scenario that cells change, one for each file of prompts."""

    def __init__(self, path: Path, table: dict[str, Any], base: Any, prompts: Any) -> None:
        if base is not None and (table or not isinstance(base, str)):
            raise GridUnusable(
                f"{path} has base = {base!r}"
                + (f" and the key {next(iter(table))!r} of a scenario" if table else "")
                + "; expected the name of a scenario file, or a scenario's keys in the grid file itself. Keep one of them."
            )
        self._where, self._folder, self._prompts = path, path.parent, prompts
        self._table = table
        if base is not None:
            self._where = path.parent / base
            self._folder = self._where.parent
            self._table = toml_table(self._where)
        self._made: dict[str | None, Scenario] = {}

    def _base(self, grid: Path, prompts: Any) -> Scenario:
        if prompts is not None and not isinstance(prompts, str):
            raise GridUnusable(f"{grid}: prompts is {prompts!r}; expected a file of prompts. Name one.")
        if prompts not in self._made:
            table = dict(self._table)
            if prompts is not None:
                table["request"] = [dict(each) for each in read_prompts(grid.parent / prompts)]
            self._made[prompts] = Scenario.from_dict(resolved(table, self._folder), where=str(self._where))
        return self._made[prompts]

    def scenario(self, grid: Path, values: Mapping[str, _Changes]) -> Scenario:
        """The scenario of one cell; ``values`` are the changes by axis. Raises ScenarioError and GridUnusable."""
        changes: dict[str, Any] = {}
        for axis, changed in values.items():
            twice = sorted(changes.keys() & changed.keys())
            if twice:
                raise GridUnusable(
                    f"{grid}: axis {axis} sets {twice[0]}, as another axis does; expected one. Take it from one of them."
                )
            changes |= changed
        base = self._base(grid, changes.pop(PROMPTS, self._prompts))
        return base.with_changes(**resolved(changes, grid.parent))


def _rules(path: Path, given: Any, axes: Mapping[str, Mapping[str, Any]]) -> list[dict[str, set[str]]]:
    if not isinstance(given, list):
        raise GridUnusable(f"{path}: exclude is {given!r}; expected [[exclude]] tables. Write them so.")
    return [
        {axis: _labels_of(f"{path}: exclude {number}", axis, value, axes) for axis, value in rule.items()}
        for number, rule in enumerate(given, 1)
        if _keys(f"{path}: exclude {number}", rule, tuple(axes)) or _empty(path, number)
    ]


def _empty(path: Path, number: int) -> bool:
    raise GridUnusable(
        f"{path}: exclude {number} is empty and would leave all out; expected axes with values. Write some."
    )


def _labels_of(where: str, axis: str, value: Any, axes: Mapping[str, Mapping[str, Any]]) -> set[str]:
    several = isinstance(value, list) and value and _label(value) not in axes[axis]
    labels = {_label(each) for each in (value if several else [value])}
    for label in sorted(labels):
        if label not in axes[axis]:
            raise GridUnusable(f"{where}: axis {axis} has no value {label!r}; {nearest(label, axes[axis])}")
    return labels


def _pairs(
    path: Path, given: Any, axes: Mapping[str, Mapping[str, Any]], cells: Mapping[tuple[str, ...], Cell]
) -> tuple[HowCompared, tuple[CellPair, ...]]:
    where = f"{path}: pairs"
    table = _keys(where, {} if given is None else given, _PAIR_KEYS)
    along = table.get("along", [])
    along = [along] if isinstance(along, str) else along
    if not isinstance(along, list) or not (table.get("baseline") or along):
        raise GridUnusable(
            f'{path} does not say which cells are compared; expected [pairs] with baseline = {{axis = "value"}}, or along = "axis". '
            "Write one of them."
        )
    for axis in along:
        if axis not in axes:
            raise GridUnusable(f"{where}: along names {axis!r}; {nearest(str(axis), axes)}")
    pairs = list(_against_baseline(path, table["baseline"], axes, cells)) if "baseline" in table else []
    for axis in along:
        pairs += _neighbours(axis, axes, cells)
    if not pairs:
        raise GridUnusable(
            f"{path} has no two cells to compare; expected a pair at least. Change axes or exclusions."
        )
    return _how(where, table), tuple(pairs)


def _against_baseline(
    path: Path, given: Any, axes: Mapping[str, Mapping[str, Any]], cells: Mapping[tuple[str, ...], Cell]
) -> Iterator[CellPair]:
    where = f"{path}: baseline"
    held = {}
    for axis, value in _keys(where, given, tuple(axes)).items():
        (held[axis],) = _labels_of(where, axis, [value], axes)
    for cell in cells.values():
        labels = {**cell.labels, **held}
        if labels == cell.labels:
            continue
        other = cells.get(tuple(labels.values()))
        if other is None:
            raise GridUnusable(
                f"{path}: cell {cell.name} has no baseline, since {_name(labels)} is excluded; expected one to compare with. Exclude "
                "both, or name another baseline."
            )
        yield CellPair(cell.name, other, cell)


def _neighbours(
    axis: str, axes: Mapping[str, Mapping[str, Any]], cells: Mapping[tuple[str, ...], Cell]
) -> Iterator[CellPair]:
    before: dict[tuple[str, ...], Cell] = {}
    place = list(axes).index(axis)
    for labels, cell in cells.items():
        others = (*labels[:place], *labels[place + 1 :])
        if others in before:
            yield CellPair(f"{cell.name}~{_plain(axis)}", before[others], cell, axis)
        before[others] = cell


def _how(where: str, table: Mapping[str, Any]) -> HowCompared:
    verdict = table.get("verdict", "never")
    if verdict not in get_args(Verdicts):
        raise GridUnusable(
            f"{where}: verdict is {verdict!r}; expected never, different (pairs that differ) or always. Correct it."
        )
    budget = table.get("budget")
    if budget is not None and (type(budget) is not int or budget < 0):
        raise GridUnusable(
            f"{where}: budget is {budget!r}; expected how many re-runs a verdict may take. Correct it."
        )
    across = {}
    for name in ("across_models", "across_engines"):
        across[name] = table.get(name, False)
        if not isinstance(across[name], bool):
            raise GridUnusable(f"{where}: {name} is {across[name]!r}; expected true or false. Correct it.")
    return HowCompared(verdict, budget, **across)


def _needs(path: Path, given: Any) -> Needs:
    table = _keys(f"{path}: needs", given, _NEED_KEYS)
    for name, value in table.items():
        whole = name == "memory_mb"
        if type(value) not in ((int,) if whole else (int, float)) or value < 0:
            raise GridUnusable(f"{path}: needs has {name} = {value!r}; expected a number from 0. Correct it.")
    return Needs(**table)
