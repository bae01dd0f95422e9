"""One damaged blob, put together again: leaf by leaf from its copies, cell by cell from equal cells, its proof anew.

Bytes are taken only where they have the digest that the proof, or a live checkpoint, gives them; and the blob is right
only if all of it has the name that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from casckpt.base.digest import Buffer
from casckpt.errors import InvalidInput, NotFound, Refused, StorageError
from casckpt.format.blob import DATA_OFFSET, decode_header, encode_header, order
from casckpt.format.blob_writer import BlobWriter, buffer_bytes, padded
from casckpt.format.digest import cell_digest, proof_name
from casckpt.format.dtypes import coded_width, stored_name
from casckpt.format.encodings import decode, encode_delta, encode_planes
from casckpt.format.keys import blob_key
from casckpt.format.names import CellDigest
from casckpt.format.proof import Leaf, LeafCheck, as_leaves, decode_proof, encode_proof, read_proof
from casckpt.format.sections.blobs import BlobRef
from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader, ShortObject
from casckpt.upkeep.repair.cell_sources import UNREADABLE, BlobCopies, Cells, EncodedSource, LiveCell, take_cell

_PAGE = DATA_OFFSET


@dataclass
class Mending:
    """What there is of the blob ``ref``. ``data``: its bytes, as far as they could be had.

    ``leaves``: proved by its name; none where no proof could be had. ``wrong``: those that ``data`` lacks. ``cells``:
    of live checkpoints, in order; ``missing``: those that ``data`` lacks.
    """

    ref: BlobRef
    data: bytearray
    leaves: list[Leaf] = field(default_factory=list)
    wrong: list[Leaf] = field(default_factory=list)
    cells: Sequence[LiveCell] = ()
    missing: frozenset[LiveCell] = frozenset()

    @property
    def is_whole(self) -> bool:
        """Is ``data`` the blob?"""
        return bool(self.leaves) and not self.wrong

    @property
    def is_untouched(self) -> bool:
        """Is it, too, all that live checkpoints say that it is?"""
        return not self.missing and all(map(self.is_right, self.leaves))

    def part(self, offset: int, nbytes: int) -> memoryview:
        """Return some of the bytes, to be looked at or written."""
        return memoryview(self.data)[offset : offset + nbytes]

    def is_right(self, leaf: Leaf) -> bool:
        """Tell whether ``data`` has a leaf."""
        return cell_digest(self.part(leaf.offset, leaf.nbytes)) == leaf.digest

    def take_proof(self, proof: bytes) -> None:
        """Put a proof that has the hash in the name, and look what of it is there. Raises Refused for no blob's."""
        self.leaves = decode_proof(proof)
        self.data[self.leaves[-1].end :] = proof
        check = LeafCheck(self.leaves)
        check.update(memoryview(self.data))
        self.wrong = check.wrong

    def become(self, data: memoryview) -> None:
        """Take ``data``, which has the right name."""
        self.data[:] = data
        self.take_proof(read_proof(lambda offset, nbytes: data[offset : offset + nbytes], len(data), self.ref.hash))


def mend_from_copies(repo: Repository, ref: BlobRef, copies: BlobCopies) -> Mending:
    """Put a damaged blob together from what is left of it and of its copies, leaf by leaf."""
    found = Mending(ref, _remains(repo, ref))
    try:
        found.take_proof(_proof(found.data, ref, copies))
    except Refused:
        return found
    for reader in copies.readers(ref) if found.wrong else ():
        _take_leaves(reader, found)
        if not found.wrong:
            break
    return found


