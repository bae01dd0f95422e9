"""Bytes of manifests and blobs, written from docs/format.md alone, for tests/support/plain_reader.py."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np
from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Iterator

SECTIONS = ["index", "places", "blobs", "objects", "cells", "rows"]
CONTEXT = "casckpt 2026-11-23 the proof of a blob"
NATIVE = {f"{sign}int{8 * n}": f"<{letter}{n}" for sign, letter in (("u", "u"), ("", "i")) for n in (1, 2, 4, 8)}
NATIVE |= {"bool": "?", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8", "complex128": "<c16"}
NATIVE |= {"bfloat16": "<u2", "complex32": "<u4", "float4_e2m1fn_x2": "u1"}  # from here on the bytes as they are
NATIVE |= dict.fromkeys((f"float8_{name}" for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")), "u1")
NATIVE |= dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), "u1")
NATIVE |= dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), "u1") | {"bits16": "<u2"}
STORED = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
STORED |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8}


class RefusedError(Exception):
    """The format does not allow this."""


class DamagedError(Exception):
    """These bytes are not the ones that were written."""


def refuse(why: str) -> NoReturn:
    """Raise RefusedError."""
    raise RefusedError(why)


def proved(raw: bytes, digest: bytes, what: str) -> bytes:
    """Give raw back, if it has this BLAKE3; else raise DamagedError."""
    if blake3(raw).digest() != digest:
        message = f"{what} has not its hash"
        raise DamagedError(message)
    return raw


def column(raw: bytes) -> list[int]:
    """Read a column of numbers."""
    if not raw or raw[0] not in {1, 2, 4, 8} or (len(raw) - 1) % raw[0]:
        refuse("a column of no known width")
    numbers: list[int] = np.frombuffer(raw, f"<u{raw[0]}", offset=1).tolist()
    return numbers if max(numbers, default=0) <= 2**62 else refuse("a number above 2^62")


def columns(*raw: bytes) -> list[tuple[int, ...]]:
    """Read columns of one length, row by row."""
    read = [column(each) for each in raw]
    return list(zip(*read, strict=True)) if len({len(each) for each in read}) == 1 else refuse("columns differ")


def pieces(table: list[Any], section: bytes, what: str) -> list[bytes]:
    """Cut a section into its pieces, each proved with its group."""
    lengths, each, hashes = column(table[0]), int(table[1]), table[2]
    if sum(lengths) != len(section) or each < 1 or len(hashes) != 32 * -(-len(lengths) // each):
        refuse(f"the table of {what} does not fit it")
    at = np.cumsum([0, *lengths]).tolist()
    first = [*range(0, len(lengths), each), len(lengths)]
    for i, (a, b) in enumerate(pairwise(first)):
        proved(section[at[a] : at[b]], hashes[32 * i : 32 * i + 32], f"group {i} of {what}")
    return [section[a:b] for a, b in pairwise(at)]


def read_head(raw: bytes, expected: str) -> dict[str, tuple[int, int, bytes]]:
    """Give offset, length and hash of each section; raise if this is not the head that the commit record says."""
    if raw[:7] != b"CASCKPT" or raw[7] > 1:
        refuse("no manifest, or a later one")
    proved(raw[:4064], raw[4064:4096], "the head")
    if raw[4064:4096].hex() != expected:
        message = "the head is not that of the commit record"
        raise DamagedError(message)
    count, end = int.from_bytes(raw[8:16], "little"), 4096
    sections: dict[str, tuple[int, int, bytes]] = {}
    if count > 56 or any(raw[16 + 72 * count : 4064]):
        refuse("too many sections, or no zeros behind them")
    for at in range(16, 16 + 72 * count, 72):
        name = raw[at : at + 16].rstrip(b"\0").decode("ascii")
        flags, offset, length = (int.from_bytes(raw[at + i : at + i + 8], "little") for i in (16, 24, 32))
        if name in sections or offset != end or (flags & 1 and name not in SECTIONS):
            refuse(f"the section {name}")
        sections[name], end = (offset, length, raw[at + 40 : at + 72]), end + length
    if [name for name in sections if name in SECTIONS] != SECTIONS:
        refuse("not the six sections")
    return sections


def prove_blob(raw: bytes, name: str) -> list[tuple[int, int, bool]]:
    """Prove the proof of a blob by its name and check its header; give begin, end and health of each leaf."""
    header = raw[8:4096].rstrip(b" ")
    fields = json.loads(header)
    if raw[:8] != (4088).to_bytes(8, "little") or json.dumps(fields, separators=(",", ":")).encode() != header:
        refuse("a header that is not made so")
    end, start, dtype, before = 0, 0, "", ""
    for number, (key, field) in enumerate(fields.items()):
        dtype, shape, (a, b), last = field["dtype"], field["shape"], field["data_offsets"], number == len(fields) - 1
        named = key == ("proof" if last else str(number)) and list(field) == ["dtype", "shape", "data_offsets"]
        if not named or a != end or b <= a or shape != [(b - a) // STORED[dtype]] or (dtype == before and not last):
            refuse(f"the tensor {key} of a header")
        end, before, start = b, dtype, a + 4096
    if end + 4096 != len(raw) or dtype != "U8":
        refuse("a header that does not fit its file")
    proof = raw[start:]
    if blake3(proof, derive_key_context=CONTEXT).hexdigest() != name:
        message = f"the proof of the blob {name}"
        raise DamagedError(message)
    records = [(int.from_bytes(proof[i : i + 4], "little"), proof[i + 4 : i + 36]) for i in range(0, len(proof), 36)]
    lengths = [length for length, _ in records]
    if len(proof) % 36 or not 2 <= len(records) <= 65536 or lengths[0] != 4096 or sum(lengths) != start:
        refuse("a proof that does not fit its blob")
    if min(lengths) < 1 or max(lengths) > 2**30:
        refuse("a leaf of no size that is allowed")
    at = np.cumsum([0, *lengths]).tolist()
    return [(a, b, blake3(raw[a:b]).digest() == one) for a, b, (_, one) in zip(at, at[1:], records, strict=False)]


@dataclass(frozen=True)
class Entry:
    """A row of the entries, with its cell table and its rows; rank is -1 for none."""

    kind: str
    key: str
    index: int
    rank: int
    dtype: str
    width: int
    shape: tuple[int, ...]
    cells: bytes
    rows: bytes

    @property
    def size(self) -> int:
        """Elements."""
        return int(np.prod(self.shape, dtype=object))

    def spans(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
        """Give offset and shape of the box, lo and hi, of each span."""
        whole = ((0,) * len(self.shape), self.shape)
        if self.cells[0] == 0:
            yield *whole, 0, self.size
            return
        boxes, spans, _ = msgspec.msgpack.decode(self.cells[1:])
        known, end, total = [whole, *boxes], (0, 0), 0
        for number, a, b in spans:
            offset, shape = known[number] if number < len(known) else refuse("a box that does not exist")
            inside = all(s > 0 and o + s <= d for o, s, d in zip(offset, shape, self.shape, strict=True))
            if (number, a) < end or not a < b <= int(np.prod(shape, dtype=object)) or not inside:
                refuse(f"a span of {self.key}")
            end, total = (number, b), total + b - a
            yield offset, shape, a, b
        if total != self.size:
            refuse(f"the spans of {self.key} do not cover it")

    def places(self) -> list[tuple[int, int, int]]:
        """Give cells, blob and offset of each row."""
        if self.rows[0] or len(self.rows) % 12 != 1:
            refuse("a form of rows that is not known")
        return [(a, b, c) for a, b, c in np.frombuffer(self.rows, "<u4", offset=1).reshape(-1, 3).tolist()]

    def cut(self, cell_bytes: int) -> Iterator[tuple[int, int, bytes]]:
        """Give span number, length in bytes and digest of each cell."""
        if self.cells[0] > 1:
            refuse("a form of cells that is not known")
        digests = self.cells[1:] if not self.cells[0] else msgspec.msgpack.decode(self.cells[1:])[2]
        c, i = cell_bytes // self.width, 0
        for number, (_, _, lo, hi) in enumerate(self.spans()):
            ends = [*range(lo // c * c + c, hi, c), hi]
            for a, b in zip([lo, *ends], ends, strict=False):
                yield number, (b - a) * self.width, digests[32 * i : 32 * i + 32]
                i += 1
        if len(digests) != 32 * i:
            refuse(f"the digests of {self.key}")
