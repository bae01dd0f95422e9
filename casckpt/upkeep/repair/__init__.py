"""Finds, marks and repairs damage.

`verify` reads the bytes that live checkpoints need, compares them with their hashes, and puts a **mark** on damaged
blobs, so that no save reuses them. `repair` restores damaged blobs and manifests from intact copies, in this store or
in others.
"""
