"""Settings of a candidate made plainer: taken back to their defaults, made alike on both sides, or lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from detdiff.errors import ScenarioError
from detdiff.explain.smallest import smallest
from detdiff.scenario import Request, Scenario, toml_text

from .candidate import Candidate

Holds = Callable[[Candidate], bool]

DROPPED: Final = (
    "temperature",
    "top_p",
    "seed",
    "ignore_stop",
    "draft",
    "kv_bits",
    "kv_group_size",
    "kv_start",
    "reuse_tokens",
    "page_tokens",
    "share_prefix",
    "row_budget",
    "active",
    "prefill_chunk",
    "split_rows",
    "kernels",
    "force_tokens",
    "schedule",
    "layout",
)
"""What is taken back to its default where nothing needs it."""
LOWERED: Final[Mapping[str, int]] = {
    "prefill_chunk": 1,
    "row_budget": 1,
    "split_rows": 1,
    "page_tokens": 1,
    "drafts": 1,
    "active": 1,
    "kv_start": 0,
    "reuse_tokens": 1,
}
"""What is lowered where it stays, and the least that it can be. A smaller threshold is met by fewer rows."""
_OF_REQUESTS: Final = ("temperature", "top_p", "seed", "ignore_stop")


def plain(scenario: Scenario, tokens: Mapping[str, Sequence[int]]) -> Scenario:
    """A scenario with prompts as token ids and without what only says how much is written."""
    requests = tuple(
        replace(request, prompt=None, chat=False, tokens=tuple(tokens[request.id]))
        for request in scenario.requests
    )
    capture = type(scenario.capture)(digest=scenario.capture.digest, memory_mb=scenario.capture.memory_mb)
    return replace(scenario, requests=requests, capture=capture)


def short_toml(scenario: Scenario) -> str:
    """A scenario file that leaves out what is a default."""
    bare = Scenario("m", (Request("r", tokens=(0,)),)).to_dict()
    [plain_request] = bare.pop("request")
    keys = {key: value for key, value in scenario.to_dict().items() if bare.get(key) != value}
    keys["request"] = [
        {
            key: value
            for key, value in request.items()
            if key in ("id", "tokens", "max_tokens") or plain_request.get(key) != value
        }
        for request in keys["request"]
    ]
    return toml_text(keys)


def plainer(now: Candidate, holds: Holds) -> Candidate:
    """Without settings that are not needed: all of them at once, or else as few as have to stay; then without rules that
    are not, and with settings alike that need not differ."""
    keys = [key for key in DROPPED if any(not _is_default(now.side(name), key) for name in "ab")]

    def without(kept: Sequence[str]) -> Candidate | None:
        gone = {key: None for key in keys if key not in kept}
        return _changed(now, "ab", gone) if gone else now

    def works(kept: Sequence[str]) -> bool:
        made = without(kept)
        return made is not None and holds(made)

    if keys:
        needed: list[str] = [] if works([]) else _needed(keys, works)
        made = without(needed)
        now = now if made is None else made
    return _alike(_rules(now, holds), holds)


def lowered(now: Candidate, holds: Holds) -> Candidate:
    """With smaller chunks, budgets and thresholds where these stay: all halved together as long as that goes, since one
    often only fits another, then one by one the least, the next to it, or half of what it is."""
    while (made := _halved(now)) is not None and holds(made):
        now = made
    for key, low in LOWERED.items():
        for sides in ("ab", "a", "b"):
            numbers = _numbers(now, key)
            # One side by itself only where the two differ already.
            if not numbers or (sides != "ab" and len(set(numbers.values())) < 2):
                continue
            values = {name: numbers[name] for name in sides if name in numbers}
            for smaller in dict.fromkeys((low, low + 1, max(low, max(values.values()) // 2))):
                made = _lower(now, {name: {key: min(smaller, n)} for name, n in values.items()})
                if made is not None and made != now and holds(made):
                    now = made
                    break
    return now


def _numbers(now: Candidate, key: str) -> dict[str, int]:
    """A number by side, where it is no default."""
    return {name: int(now.side(name).to_dict()[key]) for name in "ab" if not _is_default(now.side(name), key)}


def _halved(now: Candidate) -> Candidate | None:
    keys: dict[str, dict[str, int]] = {"a": {}, "b": {}}
    for key, low in LOWERED.items():
        for name, n in _numbers(now, key).items():
            if n > low:
                keys[name][key] = max(low, n // 2)
    # A single one is halved by itself.
    return _lower(now, keys) if len({key for each in keys.values() for key in each}) > 1 else None


def _lower(now: Candidate, keys: Mapping[str, Mapping[str, int]]) -> Candidate | None:
    made: Candidate | None = now
    for name, values in keys.items():
        made = _changed(made, name, values) if made is not None and values else made
    return made


def dropped(before: Candidate, after: Candidate) -> tuple[str, ...]:
    """The settings of the first that the second does without, a sentence's worth each."""
    found = []
    for key in DROPPED:
        was = [name for name in "ab" if not _is_default(before.side(name), key)]
        if was and all(_is_default(after.side(name), key) for name in "ab"):
            found.append(key)
    rules = [len(each.a.kernels.rules) + len(each.b.kernels.rules) for each in (before, after)]
    if rules[1] < rules[0]:
        found.append("rules")
    return tuple(found)


