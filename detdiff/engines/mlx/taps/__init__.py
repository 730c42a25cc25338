"""Taps: where a model's values are seen, by swapping classes, and how they become a trace.

Importing this package loads nothing; its modules import mlx.
"""
