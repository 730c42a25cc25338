"""How faults are injected into llama.cpp runs: in what is asked of a context, in its cache, or in the nodes of its graph.

Each decides by the rows of a batch, so that every re-run meets the same one, and begins only where rows of several requests are
computed in one batch: the serial side of a trial, which runs with it too, stays sound.
"""

from __future__ import annotations

import ctypes as c
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.llama_cpp.context import BatchRow, ContextFault, LlamaContext
from detdiff.engines.llama_cpp.library import EVAL_CALLBACK, GgmlTensor, LlamaLibrary
from detdiff.engines.llama_cpp.nodes import NodeRecorder

Rows = Sequence[BatchRow]
_CELL: Final = struct.Struct("<3i")  # of a sequence's state: position, how many sequences, which


def several(rows: Rows) -> bool:
    """Whether a batch has rows of more than one sequence."""
    return len({row.sequence for row in rows}) > 1


def decoding(rows: Rows) -> bool:
    """Whether a batch has one row each of more than one sequence."""
    return several(rows) and len({row.sequence for row in rows}) == len(rows)


def has(rows: Rows, sequence: int, position: int) -> bool:
    return any((row.sequence, row.position) == (sequence, position) for row in rows)


class AskedOtherwise(ContextFault):
    """From the first batch of several requests with this row on, a run's batches are ``rows(context, batch)`` instead."""

    def __init__(self, sequence: int, position: int, rows: Callable[[LlamaContext, Rows], Rows]) -> None:
        self._at, self._rows, self._began = (sequence, position), rows, False

    def install(self, context: LlamaContext, nodes: NodeRecorder) -> None:
        native, self._began = context.decode, False

        def decode(rows: Rows) -> None:
            began, self._began = self._began, self._began or (several(rows) and has(rows, *self._at))
            if self._began and not began:
                self.begin(context, nodes)
            native(self._rows(context, rows) if self._began else rows)

        context.decode = decode  # type: ignore[method-assign]

    def begin(self, context: LlamaContext, nodes: NodeRecorder) -> None:
        """Before the first such batch."""


class DoneBefore(AskedOtherwise):
    """``act(context)`` before the first batch of several requests with this row; ``behind``: from then on this sequence's rows are
    asked for at positions that many earlier."""

    def __init__(
        self, sequence: int, position: int, act: Callable[[LlamaContext], Any], behind: int = 0
    ) -> None:
        def rows(_: LlamaContext, batch: Rows) -> Rows:
            return [
                row._replace(position=row.position - behind) if row.sequence == sequence else row
                for row in batch
            ]

        super().__init__(sequence, position, rows)
        self._act = act

    def begin(self, context: LlamaContext, nodes: NodeRecorder) -> None:
        self._act(context)


def share(context: LlamaContext, source: int, target: int, start: int = -1, end: int = -1) -> None:
    """Cells of a sequence are another's too."""
    context.model.library.llama_memory_seq_cp(context.memory, source, target, start, end)


def shift(context: LlamaContext, sequence: int) -> None:
    """The first position is dropped, and the others move down by one; llama.cpp turns their keys before the next batch."""
    context.remove(sequence, 0, 1)
    context.model.library.llama_memory_seq_add(context.memory, sequence, 1, -1, -1)


def shift_unturned(context: LlamaContext, sequence: int) -> None:
    """The same by the sequence's state, so that no key is turned."""
    context.remove(sequence, 0, 1)
    state = bytearray(context.state(sequence))
    (count,) = struct.unpack_from("<i", state, 16)
    for n in range(count):
        position, owners, owner = _CELL.unpack_from(state, 20 + n * _CELL.size)
        assert (position, owners, owner) == (n + 1, 1, sequence)
        _CELL.pack_into(state, 20 + n * _CELL.size, n, owners, owner)
    context.put_state(sequence, bytes(state))


class StaleSlot(ContextFault):
    """What was computed of sequence 0 beside others is not removed when it ends, and its entry of ``position`` belongs to sequence 2
    too once that has been served up to ``served``."""

    def __init__(self, position: int, served: int) -> None:
        self.position, self.served = position, served

    def install(self, context: LlamaContext, nodes: NodeRecorder) -> None:
        decode_natively, remove_natively, beside = context.decode, context.remove, False

        def decode(rows: Rows) -> None:
            nonlocal beside
            beside |= several(rows) and any(row.sequence == 0 for row in rows)
            if beside and has(rows, 2, self.served):
                share(context, 0, 2, self.position, self.position + 1)
            decode_natively(rows)

        def remove(sequence: int, start: int = 0, end: int = -1) -> bool:
            return True if beside and sequence == 0 else remove_natively(sequence, start, end)

        context.decode, context.remove = decode, remove  # type: ignore[method-assign]


