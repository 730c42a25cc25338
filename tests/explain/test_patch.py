from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from runs import Runs, model, scenario
from tiers import some_now

from detdiff.engines.mlx.cache_patches import differing, held, patched, put
from detdiff.engines.mlx.caches import PagedCache, PagePool, PageTable
from detdiff.engines.mlx.engine import RecordOptions
from detdiff.engines.mlx.taps.injected import InjectedFault
from detdiff.explain.case import Case
from detdiff.explain.control import CannotRun
from detdiff.explain.controls.patches import EntryKey
from detdiff.explain.investigate import run_control


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def _injected(
    runs: Runs, arch: str, injected_fault: InjectedFault, schedule: str, layout: str, **keys: Any
) -> Case:
    loaded, asked = model(arch, "f32"), scenario(schedule, layout, **{"max_tokens": 10, **keys})
    a = runs.record(loaded, asked)
    b = runs.record(loaded, asked, RecordOptions(observe=0, faults=(injected_fault,)))
    return Case.of(a, b, loaded=loaded, injected_faults=((), (injected_fault,)))


@pytest.mark.parametrize(
    ("arch", "schedule", "layout", "keys"),
    some_now(
        [
            ("llama", "continuous", "packed", {"page_tokens": 4, "arrivals": (0, 2, 5)}),
            ("llama", "serial", "padded", {}),
            ("llama", "static", "padded", {}),
            ("gemma3_text", "continuous", "packed", {"lengths": (12, 3, 14)}),
        ],
        0,
    ),
)
def test_the_one_entry_is_named_in_every_cache(
    runs: Runs, arch: str, schedule: str, layout: str, keys: dict[str, Any]
) -> None:
    loaded = model(arch)
    layer = len(loaded.model.layers) - 1
    head = 1 if arch == "llama" else 0
    width = 16 if arch == "llama" else 32
    injected_fault = InjectedFault(f"layers.{layer}.self_attn.v_proj", 1, 2, head * width + 3)
    case = _injected(runs, arch, injected_fault, schedule, layout, **keys)
    for name, result in (("patch_in", "removed"), ("patch_out", "reproduced")):
        control = run_control(case, name)
        assert control.result == result, control.sentence
        assert control.detail["smallest"] == ((layer, "V", head, 2),)
        assert control.detail["exact"]


def test_a_difference_outside_the_cache_is_not_carried(runs: Runs) -> None:
    # The last row's own last layer: it writes nothing that anybody reads.
    injected_fault = InjectedFault("layers.1.mlp.down_proj", 0, 12 + 10 - 2, 3)
    control = run_control(_injected(runs, "llama", injected_fault, "continuous", "packed"), "patch_in")
    assert control.result == "no_differing_entries"


def test_what_arises_in_the_deciding_forward_too_remains(runs: Runs) -> None:
    first = InjectedFault("layers.1.self_attn.v_proj", 0, 3, 1)
    last = InjectedFault("layers.1.mlp.down_proj", 0, 12 + 10 - 2, 3)
    loaded, asked = model("llama"), scenario("continuous", "packed", max_tokens=10)
    a = runs.record(loaded, asked)
    b = runs.record(loaded, asked, RecordOptions(observe=0, faults=(first, last)))
    case = Case.of(a, b, loaded=loaded, injected_faults=((), (first, last)))
    assert [run_control(case, name).result for name in ("patch_in", "patch_out")] == [
        "remains",
        "not_reproduced",
    ]


def test_differing_entries_are_those_that_compare_counts(runs: Runs) -> None:
    injected_fault = InjectedFault("layers.0.self_attn.k_proj", 0, 4, 7)
    case = _injected(runs, "llama", injected_fault, "continuous", "packed")
    control = run_control(case, "patch_in")
    counted = case.focus.differing_entries
    assert counted is not None
    # Compare also counts what the deciding row itself wrote before it attended.
    own = sum(len(layer) for layer in ("KV", "KV")) * 2 * (counted.positions[-1][1] == counted.alive_at)
    assert counted.count - own <= control.detail["differing_entries"] <= counted.count


def _filled(cache: Any, rows: int, seed: int, chunk: int) -> Any:
    mx.random.seed(seed)
    keys, values = (mx.random.normal((1, 2, rows, 32)) for _ in "kv")
    for start in range(0, rows, chunk):
        cache.update_and_fetch(keys[:, :, start : start + chunk], values[:, :, start : start + chunk])
    return cache, keys, values


def _paged() -> PagedCache:
    return PagedCache(PageTable(PagePool(1, 4), 0), 0)


@pytest.mark.parametrize("chunk", [1, 5, 23])
@pytest.mark.parametrize(
    "make",
    [KVCache, lambda: RotatingKVCache(16), lambda: RotatingKVCache(64), _paged],
    ids=["plain", "wrapped window", "open window", "paged"],
)
def test_entries_lie_by_position_and_can_be_replaced(make: Any, chunk: int) -> None:
    cache, keys, values = _filled(make(), 23, 1, chunk)
    mine = held(cache)
    assert mine.end == 23
    for side, array in ((mine.keys, keys), (mine.values, values)):
        assert np.array_equal(np.asarray(side[0]), np.asarray(array[0, :, mine.first :]))
    other = held(_filled(make(), 23, 2, chunk)[0])
    wanted = [EntryKey(0, "K", 1, 20), EntryKey(0, "V", 0, 22)]
    put(cache, patched(mine, other, wanted))
    assert differing([held(cache)], [mine]) == wanted
    left = differing([held(cache)], [other])
    assert len(left) == 4 * (23 - mine.first) - len(wanted) and not set(left) & set(wanted)


def test_a_quantised_entry_has_all_its_parts() -> None:
    a, b = (held(_filled(QuantizedKVCache(group_size=32, bits=4), 9, seed, 3)[0]) for seed in (1, 2))
    assert len(a.keys) == 3
    taken = patched(a, b, [EntryKey(0, "V", 1, 4)])
    assert differing([taken], [a]) == [EntryKey(0, "V", 1, 4)]


def test_a_padded_slot_begins_after_its_padding() -> None:
    cache = BatchKVCache([0, 3])
    keys = mx.random.normal((2, 2, 8, 16))
    cache.update_and_fetch(keys, keys)
    entries = held(cache, 1)
    assert entries.end == 5
    put(cache, patched(entries, held(cache, 0), [EntryKey(0, "K", 0, 0)]), 1)
    assert np.array_equal(np.asarray(cache.keys[1, 0, 3]), np.asarray(keys[0, 0, 0]))
    assert np.array_equal(np.asarray(cache.keys[0, :, :8]), np.asarray(keys[0]))


def test_a_ring_that_keeps_its_start_is_refused() -> None:
    with pytest.raises(CannotRun, match="keeps its first entries"):
        held(_filled(RotatingKVCache(8, keep=2), 20, 1, 1)[0])
