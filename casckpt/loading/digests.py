"""Digests of tensors, which say nothing of how they were saved: BLAKE3 of the bytes of a tensor in row-major order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from casckpt.base.digest import hex_digest
from casckpt.base.progress import Progress
from casckpt.contents import manifests
from casckpt.format.digest import Hasher
from casckpt.format.extents import DIGEST_BYTES
from casckpt.format.manifest import Manifest
from casckpt.format.sections.index import Entry
from casckpt.history.commits import Commit
from casckpt.loading.arguments import matches, usable_patterns
from casckpt.loading.load import check_used
from casckpt.loading.regions import RegionReader, parts_in_order
from casckpt.repository.repository import Repository


def digests_of(repo: Repository, commit: Commit, keys: Sequence[str] | None, progress: Progress) -> dict[str, str]:
    """Return the digests of a checkpoint's tensors by key. Raises MissingKey, and what `tensor_digests` does."""
    patterns = usable_patterns(keys)

    def compute(_: Commit, manifest: Manifest) -> dict[str, str]:
        chosen = {key: entry for key, entry in manifest.tensors.items() if matches(key, patterns)}
        check_used(manifest, patterns or (), list(manifest.tensors))
        found = tensor_digests(repo, manifest, list(chosen.values()), progress)
        return {key: found[entry.number] for key, entry in chosen.items() if entry.number in found}

    return manifests.use(repo, commit, compute)


def tensor_digests(
    repo: Repository, manifest: Manifest, entries: Sequence[Entry], progress: Progress
) -> dict[int, str]:
    """Return the digests of entries, 64 hex digits each, by number of the entry.

    What was computed before is known to the catalogue, also of other checkpoints with the same cells; the others are
    read, and verified. What was thinned away, and is not known, is left out. Raises Damaged, StorageError.
    """
    manifest.ready([entry.number for entry in entries], ())
    known = {entry.number: _known(repo, manifest, entry) for entry in entries}
    unknown = [entry for entry in entries if known[entry.number] is None and not manifest.lacks(entry)]
    found = {number: digest for number, digest in known.items() if digest is not None}
    for entry, digest in _computed(repo, manifest, unknown, progress):
        repo.catalogue.set_note(_name(manifest, entry), digest.encode())
        found[entry.number] = digest
    return found


def _known(repo: Repository, manifest: Manifest, entry: Entry) -> str | None:
    """Return the digest of an entry, if it has one cell or none, or the catalogue has it."""
    digests = b"".join(extent.digests for extent in manifest.cells(entry).extents)
    if len(digests) <= DIGEST_BYTES:
        return digests.hex() or hex_digest(b"")
    note = repo.catalogue.note(_name(manifest, entry))
    return None if note is None else note.decode()


def _name(manifest: Manifest, entry: Entry) -> str:
    """Return the name of the note that has the digest of all tensors with these cells."""
    form = f"{entry.shape} {entry.itemsize} {manifest.body.cell_bytes} "
    return f"digest/{hex_digest(form.encode() + bytes(manifest.raw_cells(entry)))}"


def _computed(
    repo: Repository, manifest: Manifest, entries: Sequence[Entry], progress: Progress
) -> Iterator[tuple[Entry, str]]:
    reader = RegionReader(repo, manifest, sum(entry.nbytes for entry in entries), progress)
    parts = (part for entry in entries for part in parts_in_order(entry, manifest.body.cell_bytes))
    hasher = Hasher()
    for part, data in reader.read(parts):
        hasher.update(data)
        if part.region.hi == part.entry.numel:
            yield part.entry, hasher.digest().hex()
            hasher = Hasher()
