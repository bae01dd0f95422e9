"""The sections of a manifest. Each section has its own hash, so that readers fetch and verify only what they need.

`head` lists the sections. `index` says what was saved: its hash is the **id** of the checkpoint. `tables` gives the
places of the cells of each entry, and `blobs` lists the blobs. gc, copies and statistics read only that list. `health`
counts NaNs.
"""
