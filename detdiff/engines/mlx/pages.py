"""A paged key and value cache: one pool of pages for all requests of a model, one page table a request.

A table is shared by all layers, as in engines that page: logical page i of a request is the same physical page in every
layer. Pages are counted by who names them, so requests can share a prefix; who writes to a shared page copies it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, create_attention_mask

from detdiff.errors import LayoutError

OnEvent = Callable[..., None]
"""``event(kind, **fields)``: puts a line into the trace."""


def silent(kind: str, **fields: Any) -> None:
    """An ``OnEvent`` that nobody hears."""


def refuse_unpageable(caches: Sequence[Any]) -> None:
    """Raises LayoutError, naming the layer, unless all of a model's caches are plain key and value caches."""
    for layer, cache in enumerate(caches):
        if type(cache) is not KVCache:
            raise LayoutError(
                f"layers.{layer} keeps its entries in {type(cache).__name__}; expected KVCache, whose entries stay where "
                "they were written: pages hold nothing else. Leave page_tokens out for this model."
            )


class PagePool:
    """The pages of one model: per layer, keys and values [pages, heads, page_tokens, width].

    Arrays are made when the first rows come, and grow by doubling. A free page of the lowest number is taken first, so
    that a run's tables depend on nothing but the run.
    """

    def __init__(self, layers: int, page_tokens: int, event: OnEvent = silent, model: str = "target") -> None:
        self.page_tokens = page_tokens
        self.model = model
        self.event = event
        self.keys: list[mx.array | None] = [None] * layers
        self.values: list[mx.array | None] = [None] * layers
        self.users: list[int] = []  # how many tables name each page

    @property
    def layers(self) -> int:
        return len(self.keys)

    def take(self) -> int:
        """A free page, which then has one user."""
        for page, users in enumerate(self.users):
            if users == 0:
                self.users[page] = 1
                return page
        self.users.append(1)
        return len(self.users) - 1

    def share(self, page: int) -> None:
        """One more table names ``page``."""
        self.users[page] += 1

    def release(self, page: int) -> None:
        """One table less names ``page``; with none left it is free."""
        self.users[page] -= 1

    def copy(self, source: int, target: int) -> None:
        """Copy a page's content in all layers."""
        for side in (self.keys, self.values):
            for layer, array in enumerate(side):
                if array is not None:
                    array = _roomy(array, target + 1)
                    array[target] = array[source]
                    side[layer] = array

    def write(self, layer: int, page: int, first: int, keys: mx.array, values: mx.array) -> None:
        """Put rows [1, heads, n, width] into a page of a layer, from its row ``first`` on."""
        for side, rows in ((self.keys, keys), (self.values, values)):
            array = side[layer]
            if array is None:
                _, heads, _, width = rows.shape
                array = mx.zeros((16, heads, self.page_tokens, width), rows.dtype)
            array = _roomy(array, page + 1)
            array[page, :, first : first + rows.shape[2]] = rows[0]
            side[layer] = array

    def read(self, layer: int, pages: Sequence[int], length: int) -> tuple[mx.array, mx.array]:
        """Keys and values [1, heads, length, width] of ``pages`` in that order."""
        found = []
        for array in (self.keys[layer], self.values[layer]):
            assert array is not None
            taken = array[mx.array(list(pages), mx.uint32)]
            count, heads, tokens, width = taken.shape
            found.append(taken.transpose(1, 0, 2, 3).reshape(1, heads, count * tokens, width)[:, :, :length])
        return found[0], found[1]

    def arrays(self, layer: int) -> list[mx.array]:
        return [array for array in (self.keys[layer], self.values[layer]) if array is not None]


def _roomy(array: mx.array, pages: int) -> mx.array:
    have = array.shape[0]
    if pages <= have:
        return array
    more = max(pages, 2 * have) - have
    return mx.concatenate([array, mx.zeros((more, *array.shape[1:]), array.dtype)])


