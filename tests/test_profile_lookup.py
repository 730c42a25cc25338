"""Finding profiles: by name, with parameters, as a file, from an installed package; and what is refused."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from profile_files import FIRST, HEAD, rule, written

from detdiff_kernels import Call, errors, profile, profile_file, profile_names

ROOT = Path(__file__).resolve().parent.parent
MV = "candle-metal/mv"
ONE = "candle-metal: second-to-last dimension 1 -> mv"


def call(rows: int = 1, k: int = 576) -> Call:
    return Call("linear", rows, 1, k, 1536, "float32", 4)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("candle", errors.UnknownProfile, r"'candle'.*did you mean candle-metal.*ends in \.toml"),
        ("mlx-metal:generaton=15", errors.UnknownParameter, "'generaton'; did you mean generation"),
        ("candle-metal:chip=1", errors.UnknownParameter, "'chip'; it has none"),
        ("mlx-metal:generation=11", errors.BadParameterValue, "from 12 to 18"),
        ("mlx-metal:generation=new", errors.BadParameterValue, "'new'; it takes a whole number"),
        ("mlx-metal:letter=x", errors.BadParameterValue, "one of p, g, s, c, d"),
        ("mlx-metal:version=0.28", errors.BadParameterValue, "not below 0.29"),
        ("mlx-metal:version=0.32.x", errors.BadParameterValue, "a version not below"),
        ("ggml-cuda:arch=blackwel", errors.BadParameterValue, "did you mean blackwell"),
        ("mlx-metal:generation", errors.BadParameterValue, "'generation' after the colon"),
        ("mlx-metal:letter=s,letter=d", errors.BadParameterValue, "each once"),
        ("mlx-metal:letter=", errors.BadParameterValue, "'letter=' after the colon"),
    ],
)
def test_a_wrong_name_or_parameter_is_one_clear_error(
    spec: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        profile(spec)
    assert "\n" not in str(caught.value)


def test_parameters_are_bound_and_said() -> None:
    chosen = profile("mlx-metal: generation=13, version=0.31.0")
    assert chosen.spec == "mlx-metal:generation=13,letter=s,version=0.31,nax=auto,tf32=on"
    assert profile(chosen.spec) == chosen and chosen != profile("mlx-metal")
    assert profile("batch-invariant").spec == "batch-invariant"


def test_a_file_is_a_profile_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(
        tmp_path,
        HEAD,
        '[parameters.size]\ndefault = 3\nmeaning = "a"\nrange = "1..9"\n',
        rule(when="m < size"),
    )
    monkeypatch.chdir(tmp_path)
    for spec in (f"{path}", "mine.toml", "./mine.toml:size=3"):
        assert profile(spec).choose(call(rows=2)).kernel == MV
    assert profile("./mine.toml:size=2").choose(call(rows=2)).kernel == "native"
    with pytest.raises(errors.UnknownProfile):
        profile("mine")


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str, *names: str) -> None:
    """A package whose entry points of the group are ``names``, each a variable of the module ``offered``."""
    info = folder / "offered-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1\n")
    lines = "".join(f"{name} = offered:{name.replace('-', '_')}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[{profile_file.GROUP}]\n{lines}")
    (folder / "offered.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "offered", raising=False)


def test_an_installed_package_can_offer_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, HEAD.replace("mine", "as-path"), FIRST)
    source = (
        f"import pathlib\nas_path = pathlib.Path({str(path)!r})\nas_name = {str(path)!r}\n"
        f"as_text = {HEAD + rule(rows=2)!r}\nbroken = 3\ncandle_metal = 3\n"
    )
    installed(
        monkeypatch, tmp_path, source, "as-path", "as-name", "as-text", "broken", "lost", "candle-metal"
    )
    assert profile_names()[-5:] == ("as-name", "as-path", "as-text", "broken", "lost")
    assert profile("as-path") == profile("as-name") == profile(str(path))
    assert profile("as-text").choose(call(rows=2)).rule == f"mine: rows 2 -> {MV}"
    assert profile("candle-metal").choose(call()).rule == ONE
    with pytest.raises(
        errors.BadEntryPoint, match=r"broken .*\(offered:broken\) is a int; expected a pathlib"
    ):
        profile("broken")
    with pytest.raises(errors.BadEntryPoint, match="lost .* cannot be loaded: AttributeError"):
        profile("lost")
    assert EntryPoint("a", "b", profile_file.GROUP).group == "detdiff.profiles"


def test_the_example_of_the_page_is_a_profile(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
    example = profile(f"{written(tmp_path, page.partition('```toml')[2].partition('```')[0])}:cores=8")
    assert example.choose(call(rows=32, k=4096)).rule == "mine: quantised, m >= limit (32) -> mlx-metal/qmm_t"
    assert example.choose(call(rows=7, k=4095)).kernel == "mlx-metal/qmv"
