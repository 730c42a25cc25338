"""transformers' own continuous batching: as sound as it comes, and with a fault in its pages, positions, masks or choices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiers import some_now
from torch_models import VOCABULARY, tiny, tiny_gemma3, tiny_llama, torch_or_skip

from detdiff import Divergence, Scenario, compare, explain, record
from detdiff.engines.base import Overrides, RunOptions
from detdiff.engines.transformers import TransformersEngine
from detdiff.engines.transformers.continuous import PagesPlan
from detdiff.errors import EngineFailed, EngineRefuses
from detdiff.trace import Trace

PINNED = RunOptions(overrides=Overrides(pin_kernels=True), durable=False)
LENGTHS = (6, 6, 9, 2)
MORE = {"schedule": "continuous", "active": 3, "page_tokens": 4}


@pytest.fixture(scope="module")
def torch() -> Any:
    return torch_or_skip()


def scenario(**keys: Any) -> Scenario:
    prompts = [[(7 * i + 5 * k) % VOCABULARY for k in range(n)] for i, n in enumerate(LENGTHS)]
    asked = [{"tokens": prompt} for prompt in prompts]
    return Scenario.from_dict(
        {"model": "tiny", "engine": "transformers", "request": asked, "max_tokens": 6, **keys}
    )


def tiny_qwen3(torch: Any) -> Any:
    return tiny(torch, "Qwen3", num_key_value_heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("make", "keys"),
    some_now(
        [
            (tiny_llama, {"row_budget": 5}),
            (tiny_gemma3, {"row_budget": 5}),
            (tiny_gemma3, {"active": None, "arrivals": [0, 2, 3, 30]}),
            (tiny_llama, {"page_tokens": None, "arrivals": [9, 0, 1, 0]}),
            (tiny_qwen3, {"active": 2}),
        ],
        1,
    ),
)
def test_every_bit_is_that_of_a_request_alone_where_kernels_are_pinned(
    torch: Any, tmp_path: Path, make: Callable[[Any], Any], keys: dict[str, Any]
) -> None:
    model = make(torch)
    engine = TransformersEngine(model, name="tiny")
    attention = model.config._attn_implementation
    drawn = torch.random.get_rng_state()
    a = record(scenario(), tmp_path / "a", engine=engine, options=PINNED)
    b = record(scenario().with_changes(**{**MORE, **keys}), tmp_path / "b", engine=engine, options=PINNED)
    for trace in (a, b):
        trace.verify()
        assert trace.header["observer"] == {"forwards": 4, "equal": True}
        assert trace.lacks.keys() == {"kernel_paths"}
    found = compare(a, b)
    assert found.identical and not found.bookkeeping
    # Every row with every site, head and logits where a token came of it.
    assert found.compared.rows == sum(LENGTHS) + 4 * 5
    forwards = b.forwards()
    assert {line["layout"] for line in forwards} == {"packed"}
    if "row_budget" in keys:
        assert max(line["shape"][1] for line in forwards) == 5
        assert "mixed" in {line["phase"] for line in forwards}
    assert any("pages of" in note for note in b.header["notes"])
    # The model is as it was, and torch's random numbers are.
    assert model.config._attn_implementation == attention
    assert all("forward" not in vars(module) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(drawn, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("make", "implementation", "dtype", "base"),
    some_now(
        [
            (tiny_llama, "sdpa", "bfloat16", "serial"),
            (tiny_qwen3, "sdpa", "float32", "static"),
            (tiny_gemma3, "sdpa", "bfloat16", "serial"),
            (tiny_gemma3, "eager", "float32", "serial"),
        ],
        0,
    ),
)
def test_what_differs_beside_other_requests_is_rounding(
    torch: Any, make: Callable[[Any], Any], implementation: str, dtype: str, base: str
) -> None:
    model = make(torch).to(getattr(torch, dtype))
    model.set_attn_implementation(implementation)
    asked = scenario(schedule=base)
    verdict = explain(asked, asked.with_changes(**MORE), engine=TransformersEngine(model, name="tiny"))
    assert verdict.kind in ("identical", "numerics"), verdict.sentence
    assert verdict.kind == "identical" or verdict.rule == "path"


# Each fault takes (monkeypatch, torch) and says what is found: what, of which request, from which position on, and words of it.
Found = tuple[str, str, int, str]


def shifted_read(patch: pytest.MonkeyPatch, torch: Any) -> Found:
    """From nine positions on, request r1 is given what lies one cell further."""
    from transformers.generation.continuous_batching.cache_allocators import (
        FullAttentionCacheAllocator as Kind,
    )

    native = Kind.get_read_indices

    def wrong(kind: Any, request: str, past: int, rows: int) -> list[int]:
        cells = native(kind, request, past, rows)
        return [*cells[1:], cells[-1] + 1] if request == "1" and past == 8 else cells

    patch.setattr(Kind, "get_read_indices", wrong)
    return "cache_missing", "r1", 8, "did not see the entry of its own position 0"


def swapped_reads(patch: pytest.MonkeyPatch, torch: Any) -> Found:
    """In one forward r0 and r1, which are as long as each other, read each other's pages."""
    from transformers.generation.continuous_batching.cache_allocators import (
        FullAttentionCacheAllocator as Kind,
    )

    native = Kind.get_read_indices

    def wrong(kind: Any, request: str, past: int, rows: int) -> list[int]:
        swapped = {"0": "1", "1": "0"}.get(request, request) if past == 7 else request
        return native(kind, swapped, past, rows)

    patch.setattr(Kind, "get_read_indices", wrong)
    return "cache_foreign", "r0", 7, "saw the entries of positions 0-"


