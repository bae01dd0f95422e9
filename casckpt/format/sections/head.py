"""The head of a manifest: the location and hash of each section.

::

    8 bytes    b"CASCKPT" and the version of this layout, 1
    8 bytes    number of sections
    72 bytes   for each: name (16, ASCII, padded with zeros), flags, offset, length (8 each), BLAKE3 (32)
    zeros      up to byte 4064
    32 bytes   BLAKE3 of all preceding bytes: the head's own hash, which the commit record names
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple, TypeAlias

from casckpt.base.digest import Buffer
from casckpt.base.lazy import cached_property
from casckpt.errors import Damaged, Refused
from casckpt.format.digest import cell_digest

MAGIC = b"CASCKPT\x01"
HEAD_BYTES = 4096
MAX_MANIFEST_BYTES = 4 << 30
INDEX, PLACES, BLOBS, OBJECTS, CELLS, ROWS = "index", "places", "blobs", "objects", "cells", "rows"
KNOWN = (INDEX, PLACES, BLOBS, OBJECTS, CELLS, ROWS)
"""The sections in stored order. The sections that every reader needs come first, so that a single read fetches them."""
NEEDED, COPIED = 1, 2
"""Flags of a section. NEEDED: a reader that does not know the section must refuse the manifest.

COPIED: copies of the checkpoint keep the section.
"""
_OF_COPIES = {INDEX, OBJECTS, CELLS}

_RECORD = Struct("<16sQQQ32s")
_HASHED = HEAD_BYTES - 32
_MOST = (_HASHED - 16) // _RECORD.size

Read: TypeAlias = Callable[[Sequence[tuple[int, int]]], Sequence[Buffer]]
"""Reads ranges (offset, length) of a manifest."""


class Section(NamedTuple):
    """One section: the bytes from ``offset`` to ``offset + length`` of the manifest, whose hash is ``digest``."""

    name: str
    flags: int
    offset: int
    length: int
    digest: bytes

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.offset + self.length


@dataclass(frozen=True)
class Head:
    """A decoded head. ``digest``: its own hash in hex. ``data``: its bytes."""

    digest: str
    sections: Sequence[Section]
    data: bytes

    @property
    def size(self) -> int:
        """The size of the whole manifest in bytes."""
        return self.sections[-1].end

    def __getitem__(self, name: str) -> Section:
        return self._named[name]

    def __contains__(self, name: str) -> bool:
        return name in self._named

    @cached_property
    def _named(self) -> Mapping[str, Section]:
        return {section.name: section for section in self.sections}

    @property
    def foreign(self) -> list[Section]:
        """The sections that this version does not know."""
        return [section for section in self.sections if section.name not in KNOWN]

    def check_known(self) -> None:
        """Raise Refused if an unknown section is required."""
        needed = [section.name for section in self.foreign if section.flags & NEEDED]
        if needed:
            raise Refused(f"it requires the section {needed[0]!r}, which this version does not know; upgrade casckpt")


def assemble(parts: Iterable[tuple[str, Buffer]], foreign: Iterable[tuple[Section, Buffer]] = ()) -> tuple[Head, bytes]:
    """Build a manifest from ``parts``, in order, followed by ``foreign`` sections. Return the head and all bytes."""
    pieces = [(name, NEEDED | (COPIED if name in _OF_COPIES else 0), data) for name, data in parts]
    pieces += [(section.name, section.flags, data) for section, data in foreign]
    offset, sections = HEAD_BYTES, []
    for name, flags, data in pieces:
        sections.append(Section(name, flags, offset, len(data), cell_digest(data)))
        offset += len(data)
    head = _encode(sections)
    return head, b"".join((head.data, *(data for _, _, data in pieces)))


def _encode(sections: Sequence[Section]) -> Head:
    rows = (_RECORD.pack(name.encode(), flags, at, length, digest) for name, flags, at, length, digest in sections)
    text = b"".join((MAGIC, len(sections).to_bytes(8, "little"), *rows)).ljust(_HASHED, b"\0")
    digest = cell_digest(text)
    return Head(digest.hex(), sections, text + digest)


def decode_head(data: Buffer, wanted: str | None = None) -> Head:
    """Decode the head at the start of a manifest. ``wanted``: the hash that it must have, or None to accept any.

    Raises Damaged if its bytes have changed, and Refused if it is invalid or has a different version.
    """
    head = bytes(data[:HEAD_BYTES])
    digest = cell_digest(head[:_HASHED])
    if len(head) < HEAD_BYTES or digest != head[_HASHED:]:
        raise Damaged("its head does not match the hash at the head's end")
    if wanted is not None and digest.hex() != wanted:
        raise Damaged("its head is not the one that the commit record names: it is a different manifest")
    if head[:8] != MAGIC:
        if head[:7] == MAGIC[:7] and head[7] > MAGIC[7]:
            raise Refused("a later version of casckpt wrote it; upgrade casckpt to read it")
        raise Refused("it does not begin like a manifest")
    count = int.from_bytes(head[8:16], "little")
    end = 16 + count * _RECORD.size
    if count > _MOST or head[end:_HASHED].strip(b"\0"):
        raise Refused("its head lists more sections than fit, or has extra data after them")
    sections = [_section(*row) for row in _RECORD.iter_unpack(head[16:end])]
    _check(sections)
    return Head(digest.hex(), sections, head)


def _section(name: bytes, flags: int, offset: int, length: int, digest: bytes) -> Section:
    stripped = name.rstrip(b"\0")
    if not stripped.isascii() or not stripped.decode("ascii").isprintable():
        raise Refused("a section in its head has an invalid name")
    return Section(stripped.decode("ascii"), flags, offset, length, digest)


def _check(sections: Sequence[Section]) -> None:
    names = [section.name for section in sections]
    if [name for name in names if name in KNOWN] != list(KNOWN) or len(set(names)) != len(names):
        raise Refused("a section is missing from its head, is listed twice, or is out of order")
    end = HEAD_BYTES
    for section in sections:
        if section.offset != end or section.length > MAX_MANIFEST_BYTES - end:
            raise Refused(f"its section {section.name!r} does not begin where the previous one ends, or is too large")
        end = section.end


def check_size(head: Head, size: int) -> None:
    """Raise Damaged unless the manifest has the size that its head specifies."""
    if size != head.size:
        raise Damaged(f"it has {size} bytes instead of {head.size}")


def check_section(section: Section, data: Buffer) -> None:
    """Raise Damaged unless ``data`` matches this section's hash."""
    if len(data) != section.length or cell_digest(data) != section.digest:
        raise Damaged(f"its section {section.name!r} does not match its hash")
