#!/usr/bin/env python3
"""Write docs/profiles.md from the profiles that are shipped; a test says when it is out of date.

python tools/profile_docs.py            writes docs/profiles.md
python tools/profile_docs.py --check    exit status 1 when docs/profiles.md is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from detdiff_kernels import Call, Profile, profile, profile_names

TARGET = Path(__file__).resolve().parent.parent / "docs" / "profiles.md"
ROWS = tuple(range(1, 49))
KEYS = tuple(2**power for power in range(18))
WIDE = {"M": 1, "keys": 2}
MARKS = "abcdefghijklmnopqrstuvwxyz"
INTRODUCTION = """\
# Dispatch profiles

This page is made by `python tools/profile_docs.py` from the profiles that are shipped.

A profile mirrors one backend's choice of kernels: rules in order, of which the first that takes a call wins; a call that no
rule takes stays native. Nothing here was run on Metal or CUDA. Each rule says where it was found, and its tag whether the
fact was *read* in that source, *inferred*, or *measured*.

    detdiff profiles
    detdiff profiles mlx-metal --m 1..32 --k 2048 --n 2048
    detdiff profiles mlx-metal:generation=13,letter=d --m 1..32 --k 2048 --n 2048 --bits dense
    detdiff profiles mlx-metal --keys 1..8192 --head-dim 64 --heads 9 --kv-heads 3

The first lists them; the others say which kernel each size takes, and where that changes. A scenario names a profile as
`kernels = "mlx-metal:generation=13,letter=d"`; parameters that are left out keep their defaults.

## A profile of your own

A TOML file, named by a path that ends in `.toml`, as in `detdiff profiles ./mine.toml:cores=8 --m 1..8 --k 64 --n 64`:

```toml
name = "mine"
backend = "my engine 1.2"
note = "Read in the source."

[parameters.cores]
default = 4
range = "1..64"                  # or choices = ["small", "large"], or versions = "1.0.."
meaning = "cores of the device"

[[define]]                       # of one name, the first that holds counts; the last has no `when`
name = "limit"
when = "k >= 4096 and cores >= 8"
value = "4 * cores"
source = "engine.cpp pick_limit"
tag = "read"

[[define]]
name = "limit"
value = 8
source = "engine.cpp pick_limit"
tag = "read"

[[rule]]
op = ["linear", "head"]          # linear, head, switch (experts), attention
bits = "quantised"               # widths, "dense" or "quantised"
when = "m >= limit"
kernel = "mlx-metal/qmm_t"       # a reference kernel, native, rows or pad:N
source = "engine.cpp matmul"
tag = "read"

[[rule]]
op = ["linear", "head"]
bits = "quantised"
kernel = "mlx-metal/qmv"
source = "engine.cpp matmul"
tag = "read"
```

Further conditions of a rule are the ranges `rows` (M), `second_last` (the second-to-last dimension), `k`, `n`, `group_size`,
`query`, `keys` (key length, padding included) and `head_dim`, written `"4"`, `"2..8"` or `"9.."`; and `dtype`, `format`
(`affine` or a GGUF block such as `Q4_K`) and `mask` (`none`, `causal`, `array`). All have to hold. `whole = 4` gives whole
groups of four rows to the kernel, and the rows left over are a call of their own. `shows = ["lanes"]` puts the value of a
definition into the rule's text; `passes = ["blocks"]` hands it to the kernel as well.

`when` and `value` know m, n, k, l (second-to-last dimension), bits (0: dense), group_size, q, kv, d, heads, kv_heads, gqa
(heads per key head), batch, experts, sorted, padded (an array mask over a batch), dtype, format, mask, the parameters and the
definitions above; and, or, not, comparisons, `in (64, 128)`, + - * // %, `a if b else c`, min, max, ceil(a, b) (a / b rounded
up), npow2(a) (the power of two not below a) and even_split(a, unit, most) (the largest count up to `most` of equal parts of a
that are multiples of unit). A version is compared with a text: `version >= "0.32.1"`.

A profile is checked when it is read: keys, expressions, kernels, and rules that one above them contains. The shipped ones
pass a lint as well, `python tests/profile_lint.py FILE`: no rule that earlier ones together leave nothing to, and none that
cross, so that each can be read alone: of two rules that take a call in common and name different kernels, one has to contain
the other. Whether they do is found out on a few thousand calls, drawn near the constants of the conditions.

