"""What one composition of an engine's requests shows, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from detdiff.probe import Probe
from detdiff.probe.chart import spans_of
from detdiff.report.words import count, escaped

from .difference import Compared, Difference


@dataclass(frozen=True)
class EngineFinding:
    """One composition: what was compared, and each request that parted in it.

    ``repeats`` says that all requests that parted give the same again when they are run alone again; None where none parted,
    and the first of ``parted`` does not where it is False. ``kernels`` are probes of what computes the sites that parted,
    where the engine has them, and ``notes`` say what they could not.
    """

    composition: str
    engine: str
    compared: Compared
    parted: tuple[Difference, ...]
    repeats: bool | None
    kernels: tuple[Probe, ...]
    notes: tuple[str, ...] = ()

    def __bool__(self) -> NoReturn:
        raise TypeError("an EngineFinding has no truth value; ask .identical")

    @property
    def identical(self) -> bool:
        return not self.parted

    def said(self) -> list[str]:
        """What was found, in sentences, each request and its kernels apart."""
        if self.identical:
            return [f"nothing differs: {self._compared()}"]
        found = []
        if self.repeats is False:
            found.append(
                f"{escaped(self.parted[0].request.id)} alone gives other bits each time it is run, so this is not about the batch: "
                "look for a race, or for sampling that is not greedy"
            )
        for each in self.parted:
            names = ", ".join(map(escaped, each.neighbours)) or "nobody"
            drawn = f" ({each.drawn})" if each.drawn else ""
            found.append(f"{escaped(each.request.id)} beside {names}{drawn}: {'; '.join(each.said())}")
        found += [kernel_words(each) for each in self.kernels]
        found += map(escaped, self.notes)
        # What holds for all of them is said once.
        found += dict.fromkeys(note for each in self.kernels for note in each.notes)
        return found

    def text(self) -> str:
        """The finding as lines of text."""
        return "\n  ".join([f"{escaped(self.composition)} of {escaped(self.engine)}:", *self.said()])

    def _compared(self) -> str:
        seen = self.compared
        parts = [count(seen.tokens, "token")]
        parts += (
            [count(seen.log_probabilities, "log-probability", "log-probabilities")]
            if seen.log_probabilities
            else []
        )
        parts += [f"{count(seen.rows, 'row')} of {count(seen.sites, 'site')}"] if seen.rows else []
        return ", ".join(parts)


def kernel_words(found: Probe) -> str:
    """At which numbers of rows M a probed operation gives a row other bits."""
    swept = f"of M = {spans_of(found.rows)}"
    if found.invariant:
        return f"{escaped(found.target)}: a row's bits change at no M {swept}"
    parts = []
    if found.bits_change_at:
        groups = " | ".join(spans_of(members) for members in found.classes)
        parts.append(f"change at M = {', '.join(map(str, found.bits_change_at))} {swept} (alike: {groups})")
    if found.position:
        parts.append("depend on the row's position")
    if found.neighbours:
        parts.append("depend on other rows' content")
    if found.repeat:
        parts.append("differ on a repeat")
    return f"{escaped(found.target)}: a row's bits {', and '.join(parts)}"
