"""Many prompts from a file, run under several schedules and again, and summed up."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detdiff.errors import CommandError
from detdiff.scenario import Request, Scenario

if TYPE_CHECKING:
    from detdiff.commands.sides import ComparisonArguments, Progress
    from detdiff.compare.summary import Summary
    from detdiff.trace import Trace


def read_prompts(path: Path) -> tuple[dict[str, Any], ...]:
    """The prompts of a file, one a line: text, or a JSON object with ``prompt`` or chat ``messages``, and ``id`` and
    ``max_tokens`` where they are given. Empty lines are left out. Raises CommandError."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(
            f"{path} cannot be read as prompts ({error}); expected a text file in UTF-8 with one prompt a line. Correct it."
        ) from None
    found = [
        _prompt(f"{path}, line {number}", line, place)
        for place, (number, line) in enumerate((n, line) for n, line in enumerate(lines, 1) if line.strip())
    ]
    if not found:
        raise CommandError(
            f"{path} has no prompt; expected one a line, as text or as a JSON object. Write some."
        )
    return tuple(found)


def _prompt(where: str, line: str, place: int) -> dict[str, Any]:
    found: dict[str, Any] = {"id": f"r{place}", "prompt": line}
    if not line.lstrip().startswith("{"):
        return found
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{where} begins like a JSON object and is none ({error}); correct it.") from None
    wrong = sorted(given.keys() - {"id", "prompt", "messages", "max_tokens"})
    if wrong or ("prompt" in given) == ("messages" in given):
        raise CommandError(
            f"{where} has the keys {', '.join(map(str, given))}; expected prompt or messages, and, where they are given, id and max_tokens. Correct it."
        )
    found |= {key: value for key, value in given.items() if key != "messages"}
    if "messages" in given:
        messages = given["messages"]
        if not (
            isinstance(messages, list)
            and messages
            and all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in messages)
        ):
            raise CommandError(f"{where} has no list of messages, each with role and content; correct it.")
        one = messages[0] if len(messages) == 1 else None
        plain = one is not None and one["role"] == "user" and isinstance(one["content"], str)
        found |= {"prompt": one["content"] if plain and one else json.dumps(messages), "chat": True}
    kinds = (("id", str), ("prompt", str), ("max_tokens", int))
    bad = next((key for key, kind in kinds if key in found and type(found[key]) is not kind), None)
    if bad is not None:
        raise CommandError(
            f"{where} has the {bad} {found[bad]!r}; expected {'a number' if bad == 'max_tokens' else 'text'}. Correct it."
        )
    return found


def with_prompts(scenario: Scenario, prompts: Sequence[Mapping[str, Any]]) -> Scenario:
    """The scenario, made of the prompts' texts in their order, with what a file says of each beside."""
    requests: list[Request] = []
    for request, given in zip(scenario.requests, prompts, strict=True):
        changed = {key: given[key] for key in ("id", "max_tokens", "chat") if key in given}
        requests.append(replace(request, **changed))
    return replace(scenario, requests=tuple(requests))


@dataclass(frozen=True)
class SummaryArguments:
    """How much is run: each side ``repeats`` times, and b at each of ``levels`` (how many requests at once) instead of once."""

    repeats: int = 1
    levels: tuple[int, ...] = ()

    @classmethod
    def of(cls, repeats: int | None, levels: str | None) -> SummaryArguments:
        """Raises CommandError for levels that are none."""
        words = [word.strip() for word in (levels or "").split(",") if word.strip()]
        if not all(word.isdigit() and 2 <= int(word) <= 4096 for word in words):
            raise CommandError(
                f"--levels is {levels!r}; expected whole numbers from 2, such as 2,4,8. Correct it."
            )
        return cls(repeats or 1, tuple(dict.fromkeys(map(int, words))))


def summarised(asked: ComparisonArguments, wanted: SummaryArguments, progress: Progress) -> Summary:
    """Record side a and side b, at each level and again, and sum up. Raises what ``sides`` and recording raise."""
    from detdiff.commands.sides import Engines, record_trace, sides
    from detdiff.compare.summary import Summary, summed

    found = sides(asked)
    scenarios = [side.source for side in found]
    a, b = scenarios
    if not (isinstance(a, Scenario) and isinstance(b, Scenario)):
        raise CommandError(
            "--prompts, --repeats and --levels say what to run, and a side is a trace that was recorded already; give scenarios, or "
            "--model."
        )
    levels: dict[int, Scenario] = {
        level: b.with_changes(
            schedule="static" if b.schedule.kind == "serial" else b.schedule.kind, active=level
        )
        for level in wanted.levels
    } or {_at_once(b): b}
    engines = Engines()
    with ExitStack() as stack:
        folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="detdiff-")))

        def runs(name: str, scenario: Scenario) -> list[Trace]:
            made = []
            for again in range(wanted.repeats):
                where = folder / (name if not again else f"{name}-again{again}")
                with progress(f"run {where.name}") as on_token:
                    # One opened engine for all of them: that is what repeats.
                    made.append(record_trace(scenario, where, on_token, engines, kept=asked.keep is not None))
            return made

        of_a = runs("a", a)
        repeats, arms, notes = [], [], list(_notes(of_a[0]))
        if wanted.repeats > 1:
            repeats.append(summed("side a", _at_once(a), [(of_a[0], each) for each in of_a[1:]]))
        for level, scenario in levels.items():
            name = f"b{level}" if wanted.levels else "b"
            said = f"{scenario.schedule.kind}:{level}" if level > 1 else scenario.schedule.kind
            of_b = runs(name, scenario)
            if wanted.repeats > 1:
                repeats.append(summed(f"side b, {said}", level, [(of_b[0], each) for each in of_b[1:]]))
            arms.append(summed(said, level, list(zip(of_a, of_b, strict=True))))
            notes += _notes(of_b[0])
    return Summary(tuple(repeats), tuple(arms), tuple(dict.fromkeys(notes)))


def _at_once(scenario: Scenario) -> int:
    if scenario.schedule.kind == "serial":
        return 1
    return scenario.schedule.active or len(scenario.requests)


def _notes(trace: Trace) -> Sequence[str]:
    return [str(note) for note in trace.header["notes"]]
