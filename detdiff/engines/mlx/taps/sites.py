"""A model's sites: found by a small forward with every tap on, whose order and shapes say what there is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList, make_prompt_cache
from numpy.typing import NDArray

from detdiff.engines import base
from detdiff.errors import LayoutError
from detdiff.trace import Site

Arrays = list[tuple[str, mx.array]]

LINEAR_CLASSES = (
    "Linear",
    "QuantizedLinear",
    "QQLinear",
    "BitLinear",
    "AllToShardedLinear",
    "ShardedToAllLinear",
    "QuantizedAllToShardedLinear",
    "QuantizedShardedToAllLinear",
)
EMBEDDING_CLASSES = ("Embedding", "QuantizedEmbedding")
SWITCH_CLASSES = ("SwitchLinear", "QuantizedSwitchLinear")


ROLES = base.llama_roles("")
ROLES["rope_q"].insert(0, ("layers.*.self_attn.rope.q", "out"))
ROLES["rope_k"].insert(0, ("layers.*.self_attn.rope.k", "out"))
ROLES["head"].append(("embed_tokens.as_linear", "out"))
"""Where the values of each role are, in models that are built as llama is."""


def module_kind(module: Module) -> str | None:
    """The site kind of a leaf module by its class, or None for one that is not tapped."""
    names = [cls.__name__ for cls in type(module).__mro__]
    if any(name in SWITCH_CLASSES for name in names):
        return "switch"
    if any(name in EMBEDDING_CLASSES for name in names):
        return "embedding"
    if any(name in LINEAR_CLASSES for name in names):
        return "linear"
    if module.children():
        return None  # a block whose name says rope or norm is still a block
    if any("rope" in name.lower() or "rotary" in name.lower() for name in names):
        return "rope"
    if any("Norm" in name for name in names):
        return "norm"
    return None


def site_name(path: str) -> str:
    """A module path as a site name: what wraps the language model is dropped from the front."""
    for prefix in ("language_model.model.", "language_model.", "model.", "backbone.", "transformer."):
        if path.startswith(prefix):
            return path[len(prefix) :]
    return path


def layer_of(name: str) -> int | None:
    """The layer number in a site name, or None."""
    found = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


def walk(model: Module) -> Iterator[tuple[str, Module, str]]:
    """(site name, module, kind) of every module worth a tap; composites have the kind "composite"."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        if module is model or not path or id(module) in seen or not callable(module):
            continue
        seen.add(id(module))
        kind = module_kind(module)
        name = site_name(path)
        if kind is None:
            if not module.children() or layer_of(name) is None:
                continue
            kind = "composite"
        yield name, module, kind


@dataclass
class DiscoveredCall:
    """One completed call seen during discovery."""

    key: str
    kind: str
    inputs: Arrays
    outputs: Arrays
    parent: str | None


@dataclass(frozen=True)
class RowPart:
    """What a process holds of a row of the whole model: ``count`` items from ``start`` on at ``axis`` of the row's ``shape``.

    ``biased``: its digest carries what dtype and length add, which the other processes' leave out.
    """

    shape: tuple[int, ...]
    axis: int
    start: int
    count: int
    biased: bool

    @property
    def places(self) -> tuple[slice, ...]:
        """Where the part lies in an array of the row's shape."""
        return (*([slice(None)] * self.axis), slice(self.start, self.start + self.count))

    def words(self, itemsize: int) -> NDArray[np.int64]:
        """The places of the part's 32-bit words among those of the whole row. Raises ValueError where a word is of two parts."""
        items = np.arange(int(np.prod(self.shape))).reshape(self.shape)[self.places].reshape(-1)
        if itemsize >= 4:
            each = itemsize // 4
            return (items[:, None] * each + np.arange(each)).reshape(-1)
        each = 4 // itemsize
        if len(items) % each or (items.reshape(-1, each) != items[::each, None] + np.arange(each)).any():
            raise ValueError(self)
        if (items[::each] % each).any():
            raise ValueError(self)
        return items[::each] // each


