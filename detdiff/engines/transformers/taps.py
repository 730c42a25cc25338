"""Taps on a torch model: forward hooks on its modules, its attention function and its cache, which undo themselves."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .sites import call_names, first_tensor, output_tensor, replaced

Observe = Callable[[str, Any, Any], None]  # site, given, made
Attended = Callable[
    [str, Any, Any, bool], None
]  # attention module, keys, values, whether entries came through a cache
Attention = Callable[..., Any]


@contextlib.contextmanager
def tapped(
    torch: Any,
    model: Any,
    observe: Observe,
    attended: Attended,
    before: Callable[[], None] | None = None,
    written: Callable[[str, Any, Any], None] | None = None,
) -> Iterator[None]:
    """Call ``observe`` for each module and attention call when it ends, ``attended`` with the keys and values that attention
    reads, ``written`` with new entries on their way into the cache, and ``before`` when a forward begins."""
    seen: dict[str, int] = {}
    names = {id(module): name for name, module in model.named_modules()}
    layers = {
        getattr(module, "layer_idx", None): name
        for name, module in model.named_modules()
        if getattr(module, "layer_idx", None) is not None and hasattr(module, "forward") and _attends(module)
    }
    cached: set[str] = set()

    def begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.clear()
        cached.clear()
        if before is not None:
            before()

    def hook(name: str) -> Any:
        def ended(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            observe(call_names(name, seen), first_tensor(torch, args, kwargs), output_tensor(torch, output))

        return ended

    def attention(native: Attention) -> Attention:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            output = native(module, *args, **kwargs)
            query, key, value = (
                args[n] if len(args) > n else kwargs.get(word)
                for n, word in enumerate(("query", "key", "value"))
            )
            name = names.get(id(module))
            made = output_tensor(torch, output)
            if (
                name is not None
                and made is not None
                and all(isinstance(each, torch.Tensor) and each.ndim == 4 for each in (query, key, value))
            ):
                attended(name, key, value, name in cached)
                observe(call_names(f"{name}.attention", seen), query, made)
            return output

        return call

    def update(native: Attention) -> Attention:
        def call(cache: Any, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
            name = layers.get(layer)
            if name is not None and getattr(keys, "ndim", 0) == 4:
                cached.add(name)
                if written is not None:
                    written(name, keys, values)
            return native(cache, keys, values, layer, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:

        def registered(handle: Any) -> None:
            stack.callback(handle.remove)

        registered(model.register_forward_pre_hook(begin, with_kwargs=True))
        for name, module in model.named_modules():
            # Containers are not called, and what does nothing is no site.
            idle = torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.Dropout | torch.nn.Identity
            if name and not isinstance(module, idle):
                registered(module.register_forward_hook(hook(name), with_kwargs=True))
        stack.enter_context(attention_as(model, attention))
        from transformers.cache_utils import Cache

        stack.enter_context(replaced(Cache, "update", update(Cache.update)))
        yield


def _attends(module: Any) -> bool:
    return "Attention" in type(module).__name__ or hasattr(module, "q_proj")


@contextlib.contextmanager
def attention_as(model: Any, change: Callable[[Attention], Attention]) -> Iterator[None]:
    """The attention functions of the model's own modules wrapped by ``change``: those that are registered under the
    implementation that it uses, and each module's eager one."""
    homes = {type(module).__module__ for module in model.modules()}
    with contextlib.ExitStack() as stack:
        done: set[int] = set()
        for home in sorted(homes):
            place = sys.modules.get(home)
            interface = getattr(place, "ALL_ATTENTION_FUNCTIONS", None)
            if interface is not None and id(interface) not in done:
                done.add(id(interface))
                for name in implementations(model):
                    if name in interface:
                        stack.enter_context(_entry(interface, name, change(interface[name])))
            eager = vars(place).get("eager_attention_forward") if place is not None else None
            if eager is not None:
                stack.enter_context(replaced(place, "eager_attention_forward", change(eager)))
        yield


@contextlib.contextmanager
def _entry(interface: Any, name: str, value: Any) -> Iterator[None]:
    """An entry of an attention interface's own mapping, which goes before the library's."""
    own = interface._local_mapping
    before = own.get(name)
    own[name] = value
    try:
        yield
    finally:
        if before is None:
            own.pop(name, None)
        else:
            own[name] = before


