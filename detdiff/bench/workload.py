"""What a measurement serves: how long prompts and answers are, and when they come; drawn with a seed, or read from a file.

Lengths of answers are exact: a request goes on past stop tokens, so that every policy does the same work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from detdiff.errors import WorkloadUnusable

AT_ONCE: Final = "at-once"
_LENGTHS = re.compile(r"(fixed|uniform|exponential):(\d+)(?:-(\d+))?")
_ARRIVALS = re.compile(r"(poisson|gamma):(\d+(?:\.\d+)?)(?::(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths, at least 1: ``fixed`` at ``a``, ``uniform`` from ``a`` to ``b``, or ``exponential`` with the
    mean ``a`` and at most ``b``."""

    kind: str
    a: int
    b: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Of ``fixed:32``, ``uniform:8-64`` or ``exponential:32`` (``exponential:32-256`` with a limit). Raises WorkloadUnusable."""
        found = _LENGTHS.fullmatch(text)
        number = re.fullmatch(r"\d+", text)
        if number is not None:
            return cls("fixed", *cls._checked(text, int(text), int(text)))
        if found is None or (found[1] == "uniform") > bool(found[3]) or (found[1] == "fixed" and found[3]):
            raise WorkloadUnusable(
                f"{text!r} is no distribution of lengths; expected fixed:N, uniform:A-B, exponential:MEAN or exponential:MEAN-MOST. "
                "Correct it."
            )
        first = int(found[2])
        return cls(
            found[1],
            *cls._checked(text, first, int(found[3] or (8 * first if found[1] == "exponential" else first))),
        )

    @staticmethod
    def _checked(text: str, a: int, b: int) -> tuple[int, int]:
        if not 1 <= a <= b:
            raise WorkloadUnusable(
                f"The lengths {text!r} run from {a} to {b}; expected 1 or more, and upwards. Correct them."
            )
        return a, b

    def __str__(self) -> str:
        plain = self.b == (8 * self.a if self.kind == "exponential" else self.a)
        return f"{self.kind}:{self.a}" if plain else f"{self.kind}:{self.a}-{self.b}"

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """``count`` lengths."""
        if self.kind == "uniform":
            return [int(n) for n in random.integers(self.a, self.b + 1, count)]
        if self.kind == "fixed":
            return [self.a] * count
        return [min(self.b, max(1, round(float(n)))) for n in random.exponential(self.a, count)]


@dataclass(frozen=True)
class WorkItem:
    """One request: how long its prompt and its answer are, in tokens, and when it comes. ``prompt`` has its text or token ids
    where they are known."""

    prompt_length: int
    answer_length: int
    arrival: float = 0.0
    prompt: str | tuple[int, ...] | None = None


@dataclass(frozen=True)
class Workload:
    """The requests of a measurement, in order of arrival. ``source`` says where they are from."""

    items: tuple[WorkItem, ...]
    source: str

    def __len__(self) -> int:
        return len(self.items)


def drawn(count: int, prompts: Lengths, answers: Lengths, arrivals: str = AT_ONCE, seed: int = 0) -> Workload:
    """``count`` requests; the same seed gives the same. ``arrivals`` is ``at-once``, ``poisson:RATE`` or
    ``gamma:RATE:BURSTINESS`` (1 is Poisson, below it burstier), in requests a unit of the engine's clock: a forward, or a second of a server's.

    Raises WorkloadUnusable.
    """
    if count < 1:
        raise WorkloadUnusable(f"{count} requests were asked for; expected one at least. Raise --requests.")
    random = np.random.default_rng(seed)
    items = zip(
        prompts.draw(random, count),
        answers.draw(random, count),
        _arrivals(arrivals, random, count),
        strict=True,
    )
    words = f"prompts {prompts}, answers {answers} tokens, arrivals {arrivals}, seed {seed}"
    return Workload(tuple(WorkItem(*item) for item in items), f"{count} requests drawn: {words}")


def _arrivals(text: str, random: np.random.Generator, count: int) -> Sequence[float]:
    if text == AT_ONCE:
        return [0.0] * count
    found = _ARRIVALS.fullmatch(text)
    rate = float(found[2]) if found is not None else 0.0
    if found is None or rate <= 0 or (found[1] == "gamma") != bool(found[3]) or float(found[3] or 1) <= 0:
        raise WorkloadUnusable(
            f"{text!r} is no way to arrive; expected at-once, poisson:RATE or gamma:RATE:BURSTINESS with numbers above 0. Correct it."
        )
    burstiness = float(found[3] or 1)
    gaps = random.gamma(burstiness, 1 / (rate * burstiness), count)
    gaps[0] = 0.0
    return [float(each) for each in np.cumsum(gaps)]


def read(path: Path, encode: Callable[[str], Sequence[int]] | None = None) -> Workload:
    """Real requests from a JSONL file: each line an object with ``prompt_length`` and ``answer_length`` in tokens, or with a
    ``prompt`` (text, or token ids) in the place of its length; ``arrival`` may follow. Names of other tools are read too:
    ``input_len`` or ``prompt_len``, ``output_len`` or ``max_tokens``, and ``timestamp``.

    Raises WorkloadUnusable for a line without lengths, and for a file that cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadUnusable(
            f"{path} cannot be read ({error}); expected a JSONL file of requests."
        ) from None
    items = [_item(path, number, line, encode) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise WorkloadUnusable(f"{path} has no request; expected one a line. Name another file.")
    ordered = sorted(items, key=lambda item: item.arrival)
    return Workload(tuple(ordered), f"{len(items)} requests of {path.name}")


def _item(path: Path, number: int, line: str, encode: Callable[[str], Sequence[int]] | None) -> WorkItem:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise WorkloadUnusable(
            f"{path}, line {number} is no JSON ({error}); expected one object a line."
        ) from None
    if not isinstance(given, Mapping):
        raise WorkloadUnusable(f"{path}, line {number} is {line[:60]}; expected an object.")
    prompt: Any = given.get("prompt")
    if isinstance(prompt, list):
        prompt = tuple(int(token) for token in prompt)
    elif isinstance(prompt, str) and encode is not None:
        prompt = tuple(encode(prompt))
    length = (
        len(prompt)
        if isinstance(prompt, tuple)
        else _first(given, ("prompt_length", "prompt_len", "input_len"))
    )
    answer = _first(given, ("answer_length", "output_len", "max_tokens", "output_length"))
    arrival = given.get("arrival", given.get("timestamp", 0.0))
    if not (isinstance(length, int) and isinstance(answer, int) and length > 0 and answer > 0):
        raise WorkloadUnusable(
            f"{path}, line {number} has a prompt of {length} and an answer of {answer} tokens; expected both as whole numbers above 0: "
            "prompt_length (or a prompt) and answer_length. Add them: a measurement needs the lengths."
        )
    if not isinstance(arrival, int | float) or arrival < 0:
        raise WorkloadUnusable(
            f"{path}, line {number} has the arrival {arrival!r}; expected a number, 0 or more."
        )
    return WorkItem(length, answer, float(arrival), prompt)


def _first(given: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((given[name] for name in names if name in given), None)
