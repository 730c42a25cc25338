"""Pinning an mlx-lm model's kernels: its linear, expert and attention calls in groups, tried, timed and run under a kernel plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from detdiff.engines.mlx.taps.kernel_plan import NATIVE, CallSite, name_of
from detdiff.engines.mlx.taps.operations import ATTENTION_NAMES, Operations
from detdiff.engines.mlx.taps.tapping import Untouched, tapped, tapped_calls
from detdiff.errors import EngineRefuses
from detdiff.invariance.pinning import KEYS, Pins, SiteGroup, paired_seconds
from detdiff.invariance.policies import RowPolicy
from detdiff.probe.operation import ONE_AFTER_THE_OTHER, ProbeTarget
from detdiff.scenario import KernelPlan, PathRule

from .model import LoadedModel
from .probe_operations import AS_LINEAR, ShapeSites, shapes_of

_WORK = 1 << 30  # products of one call in a probe at most
_ATTENTION = "attention"
_CONTEXT = 32  # positions that stand in the caches before a step is timed


@dataclass(frozen=True)
class _SeenAttention:
    """How a model calls attention: the function, its heads, and whether keys lie in a ring."""

    native: Callable[..., Any]
    queries: int
    keys: int
    width: int
    values: int
    dtype: mx.Dtype
    scale: float
    sinks: mx.array | None
    ring: bool


class _SeenCalls(Untouched):
    """Taps that only see how experts and attention are called."""

    def __init__(self) -> None:
        self.switches: dict[str, tuple[Module, mx.Dtype, Callable[..., Any]]] = {}
        self.attended: list[_SeenAttention] = []

    def leaf(
        self, name: str, kind: str, native: Callable[..., Any], module: Module, args: Any, kw: Any
    ) -> Any:
        if kind == "switch":
            self.switches.setdefault(name, (module, args[0].dtype, native))
        return native(*args, **kw)

    def attention(self, native: Callable[..., Any], args: Any, kw: Any) -> Any:
        given = {**dict(zip(ATTENTION_NAMES, args, strict=False)), **kw}
        q, k, v = (given[name] for name in ATTENTION_NAMES[:3])
        if all(isinstance(each, mx.array) and each.ndim == 4 for each in (q, k, v)):
            ring = "Rotating" in type(given.get("cache")).__name__
            heads = (q.shape[1], k.shape[1], q.shape[3], v.shape[3])
            self.attended.append(
                _SeenAttention(native, *heads, q.dtype, float(given["scale"]), given.get("sinks"), ring)
            )
        return native(*args, **kw)


class MlxPinning:
    """See `detdiff.invariance.pinning.Pinnable`; under a dispatch ``profile`` its reference kernels are what is pinned."""

    def __init__(self, loaded: LoadedModel, kernels: KernelPlan) -> None:
        """Raises EngineRefuses for a kernel plan with rules of its own."""
        if kernels.rules or kernels.split_rows is not None:
            raise EngineRefuses(
                "Kernels are to be pinned, and the kernel plan has rules or split_rows already, which pins take the place of; "
                "expected a dispatch profile or native alone. Leave the rules out."
            )
        self._loaded, self._profile = loaded, kernels.profile
        on = kernels.profile or NATIVE
        self._shapes: dict[SiteGroup, list[ShapeSites]] = {}
        by_shape: dict[tuple[str, str], list[ShapeSites]] = {}
        for packed in shapes_of(loaded, on):
            by_shape.setdefault((packed.op, str(packed.shape)), []).append(packed)
        for (op, shape), found in by_shape.items():
            self._shapes[SiteGroup(op, shape, tuple(site for each in found for site in each.sites))] = found
        seen = _SeenCalls()
        with tapped(loaded.model, seen):
            mx.eval(loaded.model(mx.zeros((1, 5), mx.int32), cache=make_prompt_cache(loaded.model)))
        self._switches: dict[SiteGroup, tuple[Module, mx.Dtype, Callable[..., Any]]] = {}
        experts: dict[str, list[str]] = {}
        for name, (module, dtype, _) in seen.switches.items():
            count, n, k = module["weight"].shape
            held = f",{module.bits},{module.group_size}" if "scales" in module else ""
            experts.setdefault(f"{k},{n},{name_of(dtype)}{held}, {count} experts", []).append(name)
        for shape, names in experts.items():
            self._switches[SiteGroup("switch", shape, tuple(names))] = seen.switches[names[0]]
        self._attention: dict[SiteGroup, list[_SeenAttention]] = {}
        if seen.attended:
            shapes = dict.fromkeys(
                f"{one.queries} heads of {one.width} over {one.keys}, {name_of(one.dtype)}{', in a ring' if one.ring else ''}"
                for one in seen.attended
            )
            group = SiteGroup(_ATTENTION, " and ".join(shapes), (f"{len(seen.attended)} calls a forward",))
            self._attention[group] = _distinct(seen.attended)

    @property
    def groups(self) -> Sequence[SiteGroup]:
        return [*self._shapes, *self._switches, *self._attention]

    @property
    def notes(self) -> Sequence[str]:
        return ()

    @property
    def priced(self) -> str:
        if self._profile is None:
            return ""
        return (
            f"the kernels of {self._profile} are emulated here, and their times say nothing of the real ones"
        )

    def sizes(self, group: SiteGroup, sizes: Sequence[int]) -> Sequence[int]:
        shape = self._shapes[group][0].shape
        return [rows for rows in sizes if rows <= 8 or rows * shape.k * shape.n <= _WORK]

    def targets(self, group: SiteGroup) -> Sequence[ProbeTarget]:
        found = self._shapes[group]
        first = found[0].first
        plain = (ONE_AFTER_THE_OTHER, first.called[1])
        own = [each.first for each in found if each.first.called[0] != ONE_AFTER_THE_OTHER]
        return [replace(first, called=plain), replace(first, called=plain, layout="batch"), *own]

    def paths(self, group: SiteGroup) -> Sequence[str]:
        return (NATIVE, KEYS) if group in self._attention else (NATIVE, "tile:8", "tile:1")

    def _operations(self, path: str) -> Operations:
        rules = () if path == NATIVE else (PathRule(path=path),)
        return Operations(KernelPlan(profile=self._profile, rules=rules), self._loaded.staged)

    def first_difference(self, group: SiteGroup, path: str, seed: int) -> str:
        if group in self._switches:
            module, dtype, native = self._switches[group]
            return _experts_differ(self._operations(path), module, dtype, native, seed)
        for one in self._attention[group]:
            found = _attention_differs(self._operations(path), one, seed)
            if found:
                return found
        return ""

    def plan(self, pins: Pins) -> KernelPlan:
        rules: list[PathRule] = []
        every = {site: group for group in (*self._shapes, *self._switches) for site in group.sites}
        for group, policy in pins.items():
            if group in self._attention:
                rules += [] if policy == NATIVE else [PathRule(path=str(policy))]
                continue
            for pattern in _patterns(group, every):
                if isinstance(policy, RowPolicy):
                    rules += policy.rules(pattern)
                elif policy != NATIVE:
                    rules.append(PathRule(pattern, path=policy))
        return KernelPlan(profile=self._profile, rules=tuple(rules))

    @contextmanager
    def pinned(self, pins: Pins) -> Iterator[None]:
        plan = self.plan(pins)
        operations = Operations(plan, self._loaded.staged)
        places = {
            site: CallSite(site, group.kind, "any")
            for group in (*self._shapes, *self._switches)
            for site in group.sites
            if self._profile is not None or any(fnmatchcase(site, rule.site) for rule in plan.rules)
        }
        attention = self._profile is not None or any(rule.path == KEYS for rule in plan.rules)
        wanted = set(places) | {site.removesuffix(AS_LINEAR) for site in places}
        free = {
            site: len(policy.tiles)
            for group, policy in pins.items()
            if isinstance(policy, RowPolicy) and policy.as_it_comes and self._profile is None
            for site in group.sites
        }
        taps = _PinnedCalls(operations, places, free)
        with tapped_calls(self._loaded.model, taps, lambda name, _: name in wanted, attention=attention):
            yield

    def step_seconds(self, batch: int, rounds: int, pins: Pins) -> Sequence[tuple[float, float]]:
        model, draw = self._loaded.model, np.random.default_rng(0)
        vocabulary = int(self._loaded.identity.get("vocab_size") or 2)
        prompt = mx.array(draw.integers(0, vocabulary, (batch, _CONTEXT)))
        caches = [make_prompt_cache(model) for _ in range(2)]
        for cache in caches:
            mx.eval(model(prompt, cache=cache), [each.state for each in cache])

        def step(cache: Any) -> None:
            mx.eval(model(prompt[:, :1], cache=cache))

        first, second = (partial(step, cache) for cache in caches)
        return paired_seconds(first, second, lambda: self.pinned(pins), rounds)


class _PinnedCalls(Untouched):
    """Taps that run linear, expert and attention calls under a kernel plan; they hold nothing of a call, so that threads may share
    them."""

    def __init__(self, operations: Operations, places: dict[str, CallSite], free: dict[str, int]) -> None:
        """``free`` has by site up to how many rows a call is left as it is."""
        self._operations, self._places, self._free = operations, places, free
        self._attention = CallSite(_ATTENTION, _ATTENTION, "any")

    def leaf(
        self, name: str, kind: str, native: Callable[..., Any], module: Module, args: Any, kw: Any
    ) -> Any:
        place = self._places.get(name)
        if place is None or not args:
            return native(*args, **kw)
        free = self._free.get(name)
        if free is not None and args[0].size <= free * args[0].shape[-1]:
            return native(*args, **kw)
        if kind == "switch":
            return self._operations.switch.run(place, native, module, args, kw)[0]
        method = "as_linear" if kind == "as_linear" else "__call__"
        return self._operations.linear.run(place, native, module, args[0], method)[0]

    def attention(self, native: Callable[..., Any], args: Any, kw: Any) -> Any:
        return self._operations.attention.run(self._attention, native, args, kw)[0]


def _distinct(seen: Sequence[_SeenAttention]) -> list[_SeenAttention]:
    found: dict[tuple[Any, ...], _SeenAttention] = {}
    for one in seen:
        key = (
            one.queries,
            one.keys,
            one.width,
            one.values,
            one.dtype,
            one.scale,
            one.sinks is None,
            one.ring,
        )
        found.setdefault(key, one)
    return list(found.values())


def _patterns(group: SiteGroup, every: dict[str, SiteGroup]) -> list[str]:
    """Patterns of site names that match the group's sites and none of another group's."""
    found: dict[str, None] = {}
    for site in group.sites:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", site)
        others = any(fnmatchcase(name, pattern) for name, of in every.items() if of is not group)
        found[site if others else pattern] = None
    return list(found)


def _bits(array: mx.array) -> Any:
    whole = mx.contiguous(array)
    return np.asarray(whole.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.itemsize]))


_DRAWS = (
    # slots, columns that are queries, keys at most
    (1, 9, 9),
    (2, 5, 31),
    (3, 1, 40),
    (4, 17, 17),
    (5, 1, 13),
    (2, 33, 70),
    (2, 2, 1100),
    (1, 1, 530),
)


def _attention_differs(operations: Operations, seen: _SeenAttention, seed: int) -> str:
    """Drawn queries over drawn keys: in slots with padding on the left, several at a time, against each row alone."""
    draw = np.random.default_rng([seed, 2])
    place = CallSite(_ATTENTION, _ATTENTION, "any")

    def made(*shape: int) -> mx.array:
        return mx.array(draw.standard_normal(shape, dtype=np.float32)).astype(seen.dtype)

    def attend(q: mx.array, k: mx.array, v: mx.array, mask: Any, cache: Any = None) -> mx.array:
        more = {} if seen.sinks is None else {"sinks": seen.sinks}
        y: mx.array = operations.attention.run(
            place, seen.native, (q, k, v), {"cache": cache, "scale": seen.scale, "mask": mask, **more}
        )[0]
        return y

    for slots, rows, keys in _DRAWS:
        own = [keys, *(int(draw.integers(rows, keys + 1)) for _ in range(slots - 1))]
        q = made(slots, seen.queries, rows, seen.width)
        k, v = made(slots, seen.keys, keys, seen.width), made(slots, seen.keys, keys, seen.values)
        at, columns = np.arange(keys - rows, keys)[:, None], np.arange(keys)[None]
        mask = np.stack([(columns <= at) & (columns >= keys - length) for length in own])[:, None]
        padded = any(length < keys for length in own)
        given: Any = mx.array(mask) if padded else None if rows == 1 else "causal"
        together = _bits(attend(q, k, v, given))
        for slot, length in enumerate(own):
            for row in range(rows):
                last, first = keys - rows + row + 1, keys - length
                alone = attend(
                    q[slot : slot + 1, :, row : row + 1],
                    k[slot : slot + 1, :, first:last],
                    v[slot : slot + 1, :, first:last],
                    None,
                )
                if not np.array_equal(_bits(alone)[0, :, 0], together[slot, :, row]):
                    return (
                        f"row {row} of {rows} in slot {slot} of {slots}, over {last - first} of {keys} keys with {first} columns of "
                        "padding, is another than alone"
                    )
    return _ring_differs(attend, made, seen) if seen.ring else ""


def _ring_differs(
    attend: Callable[..., mx.array], made: Callable[..., mx.array], seen: _SeenAttention
) -> str:
    """A full window whose oldest key lies at another place, as in a ring that others have turned further."""
    from mlx_lm.models.cache import RotatingKVCache

    for keys, turned in ((12, 5), (16, 3), (64, 21), (64, 40), (200, 77), (200, 3)):
        cache = RotatingKVCache(keys)
        q = made(1, seen.queries, 1, seen.width)
        k, v = made(1, seen.keys, keys, seen.width), made(1, seen.keys, keys, seen.values)
        order = mx.array(np.roll(np.arange(keys), turned))
        straight = attend(q, k, v, None, cache)
        ring = attend(q, k[:, :, order], v[:, :, order], None, cache)
        if not np.array_equal(_bits(straight), _bits(ring)):
            return f"a row over the same {keys} keys in another order, as a ring has them, is another"
    return ""


def _experts_differ(
    operations: Operations, module: Module, dtype: mx.Dtype, native: Callable[..., Any], seed: int
) -> str:
    """Drawn rows and their experts, together (in row order and sorted by expert) against each row alone."""
    draw = np.random.default_rng([seed, 3])
    place = CallSite("switch", "switch", "any")
    count = int(module["weight"].shape[0])
    width = int(module["weight"].shape[-1])
    if "scales" in module:
        width = width * 32 // int(module.bits)
    each = min(2, count)
    for rows in (1, 2, 3, 5, 8, 13, 16, 40):
        x = mx.array(draw.standard_normal((1, rows, 1, 1, width), dtype=np.float32)).astype(dtype)
        chosen = mx.array(
            np.stack([draw.permutation(count)[:each] for _ in range(rows)])[None].astype(np.uint32)
        )

        def run(x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
            y: mx.array = operations.switch.run(
                place, native, module, (x, experts), {"sorted_indices": in_order}
            )[0]
            return y

        alone = np.stack(
            [_bits(run(x[:, n : n + 1], chosen[:, n : n + 1], False)).reshape(each, -1) for n in range(rows)]
        )
        order = mx.argsort(chosen.flatten())
        gathered = run(x.flatten(0, -3)[order // each], chosen.flatten()[order], True)[mx.argsort(order)]
        for how, y in (("in row order", run(x, chosen, False)), ("sorted by expert", gathered)):
            same = (_bits(y).reshape(rows, each, -1) == alone).all(axis=(1, 2))
            if not same.all():
                return f"row {int(np.flatnonzero(~same)[0])} of {rows}, {how}, is another than alone"
    return ""
