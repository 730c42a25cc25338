"""Verdicts on a model in torch: a kernel that rounds in another order with more rows, one that is wrong there, and neither."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch_models import VOCABULARY, row_by_row, tiny_llama, tiny_moe, torch_or_skip

from detdiff import Scenario, explain
from detdiff.engines.transformers import TransformersEngine
from detdiff.explain import Verdict

LENGTHS = (6, 6, 6)
PLACE = "model.layers.0.self_attn.k_proj"


@pytest.fixture(scope="module")
def torch() -> Any:
    return torch_or_skip()


def explained(torch: Any, model: Any, **options: Any) -> Verdict:
    prompts = [[(7 * i + 5 * k) % VOCABULARY for k in range(n)] for i, n in enumerate(LENGTHS)]
    asked = Scenario.from_dict(
        {
            "model": "tiny",
            "engine": "transformers",
            "request": [{"tokens": prompt} for prompt in prompts],
            "max_tokens": 5,
        }
    )
    engine = TransformersEngine(model, name="tiny")
    return explain(asked, asked.with_changes(schedule="static"), engine=engine, **options)


def injected(torch: Any, many: Callable[[Any, Any], Any]) -> Any:
    """The model with every row computed alone, but for one layer, which gives ``many(weight, x)`` from nine rows on."""
    model = row_by_row(torch, tiny_llama(torch))
    module = model.get_submodule(PLACE)
    right = module.forward
    module.forward = lambda x: many(module.weight, x) if x.shape[0] * x.shape[1] >= 9 else right(x)
    return model


def test_another_order_of_sums_in_a_batch_is_numerics_with_its_m(torch: Any) -> None:
    def halves(weight: Any, x: Any) -> Any:
        half = weight.shape[1] // 2
        linear = torch.nn.functional.linear
        return linear(x[..., half:], weight[:, half:]) + linear(x[..., :half], weight[:, :half])

    verdict = explained(torch, injected(torch, halves))
    results = {control.name: control.result for control in verdict.controls}
    assert (verdict.kind, verdict.rule) == ("numerics", "path"), (verdict.sentence, results)
    assert (
        PLACE in verdict.sentence and "6 rows in a" in verdict.sentence and "18 rows in b" in verdict.sentence
    )
    assert (results["repeat"], results["pin_kernels"], results["oracle"]) == ("equal", "removed", "inside")
    assert results["neighbour_content"] == "equal"
    for name in ("minimal_change", "patch_in", "patch_out"):
        control = verdict.control(name)
        assert (
            control is not None
            and control.result == "not_run"
            and "transformers engine has no" in control.sentence
        )


def test_a_kernel_that_is_wrong_in_a_batch_is_a_bug(torch: Any) -> None:
    def lossy(weight: Any, x: Any) -> Any:
        y = torch.nn.functional.linear(x, weight)
        y[..., 3] *= 1.01
        return y

    verdict = explained(torch, injected(torch, lossy))
    assert (verdict.kind, verdict.rule) == ("bug", "outside"), verdict.sentence
    assert f"{PLACE} (linear, columns 3 to 3)" in verdict.sentence


def test_rows_that_are_computed_alone_are_identical(torch: Any) -> None:
    verdict = explained(torch, row_by_row(torch, tiny_llama(torch)))
    assert verdict.kind == "identical"


@pytest.mark.parametrize(
    ("leaks", "kind", "rules"), [(False, "numerics", ("path",)), (True, "bug", ("leak", "padding"))]
)
def test_experts_that_round_by_the_number_of_their_rows_are_no_leak(
    torch: Any, leaks: bool, kind: str, rules: tuple[str, ...]
) -> None:
    """Which rows an expert has beside a request's own depends on what the others say."""

    def wrong(native: Any, x: Any, index: Any, weights: Any) -> Any:
        made = native(x, index, weights)
        if leaks:
            return made + made.flip(0) / 64
        shared = torch.bincount(index.flatten(), minlength=8)[index].amax(-1) > 1
        return torch.where(shared[:, None], made * (1 + 2**-22), made)

    model = tiny_moe(torch)
    for layer in model.model.layers:
        layer.mlp.experts.forward = partial(wrong, layer.mlp.experts.forward)
    verdict = explained(torch, model)
    assert verdict.kind == kind and verdict.rule in rules, verdict.sentence
    content = {control.name: control.result for control in verdict.controls}["neighbour_content"]
    assert content == ("differs" if leaks else "undecided")
