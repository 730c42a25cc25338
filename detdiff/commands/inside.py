"""`detdiff explain --inside`: a server's runs on a local engine; what the place after it means."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from detdiff.commands.explain import ProgressBars
from detdiff.commands.sides import (
    ComparisonArguments,
    Engines,
    Progress,
    as_given,
    recorded,
    sides,
    with_names,
)
from detdiff.explain.inside import InsideAnswer, look_inside
from detdiff.scenario import Scenario
from detdiff.trace import Address, Trace, place

_PLACEHOLDER: Final = [{"id": "r0", "tokens": [0]}]


def seen_inside(
    asked: ComparisonArguments, where: str, controls: Sequence[str], budget: int | None, progress: Progress
) -> InsideAnswer:
    """What a server's runs show on the local engine that ``where`` names. Raises CommandError and what reading, recording and running raise."""
    base, served = local(where)
    engines = Engines()
    if len(asked.files) == 1:
        return _inside(
            (None, Trace.open(asked.files[0])), base, served, engines, asked, controls, budget, progress
        )
    found = sides(replace(asked, replay=True, keep=None))
    with recorded(found, None, progress, engines) as traces:
        answer = _inside(traces, base, served, engines, asked, controls, budget, progress)
        return as_given(answer, found, traces)


def local(where: str) -> tuple[Scenario, Trace | None]:
    """How to run on a local engine: as a scenario file says, as a served trace was run (given too), or a model as it comes.

    Raises what reading files raises.
    """
    path = place(where)
    if isinstance(path, Address):
        served = Trace.open(path, checked=True)
        return Scenario.from_dict({**served.scenario, "request": _PLACEHOLDER}, where=where), served
    if path.suffix == ".toml":
        return Scenario.from_toml(path, requests=_PLACEHOLDER), None
    if (path / "trace.json").exists():
        served = Trace.open(path)
        return Scenario.from_dict({**served.scenario, "request": _PLACEHOLDER}, where=where), served
    keys: dict[str, Any] = {"model": where, "request": _PLACEHOLDER}
    if path.suffix == ".gguf":
        keys["engine"] = "llama.cpp"
    return Scenario.from_dict(keys, where="--inside"), None


def _inside(
    traces: tuple[Trace | None, Trace],
    base: Scenario,
    served: Trace | None,
    engines: Engines,
    asked: ComparisonArguments,
    controls: Sequence[str],
    budget: int | None,
    progress: Progress,
) -> InsideAnswer:
    with tempfile.TemporaryDirectory(prefix="detdiff-") as folder, ProgressBars(progress) as bars:
        found = look_inside(
            *traces,
            base,
            engines.of(base),
            asked.keep or Path(folder),
            served=served,
            controls=controls or None,
            budget=budget,
            progress=bars.on_token,
            on_control=bars.next,
        )
        divergence = found.verdict.divergence
        if asked.keep is not None or divergence is None:
            return found
        paths = {getattr(divergence, side).trace: f"run {side} inside" for side in "ab"}
        verdict = replace(found.verdict, divergence=divergence.not_kept("ab"))
        return with_names(replace(found, verdict=verdict), paths)
