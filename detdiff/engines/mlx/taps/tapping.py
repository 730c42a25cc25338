"""Taps: a model's modules, its attention, scans and caches call them in the place of what they were.

Three kinds of change: a module's class becomes a recording subclass, the model's Python module gets a wrapped
``scaled_dot_product_attention``, and a cache class gets a wrapped ``update_and_fetch``. Every change is undone in reverse order by
one ExitStack, so an exception, a nested session or a second use of the same session leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import cache as cache_module
from mlx_lm.models import switch_layers

from .latent import LATENT_CLASSES
from .sites import walk

TAPPED = "_tapped_class"
"""An attribute that only the classes have which taps put in front of a module's own."""


class Taps(Protocol):
    """What a session answers to the taps; ``native`` is the untapped call."""

    def leaf(
        self, name: str, kind: str, native: Callable[..., Any], module: Module, args: Any, kw: Any
    ) -> Any: ...
    def composite(self, name: str, native: Callable[..., Any], args: Any, kw: Any) -> Any: ...
    def top(self, native: Callable[..., Any], args: Any, kw: Any) -> Any: ...
    def attention(self, native: Callable[..., Any], args: Any, kw: Any) -> Any: ...
    def cache(self, native: partial[Any], cache: Any, args: Any) -> Any: ...
    def gather_sort(self, native: Callable[..., Any], args: Any) -> Any: ...
    def scan(self, kind: str, native: Callable[..., Any], args: Any, kw: Any) -> Any: ...
    def all_sum(self, native: Callable[..., Any], args: Any, kw: Any) -> Any: ...
    def latent(
        self, name: str, native: Callable[..., Any], module: Module, x: Any, transpose: bool
    ) -> Any: ...


class Untouched:
    """Taps that leave every call as it is, for those that only look at some."""

    def leaf(
        self, name: str, kind: str, native: Callable[..., Any], module: Module, args: Any, kw: Any
    ) -> Any:
        return native(*args, **kw)

    def composite(self, name: str, native: Callable[..., Any], args: Any, kw: Any) -> Any:
        return native(*args, **kw)

    def top(self, native: Callable[..., Any], args: Any, kw: Any) -> Any:
        return native(*args, **kw)

    def attention(self, native: Callable[..., Any], args: Any, kw: Any) -> Any:
        return native(*args, **kw)

    def cache(self, native: partial[Any], cache: Any, args: Any) -> Any:
        return native(*args)

    def gather_sort(self, native: Callable[..., Any], args: Any) -> Any:
        return native(*args)

    def scan(self, kind: str, native: Callable[..., Any], args: Any, kw: Any) -> Any:
        return native(*args, **kw)

    def latent(self, name: str, native: Callable[..., Any], module: Module, x: Any, transpose: bool) -> Any:
        return native(x, transpose=transpose)

    def all_sum(self, native: Callable[..., Any], args: Any, kw: Any) -> Any:
        return native(*args, **kw)


def _swap(stack: contextlib.ExitStack, module: Module, methods: dict[str, Callable[..., Any]]) -> None:
    original = type(module)
    # The subclass keeps the name: models and quantisers look at class names.
    recording = type(
        original.__name__, (original,), {"__module__": original.__module__, TAPPED: True, **methods}
    )
    module.__class__ = recording
    stack.callback(_restore_class, module, recording, original)


def _restore_class(module: Module, recording: type, original: type) -> None:
    if type(module) is not recording:
        raise RuntimeError(
            "sessions were left in another order than they were entered; leave the inner one first"
        )
    module.__class__ = original


def _set(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    previous = vars(owner)[name]
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, previous)


