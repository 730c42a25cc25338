"""The kernel plan at work: which path a call takes, the rule that chose it, and the weights that reference kernels take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from detdiff.errors import KernelPlanError
from detdiff.scenario import KernelPlan, PathRule
from detdiff.trace import Site
from detdiff_kernels import (
    Affine,
    Call,
    Choice,
    Dense,
    Kernel,
    Profile,
    Staged,
    Weight,
    kernel,
    kernel_names,
    profile,
)
from detdiff_kernels.attention import Attention
from detdiff_kernels.staging import summed

from .tapping import TAPPED

StagedWeights = dict[tuple[int, str, str, int], tuple[Module, Staged]]
"""By id of the module, kernel, dtype and expert (-1: none)."""

_KNOWN = (
    "Linear",
    "QuantizedLinear",
    "Embedding",
    "QuantizedEmbedding",
    "SwitchLinear",
    "QuantizedSwitchLinear",
)
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


class Operand(NamedTuple):
    """What a call with a module's weight [..., N, K] is like: the dtype it runs in, and how the weight is held.

    ``problem`` is a sentence where a reference kernel cannot stand for the module, else empty.
    """

    dtype: mx.Dtype
    n: int
    format: str
    bits: int | None
    group_size: int | None
    problem: str = ""


def operand(module: Module, x: mx.array, method: str = "__call__") -> Operand:
    """The facts of ``module`` called with ``x``; ``method`` is the one that is called."""
    weight = module["weight"]
    n = int(weight.shape[-2])
    owner = _owner(module, method)
    problem = "" if owner in _KNOWN else f"the module's class {owner} computes in its own way."
    if "scales" not in module:
        if weight.dtype not in _FLOATS:
            held = str(weight.dtype).rpartition(".")[2]
            return Operand(
                x.dtype, n, "dense", None, None, problem or f"the module holds its weight as {held}."
            )
        return Operand(mx.result_type(x, weight), n, "dense", None, None, problem)
    affine = module.mode == "affine"
    dtype = mx.result_type(x, module["scales"]) if affine else x.dtype
    return Operand(dtype, n, module.mode, int(module.bits), int(module.group_size), problem)


def _owner(module: Module, method: str) -> str:
    """The class that defines what is called, taps aside."""
    classes = (cls for cls in type(module).__mro__ if method in vars(cls) and TAPPED not in vars(cls))
    return next((cls.__name__ for cls in classes), type(module).__name__)


def plain(array: mx.array) -> NDArray[Any]:
    """The values of an array, copied only where they do not lie in rows; bfloat16 as the uint16 of its bits."""
    whole = mx.contiguous(array)
    return np.asarray(whole.view(mx.uint16) if array.dtype == mx.bfloat16 else whole)


def floats(array: mx.array) -> NDArray[np.float32]:
    """The values of an array as float32; those of a float32 array are not copied."""
    return np.asarray(array if array.dtype == mx.float32 else array.astype(mx.float32))


def weight_of(module: Module, expert: int | None = None) -> Weight:
    """The weight [N, K] of a linear, quantised linear or embedding module, or of one expert of a switch module.

    Modes other than affine are unpacked to float32. Raises UnsupportedFormat for bits that no kernel knows.
    """

    def part(name: str) -> mx.array:
        array: mx.array = module[name]
        return array if expert is None else array[expert]

    if "scales" not in module:
        weight = module["weight"]
        data = plain(weight)
        return Dense(data if expert is None else data[expert], name_of(weight.dtype))
    if module.mode == "affine":
        packed = plain(module["weight"])
        scales, biases = (floats(mx.contiguous(part(name))) for name in ("scales", "biases"))
        return Affine(
            packed if expert is None else packed[expert], scales, biases, module.bits, module.group_size
        )
    whole = module.get("global_scale")
    values = mx.dequantize(
        part("weight"),
        part("scales"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        global_scale=None if whole is None else part("global_scale"),
        dtype=mx.float32,
    )
    return Dense(plain(values), "float32")


def name_of(dtype: mx.Dtype) -> str:
    """A dtype's name without its module, such as float32."""
    return str(dtype).rpartition(".")[2]


