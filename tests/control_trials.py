"""Trials of the controls: one path change or one unit in the last place, injected at random, must be named exactly."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runs import model

from detdiff.compare import compare
from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.engines.mlx.taps.injected import InjectedFault
from detdiff.explain.case import Case
from detdiff.explain.control import Control
from detdiff.explain.investigate import run_control
from detdiff.scenario import KernelPlan, PathRule, Scenario
from detdiff.trace import Trace

SUITES = (("llama", "f32"), ("qwen3", "q4"), ("phi3", "f32"), ("qwen2", "f32"))
VOCAB, WIDTH = 96, 16

DECOY = PathRule("*", path="pad:48")
"""On a CPU a row is alike for every number of rows: a path change at every call that moves no bit."""


@dataclass(frozen=True)
class Tried:
    """What was injected, what the controls gave, and the forwards of a run from the prompt."""

    injected: Any
    named: Any
    controls: dict[str, Control]
    length: int
    candidates: int = 0

    @property
    def right(self) -> bool:
        return bool(self.named == self.injected)

    @property
    def forwards(self) -> int:
        """Forwards of all trials, the two known runs before them not counted."""
        allowed = self.controls["minimal_change"].detail
        patches = sum(c.forwards for name, c in self.controls.items() if name.startswith("patch"))
        spent = sum(allowed.get(name) or 0 for name in ("held_forwards", "trial_forwards")) + patches
        return int(spent)

    @property
    def reruns(self) -> int:
        """Re-runs that were asked for: the held run, trials of path changes, trials of entries."""
        allowed = self.controls["minimal_change"].detail
        patches = [
            c.detail.get("trials", 1) + 1 for name, c in self.controls.items() if name.startswith("patch")
        ]
        return int(bool(allowed.get("held_forwards"))) + int(allowed.get("trials") or 0) + sum(patches)


class Series:
    """Trial ``n`` is drawn from its number, so that one can be repeated alone."""

    def __init__(self, directory: Path, tokens: int = 24, requests: int = 4, seed: int = 0) -> None:
        self._directory, self._tokens, self._requests, self._seed = directory, tokens, requests, seed
        self._count = 0

    def path_change(self, number: int) -> Tried:
        """One call on another path that moves bits, among path changes at every call that move none."""
        arch, fmt = SUITES[number % len(SUITES)]
        draw = random.Random(f"path {self._seed} {number}")
        loaded = model(arch, fmt)
        while True:
            asked = self._scenario(draw)
            a = self._record(loaded, asked)
            call = self._call(draw, a)
            if call is None:
                continue
            site, rows, forward = call
            rules = (PathRule(site, rows=str(rows), path="candle-metal/mv"), DECOY)
            b = self._record(loaded, replace(asked, kernels=KernelPlan(rules=rules)))
            divergence = compare(a, b)
            if not divergence.identical:
                break
        case = Case.of(a, b, divergence, loaded=loaded)
        allowed = run_control(case, "minimal_change")
        named = [(each["forward"], each["site"]) for each in allowed.detail.get("smallest", ())]
        controls = {"minimal_change": allowed}
        return Tried(
            [(forward, site)], named, controls, len(a.forwards()), allowed.detail.get("candidates", 0)
        )

    def one_ulp(self, number: int) -> Tried:
        """One element of a key or value of the last layer, so that one cache entry is all that carries it."""
        arch, fmt = SUITES[number % len(SUITES)]
        draw = random.Random(f"ulp {self._seed} {number}")
        loaded = model(arch, fmt)
        layer = len(loaded.model.layers) - 1
        width = 32 if arch == "qwen3" else WIDTH
        while True:
            asked = self._scenario(draw)
            a = self._record(loaded, asked)
            request = draw.randrange(len(asked.requests))
            last = len(a.requests[request]["tokens"]) + self._tokens - 2
            position = draw.randrange(last)
            kind = draw.choice("KV")
            # phi3 has queries, keys and values in one product, in this order.
            head, element = draw.randrange(2), draw.randrange(width)
            before = {"K": 4 * width, "V": 6 * width}[kind] if arch == "phi3" else 0
            site = "qkv_proj" if arch == "phi3" else f"{kind.lower()}_proj"
            injected_fault = InjectedFault(
                f"layers.{layer}.self_attn.{site}", request, position, before + head * width + element
            )
            injected_faults: tuple[tuple[InjectedFault, ...], tuple[InjectedFault, ...]] = (
                (),
                (injected_fault,),
            )
            b = self._record(loaded, asked, injected_faults[1])
            case = Case.of(a, b, loaded=loaded, injected_faults=injected_faults)
            if case.divergence.identical:
                continue
            controls = {name: run_control(case, name) for name in ("minimal_change", "patch_in", "patch_out")}
            # A unit in the last place may be rounded away before it is stored, or by all that read it.
            if controls["patch_in"].result not in ("no_effect", "no_differing_entries", "not_run"):
                break
        named = [
            controls["minimal_change"].result,
            *(list(map(tuple, controls[name].detail["smallest"])) for name in ("patch_in", "patch_out")),
        ]
        entry = [(layer, kind, head, position)]
        return Tried(["none", entry, entry], named, controls, len(a.forwards()))

    def _scenario(self, draw: random.Random) -> Scenario:
        requests = [
            {
                "id": f"r{n}",
                "tokens": [draw.randrange(VOCAB) for _ in range(draw.randrange(2, 30))],
                "arrival": 0 if n == 0 else draw.randrange(self._tokens),
            }
            for n in range(self._requests)
        ]
        return Scenario.from_dict(
            {
                "model": "tiny",
                "schedule": "continuous",
                "layout": "packed",
                "active": 3,
                "max_tokens": self._tokens,
                "request": requests,
            }
        )

    def _record(self, loaded: Any, asked: Scenario, injected_faults: tuple[InjectedFault, ...] = ()) -> Trace:
        self._count += 1
        options = RecordOptions(observe=0, faults=injected_faults)
        return record(asked, self._directory / str(self._count), loaded=loaded, options=options)

    def _call(self, draw: random.Random, trace: Trace) -> tuple[str, int, int] | None:
        """A linear site, and a forward whose number of rows no other one has; None where there is none."""
        rows = [int(line["shape"][1]) for line in trace.forwards()]
        alone = [n for n, count in enumerate(rows) if rows.count(count) == 1]
        if not alone:
            return None
        forward = draw.choice(alone)
        site = draw.choice([site.name for site in trace.sites if site.kind == "linear"])
        return site, rows[forward], forward
