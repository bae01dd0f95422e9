"""Small helpers that every other package may import.

Nothing here knows what a checkpoint is. `parallel` runs work in threads, and `progress` reports its progress. `units`
parses sizes and durations. `lazy` computes attributes on first use, without a lock. `casckpt.errors` belongs to this
layer too.
"""
