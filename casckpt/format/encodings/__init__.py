"""Frames: cells in a smaller form, computed only from the cell's bytes and the base's bytes.

`frames` chooses among three forms: byte planes of the cell, differences from the base, or the positions and values of
changed elements. It can also decode a cell whose base is itself a frame. Every part of a frame is raw, constant or
compressed with zstd (`parts`). `scratch` provides memory that threads reuse.
"""
