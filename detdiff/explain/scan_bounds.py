"""The bounds of recurrences: a state that is carried from row to row, in float64 beside how far float32 can be from it.

All forms are linear in the state, so that an error is carried on as the state is, and each row adds its own roundings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .bounds import BoundedOutputs, output_rounded
from .roundings import SMALLEST, U32, UNIT, Arithmetic, Float64, growth

_CHUNK_ROWS = 128
_FUNCTION = 16
"""Roundings that an exponential, a logarithm of one more, or a logistic function stays within, of any library."""


@dataclass(frozen=True, eq=False)
class GatedDelta:
    """The gated delta rule over rows t of one request, in heads h: the state [h, v, k] decays by ``g``, loses what it has at the
    key and gains ``beta`` of the value there, and is read at the query.

    ``q`` and ``k`` (t, h, k), ``v`` (t, h, v), ``g`` (t, h) or (t, h, k) and ``beta`` (t, h) as they were computed; ``state`` before
    the first row. The outputs are the last row's (h, v) and, with ``ends``, the state after it, in one line. Its order is
    that of mlx-lm 0.32.2 models/gated_delta.py gated_delta_ops; sums may be in any.
    """

    q: Float64
    k: Float64
    v: Float64
    g: Float64
    beta: Float64
    state: Float64
    ends: bool
    dtype: str

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        s, e = self.state, np.zeros_like(self.state)
        width = growth((self.k.shape[-1] + 2, U32))
        y = e_y = size = np.zeros(0)
        for t in range(len(self.q)):
            g = self.g[t][:, None, :] if self.g.ndim == 3 else self.g[t][:, None, None]
            s = s * g
            e = np.abs(g) * e + U32 * (np.abs(s) + np.abs(g) * e)
            k, beta = self.k[t][:, None, :], self.beta[t][:, None]
            held = (s * k).sum(-1)
            e_held = (e * np.abs(k)).sum(-1) + width * ((np.abs(s) + e) * np.abs(k)).sum(-1)
            away = self.v[t] - held
            delta = away * beta
            e_delta = np.abs(beta) * (e_held + 2 * U32 * (np.abs(away) + e_held)) * (1 + U32)
            s = s + k * delta[..., None]
            e = e + np.abs(k) * (e_delta + 2 * U32 * (np.abs(delta) + e_delta))[..., None]
            e = e + U32 * (np.abs(s) + e) + SMALLEST["float32"]
            q = self.q[t][:, None, :]
            y, size = (s * q).sum(-1), (np.abs(s) * np.abs(q)).sum(-1)
            e_y = (e * np.abs(q)).sum(-1) + width * ((np.abs(s) + e) * np.abs(q)).sum(-1)
        return _outputs(y, e_y, size, s, e, self, f"gated delta rule over {len(self.q)} rows")


@dataclass(frozen=True, eq=False)
class GatedLinear:
    """Linear attention with a decay over rows t of one request, in heads h: the state [h, k, v] decays by exp(decay), gains the product of
    key and value, and is read at the query times ``scale``.

    ``q`` and ``k`` (t, h, k), ``v`` (t, h, v), ``decay`` (h,); ``state`` before the first row. Outputs as in ``GatedDelta``. Bounds hold
    for the recurrence and for mlx-lm 0.32.2 models/bailing_hybrid.py recurrent_gla, which sums up to 128 rows at once and spreads their
    decays over queries and keys.
    """

    q: Float64
    k: Float64
    v: Float64
    decay: Float64
    scale: float
    state: Float64
    ends: bool
    dtype: str

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        rows, width = len(self.q), self.k.shape[-1]
        spread = 8 * U32 * np.abs(self.decay) * max(rows, _CHUNK_ROWS)
        each = growth((width + 2 * rows + 3 * _FUNCTION, U32), (4, UNIT[self.dtype]))
        off = (np.expm1(spread) + each)[:, None, None]
        ages = np.arange(rows, dtype=np.float64)[::-1, None]
        kept = np.exp(ages * self.decay)
        s = np.einsum("th,thk,thv->hkv", kept, self.k, self.v)
        size = np.einsum("th,thk,thv->hkv", kept, np.abs(self.k), np.abs(self.v))
        first = np.exp(rows * self.decay)[:, None, None]
        s, size = s + first * self.state, size + first * np.abs(self.state)
        e = off * size + SMALLEST["float32"]
        q = self.q[-1] * self.scale
        y = np.einsum("hk,hkv->hv", q, s)
        whole = np.einsum("hk,hkv->hv", np.abs(q), size)
        e_y = np.einsum("hk,hkv->hv", np.abs(q), e) + off[..., 0] * whole
        return _outputs(y, e_y, whole, s, e, self, f"linear attention with a decay over {rows} rows")


@dataclass(frozen=True, eq=False)
class StateSpace:
    """The state-space recurrence over rows t of one request, in heads h: the state [h, d, n] decays by exp(dt A), gains dt x B and is
    read at C; x D is added.

    ``x`` (t, h, d), ``dt`` (t, h) before its bias and softplus, ``b`` and ``c`` (t, h, n), ``a``, ``bias`` and ``skip`` (h,), ``limit`` what
    dt is clipped to; ``state`` before the first row. Outputs as in ``GatedDelta``. Bounds hold for the recurrence and for mlx-lm
    0.32.2 models/ssm.py ssm_attn, which sums in chunks: its decays are exponentials of sums of up to t terms.
    ``mixed`` is the dtype that B and C are multiplied in.
    """

    x: Float64
    dt: Float64
    b: Float64
    c: Float64
    a: Float64
    bias: Float64
    skip: Float64
    limit: tuple[float, float]
    state: Float64
    ends: bool
    dtype: str
    mixed: str

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        rows, width = len(self.x), self.b.shape[-1]
        raw = self.dt + self.bias
        dt = np.clip(np.logaddexp(0.0, raw), *self.limit)
        off_dt = growth((_FUNCTION, U32)) + U32 * np.abs(raw) / np.maximum(dt, 1e-30)
        decays = dt * self.a
        # What an exponent can be off: its terms', and that of their sums in any order.
        off = np.abs(decays) * (off_dt + growth((rows + _FUNCTION, U32)))
        after, off_after = decays.sum(0) - decays.cumsum(0), off.sum(0) - off.cumsum(0)
        each = growth((width + 2 * rows + 3 * _FUNCTION, U32), (2, UNIT[self.mixed]))
        gained = np.einsum("thd,thn->thdn", self.x * dt[..., None], self.b)
        kept = np.exp(after)[..., None, None]
        moved = (np.expm1(off_after) + off_dt + each)[..., None, None]
        s = (gained * kept).sum(0)
        e = (np.abs(gained) * kept * moved).sum(0)
        first = np.exp(decays.sum(0))[:, None, None]
        s = s + first * self.state
        e = e + first * np.abs(self.state) * (np.expm1(off.sum(0))[:, None, None] + each)
        c = self.c[-1][:, None, :]
        skipped = self.x[-1] * self.skip[:, None]
        y = (s * c).sum(-1) + skipped
        size = (np.abs(s) * np.abs(c)).sum(-1) + np.abs(skipped)
        terms = (np.abs(gained) * kept).sum(0) + first * np.abs(self.state)
        unit = UNIT[self.dtype]
        e_y = (e * np.abs(c)).sum(-1) + each * (terms * np.abs(c)).sum(-1)
        # The product with C is rounded to the dtype before x D, itself rounded to it, is added.
        e_y = e_y + 2 * unit * (np.abs(y - skipped) + e_y + np.abs(skipped))
        e = e + U32 * (np.abs(s) + e) + SMALLEST["float32"]
        return _outputs(y, e_y, size, s, e, self, f"state-space recurrence over {rows} rows")


def _outputs(
    y: Float64,
    e_y: Float64,
    size: Float64,
    s: Float64,
    e: Float64,
    scan: GatedDelta | GatedLinear | StateSpace,
    what: str,
) -> BoundedOutputs:
    bound, over = output_rounded(y, e_y, Arithmetic("native", scan.dtype, "cpu", 1))
    parts = [(y, bound, size, over)]
    if scan.ends:
        parts.append((s, e, np.abs(s), np.zeros(s.shape, np.bool_)))
    exact, bounds, sizes, unbounded = (
        np.concatenate([part[n].ravel() for part in parts])[None] for n in range(4)
    )
    text = f"{what}: each row's roundings, carried on as the state is, sums in any order, output rounding"
    return BoundedOutputs(exact, bounds, bounds, sizes + SMALLEST[scan.dtype], unbounded, text)
