"""Hugging Face transformers under the check: tiny models with and without a planted fault, and SmolLM2 as it comes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch_models import VOCABULARY, row_by_row, tiny_llama, torch_or_skip

from detdiff.check.engine import EngineRequest, check_engine
from detdiff.check.engine_finding import EngineFinding
from detdiff.check.torch_engine import TransformersEngine, affordable
from detdiff.errors import CheckSubjectInvalid, EngineFailed, TorchMissing
from detdiff.scenario import Schedule

PROCESSOR = Path("/proc/cpuinfo")
WORDS = set(PROCESSOR.read_text(encoding="utf-8").split()) if PROCESSOR.is_file() else set[str]()


@pytest.fixture(scope="module")
def torch() -> Any:
    return torch_or_skip()


def requests(lengths: Sequence[int], max_tokens: int = 5) -> list[EngineRequest]:
    return [
        EngineRequest(f"r{i}", tuple((7 * i + 5 * k) % VOCABULARY for k in range(n)), max_tokens)
        for i, n in enumerate(lengths)
    ]


def check(model: Any, lengths: Sequence[int], schedule: str = "static:2", **keys: Any) -> EngineFinding:
    return check_engine(TransformersEngine(model, name="tiny"), requests(lengths), [schedule], **keys)[0]


@pytest.mark.parametrize("schedule", ["static:2", "static:3"])
def test_rows_that_are_computed_one_by_one_are_equal_to_the_bit(torch: Any, schedule: str) -> None:
    found = check(row_by_row(torch, tiny_llama(torch)), (6, 6, 6), schedule)
    assert found.identical, found.text()
    assert found.compared.sites == 30 and found.repeats is None and found.kernels == ()
    # Every site of every position but the last token's, and of the head those whose logits were asked for.
    positions = 6 + 5 - 1
    assert found.compared.rows / found.compared.tokens * 5 == 29 * positions + 5
    assert found.compared.log_probabilities == found.compared.tokens


@pytest.mark.parametrize(
    "place", ["layers.0.self_attn.k_proj", "layers.1.mlp.down_proj", "layers.1.self_attn.o_proj"]
)
def test_a_kernel_that_changes_with_m_is_named_with_its_m(torch: Any, place: str) -> None:
    model = row_by_row(torch, tiny_llama(torch))
    module = model.get_submodule(f"model.{place}")
    right = module.forward

    def other(x: Any) -> Any:
        y = right(x)
        return torch.nextafter(y, torch.full_like(y, 9)) if y.shape[0] * y.shape[1] >= 9 else y

    module.forward = other
    found = check(model, (6, 6, 6))
    first = found.parted[0].site
    assert first is not None and (first.site, first.position, first.birth) == (f"model.{place}", 0, True)
    assert (first.alone, first.beside) == (6, 12)
    assert found.repeats is True
    (kernel,) = found.kernels
    assert kernel.bits_change_at == (9,) and place in kernel.target
    assert "M = 6 alone and 12 here: its inputs are bit-equal" in found.text()
    assert "change at M = 9 of M = 1-12 (alike: 1-8 | 9-12)" in found.text()


def test_a_leak_between_rows_is_named_and_not_taken_for_a_kernel(torch: Any) -> None:
    model = row_by_row(torch, tiny_llama(torch))
    module = model.get_submodule("model.layers.1.mlp")
    module.register_forward_hook(lambda module, args, y: y + 0.5 * y.flip(0) * (y.shape[0] > 1))
    found = check(model, (6, 6))
    first = found.parted[0].site
    assert first is not None and (first.site, first.position, first.birth) == ("model.layers.1.mlp", 0, True)
    assert found.parted[0].flip is not None
    assert all(each.invariant for each in found.kernels)


def test_padding_that_is_attended_to_is_found(torch: Any) -> None:
    model = row_by_row(torch, tiny_llama(torch))

    class Unmasked(TransformersEngine):
        def _generate(self, ids: Any, mask: Any, *rest: Any) -> Any:
            return super()._generate(ids, torch.ones_like(mask), *rest)

    right = check_engine(TransformersEngine(model, name="tiny"), requests((2, 9)), ["static:2"], "tokens")[0]
    wrong = check_engine(Unmasked(model, name="tiny"), requests((2, 9)), ["static:2"], "tokens")[0]
    assert right.identical, right.text()
    assert [each.request.id for each in wrong.parted] == ["r0"]


def test_padding_alone_changes_what_attention_adds_up(torch: Any) -> None:
    model = row_by_row(torch, tiny_llama(torch))
    if "avx512f" not in WORDS:
        pytest.skip(
            "this processor has no AVX-512, for which it is known that longer rows are summed in another order"
        )
    (found,) = check_engine(TransformersEngine(model, name="tiny"), requests((3, 6)), ["static:2"])
    # The longest prompt has no padding.
    (padded,) = found.parted
    assert padded.request.id == "r0" and padded.flip is None and padded.site is not None
    assert (padded.site.site, padded.site.birth) == ("model.layers.0.self_attn", True)
    assert all(kernel.invariant for kernel in found.kernels) and len(found.kernels) == 4


def test_a_sweep_of_many_weights_takes_fewer_numbers_of_rows() -> None:
    assert affordable(tuple(range(1, 65)), 576 * 1536) == tuple(range(1, 65))
    few = affordable((*range(1, 65), 300, 400), 4096 * 14336)
    assert few[0] == 1 and few[-2:] == (300, 400) and 4 <= len(few) < 20
    assert affordable((1, 2, 500), 1 << 30) == (1, 2, 500)


def test_weights_that_cannot_be_probed_are_left_out(torch: Any) -> None:
    engine = TransformersEngine(tiny_llama(torch).double())
    assert list(engine.kernels(range(1, 4))) == []
    (found,) = check_engine(engine, requests((6, 6)), ["static:2"])
    assert found.kernels == () and found.compared.sites == 30


def test_torchs_own_kernels_are_reported_for_what_they_are(torch: Any) -> None:
    found = check(tiny_llama(torch), (6, 6, 6), "static:3")
    assert found.kernels and all(kernel.rows[:8] == tuple(range(1, 9)) for kernel in found.kernels)
    if "avx512f" not in WORDS:
        pytest.skip("this processor has no AVX-512, for which the classes are known")
    # One row is a matrix-vector product, which sums in another order.
    assert not found.identical and found.kernels[0].bits_change_at[0] == 2
    assert found.parted[0].site is not None and found.parted[0].site.birth


def test_the_hooks_leave_the_model_as_it_was(torch: Any) -> None:
    model = tiny_llama(torch)
    engine, bare = TransformersEngine(model), TransformersEngine(model, taps=False)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    schedule = Schedule("static")
    tapped, plain = engine.generate(requests((4, 7)), schedule), bare.generate(requests((4, 7)), schedule)
    assert [each.tokens for each in tapped] == [each.tokens for each in plain]
    assert all((a.log_probabilities == b.log_probabilities).all() for a, b in zip(tapped, plain, strict=True))
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert plain[0].taps == {} and len(tapped[0].taps) == 30
    with pytest.raises(RuntimeError):
        engine.generate([EngineRequest("r0", (), 4)], schedule)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_a_text_ends_where_the_model_ends_it(torch: Any) -> None:
    model = row_by_row(torch, tiny_llama(torch))
    schedule = Schedule("static")
    whole = TransformersEngine(model).generate(requests((6, 6)), schedule)[0].tokens
    model.generation_config.eos_token_id = [whole[1]]
    cut = TransformersEngine(model).generate(requests((6, 6)), schedule)
    assert cut[0].tokens == whole[:2] and max(cut[0].taps["lm_head"].positions) == 6
    assert check(model, (6, 6)).identical


def test_a_transformers_model_needs_no_wrapping_and_what_it_cannot_do_is_said(torch: Any) -> None:
    model = row_by_row(torch, tiny_llama(torch))
    assert check_engine(model, requests((6, 6)), ["static:2"])[0].identical
    with pytest.raises(EngineFailed, match="schedule continuous was asked for. Ask for static:N"):
        check(model, (6, 6), "continuous:2")
    with pytest.raises(CheckSubjectInvalid, match="made without a tokenizer"):
        TransformersEngine(model).encode("text")
    with pytest.raises(CheckSubjectInvalid, match="no causal language model"):
        TransformersEngine(torch.nn.Linear(2, 2))


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TorchMissing, match=r"pip install '\.\[torch\]'"):
        TransformersEngine(object())
