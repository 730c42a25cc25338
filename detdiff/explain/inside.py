"""From outside to inside: what a server was asked, run on a local engine, and whether its flips appear there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from detdiff.engines.base import Engine, RunOptions
from detdiff.engines.record import record
from detdiff.errors import CommandError
from detdiff.scenario import Request, Scenario, prompt_messages
from detdiff.trace import Place, Trace

from .investigate import OnControl, Progress, explain
from .outside import borrowed, cached_tokens
from .verdict import Verdict

SAME: Final = "same flip"
OTHER: Final = "other flip"
BITS: Final = "bits"
NOTHING: Final = "nothing"
ANOTHER_MODEL: Final = "other answers"
NO_DIFFERENCE: Final = "no difference"
_SPECIAL: Final = re.compile(r"<[^<>\s]+>")


@dataclass(frozen=True)
class InsideFlip:
    """A request whose answer differs outside, or inside: the ``outside`` and ``inside`` index of the first other token (of the first other
    character where ``characters``; None: none differs). ``same``: the same at the same place. ``alone_equal``: up to it, and without
    neighbours, the local engine answers as the server did."""

    request: str
    outside: int | None
    inside: int | None
    characters: bool
    same: bool
    alone_equal: bool


@dataclass(frozen=True)
class InsideAnswer:
    """What a server's runs show on a local engine.

    ``found`` is SAME, OTHER (flips inside, not those outside), BITS (bits differ inside, and no token), NOTHING (nothing does), ANOTHER_MODEL (the
    local engine answers otherwise without neighbours, so that nothing follows) or NO_DIFFERENCE (neither outside nor inside).
    ``exact`` says that who shared a forward is known, ``not_carried`` what could not be carried over. ``verdict`` is on the local runs.
    """

    found: str
    sentence: str
    flips: tuple[InsideFlip, ...]
    exact: bool
    not_carried: tuple[str, ...]
    verdict: Verdict


@dataclass(frozen=True)
class Replayed:
    """A server's run as a local scenario."""

    scenario: Scenario
    not_carried: tuple[str, ...]
    exact: bool


def look_inside(
    a: Trace | None,
    b: Trace,
    base: Scenario,
    engine: Engine,
    folder: Place,
    *,
    served: Trace | None = None,
    controls: Sequence[str] | None = None,
    budget: int | None = None,
    progress: Progress | None = None,
    on_control: OnControl | None = None,
) -> InsideAnswer:
    """Run what a server was asked in ``b``, and in ``a`` (None: each request alone), on ``engine`` as ``base`` says, into ``folder``.

    ``served`` is what a `detdiff serve` recorded meanwhile: who shared a forward is taken from it. Raises CommandError for runs that
    cannot be carried over, and what recording and explaining raise.
    """
    for trace in (a, b):
        if trace is not None:
            _check(trace)
    only = _batch(a, b)
    outside = [_replayed(trace, base, engine, served, only) for trace in (b if a is None else a, b)]
    if a is None:
        outside[0] = replace(
            outside[0], scenario=outside[0].scenario.with_changes(schedule="serial", arrivals=None)
        )
    traces = []
    for name, each in zip("ab", outside, strict=True):
        if on_control is not None:
            on_control(f"run {name} inside")
        options = RunOptions(progress=progress)
        traces.append(record(each.scenario, folder / name, engine=engine, options=options))
    verdict = explain(
        *traces, controls=controls, budget=budget, engine=engine, progress=progress, on_control=on_control
    )
    flips = tuple(_flips(a, b, traces, engine, only))
    found = _kind(flips, a, b, verdict)
    said = _sentence(found, flips, verdict, a, b)
    not_carried = tuple(dict.fromkeys(words for each in outside for words in each.not_carried))
    return InsideAnswer(found, said, flips, all(each.exact for each in outside), not_carried, verdict)


def _check(trace: Trace) -> None:
    if trace.engine != "server":
        raise CommandError(
            f"{trace.path} was recorded by the engine {trace.engine}; --inside expects traces of a server. Explain it without --inside."
        )
    requests = Scenario.from_dict(trace.scenario, where=str(trace.path)).requests
    drawn = next((each.id for each in requests if each.sampling.temperature), None)
    if drawn is not None:
        raise CommandError(
            f"Request {drawn!r} of {trace.path} was drawn with a temperature by the server's own generator, which no local engine "
            "has; --inside expects greedy answers. Record it with temperature=0."
        )


