"""The command line: one function a command, nothing but arguments in and answers out."""

from . import comparing, measuring, reading, running  # noqa: F401  (each adds its commands to the group)
from .group import DIFFERENT, IDENTICAL, INCONCLUSIVE, TROUBLE, main

__all__ = ["DIFFERENT", "IDENTICAL", "INCONCLUSIVE", "TROUBLE", "main"]
