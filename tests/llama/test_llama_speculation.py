"""Speculation on llama.cpp changes no token, its account adds up, and a rewind that does not happen is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import need_llama, tiny_gguf
from tiers import some_now

from detdiff.compare import compare
from detdiff.compare.divergence import Divergence
from detdiff.engines.base import Overrides, RunOptions
from detdiff.engines.llama_cpp import engine as engine_module
from detdiff.engines.llama_cpp.context import BatchRow, ContextFault, LlamaContext
from detdiff.engines.llama_cpp.nodes import NodeRecorder
from detdiff.engines.record import record
from detdiff.engines.registry import open_named
from detdiff.errors import ContextExceeded, DraftMismatch, EngineRefuses, LlamaFailed
from detdiff.explain.case import Case
from detdiff.explain.investigate import judge
from detdiff.report import divergence_text
from detdiff.scenario import Scenario
from detdiff.trace import Trace

PROMPTS = ("The quick brown fox", "Once", "In the beginning was")
TOKENS = 12
KINDS = ("Q8_0", "F32", "F16", "Q4_0")
ALIKE = ("Q8_0", "Q4_0")
"""Weights whose rows llama.cpp computes alike for every number of rows on a CPU."""


class Trials:
    """Scenarios of tiny models, recorded once each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines: dict[tuple[str, str], Any] = {}
        self._traces: dict[str, Trace] = {}

    def model(self, kind: str, seed: int = 0, **changes: Any) -> Path:
        path = self._folder / f"{kind}-{seed}{'-'.join(map(str, changes.values()))}.gguf"
        return path if path.exists() else tiny_gguf(path, kind, seed=seed, heads=2, kv_heads=2, **changes)

    def engine(self, kind: str, **settings: Any) -> Any:
        key = kind, json.dumps(settings, sort_keys=True)
        if key not in self._engines:
            self._engines[key] = open_named("llama.cpp", str(self.model(kind)), settings)
        return self._engines[key]

    def scenario(self, schedule: str, draft: Path | None = None, drafts: int = 3, **keys: Any) -> Scenario:
        arrivals = (0, 2, 3) if schedule == "continuous" else (0, 0, 0)
        requests = [
            {"id": f"r{n}", "prompt": prompt, "arrival": arrival, "ignore_stop": True}
            for n, (prompt, arrival) in enumerate(zip(PROMPTS, arrivals, strict=True))
        ]
        given = {"model": "tiny", "engine": "llama.cpp", "layout": "packed", "max_tokens": TOKENS, **keys}
        if draft is not None:
            given |= {"draft": str(draft), "drafts": drafts}
        return Scenario.from_dict({**given, "schedule": schedule, "request": requests})

    def record(
        self,
        kind: str,
        scenario: Scenario,
        *faults: ContextFault,
        pinned: bool = False,
        **settings: Any,
    ) -> Trace:
        key = repr((kind, scenario, faults, pinned, settings))
        if key not in self._traces:
            options = RunOptions(faults=faults, overrides=Overrides(pin_kernels=pinned))
            self._traces[key] = record(
                scenario,
                self._folder / f"trace-{len(self._traces)}",
                engine=self.engine(kind, **settings),
                options=options,
            )
        return self._traces[key]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    need_llama()
    return Trials(tmp_path_factory.mktemp("llama-speculation"))


def tokens_of(trace: Trace) -> dict[str, list[int]]:
    found = trace.generated(lens=False)
    return {
        request["id"]: found.token[found.request == number].tolist()
        for number, request in enumerate(trace.requests)
    }


def noticed(trace: Trace) -> list[Any]:
    return [event for line in trace.forwards() for event in line.get("events", ())]


