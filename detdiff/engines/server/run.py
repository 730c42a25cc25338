"""One run of a scenario at a server: batches asked, what shows that they met, and answers written as they come."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from detdiff.engines import base
from detdiff.engines.base import Begin, RunOptions, request_header, wanted_values
from detdiff.engines.function import EngineRequest
from detdiff.engines.function.answers import Answer, answer
from detdiff.engines.function.steps import AnsweredBatch, AnswerKinds, StepWriter
from detdiff.scenario import Scenario

from .answers import ServerAnswer
from .load import LoadWatch
from .together import TogetherEvidence, at_once, evidence, poisson

if TYPE_CHECKING:
    from .engine import ServerEngine


class ServerRun:
    """One run of a scenario: batches asked, answers written as they come."""

    def __init__(self, engine: ServerEngine, scenario: Scenario, begin: Begin, options: RunOptions) -> None:
        self._engine, self._scenario, self._begin, self._options = engine, scenario, begin, options
        self._name = uuid.uuid4().hex[:8]
        self._asking = engine.asking(scenario.capture.top, self._name)
        self._asked = [
            EngineRequest(each.id, engine.prompt(each), each.max_tokens, 0, each.prompt)
            for each in scenario.requests
        ]
        self._answers: dict[int, Answer] = {}
        self._found: dict[int, ServerAnswer] = {}
        self._waiting: list[AnsweredBatch] = []
        self._writer: Any = None
        self._written: StepWriter | None = None
        self._came: list[list[Sequence[float]]] = []
        self._rehearsed = False
        self._load = LoadWatch(engine.client, engine.kind.load)
        self._kinds: AnswerKinds
        self._again = dict(engine.client.again)
        self._started, self._clock = time.time(), time.perf_counter()
        self._tokens = 0

    def all(self) -> None:
        """Run every batch and write it."""
        numbers = range(len(self._asked))
        kind, size = self._scenario.schedule.kind, self._scenario.schedule.active
        if kind == "serial":
            for number in numbers:
                self._batch([number])
        elif kind == "static":
            step = size or len(self._asked)
            for first in range(0, len(self._asked), step):
                self._batch(list(numbers[first : first + step]))
        else:
            self._batch(list(numbers), self._starts(), size)
        if self._waiting:
            self._open()

    def _starts(self) -> list[float]:
        own, requests = self._engine.own, self._scenario.requests
        if own.arrivals:
            return list(own.arrivals)
        if own.rate:
            return poisson(len(requests), own.rate, own.seed)
        return [each.arrival * own.tick for each in requests]

    def _batch(self, numbers: list[int], starts: Sequence[float] = (), active: int | None = None) -> None:
        rehearse = (
            len(numbers) > 1
            and not (self._engine.kind.streams_values and self._engine.own.stream)
            and self._engine.own.rehearse
        )
        if rehearse:
            seen = self._together(numbers, starts, active, values=False)
            self._came.append([found.came for found in seen.values()])
            self._rehearsed = True
        found = self._together(numbers, starts, active, values=True)
        if not rehearse:
            self._came.append([each.came for each in found.values()])

    def _together(
        self, numbers: list[int], starts: Sequence[float], active: int | None, *, values: bool
    ) -> dict[int, ServerAnswer]:
        jobs = [self._job(number, values) for number in numbers]
        self._engine.client.stopped = False
        if len(jobs) == 1 and not starts:
            return {numbers[0]: self._kept([numbers[0]], [jobs[0]()], values)[0]}
        with self._load.watched():
            outcome = at_once(jobs, starts, active, self._engine.client.stop)
        done = [place for place in range(len(jobs)) if place in outcome.done]
        found = [outcome.done[place] for place in done]
        # What was answered before a failure stays readable.
        self._kept([numbers[place] for place in done], found, values)
        if outcome.failed is not None:
            raise outcome.failed
        return dict(zip(numbers, found, strict=True))

    def _job(self, number: int, values: bool) -> Callable[[], ServerAnswer]:
        request, tokens = self._scenario.requests[number], self._asked[number].tokens
        return lambda: self._asking.ask(request, tokens, values=values)

    def _kept(self, numbers: list[int], found: list[ServerAnswer], values: bool) -> list[ServerAnswer]:
        if not values or not numbers:
            return found
        answers = []
        for number, each in zip(numbers, found, strict=True):
            self._engine.learn(each)
            answers.append(answer(each.generation(), self._asked[number], self._engine.kind.name))
            self._found[number] = each
        self._answers |= dict(zip(numbers, answers, strict=True))
        self._waiting.append(AnsweredBatch(tuple(numbers), tuple(answers)))
        # Only an answer with a token says what answers hold.
        if self._writer is None and any(each.tokens for each in answers):
            self._open()
        elif self._writer is not None:
            self._write()
        return found

    def _open(self) -> None:
        first = next((each for each in self._answers.values() if each.tokens), None)
        known = {number: each for number, each in self._answers.items() if each.tokens or first is None}
        self._kinds = AnswerKinds.of(self._engine.kind.name, self._asked, known)
        lacks = self._kinds.lacks()
        for capability in (base.SITES, base.ROWS_SEEN, base.CACHE, base.KERNEL_PATHS, base.FORWARDS):
            lacks[capability] = self._engine.lacks(capability)
        if base.LOGITS in lacks:
            lacks[base.LOGITS] = "the server gave no log-probabilities"
        self._writer = self._begin(
            {
                "requests": [
                    request_header(request, each.tokens)
                    for request, each in zip(self._scenario.requests, self._asked, strict=True)
                ],
                "sites": self._kinds.sites,
                "lacks": lacks,
                "notes": self._notes(),
            }
        )
        wanted = wanted_values(self._scenario, self._options)
        self._written = StepWriter(self._engine.text, self._kinds, self._asked, self._answers, wanted)
        self._write()

    def _write(self) -> None:
        assert self._written is not None
        total = sum(each.max_tokens for each in self._asked)
        for batch in self._waiting:
            for number in batch.numbers:
                self._answers[number] = self._fitting(number)
            for step in range(max(self._written.steps(number) for number in batch.numbers)):
                self._written.step(self._writer, batch.numbers, step)
            self._tokens += sum(len(each.tokens) for each in batch.answers)
            if self._options.progress is not None:
                self._options.progress(min(self._tokens, total), total)
        self._waiting.clear()

    def _fitting(self, number: int) -> Answer:
        """An answer of the kinds of this run; one without a token fits all. Raises EngineAnswerInvalid."""
        found = self._answers[number]
        if not found.tokens:
            return self._kinds.empty()
        self._kinds.check(self._engine.kind.name, self._asked[number], found)
        return found

    def _notes(self) -> list[str]:
        kind, own = self._engine.kind, self._engine.own
        notes = list(kind.notes)
        some = next((each for each in self._found.values() if each.tokens or each.ids), None)
        if some is not None and not some.ids and any(token.number is None for token in some.tokens):
            notes.append(
                "the server names tokens by text alone: their ids here are numbers of their bytes, not a tokenizer's"
            )
        if self._engine.asks_text or any(each.chat for each in self._scenario.requests):
            notes.append(
                "prompts went to the server as text: positions and ids of a prompt are its characters"
            )
        if own.cache != "off":
            notes.append("prefix caches of the server are as it has them")
        elif not kind.cache_off:
            notes.append(
                f"prefix caches of {kind.name} cannot be switched off from outside: a prompt that it has seen may be answered from a cache"
            )
        if kind.sampled_note and any(each.sampling.temperature for each in self._scenario.requests):
            notes.append(kind.sampled_note)
        return notes

    def told(self) -> dict[str, Any]:
        """What the end of the trace says: times, evidence, cached tokens, and what went on beside."""
        together = self._scenario.schedule.kind != "serial"
        batched = together and len(self._asked) > 1
        notes = self._notes()
        misnamed = sum(each.misnamed for n, each in self._found.items() if self._greedy(n))
        collided = sum(each.collided for each in self._found.values())
        if misnamed:
            notes.append(
                f"{misnamed} tokens are not the likeliest of their own top list, though decoding is greedy: the server names another "
                "token than the one it sent (as mlx_lm.server 0.32.2 does where top_logprobs is asked), or gives log-probabilities "
                "of something else"
            )
        if collided:
            notes.append(
                f"{collided} top lists are shorter than asked for: they are keyed by text, and tokens of the same text (parts of a "
                "character) collide"
            )
        miscounted = {
            self._asked[number].id: each
            for number, each in sorted(self._found.items())
            if each.counted is not None and each.tokens and abs(each.counted - len(each.tokens)) > 1
        }
        if miscounted:
            first = next(iter(miscounted.values()))
            notes.append(
                f"{len(miscounted)} answers have another number of tokens than the server counts, first {len(first.tokens)} "
                f"and {first.counted}"
            )
        again = {
            reason: count - self._again.get(reason, 0)
            for reason, count in self._engine.client.again.items()
            if count > self._again.get(reason, 0)
        }
        notes += [f"{count} requests were sent again ({reason})" for reason, count in again.items()]
        seen = self._evidence() if batched else None
        cached = {
            self._asked[number].id: each.cached
            for number, each in sorted(self._found.items())
            if each.cached is not None
        }
        server: dict[str, Any] = {
            "cached_tokens": cached,
            "again": again,
            "prompt_ids": [
                request.id
                for request in self._scenario.requests
                if request.tokens is not None or not (request.chat or self._engine.asks_text)
            ],
            "prompt_tokens": {
                self._asked[number].id: each.prompted
                for number, each in sorted(self._found.items())
                if each.prompted is not None
            },
            "miscounted": list(miscounted),
            "token_ids": all(each.named_by_id for each in self._found.values()),
        }
        times: dict[str, Any] = {
            "asked_as": self._name,
            "started": self._started,
            "seconds": time.perf_counter() - self._clock,
            "requests": {
                self._asked[number].id: [round(at - self._clock, 6) for at in each.came]
                for number, each in sorted(self._found.items())
            },
        }
        if together and not batched:
            server["met"] = False
            notes.append("one request was sent alone, so that nothing ran together: give more prompts")
        if seen is not None:
            server["met"] = seen.met
            times["together"] = seen.to_json()
            if not seen.met:
                notes.append(
                    "the requests that were sent together did not all run together, as far as their tokens show: "
                    f"{seen.most} at most at a time"
                    if seen.met is False
                    else "whether the requests ran together was not seen: their answers did not stream"
                )
            if seen.alone_inside:
                notes.append(
                    "the server counts one request in each of its forwards: where tokens come between each other's all the same, "
                    "several servers stand behind the address"
                )
            if seen.load is None:
                notes.append(
                    f"the server does not say how many requests it runs: {self._load.absent or 'nothing came while they ran'}"
                )
            elif seen.load.before:
                notes.append(
                    "the server ran requests of others before these: what met here is not all that met there"
                )
        return {
            "times": times,
            "observer": {"forwards": 0, "equal": None},
            "notes": notes,
            "server": server,
        }

    def _greedy(self, number: int) -> bool:
        return not self._scenario.requests[number].sampling.temperature

    def _evidence(self) -> TogetherEvidence:
        schedule = self._scenario.schedule
        streamed = (self._engine.kind.streams_values and self._engine.own.stream) or self._rehearsed
        if streamed:
            by = "tokens of a streamed rehearsal" if self._rehearsed else "times of tokens"
            found = evidence(self._came, by, every=schedule.kind == "static")
        else:
            found = TogetherEvidence(None, 1, 0, "nothing: answers did not stream")
        sent = (
            2 if schedule.kind == "continuous" else min(schedule.active or len(self._asked), len(self._asked))
        )
        return found.with_load(self._load.found(), sent)