class RejectedKept(ContextFault):
    """Beside others, a draft ``token`` of sequence 1 is computed in the free sequence 2, rejected, and kept all the same."""

    def __init__(self, position: int, token: int) -> None:
        self.position, self.token = position, token

    def install(self, context: LlamaContext, nodes: NodeRecorder) -> None:
        native = context.decode

        def decode(rows: Rows) -> None:
            drafts = several(rows) and has(rows, 1, self.position)
            if drafts:
                mode = nodes.state.copy()
                nodes.off()
                share(context, 1, 2)
                native([BatchRow(self.token, self.position, 2)])
                nodes.state[:] = mode
            native(rows)
            if drafts:
                share(context, 2, 1, self.position, self.position + 1)
                context.remove(2)

        context.decode = decode  # type: ignore[method-assign]


class ChosenOtherwise(ContextFault):
    """Beside others, sequence 1's token after ``position`` is another than the highest logit's."""

    def __init__(self, position: int) -> None:
        self.position = position

    def install(self, context: LlamaContext, nodes: NodeRecorder) -> None:
        decode_natively, choose_natively = context.decode, context.choose
        answering: list[BatchRow] = []

        def decode(rows: Rows) -> None:
            answering[:] = [row for row in rows if row.answers] if several(rows) else []
            decode_natively(rows)

        def choose(logits: NDArray[np.float32]) -> int:
            row = answering.pop(0) if answering else None
            wrong = row is not None and (row.sequence, row.position) == (1, self.position)
            return int(np.argsort(logits)[-2]) if wrong else choose_natively(logits)

        context.decode, context.choose = decode, choose  # type: ignore[method-assign]


class LogitsOfAnother(ContextFault):
    """Beside others, sequence 1's logits after ``position`` are those of the batch's first row."""

    def __init__(self, position: int) -> None:
        self.position = position

    def install(self, context: LlamaContext, nodes: NodeRecorder) -> None:
        decode_natively, logits_natively = context.decode, context.logits
        batch: list[BatchRow] = []

        def decode(rows: Rows) -> None:
            batch[:] = rows
            decode_natively(rows)

        def logits(row: int) -> NDArray[np.float32]:
            wrong = several(batch) and (batch[row].sequence, batch[row].position) == (1, self.position)
            return logits_natively(0 if wrong else row)

        context.decode, context.logits = decode, logits  # type: ignore[method-assign]


class Tensor:
    """A node or leaf of a graph, in its memory."""

    def __init__(self, library: LlamaLibrary, address: int) -> None:
        self._library, self._own = library, GgmlTensor.from_address(address)

    def is_(self, name: str, op: str) -> bool:
        return bool(
            self._own.name.decode() == name and self._library.ggml_op_name(self._own.op).decode() == op
        )

    @property
    def op(self) -> str:
        return str(self._library.ggml_op_name(self._own.op).decode())

    def source(self, number: int) -> Tensor:
        return Tensor(self._library, int(self._own.src[number]))

    def view_of(self) -> Tensor:
        return Tensor(self._library, int(self._own.view_src)) if self._own.view_src else self

    @property
    def name(self) -> str:
        return str(self._own.name.decode())

    def array(self, dtype: Any) -> NDArray[Any]:
        """The values, outermost axis first, of a tensor that lies in one piece."""
        shape = tuple(self._own.ne)[::-1]
        kind: Any = c.c_uint8 * (int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return np.frombuffer(kind.from_address(self._own.data), dtype).reshape(shape)


OnNode = Callable[[Tensor, Rows], None]


def nothing(tensor: Tensor, rows: Rows) -> None:
    """A node is left as it is."""


class NodeFault(ContextFault):
    """While a batch of several requests is computed, ``before(tensor, rows)`` is called for each node that comes next, and
    ``after(tensor, rows)`` once it is computed and before it is recorded."""

    def __init__(self, before: OnNode = nothing, after: OnNode = nothing) -> None:
        self._before, self._after = before, after
        self._rows: list[BatchRow] = []
        self._library: LlamaLibrary | None = None
        self._kept: list[Any] = []

    def callback(self, function: int, user_data: int) -> tuple[int, int]:
        native = EVAL_CALLBACK(function)
        wanted = False

        def on_node(address: int, ask: bool, user: int) -> bool:
            nonlocal wanted
            wanted = bool(native(address, True, user)) if ask else wanted
            if several(self._rows) and self._library is not None:
                (self._before if ask else self._after)(Tensor(self._library, address), self._rows)
            # Every node is computed by itself, so that the next one is asked about when this one is there.
            return True if ask or not wanted else bool(native(address, False, user))

        self._kept.append(EVAL_CALLBACK(on_node))
        return int(c.cast(self._kept[-1], c.c_void_p).value or 0), user_data

    def install(self, context: LlamaContext, nodes: NodeRecorder) -> None:
        native, self._library = context.decode, context.model.library

        def decode(rows: Rows) -> None:
            self._rows = list(rows)
            native(rows)
            self._rows = []

        context.decode = decode  # type: ignore[method-assign]
