"""Explaining a tiny model in the real llama.cpp: what takes a difference away, what carries it, and what leaves it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command_line import run
from models import KINDS, need_llama, tiny_gguf
from tiers import some_now

from detdiff import Scenario, explain
from detdiff.compare import Divergence
from detdiff.engines.base import PATCH
from detdiff.engines.llama_cpp import float32_twin
from detdiff.engines.llama_cpp.cache_patches import StoredEntries
from detdiff.engines.llama_cpp.context import (
    BatchRow,
    ContextFault,
    ContextSettings,
    LlamaContext,
    LlamaModel,
)
from detdiff.engines.llama_cpp.float32_twin import write_float32
from detdiff.engines.llama_cpp.known_model import PROMPT, TOLERANCE, KnownModel
from detdiff.engines.llama_cpp.layout import checked_library
from detdiff.engines.llama_cpp.library import GgmlTensor
from detdiff.engines.llama_cpp.node_loops import ENTRY, HEADS, KV_SIZE, LAYER, WRITE_K, WRITE_V
from detdiff.engines.registry import open_engine
from detdiff.errors import LlamaFailed
from detdiff.explain.case import Case
from detdiff.explain.deciding import deciding_row
from detdiff.explain.investigate import run_control
from detdiff_kernels.gguf_file import open_gguf

PROMPTS = ("The capital of France is", "Once upon a time", "def f(n):", "Water boils at")
ONE_BY_ONE, AS_THEY_COME = "schedule=serial", "schedule=continuous arrivals=0,2,4,6"


@pytest.fixture(scope="module")
def f16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_llama()
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "F16", width=128)


def asked(file: Path, flags: str, prompts: tuple[str, ...] = PROMPTS) -> Scenario:
    return Scenario.from_flags(str(file), prompts, f"engine=llama.cpp max_tokens=24 ignore_stop {flags}")


def differing(found: Divergence) -> None:
    """Without a difference there is nothing to explain."""
    if found.identical:
        pytest.skip("this processor's llama.cpp gives a row of F16 the same bits alone and beside others")


@pytest.mark.parametrize("settings", some_now(["", "engine.unified=true", "engine.flash_attention=off"], 0))
def test_another_kernel_for_more_rows_is_numerics_and_goes_with_pinned_rows(f16: Path, settings: str) -> None:
    verdict = explain(asked(f16, f"{ONE_BY_ONE} {settings}"), asked(f16, f"{AS_THEY_COME} {settings}"))
    assert verdict.divergence is not None
    differing(verdict.divergence)
    first = next(each for each in verdict.divergence.requests if each.id == verdict.divergence.first)
    origin = first.origin
    assert origin is not None and origin.kind == "linear" and origin.site.endswith("-0.MUL_MAT")
    assert (origin.rows_a, origin.rows_b) == (1, origin.composition_b and origin.composition_b.rows)
    results = {each.name: each.result for each in verdict.controls}
    for name, result in (
        ("repeat", "equal"), ("pin_kernels", "removed"), ("neighbour_content", "equal"), ("oracle", "inside"),
    ):  # fmt: skip
        assert results[name] == result, next(each.sentence for each in verdict.controls if each.name == name)
    assert results["patch_in"] in ("removed", "remains", "no_effect", "no_differing_entries")
    assert verdict.kind == "numerics", verdict.sentence
    assert f"{origin.site} was computed for 1 row in a and for {origin.rows_b} rows in b" in verdict.sentence
    assert "each row decoded in a call of its own" in verdict.sentence
    # That command runs no operation of this engine.
    assert "pin the kernels" in verdict.advice and "probe" not in verdict.advice


def test_blocks_of_eight_bits_are_the_same_in_every_batch(tmp_path: Path) -> None:
    need_llama()
    file = tiny_gguf(tmp_path / "tiny.gguf", "Q8_0")
    verdict = explain(asked(file, ONE_BY_ONE), asked(file, AS_THEY_COME))
    assert verdict.kind == "identical" and verdict.divergence is not None
    assert all(run.observer["equal"] is True for run in (verdict.divergence.a, verdict.divergence.b))


@dataclass
class ChangedEntry(ContextFault):
    """A fault: once so many batches are computed, the last number of an entry in cell ``cell`` (or each one) has another sign."""

    layer: int
    kind: str
    head: int
    cell: int
    batches: int
    whole: bool = False

    def install(self, context: Any, nodes: Any) -> None:
        decode: Callable[[Any], None] = context.decode
        done = 0

        def changing(rows: Any) -> None:
            nonlocal done
            decode(rows)
            done += 1
            if done == self.batches:
                self._change(nodes)

        context.decode = changing

    def _change(self, nodes: Any) -> None:
        stored, size = stored_entries(nodes, self.layer, self.kind)
        step = size // 32 if self.whole else size
        # The sign of a number: nothing that rounding would make.
        stored.at(self.cell, self.head).flat[-1::-step] ^= 0x80


def stored_entries(nodes: Any, layer: int, kind: str) -> tuple[StoredEntries, int]:
    """Where a layer's keys or values lie, and the bytes of an entry."""
    plan, action = nodes._plan, WRITE_K if kind == "K" else WRITE_V
    node = int(np.flatnonzero((plan[:, 1] == action) & (plan[:, LAYER] == layer))[0])
    size = int(plan[node, ENTRY])
    written = GgmlTensor.from_address(nodes.address(node))
    return StoredEntries(
        written, nodes.cells.shape[2], int(plan[node, KV_SIZE]), int(plan[node, HEADS]), size
    ), size


