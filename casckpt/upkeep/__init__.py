"""Maintenance of a store: gc, copies, verification, repair and statistics. It does not need torch.

`gc` deletes the objects that no live commit needs. `copies` keeps checkpoints in a second store. `repair` finds and
restores damaged blobs. `rewrite` recommits a checkpoint with its cells in different blobs, for thinning and fuller
copies. `sizes` reports what uses the store's space.
"""
