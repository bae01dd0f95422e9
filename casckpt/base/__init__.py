"""Small helpers that every other package may import.

Nothing here knows what a checkpoint is. `parallel` runs work in threads, `progress` reports how far it is, `sizes` and
`durations` parse what people write, and `lazy` computes attributes on first use without a lock. `casckpt.errors`, one
level up, belongs to this layer too.
"""
