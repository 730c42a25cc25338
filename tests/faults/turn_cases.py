"""Faults of a cache's life over turns: what is kept of a turn, forgotten, saved, loaded or given to another request.

Both sides of a trial have the fault in them. Side a runs whole conversations from scratch, which meets none of them unless
it is said otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from adapters import adapted, write_adapter
from fault_models import fixture, prompt
from injecting import Around, replaced, set_entry
from mlx_lm.models import cache as caches
from tiny import TinyTokenizer, tiny

from detdiff.engines.mlx import serve
from detdiff.engines.mlx.cache_events import mlx_lm_generate
from detdiff.engines.mlx.caches import PageTable
from detdiff.engines.mlx.model import LoadedModel
from detdiff.engines.mlx.turns import Conversations
from detdiff.engines.schedule import Said, Work
from detdiff.scenario import Scenario

Call = Callable[..., Any]
END, USER, ANSWER, STOP = 90, 91, 92, 93
"""Tokens of the chat template."""


@dataclass(frozen=True)
class TurnTrial:
    """Two runs with the fault of ``around`` in them, and what has to be named: ``what`` is the finding's name, ``request`` whose it
    is, and ``words`` are in its text."""

    scenario_a: Scenario
    scenario_b: Scenario
    loaded: LoadedModel
    around: Around
    request: str
    what: str
    words: tuple[str, ...]


def talk(seed: int, *turns: dict[str, Any], length: int = 9, **keys: Any) -> Scenario:
    """A request of ``length`` and 4 tokens with later turns; those without tokens have two."""
    given = [{"tokens": prompt(2, (seed, "turn", n)), **turn} for n, turn in enumerate(turns)]
    request = {"id": "r0", "tokens": prompt(length, seed), "turn": given}
    return Scenario.from_dict({"model": "fixture", "max_tokens": 4, "request": [request], **keys})


def sides(asked: Scenario, **keys: Any) -> tuple[Scenario, Scenario]:
    return asked.with_changes(turns="fresh"), asked.with_changes(**keys) if keys else asked


def trimmed_otherwise(seed: int, more: int) -> TurnTrial:
    """A layer of the cache forgets ``more`` rows than it is asked to, and says that it forgot so many as that."""
    draw = random.Random(f"trim {more} {seed}")
    layer, rewind = draw.randrange(2), draw.randrange(2, 5)

    def trim(native: Call) -> Call:
        def injected(cache: list[Any], count: int) -> int:
            for n, one in enumerate(cache):
                one.trim(count + more * (n == layer))
            return count

        return injected

    # 13 rows are in the cache after the first turn.
    at, row = 13 - rewind - more, 13 - rewind
    stale = ("stale", f"1 row of r0 that forward {row - 7} wrote at position {row}")
    what, words = ("offset", f"the cache of layer {layer} is at offset {at}, the row at {row}")
    if more < 0:
        what, words = stale
    return TurnTrial(
        *sides(talk(seed, {"rewind": rewind})),
        fixture("T", "f32", seed),
        Around(partial(replaced, mlx_lm_generate, "trim_prompt_cache", trim)),
        "r0/2",
        what,
        (words, f"layer {layer}" if more > 0 else f"in layers {layer},"),
    )


def state_not_rewound(seed: int) -> TurnTrial:
    """Recurrent states say that they can be trimmed and stay what they are, beside keys and values that are."""

    def always(native: Call) -> Call:
        return lambda self: True

    def trim(self: Any, count: int) -> int:
        return count

    @dataclass
    class Trims:
        """``ArraysCache`` has no trim of its own."""

        def __enter__(self) -> None:
            caches.ArraysCache.trim = trim
            caches.ArraysCache.is_trimmable = lambda self: True

        def __exit__(self, *_: Any) -> None:
            del caches.ArraysCache.trim, caches.ArraysCache.is_trimmable

    rewind = 1 + seed % 4
    return TurnTrial(
        *sides(talk(seed, {"rewind": rewind})),
        fixture("H", "f32", seed),
        Around(Trims),
        "r0/2",
        "state",
        (
            f"the recurrent states of layers 0,2 that the row after position {12 - rewind} found are as position 12 left them",
        ),
    )


def saved_early(seed: int) -> TurnTrial:
    """The prompt cache is saved before its last row is written."""

    def save(native: Call) -> Call:
        def injected(path: str, cache: list[Any], *args: Any) -> None:
            for one in cache:
                one.offset -= 1
            native(path, cache, *args)

        return injected

    return TurnTrial(
        *sides(talk(seed, {}, length=5 + seed), turns="reloaded"),
        fixture("T", "f32", seed),
        Around(partial(replaced, caches, "save_prompt_cache", save)),
        "r0/2",
        "offset",
        (
            f"the cache of layers 0-1 is at offset {8 + seed}, the row at {9 + seed}",
            "load (layers 0-1, for r0/2)",
        ),
    )


def slot_not_reset(seed: int) -> TurnTrial:
    """A slot that a conversation began anew in still holds, in one layer, what was before."""
    layer = seed % 2

    def trim(native: Call) -> Call:
        def injected(cache: list[Any], count: int) -> int:
            for n, one in enumerate(cache):
                if n != layer:
                    one.trim(count)
            return count

        return injected

    length = 5 + seed
    return TurnTrial(
        *sides(talk(seed, {"anew": True, "tokens": prompt(3, seed)}, length=length)),
        fixture("T", "f32", seed),
        Around(partial(replaced, mlx_lm_generate, "trim_prompt_cache", trim)),
        "r0/2",
        "stale",
        (
            f"{length + 4} rows of r0 that forwards 0-",
            f"at positions 0-{length + 3}",
            f"in layers {layer}, and",
        ),
    )


def page_freed_twice(seed: int) -> TurnTrial:
    """What a turn forgets goes back to the pool of pages at once, and a second time when the turn is over."""
    gone: dict[int, list[int]] = {}

    def shrink(native: Call) -> Call:
        def injected(self: PageTable) -> None:
            before = list(self.pages)
            native(self)
            gone.setdefault(self.request, []).extend(before[len(self.pages) :])

        return injected

    def free(native: Call) -> Call:
        def injected(self: PageTable) -> None:
            forgotten = gone.pop(self.request, [])
            native(self)
            for page in forgotten:
                self.pool.users[page] = 0

        return injected

    def request(name: str, length: int, arrival: int, tokens: int) -> dict[str, Any]:
        return {"id": name, "tokens": prompt(length, (seed, name)), "arrival": arrival, "max_tokens": tokens}

    # r0 lets go of page 2, r1 takes it, r0 ends, and r2 needs three pages.
    requests = [
        {**request("r0", 9, 0, 4), "turn": [{"tokens": prompt(1, seed), "rewind": 8, "max_tokens": 3}]},
        request("r1", 4, 4, 12),
        request("r2", 9, 8, 4),
    ]
    asked = Scenario.from_dict(
        {"model": "fixture", "schedule": "continuous", "layout": "packed", "request": requests}
    )
    return TurnTrial(
        asked.with_changes(turns="fresh"),
        asked.with_changes(page_tokens=4),
        fixture("T", "f32", seed),
        Around(partial(replaced, PageTable, "shrink", shrink), partial(replaced, PageTable, "free", free)),
        "r2",
        "page",
        ("page 2 was given to r2 for positions 8 to 11 while it held positions 0 to 3 of r1",),
    )


def offset_stays(seed: int) -> TurnTrial:
    """A cache that is loaded from a file counts from zero."""

    def from_state(native: Any) -> Any:
        def injected(cls: type, state: Any) -> Any:
            made = native.__func__(cls, state)
            made.offset = 0
            return made

        return classmethod(injected)

    length = 5 + seed
    return TurnTrial(
        *sides(talk(seed, {}, length=length), turns="reloaded"),
        fixture("T", "f32", seed),
        Around(partial(replaced, caches._BaseCache, "from_state", from_state)),
        "r0/2",
        "offset",
        (f"the cache of layers 0-1 is at offset 0, the row at {length + 4}", "load (layers 0-1, for r0/2)"),
    )


def tail_lost(seed: int) -> TurnTrial:
    """The newest entries of one head of a quantised cache are zeros in the file that it is saved to."""
    draw = random.Random(f"tail {seed}")
    layer, side, head, lost = draw.randrange(2), draw.choice("KV"), draw.randrange(2), draw.randrange(1, 4)

    def save(native: Call) -> Call:
        def injected(path: str, cache: list[Any], *args: Any) -> None:
            held = cache[layer]
            name = "keys" if side == "K" else "values"
            packed, *rest = getattr(held, name)
            for n in range(held.offset - lost, held.offset):
                packed = set_entry(packed, (0, head, n), 0)
            setattr(held, name, (packed, *rest))
            native(path, cache, *args)

        return injected

    asked = talk(seed, {}, kv_bits=8)
    where = f"head {head}, position 12" if lost == 1 else f"head {head}, positions {13 - lost}-12"
    return TurnTrial(
        asked,
        asked.with_changes(turns="reloaded"),
        fixture("wide", "f32", seed),
        Around(partial(replaced, caches, "save_prompt_cache", save)),
        "r0/2",
        "cache_changed",
        (
            f"the cache entry {side} of layer {layer}, {where} is"
            if lost == 1
            else f"{side}, layer {layer}, {where}",
            "load (layers 0-1, for r0/2)",
        ),
    )


def cancelled_rows(seed: int) -> TurnTrial:
    """When the first of two requests is cancelled, the other goes on with the rows of its slot."""
    layer_keys = ("keys", "values")

    def filtering(native: Call) -> Call:
        def injected(self: Any, keep: Sequence[int]) -> None:
            if list(keep) == [1]:
                for name in layer_keys:
                    setattr(self, name, getattr(self, name)[mx.array([0, 0])])
            native(self, keep)

        return injected

    requests = [
        {"id": "r0", "tokens": prompt(6 + seed % 9, (seed, 0)), "cancel": 2},
        {"id": "r1", "tokens": prompt(6 + seed % 9, (seed, 1))},
    ]
    asked = Scenario.from_dict({"model": "fixture", "max_tokens": 5, "request": requests})
    return TurnTrial(
        asked,
        asked.with_changes(schedule="static"),
        fixture("T", "f32", seed),
        Around(partial(replaced, caches.BatchKVCache, "filter", filtering)),
        "r1",
        "cache_changed",
        (
            f"K and V, layers 0-1, heads 0-1, positions 0-{7 + seed % 9}",
            "cancel (r0 after 2 tokens)",
            "filter (kept r1 of r0, r1)",
        ),
    )


def sink_evicted(seed: int) -> TurnTrial:
    """A ring that is to keep its first four entries for good begins again at its very beginning."""

    def update(native: Call) -> Call:
        def injected(self: Any, *given: Any) -> Any:
            keep = self.keep
            if self._idx == self.max_size:
                self.keep = 0
            found = native(self, *given)
            self.keep = keep
            return found

        return injected

    # From scratch the keys of a ring lie in another order, which rounds otherwise.
    asked = talk(seed, {}, length=5 + seed % 4, max_kv_size=8)
    return TurnTrial(
        asked,
        asked.with_changes(turns="reloaded"),
        tiny("qwen2", seed=seed),
        Around(partial(replaced, caches.RotatingKVCache, "_update_in_place", update)),
        "r0",
        "cache_missing",
        ("the row at position 8 did not see the entry of its own position 0 in the cache of layers 0-1",),
    )


def adapter_left_on(seed: int, folder: Path) -> TurnTrial:
    """One layer's adapter, LoRA or DoRA, goes on computing in a turn that is to be without it."""
    layer, name = seed % 2, ("q_proj", "v_proj")[seed // 2 % 2]

    def switch(native: Call) -> Call:
        def injected(model: Any, on: bool) -> None:
            native(model, on)
            model.model.layers[layer].self_attn[name].adapter_off = False

        return injected

    of = adapted(
        tiny("llama", seed=seed),
        write_adapter(tiny("llama"), folder / str(seed), dora=seed % 4 > 1, seed=seed),
    )
    return TurnTrial(
        *sides(talk(seed, {"use_adapter": False})),
        of,
        Around(partial(replaced, serve, "switch_adapter", switch)),
        "r0/2",
        "adapter",
        (
            f"the adapter of layers.{layer}.self_attn.{name} computed the rows from position 0 on, although it was off",
        ),
    )


class ChatTokenizer(TinyTokenizer):
    """A template of tokens: each message is opened by who speaks, and closed."""

    has_chat_template = True

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token) for token in ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        found: list[int] = []
        for message in messages:
            found += [
                USER if message["role"] == "user" else ANSWER,
                *self.encode(message["content"]),
                END,
                STOP,
            ]
        return [*found, ANSWER] if add_generation_prompt else found


