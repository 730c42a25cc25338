"""The least number that still works, from below: small trials are cheap ones."""

from __future__ import annotations

from collections.abc import Callable


def least(low: int, high: int, works: Callable[[int], bool]) -> int:
    """A number from ``low`` to ``high`` that works; ``high`` is taken to work and is not tried.

    Distances from ``low`` double until one works, and then halve down to it, so the answer is the least one where larger
    numbers always work. ``works`` is asked no number twice.
    """
    failed, found, distance = low - 1, high, 0
    while low + distance < high:
        if works(low + distance):
            found = low + distance
            break
        failed, distance = low + distance, 2 * distance + 1
    while found - failed > 1:
        middle = (failed + found) // 2
        if works(middle):
            found = middle
        else:
            failed = middle
    return found
