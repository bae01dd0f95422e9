"""The boundary to torch: converts states to leaves and tensors to regions, and accesses their memory.

`state` flattens a nested state into leaves and a tree, and rebuilds it. `shards` computes which **regions** of a
global tensor this process holds, for every class of sharded tensor (`dtensors`, `foreign`). `memory` provides access
to a tensor's bytes, without a copy where possible.
"""
