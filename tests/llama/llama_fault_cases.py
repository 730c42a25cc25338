"""The faults that are injected into llama.cpp runs, after ``faults.md``'s kinds, and what has to be named of each.

Requests r0 and r1 have prompts of twelve tokens and are served side by side, r2 has twenty: in ``JOINED`` it joins them, in ``LATER``
it arrives when both have ended. In the serial run each has a sequence alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llama_faults import (
    AskedOtherwise,
    ChosenOtherwise,
    DoneBefore,
    LogitsOfAnother,
    NodeFault,
    RejectedKept,
    Rows,
    StaleSlot,
    Tensor,
    decoding,
    has,
    share,
    shift,
    shift_unturned,
)

from detdiff.engines.llama_cpp.context import ContextFault, LlamaContext

JOINED, LATER = (0, 0, 2), (0, 0, 12)
"""Arrivals of r0, r1 and r2."""
LENGTHS, TOKENS = (12, 12, 20), 8


@dataclass(frozen=True)
class Named:
    """What has to be named: the finding's kind, request and words, the first origin's site and position (None: no finding, no
    origin), the verdict and its rule. ``others`` may diverge too."""

    request: str
    site: str | None
    position: int | None
    what: str | None = None
    says: str = ""
    verdict: str = "bug"
    rule: str = "bookkeeping"
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class LlamaTrial:
    """A fault, what has to be named, and the setting and arrivals under which a sound run is the serial one's equal."""

    fault: ContextFault
    named: Named
    unified: bool = False
    arrivals: tuple[int, ...] = JOINED


DrawTrial = Callable[[random.Random], LlamaTrial]


def _step(draw: random.Random) -> int:
    """A position that r1 decodes while r0 does."""
    return draw.randrange(13, 18)


def position_off_by_one(draw: random.Random) -> LlamaTrial:
    """r1's last prompt row is computed at the position before it, and so is every later one."""

    def rows(context: LlamaContext, batch: Rows) -> Rows:
        return [
            row._replace(position=row.position - 1) if row.sequence == 1 and row.position >= 11 else row
            for row in batch
        ]

    named = Named("r1", "Qcur-0.ROPE", 11, "offset", "the row at position 11 was computed at position 10")
    return LlamaTrial(AskedOtherwise(1, 11, rows), named)


def shared_position(draw: random.Random) -> LlamaTrial:
    """All rows of a batch take the first one's position."""

    def before(tensor: Tensor, rows: Rows) -> None:
        if decoding(rows) and tensor.is_("Qcur-0", "ROPE"):
            positions = tensor.source(1).array(np.int32)
            positions[:] = positions.flat[0]

    says = r"the row at position 20 was computed at position \d+"
    return LlamaTrial(NodeFault(before), Named("r2", "Qcur-0.ROPE", 20, "offset", says))


def _other_sequence(step: int) -> AskedOtherwise:
    def rows(context: LlamaContext, batch: Rows) -> Rows:
        return [row._replace(sequence=0) if row.sequence == 1 else row for row in batch]

    return AskedOtherwise(1, step, rows)


def other_sequence(draw: random.Random) -> LlamaTrial:
    """r1's decode rows are asked for in r0's sequence, which has a cache of its own."""
    says = "the row at position 12 was computed in the sequence of r0"
    return LlamaTrial(_other_sequence(12), Named("r1", "cache_l0.read", 12, "sequence", says, others=("r0",)))


def other_sequence_of_one_cache(draw: random.Random) -> LlamaTrial:
    """The same where all sequences share one cache: r1's rows see r0's cells."""
    says = "the row at position 12 saw the entries of positions 0-12 of r0 in the cache of layers 0-1"
    named = Named("r1", "cache_l0.read", 12, "cache_foreign", says, others=("r0",))
    return LlamaTrial(_other_sequence(12), named, unified=True, arrivals=LATER)


def dropped(draw: random.Random) -> LlamaTrial:
    """One of r1's cells is removed."""
    at, gone = _step(draw), draw.randrange(11)
    says = f"the row at position {at} did not see the entry of its own position {gone} in the cache of layers 0-1"
    named = Named("r1", "cache_l0.read", at, "cache_missing", says)
    return LlamaTrial(DoneBefore(1, at, lambda context: context.remove(1, gone, gone + 1)), named)


def copied(draw: random.Random) -> LlamaTrial:
    """One of r0's cells becomes r1's too."""
    at, taken = _step(draw), draw.randrange(11)
    says = f"the row at position {at} saw the entry of position {taken} of r0 in the cache of layers 0-1"
    named = Named("r1", "cache_l0.read", at, "cache_foreign", says)
    fault = DoneBefore(1, at, lambda context: share(context, 0, 1, taken, taken + 1))
    return LlamaTrial(fault, named, unified=True, arrivals=LATER)


def restored(draw: random.Random) -> LlamaTrial:
    """r0's state is put into r1's slot."""
    at = _step(draw)
    says = f"are not what was written but what was written for positions 0-{at - 1} of r0"
    named = Named("r1", "cache_l0.read", at, "cache_changed", says)
    return LlamaTrial(DoneBefore(1, at, lambda context: context.put_state(1, context.state(0))), named)


