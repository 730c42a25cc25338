"""Pinning an mlx-lm model's kernels: its linear, expert and attention calls in groups, tried, timed and run under a kernel plan."""

from __future__ import annotations

import copy
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
from mlx.utils import tree_map
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from detdiff.engines.mlx.taps.kernel_plan import NATIVE, CallSite, name_of, weight_of
from detdiff.engines.mlx.taps.operations import ATTENTION_NAMES, Operations
from detdiff.engines.mlx.taps.tapping import Untouched, tapped, tapped_calls
from detdiff.errors import EngineRefuses
from detdiff.invariance.arrangements import (
    EXPERT_OUTPUTS,
    Attend,
    AttentionHeads,
    differing_row,
    ring_differs,
)
from detdiff.invariance.pinning import KEYS, Pins, SiteGroup, paired_seconds
from detdiff.invariance.policies import RowPolicy
from detdiff.probe.operation import ONE_AFTER_THE_OTHER, ProbeTarget, Weights
from detdiff.scenario import KernelPlan, PathRule
from detdiff_kernels.rounding import Float32

from .model import LoadedModel
from .probe_operations import AS_LINEAR, ShapeSites, shapes_of

_WORK = 1 << 30  # products of one call in a probe at most
_ATTENTION = "attention"
_CONTEXT = 32  # positions that stand in the caches before a step is timed


@dataclass(frozen=True)
class _SeenAttention:
    """How a model calls attention: the function, its heads, and whether keys lie in a ring."""

    native: Callable[..., Any]
    heads: AttentionHeads
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
            heads = AttentionHeads(q.shape[1], k.shape[1], q.shape[3], v.shape[3])
            self.attended.append(
                _SeenAttention(native, heads, q.dtype, float(given["scale"]), given.get("sinks"), ring)
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
                f"{one.heads.queries} heads of {one.heads.width} over {one.heads.keys}, {name_of(one.dtype)}{', in a ring' if one.ring else ''}"
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
        operations = self._operations(path)
        for one in self._attention[group]:
            found = differing_row(_attend(operations, one), one.heads, seed)
            if one.ring and not found:
                found = ring_differs(partial(_in_ring, operations, one), one.heads, seed)
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
        prompt = mx.array(draw.integers(0, vocabulary, (1, _CONTEXT)))
        filled = make_prompt_cache(model)
        mx.eval(model(prompt, cache=filled))
        tokens = mx.repeat(prompt[:, :1], batch, axis=0)

        def filled_slots() -> list[Any]:
            """The same prompt in every slot, which no batch of prompts has to be computed for."""
            caches: list[Any] = copy.deepcopy(filled)
            for each in caches:
                each.state = tree_map(
                    lambda held: mx.repeat(held, batch, axis=0) if isinstance(held, mx.array) else held,
                    each.state,
                )
            mx.eval([each.state for each in caches])
            return caches

        def step(cache: Any) -> None:
            mx.eval(model(tokens, cache=cache))

        first, second = (partial(step, filled_slots()) for _ in range(2))
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
        found.setdefault((one.heads, one.dtype, one.scale, one.sinks is None, one.ring), one)
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


def _attend(operations: Operations, seen: _SeenAttention, cache: Any = None) -> Attend:
    place = CallSite(_ATTENTION, _ATTENTION, "any")
    more = {} if seen.sinks is None else {"sinks": seen.sinks}

    def attend(q: Float32, k: Float32, v: Float32, shown: Any) -> Any:
        mask: Any = None
        if shown is not None:
            # As mlx-lm says it: the last row of a slot without padding sees every key.
            whole = bool(shown[:, :, -1].all())
            mask = mx.array(shown) if not whole else "causal" if q.shape[2] > 1 else None
        given = (mx.array(each).astype(seen.dtype) for each in (q, k, v))
        settings = {"cache": cache, "scale": seen.scale, "mask": mask, **more}
        y: mx.array = operations.attention.run(place, seen.native, tuple(given), settings)[0]
        return _bits(y.transpose(0, 2, 1, 3))

    return attend


def _in_ring(operations: Operations, seen: _SeenAttention, keys: int) -> Attend:
    return _attend(operations, seen, RotatingKVCache(keys))


def _weights(held: Float32) -> Weights:
    return Weights(len(held), lambda first, last: held[first:last].astype(np.float64))


def _experts_differ(
    operations: Operations, module: Module, dtype: mx.Dtype, native: Callable[..., Any], seed: int
) -> str:
    """Drawn rows and their experts, together (in row order and sorted by expert) against each row alone. The products of every other row
    with weights of its first expert cancel, as `sampled` has it."""
    draw = np.random.default_rng([seed, 3])
    place = CallSite("switch", "switch", "any")
    count = int(module["weight"].shape[0])
    width = int(module["weight"].shape[-1])
    if "scales" in module:
        width = width * 32 // int(module.bits)
    each = min(2, count)
    weights = [_weights(weight_of(module, expert).floats()) for expert in range(min(count, 2))]
    for rows in (
        1,
        2,
        3,
        5,
        8,
        13,
        16,
        *[40] * -(-EXPERT_OUTPUTS // (40 * each * module["weight"].shape[1])),
    ):
        drawn = draw.standard_normal((rows, width))
        picked = np.stack([draw.permutation(count)[:each] for _ in range(rows)]).astype(np.uint32)
        for row in range(1, rows, 2):
            first = row // 2 % len(weights)
            picked[row] = (picked[row] - picked[row, 0] + first) % count
            drawn[row] = weights[first].cancelling(drawn[row], row)
        x = mx.array(drawn.astype(np.float32).reshape(1, rows, 1, 1, width)).astype(dtype)
        chosen = mx.array(picked[None])

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