@dataclass(frozen=True)
class SiteMap:
    """A model's sites in execution order, and how taps address them.

    ``index`` maps a tap's key to its site; ``ports`` maps (key, port name) to a port index, and ``axes`` that
    index to the row axis of its array; ``bytes_per_row`` is what one row of all ports takes; ``head`` is the key of
    the output projection, ``norm`` that of the norm before it, ``blocks`` those of the layers; ``cache_layers`` maps
    the key of a cache write to its layer; ``unrecorded`` has the class of the cache of each layer whose entries cannot
    be recorded. ``unkept`` has the side, K or V, of a
    cache write that the model itself replaces after it. ``first_site`` and ``first_port`` are their numbers in a trace of several
    models. ``shapes`` has the shape of each port's array when the sites were found. Where the model is a part of one that several
    processes run, ``parts`` says which part of a whole row a port holds, and ``head_numbers`` the whole model's numbers of the heads
    (K, then V) of a cache by how many of them this process has.
    """

    sites: tuple[Site, ...]
    index: dict[str, int]
    ports: dict[tuple[str, str], int]
    axes: dict[int, int]
    bytes_per_row: int
    head: str | None
    cache_layers: dict[str, int] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    norm: str | None = None
    unrecorded: dict[int, str] = field(default_factory=dict)
    unkept: dict[str, str] = field(default_factory=dict)
    first_site: int = 0
    first_port: int = 0
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[int, RowPart] = field(default_factory=dict)
    head_numbers: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def after(self, other: SiteMap, prefix: str) -> SiteMap:
        """The map of a second model whose sites follow those of ``other`` in a trace, its sites' names after ``prefix``.

        ``first_site`` and ``first_port`` say where they begin; everything else counts from 0 as before.
        """
        sites = tuple(
            replace(
                site,
                name=prefix + site.name,
                parent=None if site.parent is None else prefix + site.parent,
            )
            for site in self.sites
        )
        first = other.first_port + len(other.ports)
        return replace(self, sites=sites, first_site=other.first_site + len(other.sites), first_port=first)


class Discovery:
    """A sink for taps that only remembers what was called, in order of completion, and what became of the caches."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self.calls: list[DiscoveredCall] = []
        self._caches = [(n, part) for n, cache in enumerate(caches) for part in _parts_of(cache)]
        self._given: dict[int, str] = {}
        self._recorded: set[int] = set()
        self._written: list[tuple[str, Any, Any, Any]] = []

    def given(self, key: str, arguments: Sequence[Any]) -> None:
        """The module ``key`` is done, which had these arguments: the innermost one is a cache's."""
        mine = {id(part) for argument in arguments for part in _parts_of(argument)}
        for _, cache in self._caches:
            if id(cache) in mine:
                self._given.setdefault(id(cache), key)

    def recorded(self, cache: Any, key: str = "") -> None:
        """What this cache holds is recorded, here at the write ``key``."""
        self._recorded.add(id(cache))
        if key:
            self._written.append((key, cache, getattr(cache, "keys", None), getattr(cache, "values", None)))

    def unkept(self) -> dict[str, str]:
        """The side of each write that the model replaced by something else after it, or gives no width, as one has no use for its values."""
        found = {}
        for key, cache, keys, values in self._written:
            for side, then, now in (
                ("K", keys, getattr(cache, "keys", None)),
                ("V", values, getattr(cache, "values", None)),
            ):
                if not (isinstance(then, mx.array) and isinstance(now, mx.array)):
                    continue
                if not then.size or (now is not then and not bool(mx.array_equal(now, then))):
                    found[key] = side
        return found

    def unrecorded(self) -> Iterator[tuple[int, str | None, str]]:
        """(layer, key of the module that was given the cache, class) of each cache in use that is not recorded."""
        for n, cache in self._caches:
            if cache is None or id(cache) in self._recorded or _untouched(cache):
                continue
            key = self._given.get(id(cache))
            layer = None if key is None else layer_of(key)
            yield n if layer is None else layer, key, type(cache).__name__

    def site(self, key: str, kind: str, inputs: Arrays, outputs: Arrays, parent: str | None) -> None:
        self.calls.append(DiscoveredCall(key, kind, inputs, outputs, parent))