@dataclass(frozen=True)
class StagedKernel:
    """A linear reference kernel with the weight of one module, or of one of its experts, staged for it."""

    kernel: Kernel
    staged: Staged

    def __call__(self, x: NDArray[np.float32], rows: int | None = None) -> NDArray[np.float32]:
        """``x`` [rows, K] times the weight: [rows, N]; ``rows``: in the order of a call of that many."""
        if rows is None or rows == len(x):
            return self.kernel(x, self.staged)
        # A row's result depends on that row and the order alone, so the order of another call may run these rows.
        out = np.empty((len(x), self.staged.n), np.float32)
        summed(x, self.staged, self.kernel.order_for(self.staged.weight, self.staged.dtype, rows), out)
        return out


class Kernels:
    """Reference kernels by name, and the weights that are staged for them."""

    def __init__(self, staged: StagedWeights | None = None) -> None:
        """``staged`` keeps what kernels make of weights from one session of a model to the next."""
        self._staged: StagedWeights = {} if staged is None else staged

    def attention(self, name: str) -> Attention:
        """The attention kernel of that name."""
        found = kernel(name)
        assert isinstance(found, Attention)
        return found

    def linear(
        self, name: str, module: Module, dtype: str, *, rows: int, expert: int | None = None
    ) -> StagedKernel:
        """The linear kernel of that name with the module's weight, for ``rows`` rows of activations of ``dtype``.

        Raises UnsupportedFormat and BadOperand for a weight that it does not take.
        """
        found = kernel(name)
        assert isinstance(found, Kernel)
        key = (id(module), name, dtype, -1 if expert is None else expert)
        entry = self._staged.get(key)
        if entry is None:
            # The module is kept beside its staged weight so that its id cannot be given to another one.
            entry = self._staged[key] = (module, found.stage(weight_of(module, expert), dtype))
        found.order_for(entry[1].weight, dtype, rows)
        return StagedKernel(found, entry[1])


Native = Callable[..., Any]
"""An untapped call."""

NATIVE = "native"
OPS = ("linear", "head", "switch", "attention")  # the kinds of sites that a kernel path can be chosen for
BY_ROWS = ("linear", "head", "switch")  # what can be run row by row, or padded to more rows
_REMEMBERED = 1 << 14


@dataclass(frozen=True)
class KernelPath:
    """A kernel path by its full name (native, forced/…, reference/…), and the rule that chose it.

    ``asked`` says that a rule of the scenario names it, so that another one would be a run that nobody asked for;
    ``arguments`` are what a profile hands to the kernel beside the operands. ``rows`` asks for what the path gives in
    a call of that many rows, whatever number it is called with; None for the call's own.
    """

    name: str
    rule: str
    asked: bool = False
    arguments: tuple[tuple[str, int], ...] = ()
    rows: int | None = None

    @property
    def kernel(self) -> str | None:
        """The reference kernel's name, or None."""
        family, _, name = self.name.partition("/")
        return name if family == "reference" else None

    def left_native(self, reason: str) -> KernelPath:
        """The native path, with the reason why this one is not taken. Raises KernelPlanError for one that is asked for."""
        if self.asked:
            raise KernelPlanError(f"{self.rule} cannot be done: {reason} Correct the rule, or remove it.")
        rule = f"{self.rule}; not taken, so native: {reason}"
        return KernelPath(NATIVE, rule) if self.rows is None else tiled(self.rows, rule)


ROW_BY_ROW = "forced/rows"
"""Every row, of attention every query row, as a call of its own."""
TILE = "tile:"
CUT = "cut:"
KEYS = "keys"


def tiled(rows: int, rule: str) -> KernelPath:
    """The backend's own operation in calls of ``rows`` rows [1, rows, K], the last one filled up."""
    return KernelPath(f"forced/{TILE}{rows}", rule, rows=rows)


class Span(NamedTuple):
    """Flat rows ``first`` to ``last`` - 1 of a call, and their path."""

    first: int
    last: int
    path: KernelPath


class CallSite(NamedTuple):
    """Where a call is made: the site's name, its kind of operation, the forward's phase.

    ``columns`` are those of the forward that a call per request is for; only an override is told them.
    """

    site: str
    op: str
    phase: str
    columns: range | None = None