def _server(trace: Trace) -> Mapping[str, Any]:
    found = trace.header.get("server")
    return found if isinstance(found, Mapping) else {}


def _batch(a: Trace | None, b: Trace) -> list[str]:
    """The requests that are run inside: all of them, or, where a server was asked batch after batch, the first batch with a flip."""
    ids = [str(each["id"]) for each in b.requests]
    schedule = Scenario.from_dict(b.scenario, where=str(b.path)).schedule
    if schedule.kind != "static" or not schedule.active:
        return ids
    batches = [ids[first : first + schedule.active] for first in range(0, len(ids), schedule.active)]
    if a is None:
        return batches[0]
    flipped = {id for id in ids if _first_unequal(_answer(a, id), _answer(b, id)) is not None}
    return next((batch for batch in batches if flipped & set(batch)), batches[0])


def _replayed(
    trace: Trace, base: Scenario, engine: Engine, served: Trace | None, only: Sequence[str]
) -> Replayed:
    """A server's run on a local engine, with what could not be carried over."""
    asked = Scenario.from_dict(trace.scenario, where=str(trace.path))
    header = {str(each["id"]): each for each in trace.requests}
    known = set(_server(trace).get("prompt_ids", ()))
    lost: list[str] = []
    requests = []
    for request in asked.requests:
        if request.id not in only:
            continue
        tokens = header[request.id]["tokens"] if request.id in known else request.tokens
        if tokens is not None:
            own = Request(request.id, tokens=tuple(tokens))
        else:
            messages = prompt_messages(request.prompt or "") if request.chat else None
            own = (
                Request(request.id, messages=tuple(messages))
                if messages
                else Request(request.id, prompt=request.prompt, chat=request.chat)
            )
        requests.append(
            replace(own, max_tokens=request.max_tokens, ignore_stop=request.ignore_stop, stop=request.stop)
        )
    as_text = [each.id for each in requests if each.tokens is None]
    if as_text:
        template = any(each.chat or each.messages for each in requests)
        lost.append(
            "prompts went to the server as text: the local tokenizer's ids are run"
            + (", and the local model's chat template stands for that of the server" if template else "")
            + _other_lengths(trace, requests, engine)
        )
    body = asked.engine_settings.get("body")
    if body:
        lost.append(f"engine.body ({', '.join(sorted(body))}) is of the server alone, and is left out here")
    cached = sum((cached_tokens(trace) or {}).values())
    if cached:
        lost.append(f"{cached} prompt tokens came from the server's prefix cache; here every one is computed")
    miscounted = [each.id for each in requests if each.id in _server(trace).get("miscounted", ())]
    if miscounted:
        lost.append(
            f"answers to {', '.join(miscounted)} lack tokens that the server counts, as llama.cpp's leaves out parts of characters: what came is "
            "looked for in the local answers in its order"
        )
    if len(requests) < len(asked.requests):
        lost.append(f"of {len(asked.requests)} requests those of one batch are run: {', '.join(only)}")
    scenario, exact = _scheduled(trace, replace(base, requests=tuple(requests)), asked, served, lost)
    return Replayed(scenario, tuple(lost), exact)


def _other_lengths(trace: Trace, requests: Sequence[Request], engine: Engine) -> str:
    counts = _server(trace).get("prompt_tokens", {})
    for each in requests:
        if each.prompt is None or each.id not in counts:
            continue
        here = len(engine.encode(each.prompt, each.chat))
        if here != counts[each.id]:
            return f"; the prompt of {each.id} has {here} tokens here and {counts[each.id]} there"
    return ""


def _scheduled(
    trace: Trace, base: Scenario, asked: Scenario, served: Trace | None, lost: list[str]
) -> tuple[Scenario, bool]:
    """The requests under the schedule that stands for the server's, and whether who shared a forward is known."""
    kind = asked.schedule.kind
    if kind == "serial" or len(base.requests) == 1:
        return base.with_changes(schedule="serial", arrivals=None), True
    before = len(lost)
    arrivals = None if served is None else _served_arrivals(trace, base, served, lost)
    if arrivals is not None:
        known = len(lost) == before
        return base.with_changes(schedule="continuous", active=None, arrivals=arrivals), known
    own = base.schedule.kind if base.schedule.kind != "serial" else kind
    if kind == "static":
        lost.append(
            f"which of the requests that were sent together shared a forward is not known: they run as schedule {own}, all at once"
        )
        return base.with_changes(schedule=own, active=None), False
    lost.append(
        "arrivals are known as seconds alone: each request comes here at the forward that the tokens of those before it had reached"
    )
    return base.with_changes(schedule="continuous", arrivals=_steps_before(trace, base)), False


