"""Why draws are not what their requests ask for: what is of other requests, left out or padded, tried one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import mlx.core as mx

from detdiff.explain.case import Case, Side
from detdiff.explain.controls.choices import RunChoices, WrongChoice
from detdiff.scenario import Sampling

from .choices import ONE_SEED, SEED_ZERO, Draw, Owner, RunDraws, Tokens
from .sampling import Processor, Sampler, TokenDraw, processors

PADDED_TO: Final = (8, 32, 64, 128, 256)
"""Multiples that kernels pad a vocabulary to."""


@dataclass(frozen=True)
class _OtherProcessing:
    """Processors other than a request's own, or other tokens for them: ``cause`` in words, and what they make of a draw."""

    tried: str
    cause: str
    expected: Callable[[Draw], mx.array]


@dataclass(frozen=True)
class _OtherDraw:
    """Another way to draw: ``cause`` in words, and the tokens."""

    tried: str
    cause: str
    tokens: Callable[[], Tokens]


def run_choices(case: Case, side: Side, until: Mapping[str, int]) -> RunChoices:
    """Compute the draws of a side anew, as far as the tokens ``until``. Raises CannotRun."""
    drawn = RunDraws.of(case, side, until)
    given = [draw for draw in drawn.known if not drawn.was_given(draw, drawn.given(draw))]
    uncached = _mlx_lms_way(drawn, given)
    given = [] if uncached else given
    chosen = drawn.unlike(drawn.chosen(drawn.samplers()))
    states = {
        (drawn.work[draw.request].id, draw.index): drawn.states[draw.place]
        for draw in drawn.known
        if draw.place in drawn.states
    }
    first = min((*given, *chosen), key=lambda draw: draw.place, default=None)
    if first is None:
        return RunChoices(len(drawn.known), states, None, uncached)
    tried, causes = _processors_tried(drawn, given) if first in given else _draws_tried(drawn, chosen)
    wrong = WrongChoice(
        side,
        drawn.work[first.request].id,
        first.index,
        "processors" if first in given else "draw",
        first.token or 0,
        causes[0] if causes else "",
        len(drawn.known),
        tuple(dict.fromkeys(tried)),
        tuple(dict.fromkeys(each for each in causes[1:] if each != causes[0])),
    )
    return RunChoices(len(drawn.known), states, wrong)


def _mlx_lms_way(drawn: RunDraws, wrong: Sequence[Draw]) -> tuple[str, ...]:
    """The requests whose processors were not given what came from a cache, where that explains every draw and the run is one of
    ``generate_step``, which gives them what it is fed itself: mlx-lm's batches are told of the tokens before."""
    schedule = drawn.scenario.schedule
    if schedule.layout == "packed" or schedule.kind != "serial":
        return ()
    expected = partial(_of_tokens, drawn, partial(_uncached, drawn))
    if not all(drawn.was_given(draw, expected(draw)) for draw in (*wrong[:4], *drawn.known)):
        return ()
    return tuple(dict.fromkeys(drawn.work[draw.request].id for draw in wrong))


def _processors_tried(drawn: RunDraws, wrong: Sequence[Draw]) -> tuple[list[str], list[str]]:
    tried, causes = [], []
    for each in _other_processing(drawn, wrong):
        tried.append(each.tried)
        # Those that are wrong fail first.
        if all(drawn.was_given(draw, each.expected(draw)) for draw in (*wrong[:4], *drawn.known)):
            causes.append(each.cause)
    return tried, causes


def _other_processing(drawn: RunDraws, wrong: Sequence[Draw]) -> Iterator[_OtherProcessing]:
    def without(draw: Draw) -> mx.array:
        return drawn.given(draw, ())

    yield _OtherProcessing("no processors", "no logits processor was run", without)
    for words, owner in drawn.others(wrong):
        buffers = drawn.buffered(owner)
        for what, expected in (
            ("tokens", partial(_with, drawn, None, owner)),
            ("buffer of tokens", partial(_of_buffer, drawn, buffers)),
            ("logit bias", partial(_with_bias, drawn, owner)),
            ("processors", partial(_with, drawn, owner, None)),
            ("processors and tokens", partial(_with, drawn, owner, owner)),
        ):
            yield _OtherProcessing(f"the {what} {words}", f"it was given the {what} {words}", expected)
    for what, tokens in (
        ("the answer alone", partial(_answer, drawn)),
        ("the prompt alone", partial(_prompt, drawn)),
        ("no tokens that came from a cache", partial(_uncached, drawn)),
        ("the tokens of all requests in one list", partial(_together, drawn)),
    ):
        cause = f"its processors were given {what}"
        yield _OtherProcessing(what, cause, partial(_of_tokens, drawn, tokens))


