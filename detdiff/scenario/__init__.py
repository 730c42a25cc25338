"""A scenario says everything about a run: model, requests, schedule, speculation, cache, kernel plan, capture."""

from detdiff.scenario.keys import nearest, parse_flags, toml_text
from detdiff.scenario.sampling import Sampling
from detdiff.scenario.scenario import (
    LLAMA,
    MLX,
    TRANSFORMERS,
    Scenario,
    is_address,
    located,
    resolved,
    toml_table,
)
from detdiff.scenario.settings import (
    EMBED,
    GENERATE,
    LAYOUTS,
    SCHEDULES,
    SCORE,
    CachePlan,
    Capture,
    KernelPlan,
    PathRule,
    Request,
    Schedule,
    Speculation,
    Turn,
)

__all__ = [
    "EMBED",
    "GENERATE",
    "LAYOUTS",
    "LLAMA",
    "MLX",
    "SCHEDULES",
    "SCORE",
    "TRANSFORMERS",
    "CachePlan",
    "Capture",
    "KernelPlan",
    "PathRule",
    "Request",
    "Sampling",
    "Scenario",
    "Schedule",
    "Speculation",
    "Turn",
    "is_address",
    "located",
    "nearest",
    "parse_flags",
    "resolved",
    "toml_table",
    "toml_text",
]
