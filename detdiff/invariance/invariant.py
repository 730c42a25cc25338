"""``detdiff.invariant``: a model whose rows depend on nothing but themselves while a block lasts, and what that took."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from detdiff.engines.base import INVARIANCE, Engine
from detdiff.engines.registry import as_engine, find_factory
from detdiff.errors import EngineUnusable, KernelsNotPinned, PolicyUnusable
from detdiff.probe.operation import ProbeTarget
from detdiff.scenario import KernelPlan, Scenario

from .compositions import CheckedCompositions, check
from .pinning import Pinnable, Pins, PinsKernels, SiteGroup, SitePolicy
from .policies import AUTO, DECODE, NATIVE, SIZES, RowPolicy, cheapest, named, size_of
from .sampled import SampledSizes, sample

COMPOSITIONS = 12
ROUNDS = 9
_ARRANGED = 3  # seeds of arrangements that attention, experts and activations are tried with

OnStep = Callable[[str, int, int], None]
"""``on_step(what, done, total)``."""


@dataclass(frozen=True)
class StepPrice:
    """A decode step of ``batch`` requests: its time pinned over that of the model as it is, in the same round; median and quartiles
    of ``rounds``, and the median seconds of both."""

    batch: int
    ratio: float
    low: float
    high: float
    rounds: int
    native: float
    pinned: float


@dataclass(frozen=True)
class PinnedGroup:
    """What serves a group of sites. Of rows, ``sizes`` says which sizes of a call gave the same bits, a set each; a kernel that
    differs in less than one of ``rarest`` outputs would probably not have been seen."""

    group: SiteGroup
    policy: SitePolicy
    sizes: tuple[frozenset[int], ...] = ()
    rarest: int = 0

    def __str__(self) -> str:
        text = f"{self.group}: {self.policy}"
        if len(self.sizes) < 2:
            return text
        return f"{text}; calls of {'; of '.join(_ranges(each) for each in self.sizes)} rows agree among themselves"


@dataclass(frozen=True)
class InvariantModel:
    """What was pinned and how it was found out. ``plan`` says the same as a scenario's kernel plan, where the engine takes one;
    ``price`` has an entry a batch, or is empty, and ``not_priced`` says why."""

    pinned: tuple[PinnedGroup, ...]
    checked: CheckedCompositions | None
    price: tuple[StepPrice, ...]
    not_priced: str
    plan: KernelPlan | None
    notes: tuple[str, ...] = field(default=())

    @property
    def pins(self) -> Pins:
        """The policy of each group of sites."""
        return {each.group: each.policy for each in self.pinned}

    def __str__(self) -> str:
        lines = [str(each) for each in self.pinned]
        seen = [each.rarest for each in self.pinned if each.rarest]
        if seen:
            lines.append(
                f"not seen: a linear kernel that differs in less than one of {min(seen):,} outputs may be taken for the same"
            )
        if self.checked is None:
            lines.append("not checked: no composition was asked for")
        else:
            lines.append(
                f"checked: {self.checked.count} random compositions of {self.checked.requests} requests, {self.checked.values:,} digests, "
                "none differs"
            )
            lines += [f"not checked in the schedule {reason}" for reason in self.checked.left_out]
        lines += [
            f"price of a decode step at batch {each.batch}: {each.ratio:.2f} of native ({each.low:.2f} to {each.high:.2f}, "
            f"{each.rounds} rounds; {1e3 * each.native:.2f} ms -> {1e3 * each.pinned:.2f} ms)"
            for each in self.price
        ]
        if self.not_priced:
            lines.append(f"price: not measured, {self.not_priced}")
        return "\n".join([*lines, *self.notes])


@contextmanager
def invariant(
    model: Any,
    policy: str = AUTO,
    *,
    kernels: str = NATIVE,
    compositions: int = COMPOSITIONS,
    price: Sequence[int] = DECODE,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Iterator[InvariantModel]:
    """While the block lasts, every row of ``model`` has the bits that it has alone, whoever it is batched with.

    ``model`` is an mlx-lm model or the pair that ``mlx_lm.load`` gives, a causal language model of transformers, or an opened
    engine. ``policy`` is auto (the cheapest that holds here), rows, pad:N, tile:N or split_rows:N; ``kernels`` a dispatch profile whose
    kernels run instead of the model's own. ``compositions`` random ones must agree bit for bit before the block begins; ``price`` are
    the batches whose decode step is timed beside the model as it is. Everything is undone at the block's end.

    Raises KernelsNotPinned where nothing holds, or a composition differs: it names the composition, the site and the row; PolicyUnusable for
    a policy that is none, or numbers that are none of compositions and batches, EngineUnusable for a model that cannot be pinned.
    """
    _refuse_other_numbers(compositions, price, seed)
    with pinned_engine(
        _engine(model),
        policy,
        KernelPlan(profile=kernels),
        compositions=compositions,
        price=price,
        seed=seed,
        on_step=on_step,
    ) as found:
        yield found


@contextmanager
def pinned_engine(
    engine: Engine,
    policy: str,
    kernels: KernelPlan,
    *,
    compositions: int,
    price: Sequence[int],
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Iterator[InvariantModel]:
    """`invariant` for an opened engine that has the capability, under what is left of ``kernels`` beside pins: a profile."""
    size_of(policy)
    pinning = cast(PinsKernels, engine).pinning(kernels)
    found = find_pins(pinning, policy, seed, on_step)
    pins = {each.group: each.policy for each in found}
    with pinning.pinned(pins):
        checked = None
        if compositions:
            checked = check(engine, compositions, seed, _step(on_step, "compositions"))
    times = () if pinning.priced else tuple(_priced(pinning, pins, price, _step(on_step, "price")))
    not_priced = pinning.priced or ("" if times else "no batch was asked for")
    result = InvariantModel(found, checked, times, not_priced, pinning.plan(pins), tuple(pinning.notes))
    with pinning.pinned(pins):
        yield result


def pinned_scenario(
    engine: Engine,
    scenario: Scenario,
    *,
    compositions: int = COMPOSITIONS,
    price: Sequence[int] = (),
    on_step: OnStep | None = None,
) -> tuple[Scenario, InvariantModel]:
    """``scenario`` with the kernel plan that makes its engine's model invariant, and what was found.

    Raises what `invariant` raises, and EngineUnusable for an engine that takes no kernel plan.
    """
    with pinned_engine(
        _pinnable(engine), AUTO, scenario.kernels, compositions=compositions, price=price, on_step=on_step
    ) as found:
        if found.plan is None:
            raise EngineUnusable(
                f"The engine {engine.name} takes no kernel plan, so that a scenario cannot say what is pinned; expected mlx. In Python, "
                "run it within `with detdiff.invariant(model):`."
            )
        return replace(scenario, kernels=found.plan), found


def find_pins(
    pinning: Pinnable, policy: str = AUTO, seed: int = 0, on_step: OnStep | None = None
) -> tuple[PinnedGroup, ...]:
    """For each group of sites the policy that serves it. Raises KernelsNotPinned."""
    found = []
    groups = pinning.groups
    for number, group in enumerate(groups):
        chosen = (
            _by_rows(pinning, group, policy) if group.by_rows else _arranged(pinning, group, policy, seed)
        )
        found.append(chosen)
        if on_step is not None:
            on_step("sites", number + 1, len(groups))
    return tuple(found)


def _by_rows(pinning: Pinnable, group: SiteGroup, policy: str) -> PinnedGroup:
    wanted = pinning.sizes(group, sorted({*SIZES, size_of(policy)}))
    targets = pinning.targets(group)
    found = [_sampled(target, wanted) for target in targets]
    sets = found[0].sets
    whole = all(each.whole for each in found)
    if policy == AUTO:
        seconds = None
        if len(sets) > 1 and not pinning.priced:
            timed = _timed(targets[0], wanted)
            seconds = {size: timed[size] for size in wanted}
        chosen = cheapest(sets, seconds)
        if chosen is None:
            raise KernelsNotPinned(
                f"No policy makes a row's bits depend on the row alone at {group}: in a call of one row, a repeat differs already. Expected "
                "one size of a call whose rows are alike at every place. Look at it with detdiff probe."
            )
    else:
        chosen = named(policy, wanted)
    home = next((each for each in sets if chosen.sizes <= each), None)
    if home is None:
        raise KernelsNotPinned(
            f"The policy {policy} does not make a row's bits depend on the row alone at {group}: it makes calls of "
            f"{_ranges(chosen.sizes)} rows, and those that agree are {'; '.join(_ranges(each) for each in sets) or 'none'}. "
            "Take auto, or a policy with calls of one such set."
        )
    as_it_comes = whole and str(chosen) == NATIVE
    return PinnedGroup(
        group,
        RowPolicy(chosen.tiles, chosen.large, as_it_comes),
        tuple(sets) if len(sets) > 1 else (),
        found[0].rarest,
    )


def _arranged(pinning: Pinnable, group: SiteGroup, policy: str, seed: int) -> PinnedGroup:
    """Attention, experts and activations follow no policy for rows but ``rows``: the first path that holds in drawn arrangements."""
    paths = pinning.paths(group)
    if policy == "rows":
        paths = paths[-1:]
    reasons = []
    for path in paths:
        wrong = next(
            (w for s in range(_ARRANGED) if (w := pinning.first_difference(group, path, seed + s))), ""
        )
        if not wrong:
            return PinnedGroup(group, path)
        reasons.append(f"{path}: {wrong}")
    raise KernelsNotPinned(
        f"No policy makes a row's bits depend on the row alone at {group}: {'; '.join(reasons)}. Expected rows that are the same alone and "
        "together on one of these paths. Serve requests one at a time, or take another attention."
    )


def _sampled(target: ProbeTarget, sizes: Sequence[int]) -> SampledSizes:
    operation = target.operation(0)
    one = operation.read(operation.run(operation.given(np.zeros((1, operation.k), np.float32))), 1)
    return sample(operation, sizes, one.data.shape[1])


def _timed(target: Any, sizes: Sequence[int]) -> Mapping[int, float]:
    from detdiff.probe.measures import measure
    from detdiff.probe.sweep import RowContent

    operation = target.operation(0)
    content = RowContent.of_seed(0, max(sizes), operation)
    return {each.rows: each.seconds for each in measure(operation, content, sizes, budget=0.3)}


def _priced(
    pinning: Pinnable, pins: Mapping[SiteGroup, SitePolicy], batches: Sequence[int], on_batch: Any
) -> Iterator[StepPrice]:
    for number, batch in enumerate(batches):
        rounds = pinning.step_seconds(batch, ROUNDS, pins)
        ratios = [pinned / native for native, pinned in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4)
        native, held = (statistics.median(each) for each in zip(*rounds, strict=True))
        yield StepPrice(batch, middle, low, high, len(rounds), native, held)
        if on_batch is not None:
            on_batch(number + 1, len(batches))


def _step(on_step: OnStep | None, what: str) -> Callable[[int, int], None] | None:
    return None if on_step is None else lambda done, total: on_step(what, done, total)


def _refuse_other_numbers(compositions: Any, price: Any, seed: Any) -> None:
    """Raises PolicyUnusable."""
    batches = price if isinstance(price, Sequence) and not isinstance(price, str) else None
    wrong = [
        f"compositions={compositions!r}" if type(compositions) is not int or compositions < 0 else "",
        f"price={price!r}"
        if batches is None or any(type(each) is not int or each < 1 for each in batches)
        else "",
        f"seed={seed!r}" if type(seed) is not int or seed < 0 else "",
    ]
    if any(wrong):
        raise PolicyUnusable(
            f"detdiff.invariant was given {' and '.join(filter(None, wrong))}; expected a number of compositions and a seed from 0 on, and a "
            "sequence of batches from 1 on, such as price=(1, 8), or () for none. Correct it."
        )


def _engine(model: Any) -> Engine:
    """Raises EngineUnusable for what cannot be pinned."""
    kinds = {each.__module__ for each in type(model).__mro__}
    pair = isinstance(model, tuple | list) and len(model) in (2, 3)
    found: Any
    if pair or "mlx.nn.layers.base" in kinds or type(model).__name__ == "LoadedModel":
        found = find_factory("detdiff.engines.mlx.engine:engine_of_objects")(model, without_tokenizer=True)
    else:
        found = as_engine(model)
    if found is None or isinstance(found, str):
        return _pinnable(found or model)
    return _pinnable(found)


def _pinnable(found: Any) -> Engine:
    """Raises EngineUnusable for what is no engine, or for one whose kernels cannot be pinned."""
    if INVARIANCE not in getattr(found, "capabilities", ()):
        what = found if isinstance(found, str) else f"a {type(found).__name__}"
        raise EngineUnusable(
            f"The kernels of {what} cannot be pinned; expected an mlx-lm model, the pair that mlx_lm.load gives, or a causal language "
            "model of transformers. Give one of them."
        )
    engine: Engine = found
    return engine


def _ranges(sizes: frozenset[int]) -> str:
    """``1..8, 16`` of a set of numbers."""
    parts: list[list[int]] = []
    for size in sorted(sizes):
        if parts and size == parts[-1][-1] + 1:
            parts[-1][1:] = [size]
        else:
            parts.append([size])
    return ", ".join("..".join(map(str, each)) for each in parts)
