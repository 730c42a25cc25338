"""Reports: pure functions of a Divergence or a Verdict."""

from detdiff.report.json import SCHEMA, from_json, to_json
from detdiff.report.text import divergence_text, headline
from detdiff.report.verdict_json import verdict_json
from detdiff.report.verdict_text import verdict_text

__all__ = [
    "SCHEMA",
    "divergence_text",
    "from_json",
    "headline",
    "to_json",
    "verdict_json",
    "verdict_text",
]
