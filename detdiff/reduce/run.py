"""reduce: two runs in, the smallest pair of scenarios that still diverges in the same way out."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from detdiff.engines.mlx.engine import environment
from detdiff.engines.mlx.model import LoadedModel, encode, encode_messages
from detdiff.engines.mlx.model_directory import RANDOM, layers_of
from detdiff.engines.mlx.serve import Models
from detdiff.engines.registry import DEFAULT
from detdiff.errors import NothingToReduce, ReductionError
from detdiff.explain.case import opened_run, scenario_of
from detdiff.scenario import Request, Scenario
from detdiff.trace import Place, Trace

from .pair import Candidate, dropped, plain
from .result import ReduceOptions, Reduction, Step, TrialOutcome
from .search import Search
from .trials import CandidateTrials, Progress, ReductionFolder

Run = Trace | Scenario | Place | str
OnStep = Callable[[Step], None]
_SAME_MACHINE = ("detdiff", "mlx", "mlx_lm", "chip", "device")
"""What of the environment answers depend on."""


def reduce(
    a: Run,
    b: Run,
    *,
    folder: Path | str,
    loaded: LoadedModel | None = None,
    draft: LoadedModel | None = None,
    budget: int | None = None,
    progress: Progress | None = None,
    on_step: OnStep | None = None,
    options: ReduceOptions | None = None,
) -> Reduction:
    """The smallest pair of scenarios whose runs diverge as those of ``a`` and ``b`` do: the same verdict, the same stage, the
    same site of the first origin on the same kernel paths, the same finding of the bookkeeping.

    ``a`` and ``b`` are traces, scenarios, or paths of either; a trace is run again from its scenario. ``folder`` is new, or
    one in which the same reduction was interrupted: it then goes on without running any pair twice, and ends in the same
    pair. ``loaded`` and ``draft`` are used in every run. At most ``budget`` pairs are run, those of interrupted runs
    included. ``progress`` is called with tokens so far and at most of each run, ``on_step`` with each step that was not in
    the folder yet.

    Raises ReductionError for runs of another engine than MLX, NothingToReduce where they do not diverge, ReductionOfAnotherCase and
    ReductionFolderUnusable, and what reading, loading and running raise. An interrupt leaves the folder as it was after the last step.
    """
    options = options or ReduceOptions()
    runs = [opened_run(run) for run in (a, b)]
    scenarios = [scenario_of(run) for run in runs]
    _refuse_unreduced(scenarios)
    models = _models(scenarios, loaded, draft)
    plain_ = [_plain(run, asked, models) for run, asked in zip(runs, scenarios, strict=True)]
    start = Candidate(plain_[0], plain_[1])
    kept = ReductionFolder(folder, _case(start, models, options))
    with tempfile.TemporaryDirectory(prefix="detdiff-reduce-") as scratch:
        trials = CandidateTrials(kept, models, Path(scratch), budget, progress)
        steps: list[Step] = []

        def step(sentence: str, pair: Candidate, answer: TrialOutcome) -> None:
            made = _step(len(steps), sentence, pair, answer)
            steps.append(made)
            if kept.step(made, pair, trials.write_twins) and on_step is not None:
                on_step(made)

        try:
            search = _started(trials, start, step, options)
            search.run(_layers(models.target, start, options))
            verdict = trials.explained(search.now)
        finally:
            kept.write_pair()
        return Reduction(
            scenario_a=Scenario.from_toml(kept.path / "a.toml"),
            scenario_b=Scenario.from_toml(kept.path / "b.toml"),
            verdict=verdict,
            rows_before=steps[0].rows,
            rows_after=steps[-1].rows,
            steps=tuple(steps),
            tried=trials.tried,
            dropped=dropped(start, search.now),
            twin=search.now.twin is not None,
            finished=search.finished,
            folder=kept.path,
        )


def _started(trials: CandidateTrials, start: Candidate, step: Any, options: ReduceOptions) -> Search:
    search = Search(trials, start, step, flip=options.keep_flip)
    if search.original is None:
        raise NothingToReduce(
            f"There is nothing to reduce: {search.answer.why or 'the two runs do not diverge'}, each recorded anew on this machine. "
            "Expected two runs that part; `detdiff compare` shows what was compared."
        )
    if options.keep_flip and not search.original.flip:
        raise NothingToReduce(
            "There is no flip to keep: the two runs diverge in bits, and every token is equal. Reduce them without keeping a flip, or "
            "let them generate more tokens."
        )
    return search


def _refuse_unreduced(scenarios: list[Scenario]) -> None:
    """Raises ReductionError for what another engine than MLX ran, for adapters, and for later turns."""
    other = next((each.engine for each in scenarios if each.engine != DEFAULT), None)
    if other is not None:
        raise ReductionError(
            f"The runs are those of the engine {other}; expected mlx, which runs every smaller pair. Take requests and settings out of the "
            "scenarios by hand, and compare them with `detdiff compare`."
        )
    several = next((n for each in scenarios if (n := each.engine_settings.get("processes", 1)) != 1), None)
    if several is not None:
        raise ReductionError(
            f"A side runs over {several} processes; expected one, as smaller models need not be divisible among them. Take requests and "
            "settings out of the scenarios by hand, and compare them with `detdiff compare`."
        )
    adapter = next((each.adapter_path for each in scenarios if each.adapter_path is not None), None)
    if adapter is not None:
        raise ReductionError(
            f"A side has the adapter {adapter!r}; expected none, as smaller models and random weights have no layers of it. Fuse it "
            "into the model, or reduce without it."
        )
    turn = next((each.id for one in scenarios for each in one.requests if each.turn is not None), None)
    if turn is not None:
        raise ReductionError(
            f"Request {turn!r} is a later turn, whose conversation hangs on the turns before it; expected requests of one turn. "
            "Take turns out of the scenarios by hand, and compare them with `detdiff compare`."
        )


def _models(scenarios: list[Scenario], loaded: LoadedModel | None, draft: LoadedModel | None) -> Models:
    names = {scenario.model for scenario in scenarios}
    if loaded is None and len(names) > 1:
        raise ReductionError(
            f"The two sides name the models {' and '.join(map(repr, sorted(names)))}; expected one, as every smaller pair is run on "
            "it. Give both sides the same model."
        )
    speculative = next((each for each in scenarios if each.speculation is not None), scenarios[0])
    return Models.of(speculative, loaded, draft)


def _plain(run: Trace | Scenario, asked: Scenario, models: Models) -> Scenario:
    if isinstance(run, Trace):
        return plain(asked, {each["id"]: each["tokens"] for each in run.requests})
    return plain(asked, {each.id: _prompt(each, models.target) for each in asked.requests})


def _prompt(request: Request, loaded: LoadedModel) -> tuple[int, ...]:
    if request.tokens is not None:
        return request.tokens
    if request.messages is not None:
        return tuple(encode_messages(loaded, request.messages, arguments=request.chat_template_args))
    return tuple(encode(loaded, request.prompt or "", request.chat, request.chat_template_args))


def _case(start: Candidate, models: Models, options: ReduceOptions) -> dict[str, Any]:
    here = environment()
    return {
        "pair": start.key,
        "model": _hash(models.target.identity),
        "draft": None if models.draft is None else _hash(models.draft.identity),
        "options": vars(options),
        "environment": {name: here[name] for name in _SAME_MACHINE},
    }


def _hash(identity: Any) -> str:
    text = json.dumps(dict(identity), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _layers(model: LoadedModel, start: Candidate, options: ReduceOptions) -> int | None:
    """The model's layers, where twins may stand for it and can be made."""
    if options.twin is False or RANDOM in model.config or start.a.force_tokens or start.b.force_tokens:
        return None
    if options.twin is None and start.a.model == "builtin":
        return None
    known = (model.path / "config.json").is_file()
    return layers_of(model.config) if known and model.config else None


def _step(number: int, sentence: str, pair: Candidate, answer: TrialOutcome) -> Step:
    limits = [request.max_tokens for request in pair.a.requests]
    return Step(
        number=number,
        sentence=sentence,
        rows=answer.rows,
        requests=len(pair.a.requests),
        prompt_tokens=sum(len(request.tokens or ()) for request in pair.a.requests),
        max_tokens=sum(limits),
        layers=None if pair.twin is None else pair.twin.layers,
        key=pair.key,
    )
