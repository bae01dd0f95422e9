"""Stores a folder or file of another program as it is."""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Unpack
from zlib import crc32

from casckpt.base.names import check_keywords
from casckpt.base.progress import Progress
from casckpt.base.text import is_url, listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput
from casckpt.format import dtypes
from casckpt.format.regions import Shape
from casckpt.format.sections.index import TENSOR
from casckpt.format.sections.recipe import NOTE, FilePiece, Item, ItemKind, encode_recipe
from casckpt.format.tree import TENSOR as TENSOR_LEAF
from casckpt.frontends.files.cutting import Cut, Span, cut
from casckpt.frontends.files.listing import SMALL, Found, Listing, list_folder
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.loading.comparison import holds
from casckpt.saving.local_entries import LocalEntry
from casckpt.saving.options import ImportArguments, SaveOptions
from casckpt.saving.prepare import Prepared
from casckpt.saving.rounds import ComputedState, Rounds, save_in_rounds
from casckpt.store.store import Store
from casckpt.tensors.file_memory import FileMemory, FileRange
from casckpt.tensors.state import check_key, encode_tree
from casckpt.tensors.untrusted import MISREAD

log = logging.getLogger(__name__)

_PACK, _ENDS_PACK = (256 << 10, 4 << 20), 8  # the sizes from which a pack may end at one path of eight, and at any
_MOST_METADATA = 256 << 20
STEP: Final = "{step}"
_LEAST_STEP: Final = 100  # in a path, smaller numbers are rather those of ranks


def import_files(
    store: AnyStore,
    path: str | os.PathLike[str] | Listing,
    *,
    step: int,
    follow_links: bool = False,
    **options: Unpack[ImportArguments],
) -> Checkpoint:
    """Store a folder or file of any program as it is. An export with ``format="files"`` gives it back byte for byte.

    Keeps names, permission bits, empty folders, and links. A tensor that is stored whole and contiguous (safetensors,
    torch.save, DCP, npy, npz) is an entry of its own: it is stored once across steps, files, and saves. No pickle is
    run. Each file is read once, in bounded memory.

    ``path``: a local path, or what `list_folder` returned for it. ``follow_links``: replace links that lead out of the
    folder by what they lead to. ``options``: those of `ImportArguments`.

    Raises NotFound, and InvalidInput, with the path, for what cannot be stored. Raises Conflict if another program
    changes the folder meanwhile, so that no mixture is stored, or if the step exists. Raises StorageError.
    """
    check_keywords("import_files", options, ImportArguments)
    opened = as_store(store)
    found = path if isinstance(path, Listing) else list_folder(path, follow_links=follow_links)
    return save_listing(opened, found, step=step, **options)


def save_listing(
    opened: Store, found: Listing, *, step: int, whole: bool = False, **options: Unpack[ImportArguments]
) -> Checkpoint:
    """Store what was listed, as `import_files` does. ``whole``: refuse truncated files."""
    if not is_url(opened.url) and Path(opened.url).resolve().is_relative_to(found.path.resolve()):
        raise InvalidInput(f"{found.path} contains the store itself: move the store, or import a folder beside it")
    named = os.fsencode(found.path.absolute()).decode(errors="replace")
    options.setdefault("lineage", {"imported_from": {"path": named}})
    files = sum(one.item.kind == ItemKind.FILE for one in found.items)
    described = {"files": files, "bytes": found.nbytes, "listing": found.digest}
    options["metadata"] = {**(options.get("metadata") or {}), "folder": described}
    progress = Progress(options.pop("progress", None))
    checked = SaveOptions(step=step, no_dist=True, **options).checked()
    layout = _Layout(step, cuts_small=whole)
    layout.add_all(found)
    if layout.truncated and whole:
        raise InvalidInput(f"{listed(layout.truncated)} seem to be truncated")
    if layout.truncated:
        log.warning("%s: %s seem to be truncated, and are stored as they are", found.path, listed(layout.truncated))
    prepared = layout.prepared()

    def rounds() -> Iterator[Prepared]:
        yield prepared
        found.check_unchanged()  # before the commit

    note = encode_recipe(layout.items)
    state = ComputedState(prepared.streams, prepared.tree, None, lambda _: Rounds({}, rounds()), {NOTE: note})
    return Checkpoint(opened.repository, save_in_rounds(opened.repository, state, checked, progress))


def is_stored(checkpoint: Checkpoint, found: Listing) -> bool:
    """Return whether a checkpoint holds what was listed. Reads the files only if its listing was a different one.

    Raises InvalidInput if it holds no folder, Conflict, and StorageError.
    """
    described = checkpoint.metadata.get("folder")
    if not isinstance(described, dict):
        raise InvalidInput(
            f"{checkpoint.run}@{checkpoint.step} does not hold a folder of files: choose a different run"
        )
    if described.get("listing") == found.digest:
        return True
    layout = _Layout(checkpoint.step)
    layout.add_all(found)
    contents = Contents.open(checkpoint.repo, checkpoint.commit)
    is_same = contents.manifest.body.notes.get(NOTE) == encode_recipe(layout.items)
    return is_same and holds(contents, layout.prepared().sources)


