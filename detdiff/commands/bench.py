"""The `bench` command: a workload, policies, their rounds, and what is written of them."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from detdiff.bench.counts import Counts, cache_memory
from detdiff.bench.figures import bench_json
from detdiff.bench.measure import WALL, Measurement, PolicyResult, Progress, answers, measure
from detdiff.bench.policies import DEFAULT, policies, with_pins
from detdiff.bench.runs import Goodput
from detdiff.bench.simulate import simulate
from detdiff.bench.split import LEVELS, SplitSearch, find_split, split_levels
from detdiff.bench.workload import AT_ONCE, Lengths, Workload, drawn, read
from detdiff.compare import series
from detdiff.engines.base import Engine, chip
from detdiff.engines.registry import SERVER, open_engine
from detdiff.errors import CommandError, PolicyUnusable
from detdiff.report.bench import bench_html
from detdiff.report.build import build
from detdiff.report.html import write_html
from detdiff.report.split import split_html, split_json
from detdiff.scenario import Request, Scenario, parse_flags
from detdiff.trace import Trace


@dataclass(frozen=True)
class BenchArguments:
    """The command's options."""

    scenario: Path | None
    model: str | None
    engine: str | None
    changes: str
    policies: tuple[str, ...]
    requests: int | None
    prompt_lengths: str | None
    answer_lengths: str | None
    arrivals: str
    workload: Path | None
    seed: int
    rounds: int
    simulate: bool
    page: int
    budget: int | None
    goodput: tuple[str, ...]
    folder: Path | None
    find_split: bool = False
    clock: str = WALL


def measured(asked: BenchArguments, progress: Progress | None = None) -> Measurement:
    """Measure, or only simulate; an interrupted measurement keeps its rounds.

    Raises CommandError for options that contradict one another, WorkloadUnusable, PolicyUnusable, and what running raises.
    """
    _check(asked)
    base = _base(asked)
    engine = None if asked.simulate else open_engine(base)
    workload = _workload(asked, engine)
    _check_clock(asked.clock, workload, engine)
    scenario = _loaded(base, workload, engine, asked.seed)
    wanted = policies(scenario, asked.policies or DEFAULT)
    found = [PolicyResult(each) for each in (wanted if engine is None else with_pins(engine, wanted))]
    environment = _environment(engine, asked.clock)
    result = Measurement(workload, found, 0 if asked.simulate else asked.rounds, environment)
    if engine is None:
        _simulate(asked, found, workload)
        result.finished = True
        return result
    folder = None if asked.folder is None else asked.folder / "traces"
    try:
        answers(engine, found, workload, folder, progress)
        measure(engine, found, asked.rounds, seed=asked.seed, clock=asked.clock, progress=progress)
        result.finished = True
    except KeyboardInterrupt:
        if not any(each.runs or each.counts for each in found):
            raise
    environment["load_after"] = os.getloadavg()[0]
    return result


def split_measured(asked: BenchArguments, progress: Progress | None = None) -> SplitSearch:
    """From how many requests at once one batch pays; an interrupted search keeps its rounds. Raises what `measured` does."""
    _check(asked)
    base = _base(asked)
    engine = open_engine(base)
    workload = _workload(replace(asked, requests=asked.requests or LEVELS[-1]), engine)
    _check_clock(asked.clock, workload, engine)
    scenario = _loaded(base, workload, engine, asked.seed)
    found = SplitSearch(
        split_levels(scenario, engine, len(workload)),
        asked.rounds,
        workload.source,
        _environment(engine, asked.clock),
    )
    found.environment["reference"] = base.kernels.profile is not None
    try:
        find_split(engine, found, asked.seed, progress)
    except KeyboardInterrupt:
        if not any(level.whole.runs for level in found.levels):
            raise
    found.environment["load_after"] = os.getloadavg()[0]
    if asked.folder is not None:
        asked.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(split_json(found), indent=1, allow_nan=False)
        (asked.folder / "split.json").write_text(text + "\n", encoding="utf-8")
        (asked.folder / "split.html").write_text(split_html(found), encoding="utf-8")
    return found


def _check_clock(clock: str, workload: Workload, engine: Engine | None) -> None:
    served = engine is not None and engine.name == SERVER
    if clock != WALL and (served or any(item.arrival for item in workload.items)):
        raise CommandError(
            f"--clock {clock} counts what this process computes, and says nothing of a server's work, nor of waiting for arrivals. Leave it out, "
            "or measure requests at once on an engine in this process."
        )


def _environment(engine: Engine | None, clock: str) -> dict[str, Any]:
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "chip": chip(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "load_after": os.getloadavg()[0],
        "clock": clock,
        **({} if engine is None else {"engine": engine.environment()}),
    }


