"""What a check is asked for: its settings, the compositions that a schedule stands for, and prompts where none are given."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from detdiff.errors import CheckSettingInvalid, DetdiffError, NothingToCheck, ScheduleInvalid
from detdiff.scenario import LAYOUTS, SCHEDULES, KernelPlan, Scenario, located, nearest, parse_flags

EXACT, TOKENS, BOUNDED, GOLDEN = "exact", "tokens", "bounded", "golden"
LEVELS: Final = (EXACT, TOKENS, BOUNDED, GOLDEN)
"""What a check lets pass: every bit of every site, the generated tokens, rounding alone, a committed trace."""
SCHEDULES_BY_DEFAULT: Final = ("static:2", "continuous:4")
LAYOUTS_BY_DEFAULT: Final = ("padded", "packed")
_OWN: Final = ("request", "schedule", "layout", "arrivals", "force_tokens", "active")
"""Scenario keys that a check decides itself."""


@dataclass(frozen=True)
class Defaults:
    """What holds where a test says nothing. ``root`` is where failures are kept."""

    root: Path
    model: str | None = None
    schedules: str | Sequence[str] = SCHEDULES_BY_DEFAULT
    level: str = EXACT
    update: bool = False
    explain: bool = False
    full: bool = False


@dataclass(frozen=True)
class CheckSettings:
    """One check. ``settings`` are further keys of a scenario, which hold for the run alone and for every composition."""

    model: Any = None
    prompts: Sequence[Any] | str | None = None
    schedules: str | Sequence[str] = SCHEDULES_BY_DEFAULT
    layouts: str | Sequence[str] = LAYOUTS_BY_DEFAULT
    kernels: str | KernelPlan = "native"
    max_tokens: int = 16
    seeds: Sequence[int] = (0,)
    level: str = EXACT
    explain: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any], defaults: Defaults) -> CheckSettings:
        """The check for arguments by name; those that are None are left to ``defaults``.

        Raises CheckSettingInvalid and NothingToCheck.
        """
        found = {name: value for name, value in given.items() if value is not None}
        fields = cls.__dataclass_fields__.keys() - {"settings"}
        own = {name: found.pop(name) for name in list(found) if name in fields}
        asked = replace(
            cls(
                model=defaults.model,
                schedules=defaults.schedules,
                level=defaults.level,
                explain=defaults.explain,
            ),
            **own,
        )
        if "engine" in found:
            raise CheckSettingInvalid(
                "engine is no setting of a check; it follows from the model. Give an engine that is opened as the model, such as "
                "detdiff.engines.registry.open_named('llama.cpp', 'FILE.gguf', {})."
            )
        taken = next((name for name in found if name in _OWN), None)
        if taken is not None:
            raise CheckSettingInvalid(
                f"{taken} is no setting of a check; it follows from prompts, schedules and layouts. Leave it out, or write it "
                "after a schedule, such as 'continuous:2 arrivals=0,5'."
            )
        if asked.level not in LEVELS:
            raise CheckSettingInvalid(f"level is {asked.level!r}; {nearest(str(asked.level), LEVELS)}")
        drawn: Any = asked.seeds
        seeds = list(drawn) if isinstance(drawn, Iterable) else [drawn]
        if not seeds:
            raise NothingToCheck("There are no seeds, so that nothing would be checked. Give one, such as 0.")
        if not all(type(seed) is int and seed >= 0 for seed in seeds) or len(set(seeds)) < len(seeds):
            raise CheckSettingInvalid(f"seeds are {seeds}; expected whole numbers from 0 on, each once.")
        return replace(asked, seeds=tuple(seeds), settings=found)

    def base(
        self, model: str, requests: Sequence[Mapping[str, Any]], layout: str | None, engine: str = "mlx"
    ) -> Scenario:
        """The serial scenario in a layout of an engine, None: its own. Raises what making a scenario raises."""
        plan = self.kernels if isinstance(self.kernels, KernelPlan) else None
        keys = {
            "model": model,
            "engine": engine,
            "schedule": "serial",
            **({} if layout is None else {"layout": layout}),
            "kernels": "native" if plan is not None else self.kernels,
            "max_tokens": self.max_tokens,
            **self.settings,
            "request": list(requests),
        }
        scenario = Scenario.from_dict(keys, where="check")
        return scenario if plan is None else replace(scenario, kernels=plan)


LATEST: Final = 3
"""Forwards at most between two arrivals."""
_WRITTEN: Final = re.compile(r"(serial|static|continuous)(?::([1-9][0-9]{0,5}))?(?: +(\S.*))?")


@dataclass(frozen=True)
class CheckedSchedule:
    """One schedule in one layout, None: an engine's own. ``written`` is the schedule as it was given; ``size`` its N, None
    without one; ``flags`` are further scenario keys of this run alone."""

    written: str
    layout: str | None
    kind: str
    size: int | None
    flags: str

    @classmethod
    def of(cls, written: str, layout: str | None) -> CheckedSchedule:
        """Read a schedule. Raises ScheduleInvalid, and what reading scenario keys raises."""
        found = _WRITTEN.fullmatch(str(written).strip())
        if found is None or (found[1] == "serial" and found[2]):
            raise ScheduleInvalid(
                f"{written!r} is no schedule; expected one of {', '.join(SCHEDULES)}, the last two also with how many "
                "requests at a time, such as 'static:2' or 'continuous:4', and scenario keys after a space. Correct it."
            )
        if layout not in (*LAYOUTS, None):
            raise ScheduleInvalid(f"{layout!r} is no layout; expected {' or '.join(LAYOUTS)}. Correct it.")
        with located(f"schedule {written!r}"):
            keys = parse_flags(found[3] or "")
            taken = sorted({"model", "schedule", "layout", "active", "tokens"} & set(keys))
            if taken:
                raise ScheduleInvalid(
                    f"schedule {written!r} sets {taken[0]}, which {'the check decides' if taken[0] in ('model', 'tokens') else 'its first word and the layouts decide'}. "
                    "Leave it out."
                )
        return cls(written.strip(), layout, found[1], int(found[2]) if found[2] else None, found[3] or "")

    @property
    def name(self) -> str:
        """Such as ``static:2-packed``."""
        return self.written if self.layout is None else f"{self.written}-{self.layout}"

    @property
    def least(self) -> int:
        """The fewest requests with which this composition happens."""
        return self.size or (1 if self.kind == "serial" else 2)

    @property
    def one_at_a_time(self) -> bool:
        """Whether each request is to be served alone here too."""
        return self.kind == "serial" or self.size == 1

    def draw(self, base: Scenario, seed: int) -> list[Scenario]:
        """The runs of this composition, together holding every request of ``base``, a serial scenario.

        Seed 0 takes the requests in their order, arriving one forward apart. Any other seed draws who is beside whom, who
        arrives first, and how many forwards lie between. Raises NothingToCheck for fewer requests than the composition
        needs, and what making a scenario raises.
        """
        requests = list(base.requests)
        if len(requests) < self.least:
            raise NothingToCheck(
                f"{self.name} needs {self.least} requests and there {_are(len(requests))}, so that this composition would "
                "not happen. Give more prompts, or a smaller number after the colon."
            )
        draw = random.Random(f"{self.name} {seed}")
        if seed:
            draw.shuffle(requests)
        layout = {} if self.layout is None else {"layout": self.layout}
        changes: dict[str, Any] = {"schedule": self.kind, **layout, **parse_flags(self.flags)}
        if self.kind == "serial":
            return [base.with_changes(**changes)]
        if self.kind == "continuous":
            changes.setdefault("arrivals", _arrivals(len(requests), draw if seed else None))
            if self.size is not None:
                changes["active"] = self.size
            return [replace(base, requests=tuple(requests)).with_changes(**changes)]
        # The last batch is filled up from the first, so that each is of the size that was asked for.
        size = self.size or len(requests)
        places = [range(first, first + size) for first in range(0, len(requests), size)]
        return [
            replace(base, requests=tuple(requests[n % len(requests)] for n in each)).with_changes(**changes)
            for each in places
        ]


def fitting(wanted: Sequence[CheckedSchedule], requests: int) -> list[CheckedSchedule]:
    """Compositions by default as ``requests`` requests can make them: no more at a time than there are, each once."""
    found: dict[str, CheckedSchedule] = {}
    for each in wanted:
        if each.size is not None and each.size > requests >= 2:
            each = CheckedSchedule.of(f"{each.kind}:{requests}", each.layout)
        found.setdefault(each.name, each)
    return list(found.values())


def compositions(
    schedules: str | Sequence[str], layouts: str | Sequence[str] | None
) -> list[CheckedSchedule]:
    """Every schedule in every layout, in order; None: in an engine's own. A text may hold several with commas between them.

    Raises NothingToCheck where there is none, and ScheduleInvalid for what cannot be read or is there twice.
    """
    found = [
        CheckedSchedule.of(schedule, layout)
        for schedule in listed(schedules, "schedules")
        for layout in ([None] if layouts is None else listed(layouts, "layouts"))
    ]
    names = [each.name for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ScheduleInvalid(f"{twice} is asked for twice; expected each composition once. Remove one.")
    return found


def listed(given: str | Sequence[str], what: str) -> list[str]:
    """``given`` as a list; text is cut at commas, but for those inside scenario keys. Raises NothingToCheck."""
    if isinstance(given, str):
        given = [
            word.strip() for word in re.split(r",(?=\s*(?:serial|static|continuous|padded|packed))", given)
        ]
    if not isinstance(given, Iterable):
        raise ScheduleInvalid(f"{what} are {given!r}; expected text, or a list of texts. Correct them.")
    found = [each for each in given if each != ""]
    if not found:
        raise NothingToCheck(
            f"There are no {what}, so that nothing would be checked. Give one at least, or leave {what} out."
        )
    return found


def _are(n: int) -> str:
    return "is 1" if n == 1 else f"are {n}"


def _arrivals(count: int, draw: random.Random | None) -> tuple[int, ...]:
    return tuple(_steps(count, draw))


def _steps(count: int, draw: random.Random | None) -> Iterator[int]:
    at = 0
    for _ in range(count):
        yield at
        at += 1 if draw is None else draw.randint(0, LATEST)


Prompt = str | Sequence[int]
Encode = Callable[[str], Sequence[int]]

BY_DEFAULT: Final = 4
"""How many prompts there are without any given, if no schedule needs more."""
_TEXTS: Final = (
    "In the beginning",
    "And the king said unto the people, Hear ye the words of this day, and keep them",
    "The value of two sums in another order is",
    "Once there was a small house at the end of a long road. Nobody who passed it knew who lived there, but at night",
)
_LENGTHS: Final = (8, 24, 12, 32)
"""Tokens of the first prompts at most: a tokenizer of single characters makes many of a text."""
_VOCABULARY: Final = 32
"""Token ids that every model has, where nothing says how many there are."""


def requests(
    given: Sequence[Prompt] | str | None, encode: Encode | None, vocabulary: int | None, least: int
) -> list[dict[str, Any]]:
    """The requests r0, r1, ... as tables of a scenario: ``given`` as text or token ids, else at least ``least``.

    ``encode`` gives a text's token ids, which lie below ``vocabulary``; either may not be known. Raises NothingToCheck for an empty list, and CheckSettingInvalid for what is neither text nor token ids.
    """
    prompts = default(encode, vocabulary, max(least, BY_DEFAULT)) if given is None else given
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Iterable):
        raise CheckSettingInvalid(
            f"prompts are {prompts!r}; expected a list of texts or of lists of token ids. Give one."
        )
    prompts = list(prompts)
    if not len(prompts):
        raise NothingToCheck(
            "There are no prompts, so that nothing would be checked. Give one at least, or leave prompts out."
        )
    return [{"id": f"r{n}", **_table(prompt, n)} for n, prompt in enumerate(prompts)]


def default(encode: Encode | None, vocabulary: int | None, count: int) -> list[Prompt]:
    """Prompts that differ in length: texts where they can be encoded, token ids where they cannot."""
    found: list[Prompt] = []
    for n in range(count):
        # A number in front keeps prompts apart where there are more of them than texts.
        text = _TEXTS[n % len(_TEXTS)] if n < len(_TEXTS) else f"{n}. {_TEXTS[n % len(_TEXTS)]}"
        most = _LENGTHS[n % len(_LENGTHS)]
        tokens = _tokens(text, encode, vocabulary)
        if tokens is None:
            found.append([(7 * n + 13 * place + 1) % (vocabulary or _VOCABULARY) for place in range(most)])
        else:
            found.append(text if len(tokens) <= most else tokens[:most])
    return found


def _tokens(text: str, encode: Encode | None, vocabulary: int | None) -> list[int] | None:
    """The text's token ids; None where it cannot be encoded, or not with the model's own."""
    if encode is None:
        return None
    try:
        ids = [int(token) for token in encode(text)]
    except (DetdiffError, AttributeError, TypeError, KeyError, ValueError):  # a tokenizer of the user's own
        return None
    return ids if ids and (vocabulary is None or max(ids) < vocabulary) else None


def _table(prompt: Any, n: int) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    tokens = getattr(prompt, "tolist", lambda: prompt)()
    if isinstance(tokens, list | tuple) and all(type(token) is int for token in tokens):
        return {"tokens": list(tokens)}
    raise CheckSettingInvalid(
        f"Prompt {n} is {str(prompt)[:60]!r}, a {type(prompt).__name__}; expected text, or a list of token ids. Give one of them."
    )