@dataclass
class _Entry:
    """An entry to store: its bytes, in order. The shape of a stream of bytes is known only at the end."""

    key: str
    dtype: str = "uint8"
    shape: Shape | None = None
    ranges: list[FileRange] = field(default_factory=list)
    nbytes: int = 0

    def source(self) -> LocalEntry:
        """Return the entry for a save."""
        shape = (self.nbytes,) if self.shape is None else self.shape
        memory = FileMemory(self.ranges, dtypes.itemsize(self.dtype))
        return LocalEntry(TENSOR, self.key, 0, None, self.dtype, shape, memory)


class _Layout:
    """Which entries hold the bytes of which files.

    Keys are paths, followed by the names of tensors. Where a path has the step in it, the key does not, so that later
    steps have the same keys.
    """

    def __init__(self, step: int, *, cuts_small: bool = False) -> None:
        self._cuts_small = cuts_small  # to find those that are truncated
        self.items: list[Item] = []
        self.truncated: list[str] = []
        self._step = re.compile(rf"(?<!\d){step}(?!\d)" if step >= _LEAST_STEP else "(?!)")
        self._entries: dict[str, _Entry] = {}
        self._numbers: dict[str, int] = {}
        self._pack: _Entry | None = None

    def add_all(self, found: Listing) -> None:
        """Add all items of a folder."""
        if any(STEP in one.item.path for one in found.items):
            self._step = re.compile("(?!)")
        archives = _archives(found)
        for one in found.items:
            pieces = self._pieces(one, archives.get(one.item.path, ())) if one.size else ()
            self.items.append(replace(one.item, pieces=tuple(pieces)))

    def prepared(self) -> Prepared:
        """Return what to save."""
        sources = [entry.source() for entry in self._entries.values()]
        return Prepared(sources, [], [], encode_tree(dict.fromkeys(self._entries, TENSOR_LEAF)))

    def _pieces(self, one: Found, archives: Sequence[Span]) -> Iterator[FilePiece]:
        found = cut(one, one.size, archives) if one.size >= SMALL or self._cuts_small else Cut()
        if not found.is_whole:
            self.truncated.append(one.item.path or one.place.name)
        if one.size < SMALL:
            yield self._piece(self._packed(one.item.path), one, 0, one.size)
            return
        base, at = self._step.sub(STEP, one.item.path) or "file", 0
        stream = _Entry(base)
        for tensor in found.tensors:
            key = f"{base}/{tensor.name}"
            if key in self._entries or not _fits(key):
                continue  # its bytes remain in the stream
            if at < tensor.start:
                yield self._piece(stream, one, at, tensor.start)
            yield self._piece(_Entry(key, tensor.dtype, tensor.shape), one, tensor.start, tensor.end)
            at = tensor.end
        if at < one.size:
            yield self._piece(stream, one, at, one.size)

    def _packed(self, path: str) -> _Entry:
        """Return the entry of a small file. Packs end at certain paths, so that a new file changes only one of them."""
        pack = self._pack
        if pack is None or pack.nbytes >= (_PACK[0] if crc32(path.encode()) % _ENDS_PACK == 0 else _PACK[1]):
            pack = self._pack = _Entry(f"/{self._step.sub(STEP, path)}")  # no path begins with a slash
        return pack

    def _piece(self, entry: _Entry, one: Found, start: int, end: int) -> FilePiece:
        """Add the bytes [start, end) of a file to an entry."""
        self._entries.setdefault(entry.key, entry)
        number = self._numbers.setdefault(entry.key, len(self._numbers))
        piece = FilePiece(number, entry.nbytes, end - start)
        entry.ranges.append(FileRange(one, start, end - start))
        entry.nbytes += end - start
        return piece


def _fits(key: str) -> bool:
    try:
        return bool(check_key(key))
    except InvalidInput:
        return False


def _archives(found: Listing) -> dict[str, list[Span]]:
    """Return where the files of DCP hold archives, by path, from the metadata in their folders."""
    archives = defaultdict[str, list[Span]](list)
    for one in found.items:
        folder, _, name = one.item.path.rpartition("/")
        if name != ".metadata" or not 0 < one.size <= _MOST_METADATA:
            continue
        from casckpt.frontends.dcp.folder import read_metadata  # takes a while to import

        data = bytearray(one.size)
        one.read_into(0, memoryview(data))
        with suppress(*MISREAD):  # InvalidInput, too
            places = read_metadata(bytes(data), str(one.place), anything=False).storage_data or {}
            for index, place in places.items():
                offsets = "" if index.offset is None else f"@{','.join(map(str, index.offset))}"
                path = f"{folder}/{place.relative_path}" if folder else place.relative_path
                archives[path].append(Span(place.offset, place.length, f"{index.fqn}{offsets}/"))
    return archives
