"""Policies: what a scenario can say about how requests are batched, in one line each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from detdiff.errors import PolicyUnusable, ScenarioError
from detdiff.scenario import LLAMA, PathRule, Scenario, parse_flags

BASELINE: Final = "serial"
DEFAULT: Final = ("static:8", "continuous:8", "continuous:8 layout=packed")
KEYS: Final = (
    "schedule", "active", "layout", "row_budget", "prefill_chunk", "draft", "drafts", "kernels", "split_rows", "page_tokens",
    "share_prefix", "kv_bits", "kv_group_size", "kv_start", "max_kv_size", "reuse_tokens",
)  # fmt: skip
"""What a policy can say."""
_PAD = re.compile(r"pad:([1-9][0-9]{0,4})")


@dataclass(frozen=True)
class Policy:
    """``name`` is what was asked for; ``scenario`` is the scenario under it."""

    name: str
    scenario: Scenario

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

    def alone(self, serial: Scenario) -> Scenario:
        """One request after the other as the policy computes it: ``serial``, unless its kernels, draft or cache say otherwise."""
        own = self.scenario
        plain = (serial.kernels, serial.speculation, serial.cache.kv_bits)
        if (own.kernels, own.speculation, own.cache.kv_bits) == plain:
            return serial
        return replace(own, schedule=replace(own.schedule, kind="serial", active=None, row_budget=None))


def policies(base: Scenario, asked: Sequence[str]) -> list[Policy]:
    """The policies of ``base``, serial first, which all others are compared with. A policy is flags, such as ``static:8`` or
    ``continuous:8 layout=packed split_rows=4``; ``batch-invariant`` is short for ``kernels=batch-invariant``, and ``pad:N`` pads linear
    calls of fewer rows to N.

    Raises PolicyUnusable for one that is unknown, twice there, or that the scenario cannot have.
    """
    names = list(dict.fromkeys([BASELINE, *(" ".join(each.split()) for each in asked)]))
    return [Policy(name, _under(base, name)) for name in names]


def _under(base: Scenario, name: str) -> Scenario:
    words, pad = [], None
    for word in name.split():
        found = _PAD.fullmatch(word)
        if found is not None:
            pad = int(found[1])
        else:
            words.append("kernels=batch-invariant" if word == "batch-invariant" else word)
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
