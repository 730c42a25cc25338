"""Compares two traces down a fixed ladder, earliest stage first.

Nothing comparable, workload (tokens in), bookkeeping, dtype, shape, bits; magnitude where both traces hold values.
Nothing compared is never a pass.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from detdiff.errors import NothingComparable
from detdiff.trace import Address, Place, Trace, place

from .across import across_engines as by_role
from .across import check_asked
from .alignment import CommonPorts, RowPairs, pair_rows
from .answer import Pass, RequestAnswer, Verifications
from .choices import choice_findings
from .details import Details, Runs
from .digests import Scanner
from .divergence import Compared, Divergence, NotCompared, RequestDivergence, RunIdentity
from .events import RunEvents, attributed, event_answer
from .forwards import RunLog, one_sided
from .origins import Int64, OriginWatch, SettledOrigins, Tally
from .tokens import Pairing, pair_requests, was_forced

STAGES: Final = ("workload", "bookkeeping", "dtype", "shape", "bits", "tokens")
"""From the earliest to the last. ``tokens``: every compared digest is equal and yet the tokens differ."""


_LACKING: Final = {
    "tokens": "token ids",
    "inputs": "the inputs of sites",
    "rows_seen": "the numbers of rows that operations saw",
    "cache": "cache entries",
}


def compare(
    a: Trace | Path | str,
    b: Trace | Path | str,
    *,
    requests: Collection[str] | None = None,
    across_models: bool = False,
    across_engines: bool = False,
) -> Divergence:
    """Where and how run ``b`` diverges from run ``a``. Needs the traces alone, no model.

    Runs are traces, or the folders or addresses of traces. ``requests`` are the ids that are asked about, None: all of both runs. With
    ``across_models`` two models may be compared, at tokens, logits and sites by name: their weights differ, so nothing is
    an origin, and the first site that differs is named with its size. With ``across_engines`` two engines are compared, at
    tokens, logits and the values of the same roles, whose bits are expected to differ. Raises NothingComparable for traces
    of two models or of two engines with sites without these, or without a common request, row, port or answer, TypeError for
    a scenario, which is recorded first, and TraceError where a trace breaks a rule of the format.
    """
    aligned = align(
        _opened(a), _opened(b), requests, across_models=across_models, across_engines=across_engines
    )
    return _answer(aligned, scan(aligned))


def _opened(run: Trace | Place | str) -> Trace:
    if isinstance(run, Trace):
        return run
    if isinstance(run, Path | Address | str):
        where = place(run)
        # What came over a network is what was written, or there is no answer.
        return Trace.open(where, checked=isinstance(where, Address))
    raise TypeError(
        f"compare was given a {type(run).__name__}; expected a Trace or the folder of one. Comparing runs no model: record a "
        "scenario first (detdiff.record), or give both scenarios to detdiff.explain, which records them."
    )


@dataclass(frozen=True)
class Aligned:
    """Two runs, and what belongs together in them. ``rowless`` says that they need have no row in common."""

    runs: Runs
    pairing: Pairing
    ports: CommonPorts
    pairs: RowPairs
    across_models: bool = False
    rowless: bool = False
    across_engines: bool = False


def align(
    a: Trace,
    b: Trace,
    requests: Collection[str] | None = None,
    *,
    across_models: bool = False,
    across_engines: bool = False,
) -> Aligned:
    """Match requests, sites and rows; parameters and what it raises as in ``compare``."""
    if not across_engines:
        check_asked(a, b)
    pairing = pair_requests(a, b, requests, across_models=across_models or across_engines)
    ports = CommonPorts.none() if across_engines else CommonPorts.of(a, b)
    # Where an engine shows no sites, or names its own, tokens and logits can be compared all the same.
    rowless = across_models or across_engines or not (a.sites and b.sites) or a.engine != b.engine
    if rowless and not ports.names and not any(pair.common for pair in pairing.pairs):
        raise NothingComparable(_nothing_answered(a, b))
    if not ports.names and not rowless:
        raise NothingComparable(
            f"Run a ({a.path}) and run b ({b.path}) have no site in common: a has {len(a.sites)}, such as "
            f"{a.sites[0].name!r}, and b has {len(b.sites)}, such as {b.sites[0].name!r}. Expected sites of one model. "
            "Record both runs with the same model and version."
        )
    pairs = pair_rows(a, b, pairing.pairs, may_lack=rowless)
    runs = Runs(a, b, RunLog(a, "a"), RunLog(b, "b"))
    return Aligned(runs, pairing, ports, pairs, across_models, rowless, across_engines)


def _nothing_answered(a: Trace, b: Trace) -> str:
    counts = [len(trace.generated(lens=False).token) for trace in (a, b)]
    reasons = "; ".join(
        f"run {run}: {reason}"
        for run, trace in (("a", a), ("b", b))
        for reason in dict.fromkeys(trace.lacks.values())
    )
    return (
        f"Run a ({a.path}) and run b ({b.path}) have no site in common, {counts[0]} and {counts[1]} generated tokens, and no "
        f"request whose answers both have{f' ({reasons})' if reasons else ''}. Expected tokens or texts of the same requests. "
        "Record both runs to the end, with an engine that gives tokens or text."
    )


def scan(aligned: Aligned, watch: OriginWatch | None = None) -> Pass:
    """Compare all digests; ``watch`` sees every block of rows, and every origin. Raises NothingComparable for none."""
    runs, ports, pairs = aligned.runs, aligned.ports, aligned.pairs
    forward_a = runs.a.row_index().forward[pairs.a].astype(np.int64)

    def calls(rows: Int64, place: int) -> tuple[Int64, Int64]:
        site = ports.sites[place]
        return (
            runs.log_a.call_numbers(pairs.a[rows], site.index_a),
            runs.log_b.call_numbers(pairs.b[rows], site.index_b),
        )

    tally = Tally(
        ports,
        pairs,
        calls,
        watch,
        nameless=aligned.across_models or any("sites" in run.lacks for run in (runs.a, runs.b)),
    )
    scanner = Scanner(runs.a, runs.b, ports, pairs)
    for block in scanner.blocks():
        tally.add(block, forward_a)
    tally.settle(forward_a)
    if not tally.compared.any() and not any(pair.common for pair in aligned.pairing.pairs if aligned.rowless):
        raise NothingComparable(
            f"Run a ({runs.a.path}) and run b ({runs.b.path}) share {len(pairs)} rows, and no port is recorded for a row "
            "in both. Expected digests of the same sites. Record both runs with the same version."
        )
    rules = SettledOrigins(tally, ports, pairs, scanner)
    settled = {}
    for found in rules.origins():
        settled[found.row, found.place] = found.how
        tally.claim(found.place, np.array([found.row]), np.array([rules.place_of(found)]), forward_a)
    details = Details(runs, scanner, ports, pairs, aligned.pairing.pairs)
    return Pass(ports, pairs, tally, details, settled, aligned.across_models)


def _answer(aligned: Aligned, done: Pass) -> Divergence:
    runs, pairing, rowless = aligned.runs, aligned.pairing, aligned.rowless
    noticed, bookkeeping_diverged = one_sided(runs.log_a, runs.log_b)
    happened = RunEvents(runs.a, runs.log_a, "a"), RunEvents(runs.b, runs.log_b, "b")
    events = event_answer(*happened)
    bookkeeping = (*events.findings, *attributed(noticed, *happened))
    verifications = Verifications(runs.a, runs.b)
    choices = tuple(verifications.findings(pairing.pairs))
    bookkeeping = (*choices, *bookkeeping)
    bookkeeping_diverged |= events.diverged or bool(choices)
    fed_otherwise = {finding.request for finding in done.pairs.findings}
    maker = RequestAnswer(runs, done, (runs.a.texts(), runs.b.texts()), verifications)
    requests: list[RequestDivergence] = []
    not_compared = list(pairing.not_compared)
    for number, request in enumerate(pairing.pairs):
        answer = maker.answer(number, request, request.id in fed_otherwise)
        if answer.rows or answer.flip is not None or answer.stage is not None or (rowless and request.common):
            requests.append(answer)
        else:
            what = "nothing that it answered" if rowless else "no row of it"
            not_compared.append(NotCompared(request.id, f"{what} is in both runs"))
    chosen = tuple(choice_findings(runs.a, runs.b, pairing.pairs, requests))
    bookkeeping = (*bookkeeping, *chosen)
    bookkeeping_diverged |= any(each.what == "processed" for each in chosen)
    found = {request.stage for request in requests} | ({"workload"} if done.pairs.findings else set())
    found |= {"bookkeeping"} if bookkeeping_diverged else set()
    # Other settings diverge nothing by themselves, but where something diverges they come first.
    found |= {"workload"} if pairing.workload and found - {None} else set()
    across = by_role(runs.a, runs.b, done.pairs, pairing.pairs) if aligned.across_engines else None
    if across is not None and any(each.largest for each in across.roles):
        found |= {"bits"}
    stage = next((stage for stage in STAGES if stage in found), None)
    workload = (*pairing.workload, *done.pairs.findings)
    whole = not not_compared and not workload and all(request.identical for request in requests)
    whole = whole and runs.a.complete and runs.b.complete
    whole = whole and not any(run.header["observer"].get("equal") is False for run in (runs.a, runs.b))
    # Requests that were to run together and did not say nothing about running together.
    whole = whole and not any(run.unmet for run in (runs.a, runs.b))
    # Equal tokens and highest logits say little of what led to them.
    whole = whole and (across is None or bool(across.roles))
    return Divergence(
        identical=stage is None and whole,
        inconclusive=stage is None and not whole,
        stage=stage,
        first=_first(pairing, done),
        compared=_compared(done, len(requests), sum(pair.common for pair in pairing.pairs)),
        requests=tuple(requests),
        not_compared=tuple(not_compared),
        workload=workload,
        bookkeeping=bookkeeping,
        events=events.events,
        notes=(*_notes(runs, pairing, done, requests), *events.notes),
        a=_run(runs.a, len(runs.log_a)),
        b=_run(runs.b, len(runs.log_b)),
        across_models=aligned.across_models,
        across_engines=across,
    )


def _first(pairing: Pairing, done: Pass) -> str | None:
    # A request's rows of the target come before its rows of the draft, which decide no token.
    requests = len(pairing.pairs)
    firsts = sorted((number >= requests, first, number) for number, first in done.tally.first.items())
    return pairing.pairs[firsts[0][2] % requests].id if firsts else None


def _compared(done: Pass, requests: int, tokens: int) -> Compared:
    pairs, tally, ports = done.pairs, done.tally, done.ports
    return Compared(
        requests=requests,
        rows=len(pairs),
        ports=len(ports.names),
        digests=int(tally.compared.sum(dtype=np.int64)),
        differing=int(tally.differing.sum(dtype=np.int64)),
        only_a=pairs.only_a,
        only_b=pairs.only_b,
        superseded_a=pairs.superseded_a,
        superseded_b=pairs.superseded_b,
        after_flip_a=pairs.after_flip_a,
        after_flip_b=pairs.after_flip_b,
        token_differs=pairs.token_differs,
        one_sided=tally.one_sided,
        unattributed=tally.blind,
        ports_only_a=ports.only_a,
        ports_only_b=ports.only_b,
        tokens=tokens,
        reused_a=int(pairs.reused_a.sum()),
        reused_b=int(pairs.reused_b.sum()),
    )


def _run(trace: Trace, forwards: int) -> RunIdentity:
    header = trace.header
    return RunIdentity(
        trace=str(trace.path),
        complete=trace.complete,
        forwards=forwards,
        model=trace.model,
        scenario=trace.scenario,
        environment=dict(header["environment"]),
        observer=dict(header["observer"]),
        engine=trace.engine,
        lacks=trace.lacks,
    )


def _notes(runs: Runs, pairing: Pairing, done: Pass, requests: list[RequestDivergence]) -> tuple[str, ...]:
    notes = []
    for trace, run in ((runs.a, "a"), (runs.b, "b")):
        notes += [f"run {run} is incomplete: {problem}" for problem in trace.problems]
        notes += [f"run {run}: {note}" for note in trace.header["notes"]]
    notes += [*_lacking(runs), *_observed(runs), *_environments(runs)]
    a, b = (trace.header["model"].get("tokenizer_sha256") for trace in (runs.a, runs.b))
    if a is not None and b is not None and a != b:
        notes.append("the tokenizers differ, so token texts may differ where ids do not")
    for number, request in enumerate(pairing.pairs):
        if request.cut is not None:
            notes.append(f"request {request.id}: {request.cut}")
        elif request.flip is None and done.pairs.lacking[number]:
            notes.append(
                f"request {request.id}: {done.pairs.lacking[number]} of its rows are in one run only"
            )
    for number, request in enumerate(pairing.pairs):
        for run, reused in (("a", done.pairs.reused_a[number]), ("b", done.pairs.reused_b[number])):
            if reused:
                notes.append(
                    f"request {request.id}: the first {reused} rows were computed by run {'b' if run == 'a' else 'a'} alone, "
                    f"run {run} took them from a cache; they are not compared"
                )
    for answer in requests:
        notes += _of_request(answer)
    if done.tally.blind:
        notes.append(
            f"{done.tally.blind} rows differ without a named origin, since what their attention read was not recorded"
        )
    if len(done.pairs) and any(r.flip is not None and r.limit == r.at for r in pairing.pairs):
        notes.append("rows after a request's first flip saw other tokens and are not compared")
    for trace, run in ((runs.a, "a"), (runs.b, "b")):
        if was_forced(trace):
            notes.append(
                f"run {run} was fed given tokens; its tokens here are what the model itself would have chosen, and rows after "
                "a flip are compared as long as both runs were fed the same"
            )
    return tuple(notes)


def _of_request(request: RequestDivergence) -> list[str]:
    """What a request's logits and tokens say beyond its digests."""
    notes = []
    for found in request.not_finite:
        what = [f"{n} {name}" for n, name in ((found.nan, "NaN"), (found.inf, "infinity")) if n]
        notes.append(
            f"request {request.id}: the logits of token {found.index} in run {found.run} are not finite "
            f"({' and '.join(what)}), which is equal to nothing"
        )
    if request.stage == "tokens" and request.rows:
        cause = "the choice of the token differs, or something that was not recorded"
        if request.logits_equal:
            cause = "the token was chosen otherwise (sampling), not computed otherwise"
        notes.append(f"request {request.id}: every compared digest is equal and the tokens differ: {cause}")
    return notes


