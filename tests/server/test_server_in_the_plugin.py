"""The plugin against an address: the lines of README as they stand there, sound and with a fault behind the address."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from local_servers import SmallModel

from detdiff.check.checker import NotChecked, NotInvariant

README = Path(__file__).parents[2] / "README.md"
ADDRESS = "http://127.0.0.1:8000"


def checked(batch_invariance: Any, fault: str = "", **how: Any) -> None:
    """Run the test that README shows, with a small model behind its address that waits for each batch of eight."""
    found = next(
        block
        for block in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
        if ADDRESS in block
    )
    assert len(found.strip().splitlines()) <= 10
    small = SmallModel(fault, **how)
    small.sizes = itertools.cycle([1] * 8 + [8])
    with small.at() as address:
        names: dict[str, Any] = {}
        exec(compile(found.replace(ADDRESS, address), "README.md", "exec"), names)
        # What fails here on purpose is not to stand in the summary of the session.
        tally = copy.deepcopy(batch_invariance.tally)
        try:
            names["test_my_endpoint"](batch_invariance)
        finally:
            batch_invariance.tally = tally


def test_a_sound_server_passes(batch_invariance: Any) -> None:
    checked(batch_invariance)


def test_a_difference_fails(batch_invariance: Any) -> None:
    with pytest.raises(NotInvariant, match="static:8"):
        checked(batch_invariance, "rounding")


def test_requests_that_never_met_were_not_checked(batch_invariance: Any) -> None:
    with pytest.raises(NotChecked, match="No two requests were served at a time"):
        checked(batch_invariance, alone=True)