def _with(drawn: RunDraws, settings: Owner | None, tokens: Owner | None, draw: Draw) -> mx.array:
    run = None if settings is None else processors(drawn.sampling[settings(draw)])
    return drawn.given(draw, run, None if tokens is None else drawn.tokens(draw, tokens(draw)))


def _with_bias(drawn: RunDraws, owner: Owner, draw: Draw) -> mx.array:
    mine, other = drawn.sampling[draw.request], drawn.sampling[owner(draw)]
    run: tuple[Processor, ...] = processors(replace(mine, logit_bias=other.logit_bias))
    return drawn.given(draw, run)


def _of_tokens(drawn: RunDraws, tokens: Callable[[Draw], list[int]], draw: Draw) -> mx.array:
    return drawn.given(draw, None, tokens(draw))


def _of_buffer(drawn: RunDraws, buffers: Mapping[int, list[int]], draw: Draw) -> mx.array:
    return drawn.given(draw, None, buffers[draw.place])


def _answer(drawn: RunDraws, draw: Draw) -> list[int]:
    return drawn.tokens(draw, draw.request)[len(drawn.work[draw.request].prompt) :]


def _prompt(drawn: RunDraws, draw: Draw) -> list[int]:
    return list(drawn.work[draw.request].prompt)


def _uncached(drawn: RunDraws, draw: Draw) -> list[int]:
    item = drawn.work[draw.request]
    reused = min(drawn.scenario.cache.reuse_tokens or 0, len(item.prompt) - 1)
    taken = max(reused, drawn.kept.get(item.index, 0))
    return drawn.tokens(draw, draw.request)[taken:]


def _together(drawn: RunDraws, draw: Draw) -> list[int]:
    """All tokens that the run knew, in the order in which they came: one history for everybody."""
    live = dict.fromkeys(d.request for d in drawn.draws if d.forward <= draw.forward)
    found = [token for request in live for token in drawn.work[request].prompt]
    return found + [d.token for d in drawn.draws if d.forward < draw.forward and d.token is not None]


def _draws_tried(drawn: RunDraws, wrong: Sequence[Draw]) -> tuple[list[str], list[str]]:
    tried, causes = [], []
    for each in _other_draws(drawn, wrong):
        tried.append(each.tried)
        if not drawn.unlike(each.tokens()):
            causes.append(each.cause)
    return tried, causes


def _other_draws(drawn: RunDraws, wrong: Sequence[Draw]) -> Iterator[_OtherDraw]:
    others = [
        _OtherDraw(
            f"the sampler {words}", f"it was given the sampler {words}", partial(_of_owner, drawn, owner)
        )
        for words, owner in drawn.others(wrong)
    ]
    # What is of one request throughout is hard to tell from what all share, where they ask for the same.
    yield from (each for each in others if "list" in each.cause)
    if any(drawn.from_state(draw.request) for draw in wrong):
        yield from _other_states(drawn)
    else:
        yield from _other_keys(drawn, wrong)
    yield from (each for each in others if "list" not in each.cause)
    yield from _other_filters(drawn)


def _of_owner(drawn: RunDraws, owner: Owner) -> Tokens:
    return drawn.chosen(drawn.samplers(), owner)


def _other_states(drawn: RunDraws) -> Iterator[_OtherDraw]:
    for seeds, cause in (
        (ONE_SEED, "its seed was ignored: it drew on from the random state that the request before it left"),
        (SEED_ZERO, "its seed was ignored: it drew with the seed 0"),
    ):
        yield _OtherDraw(f"the random state seeded {seeds}", cause, partial(_seeded, drawn, seeds))


def _seeded(drawn: RunDraws, seeds: str) -> Tokens:
    return drawn.chosen(drawn.samplers(), seeds=seeds)


