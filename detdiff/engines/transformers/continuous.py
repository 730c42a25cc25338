"""Requests in transformers' own continuous batching: its scheduler, pages and forwards, driven a step at a time in this thread."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final

from detdiff.engines import base
from detdiff.engines.base import OnTimedToken, RunOptions
from detdiff.engines.schedule import Share, Work, admitted, by_arrival
from detdiff.errors import EngineFailed, EngineRefuses, words_of
from detdiff.scenario import GENERATE, Scenario

from .padded import Given, greedy, text_ends
from .paged_recorder import PagedRecorder
from .rows import RowSink
from .sites import replaced
from .taps import PAGED_EAGER, pinned, tapped

PAGE_TOKENS: Final = 256
"""Positions of a page, and rows of a forward at most, where nothing else is said: transformers' own defaults (5.24)."""
MOST_ROWS: Final = 8192
LEAST_PAGE: Final = 4
_ATTENTION: Final = ("eager", "sdpa", PAGED_EAGER)
_HOME: Final = "transformers.generation.continuous_batching"


@dataclass(frozen=True)
class PagesPlan:
    """What continuous batching is told: requests at a time, rows of a forward at most, and positions of a page."""

    requests: int
    rows: int
    page: int

    @classmethod
    def of(cls, scenario: Scenario, given: Given) -> PagesPlan:
        count = len(scenario.requests)
        active = min(scenario.schedule.active or count, count)
        longest = sorted((len(prompt) for prompt, _ in given), reverse=True)[:active]
        # No forward has more rows than so many prompts.
        rows = scenario.schedule.row_budget or min(MOST_ROWS, sum(longest))
        return cls(active, rows, scenario.cache.page_tokens or PAGE_TOKENS)

    def blocks(self, longest: int, kinds: Sequence[int]) -> int:
        """Blocks that hold so many requests of the longest length; ``kinds`` are the layers of each kind of attention. Cells are dealt to these
        in parts that all can divide."""
        spare = math.ceil(math.lcm(*kinds) / sum(kinds)) * len(kinds)
        return self.requests * (math.ceil(longest / self.page) + 1) + spare


