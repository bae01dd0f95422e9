"""Maintenance of a store, without torch: gc, copies, verification, repair and statistics.

`gc` deletes the objects that no live commit needs. `copies` keeps checkpoints in a second store. `repair` finds damaged
blobs and restores them. `rewrite` commits a checkpoint again with its cells in other blobs; repair, thinning and
repacking use it. `usage`, `footprint` and `history` report how the bytes are used.
"""
