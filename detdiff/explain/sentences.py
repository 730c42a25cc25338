"""The verdicts in words: what each rule says, what it advises, what an undetermined case lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .controls.finite import FiniteFigures
from .controls.neighbours import NeighbourFigures
from .controls.oracle import OracleFigures
from .controls.pin_kernels import PinKernelsFigures
from .controls.repeat import RepeatFigures
from .controls.roles import RolesFigures
from .facts import Facts, rows_seen, seen, where_not_finite


def say_nothing(facts: Facts) -> str:
    return f"Nothing can be said: nothing could be compared. {facts.why}"


def oracle_figures(facts: Facts) -> OracleFigures:
    found = facts.oracle
    assert found is not None
    return found


def _pattern(facts: Facts) -> str:
    return "" if facts.oracle is None else facts.oracle.pattern


def say_served(facts: Facts) -> str:
    return (
        "It depends on what was served before, and on nothing that the two sides differ in as far as is known. "
        f"{control_said(facts, 'fresh')}"
    )


def say_kept(facts: Facts) -> str:
    return (
        f"What a later turn goes on over is not what its conversation gives. {control_said(facts, 'fresh')}"
    )


def say_changed(facts: Facts) -> str:
    return (
        "The trace is not repeated, and what was run in its place repeats itself: the code or the machine changed since it was recorded. "
        f"{control_said(facts, 'repeat')}"
    )


def say_observed(facts: Facts) -> str:
    runs = " and ".join(facts.observed)
    again = control_said(facts, "repeat")
    return (
        f"Nothing that was compared differs, but recording changed the logits of run{'s' * (len(facts.observed) > 1)} {runs}: its "
        f"first forwards, run again without recording, gave others.{f' {again}' if again else ''}"
    )


def only_together(facts: Facts) -> bool:
    """Whether what does not repeat are requests that a server is sent together."""
    repeated = facts.figures(RepeatFigures)
    if repeated is None or repeated.side is None or facts.divergence is None or not facts.outside:
        return False
    run = facts.divergence.a if repeated.side == "a" else facts.divergence.b
    return run.scenario.get("schedule") != "serial"


def _looks(facts: Facts) -> str:
    """Whether answers look as rounding would, with the numbers; empty where that is not known."""
    found = facts.recorded.answers
    if found is None:
        return ""
    words: dict[bool | None, str] = {
        True: "As rounding would look",
        False: "Not as rounding would look",
        None: "Whether it looks as rounding would cannot be said",
    }
    return f"{words[found.rounding]}: {found.said}."


def say_nondeterminism(facts: Facts) -> str:
    if only_together(facts):
        return (
            "Requests that the server is sent together do not repeat: which of them meet in a forward depends on when they arrive, "
            f"which cannot be fixed from outside, and so may what is computed. {control_said(facts, 'repeat')} {_looks(facts)}"
        ).strip()
    return (
        "Run-to-run change: the same scenario, run again on the same model, gave other bits. Nothing about batching or kernel "
        f"paths follows from these two runs. {control_said(facts, 'repeat')}"
    )


def say_contradiction(facts: Facts) -> str:
    found = facts.contradictions[0]
    where = f"in run {found.run}" if found.run != "both" else "in both runs"
    if found.forward is not None:
        where += f", forward {found.forward}"
    who = "" if found.request is None else f" of request {found.request}"
    more = len(facts.contradictions) - 1
    rest = (
        f" {more} more finding{'s' * (more > 1)} of this sort follow{'s' * (more == 1)} it." if more else ""
    )
    return (
        f"A fault of the bookkeeping, found before any number was looked at: {found.detail} ({where}{who}). No rounding makes "
        f"that.{rest}"
    )


def say_not_finite(facts: Facts) -> str:
    finite = facts.figures(FiniteFigures)
    found = None if finite is None else finite.first
    same = "Values that are not finite count as different even where both runs have them."
    if found is not None:
        row = "a row of padding" if found["padding"] else "a real row"
        return f"A value that is not finite, first in {row}: {found['said']}. {same}"
    return f"A value that is not finite: {where_not_finite(*facts.recorded.not_finite[0])}. {same}"


def _roles(facts: Facts) -> RolesFigures:
    found = facts.figures(RolesFigures)
    assert found is not None
    return found


def _engine(facts: Facts, run: str) -> str:
    assert facts.divergence is not None
    return (facts.divergence.a if run == "a" else facts.divergence.b).engine


def say_role_outside(facts: Facts) -> str:
    found = _roles(facts)
    more = len(found.outside_where) - 1
    rest = f" {more} more operations of this sort follow it." if more else ""
    return f"Not rounding: {found.outside_where[0]['said']}.{rest}"


def say_other_files(facts: Facts) -> str:
    return f"Not one model: {_roles(facts).files}. Every operation that was judged does what its own side's file says."


def say_roles_inside(facts: Facts) -> str:
    found = _roles(facts)
    a, b = (_engine(facts, run) for run in "ab")
    count = min(found.operations.values())
    which = "neither is nearer to float64"
    if found.nearer in ("a", "b"):
        times = found.ratio if found.nearer == "b" else 1 / found.ratio if found.ratio else None
        by = "" if times is None else f", by a factor of {times:.3g} on average"
        which = f"run {found.nearer} ({_engine(facts, found.nearer)}) is nearer to float64{by}"
    return (
        f"Rounding: all {count:,} operations of {a} and of {b} stay inside their rounding bounds, each given its own inputs and what "
        f"the model's file says, and {which}."
    )


def say_identical(facts: Facts) -> str:
    assert facts.divergence is not None
    c = facts.divergence.compared
    again = control_said(facts, "repeat") if facts.result("repeat") == "equal" else ""
    return (
        f"The runs are identical: {c.requests:,} requests, {c.rows:,} rows and {c.digests:,} digests compared, none differs."
        f"{f' {again}' if again else ''}"
    )


def say_incomplete(facts: Facts) -> str:
    return "Nothing that was compared differs, and not everything could be compared."


def say_asked_alone(facts: Facts) -> str:
    found = dict.fromkeys(f"{finding.request}: {finding.detail}" for finding in facts.asked_otherwise)
    more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
    return (
        f"A difference of configuration: the two sides were asked for different things ({'; '.join([*found][:4])}{more}). Of what both "
        "computed nothing differs."
    )


def say_asked_otherwise(facts: Facts) -> str:
    found = [*facts.settings, *(finding.detail for finding in facts.asked_otherwise)]
    return (
        f"A difference of configuration: the two sides were asked for different things ({'; '.join(found[:4])}), which changes what is "
        "computed by itself."
    )


def say_quantised_attention(facts: Facts) -> str:
    return f"Not the setting alone: {control_said(facts, 'quantised_attention')} No quantisation of what is read makes that."


def say_quantised_apart(facts: Facts) -> str:
    places = [
        ", ".join(str(position) for position, _ in side[:4]) or "nowhere"
        for side in (facts.recorded.quantised_a, facts.recorded.quantised_b)
    ]
    return (
        f"A difference of configuration: the cache was quantised from position {places[0]} in a and from {places[1]} in b, so that rows "
        f"between the two read exact entries in one run and quantised ones in the other. {control_said(facts, 'configuration')}"
    )


def say_sampling(facts: Facts) -> str:
    ended = facts.ended_otherwise
    if ended is not None and ended.flip is not None:
        ends, goes_on = ("a", "b") if ended.generated_a < ended.generated_b else ("b", "a")
        return (
            f"The end of an answer, not the model: every compared digest is bit-equal, logits among them, the settings are equal, and {ended.id} "
            f"ends after {ended.flip.index} tokens in run {ends} and goes on in run {goes_on}. What ends an answer there (its limit, its "
            "stop tokens, its stop texts) is another request's, or is not looked for."
        )
    found = facts.chosen_otherwise[0]
    at = "" if found.flip is None else f", token {found.flip.index}"
    return (
        f"The sampling, not the model: every compared digest up to the flip of {found.id}{at} is bit-equal, logits among them, "
        "the settings are equal, and the token is another one. What chooses the token took another sampler, seed or state."
    )


def say_choices(facts: Facts) -> str:
    return f"The sampling, not the model: {control_said(facts, 'choices')}"


def say_cache_size(facts: Facts) -> str:
    if facts.sizes[0] == facts.sizes[1]:
        return (
            f"A difference of configuration: the caches of both sides keep {facts.sizes[0]:,} positions (max_kv_size), and which of them a row "
            f"still finds depends on how the prompt is cut into forwards ({'; '.join(facts.cuts)}). {control_said(facts, 'cache_size')}"
        )
    kept = ["all positions" if size is None else f"{size:,} positions" for size in facts.sizes]
    before = "what differs before one has gone is rounding"
    if not facts.before_one_goes:
        before = "no row differs before one has gone"
    return (
        f"A difference of configuration: the caches keep {kept[0]} in a and {kept[1]} in b (max_kv_size), and {before}. "
        f"{control_said(facts, 'cache_size')}"
    )


def say_rank_outside(facts: Facts) -> str:
    return f"Not rounding: {control_said(facts, 'ranks')}"


def say_ranks_inside(facts: Facts) -> str:
    origin = facts.origin
    where = "" if origin is None else f" The first difference arises at {origin.site}."
    return f"Rounding: sums of several processes are added in another order than those of one.{where} {control_said(facts, 'ranks')}"


def say_adapter_outside(facts: Facts) -> str:
    return f"Not rounding: {control_said(facts, 'adapters')}"


def say_adapter_without(facts: Facts) -> str:
    return f"A difference of configuration: {control_said(facts, 'adapters')}"


def say_adapter_inside(facts: Facts) -> str:
    return f"Rounding: {control_said(facts, 'adapters')} The weights beside them are bit-equal."


def say_shared_state(facts: Facts) -> str:
    found = facts.chosen_otherwise[0]
    at = "" if found.flip is None else f", token {found.flip.index}"
    return (
        f"A difference of configuration: up to the flip of {found.id}{at} every digest is bit-equal, logits among them, and every draw of both "
        "runs is what its request asks for. The requests of a batch draw from MLX's one random state, one after the other, so that a draw "
        "depends on who else drew before: that is how mlx-lm's samplers work."
    )


def say_uncached(facts: Facts) -> str:
    return (
        "A difference of configuration: the model computes the same, and penalties reach over other tokens: one run was fed the whole "
        f"conversation, the other found a part of it in a cache. {control_said(facts, 'choices')}"
    )


def say_leak(facts: Facts) -> str:
    content = next(
        (
            c.detail
            for c in (facts.controls.get("neighbour_content"),)
            if c and isinstance(c.detail, NeighbourFigures)
        ),
        None,
    )
    where = None if content is None else content.where
    at = f" First at {where}." if where else ""
    return (
        "A leak between requests: other text of the neighbours, of the same length, changed a request that is not theirs. "
        f"{control_said(facts, 'neighbour_content')}{at}"
    )


def say_padding(facts: Facts) -> str:
    pattern = _pattern(facts)
    return (
        "Padding leaks into a request: rows that fill a batch up are nobody's, and another token in them changed what a request "
        f"computes, at the same shapes. {control_said(facts, 'padding')}{f' Affected: {pattern}.' if pattern else ''}"
    )


def say_read_otherwise(facts: Facts) -> str:
    request, origin = facts.read_otherwise[0]
    how = (
        "a cache entry was read otherwise than it was written"
        if origin.how == "changed"
        else "every cache entry up to this row was written alike in both runs and the row read others: a mask, an offset or a length"
    )
    pattern = _pattern(facts) or "; ".join(_chunks(facts, request))
    return (
        f"A fault of the cache or its mask at {origin.site}, position {origin.position} of {request}, forward {origin.forward_a} "
        f"in a and {origin.forward_b} in b: {how}.{f' Affected: {pattern}.' if pattern else ''}"
    )


def _chunks(facts: Facts, id: str) -> Iterator[str]:
    """Which part of the prompt a request's first origin lies in."""
    assert facts.divergence is not None
    for chunk in facts.divergence.request(id).chunks:
        spans = ", ".join(f"{first} to {last}" for first, last in chunk.differing[:4])
        if chunk.index and chunk.earlier_equal:
            yield (
                f"prefill chunk {chunk.index} of run {chunk.run}, positions {spans or 'none'}, while every earlier chunk is exact"
            )


