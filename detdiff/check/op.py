"""A function of rows: whether a row's outputs depend on how many rows there are, where it stands and what is in the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import numpy as np

from detdiff.compare.metrics import Values, ulp_distance
from detdiff.errors import CheckSettingInvalid, CheckSubjectInvalid, NothingToCheck
from detdiff.probe import Function, Probe, probe
from detdiff.probe.chart import spans_of
from detdiff.probe.operation import ProbedOperation
from detdiff.probe.run import SEEDS
from detdiff.probe.sweep import ChangedRows, RowContent, kept_rows
from detdiff.probe.targets import DEFAULT_K, LIBRARIES
from detdiff.report.words import count, escaped
from detdiff_kernels.rounding import DTYPES, Float32

ROWS = "1..8"
Shape = int | Sequence[int]


class RowsDiffer(AssertionError):
    """A row's outputs depend on its batch. ``found`` is what was found."""

    def __init__(self, found: OpCheck) -> None:
        super().__init__(found.text())
        self.found = found


@dataclass(frozen=True)
class ShapeCheck:
    """One shape of rows: what the sweep found, and the first element that differs of each kind of difference."""

    shape: tuple[int, ...]
    probe: Probe
    differences: tuple[ElementDifference, ...]


@dataclass(frozen=True)
class OpCheck:
    """One function over all shapes. Has no truth value; ask ``invariant``."""

    name: str
    array: str
    shapes: tuple[ShapeCheck, ...]

    def __bool__(self) -> NoReturn:
        raise TypeError("an OpCheck has no truth value; ask .invariant")

    @property
    def invariant(self) -> bool:
        return all(each.probe.invariant for each in self.shapes)

    def text(self) -> str:
        """What was found, as lines of text."""
        wrong = sum(not each.probe.invariant for each in self.shapes)
        head = (
            f"{escaped(self.name)} is invariant to the batch"
            if self.invariant
            else f"{escaped(self.name)} depends on the batch, for {wrong} of {len(self.shapes)} shapes of rows"
        )
        lines = [f"{head} ({self.array} arrays):"]
        for each in self.shapes:
            lines.append(f"  rows of {each.shape}, {each.probe.dtype}:")
            lines += [f"    {line}" for line in sentences(each.probe, each.differences)]
        return "\n".join(lines)


def check_op(
    fn: Callable[[Any], Any],
    *,
    shapes: Shape | Iterable[Shape] | None = None,
    rows: str | Iterable[int] = ROWS,
    dtype: str = "float32",
    seeds: int = SEEDS,
    array: str | None = None,
) -> OpCheck:
    """Check that ``fn`` computes each row from that row alone, to the bit.

    ``fn`` takes an array (M, *shape) and returns one (M, ...): a function, or a module of MLX or torch. ``shapes`` are one
    shape of a row or several, each a width or a tuple, 576 without any; ``rows`` the numbers of rows M, as in
    ``detdiff.probe``. ``dtype`` is float32, float16 or bfloat16, ``seeds`` how many draws of rows (2 or more). ``array`` is
    numpy, mlx or torch: by default what ``fn`` itself uses.

    Raises RowsDiffer, whose text says at which M bits change, with which seeds, and the first element that differs. Raises
    NothingToCheck, CheckSettingInvalid, CheckSubjectInvalid and ProbeError where it cannot be checked.
    """
    found = examine_op(fn, shapes=shapes, rows=rows, dtype=dtype, seeds=seeds, array=array)
    if not found.invariant:
        raise RowsDiffer(found)
    return found


def examine_op(
    fn: Callable[[Any], Any],
    *,
    shapes: Shape | Iterable[Shape] | None = None,
    rows: str | Iterable[int] = ROWS,
    dtype: str = "float32",
    seeds: int = SEEDS,
    array: str | None = None,
) -> OpCheck:
    """What `check_op` finds, for functions that depend on the batch too."""
    if not callable(fn):
        raise CheckSubjectInvalid(
            f"A {type(fn).__name__} cannot be called; expected a function that takes an array of rows. Give one."
        )
    if dtype not in DTYPES:
        raise CheckSettingInvalid(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}.")
    if not isinstance(rows, Iterable):
        raise CheckSettingInvalid(
            f"rows are {rows!r}; expected text such as '1..8', or a list of numbers. Write them so."
        )
    if type(seeds) is not int:
        raise CheckSettingInvalid(
            f"seeds is {seeds!r}; expected how many draws of rows, such as {SEEDS}. Give a number."
        )
    swept = rows if isinstance(rows, str) else tuple(rows)
    if not swept:
        raise NothingToCheck("There are no rows, so that nothing would be checked. Write them as 1..8.")
    library = array if array is not None else library_of(fn)
    name = str(getattr(fn, "__qualname__", type(fn).__name__))
    found = []
    for shape in _shapes(shapes):
        target = Function(_FlatRows(fn, shape, dtype), name, array=library)
        answer = probe(target, rows=swept, seeds=seeds, timed=False)
        found.append(ShapeCheck(shape, answer, tuple(differences(target, answer))))
    return OpCheck(name, library, tuple(found))


