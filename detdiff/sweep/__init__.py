"""Many pairs of runs: a grid of scenarios, who runs which cell, and what came out."""