def freed_page(patch: pytest.MonkeyPatch, torch: Any) -> Found:
    """The first page of r1 goes back to the pool while r1 goes on reading it; r0 writes there next."""
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchProcessor as Processor,
    )

    native = Processor.prepare_next_batch

    def wrong(processor: Any) -> bool:
        (kind,) = processor.cache.cache_allocators.values()
        r1 = processor.scheduler.active_requests.get("1")
        if r1 is not None and r1.position_offset == 7:
            kind.pool.free_blocks(kind.index, kind.block_table["1"][:1])
        return native(processor)

    patch.setattr(Processor, "prepare_next_batch", wrong)
    return "cache_foreign", "r1", 8, "saw the entry of position 8 of r0"


def changed_entry(patch: pytest.MonkeyPatch, torch: Any) -> Found:
    """The value of position 1 of r0 in layer 1 changes where it lies."""
    from transformers.generation.continuous_batching.cache_allocators import (
        FullAttentionCacheAllocator as Kind,
    )

    native = Kind.update

    def wrong(kind: Any, keys: Any, values: Any, layer: int, read: Any, write: Any) -> Any:
        if layer == 1 and len(read) and len(write) == 3:
            kind._kv_token_views[layer][1][read[1], 1] += 1
        return native(kind, keys, values, layer, read, write)

    patch.setattr(Kind, "update", wrong)
    return (
        "cache_changed",
        "r0",
        6,
        "the cache entry V of layer 1, head 1, position 1 is not what was written",
    )


def shifted_positions(patch: pytest.MonkeyPatch, torch: Any) -> Found:
    """In one forward the second request's positions are one too high."""
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs as Inputs

    native = Inputs.get_model_kwargs

    def wrong(inputs: Any, use_padding: bool = False) -> Any:
        kwargs = native(inputs, use_padding)
        if kwargs["position_ids"][0].tolist()[:2] == [7, 7]:
            kwargs["position_ids"] = kwargs["position_ids"] + torch.tensor([[0, 1, 0]], dtype=torch.int32)
        return kwargs

    patch.setattr(Inputs, "get_model_kwargs", wrong)
    return "offset", "r1", 7, "the row at position 7 was computed at position 8"


def leaking_mask(patch: pytest.MonkeyPatch, torch: Any) -> Found:
    """In forwards of three rows the mask hides nothing from the first of them."""
    from transformers.generation.continuous_batching import input_outputs

    native = input_outputs.build_attention_mask

    def wrong(attention_mask: Any, cumulative_seqlens_q: list[int], *rest: Any, **more: Any) -> None:
        native(attention_mask, cumulative_seqlens_q, *rest, **more)
        if cumulative_seqlens_q[-1] == 3:
            attention_mask[..., 0, :12] = 0

    patch.setattr(input_outputs, "build_attention_mask", wrong)
    return "cache_foreign", "r0", 6, "of r1"


def swapped_logits(patch: pytest.MonkeyPatch, torch: Any) -> Found:
    """In one forward r0 and r1 are answered from each other's logits."""
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs as Inputs

    native = Inputs.get_model_kwargs

    def wrong(inputs: Any, use_padding: bool = False) -> Any:
        kwargs = native(inputs, use_padding)
        if kwargs["position_ids"][0].tolist()[:2] == [7, 7]:
            kwargs["logits_indices"] = kwargs["logits_indices"][[1, 0, 2]]
        return kwargs

    patch.setattr(Inputs, "get_model_kwargs", wrong)
    return (
        "logits_read",
        "r0",
        7,
        "was chosen from logits that are not its row's but those of position 7 of r1",
    )