class PageTable:
    """Which physical page each logical page of one request is; ``pages[i]`` holds positions i·page_tokens and on."""

    def __init__(self, pool: PagePool, request: int) -> None:
        self.pool, self.request = pool, request
        self.pages: list[int] = []
        self.lengths = [0] * pool.layers

    def take_over(self, other: PageTable, tokens: int) -> None:
        """Begin with the first ``tokens`` positions of another request, on its own pages. This table must be empty."""
        for index in range(-(-tokens // self.pool.page_tokens)):
            page = other.pages[index]
            self.pool.share(page)
            self._name(index, page)
        self.lengths = [tokens] * self.pool.layers

    def writable(self, index: int) -> int:
        """The page of a logical index that is about to be written: taken if there is none, copied if it is shared."""
        pool = self.pool
        if index == len(self.pages):
            self._name(index, pool.take())
        elif pool.users[self.pages[index]] > 1:
            shared = self.pages[index]
            own = pool.take()
            pool.copy(shared, own)
            pool.release(shared)
            self._name(index, own, copied=shared)
        return self.pages[index]

    def _name(self, index: int, page: int, **more: int) -> None:
        self.pages[index : index + 1] = [page]
        self.pool.event("page", request=self.request, model=self.pool.model, index=index, page=page, **more)

    def shrink(self) -> None:
        """Let go of the pages that no layer needs any more."""
        needed = -(-max(self.lengths) // self.pool.page_tokens)
        while len(self.pages) > needed:
            page = self.pages.pop()
            self.pool.release(page)
            self.pool.event(
                "page",
                request=self.request,
                model=self.pool.model,
                index=len(self.pages),
                page=page,
                freed=True,
            )

    def free(self) -> None:
        """The request is finished: all its pages go back."""
        self.lengths = [0] * self.pool.layers
        self.shrink()


class PagedCache:
    """One layer of one request: what mlx-lm's KVCache is to a model, on the pages of a table.

    Returns entries in logical order, so that what attention reads is bit-equal to a contiguous cache.
    """

    def __init__(self, table: PageTable, layer: int) -> None:
        self.table, self.layer = table, layer

    @property
    def offset(self) -> int:
        return self.table.lengths[self.layer]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write keys and values [1, heads, n, width]; all entries [1, heads, offset, width] in logical order."""
        table, pool = self.table, self.table.pool
        size, start = pool.page_tokens, self.offset
        end = start + keys.shape[2]
        position = start
        while position < end:
            index, first = divmod(position, size)
            count = min(size - first, end - position)
            page = table.writable(index)
            at = slice(position - start, position - start + count)
            pool.write(self.layer, page, first, keys[:, :, at], values[:, :, at])
            position += count
        table.lengths[self.layer] = end
        return self.entries()

    def entries(self) -> tuple[mx.array, mx.array]:
        """Keys and values [1, heads, offset, width] in logical order."""
        count = -(-self.offset // self.table.pool.page_tokens)
        return self.table.pool.read(self.layer, self.table.pages[:count], self.offset)

    def put(self, position: int, keys: mx.array, values: mx.array) -> None:
        """Replace entries from ``position`` on by [1, heads, n, width], which must lie below ``offset``."""
        size = self.table.pool.page_tokens
        for n in range(keys.shape[2]):
            index, first = divmod(position + n, size)
            page = self.table.writable(index)
            rows = slice(n, n + 1)
            self.table.pool.write(self.layer, page, first, keys[:, :, rows], values[:, :, rows])

    def make_mask(self, *args: Any, **options: Any) -> Any:
        return create_attention_mask(*args, offset=self.offset, **options)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forget the newest ``n`` rows of this layer; how many there were. Pages that no layer needs become free."""
        n = min(self.offset, n)
        self.table.lengths[self.layer] -= n
        self.table.shrink()
        return n

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def state(self) -> list[mx.array]:
        return self.table.pool.arrays(self.layer)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state) // max(1, len(self.table.pool.users))
