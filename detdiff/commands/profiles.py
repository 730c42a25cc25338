"""`detdiff profiles`: which kernel each size takes under a dispatch profile, compressed into ranges, as JSON and as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from detdiff.errors import ProfileQuestionError, ProfileUnusable
from detdiff.report.document import Blank, Block, Item, Prose, Table
from detdiff.report.text import plain
from detdiff.report.words import count
from detdiff_kernels import Call, Choice, KernelLibraryError, Profile, RowSpan, Rule, profile, profile_names

SCHEMA = "detdiff.profile/1"
LIST_SCHEMA = "detdiff.profiles/1"
_AXES = {"m": "M", "keys": "key length", "query": "query length"}
MOST = 200_000
_RANGE = re.compile(r"(\d+)(?:\.\.(\d+))?")

Axis = Literal["m", "keys", "query"]
Default = Callable[[str, Any, str], Any]


@dataclass(frozen=True)
class Question:
    """A call of which one size goes over a range."""

    call: Call
    axis: Axis
    first: int
    last: int
    packed: bool
    assumed: tuple[str, ...] = ()

    def at(self, size: int) -> Call:
        """The call for one size of the axis."""
        if self.axis == "m":
            return replace(self.call, rows=size, second_last=self.second_last(size))
        if self.axis == "keys":
            return replace(self.call, keys=size)
        return replace(self.call, query=size, rows=size)

    def second_last(self, rows: int) -> int:
        """The second-to-last dimension: 1 for padded rows, and for a switch, which gathers rows one by one."""
        return rows if self.packed and self.call.op != "switch" else 1


def asked(options: Mapping[str, Any]) -> Question | None:
    """The question that the command's options ask; None where none of them is given.

    Raises ProfileQuestionError for sizes that are missing, make no range, or do not go with the operation.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if not given:
        return None
    op = given.pop("op", "attention" if "keys" in given or "query" in given else "linear")
    take = _attention if op == "attention" else _matrix
    taken, assumed = dict(given), []

    def default(key: str, value: Any, words: str) -> Any:
        if key not in taken:
            assumed.append(words)
        return taken.pop(key, value)

    question = take(op, taken, default)
    if taken:
        raise ProfileQuestionError(
            f"The operation {op} has no {', '.join(sorted(_flag(key) for key in taken))}; leave that out, or choose "
            "another --op."
        )
    return replace(question, assumed=tuple(assumed))


def _matrix(op: str, taken: dict[str, Any], default: Default) -> Question:
    for key in ("m", "k", "n"):
        if key not in taken:
            raise ProfileQuestionError(
                f"The operation {op} needs {_flag(key)}; give --m, --k and --n, such as --m 1..32 --k 2048 --n 2048."
            )
    first, last = _sizes(taken.pop("m"), "m")
    k, n = taken.pop("k"), taken.pop("n")
    bits = _width(default("bits", "4", "--bits 4"))
    group = None if bits is None else default("group_size", 64, "--group-size 64")
    form = taken.pop("format", "dense" if bits is None else "affine")
    dtype = default("dtype", "bfloat16", "--dtype bfloat16")
    experts, in_order, layout = 1, False, "packed"
    if op == "switch":
        experts, in_order = default("experts", 8, "--experts 8"), taken.pop("sorted", False)
    else:
        layout = default("layout", "packed", "--layout packed")
    call = Call(op, first, 1, k, n, dtype, bits, group, form, experts, in_order)  # type: ignore[arg-type]
    return Question(call, "m", first, last, layout == "packed")


def _attention(op: str, taken: dict[str, Any], default: Default) -> Question:
    query = _sizes(default("query", "1", "--query 1"), "query")
    if "keys" not in taken:
        raise ProfileQuestionError(
            "Attention needs --keys, the key length with padding, such as --keys 1..4096."
        )
    keys = _sizes(taken.pop("keys"), "keys")
    ranges = [axis for axis, (first, last) in (("query", query), ("keys", keys)) if first != last]
    if len(ranges) == 2:
        raise ProfileQuestionError(
            "Both --query and --keys are ranges; give a single number for one of them."
        )
    heads = default("heads", 1, "--heads 1")
    kv_heads = taken.pop("kv_heads", heads)
    if heads % kv_heads:
        raise ProfileQuestionError(
            f"{heads} heads cannot share {kv_heads} key/value heads evenly; --heads has to be a multiple of --kv-heads."
        )
    call = Call(
        "attention",
        query[0],
        query[0],
        dtype=default("dtype", "bfloat16", "--dtype bfloat16"),
        query=query[0],
        keys=keys[0],
        head_dim=default("head_dim", 64, "--head-dim 64"),
        heads=heads,
        kv_heads=kv_heads,
        batch=taken.pop("batch", 1),
        mask=default("mask", "none", "--mask none"),
    )
    axis: Axis = "query" if ranges == ["query"] else "keys"
    first, last = query if axis == "query" else keys
    return Question(call, axis, first, last, True)


