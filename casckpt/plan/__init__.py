"""What to do, as pure functions of values: no I/O, no clock, no torch.

A **plan** is made before anything is done, so tests can check it without a store. `writers` decides which rank writes
what, `cells` cuts shards into cells and groups new cells into blobs, and `reuse` finds stored cells. `reads`
merges the ranges that a load needs. `retention` decides which checkpoints a policy keeps.
"""