@dataclass(frozen=True)
class CellSupply:
    """All that a blob can be mended from. ``misframed``: blobs whose leaves are right, and frames may be wrong."""

    cells: Cells
    copies: BlobCopies
    misframed: Container[BlobRef] = ()

    def mend(self, repo: Repository, ref: BlobRef, live: Iterable[LiveCell]) -> Mending:
        """Put a damaged blob together, its ``live`` cells from wherever equal ones are, and then what follows."""
        found = mend_from_copies(repo, ref, self.copies)
        found.cells = sorted(live, key=lambda cell: (cell.offset, cell.nbytes, order(cell.dtype)))
        wrong = [cell for cell in found.cells if not self._is_right(found, cell)]
        found.missing = frozenset(cell for cell in wrong if not self._take_cell(found, cell))
        found.wrong = [leaf for leaf in found.wrong if not found.is_right(leaf)]
        if not found.is_whole and not found.missing:
            _write_anew(found)
        if not found.is_whole and found.leaves:
            found.wrong = [leaf for leaf in found.wrong if not self._take_leaf(found, leaf)]
        if not found.leaves:
            _prove_anew(found)
        return found

    def plain(self, cell: LiveCell) -> bytearray | None:
        """Return the bytes of a cell that is coded, from wherever it can be had."""
        return None if cell.coded is None else self.fetch(cell.digest, cell.coded.nbytes)

    def fetch(self, digest: CellDigest, nbytes: int) -> bytearray | None:
        """Return the bytes of a cell, from wherever it can be had."""
        plain = bytearray(nbytes)
        return plain if self.cells.fetch(digest, memoryview(plain)) else None

    def _is_right(self, found: Mending, cell: LiveCell) -> bool:
        """Tell whether the bytes of a cell are there."""
        part = found.part(cell.offset, cell.nbytes)
        if cell.coded is None:
            return cell_digest(part) == cell.digest
        is_trusted = found.leaves and found.ref not in self.misframed
        if is_trusted and not any(cell.offset < one.end and one.offset < cell.end for one in found.wrong):
            return True
        return self._makes(part, cell, cell.coded)

    def _makes(self, frame: memoryview, cell: LiveCell, coded: EncodedSource) -> bool:
        """Tell whether a frame makes a cell, as far as its base can be had."""
        base = None if coded.base is None else self.fetch(coded.base, coded.nbytes)
        plain = bytearray(coded.nbytes)
        try:
            decode(frame, memoryview(plain), None if base is None else memoryview(base))
        except InvalidInput:
            return False
        return cell_digest(plain) == cell.digest

    def _take_cell(self, found: Mending, cell: LiveCell) -> bool:
        """Put a cell right, from an equal one or from a copy of the blob; one that is coded, coded again."""
        part = found.part(cell.offset, cell.nbytes)
        if cell.coded is not None:
            return self._take_frame(part, cell, cell.coded)
        if self.cells.fetch(cell.digest, part):
            return True
        return any(take_cell(reader, cell.offset, part, cell.digest) for reader in self.copies.readers(found.ref))

    def _take_frame(self, part: memoryview, cell: LiveCell, coded: EncodedSource) -> bool:
        base = None if coded.base is None else self.fetch(coded.base, coded.nbytes)
        plain = self.plain(cell)
        if plain is None or (base is None and coded.base is not None):
            return False
        frame = _encode(memoryview(plain), coded_width(coded.dtype), base)
        if frame is None or len(frame) != cell.nbytes:
            return False
        part[:] = frame
        return True

    def _take_leaf(self, found: Mending, leaf: Leaf) -> bool:
        """Put a leaf right that is no live cell: the header, padding, or a dead cell that lives elsewhere."""
        part = found.part(leaf.offset, leaf.nbytes)
        guess = _without_padding(found, leaf) if leaf.offset else _header(found)
        if cell_digest(guess) != leaf.digest:
            return self.cells.fetch(leaf.digest, part)
        part[:] = guess
        return True


def _encode(plain: memoryview, width: int, base: bytearray | None) -> bytes | None:
    return encode_planes(plain, width) if base is None else encode_delta(plain, width, memoryview(base))


def _remains(repo: Repository, ref: BlobRef) -> bytearray:
    """Read the bytes of a damaged blob, zeros where there are none."""
    data = bytearray(ref.size)
    try:
        with repo.storage.open(blob_key(ref.uploader, ref.hash)) as reader:
            have = min(reader.size, ref.size)
            reader.read_into(0, [memoryview(data)[:have]])
    except (NotFound, Refused, StorageError, ShortObject):
        pass  # then every byte must come from elsewhere
    return data


def _proof(data: bytearray, ref: BlobRef, copies: BlobCopies) -> bytes:
    """Find the proof, in what is left of the blob or in a copy. Raises Refused."""
    try:
        return read_proof(lambda offset, nbytes: data[offset : offset + nbytes], ref.size, ref.hash)
    except Refused:
        for reader in copies.readers(ref):
            try:
                return read_proof(_reading(reader), ref.size, ref.hash)
            except UNREADABLE:
                continue
        raise


