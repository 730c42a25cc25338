"""Explaining a divergence: controls, grafts, the float64 oracle, verdicts."""
