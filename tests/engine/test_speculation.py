"""Speculation changes no token: packed and padded runs with a draft give what a greedy run without one gives."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import speculative_generate_step
from runs import PACKABLE, Runs, model, prompts, scenario
from tiers import FULL, some_now
from tiny import VOCAB, tiny

from detdiff.compare import compare
from detdiff.engines.mlx.engine import RecordOptions, generate
from detdiff.engines.mlx.model import LoadedModel
from detdiff.errors import ContextExceeded, DraftMismatch
from detdiff.scenario import Scenario
from detdiff.trace import Trace

TOKENS = 12
SEEDS = 10


@cache
def drafting(arch: str = "llama", fmt: str = "f32", seed: int = 0) -> LoadedModel:
    """A draft of its own; with seed 0 it is the target's twin, in modules of its own."""
    return tiny(arch, fmt, seed)


def of_seed(seed: int, **keys: Any) -> Scenario:
    """Two or three requests with prompts of their own."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 20) for _ in range(draw.choice((2, 3)))]
    requests = [
        {"id": f"r{i}", "tokens": tokens, "arrival": keys["arrivals"][i] if "arrivals" in keys else 0}
        for i, tokens in enumerate(prompts(lengths, seed))
    ]
    rest = {key: value for key, value in keys.items() if key != "arrivals"}
    return Scenario.from_dict({"model": "tiny", "max_tokens": TOKENS, "request": requests, **rest})


@cache
def greedy(seed: int) -> dict[str, list[int]]:
    return generate(of_seed(seed, layout="packed"), loaded=model("llama"))


# Each seed meets every k, and each arrival from 0 to 20 some k and seed. DETDIFF_TEST_FULL=1 runs the whole product.
CELLS = [
    (seed, k, arrival)
    for seed in range(SEEDS)
    for k in range(1, 9)
    for arrival in range(21)
    if FULL or arrival == (seed * 8 + k * 5) % 21
]


def test_the_cells_cover_every_k_and_arrival() -> None:
    assert {(seed, k) for seed, k, _ in CELLS} == {(s, k) for s in range(SEEDS) for k in range(1, 9)}
    assert {arrival for *_, arrival in CELLS} == set(range(21))


@pytest.mark.parametrize("seed", some_now(range(SEEDS), 7, ci=(0, 5, 9)))
def test_tokens_are_those_of_a_greedy_run_for_every_k_and_arrival(seed: int) -> None:
    for _, k, arrival in (cell for cell in CELLS if cell[0] == seed):
        draft = drafting(seed=(seed + k) % 3)
        wanted = of_seed(
            seed,
            schedule="continuous",
            layout="packed",
            arrivals=(0, arrival, arrival // 2),
            draft="tiny",
            drafts=k,
        )
        assert generate(wanted, loaded=model("llama"), draft=draft) == greedy(seed), (k, arrival)


@pytest.mark.parametrize("fmt", some_now(["f32", "bf16"], 0, ci=()))
@pytest.mark.parametrize("arch", some_now(PACKABLE, 4))
def test_every_packable_architecture_within_a_budget_and_in_chunks(arch: str, fmt: str) -> None:
    if arch == "qwen3_moe" and fmt == "bf16":
        pytest.skip("MLX's CPU backend has no expert matmul in bf16")
    expected = generate(scenario(layout="packed", max_tokens=TOKENS), loaded=model(arch, fmt))
    for seed, keys in (
        (0, {"row_budget": 7}),
        (5, {"row_budget": 3, "prefill_chunk": 2}),
        (5, {"active": 2}),
    ):
        asked = scenario(
            "continuous", "packed", arrivals=(0, 3, 4), max_tokens=TOKENS, draft="tiny", drafts=4, **keys
        )
        found = generate(asked, loaded=model(arch, fmt), draft=drafting(arch, fmt, seed))
        assert found == expected, (seed, keys)


def rates(trace: Trace) -> list[float]:
    return [counts["accepted"] / counts["proposed"] for counts in trace.header["speculation"].values()]


@pytest.mark.thorough
def test_a_twin_is_always_accepted_and_a_stranger_hardly_ever(runs: Runs) -> None:
    asked = scenario("continuous", "packed", arrivals=(0, 2, 3), draft="tiny", drafts=3, max_tokens=20)
    twin = runs.record(model("llama"), asked, draft=drafting())
    assert rates(twin) == [1.0] * 3
    assert all(event["event"] == "verify" for event in twin.events())
    stranger = runs.record(model("llama"), asked, draft=drafting(seed=5))
    assert max(rates(stranger)) < 0.2
    assert {event["event"] for event in stranger.events()} == {"verify", "trim"}


def test_a_stop_token_ends_a_verification() -> None:
    free = greedy(1)
    stop = free["r0"][5]
    stopping = model("llama")

    class Stops(type(stopping.tokenizer)):  # type: ignore[misc]
        eos_token_ids = frozenset({stop})

    loaded = LoadedModel(stopping.model, Stops(), stopping.path, stopping.identity, stopping.config)
    plain = generate(of_seed(1, layout="packed"), loaded=loaded)
    assert plain["r0"] == free["r0"][: free["r0"].index(stop) + 1]
    for layout in ("packed", "padded"):
        asked = of_seed(1, layout=layout, draft="tiny", drafts=8)
        assert generate(asked, loaded=loaded, draft=drafting()) == plain


@pytest.mark.parametrize("k", some_now([1, 2, 5], 0, 2))
@pytest.mark.parametrize("seed", some_now([0, 5], 1))
def test_padded_tokens_are_those_of_mlx_lm_itself(k: int, seed: int) -> None:
    target, draft = model("llama"), drafting(seed=seed)
    expected = {}
    for number, prompt in enumerate(prompts()):
        steps = speculative_generate_step(
            mx.array(prompt), target.model, draft.model, num_draft_tokens=k, max_tokens=TOKENS
        )
        expected[f"r{number}"] = [int(token) for token, _, _ in steps]
    asked = scenario(draft="tiny", drafts=k, max_tokens=TOKENS, prefill_chunk=5)
    assert generate(asked, loaded=target, draft=draft) == expected
    assert expected == generate(scenario(max_tokens=TOKENS), loaded=target)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_recording_both_models_changes_nothing(layout: str, runs: Runs) -> None:
    keys: dict[str, Any] = {"draft": "tiny", "drafts": 3, "max_tokens": TOKENS}
    if layout == "packed":
        asked = scenario("continuous", layout, arrivals=(0, 1, 2), **keys)
    else:
        asked = scenario("serial", layout, **keys)
    trace = runs.record(model("llama"), asked, RecordOptions(observe=1000), draft=drafting(seed=5))
    checked = trace.header["observer"]
    assert checked == {"forwards": len(_with_logits(trace)), "equal": True}
    generated = trace.generated()
    assert tokens_of(trace) == generate(asked, loaded=model("llama"), draft=drafting(seed=5))
    # What chose a token is the row's own logits, also where a rejected proposal was there before.
    assert generated.token.tolist() == generated.top_ids[:, 0].tolist()


def _with_logits(trace: Trace) -> set[int]:
    """The forwards, of either model, whose logits the engine used."""
    rows = trace.row_index()
    found: set[int] = set()
    for number, table in trace.tables.items():
        ports = [trace.port_index(name, "out") for name in ("logits", "draft.logits")]
        if any(table[port] >= 0 for port in ports):
            found |= set(rows.forward[rows.table == number].tolist())
    return found


def test_both_models_are_in_one_trace(runs: Runs) -> None:
    asked = scenario("continuous", "packed", arrivals=(0, 2, 3), draft="tiny", drafts=3)
    trace = runs.record(model("llama"), asked, draft=drafting("llama", "bf16", 5))
    trace.verify()
    names = [site.name for site in trace.sites]
    half = len(names) // 2
    assert names[half:] == [f"draft.{name}" for name in names[:half]]
    assert trace.header["draft"]["name"] == "tiny-llama-bf16-5"
    of = [line.get("model", "target") for line in trace.forwards()]
    assert set(of) == {"target", "draft"}
    rows = trace.row_index()
    for number, line in enumerate(trace.forwards()):
        phases = {row["phase"] for row in line["rows"]}
        assert (phases == {"draft"}) == (of[number] == "draft")
        table = trace.tables[int(rows.table[rows.forward == number][0])]
        ports = {trace.ports[port].site >= half for port in range(len(table)) if table[port] >= 0}
        assert ports == {of[number] == "draft"}
        # The head sees the rows whose logits are asked for and no others.
        head = next(site for site in range(len(names)) if trace.sites[site].kind == "head")
        if of[number] == "target" and (call := trace.call(number, head)) is not None:
            asked_for = sum(
                row["count"] if row["phase"] == "verify" else 1
                for row in line["rows"]
                if row["start"] + row["count"] >= len(trace.requests[row["request"]]["tokens"])
            )
            assert call["rows"] == asked_for


def test_a_draft_that_does_not_fit_is_refused() -> None:
    asked = scenario(layout="packed", draft="tiny")
    draft = drafting(seed=5)
    other = LoadedModel(
        draft.model, draft.tokenizer, draft.path, {**draft.identity, "vocab_size": VOCAB + 1}, draft.config
    )
    with pytest.raises(DraftMismatch, match=f"has {VOCAB + 1} token ids and the model 'tiny' has {VOCAB}"):
        generate(asked, loaded=model("llama"), draft=other)
    short = LoadedModel(
        draft.model, draft.tokenizer, draft.path, draft.identity, {"max_position_embeddings": 20}
    )
    with pytest.raises(ContextExceeded, match="draft model's context is 20"):
        generate(asked, loaded=model("llama"), draft=short)


@pytest.mark.parametrize(
    "keys",
    some_now([{"page_tokens": 4}, {"share_prefix": True}, {"page_tokens": 3, "share_prefix": True}], 2),
)
def test_pages_and_shared_prefixes_change_no_token(keys: dict[str, Any], runs: Runs) -> None:
    (common,) = prompts([14])
    tails = prompts([1, 3, 2], seed=8)
    requests = [
        {"id": f"r{n}", "tokens": common[:shared] + tails[n], "arrival": 3 * n}
        for n, shared in enumerate((14, 9, 14))
    ]
    given = {"model": "tiny", "layout": "packed", "max_tokens": TOKENS}
    plain = Scenario.from_dict({**given, "request": requests})
    asked = Scenario.from_dict(
        {**given, "request": requests, "schedule": "continuous", "draft": "tiny", "drafts": 3, **keys}
    )
    trace = runs.record(model("llama"), asked, draft=drafting(seed=5))
    assert tokens_of(trace) == generate(plain, loaded=model("llama"))
    kinds = {(event["event"], event.get("model")) for event in trace.events()}
    for kind in ("page", "prefix"):
        wanted = kind == "page" and "page_tokens" in keys or kind == "prefix" and "share_prefix" in keys
        assert {(kind, "target"), (kind, "draft")} <= kinds if wanted else not {(kind, "target")} & kinds


@pytest.mark.thorough
def test_a_forced_run_speculates_over_the_tokens_that_it_is_fed(runs: Runs) -> None:
    keys: dict[str, Any] = {"layout": "packed", "max_tokens": TOKENS}
    other = runs.record(model("qwen2"), scenario(**keys))
    forced = {**keys, "force_tokens": str(other.path)}
    plain = runs.record(model("llama"), scenario(**forced))
    trace = runs.record(model("llama"), scenario(**forced, draft="tiny", drafts=3), draft=drafting())
    # What is recorded is the model's own choice; what is committed, and fed, the other run's token.
    assert tokens_of(trace) == tokens_of(plain)
    committed: dict[int, list[int]] = {}
    for event in trace.events():
        if event["event"] == "verify":
            committed.setdefault(event["request"], []).extend(event["committed"])
    assert {f"r{n}": tokens for n, tokens in committed.items()} == {
        id: tokens[1:] for id, tokens in tokens_of(other).items()
    }
    assert compare(plain, trace).identical


def tokens_of(trace: Trace) -> dict[str, list[int]]:
    generated = trace.generated(lens=False)
    found = {}
    for number, request in enumerate(trace.requests):
        mine = generated.request == number
        found[request["id"]] = generated.token[mine][generated.index[mine].argsort()].tolist()
    return found