def _lacking(runs: Runs) -> list[str]:
    """What a run could not show, things of one reason together, and once where it is so for both."""
    sides = [_reasons(trace) for trace in (runs.a, runs.b)]
    both = [reason for reason in sides[0] if sides[0][reason] == sides[1].get(reason)]
    found = [("both runs", reason, sides[0][reason]) for reason in both]
    for run, side in zip(("run a", "run b"), sides, strict=True):
        found += [(run, reason, what) for reason, what in side.items() if reason not in both]
    return [
        f"{run}: {reason}"
        if "not recorded" in reason
        else f"{run}: {' and '.join(filter(None, [', '.join(what[:-1]), what[-1]]))} are not recorded: {reason}"
        for run, reason, what in found
    ]


def _reasons(trace: Trace) -> dict[str, list[str]]:
    """What is lacking in a trace, by reason."""
    found: dict[str, list[str]] = {}
    for key, reason in trace.lacks.items():
        found.setdefault(reason, []).append(_LACKING.get(key, key.replace("_", " ")))
    return found


def _observed(runs: Runs) -> list[str]:
    """What is known of whether recording changed the runs."""
    found = [trace.header["observer"] for trace in (runs.a, runs.b)]
    if all(observer.get("equal") is True for observer in found):
        forwards = " and ".join(sorted({str(observer.get("forwards")) for observer in found}))
        return [
            f"recording was checked: the first {forwards} forwards of each run again without it, logits bit-equal"
        ]
    notes = []
    for observer, run, trace in zip(found, "ab", (runs.a, runs.b), strict=True):
        if "sites" in trace.lacks:
            # Nothing was tapped that could disturb it.
            continue
        if observer.get("equal") is False:
            notes.append(
                f"run {run}: RECORDING CHANGED THE LOGITS: its first {observer.get('forwards')} forwards, run again without "
                "it, gave other bits; either the run is not repeatable or recording disturbs it"
            )
        elif observer.get("equal") is None:
            notes.append(f"run {run}: it was not checked whether recording changed the logits")
    return notes


def _environments(runs: Runs) -> list[str]:
    """What the two runs ran on, where it differs."""
    a, b = (trace.header["environment"] for trace in (runs.a, runs.b))
    differ = [key for key in (*a, *(key for key in b if key not in a)) if a.get(key) != b.get(key)]
    notes = []
    if differ:
        each = "; ".join(f"{key}: {a.get(key)} and {b.get(key)}" for key in differ)
        notes.append(f"the runs' environments differ ({each}), which alone can change bits")
    if any(trace.header["model"].get("weights_sha256") is None for trace in (runs.a, runs.b)):
        notes.append("the weights were not compared: a run has no hash of them")
    return notes
