"""A lint of profile files: rules that can never be reached, or that cross one another, on sampled calls.

Run it over files of your own: `python tests/profile_lint.py FILE...`. Loading a profile refuses only a rule that one above
it contains.

Conditions can only change their answer near the constants they hold, so calls are drawn from those constants, their
neighbours and multiples; the draws are the same every time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

from detdiff_kernels import load_profile
from detdiff_kernels.condition import Expression, version_of
from detdiff_kernels.dispatch import MASKS, QUANTISED, Call, Parameter, Range, Rule, shown
from detdiff_kernels.errors import ProfileError, UnreachableRule
from detdiff_kernels.rounding import DTYPES

_WIDTHS = (None, 2, 3, 4, 5, 6, 8)
_FIELDS = {"m": "rows", "l": "second_last", "q": "query", "kv": "keys", "d": "head_dim"}
_SIZES = ("m", "l", "k", "n", "group_size", "q", "kv", "d", "gqa", "kv_heads", "batch", "experts")
_USUAL = {"k": (64, 1024), "n": (64, 1024), "d": (64,), "q": (1, 16), "kv": (1, 512), "group_size": (32, 64)}
# Calls drawn for each rule, and for a rule that none of them reaches.
_DRAWS, _MORE = 150, 4000

Values = dict[str, list[Any]]


class OverlappingRules(ProfileError):
    """Two rules of different kernels cross: each takes calls that the other does not, and both take some."""


@dataclass(frozen=True)
class _Sample:
    call: Call
    names: dict[str, Any]


def check_rules(rules: Sequence[Rule], parameters: Sequence[Parameter], where: str) -> None:
    """Raises UnreachableRule, or OverlappingRules for two rules of different kernels that cross."""
    if len(rules) == 1 and rules[0].when is None:
        return
    draw = _Draw(rules, parameters)
    samples = [draw.near(rule) for rule in rules for _ in range(_DRAWS)]
    # Bit i of taken[j] says that rule j takes sample i, so that sets of calls are compared as integers.
    taken = [_bits(rule, samples) for rule in rules]
    before = 0
    for place in range(len(rules)):
        if not taken[place] & ~before and not _reached(draw, rules[: place + 1]):
            blockers = [earlier for earlier in range(place) if taken[earlier] & taken[place]]
            raise UnreachableRule(_unreachable(rules, place, blockers, where))
        before |= taken[place]
    for one, two in combinations(range(len(rules)), 2):
        both = taken[one] & taken[two]
        if rules[one].kernel != rules[two].kernel and both and taken[one] & ~both and taken[two] & ~both:
            sample = samples[(both & -both).bit_length() - 1]
            raise OverlappingRules(
                f"{where}, {_named(rules, one)} and {_named(rules, two)} cross: both take {_words(sample)}, and each "
                f"takes calls that the other does not, so that neither can be read alone. Narrow rule {two + 1}, or "
                "make one contain the other."
            )


def _unreachable(rules: Sequence[Rule], place: int, blockers: Sequence[int], where: str) -> str:
    start = f"{where}, {_named(rules, place)} can never be reached: "
    if not blockers:
        return f"{start}no call was found for which its conditions hold. Correct them, or remove the rule."
    words = " and ".join(f"rule {earlier + 1} ({rules[earlier].condition})" for earlier in blockers)
    verb = "takes" if len(blockers) == 1 else "together take"
    return f"{start}{words} {verb} all its calls. Move it up, or remove it."


def _named(rules: Sequence[Rule], place: int) -> str:
    return f"rule {place + 1} ({rules[place].condition} -> {rules[place].kernel})"


def _bits(rule: Rule, samples: Sequence[_Sample]) -> int:
    found = bytearray(len(samples) // 8 + 1)
    for place, sample in enumerate(samples):
        if rule.takes(sample.call, sample.names):
            found[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(found, "little")


def _reached(draw: _Draw, rules: Sequence[Rule]) -> bool:
    *earlier, rule = rules
    for _ in range(_MORE):
        sample = draw.near(rule)
        if rule.takes(sample.call, sample.names) and not any(
            other.takes(sample.call, sample.names) for other in earlier
        ):
            return True
    return False


def _words(sample: _Sample) -> str:
    call = sample.call
    weight = "dense" if call.bits is None else f"{call.bits}-bit {call.names()['format']}"
    shape = f"m = {call.rows}, l = {call.second_last}, k = {call.k}, n = {call.n}, {call.dtype}, {weight}"
    if call.op == "attention":
        shape = f"q = {call.query}, kv = {call.keys}, d = {call.head_dim}, gqa = {sample.names['gqa']}, mask {call.mask}"
    given = [f"{name} = {shown(value)}" for name, value in sample.names.items() if name not in call.names()]
    return ", ".join([f"a {call.op} call of {shape}", *given])


class _Draw:
    """Draws calls near the constants of all rules, or of one."""

    def __init__(self, rules: Sequence[Rule], parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._random = Random(0)
        self._all = self._values(rules, alone=False)
        self._own = {rule: self._values([rule], alone=True) for rule in rules}

    def near(self, rule: Rule) -> _Sample:
        """A call that mostly keeps to what ``rule`` asks for."""
        own, pick = self._own[rule], self._random.choice
        chosen = {
            name: pick(own[name] if own[name] and self._random.random() < 0.8 else values)
            for name, values in self._all.items()
        }
        return self._sample(pick(sorted(rule.op)), chosen)

    def _sample(self, op: str, chosen: Mapping[str, Any]) -> _Sample:
        bits, form = chosen["bits"], chosen["format"]
        if form not in ("dense", "affine"):
            bits = int(form[1]) if form[1:2].isdigit() else bits or 4
        elif bits is None:
            form = "dense"
        rows, second_last = chosen["m"], chosen["l"]
        # The second-to-last dimension divides the rows.
        rows = max(second_last, rows - rows % second_last)
        call = Call(
            op,  # type: ignore[arg-type]
            rows,
            second_last,
            chosen["k"],
            chosen["n"],
            chosen["dtype"],
            bits,
            None if bits is None else chosen["group_size"],
            form if bits is not None else "dense",
            chosen["experts"],
            chosen["sorted"],
            chosen["q"],
            chosen["kv"],
            chosen["d"],
            chosen["gqa"] * chosen["kv_heads"],
            chosen["kv_heads"],
            chosen["batch"],
            chosen["mask"],
        )
        names = call.names()
        names.update((parameter.name, chosen[parameter.name]) for parameter in self._parameters)
        return _Sample(call, names)

    def _values(self, rules: Sequence[Rule], *, alone: bool) -> Values:
        """What to draw from, by name: sizes that ``alone`` are inside a rule's ranges, else the usual and outside."""
        found: dict[str, set[Any]] = {name: set() for name in (*_SIZES, *(p.name for p in self._parameters))}
        texts: dict[str, set[Any]] = {"dtype": set(), "format": set(), "mask": set(), "bits": set()}
        for rule in rules:
            for size in _SIZES:
                limits = getattr(rule, _FIELDS.get(size, size), None)
                if isinstance(limits, Range):
                    found[size] |= _near(limits) if alone else _edges(limits)
            for key, values in texts.items():
                values |= getattr(rule, key) or set()
            if rule.whole is not None:
                found["m"] |= _around(rule.whole)
            if rule.when is not None:
                self._constants(rule.when, found, texts)
        if QUANTISED in texts["bits"]:
            texts["bits"] = texts["bits"] - {QUANTISED} | {width for width in _WIDTHS if width}
        made: Values = {
            size: sorted(found[size] | set(() if alone else (1, 2, *_USUAL.get(size, ())))) for size in _SIZES
        }
        for parameter in self._parameters:
            made[parameter.name] = self._choices(parameter, found[parameter.name], alone)
        for key, usual in (("dtype", DTYPES), ("mask", MASKS), ("bits", _WIDTHS), ("format", ("affine",))):
            made[key] = sorted(texts[key] | set(() if alone else usual), key=str)
        made["sorted"] = [False, True]
        return made

    def _constants(self, when: Expression, found: dict[str, set[Any]], texts: dict[str, set[Any]]) -> None:
        for name, constants in when.constants.items():
            numbers = {one for one in constants if type(one) is int}
            if name in texts and name != "bits":
                texts[name] |= {one for one in constants if isinstance(one, str)}
            elif name == "bits":
                texts["bits"] |= {width for width in _WIDTHS if (width or 0) in numbers}
            elif name == "heads":
                found["gqa"] |= {1, 2} | numbers
            elif name in _SIZES:
                found[name] |= {size for number in numbers for size in _around(number)}
            elif name in found:
                found[name] |= constants

    def _choices(self, parameter: Parameter, found: set[Any], alone: bool) -> list[Any]:
        if parameter.oldest:
            oldest = version_of(parameter.oldest)
            usual = set() if alone else {oldest, version_of(str(parameter.default))}
            return sorted({one for one in found if isinstance(one, tuple) and one >= oldest} | usual)
        if parameter.choices:
            return list(parameter.choices)
        return list(range(parameter.low, parameter.high + 1))


def _near(limits: Range) -> set[int]:
    if limits.high is None:
        return {limits.low, limits.low + 1, 2 * limits.low, 2 * limits.low + 1}
    return {limits.low, limits.high, (limits.low + limits.high) // 2, min(limits.low + 1, limits.high)}


def _edges(limits: Range) -> set[int]:
    ends = {limits.low} if limits.high is None else {limits.low, limits.high}
    return set().union(*(_around(end) for end in ends))


def _around(number: int) -> set[int]:
    """The sizes at which a comparison with ``number``, or with a multiple of it, may change."""
    return {size for size in (number - 1, number, number + 1, 2 * number, 2 * number + 1) if size > 0}


def main() -> None:
    for name in sys.argv[1:]:
        found = load_profile(Path(name))
        check_rules(found.rules, found.parameters, f"Profile {name}")


if __name__ == "__main__":
    main()