class _FlatRows:
    """``fn`` as a function of flat rows, with the attributes that a probe reads."""

    def __init__(self, fn: Callable[[Any], Any], shape: tuple[int, ...], dtype: str) -> None:
        self._fn, self._shape = fn, shape
        self.k, self.dtype = prod(shape), dtype

    def __call__(self, x: Any) -> Any:
        return self._fn(x.reshape(x.shape[0], *self._shape))


def _shapes(given: Shape | Iterable[Shape] | None) -> list[tuple[int, ...]]:
    if given is None:
        given = DEFAULT_K
    listed: list[Any] = [given] if isinstance(given, int) else list(given)
    if isinstance(given, tuple) and listed and all(isinstance(size, int) for size in listed):
        # (8, 64) is one shape; [8, 64] are two widths.
        listed = [given]
    if not listed:
        raise NothingToCheck("There are no shapes, so that nothing would be checked. Give one, such as 576.")
    found = []
    for each in listed:
        shape = (each,) if isinstance(each, int) else tuple(each) if isinstance(each, Iterable) else ()
        if not shape or not all(type(size) is int and size >= 1 for size in shape):
            raise CheckSettingInvalid(
                f"A shape of a row is {each!r}; expected a width such as 576, or a tuple such as (9, 64), of numbers from 1 on."
            )
        found.append(shape)
    return found


def library_of(fn: Callable[[Any], Any]) -> str:
    """The array library that a function uses, by what it is and what it refers to; numpy where that is neither of the others.

    Raises CheckSettingInvalid where it refers to both mlx and torch.
    """
    used = set(_libraries(fn, depth=2))
    heavy = sorted(used & {"mlx", "torch"})
    if len(heavy) > 1:
        raise CheckSettingInvalid(
            f"{getattr(fn, '__qualname__', type(fn).__name__)} refers to mlx and to torch, so which arrays it takes is not clear. "
            "Say it: array='mlx' or array='torch'."
        )
    return heavy[0] if heavy else LIBRARIES[0]


def _libraries(value: Any, depth: int) -> Iterator[str]:
    """Top-level packages that a value belongs to, and those that a function's own names lead to."""
    if inspect.ismodule(value):
        yield value.__name__.partition(".")[0]
        return
    for kind in type(value).__mro__:
        yield kind.__module__.partition(".")[0]
    yield str(getattr(value, "__module__", "")).partition(".")[0]
    if depth:
        for inner in _referred(value):
            yield from _libraries(inner, depth - 1)


