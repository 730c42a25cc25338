"""FunctionEngine: whatever generates for requests under a schedule, its answers written as a trace.

Importing this imports NumPy and no model library.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from detdiff.engines import base
from detdiff.engines.base import Begin, RunOptions, request_header, wanted_values
from detdiff.errors import EngineFailed, EngineRefuses, words_of
from detdiff.scenario import Scenario, Schedule
from detdiff.trace import Embeddings

from .answers import Answer, EngineRequest, answer
from .steps import AnsweredBatch, AnswerKinds, StepWriter

_CACHE = "an engine that is a function shows no cache"
_PATHS = "an engine that is a function does not say what computes its sites"
_FORWARDS = "an engine that is a function shows answers; forwards here stand for steps of the whole batch"


class FunctionEngine:
    """An object with ``generate(requests, schedule)``, or a function of the requests alone, which are then one batch.

    It answers with one Generation for each request, in their order or by their ids, or with the generated token ids alone.
    ``schedule.kind`` is ``static`` (all requests are one batch; a single request is alone) or ``continuous`` (requests
    arrive at their ``arrival``, ``schedule.active`` of them at a time at most). The object may have ``name``,
    ``encode(text)``, ``decode(ids)``, ``vocab_size`` and ``reset()``.
    """

    def __init__(
        self, given: Any, *, name: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.given = given
        self.name = name or "function"
        self.settings: Mapping[str, Any] = dict(settings or {})
        generate = getattr(given, "generate", None)
        self._call: Callable[..., Any] = generate if callable(generate) else given
        self._scheduled = _takes_two(self._call)
        own = getattr(given, "name", None) if callable(generate) else getattr(given, "__qualname__", None)
        self.label = str(own or type(given).__name__)
        self.identity: Mapping[str, Any] = {"name": self.label}
        if getattr(given, "vocab_size", None) is not None:
            self.identity = {**self.identity, "vocab_size": int(given.vocab_size)}
        found = {base.TOKENS, base.SERIAL, base.STATIC, base.EMBEDS}
        found |= {base.CONTINUOUS} if self._scheduled else set()
        found |= {base.RESET} if callable(getattr(given, "reset", None)) else set()
        found |= {base.TEXT} if callable(getattr(given, "encode", None)) else set()
        self.capabilities = frozenset(found)

    def environment(self) -> dict[str, Any]:
        return base.machine()

    def lacks(self, capability: str) -> str:
        reasons = {
            base.RESET: f"{self.label} has no reset()",
            base.CONTINUOUS: f"{self.label} takes requests alone",
            base.TEXT: f"{self.label} has no encode(text)",
            base.CACHE: _CACHE,
            base.KERNEL_PATHS: _PATHS,
            base.FORWARDS: _FORWARDS,
        }
        return reasons.get(capability, f"{self.label} is a function, which cannot be told of {capability}")

    def encode(self, text: str, chat: bool) -> list[int]:
        """Raises EngineRefuses without ``encode``, and EngineFailed where it raises."""
        if chat:
            raise EngineRefuses(
                f"chat cannot be told to the engine {self.label}; expected prompts as they are. Leave it out."
            )
        encode = getattr(self.given, "encode", None)
        if not callable(encode):
            raise EngineRefuses(
                f"Prompt {text[:40]!r} is text, and the engine {self.label} has no encode(text) that gives token ids. Give "
                "prompts as lists of token ids, or the engine that method."
            )
        try:
            return [int(token) for token in encode(text)]
        except Exception as error:
            raise EngineFailed(
                f"encode of the engine {self.label} raised {type(error).__name__} ({error}) for the prompt {text[:40]!r}; "
                "expected its token ids. Correct the engine, or give prompts as lists of token ids."
            ) from error

    def decode(self, ids: list[int]) -> str:
        decode = getattr(self.given, "decode", None)
        return str(decode(ids)) if callable(decode) else " ".join(map(str, ids))

    def check(self, scenario: Scenario) -> None:
        """Raises EngineRefuses for what a function cannot be told."""
        if scenario.schedule.kind == "continuous" and not self._scheduled:
            raise EngineFailed(
                f"The function {self.label} takes requests alone, so that all of them are one batch, and schedule "
                "continuous was asked for. Ask for static:N, or let the function take the schedule as its second argument."
            )
        names = "kernels", "a draft", "settings of the cache", "force_tokens", "lens", "chat", "a temperature"
        base.refuse_untold(
            scenario,
            names,
            f"{self.label}, which is asked for requests under a schedule alone. Leave it "
            "out, or set it in the engine.",
        )

    def reset(self) -> None:
        self.given.reset()

    def run(self, scenario: Scenario, begin: Begin, options: RunOptions) -> Mapping[str, Any]:
        """See `base.Engine.run`. Raises EngineFailed where the function raises, EngineAnswerInvalid for what it answers."""
        overrides = options.overrides
        if overrides != base.Overrides():
            raise EngineRefuses(
                f"The engine {self.label} was asked for an override; expected none, since a function takes none. Leave it out."
            )
        asked = self._asked(scenario)
        started, clock = time.time(), time.perf_counter()
        batches = self._batches(scenario, asked)
        seconds = time.perf_counter() - clock
        self._write(scenario, asked, batches, begin, options)
        return {
            "times": {"started": started, "seconds": seconds},
            "observer": {"forwards": 0, "equal": None},
        }

    def _asked(self, scenario: Scenario) -> list[EngineRequest]:
        found = []
        arriving = scenario.schedule.kind == "continuous"
        for each in scenario.requests:
            tokens = each.tokens
            if tokens is None:
                text = each.prompt or ""
                # Without an encoder an engine of texts is asked by text, and its code points stand for token ids.
                known = base.TEXT in self.capabilities or not getattr(self.given, "text", False)
                tokens = tuple(self.encode(text, each.chat)) if known else tuple(map(ord, text))
            found.append(
                EngineRequest(
                    each.id,
                    tuple(tokens),
                    each.max_tokens,
                    each.arrival if arriving else 0,
                    each.prompt,
                    scenario.task,
                )
            )
        return found

    def _batches(self, scenario: Scenario, asked: Sequence[EngineRequest]) -> list[AnsweredBatch]:
        if scenario.schedule.kind == "serial":
            return [
                AnsweredBatch((number,), tuple(self._answers([each], Schedule("static"))))
                for number, each in enumerate(asked)
            ]
        schedule = scenario.schedule
        size = schedule.active if schedule.kind == "static" and schedule.active else len(asked)
        return [
            AnsweredBatch(
                tuple(range(first, min(first + size, len(asked)))),
                tuple(self._answers(asked[first : first + size], scenario.schedule)),
            )
            for first in range(0, len(asked), size)
        ]

    def _answers(self, asked: Sequence[EngineRequest], schedule: Schedule) -> list[Answer]:
        try:
            given = self._call(tuple(asked), schedule) if self._scheduled else self._call(tuple(asked))
        except Exception as error:
            if isinstance(error, EngineFailed):
                raise
            raise EngineFailed(
                f"The engine {self.label} raised {type(error).__name__} ({words_of(error)}) for schedule {schedule.kind} and the requests "
                f"{', '.join(each.id for each in asked)}; expected one answer for each. Correct the engine."
            ) from error
        if isinstance(given, Mapping):
            listed = [given[each.id] for each in asked if each.id in given]
        else:
            # Whatever an engine of the user's own returns.
            listed = list(cast(Any, given)) if hasattr(given, "__iter__") else []
        if len(listed) != len(asked):
            raise EngineFailed(
                f"The engine {self.label} gave {len(listed)} answers for {len(asked)} requests; expected one for each, in their "
                "order or by their ids. Correct the engine."
            )
        return [answer(one, each, self.label) for each, one in zip(asked, listed, strict=True)]

    def _write(
        self,
        scenario: Scenario,
        asked: Sequence[EngineRequest],
        batches: Sequence[AnsweredBatch],
        begin: Begin,
        options: RunOptions,
    ) -> None:
        answers = {
            number: one for batch in batches for number, one in zip(batch.numbers, batch.answers, strict=True)
        }
        kinds = AnswerKinds.of(self.label, asked, answers)
        writer = begin(
            {
                "requests": [
                    request_header(request, each.tokens)
                    for request, each in zip(scenario.requests, asked, strict=True)
                ],
                "sites": kinds.sites,
                "lacks": {
                    **kinds.lacks(),
                    base.KERNEL_PATHS: _PATHS,
                    base.CACHE: _CACHE,
                    base.FORWARDS: _FORWARDS,
                },
            }
        )
        written = StepWriter(
            lambda token: self.decode([token]), kinds, asked, answers, wanted_values(scenario, options)
        )
        total, done = sum(each.max_tokens for each in asked), 0
        for batch in batches:
            for step in range(max(written.steps(number) for number in batch.numbers)):
                written.step(writer, batch.numbers, step)
            for number, one in zip(batch.numbers, batch.answers, strict=True):
                if one.embedding is not None:
                    writer.embeddings(Embeddings(np.array([number], np.int32), one.embedding[None]))
            done += sum(len(one.tokens) for one in batch.answers)
            if options.progress is not None:
                options.progress(min(done, total), total)


def wrap(given: Any, *, name: str | None, settings: Mapping[str, Any]) -> FunctionEngine | None:
    """``given`` as an engine where it generates, or is a function; None for anything else."""
    if isinstance(given, type):
        return None
    if callable(getattr(given, "generate", None)):
        return FunctionEngine(given, name=name, settings=settings)
    if not callable(given) or hasattr(given, "parameters"):
        return None
    return FunctionEngine(given, name=name, settings=settings)


def open_function(model: str | None, settings: Mapping[str, Any]) -> FunctionEngine:
    """Raises EngineRefuses: a Python object has no name that opens it again."""
    raise EngineRefuses(
        "The engine function is an object that was given in Python, and its name alone does not open it again. Give the "
        "object (engine=...), or a factory as package.module:factory."
    )


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True