def _reading(reader: Reader) -> Callable[[int, int], bytearray]:
    def read(offset: int, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        reader.read_into(offset, [memoryview(data)])
        return data

    return read


def _take_leaves(reader: Reader, found: Mending) -> None:
    """Take what a copy has of the leaves that are wrong."""
    for run in list(_runs(found.wrong)):
        first = run[0].offset
        part = memoryview(bytearray(run[-1].end - first))
        try:
            have = reader.size - first
            reader.read_into(first, [part[:have]] if have > 0 else [])
        except UNREADABLE:
            continue
        for leaf in run:
            piece = part[leaf.offset - first : leaf.end - first]
            if cell_digest(piece) == leaf.digest:
                found.part(leaf.offset, leaf.nbytes)[:] = piece
                found.wrong.remove(leaf)


def _runs(leaves: Sequence[Leaf]) -> Iterator[list[Leaf]]:
    """Yield leaves that follow each other together: one read for each."""
    run: list[Leaf] = []
    for leaf in leaves:
        if run and run[-1].end != leaf.offset:
            yield run
            run = []
        run.append(leaf)
    if run:
        yield run


def _header(found: Mending) -> bytes:
    """Return the header that the live cells tell of; what is between two of them belongs to the first one's run."""
    starts: list[tuple[str, int]] = []
    for cell in found.cells:
        if not starts or stored_name(cell.dtype) != stored_name(starts[-1][0]):
            starts.append((cell.dtype, cell.offset if starts else DATA_OFFSET))
    ends = [start for _, start in starts[1:]] + [found.leaves[-1].end]
    runs = [(dtype, end - start) for (dtype, start), end in zip(starts, ends, strict=False)]
    try:
        return encode_header(runs, len(found.leaves))
    except InvalidInput:
        return b""


def _without_padding(found: Mending, leaf: Leaf) -> bytes:
    """Return a leaf with zeros where no live cell lies and the next one begins at a page."""
    data, end = bytearray(found.part(leaf.offset, leaf.nbytes)), leaf.offset
    for cell in (*found.cells, LiveCell(leaf.end, 0, leaf.digest, "")):
        if end < cell.offset <= leaf.end and cell.offset % _PAGE == 0 and cell.offset - end < _PAGE:
            data[end - leaf.offset : cell.offset - leaf.offset] = bytes(cell.offset - end)
        end = max(end, cell.offset + cell.nbytes)
    return bytes(data)


def _write_anew(found: Mending) -> None:
    """Write the blob as casckpt would if the live cells are all that it holds: header, padding and proof come back."""
    buffer = memoryview(bytearray(buffer_bytes(padded(found.ref.size))))
    writer = BlobWriter(buffer)
    for cell in found.cells:
        if cell.offset != place_of(writer, cell):
            if cell.offset < writer.end:
                continue  # entries of several dtypes share it
            return  # there were dead cells in between
        put(writer, buffer, cell, found.part(cell.offset, cell.nbytes))
    try:
        name, size = writer.finish()
    except InvalidInput:
        return
    if (name, size) == (found.ref.hash, found.ref.size):
        found.become(buffer[:size])


def place_of(writer: BlobWriter, cell: LiveCell) -> int:
    """Return where a cell comes to lie if it is written next."""
    return writer.end if cell.coded else writer.place(cell.nbytes)


def put(writer: BlobWriter, buffer: memoryview, cell: LiveCell, data: Buffer) -> int:
    """Write what lies in a blob of a cell; return where."""
    at = place_of(writer, cell)
    buffer[at : at + cell.nbytes] = data
    if cell.coded:
        writer.add_frame(cell.nbytes)
    else:
        writer.add(cell.dtype, cell.nbytes, cell.digest)
    return at


def _prove_anew(found: Mending) -> None:
    """Make the proof again from the bytes it is of, and from what is left of it: the lengths, but for one at most."""
    data, size = found.data, found.ref.size
    try:
        place = DATA_OFFSET + sum(nbytes for _, nbytes in decode_header(bytes(data[:DATA_OFFSET]), size))
    except Refused:
        return
    told = as_leaves(data[place:])
    lengths = [leaf.nbytes for leaf in told]
    excess = sum(lengths) - place
    if excess:
        wrong = next((number for number, leaf in enumerate(told) if leaf.end > place or not found.is_right(leaf)), 0)
        lengths[wrong] -= excess
    if min(lengths) < 1:
        return
    made, start = [], 0
    for nbytes in lengths:
        made.append((nbytes, cell_digest(found.part(start, nbytes))))
        start += nbytes
    proof = encode_proof(made)
    if proof_name(proof) == found.ref.hash:
        found.take_proof(proof)
