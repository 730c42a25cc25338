"""Pinning the kernels of a model of transformers: linear layers, experts, activations and attention, tried and run on torch's own.

Importing this imports no torch: the engine whose model it pins has done so.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from detdiff.errors import KernelsNotPinned
from detdiff.invariance.arrangements import (
    EXPERT_OUTPUTS,
    Attend,
    AttentionHeads,
    differing_row,
    paged_row_differs,
)
from detdiff.invariance.pinning import KEYS, Pins, SiteGroup, paired_seconds
from detdiff.invariance.policies import NATIVE, RowPolicy
from detdiff.probe.operation import ProbedOperation, ProbeTarget
from detdiff.scenario import KernelPlan
from detdiff_kernels.rounding import Float32

from .linear_sites import TorchLinear, is_linear
from .sites import bits, replaced
from .taps import (
    PAGED_EAGER,
    Attention,
    activations,
    attention_as,
    by_keys,
    experts,
    implementations,
    row_by_row,
)

_WORK = 1 << 30  # products of one call in a probe at most
_CONTEXT = 32  # positions that stand in the caches before a step is timed
_TOKENS = 24  # of the forward whose routes are tried
_MOST_ROWS = 1500  # of experts, routers and activations that are tried at a time


@dataclass(frozen=True, eq=False)
class _TorchCalls(TorchLinear):
    """Linear modules of one shape called with rows as ``shape_of_rows``: rows [M, K], packed [1, M, K] or batch [M, 1, K]."""

    shape_of_rows: str = "rows"

    def operation(self, seed: int) -> ProbedOperation:
        return replace(super().operation(seed), layout=self.shape_of_rows)


@dataclass(frozen=True, eq=False)
class _AttendingModule:
    """How a module calls attention: the function, its heads, its queries and what else is given."""

    module: Any
    native: Attention
    heads: AttentionHeads
    query: Any
    settings: dict[str, Any]

    @property
    def kind(self) -> tuple[Any, ...]:
        """The same for calls that are tried once."""
        plain = sorted(
            (key, value) for key, value in self.settings.items() if isinstance(value, int | float | str)
        )
        return type(self.module), self.native, self.heads, self.query.dtype, tuple(plain)


class TorchPinning:
    """See `detdiff.invariance.pinning.Pinnable`."""

    priced = ""

    def __init__(self, torch: Any, model: Any, name: str) -> None:
        self._torch, self._model, self._threads = torch, model, torch.get_num_threads()
        self._linear: dict[SiteGroup, list[tuple[str, Any]]] = {}
        shapes: dict[str, list[tuple[str, Any]]] = {}
        for site, module in model.named_modules():
            if is_linear(module):
                n, k = module.weight.shape
                kind = str(module.weight.dtype).rpartition(".")[2]
                biased = "" if module.bias is None else ", with a bias"
                shapes.setdefault(f"{k},{n},{kind}{biased}", []).append((site, module))
        for shape, found in shapes.items():
            self._linear[SiteGroup("linear", shape, tuple(site for site, _ in found))] = found
        self._name = name
        self._whole: dict[SiteGroup, list[tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {}
        self._attention: SiteGroup | None = None
        self._attended: list[_AttendingModule] = []
        self._discover()

    def _discover(self) -> None:
        """One forward, which shows how experts, activations and attention are called."""
        torch, model = self._torch, self._model
        called: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        attended: list[_AttendingModule] = []

        def seeing(native: Attention) -> Attention:
            def call(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **kwargs: Any) -> Any:
                heads = AttentionHeads(query.shape[1], key.shape[1], query.shape[3], value.shape[3])
                attended.append(_AttendingModule(module, native, heads, query, kwargs))
                return native(module, query, key, value, mask, **kwargs)

            return call

        with ExitStack() as stack:
            of_experts = list(experts(torch, model))
            # Those of an expert are tried with it.
            acting = {
                name: module
                for name, module in activations(torch, model)
                if not any(name.startswith(f"{expert}.") for expert, _ in of_experts)
            }
            for name, module in (*of_experts, *acting.items()):

                def hook(module: Any, args: Any, kwargs: Any, name: str = name) -> None:
                    called.setdefault(name, (module, args, kwargs))

                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            stack.enter_context(attention_as(model, seeing))
            stack.enter_context(torch.no_grad())
            vocabulary = int(model.config.get_text_config().vocab_size)
            ids = torch.arange(_TOKENS)[None] * 7 % vocabulary
            model(input_ids=ids.to(model.device))
        by_class: dict[tuple[str, str], list[str]] = {}
        for name, (module, args, _) in called.items():
            shape = type(module).__name__
            if name in acting:
                by_class.setdefault(("activation", f"{shape} of {args[0].shape[-1]}"), []).append(name)
            else:
                by_class.setdefault(("switch", shape), []).append(name)
        for (kind, shape), names in by_class.items():
            self._whole[SiteGroup(kind, shape, tuple(names))] = [called[name] for name in names]
        if attended:
            shapes = dict.fromkeys(
                f"{each.heads.queries} heads of {each.heads.width} over {each.heads.keys}, {str(each.query.dtype).rpartition('.')[2]}"
                for each in attended
            )
            shape = f"{' and '.join(shapes)}, {' and '.join(implementations(model))}"
            self._attention = SiteGroup("attention", shape, (f"{len(attended)} calls a forward",))
            self._attended = list({each.kind: each for each in attended}.values())

    @property
    def groups(self) -> Sequence[SiteGroup]:
        own = [] if self._attention is None else [self._attention]
        return [*self._linear, *self._whole, *own]

    @property
    def notes(self) -> Sequence[str]:
        return (f"torch with {self._threads} threads: with another number of threads a forward is refused",)

    def sizes(self, group: SiteGroup, sizes: Sequence[int]) -> Sequence[int]:
        n, k = self._linear[group][0][1].weight.shape
        return [rows for rows in sizes if rows <= 8 or rows * k * n <= _WORK]

    def targets(self, group: SiteGroup) -> Sequence[ProbeTarget]:
        module = self._linear[group][0][1]
        return [
            _TorchCalls(self._name, module, group.sites, shape_of_rows=layout)
            for layout in ("rows", "packed", "batch")
        ]

    def paths(self, group: SiteGroup) -> Sequence[str]:
        return (NATIVE, KEYS) if group is self._attention else (NATIVE, "rows")

    def first_difference(self, group: SiteGroup, path: str, seed: int) -> str:
        with self._torch.no_grad():
            if group is self._attention:
                return next(
                    filter(None, (self._attention_differs(path, seed, each) for each in self._attended)), ""
                )
            # Those of a group are computed alike: each seed tries another one.
            alike = self._whole[group]
            return self._rows_differ(path, seed, *alike[seed % len(alike)])

    def _rows_differ(
        self, path: str, seed: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        """Drawn rows, of experts routed as those of a forward were, in calls of several sizes against each of them alone."""
        torch, draw = self._torch, np.random.default_rng([seed, 3])
        first = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        with_outputs = _tensors(torch, module(*args, **kwargs))[0].numel() // _TOKENS
        native = path == NATIVE
        # Row by row, what is tried is that a row repeats.
        count = min(_MOST_ROWS, -(-EXPERT_OUTPUTS // with_outputs)) if native else _TOKENS
        routed = torch.from_numpy(draw.integers(0, _TOKENS, count)).to(first.device)
        x = torch.from_numpy(draw.standard_normal((count, first.shape[-1]), dtype=np.float32)).to(
            first.device
        )

        def drawn(each: Any) -> Any:
            return (x * first.float().std()).to(first.dtype) if each is first else _rows(torch, each, routed)

        rows, more = [drawn(each) for each in args], {key: drawn(each) for key, each in kwargs.items()}
        alone = _tensors(torch, row_by_row(torch, module)(*rows, **more))
        run = module.forward if native else row_by_row(torch, module)
        for size in (2, 3, 5, 8, 13, 40, count) if native else (count,):
            for at in range(0, count, size):
                some = slice(at, min(count, at + size))
                part = [_part(torch, each, some, count) for each in rows]
                named = {key: _part(torch, each, some, count) for key, each in more.items()}
                for made, own in zip(_tensors(torch, run(*part, **named)), alone, strict=True):
                    one, other = (bits(torch, each.reshape(len(own[some]), -1)) for each in (made, own[some]))
                    if not torch.equal(one, other):
                        row = (one == other).all(dim=1).tolist().index(False)
                        return f"row {row} of {len(one)} is another than alone"
        return ""

    def _attention_differs(self, path: str, seed: int, seen: _AttendingModule) -> str:
        """In slots with padding, and in the pages of continuous batching, which has another function in the place of eager."""
        outside = self._attend(seen, path)
        found = differing_row(outside, seen.heads, seed)
        if found or implementations(self._model) not in (["eager"], ["sdpa"]):
            return found
        return paged_row_differs(self._attend(seen, path, in_pages=True), outside, seen.heads, seed)

    def _attend(self, seen: _AttendingModule, path: str, in_pages: bool = False) -> Attend:
        torch, query, settings, native = self._torch, seen.query, seen.settings, seen.native
        eager = implementations(self._model) == ["eager"]
        if in_pages:
            settings = {**settings, "is_causal": False}
            if eager:
                native = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS[PAGED_EAGER]
        call = native if path == NATIVE else by_keys(torch, native)

        def attend(q: Float32, k: Float32, v: Float32, shown: Any) -> Any:
            mask = None
            if shown is not None and (in_pages or not shown[:, :, -1].all() or (eager and q.shape[2] > 1)):
                mask = torch.from_numpy(shown).to(query.device)
                if eager or in_pages:
                    mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
            given = (torch.from_numpy(each).contiguous().to(query.device, query.dtype) for each in (q, k, v))
            return bits(torch, call(seen.module, *given, mask, **settings)[0]).cpu().numpy()

        return attend

    def plan(self, pins: Pins) -> KernelPlan | None:
        return None

    @contextmanager
    def pinned(self, pins: Pins) -> Iterator[None]:
        torch, model = self._torch, self._model

        def same_threads(module: Any, args: Any) -> None:
            found = torch.get_num_threads()
            if found != self._threads:
                raise KernelsNotPinned(
                    f"torch computes with {found} threads now, and its kernels were tried with {self._threads}; with another number of threads "
                    "they may sum otherwise. Set the number of threads before the model is made invariant."
                )

        with ExitStack() as stack:
            stack.callback(model.register_forward_pre_hook(same_threads).remove)
            for group, policy in pins.items():
                if group in self._linear and isinstance(policy, RowPolicy):
                    for _, module in self._linear[group]:
                        stack.enter_context(replaced(module, "forward", _tiled(torch, module, policy)))
                elif group in self._whole and policy != NATIVE:
                    for module, _, _ in self._whole[group]:
                        stack.enter_context(replaced(module, "forward", row_by_row(torch, module)))
                elif policy == KEYS:
                    stack.enter_context(attention_as(model, lambda native: by_keys(torch, native)))
            yield

    def step_seconds(self, batch: int, rounds: int, pins: Pins) -> Sequence[tuple[float, float]]:
        torch, model = self._torch, self._model
        vocabulary = int(model.config.get_text_config().vocab_size)
        draw = np.random.default_rng(0)
        prompt = torch.from_numpy(draw.integers(0, vocabulary, (batch, _CONTEXT))).to(model.device)
        with torch.no_grad():
            # transformers 5.40 calls it cache.
            named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
            filled = getattr(model(input_ids=prompt, use_cache=True), named)
            caches = [copy.deepcopy(filled) for _ in range(2)]

            def step(cache: Any) -> None:
                model(input_ids=prompt[:, :1], use_cache=True, **{named: cache}).logits.sum().item()

            first, second = (partial(step, cache) for cache in caches)
            return paired_seconds(first, second, lambda: self.pinned(pins), rounds)


def _tiled(torch: Any, module: Any, policy: RowPolicy) -> Callable[[Any], Any]:
    """A linear module's forward in the calls [rows, K] of a policy."""
    native, free = module.forward, len(policy.tiles) if policy.as_it_comes else 0

    def forward(x: Any) -> Any:
        width = x.shape[-1]
        count = x.numel() // width
        if count <= free or not count:
            return native(x)
        flat, at, made = x.reshape(count, width).contiguous(), 0, []
        for taken, size in policy.calls(count):
            rows = flat[at : at + taken]
            if taken < size:
                rows = torch.cat([rows, rows.new_zeros((size - taken, width))])
            made.append(native(rows)[:taken])
            at += taken
        whole = made[0] if len(made) == 1 else torch.cat(made)
        return whole.reshape(*x.shape[:-1], -1)

    return forward


def _tensors(torch: Any, made: Any) -> list[Any]:
    return [each for each in (made if isinstance(made, tuple) else (made,)) if isinstance(each, torch.Tensor)]


def _rows(torch: Any, each: Any, rows: Any) -> Any:
    """These rows of what has one for each token."""
    if not isinstance(each, torch.Tensor) or each.ndim < 2:
        return each
    flat = each.reshape(-1, each.shape[-1])
    return flat[rows] if len(flat) == _TOKENS else each


def _part(torch: Any, each: Any, some: slice, count: int) -> Any:
    """Neighbouring rows of what has ``count``."""
    return each[some] if isinstance(each, torch.Tensor) and each.ndim > 1 and len(each) == count else each