def shifted(draw: random.Random) -> LlamaTrial:
    """r1's first position is dropped and the others move down, with their keys turned."""
    at = _step(draw)
    says = f"the row at position {at} was computed at position {at - 1}"
    fault = DoneBefore(1, at, lambda context: shift(context, 1), behind=1)
    return LlamaTrial(fault, Named("r1", "Qcur-0.ROPE", at, "offset", says))


def shifted_unturned(draw: random.Random) -> LlamaTrial:
    """The same without turning the keys."""
    at = _step(draw)
    says = rf"\d+ are what was written for positions 1-{at - 2} of r1"
    fault = DoneBefore(1, at, lambda context: shift_unturned(context, 1), behind=1)
    return LlamaTrial(fault, Named("r1", "Qcur-0.ROPE", at, "cache_changed", says))


def stale_slot(draw: random.Random) -> LlamaTrial:
    """r0 ends and stays in the cache, and r2 reads an entry of it."""
    at, stale = draw.randrange(20, 26), draw.randrange(11)
    says = f"the row at position {at} saw the entry of position {stale} of r0, which had ended, in the cache of layers 0-1"
    named = Named("r2", "cache_l0.read", at, "cache_foreign", says)
    return LlamaTrial(StaleSlot(stale, at), named, unified=True, arrivals=LATER)


def rejected_kept(draw: random.Random) -> LlamaTrial:
    """A rejected draft's entry stays in r1's cache."""
    at = _step(draw)
    says = (
        rf"the row at position {at + 1} saw cell \d+, which no recorded row wrote, in the cache of layers 0-1"
    )
    named = Named("r1", "cache_l0.read", at + 1, "cache_foreign", says)
    return LlamaTrial(RejectedKept(at, draw.randrange(3, 250)), named, unified=True, arrivals=LATER)


def written_elsewhere(draw: random.Random) -> LlamaTrial:
    """r1's values of a layer are written into the next cell."""
    at, layer = _step(draw), draw.randrange(2)

    def move(tensor: Tensor, rows: Rows, by: int) -> None:
        if decoding(rows) and has(rows, 1, at) and tensor.op == "SET_ROWS":
            if tensor.view_of().name == f"cache_v_l{layer}":
                tensor.source(1).array(np.int64).reshape(-1)[1] += by

    fault = NodeFault(lambda tensor, rows: move(tensor, rows, 1), lambda tensor, rows: move(tensor, rows, -1))
    site = f"cache_l{layer}.write"
    return LlamaTrial(fault, Named("r1", site, at, says=site, rule="outside"))


def one_bit(draw: random.Random) -> LlamaTrial:
    """One bit of one of r1's keys or values flips in memory."""
    at, layer, head, written = _step(draw), draw.randrange(2), draw.randrange(2), draw.randrange(11)
    side, place, bit = draw.choice("KV"), draw.randrange(16), draw.randrange(10)

    def before(tensor: Tensor, rows: Rows) -> None:
        if has(rows, 1, at) and tensor.op == "FLASH_ATTN_EXT":
            cache = tensor.source(1 if side == "K" else 2).view_of()
            if cache.name == f"cache_{side.lower()}_l{layer}":
                entries = cache.array(np.uint16)
                entries.reshape(3, -1, 2, 16)[1, written, head, place] ^= 1 << bit

    says = f"the cache entry {side} of layer {layer}, head {head}, position {written} is not what was written"
    named = Named("r1", f"cache_l{layer}.read", at, "cache_changed", says)
    return LlamaTrial(NodeFault(before), named)


def hidden(draw: random.Random) -> LlamaTrial:
    """From a layer on, the mask hides one of r1's entries from one row."""
    at, layer, gone = _step(draw), draw.randrange(2), draw.randrange(11)

    def before(tensor: Tensor, rows: Rows) -> None:
        if decoding(rows) and has(rows, 1, at) and is_attention(tensor, layer):
            tensor.source(3).array(np.float16)[1, 0, 0, gone] = -np.inf

    layers = "layers 0-1" if layer == 0 else "layer 1"
    says = (
        f"the row at position {at} did not see the entry of its own position {gone} in the cache of {layers}"
    )
    return LlamaTrial(NodeFault(before), Named("r1", f"cache_l{layer}.read", at, "cache_missing", says))


def not_causal(draw: random.Random) -> LlamaTrial:
    """The mask shows a prompt row the next one's entry."""
    at, layer = draw.randrange(10), draw.randrange(2)

    def before(tensor: Tensor, rows: Rows) -> None:
        if has(rows, 1, at) and is_attention(tensor, layer):
            tensor.source(3).array(np.float16)[1, 0, at, at + 1] = 0

    layers = "layers 0-1" if layer == 0 else "layer 1"
    says = (
        f"the row at position {at} saw the entry of its own later position {at + 1} in the cache of {layers}"
    )
    return LlamaTrial(NodeFault(before), Named("r1", f"cache_l{layer}.read", at, "cache_foreign", says))


