"""Hugging Face transformers as an engine: tiny models with and without an injected fault, and SmolLM2 as it comes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiers import some_now
from torch_models import VOCABULARY, row_by_row, tiny, tiny_gemma3, tiny_llama, torch_or_skip

from detdiff import Divergence, Scenario, compare, record
from detdiff.engines.base import Overrides, RunOptions
from detdiff.engines.transformers import TransformersEngine
from detdiff.engines.transformers.padded import PaddedBatches
from detdiff.errors import EngineRefuses, EngineUnusable, TorchMissing
from detdiff.trace import Trace

PINNED = RunOptions(overrides=Overrides(pin_kernels=True))


@pytest.fixture(scope="module")
def torch() -> Any:
    return torch_or_skip()


def scenario(lengths: Sequence[int], max_tokens: int = 5, **keys: Any) -> Scenario:
    prompts = [[(7 * i + 5 * k) % VOCABULARY for k in range(n)] for i, n in enumerate(lengths)]
    return Scenario.from_dict(
        {
            "model": "tiny",
            "engine": "transformers",
            "request": [{"tokens": prompt} for prompt in prompts],
            "max_tokens": max_tokens,
            **keys,
        }
    )


def both(
    engine: Any,
    folder: Path,
    lengths: Sequence[int],
    options: RunOptions | None = None,
    **keys: Any,
) -> tuple[Trace, Trace]:
    """Each request alone, and all in one batch."""
    asked = scenario(lengths, **keys)
    a = record(asked, folder / "a", engine=engine, options=options)
    b = record(asked.with_changes(schedule="static"), folder / "b", engine=engine, options=options)
    for trace in (a, b):
        trace.verify()
        assert trace.header["observer"]["equal"] is True and trace.engine == "transformers"
    return a, b


def found_by(model: Any, folder: Path, lengths: Sequence[int], **keys: Any) -> Divergence:
    return compare(*both(TransformersEngine(model, name="tiny"), folder, lengths, **keys))


@pytest.mark.parametrize("count", some_now([2, 3], 1))
def test_rows_that_are_computed_one_by_one_are_equal_to_the_bit(
    torch: Any, tmp_path: Path, count: int
) -> None:
    found = found_by(row_by_row(torch, tiny_llama(torch)), tmp_path, (6,) * count)
    assert found.identical
    # Every position but the last token's, each with all sites but head and logits.
    assert found.compared.rows == count * (6 + 5 - 1)
    a = Trace.open(tmp_path / "a")
    assert len(a.sites) == 37 and a.lacks.keys() == {"kernel_paths"}
    kinds = {site.kind for site in a.sites}
    assert kinds >= {
        "linear",
        "norm",
        "attention",
        "cache_write",
        "cache_read",
        "mlp",
        "block",
        "head",
        "logits",
    }


@pytest.mark.parametrize(
    "place",
    some_now(["layers.0.self_attn.k_proj", "layers.1.mlp.down_proj", "layers.1.self_attn.o_proj"], 1),
)
def test_a_kernel_that_changes_with_m_is_named_with_its_m(torch: Any, tmp_path: Path, place: str) -> None:
    model = row_by_row(torch, tiny_llama(torch))
    module = model.get_submodule(f"model.{place}")
    right = module.forward

    def other(x: Any) -> Any:
        y = right(x)
        return torch.nextafter(y, torch.full_like(y, 9)) if y.shape[0] * y.shape[1] >= 9 else y

    module.forward = other
    found = found_by(model, tmp_path, (6, 6, 6))
    origin = found.requests[0].origin
    assert origin is not None and (origin.site, origin.position) == (f"model.{place}", 0)
    calls = [
        trace.call(0, [site.name for site in trace.sites].index(origin.site), (0, 0))
        for trace in (Trace.open(tmp_path / side) for side in "ab")
    ]
    assert [call and call["rows"] for call in calls] == [6, 18]
    if place.endswith("k_proj"):
        entry = found.requests[0].cache_entry
        assert entry is not None and (entry.layer, entry.kind, entry.position) == (0, "K", 0)


def test_pinned_kernels_make_batches_with_padding_equal(torch: Any, tmp_path: Path) -> None:
    model = tiny_llama(torch)
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        engine = TransformersEngine(model, name="tiny")
        a, b = both(engine, tmp_path / name, (6, 2, 9), PINNED)
        assert compare(a, b).identical
    # The model itself is as it was.
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_leak_between_rows_is_named_and_stays_when_kernels_are_pinned(torch: Any, tmp_path: Path) -> None:
    model = row_by_row(torch, tiny_llama(torch))
    module = model.get_submodule("model.layers.1.mlp")
    module.register_forward_hook(lambda module, args, y: y + 0.5 * y.flip(0) * (y.shape[0] > 1))
    for options in (None, PINNED):
        engine = TransformersEngine(model, name="tiny")
        found = compare(*both(engine, tmp_path / str(options is None), (6, 6), options))
        first = found.requests[0].origin
        assert first is not None and (first.site, first.position) == ("model.layers.1.mlp", 0)
        assert found.requests[0].flip is not None


def test_padding_that_is_attended_to_is_found(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersEngine(row_by_row(torch, tiny_llama(torch)), name="tiny")
    right = compare(*both(engine, tmp_path / "right", (2, 9), PINNED))
    native = PaddedBatches.generate

    def unmasked(run: Any, ids: Any, mask: Any, *rest: Any) -> Any:
        return native(run, ids, torch.ones_like(mask), *rest)

    monkeypatch.setattr(PaddedBatches, "generate", unmasked)
    wrong = compare(*both(engine, tmp_path / "wrong", (2, 9)))
    assert right.identical
    flipped = [request.id for request in wrong.requests if request.flip is not None]
    assert flipped == ["r0"]


def test_cache_entries_that_change_after_they_were_written_are_an_origin(torch: Any, tmp_path: Path) -> None:
    from transformers.cache_utils import DynamicLayer

    model = row_by_row(torch, tiny_llama(torch))
    native = DynamicLayer.update

    def update(layer: Any, keys: Any, values: Any, *rest: Any, **named: Any) -> Any:
        found = native(layer, keys, values, *rest, **named)
        if keys.shape[0] > 1 and layer.keys.shape[2] == 8:
            layer.keys[0, 0, 3] += 1
        return found

    engine = TransformersEngine(model, name="tiny")
    assert compare(*both(engine, tmp_path / "right", (6, 6))).identical
    DynamicLayer.update = update
    try:
        found = compare(*both(engine, tmp_path / "wrong", (6, 6)))
    finally:
        DynamicLayer.update = native
    origin = found.requests[0].origin
    assert origin is not None and (origin.site, origin.position) == ("model.layers.0.self_attn.cache.read", 7)


def mixtral(torch: Any) -> Any:
    return tiny(torch, "Mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)


def phi(torch: Any) -> Any:
    return tiny(torch, "Phi", qk_layernorm=True)


@pytest.mark.parametrize("lengths", some_now([((3, 3),), ((1, 2),), ((6, 9),)], 1))
@pytest.mark.parametrize("make", [tiny_gemma3, mixtral, phi])
def test_heads_and_experts_are_not_taken_for_positions(
    torch: Any, tmp_path: Path, make: Callable[[Any], Any], lengths: tuple[int, ...]
) -> None:
    engine = TransformersEngine(make(torch), name="tiny")
    assert compare(*both(engine, tmp_path, lengths, PINNED)).identical


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (tiny_gemma3, "model.layers.0.self_attn.q_norm"),
        (tiny_gemma3, "model.layers.1.self_attn.k_norm"),
        (phi, "model.layers.1.self_attn.q_layernorm"),
        (mixtral, "model.layers.1.mlp.gate"),
    ],
)
def test_a_fault_in_a_norm_over_heads_or_in_a_flattened_gate_is_at_its_row(
    torch: Any, tmp_path: Path, make: Callable[[Any], Any], place: str
) -> None:
    model = make(torch)
    engine = TransformersEngine(model, name="tiny")

    def fault(module: Any, args: Any, output: Any) -> Any:
        made = output[0] if isinstance(output, tuple) else output
        changed = made.clone()
        flat = place.endswith("gate")
        if flat and len(made) == 6:  # rows of a batch of two prompts of three
            changed[4] += 1
        elif not flat and made.shape[0] == 2 and 3 in made.shape:
            at = (1, slice(None), 1) if made.shape[1] != 3 else (1, 1)
            changed[at] += 1
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    model.get_submodule(place).register_forward_hook(fault)
    found = compare(*both(engine, tmp_path, (3, 3), PINNED))
    assert found.requests[0].identical
    origin = found.requests[1].origin
    assert origin is not None and (origin.site, origin.position) == (place, 1)


def test_the_hooks_leave_the_model_as_it_was(torch: Any, tmp_path: Path) -> None:
    from transformers.cache_utils import Cache

    model = tiny_llama(torch)
    engine = TransformersEngine(model)
    hooks, update = [len(module._forward_hooks) for module in model.modules()], Cache.update
    both(engine, tmp_path, (4, 7))
    with pytest.raises(EngineRefuses), engine_that_fails(model):
        record(scenario((4, 7)), tmp_path / "c", engine=engine)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert Cache.update is update and not Trace.open(tmp_path / "c").complete


class engine_that_fails:
    """The model's last layer raises."""

    def __init__(self, model: Any) -> None:
        self._module = model.model.layers[-1]

    def __enter__(self) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            raise EngineRefuses("a fault of the model's own")

        self._module.forward = forward

    def __exit__(self, *_: object) -> None:
        del self._module.forward


