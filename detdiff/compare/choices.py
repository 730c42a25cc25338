"""What tokens were chosen from, after logits processors: where it differs between runs although the logits do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from detdiff.trace import Trace

from .divergence import Finding, RequestDivergence
from .tokens import RequestPair

Digests = dict[tuple[int, int], str]


def digests(trace: Trace) -> Digests:
    """The digest of the log-probabilities that each token was chosen from, by request and index, where it is told."""
    return {(e["request"], e["index"]): e["digest"] for e in trace.events() if e["event"] == "choice"}


def choice_findings(
    a: Trace, b: Trace, pairs: Sequence[RequestPair], answers: Sequence[RequestDivergence]
) -> Iterator[Finding]:
    """One for each request whose compared digests are all equal: from which token on other log-probabilities came from
    equal logits (``processed``), or that they are equal at its flip (``drawn``)."""
    mine, theirs = digests(a), digests(b)
    if not (mine and theirs):
        return
    numbers = {pair.id: pair for pair in pairs}
    for answer in answers:
        pair = numbers[answer.id]
        told = sorted(index for number, index in mine if number == pair.a and (pair.b, index) in theirs)
        until = answer.flip.index if answer.flip is not None else None
        told = [index for index in told if until is None or index <= until]
        if answer.differing or not told:
            continue
        first = next((index for index in told if mine[pair.a, index] != theirs[pair.b, index]), None)
        if first is not None:
            detail = (
                f"the logits of token {first} are bit-equal, and what its sampler was given is not: logits processors changed them "
                "otherwise"
            )
            yield Finding("both", "processed", answer.id, None, detail)
        elif until in told:
            detail = f"what the sampler of token {until} was given is bit-equal in both runs, and the token is another: the draw differs"
            yield Finding("both", "drawn", answer.id, None, detail)
