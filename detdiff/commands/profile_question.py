"""What `detdiff profiles NAME` is asked: one call whose rows, key length or query length go over a range."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from detdiff.errors import ProfileQuestionError
from detdiff_kernels import Call

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
