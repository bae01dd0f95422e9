"""Copies of checkpoints in other stores: made once with `casckpt copy`, or kept up to date by a mirror.

`replication` copies one checkpoint: it finds out which blobs and cells the target lacks, copies and verifies them, and
commits under the transaction id of the original. `copy` does this for many checkpoints, and `mirror` runs it in a
thread behind the saves.
"""