def _parts_of(cache: Any) -> tuple[Any, ...]:
    """A cache, or the caches that it is a list of."""
    return tuple(cache.caches) if isinstance(cache, CacheList) else (cache,)


def _untouched(cache: Any) -> bool:
    """Whether a cache of mlx-lm's own holds nothing, as where a layer has no use for it."""
    ours = type(cache).__module__ == CacheList.__module__
    return ours and bool(cache.empty())


def probe_length(model: Module) -> int:
    """A row count that no weight and no configured size of the model has, so that the row axis is unmistakable."""
    taken: set[int] = set()

    def collect(value: Any) -> None:
        if isinstance(value, bool):
            return
        if isinstance(value, int):
            taken.add(value)
        elif isinstance(value, mx.array):
            taken.update(value.shape)
        elif isinstance(value, dict):
            for item in value.values():
                collect(item)
        elif isinstance(value, list | tuple):
            for item in value:
                collect(item)

    collect(vars(getattr(model, "args", None) or object()) if hasattr(model, "args") else {})
    for module in model.modules():
        collect({k: v for k, v in vars(module).items() if not k.startswith("__")})
        collect([v for v in module.values() if isinstance(v, mx.array)])
    # Odd, because sizes are products of small numbers and a derived one is rarely odd.
    return next(n for n in count(5, 2) if n not in taken)


def discover(model: Module, install: Callable[[Any], Any]) -> SiteMap:
    """Run one short forward with taps on and read off the sites.

    ``install(sink)`` is a context manager that puts the taps on. Raises LayoutError when the model's output
    is not logits of shape [1, rows, vocabulary].
    """
    length = probe_length(model)
    caches = make_prompt_cache(model)
    sink = Discovery(caches)
    tokens = mx.zeros((1, length), mx.int32)
    with install(sink):
        logits = model(tokens, cache=caches)
    if not isinstance(logits, mx.array) or logits.ndim != 3 or logits.shape[1] != length:
        raise LayoutError(
            f"The model {type(model).__module__}.{type(model).__name__} returned "
            f"{getattr(logits, 'shape', type(logits).__name__)} for {length} tokens; expected logits of shape "
            f"[1, {length}, vocabulary]. Only language models in mlx-lm's form can be traced."
        )
    unkept = sink.unkept()
    for call in sink.calls:
        side = unkept.get(call.key, "").lower()
        call.inputs = [(name, array) for name, array in call.inputs if name != side or not side]
        call.outputs = [(name, array) for name, array in call.outputs if name != side or not side]
    return replace(_site_map(sink.calls, logits, length, tuple(sink.unrecorded())), unkept=unkept)


def _row_axis(array: mx.array, length: int) -> int | None:
    # What does not begin with the batch, such as gemma3n's stack of its layers' streams, has no rows at that axis.
    if array.ndim < 2 or array.shape[0] != 1:
        return None
    return next((axis for axis in (1, 2) if array.ndim > axis and array.shape[axis] == length), None)


