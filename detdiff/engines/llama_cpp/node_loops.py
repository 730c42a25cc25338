"""What llama.cpp's scheduler calls for every node of a graph: compiled code that digests rows where they lie.

ggml reuses a node's memory for later ones, so a value is digested (and copied, where it is asked for) as soon as it is computed. A
Python callback at each of some thousand calls a forward would cost more than the forward; this one costs what reading the
values costs. The offsets are those of ``library.GgmlTensor``, which ``layout.py`` has checked.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]

# Columns of the plan, one row a node: which node, what is done with it, how its rows lie, and where its digests go.
HASH, ACTION, INPUT, TOKENS, AXIS, STREAM, PIECE, BIAS, COLUMN, KEEP = range(10)
# Of cache writes and reads: the layer, cells of a stream; heads, the first one's number, bytes of an entry and its bias (of keys,
# where both are read); the same of values; the views of keys and values, by node; and the column of what was read.
LAYER, KV_SIZE, HEADS, FIRST_HEAD, ENTRY, ENTRY_BIAS, V_ENTRY, V_BIAS, K_VIEW, V_VIEW, READ_COLUMN, GROUP = (
    range(10, 22)
)
WIDTH: Final = 24
# ACTION: what is done with a node.
NOTHING, ROWS, WRITE_K, WRITE_V, READ_FLASH, READ_SOFTMAX = range(6)
# TOKENS: what a node's rows are.
FLAT, OUTPUTS = range(2)
# INPUT: which rows' numbers a node brings from its second source.
NO_INPUT, INPUT_TOKENS, INPUT_POSITIONS, INPUT_OUTPUTS = range(4)

# The state, int64 each.
MODE, NODE, ROW, COUNT, GRAPHS, TROUBLE, EVENTS, WINDOW, SPLIT, PLANNED, MADE = range(11)
STATE: Final = 16
OFF, DISCOVER, RECORD, STOP = range(4)
# TROUBLE: why a graph could not be recorded.
FINE, ANOTHER_GRAPH, TOO_MANY_ROWS = range(3)
# Kinds of events, and their fields.
CHANGED, FOREIGN, MISSING = range(1, 4)
# Kind, layer, row or cell, head or cell or first missing position, position, owners or count, and the digest that a changed entry had.
EVENT_FIELDS: Final = 7
MOST_EVENTS: Final = 4096
MOST_NODES: Final = 1 << 15

_WORD: Any = types.CPointer(types.uint32)  # type: ignore[attr-defined]
_BYTE: Any = types.CPointer(types.uint8)  # type: ignore[attr-defined]
_LONG: Any = types.CPointer(types.int64)  # type: ignore[attr-defined]
_NATURAL: Any = types.CPointer(types.uint64)  # type: ignore[attr-defined]
_SHORT: Any = types.CPointer(types.int32)  # type: ignore[attr-defined]
_HALF: Any = types.CPointer(types.uint16)  # type: ignore[attr-defined]


def _pointer(kind: Any) -> Any:
    @intrinsic
    def cast(typingctx: Any, address: Any) -> Any:
        """An int64 address as a pointer."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return kind(types.int64), codegen

    return cast


_words, _bytes, _longs, _naturals, _shorts, _halves = map(
    _pointer, (_WORD, _BYTE, _LONG, _NATURAL, _SHORT, _HALF)
)
_loop: Any = numba.njit(cache=True, nogil=True)

# Places in a ggml_tensor, in int64 words: type (low half), ne, nb, op (low half), src, view_offs, data, name.
_NE, _NB, _OP, _SRC, _OFFSET, _DATA, _NAME = 2, 6, 10, 19, 30, 31, 32


@_loop
def _hash(tensor: int) -> int:
    """FNV-1a of a node's name and operation."""
    words = numba.carray(_longs(tensor), 42)
    name = numba.carray(_bytes(tensor + _NAME * 8), 64)
    found = np.uint64(0xCBF29CE484222325)
    for i in range(64):
        if name[i] == 0:
            break
        found = (found ^ np.uint64(name[i])) * np.uint64(0x100000001B3)
    found = (found ^ np.uint64(words[_OP] & 0xFFFFFFFF)) * np.uint64(0x100000001B3)
    return np.int64(found)  # type: ignore[return-value]


