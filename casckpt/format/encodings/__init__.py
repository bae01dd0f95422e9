"""Frames: cells in a smaller form, as pure functions of their bytes and of the bytes of a base.

`frames` chooses between the forms: byte planes of the cell, differences to the base, or the positions and values of
changed elements. It also decodes a cell whose base is a frame itself. Every part of a frame is raw, constant or
compressed with zstd (`parts`). `scratch` is memory that threads reuse.
"""
