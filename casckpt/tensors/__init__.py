"""The boundary to torch: states into leaves, tensors into regions, and memory for their bytes.

`state` flattens a nested state into leaves and a tree, and builds it again. `shards` computes which **regions** of a
global tensor this process holds, for every class of sharded tensor (`dtensors`, `foreign`). `memory` gives access to
the bytes of a tensor, without a copy where possible.
"""
