"""What mlx-lm does to its caches between forwards, as events: merge, extend, filter, roll, trim, quantise.

Only mlx-lm's own functions that do these things are wrapped, and only while the block lasts; nothing is wrapped that a
forward calls, so a run in which nothing happens costs nothing.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

from detdiff.trace import format_ranges

from .caches import OnEvent

# By its name in full: the package has a function of that name, too.
mlx_lm_generate: Any = importlib.import_module("mlx_lm.generate")


@dataclass
class Owners:
    """Whose caches are whose: ``of_uid`` maps a batch generator's uid to a request's number.

    ``serial`` is the request that a serial generator runs; ``named`` are lists of caches that belong to a model.
    """

    of_uid: Callable[[int], int]
    serial: int = 0
    named: list[tuple[str, Sequence[Any]]] = field(default_factory=list)

    def model(self, caches: Sequence[Any]) -> str:
        """The model that a list of caches belongs to: by its first cache, as mlx-lm slices lists."""
        for name, mine in self.named:
            if caches and any(cache is caches[0] for cache in mine):
                return name
        return "target"


@contextlib.contextmanager
def watched(owners: Owners, event: OnEvent) -> Iterator[None]:
    """Tell ``event`` what mlx-lm's generators do to caches while the block lasts; undone on leaving, in reverse order."""
    watch = _Watch(owners, event)
    with contextlib.ExitStack() as stack:
        for owner, name, wrap in (
            (PromptProcessingBatch, "__init__", watch.merge),
            (PromptProcessingBatch, "extend", watch.extend),
            (PromptProcessingBatch, "filter", watch.filter),
            (PromptProcessingBatch, "prompt", watch.prompt),
            (GenerationBatch, "extend", watch.extend),
            (GenerationBatch, "filter", watch.filter),
            (mlx_lm_generate, "trim_prompt_cache", watch.trim),
            (mlx_lm_generate, "maybe_quantize_kv_cache", watch.quantise),
        ):
            native = vars(owner)[name]
            setattr(owner, name, wrap(native))
            stack.callback(setattr, owner, name, native)
        yield


Native = Callable[..., Any]


class _Watch:
    """The wrappers: each runs the native function and says what it did."""

    def __init__(self, owners: Owners, event: OnEvent) -> None:
        self._owners, self._event = owners, event

    def _requests(self, uids: Sequence[int]) -> list[int]:
        return [self._owners.of_uid(uid) for uid in uids]

    def merge(self, native: Native) -> Native:
        def init(batch: Any, *args: Any, **kw: Any) -> None:
            native(batch, *args, **kw)
            if batch.uids:
                self._event("merge", requests=self._requests(batch.uids), layers=_all(batch.prompt_cache))

        return init

    def extend(self, native: Native) -> Native:
        def extend(batch: Any, other: Any) -> None:
            before, more = list(batch.uids), list(other.uids)
            native(batch, other)
            if before and more:
                self._event(
                    "extend",
                    requests=self._requests(before),
                    by=self._requests(more),
                    layers=_all(batch.prompt_cache),
                )

        return extend

    def filter(self, native: Native) -> Native:
        def filter_(batch: Any, keep: list[int]) -> None:
            before = list(batch.uids)
            native(batch, keep)
            if before and len(keep) < len(before):
                self._event(
                    "filter",
                    requests=self._requests(before),
                    kept=self._requests([before[slot] for slot in keep]),
                    slots=list(keep),
                )

        return filter_

    def prompt(self, native: Native) -> Native:
        def prompt(batch: Any, tokens: list[list[int]]) -> None:
            uids = list(batch.uids)
            lengths = [len(t) for t in tokens]
            native(batch, tokens)
            padding = [max(lengths) - length for length in lengths] if lengths else []
            if any(padding):
                self._event(
                    "roll", requests=self._requests(uids), by=padding, layers=_all(batch.prompt_cache)
                )

        return prompt

    def trim(self, native: Native) -> Native:
        def trim(cache: list[Any], num_tokens: int) -> Any:
            can = [c.is_trimmable() for c in cache]
            done = native(cache, num_tokens)
            if num_tokens:
                # mlx-lm trims no layer where one cannot be trimmed.
                blocked = [layer for layer, ok in enumerate(can) if not ok]
                self._event(
                    "trim",
                    request=self._owners.serial,
                    model=self._owners.model(cache),
                    asked=int(num_tokens),
                    done=int(done),
                    layers=format_ranges(blocked or range(len(cache))),
                )
            return done

        return trim

    def quantise(self, native: Native) -> Native:
        def quantise(
            prompt_cache: list[Any], quantized_kv_start: int, kv_group_size: int, kv_bits: int | None
        ) -> None:
            if kv_bits is None:
                native(prompt_cache, quantized_kv_start, kv_group_size, kv_bits)
                return
            before = list(prompt_cache)
            native(prompt_cache, quantized_kv_start, kv_group_size, kv_bits)
            changed = [n for n, (a, b) in enumerate(zip(before, prompt_cache, strict=True)) if a is not b]
            if changed:
                self._event(
                    "quantise",
                    request=self._owners.serial,
                    model=self._owners.model(prompt_cache),
                    position=int(before[changed[0]].offset),
                    layers=format_ranges(changed),
                    bits=kv_bits,
                    group_size=kv_group_size,
                )

        return quantise


def _all(caches: Sequence[Any]) -> str:
    return format_ranges(range(len(caches)))
