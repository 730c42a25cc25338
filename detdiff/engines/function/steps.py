"""Answers of an engine that shows nothing else, written as a trace: a forward for each step of the whole batch.

Importing this imports NumPy and no model library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np

from detdiff.compare.metrics import Values
from detdiff.engines import base
from detdiff.engines.base import PortRows, RowTable, WantedValues, forward_line, write_rows
from detdiff.errors import EngineAnswerInvalid
from detdiff.trace import Generated, Site, digest_rows, format_ranges, ports_of

from .answers import Answer, EngineRequest

SCORES: Final = "log_probabilities"
TOKENS: Final = "tokens"


@dataclass(frozen=True, eq=False)
class AnsweredBatch:
    """The requests of one call, by number, and their answers in the same order."""

    numbers: tuple[int, ...]
    answers: tuple[Answer, ...]


@dataclass(frozen=True, eq=False)
class AnswerKinds:
    """What the answers of one run hold: the sites of its trace, and whether it has scores, tops and texts."""

    sites: tuple[Site, ...]
    taps: tuple[str, ...]
    scores: bool
    top: int
    text: bool
    m: bool

    @classmethod
    def of(cls, label: str, asked: Sequence[EngineRequest], answers: Mapping[int, Answer]) -> AnswerKinds:
        """Raises EngineAnswerInvalid where one request has what another does not."""
        first = next(iter(answers.values()))
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
        found = cls(tuple(sites), tuple(first.taps), scored, _width(first), first.text, m)
        for number, one in answers.items():
            found.check(label, asked[number], one)
        return found

    def check(self, label: str, request: EngineRequest, one: Answer) -> None:
        """Raises EngineAnswerInvalid for an answer that has what these have not, or lacks what they have."""
        for what, differs in (
            ("log-probabilities", (one.log_probabilities is not None) != self.scores),
            ("top logits", _width(one) != self.top),
            ("taps of other sites", one.taps.keys() != set(self.taps)),
            ("text", one.text != self.text),
        ):
            if differs:
                _refuse(label, request, what)

    def empty(self) -> Answer:
        """An answer of these kinds without a token."""
        top = (np.zeros((0, self.top), np.int32), np.zeros((0, self.top), np.float32)) if self.top else None
        scores = Values(np.zeros(0, np.float32), "F32") if self.scores else None
        return Answer((), scores, {}, top, self.text)

    def lacks(self) -> dict[str, str]:
        """What the answers do not show, each with the reason."""
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
        return found


def _width(one: Answer) -> int:
    return 0 if one.top is None else one.top[0].shape[1]


def _refuse(label: str, request: EngineRequest, what: str) -> NoReturn:
    raise EngineAnswerInvalid(
        f"For request {request.id!r} the engine {label} gave {what} otherwise than for another request of the run; expected the "
        "same kinds of answer for all, so that all of it can be compared. Correct the engine, or leave them out in all."
    )


class StepWriter:
    """Writes the steps of batches: step 0 holds the prompts, step n the row that was fed the token n - 1.

    ``text`` gives a token id's text; ``answers`` by a request's number may grow from batch to batch.
    """

    def __init__(
        self,
        text: Callable[[int], str],
        kinds: AnswerKinds,
        asked: Sequence[EngineRequest],
        answers: Mapping[int, Answer],
        wanted: WantedValues | None,
    ) -> None:
        self._text, self._kinds, self._asked, self._answers = text, kinds, asked, answers
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
                place = {position: n for n, position in enumerate(positions.tolist())}
                at = np.array([place.get(p, -1) for p in table.position[mine].tolist()], np.int64)
            else:
                values = one.log_probabilities
                at = table.position[mine] - self._prompts[request] + 1
                at[at >= len(one.tokens)] = -1
            assert values is not None
            mine, at = mine[at >= 0], at[at >= 0]
            if len(mine):
                rows.append(mine)
                pieces.append(values.data[at])
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
                writer.text(token, chr(token) if self._kinds.text else self._text(token))
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
