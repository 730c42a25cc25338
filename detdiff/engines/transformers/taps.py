"""Taps on a torch model: forward hooks on its modules, its attention function and its cache, which undo themselves."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .sites import call_names, first_tensor, multiplies, output_tensor, replaced


class KeysShown(NamedTuple):
    """What goes with the keys and values of a call: whether they came through a cache, the mask [requests or 1, 1, rows, keys] of those that
    each row sees (None: all before it), and how many of the newest it sees at most."""

    cached: bool
    mask: Any
    window: int | None


Observe = Callable[[str, Any, Any], None]  # site, given, made
Attended = Callable[[str, Any, Any, KeysShown], None]  # attention module, keys, values
Attention = Callable[..., Any]
PAGED_EAGER = "paged|eager"
"""What continuous batching takes in the place of eager."""


@contextlib.contextmanager
def tapped(
    torch: Any,
    model: Any,
    observe: Observe,
    attended: Attended,
    before: Callable[[], None] | None = None,
    written: Callable[[str, Any, Any], None] | None = None,
    caches: Sequence[type] = (),
) -> Iterator[None]:
    """Call ``observe`` for each module and attention call when it ends, ``attended`` with the keys and values that attention
    reads, ``written`` with new entries on their way into the cache, and ``before`` when a forward begins. ``caches`` are classes of
    caches besides transformers' ``Cache``."""
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
            query, key, value, mask = (
                args[n] if len(args) > n else kwargs.get(word)
                for n, word in enumerate(("query", "key", "value", "attention_mask"))
            )
            name = names.get(id(module))
            made = output_tensor(torch, output)
            if (
                name is not None
                and made is not None
                and all(isinstance(each, torch.Tensor) and each.ndim == 4 for each in (query, key, value))
            ):
                window = kwargs.get("sliding_window")
                attended(name, key, value, KeysShown(name in cached, mask, window))
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

        for kind in (Cache, *caches):
            stack.enter_context(replaced(kind, "update", update(vars(kind)["update"])))
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
                names = implementations(model)
                for name in (*names, *([PAGED_EAGER] if "eager" in names else [])):
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
def pinned(torch: Any, model: Any) -> Iterator[None]:
    """Every linear layer, expert and activation computes row by row, and attention row by row over the keys that it sees, whatever the
    batch: one kernel path for every number of rows."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if multiplies(torch, module):
                stack.enter_context(replaced(module, "forward", row_by_row(torch, module)))
        for _, module in (*experts(torch, model), *activations(torch, model)):
            stack.enter_context(replaced(module, "forward", row_by_row(torch, module)))
        stack.enter_context(attention_as(model, lambda native: by_keys(torch, native)))
        yield


def activations(torch: Any, model: Any) -> Iterator[tuple[str, Any]]:
    """Activations by name: torch takes another exponential for the last items of a tensor than for whole vectors of them."""
    for name, module in model.named_modules():
        held = (*module.children(), *module.parameters(), *module.buffers())
        home = type(module).__module__
        if not held and home.startswith(("torch.nn.modules.activation", "transformers.activations")):
            yield name, module


def by_keys(torch: Any, native: Attention) -> Attention:
    """Attention in a call for each row, over the keys that it sees."""

    def bounds(mask: Any) -> list[list[tuple[int, int, bool]]]:
        """For each slot and row of a mask: the first key, the one after the last, and whether all between are seen alike."""
        held = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        whole = mask.dtype == torch.bool or bool((mask[held] == 0).all())
        seen = held[:, 0].to(torch.int8)
        first, count = seen.argmax(dim=-1), seen.sum(dim=-1)
        last_seen = seen.shape[-1] - seen.flip(-1).argmax(dim=-1)
        rows = zip(first.tolist(), last_seen.tolist(), count.tolist(), strict=True)
        return [
            [(f, e if c else f, whole and e - f == c) for f, e, c in zip(*slot, strict=True)] for slot in rows
        ]

    def call(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **kwargs: Any) -> Any:
        slots, rows, keys = query.shape[0], query.shape[2], key.shape[2]
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if mask is not None and (mask.ndim != 4 or mask.shape[1] > 1):
            return native(module, query, key, value, mask, **kwargs)
        told = None if mask is None else bounds(mask)
        outputs = []
        for slot in range(slots):
            mine = None if told is None else told[slot if len(told) > 1 else 0]
            done = []
            for row in range(rows):
                first, last, whole = 0, keys - rows + row + 1 if causal else keys, True
                if mine is not None:
                    first, last, whole = mine[row if len(mine) > 1 else 0]
                q = query[slot : slot + 1, :, row : row + 1].contiguous()
                if last == first:
                    # Padding: nobody reads it.
                    done.append(query.new_zeros((1, 1, query.shape[1], value.shape[3])))
                    continue
                k, v = (each[slot : slot + 1, :, first:last].contiguous() for each in (key, value))
                own = None
                if not whole:
                    own = mask[min(slot, len(mask) - 1)][None, :, row : row + 1, first:last].contiguous()
                done.append(native(module, q, k, v, own, **kwargs)[0])
            outputs.append(done[0] if rows == 1 else torch.cat(done, dim=1))
        return (outputs[0] if slots == 1 else torch.cat(outputs)), None

    return call


def experts(torch: Any, model: Any) -> Iterator[tuple[str, Any]]:
    """Routers, and experts that hold their weights in one tensor, by name."""
    for name, module in model.named_modules():
        named = re.search(r"Experts|Router|Gate$", type(module).__name__)
        if named and not multiplies(torch, module) and _own_weights(module):
            yield name, module


def row_by_row(torch: Any, module: Any) -> Callable[..., Any]:
    """A module's forward row by row, whatever of the arguments has a row for each of the first."""
    native = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        first = next(each for each in given if isinstance(each, torch.Tensor))
        width = first.shape[-1]
        count = first.numel() // width

        def row(each: Any, n: int) -> Any:
            if not isinstance(each, torch.Tensor) or each.ndim < 2:
                return each
            flat = each.reshape(-1, each.shape[-1])
            return flat[n : n + 1].contiguous() if len(flat) == count else each

        made = [
            native(*(row(each, n) for each in args), **{k: row(v, n) for k, v in kwargs.items()})
            for n in range(count)
        ]
        if not made:
            return native(*args, **kwargs)
        if not isinstance(made[0], tuple):
            return torch.cat(made).reshape(*first.shape[:-1], -1)
        return tuple(torch.cat(each) for each in zip(*made, strict=True))

    return forward


def _own_weights(module: Any) -> bool:
    """Whether a module multiplies by itself: a router, or experts in one tensor."""
    return any(parameter.ndim >= 2 for parameter in module.parameters(recurse=False))