class LeakedEntry(ContextFault):
    """A fault: after the second batch a value of one sequence is what another one holds there."""

    def install(self, context: Any, nodes: Any) -> None:
        decode, done = context.decode, itertools.count(1)

        def leaking(rows: Any) -> None:
            decode(rows)
            if next(done) == 2:
                stored, _ = stored_entries(nodes, 0, "V")
                stored.at(2, 0)[...] = stored.at(context.cells_of_stream + 2, 0)

        context.decode = leaking


class AnotherEachTime(ChangedEntry):
    """A fault: each run changes another head."""

    def install(self, context: Any, nodes: Any) -> None:
        self.head = 1 - self.head
        super().install(context, nodes)


def test_what_another_request_left_in_the_cache_is_found_by_its_text(f16: Path) -> None:
    scenario = asked(f16, "schedule=static", PROMPTS[:2])
    case = Case.of(scenario, scenario, injected_faults=((), (LeakedEntry(),)))
    control = run_control(case, "neighbour_content")
    assert control.result == "differs", control.sentence
    assert control.detail["request"] == "r0" and control.detail["entry_kind"] in (None, "V")


def test_a_run_that_is_another_each_time_does_not_repeat(f16: Path) -> None:
    scenario = asked(f16, ONE_BY_ONE, PROMPTS[:1])
    case = Case.of(scenario, scenario, injected_faults=((), (AnotherEachTime(0, "V", 0, cell=5, batches=2),)))
    assert run_control(case, "repeat").result == "differs"


@pytest.mark.parametrize(
    ("kind", "settings"),
    some_now(
        [
            ("V", ""), ("K", "engine.flash_attention=off"), ("V", "engine.flash_attention=off"), ("K", "engine.unified=true"),
            ("V", "engine.unified=true engine.flash_attention=off"), ("K", "engine.cache_type_k=q8_0"), ("V", "engine.cache_type_k=bf16"),
        ],
        0, 2,
    ),
)  # fmt: skip
def test_the_one_changed_entry_is_what_carries_the_difference(f16: Path, kind: str, settings: str) -> None:
    scenario = asked(f16, f"{ONE_BY_ONE} {settings}", PROMPTS[:1])
    changed = ChangedEntry(1, kind, 1, cell=7, batches=3)
    case = Case.of(scenario, scenario, injected_faults=((), (changed,)))
    # The recorder, which reads the cache in a way of its own, saw the same entry change.
    seen = [event for line in case.b.forwards() for event in line.get("events", ())]
    assert [(each["layer"], each["entry"], each["head"], each["position"]) for each in seen] == [
        (1, kind, 1, 7)
    ]
    for name, result in (("patch_in", "removed"), ("patch_out", "reproduced")):
        control = run_control(case, name)
        assert control.result == result, control.sentence
        assert control.detail["smallest"] == ((1, kind, 1, 7),)
        assert control.detail["exact"]


