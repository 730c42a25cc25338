"""How precise numbers of each dtype are, and which roundings a kernel path does: read off the path's own order."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import OracleRefused
from detdiff_kernels import Call, Kernel, kernel, kernel_names, profile
from detdiff_kernels.ggml_kernels import BlockKernel
from detdiff_kernels.joins import JOINS
from detdiff_kernels.order import Inputs, Join, Order, WeightForm, plan
from detdiff_kernels.weights import Affine, Weight

Float64 = NDArray[np.float64]

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LARGEST = {"float32": (2 - 2.0**-23) * 2.0**127, "float16": 65504.0, "bfloat16": (2 - 2.0**-7) * 2.0**127}
# Half the distance of the numbers around zero: what a rounding to nearest can be off where it is subnormal.
SMALLEST = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
FLUSHED = 2.0**-126
"""What is lost where float32 numbers below the smallest normal one become zero."""

U32 = UNIT["float32"]


def growth(*roundings: tuple[float, float]) -> float:
    """What ``(count, unit)`` roundings can make of a number, relative to it: the product of all (1 + unit)**count, less 1.

    At most gamma of the sum of all count * unit (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma
    3.1), and unlike gamma it holds for any count.
    """
    with np.errstate(over="ignore"):
        return float(np.expm1(sum(count * np.log1p(unit) for count, unit in roundings)))


def numbers(values: Any) -> Float64:
    """An array, or recorded ``Values`` in their own shape, as float64; exact for all float types that models use."""
    if hasattr(values, "numbers"):
        found: Float64 = values.numbers().reshape(values.data.shape)
        return found
    return np.asarray(values, np.float64)


Backend = Literal["cpu", "metal", "cuda"]
Op = Literal["linear", "head", "switch"]

# Roundings from a unit's accumulators to the lane's total, counted in the formulas of `detdiff_kernels.joins`.
_JOIN_ROUNDINGS: dict[Join, int] = {
    "chain": 0, "add": 1, "affine": 3, "scale": 1, "q4_0": 2, "q4_0_pairs": 2, "q4_1": 3, "q4_1_pairs": 3, "q4_k": 13,
    "q6_k": 5, "q8_1": 3, "q8_1_min2": 3, "q8_1_min4": 3, "q8_1_scale": 2, "q8_1_k": 7, "q8_1_scales": 5, "tile": 2,
    "tile_min": 3, "tile_scales": 8,
}  # fmt: skip


_LARGEST_FP8 = 448.0  # of 4-bit codes 6


@dataclass(frozen=True)
class LinearRoundings:
    """The roundings of one linear kernel on rows of K items.

    ``weights`` and ``inputs`` say how these are staged (the words of ``detdiff_kernels.order.Order``); any term passes
    at most ``float32`` roundings to float32, ``dtype`` ones to the activation's dtype; the inputs that a bias or a
    minimum multiplies pass ``sums_dtype`` more of these. ``split``: codes meet their scales and minima after the sum,
    so that |scale| code and |minimum| count apart. ``block`` is the weight as the kernel takes it. ``raw``: the largest code of
    a format whose codes are summed in the dtype before their group's scale, or 0. ``halves``: the
    products of two blocks' scales are rounded to float16. ``flushed`` is what an underflow in float32 loses.
    """

    weights: WeightForm
    inputs: Inputs
    float32: int
    dtype: int
    sums_dtype: int
    split: bool
    block: Weight
    halves: bool = False
    half_products: bool = False
    flushed: float = SMALLEST["float32"]
    raw: float = 0.0

    def growth(self, dtype: str) -> float:
        """Of all roundings after staging."""
        return growth((self.float32, U32), (self.dtype, UNIT[dtype]))


@dataclass(frozen=True)
class Arithmetic:
    """A kernel path by its full name, the dtype of its outputs, the backend that native paths run on.

    ``rows`` are those of the whole call, on which some kernels' orders depend; None for those that are judged.
    ``blocks``: over how many the kernels of two passes spread keys, None for the fewest there can be.
    """

    path: str
    dtype: str
    backend: Backend = "cpu"
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in UNIT:
            raise OracleRefused(
                f"The oracle was asked about outputs of dtype {self.dtype!r}; it knows the roundings of "
                f"{', '.join(UNIT)}. Record the site in one of these."
            )

    @property
    def unit(self) -> float:
        return UNIT[self.dtype]

    @property
    def smallest(self) -> float:
        """What an output can lose by being subnormal."""
        return max(SMALLEST[self.dtype], 0.0 if self.backend == "cpu" or self.reference else FLUSHED)

    @property
    def largest(self) -> float:
        return LARGEST[self.dtype]

    @property
    def reference(self) -> str | None:
        """The reference kernel's name, or None for native and forced paths."""
        family, _, name = self.path.partition("/")
        return name if family == "reference" else None

    def sums(self, weight: Weight, rows: int, *, quantised: bool, op: Op = "linear") -> LinearRoundings:
        """The roundings of ``weight`` times ``rows`` rows; ``quantised``: the module holds codes, in whichever mode.

        Raises OracleRefused where a native path's kernel is not known, and UnsupportedFormat for a weight that the
        path's kernel does not take.
        """
        rows = self.rows or rows
        name = self.reference or self._native_kernel(weight, rows, op)
        if name is None:
            return _mlx_cpu(weight, self.dtype, quantised)
        found = kernel(name)
        if not isinstance(found, Kernel):
            raise OracleRefused(
                f"The path {self.path} is an attention kernel, and the site is a {op} one. Give the site's own path."
            )
        if isinstance(found, BlockKernel) and isinstance(weight, Affine):
            weight = weight.as_blocks()
        flushed = FLUSHED if self.backend != "cpu" and self.reference is None else SMALLEST["float32"]
        return sums_of(found.order_for(weight, self.dtype, rows), weight, self.dtype, flushed)

    def _native_kernel(self, weight: Weight, rows: int, op: Op) -> str | None:
        """The reference kernel that stands for MLX's own on a GPU; None on the CPU."""
        if self.backend == "cpu":
            return None
        call = Call(
            op, rows, second_last=rows, k=weight.k, n=weight.n, dtype=self.dtype, bits=weight.bits,
            group_size=weight.group_size, format=weight.format,
        )  # fmt: skip
        chosen = profile(f"mlx-{self.backend}").choose(call)
        if chosen.kernel not in kernel_names():
            raise OracleRefused(
                f"MLX's own kernel for {rows} rows of {weight.k} on {self.backend} is not among the reference kernels, so "
                f"its roundings are not known ({chosen.rule}). Judge a reference path instead."
            )
        return chosen.kernel


