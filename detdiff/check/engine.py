"""Engines of the user's own: what one must do to be checked, and the check.

Importing this imports NumPy and no model library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from detdiff.errors import CheckSettingInvalid, CheckSubjectInvalid, EngineFailed, NothingToCheck
from detdiff.probe import Probe
from detdiff.scenario import Request, Scenario, Schedule

from .compositions import Composition
from .difference import Compared, Difference, difference
from .engine_finding import EngineFinding
from .generation import Answer, EngineRequest, Generation, Tap, answer
from .levels import EXACT, TOKENS

__all__ = ["Engine", "EngineRequest", "Generation", "Tap", "as_engine", "check_engine", "check_scenario"]

_FEW, _DENSE, _MOST = 8, 64, 512
"""Kernels are probed over every number of rows up to the first at least and the second at most; none above the third."""


@runtime_checkable
class Engine(Protocol):
    """What can be checked: it generates greedily for requests under a schedule.

    An engine may have further attributes. ``name`` stands for it in what is said. ``encode(text)`` gives token ids, so that
    prompts may be texts; ``vocab_size`` bounds the prompts that are drawn without any. ``kernels(rows, sites)`` probes what
    computes its sites: given numbers of rows and names of sites (None: all), an iterable of `detdiff.probe.Probe`.
    """

    def generate(
        self, requests: Sequence[EngineRequest], schedule: Schedule
    ) -> Sequence[Any] | Mapping[str, Any]:
        """One answer for each request, in their order or by their ids: a Generation, or the generated token ids alone.

        ``schedule.kind`` is ``static`` (all requests are one batch; a single request is alone) or ``continuous`` (requests
        arrive at their ``arrival``, ``schedule.active`` of them at a time at most).
        """


@dataclass(frozen=True)
class FunctionEngine:
    """A function as an engine: it takes the requests and the schedule, or the requests alone, which are then one batch."""

    call: Callable[..., Any]
    name: str
    scheduled: bool

    def generate(
        self, requests: Sequence[EngineRequest], schedule: Schedule
    ) -> Sequence[Any] | Mapping[str, Any]:
        """Raises EngineFailed for a schedule that the function cannot be told of."""
        if self.scheduled:
            return self._answers(self.call(requests, schedule))
        if schedule.kind != "static":
            raise EngineFailed(
                f"The function {self.name} takes requests alone, so that all of them are one batch, and schedule "
                f"{schedule.kind} was asked for. Ask for static:N, or let the function take the schedule as its second argument."
            )
        return self._answers(self.call(requests))

    @staticmethod
    def _answers(given: Any) -> Sequence[Any] | Mapping[str, Any]:
        found: Sequence[Any] | Mapping[str, Any] = given
        return found


def as_engine(model: Any) -> Engine | None:
    """``model`` as an engine: one already, a function, or a causal language model of transformers; None for anything else."""
    kinds = {
        name for each in type(model).__mro__ for name in (each.__name__, f"{each.__module__}.{each.__name__}")
    }
    if "PreTrainedModel" in kinds:
        from .torch_engine import TransformersEngine

        return TransformersEngine(model)
    if callable(getattr(model, "generate", None)) and not isinstance(model, type):
        engine: Engine = model
        return engine
    if not callable(model) or isinstance(model, type) or hasattr(model, "parameters"):
        return None
    name = getattr(model, "__qualname__", type(model).__name__)
    return FunctionEngine(model, str(name), _takes_two(model))


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def name_of(engine: Engine) -> str:
    """An engine's own name, or that of its class."""
    return str(getattr(engine, "name", None) or type(engine).__name__)


def check_engine(
    engine: Any,
    requests: Sequence[EngineRequest],
    compositions: Sequence[Composition | str],
    level: str = EXACT,
    *,
    seeds: Sequence[int] = (0,),
) -> list[EngineFinding]:
    """Each request alone against the same request in every composition: one finding for each, in their order.

    ``engine`` is an Engine, a function or a causal language model of transformers. ``compositions`` are written as
    ``static:2`` or ``continuous:3``; each of ``seeds`` draws other neighbours and arrivals. ``level`` is ``exact`` (tokens,
    log-probabilities and tapped rows to their bits, as far as the engine gives them) or ``tokens``.

    Raises NothingToCheck, CheckSettingInvalid, CheckSubjectInvalid, and what an engine's answers are refused with.
    """
    return EngineCheck(_engine(engine), requests, level).findings(compositions, seeds)


def check_scenario(engine: Any, scenario: Scenario, level: str = EXACT) -> EngineFinding:
    """Each request of one whole batch, such as `detdiff.strategies` draws, alone against the same request in it.

    The scenario's requests have token ids; its model and what else it says of a run are not the engine's. Raises what
    `check_engine` raises.
    """
    requests = [EngineRequest(each.id, each.tokens or (), each.max_tokens) for each in scenario.requests]
    return EngineCheck(_engine(engine), requests, level).finding(scenario.schedule.kind, [("", scenario)])


def _engine(given: Any) -> Engine:
    found = as_engine(given)
    if found is None:
        raise CheckSubjectInvalid(
            f"A {type(given).__name__} is no engine; expected an object with generate(requests, schedule), a function, or a "
            "causal language model of transformers. Give one of them."
        )
    return found


