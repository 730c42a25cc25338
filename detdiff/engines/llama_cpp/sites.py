"""Which nodes of llama.cpp's graph are sites, which axes of theirs are rows, and what each was computed from.

Found from the graphs of two batches of known numbers of rows, sequences and outputs: an axis is an axis of rows where it has
the right length in both. No axis is guessed from its place, so heads and features are never taken for rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from detdiff.errors import LlamaModelRefused
from detdiff.trace import Site, digest_bias, ports_of
from detdiff.trace.digest import STORAGE

from . import nodes as steps
from .library import TYPE_NAMES, GgmlTensor, LlamaLibrary
from .nodes import Int64, node_hash

VIEWS: Final = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
"""Operations that compute nothing."""
KINDS: Final = {
    "MUL_MAT": "linear",
    "MUL_MAT_ID": "experts",
    "RMS_NORM": "norm",
    "NORM": "norm",
    "L2_NORM": "norm",
    "ROPE": "rope",
    "GLU": "activation",
    "UNARY": "activation",
    "FLASH_ATTN_EXT": "attention",
}


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


@dataclass(frozen=True)
class NodeSite:
    """A site and the node that computes it: its place, its rows, and the name of the weight that it multiplies with."""

    site: Site
    node: int
    rows: NodeRows | None
    weight: str | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class CacheLayer:
    """A layer's cache: the storage of keys and values (a trace's dtype, elements of an entry, bytes), heads, and whether attention reads it."""

    layer: int
    heads: tuple[int, int]
    dtypes: tuple[str, str]
    bytes: tuple[int, int]
    written: int
    read: int | None


class ValueForm(NamedTuple):
    """Where a digest column's value lies in the row that is kept of a node: from ``start``, ``size`` bytes of ``dtype``, of this shape
    (outermost axis first)."""

    node: int
    start: int
    size: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class GraphSites:
    """The sites of a model, and how the callback records them.

    ``columns`` int64 [ports] is the digest column of each port; ``plan`` int64 [nodes, WIDTH]; ``caches`` are the layers whose cache
    was seen; ``unseen`` says what of the graph is not recorded, in clauses.
    """

    sites: tuple[NodeSite, ...]
    columns: Int64
    width: int
    plan: Int64
    caches: tuple[CacheLayer, ...]
    unseen: tuple[str, ...]
    row_bytes: int
    forms: Mapping[int, ValueForm]

    @property
    def heads(self) -> int:
        """Heads of keys and values of a layer, at most."""
        return max((sum(each.heads) for each in self.caches), default=1)


def find_sites(
    library: LlamaLibrary, graphs: Sequence[NodeGraph], batches: Sequence[ProbeBatch], cells: int
) -> GraphSites:
    """The sites that both graphs show; ``cells`` are those of one stream of the cache.

    Raises LlamaModelRefused where the graphs are not built of the same nodes, or have no logits.
    """
    first, second = graphs
    if [(n.name, n.op) for n in first.nodes] != [(n.name, n.op) for n in second.nodes]:
        raise LlamaModelRefused(
            "llama.cpp builds this model's graph of other nodes for other numbers of rows; expected the same ones, which is how rows are "
            "told from features. The architecture cannot be traced yet."
        )
    return _Finder(library, first, second, batches, cells).found()


class _Finder:
    def __init__(
        self,
        library: LlamaLibrary,
        graph: NodeGraph,
        other: NodeGraph,
        batches: Sequence[ProbeBatch],
        cells: int,
    ) -> None:
        self.library, self.graph, self.cells = library, graph, cells
        self.rows = [
            NodeRows.of((a.shape, b.shape), batches) for a, b in zip(graph.nodes, other.nodes, strict=True)
        ]
        self.reached = graph.reached()
        self.plan = np.zeros((len(graph.nodes), steps.WIDTH), np.int64)
        self.width = 0
        self.column: dict[int, int] = {}
        self.sites: list[NodeSite] = []
        self.ports: list[list[int]] = []
        self.names: dict[str, int] = {}
        self.forms: dict[int, ValueForm] = {}
        self.unseen: list[str] = []
        self.row_bytes = 64
        self.writes: dict[int, dict[str, int]] = {}
        self.reads: dict[int, int] = {}
        self.layers: list[int] = []
        self.entries: dict[int, CacheLayer] = {}

    def found(self) -> GraphSites:
        for n, node in enumerate(self.graph.nodes):
            self.plan[n, steps.HASH] = node_hash(node.name.encode(), node.op_number)
        self._find_cache()
        self._find_inputs()
        inner = self._inside_attention()
        for n in sorted(self.reached):
            node = self.graph.nodes[n]
            if node.op in VIEWS or n in inner:
                continue
            if node.op == "SET_ROWS":
                self._written(n)
            else:
                self._computed(n)
        if "result_output.MUL_MAT" not in self.names and not any(s.site.kind == "head" for s in self.sites):
            raise LlamaModelRefused(
                "llama.cpp's graph of this model has no node result_output, which gives the logits; expected a causal language model. "
                "Name another model."
            )
        head = next(each for each in self.sites if each.site.kind == "head")
        self._add(
            Site("logits", "logits", None, ("in",), ("out",)),
            -1,
            head.rows,
            [self.column[head.node], self._columns(1)],
        )
        numbers = [number for each in self.ports for number in each]
        assert len(numbers) == len(ports_of(each.site for each in self.sites))
        return GraphSites(
            tuple(self.sites), np.array(numbers, np.int64), self.width, self.plan,
            tuple(self.entries[layer] for layer in self.layers), tuple(dict.fromkeys(self.unseen)), self.row_bytes, self.forms,
        )  # fmt: skip

    # The cache.

    def _find_cache(self) -> None:
        for n in sorted(self.reached):
            node = self.graph.nodes[n]
            if node.op == "SET_ROWS" and (place := self.graph.cache(node.address)) is not None:
                self.writes.setdefault(place[1], {})[place[0]] = n
        for n in sorted(self.reached):
            node = self.graph.nodes[n]
            if node.op == "FLASH_ATTN_EXT":
                where = self.graph.cache(node.sources[1])
                if where is not None and node.sources[3]:
                    self.reads[where[1]] = n
            elif node.op == "SOFT_MAX":
                scores = self._scores(node)
                where = None if scores is None else self.graph.cache(scores.sources[0])
                if where is not None and node.sources[1] and self._value_view(n) is not None:
                    self.reads[where[1]] = n
        for layer, both in sorted(self.writes.items()):
            if set(both) != {"k", "v"} or both["k"] > both["v"] or layer not in self.reads:
                self.unseen.append(
                    f"the cache of layer {layer} is written or read in another way than by rows of keys and values"
                )
                continue
            keys, values = self._views(layer)
            heads = (keys.shape[2], values.shape[2])
            kinds = tuple(TYPE_NAMES.get(each.type, "U8") for each in (keys, values))
            widths = (self._entry(keys, keys.shape[0]), self._entry(values, self._value_width(layer, values)))
            self.entries[layer] = CacheLayer(layer, heads, (kinds[0], kinds[1]), widths, -1, None)
            self.layers.append(layer)
            self.row_bytes = max(self.row_bytes, *widths)

    def _entry(self, view: GraphNode, elements: int) -> int:
        """Bytes of one head's entry."""
        block = int(self.library.ggml_blck_size(view.type))
        return elements // block * int(self.library.ggml_type_size(view.type))

    def _value_width(self, layer: int, values: GraphNode) -> int:
        """Dimensions of a head's values, which lie transposed without flash attention."""
        return values.shape[1 if self.graph.nodes[self.reads[layer]].op == "SOFT_MAX" else 0]

    def _views(self, layer: int) -> tuple[GraphNode, GraphNode]:
        """The views of keys and values that a layer's attention is given."""
        n = self.reads[layer]
        node = self.graph.nodes[n]
        if node.op == "FLASH_ATTN_EXT":
            return self.graph.node(node.sources[1]), self.graph.node(node.sources[2])
        scores = self._scores(node)
        view = self._value_view(n)
        assert scores is not None and view is not None
        return self.graph.node(scores.sources[0]), view

    def _scores(self, softmax: GraphNode) -> GraphNode | None:
        """The product of queries and keys that a softmax is of, through what scales or caps it."""
        node = self.graph.made(softmax.sources[0])
        for _ in range(6):
            if node.op == "MUL_MAT":
                return node
            if node.op in VIEWS or not node.sources[0]:
                return None
            node = self.graph.made(node.sources[0])
        return None

    def _value_product(self, n: int) -> GraphNode | None:
        """The product of a softmax with the values."""
        address = self.graph.nodes[n].address
        for node in self.graph.nodes[n + 1 :]:
            if node.op == "MUL_MAT" and self.graph.made(node.sources[1]).address == address:
                return node
        return None

    def _value_view(self, n: int) -> GraphNode | None:
        """The view of values, where it is made before the softmax."""
        product = self._value_product(n)
        if product is None or self.graph.cache(product.sources[0]) is None:
            return None
        view = self.graph.node(product.sources[0])
        return view if self.graph.place.get(view.address, len(self.graph.nodes)) < n else None

    def _inside_attention(self) -> set[int]:
        """Nodes between queries and values: their rows hold scores of all cells, those of other requests included."""
        found: set[int] = set()
        for n in self.reads.values():
            node = self.graph.nodes[n]
            if node.op != "SOFT_MAX":
                continue
            found.add(n)
            at = self.graph.made(node.sources[0])
            while True:
                found.add(self.graph.place[at.address])
                if at.op == "MUL_MAT":
                    break
                at = self.graph.made(at.sources[0])
        return found

    def _written(self, n: int) -> None:
        """Keys or values of a layer go into the cache; with the values, the layer's site of cache writes is complete."""
        node = self.graph.nodes[n]
        place = self.graph.cache(node.address)
        if place is None or place[1] not in self.entries:
            return
        kind, layer = place
        cache = self.entries[layer]
        side = 0 if kind == "k" else 1
        step = self.plan[n]
        step[steps.ACTION] = steps.WRITE_V if side else steps.WRITE_K
        step[steps.LAYER], step[steps.KV_SIZE] = self.layers.index(layer), self.cells
        step[steps.HEADS], step[steps.FIRST_HEAD] = cache.heads[side], cache.heads[0] if side else 0
        step[steps.ENTRY] = cache.bytes[side]
        step[steps.ENTRY_BIAS] = _signed(digest_bias(cache.dtypes[side], cache.bytes[side]))
        step[steps.COLUMN] = self._columns(cache.heads[side])
        step[steps.KEEP] = cache.heads[side] * cache.bytes[side]
        self.column[n] = int(step[steps.COLUMN])
        dtype, size = cache.dtypes[side], cache.bytes[side]
        for h in range(cache.heads[side]):
            shape = (size // STORAGE[dtype].itemsize,)
            self.forms[self.column[n] + h] = ValueForm(n, h * size, size, dtype, shape)
        if not side:
            return
        keys = self.writes[layer]["k"]
        given = [self._producer(self.graph.nodes[each].sources[0]) for each in (keys, n)]
        inputs = tuple(name for name, column in zip(("k", "v"), given, strict=True) if column is not None)
        names = (*(f"K.{h}" for h in range(cache.heads[0])), *(f"V.{h}" for h in range(cache.heads[1])))
        columns = [column for column in given if column is not None]
        for at, heads in ((keys, cache.heads[0]), (n, cache.heads[1])):
            columns += range(self.column[at], self.column[at] + heads)
        self._add(Site(f"cache_l{layer}.write", "cache_write", layer, inputs, names), n, None, columns)

    # Other nodes.

    def _find_inputs(self) -> None:
        """Nodes that are told tokens, positions or the rows of outputs; llama.cpp names those inputs."""
        inputs = {
            "inp_tokens": steps.INPUT_TOKENS,
            "inp_pos": steps.INPUT_POSITIONS,
            "out_ids": steps.INPUT_OUTPUTS,
        }
        inputs["inp_out_ids"] = steps.INPUT_OUTPUTS
        told: set[int] = set()
        for n in sorted(self.reached):
            node = self.graph.nodes[n]
            second = self.graph.source(node, 1)
            kind = steps.NO_INPUT if second is None else inputs.get(second.name, steps.NO_INPUT)
            if kind != steps.NO_INPUT and kind not in told:
                told.add(kind)
                self.plan[n, steps.INPUT] = kind
        for kind, what in ((steps.INPUT_TOKENS, "tokens"), (steps.INPUT_POSITIONS, "positions")):
            if kind not in told:
                self.unseen.append(f"the {what} that the graph is fed are not checked")

    def _computed(self, n: int) -> None:
        node, rows = self.graph.nodes[n], self.rows[n]
        base = self._name(node)
        size = int(self.library.ggml_type_size(node.type))
        dtype = TYPE_NAMES.get(node.type)
        layout = None if rows is None or dtype is None else _pieces(node, rows, size)
        if rows is None or dtype is None or layout is None:
            self.unseen.append(f"{base} ({node.op}) has no rows that can be told apart")
            return
        piece, whole = layout
        step = self.plan[n]
        step[steps.ACTION], step[steps.TOKENS] = steps.ROWS, steps.OUTPUTS if rows.outputs else steps.FLAT
        step[steps.AXIS], step[steps.STREAM], step[steps.PIECE] = rows.axis, rows.stream, piece
        step[steps.GROUP] = rows.group
        step[steps.BIAS], step[steps.KEEP] = _signed(digest_bias(dtype, whole)), whole
        step[steps.COLUMN] = self.column[n] = self._columns(1)
        self.row_bytes = max(self.row_bytes, whole)
        shape = tuple(n for axis, n in enumerate(node.shape) if axis not in (rows.axis, rows.stream))[::-1]
        if rows.group > 1:
            shape = (rows.group, *shape)
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
        self.forms[self.column[n]] = ValueForm(n, 0, whole, dtype, shape)
        layer = self._layer(base, node)
        kind, weight = self._kind(node)
        read = self._attention(n, node)
        if read is not None:
            query, cache = read
            columns = [] if query is None else [query]
            self._add(
                Site(self._site(base, node.op), "attention", cache.layer, ("in", "kv") if columns else ("kv",), ("out",)), n, rows,
                [*columns, self._read_column(cache.layer) + 1, self.column[n]],
            )  # fmt: skip
            return
        given = [] if kind == "embedding" else self._given(node)
        names = ["in" if n == 0 else f"in{n + 1}" for n in range(len(given))]
        sources = tuple(self.graph.made(each).name for each in node.sources if each)
        site = Site(self._site(base, node.op), kind, layer, tuple(names), ("out",))
        self._add(site, n, rows, [*given, self.column[n]], weight, sources)

    def _given(self, node: GraphNode) -> list[int]:
        """The columns of what a node was computed from; none where one of them is not recorded, so that it is no origin."""
        made = [self.graph.made(address) for address in node.sources if address]
        computed = [each for each in made if each.address in self.graph.place]
        columns = [self.column.get(self.graph.place[each.address]) for each in computed]
        return [column for column in columns if column is not None] if None not in columns else []

    def _attention(self, n: int, node: GraphNode) -> tuple[int | None, CacheLayer] | None:
        """The column of the queries and the cache, of a node that ends attention; its site of cache reads is added before."""
        if node.op == "FLASH_ATTN_EXT":
            at, query = n, node.sources[0]
        elif node.op == "MUL_MAT" and (softmax := self._softmax(node)) is not None:
            scores = self._scores(self.graph.nodes[softmax])
            assert scores is not None
            at, query = softmax, scores.sources[1]
        else:
            return None
        layer = next((layer for layer, place in self.reads.items() if place == at), None)
        if layer is None or layer not in self.entries:
            return None
        cache = self.entries[layer]
        keys, values = self._views(layer)
        step = self.plan[at]
        if at == n:
            step[steps.ACTION] = steps.READ_FLASH
        else:
            step[steps.ACTION] = steps.READ_SOFTMAX
            step[steps.K_VIEW], step[steps.V_VIEW] = (
                self.graph.place[keys.address],
                self.graph.place[values.address],
            )
        step[steps.LAYER], step[steps.KV_SIZE] = self.layers.index(layer), self.cells
        for place, value in (
            (steps.ENTRY, cache.bytes[0]), (steps.V_ENTRY, cache.bytes[1]),
            (steps.ENTRY_BIAS, _signed(digest_bias(cache.dtypes[0], cache.bytes[0]))),
            (steps.V_BIAS, _signed(digest_bias(cache.dtypes[1], cache.bytes[1]))),
        ):  # fmt: skip
            step[place] = value
        step[steps.READ_COLUMN] = column = self._columns(2)
        self._add(
            Site(f"cache_l{layer}.read", "cache_read", layer, ("written",), ("read",)),
            at,
            None,
            [column, column + 1],
        )
        return self._producer(query), cache

    def _read_column(self, layer: int) -> int:
        return int(self.plan[self.reads[layer], steps.READ_COLUMN])

    def _softmax(self, node: GraphNode) -> int | None:
        made = self.graph.made(node.sources[1])
        n = self.graph.place.get(made.address)
        return n if n is not None and made.op == "SOFT_MAX" and n in self.reads.values() else None

    def _producer(self, address: int) -> int | None:
        """The column of what computed an address, where that is a site."""
        n = self.graph.place.get(self.graph.made(address).address)
        return None if n is None else self.column.get(n)

    def _kind(self, node: GraphNode) -> tuple[str, str | None]:
        """A site's kind, and the name of its weight."""
        weights = [self.graph.made(each) for each in node.sources if each]
        weight = next(
            (each.name for each in weights if each.op == "NONE" and each.name.endswith((".weight", ".bias"))),
            None,
        )
        second = self.graph.source(node, 1)
        if (
            node.op == "GET_ROWS"
            and weight is not None
            and second is not None
            and second.name == "inp_tokens"
        ):
            return "embedding", weight
        if node.name == "result_output" or (
            node.op == "MUL_MAT" and weight in ("output.weight", "token_embd.weight")
        ):
            return "head", weight
        kind = KINDS.get(node.op, "elementwise")
        return ("elementwise" if kind == "linear" and weight is None else kind), weight

    def _name(self, node: GraphNode) -> str:
        """A node's own name; one that llama.cpp only numbered has that of a view of it, or of what it was computed from."""
        if not re.fullmatch(r"(node|leaf)_\d+|.*\(.*\)|", node.name):
            return node.name
        for other in self.graph.nodes[self.graph.place[node.address] + 1 :]:
            if other.op in VIEWS and self.graph.made(other.address) is node and "(" not in other.name:
                return other.name
        for address in node.sources:
            if address and (made := self.graph.made(address)) is not node and made.op != "NONE":
                return self._name(made)
        return node.name

    def _site(self, base: str, op: str) -> str:
        name = f"{base}.{op}"
        self.names[name] = self.names.get(name, 0) + 1
        return name if self.names[name] == 1 else f"{name}#{self.names[name]}"

    def _layer(self, base: str, node: GraphNode) -> int | None:
        found = re.search(r"-(\d+)$", base)
        return None if found is None else int(found[1])

    def _columns(self, count: int) -> int:
        self.width += count
        return self.width - count

    def _add(
        self, site: Site, node: int, rows: NodeRows | None, columns: list[int], weight: str | None = None,
        sources: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.sites.append(NodeSite(site, node, rows, weight, sources))
        self.ports.append(columns)


def _signed(value: int) -> int:
    """A 64-bit number as int64."""
    return value - (1 << 64) if value >> 63 else value


def _pieces(node: GraphNode, rows: NodeRows, size: int) -> tuple[int, int] | None:
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