def test_in_float32_a_changed_entry_stays(f16: Path) -> None:
    scenario = asked(f16, ONE_BY_ONE, PROMPTS[:1])
    case = Case.of(
        scenario, scenario, injected_faults=((), (ChangedEntry(0, "V", 0, cell=30, batches=8, whole=True),))
    )
    control = run_control(case, "dtype")
    assert control.result == "stays", control.sentence
    assert "with operands in float16 and by" in control.sentence
    # The model in the trace is the same one; the file of its twin goes with the engine.
    engine: Any = case.engine("b")
    twin, file = engine._twin
    assert twin.identity == engine.identity and file.path.is_file()
    assert twin.operand_dtype is None
    file.close()
    assert not file.path.exists()


@pytest.mark.parametrize("kind", some_now(KINDS, 1))
def test_a_twin_has_the_same_numbers_in_float32(kind: str, tmp_path: Path) -> None:
    """Its logits are those that the numbers of the file give in float64, which the file's own kernels miss by more."""
    need_llama()
    model = KnownModel(layers=2, kind=kind, width=128)
    file, twin = model.write(tmp_path / "m.gguf"), tmp_path / "twin.gguf"
    write_float32(file, twin)
    pairs = (
        [(each.name, each.data) for each in open_gguf(file).tensors],
        [(each.name, each.data) for each in open_gguf(twin).tensors],
    )
    assert [name for name, _ in pairs[0]] == [name for name, _ in pairs[1]]
    assert {each.tensor_type.name for each in open_gguf(twin).tensors} == {"F32"}
    found = LlamaModel(checked_library(), twin)
    settings = ContextSettings(512, 1, flash_attention="off", cache_type_k="f32", cache_type_v="f32")
    context = LlamaContext(found, settings)
    context.decode([BatchRow(token, n, 0, True) for n, token in enumerate(PROMPT)])
    logits = np.stack([context.logits(n) for n in range(len(PROMPT))])
    context.close()
    assert np.abs(logits - model.logits(PROMPT)).max() < TOLERANCE


