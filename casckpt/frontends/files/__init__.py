"""Folders and files of other programs as checkpoints, which come back byte for byte.

`listing` says what is in a folder, and notices every change. `cutting` finds the tensors in files, so that a tensor is
an entry of its own, and is stored once across steps, files, and saves. `importing` and `exporting` move whole folders.
`watching` takes each new checkpoint of a trainer. The format is in "Folders of other programs" of docs/format.md.
"""

from __future__ import annotations

from typing import Final

AS_FILES: Final = "store the folders that it writes with `casckpt import --format files` (--watch: while it trains)"
"""The way for programs that casckpt does not support otherwise."""
