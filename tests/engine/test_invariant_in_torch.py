"""`detdiff.invariant` on a model of transformers: what differs in a batch as torch computes it does not under the pins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from tiers import FULL, some_now
from torch_models import tiny, tiny_llama, tiny_moe, torch_or_skip

import detdiff
from detdiff.errors import EngineRefuses, KernelsNotPinned
from detdiff.invariance import sampled
from detdiff.invariance.compositions import check
from detdiff.scenario import KernelPlan

COMPOSITIONS = 200 if FULL else 6


@pytest.fixture
def few_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of what is tried at each shape of a linear layer: for tests of what comes after it."""
    monkeypatch.setattr(sampled, "OUTPUTS", sampled.OUTPUTS // 10)


def attending(torch: Any, implementation: str, dtype: str, make: Any = tiny_llama) -> Any:
    model = make(torch)
    model.set_attn_implementation(implementation)
    return model.to(getattr(torch, dtype))


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("sdpa", "bfloat16"), pytest.param("eager", "float32", marks=pytest.mark.thorough)],
)
def test_what_differs_as_it_is_does_not_under_pins(implementation: str, dtype: str) -> None:
    torch = torch_or_skip()
    from detdiff.engines.transformers.engine import TransformersEngine

    model = attending(torch, implementation, dtype)
    with detdiff.invariant(model, compositions=COMPOSITIONS, price=(1,)) as found:
        assert found.checked is not None and found.checked.count == COMPOSITIONS
        assert found.price[0].batch == 1 and found.plan is None
        torch.set_num_threads(2)
        try:
            with pytest.raises(KernelsNotPinned, match="2 threads now"):
                model(input_ids=torch.zeros((1, 3), dtype=torch.long))
        finally:
            torch.set_num_threads(1)
    assert all("forward" not in vars(module) for module in model.modules())
    if any(str(each.policy) != "native" for each in found.pinned):
        with pytest.raises(KernelsNotPinned, match="first at site model"):
            check(TransformersEngine(model), 6, 0)


@pytest.mark.thorough
def test_experts_in_bfloat16() -> None:
    """Experts and routers hold their weights in one tensor, and are groups of their own."""
    torch = torch_or_skip()
    from detdiff.engines.transformers.engine import TransformersEngine

    model = attending(torch, "sdpa", "bfloat16", tiny_moe)
    with detdiff.invariant(model, compositions=COMPOSITIONS, price=()) as found:
        assert found.checked is not None and found.checked.count == COMPOSITIONS
        groups = {each.group.shape: str(each.policy) for each in found.pinned if each.group.kind == "switch"}
    assert set(groups) == {"Qwen3MoeExperts", "Qwen3MoeTopKRouter"}
    if any(str(each.policy) != "native" for each in found.pinned):
        with pytest.raises(KernelsNotPinned, match="first at site model"):
            check(TransformersEngine(model), 6, 0)


PLACES = {"linear": "self_attn.o_proj", "attention": "self_attn.attention", "switch": "mlp.experts"}


