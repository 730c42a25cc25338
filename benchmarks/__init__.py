"""Measurements of docs/performance.md, each a module with ``run()``: ``python -m benchmarks`` runs them."""
