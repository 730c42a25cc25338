"""A packed engine's caches: made for a request when it begins, trimmed, shared, and let go when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from detdiff.engines.mlx.instrument.buffers import handle
from detdiff.errors import LayoutError
from detdiff.scenario import CachePlan
from detdiff.trace import format_ranges

from .pages import OnEvent, PagedCache, PagePool, PageTable, refuse_unpageable, silent
from .prefix import Donor, common_prefix, copied_prefix, refuse_unshareable


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
class _Held:
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
        self._held: dict[int, _Held] = {}
        self._pool: PagePool | None = None
        if self._plan.page_tokens is not None:
            self._pool = PagePool(len(make_prompt_cache(model)), self._plan.page_tokens, event, name)

    def shareable(self, prompt: Sequence[int]) -> int:
        """How many of a prompt's tokens an earlier request's caches hold, as far as they can be shared."""
        return self._donor(prompt)[1] if self._plan.share_prefix else 0

    def _donor(self, prompt: Sequence[int]) -> tuple[Donor | None, int]:
        donors = [Donor(number, tuple(held.tokens)) for number, held in self._held.items()]
        return common_prefix(prompt, donors, self._plan.page_tokens)

    def begin(self, request: int, prompt: Sequence[int], at_most: int | None = None) -> int:
        """Make a request's caches; how many of its prompt's tokens they hold already.

        Never the whole prompt, and not more than ``at_most``: models that run together share as much each.
        """
        table = self._table(request)
        held = self._held[request] = _Held(make_caches(self._model, self._plan, table), [], table)
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

    def of(self, request: int) -> list[Any]:
        """The caches of a request, one a layer; made empty where ``begin`` was not called."""
        if request not in self._held:
            table = self._table(request)
            self._held[request] = _Held(make_caches(self._model, self._plan, table), [], table)
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
