"""Adapters of mlx-lm: loaded as mlx-lm loads them, named in the trace, and refused where they do not fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from adapters import adapted, write_adapter
from mlx_lm.utils import load as mlx_lm_load
from runs import model
from tiny import tiny

from detdiff import Scenario
from detdiff.engines.mlx.engine import record
from detdiff.engines.mlx.model import builtin_path, load
from detdiff.errors import AdapterInvalid, ScenarioConflict
from detdiff.scenario.keys import parse_flags


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(load("builtin"), tmp_path_factory.mktemp("adapters") / "lora")


def test_the_builtin_model_with_an_adapter_is_mlx_lms(folder: Path) -> None:
    ours = load("builtin", str(folder))
    native = mlx_lm_load(str(builtin_path()), adapter_path=str(folder))[0]
    tokens = mx.array([[1, 2, 3, 4]])
    assert mx.array_equal(ours.model(tokens), native(tokens))
    assert not mx.array_equal(ours.model(tokens), load("builtin").model(tokens))
    assert ours.identity["adapter"] == {
        "name": "lora",
        "type": "lora",
        "scale": 8.0,
        "rank": 4,
        "sha256": ours.identity["adapter"]["sha256"],
        "base_weights_sha256": load("builtin").identity["weights_sha256"],
    }
    assert ours.identity["weights_sha256"] != load("builtin").identity["weights_sha256"]


def test_a_scenario_names_its_adapter_and_a_changed_one_is_another_model(
    folder: Path, tmp_path: Path
) -> None:
    asked = Scenario.from_flags("builtin", ["a"], f"max_tokens=2 adapter_path={folder}")
    first = record(asked, tmp_path / "first")
    assert first.scenario["adapter_path"] == str(folder)
    assert first.model["adapter"]["name"] == "lora"
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    write_adapter(load("builtin"), other, seed=6)
    second = record(asked.with_changes(**parse_flags(f"adapter_path={other}")), tmp_path / "second")
    assert second.model["weights_sha256"] != first.model["weights_sha256"]


@pytest.mark.parametrize("dora", [False, True])
def test_a_site_with_an_adapter_has_the_whole_and_the_base_within(dora: bool, tmp_path: Path) -> None:
    of = adapted(tiny("llama"), write_adapter(tiny("llama"), tmp_path / "a", dora=dora))
    trace = record(Scenario.from_dict({"model": "m", "max_tokens": 2, "request": [{"tokens": [1, 2]}]}), tmp_path / "t",
                   loaded=of)  # fmt: skip
    kinds = {site.name: (site.kind, site.parent) for site in trace.sites}
    whole = "layers.1.self_attn.q_proj"
    assert kinds[whole][1] == "layers.1.self_attn"
    if not dora:
        assert kinds[f"{whole}.linear"] == ("linear", whole)


def test_what_is_no_adapter_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(AdapterInvalid, match=r"has no adapter_config.json and no adapters.safetensors"):
        load("builtin", str(tmp_path))
    wrong = write_adapter(tiny("llama"), tmp_path / "wrong")
    with pytest.raises(AdapterInvalid, match="expected one that was made for this model"):
        load("builtin", str(wrong))
    with pytest.raises(ScenarioConflict, match="adapter_path is mlx-lm's own"):
        Scenario.from_dict(
            {"model": "m", "engine": "transformers", "adapter_path": "x", "request": [{"prompt": "a"}]}
        )
    assert model("llama").identity.get("adapter") is None
