"""mlx-lm's own schedulers over a model that computes nothing: which forwards they would run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from detdiff.engines.schedule import Work, silent
from detdiff.scenario import Scenario

from .padded import PaddedComposer, PaddedRun, run_padded
from .turns import TurnCaches

if TYPE_CHECKING:
    from detdiff.bench.counts import ForwardShape

_VOCABULARY = 2


class _Nothing(Module):
    """A model without layers and caches that says whose rows it was given."""

    def __init__(self, composer: PaddedComposer, work: Sequence[Work]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers: list[Any] = []
        self._composer, self._work = composer, work
        self._forwards: list[ForwardShape] = []

    def make_cache(self) -> list[Any]:
        return []

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        from detdiff.bench.counts import ForwardShape

        forward = self._composer.compose(tokens, cache)
        rows = {segment.request: segment.count for segment in forward.segments}
        holding = {item.index: item.done for item in self._work if item.done and not item.finished}
        self._forwards.append(ForwardShape(rows, forward.shape, holding))
        return mx.zeros((*tokens.shape, _VOCABULARY))


def forwards(scenario: Scenario, work: Sequence[Work]) -> list[ForwardShape]:
    """The forwards of a padded scenario's schedule for requests of these lengths."""
    items = list(work)
    for item in items:
        item.sampler = greedy_sampler
    composer = PaddedComposer(items)
    model = _Nothing(composer, items)
    with contextlib.closing(
        TurnCaches(items, scenario.cache.turns, silent, partial(make_prompt_cache, model))
    ) as turns:
        run_padded(PaddedRun(model, scenario.schedule, composer, lambda *_: None, turns), items)
    found: list[ForwardShape] = model._forwards
    return found
