"""Cases without a fault to find, without anything to compare, and one that does not repeat."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from fault_case import Expected, FaultCase, Trial
from fault_models import fixture, prompt, scenario
from injecting import Around, called

from detdiff.errors import NothingComparable
from detdiff.scenario import Scenario


def nondeterminism(seed: int) -> Trial:
    """One linear layer sums over its inputs in an order that is another one at each call."""
    draw = random.Random(f"race {seed}")
    layer, name = draw.randrange(2), draw.choice(("q_proj", "k_proj", "v_proj", "o_proj"))
    of = fixture("T", "f32", seed)
    linear = of.model.model.layers[layer].self_attn[name]
    calls = itertools.count()

    def call(native: Callable[..., Any], x: mx.array) -> Any:
        order = list(range(x.shape[-1]))
        random.Random(f"{seed} {next(calls)}").shuffle(order)
        places = mx.array(order)
        return x[..., places] @ linear.weight[:, places].T

    return Trial(
        scenario(seed),
        scenario(seed, "static"),
        of,
        Expected(
            frozenset({"r0", "r1", "r2"}),
            site=f"layers.{layer}.self_attn.{name}",
            kinds=frozenset({"linear"}),
            layer=layer,
        ),
        Around(partial(called, linear, call)),
    )


def nothing_comparable(seed: int) -> Trial:
    """No request of one run is in the other: other ids, or other prompts under the same ids."""
    asked = scenario(seed, max_tokens=3)
    requests = asked.to_dict()["request"]
    for number, request in enumerate(requests):
        if seed % 2:
            request["id"] = f"other{number}"
        else:
            request["tokens"] = prompt(len(request["tokens"]), ("another", seed, number))
    other = Scenario.from_dict({**asked.to_dict(), "request": requests})
    return Trial(asked, other, fixture("T", "f32", seed), Expected(error=NothingComparable))


GROUNDS: tuple[tuple[str, str], ...] = (
    *(("T", fmt) for fmt in ("f32", "f16", "bf16", "q4")),
    ("H", "f32"),
    ("G", "bf16"),
)


def variants(name: str) -> tuple[tuple[str, str], ...]:
    """Schedules and layouts that a fixture's runs have to be alike in."""
    packed = (("serial", "packed"), ("continuous", "packed"))
    return (("serial", "padded"), ("static", "padded"), *(packed if name == "T" else ()))


NO_FAULT = tuple(
    (name, fmt, a, b)
    for name, fmt in GROUNDS
    for a, b in itertools.combinations_with_replacement(variants(name), 2)
)
"""(fixture, format, schedule and layout of A, of B); trial n takes the one of number n."""


def sound(seed: int, name: str, schedule: str, layout: str) -> Scenario:
    """One run without a fault."""
    # Below the window of G, where no ring turns.
    lengths = (5, 3, 7) if name == "G" else (12, 3, 40)
    arrivals = (0, 2, 5) if schedule == "continuous" else ()
    return scenario(seed, schedule, layout, arrivals=arrivals, lengths=lengths, max_tokens=6)


def no_fault(seed: int) -> Trial:
    """The same run twice, or the same requests under another schedule or layout, with nothing injected."""
    name, fmt, a, b = NO_FAULT[seed % len(NO_FAULT)]
    a_run, b_run = (sound(seed, name, schedule, layout) for schedule, layout in (a, b))
    return Trial(a_run, b_run, fixture(name, fmt, seed), Expected())


CASES = (
    FaultCase(15, "run-to-run change", "nondeterminism", "one sum in a random order", nondeterminism),
    FaultCase(
        18,
        "nothing to compare",
        "undetermined",
        "disjoint requests; other prompts under the same id",
        nothing_comparable,
    ),
    FaultCase(20, "no fault", "identical", "nothing", no_fault),
)
