"""How a request's tokens are chosen: greedy, by detdiff's own keyed draw, or by mlx-lm's sampler; and what changes its logits
before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from detdiff.errors import ScenarioConflict, ScenarioRangeError

KEYED, MLX_LM = "detdiff", "mlx-lm"
SAMPLERS = (KEYED, MLX_LM)
LARGEST_SEED, LARGEST_INT = 2**63 - 1, 2**31 - 1
PENALTIES: Final = ("repetition", "presence", "frequency")
PROCESSORS: Final = ("logit_bias", *(f"{name}_penalty" for name in PENALTIES))
"""What makes logits processors."""
ALWAYS_TOLD: Final = ("temperature", "top_p", "seed")
"""What every trace says of a request's sampling; the rest stands there where it is asked for."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. Temperature 0 is greedy; else a draw of the sampler ``detdiff`` depends on ``seed`` and the
    token's index alone, and one of ``mlx-lm`` on MLX's one random state.

    Filters and logits processors are mlx-lm's own, and are named as its ``make_sampler`` and ``make_logits_processors`` name them.
    ``logit_bias`` is (token id, what is added), by id. ``xtc_special_tokens`` None: a line's end and the stop tokens.

    Raises ScenarioRangeError for a value outside its range, and ScenarioConflict for a part of a filter or penalty without it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    sampler: Literal["detdiff", "mlx-lm"] = "detdiff"
    top_k: int | None = None
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ScenarioRangeError(f"temperature is {self.temperature}; it must be 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise ScenarioRangeError(
                f"top_p is {self.top_p}; it must be more than 0 and at most 1 (1 keeps all)."
            )
        if self.sampler not in SAMPLERS:
            raise ScenarioRangeError(
                f"sampler is {self.sampler!r}; the known ones are {' and '.join(SAMPLERS)}."
            )
        self._check_between("seed", 0, LARGEST_SEED)
        for name in ("top_k", "min_tokens_to_keep", *(f"{penalty}_context_size" for penalty in PENALTIES)):
            self._check_between(name, 1, LARGEST_INT)
        self._check_between("min_p", 0, 1)
        self._check_between("xtc_probability", 0, 1)
        self._check_between("xtc_threshold", 0, 0.5)
        for name in (*(f"{penalty}_penalty" for penalty in PENALTIES), "logit_bias"):
            given = getattr(self, name)
            values = [value for _, value in given] if isinstance(given, tuple) else [given]
            if any(value is not None and not math.isfinite(value) for value in values):
                raise ScenarioRangeError(f"{name} is {given}; it must be finite.")
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise ScenarioRangeError(
                f"repetition_penalty is {self.repetition_penalty}; it must be more than 0 (1 changes nothing)."
            )
        self._check_parts()

    def _check_between(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:
            raise ScenarioRangeError(f"{name} is {value}; it must be {low} to {high}.")

    def _check_parts(self) -> None:
        whole = {f"{penalty}_context_size": f"{penalty}_penalty" for penalty in PENALTIES}
        whole |= {"min_tokens_to_keep": "min_p"}
        whole |= dict.fromkeys(("xtc_threshold", "xtc_special_tokens"), "xtc_probability")
        default = {each.name: each.default for each in fields(self)}
        for part, of in whole.items():
            if getattr(self, part) != default[part] and getattr(self, of) == default[of]:
                raise ScenarioConflict(
                    f"{part} is a part of {of}, which is not there; add {of}, or remove {part}."
                )
        if self.xtc_probability and self.sampler != MLX_LM:
            raise ScenarioConflict(
                "xtc_probability draws from MLX's one random state and sampler is detdiff, whose draws depend on seed and index "
                "alone; add sampler mlx-lm, or remove xtc_probability."
            )

    @property
    def processed(self) -> bool:
        """Whether logits processors change the logits before a token is chosen."""
        return any(getattr(self, name) for name in PROCESSORS)

    @property
    def draws(self) -> bool:
        """Whether a token may be another than the one of the highest logit."""
        return self.temperature > 0

    @property
    def beyond_keyed(self) -> tuple[str, ...]:
        """The fields that only mlx-lm's sampler and processors know, where they are asked for."""
        return tuple(each for each in self.told() if each not in ALWAYS_TOLD)

    def told(self) -> dict[str, Any]:
        """The fields as a trace says them: temperature, top_p and seed, and what else is asked for; fit for JSON."""
        found = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ALWAYS_TOLD or value != each.default:
                found[each.name] = value
        if "logit_bias" in found:
            found["logit_bias"] = {str(token): bias for token, bias in self.logit_bias}
        if self.xtc_special_tokens is not None:
            found["xtc_special_tokens"] = list(self.xtc_special_tokens)
        return found


def same_choice(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two ``told`` choose alike from equal logits: equal, or both greedy after the same processors."""
    if a == b:
        return True
    processors = (
        "logit_bias",
        *(f"{name}_{part}" for name in PENALTIES for part in ("penalty", "context_size")),
    )
    greedy = a.get("temperature") == b.get("temperature") == 0
    return greedy and all(a.get(key) == b.get(key) for key in processors)
