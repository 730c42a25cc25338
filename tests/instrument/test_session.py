"""Taps come off again: after an exception, nested, and used twice; and nothing else is touched while they are on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch
from mlx_lm.models import base, switch_layers
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray
from runs import Runs, bits, model, patched, scenario
from tiny import tiny

from detdiff.engines.mlx.engine import generate
from detdiff.engines.mlx.taps.forward import Forward, Segment
from detdiff.engines.mlx.taps.kernel_plan import TakenPath
from detdiff.engines.mlx.taps.session import Session
from detdiff.engines.mlx.taps.sites import Arrays
from detdiff.engines.mlx.taps.tapping import cache_classes, model_modules

STEPS = ((3, 1, 4, 1, 5), (9,), (2,))


def installed(of: Any) -> list[Any]:
    """Everything that taps replace, as objects."""
    found: list[Any] = [type(module) for _, module in of.named_modules()]
    found += [vars(owner).get("scaled_dot_product_attention") for owner in (base, *model_modules(of))]
    found += [vars(cls)["update_and_fetch"] for cls in cache_classes()]
    found += [switch_layers._gather_sort, PromptProcessingBatch.prompt, GenerationBatch._step]
    return found


def unchanged(before: list[Any], of: Any) -> bool:
    after = installed(of)
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


class Keep:
    """A recording that keeps the bits of all that it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.logits: list[NDArray[Any]] = []

    def begin(self, forward: Forward, cache: Sequence[Any]) -> None:
        self.seen.append(("begin", forward.index))

    def site(self, key: str, kind: str, inputs: Arrays, outputs: Arrays, parent: str | None) -> None:
        ports = [(name, bits(array).tobytes()) for name, array in (*inputs, *outputs)]
        self.seen.append((key, kind, parent, ports))

    def call(self, key: str, taken: TakenPath) -> None:
        self.seen.append((key, *taken))

    def cache_call(self, key: str, keys: mx.array, values: mx.array, calls: Any) -> None:
        self.seen.append((key, bits(keys).tobytes(), bits(values).tobytes()))

    def attended(self, key: str, layer: int | None, keys: Any, mask: Any) -> None:
        self.seen.append((layer, mask))

    def block_done(self, key: str) -> None:
        self.seen.append((key, "done"))

    def end(self, forward: Forward, logits: mx.array) -> None:
        self.logits.append(bits(logits))


def composer() -> Any:
    forwards: Iterator[int] = iter(range(100))
    done = [0]

    def compose(inputs: mx.array, cache: Any) -> Forward:
        slots, columns = inputs.shape
        segment = Segment(0, 0, done[0], columns, "prefill")
        done[0] += columns
        return Forward(next(forwards), "padded", (slots, columns), (segment,), inputs)

    return compose


def drive(of: Any) -> list[NDArray[Any]]:
    cache = make_prompt_cache(of)
    return [bits(of(mx.array([list(tokens)]), cache=cache)) for tokens in STEPS]


