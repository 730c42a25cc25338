"""The engine ``server``: what answers at an address, over HTTP, as traces like any other."""

from .engine import ServerEngine, open_server

__all__ = ["ServerEngine", "open_server"]
