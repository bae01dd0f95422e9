"""Small helpers that every other package may import.

Nothing here knows what a checkpoint is. `parallel` runs work in threads, and `progress` reports its progress. `sizes`
and `durations` parse text. `lazy` computes attributes on first use, without a lock. `casckpt.errors` belongs to this
layer too.
"""
