"""Checkpoints with real blobs and extents, made of numpy arrays without torch and stored as a save stores them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from casckpt.base.digest import Buffer
from casckpt.contents import blobs, manifests
from casckpt.errors import Refused
from casckpt.format.blob import order
from casckpt.format.blob_writer import BlobWriter, buffer_bytes, padded
from casckpt.format.digest import cell_digest
from casckpt.format.extents import ExtentTable, build
from casckpt.format.keys import blob_key
from casckpt.format.manifest import Manifest
from casckpt.format.names import BlobHash, CellDigest, TxId
from casckpt.format.proof import LeafCheck, decode_proof, read_proof
from casckpt.format.regions import Region, cut, full_box
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import TENSOR, Entry
from casckpt.history.commits import Commit
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.frames import locate
from tests.support.geometry import stored_cell
from tests.support.repositories import blob_hash, commit_draft, draft

Arrays = Mapping[str, npt.NDArray[np.generic]]
CELL = 4096  # bytes
Known = dict[CellDigest, tuple[BlobRef, int]]


def array(seed: int, cells: float = 2.0, dtype: str = "float32") -> npt.NDArray[np.generic]:
    """Return random numbers that fill this many cells. The same seed yields the same bytes."""
    data = np.random.default_rng(seed).bytes(int(cells * CELL))
    return np.frombuffer(data, dtype=dtype)


def save_arrays(
    repo: Repository,
    arrays: Arrays,
    run: str = "run",
    step: int = 0,
    *,
    reuse: Commit | None = None,
    cell: int = CELL,
    known: Known | None = None,
    **fields: object,
) -> Commit:
    """Save ``arrays`` as a checkpoint. It reuses the cells in ``reuse`` and stores the others in one new blob.

    ``known`` overrides the locations found in ``reuse``.
    """
    txid = repo.new_txid(run, step)
    known = known or (known_cells(repo, reuse) if reuse else {})
    new = _new_cells(arrays, known, cell)
    ref, places = put_cells(repo, txid, new)
    known = known | {digest: (ref, offset) for digest, offset in places.items()}
    refs = list(dict.fromkeys(known[digest][0] for _, _, digest, _ in _cells(arrays, cell)))
    streams = {(TENSOR, name, 0, None): _stream(name, data, known, refs, cell) for name, data in sorted(arrays.items())}
    made = draft(refs, run, step, cell_bytes=cell, streams=streams, created_at=repo.clock())
    return commit_draft(repo, txid, made, **fields)


def save_parts(repo: Repository, *parts: Arrays, run: str = "run", step: int = 0, **fields: object) -> Commit:
    """Save a checkpoint of all ``parts``. Each part gets its own blob."""
    uploader, known = repo.new_txid(run, step), Known()
    for arrays in parts:
        ref, places = put_cells(repo, uploader, _new_cells(arrays, {}))
        known |= {digest: (ref, offset) for digest, offset in places.items()}
    every = {name: data for arrays in parts for name, data in arrays.items()}
    return save_arrays(repo, every, run, step, known=known, **fields)  # type: ignore[arg-type]  # of the record


def known_cells(repo: Repository, commit: Commit) -> Known:
    """Return the locations of a checkpoint's cells."""
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
    """Put a blob of ``cells`` (dtype, bytes). Return the location of each."""
    if not cells:
        return BlobRef(blob_hash("no blob"), 0, uploader), {}
    name, data, offsets = blob_of(cells)
    blobs.put(repo, uploader, name, data)
    return BlobRef(name, len(data), uploader), offsets


def blob_of(cells: Mapping[CellDigest, tuple[str, bytes]]) -> tuple[BlobHash, bytes, dict[CellDigest, int]]:
    """Return the name and bytes of a blob of ``cells`` (dtype, bytes), and the location of each cell."""
    ordered = sorted(cells.items(), key=lambda item: order(item[1][0]))
    buffer = memoryview(bytearray(buffer_bytes(padded(sum(len(data) for _, data in cells.values())))))
    writer, offsets = BlobWriter(buffer), {}
    for digest, (dtype, data) in ordered:
        at = offsets[digest] = writer.place(len(data))
        buffer[at : at + len(data)] = data
        writer.add(dtype, len(data), digest)
    name, size = writer.finish()
    return name, bytes(buffer[:size]), offsets


def is_blob(name: BlobHash, data: Buffer) -> bool:
    """Report whether ``data`` is exactly the blob of that name."""
    try:
        leaves = decode_proof(read_proof(lambda offset, nbytes: data[offset : offset + nbytes], len(data), name))
    except Refused:
        return False
    check = LeafCheck(leaves)
    check.update(memoryview(data))
    return not check.wrong


def read_arrays(repo: Repository, commit: Commit, *, but: Collection[str] = ()) -> dict[str, bytes]:
    """Compare each cell with its digest. Return the bytes of every tensor except those in ``but``."""
    manifest = manifests.get(repo, commit)
    return {entry.key: _read(repo, manifest, entry) for entry in manifest.entries if entry.key not in but}


def content(arrays: Arrays) -> dict[str, bytes]:
    """Return what `read_arrays` returns for ``arrays``."""
    return {name: data.tobytes() for name, data in arrays.items()}


def only_blob(repo: Repository, commit: Commit) -> str:
    """Return the key of the only blob that the save of this checkpoint wrote."""
    (ref,) = (ref for ref in manifests.get(repo, commit).blobs if ref.uploader == commit.txid)
    return blob_key(ref.uploader, ref.hash)


def flip(repo: Repository, key: str, position: int) -> None:
    """Change one byte of a stored object."""
    data = bytearray(repo.storage.get(key, limit=1 << 30))
    data[position] ^= 0x01
    repo.storage.replace(key, bytes(data))


def _cells(arrays: Arrays, cell: int) -> list[tuple[str, Region, CellDigest, bytes]]:
    found = []
    for name, array in sorted(arrays.items()):
        data, size = array.tobytes(), array.dtype.itemsize
        for lo, hi in cut(0, array.size, cell // size):
            part = data[lo * size : hi * size]
            found.append((name, Region(full_box(array.shape), lo, hi), cell_digest(part), part))
    return found


def _new_cells(arrays: Arrays, known: Known, cell: int = CELL) -> dict[CellDigest, tuple[str, bytes]]:
    found = _cells(arrays, cell)
    return {digest: (str(arrays[name].dtype), part) for name, _, digest, part in found if digest not in known}


def _stream(
    name: str, array: npt.NDArray[np.generic], known: Known, refs: list[BlobRef], cell: int = CELL
) -> tuple[str, ExtentTable]:
    places = []
    for _, region, digest, part in _cells({name: array}, cell):
        ref, offset = known[digest]
        places.append(stored_cell(region, refs.index(ref), offset, len(part), digest))
    size = array.dtype.itemsize
    return str(array.dtype), build(array.shape, size, cell // size, places)


def _read(repo: Repository, manifest: Manifest, entry: Entry) -> bytes:
    table = manifest.extents(entry)
    out = bytearray(entry.nbytes)
    for place in table.stored_cells():
        memoryview(out)[place.lo * table.itemsize :][: place.nbytes] = locate(repo, manifest, place).read()
    return bytes(out)
