"""Policies measured at a server's address: answers and times of each, and no counts of what nobody saw."""

from __future__ import annotations

import json
from pathlib import Path

from clients import Served
from command_line import run


def test_a_server_is_measured_and_its_steps_are_not_counted(native: Served, tmp_path: Path) -> None:
    words = ["bench", "--model", f"{native.address}/v1", "--requests", "3", "--prompt-lengths", "4"]
    words += ["--answer-lengths", "2", "--rounds", "1", "--policy", "continuous"]
    done = run(*words, "-o", str(tmp_path / "m"))
    assert done.exit_code == 0 and "not counted: serial, continuous: a server does not say" in done.stdout
    found = json.loads((tmp_path / "m" / "bench.json").read_text())["policies"]
    for each in found:
        own = each["detdiff"]
        assert own["throughput"]["median"] > 0 and (own["counts"], own["cache"]) == (None, None)
        assert each["output_lens"] == [2, 2, 2] and own["counts_as_simulated"] is None
    search = run(*words[:-2], "--find-split", "--json")
    levels = json.loads(search.stdout)["levels"]
    assert [each["at_once"] for each in levels] == [2, 3] and all("split" not in each for each in levels)
    assert all(each["whole"]["other_answers"] is not None for each in levels)
    refused = run(*words, "--clock", "processor")
    assert refused.exit_code == 2 and "nothing of a server's work" in " ".join(refused.stderr.split())


def test_a_batch_that_did_not_come_about_is_no_divergence(native: Served) -> None:
    """One request has nobody to be batched with: its answer is serial's, and says nothing of the policy."""
    words = ["bench", "--model", f"{native.address}/v1", "--requests", "1", "--prompt-lengths", "4"]
    words += ["--answer-lengths", "2", "--rounds", "1", "--policy", "static:2"]
    done = run(*words, "--json")
    own = json.loads(done.stdout)["policies"][1]["detdiff"]
    assert own["answers"] == "inconclusive" and own["divergence"]["inconclusive"] is True
    assert own["divergence"]["first"] is None and own["flips"] == 0
    said = " ".join(run(*words).stdout.split())
    assert "inconclusive: static:2: nothing that was compared differs" in said
    assert "sent alone, so that nothing ran together" in said and "diverges" not in said
