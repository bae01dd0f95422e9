"""Reads the tensors of a store without casckpt or torch. Keep a copy of this file next to your checkpoints.

$ python read_without_casckpt.py checkpoints
train@40 ...
$ python read_without_casckpt.py checkpoints train@latest
model.weight bfloat16 [4, 3]
train@40: 1 of 1 tensors are intact; nothing else was read

In Python: ``one = Store("checkpoints").open("train@latest")``, ``one.read(key)`` with the keys of ``one.tensors``.
Every byte is checked against its hash. ValueError is raised for damaged or missing data, for frames (from saves with
``compress``), and for later formats. The code follows docs/format.md; comments quote the titles of its sections.
"""

import json
import re
import struct
import sys
from collections import namedtuple
from itertools import accumulate, islice, pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from msgspec.msgpack import decode  # the msgpack package calls it unpackb

SECTIONS = ["index", "places", "blobs", "objects", "cells", "rows"]
RECORD = re.compile(r"(\d{8}T\d{12}Z-[0-9a-f]{16}-[0-9a-f]{16}-\d+)(?:\.([1-9]\d{0,8}))?")  # txid, number
STATES = {"committed", "revoked", "forgotten", "restored", "purged"}
TYPES = {*STATES, "rewritten", "back", "trimmed", "tagged", "kept"}
NUMPY_HAS = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
Record = dict[str, Any]
Entry = namedtuple("Entry", "dtype width shape cells rows")


def check(holds: object, otherwise: str) -> None:
    """Raise ValueError with the message ``otherwise`` unless ``holds`` is true."""
    if not holds:
        raise ValueError(otherwise)


class Store:
    """A store in a folder, which is only read."""

    def __init__(self, folder: str | Path) -> None:
        self.root = Path(folder)
        marker = json.loads(self.path("casckpt.json").read_bytes())  # "Marker"
        known = [marker.get(name) for name in ("format", "hash", "features")] == [1, "blake3", ["history-2"]]
        check(known, f"{folder} has a different format: {marker}")

    def path(self, key: str) -> Path:
        """Return the path of an object."""
        path = self.root / key
        check(path.is_file() and not path.is_symlink(), f"{path} is missing or not a regular file")
        return path

    def record(self, txid: str, number: int) -> Record:
        """Read a record from a transaction's log ("Records")."""
        path = self.path(f"commits/{txid}.{number}" if number else f"commits/{txid}")
        record = parsed(path)
        end = f"-{blake3(record['run'].encode()).hexdigest()[:16]}-{record['step']}" if "run" in record else ""
        fits = record["txid"] == txid and txid.endswith(end) and record["type"] in TYPES
        check(fits, f"{path} is a record of a different object, or has an unknown type")
        return record

    def checkpoints(self) -> list[Record]:
        """Return the commit records of visible checkpoints, in order ("How a checkpoint becomes visible")."""
        last: dict[str, int] = {}
        for found in filter(None, (RECORD.fullmatch(path.name) for path in (self.root / "commits").glob("*"))):
            last[found[1]] = max(last.get(found[1], 0), int(found[2] or 0))
        lists = [parsed(path)["ended"] for path in (self.root / "commits/ended").glob("[0-9]*")]
        for txid, *_ in (line for lines in lists for line in lines):  # "Logs that are over"
            last.pop(txid, None)
        logs = [[self.record(txid, number) for number in range(end + 1)] for txid, end in sorted(last.items())]
        return [commit for log in logs if (commit := fold(log))]

    def open(self, ref: str, rank: int = 0) -> "Checkpoint":
        """Open RUN@STEP or RUN@latest. If ranks saved separate values, ``tensors`` has those of ``rank``."""
        run, _, step = ref.rpartition("@")
        found = [one for one in self.checkpoints() if one["run"] == run and step in {"latest", str(one["step"])}]
        check(found, f"{self.root} has no visible checkpoint {ref}")
        return Checkpoint(self, found[-1], rank)


