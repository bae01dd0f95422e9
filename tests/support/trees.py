"""Complete comparison of two folders or files: names, bytes, permission bits, link targets and empty folders."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

Tree = dict[bytes, tuple[str, int, bytes]]
"""The kind, the permission bits and the content of each item by its path below the root, which has the path "".

The content of a file is its size and digest; that of a link is its target. A link has no permission bits.
"""


def tree(root: Path) -> Tree:
    """Return what a folder contains, with the folder itself, or what a file is. Links are not followed."""
    top = os.fsencode(root)
    found, left = Tree(), [b""]
    while left:
        path = left.pop()
        full = os.path.join(top, path) if path else top
        mode = os.lstat(full).st_mode
        if stat.S_ISLNK(mode):
            found[path] = "link", 0, os.readlink(full)
        elif stat.S_ISDIR(mode):
            found[path] = "folder", mode & 0o777, b""
            left += [os.path.join(path, name) for name in os.listdir(full)]
        elif stat.S_ISREG(mode):
            with open(full, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
            found[path] = "file", mode & 0o777, b"%d %s" % (os.lstat(full).st_size, digest.hex().encode())
        else:
            raise AssertionError(f"{full!r} is neither a folder nor a file nor a link")
    return dict(sorted(found.items()))


def same_tree(one: Path, other: Path) -> None:
    """Fail, with each path that differs, unless both have the same items."""
    mine, yours = tree(one), tree(other)
    different = {path: (mine.get(path), yours.get(path)) for path in mine | yours if mine.get(path) != yours.get(path)}
    assert not different, "\n".join(f"{path!r}: {a} != {b}" for path, (a, b) in sorted(different.items()))
