"""Causal language models of Hugging Face transformers in torch. Importing this imports neither."""

from .engine import TransformersEngine, open_transformers

__all__ = ["TransformersEngine", "open_transformers"]
