"""Policies: what a scenario can say about how requests are batched, in one line each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NoReturn, cast

from detdiff.engines.base import INVARIANCE, Engine
from detdiff.errors import PolicyUnusable, ScenarioError
from detdiff.invariance.invariant import COMPOSITIONS, pinned_engine
from detdiff.invariance.pinning import PinsKernels
from detdiff.invariance.policies import AUTO
from detdiff.scenario import LLAMA, KernelPlan, PathRule, Scenario, parse_flags

BASELINE: Final = "serial"
INVARIANT: Final = "batch-invariant"
DEFAULT: Final = ("static:8", "continuous:8", "continuous:8 layout=packed")
KEYS: Final = (
    "schedule", "active", "layout", "row_budget", "prefill_chunk", "draft", "drafts", "kernels", "split_rows", "page_tokens",
    "share_prefix", "kv_bits", "kv_group_size", "kv_start", "max_kv_size", "reuse_tokens",
)  # fmt: skip
"""What a policy can say."""
_PAD = re.compile(r"pad:([1-9][0-9]{0,4})")


@dataclass(frozen=True)
class Policy:
    """``name`` is what was asked for; ``scenario`` is the scenario under it. ``invariant``: kernels are pinned so that no row depends on
    others, which ``held`` does while a run lasts where the scenario's kernel plan cannot say it; ``pinned`` is how, in words."""

    name: str
    scenario: Scenario
    invariant: bool = False
    held: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, compare=False)
    pinned: str = ""

    @property
    def at_once(self) -> int:
        """How many requests it lets run at a time."""
        schedule = self.scenario.schedule
        count = len(self.scenario.requests)
        return 1 if schedule.kind == "serial" else min(schedule.active or count, count)

    @property
    def slots(self) -> int:
        """The same for what a forward is: 0 where llama.cpp computes a batch as several, and who has no row in one may have some in the next."""
        apart = self.scenario.engine == LLAMA and not self.scenario.engine_settings.get("unified", False)
        return 0 if apart and self.at_once > 1 else self.at_once

    def alone(self, serial: Policy) -> Policy:
        """One request after the other as the policy computes it: ``serial``, unless its kernels, draft or cache say otherwise."""
        own, plain = self.scenario, serial.scenario
        others = (plain.kernels, plain.speculation, plain.cache.kv_bits, serial.invariant)
        if (own.kernels, own.speculation, own.cache.kv_bits, self.invariant) == others:
            return serial
        alone = own.with_changes(schedule="serial", active=None, row_budget=None)
        return replace(self, name=f"{BASELINE} as {self.name}", scenario=alone)

    def runs_as(self, other: Policy) -> bool:
        """Whether both are the same run."""
        return (self.scenario, self.invariant) == (other.scenario, other.invariant)


def policies(base: Scenario, asked: Sequence[str]) -> list[Policy]:
    """The policies of ``base``, serial first, which all others are compared with. A policy is flags, such as ``static:8`` or
    ``continuous:8 layout=packed split_rows=4``; ``batch-invariant`` pins the model's kernels, once `with_pins` has found how, and ``pad:N``
    pads linear calls of fewer rows to N.

    Raises PolicyUnusable for one that is unknown, twice there, or that the scenario cannot have.
    """
    names = list(dict.fromkeys([BASELINE, *(" ".join(each.split()) for each in asked)]))
    return [
        Policy(name, _under(base, name), True, _not_yet)
        if INVARIANT in name.split()
        else Policy(name, _under(base, name))
        for name in names
    ]


def _not_yet() -> NoReturn:
    raise AssertionError("an invariant policy runs once with_pins has found its kernels")


def with_pins(engine: Engine, found: Sequence[Policy], compositions: int = COMPOSITIONS) -> list[Policy]:
    """The same policies, of which those that are invariant have the cheapest kernels that hold on this engine: found once, and checked
    in so many random compositions.

    Raises PolicyUnusable for an engine whose kernels cannot be pinned, KernelsNotPinned where nothing holds.
    """
    known: dict[KernelPlan, Policy] = {}
    return [_with_pins(engine, each, known, compositions) if each.invariant else each for each in found]


def _with_pins(engine: Engine, policy: Policy, known: dict[KernelPlan, Policy], compositions: int) -> Policy:
    plan = policy.scenario.kernels
    if INVARIANCE not in engine.capabilities:
        raise PolicyUnusable(
            f"The policy {policy.name!r} pins kernels, and those of the engine {engine.name} cannot be pinned; expected mlx or transformers. "
            "Leave it out, or split rows where the engine can: split_rows=N."
        )
    if plan not in known:
        with pinned_engine(engine, AUTO, plan, compositions=compositions, price=()) as model:
            # What it costs is what is measured then.
            how = str(replace(model, not_priced=""))
            if model.plan is not None:
                scenario = replace(policy.scenario, kernels=model.plan)
                known[plan] = replace(policy, scenario=scenario, held=nullcontext, pinned=how)
            else:
                pinning = cast(PinsKernels, engine).pinning(plan)
                known[plan] = replace(policy, held=partial(pinning.pinned, model.pins), pinned=how)
    of = known[plan]
    return replace(
        policy,
        scenario=replace(policy.scenario, kernels=of.scenario.kernels),
        held=of.held,
        pinned=of.pinned,
    )


def _under(base: Scenario, name: str) -> Scenario:
    words, pad = [], None
    for word in name.split():
        found = _PAD.fullmatch(word)
        if found is not None:
            pad = int(found[1])
        elif word != INVARIANT:
            words.append(word)
    # What a policy does not say is as plain as it can be, whatever the scenario had.
    plain = {"schedule": "serial", "active": None, "row_budget": None}
    try:
        keys = parse_flags(" ".join(words))
        wrong = next((key for key in keys if key not in KEYS), None)
        if wrong is not None:
            raise ScenarioError(
                f"it says {wrong}, and policies differ in {', '.join(KEYS[:-1])} and {KEYS[-1]} alone: the rest is the same work for all of them. "
                "Leave it out, or give it to all with --set."
            )
        changed = base.with_changes(**{**plain, **keys})
        if pad is not None:
            rule = PathRule(rows=f"1..{max(1, pad - 1)}", path=f"pad:{pad}")
            changed = replace(changed, kernels=replace(changed.kernels, rules=(*changed.kernels.rules, rule)))
    except ScenarioError as error:
        raise PolicyUnusable(
            f"The policy {name!r} is none that this workload can have: {error} A policy is a schedule with scenario keys behind it, such as "
            "serial, static:8, continuous:8, or continuous:8 layout=packed split_rows=4."
        ) from None
    return changed
