"""Random-weight twins: every architecture runs on one, its weights are keyed by name, and a reduction may end with one."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from injecting import called
from mlx.utils import tree_flatten
from plugins.small_models import small_config, write_directory
from tiny import CONFIGS

from detdiff.engines.mlx.engine import record
from detdiff.engines.mlx.model import identity, load
from detdiff.engines.mlx.model_directory import draw, layers_of, twin_of, with_layers
from detdiff.errors import ModelConfigInvalid, ModelError, TokenizerMissing
from detdiff.explain import DECIDING, explain
from detdiff.reduce import ReduceOptions, Step, reduce
from detdiff.scenario import Scenario

QUANTISED = {"group_size": 32, "bits": 4, "mode": "affine"}


def directory(folder: Path, arch: str = "llama", seed: int = 0, dtype: str = "float32", **more: Any) -> Path:
    folder.mkdir()
    config = {**CONFIGS[arch], "detdiff_random": {"seed": seed, "dtype": dtype}, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def arrays(path: Path) -> dict[str, bytes]:
    parameters: Any = tree_flatten(load(str(path)).model.parameters())
    return {name: np.array(array.view(mx.uint8)).tobytes() for name, array in parameters}


# MLX's experts on a CPU take float32 alone.
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        (arch, dtype)
        for arch in CONFIGS
        for dtype in ("float32", "bfloat16")
        if dtype == "float32" or "num_experts" not in CONFIGS[arch]
    ],
)
def test_every_architecture_gives_logits_that_differ(arch: str, dtype: str, tmp_path: Path) -> None:
    model = load(str(directory(tmp_path / "twin", arch, dtype=dtype))).model
    logits = model(mx.array([[1, 2, 3, 4, 5, 6]]))[0].astype(mx.float32)
    found = np.array(logits)
    assert np.isfinite(found).all() and 0.05 < found.std() < 50
    assert len(np.unique(found)) > found.size // 2


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    paths = [directory(tmp_path / str(n), seed=seed) for n, seed in enumerate((3, 3, 4))]
    one, same, other = map(arrays, paths)
    assert one == same and one != other
    hashes = [identity(path)["weights_sha256"] for path in paths]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("arch", CONFIGS)
def test_fewer_layers_leave_the_others_alone(arch: str, tmp_path: Path) -> None:
    whole = directory(tmp_path / "whole", arch)
    source = load(str(whole))
    few = arrays(twin_of(source, tmp_path / "few", layers=2))
    every = arrays(twin_of(source, tmp_path / "every"))
    assert few.items() <= every.items()
    assert {
        name for name in every if ".layers." in name and int(name.split(".layers.")[1].split(".")[0]) < 2
    } <= set(few)


def test_a_quantised_twin_is_quantised_where_its_source_is(tmp_path: Path) -> None:
    source = directory(tmp_path / "source", quantization={**QUANTISED, "model.layers.1.mlp.down_proj": False})
    names = set(arrays(source))
    assert "model.layers.0.mlp.down_proj.scales" in names
    assert "model.layers.1.mlp.down_proj.scales" not in names
    assert set(arrays(twin_of(load(str(source)), tmp_path / "twin", seed=5))) == names


def test_a_twin_takes_dtype_and_shapes_of_real_weights(tmp_path: Path) -> None:
    source = load(str(write_directory(tmp_path / "source")))
    twin = load(str(twin_of(source, tmp_path / "twin")))
    shapes = [
        {name: (array.shape, array.dtype) for name, array in tree_flatten(each.model.parameters())}
        for each in (source, twin)
    ]
    assert shapes[0] == shapes[1]
    assert twin.identity["weights_sha256"] != source.identity["weights_sha256"]
    assert sorted(path.name for path in (tmp_path / "twin").iterdir()) == ["config.json"]


def test_what_is_drawn_is_the_same_on_every_machine() -> None:
    def digest(name: str, *shape: int) -> str:
        return hashlib.sha256(draw(7, name, shape).astype("<f4").tobytes()).hexdigest()[:16]

    assert digest("a.weight", 5, 3) == "a09c97a8b3ba2dc0"
    assert digest("a.bias", 5) == "7cb1c86e8174af2e"
    assert draw(7, "norm.weight", (4,)).tolist() == [1, 1, 1, 1]
    wide = draw(7, "wide.weight", (200, 300))
    assert wide.std() == pytest.approx(300**-0.5, rel=0.02) and abs(wide.mean()) < 0.001
    rates = draw(7, "mixer.A_log", (500,))
    assert 0 <= rates.min() < 0.1 and np.log(16) - 0.1 < rates.max() <= np.log(16)
    assert draw(7, "a.bias", (500,)).std() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    "recipe",
    [
        None,
        3,
        {},
        {"seed": -1, "dtype": "float32"},
        {"seed": True, "dtype": "float32"},
        {"seed": 1, "dtype": "int8"},
    ],
)
def test_a_recipe_that_is_none_is_refused(recipe: Any, tmp_path: Path) -> None:
    path = directory(tmp_path / "twin", detdiff_random=recipe)
    with pytest.raises(ModelConfigInvalid, match="expected a seed, 0 or more, and a dtype"):
        load(str(path))


def test_weights_beside_a_recipe_are_refused(tmp_path: Path) -> None:
    path = write_directory(
        tmp_path / "model", small_config("llama", detdiff_random={"seed": 0, "dtype": "float32"})
    )
    with pytest.raises(ModelConfigInvalid, match="there are weight files beside it. Remove one"):
        load(str(path))


def test_quantisation_that_cannot_be_made_is_an_error_of_the_model(tmp_path: Path) -> None:
    path = directory(tmp_path / "twin", quantization={**QUANTISED, "bits": 77})
    with pytest.raises(ModelError, match="cannot be quantised as config.json says"):
        load(str(path))


def test_text_is_no_prompt_for_a_twin(tmp_path: Path) -> None:
    path = directory(tmp_path / "twin")
    asked = Scenario.from_flags(str(path), ["In the beginning"], "max_tokens=2")
    with pytest.raises(TokenizerMissing, match="Give the prompt as token ids"):
        record(asked, tmp_path / "trace")


def test_texts_of_a_twin_are_ids_in_brackets(tmp_path: Path) -> None:
    path = directory(tmp_path / "twin", eos_token_id=[5, 6])
    asked = Scenario.from_dict({"model": str(path), "max_tokens": 3, "request": [{"tokens": [1, 2, 3]}]})
    trace = record(asked, tmp_path / "trace")
    assert trace.header["observer"]["equal"] and set(trace.texts().values()) <= {f"[{n}]" for n in range(96)}
    assert load(str(path)).tokenizer.eos_token_ids == {5, 6}


@pytest.mark.parametrize("layers", [0, 3])
def test_layers_that_are_not_there_cannot_stay(layers: int) -> None:
    with pytest.raises(ModelConfigInvalid, match="states 2 of layers"):
        with_layers(CONFIGS["llama"], layers)
    with pytest.raises(ModelConfigInvalid, match="states no number of layers"):
        with_layers({"model_type": "llama"}, 1)


def test_lists_by_layer_are_cut_with_the_layers() -> None:
    config = {"text_config": {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "eos_token_id": [1, 2]}}
    found = with_layers(config, 2)
    assert found == {
        "text_config": {"num_hidden_layers": 2, "layer_types": ["a", "b"], "eos_token_id": [1, 2]}
    }
    assert layers_of(config) == 3


KEYS = {"layout": "packed", "kernels": "candle-metal", "max_tokens": 4}


def pair(model: Path) -> tuple[Scenario, Scenario]:
    requests = [{"id": f"r{n}", "tokens": list(range(5 * n + 1, 5 * n + 13))} for n in range(3)]
    a = Scenario.from_dict({"model": str(model), **KEYS, "schedule": "serial", "request": requests})
    return a, a.with_changes(schedule="continuous")


@pytest.mark.thorough
def test_a_reduction_may_need_no_weights_at_all(tmp_path: Path) -> None:
    model = write_directory(tmp_path / "model", small_config("llama", num_hidden_layers=3))
    a, b = pair(model)
    found = reduce(a, b, folder=tmp_path / "smaller")
    assert found.twin and found.finished and found.verdict.kind == "numerics"
    assert found.rows_after * 4 <= found.rows_before and found.steps[-1].layers == 1
    config = json.loads((tmp_path / "smaller" / "twin" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1 and config["detdiff_random"]["dtype"] == "float32"
    # Elsewhere, without the model and without the folder that it was made in.
    shutil.move(tmp_path / "smaller", tmp_path / "sent")
    shutil.rmtree(model)
    files = [tmp_path / "sent" / f"{name}.toml" for name in "ab"]
    assert 'model = "./twin"' in files[0].read_text()
    again = explain(*files, controls=DECIDING)
    assert (again.kind, again.rule) == (found.verdict.kind, found.verdict.rule)


@pytest.mark.thorough
def test_interrupted_at_the_twin_it_goes_on_with_it(tmp_path: Path) -> None:
    model = write_directory(tmp_path / "model", small_config("llama", num_hidden_layers=2))

    def interrupt(step: Step) -> None:
        if step.sentence == "random weights":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reduce(*pair(model), folder=tmp_path / "smaller", on_step=interrupt)
    assert (tmp_path / "smaller" / "twin" / "config.json").is_file()
    found = reduce(*pair(model), folder=tmp_path / "smaller")
    whole = reduce(*pair(model), folder=tmp_path / "whole")
    assert found.steps == whole.steps and found.tried == whole.tried
    for name in ("a.toml", "b.toml", "steps.jsonl", "tried.jsonl", "twin/config.json"):
        assert (found.folder / name).read_bytes() == (whole.folder / name).read_bytes()


@pytest.mark.thorough
def test_a_draft_has_a_twin_beside_that_of_its_target(tmp_path: Path) -> None:
    """Only verifications take another kernel, so there have to be drafts."""
    paths = [write_directory(tmp_path / name) for name in ("model", "draft")]
    rules = [
        [{"phase": "verify", "rows": "2..", "path": path}] for path in ("mlx-cuda/gemv", "mlx-cuda/gemm")
    ]
    keys = {"model": str(paths[0]), "draft": str(paths[1]), "drafts": 3, "layout": "packed", "max_tokens": 7}
    requests = [{"id": f"r{n}", "tokens": list(range(7 * n + 1, 7 * n + 7))} for n in range(2)]
    a, b = (Scenario.from_dict({**keys, "request": requests, "rule": rule}) for rule in rules)
    found = reduce(a, b, folder=tmp_path / "smaller")
    assert found.twin and found.verdict.kind == "numerics" and found.rows_after * 4 <= found.rows_before
    shutil.move(tmp_path / "smaller", tmp_path / "sent")
    for path in paths:
        shutil.rmtree(path)
    assert 'draft = "./twin-draft"' in (tmp_path / "sent" / "b.toml").read_text()
    again = explain(*(tmp_path / "sent" / f"{name}.toml" for name in "ab"), controls=DECIDING)
    assert again.kind == "numerics"


@pytest.mark.thorough
def test_a_twin_is_left_out_where_it_is_not_wanted(tmp_path: Path) -> None:
    model = write_directory(tmp_path / "model")
    found = reduce(*pair(model), folder=tmp_path / "own", options=ReduceOptions(twin=False))
    assert not found.twin and found.scenario_a.model == str(model)
    assert not (tmp_path / "own" / "twin").exists() and found.rows_after * 4 <= found.rows_before


@pytest.mark.thorough
def test_a_fault_of_the_model_itself_keeps_the_model(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "model")
    of = load(str(path))
    asked = Scenario.from_dict({**pair(path)[0].to_dict(), "layout": "padded", "kernels": "native"})

    def call(native: Any, x: mx.array) -> Any:
        y = native(x)
        return mx.concatenate([y[..., :-8], mx.zeros_like(y[..., -8:])], axis=-1) if 2 <= x.shape[0] else y

    with called(of.model.model.layers[1].mlp.up_proj, call):
        found = reduce(asked, asked.with_changes(schedule="static"), folder=tmp_path / "own", loaded=of)
    assert found.verdict.kind == "bug" and not found.twin and found.finished
    assert found.rows_after * 4 <= found.rows_before and found.steps[-1].requests == 2
