"""`detdiff.invariant` on mlx models: what it pins holds in random compositions, injected faults are found, all is undone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tiers import FULL, only_in_full, some_now
from tiny import VOCAB, tiny

import detdiff
from detdiff.engines.mlx.model import LoadedModel
from detdiff.errors import EngineUnusable, KernelsNotPinned, PolicyUnusable
from detdiff.invariance import sampled
from detdiff.invariance.arrangements import AttentionHeads, differing_row
from detdiff.invariance.policies import EACH, SIZES, RowPolicy, cheapest, named
from detdiff.scenario import KernelPlan
from detdiff_kernels.rounding import rounded

PROFILES = ("candle-metal", "mlx-metal", "ggml-cuda", "flash-split-kv")
CASES = [
    (arch, fmt, profile)
    for arch, fmt in (("llama", "q4"), ("qwen3_moe", "f32"), ("gemma3_text", "bf16"))
    for profile in PROFILES
]
COMPOSITIONS = 200 if FULL else 6
# Six compositions of these two have no origin of their own: what could show it is not packed without pins.
DIFFERING = [
    case
    for case in CASES
    if case not in (("llama", "q4", "candle-metal"), ("gemma3_text", "bf16", "flash-split-kv"))
]


def held(model: Any, **settings: Any) -> Any:
    """What is pinned of a model, without a price."""
    with detdiff.invariant(model, **{"price": (), "compositions": COMPOSITIONS, **settings}) as found:
        return found


@pytest.mark.parametrize("name", ["rows", "pad:2", "pad:16", "tile:8", "tile:3", "split_rows:4", "native"])
def test_a_policy_makes_the_calls_that_its_rules_make(name: str) -> None:
    policy = named(name, SIZES)
    assert str(policy) == (name if name != "pad:16" else "tile:16")
    plan = KernelPlan(rules=tuple(policy.rules("*")))
    for rows in (*range(1, 34), 63, 64, 65, 100):
        calls = list(policy.calls(rows))
        assert sum(taken for taken, _ in calls) == rows
        assert {size for _, size in calls} <= policy.sizes
        rule = next(each for each in plan.rules if each.holds(rows))
        kind, _, size = rule.path.partition(":")
        assert int(size) == calls[0][1] and kind == ("cut" if rows >= EACH and policy.large else "tile")


def test_the_cheapest_policy_leaves_out_what_does_not_agree() -> None:
    whole = frozenset(SIZES)
    assert str(cheapest([whole], None)) == "native"
    assert str(cheapest([frozenset({1}), whole - {1}], None)) == "pad:2"
    assert str(cheapest([frozenset({1})], None)) == "rows"
    # Row by row costs no more than SAME times what is cheapest: then a row is as it is alone.
    assert str(cheapest([frozenset({1}), whole - {1}], {size: 0.1 * size for size in SIZES})) == "rows"
    gap = cheapest([whole - {13}], None)
    assert gap is not None and gap.tiles[12] == 14 and 13 not in gap.sizes
    assert cheapest([], None) is None


@pytest.mark.parametrize("name", ["fast", "pad:", "pad:0", "tile:9999", ""])
def test_a_policy_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(PolicyUnusable, match="expected auto"):
        held(tiny("llama"), policy=name)


@pytest.mark.parametrize(
    "given", [{"policy": None}, {"compositions": -1}, {"price": (0,)}, {"price": 4}, {"seed": "x"}]
)
def test_numbers_that_are_none_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(PolicyUnusable, match="expected a"):
        held(tiny("llama"), **given)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(EngineUnusable, match="cannot be pinned"):
        held(object())


@pytest.mark.parametrize(("arch", "fmt", "profile"), some_now(CASES, 5, ci=(0, 7, 9)))
def test_compositions_under_profiles(arch: str, fmt: str, profile: str) -> None:
    found = held(tiny(arch, fmt), kernels=profile)
    assert found.checked.count == COMPOSITIONS and found.checked.values > 1000
    assert found.plan.profile == profile and found.plan.rules
    assert found.price == () and "emulated" in found.not_priced


@pytest.mark.parametrize(("arch", "fmt", "profile"), some_now(DIFFERING, 0, ci=(2, 4, 6, 8)))
def test_without_pins_the_same_compositions_differ(arch: str, fmt: str, profile: str) -> None:
    from detdiff.engines.mlx.engine import MlxEngine
    from detdiff.invariance.compositions import check

    engine = MlxEngine(tiny(arch, fmt))
    with (
        engine.pinning(KernelPlan(profile=profile)).pinned({}),
        pytest.raises(
            KernelsNotPinned, match=r"in composition \d+ of seed 0 .*: first at site [\w.]+, request r\d"
        ),
    ):
        check(engine, 6, 0)


@pytest.mark.parametrize("arch", some_now(["llama", "gemma3_text", "qwen3_moe"], 0))
def test_native_mlx_is_priced_and_printed(arch: str) -> None:
    with detdiff.invariant(tiny(arch).model, price=(1, 4), compositions=2) as found:
        assert [each.batch for each in found.price] == [1, 4] and found.not_priced == ""
        assert all(each.low <= each.ratio <= each.high for each in found.price)
        text = str(found)
    assert "price of a decode step at batch 4" in text and "2 random compositions" in text


@pytest.fixture
def few_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of what is tried at each shape: for tests of what comes after it."""
    monkeypatch.setattr(sampled, "OUTPUTS", sampled.OUTPUTS // 10)


class Mixing(nn.RMSNorm):
    """A norm over all rows of a call."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) * (1 + x.mean() * 1e-3)


class OddRows(nn.RMSNorm):
    """A norm whose bits are others in a call of 13 rows."""

    def __call__(self, x: mx.array) -> mx.array:
        y = super().__call__(x)
        return y * (1 + 2**-20) if x.size // x.shape[-1] == 13 else y


class ThirdRow(nn.RMSNorm):
    """A norm that computes the third row of a call otherwise."""

    def __call__(self, x: mx.array) -> mx.array:
        y = super().__call__(x).reshape(1, -1, x.shape[-1])
        moved = mx.arange(y.shape[1])[None, :, None] == 2
        return mx.where(moved, y * (1 + 2**-20), y).reshape(x.shape)


def with_norm(kind: type) -> LoadedModel:
    loaded = tiny("llama", seed=7)
    loaded.model.layers[1].post_attention_layernorm.__class__ = kind
    return replace(loaded, staged={}, apart=set())


@pytest.mark.usefixtures("few_outputs")
@pytest.mark.parametrize("kind", [Mixing, OddRows, ThirdRow])
def test_what_no_policy_reaches_is_found_and_named(kind: type) -> None:
    with pytest.raises(KernelsNotPinned) as refused:
        held(with_norm(kind), compositions=40)
    assert "first at site layers.1.post_attention_layernorm, request r" in str(refused.value)
    assert "schedule=" in str(refused.value) and "tokens" in str(refused.value)


class OddLinear(nn.Linear):
    """A linear layer whose bits are others in a call of 13 rows, and from three rows on at the third."""

    def __call__(self, x: mx.array) -> mx.array:
        y = super().__call__(x)
        rows = x.size // x.shape[-1]
        if rows == 13:
            return y * (1 + 2**-20)
        flat = y.reshape(1, -1, y.shape[-1])
        moved = mx.arange(rows)[None, :, None] == 2
        return mx.where(moved, flat * (1 + 2**-20), flat).reshape(y.shape) if rows < 5 else y


@pytest.mark.thorough
@pytest.mark.usefixtures("few_outputs")
def test_a_kernel_with_odd_numbers_of_rows_is_gone_around() -> None:
    """The same kind of fault where a policy reaches it: the sizes that agree leave 3, 4 and 13 out."""
    loaded = tiny("llama", seed=8)
    loaded.model.layers[0].mlp.down_proj.__class__ = OddLinear
    found = held(loaded, compositions=8)
    (odd,) = [each for each in found.pinned if "layers.0.mlp.down_proj" in each.group.sites]
    assert odd.sizes and not {3, 4, 13} & set(odd.policy.sizes)
    with pytest.raises(KernelsNotPinned, match=r"pad:2 does not make .*layers\.0\.mlp\.down_proj"):
        held(loaded, policy="pad:2")
    assert str(held(loaded, policy="rows").pinned[0].policy) == "rows"


class RareLinear(nn.Linear):
    """A linear layer that computes one of ``rate`` outputs otherwise where a call has more than one row, whichever have such bits."""

    rate = 1

    def __call__(self, x: mx.array) -> mx.array:
        y = super().__call__(x)
        hit = y.view(mx.uint32) * 2654435761 < (1 << 32) // self.rate
        return mx.where(hit, y * (1 + 2**-20), y) if x.size > x.shape[-1] else y


class FlushingLinear(nn.Linear):
    """A linear layer that flushes what is below the normal numbers to zero where a call has more than one row."""

    def __call__(self, x: mx.array) -> mx.array:
        y = super().__call__(x)
        return mx.where(mx.abs(y) < 2.0**-126, 0, y) if x.size > x.shape[-1] else y


@pytest.mark.parametrize(
    ("kind", "rate", "seen"),
    some_now([(RareLinear, 2_000, True), (FlushingLinear, 1, True), (RareLinear, 10**7, False)], 0),
)
def test_rare_outputs_are_seen_or_it_is_said_how_rare(kind: type, rate: int, seen: bool) -> None:
    loaded = tiny("llama", seed=9)
    loaded.model.layers[0].mlp.down_proj.__class__ = type(kind.__name__, (kind,), {"rate": rate})
    found = held(loaded, compositions=0)
    (group,) = [each for each in found.pinned if "layers.0.mlp.down_proj" in each.group.sites]
    assert (group.sizes[:1] == (frozenset({1}),)) == seen
    assert group.rarest * 3 >= 20_000 and (rate < group.rarest) == seen
    rarest = min(each.rarest for each in found.pinned if each.rarest)
    assert f"less than one of {rarest:,} outputs" in str(found)


def summed(backwards: bool, q: Any, k: Any, v: Any, seen: Any) -> Any:
    """Attention in float32, rounded to bfloat16, whose sums over keys run backwards where a call has slots with padding, if they are to."""
    slots, heads, rows, width = q.shape
    seen = np.ones((slots, 1, rows, k.shape[2]), bool) if seen is None else seen
    turned = backwards and not seen[:, :, -1].all()
    scores = np.einsum("shrw,shkw->shrk", q, k) / np.float32(width**0.5)
    made = np.zeros((slots, rows, heads, v.shape[3]), np.float32)
    with np.errstate(all="ignore"):  # a row of padding sees nothing
        for slot, head, row in np.ndindex(slots, heads, rows):
            at = np.flatnonzero(seen[slot, 0, row])[:: -1 if turned else 1]
            if len(at):
                p = np.exp(scores[slot, head, row, at] - scores[slot, head, row, at].max())
                terms = p[:, None] / p[::1].sum() * v[slot, head, at]
                made[slot, row, head] = np.cumsum(terms, axis=0, dtype=np.float32)[-1]
    return rounded(made, "bfloat16")


@pytest.mark.parametrize("backwards", [True, False])
def test_another_order_of_keys_is_seen_through_bfloat16(backwards: bool) -> None:
    found = differing_row(partial(summed, backwards), AttentionHeads(2, 2, 8, 8), 0)
    assert ("is another than alone" in found) == backwards, found


class Served:
    """How many slots the forward that is running has, which a planted fault looks at and a probe of one layer does not see."""

    slots = 1


def planted(arch: str, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    loaded = tiny(arch, seed=11)
    model = type(loaded.model)

    def forward(self: Any, inputs: mx.array, *args: Any, **kw: Any) -> mx.array:
        monkeypatch.setattr(Served, "slots", inputs.shape[0])
        return model.__call__(self, inputs, *args, **kw)

    loaded.model.__class__ = type(
        model.__name__, (model,), {"__call__": forward, "__module__": model.__module__}
    )
    return replace(loaded, staged={}, apart=set())


def moved(y: mx.array, wrong: bool) -> mx.array:
    return y * (1 + 2**-20) if wrong else y


PLACES = {
    "linear": "layers.1.self_attn.o_proj",
    "attention": "layers.0.self_attn.attention",
    "switch": "layers.1.mlp.switch_mlp.down_proj",
}


def plant(where: str, loaded: LoadedModel, reached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that depends on the layer's own call, which a policy changes (``reached``), in all layers, as a kernel's is; else one
    on who is served, which none does."""
    from mlx_lm.models import qwen3_moe

    if where == "attention":
        attend = qwen3_moe.scaled_dot_product_attention

        def wrong(queries: mx.array, *args: Any, **kw: Any) -> mx.array:
            return moved(attend(queries, *args, **kw), (queries.shape[0] if reached else Served.slots) > 1)

        monkeypatch.setattr(qwen3_moe, "scaled_dot_product_attention", wrong)
        return
    module = dict(loaded.model.named_modules())[f"model.{PLACES[where]}"]
    kind = type(module)

    def call(self: Any, x: mx.array, *args: Any, **kw: Any) -> mx.array:
        rows = x.size // x.shape[-1]
        return moved(kind.__call__(self, x, *args, **kw), rows > 8 if reached else Served.slots > 1)

    other = type(kind.__name__, (kind,), {"__call__": call})
    for each in loaded.model.modules() if reached else [module]:
        if type(each) is kind:
            each.__class__ = other


@pytest.mark.usefixtures("few_outputs")
@pytest.mark.thorough
def test_planted_kernels_are_gone_around(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = planted("qwen3_moe", monkeypatch)
    for where in PLACES:
        plant(where, loaded, True, monkeypatch)
    found = held(loaded, compositions=4)
    for where in PLACES:
        assert {str(each.policy) for each in found.pinned if each.group.kind == where} - {"native"}, where


@pytest.mark.usefixtures("few_outputs")
@pytest.mark.parametrize("where", some_now(PLACES, 1))
def test_a_planted_composition_is_found(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = planted("qwen3_moe", monkeypatch)
    plant(where, loaded, False, monkeypatch)
    with pytest.raises(KernelsNotPinned, match=f"in composition .* first at site {PLACES[where]}, request r"):
        held(loaded, compositions=8)


@pytest.mark.usefixtures("few_outputs")
def test_everything_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models import llama

    loaded = tiny("llama", "q4")
    classes = [type(module) for module in loaded.model.modules()]
    attention = llama.scaled_dot_product_attention
    x = mx.array([[1, 2, 3]])
    before = np.array(loaded.model(x))
    with (
        pytest.raises(ZeroDivisionError),
        detdiff.invariant(loaded.model, "rows", price=(), compositions=0),
        detdiff.invariant(loaded.model, kernels="mlx-metal", price=(), compositions=0) as inner,
    ):
        assert "not checked" in str(inner)
        assert not np.array_equal(np.array(loaded.model(x)), before)
        raise ZeroDivisionError
    assert [type(module) for module in loaded.model.modules()] == classes
    assert llama.scaled_dot_product_attention is attention
    assert np.array_equal(np.array(loaded.model(x)), before)


@pytest.mark.parametrize(
    "fmt", [pytest.param("bf16", marks=only_in_full("mlx-lm's own batches under a profile")), "q4"]
)
def test_mlx_lm_itself_batches_without_a_differing_bit(fmt: str) -> None:
    """Outside of any recording: one forward of rows, in a batch with padding and one by one."""
    from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

    loaded = tiny("llama", fmt)
    draw = np.random.default_rng(3)
    prompts = [draw.integers(0, VOCAB, n).tolist() for n in (9, 4, 7)]
    with detdiff.invariant(loaded.model, kernels="mlx-metal", price=(), compositions=0):
        longest = max(map(len, prompts))
        batch = mx.array([[0] * (longest - len(p)) + p for p in prompts])
        caches = [BatchKVCache([longest - len(p) for p in prompts]) for _ in loaded.model.layers]
        together = np.array(loaded.model(batch, cache=caches)[:, -1].astype(mx.float32))
        for slot, prompt in enumerate(prompts):
            cache = make_prompt_cache(loaded.model)
            for token in prompt:
                alone = loaded.model(mx.array([[token]]), cache=cache)
            assert np.array_equal(np.array(alone[0, -1].astype(mx.float32)), together[slot])


def test_a_policy_of_its_own_shape() -> None:
    policy = RowPolicy((1, 2, 4, 4), (64, 32))
    assert str(policy) == "1..2 native, 3 tile:4, 4 native"
    assert list(policy.calls(70)) == [(64, 64), (4, 4), (2, 2)]