def _steps_before(trace: Trace, scenario: Scenario) -> list[int]:
    """For each request how many steps of others its first token came after; tokens that came nearer to each other than half the usual gap
    are one step."""
    times = {str(id): list(each) for id, each in trace.header["times"]["requests"].items()}
    gaps = [gap for each in times.values() for gap in np.diff(each).tolist() if gap > 0]
    near = float(np.median(gaps)) / 2 if gaps else 0.0
    steps: list[float] = []
    for at in sorted(at for each in times.values() for at in each):
        if not steps or at - steps[-1] > near:
            steps.append(at)
    first = [min(times.get(each.id) or [0.0]) for each in scenario.requests]
    before = [sum(step < at - near for step in steps) for at in first]
    return [each - min(before) for each in before]


def _served_arrivals(trace: Trace, scenario: Scenario, served: Trace, lost: list[str]) -> list[int] | None:
    """The forwards at which what served took these requests, by the names under which they were asked; None where it has not all of them."""
    run = trace.header["times"].get("asked_as", "")
    numbers = {str(each["id"]): number for number, each in enumerate(served.requests)}
    taken = [numbers.get(f"{run}-{each.id}") for each in scenario.requests]
    mine = [number for number in taken if number is not None]
    if len(mine) < len(taken):
        lost.append(
            f"{served.path} has not all requests of {trace.path}: who shared a forward is not taken from it"
        )
        return None
    arrivals = [int(served.requests[number]["arrival"]) for number in mine]
    others = {
        row["request"]
        for line in served.forwards()
        if not set(mine).isdisjoint(row["request"] for row in line["rows"])
        for row in line["rows"]
    } - set(mine)
    if others:
        lost.append(f"{len(others)} requests of others shared forwards with these, and are left out here")
    return [each - min(arrivals) for each in arrivals]


Tokens = tuple[int, ...] | str


def _answer(trace: Trace, id: str) -> Tokens:
    """The generated token ids, or the text where the server's ids are none of a tokenizer."""
    number = next((n for n, each in enumerate(trace.requests) if str(each["id"]) == id), None)
    generated = trace.generated(lens=False)
    mine = generated.token[generated.request == number][
        np.argsort(generated.index[generated.request == number], kind="stable")
    ]
    ids = tuple(mine.tolist())
    if trace.engine != "server" or _server(trace).get("token_ids"):
        return ids
    texts = trace.texts()
    return "".join(texts.get(each, "") for each in ids)


def _text(found: Tokens, engine: Engine, sent: str) -> str:
    """An answer as text beside what a server ``sent``, which leaves out special tokens; blanks before it, which some tokenizers give to the
    first token, are left out of both."""
    if not isinstance(found, str):
        special = {
            id
            for id in set(found)
            if _SPECIAL.fullmatch(piece := engine.decode([id])) is not None and piece not in sent
        }
        found = engine.decode([id for id in found if id not in special])
    return found.lstrip()


def _first_unequal(x: Tokens, y: Tokens) -> int | None:
    """The first index at which two answers differ, or at which one ends."""
    for index in range(min(len(x), len(y))):
        if x[index] != y[index]:
            return index
    return None if len(x) == len(y) else min(len(x), len(y))


def _all_of(part: Tokens, whole: Tokens) -> bool:
    """Whether ``part`` is left when something is taken out of ``whole``."""
    rest = iter(whole)
    return all(each in rest for each in part)


