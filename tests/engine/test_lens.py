"""Per-layer logits: every block's output through the final norm and the head, without disturbing the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from runs import ARCHITECTURES, PACKABLE, Runs, content, digests, loaded, model, scenario, values
from tiers import some_now
from toy_models import Toy

from detdiff.engines.mlx.engine import record
from detdiff.engines.mlx.taps.forward import top
from detdiff.errors import LayoutError
from detdiff.trace import Lens, Trace

TOP = 5
KEYS: dict[str, Any] = {"arrivals": (0, 2, 5), "max_tokens": 5, "lens": True, "top": TOP}


def lens_of(trace: Trace) -> Lens:
    found = trace.generated().lens
    assert found is not None
    return found


CASES = [
    (arch, layout)
    for arch in ARCHITECTURES
    for layout in ("padded", "packed")
    if layout == "padded" or arch in PACKABLE
]


@pytest.mark.parametrize(("arch", "layout"), some_now(CASES, *range(0, len(CASES), 3)))
def test_the_last_layer_s_view_is_the_answer(runs: Runs, arch: str, layout: str) -> None:
    trace = runs.record(model(arch), scenario("continuous", layout, **KEYS))
    generated, lens = trace.generated(), lens_of(trace)
    layers = len(model(arch).model.layers)
    assert lens.top_ids.shape == lens.top_logits.shape == (15, layers, TOP)
    assert lens.contested.shape == (15, layers, 2)
    assert np.array_equal(lens.top_ids[:, -1], generated.top_ids)
    assert np.array_equal(lens.top_logits[:, -1], generated.top_logits)
    assert np.array_equal(lens.contested[:, -1], generated.top_logits[:, :2])
    assert (np.diff(lens.top_logits, axis=2) <= 0).all()
    # A preference that turns somewhere: else every layer would say the same.
    assert (lens.top_ids[:, 0, 0] != generated.top_ids[:, 0]).any()


@pytest.mark.parametrize(("arch", "fmt"), [("llama", "bf16"), ("qwen3_moe", "q4"), ("gemma3_text", "f32")])
def test_every_layer_s_view_is_norm_and_head_of_its_output(runs: Runs, arch: str, fmt: str) -> None:
    of = model(arch, fmt)
    trace = runs.record(of, scenario("static", "packed", **{**KEYS, "arrivals": ()}, capture="full"))
    generated, lens = trace.generated(), lens_of(trace)
    inner = of.model.model
    dtype = mx.bfloat16 if fmt == "bf16" else mx.float32
    for layer in range(len(of.model.layers)):
        outputs = values(trace, f"layers.{layer}", "out")
        for i, (request, position) in enumerate(
            zip(generated.request.tolist(), generated.position.tolist(), strict=True)
        ):
            hidden = mx.array(outputs[request, position][None]).view(dtype)
            normed = inner.norm(hidden[None])
            own = "lm_head" in of.model
            logits = of.model.lm_head(normed) if own else inner.embed_tokens.as_linear(normed)
            plain = np.array(logits[0].astype(mx.float32))
            ids, best = top(plain, TOP)
            assert np.array_equal(lens.top_ids[i, layer], ids[0])
            assert np.array_equal(lens.top_logits[i, layer], best[0])
            assert np.array_equal(lens.contested[i, layer], plain[0, generated.top_ids[i, :2]])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_lens_disturbs_nothing(runs: Runs, layout: str) -> None:
    with_lens = runs.record(model("qwen3"), scenario("continuous", layout, **KEYS))
    without = runs.record(model("qwen3"), scenario("continuous", layout, **{**KEYS, "lens": False}))
    assert without.generated().lens is None
    assert digests(with_lens) == digests(without)
    assert content(with_lens) == content(without)


def test_the_lens_does_not_depend_on_the_memory_budget(runs: Runs) -> None:
    keys = {"lengths": (90, 3), "max_tokens": 3, "lens": True, "layout": "packed"}
    large = lens_of(runs.record(model("llama"), scenario("static", **keys)))
    small = lens_of(runs.record(model("llama"), scenario("static", memory_mb=1, **keys)))
    assert np.array_equal(large.top_ids, small.top_ids)
    assert np.array_equal(large.contested, small.contested)


class Headless(Toy):
    """The output projection is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.lm_head.weight
        del self.lm_head

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self.lm_head = lambda x: x @ self.weight.T
        try:
            return super().__call__(inputs, cache)
        finally:
            del self.lm_head


class Normless(Toy):
    def __init__(self) -> None:
        super().__init__()
        del self.norm

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self.norm = lambda x: x
        try:
            return super().__call__(inputs, cache)
        finally:
            del self.norm


@pytest.mark.parametrize(
    ("built", "words"),
    [(Headless, "no output projection"), (Normless, "no final norm")],
)
def test_a_model_without_final_norm_or_head_has_no_lens(
    runs: Runs, tmp_path: Path, built: type[Toy], words: str
) -> None:
    of = loaded(built(), built.__name__)
    assert runs.record(of, scenario(max_tokens=2)).complete
    with pytest.raises(LayoutError, match=words):
        record(scenario(lens=True, max_tokens=2), tmp_path / "t", loaded=of)
    assert not (tmp_path / "t").exists()
