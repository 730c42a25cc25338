"""The caches of requests: made when one begins, on pages or not, trimmed, shared, reused, and let go when it ends.

A page table is shared by all layers, as in engines that page: logical page i of a request is the same physical page in every
layer. Pages are counted by who names them, so requests can share a prefix; who writes to a shared page copies it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, create_attention_mask, make_prompt_cache

from detdiff.engines.mlx.taps.forward import handle
from detdiff.engines.schedule import OnEvent, Work, silent
from detdiff.errors import LayoutError
from detdiff.scenario import CachePlan
from detdiff.trace import format_ranges


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

    def hand_over(self, request: int) -> None:
        """From now on the pages are those of another request."""
        for index, page in enumerate(self.pages):
            self._told(index, page, freed=True)
        self.request = request
        for index, page in enumerate(self.pages):
            self._told(index, page)

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
        self._told(index, page, **more)

    def _told(self, index: int, page: int, **more: int) -> None:
        self.pool.event("page", request=self.request, model=self.pool.model, index=index, page=page, **more)

    def shrink(self) -> None:
        """Let go of the pages that no layer needs any more."""
        needed = -(-max(self.lengths) // self.pool.page_tokens)
        while len(self.pages) > needed:
            page = self.pages.pop()
            self.pool.release(page)
            self._told(len(self.pages), page, freed=True)

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


@dataclass(frozen=True)
class PrefixDonor:
    """An earlier request and the tokens whose rows its caches hold, in order."""

    request: int
    tokens: tuple[int, ...]


def common_prefix(
    prompt: Sequence[int], donors: Sequence[PrefixDonor], page_tokens: int | None
) -> tuple[PrefixDonor | None, int]:
    """(donor, tokens) of the longest beginning of ``prompt`` that a donor holds; (None, 0) where there is none.

    Whole pages only where there are pages. The last token always runs, since its logits are needed, so a prompt
    of nothing but shared pages begins inside the last of them.
    """
    best: tuple[PrefixDonor | None, int] = (None, 0)
    for donor in donors:
        same = 0
        for mine, held in zip(prompt, donor.tokens, strict=False):
            if mine != held:
                break
            same += 1
        if page_tokens is not None:
            same -= same % page_tokens
        same = min(same, len(prompt) - 1)
        if same > best[1]:
            best = donor, same
    return best


def refuse_unshareable(caches: Sequence[Any]) -> None:
    """Raises LayoutError, naming the layer, for a cache that does not keep every entry from position 0 on."""
    for layer, cache in enumerate(caches):
        if type(cache) is not KVCache:
            raise LayoutError(
                f"layers.{layer} keeps its entries in {type(cache).__name__}; expected KVCache, which keeps every entry of a "
                "prefix. Leave share_prefix out for this model."
            )


def copied_prefix(donor: Sequence[Any], empty: Sequence[Any], tokens: int) -> list[Any]:
    """The caches ``empty`` with copies of the first ``tokens`` entries of a donor's contiguous caches."""
    for mine, theirs in zip(empty, donor, strict=True):
        mine.update_and_fetch(theirs.keys[..., :tokens, :], theirs.values[..., :tokens, :])
    mx.eval([cache.state for cache in empty])
    return list(empty)


def reused_cache(model: Module, work: Work, plan: CachePlan, event: OnEvent) -> list[Any]:
    """mlx-lm's ``prompt_cache`` with the first ``reuse_tokens`` of a prompt, written by one forward of its own.

    At least one token of the prompt is left to run. Pass the result to ``generate_step`` with
    ``work.prompt[work.done:]``.
    """
    count = min(plan.reuse_tokens or 0, len(work.prompt) - 1)
    caches = list(make_prompt_cache(model, plan.max_kv_size))
    if count:
        model(mx.array(work.prompt[:count])[None], cache=caches)
        mx.eval([cache.state for cache in caches])
        event("prefix", request=work.index, model="target", **{"from": work.index}, tokens=count)
    return caches


def make_caches(model: Module, plan: CachePlan | None = None, table: PageTable | None = None) -> list[Any]:
    """The caches of one request, one a layer: mlx-lm's own, or on the pages of ``table`` where there is one.

    Raises LayoutError for a model whose caches cannot be paged or shared as ``plan`` asks.
    """
    caches = list(make_prompt_cache(model))
    if plan is not None and plan.share_prefix:
        refuse_unshareable(caches)
    if table is None:
        return caches
    refuse_unpageable(caches)
    return [PagedCache(table, layer) for layer in range(len(caches))]


@dataclass
class _HeldCaches:
    """A request's caches and the tokens whose rows they hold."""

    caches: list[Any]
    tokens: list[int]
    table: PageTable | None


