"""Small helpers that every other package may import.

They do not depend on checkpoints. `parallel` runs work in threads, and `progress` reports its progress. `units` parses
sizes and durations. `lazy` computes attributes on first use, without a lock. `casckpt.errors` belongs to this layer
too.
"""
