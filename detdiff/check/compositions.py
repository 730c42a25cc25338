"""What is checked against running alone: schedules as they are written, such as ``static:2``, and what a seed draws.

``static:N`` puts N requests at a time into one batch, each request into one at least; ``static`` all of them.
``continuous:N`` lets requests arrive one after the other, N of them active at most; ``continuous`` without a limit.
``serial`` is the run alone, once more. Scenario keys may follow: ``"continuous:4 prefill_chunk=8"``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from detdiff.errors import NothingToCheck, ScheduleInvalid
from detdiff.scenario import LAYOUTS, SCHEDULES, Scenario, located, parse_flags

SCHEDULES_BY_DEFAULT: Final = ("static:2", "continuous:4")
LAYOUTS_BY_DEFAULT: Final = ("padded", "packed")
LATEST: Final = 3
"""Forwards at most between two arrivals."""
_WRITTEN: Final = re.compile(r"(serial|static|continuous)(?::([1-9][0-9]{0,5}))?(?: +(\S.*))?")


@dataclass(frozen=True)
class Composition:
    """One schedule in one layout, None: an engine's own. ``written`` is the schedule as it was given; ``size`` its N, None
    without one; ``flags`` are further scenario keys of this run alone."""

    written: str
    layout: str | None
    kind: str
    size: int | None
    flags: str

    @classmethod
    def of(cls, written: str, layout: str | None) -> Composition:
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
    def alone(self) -> bool:
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
        changes: dict[str, Any] = {
            "schedule": self.kind,
            "layout": self.layout or LAYOUTS[0],
            **parse_flags(self.flags),
        }
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


def compositions(schedules: str | Sequence[str], layouts: str | Sequence[str] | None) -> list[Composition]:
    """Every schedule in every layout, in order; None: in an engine's own. A text may hold several with commas between them.

    Raises NothingToCheck where there is none, and ScheduleInvalid for what cannot be read or is there twice.
    """
    found = [
        Composition.of(schedule, layout)
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