class EngineCheck:
    """One engine and one workload: each request is run alone once, for all compositions."""

    def __init__(self, engine: Engine, requests: Sequence[EngineRequest], level: str = EXACT) -> None:
        if level not in (EXACT, TOKENS):
            raise CheckSettingInvalid(
                f"level is {level!r}, which an engine of its own cannot be checked at: what rounding may do there is not "
                f"known. Ask for {EXACT} or {TOKENS}."
            )
        if not requests or any(not each.tokens for each in requests):
            raise NothingToCheck(
                "There is no request, or one without a token, so that nothing would be checked. Give one prompt at least, "
                "each with a token at least."
            )
        self._engine = engine
        self._name = name_of(engine)
        self._level = level
        self._base = Scenario(
            self._name,
            tuple(Request(each.id, tokens=each.tokens, max_tokens=each.max_tokens) for each in requests),
        )
        self._alone: dict[str, Answer] = {}

    def findings(
        self, compositions: Sequence[Composition | str], seeds: Sequence[int] = (0,)
    ) -> list[EngineFinding]:
        """Raises NothingToCheck where there is no composition or no seed, and what an engine's answers are refused with."""
        if not compositions or not seeds:
            raise NothingToCheck(
                "There is no composition, or no seed, so that nothing would be checked. Give one at least, such as 'static:2'."
            )
        asked = [Composition.of(each, None) if isinstance(each, str) else each for each in compositions]
        return [
            self.finding(
                each.written, [(f"seed {seed}", one) for seed in seeds for one in each.draw(self._base, seed)]
            )
            for each in asked
        ]

    def finding(self, name: str, runs: Sequence[tuple[str, Scenario]]) -> EngineFinding:
        """Of the runs that make up one composition, each with the words that tell it from the others."""
        found: list[Difference] = []
        counted = Compared()
        for drawn, scenario in runs:
            answers = self._run(scenario)
            where = (drawn, tuple(each.id for each in scenario.requests))
            for request in scenario.requests:
                alone, beside = self._run_alone(request), answers[request.id]
                found.append(difference(request, where, alone, beside, exact=self._level == EXACT))
                counted = counted.add(found[-1].compared)
        if not counted.tokens:
            raise NothingToCheck(
                f"The engine {self._name} generated no token for any request, alone or in {name}, so that nothing "
                "was compared. Give other prompts, or let it ignore end-of-text."
            )
        parted = tuple(each for each in found if not each.equal)
        if not parted and counted.sites and not counted.rows:
            raise NothingToCheck(
                f"The engine {self._name} gave taps without a row for any request, so that none was compared. Give rows, or leave "
                "taps out."
            )
        # The base keeps the composition's neighbours out; a run that does not repeat says nothing of them.
        again = {each.request.id: each.request for each in parted}
        unsteady = next((id for id, request in again.items() if not self._repeats(request)), None)
        if unsteady is not None:
            parted = tuple(sorted(parted, key=lambda each: each.request.id != unsteady))
        repeats = unsteady is None if parted else None
        kernels, notes = self._kernels(parted) if parted and repeats else ((), ())
        return EngineFinding(name, self._name, counted, parted, repeats, kernels, notes)

    def _run(self, scenario: Scenario) -> dict[str, Answer]:
        asked = [
            EngineRequest(each.id, each.tokens or (), each.max_tokens, each.arrival)
            for each in scenario.requests
        ]
        if scenario.schedule.kind == "serial":
            return {each.id: self._one(each) for each in asked}
        return self._answers(asked, scenario.schedule)

    def _run_alone(self, request: Request) -> Answer:
        if request.id not in self._alone:
            self._alone[request.id] = self._one(
                EngineRequest(request.id, request.tokens or (), request.max_tokens)
            )
        return self._alone[request.id]

    def _one(self, request: EngineRequest) -> Answer:
        return self._answers([request], Schedule("static"))[request.id]

    def _answers(self, asked: Sequence[EngineRequest], schedule: Schedule) -> dict[str, Answer]:
        try:
            given = self._engine.generate(tuple(asked), schedule)
        except Exception as error:
            if isinstance(error, EngineFailed):
                raise
            words = " ".join(str(error).split())[:300].rstrip(".") or "no message"
            raise EngineFailed(
                f"The engine {self._name} raised {type(error).__name__} ({words}) for schedule {schedule.kind} and the requests "
                f"{', '.join(each.id for each in asked)}; expected one answer for each. Correct the engine."
            ) from error
        if isinstance(given, Mapping):
            listed = [given[each.id] for each in asked if each.id in given]
        else:
            # Whatever an engine of the user's own returns.
            listed = list(cast(Any, given)) if hasattr(given, "__iter__") else []
        if len(listed) != len(asked):
            raise EngineFailed(
                f"The engine {self._name} gave {len(listed)} answers for {len(asked)} requests; expected one for each, in their "
                "order or by their ids. Correct the engine."
            )
        return {each.id: answer(one, each, self._name) for each, one in zip(asked, listed, strict=True)}

    def _repeats(self, request: Request) -> bool:
        """Whether a request alone gives the same again."""
        again = self._one(EngineRequest(request.id, request.tokens or (), request.max_tokens))
        return difference(
            request, ("", ()), self._run_alone(request), again, exact=self._level == EXACT
        ).equal

    def _kernels(self, parted: Sequence[Difference]) -> tuple[tuple[Probe, ...], tuple[str, ...]]:
        """Probes of the sites where requests parted, over every M up to those of the forwards that parted, and notes."""
        probes = getattr(self._engine, "kernels", None)
        if probes is None:
            return (), ()
        first = [each.site for each in parted if each.site is not None]
        met = {
            rows for each in first for rows in (each.alone, each.beside) if rows is not None and rows <= _MOST
        }
        dense = range(1, max(_FEW, *(min(rows, _DENSE) for rows in met or {1})) + 1)
        try:
            return tuple(probes(sorted({*dense, *met}), {each.site for each in first} or None)), ()
        except Exception as error:
            # A method of the user's: what parted is to be said whatever it does.
            return (), (
                f"what computes the sites is not known: kernels raised {type(error).__name__} ({error})",
            )
