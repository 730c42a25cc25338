"""Reports: pure functions of a Divergence."""

from detdiff.report.json import SCHEMA, from_json, to_json
from detdiff.report.text import divergence_text, headline

__all__ = ["SCHEMA", "divergence_text", "from_json", "headline", "to_json"]
