"""Reads a store in a folder, written from docs/format.md alone: it shares no line with casckpt and needs no torch."""

from __future__ import annotations

import json
import re
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from tests.support.plain_bytes import (
    NATIVE,
    DamagedError,
    Entry,
    column,
    columns,
    pieces,
    prove_blob,
    proved,
    read_head,
    refuse,
)
from tests.support.plain_values import decode, nest

TXID = r"\d{8}T\d{12}Z-[0-9a-f]{16}-[0-9a-f]{16}-(?:0|[1-9]\d*)"
NUMBER = r"(?:0|[1-9]\d{0,8})"
ENDED = ("forgotten", "purged", "revoked", "replaced")
STATES = {"committed": "visible", "restored": "visible"} | {name: name for name in ENDED}


def origin(txid: str, first: dict[str, Any]) -> str:
    """Give what orders checkpoints: the transaction of the first save."""
    return str(first.get("origin") or txid)


class Checkpoint:
    """The manifest of a commit record, proved, and what it names."""

    def __init__(self, root: Path, record: dict[str, Any]) -> None:
        self.root, self.record = root, record
        self.raw = (root / "objects" / record["uploader"] / f"{record['manifest']}.manifest").read_bytes()
        self.sections = read_head(self.raw, record["head"])
        if not len(self.raw) == record["manifest_bytes"] == sum(next(reversed(self.sections.values()))[:2]):
            message = "the size of the manifest"
            raise DamagedError(message)
        self.index = msgspec.msgpack.decode(self._section("index"))
        same = all(self.index.get(name) == record.get(name) for name in ("run", "step", "created_at", "parent"))
        if self.sections["index"][2].hex() != record["manifest"] or self.index["format"] != 1 or not same:
            refuse("the index is not that of the commit record")
        blobs = msgspec.msgpack.decode(self._section("blobs"))
        hashes, names = blobs["hashes"], blobs["uploaders"]
        self.blobs = [
            (f"{names[up]}/{hashes[32 * i : 32 * i + 32].hex()}.safetensors", size)
            for i, (up, size) in enumerate(columns(blobs["index"], blobs["sizes"]))
        ]

    def _section(self, name: str) -> bytes:
        offset, length, digest = self.sections[name]
        return proved(self.raw[offset : offset + length], digest, f"the section {name}")

    @cached_property
    def entries(self) -> list[Entry]:
        """All of them, in their order."""
        table, rows = self.index["entries"], msgspec.msgpack.decode(self._section("places"))["rows"]
        parts = [pieces(t, self._section(n), n) for t, n in ((self.index["cells"], "cells"), (rows, "rows"))]
        flat, at, entries = column(table["shape"]), 0, []
        numbers = columns(*(table[name] for name in ("kind", "index", "rank", "dtype", "dimensions")))
        for i, (kind, index, rank, dtype, n) in enumerate(numbers):
            kind_and_key, (name, width) = (table["kinds"][kind], table["keys"][i]), table["dtypes"][dtype]
            shape = tuple(flat[at : at + n])
            entries.append(Entry(*kind_and_key, index, rank - 1, name, width, shape, parts[0][i], parts[1][i]))
            at += n
        return entries

    def array(self, entry: Entry) -> np.ndarray[Any, Any]:
        """Read an entry, each cell compared with its digest."""
        dtype = np.dtype(NATIVE[entry.dtype]) if entry.dtype in NATIVE else refuse(f"the dtype {entry.dtype}")
        if dtype.itemsize != entry.width or (entry.size and not entry.rows):
            refuse(f"{entry.key}: another width than its dtype has, or its bytes are left out")
        out, hits = np.empty(entry.size, dtype), np.zeros(entry.size, np.uint8)
        if not entry.size:
            return out.reshape(entry.shape)
        spans, cells = list(entry.spans()), list(entry.cut(self.index["cell_bytes"]))
        data, at = [b""] * len(spans), 0
        for count, blob, begin in entry.places():
            mine = cells[at : at + count] if count else cells
            if len({number for number, _, _ in mine}) != 1 or blob >= len(self.blobs) or begin < 4096:
                refuse(f"a row of {entry.key}")
            stored = (self.root / "objects" / self.blobs[blob][0]).read_bytes()
            ends = accumulate((length for _, length, _ in mine), initial=begin)
            for (number, _, digest), (a, b) in zip(mine, pairwise(ends), strict=True):
                data[number] += proved(stored[a:b], digest, f"a cell of {entry.key}")
            at += len(mine)
        for (offset, shape, lo, hi), raw in zip(spans, data, strict=True):
            box = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
            where = np.arange(entry.size).reshape(entry.shape)[box].reshape(-1)[lo:hi]
            out[where] = np.frombuffer(raw, dtype)
            hits[where] += 1
        return out.reshape(entry.shape) if at == len(cells) and (hits == 1).all() else refuse("rows of other cells")

    def read(self, rank: int = 0) -> Any:
        """Give the nested state as this rank sees it, tensors as arrays."""
        chosen: list[dict[str, Any]] = [{}, {}]  # tensors, objects: those of the rank, else the first ones
        for entry in self.entries:
            if entry.kind == "tensor" and (entry.rank == rank or entry.key not in chosen[0]):
                chosen[0][entry.key] = entry
        table, data = self.index["objects"], self._data()
        for i, (owner, _, pickled) in enumerate(columns(table["rank"], table["parts"], table["pickled"])):
            if owner - 1 == rank or table["keys"][i] not in chosen[1]:
                chosen[1][table["keys"][i]] = (owner - 1, pickled, data[i])
        leaves = [
            {key: self.array(entry) for key, entry in chosen[0].items()},
            {key: self._object(key, *one) for key, one in chosen[1].items()},
        ]
        return nest(msgspec.msgpack.decode(self.index["tree"]), leaves, ())

    def attachments(self) -> dict[str, bytes]:
        """Give the files that travel along, short ones and long ones."""
        names = self.index["attachments"]
        if any({"", ".", ".."} & {*name.split("/")} or re.search(r"[\\\x00-\x1f\x7f]", name) for name in names):
            refuse("an attachment of another name")
        short = dict(zip(names, self._data()[len(self.index["objects"]["keys"]) :], strict=True))
        return short | {each.key: self.array(each).tobytes() for each in self.entries if each.kind == "attachment"}

    def _data(self) -> list[bytes]:
        return pieces(self.index["data"], self._section("objects"), "objects")

    def _object(self, key: str, rank: int, pickled: int, raw: bytes) -> Any:
        return ("pickled", raw) if pickled else decode(raw, partial(self._part, key, rank))

    def _part(self, key: str, rank: int, index: int, length: int) -> bytes:
        wanted = ("part", key, index, rank)
        [entry] = [each for each in self.entries if (each.kind, each.key, each.index, each.rank) == wanted]
        raw = self.array(entry).tobytes()
        return raw if len(raw) == length else refuse(f"the length of part {index} of {key}")

    def leaves(self) -> dict[str, list[tuple[int, int, bool]]]:
        """Prove all blobs: begin, end and health of the leaves of each."""
        read = {key: (self.root / "objects" / key).read_bytes() for key, _ in self.blobs}
        if [len(read[key]) for key, _ in self.blobs] != [size for _, size in self.blobs]:
            message = "a blob of another size"
            raise DamagedError(message)
        return {key: prove_blob(raw, Path(key).stem) for key, raw in read.items()}


