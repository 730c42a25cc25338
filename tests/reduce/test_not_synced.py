"""A trace that is removed anyway is not synced to the disk, and holds what any other one does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from runs import content, model, scenario

from detdiff.engines.mlx.engine import RecordOptions, record


@pytest.mark.parametrize("durable", [True, False])
def test_only_a_trace_that_is_to_last_is_synced(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    native = os.fsync

    def counted(handle: int) -> None:
        synced.append(handle)
        native(handle)

    monkeypatch.setattr(os, "fsync", counted)
    asked = scenario(lengths=(3, 2), max_tokens=2)
    found = record(
        asked, tmp_path / "trace", loaded=model("llama"), options=RecordOptions(0, durable=durable)
    )
    assert bool(synced) == durable and found.complete
    again = record(asked, tmp_path / "other", loaded=model("llama"), options=RecordOptions(0))
    assert content(found) == content(again)
