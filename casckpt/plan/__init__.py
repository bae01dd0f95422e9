"""What to do, as pure functions of values: no I/O, no clock, no torch.

A **plan** is made before anything is done, so tests can check it without a store. `writers` decides which rank writes
what, `cells` cuts shards into cells, `reuse` finds stored cells, and `packing` groups new cells into blobs. `reads`
merges the ranges that a load needs. `retention` decides which checkpoints a policy keeps.
"""