def say_outside(facts: Facts) -> str:
    oracle = facts.oracle
    found = oracle.outside_where[0] if oracle is not None and oracle.outside_where else {}
    pattern = _pattern(facts)
    return f"Not rounding: {found.get('said', control_said(facts, 'oracle'))}.{f' Affected: {pattern}.' if pattern else ''}"


def say_precision(facts: Facts) -> str:
    found = oracle_figures(facts).precision or {}
    return (
        f"Precision, not order: {found['said']}. {_change(facts)} {_held_how(facts)} The size of the error is that of the "
        "operands' precision; no order of a float32 sum gives it."
    )


def say_worse(facts: Facts) -> str:
    far = oracle_figures(facts).far or {}
    path = f" ({far['path']})" if shows_paths(facts) else ""
    return (
        f"Rounding, and one path is far worse than the other: run {far['worse']}{path} is {far['ratio']:.3g} times as far "
        f"from float64 as the other, an error of the size of {far['precision']}: sums in less precision than they need. {_change(facts)} "
        f"{_held_how(facts)}"
    )


def say_path(facts: Facts) -> str:
    nearer = oracle_figures(facts).nearer or "equal"
    which = "neither is nearer to float64" if nearer == "equal" else f"run {nearer} is nearer to float64"
    return f"Rounding: {_change(facts)} {_held_how(facts)} Both paths stay inside their rounding bounds, and {which}."


