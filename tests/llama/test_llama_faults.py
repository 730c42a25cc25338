"""Every injected fault is named at its place by comparing a sound serial run with a faulty one of several requests, and explained;
without it the same two runs are identical."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from llama_fault_cases import CASES, JOINED, LATER, LENGTHS, TOKENS, LlamaTrial, is_attention
from llama_faults import NodeFault, Rows, Tensor, decoding, has
from models import need_llama, tiny_gguf
from tiers import FULL, some_now
from windowed_model import WINDOW, windowed_gguf

from detdiff.compare import RequestDivergence
from detdiff.engines.registry import open_named
from detdiff.explain.case import Case
from detdiff.explain.investigate import judge
from detdiff.scenario import Request, Scenario, Schedule

SEEDS = range(6 if FULL else 2)
Engine = object
Opened = Callable[[int, bool], Engine]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    need_llama()
    folder = tmp_path_factory.mktemp("faults")

    @lru_cache(4)
    def open_seed(seed: int, unified: bool) -> Engine:
        # Of these weights, products are bit-equal for every number of rows.
        file = tiny_gguf(folder / f"{seed}-{unified}.gguf", "Q8_0", seed=seed)
        return open_named("llama.cpp", str(file), {"unified": unified})

    return open_seed


def scenario(seed: int, arrivals: tuple[int, ...] | None) -> Scenario:
    """The three requests one after the other, or, with ``arrivals``, together."""
    draw = random.Random(f"prompts {seed}")
    requests = tuple(
        Request(
            id=f"r{n}",
            tokens=tuple(draw.randrange(3, 250) for _ in range(length)),
            max_tokens=TOKENS,
            arrival=0 if arrivals is None else arrivals[n],
            ignore_stop=True,
        )
        for n, length in enumerate(LENGTHS)
    )
    kind = "serial" if arrivals is None else "continuous"
    return Scenario(model="tiny", engine="llama.cpp", requests=requests, schedule=Schedule(kind=kind))


def run(
    opened: Opened, seed: int, trial: LlamaTrial | None, unified: bool, arrivals: tuple[int, ...]
) -> Case:
    faults = () if trial is None else (trial.fault,)
    return Case.of(
        scenario(seed, None),
        scenario(seed, arrivals),
        engine=opened(seed, unified),
        injected_faults=(faults, faults),
    )


def drawn(name: str, seed: int) -> LlamaTrial:
    return CASES[name](random.Random(f"{name} {seed}"))


@pytest.mark.parametrize("seed", some_now(SEEDS, 0))
@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named_at_its_place(opened: Opened, name: str, seed: int) -> None:
    trial = drawn(name, seed)
    named = trial.named
    case = run(opened, seed, trial, trial.unified, trial.arrivals)
    found = case.divergence
    assert not found.identical
    assert {request.id for request in found.requests if request.stage} <= {named.request, *named.others}
    request: RequestDivergence = found.request(named.request)
    origin = request.origin
    if named.site is None:
        assert origin is None and request.stage == "tokens"
    else:
        assert origin is not None and (origin.site, origin.position) == (named.site, named.position)
        # Beside others in run b, alone in run a.
        members = [
            () if each is None else each.members for each in (origin.composition_a, origin.composition_b)
        ]
        assert len(members[0]) == 1 and len(members[1]) > (named.request != "r2")
    findings = [each for each in found.bookkeeping if each.request == named.request]
    if named.what is None:
        assert found.bookkeeping == ()
    else:
        told = next(
            each for each in findings if each.what == named.what and re.search(named.says, each.detail)
        )
        # Run a is sound, and nothing was wrong before the row in whose forward it is.
        assert {each.run for each in found.bookkeeping} == {"b"} and origin is not None
        assert told.forward == origin.forward_b == min(each.forward or 0 for each in found.bookkeeping)
    verdict = judge(case)
    assert (verdict.kind, verdict.rule) == (named.verdict, named.rule), verdict.sentence
    said = [verdict.sentence, *(each.sentence for each in verdict.evidence if each.decided)]
    assert any(re.search(named.says, each) for each in said), said


@pytest.mark.parametrize("seed", some_now(SEEDS, 0))
@pytest.mark.parametrize(("unified", "arrivals"), [(False, JOINED), (False, LATER), (True, LATER)])
def test_without_a_fault_nothing_differs(
    opened: Opened, seed: int, unified: bool, arrivals: tuple[int, ...]
) -> None:
    case = run(opened, seed, None, unified, arrivals)
    found = case.divergence
    assert found.identical and found.bookkeeping == () and found.compared.differing == 0
    assert found.compared.digests > 2000
    assert judge(case).kind == "identical"
    # Each trial's arrangement is one of these.
    assert {(trial.unified, trial.arrivals) for trial in (drawn(name, seed) for name in CASES)} <= {
        (False, JOINED), (False, LATER), (True, LATER),
    }  # fmt: skip


@pytest.mark.parametrize("unified", some_now([True, False], 0))
@pytest.mark.parametrize("weights", some_now(["Q8_0", "F16"], 0, 1))
@pytest.mark.parametrize(
    "settings", some_now([{}, {"flash_attention": "off"}, {"ubatch": 16, "cache_type_k": "q8_0"}], 2)
)
def test_rows_that_are_rounded_otherwise_are_no_contradiction(
    tmp_path: Path, settings: dict[str, object], weights: str, unified: bool
) -> None:
    """One cache for all has each request's entries in other cells, and products of float16 depend on the rows beside."""
    need_llama()
    # A head of 32, the block of a quantised cache.
    file = tiny_gguf(tmp_path / "m.gguf", weights, heads=2, kv_heads=2)
    engine = open_named("llama.cpp", str(file), {"unified": unified, **settings})
    asked = scenario(0, JOINED)
    schedule = Schedule(kind="continuous", layout="packed", prefill_chunk=4, row_budget=7)
    case = Case.of(scenario(0, None), replace(asked, schedule=schedule), engine=engine)
    assert case.divergence.bookkeeping == ()
    assert judge(case).kind in ("identical", "numerics", "undetermined")


