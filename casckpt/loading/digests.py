"""Tensor digests: the BLAKE3 hash of the bytes in row-major order. It does not depend on how the tensor was saved."""

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
from casckpt.loading.arguments import check_used, matches, usable_patterns
from casckpt.loading.regions import EntrySlice, RegionReader
from casckpt.repository.repository import Repository


def digests_of(repo: Repository, commit: Commit, keys: Sequence[str] | None, progress: Progress) -> dict[str, str]:
    """Return the digests of a checkpoint's tensors, by key. Raises MissingKey, and the errors of `tensor_digests`."""
    patterns = usable_patterns(keys)

    def compute(_: Commit, manifest: Manifest) -> dict[str, str]:
        chosen = {key: entry for key, entry in manifest.tensors.items() if matches(key, patterns)}
        check_used(patterns, manifest.tensors, f"{manifest.body.run}@{manifest.body.step}")
        digests = tensor_digests(repo, manifest, list(chosen.values()), progress)
        return {key: digests[entry.number] for key, entry in chosen.items() if entry.number in digests}

    return manifests.use(repo, commit, compute)


def tensor_digests(
    repo: Repository, manifest: Manifest, entries: Sequence[Entry], progress: Progress
) -> dict[int, str]:
    """Return the digests of entries, by entry number. Each digest has 64 hex digits.

    The catalogue keeps computed digests, which also apply to other checkpoints with the same cells. Entries without
    such a digest are read and verified. A thinned entry is omitted if its digest is not known. Raises Damaged,
    StorageError.
    """
    manifest.ready([entry.number for entry in entries], ())
    known = {entry.number: _known(repo, manifest, entry) for entry in entries}
    unknown = [entry for entry in entries if known[entry.number] is None and not manifest.lacks(entry)]
    digests = {number: digest for number, digest in known.items() if digest is not None}
    for entry, digest in _computed(repo, manifest, unknown, progress):
        repo.catalogue.set_note(_name(manifest, entry), digest.encode())
        digests[entry.number] = digest
    return digests


def _known(repo: Repository, manifest: Manifest, entry: Entry) -> str | None:
    """Return the digest of an entry if it has at most one cell, or if its digest is in the catalogue."""
    digests = b"".join(extent.digests for extent in manifest.cells(entry).extents)
    if len(digests) <= DIGEST_BYTES:
        return digests.hex() or hex_digest(b"")
    note = repo.catalogue.note(_name(manifest, entry))
    return None if note is None else note.decode()


def _name(manifest: Manifest, entry: Entry) -> str:
    """Return the name of the catalogue note. Tensors with the same cells share it."""
    form = f"{entry.shape} {entry.itemsize} {manifest.body.cell_bytes} "
    return f"digest/{hex_digest(form.encode() + bytes(manifest.raw_cells(entry)))}"


def _computed(
    repo: Repository, manifest: Manifest, entries: Sequence[Entry], progress: Progress
) -> Iterator[tuple[Entry, str]]:
    reader = RegionReader(repo, manifest, sum(entry.nbytes for entry in entries), progress)
    windows = reader.windows(EntrySlice(entry, 0, entry.numel) for entry in entries)
    hasher = Hasher()
    for part, data in reader.read(windows):
        hasher.update(data)
        if part.hi == part.entry.numel:
            yield part.entry, hasher.digest().hex()
            hasher = Hasher()
