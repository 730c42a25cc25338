"""The forwards that a policy would make an engine run, from lengths alone: no model is loaded and nothing is computed.

Where scheduling is detdiff's (packed rows, llama.cpp) its own functions decide; where it is an engine's, that engine's scheduler runs
over a model that computes nothing, or is followed (transformers' continuous batching, whose scheduler needs a model).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from detdiff.engines.schedule import Work, admitted, allot, by_arrival, prompt_share
from detdiff.errors import PolicyUnusable
from detdiff.scenario import LLAMA, TRANSFORMERS, Scenario

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

    Raises PolicyUnusable for speculation, whose forwards depend on what is accepted, for prefixes that are shared, and for engines whose schedulers are not
    at hand.
    """
    if scenario.speculation is not None:
        raise PolicyUnusable(
            "A policy with a draft cannot be simulated: how many forwards it takes depends on what the model accepts. Measure it."
        )
    if scenario.cache.share_prefix:
        raise PolicyUnusable(
            "A policy with share_prefix cannot be simulated from lengths: how many rows a prompt takes depends on what an earlier one began "
            "with. Measure it."
        )
    work = work_of(workload, scenario)
    if scenario.engine == LLAMA:
        return _in_graphs(scenario, work)
    if scenario.engine == TRANSFORMERS:
        continuous = scenario.schedule.kind == "continuous"
        return list(first_come(scenario, work)) if continuous else padded_batches(scenario, work)
    if scenario.schedule.layout == "packed":
        return list(packed(scenario, work))
    own = _OWN.get(scenario.engine)
    if own is None:
        raise PolicyUnusable(
            f"The scheduler of the engine {scenario.engine} is not at hand, so that its forwards cannot be told from lengths. Simulate "
            "with engine mlx, transformers or llama.cpp, or layout packed."
        )
    module, _, function = own.partition(":")
    simulator: Simulator = getattr(importlib.import_module(module), function)
    return simulator(scenario, work)


def packed(scenario: Scenario, work: Sequence[Work]) -> Iterator[ForwardShape]:
    """Iteration-level scheduling of rows on one axis, as the packed layout and the engine llama.cpp do it."""
    schedule = scenario.schedule
    waiting, active, step = by_arrival(work), list[Work](), 0
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
        yield ForwardShape(rows, (1, sum(rows.values())), {item.index: item.done for item in active})
        active = [item for item in active if not item.finished]
        step += 1


def _in_graphs(scenario: Scenario, work: Sequence[Work]) -> list[ForwardShape]:
    """llama.cpp's batches as the graphs that it computes.

    A batch of at most ``split_rows`` rows is a graph for each of them. Where each sequence has a cache of its own, ``llama_batch_allocr::split_equal`` takes as many rows of each that still has some, of
    sequences whose numbers follow each other; else rows are taken in their order. Never more than ``ubatch``.
    """
    most, split = int(scenario.engine_settings.get("ubatch", 512)), scenario.kernels.split_rows or 0
    equal = not scenario.engine_settings.get("unified", False)
    # The sequence that was free longest is taken next, as the engine does it.
    free, of = list(range(len(work))), dict[int, int]()
    found: list[ForwardShape] = []
    for batch in packed(scenario, work):
        for request in batch.holding:
            if request not in of:
                of[request] = free.pop(0)
        left = dict(batch.rows)
        held = {request: count - batch.rows.get(request, 0) for request, count in batch.holding.items()}
        apart = sum(left.values()) <= split
        while left:
            part: dict[int, int] = {}
            if apart:
                part = {next(iter(left)): 1}
            elif equal:
                last = -1
                for request in left:
                    if len(part) < most and (not part or of[request] == last + 1):
                        part[request], last = 0, of[request]
                count = min(min(left[request] for request in part), max(1, most // len(part)))
                part = dict.fromkeys(part, count)
            else:
                room = most
                for request, count in left.items():
                    if room:
                        part[request] = min(count, room)
                        room -= part[request]
            for request, count in part.items():
                held[request] += count
            left = {
                request: n - part.get(request, 0) for request, n in left.items() if n > part.get(request, 0)
            }
            found.append(ForwardShape(part, (1, sum(part.values())), dict(held)))
        free += [of.pop(request) for request in [each for each in of if work[each].finished]]
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


def first_come(scenario: Scenario, work: Sequence[Work]) -> Iterator[ForwardShape]:
    """The forwards of transformers' continuous batching by its FIFOScheduler (5.24): requests that decode first, in the order in which they began,
    then prompts that were begun, then new ones, each with as many rows as are left; a forward has no more requests than may run at a time."""
    from detdiff.engines.transformers.continuous import MOST_ROWS

    schedule, arriving = scenario.schedule, replace(scenario.schedule, active=None)
    most = schedule.row_budget or MOST_ROWS
    at_once = min(schedule.active or len(work), most)
    waiting, queue, active, step = by_arrival(work), list[Work](), list[Work](), 0
    while waiting or queue or active:
        due = admitted(waiting, [*queue, *active], arriving, step)
        waiting = [item for item in waiting if item not in due]
        queue += due
        begun = [item for item in active if not item.decoding]
        rows: dict[int, int] = {}
        for item in [*(item for item in active if item.decoding), *begun, *queue]:
            left = most - sum(rows.values())
            if not left or len(rows) == at_once:
                break
            share = 1 if item.decoding else min(left, len(item.prompt) - item.done)
            rows[item.index] = share
            item.done += share
            if item in queue:
                queue.remove(item)
                active.append(item)
            if item.done >= len(item.prompt):
                item.generated.append(0)
        yield ForwardShape(rows, (1, sum(rows.values())), {item.index: item.done for item in active})
        active = [item for item in active if not item.finished]
        step += 1
