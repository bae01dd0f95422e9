"""Damage: found, marked and repaired.

`verify` reads what live checkpoints need, compares it with the hashes and puts a **mark** on damaged blobs, so that no
save reuses them. `repair` builds a damaged blob again from copies of the blob and from equal cells, in this store or in
others. What cannot be restored in place is rewritten (`relocation`), and the id of the checkpoint stays.
"""