@pytest.mark.parametrize("drafts", some_now([1, 2, 3, 5], 2))
@pytest.mark.parametrize("kind", some_now(ALIKE, 0))
def test_the_text_and_every_bit_are_those_without_a_draft(trials: Trials, kind: str, drafts: int) -> None:
    plain = trials.record(kind, trials.scenario("serial"))
    traces = [
        trials.record(kind, trials.scenario(schedule, trials.model("Q4_0"), drafts))
        for schedule in ("serial", "continuous")
    ]
    for trace in traces:
        trace.verify()
        assert tokens_of(trace) == tokens_of(plain)
        found = compare(plain, trace)
        assert found.identical and found.compared.digests > 3000
        assert noticed(trace) == [] and trace.header["observer"]["equal"] is True
    healthy = compare(*traces)
    assert healthy.identical and not healthy.bookkeeping
    for request in healthy.requests:
        assert request.draft is not None and request.draft.rows > 0 and request.draft.differing == 0


@pytest.mark.parametrize("kind", some_now(KINDS, 1))
def test_rows_in_calls_of_their_own_are_equal_for_any_weights(trials: Trials, kind: str) -> None:
    plain = trials.record(kind, trials.scenario("serial"), pinned=True)
    trace = trials.record(kind, trials.scenario("continuous", trials.model("Q4_0")), pinned=True)
    assert compare(plain, trace).identical
    assert {row["count"] for line in trace.forwards() for row in line["rows"]} == {1}


def test_the_account_is_that_of_the_events(trials: Trials) -> None:
    trace = trials.record("Q8_0", trials.scenario("continuous", trials.model("Q4_0")))
    sums: dict[str, list[int]] = {id: [0, 0] for id in trace.header["speculation"]}
    rejected = {model: dict.fromkeys(range(len(PROMPTS)), 0) for model in ("target", "draft")}
    asked = {model: dict.fromkeys(range(len(PROMPTS)), 0) for model in ("target", "draft")}
    for event in trace.events():
        if event["event"] == "verify":
            both = sums[trace.requests[event["request"]]["id"]]
            both[0] += len(event["proposals"])
            both[1] += event["accepted"]
            for counts in rejected.values():
                counts[event["request"]] += len(event["proposals"]) - len(event["committed"])
        else:
            assert event["event"] == "trim" and event["done"] == event["asked"] > 0
            asked[event["model"]][event["request"]] += event["done"]
    assert sums == {
        id: [both["proposed"], both["accepted"]] for id, both in trace.header["speculation"].items()
    }
    # Some of each, so that it says something.
    assert all(0 < accepted < proposed for proposed, accepted in sums.values())
    assert asked == rejected and all(asked["target"].values())


def test_a_twin_is_always_accepted_and_a_stranger_hardly_ever(trials: Trials) -> None:
    def rates(draft: Path) -> list[float]:
        trace = trials.record("Q8_0", trials.scenario("continuous", draft))
        return [both["accepted"] / both["proposed"] for both in trace.header["speculation"].values()]

    assert rates(trials.model("Q8_0")) == [1.0] * 3
    assert max(rates(trials.model("Q8_0", seed=5))) < 0.2


def test_both_models_are_in_one_trace(trials: Trials) -> None:
    draft = trials.model("Q8_0", seed=5)
    trace = trials.record("Q8_0", trials.scenario("continuous", draft, capture="full"))
    names = [site.name for site in trace.sites]
    first = len(names) // 2
    assert names[first:] == [f"draft.{name}" for name in names[:first]]
    assert trace.header["draft"]["name"] == draft.stem
    rows = trace.row_index()
    seen = set()
    for number, line in enumerate(trace.forwards()):
        model = line.get("model", "target")
        phases = {row["phase"] for row in line["rows"]}
        assert (phases == {"draft"}) == (model == "draft")
        seen |= phases
        table = trace.tables[int(rows.table[rows.forward == number][0])]
        ports = {trace.ports[port].site >= first for port in range(len(table)) if table[port] >= 0}
        assert ports == {model == "draft"}
        heads = [n for n, site in enumerate(trace.sites) if site.kind == "head"]
        head = heads[-1] if model == "draft" else heads[0]
        call = trace.call(number, head)
        # A batch can be several graphs, and a prompt's last row is in one of them; a draft's prompts answer nothing.
        answering = sum(
            row["count"] if row["phase"] == "verify" else 1
            for row in line["rows"]
            if row["start"] + row["count"] >= len(trace.requests[row["request"]]["tokens"])
            and (row["phase"] != "draft" or row["start"] >= len(trace.requests[row["request"]]["tokens"]))
        )
        assert (0 if call is None else call["rows"]) == answering
    assert seen == {"prefill", "draft", "verify"}
    # Requests' draft rows of one turn share a batch, and so do their verification rows with another's prompt.
    together = [(line["phase"], len(line["rows"])) for line in trace.forwards()]
    assert (
        ("draft", 3) in together
        and ("verify", 3) in together
        and any(phase == "mixed" for phase, _ in together)
    )