def _flips(
    a: Trace | None, b: Trace, inside: Sequence[Trace], engine: Engine, only: Sequence[str]
) -> list[InsideFlip]:
    found = []
    for id in only:
        here: list[Tokens] = [_answer(trace, id) for trace in inside]
        there: list[Tokens] = [here[0] if a is None else _answer(a, id), _answer(b, id)]
        characters = any(isinstance(each, str) for each in there)
        if characters:
            sent = "".join(each for each in there if isinstance(each, str))
            here = [_text(each, engine, sent) for each in here]
            there = [_text(each, engine, sent) for each in there]
        if any(id in _server(trace).get("miscounted", ()) for trace in (a, b) if trace is not None):
            here = [x if _all_of(x, y) else y for x, y in zip(there, here, strict=True)]
        at, own = _first_unequal(*there), _first_unequal(*here)
        if at is None and own is None:
            continue
        alone = _first_unequal(there[0], here[0])
        same = at == own and all(
            x[: (at or 0) + 1] == y[: (at or 0) + 1] for x, y in zip(there, here, strict=True)
        )
        until = at if at is not None else own
        found.append(InsideFlip(id, at, own, characters, same, alone is None or alone > (until or 0)))
    return found


def _kind(flips: Sequence[InsideFlip], a: Trace | None, b: Trace, verdict: Verdict) -> str:
    outside = [each for each in flips if each.outside is not None]
    if any(each.same for each in outside):
        return SAME
    if outside and not any(each.alone_equal for each in outside):
        return ANOTHER_MODEL
    if any(each.inside is not None for each in flips):
        return OTHER
    if verdict.kind != "identical":
        return BITS
    return NOTHING if outside or (a is not None and not _equal_numbers(a, b)) else NO_DIFFERENCE


def _equal_numbers(a: Trace, b: Trace) -> bool:
    """Whether no recorded log-probability differs outside."""
    from detdiff.compare import compare

    return not any(each.scores and each.scores.differing for each in compare(a, b).requests)


def _sentence(found: str, flips: Sequence[InsideFlip], verdict: Verdict, a: Trace | None, b: Trace) -> str:
    outside = [each for each in flips if each.outside is not None]
    first = next((each for each in outside if each.same), outside[0] if outside else None)
    place = (
        ""
        if first is None
        else f"{first.request} at {'character' if first.characters else 'token'} {first.outside}"
    )
    swapped = next(iter(borrowed(a, b)), None) if a is not None else None
    if found == SAME:
        more = sum(each.same for each in outside)
        return f"The flip seen from outside, {place}, appears inside at the same place ({more} of {len(outside)} flips do){_born(verdict, first)}."
    if found == ANOTHER_MODEL:
        return (
            f"Whether the flip of {place} comes from the model cannot be said: without neighbours the local engine already answers "
            "otherwise than the server did, so that they are not the same model, or the same prompt."
        )
    if found == OTHER:
        where = (
            f"The flip seen from outside, {place}, does not appear inside"
            if place
            else "No answer flips outside"
        )
        return f"{where}; others flip there{_born(verdict, None)}."
    if found == BITS:
        where = (
            f"The flip seen from outside, {place}, does not appear inside"
            if place
            else "As outside, no answer flips"
        )
        return f"{where}, where bits differ and no token does{_born(verdict, None)}."
    if found == NOTHING:
        theirs = (
            ""
            if swapped is None
            else f" (from outside it is seen that {swapped.request} got {swapped.what} of {swapped.other})"
        )
        what = (
            f"The flip seen from outside, {place},"
            if place
            else "The difference of log-probabilities seen from outside"
        )
        return (
            f"{what} is not found inside: run alone and together, the local engine gives each request the same bits{theirs}. So what "
            "the server did is not in this model under these schedules: it is in what stands around it, in other kernels, or in a composition that was not met here."
        )
    return "Nothing differs, outside or inside."


def _born(verdict: Verdict, flip: InsideFlip | None) -> str:
    """Where the local difference was born, in words."""
    divergence = verdict.divergence
    if divergence is None:
        return ""
    wanted = [each for each in divergence.requests if flip is None or each.id == flip.request]
    request = next((each for each in wanted if each.origin is not None), None)
    if request is None or request.origin is None:
        return "; where it was born is not shown by this engine"
    origin, entry = request.origin, request.cache_entry
    said = f"; it was born at {origin.site}, position {origin.position} of {request.id}"
    if entry is not None:
        layer = "" if entry.layer is None else f"layer {entry.layer}, "
        said += f"; the first cache entry that differs is {layer}{entry.kind}, head {entry.head}, position {entry.position}"
    return said