def say_cached(facts: Facts) -> str:
    found = next(
        (c.detail for c in (facts.controls.get("cached"),) if c and isinstance(c.detail, Mapping)), {}
    )
    words: dict[bool | None, str] = {
        True: "It looks as rounding would, which a prefill of fewer rows brings with it.",
        False: "It does not look as rounding would: a wrong or a stale page of the cache would look so, too, and from outside it cannot be "
        "told which it is.",
    }
    looks = words.get(
        found.get("rounding"), "Whether that is rounding cannot be said without log-probabilities."
    )
    return f"A difference of configuration: answers from the prefix cache against answers without it. {control_said(facts, 'cached')} {looks}"


def say_order(facts: Facts) -> str:
    return f"It depends on what was served before: something is kept between requests. {control_said(facts, 'served')}"


def say_another(facts: Facts) -> str:
    return f"Another request's answer: {control_said(facts, 'answers')} No rounding makes that."


def say_content(facts: Facts) -> str:
    return (
        f"A leak between requests: {control_said(facts, 'other_neighbours')} Rounding does not reach so far; experts that take only so many rows "
        "do, and are a leak by design."
    )


def say_dropped(facts: Facts) -> str:
    return f"A setting is not applied in one side: {control_said(facts, 'unset')}"


def say_outside_only(facts: Facts) -> str:
    found = facts.recorded.answers
    if found is None:
        return "The cause was not established, and no answers can be set side by side."
    return f"{_looks(facts)} What caused it cannot be seen from outside."