FAULTS = (
    shifted_read,
    swapped_reads,
    freed_page,
    changed_entry,
    shifted_positions,
    leaking_mask,
    swapped_logits,
)


@pytest.fixture(scope="module")
def sound(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[TransformersEngine, Trace]:
    """A model, and its requests alone under pinned kernels; in pages every bit is the same."""
    engine = TransformersEngine(tiny_llama(torch), name="tiny")
    folder = tmp_path_factory.mktemp("sound")
    alone = record(scenario(), folder / "a", engine=engine, options=PINNED)
    paged = record(scenario().with_changes(**MORE), folder / "b", engine=engine, options=PINNED)
    found = compare(alone, paged)
    assert found.identical and not found.bookkeeping
    return engine, alone


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_paged_path_is_named_at_its_row(
    torch: Any,
    sound: tuple[TransformersEngine, Trace],
    fault: Callable[[pytest.MonkeyPatch, Any], Found],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, alone = sound
    what, request, position, words = fault(monkeypatch, torch)
    wrong = record(scenario().with_changes(**MORE), tmp_path / "b", engine=engine, options=PINNED)
    found = compare(alone, wrong)
    first = next((each for each in found.bookkeeping if each.what == what and each.request == request), None)
    assert first is not None and words in first.detail, found.bookkeeping
    at = found.request(request)
    assert at.origin is None or at.origin.position == position
    assert at.origin is not None or at.flip is not None
    read_otherwise(found, what, request, position)


def read_otherwise(found: Divergence, what: str, request: str, position: int) -> None:
    """What is read is not what was written, at the very row, where a row saw other entries than its own."""
    origin = found.request(request).origin
    if what.startswith("cache"):
        assert origin is not None
        assert (origin.kind, origin.layer) == ("cache_read", 1 if what == "cache_changed" else 0)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("ring", "did not see the entry of its own position 8 in the cache of layer 0"),
        (
            "wide",
            "saw the entry of its own position 5, before the last 4 positions that it may see, in the cache of layer 0",
        ),
    ],
)
def test_a_window_that_is_read_one_slot_off_is_named(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, words: str
) -> None:
    from transformers.generation.continuous_batching.cache_allocators import (
        SlidingAttentionCacheAllocator as Kind,
    )

    engine = TransformersEngine(tiny_gemma3(torch), name="tiny")
    alone = record(scenario(), tmp_path / "a", engine=engine, options=PINNED)
    one = scenario().with_changes(schedule="continuous", active=1, page_tokens=4)
    sound = record(one, tmp_path / "b", engine=engine, options=PINNED)
    native = Kind.get_read_indices

    def wrong(kind: Any, request: str, past: int, rows: int) -> list[int]:
        return native(kind, request, past - (request == "0" and past == 9), rows)

    def wide(kind: Any, request: str, past: int, rows: int) -> list[int]:
        cells = native(kind, request, past, rows)
        if request == "0" and past == 9:
            cells[0] = native(kind, request, past - 1, rows)[0]
        return cells

    monkeypatch.setattr(Kind, "get_read_indices", wrong if place == "ring" else wide)
    faulty = record(one, tmp_path / "c", engine=engine, options=PINNED)
    found = compare(alone, faulty)
    assert any(each.request == "r0" and words in each.detail for each in found.bookkeeping), found.bookkeeping
    origin = found.request("r0").origin
    assert origin is not None and (origin.kind, origin.layer, origin.position) == ("cache_read", 0, 9)
    assert compare(alone, sound).identical and not compare(alone, sound).bookkeeping