A package offers a profile as an entry point of the group `detdiff.profiles` whose value is a `pathlib.Path`, or a text that
is a path ending in `.toml` or the TOML itself. A shipped profile wins over one of the same name.
"""


@dataclass(frozen=True)
class Line:
    """One line of a chart: a label, a profile with parameters, and the call at each size."""

    label: str
    spec: str
    call: Call


def linear(spec: str, k: int, n: int, bits: int | None, label: str = "", block: str = "") -> Line:
    """The kernels of a linear by M, in bfloat16, and in groups of 64 or GGUF blocks."""
    group = None if bits is None else 64
    weight = block or ("dense" if bits is None else "")
    words = f"{label}{' ' * bool(label)}{k} -> {n}{', ' * bool(weight)}{weight}"
    form = block or ("dense" if bits is None else "affine")
    return Line(words, spec, Call("linear", 1, 1, k, n, "bfloat16", bits, group, form))


def attention(
    spec: str, heads: int, kv_heads: int, label: str = "", mask: str = "none", query: int = 1
) -> Line:
    """The kernels of attention by key length, head dimension 64, in bfloat16."""
    call = Call(
        "attention", query, query, dtype="bfloat16", query=query, head_dim=64, heads=heads, kv_heads=kv_heads
    )
    words = f"{label}{' ' * bool(label)}{query} x {heads} heads over {kv_heads}"
    return Line(words + (f", {mask} mask" if mask != "none" else ""), spec, replace(call, mask=mask))  # type: ignore[arg-type]


SHAPES = ((576, 576), (1536, 576), (2048, 2048), (896, 4864), (3584, 18944))
METAL = [
    ("M1 Max", "generation=13,letter=s"),
    ("M3 Max", "generation=15,letter=s"),
    ("M5 Max", "generation=17,letter=s"),
]
CHIPS = [*METAL, ("M3 Ultra", "generation=15,letter=d")]
CHARTS: dict[str, list[Line]] = {
    "mlx-metal": [
        *(linear(f"mlx-metal:{chip}", k, n, 4, name) for name, chip in CHIPS for k, n in SHAPES),
        *(linear(f"mlx-metal:{chip}", *SHAPES[2], None, name) for name, chip in CHIPS),
        linear("mlx-metal:generation=15,letter=s,version=0.31", *SHAPES[2], 4, "M3 Max, 0.31"),
        attention("mlx-metal:letter=s", 9, 3, "Max"),
        attention("mlx-metal:letter=g", 9, 3, "base"),
        attention("mlx-metal:letter=g", 16, 16, "base"),
        attention("mlx-metal:letter=g", 14, 2, "base", query=5),
    ],
    "mlx-cuda": [
        *(linear("mlx-cuda", k, n, bits) for bits in (4, None) for k, n in SHAPES[2:3]),
        attention("mlx-cuda", 9, 3),
        attention("mlx-cuda", 9, 3, mask="array"),
        attention("mlx-cuda:sm=75", 9, 3, "before Ampere,"),
    ],
    "candle-metal": [linear("candle-metal", *SHAPES[2], 4), attention("candle-metal", 9, 3)],
    "ggml-metal": [linear("ggml-metal", k, n, 4) for k, n in ((576, 576), (2048, 2048))]
    + [linear("ggml-metal", *SHAPES[2], 4, block="Q4_K")]
    + [attention("ggml-metal", 9, 3), attention("ggml-metal", 9, 3, query=20)],
    "ggml-cuda": [
        *(linear("ggml-cuda:arch=ada", *SHAPES[2], bits, "Ada") for bits in (4, None)),
        *(
            linear(f"ggml-cuda:arch={arch}", *SHAPES[2], 4, arch.title(), "Q4_K")
            for arch in ("ada", "blackwell")
        ),
    ],
    "ggml-cpu-repack": [linear("ggml-cpu-repack", *SHAPES[2], 4)],
    "flash-split-kv": [attention("flash-split-kv", 9, 3)],
    "batch-invariant": [linear("batch-invariant", *SHAPES[2], 4), attention("batch-invariant", 9, 3)],
}


def page() -> str:
    """docs/profiles.md as it should be."""
    parts = [INTRODUCTION.rstrip()]
    for name in profile_names():
        if name in CHARTS:
            parts += section(profile(name))
    return "\n\n".join(parts) + "\n"


def section(one: Profile) -> list[str]:
    """A profile as Markdown: note, parameters, definitions, rules, chart."""
    parts = [f"## {one.name}", f"{one.backend}. {one.note}"]
    if one.parameters:
        rows = [(each.name, str(each.default), each.allowed, each.meaning) for each in one.parameters]
        parts.append(table(("parameter", "default", "takes", "meaning"), rows))
    if one.define:
        rows = [
            (
                each.name,
                f"`{each.value.text}`",
                f"`{each.when.text}`" if each.when else "otherwise",
                each.source,
                each.tag,
            )
            for each in one.define
        ]
        parts.append(table(("definition", "value", "when", "source", "tag"), rows))
    rules = [
        (str(number), ", ".join(sorted(rule.op)), rule.condition, f"`{rule.kernel}`", rule.source, rule.tag)
        for number, rule in enumerate(one.rules, 1)
    ]
    parts.append(table(("", "operation", "condition", "kernel", "source", "tag"), rules))
    lines = CHARTS[one.name]
    matrix = [line for line in lines if line.call.op != "attention"]
    heads = [line for line in lines if line.call.op == "attention"]
    if matrix:
        parts.append(
            "Kernel by M, one column for each; 4-bit unless dense, groups of 64, bfloat16, layout packed. A capital: the kernel "
            "stays, and the rule or a value that its order depends on changes."
        )
        parts.append(chart(one.name, matrix, ROWS, "M"))
    if heads:
        parts.append(
            "Kernel by key length, two columns for each power of two; query length x heads, head dimension 64, bfloat16:"
        )
        parts.append(chart(one.name, heads, KEYS, "keys"))
    return parts


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = [headers, ["---"] * len(headers), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def chart(name: str, lines: Sequence[Line], sizes: Sequence[int], axis: str) -> str:
    """A text chart: a letter for the kernel at each size; a capital where the rule's values change within a kernel."""
    marks: dict[str, str] = {}
    width = max(len(line.label) for line in lines)
    body = []
    for line in lines:
        cells = []
        before = ""
        for kernel, rule in chosen(line, sizes, axis):
            mark = marks.setdefault(kernel, MARKS[len(marks)])
            changed = bool(cells) and cells[-1].lower() == mark and rule != before
            cells.append(mark.upper() if changed else mark)
            before = rule
        body.append(f"{line.label:<{width}}  {''.join(cell * WIDE[axis] for cell in cells)}")
    legend = [f"{mark} = {kernel.replace(f'{name}/', '')}" for kernel, mark in marks.items()]
    return "\n".join(
        ["```text", *(f"{'':<{width}}  {row}" for row in scale(sizes, axis)), *body, "", *legend, "```"]
    )


def chosen(line: Line, sizes: Sequence[int], axis: str) -> Iterator[tuple[str, str]]:
    """The kernels and the rule at each size."""
    one = profile(line.spec)
    for size in sizes:
        call = (
            replace(line.call, rows=size, second_last=size) if axis == "M" else replace(line.call, keys=size)
        )
        parts = one.parts(call)
        yield ", then ".join(part.choice.kernel for part in parts), parts[0].choice.rule


def scale(sizes: Sequence[int], axis: str) -> list[str]:
    """Two lines above a chart: numbers, and ticks below them."""
    numbers, ticks = "", ""
    for place, size in enumerate(sizes):
        if size == 1 or (size % 8 == 0 if axis == "M" else place % 4 == 0):
            numbers = numbers.ljust(place * WIDE[axis]) + str(size)
            ticks = f"{ticks.ljust(place * WIDE[axis])}|"
    return [f"{numbers}  {'rows' if axis == 'M' else 'keys'}", ticks]


def main() -> int:
    """Run the command line; returns the exit status."""
    text = page()
    if sys.argv[1:] == ["--check"]:
        return int(not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != text)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