def outside_missing(facts: Facts) -> tuple[str, ...]:
    """What a server does not show that a verdict of rounding or of a bug would rest on."""
    found = ["what was in each batch, and what computed it: a server shows answers alone"]
    for control in ("repeat", "answers", "other_neighbours", "unset", "served", "cached"):
        held = facts.controls.get(control)
        if held is not None and held.result in ("not_run", "unsteady", "small"):
            found.append(f"the control {control} ({held.sentence})")
    return tuple(found)


def say_undetermined(facts: Facts) -> str:
    return f"The cause was not established. Missing: {'; '.join(missing(facts)) or 'a rule that fits'}."


def _held_how(facts: Facts) -> str:
    pinned = facts.figures(PinKernelsFigures)
    how = (pinned and pinned.how) or "one path for every number of rows"
    return f"Held ({how}), nothing differs."


def shows_paths(facts: Facts) -> bool:
    """Whether an engine says which of its kernels computed what."""
    divergence = facts.divergence
    return divergence is None or not any("kernel_paths" in run.lacks for run in (divergence.a, divergence.b))


def _rows(count: int | None) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def _change(facts: Facts) -> str:
    origin = facts.origin
    if origin is None:
        return ""
    if facts.moved_alone:
        return f"{control_said(facts, 'place')}"
    rules = [
        f"{run}: {rule.removeprefix('rule: ')}"
        for run, rule in (("a", origin.rule_a), ("b", origin.rule_b))
        if rule
    ]
    because = f" ({'; '.join(rules)})" if rules else ""
    if not shows_paths(facts):
        rows = [rows_seen(origin, run) for run in "ab"]
        if None not in rows:
            return f"{origin.site} was computed for {_rows(rows[0])} in a and for {_rows(rows[1])} in b."
    return f"{origin.site} took {seen(origin, 'a')} in a and {seen(origin, 'b')} in b{because}."


