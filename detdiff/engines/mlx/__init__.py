"""The engine ``mlx``: mlx-lm's own generators (padded) or our iteration-level scheduler (packed), on any mlx-lm model.

Importing this package loads no model library; its modules do.
"""
