"""Writes blobs: collects cells in a buffer, and adds the header and the proof.

A cell of `LEAF_BYTES` or more begins at a page boundary and is a leaf of its own. The proof reuses the cell's digest,
so no byte of a large cell is hashed twice. Smaller neighboring cells and the zeros before a page boundary are
combined into leaves of at least `LEAF_BYTES`, or less if a large cell follows. Digests are computed from the buffer
that is stored.
"""

from __future__ import annotations

from casckpt.format.blob import DATA_OFFSET, RECORD_BYTES, encode_header
from casckpt.format.digest import cell_digest, proof_name
from casckpt.format.names import BlobHash, CellDigest
from casckpt.format.proof import encode_proof

LEAF_BYTES = 64 << 10
_PAGE = DATA_OFFSET
_FRAMES = "uint8"


def place_behind(end: int, nbytes: int) -> int:
    """Return the offset for a cell of ``nbytes`` bytes in a blob whose last cell ends at byte ``end``."""
    return end if nbytes < LEAF_BYTES else -(-end // _PAGE) * _PAGE


def padded(nbytes: int) -> int:
    """Return the maximum number of data bytes for cells with a total of ``nbytes`` bytes, in any order."""
    return nbytes + _PAGE * (nbytes // LEAF_BYTES)


def buffer_bytes(data: int) -> int:
    """Return the size of a buffer, in bytes, for a blob with at most ``data`` bytes of data."""
    return DATA_OFFSET + data + RECORD_BYTES * (2 * (data // LEAF_BYTES) + 2)


class BlobWriter:
    """Builds a blob in ``buffer``, which has `buffer_bytes`. ``end`` is the file offset after the last cell.

    Sort the cells by `casckpt.format.blob.order`. For each cell, write its bytes at `place` and call `add`, or skip
    it. Then write each frame of a coded cell at `end` and call `add_frame`.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.end = DATA_OFFSET
        self._runs: list[tuple[str, int]] = []
        self._leaves: list[tuple[int, CellDigest]] = []
        self._joined = DATA_OFFSET  # the offset of the first byte that is not in a leaf yet
        self._dtype = ""

    @property
    def is_empty(self) -> bool:
        """Whether there are no cells."""
        return self.end == DATA_OFFSET

    def place(self, nbytes: int) -> int:
        """Return the offset of the next cell, in the file and in the buffer, if that cell has ``nbytes`` bytes."""
        return place_behind(self.end, nbytes)

    def add(self, dtype: str, nbytes: int, digest: CellDigest) -> None:
        """Add the cell of torch's ``dtype`` whose bytes are at `place`. ``digest`` is the digest of these bytes."""
        at = self.place(nbytes)
        if nbytes >= LEAF_BYTES:
            self._buffer[self.end : at] = bytes(at - self.end)
            self._join(at)
            self._leaves.append((nbytes, digest))
            self._joined = at + nbytes
        self._extend(dtype, at, nbytes)

    def add_frame(self, nbytes: int) -> None:
        """Add the frame of a coded cell, whose bytes are at `end`. Only other frames may follow."""
        if nbytes >= LEAF_BYTES:
            self._join(self.end)
        self._extend(_FRAMES, self.end, nbytes)

    def finish(self) -> tuple[BlobHash, int]:
        """Write the header and the proof, and return (name, size). The blob is the first ``size`` bytes of the buffer.

        Raises InvalidInput if there are no cells, or if they are not in order.
        """
        self._join(self.end)
        ends = [start for _, start in self._runs[1:]] + [self.end]
        runs = [(dtype, end - start) for (dtype, start), end in zip(self._runs, ends, strict=False)]
        self._buffer[:DATA_OFFSET] = encode_header(runs, len(self._leaves) + 1)
        proof = encode_proof([(DATA_OFFSET, cell_digest(self._buffer[:DATA_OFFSET])), *self._leaves])
        size = self.end + len(proof)
        self._buffer[self.end : size] = proof
        return proof_name(self._buffer[self.end : size]), size

    def _extend(self, dtype: str, at: int, nbytes: int) -> None:
        if dtype != self._dtype:
            self._runs.append((dtype, at))
            self._dtype = dtype
        self.end = at + nbytes
        if self.end - self._joined >= LEAF_BYTES:
            self._join(self.end)

    def _join(self, stop: int) -> None:
        """Add a leaf that consists of the bytes before ``stop`` that are not yet in a leaf."""
        if stop > self._joined:
            self._leaves.append((stop - self._joined, cell_digest(self._buffer[self._joined : stop])))
            self._joined = stop