def _referred(value: Any) -> Iterator[Any]:
    function = inspect.unwrap(getattr(value, "__func__", value))
    owner = getattr(value, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        yield owner
    if hasattr(value, "func") and hasattr(value, "args"):  # functools.partial
        yield from (value.func, *value.args, *value.keywords.values())
    if inspect.isfunction(function):
        yield from inspect.getclosurevars(function).nonlocals.values()
        yield from inspect.getclosurevars(function).globals.values()
        yield from function.__defaults__ or ()


_FLOATS = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class ElementDifference:
    """Output ``element`` of the row at ``position`` among ``rows``: ``found`` there, ``alone`` where it should be equal.

    ``kind`` is ``rows`` (against the row alone), ``position`` (against row 0, all rows alike) or ``neighbours`` (against the
    same row beside other content). ``ulp`` is None where a number is not finite or the dtypes differ. ``differing`` of
    ``outputs`` elements of that row differ.
    """

    kind: str
    seed: int
    rows: int
    position: int
    element: int
    alone: float
    found: float
    ulp: int | None
    differing: int
    outputs: int


def differences(target: Function, found: Probe) -> Iterator[ElementDifference]:
    """For each kind, at the smallest M and the first seed with which it was found, the first element.

    Nothing is given for a kind that does not come up again when it is run again.
    """
    changed = [each for each in found.against_one if not each.equal]
    if changed:
        yield from _again("rows", target, found, changed[0].seeds[0], changed[0].rows, 0)
    if found.position:
        first = found.position[0]
        yield from _again("position", target, found, first.seeds[0], first.rows, first.positions[0])
    if found.neighbours:
        first = found.neighbours[0]
        yield from _again("neighbours", target, found, first.seeds[0], first.rows, first.positions[0])


def _again(
    kind: str, target: Function, found: Probe, seed: int, rows: int, position: int
) -> Iterator[ElementDifference]:
    operation = target.operation(seed)
    content = RowContent.of_seed(seed, found.rows[-1], operation)
    for plain, other, at in _pairs(kind, operation, content, rows, position):
        a, b = (
            Values(values.data[place], values.dtype) for values, place in ((plain, at), (other, position))
        )
        if a.dtype != b.dtype:
            continue
        differing = a.bits() != b.bits()
        if differing.any():
            element = int(differing.argmax())
            x, y = float(a.numbers()[element]), float(b.numbers()[element])
            known = a.dtype in _FLOATS and np.isfinite(x) and np.isfinite(y)
            yield ElementDifference(
                kind=kind,
                seed=seed,
                rows=rows,
                position=position,
                element=element,
                alone=x,
                found=y,
                ulp=int(ulp_distance(a, b)[element]) if known else None,
                differing=int(differing.sum()),
                outputs=a.data.size,
            )
            return


def _pairs(
    kind: str, operation: ProbedOperation, content: RowContent, rows: int, position: int
) -> Iterator[tuple[Values, Values, int]]:
    """Two runs whose rows should be equal: at a place of the first, and at ``position`` of the second."""

    def run(x: Float32) -> Values:
        return operation.read(operation.run(operation.given(x)), len(x))

    given = content.rows[:rows]
    if kind == "rows":
        yield run(given[:1]), run(given), 0
        return
    alike = run(np.repeat(given[:1], rows, axis=0))
    if kind == "position":
        yield alike, alike, 0
        return
    plain = run(given)
    if position == 0:
        yield plain, alike, 0
    for kept in kept_rows(rows):
        if kept[position]:
            yield plain, run(np.where(kept[:, None], given, content.others[:rows])), position


_FEW = 3


def sentences(found: Probe, elements: Sequence[ElementDifference]) -> Iterator[str]:
    """One line for each fact."""
    swept = f"M = {spans_of(found.rows)}, {count(found.seeds, 'seed')}"
    if found.invariant:
        outputs = max(each.outputs for each in found.against_one)
        yield f"nothing changes a row's bits: {swept}, {count(outputs, 'output')} of row 0"
        return
    first = {each.kind: each for each in elements}
    changed = [each for each in found.against_one if not each.equal]
    if changed:
        groups = " | ".join(spans_of(members) for members in found.classes)
        seeds = sorted({seed for each in changed for seed in each.seeds})
        yield (
            f"M matters: row 0's bits change at M = {', '.join(map(str, found.bits_change_at))} (alike: {groups}; {swept}; other "
            f"than alone with seeds {spans_of(seeds)}){_element(first.get('rows'), 'alone')}"
        )
    for kind, what, than, places in (
        ("position", "position matters, all rows alike", "at position 0", found.position),
        ("neighbours", "what is in other rows matters", "beside other content", found.neighbours),
        ("repeat", "the same call again differs", "", found.repeat),
    ):
        if places:
            yield f"{what}: {_places(places)}{_element(first.get(kind), than)}"
    yield from (f"note: {each}" for each in found.notes if "float64" not in each)


def _places(found: Sequence[ChangedRows]) -> str:
    few = "; ".join(
        f"M = {each.rows}, position {spans_of(each.positions)}, seed {spans_of(each.seeds)}"
        for each in found[:_FEW]
    )
    more = len(found) - _FEW
    return few + (f"; and at {count(more, 'more M', 'more M')}" if more > 0 else "")


def _element(found: ElementDifference | None, than: str) -> str:
    if found is None:
        return ""
    apart = "" if found.ulp is None else f", {found.ulp:,} ULP apart"
    return (
        f"; first at M = {found.rows}, position {found.position}, element {found.element}: {found.found!r}, and {found.alone!r} "
        f"{than}{apart} ({found.differing:,} of {found.outputs:,} elements differ)"
    )
