"""`detdiff reduce`: the smallest pair of scenarios that still diverges in the same way, and what was dropped on the way to it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detdiff.commands.explain import model_of
from detdiff.commands.sides import ComparisonArguments, Engines, Progress, Side, sides
from detdiff.errors import Interrupted
from detdiff.report.document import Blank, Block, Code, Item, Prose, Table
from detdiff.report.text import plain
from detdiff.report.words import count, escaped
from detdiff.scenario import Scenario
from detdiff.trace import Trace

if TYPE_CHECKING:
    from detdiff.reduce import Reduction, Step

SCHEMA = "detdiff.reduction/2"


@dataclass(frozen=True)
class ReduceArguments:
    """Where to, how much of it, and what has to stay; see ``detdiff.reduce.reduce``."""

    folder: Path
    budget: int | None = None
    keep_flip: bool = False
    twin: bool | None = None


def reduced(
    asked: ComparisonArguments, wanted: ReduceArguments, progress: Progress, on_step: Callable[[Step], None]
) -> Reduction:
    """Reduce what was asked for. Raises Interrupted, CommandError and what ``reduce`` raises."""
    from detdiff.reduce import ReduceOptions, reduce

    found = sides(replace(asked, replay=True))
    loaded = model_of(asked, found, Engines())
    pair = [_moved(side, asked) for side in found]
    steps: list[Step] = []

    def stepped(step: Step) -> None:
        steps.append(step)
        on_step(step)

    try:
        with progress("reduce") as on_token:
            return reduce(
                *pair,
                folder=wanted.folder,
                loaded=loaded,
                budget=wanted.budget,
                progress=on_token,
                on_step=stepped,
                options=ReduceOptions(wanted.keep_flip, wanted.twin),
            )
    except KeyboardInterrupt:
        raise Interrupted(_left(wanted.folder, steps)) from None


def _moved(side: Side, asked: ComparisonArguments) -> Scenario | Trace:
    """What is to be run; a trace whose model is elsewhere now names it where it is."""
    if isinstance(side.source, Trace) and asked.model is not None:
        scenario = Scenario.from_dict(side.source.scenario, where=f"the scenario of {side.given}")
        prompts = {each["id"]: tuple(each["tokens"]) for each in side.source.requests}
        requests = tuple(
            replace(each, prompt=None, chat=False, tokens=prompts[each.id]) for each in scenario.requests
        )
        return replace(scenario, requests=requests).with_changes(model=asked.model)
    return side.source


def _left(folder: Path, steps: list[Step]) -> str:
    where = shlex.quote(str(folder))
    if not (folder / "a.toml").is_file():
        return f"Interrupted before the pair was explained; {where} holds nothing yet. The same command begins again."
    rows = f" ({count(steps[-1].rows, 'row')} in both runs)" if steps else ""
    return (
        f"Interrupted; {where} keeps the smallest pair so far{rows} as a.toml and b.toml, and the answer of every pair that was "
        "run. The same command goes on from there."
    )


def reduction_json(found: Reduction) -> dict[str, Any]:
    """The answer for programs."""
    return {
        "schema": SCHEMA,
        "a": str(found.folder / "a.toml"),
        "b": str(found.folder / "b.toml"),
        "twin": str(found.folder / "twin") if found.twin else None,
        "rows_before": found.rows_before,
        "rows_after": found.rows_after,
        "tried": found.tried,
        "finished": found.finished,
        "dropped": list(found.dropped),
        "verdict": found.verdict.kind,
        "rule": found.verdict.rule,
        "said": found.verdict.sentence,
        "site": _site(found),
        "steps": [step.to_json() for step in found.steps],
        "command": _command(found),
    }


def reduction_text(found: Reduction, *, width: int = 100) -> str:
    """The answer for people."""
    return plain(_blocks(found), width=width)


def _blocks(found: Reduction) -> Iterator[Block]:
    before, after = found.steps[0], found.steps[-1]
    share = f"{found.rows_after / found.rows_before:.0%} of what it was"
    site = _site(found)
    at = f", origin at {escaped(site)}" if site is not None else ""
    yield Prose(
        f"{count(found.rows_before, 'row')} became {found.rows_after:,} ({share}), in {count(found.tried, 'pair')} that were "
        f"run; the verdict is still {found.verdict.kind}{at}."
    )
    rows = [
        (f"{step.number}", step.sentence)
        + tuple(f"{n:,}" for n in (step.rows, step.requests, step.prompt_tokens, step.max_tokens))
        for step in found.steps
    ]
    headers = ("step", "", "rows", "requests", "prompt tokens", "generated at most")
    yield from (Blank(), Table(headers, tuple(rows)), Blank())
    yield Prose(
        f"requests: {before.requests:,} before, {after.requests:,} after; tokens: "
        f"{before.prompt_tokens + before.max_tokens:,} before, {after.prompt_tokens + after.max_tokens:,} after"
    )
    yield Item("settings that are not needed: ", ", ".join(found.dropped) or "none")
    if found.twin:
        layers = f", {count(after.layers, 'layer')}" if after.layers is not None else ""
        yield Prose(
            f"a model of random weights{layers} diverges in the same way: no weights are needed (twin/config.json)"
        )
    divergence = found.verdict.divergence
    if divergence is not None and all(request.flip is None for request in divergence.requests):
        yield Prose("no token flips in it; where the given pair has a flip, --keep-flip keeps one")
    if not found.finished:
        yield Prose("the budget ended the search; a larger one goes on from here")
    yield Item(f"{found.folder}: ", ", ".join(("a.toml", "b.toml", *(("twin/",) if found.twin else ()))))
    yield from (Blank(), Code(_command(found)))


def _command(found: Reduction) -> str:
    return shlex.join(["detdiff", "explain", str(found.folder / "a.toml"), str(found.folder / "b.toml")])


def _site(found: Reduction) -> str | None:
    divergence = found.verdict.divergence
    if divergence is None:
        return None
    first = next((r for r in divergence.requests if r.id == divergence.first), None)
    return None if first is None or first.origin is None else first.origin.site