def template_dropped(seed: int) -> TurnTrial:
    """A later turn of a chat goes on right after the answer, without what the template closes it with."""

    def said(native: Call) -> Call:
        def injected(self: Conversations, work: Work) -> Said:
            found = native(self, work)
            end = found.told + len(found.closing)
            return replace(found, tokens=(*found.tokens[: found.told], *found.tokens[end:]))

        return injected

    text = "".join(map(chr, prompt(4 + seed, seed, 80)))
    request = {
        "id": "r0",
        "prompt": text,
        "chat": True,
        "turn": [{"prompt": "".join(map(chr, prompt(3, seed, 80)))}],
    }
    asked = Scenario.from_dict({"model": "fixture", "max_tokens": 4, "request": [request]})
    of = fixture("T", "f32", seed)
    return TurnTrial(
        *sides(asked),
        replace(of, tokenizer=ChatTokenizer()),
        Around(partial(replaced, Conversations, "said", said)),
        "r0/2",
        "template",
        (
            f"at position {len(text) + 8} the conversation lacks the 2 tokens {END}, {STOP} with which the chat template ends the "
            f"answer of r0; it goes on with {USER}",
        ),
    )


def turn_cases(folder: Path) -> dict[str, Callable[[int], TurnTrial]]:
    """The cases by their kind; ``folder`` is for adapters."""
    return {**TURN_CASES, "adapter left on": partial(adapter_left_on, folder=folder)}


TURN_CASES: dict[str, Callable[[int], TurnTrial]] = {
    "trim one too many": partial(trimmed_otherwise, more=1),
    "trim one too few": partial(trimmed_otherwise, more=-1),
    "state not rewound beside a trimmed KV cache": state_not_rewound,
    "prompt cache saved before the last write": saved_early,
    "slot reused without reset": slot_not_reset,
    "page freed twice": page_freed_twice,
    "offset not moved on load": offset_stays,
    "quantised tail lost": tail_lost,
    "evicted sink": sink_evicted,
    "cancelled request's rows read": cancelled_rows,
    "second turn's template tokens dropped": template_dropped,
}
