"""What the packed layout cannot do is an error that names the module or site; it never runs and is wrong."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from runs import ARCHITECTURES, PACKABLE, Runs, loaded, model, scenario
from tiers import some_now
from toy_models import LEAKS, NAMED, Attention, Toy

from detdiff.compare import compare
from detdiff.engines.mlx import serve
from detdiff.engines.mlx.engine import MlxEngine, generate
from detdiff.engines.mlx.model import LoadedModel
from detdiff.engines.mlx.run_checks import refuse_leaks
from detdiff.errors import LayoutError
from detdiff.scenario import KernelPlan

PACKED = scenario("continuous", "packed", arrivals=(0, 2, 5))


def toy(attention: type[Attention] = Attention, mixer: type[nn.Module] | None = None) -> LoadedModel:
    mx.random.seed(3)
    return loaded(Toy(attention, mixer), "toy")


def test_a_sound_model_of_ones_own_is_packed(runs: Runs) -> None:
    of = toy()
    assert compare(runs.record(of, scenario()), runs.record(of, PACKED)).identical


@pytest.mark.parametrize("attention", NAMED)
def test_an_attention_that_looks_into_packed_objects_is_named(attention: type[Attention]) -> None:
    of = toy(attention)
    if attention.__name__ != "RopeBeforeHeads":
        assert generate(scenario(max_tokens=2), loaded=of)
    with pytest.raises(LayoutError, match=r"module layers\.0\.self_attn\S* cannot run .*padded") as caught:
        generate(PACKED, loaded=of)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mixer", LEAKS)
def test_a_mixer_that_mixes_rows_without_a_cache_is_found_at_the_start(
    runs: Runs, mixer: type[nn.Module]
) -> None:
    of = toy(mixer=mixer)
    # What a module has taps for is named itself; else the first site that takes what it made.
    first = "mixer" if of.model.layers[0].mixer.children() else "up_proj"
    with pytest.raises(LayoutError, match=rf"mixes the rows .* site layers\.0\.{first} .*padded"):
        runs.record(of, PACKED)
    with pytest.raises(LayoutError, match="mixes the rows"):
        generate(PACKED, loaded=of)


def test_a_model_is_checked_once_a_profile_and_again_after_a_reset(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    monkeypatch.setattr(serve, "refuse_leaks", lambda _, plan, staged: checked.append(plan.profile))
    engine = MlxEngine(toy())
    for profile in (None, None, "candle-metal", None):
        runs.record(engine.loaded, PACKED.with_changes(kernels=profile or "native"))
    assert checked == [None, "candle-metal"]
    engine.reset()
    runs.record(engine.loaded, PACKED)
    assert checked == [None, "candle-metal", None]


@pytest.mark.parametrize("profile", some_now([None, "candle-metal"], 0))
@pytest.mark.parametrize("arch", PACKABLE)
def test_every_packable_class_passes_the_check(arch: str, profile: str | None) -> None:
    for fmt in ("f32", "q4"):
        refuse_leaks(model(arch, fmt).model, KernelPlan(profile))


@pytest.mark.parametrize("arch", sorted(set(ARCHITECTURES) - set(PACKABLE)))
def test_recurrent_classes_are_refused_by_name(arch: str) -> None:
    named = {"qwen3_next": r"layers\.0\.linear_attn", "mamba2": r"layers\.0\.mixer"}[arch]
    with pytest.raises(LayoutError, match=rf"module {named} keeps its state in ArraysCache"):
        generate(PACKED, loaded=model(arch))


def test_a_block_named_like_a_rope_is_still_a_block(runs: Runs) -> None:
    class NormedRopeAttention(Attention):
        pass

    trace = runs.record(toy(NormedRopeAttention), scenario(max_tokens=2))
    kinds = {site.name: site.kind for site in trace.sites}
    assert kinds["layers.0.self_attn"] == "attn_block"
    assert kinds["layers.0.self_attn.rope.q"] == "rope"
