"""What the page on engines says of torch is what happens, with SmolLM2 in transformers on this processor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch_models import need_torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
PROCESSOR = Path("/proc/cpuinfo")
WORDS = set(PROCESSOR.read_text(encoding="utf-8").split()) if PROCESSOR.is_file() else set[str]()
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def blocks() -> list[str]:
    """The page's test files that need torch, in order."""
    return re.findall(
        r"<!-- test: torch -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )


def one_line(text: str) -> str:
    return " ".join(text.split())


def run(pytester: pytest.Pytester, block: str) -> pytest.RunResult:
    need_torch()
    pytester.makepyfile(block)
    # A process of its own: pytester forgets what was imported while it ran, and torch cannot be imported twice.
    return pytester.runpytest_subprocess("-p", "no:cacheprovider")


@pytest.mark.thorough
@pytest.mark.real_model
def test_batching_in_torch_fails_with_the_m_and_what_it_does_to_the_tokens(
    pytester: pytest.Pytester, smollm2_bf16: Path
) -> None:
    block = blocks()[0]
    assert block.count(MODEL) == 1
    result = run(pytester, block.replace(f'"{MODEL}"', repr(str(smollm2_bf16))))
    result.assert_outcomes(failed=1)
    text = one_line(result.stdout.str())
    assert "static:4 of smollm2 not invariant at level exact" in text, text
    assert "first origin" in text or "origin at model." in text, text
    assert "report.html" in text


@pytest.mark.thorough
def test_a_linear_layer_of_torch_is_reported_as_the_page_says(pytester: pytest.Pytester) -> None:
    if "avx512f" not in WORDS:
        need_torch()
        pytest.skip("this processor has no AVX-512, for which it is known that bits change")
    run(pytester, blocks()[1]).assert_outcomes(passed=1)


def test_the_page_has_both() -> None:
    assert [block.count("def test_") for block in blocks()] == [1, 1]