def test_a_disk_without_room_is_said_before_anything_is_written(
    f16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float32_twin.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(LlamaFailed, match="1,000 free"):
        write_float32(f16, tmp_path / "twin.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("other", some_now(["engine.cache_type_v=bf16", "engine.cache_type_k=q8_0"], 0))
def test_a_cache_of_another_type_is_a_difference_of_configuration(f16: Path, other: str) -> None:
    a = asked(f16, "schedule=static engine.cache_type_k=f16")
    verdict = explain(a, asked(f16, f"schedule=static {other}"))
    assert verdict.kind == "configuration", verdict.sentence
    assert "f16 and" in verdict.sentence
    # The same where both have it: nothing is wrong with entries of two types.
    sound = explain(asked(f16, f"{ONE_BY_ONE} {other}"), asked(f16, f"{AS_THEY_COME} {other}"))
    assert sound.kind in ("numerics", "identical", "undetermined"), sound.sentence


def test_under_speculation_the_cache_carries_what_verifying_rounded_otherwise(
    f16: Path, tmp_path: Path
) -> None:
    draft = tiny_gguf(tmp_path / "draft.gguf", "Q4_0", width=128)
    flags = ONE_BY_ONE
    case = Case.of(asked(f16, flags), asked(f16, f"{flags} draft={draft}"))
    differing(case.divergence)
    assert run_control(case, "pin_kernels").result == "removed"
    patch_in, patch_out = (run_control(case, name) for name in ("patch_in", "patch_out"))
    alone = [
        case.trace(side).forwards()[deciding_row(case, side).forward]["shape"] == [1, 1] for side in "ab"
    ]
    if patch_in.detail["differing_entries"] and all(alone):
        # Where the deciding row is computed alike, only what was written before it can differ.
        assert (patch_in.result, patch_out.result) == ("removed", "reproduced"), patch_in.sentence
        assert patch_in.detail["entries"] <= patch_in.detail["differing_entries"]
    else:
        assert "not_run" not in (patch_in.result, patch_out.result)


def test_entries_that_are_not_what_the_trace_has_are_not_put_anywhere(f16: Path) -> None:
    scenario = asked(f16, ONE_BY_ONE, PROMPTS[:1])
    changed = ChangedEntry(0, "K", 0, cell=3, batches=2)
    case = Case.of(scenario, scenario, injected_faults=((), (changed,)))
    # A re-run without the fault is another run than the trace's.
    case.injected_faults = ((), ())
    control = run_control(case, "patch_in")
    assert control.result == "not_run" and "than its trace" in control.sentence


def test_rows_that_no_other_request_reads_are_left_alone(f16: Path) -> None:
    """Trials leave nothing behind: what a side decides is the same before and after all others."""
    from detdiff.engines.llama_cpp.cache_patches import LlamaCachePatches

    a, b = asked(f16, ONE_BY_ONE), asked(f16, AS_THEY_COME)
    case = Case.of(a, b)
    differing(case.divergence)
    engine: Any = open_engine(a)
    assert PATCH in engine.capabilities
    pair = LlamaCachePatches(engine, case)
    for side in "ab":
        other = "b" if side == "a" else "a"
        held = pair._sides[side].held
        every = [entry for entry in _all(held) if entry[:2] in pair._sides[other].held]
        alone = pair.answer(side, ())
        pair.answer(side, every)
        assert pair.answer(side, ()) == alone == pair.own[side]


def _all(held: Any) -> list[Any]:
    from detdiff.explain.controls.patches import EntryKey

    return [
        EntryKey(layer, kind, head, int(position))
        for (layer, kind), side in held.items()
        for head in range(side.data.shape[1])
        for position in side.positions
    ]


def test_where_a_shared_cache_has_the_keys_is_rounding_by_their_order(tmp_path: Path) -> None:
    """D21: the same requests in another order, the same rows in every forward; with caches of their own nothing differs."""
    need_llama()
    file = tiny_gguf(tmp_path / "tiny.gguf", "F32", seed=1)
    prompts = {"one": [1, 2, 3, 4, 5, 6, 7], "two": [8, 9, 10, 11, 12]}
    requests = [f'[[request]]\nid = "{name}"\ntokens = {tokens}\n' for name, tokens in prompts.items()]
    for shared, expected in (("true", ("numerics", "path")), ("false", ("identical", "identical"))):
        head = (
            f'model = "{file}"\nschedule = "static"\nmax_tokens = 4\n'
            f'[engine]\nname = "llama.cpp"\nflash_attention = "off"\nunified = {shared}\n'
        )
        paths = [tmp_path / f"{name}-{shared}.toml" for name in "ab"]
        for path, order in zip(paths, (requests, requests[::-1]), strict=True):
            path.write_text(head + "".join(order))
        answer = json.loads(run("explain", *paths, "--json").stdout)
        verdict = explain(*paths)
        assert (answer["verdict"], answer["rule"]) == (verdict.kind, verdict.rule) == expected
        assert answer["said"] == verdict.sentence
        assert ("the order in which the shared cache has the keys moves the bits" in verdict.sentence) is (
            shared == "true"
        )