@contextmanager
def planted(torch: Any, *places: str, reached: bool) -> Iterator[Any]:
    """A model with a fault that depends on the layer's own call, which a policy changes (``reached``), in all layers, as a kernel's is; else on
    who is served, which none does, in one layer."""
    from detdiff.engines.transformers.taps import attention_as

    model = attending(torch, "sdpa", "float32", tiny_moe)
    slots, layer = [1], model.model.layers[1]
    model.register_forward_pre_hook(
        lambda module, args, kwargs: slots.__setitem__(0, len(kwargs["input_ids"])), with_kwargs=True
    )

    def moved(made: Any, own: bool) -> Any:
        return made * (1 + 2**-20) if (own if reached else slots[0] > 1) else made

    def call_moved(native: Any, x: Any, *args: Any) -> Any:
        return moved(native(x, *args), x.numel() // x.shape[-1] > 8)

    def change(native: Any) -> Any:
        def call(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            made, weights = native(module, query, *args, **kwargs)
            return (moved(made, len(query) > 1) if reached or module is layer.self_attn else made), weights

        return call

    with ExitStack() as stack:
        for where in places:
            if where == "attention":
                stack.enter_context(attention_as(model, change))
                continue
            module = layer.self_attn.o_proj if where == "linear" else layer.mlp.experts
            for each in model.modules() if reached else [module]:
                if type(each) is type(module):
                    each.forward = partial(call_moved, each.forward)
        yield model


@pytest.mark.thorough
@pytest.mark.usefixtures("few_outputs")
def test_planted_kernels_are_gone_around() -> None:
    torch = torch_or_skip()
    with planted(torch, *PLACES, reached=True) as model:
        with detdiff.invariant(model, price=(), compositions=4) as found:
            pinned = found.pinned
    for where in PLACES:
        assert {str(each.policy) for each in pinned if each.group.kind == where} - {"native"}, where


@pytest.mark.parametrize("where", some_now(PLACES, 2))
@pytest.mark.usefixtures("few_outputs")
def test_a_planted_composition_is_found(where: str) -> None:
    torch = torch_or_skip()
    site = rf"model\.layers\.1\.{PLACES[where]}"
    with (
        planted(torch, where, reached=False) as model,
        pytest.raises(KernelsNotPinned, match=f"in composition .* first at site {site}, request r"),
        detdiff.invariant(model, price=(), compositions=8),
    ):
        pass


@pytest.mark.parametrize(("rate", "seen"), some_now([(20_000, True), (10**9, False)]))
def test_rare_outputs_of_experts_are_seen(rate: int, seen: bool) -> None:
    """Experts that are computed row by row, of which one in ``rate`` outputs is another in a call of several rows."""
    torch = torch_or_skip()
    from detdiff.engines.transformers.engine import TransformersEngine
    from detdiff.engines.transformers.taps import row_by_row

    model = tiny_moe(torch)

    def rare(alone: Any, x: Any, *args: Any) -> Any:
        made = alone(x, *args)
        hit = made.view(torch.int32).to(torch.int64) * 2654435761 % (1 << 32) < (1 << 32) // rate
        return torch.where(hit, made * (1 + 2**-20), made) if len(x) > 1 else made

    for layer in model.model.layers:
        layer.mlp.experts.forward = partial(rare, row_by_row(torch, layer.mlp.experts))
    pinning = TransformersEngine(model).pinning(KernelPlan())
    (group,) = [each for each in pinning.groups if each.shape == "Qwen3MoeExperts"]
    found = [pinning.first_difference(group, "native", seed) for seed in range(3 if seen else 1)]
    assert any("is another than alone" in each for each in found) == seen, found


def gemma2(torch: Any, cap: float | None) -> Any:
    return tiny(
        torch,
        "Gemma2",
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=4,
        attn_logit_softcapping=cap,
        attn_implementation="eager",
        pad_token_id=0,
    ).to(torch.float16)


@pytest.mark.thorough
@pytest.mark.usefixtures("few_outputs")
def test_attention_that_pages_compute_by_another_function_is_refused() -> None:
    """transformers 5.24 leaves out the cap of gemma2's scores in pages; the compositions below have no cap, and do not differ."""
    torch = torch_or_skip()
    with (
        pytest.raises(
            KernelsNotPinned, match="keys: even a row alone, over .* is another in pages than outside of them"
        ),
        detdiff.invariant(gemma2(torch, 50.0), price=(), compositions=0),
    ):
        pass


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.usefixtures("few_outputs")
def test_activations_are_pinned_where_rows_differ(wrong: bool) -> None:
    """One that computes the last items of several rows otherwise, as torch does with those that are no whole vector."""
    torch = torch_or_skip()
    from detdiff.engines.transformers.taps import row_by_row

    model = gemma2(torch, None)

    def last_items(alone: Any, x: Any) -> Any:
        made = alone(x)
        if wrong and x.numel() > x.shape[-1]:
            made.view(-1)[-16:] *= 1 + 2**-10
        return made

    for layer in model.model.layers:
        layer.mlp.act_fn.forward = partial(last_items, row_by_row(torch, layer.mlp.act_fn))
    with detdiff.invariant(model, price=(), compositions=COMPOSITIONS) as found:
        assert found.checked is not None and found.checked.count == COMPOSITIONS
    (policy,) = [str(each.policy) for each in found.pinned if each.group.kind == "activation"]
    assert policy == ("rows" if wrong else "native")


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.usefixtures("few_outputs")
def test_what_differs_in_pages_alone_is_gone_around(wrong: bool) -> None:
    """Attention whose rows differ where several requests' keys lie one after the other, and nowhere else."""
    torch = torch_or_skip()
    from detdiff.engines.transformers.taps import attention_as, by_keys

    model = attending(torch, "sdpa", "float32")

    def change(native: Any) -> Any:
        alone = by_keys(torch, native)

        def call(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
            made, weights = alone(module, query, key, value, mask, **kwargs)
            in_pages = mask is not None and len(query) == 1 and query.shape[2] > 1
            return (made * (1 + 2**-20) if wrong and in_pages else made), weights

        return call

    with (
        attention_as(model, change),
        detdiff.invariant(model, price=(), compositions=4) as found,
    ):
        pass
    (policy,) = [str(each.policy) for each in found.pinned if each.group.kind == "attention"]
    assert policy == ("keys" if wrong else "native")


@pytest.mark.thorough
@pytest.mark.usefixtures("few_outputs")
def test_a_schedule_that_refuses_the_model_is_left_out_and_said() -> None:
    torch = torch_or_skip()
    model = attending(torch, "sdpa", "float32")
    with detdiff.invariant(model, price=(), compositions=1) as found:
        assert "not checked in the schedule" not in str(found)
    model.generation_config.repetition_penalty = 1.1
    with detdiff.invariant(model, price=(), compositions=2) as found:
        assert found.checked is not None and found.checked.count == 2
    assert "not checked in the schedule continuous: The model's generation_config asks for" in str(found)


def test_a_layer_that_mixes_rows_is_named() -> None:
    torch = torch_or_skip()
    model = attending(torch, "sdpa", "float32")
    norm = model.model.layers[1].post_attention_layernorm
    native = norm.forward
    norm.forward = lambda x: native(x) * (1 + x.mean() * 1e-3)
    with (
        pytest.raises(
            KernelsNotPinned, match=r"first at site model\.layers\.1\.post_attention_layernorm, request r"
        ),
        detdiff.invariant(model, price=()),
    ):
        pass


def test_a_profile_is_none_of_torch() -> None:
    torch = torch_or_skip()
    with (
        pytest.raises(EngineRefuses, match="torch's own kernels"),
        detdiff.invariant(tiny_llama(torch), kernels="mlx-metal"),
    ):
        pass