def _needed(keys: Sequence[str], works: Callable[[Sequence[str]], bool]) -> list[str]:
    """One by one, in order: most keys go or stay by themselves."""
    kept = list(keys)
    for key in keys:
        fewer = [other for other in kept if other != key]
        if fewer and works(fewer):
            kept = fewer
    return kept


def _rules(now: Candidate, holds: Holds) -> Candidate:
    rules = tuple(dict.fromkeys((*now.a.kernels.rules, *now.b.kernels.rules)))
    if not rules:
        return now

    def keeping(kept: Sequence[Any]) -> Candidate:
        def side(scenario: Scenario) -> Scenario:
            some = tuple(rule for rule in scenario.kernels.rules if rule in kept)
            return replace(scenario, kernels=replace(scenario.kernels, rules=some))

        return replace(now, a=side(now.a), b=side(now.b))

    if holds(keeping([])):
        return keeping([])
    return keeping(smallest(rules, lambda kept: holds(keeping(kept))))


def _alike(now: Candidate, holds: Holds) -> Candidate:
    """Each setting that differs between the sides, made that of the other, where more than one differs."""
    for key in _differing(now):
        if len(list(_differing(now))) < 2:
            break
        for to, from_ in (("b", "a"), ("a", "b")):
            made = _changed(now, to, {key: now.side(from_).to_dict().get(key)})
            if made is not None and holds(made):
                now = made
                break
    return now


def _differing(now: Candidate) -> Iterator[str]:
    a, b = now.a.to_dict(), now.b.to_dict()
    for key in dict.fromkeys((*a, *b)):
        if key not in ("model", "request", "rule") and a.get(key) != b.get(key):
            yield key


def _changed(now: Candidate, sides: str, keys: Mapping[str, Any]) -> Candidate | None:
    try:
        return now.with_keys(sides, **keys)
    except ScenarioError:
        return None


def _is_default(scenario: Scenario, key: str) -> bool:
    if key in _OF_REQUESTS:
        return all(_plain_setting(request, key) for request in scenario.requests)
    bare = Scenario(scenario.model, scenario.requests).to_dict()
    return scenario.to_dict().get(key) == bare.get(key)


def _plain_setting(request: Request, key: str) -> bool:
    default = Request("r", tokens=(0,))
    return bool(
        getattr(request, key, None) == getattr(default, key, None)
        and getattr(request.sampling, key, None) == getattr(default.sampling, key, None)
    )