def _mlx_cpu(weight: Weight, dtype: str, quantised: bool) -> LinearRoundings:
    """MLX on a CPU: dense products sum in float32 in any order, quantised ones in the activation's dtype.

    Read in ml-explore/mlx e8b5931 mlx/backend/cpu/gemms/simd_gemm.h simd_gemm (float sums of float16 and bfloat16) and
    0e18bb0 mlx/backend/cpu/quantized.cpp _qmm_t, fp_qmm_t (sums and weights in T, each operation rounded; the form with
    vectors, of machines that have it, sums in float32 and stays within this).
    """
    if not quantised:
        return LinearRoundings("dtype", "dtype", weight.k + 1, 0, 0, False, weight)
    affine = isinstance(weight, Affine)
    form: WeightForm = "dtype_twice" if affine else "float32"
    # A product and a sum for every term; in the other modes a group's scale multiplies its sum.
    return LinearRoundings(
        form,
        "dtype",
        0,
        weight.k + (1 if affine else 3),
        0,
        False,
        weight,
        raw=0.0 if affine else _LARGEST_FP8,
    )


def sums_of(
    order: Order, weight: Weight, dtype: str, flushed: float = SMALLEST["float32"]
) -> LinearRoundings:
    """The roundings of an order: the longest way of a term from its product to the output."""
    join = JOINS[order.join]
    steps = plan(order, weight.k)
    terms = len(steps.terms) // steps.lanes
    fold = order.fold or steps.lanes
    if order.unit:
        # A unit's inputs may be summed too, by a way of their own. Codes that are whole numbers sum exactly.
        inside = order.part + order.parts
        inside = max(inside, order.unit) if join.sums and not join.of else inside
        chain, units = inside, steps.units
    else:
        chain, units = terms, 0
    lanes = ceil(steps.lanes / fold) - 1 + fold // order.halve - 1
    tree = int(log2(order.halve))
    narrow = dtype != "float32"
    in_dtype = (lanes + 1 if order.partial == "dtype" else 0) + (chain if order.accumulate == "dtype" else 0)
    in_float32 = chain + units + _JOIN_ROUNDINGS[order.join] + lanes + 1 + tree
    return LinearRoundings(
        order.weight,
        order.inputs,
        in_float32,
        in_dtype if narrow else 0,
        order.sums - 1 if narrow and order.sums > 1 else 0,
        order.join not in ("chain", "add"),
        weight,
        order.join in ("q8_1_min2", "q8_1_min4"),
        order.join == "tile_min" and weight.format == "Q4_K",
        flushed,
    )
