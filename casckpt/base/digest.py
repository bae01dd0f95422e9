"""BLAKE3 hashes of bytes, as hex strings. The digests used by the format are in `casckpt.format.digest`.

No other module imports blake3.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

from blake3 import blake3

from casckpt.base.parallel import in_parallel, usable_threads

Buffer: TypeAlias = bytes | bytearray | memoryview
_CHUNK_BYTES: Final = 1 << 20


def files_digest(path: Path, files: Sequence[Path]) -> str:
    """Compute the digest of ``files``, which ``path`` names.

    If ``path`` is the only file, this is its digest. Otherwise, it is the digest of the lines that ``b3sum`` prints for
    the files, sorted by their names in the folder. Raises OSError.
    """
    digests = list(in_parallel(usable_threads(None), _file_digest, files))
    if [*files] == [path]:
        return digests[0]
    folder = path if path.is_dir() else path.parent
    names = [os.fsencode(file.relative_to(folder).as_posix()) for file in files]
    lines = sorted(zip(names, digests, strict=True))
    return hex_digest(b"".join(digest.encode() + b"  " + name + b"\n" for name, digest in lines))


def _file_digest(file: Path) -> str:
    hasher = blake3()
    with file.open("rb", buffering=0) as opened:
        while data := opened.read(_CHUNK_BYTES):
            hasher.update(data)
    return hasher.hexdigest()


def hex_digest(data: Buffer) -> str:
    """Compute the digest of all of ``data``, as the 64 hex digits that b3sum prints."""
    return blake3(data).hexdigest()