@pytest.mark.parametrize("name", some_now(["dropped", "one_bit", "shared_position", "other_logits"], 1))
def test_a_fault_beside_rounding_is_named_all_the_same(tmp_path: Path, name: str) -> None:
    need_llama()
    engine = open_named("llama.cpp", str(tiny_gguf(tmp_path / "m.gguf", "F16")), {})
    trial = drawn(name, 0)
    faults = (trial.fault,)
    case = Case.of(
        scenario(0, None), scenario(0, trial.arrivals), engine=engine, injected_faults=(faults, faults)
    )
    # On a processor that sums products in another order for more rows, r0 differs as well; none needs to.
    assert {request.id for request in case.divergence.requests if request.stage} >= {trial.named.request}
    verdict = judge(case)
    assert (verdict.kind, verdict.rule) == (trial.named.verdict, trial.named.rule)
    assert re.search(trial.named.says, verdict.sentence)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    need_llama()
    return open_named("llama.cpp", str(windowed_gguf(tmp_path_factory.mktemp("window") / "m.gguf")), {})


def in_window(windowed: Engine, layer: int, cell: int, value: float) -> Case:
    """Runs in which, from a layer on and for those that share its mask, r1's row at position 15 sees a cell or does not."""

    def before(tensor: Tensor, rows: Rows) -> None:
        if decoding(rows) and has(rows, 1, 15) and is_attention(tensor, layer):
            tensor.source(3).array(np.float16)[1, 0, 0, cell] = value

    faults = (NodeFault(before),)
    return Case.of(scenario(0, None), scenario(0, JOINED), engine=windowed, injected_faults=(faults, faults))


def test_a_window_is_no_contradiction(windowed: Engine) -> None:
    case = Case.of(scenario(0, None), scenario(0, JOINED), engine=windowed)
    assert case.divergence.identical and case.divergence.bookkeeping == ()
    assert judge(case).kind == "identical"


@pytest.mark.parametrize(
    ("layer", "cell", "layers"),
    some_now([(0, 13, "layers 0-4"), (5, 2, "layer 5"), (3, 15, "layers 3-4")], 0, 1),
)
def test_an_entry_that_a_row_does_not_see_in_its_window_is_named(
    windowed: Engine, layer: int, cell: int, layers: str
) -> None:
    case = in_window(windowed, layer, cell, -np.inf)
    (found,) = case.divergence.bookkeeping
    says = f"the row at position 15 did not see the entry of its own position {cell} in the cache of {layers}"
    assert (found.run, found.what, found.request, found.detail) == ("b", "cache_missing", "r1", says)
    verdict = judge(case)
    assert (verdict.kind, verdict.rule) == ("bug", "bookkeeping") and says in verdict.sentence
    origin = case.divergence.request("r1").origin
    assert origin is not None and (origin.site, origin.position) == (f"cache_l{layer}.read", 15)


def test_a_row_that_sees_more_than_its_window_reads_otherwise(windowed: Engine) -> None:
    """How long a window is, is not presumed; what a row read differs all the same from what it read alone."""
    case = in_window(windowed, 1, 15 - WINDOW, 0.0)
    verdict = judge(case)
    assert (verdict.kind, verdict.rule) == ("bug", "reading"), verdict.sentence
    assert "cache_l1" in verdict.sentence or "kqv_out-1" in verdict.sentence
    assert [request.id for request in case.divergence.requests if request.stage] == ["r1"]


@pytest.mark.parametrize("name", ["other_sequence", "hidden", "one_bit", "leak"])
def test_a_fault_that_is_in_both_runs_does_not_part_them(opened: Opened, name: str) -> None:
    """It is told of all the same where it contradicts the rows."""
    trial = drawn(name, 0)
    beside = scenario(0, trial.arrivals)
    faults = (trial.fault,)
    case = Case.of(beside, beside, engine=opened(0, trial.unified), injected_faults=(faults, faults))
    assert case.divergence.identical
    assert {each.run for each in case.divergence.bookkeeping} == ({"both"} if trial.named.what else set())
    assert judge(case).kind == ("bug" if trial.named.what else "identical")
