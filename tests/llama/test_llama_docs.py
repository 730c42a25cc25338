"""The section on llama.cpp does what it says: its commands are run on the model that it names."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from models import need_llama

from detdiff.cli import DIFFERENT, IDENTICAL, main

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def section() -> str:
    return PAGE.read_text(encoding="utf-8").partition("\n## llama.cpp\n")[2].partition("\n## ")[0]


def commands() -> list[list[str]]:
    lines = re.findall(r"^ {4}detdiff (.*)$", section().replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.real_model
@pytest.mark.thorough
def test_the_commands_of_the_section(
    smollm2_f16_gguf: Path, smollm2_q8_0_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_llama()
    monkeypatch.chdir(tmp_path)
    for name, path in (("SMOL-F16.gguf", smollm2_f16_gguf), ("SMOL-Q8_0.gguf", smollm2_q8_0_gguf)):
        (tmp_path / name).symlink_to(path)
    first, second = (CliRunner().invoke(main, words) for words in commands())
    assert second.exit_code == IDENTICAL and "The runs are identical" in second.output
    if first.exit_code == IDENTICAL:
        pytest.skip("this processor's F16 kernels compute a row alike for every number of rows")
    assert first.exit_code == DIFFERENT
    shown = section().partition("```text\n")[2].partition("```")[0]
    found = flat(first.output)
    if "origin at Qcur-0.MUL_MAT, position 4 of r0" not in found:
        pytest.skip("another operation is the first whose kernels differ on this processor")
    for part in shown.split("[...]"):
        assert flat(part) in found


@pytest.mark.real_model
@pytest.mark.thorough
def test_the_tutorials_last_command(
    smollm2_f16_gguf: Path, smollm2_q4_1_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_llama()
    text = (PAGE.parent / "tutorial.md").read_text(encoding="utf-8").partition("\n## 6.")[2]
    (command,) = re.findall(r"^ {4}detdiff (.*)$", text, re.MULTILINE)
    folder = tmp_path / "traces" / "reference-case"
    folder.mkdir(parents=True)
    for name in ("llama-serial.toml", "llama-continuous.toml"):
        shutil.copy(PAGE.parents[1] / "traces" / "reference-case" / name, folder)
    (folder / "smollm2-f16.gguf").symlink_to(smollm2_f16_gguf)
    (folder / "smollm2-q4_1.gguf").symlink_to(smollm2_q4_1_gguf)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, shlex.split(command))
    if result.exit_code == IDENTICAL:
        pytest.skip("this processor's F16 kernels compute a row alike for every number of rows")
    assert result.exit_code == DIFFERENT
    found = flat(result.output)
    if "flips at generated token 33" not in found:
        pytest.skip("another token flips on this processor, or none")
    for part in text.partition("```text\n")[2].partition("```")[0].split("[...]"):
        assert flat(part) in found


def test_the_section_has_its_commands() -> None:
    assert [words[0] for words in commands()] == ["compare", "compare"]
    assert all("llama.cpp" in words for words in commands())