def _site_map(
    calls: list[DiscoveredCall],
    logits: mx.array,
    length: int,
    unrecorded: tuple[tuple[int, str | None, str], ...],
) -> SiteMap:
    remembering = {key for _, key, _ in unrecorded}
    unknown = {layer: name for layer, _, name in unrecorded}
    parents = {call.key: call.parent for call in calls}
    calls = [call for call in calls if _keep_ports(call, length)]
    head = next(
        (
            call.key
            for call in reversed(calls)
            if call.kind in ("linear", "embedding", "as_linear")
            and call.outputs[0][1].shape[-1] == logits.shape[-1]
            and layer_of(call.key) is None
        ),
        None,
    )
    names = _names(calls, head)
    kept = {call.key for call in calls}
    attention_parents = {call.parent for call in calls if call.kind in ("attention", "cache_write")}
    recurrent_parents = {call.parent for call in calls if call.kind == "state"}
    sites: list[Site] = []
    index: dict[str, int] = {}
    ports: dict[tuple[str, str], int] = {}
    axes: dict[int, int] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    n_bytes = 0
    n_ports = 0
    for call in calls:
        kind = call.kind
        if kind == "composite":
            if re.fullmatch(r"(?:.*\.)?(?:layers|h|blocks)\.\d+(?:#\d+)?", call.key):
                kind = "block"
            elif call.key in remembering:
                kind = "stateful"
            elif call.key in recurrent_parents:
                kind = "recurrent"
            elif call.key in attention_parents:
                kind = "attn_block"
            else:
                kind = "mlp"
        if call.key == head:
            kind = "head"
        elif kind == "as_linear":
            kind = "linear"
        parent = call.parent
        while parent is not None and parent not in kept:
            parent = parents.get(parent)
        inputs, outputs = call.inputs, call.outputs
        layer = layer_of(call.key)
        extra_in = ("kv",) if kind == "attention" and layer not in unknown else ()
        in_names: tuple[str, ...]
        out_names: tuple[str, ...]
        if kind == "cache_read":
            in_names, out_names = ("written",), ("read",)
        elif kind == "cache_write":
            heads = [(side, array.shape[1]) for side, array in outputs]
            in_names = tuple(n for n, _ in inputs)
            out_names = tuple(f"{side.upper()}.{h}" for side, n in heads for h in range(n))
            n_bytes += sum(a.nbytes // length for _, a in outputs)
        else:
            in_names = tuple(n for n, _ in inputs) + extra_in
            out_names = tuple(n for n, _ in outputs)
        index[call.key] = len(sites)
        sites.append(Site(names[call.key], kind, layer, in_names, out_names, names.get(parent or "")))
        for name in (*in_names, *out_names):
            ports[call.key, name] = n_ports
            n_ports += 1
        for name, array in (*inputs, *outputs):
            port = ports.get((call.key, name))
            if port is not None:
                shapes[port] = tuple(array.shape)
            axis = _row_axis(array, length)
            if port is None or axis is None:
                continue
            axes[port] = axis
            n_bytes += array.nbytes // length
    index["logits"] = len(sites)
    sites.append(Site("logits", "logits", None, ("in",), ("out",), None))
    for name in ("in", "out"):
        ports["logits", name] = n_ports
        axes[n_ports] = 1
        n_ports += 1
    blocks = tuple(key for key, i in index.items() if sites[i].kind == "block")
    norms = [key for key, i in index.items() if sites[i].kind == "norm" and sites[i].layer is None]
    return SiteMap(
        tuple(sites),
        index,
        ports,
        axes,
        n_bytes + 2 * logits.nbytes // length,
        head,
        {key: sites[i].layer or 0 for key, i in index.items() if sites[i].kind == "cache_write"},
        blocks,
        norms[-1] if norms else None,
        unknown,
        shapes=shapes,
    )


def _keep_ports(call: DiscoveredCall, length: int) -> bool:
    """Drop arrays without a row axis; a call that keeps no output is not a site."""
    if call.kind in ("cache_read", "cache_write", "state"):
        return True
    call.inputs = [(n, a) for n, a in call.inputs if _row_axis(a, length) is not None]
    call.outputs = [(n, a) for n, a in call.outputs if _row_axis(a, length) is not None]
    return bool(call.inputs and call.outputs)


def _names(calls: list[DiscoveredCall], head: str | None) -> dict[str, str]:
    """Site names by key: a rope is called what it rotates, later calls of one module get a number."""
    queries = {id(a) for c in calls if c.kind == "attention" for _, a in c.inputs}
    keys = {id(a) for c in calls if c.kind == "cache_write" for n, a in c.inputs if n == "k"}
    names: dict[str, str] = {}
    for call in calls:
        base, _, number = call.key.partition("#")
        name = f"{base}.{number}" if number else base
        if call.kind == "rope":
            out = id(call.outputs[0][1])
            name = f"{base}.q" if out in queries else f"{base}.k" if out in keys else name
        if name in names.values():
            name = f"{base}.{number or 1}x"
        names[call.key] = name
    return names
