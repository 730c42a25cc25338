"""What two sides may differ in on the command line: engines and their settings, models, and a module imported before."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import PROMPTS, flags, paragraph, run
from plugins.small_models import small_config, write_directory

from detdiff.engines.base import IMPORTED
from detdiff.trace import Trace

FACTORY = '''
"""An engine of one's own: the built-in model behind a factory that takes settings."""

from detdiff.engines.mlx.engine import open_mlx


def make(model, settings):
    engine = open_mlx(model, {})
    engine.name, engine.settings = "own:make", settings
    return engine
'''
ANSWERS = """
class Answers:
    def __init__(self, text):
        self.text = text

    def generate(self, requests, schedule):
        from detdiff.engines.function import Generation

        return [Generation(text=self.text[: each.max_tokens]) for each in requests]


def make(model, settings):
    return Answers(settings["text"])
"""
PATCH = "import mlx_lm\nLOADED = True\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with modules of the user's, in which commands run."""
    (tmp_path / "own.py").write_text(FACTORY)
    (tmp_path / "answers.py").write_text(ANSWERS)
    (tmp_path / "my_patch.py").write_text(PATCH)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("own", "other", "answers", "my_patch"):
        sys.modules.pop(name, None)
    IMPORTED.clear()


def test_sides_may_differ_in_their_engines_settings(folder: Path) -> None:
    result = run(
        *("compare", "--prompt", PROMPTS[0], "--engine", "own:make", "--both", "max_tokens=2"),
        *("--a", "engine.cache=true", "--b", "engine.cache=false", "--keep", folder / "kept", "--json"),
    )
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert [answer[side]["scenario"]["engine"] for side in "ab"] == [
        {"name": "own:make", "cache": True},
        {"name": "own:make", "cache": False},
    ]
    trace = Trace.open(folder / "kept" / "b")
    assert trace.header["engine"] == {"name": "own:make", "settings": {"cache": False}}
    assert "model" not in trace.scenario


def test_one_engine_against_another(folder: Path) -> None:
    result = run(*flags(PROMPTS[0]), "--both", "max_tokens=2", "--a", "engine=own:make", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["a"]["scenario"]["engine"] == "own:make" and "engine" not in answer["b"]["scenario"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama_ccp", "There is no engine 'llama_ccp'"),
        ("own:mkae", "The engine 'own:mkae' cannot be imported"),
    ],
)
def test_an_engine_that_is_not_there(folder: Path, name: str, words: str) -> None:
    arguments = (*flags(PROMPTS[0]), "--engine", name, "--a", "max_tokens=2", "--keep", folder / "kept")
    assert words in paragraph(run(*arguments))
    assert not (folder / "kept").exists()


def test_two_models_are_refused_before_anything_is_recorded(folder: Path) -> None:
    model = write_directory(folder / "model", small_config("llama"))
    arguments = ("compare", "--prompt", PROMPTS[0], "--a", "model=builtin", "--b", f"model={model}")
    text = paragraph(run(*arguments, "--keep", folder / "kept"), 3)
    assert "side a is of 'builtin' and side b is of 'model'" in text
    assert "Nothing was recorded" in text and "--across-models" in text
    assert not (folder / "kept").exists()


def test_two_models_are_compared_when_asked_for(folder: Path) -> None:
    for name, changes in (("one", {}), ("two", {"rms_norm_eps": 0.1})):
        write_directory(folder / name, small_config("llama", **changes))
    arguments = ("compare", "--both", "tokens=1,2,3 max_tokens=2", "--a", "model=./one", "--b", "model=./two")
    assert "different models" in paragraph(run(*arguments), 3)
    result = run(*arguments, "--across-models", "--json", "--keep", folder / "kept")
    assert result.exit_code == 1, result.output
    answer = json.loads(result.stdout)
    assert [answer[side]["model"]["name"] for side in "ab"] == ["one", "two"]
    page = run("report", folder / "kept" / "a", folder / "kept" / "b", "--across-models", "--replay")
    assert page.exit_code == 0, page.output


def test_one_model_under_two_names_is_one_model(folder: Path) -> None:
    for name in ("one", "two"):
        write_directory(folder / name, small_config("llama"))
    result = run(
        *("compare", "--both", "tokens=1,2,3 max_tokens=1"), *("--a", "model=./one", "--b", "model=./two")
    )
    assert result.exit_code == 0, result.output


def test_a_module_is_imported_before_and_each_trace_names_it_with_its_hash(folder: Path) -> None:
    arguments = (*flags(PROMPTS[0]), "--both", "max_tokens=2", "--a", "prefill_chunk=4")
    assert run(*arguments, "--import", "my_patch", "--keep", folder / "kept").exit_code in (0, 1)
    assert sys.modules["my_patch"].LOADED
    first = Trace.open(folder / "kept" / "a").header["environment"]["imports"]
    assert list(first) == ["my_patch"] and len(first["my_patch"]) == 64
    (folder / "my_patch.py").write_text(PATCH + "# another\n")
    del sys.modules["my_patch"]
    run(*arguments, "--import", "my_patch", "--keep", folder / "again")
    assert Trace.open(folder / "again" / "a").header["environment"]["imports"] != first


def test_a_module_of_a_trace_is_imported_again_for_re_runs_and_a_change_of_it_is_told(folder: Path) -> None:
    arguments = (*flags(PROMPTS[0]), "--both", "max_tokens=2", "--a", "prefill_chunk=4")
    run(*arguments, "--keep", folder / "plain")
    run(*arguments, "--import", "my_patch", "--keep", folder / "kept")
    pair = (folder / "kept" / "a", folder / "kept" / "b")

    def forgotten() -> None:
        sys.modules.pop("my_patch")
        IMPORTED.clear()

    forgotten()
    same = run("explain", *pair, "--control", "repeat", "--json")
    assert same.exit_code == 0 and sys.modules["my_patch"].LOADED, same.output
    assert not [each for each in json.loads(same.stdout)["evidence"] if each["fact"] == "imports"]
    forgotten()
    (folder / "my_patch.py").write_text(PATCH + "# another\n")
    other = json.loads(run("explain", *pair, "--control", "repeat", "--json").stdout)
    assert "the module my_patch (--import) is another than was recorded with" in str(other["evidence"])
    mixed = run("explain", pair[0], folder / "plain" / "b", "--control", "repeat")
    assert "recorded with the module 'my_patch' (--import) and another without it" in paragraph(mixed)
    (folder / "my_patch.py").unlink()
    forgotten()
    gone = run("explain", *pair, "--control", "repeat")
    assert "The module 'my_patch' cannot be imported" in paragraph(gone)
    sys.modules["my_patch"] = sys.modules[__name__]


def test_a_module_that_cannot_be_imported_is_one_paragraph(folder: Path) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    arguments = (*flags(PROMPTS[0]), "--a", "max_tokens=2")
    for name, words in (("broken", "ZeroDivisionError"), ("not_there", "ModuleNotFoundError")):
        text = paragraph(run(*arguments, "--import", name))
        assert f"The module '{name}' cannot be imported ({words}" in text


def test_show_says_what_an_engine_could_not_show(folder: Path) -> None:
    arguments = ("--a", "engine.text=abcd", "--b", "engine.text=abxd", "--both", "max_tokens=4")
    result = run(
        "compare", "--engine", "answers:make", "--prompt", "go", *arguments, "--keep", folder / "kept"
    )
    assert result.exit_code == 1 and "character 2" in result.output, result.output
    assert "engine answers:make, engine.text abcd" in " ".join(result.output.split())
    text = run("show", folder / "kept" / "b").output
    assert "engine: answers:make, settings text abxd" in text
    assert "not recorded: sites (" in text and "not recorded: kernel paths (" in text
    assert 'generated: "abxd"' in text and "steps" in text and "native" not in text
    found = json.loads(run("show", folder / "kept" / "b", "--json").stdout)
    assert {"tokens", "logits", "sites", "cache"} < found["lacks"].keys()
    assert found["engine"] == {"name": "answers:make", "settings": {"text": "abxd"}}
    assert all(group["paths"] == {} for group in found["groups"])


def test_show_says_nothing_of_lacking_where_nothing_lacks(folder: Path) -> None:
    assert run(*flags(PROMPTS[0]), "--a", "max_tokens=1", "--keep", folder / "kept").exit_code in (0, 1, 3)
    text = run("show", folder / "kept" / "a").output
    assert "not recorded" not in text and "engine:" not in text and "kernel path × sites" in text


def test_explain_takes_an_engine_of_ones_own_and_repeats_as_often_as_asked(folder: Path) -> None:
    arguments = ("--a", "engine.text=abcd", "--b", "engine.text=abxd", "--both", "max_tokens=4")
    result = run(
        "explain", "--engine", "answers:make", "--prompt", "go", *arguments, "--repeats", "3", "--json"
    )
    assert result.exit_code in (1, 3), result.output
    verdict = json.loads(result.stdout)
    # Answers alone do not say that the logits were equal, and the settings are not.
    assert verdict["verdict"] == "undetermined"
    assert verdict["divergence"]["a"]["trace"] == "a (not kept)"
    assert "detdiff-" not in result.stdout


OTHER = """
from dataclasses import dataclass

from detdiff.engines.mlx.engine import MlxEngine, open_mlx


@dataclass(eq=False)
class Other(MlxEngine):
    name: str = "other:make"


def make(model, settings):
    engine = Other(open_mlx(model, {}).loaded)
    for layer in engine.loaded.model.layers:
        layer.self_attn.scale *= settings.get("scale", 1)
    return engine
"""


def test_two_engines_are_refused_before_anything_is_recorded(folder: Path) -> None:
    (folder / "other.py").write_text(OTHER)
    arguments = (*flags(PROMPTS[0])[1:], "--both", "max_tokens=2 capture=full", "--b", "engine=other:make")
    said = paragraph(run("compare", *arguments, "--keep", folder / "kept"), 3)
    assert "--across-engines" in said and "'mlx'" in said and "'other:make'" in said
    assert "Nothing was recorded" in said and not (folder / "kept").exists()


def test_two_engines_are_compared_by_role_when_asked_for(folder: Path) -> None:
    (folder / "other.py").write_text(OTHER)
    arguments = (*flags(PROMPTS[0])[1:], "--both", "max_tokens=2 capture=full", "--b", "engine=other:make")
    result = run("compare", *arguments, "--across-engines", "--keep", folder / "kept", "--json")
    assert result.exit_code == 0, result.output
    across = json.loads(result.stdout)["across_engines"]
    assert across["aligned"] == len(across["roles"]) > 20
    assert {each["typical"] for each in across["roles"]} == {0.0} and across["first"] is None
    kept = (folder / "kept" / "a", folder / "kept" / "b")
    page = run("report", *kept, "--across-engines", "--html", folder / "page.html")
    assert page.exit_code == 0, page.output
    assert "--replay" in paragraph(run("compare", *kept, "--across-engines", "--replay"))


@pytest.mark.thorough
def test_explain_scores_the_operations_of_two_engines(folder: Path) -> None:
    (folder / "other.py").write_text(OTHER)
    answers = []
    # The first is less than bfloat16 shows, in logits or in attention: equal tokens and logits end nothing.
    for scale in (1.001, 2):
        sides = ("--b", f"engine=other:make engine.scale={scale}", "--across-engines", "--repeats", "1")
        result = run("explain", *flags(PROMPTS[0])[1:], "--both", "max_tokens=2", *sides, "--json")
        assert result.exit_code == 1, result.output
        answers.append(json.loads(result.stdout))
    assert [(each["verdict"], each["rule"]) for each in answers] == [
        ("numerics", "roles"),
        ("bug", "role-outside"),
    ]
    assert "attention of layer 0 in run b (other:make" in answers[1]["said"]
