"""Checks batch invariance: a run alone against the same requests in other compositions, at a level that says what may differ.

``detdiff.pytest_plugin`` puts it into tests.
"""
