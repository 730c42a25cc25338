"""Random compositions: drawn requests, served together in a drawn way, must have every bit that they have alone."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detdiff.compare import compare
from detdiff.engines.base import CONTINUOUS, PACKED, PREFILL_CHUNK, STATIC, Engine, RunOptions
from detdiff.engines.record import record
from detdiff.errors import EngineRefuses, KernelsNotPinned, LayoutError
from detdiff.scenario import Scenario
from detdiff.trace import Trace

EACH_ALONE = 4
"""Compositions of the same requests, whose runs alone are recorded once."""
_LONGEST = 30
_QUIET = RunOptions(observe=0, durable=False)

OnComposition = Callable[[int, int], None]


@dataclass(frozen=True)
class CheckedCompositions:
    """``count`` compositions of ``requests`` drawn requests in which no bit of ``values`` digests of rows differed; ``left_out``: why the
    engine does not serve this model in a schedule, which none of them has then."""

    count: int
    requests: int
    values: int
    seed: int
    left_out: tuple[str, ...] = ()


def check(
    engine: Engine, count: int, seed: int, on_composition: OnComposition | None = None
) -> CheckedCompositions:
    """Record ``count`` drawn compositions and the same requests alone, and compare every site, cache entry and logit.

    Raises KernelsNotPinned with the composition, the site and the row at the first that differs.
    """
    layouts = ["padded", *(["packed"] if PACKED in engine.capabilities else [])]
    kinds, left_out = _schedules(engine)
    requests = values = 0
    alone: Trace | None = None
    with tempfile.TemporaryDirectory(prefix="detdiff-") as folder:
        for number in range(count):
            draw = random.Random(f"{seed}/{number}")
            if alone is None or number % EACH_ALONE == 0:
                drawn = _requests(engine, random.Random(f"{seed}/{number}/requests"))
                alone = record(
                    _scenario(engine, drawn, {"schedule": "serial"}), Path(folder, f"alone{number}"),
                    engine=engine, options=_QUIET,
                )  # fmt: skip
                requests += len(drawn)
            # Layouts and schedules take turns, so that a few compositions have all of them.
            kind = kinds[number // len(layouts) % len(kinds)]
            keys = _composition(engine, draw, layouts[number % len(layouts)], kind)
            arriving = [
                {**each, "arrival": draw.randrange(5)} if keys["schedule"] == "continuous" else each
                for each in drawn
            ]
            draw.shuffle(arriving)
            try:
                together = record(
                    _scenario(engine, arriving, keys), Path(folder, f"together{number}"),
                    engine=engine, options=_QUIET,
                )  # fmt: skip
            except LayoutError:
                # This model's rows cannot be packed, and nobody can run them so.
                layouts = ["padded"]
                keys["layout"] = "padded"
                together = record(
                    _scenario(engine, arriving, keys), Path(folder, f"together{number}"),
                    engine=engine, options=_QUIET,
                )  # fmt: skip
            values += _compared(alone, together, f"composition {number} of seed {seed}", arriving, keys)
            if on_composition is not None:
                on_composition(number + 1, count)
    return CheckedCompositions(count, requests, values, seed, left_out)


def _schedules(engine: Engine) -> tuple[list[str], tuple[str, ...]]:
    """The schedules in which this engine serves its model together, and why not in the others. Raises EngineRefuses where it does in none."""
    kinds: list[str] = []
    refused: dict[str, EngineRefuses] = {}
    for kind in (CONTINUOUS, STATIC):
        if kind in engine.capabilities:
            try:
                engine.check(_scenario(engine, _requests(engine, random.Random(0)), {"schedule": kind}))
                kinds.append(kind)
            except EngineRefuses as error:
                refused[kind] = error
    if refused and not kinds:
        raise next(iter(refused.values()))
    return kinds, tuple(f"{kind}: {error}" for kind, error in refused.items())


def _requests(engine: Engine, draw: random.Random) -> list[dict[str, Any]]:
    vocabulary = int(engine.identity.get("vocab_size") or 2)
    return [
        {
            "id": f"r{number}",
            "tokens": [draw.randrange(vocabulary) for _ in range(draw.randint(1, _LONGEST))],
            "max_tokens": draw.randint(3, 6),
            "ignore_stop": True,
        }
        for number in range(draw.randint(2, 5))
    ]


def _composition(engine: Engine, draw: random.Random, layout: str, kind: str) -> dict[str, Any]:
    keys: dict[str, Any] = {"schedule": kind, "layout": layout}
    if PREFILL_CHUNK in engine.capabilities:
        keys["prefill_chunk"] = draw.choice((3, 8, 2048))
    if draw.random() < 0.5:
        keys["active"] = draw.randint(2, 4)
    return keys


def _scenario(engine: Engine, requests: list[dict[str, Any]], keys: dict[str, Any]) -> Scenario:
    name = str(engine.identity.get("name") or "model")
    return Scenario.from_dict({"model": name, "engine": engine.name, "request": requests, **keys})


def _compared(
    alone: Trace, together: Trace, which: str, requests: list[dict[str, Any]], keys: dict[str, Any]
) -> int:
    """How many digests were compared. Raises KernelsNotPinned."""
    found = compare(alone, together)
    if found.identical:
        return found.compared.digests
    said = " ".join(f"{key}={value}" for key, value in keys.items())
    each = ", ".join(
        f"{one['id']} of {len(one['tokens'])} tokens"
        + (f" at {one['arrival']}" if one.get("arrival") else "")
        for one in requests
    )
    worst = next((one for one in found.requests if one.origin is not None), None)
    first = worst or next((one for one in found.requests if not one.identical), None)
    place = "no site that is recorded"
    if first is not None and first.origin is not None:
        place = f"site {first.origin.site}, request {first.id}, position {first.origin.position}"
    elif first is not None:
        place = f"request {first.id}, at the stage {first.stage}"
    raise KernelsNotPinned(
        f"A row's bits depended on other rows in {which} ({said}; {each}): first at {place}. Expected every bit of each request alone. "
        "What is pinned are linear layers, experts and attention that mlx-lm or transformers calls by its own function, and activations of "
        "transformers; what mixes rows there is not. "
        "Look at that site with detdiff compare and explain, or serve requests one at a time."
    )