def parsed(path: Path) -> Record:
    """Read the two lines of a record."""
    line, _, rest = path.read_bytes().partition(b"\n")
    check(rest == blake3(line).hexdigest().encode() + b"\n", f"{path} is damaged")
    return json.loads(line)  # type: ignore[no-any-return]


def fold(log: list[Record]) -> Record | None:
    """Return a commit record, with its current ``places`` and their ``head``, or None if the log hides it."""
    states = [record["type"] for record in log if record["type"] in STATES]
    heads, places = {log[0]["txid"]: log[0].get("head")}, log[0]["txid"]
    for record in log:
        places = record.get("by") or record.get("to") or places  # from "rewritten" or "back"
        heads.setdefault(places, record.get("head"))
    is_visible = "purged" not in states and states[-1] in {"committed", "restored"}
    return log[0] | {"places": places, "head": heads[places]} if is_visible else None


class Checkpoint:
    """A checkpoint. ``tensors`` maps each key to its Entry in the manifest ("Manifests")."""

    def __init__(self, store: Store, commit: Record, rank: int) -> None:
        self.store, self.name = store, f"{commit['run']}@{commit['step']}"
        section = sections(store.path(f"objects/{commit['places']}/{commit['manifest']}.manifest").read_bytes(), commit)
        index, places, blobs = (decode(section[name]) for name in ("index", "places", "blobs"))
        same = all(index[name] == commit.get(name) for name in ("run", "step", "created_at", "parent"))
        check(same, f"the manifest of {self.name} belongs to a different checkpoint")
        names = zip(column(blobs["index"]), struct.iter_unpack("32s", blobs["hashes"]), strict=True)
        self.blobs = [f"objects/{blobs['uploaders'][owner]}/{name.hex()}.safetensors" for owner, (name,) in names]
        self.cell_bytes, table = index["cell_bytes"], index["entries"]
        kinds, shapes = [table["kinds"][kind] for kind in column(table["kind"])], iter(column(table["shape"]))
        check({*kinds} <= {"tensor", "part", "attachment"}, f"{self.name} has entries of unknown kinds: {set(kinds)}")
        numbers = [column(table[name]) for name in ("rank", "dtype", "dimensions")]
        parts = pieces(index["cells"], section["cells"]), pieces(places["rows"], section["rows"])
        self.tensors: dict[str, Entry] = {}
        for key, kind, owner, dtype, dims, cells, rows in zip(table["keys"], kinds, *numbers, *parts, strict=True):
            entry = Entry._make([*table["dtypes"][dtype], tuple(islice(shapes, dims)), cells, rows])
            if kind == "tensor" and (key not in self.tensors or owner == rank + 1):
                self.tensors[key] = entry

    def read(self, key: str) -> np.ndarray[Any, Any]:
        """Read a tensor, as unsigned integers of its size if numpy lacks its dtype (``tensors[key].dtype``)."""
        what, entry = f"tensor {key} of {self.name}", self.tensors[key]
        dtype = np.dtype(entry.dtype if NUMPY_HAS.fullmatch(entry.dtype) else f"u{entry.width}").newbyteorder("<")
        check(dtype.itemsize == entry.width, f"{what} has elements of {entry.width} bytes and dtype {entry.dtype}")
        check(entry.rows or 0 in entry.shape, f"{what} is no longer in this checkpoint, which was thinned")
        check(entry.rows[:1] in {b"", b"\0"}, f"{what} has cells stored as frames: read it with casckpt")
        cells = iter(self.cells(entry, what))
        array, filled = np.empty(entry.shape, dtype), np.zeros(entry.shape, bool)
        for count, number, offset in struct.iter_unpack("<III", entry.rows[1:]):
            with self.store.path(self.blobs[number]).open("rb") as blob:
                blob.seek(offset)
                for box, lo, hi, digest in islice(cells, count):
                    data = blob.read((hi - lo) * entry.width)
                    check(blake3(data).digest() == digest, f"{what} has a damaged cell, in {blob.name}")
                    array[box].flat[lo:hi], filled[box].flat[lo:hi] = np.frombuffer(data, dtype), True
        check(filled.all(), f"{what} has elements that no cell covers")
        return array

    def cells(self, entry: Entry, what: str) -> list[tuple[Any, int, int, bytes]]:
        """Return each cell's box, its range in that box, and its digest ("Regions, cells, extents")."""
        size, step, is_whole = prod(entry.shape), self.cell_bytes // entry.width, entry.cells[:1] != b"\1"
        boxes, spans, digests = ([], [(0, 0, size)], entry.cells[1:]) if is_whole else decode(entry.cells[1:])
        fits = sum(hi - lo for _, lo, hi in spans) == size <= step * len(digests) // 32
        fits &= all(0 <= lo <= hi for _, lo, hi in spans) and entry.cells[:1] <= b"\1"
        check(fits, f"{what} has a cell table that does not fit its shape or has an unknown form")
        insides = [(*(slice(at, at + n) for at, n in zip(*box, strict=True)), ...) for box in [([], []), *boxes]]
        starts = [(box, lo, hi, at) for box, lo, hi in spans for at in range(lo // step * step, hi, step)]
        ranges = [(insides[box], max(lo, at), min(hi, at + step)) for box, lo, hi, at in starts]
        return [(*cell, *digest) for cell, digest in zip(ranges, struct.iter_unpack("32s", digests), strict=True)]


def sections(manifest: bytes, commit: Record) -> dict[str, bytes]:
    """Split a manifest. The commit record has the hash of its head, and the head has those of the sections."""
    what, head = f"the manifest {commit['manifest']}", manifest[:4096]
    check(blake3(head[:4064]).digest() == head[4064:] == bytes.fromhex(commit["head"]), f"{what} has a damaged head")
    check(head[:8] == b"CASCKPT\1" and head[9:16] == bytes(7), f"{what} has a later version")
    found, end = dict[str, bytes](), 4096
    for padded, flags, offset, length, digest in struct.iter_unpack("<16sQQQ32s", head[16 : 16 + 72 * head[8]]):
        name, data = padded.rstrip(b"\0").decode(), manifest[offset : offset + length]
        check(offset == end and name not in found and (name in SECTIONS or not flags & 1), f"{what}: unexpected {name}")
        check(blake3(data).digest() == digest, f"{what} has a damaged section {name}")
        found[name], end = data, end + length
    check([*found][:6] == SECTIONS and end == len(manifest), f"{what} has unexpected sections or the wrong length")
    check(blake3(found["index"]).hexdigest() == commit["manifest"], f"{what} has the index of a different checkpoint")
    return found


def pieces(table: Any, section: bytes) -> list[bytes]:
    """Return the pieces of a section, after checking each group against its hash in the table."""
    ends = [0, *accumulate(column(table[0]))]
    groups = [*ends[:-1][:: table[1]], len(section)]
    for (start, end), (digest,) in zip(pairwise(groups), struct.iter_unpack("32s", table[2]), strict=True):
        check(blake3(section[start:end]).digest() == digest, "a manifest has a damaged group of pieces")
    return [section[start:end] for start, end in pairwise(ends)]


def column(data: bytes) -> list[int]:
    """Return the numbers of a column, whose first byte is the size of each number."""
    return [int.from_bytes(data[at : at + data[0]], "little") for at in range(1, len(data), data[0])]


def main(folder: str, ref: str = "") -> None:
    """Print the checkpoints of a store, or read the tensors of one checkpoint and describe them."""
    if not ref:
        print(*(f"{one['run']}@{one['step']} {one['manifest']}" for one in Store(folder).checkpoints()), sep="\n")
        return
    checkpoint, sound = Store(folder).open(ref), 0
    for key, entry in checkpoint.tensors.items():
        try:
            print(key, entry.dtype, list(checkpoint.read(key).shape))
            sound += 1
        except ValueError as error:
            print("refused:", error)
    print(f"{checkpoint.name}: {sound} of {len(checkpoint.tensors)} tensors are intact; nothing else was read")
    sys.exit(sound != len(checkpoint.tensors))


if __name__ == "__main__":
    main(*sys.argv[1:])
