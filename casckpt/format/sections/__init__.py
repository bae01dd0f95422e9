"""The sections of a manifest. Each section has its own hash, so that readers fetch and verify only what they need.

`head` lists the sections. `index` says what was saved: its hash is the **id** of the checkpoint. `tables` says where
the cells of each entry lie, `coded_rows` adds the rows of cells that are stored as frames, and `blobs` lists the blobs,
which is all that gc, copies and statistics read. `health` counts NaNs, and `metadata` holds the values of the user.
"""
