"""Reusing a prompt's beginning: from an earlier request (packed), or from a chunk of its own (padded, serial)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

from detdiff.errors import LayoutError

from .pages import OnEvent
from .work import Work


@dataclass(frozen=True)
class Donor:
    """An earlier request and the tokens whose rows its caches hold, in order."""

    request: int
    tokens: tuple[int, ...]


def common_prefix(
    prompt: Sequence[int], donors: Sequence[Donor], page_tokens: int | None
) -> tuple[Donor | None, int]:
    """(donor, tokens) of the longest beginning of ``prompt`` that a donor holds; (None, 0) where there is none.

    Whole pages only where there are pages. The last token always runs, since its logits are needed, so a prompt
    of nothing but shared pages begins inside the last of them.
    """
    best: tuple[Donor | None, int] = (None, 0)
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


def reused_cache(model: Module, work: Work, tokens: int, event: OnEvent) -> list[Any]:
    """mlx-lm's ``prompt_cache`` with the first ``tokens`` of a prompt, written by one forward of its own.

    At least one token of the prompt is left to run. Pass the result to ``generate_step`` with
    ``work.prompt[work.done:]``.
    """
    count = min(tokens, len(work.prompt) - 1)
    caches = list(make_prompt_cache(model))
    if count:
        model(mx.array(work.prompt[:count])[None], cache=caches)
        mx.eval([cache.state for cache in caches])
        event("prefix", request=work.index, model="target", **{"from": work.index}, tokens=count)
    return caches
