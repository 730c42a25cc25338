"""How faults are injected: a module or a function computes otherwise while a block runs, and as before after it.

Every fault decides by what a call is given (rows, positions, layers), never by how many calls there were, so that each
re-run of a scenario meets the same fault. The one exception is a race, which is none if it repeats.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as caches

from detdiff.engines.mlx.taps.forward import Forward
from detdiff.engines.mlx.taps.injected import InjectedFault, Injector
from detdiff.engines.mlx.taps.session import Session
from detdiff_kernels import Kernel, library

InjectedFaults = Callable[[], AbstractContextManager[Any]]


class Around:
    """A context manager, and a function that gives it, that can be entered again and again: all injected faults of a trial."""

    def __init__(self, *injected_faults: InjectedFaults) -> None:
        self._injected_faults = injected_faults
        self._stacks: list[ExitStack] = []

    def __call__(self) -> Around:
        return self

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for injected_fault in self._injected_faults:
                stack.enter_context(injected_fault())
            self._stacks.append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stacks.pop().close()


@contextlib.contextmanager
def called(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """``call(native, *args, **kw)`` stands for the module's own call. The class keeps its name, as a fault would."""
    original = type(module)

    def injected(self: nn.Module, *args: Any, **kw: Any) -> Any:
        return call(lambda *a, **k: original.__call__(self, *a, **k), *args, **kw)

    module.__class__ = type(
        original.__name__, (original,), {"__module__": original.__module__, "__call__": injected}
    )
    try:
        yield
    finally:
        module.__class__ = original


@contextlib.contextmanager
def replaced(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """``make(native)`` stands for an attribute of a class or of a Python module."""
    native = vars(owner)[name]
    setattr(owner, name, make(native))
    try:
        yield
    finally:
        setattr(owner, name, native)


@contextlib.contextmanager
def kernel_known(kernel: Kernel) -> Iterator[None]:
    """One more reference kernel, by its own name."""
    library._KERNELS[kernel.name] = kernel
    try:
        yield
    finally:
        del library._KERNELS[kernel.name]


def set_entry(array: mx.array, index: tuple[int, ...], value: Any) -> mx.array:
    """A copy of a cache's array with one place changed; handles on the array keep what they have."""
    copy = mx.array(array)
    copy[index] = value
    return copy


def batched(cache: Any) -> bool:
    """Whether a layer's cache holds several requests side by side."""
    return isinstance(cache, caches.BatchKVCache) and cache.offset.size > 1


@dataclass(frozen=True)
class Among(InjectedFault):
    """A fault that shows only where a forward holds rows of several requests."""

    def apply(self, site: str, port: str, value: mx.array, axis: int, forward: Forward) -> mx.array:
        return super().apply(site, port, value, axis, forward) if _several(forward) else value


@dataclass(frozen=True)
class Put(InjectedFault):
    """Makes one element of a row, or with ``whole`` the row, another bit pattern or dtype: ``alone(values)`` where the
    forward holds one request, ``among(values)`` where it holds several."""

    alone: Callable[[mx.array], mx.array] = lambda values: values
    among: Callable[[mx.array], mx.array] = lambda values: values

    def apply(self, site: str, port: str, value: mx.array, axis: int, forward: Forward) -> mx.array:
        if site != self.site or port != self.port:
            return value
        change = self.among if _several(forward) else self.alone
        for segment in forward.segments:
            if segment.request == self.request and 0 <= self.position - segment.start < segment.count:
                column = segment.column + self.position - segment.start
                row = mx.take(value[segment.slot], mx.array([column]), axis=axis - 1)
                put = change(row)
                if put.dtype != value.dtype:
                    return value.astype(put.dtype)
                index = [slice(None)] * value.ndim
                index[0], index[axis] = slice(segment.slot, segment.slot + 1), slice(column, column + 1)
                copy = mx.array(value)
                copy[tuple(index)] = put[None]
                return copy
        return value


def _several(forward: Forward) -> bool:
    return len(forward.segments) > 1


@contextlib.contextmanager
def sites_injected(*injected_faults: InjectedFault) -> Iterator[None]:
    """Every session of the block has these injected faults too, whoever makes it."""
    native = Session.__init__

    def init(self: Session, *args: Any, **kw: Any) -> None:
        native(self, *args, **kw)
        self._injector = Injector((*self._injector._injected_faults, *injected_faults))

    Session.__init__ = init
    try:
        yield
    finally:
        Session.__init__ = native