class Store:
    """A store in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        marker: dict[str, Any] = {"features": [], "cell_bytes": 1 << 20, "blob_bytes": 1 << 25}
        marker |= json.loads(self._bytes("casckpt.json"))
        cell, blob = marker["cell_bytes"], marker["blob_bytes"]
        if marker["format"] != 1 or marker["features"] or marker.get("hash") != "blake3":
            refuse("a store that is not understood")
        if cell % 4096 or not 4096 <= cell <= blob <= 2**30:
            refuse("sizes outside of the limits")

    def _bytes(self, key: str) -> bytes:
        path = self.root / key
        return path.read_bytes() if path.is_file() and not path.is_symlink() else refuse(f"{key} is no object")

    def _names(self, folder: str, pattern: str) -> list[str]:
        path = self.root / folder
        return sorted(each.name for each in path.iterdir() if re.fullmatch(pattern, each.name)) if path.is_dir() else []

    def record(self, key: str) -> dict[str, Any]:
        """Read a record, its checksum compared."""
        raw = self._bytes(key)
        line, _, rest = raw.partition(b"\n")
        if rest != blake3(line).hexdigest().encode() + b"\n":
            message = f"the record {key}"
            raise DamagedError(message)
        read: dict[str, Any] = json.loads(line)
        return read if len(raw) <= 2**20 else refuse(f"{key} is too long")

    def log(self, txid: str) -> tuple[str, dict[str, Any]]:
        """Fold the log of a transaction: its state ("": none) and its first record."""
        state, first, _ = self.folded(txid)
        return (state if state != "visible" or self.stands(txid, first) else "void"), first

    def stands(self, txid: str, first: dict[str, Any]) -> bool:
        """Tell whether a rewrite stands, by the log of its base; what is no rewrite does."""
        if first.get("replaces") is None:
            return True
        base, number = first["replaces"]
        if base >= txid:
            refuse(f"{txid} rewrites what is later")
        _, its_first, links = self.folded(base)
        return links.get(number) == txid and self.stands(base, its_first)

    def folded(self, txid: str) -> tuple[str, dict[str, Any], dict[int, str]]:
        """Fold a log by itself; last: which of its records say that it is replaced, and by what."""
        state, first, number = "", dict[str, Any](), 0
        links: dict[int, str] = {}
        while (self.root / (key := f"commits/{txid}" + (f".{number}" if number else ""))).exists():
            record = self.record(key)
            if record["txid"] != txid:
                refuse(f"{key} tells of another transaction")
            if record["type"] != "kept" and state not in {"purged", "revoked"}:
                state = STATES[record["type"]]
            if record["type"] == "restored":
                links = {}
            elif record["type"] == "replaced":
                links[number] = record["by"]
            first, number = first or record, number + 1
        return state, first, links

    def logs(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Give all transactions that ended, in their order; what is superseded is visible too."""
        return {txid: self.log(txid) for txid in self._names("commits", TXID)}

    def visible(self) -> dict[tuple[str, int], str]:
        """Give the transaction that answers to each run and step."""
        logs = self.logs().items()
        seen = [(origin(txid, one), one["run"], one["step"], txid) for txid, (state, one) in logs if state == "visible"]
        return {(run, step): txid for _, run, step, txid in sorted(seen)}

    def newest_listed(self, run: str) -> str:
        """Find the newest visible checkpoint of a run by commits/."""
        found = (txid for (name, _), txid in self.visible().items() if name == run)
        return max(found, key=lambda txid: origin(txid, self.log(txid)[1]), default="")

    def newest_announced(self, run: str) -> str:
        """Find it by the announcements of the run, from the newest downwards."""
        folder = f"runs/{blake3(run.encode()).hexdigest()[:16]}"
        heads = (
            six + name for six in self._names(folder, r"\d{6}") for name in self._names(f"{folder}/{six}", r"\d{3}")
        )
        number = 999_999_999 - int(next(heads, "1000000000"))
        best, floor = "", -1
        while number > floor:
            digits = f"{999_999_999 - number:09d}"
            record = self.record(f"{folder}/{digits[:6]}/{digits[6:]}")
            for txid, _, kind in record["announced"]:
                state, first = self.log(txid)
                if state == "visible" and (not best or origin(txid, first) >= origin(best, self.log(best)[1])):
                    best = txid
                    floor = max(floor, record.get("seen", -1)) if kind == "committed" else floor
            number -= 1
        return best

    def tags(self) -> dict[str, str]:
        """Give the id that each tag names; a tag that ends is not asked for the time."""
        tags: dict[str, str] = {}
        for name in self._names("tags", r"[a-z0-9][a-z0-9._-]{0,99}"):
            newest = self.record(f"tags/{name}/{max(map(int, self._names(f'tags/{name}', NUMBER)))}")
            tags |= {name: newest["manifest"]} if newest.get("manifest") else {}
        return tags

    def checkpoint(self, txid: str) -> Checkpoint:
        """Open what a commit made."""
        return Checkpoint(self.root, self.log(txid)[1])
