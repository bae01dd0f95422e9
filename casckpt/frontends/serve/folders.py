"""The files of a checkpoint on a hub, planned from the manifest alone, with their ETags and byte ranges.

An ETag is a hash of a file's first bytes and of the digests of its cells. Computing it does not read any data. It
changes only if the tensors in the file change.
"""

from __future__ import annotations

import logging
import re
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput, MissingKey
from casckpt.format.digest import Hasher
from casckpt.format.manifest import Manifest
from casckpt.format.sections.index import StoredObject
from casckpt.format.sections.recipe import ItemKind
from casckpt.frontends.files.exporting import recipe_of, slices_of
from casckpt.frontends.interchange.safetensors.layout import FileLayout
from casckpt.frontends.interchange.safetensors.planned import FolderPlan
from casckpt.frontends.views.recut import ViewTensor
from casckpt.frontends.views.view import Rules
from casckpt.loading.regions import EntrySlice
from casckpt.store.store import Store

_ONE = re.compile(r"bytes=[ \t]*([0-9]*)-([0-9]*)[ \t]*", re.IGNORECASE)
_DIGITS = 19


class Unsatisfiable(ValueError):
    """A range that does not contain any byte of the file."""


class FileSpan(NamedTuple):
    """Bytes [start, stop) of a file."""

    start: int
    stop: int


def parse_range(header: str | None, size: int) -> FileSpan | None:
    """Return the span that a Range header requests from a file of ``size`` bytes; None for the whole file.

    For several ranges, other units and malformed headers, the result is the whole file, as RFC 9110 (14.2) allows.
    Raises Unsatisfiable.
    """
    match = None if header is None else _ONE.fullmatch(header)
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        start, stop = max(size - _number(last), 0), size
    else:
        start, stop = _number(first), min(_number(last) + 1, size) if last else size
    if start >= stop:
        raise Unsatisfiable(f"{header!r:.80} does not overlap the file, which has {size} bytes")
    return FileSpan(start, stop)


def _number(digits: str) -> int:
    """Convert digits to a number, which is capped above any file size because int() is slow for long strings."""
    return int(digits) if len(digits) <= _DIGITS else 10**_DIGITS


