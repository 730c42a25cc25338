"""`detdiff.invariant` on a model of transformers: what differs in a batch as torch computes it does not under the pins."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import FULL
from torch_models import tiny_llama, torch_or_skip

import detdiff
from detdiff.errors import EngineRefuses, KernelsNotPinned
from detdiff.invariance.compositions import check

COMPOSITIONS = 200 if FULL else 6


def attending(torch: Any, implementation: str, dtype: str) -> Any:
    model = tiny_llama(torch)
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