def same(a: list[NDArray[Any]], b: list[NDArray[Any]]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


ARCHS = ("llama", "qwen3_moe", "gemma3_text", "qwen3_next")


@pytest.mark.parametrize("arch", ARCHS)
def test_taps_are_on_inside_and_off_after(arch: str) -> None:
    of = model(arch).model
    before, plain = installed(of), drive(of)
    session = Session(of)
    assert unchanged(before, of)
    keep = Keep()
    with session.running(keep):
        session.compose = composer()
        assert not unchanged(before, of)
        # The subclasses keep the names that mlx-lm looks at.
        assert [type(m).__name__ for _, m in of.named_modules()] == [
            cls.__name__ for cls in before[: len(list(of.named_modules()))]
        ]
        assert same(drive(of), plain)
    assert unchanged(before, of)
    assert same(keep.logits, plain)
    assert same(drive(of), plain)
    # The same session again, and then a second one: both see what the first saw.
    for again in (session, Session(of)):
        second = Keep()
        with again.running(second):
            again.compose = composer()
            drive(of)
        assert second.seen == keep.seen
    assert unchanged(before, of)


@pytest.mark.parametrize("arch", ARCHS)
def test_nested_sessions_both_record_the_same(arch: str) -> None:
    of = model(arch).model
    before, plain = installed(of), drive(of)
    outer, inner = Session(of), Session(of)
    alone, first, second, late = Keep(), Keep(), Keep(), Keep()
    with outer.running(alone):
        outer.compose = composer()
        drive(of)
    with outer.running(first):
        outer.compose = composer()
        with inner.running(second):
            inner.compose = composer()
            assert same(drive(of), plain)
        between = installed(of)
        drive(of)
    with inner.running(late):
        inner.compose = composer()
        drive(of)
    assert not unchanged(between, of) and unchanged(before, of)
    assert second.seen == alone.seen == late.seen
    assert first.seen[: len(alone.seen)] == alone.seen
    assert len(first.seen) == 2 * len(alone.seen)


def test_a_session_is_entered_once_at_a_time() -> None:
    of = model("llama").model
    before = installed(of)
    session = Session(of)
    with session.running(None):
        with pytest.raises(RuntimeError, match="already entered"):
            with session.running(None):
                pass
        assert not unchanged(before, of)
    assert unchanged(before, of)
    with session.running(None):
        pass
    assert unchanged(before, of)


def test_leaving_in_another_order_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    of = tiny("llama").model
    before = installed(of)
    # What the misuse leaves behind is put back when the test ends.
    for cls in cache_classes():
        monkeypatch.setattr(cls, "update_and_fetch", vars(cls)["update_and_fetch"])
    for owner in (base, *model_modules(of)):
        if "scaled_dot_product_attention" in vars(owner):
            monkeypatch.setattr(owner, "scaled_dot_product_attention", owner.scaled_dot_product_attention)
    monkeypatch.setattr(switch_layers, "_gather_sort", switch_layers._gather_sort)
    first, second = Session(of).running(Keep()), Session(of).running(Keep())
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="another order"):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    monkeypatch.undo()
    shared = len(before) - len(list(of.named_modules()))
    assert installed(of)[-shared:] == before[-shared:]


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt, TypeError])
@pytest.mark.parametrize(
    "where", ["layers.1.mlp", "layers.0.self_attn.q_proj", "embed_tokens", "cache", "attention"]
)
def test_an_exception_inside_a_forward_undoes_everything(error: type[BaseException], where: str) -> None:
    of = tiny("llama").model
    before, plain = installed(of), drive(of)
    session = Session(of)

    def fail(*_: Any, **__: Any) -> Any:
        raise error("injected")

    undo = _sabotage(of, where, fail)
    broken = installed(of)
    with pytest.raises(error, match="injected"):
        with session.running(Keep()):
            session.compose = composer()
            drive(of)
    assert unchanged(broken, of)
    undo()
    assert unchanged(before, of)
    keep = Keep()
    with session.running(keep):
        session.compose = composer()
        assert same(drive(of), plain)
    assert session.forward is None and len(keep.logits) == len(STEPS)
    assert unchanged(before, of)


def _sabotage(of: Any, where: str, fail: Any) -> Any:
    if where == "cache":
        return patched(cache_classes()[2], "update_and_fetch", fail)
    if where == "attention":
        (owner,) = [m for m in model_modules(of) if "scaled_dot_product_attention" in vars(m)]
        return patched(owner, "scaled_dot_product_attention", fail)
    module = dict(of.named_modules())[f"model.{where}"]
    original = type(module)
    module.__class__ = type(original.__name__, (original,), {"__call__": fail})

    def undo() -> None:
        module.__class__ = original

    return undo


@pytest.mark.parametrize("schedule", ["serial", "continuous"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_an_engine_that_is_interrupted_leaves_nothing_behind(runs: Runs, schedule: str, layout: str) -> None:
    of = tiny("llama")
    before = installed(of.model)
    count = [0]

    def stop(*_: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(scenario(schedule, layout), loaded=of, on_logits=stop)
    assert unchanged(before, of.model)


def test_another_model_of_the_same_classes_is_untouched() -> None:
    mine, other = tiny("llama", seed=1).model, tiny("llama", seed=2).model
    plain = drive(other)
    classes = [type(module) for _, module in other.named_modules()]
    session, keep = Session(mine), Keep()
    with session.running(keep):
        session.compose = composer()
        assert [type(module) for _, module in other.named_modules()] == classes
        assert same(drive(other), plain)
        assert keep.seen == [] and keep.logits == []
        drive(mine)
        seen = list(keep.seen)
        assert same(drive(other), plain)
        assert keep.seen == seen and len(seen) > 0


@pytest.mark.parametrize("arch", [*ARCHS, "mamba2", "phi3"])
def test_discovery_leaves_no_trace(arch: str) -> None:
    of = model(arch).model
    before, plain = installed(of), drive(of)
    mx.random.seed(11)
    np.random.seed(11)
    expected = [mx.random.uniform(shape=(4,)).tolist(), np.random.random(4).tolist()]
    mx.random.seed(11)
    np.random.seed(11)
    first = Session(of).sites
    assert [mx.random.uniform(shape=(4,)).tolist(), np.random.random(4).tolist()] == expected
    assert unchanged(before, of)
    assert same(drive(of), plain)
    assert Session(of).sites == first