def test_a_row_budget_and_chunks_change_nothing(trials: Trials) -> None:
    plain = trials.record("Q8_0", trials.scenario("serial"))
    for keys in ({"row_budget": 5}, {"row_budget": 3, "prefill_chunk": 2}, {"active": 2}):
        trace = trials.record("Q8_0", trials.scenario("continuous", trials.model("Q4_0"), **keys))
        assert compare(plain, trace).identical and noticed(trace) == []


@pytest.mark.parametrize(
    "settings",
    some_now([{"unified": True}, {"flash_attention": "off"}, {"unified": True, "flash_attention": "off"}], 2),
)
def test_every_kind_of_cache_forgets_rejected_rows(trials: Trials, settings: dict[str, Any]) -> None:
    plain = trials.record("Q8_0", trials.scenario("continuous"), **settings)
    trace = trials.record("Q8_0", trials.scenario("continuous", trials.model("Q4_0")), **settings)
    assert noticed(trace) == [] and any(event["event"] == "trim" for event in trace.events())
    # A unified cache is as long as all requests make it, which attention may sum otherwise.
    assert tokens_of(plain) == tokens_of(trace)


def test_a_forced_run_speculates_over_the_tokens_that_it_is_fed(trials: Trials) -> None:
    other = trials.record("F16", trials.scenario("serial", max_tokens=7))
    keys = {"force_tokens": str(other.path)}
    plain = trials.record("Q8_0", trials.scenario("serial", **keys))
    trace = trials.record("Q8_0", trials.scenario("continuous", trials.model("Q4_0"), **keys))
    assert compare(plain, trace).identical
    assert tokens_of(trace) == tokens_of(plain)
    committed: dict[int, list[int]] = {}
    for event in trace.events():
        if event["event"] == "verify":
            committed.setdefault(event["request"], []).extend(event["committed"])
    fed = {n: tokens[1:] for n, tokens in enumerate(tokens_of(other).values())}
    assert committed == fed


class SkippedRewind(ContextFault):
    """Rewind ``number`` does not happen, and from there on the sequence goes on where the cache says that it is."""

    def __init__(self, number: int | None, model: str = "target", follow: bool = True) -> None:
        self.number, self.model, self.follow = number, model, follow

    def install(self, context: LlamaContext, nodes: NodeRecorder) -> None:
        remove, decode = context.remove, context.decode
        ahead: dict[int, int] = {}
        count = 0

        def removed(sequence: int, start: int = 0, end: int = -1) -> bool:
            nonlocal count
            if start == 0:
                ahead.pop(sequence, None)
                return remove(sequence, start, end)
            count += 1
            if count - 1 != self.number:
                return remove(sequence, start, end)
            ahead[sequence] = context.held(sequence) - start
            return True

        def decoded(rows: Any) -> None:
            decode(
                [
                    BatchRow(token, position + ahead.get(sequence, 0), sequence, answers)
                    for token, position, sequence, answers in rows
                ]
                if self.follow
                else rows
            )

        context.remove, context.decode = removed, decoded  # type: ignore[method-assign]


def found(divergence: Divergence, what: str) -> list[str]:
    return [finding.detail for finding in divergence.bookkeeping if finding.what == what]


Judged = Callable[..., Any]


@pytest.fixture
def judged(trials: Trials) -> Judged:
    def verdict(*faults: ContextFault) -> Any:
        asked = trials.scenario("continuous", trials.model("Q4_0"))
        case = Case.of(asked, asked, engine=trials.engine("Q8_0"), injected_faults=((), faults), repeats=1)
        return judge(case)

    return verdict