def is_attention(tensor: Tensor, layer: int) -> bool:
    """Whether a node is a layer's attention."""
    return tensor.op == "FLASH_ATTN_EXT" and tensor.source(1).view_of().name == f"cache_k_l{layer}"


def wrong_token(draw: random.Random) -> LlamaTrial:
    """r1 is fed another token than it chose."""
    at, by = _step(draw), draw.randrange(1, 200)

    def rows(context: LlamaContext, batch: Rows) -> Rows:
        return [
            row._replace(token=(row.token + by) % 256) if (row.sequence, row.position) == (1, at) else row
            for row in batch
        ]

    says = rf"the row at position {at} was fed token \d+ where \d+ was expected"
    return LlamaTrial(AskedOtherwise(1, at, rows), Named("r1", "embd.GET_ROWS", at, "token_fed", says))


def other_logits(draw: random.Random) -> LlamaTrial:
    """r1's token is chosen from r0's logits."""
    at = _step(draw)
    says = f"the token after position {at} was chosen from logits that are not its row's but those of position {at} of r0"
    return LlamaTrial(LogitsOfAnother(at), Named("r1", "logits", at, "logits_read", says))


def other_choice(draw: random.Random) -> LlamaTrial:
    """r1's token is not that of the highest logit."""
    named = Named("r1", None, None, says="The sampling, not the model", rule="sampling")
    return LlamaTrial(ChosenOtherwise(_step(draw)), named)


def leak(draw: random.Random) -> LlamaTrial:
    """A millionth of the row before is added to each row of a sum."""
    layer = draw.randrange(2)

    def after(tensor: Tensor, rows: Rows) -> None:
        if decoding(rows) and tensor.is_(f"ffn_out-{layer}", "MUL_MAT"):
            values = tensor.array(np.float32).reshape(len(rows), -1)
            values += np.float32(1e-6) * np.roll(values, 1, axis=0)

    named = Named(
        "r0",
        f"ffn_out-{layer}.MUL_MAT",
        12,
        says=f"ffn_out-{layer}.MUL_MAT",
        rule="leak",
        others=("r1", "r2"),
    )
    return LlamaTrial(NodeFault(after=after), named)


def lost_rows(draw: random.Random) -> LlamaTrial:
    """RoPE of one token each gives zeros in every row but the first."""

    def after(tensor: Tensor, rows: Rows) -> None:
        if decoding(rows) and tensor.is_("Qcur-0", "ROPE"):
            tensor.array(np.float32).reshape(len(rows), -1)[1:] = 0

    return LlamaTrial(
        NodeFault(after=after),
        Named("r1", "Qcur-0.ROPE", 12, says="Qcur-0.ROPE", rule="outside", others=("r2",)),
    )


def unwritten_columns(draw: random.Random) -> LlamaTrial:
    """A product's last columns stay zero for two to seven rows."""
    layer = draw.randrange(2)
    name = f"{draw.choice(('ffn_gate', 'ffn_up'))}-{layer}"

    def after(tensor: Tensor, rows: Rows) -> None:
        if decoding(rows) and tensor.is_(name, "MUL_MAT"):
            tensor.array(np.float32).reshape(len(rows), -1)[:, 64:] = 0

    named = Named("r0", f"{name}.MUL_MAT", 12, says=f"{name}.MUL_MAT", rule="outside", others=("r1", "r2"))
    return LlamaTrial(NodeFault(after=after), named)


def wrong_head(draw: random.Random) -> LlamaTrial:
    """Attention gives every head's result to the next one."""
    layer = draw.randrange(2)

    def after(tensor: Tensor, rows: Rows) -> None:
        if decoding(rows) and is_attention(tensor, layer):
            heads = tensor.array(np.float32).reshape(len(rows), 4, 16)
            heads[:] = np.roll(heads, 1, axis=1)

    site = f"kqv_out-{layer}.FLASH_ATTN_EXT"
    return LlamaTrial(
        NodeFault(after=after), Named("r0", site, 12, says=site, rule="outside", others=("r1", "r2"))
    )


def run_to_run(draw: random.Random) -> LlamaTrial:
    """A sum has another last bit each time."""
    layer, count = draw.randrange(2), itertools.count()

    def after(tensor: Tensor, rows: Rows) -> None:
        if decoding(rows) and tensor.is_(f"ffn_out-{layer}", "MUL_MAT"):
            words = tensor.array(np.uint32).reshape(len(rows), -1)
            words[0, next(count) % words.shape[1]] ^= 1

    site = f"ffn_out-{layer}.MUL_MAT"
    return LlamaTrial(
        NodeFault(after=after), Named("r0", site, 12, says=site, verdict="nondeterminism", rule="repeat")
    )


CASES: dict[str, DrawTrial] = {
    case.__name__: case
    for case in (
        position_off_by_one, shared_position, other_sequence, other_sequence_of_one_cache, dropped, copied, restored, written_elsewhere, shifted,
        shifted_unturned, stale_slot, rejected_kept, one_bit, hidden, not_causal, wrong_token, other_logits, other_choice, leak,
        lost_rows, unwritten_columns, wrong_head, run_to_run,
    )
}  # fmt: skip
