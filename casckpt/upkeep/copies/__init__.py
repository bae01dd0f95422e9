"""Copies of checkpoints in other stores, made once by `casckpt copy` or kept up to date by a mirror.

`replication` copies one checkpoint: it finds out which blobs and cells the target lacks, copies and verifies them, and
commits under the original's transaction id. `copy` does this for many checkpoints, and `mirror` does it in a
background thread after each save.
"""