class RowComputation(NamedTuple):
    """All that decides a row's bits but the row: the path, the rows of the call, and the order of a reference kernel."""

    path: KernelPath
    rows: int
    order: Any = None

    def path_again(self) -> KernelPath:
        """The path that gives the same in a call of any other number of rows."""
        return KernelPath(
            self.path.name, self.path.rule, arguments=self.path.arguments, rows=self.rows or None
        )

    def same_as(self, other: RowComputation) -> bool:
        """Whether a row of one call is computed as in the other. What has no order is told apart by its rows."""
        a, b = self.path, other.path
        if a.kernel is not None or b.kernel is not None:
            return (a.name, a.arguments) == (b.name, b.arguments) and bool(self.order == other.order)
        return _native_rows(a, self.rows) == _native_rows(b, other.rows)


def _native_rows(path: KernelPath, rows: int) -> int:
    """How many rows the backend's own operation sees; 0 for attention, whose rows do not name a call."""
    forced = path.name.partition("/")[2]
    if forced == "rows" or forced.startswith(TILE):
        return path.rows or 1
    return max(rows, int(forced.removeprefix("pad:"))) if forced else rows


class TakenPath(NamedTuple):
    """A path that was taken, as it is recorded. ``rows`` and ``second_last`` are None for a call per request;
    ``at`` are the call's flat rows it was taken for, None for all. ``made`` is given only under an override."""

    rows: int | None
    second_last: int | None
    path: str
    rule: str
    at: range | None = None
    made: RowComputation | None = None


Override = Callable[[CallSite, Call, "tuple[Span, ...]"], "tuple[Span, ...]"]
"""May answer a call with other paths than those that the plan chose; spans of linear calls cover ``rows``, those of
attention ``batch`` times ``rows``."""


