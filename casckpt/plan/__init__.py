"""Pure functions that make plans, without I/O, a clock or torch.

casckpt makes a **plan** before it acts, so tests can check plans without a store. `writers` assigns writes to ranks.
`cells` splits shards into cells and groups new cells into blobs. `reuse` finds stored cells. `reads` merges the ranges
that a load needs. `retention` determines which checkpoints a policy keeps.
"""
