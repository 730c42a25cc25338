"""Which nodes of llama.cpp's graph are sites, what they read of the cache, and how the callback records them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from detdiff.errors import LlamaModelRefused
from detdiff.trace import Site, digest_bias, ports_of
from detdiff.trace.digest import STORAGE

from . import node_loops as steps
from .graph import VIEWS, GraphNode, NodeGraph, NodeRows, ProbeBatch, pieces
from .library import TYPE_NAMES, LlamaLibrary
from .node_loops import Int64
from .nodes import node_hash

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


ROLES: Final[dict[str, tuple[str, ...]]] = {
    "embedding": ("inp_scaled.SCALE", "embd.GET_ROWS"), "attn_norm": ("attn_norm-*.MUL",),
    # With biases the sum is what goes on.
    "q": ("Qcur-*.ADD", "Qcur-*.MUL_MAT"), "k": ("Kcur-*.ADD", "Kcur-*.MUL_MAT"), "v": ("Vcur-*.ADD", "Vcur-*.MUL_MAT"),
    "q_norm": ("Qcur_normed-*.MUL",), "k_norm": ("Kcur_normed-*.MUL",), "rope_q": ("Qcur-*.ROPE",),
    "rope_k": ("Kcur-*.ROPE",), "attention": ("kqv_out-*.FLASH_ATTN_EXT", "kqv_out-*.CONT"),
    "o": ("attn_out-*.MUL_MAT", "kqv_out-*.MUL_MAT"), "residual": ("ffn_inp-*.ADD",), "mlp_norm": ("ffn_norm-*.MUL",),
    "gate": ("ffn_gate-*.MUL_MAT",), "up": ("ffn_up-*.MUL_MAT",), "activation": ("ffn_swiglu-*.GLU", "ffn_geglu-*.GLU"),
    "down": ("ffn_out-*.MUL_MAT",), "block": ("l_out-*.ADD",), "final_norm": ("result_norm.MUL",),
    "head": ("result_output.MUL_MAT",), "logits": ("logits",),
}  # fmt: skip
"""Whose values are those of each role, in models that are built as llama is."""


@dataclass(frozen=True)
class NodeSite:
    """A site and the node that computes it: its place, its rows, the name of the weight that it multiplies with, what it is computed from,
    and the length of its innermost axis."""

    site: Site
    node: int
    rows: NodeRows | None
    weight: str | None = None
    sources: tuple[str, ...] = ()
    width: int | None = None


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
        # A model may scale or cap what its head gives.
        head = next(each for each in reversed(self.sites) if each.site.kind == "head")
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
        layout = None if rows is None or dtype is None else pieces(node, rows, size)
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
        width = self.graph.nodes[node].shape[0] if node >= 0 else None
        self.sites.append(NodeSite(site, node, rows, weight, sources, width))
        self.ports.append(columns)


def _signed(value: int) -> int:
    """A 64-bit number as int64."""
    return value - (1 << 64) if value >> 63 else value
