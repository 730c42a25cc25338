"""Reports: pure functions of a Divergence or a Verdict."""

from detdiff.report.headlines import headline
from detdiff.report.json import DIVERGENCE as SCHEMA
from detdiff.report.json import to_json, verdict_json
from detdiff.report.saved import from_json
from detdiff.report.text import divergence_text, verdict_text

__all__ = [
    "SCHEMA",
    "divergence_text",
    "from_json",
    "headline",
    "to_json",
    "verdict_json",
    "verdict_text",
]