class RequestCaches:
    """The caches of every request of one model in a packed run.

    ``event`` is called as ``event(kind, **fields)``; ``name`` is the model's name in events: "target" or "draft".
    With a shared prefix the caches of finished requests stay until the run ends, as donors.
    """

    def __init__(
        self, model: Module, plan: CachePlan | None = None, event: OnEvent = silent, name: str = "target"
    ) -> None:
        self._model, self._plan, self._event, self._name = model, plan or CachePlan(), event, name
        self._held: dict[int, _HeldCaches] = {}
        self._pool: PagePool | None = None
        if self._plan.page_tokens is not None:
            self._pool = PagePool(len(make_prompt_cache(model)), self._plan.page_tokens, event, name)

    def shareable(self, prompt: Sequence[int]) -> int:
        """How many of a prompt's tokens an earlier request's caches hold, as far as they can be shared."""
        return self._donor(prompt)[1] if self._plan.share_prefix else 0

    def _donor(self, prompt: Sequence[int]) -> tuple[PrefixDonor | None, int]:
        donors = [PrefixDonor(number, tuple(held.tokens)) for number, held in self._held.items()]
        return common_prefix(prompt, donors, self._plan.page_tokens)

    def begin(self, request: int, prompt: Sequence[int], at_most: int | None = None) -> int:
        """Make a request's caches; how many of its prompt's tokens they hold already.

        Never the whole prompt, and not more than ``at_most``: models that run together share as much each.
        """
        table = self._table(request)
        held = self._held[request] = _HeldCaches(make_caches(self._model, self._plan, table), [], table)
        donor, shared = self._donor(prompt) if self._plan.share_prefix else (None, 0)
        shared = shared if at_most is None else min(shared, at_most)
        if donor is None or not shared:
            return 0
        self._event("prefix", request=request, model=self._name, **{"from": donor.request}, tokens=shared)
        given = self._held[donor.request]
        if table is not None and given.table is not None:
            table.take_over(given.table, shared)
        else:
            held.caches = copied_prefix(given.caches, held.caches, shared)
        held.tokens = list(prompt[:shared])
        return shared

    def rows(self, request: int) -> list[int]:
        """The tokens whose rows a request's caches hold."""
        held = self._held.get(request)
        return [] if held is None else held.tokens

    def forgets(self, request: int, count: int) -> bool:
        """Whether the newest ``count`` rows of a request can be taken back in every layer."""
        return all(cache.is_trimmable() for cache in self.of(request))

    def go_on(self, request: int, before: int, kept: int, reload: Callable[[list[Any]], list[Any]]) -> None:
        """A later turn takes over the caches of the request ``before``, of whose rows ``kept`` stay."""
        held = self._held[request] = self._held.pop(before)
        held.caches = reload(held.caches)
        if held.table is not None:
            held.table.hand_over(request)
        if len(held.tokens) > kept:
            self.trim(request, len(held.tokens) - kept)
        if kept:
            self._event("prefix", request=request, model=self._name, **{"from": before}, tokens=kept)

    def of(self, request: int) -> list[Any]:
        """The caches of a request, one a layer; made empty where ``begin`` was not called."""
        if request not in self._held:
            table = self._table(request)
            self._held[request] = _HeldCaches(make_caches(self._model, self._plan, table), [], table)
        return self._held[request].caches

    def wrote(self, request: int, tokens: Sequence[int]) -> None:
        """The rows of these tokens have been written, so that a later request can share them."""
        self._held[request].tokens += tokens

    def trim(self, request: int, count: int) -> int:
        """Forget the newest ``count`` rows in every layer; the fewest that a layer forgot.

        The event names the layers that forgot so few. Raises LayoutError for a cache that cannot forget rows.
        """
        held = self._held[request]
        refuse_untrimmable(held.caches, count)
        done = [cache.trim(count) for cache in held.caches]
        least = min(done, default=0)
        short = [layer for layer, n in enumerate(done) if n == least]
        self._event(
            "trim", request=request, model=self._name, asked=count, done=least, layers=format_ranges(short)
        )
        if count:
            # What the engine forgets, whatever a cache says of itself.
            del held.tokens[-count:]
        return least

    def free(self, request: int) -> None:
        """The request is finished; its caches go unless a later request may share its prompt."""
        held = None if self._plan.share_prefix else self._held.pop(request, None)
        if held is not None and held.table is not None:
            held.table.free()

    def _table(self, request: int) -> PageTable | None:
        return None if self._pool is None else PageTable(self._pool, request)

    def snapshot(self) -> object:
        """The caches as they are now, for ``restore``; arrays are shared, not copied."""
        return _copied((self._held, self._pool), {})

    def restore(self, snapshot: object) -> None:
        """Go back to a snapshot, which stays as it is and can be restored again."""
        self._held, self._pool = _copied(snapshot, {})


def refuse_untrimmable(caches: Sequence[Any], count: int) -> None:
    """Raises LayoutError, naming the layer, for a cache that no longer has what stood before its newest rows."""
    for layer, cache in enumerate(caches):
        if count and not cache.is_trimmable():
            raise LayoutError(
                f"{count} rejected rows cannot be taken back from layers.{layer}: its {type(cache).__name__} at offset "
                f"{cache.offset} has overwritten what they replaced. Expected a cache that can be trimmed. Run this model "
                "without a draft, or with prompt and answer shorter than its window."
            )


def _copied(value: Any, seen: dict[int, Any]) -> Any:
    """A copy that shares no object that can change, and all arrays' contents.

    Assigning into an MLX array changes what its Python object stands for, so every copy has handles of its own.
    """
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, mx.array):
        found: Any = handle(value)
    elif isinstance(value, list):
        found = seen[id(value)] = []
        found += [_copied(item, seen) for item in value]
    elif isinstance(value, tuple):
        found = tuple(_copied(item, seen) for item in value)
    elif isinstance(value, dict):
        found = {key: _copied(item, seen) for key, item in value.items()}
    elif hasattr(value, "__dict__") and not callable(value):
        found = seen[id(value)] = object.__new__(type(value))
        found.__dict__.update({key: _copied(item, seen) for key, item in vars(value).items()})
    else:
        return value
    seen[id(value)] = found
    return found