def _sizes(text: str, key: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(text)
    first = int(found[1]) if found else 0
    last = int(found[2] or first) if found else 0
    if not 1 <= first <= last or last - first >= MOST:
        raise ProfileQuestionError(
            f'{_flag(key)} is {text!r}; expected a number or a range from 1 on, such as "8" or "1..32", of at most '
            f"{MOST:,} sizes."
        )
    return first, last


def _width(text: str) -> int | None:
    if text == "dense":
        return None
    if not text.isdigit() or not 1 <= int(text) <= 16:
        raise ProfileQuestionError(f'--bits is {text!r}; expected a width such as 4 or 8, or "dense".')
    return int(text)


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


@dataclass(frozen=True)
class Band:
    """The sizes ``first`` to ``last`` that take the same kernels by the same rules with the same values.

    ``parts`` are those of ``first``; ``rules`` is the rule of each.
    """

    first: int
    last: int
    parts: tuple[RowSpan, ...]
    rules: tuple[Rule | None, ...]

    @property
    def kernels(self) -> str:
        """The kernels in the order of rows, as in "gemm, then gemv"."""
        return ", then ".join(part.choice.kernel for part in self.parts)


def bands(chosen: Profile, question: Question) -> tuple[Band, ...]:
    """The bands of a question's range, in order and without gaps."""
    found: list[Band] = []
    keys: list[tuple[Choice, ...]] = []
    for size in range(question.first, question.last + 1):
        call = question.at(size)
        parts = chosen.parts(call)
        rules = tuple(chosen.rule_for(_rest(call, part)) for part in parts)
        key = tuple(part.choice for part in parts)
        if keys and keys[-1] == key:
            found[-1] = replace(found[-1], last=size)
        else:
            keys.append(key)
            found.append(Band(size, size, parts, rules))
    return tuple(found)


def _rest(call: Call, part: RowSpan) -> Call:
    if part.first == 0:
        return call
    left = call.rows - part.first
    return replace(call, rows=left, second_last=min(left, call.second_last))


def listed() -> list[Profile]:
    """Every profile that is shipped or installed, with its defaults; raises ProfileUnusable."""
    return [opened(name) for name in profile_names()]


def opened(spec: str) -> Profile:
    """The profile that ``spec`` names, a file included; raises ProfileUnusable."""
    try:
        return profile(spec)
    except KernelLibraryError as error:
        raise ProfileUnusable(f"{error}") from error


def list_json(profiles: list[Profile]) -> dict[str, Any]:
    """The answer of ``detdiff profiles --json``."""
    return {"schema": LIST_SCHEMA, "profiles": [_profile_json(one) for one in profiles]}


def _profile_json(one: Profile) -> dict[str, Any]:
    return {
        "name": one.name,
        "backend": one.backend,
        "note": one.note,
        "parameters": [
            {"name": each.name, "default": each.default, "takes": each.allowed, "meaning": each.meaning}
            for each in one.parameters
        ],
        "rules": len(one.rules),
        "tags": _tags(one),
    }


def _tags(one: Profile) -> dict[str, int]:
    tags = [rule.tag for rule in one.rules]
    return {tag: tags.count(tag) for tag in ("read", "inferred", "measured") if tag in tags}


def list_text(profiles: list[Profile], width: int) -> str:
    """The answer of ``detdiff profiles``."""
    return plain(_list(profiles), width=width)


def _list(profiles: list[Profile]) -> Iterator[Block]:
    rows = []
    for one in profiles:
        parameters = ", ".join(f"{each.name}={each.default}" for each in one.parameters)
        tags = ", ".join(f"{number} {tag}" for tag, number in _tags(one).items())
        rows.append((one.name, one.backend, parameters or "none", f"{len(one.rules)}", tags))
    yield Table(("profile", "backend", "parameters and defaults", "rules", "of these"), tuple(rows))
    yield Blank()
    for one in profiles:
        for each in one.parameters:
            yield Item(f"{one.name}, {each.name}: ", f"{each.meaning}; {each.allowed}")
    yield Blank()
    yield Prose(
        "Ask what one does with `detdiff profiles NAME --m 1..32 --k 2048 --n 2048`; NAME may be NAME:parameter=value "
        "or a .toml file."
    )


def profile_text(one: Profile, width: int) -> str:
    """What a profile without a question says: its rules in order, with source and tag."""
    blocks = _head(one)
    for number, rule in enumerate(one.rules, 1):
        ops = ", ".join(op for op in ("linear", "head", "switch", "attention") if op in rule.op)
        text = f"{rule.condition} -> {rule.kernel} ({rule.tag}: {rule.source})"
        blocks.append(Item(f"{number}. {ops}: ", text))
    return plain(blocks, width=width)


def rules_json(one: Profile) -> dict[str, Any]:
    """The same as JSON values."""
    rules = [
        {
            "op": sorted(rule.op),
            "condition": rule.condition,
            "kernel": rule.kernel,
            "source": rule.source,
            "tag": rule.tag,
        }
        for rule in one.rules
    ]
    return {"schema": SCHEMA, **_profile_json(one), "spec": one.spec, "each_rule": rules}


def answer_json(one: Profile, question: Question, found: tuple[Band, ...]) -> dict[str, Any]:
    """The answer to a question as JSON values; docs/cli.md lists the keys."""
    call = question.at(question.first)
    fields = ("op", "k", "n", "dtype", "bits", "group_size", "format", "experts", "sorted")
    if call.op == "attention":
        fields = ("op", "query", "keys", "head_dim", "heads", "kv_heads", "batch", "mask", "dtype")
    return {
        "schema": SCHEMA,
        "profile": one.name,
        "spec": one.spec,
        "axis": question.axis,
        "first": question.first,
        "last": question.last,
        "call": {field: getattr(call, field) for field in fields if field != question.axis},
        "layout": "packed" if question.packed else "padded",
        "assumed": list(question.assumed),
        "thresholds": [band.first for band in found[1:]],
        "bands": [_band_json(band) for band in found],
    }


def _band_json(band: Band) -> dict[str, Any]:
    parts = [
        {
            "first_row": part.first,
            "last_row": part.last - 1,
            "kernel": part.choice.kernel,
            "rule": part.choice.rule,
            "source": rule.source if rule else None,
            "tag": rule.tag if rule else None,
        }
        for part, rule in zip(band.parts, band.rules, strict=True)
    ]
    return {"first": band.first, "last": band.last, "parts": parts}


def answer_text(one: Profile, question: Question, found: tuple[Band, ...], width: int) -> str:
    """The answer to a question as text."""
    return plain([*_head(one), *_answer(one, question, found)], width=width)


def _answer(one: Profile, question: Question, found: tuple[Band, ...]) -> Iterator[Block]:
    word = _AXES[question.axis]
    rows = [(_span(band.first, band.last), _short(one, band.kernels), _why(one, band)) for band in found]
    yield from (Prose(_asked(question)), Blank(), Table((word, "kernel", "rule"), tuple(rows)), Blank())
    none = f"No threshold from {question.first} to {question.last}."
    yield Prose(none if len(found) == 1 else "Thresholds:")
    for before, after in pairwise(found):
        yield Item(
            f"  {word} {after.first}: ",
            f"{_short(one, before.kernels)} -> {_short(one, after.kernels)}; before: {_why(one, before)}; from here on: "
            f"{_why(one, after)}",
        )
    sources = dict.fromkeys(
        (f"{_short(one, rule.kernel)} ({rule.tag})", rule.source)
        for band in found
        for rule in band.rules
        if rule
    )
    if sources:
        yield from (Blank(), Prose("Sources:"))
        yield from (Item(f"  {what}: ", source) for what, source in sources)


def _head(one: Profile) -> list[Block]:
    return [Item(f"{one.spec}: ", one.backend), Prose(one.note), Blank()]


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"


def _short(one: Profile, kernels: str) -> str:
    return kernels.replace(f"{one.name}/", "")


def _why(one: Profile, band: Band) -> str:
    return "; then ".join(
        part.choice.rule.removeprefix(f"{one.name}: ").rpartition(" -> ")[0] for part in band.parts
    )


def _asked(question: Question) -> str:
    call = question.at(question.first)
    sizes = f"{_AXES[question.axis]} {_span(question.first, question.last)}"
    if call.op == "attention":
        other = "" if question.axis == "query" else f", query length {call.query}"
        other += "" if question.axis == "keys" else f", key length {call.keys}"
        words = (
            f"attention, {sizes}{other}, head dimension {call.head_dim}, {count(call.heads, 'head')} over "
            f"{call.kv_heads}, batch {call.batch}, mask {call.mask}, {call.dtype}"
        )
    else:
        weight = "dense" if call.bits is None else f"{call.bits}-bit, groups of {call.group_size}"
        words = f"{call.op}, {sizes}, k {call.k}, n {call.n}, {weight}, {call.dtype}"
        if call.op == "switch":
            words += f", {count(call.experts, 'expert')}{', sorted' if call.sorted else ''}"
        else:
            words += f", layout {'packed' if question.packed else 'padded'}"
    assumed = f" Taken for granted: {', '.join(question.assumed)}." if question.assumed else ""
    return f"{words}.{assumed}"