@pytest.mark.parametrize(
    ("number", "model"), some_now([(0, "target"), (3, "target"), (0, "draft"), (2, "draft")], 0, 3)
)
def test_a_rewind_that_does_not_happen_is_a_bug(judged: Judged, number: int, model: str) -> None:
    verdict = judged(SkippedRewind(number, model))
    assert verdict.kind == "bug" and verdict.rule == "bookkeeping"
    divergence = verdict.divergence
    (short,) = found(divergence, "trim")
    assert f"a trim of the {model}'s cache" in short and "took 0 of" in short and "in layers 0-1" in short
    stale = found(divergence, "stale")
    assert stale and f"stayed in the {model}'s cache in layers 0-1" in stale[0]
    assert "rejected row" in stale[0] and found(divergence, "offset")
    # Its rows saw what should have been gone.
    assert any(
        "not the last one" in text or "later position" in text for text in found(divergence, "cache_foreign")
    )
    if model == "draft":
        # A draft that sees rejected rows proposes otherwise, and no token of the target changes.
        assert all(request.flip is None and request.differing == 0 for request in divergence.requests)
    assert f"stayed in the {model}'s cache" in " ".join(divergence_text(divergence).split())


def test_the_same_fault_that_skips_nothing_is_none(judged: Judged) -> None:
    verdict = judged(SkippedRewind(None), SkippedRewind(None, "draft"))
    assert verdict.kind == "identical" and not verdict.divergence.bookkeeping


def test_rows_at_their_own_positions_are_refused_after_a_skipped_rewind(trials: Trials) -> None:
    asked = trials.scenario("continuous", trials.model("Q4_0"), drafts=4)
    path = trials._folder / "refused"
    with pytest.raises(LlamaFailed, match=r"could not compute a batch of \d+ rows"):
        options = RunOptions(faults=(SkippedRewind(0, follow=False),))
        record(asked, path, engine=trials.engine("Q8_0"), options=options)
    trace = Trace.open(path)
    assert not trace.complete
    (short,) = [event for event in trace.events() if event["event"] == "trim" and event["done"] == 0]
    assert short["model"] == "target" and short["asked"] > 0


def test_a_draft_that_does_not_fit_is_refused(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trials.engine("Q8_0")
    short = trials.model("Q8_0", seed=1, context=20)
    with pytest.raises(ContextExceeded, match="draft model's context is 20"):
        trials.record("Q8_0", trials.scenario("serial", short))
    with pytest.raises(EngineRefuses, match="is no file"):
        engine.check(trials.scenario("serial", Path("nowhere.gguf")))
    opened = engine_module.open_llama

    def of_another_vocabulary(model: Any, settings: Any) -> Any:
        found = opened(model, settings)
        found.model.vocabulary += 1
        return found

    monkeypatch.setattr(engine_module, "open_llama", of_another_vocabulary)
    with pytest.raises(DraftMismatch, match=r"has 261 token ids and the model 'tiny' has 260"):
        engine.check(trials.scenario("serial", trials.model("Q8_0", seed=2)))


def test_a_draft_whose_kernels_differ_is_judged_by_its_own_weights(trials: Trials) -> None:
    draft = trials.model("F16", seed=5)
    asked = [trials.scenario(schedule, draft) for schedule in ("serial", "continuous")]
    traces = [trials.record("Q8_0", each) for each in asked]
    divergence = compare(*traces)
    if divergence.identical:
        pytest.skip("this processor's F16 kernels compute a row alike for every number of rows")
    for request in divergence.requests:
        assert request.flip is None and request.differing == 0 and request.draft is not None
    origin = next(request.origin for request in divergence.requests if request.origin is not None)
    assert origin.site.startswith("draft.") and origin.site.endswith(".MUL_MAT")
    assert (origin.rows_a, origin.rows_b) != (None, None) and origin.rows_a != origin.rows_b
    verdict = judge(Case.of(*asked, engine=trials.engine("Q8_0"), repeats=1))
    # No token, logit or cache entry of the target shows an effect, so that the verdict may stay open; a bug it is not.
    assert verdict.kind in ("numerics", "undetermined")
    results = {control.name: control.result for control in verdict.controls}
    assert results["oracle"] == "inside" and results["pin_kernels"] == "removed"