def _other_keys(drawn: RunDraws, wrong: Sequence[Draw]) -> Iterator[_OtherDraw]:
    cause = "its generator is shared with other requests, which draw from it in between"
    yield _OtherDraw("one generator for all", cause, partial(_one_generator, drawn))
    cause = "its generator is shared with other requests, for all of which one draw is made"
    yield _OtherDraw("one draw for all", cause, partial(_one_draw, drawn))
    seeds = {item.id: drawn.sampling[item.index].seed for item in drawn.work}
    for request in dict.fromkeys(draw.request for draw in wrong):
        mine = drawn.sampling[request].seed
        for whose, seed in (*seeds.items(), ("nobody", 0)):
            if seed != mine:
                words = f"the seed {seed}" + (f" of {whose}" if whose in seeds else "")
                cause = f"its seed {mine} was ignored: it drew with {words}"
                yield _OtherDraw(words, cause, partial(_with_seed, drawn, request, seed))
    if any(seeds.values()):
        cause = "the seeds were ignored: every request drew with the seed 0"
        yield _OtherDraw("the seed 0 for all", cause, partial(_with_seed, drawn, None, 0))


def _with_seed(drawn: RunDraws, request: int | None, seed: int) -> Tokens:
    def make(number: int) -> Sampler:
        return drawn.sampler(number, seed=seed) if request in (None, number) else drawn.sampler(number)

    return drawn.chosen(drawn.samplers(make))


def _one_generator(drawn: RunDraws) -> Tokens:
    """Every draw takes the next key of the generator that the first request has."""
    seed, count = drawn.sampling[drawn.draws[0].request].seed, 0

    def make(number: int) -> Sampler:
        draw = drawn.sampler(number, seed=seed)

        def call(logprobs: mx.array) -> mx.array:
            nonlocal count
            if isinstance(draw, TokenDraw):
                draw.index = count
                count += 1
            return draw(logprobs)

        return call

    return drawn.chosen(drawn.samplers(make))


def _one_draw(drawn: RunDraws) -> Tokens:
    """One draw of the first request's sampler for all requests of a forward, as mlx-lm makes it where all have the same object."""
    made, found = drawn.sampler(drawn.draws[0].request), {}
    forwards: dict[int, list[Draw]] = {}
    for draw in drawn.draws:
        forwards.setdefault(draw.forward, []).append(draw)
    for draws in forwards.values():
        given = [drawn.given(draw) if draw.logprobs is None else draw.logprobs for draw in draws]
        tokens = made(mx.concatenate(given, axis=0))
        found.update({draw.place: tokens[row : row + 1] for row, draw in enumerate(draws)})
    return found


def _other_filters(drawn: RunDraws) -> Iterator[_OtherDraw]:
    plain = Sampling(temperature=1.0)
    for name in ("top_k", "top_p", "min_p", "temperature"):
        if any(each.draws and getattr(each, name) != getattr(plain, name) for each in drawn.sampling):
            yield _OtherDraw(f"no {name}", f"it was drawn without {name}", partial(_without, drawn, name))
    if all(each.top_k is None or not each.draws for each in drawn.sampling):
        return
    size = int(drawn.draws[0].logits.shape[-1])
    for more in sorted({-size % multiple for multiple in PADDED_TO} - {0}):
        cause = f"top_k was taken on a vocabulary that is padded from {size} to {size + more} ids, and padding took places of tokens"
        for cut in (True, False):
            how = "cut off before the draw" if cut else "kept in the draw"
            tokens = partial(_on_padded, drawn, more, cut)
            yield _OtherDraw(f"top_k on {size + more} ids, {how}", cause, tokens)


def _without(drawn: RunDraws, name: str) -> Tokens:
    plain = Sampling(temperature=1.0)
    changes = {name: getattr(plain, name), **({"min_tokens_to_keep": 1} if name == "min_p" else {})}

    def make(number: int) -> Sampler:
        return drawn.sampler(number, **changes) if drawn.sampling[number].draws else drawn.sampler(number)

    return drawn.chosen(drawn.samplers(make))


def _on_padded(drawn: RunDraws, more: int, cut: bool) -> Tokens:
    """``top_k`` looks at ``more`` ids of logit 0 beyond the vocabulary, which may be cut off before the draw."""

    def make(number: int) -> Sampler:
        asked = drawn.sampling[number]
        keep = asked.top_k if asked.draws else None
        if keep is None:
            return drawn.sampler(number)
        native = drawn.sampler(number, **({"top_k": None} if cut else {}))

        def call(logprobs: mx.array) -> mx.array:
            size = logprobs.shape[-1]
            wide = mx.concatenate([logprobs, mx.zeros((1, more), logprobs.dtype)], axis=-1)
            if not cut:
                return native(wide)
            left = mx.argpartition(-wide, kth=keep - 1, axis=-1)[..., keep:]
            wide = mx.put_along_axis(wide, left, mx.array(-float("inf"), wide.dtype), axis=-1)
            return native(wide[..., :size])

        return call

    return drawn.chosen(drawn.samplers(make))
