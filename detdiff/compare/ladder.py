"""Compares two traces down a fixed ladder, earliest rung first.

Nothing comparable, workload (tokens in), bookkeeping, dtype, shape, bits; magnitude where both traces hold values.
Nothing compared is never a pass.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from detdiff.errors import NothingComparable
from detdiff.trace import Trace

from .alignment import CommonPorts, RowPairs, pair_rows
from .answer import Pass, RequestAnswer, Verifications
from .details import Details, Runs
from .digests import Scanner
from .divergence import Compared, Divergence, NotCompared, RequestDivergence, Run
from .events import RunEvents, attributed, event_answer
from .forwards import RunLog, one_sided
from .origins import Int64, SettledOrigins, Tally, Watch
from .tokens import Pairing, pair_requests, was_forced

RUNGS: Final = ("workload", "bookkeeping", "dtype", "shape", "bits", "tokens")
"""From the earliest to the last. ``tokens``: every compared digest is equal and yet the tokens differ."""


def compare(a: Trace, b: Trace, *, requests: Collection[str] | None = None) -> Divergence:
    """Where and how run ``b`` parts from run ``a``. Needs the traces alone, no model.

    ``requests`` are the ids that are asked about, None: all of both runs. Raises NothingComparable for traces of two models
    or without a common request, row or port, and TraceError where a part of a trace that is read only now breaks a rule.
    """
    aligned = align(a, b, requests)
    return _answer(aligned.runs, aligned.pairing, scan(aligned))


@dataclass(frozen=True)
class Aligned:
    """Two runs, and what belongs together in them."""

    runs: Runs
    pairing: Pairing
    ports: CommonPorts
    pairs: RowPairs


def align(a: Trace, b: Trace, requests: Collection[str] | None = None) -> Aligned:
    """Match requests, sites and rows; ``requests`` and what it raises as in ``compare``."""
    pairing = pair_requests(a, b, requests)
    ports = CommonPorts.of(a, b)
    if not ports.names:
        raise NothingComparable(
            f"Run a ({a.path}) and run b ({b.path}) have no site in common: a has {len(a.sites)}, such as "
            f"{a.sites[0].name!r}, and b has {len(b.sites)}, such as {b.sites[0].name!r}. Expected sites of one model. "
            "Record both runs with the same model and version."
        )
    pairs = pair_rows(a, b, pairing.pairs)
    return Aligned(Runs(a, b, RunLog(a, "a"), RunLog(b, "b")), pairing, ports, pairs)


def scan(aligned: Aligned, watch: Watch | None = None) -> Pass:
    """Compare all digests; ``watch`` sees every block of rows, and every origin. Raises NothingComparable for none."""
    runs, ports, pairs = aligned.runs, aligned.ports, aligned.pairs
    forward_a = runs.a.row_index().forward[pairs.a].astype(np.int64)

    def calls(rows: Int64, place: int) -> tuple[Int64, Int64]:
        site = ports.sites[place]
        return (
            runs.log_a.call_numbers(pairs.a[rows], site.index_a),
            runs.log_b.call_numbers(pairs.b[rows], site.index_b),
        )

    tally = Tally(ports, pairs, calls, watch)
    scanner = Scanner(runs.a, runs.b, ports, pairs)
    for block in scanner.blocks():
        tally.add(block, forward_a)
    tally.settle(forward_a)
    if not tally.compared.any():
        raise NothingComparable(
            f"Run a ({runs.a.path}) and run b ({runs.b.path}) share {len(pairs)} rows, and no port is recorded for a row "
            "in both. Expected digests of the same sites. Record both runs with the same version."
        )
    rules = SettledOrigins(tally, ports, pairs, scanner)
    late = {}
    for found in rules.origins():
        late[found.row, found.place] = found.how
        tally.claim(found.place, np.array([found.row]), np.array([rules.place_of(found)]), forward_a)
    return Pass(ports, pairs, tally, Details(runs, ports, pairs, aligned.pairing.pairs), late)


def _answer(runs: Runs, pairing: Pairing, done: Pass) -> Divergence:
    noticed, bookkeeping_parted = one_sided(runs.log_a, runs.log_b)
    happened = RunEvents(runs.a, runs.log_a, "a"), RunEvents(runs.b, runs.log_b, "b")
    events = event_answer(*happened)
    bookkeeping = (*events.findings, *attributed(noticed, *happened))
    verifications = Verifications(runs.a, runs.b)
    choices = tuple(verifications.findings(pairing.pairs))
    bookkeeping = (*choices, *bookkeeping)
    bookkeeping_parted |= events.parted or bool(choices)
    fed_otherwise = {finding.request for finding in done.pairs.findings}
    maker = RequestAnswer(runs, done, (runs.a.texts(), runs.b.texts()), verifications)
    requests: list[RequestDivergence] = []
    not_compared = list(pairing.not_compared)
    for number, request in enumerate(pairing.pairs):
        answer = maker.answer(number, request, request.id in fed_otherwise)
        if answer.rows or answer.flip is not None or answer.rung is not None:
            requests.append(answer)
        else:
            not_compared.append(NotCompared(request.id, "no row of it is in both runs"))
    found = {request.rung for request in requests} | ({"workload"} if done.pairs.findings else set())
    found |= {"bookkeeping"} if bookkeeping_parted else set()
    # Other settings part nothing by themselves, but where something parts they come first.
    found |= {"workload"} if pairing.workload and found - {None} else set()
    rung = next((rung for rung in RUNGS if rung in found), None)
    workload = (*pairing.workload, *done.pairs.findings)
    whole = not not_compared and not workload and all(request.identical for request in requests)
    whole = whole and runs.a.complete and runs.b.complete
    whole = whole and not any(run.header["observer"].get("equal") is False for run in (runs.a, runs.b))
    return Divergence(
        identical=rung is None and whole,
        inconclusive=rung is None and not whole,
        rung=rung,
        first=_first(pairing, done),
        compared=_compared(done, len(requests)),
        requests=tuple(requests),
        not_compared=tuple(not_compared),
        workload=workload,
        bookkeeping=bookkeeping,
        events=events.events,
        notes=(*_notes(runs, pairing, done, requests), *events.notes),
        a=_run(runs.a, len(runs.log_a)),
        b=_run(runs.b, len(runs.log_b)),
    )


def _first(pairing: Pairing, done: Pass) -> str | None:
    # A request's rows of the target come before its rows of the draft, which decide no token.
    requests = len(pairing.pairs)
    firsts = sorted((number >= requests, first, number) for number, first in done.tally.first.items())
    return pairing.pairs[firsts[0][2] % requests].id if firsts else None


def _compared(done: Pass, requests: int) -> Compared:
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
    )


def _run(trace: Trace, forwards: int) -> Run:
    header = trace.header
    return Run(
        trace=str(trace.path),
        complete=trace.complete,
        forwards=forwards,
        model=trace.model,
        scenario=trace.scenario,
        environment=dict(header["environment"]),
        observer=dict(header["observer"]),
        engine=engine_of(trace),
        lacks=lacks(trace),
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
    notes += [
        f"request {request.id}: every compared digest is equal and the tokens differ: the choice of the token differs, "
        "or something that was not recorded"
        for request in requests
        if request.rung == "tokens"
    ]
    if done.tally.blind:
        notes.append(
            f"{done.tally.blind} rows differ without a named origin, since what their attention read was not recorded"
        )
    if any(request.flip is not None and request.limit == request.at for request in pairing.pairs):
        notes.append("rows after a request's first flip saw other tokens and are not compared")
    for trace, run in ((runs.a, "a"), (runs.b, "b")):
        if was_forced(trace):
            notes.append(
                f"run {run} was fed given tokens; its tokens here are what the model itself would have chosen, and rows after "
                "a flip are compared as long as both runs were fed the same"
            )
    return tuple(notes)


def lacks(trace: Trace) -> dict[str, str]:
    """What the engine could not show in ``trace``, each with the reason."""
    found = trace.header.get("lacks")
    return {str(key): str(reason) for key, reason in found.items()} if isinstance(found, dict) else {}


def engine_of(trace: Trace) -> str:
    """The name of the engine that wrote ``trace``."""
    found = trace.header.get("engine")
    return str(found.get("name")) if isinstance(found, dict) else "mlx"


def _lacking(runs: Runs) -> list[str]:
    """What a run could not show, said once where it is so for both."""
    of_a, of_b = lacks(runs.a), lacks(runs.b)
    found = []
    for key in dict.fromkeys((*of_a, *of_b)):
        if of_a.get(key) == of_b.get(key):
            found.append(f"both runs: {of_a[key]}")
        else:
            found += [f"run {run}: {of[key]}" for run, of in (("a", of_a), ("b", of_b)) if key in of]
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
    for observer, run in zip(found, "ab", strict=True):
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