def control_said(facts: Facts, control: str) -> str:
    found = facts.controls.get(control)
    return "" if found is None else _sentence(found.sentence)


def _sentence(words: str) -> str:
    words = words.strip()
    if not words:
        return ""
    first = words.partition(" ")[0]
    start = words[0].upper() if first.isalpha() else words[0]
    return f"{start}{words[1:].rstrip('.')}."


def _roles_missing(facts: Facts) -> Iterator[str]:
    """What a verdict on two engines lacks."""
    repeat, roles = (facts.controls.get(name) for name in ("repeat", "roles"))
    for name, control in (("repeat", repeat), ("roles", roles)):
        if control is None or control.result == "not_run":
            yield f"the control {name} ({'it was not asked for' if control is None else control.sentence})"
    found = facts.figures(RolesFigures)
    if found is None:
        return
    if found.shared:
        yield (
            f"a reading of the model's file that both engines share: outside in both are {', '.join(found.shared[:8])}, so that what "
            "is judged by is in question rather than one of them"
        )
    for why, which in found.not_judged.items():
        yield f"a judgement of {', '.join(which[:8])}{', ...' if len(which) > 8 else ''}: {why}"


def left_out(facts: Facts) -> tuple[str, ...]:
    """What the traces do not show, with the engines' reasons."""
    if facts.divergence is None:
        return ()
    runs = (facts.divergence.a, facts.divergence.b)
    return tuple(dict.fromkeys((*facts.unknown, *(why for run in runs for why in run.lacks.values()))))


def missing(facts: Facts) -> tuple[str, ...]:
    """What a verdict of numerics, configuration or a bug would need and does not have."""
    if facts.divergence is not None and facts.divergence.across_engines is not None:
        return tuple(_roles_missing(facts))
    found = []
    if facts.divergence is not None and facts.divergence.across_models:
        found.append(
            "one set of weights: with two, no operation has equal inputs and should give equal outputs"
        )
        adapters = facts.controls.get("adapters")
        return (*found, *([adapters.sentence] if adapters is not None else ()))
    if facts.origin is None:
        found.append("an origin: no operation was found whose inputs are equal and whose outputs are not")
    elif not (facts.path_change or facts.moved_alone):
        found.append(
            "a path change: the first origin's operation took the same path on the same number of rows in both runs, and neither its "
            "place among them nor an order of keys was seen to move its bits"
        )
    if facts.origin is not None and not facts.shows:
        found.append(
            "an effect: no token, cache entry or logit differs, so nothing shows whether pinning the kernels takes the difference away"
        )
    for control, wanted in (("repeat", "equal"), ("pin_kernels", "removed"), ("oracle", "inside")):
        result = facts.result(control)
        if result == "not_run":
            why = facts.controls[control].sentence if control in facts.controls else "it was not asked for"
            found.append(f"the control {control} ({why})")
        elif result != wanted:
            found.append(f"the control {control} gave {result}, not {wanted}")
    found += [what for what in left_out(facts) if what not in found]
    if facts.quantised_apart and facts.result("configuration") != "removed":
        found.append("that the difference goes with the cache's quantisation (control configuration)")
    return tuple(found)
