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
from detdiff.compare import compare
from detdiff.engines.mlx.engine import record
from detdiff.engines.mlx.model import builtin_path, load
from detdiff.errors import AdapterInvalid, ReductionError, ScenarioConflict
from detdiff.reduce import reduce
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


def talk(**keys: object) -> Scenario:
    turns = [{"tokens": [6], "use_adapter": False}, {"tokens": [7], "use_adapter": False}, {"tokens": [8]}]
    request = {"id": "r0", "tokens": [1, 2, 3, 4, 5], "turn": turns}
    return Scenario.from_dict({"model": "m", "max_tokens": 3, "request": [request], **keys})


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_is_left_out_of_turns_that_say_so(dora: bool, tmp_path: Path) -> None:
    base = tiny("llama")
    of = adapted(tiny("llama"), write_adapter(tiny("llama"), tmp_path / "a", dora=dora))
    kept = record(talk(), tmp_path / "kept", loaded=of)
    for name, asked in (("fresh", talk(turns="fresh")), ("packed", talk(layout="packed"))):
        assert compare(record(asked, tmp_path / name, loaded=of), kept).identical
    answers = [kept.generated().token[kept.generated().request == n].tolist() for n in range(4)]
    for model_, number, same in ((base, 1, True), (base, 2, True), (of, 3, True), (of, 1, False)):
        asked = {"tokens": kept.requests[number]["tokens"], "max_tokens": 3}
        alone = record(
            Scenario.from_dict({"model": "m", "request": [asked]}),
            tmp_path / f"{id(model_)}-{number}",
            loaded=model_,
        )
        assert (alone.generated().token.tolist() == answers[number]) == same
    # What one adapter computed is nothing for a turn with another.
    assert [e["kept"] for e in kept.events() if e["event"] == "turn"] == [0, 12, 0]


def test_requests_with_and_without_an_adapter_are_not_batched() -> None:
    with pytest.raises(ScenarioConflict, match="use_adapter is not the same in all requests"):
        talk(schedule="static")


def test_a_case_with_an_adapter_is_not_reduced(folder: Path, tmp_path: Path) -> None:
    asked = Scenario.from_flags("builtin", ["a"], f"max_tokens=2 adapter_path={folder}")
    with pytest.raises(ReductionError, match="Fuse it into the model"):
        reduce(asked, asked, folder=tmp_path / "smaller")
