"""Checkpoints with real blobs and extents, made of numpy arrays: what a save leaves, without torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from casckpt.format.blob import DATA_OFFSET, encode_header, order
from casckpt.format.digest import cell_digest, hex_digest
from casckpt.format.extents import ExtentTable, build
from casckpt.format.keys import blob_key
from casckpt.format.manifest import Manifest
from casckpt.format.names import BlobHash, CellDigest, TxId
from casckpt.format.regions import Region, cut, full_box
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import TENSOR, StreamEntry
from casckpt.repository import blobs, manifests
from casckpt.repository.commits import Commit
from casckpt.repository.repository import Repository
from tests.support.geometry import stored_cell
from tests.support.repositories import commit_draft, draft

Arrays = Mapping[str, npt.NDArray[np.generic]]
CELL = 4096  # bytes
Known = dict[CellDigest, tuple[BlobRef, int]]


def array(seed: int, cells: float = 2.0, dtype: str = "float32") -> npt.NDArray[np.generic]:
    """So many cells of random numbers; the same seed gives the same bytes."""
    data = np.random.default_rng(seed).bytes(int(cells * CELL))
    return np.frombuffer(data, dtype=dtype)


def save_arrays(
    repo: Repository, arrays: Arrays, run: str = "run", step: int = 0, *, reuse: Commit | None = None, **fields: object
) -> Commit:
    """A checkpoint of ``arrays``: cells that ``reuse`` has are reused, the others lie in one new blob."""
    txid = repo.new_txid(run, step)
    known = known_cells(repo, reuse) if reuse else {}
    new = _new_cells(arrays, known)
    ref, places = put_cells(repo, txid, new)
    known |= {digest: (ref, offset) for digest, offset in places.items()}
    refs = list(dict.fromkeys(known[digest][0] for _, _, digest, _ in _cells(arrays)))
    streams = {(TENSOR, name, 0, None): _stream(name, data, known, refs) for name, data in sorted(arrays.items())}
    made = draft(refs, run, step, cell_bytes=CELL, streams=streams, created_at=repo.clock())
    return commit_draft(repo, txid, made, **fields)


def known_cells(repo: Repository, commit: Commit) -> Known:
    """Where the cells of a checkpoint lie."""
    manifest = manifests.get(repo, commit)
    return {
        place.digest: (manifest.blob(place.blob), place.offset)
        for entry in manifest.entries
        for table in [manifest.extents(entry)]
        for place in table.stored_cells()
    }


def put_cells(
    repo: Repository, uploader: TxId, cells: Mapping[CellDigest, tuple[str, bytes]]
) -> tuple[BlobRef, dict[CellDigest, int]]:
    """A blob of ``cells`` (dtype, bytes), and where each lies in it."""
    ordered = sorted(cells.items(), key=lambda item: order(item[1][0]))
    offsets, end = {}, DATA_OFFSET
    for digest, (_, data) in ordered:
        offsets[digest] = end
        end += len(data)
    header = encode_header([(dtype, len(data)) for _, (dtype, data) in ordered])
    whole = b"".join((header, *(data for _, (_, data) in ordered)))
    name = BlobHash(hex_digest(whole))
    if cells:
        blobs.put(repo, uploader, name, whole)
    return BlobRef(name, len(whole), uploader), offsets


def read_arrays(repo: Repository, commit: Commit) -> dict[str, bytes]:
    """The bytes of every tensor, each cell compared with its digest."""
    manifest = manifests.get(repo, commit)
    return {entry.key: _read(repo, manifest, entry) for entry in manifest.entries}


def content(arrays: Arrays) -> dict[str, bytes]:
    """What `read_arrays` gives for ``arrays``."""
    return {name: data.tobytes() for name, data in arrays.items()}


def only_blob(repo: Repository, commit: Commit) -> str:
    """Key of the blob that a checkpoint's own save wrote."""
    (ref,) = (ref for ref in manifests.get(repo, commit).blobs if ref.uploader == commit.txid)
    return blob_key(ref.uploader, ref.hash)


def flip(repo: Repository, key: str, position: int) -> None:
    """Change one byte of an object behind everybody's back."""
    data = bytearray(repo.storage.get(key, limit=1 << 30))
    data[position] ^= 0x01
    repo.storage.replace(key, bytes(data))


def _cells(arrays: Arrays) -> list[tuple[str, Region, CellDigest, bytes]]:
    found = []
    for name, array in sorted(arrays.items()):
        data, size = array.tobytes(), array.dtype.itemsize
        for lo, hi in cut(0, array.size, CELL // size):
            part = data[lo * size : hi * size]
            found.append((name, Region(full_box(array.shape), lo, hi), cell_digest(part), part))
    return found


def _new_cells(arrays: Arrays, known: Known) -> dict[CellDigest, tuple[str, bytes]]:
    return {digest: (str(arrays[name].dtype), part) for name, _, digest, part in _cells(arrays) if digest not in known}


def _stream(name: str, array: npt.NDArray[np.generic], known: Known, refs: list[BlobRef]) -> tuple[str, ExtentTable]:
    places = []
    for _, region, digest, part in _cells({name: array}):
        ref, offset = known[digest]
        places.append(stored_cell(region, refs.index(ref), offset, len(part), digest))
    size = array.dtype.itemsize
    return str(array.dtype), build(array.shape, size, CELL // size, places)


def _read(repo: Repository, manifest: Manifest, entry: StreamEntry) -> bytes:
    table = manifest.extents(entry)
    out = bytearray(entry.nbytes)
    for place in table.stored_cells():
        ref = manifest.blob(place.blob)
        part = memoryview(out)[place.lo * table.itemsize :][: place.nbytes]
        with repo.storage.open(blob_key(ref.uploader, ref.hash)) as reader:
            reader.read_into(place.offset, [part])
        assert cell_digest(part) == place.digest
    return bytes(out)