class File:
    """One file of a checkpoint. ``etag``: 40 hex digits, equal for files whose bytes and cell boundaries are equal."""

    def __init__(self, layout: FileLayout, etag: str) -> None:
        self.name, self.etag = layout.name, etag
        self._head = memoryview(layout.head)
        self._sources = [source for tensor in layout.tensors for source in tensor.sources if source.nbytes]
        self._begins = list(accumulate((source.nbytes for source in self._sources), initial=0))

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self._head) + self._begins[-1]

    def wanted(self, span: FileSpan) -> tuple[memoryview, list[EntrySlice], int]:
        """Return the content of ``span``: its bytes of the head, slices of entries, and how many bytes to skip in them.

        The slices are of whole elements, so they may also end after ``span``.
        """
        start, stop = (max(at - len(self._head), 0) for at in span)
        sources, skip = self._elements(start, stop)
        return self._head[span.start : span.stop], sources, skip

    def _elements(self, start: int, stop: int) -> tuple[list[EntrySlice], int]:
        """Return the elements with bytes [start, stop) of the data, and how many bytes to skip in the first."""
        if start >= stop:
            return [], 0
        first, last = bisect_right(self._begins, start) - 1, bisect_left(self._begins, stop)
        sources = [self._cut(number, start, stop) for number in range(first, last)]
        return sources, (start - self._begins[first]) % sources[0].entry.itemsize

    def _cut(self, number: int, start: int, stop: int) -> EntrySlice:
        source, begin = self._sources[number], self._begins[number]
        size = source.entry.itemsize
        lo = max(start - begin, 0) // size
        hi = -(-min(stop - begin, source.nbytes) // size)
        return source._replace(lo=source.lo + lo, hi=source.lo + hi)


_KEPT = 8
_ETAG_BYTES = 20
_ETAG_OF = b"casckpt serve, ETag 1\n"

log = logging.getLogger("casckpt.frontends.serve")


@dataclass(frozen=True)
class ServedFolder:
    """The files of one checkpoint. ``files``: sorted by name. ``tensors``: the tensors in these files."""

    checkpoint: Checkpoint
    manifest: Manifest
    files: Mapping[str, File]
    tensors: tuple[ViewTensor, ...]


@dataclass
class ServedFolders:
    """The most recently used folders."""

    store: Store
    max_shard_size: int | None
    _held: OrderedDict[str, ServedFolder] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _making: Sequence[threading.Lock] = field(default_factory=lambda: [threading.Lock() for _ in range(_KEPT)])

    def held(self, commit: str) -> ServedFolder | None:
        """If the folder of the checkpoint whose id begins with ``commit`` is in memory, return it.

        Otherwise, return None.
        """
        with self._lock:
            return next((folder for id, folder in self._held.items() if id.startswith(commit)), None)

    def of(self, checkpoint: Checkpoint) -> ServedFolder:
        """Return the folder of a checkpoint.

        Raises the errors of a load, and InvalidInput for a value that safetensors cannot hold.
        """
        with self._making[hash(checkpoint.id) % _KEPT]:  # if several requests arrive, only one of them plans the folder
            folder = self.held(checkpoint.id)
            if folder is None or _place(folder.checkpoint) != _place(checkpoint):  # a forged record may name any id
                folder = self._made(checkpoint)
            with self._lock:
                self._held[checkpoint.id] = folder
                self._held.move_to_end(checkpoint.id)
                while len(self._held) > _KEPT:
                    self._held.popitem(last=False)
        return folder

    def drop(self, folder: ServedFolder) -> None:
        """Drop a folder whose bytes could not be read, so that the next request replans it."""
        with self._lock:
            self._held.pop(folder.checkpoint.id, None)

    def _made(self, checkpoint: Checkpoint) -> ServedFolder:
        if checkpoint.holds_files:
            return _stored(checkpoint)
        plan = self._plan(checkpoint)
        files = {file.name: file for file in plan.lay_out(self.max_shard_size)}
        for note in plan.notes:
            log.info("%s: %s", checkpoint, note)
        names, _ = plan.attachments()
        manifest, attached = plan.contents.manifest, (_attached(plan.contents, name) for name in names)
        files |= {file.name: file for file in attached if file.name not in files}
        made = {name: File(file, etag_of(manifest, file)) for name, file in sorted(files.items())}
        return ServedFolder(checkpoint, manifest, made, plan.view.tensors)

    def _plan(self, checkpoint: Checkpoint) -> FolderPlan:
        try:
            return FolderPlan(self.store, checkpoint, Rules(model=True))
        except (InvalidInput, MissingKey) as error:
            log.info("casckpt serves all tensors of %s under their keys: %s", checkpoint, error)
            return FolderPlan(self.store, checkpoint, Rules())


def _stored(checkpoint: Checkpoint) -> ServedFolder:
    """Return the files of another program as they were stored, without links."""
    manifest = Contents.open(checkpoint.repo, checkpoint.commit).manifest
    made = dict[str, File]()
    for one in recipe_of(manifest) or ():
        if one.kind == ItemKind.FILE:
            parts = tuple(ViewTensor(part.entry.key, part.entry, (part,)) for part in slices_of(manifest, [one]))
            file = FileLayout(one.path or "file", b"", parts)
            made[file.name] = File(file, etag_of(manifest, file))
    return ServedFolder(checkpoint, manifest, made, ())


def _place(checkpoint: Checkpoint) -> tuple[str, int]:
    return checkpoint.run, checkpoint.step


def _attached(contents: Contents, name: str) -> FileLayout:
    """Return the file of an attachment: the bytes of a small one, or the entry of a large one."""
    attached = contents.attachments[name]
    if isinstance(attached, StoredObject):
        return FileLayout(name, contents.manifest.data(attached))
    return FileLayout(name, b"", (ViewTensor(name, attached),))


def etag_of(manifest: Manifest, file: FileLayout) -> str:
    """Return a hash of a file's content, computed from the digests in the manifest.

    Raises the errors of a manifest read.
    """
    hasher = Hasher()
    _add(hasher, _ETAG_OF, file.head)
    for tensor in file.tensors:
        for source in tensor.sources:
            _add(hasher, f"{source.lo} {source.hi} {source.entry.numel}".encode(), manifest.raw_cells(source.entry))
    return hasher.digest()[:_ETAG_BYTES].hex()


def _add(hasher: Hasher, *parts: bytes | memoryview) -> None:
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
