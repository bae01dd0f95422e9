"""Maintenance of a store: gc, copies, verification, repair and statistics. It does not need torch.

`gc` deletes the objects that no live commit needs. `copies` keeps checkpoints in a second store. `repair` finds
damaged blobs and restores them. `rewrite` commits a checkpoint again with its cells in different blobs. Repair,
thinning and repacking use it. `usage`, `footprint` and `history` report what the bytes of the store are used for.
"""
