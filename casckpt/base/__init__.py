"""Small helpers that every other package may import.

They have nothing to do with checkpoints. `parallel` runs work in threads, and `progress` reports its progress. `units`
parses sizes and durations. `lazy` computes attributes on first use, without a lock. `casckpt.errors` also belongs to
this layer.
"""