def model_modules(model: Module) -> list[ModuleType]:
    """The Python modules that define the model's classes, each once."""
    names = {type(m).__module__ for m in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def cache_classes() -> list[type]:
    """mlx-lm's cache classes that define ``update_and_fetch`` themselves."""
    classes = [c for c in vars(cache_module).values() if inspect.isclass(c)]
    return [c for c in classes if "update_and_fetch" in vars(c) and c.__name__ != "TokenBuffer"]


@contextlib.contextmanager
def tapped(model: Module, taps: Taps) -> Iterator[None]:
    """All taps on ``model`` while the block runs; what was there before is back afterwards."""
    with contextlib.ExitStack() as stack:
        for name, module, kind in list(walk(model)):
            _tap_module(stack, taps, name, module, kind)
        for path, module in list(model.named_modules()):
            if type(module).__name__ in LATENT_CLASSES:
                _tap_latent(stack, taps, path.rpartition(".")[2], module)
        _tap_top(stack, taps, model)
        for owner in model_modules(model):
            if "scaled_dot_product_attention" in vars(owner):
                _tap_attention(stack, taps, owner)
        for cls in cache_classes():
            _tap_cache(stack, taps, cls)
        for owner, name in _scans(model):
            _tap_scan(stack, taps, owner, name)
        native_sort = switch_layers._gather_sort
        _set(stack, switch_layers, "_gather_sort", lambda *args: taps.gather_sort(native_sort, args))
        native_sum = mx.distributed.all_sum
        _set(stack, mx.distributed, "all_sum", lambda *args, **kw: taps.all_sum(native_sum, args, kw))
        yield


def _tap_module(stack: contextlib.ExitStack, taps: Taps, name: str, module: Module, kind: str) -> None:
    original = type(module)
    call = original.__call__
    if kind == "composite":

        def composite(self: Module, *args: Any, **kw: Any) -> Any:
            return taps.composite(name, partial(call, self), args, kw)

        _swap(stack, module, {"__call__": composite})
        return

    def leaf(self: Module, *args: Any, **kw: Any) -> Any:
        return taps.leaf(name, kind, partial(call, self), self, args, kw)

    methods: dict[str, Callable[..., Any]] = {"__call__": leaf}
    if kind == "embedding" and hasattr(original, "as_linear"):
        linear = original.as_linear

        def as_linear(self: Module, x: Any) -> Any:
            return taps.leaf(f"{name}.as_linear", "as_linear", partial(linear, self), self, (x,), {})

        methods["as_linear"] = as_linear
    _swap(stack, module, methods)


def _tap_latent(stack: contextlib.ExitStack, taps: Taps, name: str, module: Module) -> None:
    call = type(module).__call__

    def latent(self: Module, x: Any, transpose: bool = True) -> Any:
        return taps.latent(name, lambda *a, **k: call(self, *a, **k), self, x, transpose)

    _swap(stack, module, {"__call__": latent})


def _tap_top(stack: contextlib.ExitStack, taps: Taps, model: Module) -> None:
    call = type(model).__call__

    def top(self: Module, *args: Any, **kw: Any) -> Any:
        return taps.top(partial(call, self), args, kw)

    _swap(stack, model, {"__call__": top})


def _tap_attention(stack: contextlib.ExitStack, taps: Taps, owner: ModuleType) -> None:
    native = owner.scaled_dot_product_attention

    def attention(*args: Any, **kw: Any) -> Any:
        return taps.attention(native, args, kw)

    _set(stack, owner, "scaled_dot_product_attention", attention)


def _scans(model: Module) -> Iterator[tuple[ModuleType, str]]:
    """Where the recurrences of a model's modules are called from, with their names."""
    for owner in model_modules(model):
        yield from ((owner, name) for name in ("ssm_update", "recurrent_gla") if name in vars(owner))
    gated = sys.modules.get("mlx_lm.models.gated_delta")
    if gated is not None:
        # What makes gates and rates of a layer's projections is around these.
        yield from (
            (gated, name) for name in ("gated_delta_ops", "gated_delta_kernel") if name in vars(gated)
        )


def _tap_scan(stack: contextlib.ExitStack, taps: Taps, owner: ModuleType, name: str) -> None:
    native, kind = vars(owner)[name], "gated_delta" if name.startswith("gated_delta") else name

    def scan(*args: Any, **kw: Any) -> Any:
        return taps.scan(kind, native, args, kw)

    _set(stack, owner, name, scan)


def _tap_cache(stack: contextlib.ExitStack, taps: Taps, cls: Any) -> None:
    native = cls.update_and_fetch

    def update_and_fetch(self: Any, keys: Any, values: Any) -> Any:
        return taps.cache(partial(native, self), self, (keys, values))

    _set(stack, cls, "update_and_fetch", update_and_fetch)


@contextlib.contextmanager
def tapped_calls(
    model: Module, taps: Taps, wanted: Callable[[str, str], bool], *, attention: bool
) -> Iterator[None]:
    """Taps on leaf modules whose (site name, kind) is ``wanted``, and on attention: what a plan pins outside recordings."""
    with contextlib.ExitStack() as stack:
        for name, module, kind in list(walk(model)):
            if kind != "composite" and wanted(name, kind):
                _tap_module(stack, taps, name, module, kind)
        for owner in model_modules(model) if attention else ():
            if "scaled_dot_product_attention" in vars(owner):
                _tap_attention(stack, taps, owner)
        yield


@contextlib.contextmanager
def tapped_top(model: Module, taps: Taps) -> Iterator[None]:
    """Only the model call itself is tapped: enough to count forwards, nothing else is touched."""
    with contextlib.ExitStack() as stack:
        _tap_top(stack, taps, model)
        yield