def test_a_text_ends_where_the_model_ends_it(torch: Any, tmp_path: Path) -> None:
    model = row_by_row(torch, tiny_llama(torch))
    whole = record(scenario((6, 6)), tmp_path / "whole", engine=TransformersEngine(model)).generated()
    model.generation_config.eos_token_id = [int(whole.token[1])]
    a, b = both(TransformersEngine(model), tmp_path, (6, 6))
    cut = a.generated()
    assert cut.token[cut.request == 0].tolist() == whole.token[:2].tolist()
    on = record(scenario((6, 6), ignore_stop=True), tmp_path / "on", engine=TransformersEngine(model))
    assert on.generated().token.tolist() == whole.token.tolist()
    rows = a.row_index()
    assert int(rows.position[rows.request == 0].max()) == 6
    assert compare(a, b).identical


def test_settings_and_overrides_reach_the_model(torch: Any, tmp_path: Path) -> None:
    model = tiny_llama(torch)
    engine = TransformersEngine(model, settings={"dtype": "bfloat16", "attn_implementation": "sdpa"})
    trace = record(scenario((4,), capture="full"), tmp_path / "a", engine=engine)
    assert trace.header["engine"]["settings"] == {"dtype": "bfloat16", "attn_implementation": "sdpa"}
    assert trace.header["environment"]["attn_implementation"] == ["sdpa"]
    assert compare(trace, trace).identical and any(shard.value_columns() for shard in trace.shards)
    wide = RunOptions(overrides=Overrides(dtype="float64"))
    other = record(scenario((4,), capture="full"), tmp_path / "b", engine=engine, options=wide)
    assert not compare(trace, other).identical and model.dtype == torch.bfloat16
    with pytest.raises(EngineRefuses, match="has no setting 'dtyp'; did you mean 'dtype'"):
        TransformersEngine(model, settings={"dtyp": "bfloat16"})
    with pytest.raises(EngineRefuses, match="padding_side is 'right'"):
        TransformersEngine(model, settings={"padding_side": "right"}).check(scenario((4,)))
    with pytest.raises(EngineRefuses, match="expected 'left' or 'right'"):
        TransformersEngine(model, settings={"padding_side": "above"})


def test_a_transformers_model_needs_no_wrapping_and_what_it_cannot_do_is_said(
    torch: Any, tmp_path: Path
) -> None:
    model = row_by_row(torch, tiny_llama(torch))
    assert compare(*both(model, tmp_path, (6, 6))).identical
    with pytest.raises(EngineRefuses, match="layout packed cannot be told"):
        record(scenario((6, 6), layout="packed"), tmp_path / "c", engine=model)
    with pytest.raises(EngineRefuses, match="given without a tokenizer"):
        TransformersEngine(model).encode("text", False)
    with pytest.raises(EngineUnusable, match="is no model of transformers"):
        TransformersEngine(torch.nn.Linear(2, 2))
    assert not (tmp_path / "c").exists()


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TorchMissing, match=r"pip install '\.\[torch\]'"):
        TransformersEngine(object())
