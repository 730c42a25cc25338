"""llama.cpp's graph as it was built: nodes, what each was computed from, and which of their axes are rows.

Told apart by the graphs of two batches of known numbers of rows, sequences and outputs: an axis is an axis of rows where it has
the right length in both. No axis is guessed from its place, so heads and features are never taken for rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .library import GgmlTensor, LlamaLibrary

VIEWS: Final = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
"""Operations that compute nothing."""


@dataclass(frozen=True)
class ProbeBatch:
    """A batch for finding sites: sequences, rows of each, and rows of it whose logits are asked for."""

    sequences: int
    rows: int
    outputs: int

    def sizes(self) -> tuple[int, int, int, int]:
        """Rows, rows of a sequence, sequences, outputs."""
        return self.sequences * self.rows, self.rows, self.sequences, self.outputs


def probes(sequences: int) -> tuple[ProbeBatch, ProbeBatch]:
    """Two batches for a context whose streams hold ``sequences`` (1 where all share one)."""
    if sequences == 1:
        return ProbeBatch(1, 10, 3), ProbeBatch(1, 21, 8)
    first = 2 if sequences > 2 else 1
    return ProbeBatch(first, 5, 3), ProbeBatch(first + 1, 7, 8 if first == 2 else 9)


@dataclass(frozen=True)
class GraphNode:
    """A node or leaf of a graph; ``sources`` are addresses, 0 where there is none."""

    address: int
    name: str
    op: str
    op_number: int
    type: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sources: tuple[int, ...]
    view_of: int

    @classmethod
    def at(cls, library: LlamaLibrary, address: int) -> GraphNode:
        tensor = GgmlTensor.from_address(address)
        return cls(
            address,
            tensor.name.decode(errors="replace"),
            library.ggml_op_name(tensor.op).decode(),
            int(tensor.op),
            int(tensor.type),
            tuple(tensor.ne),
            tuple(tensor.nb),
            tuple(int(each or 0) for each in tensor.src),
            int(tensor.view_src or 0),
        )


class NodeGraph:
    """The nodes of one graph in order, and the leaves that they name."""

    def __init__(self, library: LlamaLibrary, addresses: Sequence[int]) -> None:
        self.nodes = [GraphNode.at(library, each) for each in addresses]
        self.place = {node.address: n for n, node in enumerate(self.nodes)}
        self._known = {node.address: node for node in self.nodes}
        self._library = library

    def node(self, address: int) -> GraphNode:
        if address not in self._known:
            self._known[address] = GraphNode.at(self._library, address)
        return self._known[address]

    def source(self, node: GraphNode, number: int) -> GraphNode | None:
        return self.node(node.sources[number]) if node.sources[number] else None

    def made(self, address: int) -> GraphNode:
        """What computed the values behind an address: a node, or a leaf (a weight, an input, the cache)."""
        node = self.node(address)
        while node.op in VIEWS and node.op != "NONE":
            node = self.node(node.sources[0])
        return node

    def cache(self, address: int) -> tuple[str, int] | None:
        """``k`` or ``v`` and the layer, where an address is a view of the cache."""
        node = self.node(address)
        if node.view_of:
            node = self.node(node.view_of)
        found = re.fullmatch(r"cache_([kv])_l(\d+)", node.name)
        return None if found is None else (found[1], int(found[2]))

    def reached(self) -> set[int]:
        """Places of the nodes that the logits or the cache depend on; llama.cpp also computes some that nothing uses."""
        last = next((n for n, node in enumerate(self.nodes) if node.name == "result_output"), None)
        found: set[int] = set()
        waiting = [
            n for n, node in enumerate(self.nodes) if node.op == "SET_ROWS" and self.cache(node.address)
        ]
        waiting += [] if last is None else [last]
        while waiting:
            at = waiting.pop()
            if at in found:
                continue
            found.add(at)
            node = self.nodes[at]
            waiting += [self.place[each] for each in (*node.sources, node.view_of) if each in self.place]
        return found


@dataclass(frozen=True)
class NodeRows:
    """How a node's rows lie: along ``axis``, ``group`` of its elements a row, and along ``stream`` where each sequence has its own;
    or only those of outputs."""

    axis: int
    stream: int = -1
    outputs: bool = False
    group: int = 1

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], batches: Sequence[ProbeBatch]) -> NodeRows | None:
        """None where the shapes have no axis of rows, or more than one."""
        every = [batch.sizes() for batch in batches]

        def axes(size: int) -> list[int]:
            pair = [each[size] for each in every]
            return [axis for axis in range(4) if [shape[axis] for shape in shapes] == pair]

        flat, single, streams, outputs = (axes(size) for size in range(4))
        if len(outputs) == 1 and not flat:
            return cls(outputs[0], outputs=True)
        if len(flat) == 1:
            return cls(flat[0])
        if len(single) == 1 and len(streams) == 1 and not flat:
            return cls(single[0], streams[0])
        # Heads in one axis with the rows, a row's next to each other.
        first, second = (each[0] for each in every)
        merged = [
            axis
            for axis, (a, b) in enumerate(zip(*shapes, strict=True))
            if a % first == 0 and a != b and a // first * second == b
        ]
        return cls(merged[0], group=shapes[0][merged[0]] // first) if len(merged) == 1 else None


def pieces(node: GraphNode, rows: NodeRows, size: int) -> tuple[int, int] | None:
    """Bytes of a row's contiguous pieces, and of the row; None where a piece is no whole number of words."""
    piece, axis = size, 0
    while axis < rows.axis and node.strides[axis] == piece:
        piece *= node.shape[axis]
        axis += 1
    if axis != rows.axis or rows.axis == 0:
        return None
    piece *= rows.group
    outer = math.prod(n for axis, n in enumerate(node.shape) if axis > rows.axis and axis != rows.stream)
    if piece % 4 and outer > 1:
        return None
    return piece, piece * outer