class ContinuousBatches:
    """The requests of a scenario whose schedule is continuous."""

    def __init__(self, torch: Any, model: Any, scenario: Scenario, given: Given) -> None:
        self._torch, self.model = torch, model
        self._scenario, self._given = scenario, given
        self.plan = PagesPlan.of(scenario, given)

    @property
    def notes(self) -> Sequence[str]:
        plan = self.plan
        return (
            f"transformers' own continuous batching: at most {plan.requests} requests at a time and {plan.rows} rows a forward, in pages of "
            f"{plan.page} positions that no two requests share",
        )

    def record(self, into: RowSink, options: RunOptions) -> tuple[PagedRecorder, list[Any]]:
        """The recorder that has written all forwards, and the logits of the first of them, as many as ``options`` observe."""
        recorder, logits = PagedRecorder(into), list[Any]()
        torch, model = self._torch, self.model
        shares: list[Share] = []

        def fed(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recorder.begin(shares, kwargs)

        def made(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            recorder.end(output.logits)
            if len(logits) < options.observe:
                logits.append(output.logits.clone())

        def before(next_: list[Share]) -> None:
            shares[:] = next_

        def after(answered: list[tuple[Work, int]]) -> bool:
            recorder.chosen(
                [token for _, token in answered], [work.index for work, _ in answered if work.finished]
            )
            return True

        with self._stepped(options.overrides.pin_kernels) as processor, contextlib.ExitStack() as stack:
            kinds = [type(processor.cache)]
            stack.callback(model.register_forward_pre_hook(fed, with_kwargs=True).remove)
            stack.enter_context(
                tapped(torch, model, recorder.site, recorder.attended, written=recorder.written, caches=kinds)
            )
            stack.callback(model.register_forward_hook(made, with_kwargs=True).remove)
            self._serve(processor, self._work(), before, after)
        return recorder, logits

    def again(self, options: RunOptions, enough: int) -> list[Any]:
        """The logits of the first forwards where nothing is recorded, ``enough`` of them."""
        found: list[Any] = []
        with self._stepped(options.overrides.pin_kernels) as processor, contextlib.ExitStack() as stack:
            keep = self.model.register_forward_hook(lambda *call: found.append(call[2].logits.clone()))
            stack.callback(keep.remove)
            self._serve(processor, self._work(), lambda _: None, lambda _: len(found) < enough)
        return found

    def timed(self, on_start: Callable[[], None], on_token: OnTimedToken) -> list[float | None]:
        """See ``base.RunsUnrecorded``."""
        work = self._work()

        def after(answered: list[tuple[Work, int]]) -> bool:
            for item, token in answered:
                on_token(item.index, token)
            return True

        with self._stepped(False) as processor:
            on_start()
            self._serve(processor, work, lambda _: None, after)
        return [item.came for item in work]

    def _work(self) -> list[Work]:
        ends = frozenset(text_ends(self.model))
        return [
            Work(
                n,
                request.id,
                prompt,
                request.max_tokens,
                request.arrival,
                frozenset() if request.ignore_stop else ends,
                None,
            )
            for n, (request, (prompt, _)) in enumerate(zip(self._scenario.requests, self._given, strict=True))
        ]

    def _serve(
        self,
        processor: Any,
        work: Sequence[Work],
        before: Callable[[list[Share]], None],
        after: Callable[[list[tuple[Work, int]]], bool],
    ) -> None:
        """All requests to their ends: ``before`` is told who has which rows in the next forward, ``after`` who was answered with
        which token; it says whether to go on. Raises EngineFailed where requests are left and no forward comes."""
        waiting, forward = by_arrival(work), 0
        # How many requests run at a time is for transformers to keep to.
        arriving = replace(self._scenario.schedule, active=None)
        while waiting or processor.has_pending_requests():
            busy = [item for item in work if item not in waiting and not item.finished]
            for item in admitted(
                waiting, busy if processor.has_pending_requests() else [], arriving, forward
            ):
                waiting.remove(item)
                processor.scheduler.add_waiting_request(_state(item))
            if not processor.prepare_next_batch():
                left = sum(not item.finished for item in work)
                raise EngineFailed(
                    f"transformers' continuous batching has no next forward, and {left} requests have not ended; expected one. "
                    "Ask for static:N, or tell its authors."
                )
            batch = [
                (work[int(each.state.request_id)], each)
                for each in processor.inputs_and_outputs.requests_in_batch
            ]
            before([_share(item, each) for item, each in batch])
            processor._generation_step(self.model)
            processor.update_batch()
            answered = []
            for item, each in batch:
                item.done += each.query_length
                if each.has_new_token:
                    item.generated.append(int(each.state.generated_tokens[-1]))
                    answered.append((item, item.generated[-1]))
            forward += 1
            if not after(answered):
                return

    @contextlib.contextmanager
    def _stepped(self, pin_kernels: bool) -> Iterator[Any]:
        """The processor of transformers' manager with empty pages; the model is as it was afterwards."""
        torch, model = self._torch, self.model
        attention = model.config._attn_implementation
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            # The processor seeds torch, which is nobody's business where nothing is drawn.
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.callback(_attend_as, model, attention)
            processor = self._processor()
            if pin_kernels:
                stack.enter_context(pinned(torch, model))
                runner = processor.model_runner
                stack.enter_context(replaced(runner, "_sample", _lowest(torch)))
            yield processor

    def _processor(self) -> Any:
        """Raises EngineRefuses where there is no room for the pages and what goes with them."""
        try:
            return self._manager()._create_batch_processor()
        except MemoryError as error:
            raise EngineRefuses(
                f"transformers' continuous batching has no room for {self.plan.requests} requests at a time and {self.plan.rows} rows a forward "
                f"({words_of(error)}); expected less than this machine has. Ask for fewer (continuous:N, row_budget=N)."
            ) from error

    def _manager(self) -> Any:
        plan, text = self.plan, self.model.config.get_text_config()
        longest = max(
            len(prompt) + request.max_tokens
            for request, (prompt, _) in zip(self._scenario.requests, self._given, strict=True)
        )
        kinds = import_module(f"{_HOME}.cache").group_layers_by_attn_type(text)
        config = import_module("transformers").ContinuousBatchingConfig(
            page_size=plan.page,
            num_blocks=plan.blocks(longest, [len(layers) for layers in kinds.values()]),
            max_batch_tokens=plan.rows,
            max_requests_per_batch=plan.requests,
            max_blocks_per_request=0,
            allow_block_sharing=False,
            use_async_batching=False,
            use_cuda_graph=False,
            # There is room for all that run at a time.
            safety_margin=0.0,
            auto_switch_to_flash=False,
            seed=0,
        )
        return import_module(_HOME).ContinuousBatchingManager(self.model, _greedy(self.model), config)


def refuse_paged(model: Any, scenario: Scenario) -> None:
    """Raises EngineRefuses for what continuous batching cannot be told, and for a model that it does not run."""
    cache = scenario.cache
    if scenario.task != GENERATE:
        raise EngineRefuses(
            f"task is {scenario.task} and schedule is continuous, and transformers' continuous batching generates alone. Ask for serial or static:N."
        )
    if cache.share_prefix:
        raise EngineRefuses(
            "share_prefix is true, and pages that transformers' continuous batching shares between requests are not told apart here; each "
            "request writes pages of its own. Leave it out."
        )
    if cache.page_tokens is not None and cache.page_tokens < LEAST_PAGE:
        raise EngineRefuses(
            f"page_tokens is {cache.page_tokens}, and transformers has pages of {LEAST_PAGE} positions at least. Give more, or leave it out: "
            f"{PAGE_TOKENS}."
        )
    attention = model.config._attn_implementation
    if attention not in _ATTENTION:
        raise EngineRefuses(
            f"attn_implementation is {attention!r}, and which entries a row sees in transformers' continuous batching is read from the mask that "
            "eager and sdpa are given. Set one of them."
        )
    try:
        cache_module = import_module(f"{_HOME}.cache")
        cache_module.group_layers_by_attn_type(model.config.get_text_config())
        processors = model._get_logits_processor(_greedy(model), input_ids_seq_length=1)
    except (ImportError, AttributeError, ValueError) as error:
        raise EngineRefuses(
            f"transformers {base.version('transformers')} has no continuous batching for {type(model).__name__} as it is driven here "
            f"({words_of(error)}); expected what its version 5.24 has. Ask for static:N."
        ) from error
    if processors:
        names = ", ".join(type(each).__name__ for each in processors)
        raise EngineRefuses(
            f"The model's generation_config asks for {names}, which continuous batching leaves out or applies otherwise than generate does; "
            "expected greedy decoding of plain logits. Take that out of generation_config, or ask for static:N."
        )


def _attend_as(model: Any, attention: str) -> None:
    if model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)


def _greedy(model: Any) -> Any:
    # Each request has an end of its own.
    return greedy(model, num_return_sequences=1, eos_token_id=-1)


def _state(item: Work) -> Any:
    """A request as transformers queues it."""
    return import_module(_HOME).RequestState(
        request_id=str(item.index),
        initial_tokens=list(item.prompt),
        max_new_tokens=item.max_tokens,
        eos_token_id=sorted(item.stop),
    )


def _share(item: Work, scheduled: Any) -> Share:
    """The rows that a request should have in a forward, as it stands. Raises EngineFailed where transformers began it anew."""
    if len(scheduled.state.initial_tokens) != len(item.prompt):
        raise EngineFailed(
            f"transformers began request {item.id!r} anew, as if there were no room for its pages; expected none of that. Give pages of fewer "
            "positions (page_tokens), or ask for static:N."
        )
    count = scheduled.query_length
    tokens = (*item.prompt, *item.generated)[item.done : item.done + count]
    phase = "decode" if item.decoding else "prefill"
    return Share(item, item.done, tokens, int(scheduled.has_new_token), phase)


def _lowest(torch: Any) -> Callable[[Any, Any], None]:
    """Of equal logits [1, rows, vocabulary] the lowest id, whatever torch's argmax takes among so many rows."""

    def sample(scores: Any, output_ids: Any) -> None:
        best = scores[0] == scores[0].amax(dim=-1, keepdim=True)
        ids = torch.arange(best.shape[-1], device=best.device).expand_as(best)
        found = ids.masked_fill(~best, best.shape[-1]).amin(dim=-1)
        output_ids[0, : len(found)].copy_(found)

    return sample