@pytest.mark.parametrize("fault", some_now([shifted_positions, freed_page, swapped_reads], 0))
def test_a_fault_in_the_paged_path_is_a_bug(
    torch: Any, fault: Callable[[pytest.MonkeyPatch, Any], Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersEngine(tiny_llama(torch), name="tiny")
    _, request, *_ = fault(monkeypatch, torch)
    verdict = explain(scenario(), scenario().with_changes(**MORE), engine=engine)
    assert (verdict.kind, verdict.rule) == ("bug", "bookkeeping"), verdict.sentence
    assert "in run b" in verdict.sentence and f"of request {request}" in verdict.sentence


@pytest.mark.thorough
def test_a_wrong_kernel_beside_other_requests_is_a_bug(torch: Any) -> None:
    model = tiny_llama(torch).to(torch.bfloat16)
    model.set_attn_implementation("sdpa")
    engine = TransformersEngine(model, name="tiny")

    def lossy(module: Any, args: Any, y: Any) -> Any:
        return y * torch.where(torch.arange(y.shape[-1]) == 5, 1.05, 1.0).to(y.dtype) if y.shape[1] > 9 else y

    model.get_submodule("model.layers.0.self_attn.k_proj").register_forward_hook(lossy)
    verdict = explain(scenario(), scenario().with_changes(**MORE), engine=engine)
    assert (verdict.kind, verdict.rule) == ("bug", "outside"), verdict.sentence
    assert "model.layers.0.self_attn.k_proj (linear, columns 5 to 5)" in verdict.sentence


def test_what_continuous_batching_cannot_be_told_is_said(torch: Any) -> None:
    model = tiny_llama(torch)
    engine = TransformersEngine(model, name="tiny")
    for keys, words in (
        ({"share_prefix": True}, "share_prefix is true, and pages that .* Leave it out"),
        ({"page_tokens": 3}, "page_tokens is 3, and transformers has pages of 4 positions at least"),
        (
            {"prefill_chunk": 4},
            r"prefill_chunk cannot be told .* knows one limit, of a forward's rows \(row_budget\)",
        ),
        ({"lens": True}, "lens cannot be told"),
        ({"temperature": 0.5}, "the temperature of request 'r0' cannot be told"),
        ({"task": "embed"}, "task is embed and schedule is continuous"),
    ):
        with pytest.raises(EngineRefuses, match=words):
            engine.check(scenario(schedule="continuous", **keys))  # type: ignore[arg-type]
    model.generation_config.repetition_penalty = 1.5
    with pytest.raises(EngineRefuses, match="generation_config asks for RepetitionPenaltyLogitsProcessor"):
        engine.check(scenario(schedule="continuous"))
    model.generation_config.repetition_penalty = None
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(
        EngineRefuses, match="no continuous batching for LlamaForCausalLM .*Invalid layer type"
    ):
        engine.check(scenario(schedule="continuous"))
    model.config.layer_types = None
    engine.check(scenario(schedule="continuous", row_budget=4, page_tokens=4))


def test_a_run_that_transformers_does_not_go_through_with_is_said(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler as Memory
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchProcessor as Processor,
    )

    model = tiny_llama(torch)
    asked = scenario().with_changes(**MORE)

    def fails(number: int, error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            record(asked, tmp_path / str(number), engine=model)
        assert model.config._attn_implementation == "eager"

    with monkeypatch.context() as patch:
        patch.setattr(Memory, "get_available_memory", lambda self: 0)
        fails(0, EngineRefuses, "no room for 3 requests at a time and 21 rows a forward .*Ask for fewer")
    with monkeypatch.context() as patch:
        patch.setattr(Processor, "prepare_next_batch", lambda self: False)
        fails(1, EngineFailed, "has no next forward, and 4 requests have not ended")
    with monkeypatch.context() as patch:
        # Too few pages: transformers takes a request out and begins it anew.
        patch.setattr(PagesPlan, "blocks", lambda *_: 6)
        fails(2, EngineFailed, "began request 'r[0-3]' anew")


def test_texts_end_where_the_model_ends_them_and_leave_their_place(torch: Any, tmp_path: Path) -> None:
    model = tiny_llama(torch)
    engine = TransformersEngine(model, name="tiny")
    whole = record(scenario(), tmp_path / "whole", engine=engine, options=PINNED).generated()
    model.generation_config.eos_token_id = [int(whole.token[1]), 1]
    a = record(scenario(), tmp_path / "a", engine=engine, options=PINNED)
    b = record(
        scenario().with_changes(**{**MORE, "active": 1}), tmp_path / "b", engine=engine, options=PINNED
    )
    assert compare(a, b).identical
    cut = b.generated()
    assert cut.token[cut.request == 0].tolist() == whole.token[:2].tolist()
    # The next request begins right after.
    assert [{row["request"] for row in line["rows"]} for line in b.forwards()][1:3] == [{0}, {1}]


def test_a_model_that_gives_all_its_logits_is_recorded_alike(torch: Any, tmp_path: Path) -> None:
    model = tiny_llama(torch)
    engine = TransformersEngine(model, name="tiny")
    asked = scenario().with_changes(**MORE, row_budget=5)
    sliced = record(asked, tmp_path / "a", engine=engine, options=PINNED)
    model._supports_logits_to_keep = lambda: False
    whole = record(asked, tmp_path / "b", engine=engine, options=PINNED)
    found = compare(sliced, whole)
    assert found.identical and found.compared.rows == sum(LENGTHS) + 4 * 5