class PathChooser:
    """Chooses the kernel path of every call under one plan.

    Raises KernelPlanError for a path or profile that does not exist.
    """

    def __init__(self, plan: KernelPlan) -> None:
        self._plan = plan
        self._profile: Profile | None = _profile(plan.profile) if plan.profile else None
        self._known: dict[tuple[CallSite | None, Call, bool], tuple[Span, ...]] = {}
        self.override: Override | None = None
        for rule in plan.rules:
            self._check(rule)

    @property
    def native(self) -> bool:
        """True when every call runs as the backend would run it."""
        return self._profile is None and not self._plan.rules and self._plan.split_rows is None

    def _check(self, rule: PathRule) -> None:
        path = rule.path
        if path != NATIVE and not _forced(path) and path not in kernel_names():
            raise KernelPlanError(
                f"A rule for {rule.site!r} names the kernel path {path!r}; expected native, rows, pad:N, tile:N, cut:N, keys or one of "
                f"{', '.join(kernel_names())}. Correct the path."
            )

    def check_sites(self, sites: Sequence[Site]) -> None:
        """Raises KernelPlanError for a rule that no site of the model can follow."""
        takers = [site for site in sites if site.kind in OPS]
        for rule in self._plan.rules:
            matching = [site for site in takers if fnmatchcase(site.name, rule.site)]
            if not matching:
                raise KernelPlanError(
                    f"The rule for site {rule.site!r} matches none of the {len(takers)} sites of this model that have a "
                    f"kernel path (for example {takers[0].name if takers else 'none'}). Correct the pattern, or remove "
                    "the rule."
                )
            if not any(_fits(rule.path, site.kind) for site in matching):
                first = matching[0]
                raise KernelPlanError(
                    f"The rule for site {rule.site!r} names the path {rule.path}, which {first.name} ({first.kind}) cannot "
                    f"take; expected {_expected(first.kind)}. Correct the path or the pattern."
                )

    def choose(self, place: CallSite, call: Call) -> tuple[Span, ...]:
        """The paths of one call's rows, first to last; mostly one for all."""
        planned = self.planned(place, call)
        return planned if self.override is None else self.override(place, call, planned)

    def planned(self, place: CallSite, call: Call, *, alone: bool = False) -> tuple[Span, ...]:
        """The same by the plan alone; ``alone`` is a call that the path ``keys`` makes for a single row."""
        if place.columns is not None:
            place = place._replace(columns=None)
        # Without rules a site's name and the phase decide nothing, so that all layers share what is known.
        key = (place if self._plan.rules else None, call, alone)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = self._known[key] = self._chosen(place, call, alone)
        return found

    def _chosen(self, place: CallSite, call: Call, alone: bool) -> tuple[Span, ...]:
        for rule in self._plan.rules:
            if (
                not (alone and rule.path == KEYS)
                and fnmatchcase(place.site, rule.site)
                and rule.phase in ("any", place.phase)
                and rule.holds(call.rows * call.batch, call.second_last)
                and _fits(rule.path, call.op)
            ):
                text = f"rule: site {rule.site}, phase {rule.phase}, rows {rule.rows} -> {rule.path}"
                if rule.path.startswith(TILE):
                    return (Span(0, call.rows, self._tile(int(rule.path.removeprefix(TILE)), call, text)),)
                if rule.path.startswith(CUT):
                    return tuple(self._cut(int(rule.path.removeprefix(CUT)), place, call, text))
                return (Span(0, call.rows, KernelPath(_full_name(rule.path), text, asked=True)),)
        split = self._plan.split_rows
        if self._profile is not None:
            parts = self._profile.parts(call, split_rows=split)
            return tuple(Span(part.first, part.last, _path(part.choice, call.op)) for part in parts)
        if split is not None and 1 < call.rows <= split and call.op in ("linear", "head"):
            path = KernelPath("forced/rows", f"split_rows {split}: {call.rows} rows <= {split} -> row by row")
            return (Span(0, call.rows, path),)
        return (Span(0, call.rows, KernelPath(NATIVE, "")),)

    def _cut(self, rows: int, place: CallSite, call: Call, rule: str) -> Iterator[Span]:
        whole = call.rows - call.rows % rows
        yield from (Span(at, at + rows, self._tile(rows, call, rule)) for at in range(0, whole, rows))
        rest = call.rows - whole
        if rest:
            for span in self._chosen(place, replace(call, rows=rest, second_last=rest), False):
                yield Span(whole + span.first, whole + span.last, span.path)

    def _tile(self, rows: int, call: Call, rule: str) -> KernelPath:
        """What the plan has for a call of that many rows without its rules, for a call of any number."""
        if self._profile is None:
            return tiled(rows, rule)
        second_last = call.second_last if call.op == "switch" else rows
        parts = self._profile.parts(replace(call, rows=rows, second_last=second_last, sorted=False))
        if len(parts) > 1:
            raise KernelPlanError(
                f"{rule} cannot be done: in a call of {rows} rows, {self._profile.name} computes the first "
                f"{parts[0].last} otherwise than the others, and a tile has one path. Take tile:{parts[0].last}."
            )
        path = replace(_path(parts[0].choice, call.op), rows=rows)
        path = replace(path, rule=f"{rule}, as for {rows} rows: {path.rule}")
        return path if path.kernel is not None else tiled(rows, path.rule)


def _profile(name: str) -> Profile:
    try:
        return profile(name)
    except ValueError as error:
        raise KernelPlanError(f"{error}") from error


def _path(choice: Choice, op: str) -> KernelPath:
    path = KernelPath(_full_name(choice.kernel), choice.rule, arguments=choice.arguments)
    return path if _fits(choice.kernel, op) else path.left_native(f"{choice.kernel} cannot run {op} calls.")


def _forced(path: str) -> bool:
    return path in ("rows", KEYS) or path.startswith(("pad:", TILE, CUT))


def _fits(path: str, op: str) -> bool:
    if path == NATIVE:
        return True
    if _forced(path):
        # An expert's row cannot depend on its place among the others, which a cut would have to know.
        return op == "attention" if path == KEYS else op in BY_ROWS[: 2 if path.startswith(CUT) else 3]
    return (kernel(path).op == "attention") == (op == "attention")


def _expected(op: str) -> str:
    kernels = [name for name in kernel_names() if _fits(name, op)]
    forced = "native, rows, pad:N, tile:N, cut:N" if op in BY_ROWS else "native, keys"
    return f"{forced} or one of {', '.join(kernels)}" if kernels else forced


def _full_name(path: str) -> str:
    if path == NATIVE:
        return path
    if path == KEYS:
        return ROW_BY_ROW
    return f"forced/{path}" if _forced(path) else f"reference/{path}"
