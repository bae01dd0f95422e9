"""The proof of a blob: the lengths and digests of its leaves.

Together, the leaves are all other bytes of the file, in order.

::

    n records of 36 bytes: length of the leaf (4 bytes, little-endian), its BLAKE3

The proof follows the data and extends to the end of the file. Its hash is the blob's name (`digest.proof_name`).
Therefore, a reader that knows the name can verify each leaf individually, without a manifest. Leaf 0 is the header. The
writer (`casckpt.format.blob_writer`) chooses how to split the rest, and readers accept any split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from struct import Struct
from typing import NamedTuple

from casckpt.base.digest import Buffer
from casckpt.errors import Refused
from casckpt.format.blob import DATA_OFFSET, MAX_LEAVES, MIN_LEAVES, RECORD_BYTES
from casckpt.format.digest import Hasher, cell_digest, proof_name
from casckpt.format.names import BlobHash, CellDigest

MAX_LEAF_BYTES = 1 << 30

_RECORD = Struct("<I32s")
_FIRST_TAIL = 4096  # bytes, enough for the proofs of nearly all blobs
_MORE = 16


class Leaf(NamedTuple):
    """One leaf: ``nbytes`` bytes at ``offset`` in the file."""

    offset: int
    nbytes: int
    digest: CellDigest

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.offset + self.nbytes


def encode_proof(leaves: Iterable[tuple[int, CellDigest]]) -> bytes:
    """Encode the proof for ``leaves``: (size in bytes, digest), in order."""
    return b"".join([nbytes.to_bytes(4, "little") + digest for nbytes, digest in leaves])


def decode_proof(data: Buffer) -> list[Leaf]:
    """Decode the leaves of a proof. Raises Refused for an invalid proof."""
    count, rest = divmod(len(data), RECORD_BYTES)
    if rest or not MIN_LEAVES <= count <= MAX_LEAVES:
        raise Refused(
            f"a proof cannot have {len(data)} bytes: it has {MIN_LEAVES} to {MAX_LEAVES} records of "
            f"{RECORD_BYTES} bytes"
        )
    leaves = as_leaves(data)
    if not all(1 <= leaf.nbytes <= MAX_LEAF_BYTES for leaf in leaves) or leaves[0].nbytes != DATA_OFFSET:
        raise Refused(f"a leaf does not have 1 to {MAX_LEAF_BYTES} bytes, or the first leaf is not a header")
    return leaves


def as_leaves(data: Buffer) -> list[Leaf]:
    """Split records into leaves, without any checks."""
    records = list(_RECORD.iter_unpack(data))
    offsets = accumulate((nbytes for nbytes, _ in records), initial=0)
    return [Leaf(at, nbytes, CellDigest(digest)) for at, (nbytes, digest) in zip(offsets, records, strict=False)]


def find_proof(tail: Buffer, size: int) -> bytes | None:
    """Find the proof in ``tail``, the last bytes of a file of ``size`` bytes. Return None if it is not complete.

    The file size determines the number of records, because the sizes of the leaves and of the proof add up to the file
    size for only one number.
    """
    count = min(len(tail) // RECORD_BYTES, MAX_LEAVES)
    records, covered = memoryview(tail)[len(tail) - count * RECORD_BYTES :], 0
    for at in range((count - 1) * RECORD_BYTES, -1, -RECORD_BYTES):
        covered += _RECORD.unpack_from(records, at)[0] + RECORD_BYTES
        if covered >= size:
            return bytes(records[at:]) if covered == size else None
    return None


def read_proof(read: Callable[[int, int], Buffer], size: int, name: BlobHash) -> bytes:
    """Read and verify the proof of the blob ``name``, a file of ``size`` bytes.

    ``read`` is called with (offset, size) for increasingly long parts at the end of the file. Raises Refused if there
    is no proof with that hash, and any error that ``read`` raises.
    """
    most = min(size - DATA_OFFSET, MAX_LEAVES * RECORD_BYTES)
    wanted, proof = min(_FIRST_TAIL, most), None
    while proof is None and wanted > 0:
        proof = find_proof(read(size - wanted, wanted), size)
        wanted = min(wanted * _MORE, most) if wanted < most else 0
    if proof is None or proof_name(proof) != name:
        raise Refused("its proof does not match the hash in its name")
    return proof


class LeafCheck:
    """Compares a blob's bytes, passed in order, with its leaves. ``wrong``: the leaves that have differed so far."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.wrong: list[Leaf] = []
        self._rest = iter(leaves)
        self._leaf = next(self._rest, None)
        self._hasher: Hasher | None = None
        self._at = 0

    def update(self, data: memoryview) -> None:
        """Process the next bytes. Bytes after the last leaf are ignored."""
        while len(data) and self._leaf is not None:
            part = data[: self._leaf.end - self._at]
            data = data[len(part) :]
            self._at += len(part)
            if self._hasher is None and len(part) == self._leaf.nbytes:
                self._close(self._leaf, cell_digest(part))
                continue
            self._hasher = self._hasher or Hasher()
            self._hasher.update(part)
            if self._at == self._leaf.end:
                self._close(self._leaf, CellDigest(self._hasher.digest()))

    def _close(self, leaf: Leaf, digest: CellDigest) -> None:
        if digest != leaf.digest:
            self.wrong.append(leaf)
        self._leaf, self._hasher = next(self._rest, None), None
