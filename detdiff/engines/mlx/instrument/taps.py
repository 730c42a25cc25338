"""Putting taps on a model and taking them off again.

Modules get a subclass of their own class, model modules get a wrapped attention function, cache classes a
wrapped ``update_and_fetch``. Every change is undone in reverse order by one ExitStack, so an exception, a
nested session or a second use of the same session leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol

from mlx.nn.layers.base import Module
from mlx_lm.models import cache as cache_module
from mlx_lm.models import switch_layers

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
    def cache(self, native: Callable[..., Any], cache: Any, args: Any) -> Any: ...
    def gather_sort(self, native: Callable[..., Any], args: Any) -> Any: ...


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
        _tap_top(stack, taps, model)
        for owner in model_modules(model):
            if "scaled_dot_product_attention" in vars(owner):
                _tap_attention(stack, taps, owner)
        for cls in cache_classes():
            _tap_cache(stack, taps, cls)
        native_sort = switch_layers._gather_sort
        _set(stack, switch_layers, "_gather_sort", lambda *args: taps.gather_sort(native_sort, args))
        yield


def _tap_module(stack: contextlib.ExitStack, taps: Taps, name: str, module: Module, kind: str) -> None:
    original = type(module)
    call = original.__call__
    if kind == "composite":

        def composite(self: Module, *args: Any, **kw: Any) -> Any:
            return taps.composite(name, lambda *a, **k: call(self, *a, **k), args, kw)

        _swap(stack, module, {"__call__": composite})
        return

    def leaf(self: Module, *args: Any, **kw: Any) -> Any:
        return taps.leaf(name, kind, lambda *a, **k: call(self, *a, **k), self, args, kw)

    methods: dict[str, Callable[..., Any]] = {"__call__": leaf}
    if kind == "embedding" and hasattr(original, "as_linear"):
        linear = original.as_linear

        def as_linear(self: Module, x: Any) -> Any:
            return taps.leaf(f"{name}.as_linear", "as_linear", lambda y: linear(self, y), self, (x,), {})

        methods["as_linear"] = as_linear
    _swap(stack, module, methods)


def _tap_top(stack: contextlib.ExitStack, taps: Taps, model: Module) -> None:
    call = type(model).__call__

    def top(self: Module, *args: Any, **kw: Any) -> Any:
        return taps.top(lambda *a, **k: call(self, *a, **k), args, kw)

    _swap(stack, model, {"__call__": top})


def _tap_attention(stack: contextlib.ExitStack, taps: Taps, owner: ModuleType) -> None:
    native = owner.scaled_dot_product_attention

    def attention(*args: Any, **kw: Any) -> Any:
        return taps.attention(native, args, kw)

    _set(stack, owner, "scaled_dot_product_attention", attention)


def _tap_cache(stack: contextlib.ExitStack, taps: Taps, cls: Any) -> None:
    native = cls.update_and_fetch

    def update_and_fetch(self: Any, keys: Any, values: Any) -> Any:
        return taps.cache(lambda k, v: native(self, k, v), self, (keys, values))

    _set(stack, cls, "update_and_fetch", update_and_fetch)


@contextlib.contextmanager
def tapped_top(model: Module, taps: Taps) -> Iterator[None]:
    """Only the model call itself is tapped: enough to count forwards, nothing else is touched."""
    with contextlib.ExitStack() as stack:
        _tap_top(stack, taps, model)
        yield
