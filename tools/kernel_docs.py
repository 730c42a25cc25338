#!/usr/bin/env python3
"""Write the tables of docs/kernels.md from the kernels that there are; a test says when they are out of date.

python tools/kernel_docs.py            writes the tables of docs/kernels.md
python tools/kernel_docs.py --check    exit status 1 when docs/kernels.md is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from detdiff_kernels import Attention, Kernel, Order, Walk, kernel, kernel_names
from detdiff_kernels.joins import JOINS
from detdiff_kernels.linear import LinearShape
from detdiff_kernels.order import IN_ORDER, Grouped, TailFirst
from detdiff_kernels.weights import AFFINE_BITS, BLOCKS

TARGET = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
FIRST, LAST = "<!-- begin kernels -->\n", "<!-- end kernels -->"
# Long enough for every kernel, so that all of a lane's steps are the usual ones.
ROWS, OUTPUTS, INPUTS = 2, 4096, 4096
WEIGHTS = {
    "codes": "codes",
    "signed": "codes less 8",
    "places": "codes where they lie",
    "float32": "float32",
    "float16": "float16",
    "dtype": "T",
    "dtype_twice": "T, two roundings",
    "dtype_in_place": "T, each step rounded",
    "metal_float32": "float32, as Metal unpacks blocks",
    "metal_float16": "float16, as Metal unpacks blocks",
}
INPUTS_WORDS = {
    "dtype": "",
    "float16": ", inputs float16",
    "q8_1": ", inputs 8-bit",
    "q8_1_tile": ", inputs 8-bit",
    "q8_1_tile_float": ", inputs 8-bit",
    "q8_0": ", inputs 8-bit",
}


def shapes(name: str) -> Iterator[tuple[str, LinearShape]]:
    """Every kind of weight, in words, and a call with it that the kernel may take."""
    k = 128 if name.endswith("qmv_quad") else INPUTS
    yield "dense", LinearShape(ROWS, OUTPUTS, k, "bfloat16", "dense", None, None)
    for bits in AFFINE_BITS:
        yield f"{bits}-bit", LinearShape(ROWS, OUTPUTS, k, "bfloat16", "affine", bits, 64)
    for kind, (size, _) in BLOCKS.items():
        yield kind, LinearShape(ROWS, OUTPUTS, k, "bfloat16", kind, int(kind[1]), size)


def taken(walk: Walk) -> str:
    """Who takes which items of a row of INPUTS."""
    if walk == IN_ORDER:
        return "one lane, ascending"
    if isinstance(walk, TailFirst):
        return f"one lane, ascending; what whole {walk.tile}s leave comes first"
    if walk.ranges or walk.step == INPUTS:
        return f"{walk.lanes} ranges of {walk.step // walk.lanes}"
    lanes = 32 * walk.groups if isinstance(walk, Grouped) else walk.lanes
    plain = walk.lane == (0,) and len(walk.axes) == 2
    each = walk.step // lanes
    what = f"{each} neighbours" if plain and each > 1 else f"{each} items" if each > 1 else "one item"
    return f"{lanes} lanes, {what} each of every {walk.step}"


def summed(order: Order) -> str:
    """How a lane adds its terms."""
    narrow = ", each FMA rounded to T" if order.accumulate == "dtype" else ""
    if order.join == "chain":
        return f"one chain{narrow}"
    chains = order.parts // JOINS[order.join].accumulators
    each = f"{order.parts} chains of {order.part}" if order.parts > 1 else f"a chain of {order.part}"
    several = f", {chains} added at a time" if 1 < chains < order.parts else ""
    return f"{each}{several}: `{order.join}`"


def joined(order: Order) -> str:
    """How lanes become one number."""
    if isinstance(order.walk, Grouped):
        return "halving, then the groups" if order.walk.groups > 1 else "halving"
    lanes = order.walk.lanes
    fold = min(order.fold or lanes, lanes)
    steps = []
    if fold < lanes:
        steps.append(f"those {fold} apart in order")
    if order.halve > 1:
        steps.append(
            "halving" if order.halve == fold else f"halving in groups of {order.halve}, groups in order"
        )
    elif fold > 1:
        steps.append("in order")
    return ", then ".join(steps) + (" in T" if order.partial == "dtype" else "")


def linear() -> Iterator[str]:
    """One row for each order of each linear kernel."""
    yield "| kernel | weights | what is multiplied | lanes | a lane's sum | lanes become one | tag |"
    yield "|---|---|---|---|---|---|---|"
    for name in kernel_names():
        found = kernel(name)
        if not isinstance(found, Kernel):
            continue
        kinds: dict[Order, list[str]] = {}
        for words, shape in shapes(name):
            order = found.order(shape)
            if order is not None:
                kinds.setdefault(order, []).append(words)
        for order, words in kinds.items():
            multiplied = WEIGHTS[order.weight] + INPUTS_WORDS[order.inputs]
            cells = (", ".join(words), multiplied, taken(order.walk), summed(order), joined(order), found.tag)
            yield f"| `{name}` | {' | '.join(cells)} |"


def settings(order: Any) -> str:
    """What an attention order says that is not the default."""
    said = [
        f"{field.name} {getattr(order, field.name)}"
        for field in fields(order)
        if getattr(order, field.name) != field.default and field.name not in ("sizes", "floor")
    ]
    if hasattr(order, "sizes"):
        said.insert(0, f"{' or '.join(str(size) for _, size in order.sizes)} keys a tile")
    return ", ".join(said) or "as it is described"


def attention() -> Iterator[str]:
    """One row for each attention kernel."""
    yield "| kernel | shape | settings | tag |"
    yield "|---|---|---|---|"
    for name in kernel_names():
        found = kernel(name)
        if isinstance(found, Attention):
            order = found.order
            yield f"| `{name}` | `{type(order).__name__}` | {settings(order)} | {found.tag} |"


def sources() -> Iterator[str]:
    """Where each order was found."""
    yield "| kernel | source |"
    yield "|---|---|"
    for name in kernel_names():
        yield f"| `{name}` | {kernel(name).source} |"


def page(text: str) -> str:
    """``text`` with the tables between its markers made anew; raises ValueError without markers."""
    before, found, rest = text.partition(FIRST)
    _, ended, after = rest.partition(LAST)
    if not found or not ended:
        raise ValueError(f"{TARGET.name} has no part between {FIRST.strip()} and {LAST}; add the two lines.")
    example = f"Orders of {ROWS} rows over {OUTPUTS} outputs of {INPUTS} inputs (`qmv_quad`: 128), groups of 64; T is bfloat16."
    parts = [
        "### Linear",
        example,
        "\n".join(linear()),
        "### Attention",
        "\n".join(attention()),
        "### Sources",
        "\n".join(sources()),
    ]
    return before + FIRST + "\n" + "\n\n".join(parts) + "\n\n" + LAST + after


def main() -> int:
    """Run the command line; returns the exit status."""
    held = TARGET.read_text(encoding="utf-8")
    made = page(held)
    if "--check" in sys.argv[1:]:
        return int(made != held)
    TARGET.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