def implementations(model: Any) -> list[str]:
    """The names of the attention implementations in use."""
    configs = {id(model.config): model.config}
    for module in model.modules():
        if hasattr(module, "config"):
            configs[id(module.config)] = module.config
    found = [getattr(config, "_attn_implementation", None) for config in configs.values()]
    return sorted({str(each) for each in found if each})


@contextlib.contextmanager
def pinned(
    torch: Any, model: Any, padding: Sequence[int], after: Sequence[int] = (), causal: bool = True
) -> Iterator[None]:
    """Every linear layer computes row by row, and attention sequence by sequence without its padding (columns on the left
    by request, and ``after`` on the right), whatever the batch: one kernel path for every number of rows."""

    def rows(module: Any) -> Any:
        native = module.forward

        def forward(x: Any) -> Any:
            flat = x.reshape(-1, x.shape[-1])
            made = [native(row[None].contiguous()) for row in flat]
            return torch.cat(made).reshape(*x.shape[:-1], -1) if made else native(x)

        return forward

    def attention(native: Attention) -> Attention:
        def call(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **kwargs: Any) -> Any:
            length, keys = query.shape[2], key.shape[2]
            outputs, weights = [], None
            for request, columns in enumerate(padding):
                # A window's cache has lost its oldest columns, padding first.
                pad = max(0, columns - (fed[0] - keys))
                first = max(0, columns - (fed[0] - length))
                behind = after[request] if after else 0
                q = query[request : request + 1, :, first : length - behind].contiguous()
                k, v = (
                    each[request : request + 1, :, pad : keys - behind].contiguous() for each in (key, value)
                )
                own = _mask(torch, mask, request, q, k, first, pad)
                if mask is None and not causal:
                    own = None if implementations(model) == ["eager"] else torch.ones_like(own)
                made, weights = native(module, q, k, v, own, **kwargs)
                if first or behind:
                    empty = [made.new_zeros((1, n, *made.shape[2:])) for n in (first, behind)]
                    made = torch.cat([empty[0], made, empty[1]], dim=1)
                outputs.append(made)
            return torch.cat(outputs), weights if len(outputs) == 1 else None

        return call

    fed = [0]

    def begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        fed[0] += int(ids.shape[1])

    with contextlib.ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D":
                stack.enter_context(replaced(module, "forward", rows(module)))
        for _, module in experts(torch, model):
            stack.enter_context(replaced(module, "forward", row_by_row(torch, module)))
        stack.enter_context(attention_as(model, attention))
        yield


def experts(torch: Any, model: Any) -> Iterator[tuple[str, Any]]:
    """Routers, and experts that hold their weights in one tensor, by name."""
    for name, module in model.named_modules():
        linear = isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
        if not linear and re.search(r"Experts|Router|Gate$", type(module).__name__) and _own_weights(module):
            yield name, module


def row_by_row(torch: Any, module: Any) -> Callable[..., Any]:
    """A module's forward row by row, whatever of the arguments has a row for each of the first."""
    native = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        first = next(each for each in given if isinstance(each, torch.Tensor))
        width = first.shape[-1]
        count = first.numel() // width if first.ndim > 2 else len(first)

        def row(each: Any, n: int) -> Any:
            if not isinstance(each, torch.Tensor) or each.ndim < 2:
                return each
            flat = each.reshape(-1, each.shape[-1])
            return flat[n : n + 1].contiguous() if len(flat) == count else each

        made = [
            native(*(row(each, n) for each in args), **{k: row(v, n) for k, v in kwargs.items()})
            for n in range(count)
        ]
        if not isinstance(made[0], tuple):
            return torch.cat(made).reshape(*first.shape[:-1], -1)
        return tuple(torch.cat(each) for each in zip(*made, strict=True))

    return forward


def _own_weights(module: Any) -> bool:
    """Whether a module multiplies by itself: a router, or experts in one tensor."""
    return any(parameter.ndim >= 2 for parameter in module.parameters(recurse=False))


def _mask(torch: Any, mask: Any, request: int, query: Any, key: Any, first: int, pad: int) -> Any:
    """The mask of one request without its padding; where the batch came without any, the causal one it stands for, since
    attention takes another kernel without a mask."""
    length, seen = query.shape[2], key.shape[2]
    if mask is None:
        at = torch.arange(length, device=query.device)[:, None] + (seen - length)
        return (torch.arange(seen, device=query.device)[None] <= at)[None, None]
    of = request if mask.shape[0] > 1 else 0
    return mask[of : of + 1, :, first : first + length, pad : pad + seen].contiguous()
