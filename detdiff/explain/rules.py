"""The rules of a verdict: one table, asked from the top; the first row that holds decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from . import advice, sentences
from .control import Control
from .evidence import evidence_of
from .facts import Facts
from .verdict import Evidence, Kind, Verdict


@dataclass(frozen=True)
class VerdictRule:
    """One row. ``when`` is the condition in words and ``holds`` the same as code; ``says`` is the verdict in words.

    ``because`` names the facts and controls that decide. ``stops`` names the controls after which no other one is run once
    the rule holds; None: it never ends the re-runs. ``advises`` is what to do about it.
    """

    name: str
    when: str
    verdict: Kind
    holds: Callable[[Facts], bool]
    says: Callable[[Facts], str]
    because: tuple[str, ...]
    advises: Callable[[Facts], str] = lambda facts: ""
    stops: tuple[str, ...] | None = None


def _role_outside(facts: Facts) -> bool:
    return facts.result("roles") == "outside" and facts.result("repeat") == "equal"


def _other_files(facts: Facts) -> bool:
    return facts.result("roles") == "other_files" and facts.result("repeat") == "equal"


def _roles_inside(facts: Facts) -> bool:
    return facts.result("roles") == "inside" and facts.result("repeat") == "equal"


def _across_engines(facts: Facts) -> bool:
    return (
        facts.divergence is not None
        and facts.divergence.across_engines is not None
        and not facts.divergence.identical
    )


def _observed(facts: Facts) -> bool:
    return _incomplete(facts) and bool(facts.observed)


def _incomplete(facts: Facts) -> bool:
    return facts.divergence is not None and facts.divergence.inconclusive and not _across_engines(facts)


def _quantised_apart(facts: Facts) -> bool:
    return (
        facts.quantised_apart
        and not facts.before_quantisation
        and facts.result("configuration") == "removed"
        and facts.result("repeat") == "equal"
    )


def _outside(facts: Facts) -> bool:
    return (
        facts.result("oracle") == "outside"
        and facts.oracle is not None
        and not facts.oracle.precision
        and facts.result("repeat") == "equal"
        # Reads that only a quantisation explains are no sums that went wrong, and of unknown caches nothing is presumed.
        and not ((facts.quantised_apart or facts.unknown) and not facts.oracle.outside_where)
    )


def _precision(facts: Facts) -> bool:
    return facts.held and facts.oracle is not None and bool(facts.oracle.precision)


def _worse(facts: Facts) -> bool:
    return _path(facts) and facts.oracle is not None and bool(facts.oracle.far)


def _path(facts: Facts) -> bool:
    return facts.held_inside


RULES: Final[tuple[VerdictRule, ...]] = (
    VerdictRule(
        "nothing",
        "no request, row or port of the two runs can be compared",
        "undetermined",
        lambda facts: facts.divergence is None,
        sentences.say_nothing,
        ("not_compared",),
        stops=(),
    ),
    VerdictRule(
        "served-before",
        "the same scenario gave other bits on an engine that has served nothing than on one that has, or its first request did "
        "when it was asked again at the end",
        "nondeterminism",
        lambda facts: facts.result("fresh") == "differs",
        sentences.say_served,
        ("fresh",),
        advice.advise_served,
        stops=(),
    ),
    VerdictRule(
        "cached",
        "a server's answers change once part of a prompt comes from its prefix cache, and cached ones repeat",
        "configuration",
        lambda facts: facts.result("cached") == "differs",
        sentences.say_cached,
        ("cached",),
        advice.advise_cached,
        stops=("cached",),
    ),
    VerdictRule(
        "served",
        "a server answers otherwise when the same requests come one by one in reverse order, and each order repeats",
        "nondeterminism",
        lambda facts: facts.result("served") == "differs",
        sentences.say_order,
        ("served",),
        advice.advise_served,
        stops=("served",),
    ),
    VerdictRule(
        "choices",
        "a token is not the one that its request's own processors, sampler and seed choose from its logits, computed anew",
        "bug",
        lambda facts: facts.result("choices") == "otherwise",
        sentences.say_choices,
        ("choices", "chosen"),
        advice.advise_choices,
        stops=("choices",),
    ),
    VerdictRule(
        "repeat",
        "the same scenario, run again, gave other bits",
        "nondeterminism",
        lambda facts: facts.result("repeat") == "differs",
        sentences.say_nondeterminism,
        ("repeat",),
        advice.advise_nondeterminism,
        stops=("fresh",),
    ),
    VerdictRule(
        "changed",
        "a trace is not repeated, and what was run in its place repeats itself: the code or the machine changed",
        "undetermined",
        lambda facts: facts.result("repeat") == "changed",
        sentences.say_changed,
        ("repeat",),
        advice.advise_changed,
        stops=("fresh",),
    ),
    VerdictRule(
        "bookkeeping",
        "the bookkeeping contradicts the rows: an offset that is not the row's position, a trim that took off another "
        "number of rows than was asked, a recurrent state that was not taken back with its rows, a turn that does not begin where what it "
        "keeps ends, lacks tokens of the chat template or has another adapter than its rows, a cache entry that is not what was written, one that a row saw and that is not its own, one of its own that it did not "
        "see, a rejected row that was read again, a prefix of other tokens, a page with two owners, drafts counted otherwise, a row fed "
        "another token or computed in another sequence, a token chosen from another row's logits, processes that should hold the same bits "
        "or choose the same token and do not",
        "bug",
        lambda facts: bool(facts.contradictions),
        sentences.say_contradiction,
        ("contradiction",),
        advice.advise_bug,
        stops=("repeat",),
    ),
    VerdictRule(
        "not-finite",
        "a NaN or an infinity where float64 has a number, even if both runs have it",
        "bug",
        lambda facts: facts.result("finite") == "not_finite" or bool(facts.recorded.not_finite),
        sentences.say_not_finite,
        ("not_finite", "finite"),
        advice.advise_bug,
        stops=("repeat", "finite"),
    ),
    VerdictRule(
        "rank-outside",
        "a model over several processes: an operation of one of them, given its own inputs and the whole model's weights, is outside the "
        "rounding bound, and a repeat is equal",
        "bug",
        lambda facts: facts.result("ranks") == "outside" and facts.result("repeat") == "equal",
        sentences.say_rank_outside,
        ("ranks", "repeat"),
        advice.advise_bug,
        stops=("repeat", "ranks"),
    ),
    VerdictRule(
        "role-outside",
        "two engines: an operation of one of them, given its own inputs and the weights and constants of the model's file, is "
        "outside the rounding bound, the other's is not, and a repeat is equal",
        "bug",
        _role_outside,
        sentences.say_role_outside,
        ("roles", "repeat"),
        advice.advise_bug,
        stops=("repeat", "roles"),
    ),
    VerdictRule(
        "other-files",
        "two engines: every operation that was judged is inside its bound, the models' files differ in a setting or in weights "
        "by more than their dtypes' rounding, and a repeat is equal",
        "configuration",
        _other_files,
        sentences.say_other_files,
        ("roles", "repeat"),
        advice.advise_other_files,
        stops=("repeat", "roles"),
    ),
    VerdictRule(
        "roles",
        "two engines: every operation of both is inside its rounding bound, given its own inputs and the weights and constants "
        "of the model's file, and a repeat is equal",
        "numerics",
        _roles_inside,
        sentences.say_roles_inside,
        ("roles", "repeat"),
        advice.advise_roles,
        stops=("repeat", "roles"),
    ),
    VerdictRule(
        "adapter-outside",
        "two sets of weights: a layer with an adapter is not, from its own inputs, what the adapter's files make of it, beside its weights or "
        "fused into them, and a repeat is equal",
        "bug",
        lambda facts: facts.result("adapters") == "outside" and facts.result("repeat") == "equal",
        sentences.say_adapter_outside,
        ("adapters", "repeat"),
        advice.advise_bug,
        stops=("repeat", "adapters"),
    ),
    VerdictRule(
        "adapter-without",
        "two sets of weights: one side has an adapter, the other the same model without it, and a repeat is equal",
        "configuration",
        lambda facts: facts.result("adapters") == "without" and facts.result("repeat") == "equal",
        sentences.say_adapter_without,
        ("adapters", "repeat"),
        advice.advise_configuration,
        stops=("repeat", "adapters"),
    ),
    VerdictRule(
        "adapter",
        "two sets of weights: every layer with an adapter is inside its bound on both sides, beside its weights or fused, all other "
        "weights are bit-equal, and a repeat is equal",
        "numerics",
        lambda facts: (
            facts.result("adapters") == "inside"
            and facts.result("repeat") == "equal"
            and bool(facts.diverged)
        ),
        sentences.say_adapter_inside,
        ("adapters", "repeat"),
        advice.advise_adapter,
        stops=("repeat", "adapters"),
    ),
    VerdictRule(
        "identical",
        "every request of both runs was compared in whole and nothing differs",
        "identical",
        lambda facts: facts.divergence is not None and facts.divergence.identical,
        sentences.say_identical,
        ("compared",),
        stops=(),
    ),
    VerdictRule(
        "observed",
        "nothing that was compared differs, and recording changed the logits of a run",
        "undetermined",
        _observed,
        sentences.say_observed,
        ("observed", "repeat"),
        advice.advise_observed,
        stops=("repeat",),
    ),
    VerdictRule(
        "asked",
        "nothing that was compared differs, and what was left out is of requests whose sampling or limits differ, as max_tokens or cancel",
        "configuration",
        lambda facts: _incomplete(facts) and facts.asked_alone,
        sentences.say_asked_alone,
        ("settings", "compared"),
        advice.advise_configuration,
        stops=(),
    ),
    VerdictRule(
        "incomplete",
        "nothing that was compared differs, and something was left out",
        "undetermined",
        _incomplete,
        sentences.say_incomplete,
        ("compared",),
        stops=(),
    ),
    VerdictRule(
        "engines",
        "two engines whose operations could not all be judged, or of which the same one is outside in both: the verdict says which",
        "undetermined",
        _across_engines,
        sentences.say_undetermined,
        ("roles",),
        stops=("repeat", "roles"),
    ),
    VerdictRule(
        "quantised-attention",
        "the runs quantise their caches otherwise, and attention over a quantised cache is outside of its rounding bound, given what it was "
        "called with; a repeat is equal",
        "bug",
        lambda facts: facts.result("quantised_attention") == "outside" and facts.result("repeat") == "equal",
        sentences.say_quantised_attention,
        ("quantised_attention", "repeat"),
        advice.advise_bug,
        stops=("repeat", "quantised_attention"),
    ),
    VerdictRule(
        "settings",
        "the sides were asked for caches quantised otherwise; or every digest up to a flip is bit-equal and the request's "
        "sampling or limits differ",
        "configuration",
        lambda facts: (
            bool(facts.settings)
            or (bool(facts.chosen_otherwise or facts.processed_otherwise) and bool(facts.asked_otherwise))
        ),
        sentences.say_asked_otherwise,
        ("settings",),
        advice.advise_configuration,
        stops=("repeat", "quantised_attention"),
    ),
    VerdictRule(
        "random-state",
        "every digest up to a flip is bit-equal, the settings are equal, and both runs' draws, computed anew, are as asked from one "
        "random state that the requests of a batch share; a repeat is equal",
        "configuration",
        lambda facts: (
            bool(facts.chosen_otherwise)
            and facts.result("choices") == "shared"
            and facts.result("repeat") == "equal"
        ),
        sentences.say_shared_state,
        ("choices", "chosen", "repeat"),
        advice.advise_shared_state,
        stops=("repeat",),
    ),
    VerdictRule(
        "uncached-history",
        "every digest up to a token that differs is bit-equal, the settings are equal, and the draws of both runs, computed anew, are as "
        "asked but for logits processors that were not given what came from a cache, which is mlx-lm's way; a repeat is equal",
        "configuration",
        lambda facts: (
            bool(facts.chosen_otherwise or facts.processed_otherwise)
            and facts.result("choices") == "uncached"
            and facts.result("repeat") == "equal"
        ),
        sentences.say_uncached,
        ("choices", "chosen", "repeat"),
        advice.advise_uncached,
        stops=("repeat",),
    ),
    VerdictRule(
        "sampling",
        "every digest up to a flip is bit-equal, logits among them, and the settings are equal; or so, and an answer ends in one run "
        "where it goes on in the other",
        "bug",
        lambda facts: (
            bool(facts.chosen_otherwise)
            and facts.logits_equal
            and (
                facts.result("choices") not in ("shared", "uncached", "as_asked")
                or facts.ended_otherwise is not None
            )
        ),
        sentences.say_sampling,
        ("compared",),
        stops=("repeat",),
    ),
    VerdictRule(
        "quantised",
        "the runs quantised the cache at different positions, no origin is before that, a repeat is equal, and without "
        "quantisation nothing differs",
        "configuration",
        _quantised_apart,
        sentences.say_quantised_apart,
        ("quantised", "configuration", "repeat"),
        advice.advise_configuration,
        stops=("repeat", "quantised_attention", "configuration"),
    ),
    VerdictRule(
        "cache-size",
        "the runs keep different numbers of positions in their caches, or some of them and cut prompts into other forwards, no origin before the first that goes is anything else than rounding, a repeat is equal, and "
        "with caches that keep all nothing differs",
        "configuration",
        lambda facts: (
            bool(facts.sizes)
            and facts.result("cache_size") == "removed"
            and facts.result("repeat") == "equal"
        ),
        sentences.say_cache_size,
        ("cache_size", "origin", "repeat"),
        advice.advise_configuration,
        stops=("repeat", "cache_size"),
    ),
    VerdictRule(
        "kept",
        "a later turn gives other bits over the cache that was kept than its whole conversation from scratch, with every row on one "
        "kernel path and caches that keep every bit, and a repeat is equal",
        "bug",
        lambda facts: facts.result("fresh") == "kept" and facts.result("repeat") == "equal",
        sentences.say_kept,
        ("fresh", "repeat"),
        advice.advise_bug,
        stops=("repeat", "fresh"),
    ),
    VerdictRule(
        "leak",
        "other text of the neighbours, of the same length, changed a request, and a repeat is equal",
        "bug",
        lambda facts: (
            facts.result("neighbour_content") == "differs"
            and facts.result("repeat") == "equal"
            and not facts.outside
        ),
        sentences.say_leak,
        ("neighbour_content", "repeat"),
        advice.advise_bug,
    ),
    VerdictRule(
        "padding",
        "another token in the rows of padding, of the same shape, changed a request, and a repeat is equal",
        "bug",
        lambda facts: facts.result("padding") == "differs" and facts.result("repeat") == "equal",
        sentences.say_padding,
        ("padding", "repeat"),
        advice.advise_bug,
        stops=("padding",),
    ),
    VerdictRule(
        "another-answer",
        "a server answered a request with another one's text or log-probabilities, and a repeat is equal",
        "bug",
        lambda facts: facts.result("answers") == "another" and facts.result("repeat") == "equal",
        sentences.say_another,
        ("answers", "repeat"),
        advice.advise_bug,
        stops=("answers",),
    ),
    VerdictRule(
        "content",
        "a server's answer follows the content of its neighbours, whose lengths are the same, further than rounding would; each content "
        "and a repeat are equal",
        "bug",
        lambda facts: facts.result("other_neighbours") == "differs" and facts.result("repeat") == "equal",
        sentences.say_content,
        ("other_neighbours", "repeat"),
        advice.advise_bug,
        stops=("other_neighbours",),
    ),
    VerdictRule(
        "dropped",
        "a server answers one side bit for bit as the other side without a setting that both ask for, and a repeat is equal",
        "bug",
        lambda facts: facts.result("unset") == "dropped" and facts.result("repeat") == "equal",
        sentences.say_dropped,
        ("unset", "repeat"),
        advice.advise_bug,
        stops=("unset",),
    ),
    VerdictRule(
        "reading",
        "an origin at which the cache was read otherwise than it was written, a repeat is equal, and the cache was quantised "
        "alike",
        "bug",
        lambda facts: (
            bool(facts.read_otherwise) and not facts.quantised_apart and facts.result("repeat") == "equal"
        ),
        sentences.say_read_otherwise,
        ("origin", "repeat"),
        advice.advise_bug,
    ),
    VerdictRule(
        "outside",
        "an origin's output is outside the rounding bound on a side and no lower precision of its operands explains it, or a composite "
        "hands on the bits of its last site in one run and is off by more than roundings in the other; a repeat is equal",
        "bug",
        _outside,
        sentences.say_outside,
        ("origin", "oracle", "repeat"),
        advice.advise_bug,
    ),
    VerdictRule(
        "ranks",
        "a model over several processes: every operation of each, given its own inputs and the whole model's weights, is inside its rounding "
        "bound, the all-reduce among them, so are the origins on both sides, the processes agree, and a repeat is equal",
        "numerics",
        lambda facts: (
            facts.result("ranks") == "inside"
            and facts.result("oracle") == "inside"
            and facts.result("repeat") == "equal"
        ),
        sentences.say_ranks_inside,
        ("origin", "ranks", "oracle", "repeat"),
        advice.advise_ranks,
        stops=("repeat", "ranks", "oracle"),
    ),
    VerdictRule(
        "precision",
        "the path, the row's place or the order of its keys changed, holding it removes the difference, a repeat is equal, and one side "
        "is inside the bound only with operands of lower precision",
        "numerics",
        _precision,
        sentences.say_precision,
        ("origin", "pin_kernels", "place", "oracle", "repeat"),
        advice.advise_precision,
    ),
    VerdictRule(
        "worse-path",
        "the path, the row's place or the order of its keys changed, holding it removes the difference, a repeat is equal, both sides "
        "are inside the bounds of their paths, and one of them is at least twice as far from float64, by an error of the size of a lower precision",
        "numerics",
        _worse,
        sentences.say_worse,
        ("origin", "pin_kernels", "place", "oracle", "repeat"),
        advice.advise_worse,
    ),
    VerdictRule(
        "path",
        "the path, the row's place or the order of its keys changed, holding it removes the difference, a repeat is equal, and both sides "
        "are inside the bound",
        "numerics",
        _path,
        sentences.say_path,
        ("origin", "pin_kernels", "place", "oracle", "repeat"),
        advice.advise_path,
    ),
    VerdictRule(
        "outside-only",
        "none of the above, and a server shows answers alone: the verdict says whether they look as rounding would",
        "undetermined",
        lambda facts: facts.outside,
        sentences.say_outside_only,
        (),
        advice.advise_outside_only,
    ),
    VerdictRule(
        "undetermined",
        "none of the above: the verdict says what is missing",
        "undetermined",
        lambda facts: True,
        sentences.say_undetermined,
        (),
    ),
)
"""From the top; the first that holds decides."""

TABLE_START, TABLE_END = "<!-- rules -->", "<!-- end of rules -->"


def deciding(facts: Facts) -> VerdictRule:
    """The first rule that holds."""
    return next(rule for rule in RULES if rule.holds(facts))


def decide(facts: Facts) -> Verdict:
    """The verdict on what is known, with all evidence, that of the deciding rule marked."""
    rule = deciding(facts)
    controls = tuple(facts.controls.values())
    evidence = [*evidence_of(facts), *_from_controls(controls)]
    return Verdict(
        kind=rule.verdict,
        sentence=rule.says(facts),
        evidence=tuple(dataclasses.replace(each, decided=each.fact in rule.because) for each in evidence),
        controls=controls,
        divergence=facts.divergence,
        rule=rule.name,
        advice=rule.advises(facts),
        missing=_missing(rule, facts),
    )


def _missing(rule: VerdictRule, facts: Facts) -> tuple[str, ...]:
    if rule.name == "incomplete":
        return sentences.left_out(facts)
    if rule.name == "outside-only":
        return sentences.outside_missing(facts)
    return sentences.missing(facts) if rule.name in ("undetermined", "engines") else ()


def _from_controls(controls: tuple[Control, ...]) -> Iterator[Evidence]:
    for control in controls:
        if control.result != "not_run":
            yield Evidence(control.name, control.sentence, {"result": control.result})


def table() -> str:
    """The rules as a Markdown table."""
    rows = [
        f"| {number} | `{rule.name}` | {rule.when} | `{rule.verdict}` | {_names(rule.because) or '-'} | {_ends(rule)} |"
        for number, rule in enumerate(RULES, 1)
    ]
    return "\n".join(
        ["| | rule | when | verdict | decided by | ends the re-runs |", "|---|---|---|---|---|---|", *rows]
    )


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _ends(rule: VerdictRule) -> str:
    if rule.stops is None:
        return "no"
    return f"after {_names(rule.stops)}" if rule.stops else "at once"
