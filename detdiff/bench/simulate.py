"""The forwards that a policy would make an engine run, from lengths alone: no model is loaded and nothing is computed.

Where scheduling is detdiff's (packed rows, llama.cpp) its own functions decide; where it is an engine's, that engine's scheduler runs
over a model that computes nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Final

from detdiff.engines.schedule import Work, admitted, allot, by_arrival, prompt_share
from detdiff.errors import PolicyUnusable
from detdiff.scenario import LLAMA, Scenario

from .counts import ForwardShape
from .workload import Workload

Simulator = Callable[[Scenario, Sequence[Work]], list[ForwardShape]]
_OWN: Final = {"mlx": "detdiff.engines.mlx.dry_run:forwards"}
"""Engines with a scheduler of their own: module and function of their simulators."""


def work_of(workload: Workload, scenario: Scenario) -> list[Work]:
    """The requests of a workload on their way through an engine; their tokens say nothing."""
    static = scenario.schedule.kind != "continuous"
    return [
        Work(
            index,
            f"r{index}",
            (0,) * item.prompt_length,
            item.answer_length,
            0 if static else round(item.arrival),
            frozenset(),
            None,
        )
        for index, item in enumerate(workload.items)
    ]


def simulate(scenario: Scenario, workload: Workload) -> list[ForwardShape]:
    """The forwards that a scenario's policy would run for the lengths of ``workload``, whatever the scenario's own requests are.

    Raises PolicyUnusable for speculation, whose forwards depend on what is accepted, and for engines whose schedulers are not
    at hand.
    """
    if scenario.speculation is not None:
        raise PolicyUnusable(
            "A policy with a draft cannot be simulated: how many forwards it takes depends on what the model accepts. Measure it."
        )
    work = work_of(workload, scenario)
    if scenario.engine == LLAMA or scenario.schedule.layout == "packed":
        return packed(scenario, work)
    if scenario.engine == "transformers":
        return padded_batches(scenario, work)
    own = _OWN.get(scenario.engine)
    if own is None:
        raise PolicyUnusable(
            f"The scheduler of the engine {scenario.engine} is not at hand, so that its forwards cannot be told from lengths. Simulate "
            "with engine mlx, transformers or llama.cpp, or layout packed."
        )
    module, _, function = own.partition(":")
    simulator: Simulator = getattr(importlib.import_module(module), function)
    return simulator(scenario, work)


def packed(scenario: Scenario, work: Sequence[Work]) -> list[ForwardShape]:
    """Iteration-level scheduling of rows on one axis, as the packed layout and the engine llama.cpp do it."""
    schedule = scenario.schedule
    waiting, active, step = by_arrival(work), list[Work](), 0
    found: list[ForwardShape] = []
    while waiting or active:
        due = admitted(waiting, active, schedule, step)
        if not active and scenario.engine == LLAMA:
            # That engine's clock goes on to an arrival that ends idleness; MLX's counts forwards alone.
            step = max(step, due[0].arrival)
        waiting = [item for item in waiting if item not in due]
        active += due
        rows: dict[int, int] = {}
        for item, count in allot(active, schedule):
            if item.decoding:
                item.done += count
                item.generated.append(0)
            else:
                share = prompt_share(item, count)
                item.done += count
                item.generated += [0] * share.answers
            rows[item.index] = count
        found.append(ForwardShape(rows, (1, sum(rows.values())), {item.index: item.done for item in active}))
        active = [item for item in active if not item.finished]
        step += 1
    return found


def padded_batches(scenario: Scenario, work: Sequence[Work]) -> list[ForwardShape]:
    """Batches one after the other, padded on the left, each decoded until its longest answer is through."""
    schedule = scenario.schedule
    size = 1 if schedule.kind == "serial" else schedule.active or len(work)
    found: list[ForwardShape] = []
    for first in range(0, len(work), size):
        batch = list(work[first : first + size])
        longest = max(len(item.prompt) for item in batch)
        for step in range(max(item.max_tokens for item in batch)):
            live = [item for item in batch if item.max_tokens > step]
            rows = {item.index: len(item.prompt) if step == 0 else 1 for item in live}
            held = {item.index: len(item.prompt) + min(step, item.max_tokens - 1) for item in batch}
            found.append(ForwardShape(rows, (len(batch), longest if step == 0 else 1), held))
    return found
