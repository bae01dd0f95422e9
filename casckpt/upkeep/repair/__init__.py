"""Finds, marks and repairs damage.

`verify` reads the bytes that live checkpoints need, compares them with their hashes, and puts a **mark** on damaged
blobs, so that no save reuses them. `repair` rebuilds a damaged blob from copies of the blob and from equal cells, in
this store or in others. If it cannot restore a blob in place, it rewrites the checkpoint (`relocation`) under the same
id.
"""
