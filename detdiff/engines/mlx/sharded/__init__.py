"""A model over several processes: mlx-lm's own ``shard``, a recording of what each process holds, and one trace of all."""