def _check(asked: BenchArguments) -> None:
    if (asked.scenario is None) == (asked.model is None):
        raise CommandError("One of the two says what is measured: a SCENARIO file, or --model. Give either.")
    goodput_of(asked.goodput)
    beside = {
        "--policy": asked.policies,
        "--simulate": asked.simulate,
        "--arrivals": asked.arrivals != AT_ONCE,
        "--goodput": asked.goodput,
    }
    wrong = [name for name, given in beside.items() if given]
    if asked.find_split and wrong:
        raise CommandError(
            f"{wrong[0]} says nothing to --find-split, which compares one batch of requests at once with its rows split. Leave one of the two out."
        )


def written(found: Measurement, asked: BenchArguments) -> Path | None:
    """Write the JSON, the page and a page for each divergence into the folder that was asked for; the page's path."""
    if asked.folder is None:
        return None
    asked.folder.mkdir(parents=True, exist_ok=True)
    goodput = goodput_of(asked.goodput)
    text = json.dumps(bench_json(found, goodput), indent=1, allow_nan=False)
    (asked.folder / "bench.json").write_text(text + "\n", encoding="utf-8")
    links = {}
    for number, result in enumerate(found.results):
        traces = [asked.folder / "traces" / str(n) for n in (0, number)]
        if (
            result.divergence is not None
            and not result.divergence.identical
            and all(t.is_dir() for t in traces)
        ):
            name = f"divergence-{re.sub(r'[^A-Za-z0-9]+', '-', result.policy.name).strip('-')}.html"
            a, b = (Trace.open(trace) for trace in traces)
            write_html(
                build(result.divergence, None, series(a, b, result.divergence), ""), asked.folder / name
            )
            links[result.policy.name] = name
    page = asked.folder / "bench.html"
    page.write_text(bench_html(found, links, goodput), encoding="utf-8")
    return page


def _simulate(asked: BenchArguments, found: Sequence[PolicyResult], workload: Workload) -> None:
    lengths = [(item.prompt_length, item.answer_length) for item in workload.items]
    for result in found:
        try:
            forwards = simulate(result.policy.scenario, workload)
        except PolicyUnusable as error:
            result.why = str(error)
            continue
        result.counts = Counts.of(forwards, result.policy.slots)
        result.memory = cache_memory(lengths, forwards, asked.page, asked.budget)


def _base(asked: BenchArguments) -> Scenario:
    """The scenario without its workload."""
    if asked.scenario is not None:
        base = Scenario.from_toml(asked.scenario)
    else:
        keys = {"model": asked.model, "request": [{"tokens": [0]}]}
        base = Scenario.from_dict(
            {**keys, **({} if asked.engine is None else {"engine": asked.engine})}, where="bench"
        )
    if asked.changes:
        base = base.with_changes(**parse_flags(asked.changes))
    return base


def _workload(asked: BenchArguments, engine: Engine | None) -> Workload:
    if asked.workload is not None:
        encode = None if engine is None else lambda text: engine.encode(text, False)
        return read(asked.workload, encode)
    # Requests of one length stay together from first to last.
    plain = ("8", "16") if asked.find_split else ("exponential:32", "exponential:16")
    prompts, lengths = (
        Lengths.parse(given or usual)
        for given, usual in zip((asked.prompt_lengths, asked.answer_lengths), plain, strict=True)
    )
    return drawn(asked.requests or 32, prompts, lengths, asked.arrivals, asked.seed)


def _loaded(base: Scenario, workload: Workload, engine: Engine | None, seed: int) -> Scenario:
    """The scenario with the workload's requests; prompts that are not known are drawn."""
    draw = random.Random(seed)
    size = int(engine.identity.get("vocab_size") or 256) if engine is not None else 256
    stops = set(getattr(engine, "stop_tokens", ()))
    usable = [token for token in range(size) if token not in stops]
    requests = []
    for number, item in enumerate(workload.items):
        tokens = item.prompt if isinstance(item.prompt, tuple) else None
        if tokens is None:
            tokens = tuple(draw.choice(usable) for _ in range(item.prompt_length))
        arrival = round(item.arrival) if any(each.arrival for each in workload.items) else 0
        requests.append(
            Request(
                id=f"r{number}",
                tokens=tokens,
                max_tokens=item.answer_length,
                arrival=arrival,
                ignore_stop=True,
            )
        )
    return replace(
        base, requests=tuple(requests), schedule=replace(base.schedule, kind="continuous", active=None)
    )


def goodput_of(given: Sequence[str]) -> Goodput | None:
    """The limits that ``--goodput`` says. Raises CommandError."""
    limits = {}
    for each in given:
        name, _, value = each.partition(":")
        if name not in ("ttft", "tpot", "e2el") or not re.fullmatch(r"\d+(\.\d+)?", value):
            raise CommandError(
                f"--goodput is {each!r}; expected ttft:MS, tpot:MS or e2el:MS, milliseconds that a request has to keep. Correct it."
            )
        limits[name] = float(value)
    return Goodput(**limits) if limits else None
