"""Each rule of a verdict with a case that it decides, and a twin in which one fact is another and the rule is silent."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from verdict_facts import (
    FAR,
    HELD,
    ORACLE,
    OUTSIDE,
    PRECISION,
    QUANTISED,
    TRIM,
    asked,
    chosen,
    control,
    diverged,
    equal,
    facts,
    found,
    observed,
    oracle,
    read,
    speculated,
    two_engines,
)

from detdiff.compare import Divergence, Finding, NotCompared
from detdiff.explain import Control
from detdiff.explain.controls.repeat import RepeatFigures
from detdiff.explain.facts import CACHE_FINDINGS, CONTRADICTIONS, Facts, RecordedFacts
from detdiff.explain.outside import AnswerDifferences
from detdiff.explain.rules import RULES, TABLE_END, TABLE_START, decide, deciding, table
from detdiff.explain.verdict import KINDS

CHANGED = Finding(
    "b",
    "cache_changed",
    "anchor",
    2,
    "the cache entry K of layer 0, head 1, position 3 is not what was written",
)
SETTINGS = Finding("both", "settings", "anchor", None, "request anchor: temperature 0 in a, 1 in b")
QUANTISE = Finding(
    "both", "quantise", None, None, "the cache was quantised from position 20 in a and 32 in b"
)


def quantised(**results: str) -> Facts:
    return facts(found(read(), QUANTISE), QUANTISED, **{"configuration": "removed", **results})


def sized(**results: str) -> Facts:
    run = replace(read().b, scenario={**read().b.scenario, "max_kv_size": 5})
    origins = [
        each if each.origin is None else replace(each, origin=replace(each.origin, position=9))
        for each in read().requests
    ]
    whole = replace(read(), b=run, requests=tuple(origins))
    return facts(whole, **{"cache_size": "removed", **results})


def served() -> Divergence:
    """The same, of answers of a server."""
    runs = {
        side: replace(
            getattr(diverged(), side), scenario={**getattr(diverged(), side).scenario, "engine": "server"}
        )
        for side in "ab"
    }
    return replace(diverged(), **runs)


@pytest.mark.parametrize(
    ("answers", "rounding"),
    [
        (AnswerDifferences(3, 0, 0.01, 0.01), True),
        (AnswerDifferences(3, 1, 0.01, 0.3, 0.015, "r0", 4), True),
        (AnswerDifferences(3, 1, 0.01, 0.3, 0.2, "r0", 4), False),
        (AnswerDifferences(3, 0, 2.0, 2.0), False),
        (AnswerDifferences(3, 1, None, 0.3, 0.2, "r0", 0), None),
        (AnswerDifferences(3, 1, None, None), None),
    ],
)
def test_what_looks_as_rounding_would(answers: AnswerDifferences, rounding: bool | None) -> None:
    assert answers.rounding is rounding
    verdict = decide(facts(served(), RecordedFacts(answers=answers), oracle="not_run"))
    assert verdict.kind == "undetermined"
    start = {
        True: "As rounding would look",
        False: "Not as rounding would look",
        None: "Whether it looks as rounding would cannot",
    }
    assert verdict.sentence.startswith(start[rounding])


def test_what_does_not_repeat_together_and_does_alone_is_said_of_a_server() -> None:
    def repeated(side: str, schedules: tuple[str, str]) -> str:
        runs = {
            name: replace(getattr(served(), name), scenario={"engine": "server", "schedule": schedule})
            for name, schedule in zip("ab", schedules, strict=True)
        }
        differs = Control(
            "repeat", "differs", "side b gave other bits", 0, 0.0, RepeatFigures({"a": 1, "b": 1}, side)
        )
        recorded = RecordedFacts(answers=AnswerDifferences(3, 0, 0.01, 0.01))
        verdict = decide(facts(replace(served(), **runs), recorded, repeat=differs))
        assert verdict.kind == "nondeterminism"
        return verdict.sentence

    together = repeated("b", ("serial", "static"))
    assert (
        together.startswith("Requests that the server is sent together do not repeat")
        and "As rounding would look" in together
    )
    assert repeated("a", ("serial", "static")).startswith("Run-to-run change")
    # Two sides of batches: which requests meet may vary in either.
    assert repeated("b", ("static", "static")).startswith("Requests that the server is sent together")


CASES: dict[str, tuple[Callable[[], Facts], Callable[[], Facts]]] = {
    "nothing": (lambda: Facts(None, why="no request is in both."), lambda: facts(equal())),
    "served-before": (lambda: facts(fresh="differs"), lambda: facts(fresh="unsteady")),
    "cached": (lambda: facts(cached="differs"), lambda: facts(cached="equal")),
    "served": (lambda: facts(served="differs"), lambda: facts(served="unsteady")),
    "choices": (
        lambda: facts(chosen(), choices="otherwise", repeat="differs"),
        lambda: facts(chosen(), choices="as_asked"),
    ),
    "repeat": (lambda: facts(repeat="differs"), lambda: facts(repeat="equal")),
    "changed": (lambda: facts(repeat="changed"), lambda: facts(repeat="changed", fresh="differs")),
    "bookkeeping": (
        lambda: facts(found(diverged(), TRIM)),
        # Changed because the cache was quantised right before is no contradiction.
        lambda: facts(found(diverged(), CHANGED), RecordedFacts(quantised_b=((3, 1),))),
    ),
    "not-finite": (
        lambda: facts(equal(), RecordedFacts(not_finite=(("b", "anchor", 3),))),
        lambda: facts(equal(), finite="finite"),
    ),
    "rank-outside": (
        lambda: facts(ranks="outside"),
        lambda: facts(ranks="outside", repeat="not_run"),
    ),
    "role-outside": (
        lambda: facts(two_engines(), roles="outside"),
        lambda: facts(two_engines(), roles="outside", repeat="not_run"),
    ),
    "other-files": (
        lambda: facts(
            two_engines(), roles=control("roles", "other_files", files="the models' files differ: heads")
        ),
        lambda: facts(two_engines(), roles="inside"),
    ),
    "roles": (
        lambda: facts(two_engines(), roles="inside"),
        lambda: facts(two_engines(), roles="partly"),
    ),
    "adapter-outside": (
        lambda: facts(adapters="outside"),
        lambda: facts(adapters="outside", repeat="not_run"),
    ),
    "adapter-without": (lambda: facts(adapters="without"), lambda: facts(adapters="other_weights")),
    "adapter": (lambda: facts(adapters="inside"), lambda: facts(equal(), adapters="inside")),
    "identical": (
        lambda: facts(equal()),
        lambda: facts(replace(equal(), identical=False, inconclusive=True)),
    ),
    "observed": (
        lambda: facts(observed(replace(equal(), identical=False, inconclusive=True))),
        lambda: facts(replace(equal(), identical=False, inconclusive=True)),
    ),
    "asked": (
        lambda: facts(replace(equal(), identical=False, inconclusive=True, workload=(SETTINGS,))),
        # Of another request nothing at all was compared.
        lambda: facts(
            replace(
                equal(),
                identical=False,
                inconclusive=True,
                workload=(SETTINGS,),
                not_compared=(NotCompared("quiet", "the prompts differ"),),
            )
        ),
    ),
    "incomplete": (
        lambda: facts(replace(equal(), identical=False, inconclusive=True)),
        lambda: facts(equal()),
    ),
    "engines": (
        lambda: facts(two_engines(), roles="shared"),
        lambda: facts(two_engines(), roles="inside"),
    ),
    "quantised-attention": (
        lambda: facts(quantised_attention="outside"),
        lambda: facts(quantised_attention="inside"),
    ),
    "settings": (
        lambda: facts(replace(chosen(), workload=(SETTINGS,))),
        # Where digests differ, the sampling does not explain it.
        lambda: facts(replace(diverged(), workload=(SETTINGS,))),
    ),
    "random-state": (
        lambda: facts(chosen(), choices="shared"),
        lambda: facts(chosen(), choices="shared", repeat="differs"),
    ),
    "uncached-history": (
        lambda: facts(chosen(), choices="uncached"),
        lambda: facts(chosen(), choices="uncached", repeat="differs"),
    ),
    "sampling": (lambda: facts(chosen()), lambda: facts(diverged())),
    "quantised": (quantised, lambda: quantised(configuration="remains")),
    "cache-size": (sized, lambda: sized(cache_size="remains")),
    "kept": (lambda: facts(fresh="kept", repeat="equal"), lambda: facts(fresh="rounds", repeat="equal")),
    "leak": (lambda: facts(neighbour_content="differs"), lambda: facts(neighbour_content="equal")),
    "padding": (lambda: facts(padding="differs"), lambda: facts(padding="equal")),
    "another-answer": (
        lambda: facts(answers="another"),
        lambda: facts(answers="another", repeat="not_run"),
    ),
    "content": (
        lambda: facts(other_neighbours="differs"),
        # Experts whose rows are put together by what they say do that without a fault.
        lambda: facts(other_neighbours="small"),
    ),
    "dropped": (lambda: facts(unset="dropped"), lambda: facts(unset="kept")),
    "reading": (lambda: facts(read()), lambda: facts(read(), repeat="not_run")),
    "outside": (
        lambda: facts(oracle=oracle("outside", outside_where=[OUTSIDE])),
        lambda: facts(oracle=oracle("outside", outside_where=[OUTSIDE], precision=PRECISION)),
    ),
    "ranks": (
        lambda: facts(ranks="inside", oracle="inside", pin_kernels="not_run"),
        lambda: facts(ranks="partly", oracle="inside", pin_kernels="not_run"),
    ),
    "precision": (
        lambda: facts(oracle=oracle("outside", outside_where=[OUTSIDE], precision=PRECISION)),
        lambda: facts(
            oracle=oracle("outside", outside_where=[OUTSIDE], precision=PRECISION), pin_kernels="remains"
        ),
    ),
    "worse-path": (lambda: facts(oracle=oracle("inside", far=FAR)), lambda: facts(oracle=oracle("inside"))),
    "path": (lambda: facts(), lambda: facts(pin_kernels="remains")),
    "outside-only": (
        lambda: facts(
            served(),
            RecordedFacts(answers=AnswerDifferences(3, 1, 0.01, 0.02, 0.005, "anchor", 3)),
            oracle="not_run",
        ),
        lambda: facts(served(), oracle="not_run", repeat="differs"),
    ),
    "undetermined": (lambda: facts(oracle="not_run"), lambda: facts()),
}


def test_every_rule_has_a_case() -> None:
    assert list(CASES) == [rule.name for rule in RULES]
    assert {rule.verdict for rule in RULES} == set(KINDS)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_decides_its_case_and_not_the_twin(name: str) -> None:
    case, twin = (make() for make in CASES[name])
    assert deciding(case).name == name
    assert deciding(twin).name != name


@pytest.mark.parametrize("name", CASES)
def test_a_verdict_says_what_decided(name: str) -> None:
    verdict = decide(CASES[name][0]())
    assert (
        verdict.rule == name
        and verdict.sentence.strip() == verdict.sentence
        and verdict.sentence.endswith(".")
    )
    assert "None" not in verdict.sentence and "  " not in verdict.sentence
    rule = next(rule for rule in RULES if rule.name == name)
    assert {each.fact for each in verdict.deciding} <= set(rule.because)
    assert bool(verdict.deciding) == (name not in ("undetermined", "outside-only"))
    assert bool(verdict.missing) == (name in ("undetermined", "engines", "outside-only"))


@pytest.mark.parametrize("what", CONTRADICTIONS)
@pytest.mark.parametrize("run", ["a", "b", "both"])
def test_every_contradiction_is_a_bug_and_other_findings_are_none(what: str, run: str) -> None:
    detail = "something is not as it should be"
    verdict = decide(facts(found(diverged(), Finding(run, what, None, None, detail))))
    assert verdict.kind == "bug" and detail in verdict.sentence
    assert decide(facts(found(diverged(), Finding(run, "wrap", None, None, detail)))).kind == "numerics"


def test_a_change_after_the_quantisation_that_explains_others_is_a_bug() -> None:
    late = replace(CHANGED, forward=5)
    assert decide(facts(found(diverged(), CHANGED, late), RecordedFacts(quantised_b=((3, 1),)))).kind == "bug"
    assert (
        decide(facts(found(diverged(), replace(CHANGED, run="a")), RecordedFacts(quantised_b=((3, 1),)))).kind
        == "bug"
    )


ODD = RecordedFacts(unknown={0: "EvictingCache", 1: "EvictingCache"})


@pytest.mark.parametrize("what", CACHE_FINDINGS)
def test_what_rests_on_how_an_unknown_cache_works_is_no_bug(what: str) -> None:
    finding = Finding("b", what, "anchor", 2, "something of the cache is not as it should be")
    assert decide(facts(found(diverged(), finding))).rule == "bookkeeping"
    verdict = decide(facts(found(diverged(), finding), ODD, pin_kernels="remains"))
    assert verdict.kind == "undetermined"
    assert any("layers 0, 1 is not known: class EvictingCache" in each for each in verdict.missing)
    # What is not of the cache is a contradiction all the same.
    fed = Finding("b", "token_in", "anchor", 2, "a row was fed another token")
    assert decide(facts(found(diverged(), fed), ODD)).rule == "bookkeeping"


def test_a_row_that_reads_other_entries_of_an_unknown_cache_is_no_bug() -> None:
    assert decide(facts(read())).rule == "reading"
    assert decide(facts(read(), RecordedFacts(unknown={0: "EvictingCache"}))).rule == "reading"
    verdict = decide(facts(read(), ODD, oracle=oracle("outside", changed=3), pin_kernels="remains"))
    assert verdict.kind == "undetermined"
    assert any(each.fact == "unknown_cache" for each in verdict.evidence)


def test_other_cache_settings_are_a_configuration_whatever_else_parts() -> None:
    verdict = decide(facts(asked(diverged(), kv_bits=4)))
    assert verdict.kind == "configuration" and "kv_bits None and 4" in verdict.sentence


def test_an_origin_before_the_quantisation_is_not_explained_by_it() -> None:
    late = RecordedFacts(quantised_a=((20, 40),), quantised_b=((32, 40),))
    assert decide(facts(found(diverged(), QUANTISE), late, configuration="removed")).rule != "quantised"


@pytest.mark.parametrize("lacking", ["logits", "sites"])
def test_a_token_that_differs_without_logits_or_sites_is_no_bug_of_the_sampling(lacking: str) -> None:
    whole = chosen()
    bare = replace(whole, b=replace(whole.b, lacks={lacking: "an engine of tokens alone"}))
    assert decide(facts(bare)).kind != "bug"


def test_sampling_differs_with_equal_settings_says_so() -> None:
    verdict = decide(facts(chosen()))
    assert verdict.kind == "bug" and verdict.sentence.startswith("The sampling, not the model")


@pytest.mark.parametrize("name", ["repeat", "pin_kernels", "oracle"])
@pytest.mark.parametrize("result", ["not_run", "undecided"])
def test_no_numerics_without_each_of_its_controls(name: str, result: str) -> None:
    verdict = decide(facts(**{name: result}))
    assert verdict.kind == "undetermined"
    assert [each for each in verdict.missing if name in each]


def test_no_numerics_without_a_path_change() -> None:
    divergence = diverged()
    origin = divergence.request("anchor").origin
    assert origin is not None
    same = replace(origin, path_b=origin.path_a, rule_b=origin.rule_a, rows_b=origin.rows_a)
    requests = tuple(replace(r, origin=same) if r.id == "anchor" else r for r in divergence.requests)
    verdict = decide(facts(replace(divergence, requests=requests)))
    assert verdict.kind == "undetermined" and "a path change" in verdict.missing[0]


def test_what_never_reached_a_cache_or_a_logit_is_not_seen_to_go() -> None:
    divergence = diverged()
    requests = tuple(replace(r, flip=None, cache_entry=None, margins=()) for r in divergence.requests)
    verdict = decide(facts(replace(divergence, requests=requests)))
    assert verdict.kind == "undetermined" and any("an effect" in each for each in verdict.missing)


def test_magnitude_decides_nothing() -> None:
    huge = {**ORACLE, "ratio": 1e9, "pairs": [{"worst_a": 1.0, "worst_b": 0.9}]}
    assert decide(facts(oracle=control("oracle", "inside", **huge))).rule == "path"


def test_the_sentences_of_numerics_name_rule_side_and_cost() -> None:
    verdict = decide(facts())
    assert "layers.0.attn.k_proj took reference/candle-metal/" in verdict.sentence
    assert "run a is nearer to float64" in verdict.sentence and HELD in verdict.sentence
    assert HELD in verdict.advice and "10 ms a forward" in verdict.advice
    assert decide(facts(oracle=oracle("inside", far=FAR))).sentence.startswith(
        "Rounding, and one path is far worse than the other: run a"
    )
    assert decide(facts(oracle=oracle("outside", precision=PRECISION))).sentence.startswith(
        "Precision, not order"
    )


def test_the_first_value_that_is_not_finite_is_named_with_its_row() -> None:
    first = {
        "padding": True,
        "said": "layers.0.self_attn.attention (attention) gave a NaN in run b, forward 0, row 11",
    }
    verdict = decide(facts(finite=control("finite", "not_finite", first=first)))
    assert (
        verdict.kind == "bug"
        and "first in a row of padding" in verdict.sentence
        and "row 11" in verdict.sentence
    )
    first["padding"] = False
    assert "a real row" in decide(facts(finite=control("finite", "not_finite", first=first))).sentence


def test_acceptance_and_proposals_are_evidence() -> None:
    said = {each.fact: each.sentence for each in decide(facts(speculated(diverged()))).evidence}
    assert said["acceptance"].startswith(
        "anchor: 5 of 8 drafts accepted in a and 4 of 8 drafts accepted in b; the engine counted"
    )
    assert "the target decided differently" in said["proposals"]


def test_a_verdict_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match=r"ask \.kind"):
        bool(decide(facts()))


def test_the_table_in_the_docs_is_the_one_in_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text(encoding="utf-8")
    written = re.search(f"{re.escape(TABLE_START)}\n(.*?)\n{re.escape(TABLE_END)}", page, re.DOTALL)
    assert written is not None and written[1] == table(), "run `python tools/verdict_matrix.py --rules`"
