"""Frames of cells, decoded from docs/format.md alone, element by element."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def decode(frame: bytes, base: bytes | None) -> bytes:
    form, width, rotated, nbytes, at = frame[0], frame[1], frame[2], int.from_bytes(frame[4:8], "little"), 8
    bits, count, gaps = 8 * width, nbytes // width, b""

    def part(length: int) -> bytes:
        nonlocal at
        kind, stored = frame[at], int.from_bytes(frame[at + 1 : at + 5], "little")
        data, at = frame[at + 5 : at + 5 + stored], at + 5 + stored
        return zstd.decompress(data) if kind == 2 else data * length if kind == 1 else data

    if form == 2:
        count, length = (int.from_bytes(frame[i : i + 4], "little") for i in (8, 12))
        at = 16
        gaps = part(length)
    planes = [part(count) for _ in range(width)]
    assert at == len(frame)
    numbers = [int.from_bytes(element, "little") for element in map(bytes, zip(*planes, strict=True))]
    if form == 1:
        turned = [n >> 1 | (n & 1) << (bits - 1) if rotated else n for n in numbers]
        return b"".join(n.to_bytes(width, "little") for n in turned)
    assert base is not None
    elements = [int.from_bytes(base[i : i + width], "little") for i in range(0, nbytes, width)]
    for i, n in zip(indices(gaps) if form == 2 else range(count), numbers, strict=True):
        elements[i] = (elements[i] + (n >> 1 ^ -(n & 1))) % 2**bits
    return b"".join(n.to_bytes(width, "little") for n in elements)


def indices(gaps: bytes) -> list[int]:
    found, at = list[int](), 0
    for gap in gaps:
        at += gap
        if gap != 255:
            found.append(at)
            at += 1
    return found
