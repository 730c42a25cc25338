"""FunctionEngine: whatever generates for requests under a schedule, its answers written as a trace.

Importing this imports NumPy and no model library.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, cast

import numpy as np

from detdiff.engines import base
from detdiff.engines.base import (
    Begin,
    PortRows,
    RowTable,
    RunOptions,
    forward_line,
    request_header,
    wanted_values,
    write_rows,
)
from detdiff.errors import EngineAnswerInvalid, EngineFailed, EngineRefuses, words_of
from detdiff.scenario import Capture, Scenario, Schedule
from detdiff.trace import Generated, Site, digest_rows, format_ranges, ports_of

from .answers import Answer, EngineRequest, answer

SCORES: Final = "log_probabilities"
TOKENS: Final = "tokens"
_CACHE = "an engine that is a function shows no cache"
_PATHS = "an engine that is a function does not say what computes its sites"
_FORWARDS = "an engine that is a function shows answers; forwards here stand for steps of the whole batch"


@dataclass(frozen=True, eq=False)
class _AnsweredBatch:
    """The requests of one call, by number, and their answers in the same order."""

    numbers: tuple[int, ...]
    answers: tuple[Answer, ...]


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
        found = {base.TOKENS, base.SERIAL, base.STATIC}
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
                    each.id, tuple(tokens), each.max_tokens, each.arrival if arriving else 0, each.prompt
                )
            )
        return found

    def _batches(self, scenario: Scenario, asked: Sequence[EngineRequest]) -> list[_AnsweredBatch]:
        if scenario.schedule.kind == "serial":
            return [
                _AnsweredBatch((number,), tuple(self._answers([each], Schedule("static"))))
                for number, each in enumerate(asked)
            ]
        numbers = tuple(range(len(asked)))
        return [_AnsweredBatch(numbers, tuple(self._answers(asked, scenario.schedule)))]

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
        batches: Sequence[_AnsweredBatch],
        begin: Begin,
        options: RunOptions,
    ) -> None:
        answers = {
            number: one for batch in batches for number, one in zip(batch.numbers, batch.answers, strict=True)
        }
        kinds = _AnswerKinds.of(self.label, asked, answers)
        writer = begin(
            {
                "requests": [
                    request_header(request, each.tokens)
                    for request, each in zip(scenario.requests, asked, strict=True)
                ],
                "sites": kinds.sites,
                "lacks": kinds.lacks(),
            }
        )
        written = _StepWriter(self, kinds, asked, answers, wanted_values(scenario, options), scenario.capture)
        total, done = sum(each.max_tokens for each in asked), 0
        for batch in batches:
            for step in range(max(written.steps(number) for number in batch.numbers)):
                written.step(writer, batch.numbers, step)
            done += sum(len(one.tokens) for one in batch.answers)
            if options.progress is not None:
                options.progress(min(done, total), total)


@dataclass(frozen=True, eq=False)
class _AnswerKinds:
    """What the answers of one run hold: the sites of its trace, and whether it has scores, tops and texts."""

    sites: tuple[Site, ...]
    taps: tuple[str, ...]
    scores: bool
    top: int
    text: bool
    m: bool

    @classmethod
    def of(cls, label: str, asked: Sequence[EngineRequest], answers: Mapping[int, Answer]) -> _AnswerKinds:
        """Raises EngineAnswerInvalid where one request has what another does not."""
        first = answers[0]
        for number, one in answers.items():
            for what, differs in (
                ("log-probabilities", (one.log_probabilities is None) != (first.log_probabilities is None)),
                ("top logits", _width(one) != _width(first)),
                ("taps of other sites", one.taps.keys() != first.taps.keys()),
                ("text", one.text != first.text),
            ):
                if differs:
                    _refuse(label, asked[number], what)
        sites: list[Site] = []
        for name in first.taps:
            inputs = all(one.taps[name].inputs is not None for one in answers.values())
            sites.append(Site(name, "tap", None, ("in",) if inputs else (), ("out",)))
        scored = first.log_probabilities is not None
        if scored:
            sites.append(Site(SCORES, "log_probability", None, (), ("out",)))
        if not sites:
            # What was fed, equal in both runs up to a flip: a trace of tokens alone still says what was compared.
            sites.append(Site(TOKENS, "tokens", None, (), ("in",)))
        m = any(tap.m is not None for one in answers.values() for tap in one.taps.values())
        return cls(tuple(sites), tuple(first.taps), scored, _width(first), first.text, m)

    def lacks(self) -> dict[str, str]:
        found = {}
        if self.text:
            found[base.TOKENS] = (
                "the engine answers with text and without token ids; token ids here are its code points"
            )
        if not (self.scores or self.top):
            found[base.LOGITS] = "the engine gave neither log-probabilities nor top logits"
        if not self.taps:
            found[base.SITES] = "the engine gave no taps, so that no place inside the model is known"
        elif not all(site.inputs for site in self.sites if site.kind == "tap"):
            found[base.INPUTS] = "the engine gave what some sites computed and not what they were given"
        if not self.m:
            found[base.ROWS_SEEN] = "the engine did not say how many rows (M) its calls had"
        return {**found, base.KERNEL_PATHS: _PATHS, base.CACHE: _CACHE, base.FORWARDS: _FORWARDS}


def _width(one: Answer) -> int:
    return 0 if one.top is None else one.top[0].shape[1]


def _refuse(label: str, request: EngineRequest, what: str) -> NoReturn:
    raise EngineAnswerInvalid(
        f"For request {request.id!r} the engine {label} gave {what} otherwise than for another request of the run; expected the "
        "same kinds of answer for all, so that all of it can be compared. Correct the engine, or leave them out in all."
    )


class _StepWriter:
    """Writes the steps of a batch: step 0 holds the prompts, step n the row that was fed the token n - 1."""

    def __init__(
        self,
        engine: FunctionEngine,
        kinds: _AnswerKinds,
        asked: Sequence[EngineRequest],
        answers: Mapping[int, Answer],
        wanted: Any,
        capture: Capture,
    ) -> None:
        self._engine, self._kinds, self._asked, self._answers = engine, kinds, asked, answers
        self._wanted = wanted
        self._count = len(ports_of(kinds.sites))
        self._forward = 0
        self._prompts = [len(each.tokens) for each in asked]
        self._texts: set[int] = set()

    def steps(self, number: int) -> int:
        return max(1, len(self._answers[number].tokens), self._last(number) - self._prompts[number] + 2)

    def _last(self, number: int) -> int:
        """The last position of a request that a tap has."""
        return max(
            (int(tap.positions.max(initial=-1)) for tap in self._answers[number].taps.values()), default=-1
        )

    def step(self, writer: Any, numbers: Iterable[int], step: int) -> None:
        spans = []
        for slot, number in enumerate(numbers):
            if step < self.steps(number):
                prompt = self._prompts[number]
                spans.append((number, slot, *((0, prompt) if step == 0 else (prompt + step - 1, 1))))
        table = RowTable(
            *(
                np.array(column, np.int64)
                for column in zip(
                    *(
                        (number, position, slot, 0 if step == 0 else 1, self._fed(number, position))
                        for number, slot, start, count in spans
                        for position in range(start, start + count)
                    ),
                    strict=True,
                )
            )
        )
        shape = (max(slot for _, slot, _, _ in spans) + 1, max(count for *_, count in spans))
        plan = writer.plan(self._calls(spans, shape))
        writer.forward(forward_line(self._forward, spans, shape, plan, self._prompts))
        write_rows(writer, self._forward, table, self._ports(table), self._count)
        self._generated(writer, [span[0] for span in spans], step)
        self._forward += 1

    def _fed(self, number: int, position: int) -> int:
        tokens = self._asked[number].tokens
        if position < len(tokens):
            return tokens[position]
        return self._answers[number].tokens[position - len(tokens)]

    def _calls(
        self, spans: Sequence[tuple[int, int, int, int]], shape: tuple[int, int]
    ) -> list[dict[str, Any]]:
        """One call for each M that a site had, of the rows that had it."""
        calls: dict[tuple[int, str], list[int]] = {}
        plain: list[int] = []
        for site, name in enumerate(self._kinds.taps):
            rows: dict[int, list[int]] = {}
            for number, slot, start, count in spans:
                tap = self._answers[number].taps[name]
                if tap.m is None:
                    continue
                inside = (tap.positions >= start) & (tap.positions < start + count)
                for position, m in zip(tap.positions[inside].tolist(), tap.m[inside].tolist(), strict=True):
                    rows.setdefault(m, []).append(slot * shape[1] + position - start)
            if not rows:
                plain.append(site)
            for m, at in rows.items():
                calls.setdefault((m, format_ranges(at)), []).append(site)
        plain += range(len(self._kinds.taps), len(self._kinds.sites))
        found: list[dict[str, Any]] = [
            {
                "path": "native",
                "rule": "",
                "rows": m,
                "sites": format_ranges(sites),
                "at": at,
            }
            for (m, at), sites in calls.items()
        ]
        if plain:
            found.append({"path": "native", "rule": "", "sites": format_ranges(plain)})
        return found

    def _ports(self, table: RowTable) -> dict[int, PortRows]:
        ports: dict[int, PortRows] = {}
        for number, port in enumerate(ports_of(self._kinds.sites)):
            site = self._kinds.sites[port.site]
            if site.kind == "tokens":
                every = np.arange(len(table))
                ports[number] = PortRows(every, digest_rows(table.token[:, None], "I64"))
                continue
            found = self._values(table, site, port.is_input)
            if found is not None:
                ports[number] = found
        return ports

    def _values(self, table: RowTable, site: Site, is_input: bool) -> PortRows | None:
        rows, pieces, dtypes = [], [], set()
        for request in dict.fromkeys(table.request.tolist()):
            mine = np.flatnonzero(table.request == request)
            one = self._answers[request]
            if site.kind == "tap":
                tap = one.taps[site.name]
                values, positions = tap.inputs if is_input else tap.out, tap.positions
            else:
                values = one.log_probabilities
                positions = np.arange(len(one.tokens)) + self._prompts[request] - 1
            assert values is not None
            place = {position: n for n, position in enumerate(positions.tolist())}
            here = [
                (row, place[p])
                for row, p in zip(mine.tolist(), table.position[mine].tolist(), strict=True)
                if p in place
            ]
            if here:
                rows.append(np.array([row for row, _ in here], np.int64))
                pieces.append(values.data[[n for _, n in here]])
                dtypes.add((values.dtype, pieces[-1].shape[1:]))
        if not rows:
            return None
        order = np.concatenate(rows)
        if len(dtypes) > 1:
            # Requests of one run may differ in dtype; digests say so, and values would have no common form.
            digests = np.concatenate(
                [
                    _digests(piece, values)
                    for piece, values in zip(pieces, self._dtypes_of(table, site, is_input), strict=True)
                ]
            )
            return PortRows(order, digests)
        data, dtype = np.concatenate(pieces), next(iter(dtypes))[0]
        kept = None
        if site.kind != "tap":
            kept = np.ones(len(order), np.bool_)
        elif self._wanted is not None and not _is_digest(data, dtype):
            kept = np.array(
                [
                    self._wanted(self._asked[request].id, position, site.name)
                    for request, position in zip(
                        table.request[order].tolist(), table.position[order].tolist(), strict=True
                    )
                ],
                np.bool_,
            )
        return PortRows(order, _digests(data, dtype), None if kept is None else data, dtype, kept)

    def _dtypes_of(self, table: RowTable, site: Site, is_input: bool) -> list[str]:
        found = []
        for request in dict.fromkeys(table.request.tolist()):
            one = self._answers[request]
            tap = one.taps[site.name] if site.kind == "tap" else None
            values = one.log_probabilities if tap is None else tap.inputs if is_input else tap.out
            assert values is not None
            found.append(values.dtype)
        return found

    def _generated(self, writer: Any, numbers: Sequence[int], step: int) -> None:
        mine = [number for number in numbers if step < len(self._answers[number].tokens)]
        if not mine:
            return
        tokens = [self._answers[number].tokens[step] for number in mine]
        for token in tokens:
            if token not in self._texts:
                self._texts.add(token)
                writer.text(token, chr(token) if self._kinds.text else self._engine.decode([token]))
        ids, logits = [], []
        for number, token in zip(mine, tokens, strict=True):
            one = self._answers[number]
            if one.top is not None:
                ids.append(one.top[0][step])
                logits.append(one.top[1][step])
            elif one.log_probabilities is not None:
                ids.append(np.array([token], np.int32))
                score = float(one.log_probabilities.numbers()[step])
                logits.append(np.array([score], np.float32))
        width = len(ids[0]) if ids else 0
        position = [self._prompts[number] - 1 + step for number in mine]
        writer.generated(
            Generated(
                np.array(mine, np.int32),
                np.full(len(mine), step, np.int32),
                np.array(tokens, np.int32),
                np.full(len(mine), self._forward, np.int32),
                np.array(position, np.int32),
                np.array(ids, np.int32).reshape(len(mine), width),
                np.array(logits, np.float32).reshape(len(mine), width),
            )
        )


def _is_digest(data: Any, dtype: str) -> bool:
    return bool(dtype == "U64" and data.ndim == 1)


def _digests(data: Any, dtype: str) -> Any:
    """Digests of rows, or what are digests already."""
    if _is_digest(data, dtype):
        return data.astype(np.uint64)
    return digest_rows(data.reshape(len(data), -1), dtype)


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