@_loop
def _sum(address: int, count: int, coef: UInt64, first: int) -> np.uint64:
    """Of ``count`` bytes from ``address`` on, as words from the ``first`` on; a last word is filled up with zeros."""
    words = numba.carray(_words(address), count // 4)
    total = np.uint64(0)
    for i in range(count // 4):
        total += coef[first + i] * np.uint64(words[i])
    if count % 4:
        rest = numba.carray(_bytes(address), count)
        word = np.uint64(0)
        for k in range(count % 4):
            word |= np.uint64(rest[count // 4 * 4 + k]) << np.uint64(8 * k)
        total += coef[first + count // 4] * word
    return total


@_loop
def _copy(source: int, target: int, count: int) -> None:
    a, b = numba.carray(_bytes(source), count), numba.carray(_bytes(target), count)
    for i in range(count):
        b[i] = a[i]


@_loop
def _row(words: Int64, data: int, piece: int, axis: int, stream: int, coef: UInt64, kept: int) -> np.uint64:
    """The sum over one row, ``data`` being its first element: what lies inside the axis of tokens, in contiguous pieces.

    Copied to ``kept``, where that is an address."""
    total, first = np.uint64(0), 0
    counts = (words[_NE], words[_NE + 1], words[_NE + 2], words[_NE + 3])
    outer = np.ones(3, np.int64)
    strides = np.zeros(3, np.int64)
    n = 0
    for d in range(axis + 1, 4):
        if d != stream:
            outer[n], strides[n] = counts[d], words[_NB + d]
            n += 1
    for c in range(outer[2]):
        for b in range(outer[1]):
            for a in range(outer[0]):
                at = data + a * strides[0] + b * strides[1] + c * strides[2]
                total += _sum(at, piece, coef, first // 4)
                if kept:
                    _copy(at, kept + first, piece)
                first += piece
    return total


@_loop
def _event(
    state: Int64,
    events: Int64,
    kind: int,
    layer: int,
    row: int,
    head: int,
    position: int,
    count: int,
    before: int = 0,
) -> None:
    n = state[EVENTS]
    if n < events.shape[0]:
        events[n, 0], events[n, 1], events[n, 2] = kind, layer, row
        events[n, 3], events[n, 4], events[n, 5] = head, position, count
        events[n, 6] = before
    state[EVENTS] = n + 1


@_loop
def _entry(
    base: int, element: int, size: int, bytes_: int, coef: UInt64, scratch: int, kept: int
) -> np.uint64:
    """The sum over one head's entry: ``bytes_`` of elements of ``size`` bytes, ``element`` apart."""
    at = base
    if element != size:
        for i in range(bytes_ // size):
            _copy(base + i * element, scratch + i * size, size)
        at = scratch
    if kept:
        _copy(at, kept, bytes_)
    return np.uint64(_sum(at, bytes_, coef, 0))


@_loop
def _rows(
    state: Int64, step: Int64, words: Int64, digests: UInt64, outputs: Int64, coef: UInt64, keep: int
) -> None:
    """Digest the rows of a node."""
    axis, stream = step[AXIS], step[STREAM]
    group = step[GROUP]
    count = words[_NE + axis] // group
    streams = words[_NE + stream] if stream >= 0 else 1
    piece = step[PIECE]
    bias = np.uint64(step[BIAS])
    for s in range(streams):
        for t in range(count):
            row = s * count + t
            data = words[_DATA] + t * group * words[_NB + axis]
            if stream >= 0:
                data += s * words[_NB + stream]
            place = state[ROW] + (outputs[row] if step[TOKENS] == OUTPUTS else row)
            kept = keep + place * step[KEEP] if keep else 0
            digests[place, step[COLUMN]] = bias + _row(words, data, piece, axis, stream, coef, kept)


@_loop
def _asked_row(batch: Int64, sequence: int) -> int:
    """The first row of a batch [rows, 3] (sequence, position, whether it was seen) that is a sequence's and was not seen yet; of any
    sequence where there is none, as then a row went to the wrong one."""
    other = -1
    for n in range(batch.shape[0]):
        if not batch[n, 2]:
            if batch[n, 0] == sequence:
                return n
            if other < 0:
                other = n
    return max(other, 0)


@_loop
def _write(
    state: Int64,
    step: Int64,
    words: Int64,
    digests: UInt64,
    rows: Int64,
    batch: Int64,
    observed: Int64,
    cells: Int64,
    written: UInt64,
    terms: UInt64,
    newest: Int64,
    head_weights: UInt64,
    coef: UInt64,
    scratch: int,
    keep: int,
) -> None:
    """Digest cache entries as they were written: keys (or values) of each row and head at the row's cell.

    ``rows`` [rows, 4] are sequence, position, graph and place in the batch; ``cells`` [2, cells] are position and owners, a bit a
    sequence; ``newest`` [sequences, positions] is the cell that holds an entry.
    """
    first = state[ROW]
    count = state[COUNT]
    source = numba.carray(_longs(words[_SRC + 1]), 42)
    places = numba.carray(_longs(source[_DATA]), source[_NE])
    heads, bytes_, kv = step[HEADS], step[ENTRY], step[KV_SIZE]
    transposed = words[_NE] == 1
    if state[SPLIT] and step[ACTION] == WRITE_K and step[LAYER] == 0:
        # Each sequence has a stream of its own, and llama.cpp orders a batch's rows by them.
        for i in range(count):
            observed[first + i, 3] = places[i] // kv
            place = _asked_row(batch, places[i] // kv)
            batch[place, 2] = 1
            rows[first + i, 0], rows[first + i, 1], rows[first + i, 3] = (
                batch[place, 0],
                batch[place, 1],
                place,
            )
    size = words[_NB] if transposed else bytes_
    width = source[_NE] // count if count else 0
    values = step[ACTION] == WRITE_V
    for i in range(count):
        place = places[i * width]
        # Transposed values lie as [stream][dimension][cell].
        cell = place if not transposed else place // (kv * width) * kv + place % kv
        row = first + i
        if not values:
            cells[0, cell] = rows[row, 1]
            cells[1, cell] = np.int64(1) << rows[row, 0]
            terms[rows[row, 0], rows[row, 1]] = np.uint64(0)
            newest[rows[row, 0], rows[row, 1]] = cell
        term = np.uint64(0)
        for h in range(heads):
            if transposed:
                base = words[_DATA] + places[i * width + h * (width // heads)] * size
                element = size * kv
            else:
                base = words[_DATA] + place * words[_NB + 1] + h * bytes_
                element = size
            kept = keep + row * step[KEEP] + h * bytes_ if keep else 0
            found = np.uint64(step[ENTRY_BIAS]) + _entry(base, element, size, bytes_, coef, scratch, kept)
            number = step[FIRST_HEAD] + h
            written[cell, number] = found
            digests[row, step[COLUMN] + h] = found
            term += head_weights[number] * found
        terms[rows[row, 0], rows[row, 1]] += term


@_loop
def _visible(mask: Int64, cell: int, row: int, stream: int) -> bool:
    """Whether a mask [cells, rows, 1, streams] of float32 or float16 shows a cell to a row; no mask shows all."""
    at = mask[_DATA] + cell * mask[_NB] + row * mask[_NB + 1] + stream * mask[_NB + 3]
    if mask[_NB] == 2:
        return bool(numba.carray(_halves(at), 1)[0] != 0xFC00)
    return bool(numba.carray(_words(at), 1)[0] != 0xFF800000)


@_loop
def _read(
    state: Int64,
    step: Int64,
    keys: Int64,
    values: Int64,
    mask: Int64,
    tokens: int,
    digests: UInt64,
    rows: Int64,
    cells: Int64,
    written: UInt64,
    terms: UInt64,
    newest: Int64,
    events: Int64,
    position_weights: UInt64,
    head_weights: UInt64,
    coef: UInt64,
    scratch: int,
) -> None:
    """What each row's attention read: the entries of all cells that the mask shows it.

    Two sums for each row: of its own sequence's entries as they were written, and of the visible cells as they are now. Keys are
    [dimension, cell, head, stream]; values too, or [cell, dimension, head, stream] where they lie transposed.
    """
    count, streams, kv = keys[_NE + 1], keys[_NE + 3], step[KV_SIZE]
    transposed = step[ACTION] == READ_SOFTMAX
    k_heads, v_heads = keys[_NE + 2], values[_NE + 2]
    layer, column = step[LAYER], step[READ_COLUMN]
    sums = np.empty(count, np.uint64)
    shown = np.empty(count, np.bool_)
    for s in range(streams):
        base = (keys[_OFFSET] // keys[_NB + 3] + s) * kv if state[SPLIT] else 0
        for c in range(count):
            shown[c] = False
            for t in range(tokens):
                if _visible(mask, c, t, s):
                    shown[c] = True
                    break
            if not shown[c]:
                continue
            position, term = cells[0, base + c], np.uint64(0)
            for number in range(k_heads + v_heads):
                if number < k_heads:
                    at = keys[_DATA] + c * keys[_NB + 1] + number * keys[_NB + 2] + s * keys[_NB + 3]
                    found = np.uint64(step[ENTRY_BIAS]) + _entry(at, 1, 1, step[ENTRY], coef, scratch, 0)
                else:
                    at = values[_DATA] + (number - k_heads) * values[_NB + 2] + s * values[_NB + 3]
                    bias = np.uint64(step[V_BIAS])
                    if transposed:
                        at += c * values[_NB]
                        found = bias + _entry(
                            at, values[_NB + 1], values[_NB], step[V_ENTRY], coef, scratch, 0
                        )
                    else:
                        at += c * values[_NB + 1]
                        found = bias + _entry(at, 1, 1, step[V_ENTRY], coef, scratch, 0)
                if written[base + c, number] != found and position >= 0:
                    before = np.int64(written[base + c, number])
                    _event(
                        state, events, CHANGED, layer, base + c, number, position, cells[1, base + c], before
                    )
                    # From now on that is what is there: it is told once.
                    written[base + c, number] = found
                term += head_weights[number] * found
            sums[c] = term * (position_weights[position] if position >= 0 else np.uint64(1))
        for t in range(tokens):
            row = state[ROW] + s * tokens + t
            sequence, last = rows[row, 0], rows[row, 1]
            read, own, seen = np.uint64(0), np.uint64(0), 0
            # Where a window ends is the model's matter; from there on nothing may be missing, nor may a row's own entry.
            oldest = last if state[WINDOW] else 0
            for c in range(count):
                if not shown[c] or not _visible(mask, c, t, s):
                    continue
                read += sums[c]
                position = cells[0, base + c]
                mine = position >= 0 and (cells[1, base + c] >> sequence) & 1
                # Neither an entry of a later row, nor one that was written again elsewhere.
                if mine and position <= last and newest[sequence, position] == base + c:
                    seen += 1
                    oldest = min(oldest, position)
                else:
                    _event(state, events, FOREIGN, layer, row, base + c, position, cells[1, base + c])
            for p in range(oldest, last + 1):
                own += position_weights[p] * terms[sequence, p]
            if seen < last + 1 - oldest:
                first = oldest
                while first < last:
                    cell = newest[sequence, first] - base
                    if not (0 <= cell < count and shown[cell] and _visible(mask, cell, t, s)):
                        break
                    if cells[0, base + cell] != first:
                        break
                    first += 1
                _event(state, events, MISSING, layer, row, first, last, last + 1 - oldest - seen)
            digests[row, column] = own
            digests[row, column + 1] = read


@_loop
def _input(state: Int64, step: Int64, words: Int64, rows: Int64, outputs: Int64, observed: Int64) -> None:
    """The tokens, positions or output rows that a node was told."""
    source = numba.carray(_longs(words[_SRC + 1]), 42)
    given = numba.carray(_shorts(source[_DATA]), source[_NE])
    for i in range(source[_NE]):
        if step[INPUT] == INPUT_OUTPUTS:
            outputs[i] = given[i]
            observed[state[ROW] + given[i], 2] = 1
        elif step[INPUT] == INPUT_TOKENS:
            observed[state[ROW] + i, 0] = given[i]
        else:
            observed[state[ROW] + i, 1] = given[i]


# The table that the callback is given: addresses, then the sizes that go with them.
(
    AT_STATE,
    AT_PLAN,
    AT_NODES,
    AT_DIGESTS,
    AT_ROWS,
    AT_OUT,
    AT_OBSERVED,
    AT_CELLS,
    AT_WRITTEN,
    AT_TERMS,
    AT_EVENTS,
    AT_PW,
    AT_HW,
    AT_COEF,
    AT_BATCH,
    AT_NEWEST,
) = range(16)
AT_SCRATCH, AT_KEPT, N_ROWS, N_COLUMNS, N_CELLS, N_HEADS, N_SEQUENCES, N_POSITIONS, N_COEF, N_BATCH = range(
    16, 26
)
FIELDS: Final = 26


@_loop
def _process(table: Int64, state: Int64, plan: Int64, nodes: Int64, node: int, tensor: int) -> None:
    """A node that was computed."""
    step, words = plan[node], numba.carray(_longs(tensor), 42)
    size = table[N_ROWS]
    rows = numba.carray(_longs(table[AT_ROWS]), (size, 4))
    outputs = numba.carray(_longs(table[AT_OUT]), size)
    observed = numba.carray(_longs(table[AT_OBSERVED]), (size, 4))
    if step[INPUT] != NO_INPUT:
        _input(state, step, words, rows, outputs, observed)
    action = step[ACTION]
    if action == NOTHING:
        return
    digests = numba.carray(_naturals(table[AT_DIGESTS]), (size, table[N_COLUMNS]))
    coef = numba.carray(_naturals(table[AT_COEF]), table[N_COEF])
    keep = numba.carray(_longs(table[AT_KEPT]), plan.shape[0])[node]
    if action == ROWS or action == READ_FLASH:
        _rows(state, step, words, digests, outputs, coef, keep)
        if action == ROWS:
            return
    layer, n, heads = step[LAYER], table[N_CELLS], table[N_HEADS]
    sequences, positions = table[N_SEQUENCES], table[N_POSITIONS]
    cells = numba.carray(_longs(table[AT_CELLS] + layer * 2 * n * 8), (2, n))
    written = numba.carray(_naturals(table[AT_WRITTEN] + layer * n * heads * 8), (n, heads))
    terms = numba.carray(
        _naturals(table[AT_TERMS] + layer * sequences * positions * 8), (sequences, positions)
    )
    newest = numba.carray(
        _longs(table[AT_NEWEST] + layer * sequences * positions * 8), (sequences, positions)
    )
    head_weights = numba.carray(_naturals(table[AT_HW]), heads)
    scratch = table[AT_SCRATCH]
    if action == WRITE_K or action == WRITE_V:
        _write(
            state,
            step,
            words,
            digests,
            rows,
            numba.carray(_longs(table[AT_BATCH]), (table[N_BATCH], 3)),
            observed,
            cells,
            written,
            terms,
            newest,
            head_weights,
            coef,
            scratch,
            keep,
        )
        return
    position_weights = numba.carray(_naturals(table[AT_PW]), positions)
    events = numba.carray(_longs(table[AT_EVENTS]), (MOST_EVENTS, EVENT_FIELDS))
    if action == READ_FLASH:
        keys, values, mask = words[_SRC + 1], words[_SRC + 2], words[_SRC + 3]
        tokens = numba.carray(_longs(words[_SRC]), 42)[_NE + 1]
    else:
        keys, values, mask, tokens = nodes[step[K_VIEW]], nodes[step[V_VIEW]], words[_SRC + 1], words[_NE + 1]
    k, v, m = numba.carray(_longs(keys), 42), numba.carray(_longs(values), 42), numba.carray(_longs(mask), 42)
    _read(
        state, step, k, v, m, tokens, digests, rows, cells, written, terms, newest, events, position_weights,
        head_weights, coef, scratch,
    )  # fmt: skip


@numba.cfunc(types.boolean(types.int64, types.boolean, types.int64), cache=True)
def on_node(tensor: int, ask: bool, user: int) -> bool:
    """ggml's eval callback; ``user`` is the address of the table."""
    table = numba.carray(_longs(user), FIELDS)
    state = numba.carray(_longs(table[AT_STATE]), STATE)
    if state[MODE] == OFF or state[MODE] == STOP:
        return bool(state[MODE] == STOP)
    nodes = numba.carray(_longs(table[AT_NODES]), MOST_NODES)
    if state[MODE] == DISCOVER:
        if ask and state[MADE] < MOST_NODES:
            nodes[state[MADE]] = tensor
            state[MADE] += 1
        return False
    plan = numba.carray(_longs(table[AT_PLAN]), (state[PLANNED], WIDTH))
    if not ask:
        if state[TROUBLE] == FINE:
            _process(table, state, plan, nodes, state[NODE] - 1, tensor)
        return True
    node = state[NODE]
    if (node == 0 or node == state[PLANNED]) and plan[0, HASH] != _hash(tensor):
        # A graph without rows, such as the one that turns keys after positions were shifted.
        return False
    if node == state[PLANNED]:
        # The next part of a batch that was too large, or too uneven, for one graph.
        state[ROW] += state[COUNT]
        state[GRAPHS] += 1
        node = 0
    if state[TROUBLE] != FINE or plan[node, HASH] != _hash(tensor):
        state[TROUBLE] = max(state[TROUBLE], ANOTHER_GRAPH)
        return False
    if node == 0:
        state[COUNT] = numba.carray(_longs(tensor), 42)[_NE + plan[node, AXIS]] // max(1, plan[node, GROUP])
        if state[ROW] + state[COUNT] > table[N_ROWS]:
            state[TROUBLE] = TOO_MANY_ROWS
            return False
        rows = numba.carray(_longs(table[AT_ROWS]), (table[N_ROWS], 4))
        for r in range(state[ROW], state[ROW] + state[COUNT]):
            rows[r, 2] = state[GRAPHS]
    nodes[node] = tensor
    state[NODE] = node + 1
    return bool(plan[node, ACTION] != NOTHING or plan[node, INPUT] != NO_INPUT)


@_loop
def digest(address: int, count: int, coef: UInt64, bias: np.uint64) -> np.uint64:
    return np.uint64(_sum(address, count, coef, 0) + bias)
