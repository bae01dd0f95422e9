"""Finds, marks and repairs damage.

`verify` reads the bytes that live checkpoints need, compares them with the hashes and puts a **mark** on damaged blobs,
so that no save reuses them. `repair` builds a damaged blob again from copies of the blob and from equal cells, in this
store or in others. A checkpoint whose blob cannot be restored in place is rewritten (`relocation`), and keeps its id.
"""
