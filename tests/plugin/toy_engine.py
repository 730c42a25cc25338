"""A toy engine that serves requests packed, and the same with a fault that one composition brings out."""

from __future__ import annotations

from collections.abc import Sequence

from detdiff.engines.function import EngineRequest
from detdiff.scenario import Schedule

MODULUS = 97


class Packed:
    """Iteration-level scheduling of prefill chunks and decode rows; a token is the sum of all before it."""

    name = "packed"

    def generate(self, requests: Sequence[EngineRequest], schedule: Schedule) -> dict[str, list[int]]:
        waiting = sorted(requests, key=lambda request: request.arrival)
        active: list[EngineRequest] = []
        self.done = {request.id: 0 for request in requests}
        self.state = {request.id: 0 for request in requests}
        out: dict[str, list[int]] = {request.id: [] for request in requests}
        step = 0
        while waiting or active:
            step = step if active else max(step, waiting[0].arrival)
            while waiting and waiting[0].arrival <= step and len(active) < (schedule.active or len(requests)):
                active.append(waiting.pop(0))
                self.admitted(active)
            left = schedule.row_budget or sum(len(request.tokens) for request in requests) + len(requests)
            for request in active:
                done, whole = self.done[request.id], len(request.tokens)
                rows = min(left, schedule.prefill_chunk, whole - done) if done < whole else min(left, 1)
                given = request.tokens[done : done + rows] if done < whole else out[request.id][-1:][:rows]
                self.state[request.id] += sum(given)
                self.done[request.id] += rows
                left -= rows
                if rows and self.done[request.id] >= whole:
                    out[request.id].append(self.state[request.id] % MODULUS)
            active = [request for request in active if len(out[request.id]) < request.max_tokens]
            step += 1
        return out

    def admitted(self, active: Sequence[EngineRequest]) -> None:
        """Called when the last of ``active`` has come."""


class Faulty(Packed):
    """Whoever comes as the third while a prompt is half done changes that prompt's state."""

    def admitted(self, active: Sequence[EngineRequest]) -> None:
        for request in active[:-1]:
            if len(active) >= 3 and 0 < self.done[request.id] < len(request.tokens):
                self.state[request.id] += 1
