"""An opened llama.cpp is checked as any engine is, and the check says what a comparison says."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import need_llama, tiny_gguf

from detdiff import compare, record
from detdiff.check.invariance import check_engine
from detdiff.check.settings import CheckSettings, Defaults
from detdiff.engines.function import EngineRequest
from detdiff.engines.registry import open_named
from detdiff.errors import CheckSettingInvalid
from detdiff.scenario import Request, Scenario, Schedule

TOKENS = ((3, 4, 5), (6, 7, 8, 9, 10), (11,))


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_a_check_says_what_a_comparison_says(tmp_path: Path, kind: str) -> None:
    need_llama()
    engine = open_named("llama.cpp", str(tiny_gguf(tmp_path / "tiny.gguf", kind)), {})
    asked = [EngineRequest(f"r{n}", tokens=tokens, max_tokens=4) for n, tokens in enumerate(TOKENS)]
    (checked,) = check_engine(engine, asked, ["static:3"])
    requests = tuple(Request(id=f"r{n}", tokens=tokens, max_tokens=4) for n, tokens in enumerate(TOKENS))
    alone = Scenario(
        model="tiny", engine="llama.cpp", requests=requests, schedule=Schedule("serial", "packed")
    )
    sides = [alone, alone.with_changes(schedule="static")]
    found = compare(*(record(each, tmp_path / each.schedule.kind, engine=engine) for each in sides))
    assert found.compared.rows > 15
    assert checked.identical == found.identical
    if kind == "Q8_0":
        assert checked.identical


def test_an_engine_by_name_is_refused(tmp_path: Path) -> None:
    """It would be told to a model that another engine has opened."""
    with pytest.raises(CheckSettingInvalid, match="opened as the model"):
        CheckSettings.of({"model": "tiny.gguf", "engine": "llama.cpp"}, Defaults(tmp_path))
