"""Engines: whatever runs requests and writes a trace."""
