"""Forced native paths: the backend's own operation, called with another number of rows than the caller has.

Arrays are of shape (..., k); ``xp`` is the array module, numpy or mlx.core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Op = Callable[[Any], Any]


def rows(op: Op, x: Any, xp: Any) -> Any:
    """``op`` on every row alone, as (1, 1, k); the result has x's leading shape and op's last size."""
    flat = xp.reshape(x, (-1, 1, 1, x.shape[-1]))
    done = [op(flat[row]) for row in range(flat.shape[0])]
    return xp.reshape(xp.concatenate(done, axis=0), (*x.shape[:-1], done[0].shape[-1]))


def padded(op: Op, x: Any, n: int, xp: Any) -> Any:
    """``op`` once on all rows as (1, n, k), filled up with zero rows; with n rows or more, ``op(x)``."""
    flat = xp.reshape(x, (1, -1, x.shape[-1]))
    count = flat.shape[1]
    if count >= n:
        return op(x)
    zeros = xp.zeros((1, n - count, x.shape[-1]), dtype=x.dtype)
    done = op(xp.concatenate([flat, zeros], axis=1))
    return xp.reshape(done[:, :count], (*x.shape[:-1], done.shape[-1]))
