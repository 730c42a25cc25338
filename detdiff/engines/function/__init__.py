"""An engine of the user's own: a function or an object with generate(requests[, schedule]), as traces."""

from .answers import EngineRequest, Generation, Tap
from .engine import FunctionEngine

__all__ = ["EngineRequest", "FunctionEngine", "Generation", "Tap"]
