"""The sections of a manifest. Each has its own hash, so that readers can fetch and verify only what they need.

`head` lists the sections. `index` describes what was saved, and its hash is the checkpoint's **id**. `tables` holds
the locations of each entry's cells, and `blobs` lists the blobs. gc, copies and statistics read only that list.
`health` counts NaNs. `recipe` is a note in the index.
"""
