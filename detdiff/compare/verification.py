"""Speculation in both runs: what was proposed for each generated token, what stood, and the sums of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from detdiff.trace import Trace

from .divergence import Finding
from .requests import RequestPair
from .speculated import Acceptance, Proposed, Verification, Verified

Event = Mapping[str, Any]


class Verifications:
    """The verifications of two runs, by request."""

    def __init__(self, a: Trace, b: Trace) -> None:
        self._traces = a, b
        self._events: tuple[dict[int, list[Event]], ...] = ({}, {})
        for trace, found in zip(self._traces, self._events, strict=True):
            for event in trace.events() if _speculated(trace) else ():
                if event["event"] == "verify":
                    found.setdefault(event["request"], []).append(event)

    def answer(self, request: RequestPair) -> Verification | None:
        """None where neither run speculated."""
        if not any(map(_speculated, self._traces)):
            return None
        a, b = (
            events.get(number, [])
            for events, number in zip(self._events, (request.a, request.b), strict=True)
        )
        by_token = _by_token(a, request.prompt), _by_token(b, request.prompt)
        end = request.flip if request.flip is not None else len(request.steps_a) - 1
        both = [n for n in range(end + 1) if all(n in found for found in by_token)]
        pairs = [(n, by_token[0][n], by_token[1][n]) for n in both]
        proposals = [n for n, x, y in pairs if x.proposal != y.proposal]
        choices = [n for n, x, y in pairs if x.choice != y.choice]
        flip = None if request.flip is None else tuple(found.get(request.flip) for found in by_token)
        return Verification(
            tokens=len(both),
            proposals_equal=not proposals if both else None,
            first_other_proposal=proposals[0] if proposals else None,
            choices_equal=not choices if both else None,
            first_other_choice=choices[0] if choices else None,
            flip_a=None if flip is None else flip[0],
            flip_b=None if flip is None else flip[1],
            a=self._acceptance(0, request, a),
            b=self._acceptance(1, request, b),
        )

    def findings(self, requests: Sequence[RequestPair]) -> Iterator[Finding]:
        """Choices that are not what their own row's logits say: taken from another row, or from another model."""
        for request in requests:
            for side, (number, steps) in enumerate(
                ((request.a, request.steps_a), (request.b, request.steps_b))
            ):
                row = {int(position): n for n, position in enumerate(steps.position.tolist())}
                for event in self._events[side].get(number, ()):
                    for place, choice in enumerate(event["choices"][: len(event["committed"])]):
                        n = row.get(event["start"] + place)
                        own = choice if n is None or not steps.top_ids.shape[1] else int(steps.top_ids[n, 0])
                        if own != choice:
                            yield Finding(
                                "ab"[side],
                                "choice",
                                request.id,
                                event["forward"],
                                f"the verification takes token {choice} as the choice at position {event['start'] + place}, "
                                f"and that row's own logits choose {own}",
                            )

    def _acceptance(self, side: int, request: RequestPair, events: list[Event]) -> Acceptance | None:
        trace = self._traces[side]
        if not _speculated(trace):
            return None
        own = trace.header.get("speculation", {}).get(request.id)
        proposed = sum(len(event["proposals"]) for event in events)
        accepted = sum(event["accepted"] for event in events)
        counted = (own.get("proposed"), own.get("accepted")) if isinstance(own, Mapping) else (None, None)
        return Acceptance(
            verifications=len(events),
            proposed=proposed,
            accepted=accepted,
            own_proposed=counted[0],
            own_accepted=counted[1],
            agrees=None if None in counted else counted == (proposed, accepted),
        )


def _speculated(trace: Trace) -> bool:
    return trace.scenario.get("draft") is not None


def _by_token(events: list[Event], prompt: int) -> dict[int, Verified]:
    """The verification of each generated token that one gave; a token's index counts from 0."""
    found: dict[int, Verified] = {}
    for event in events:
        first = event["start"] - prompt + 1
        for place in range(len(event["committed"])):
            proposal = event["proposals"][place] if place < len(event["proposals"]) else None
            choice = event["choices"][place] if place < len(event["choices"]) else None
            found[first + place] = Verified(
                event["forward"],
                Proposed(tuple(event["proposals"]), tuple(event["choices"])),
                place,
                proposal,
                choice,
            )
    return found
