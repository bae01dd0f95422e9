"""Reads a store in a folder, written from docs/format.md alone. It does not use casckpt or torch."""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import json
import pathlib
import re
import struct
import sys
import types
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Sequence
from itertools import accumulate, islice, pairwise
from math import prod
from typing import Any

import numpy as np
from blake3 import blake3
from msgspec.msgpack import decode

zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
SECTIONS = ["index", "places", "blobs", "objects", "cells", "rows"]
PROOF_CONTEXT = "casckpt 2026-11-23 the proof of a blob"
NUMPY_HAS = r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)"
TXID = r"\d{8}T\d{12}Z-[0-9a-f]{16}-[0-9a-f]{16}-(?:0|[1-9]\d*)"
STATES = {"committed": "visible", "restored": "visible"} | {name: name for name in ("forgotten", "purged", "revoked")}
Entry = namedtuple("Entry", "kind key index rank dtype width shape cells rows")  # rank: 0 for none
Object = namedtuple("Object", "key rank is_pickled data")
Log = namedtuple("Log", "state record existing tagged")  # existing: the txids of the places that did not end


class DamagedError(Exception):
    """The bytes differ from those that were written. (Invalid formats raise ValueError.)"""


def check(fits: object, what: str, error: type[Exception] = ValueError) -> None:
    if not fits:
        raise error(what)


def proved(raw: bytes, digest: bytes, what: str) -> bytes:
    check(blake3(raw).digest() == digest, what, DamagedError)
    return raw


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + 32] for i in range(0, len(hashes), 32)]


def column(raw: bytes) -> list[int]:
    return list(np.frombuffer(raw, f"<u{raw[0]}", offset=1).tolist())


def pieces(table: list[Any], section: bytes, what: str) -> list[bytes]:
    lengths, each = column(table[0]), table[1]
    at, first = [*accumulate(lengths, initial=0)], [*range(0, len(lengths), each), len(lengths)]
    check(at[-1] == len(section), f"the table of {what} does not fit it")
    for (a, b), digest in zip(pairwise(first), split(table[2]), strict=True):
        proved(section[at[a] : at[b]], digest, f"groups {a} to {b} of {what}")
    return [section[a:b] for a, b in pairwise(at)]


def read_head(raw: bytes, expected: str) -> dict[str, tuple[int, int, bytes]]:
    """Return the offset, length and hash of each section. Raise an error if the head differs from the commit record."""
    check(blake3(raw[:4064]).hexdigest() == raw[4064:4096].hex() == expected, "the head", DamagedError)
    sections, end, listed = dict[str, tuple[int, int, bytes]](), 4096, 16 + 72 * int.from_bytes(raw[8:16], "little")
    check(raw[:8] == b"CASCKPT\1" and listed <= 4064 and not any(raw[listed:4064]), "no manifest, or a later one")
    for padded, flags, offset, length, digest in struct.iter_unpack("<16sQQQ32s", raw[16:listed]):
        name = padded.rstrip(b"\0").decode("ascii")
        check(offset == end and name not in sections and (name in SECTIONS or not flags & 1), f"the section {name}")
        sections[name], end = (offset, length, digest), offset + length
    check([name for name in sections if name in SECTIONS] == SECTIONS, "not the six sections")
    check(end == len(raw), "the size of the manifest", DamagedError)
    return sections


def cells_of(entry: Entry, cell_bytes: int) -> list[tuple[np.ndarray[Any, Any], bytes]]:
    """For each cell, return the positions of its elements in the tensor, and its digest."""
    c, places = cell_bytes // entry.width, np.arange(prod(entry.shape)).reshape(entry.shape)
    boxes, spans, digests = [], [(0, 0, places.size)] if entry.cells else [], entry.cells[1:]
    if entry.cells[:1] == b"\1":
        boxes, spans, digests = decode(entry.cells[1:])
    check(entry.cells[:1] <= b"\1" and spans == sorted(spans), "spans out of order, or a form that is not known")
    found: list[np.ndarray[Any, Any]] = []
    for box, lo, hi in spans:
        offset, shape = [((0,) * len(entry.shape), entry.shape), *boxes][box]
        inside = places[tuple(slice(a, a + b) for a, b in zip(offset, shape, strict=True))].reshape(-1)
        check(lo < hi <= len(inside) == prod(shape), f"a span of {entry.key}")
        found += [inside[a:b] for a, b in pairwise([lo, *range(lo // c * c + c, hi, c), hi])]
    return list(zip(found, split(digests), strict=True))


def chains(entry: Entry, cells: list[Any]) -> list[list[Any]]:
    """For each cell, return its location and those of its bases: blob, offset, bytes, row kind, digest."""
    is_coded = entry.rows[:1] == b"\1"
    rows, lengths, digests = decode(entry.rows[1:]) if is_coded else (entry.rows[1:], b"", b"")
    sizes, bases = iter(np.frombuffer(lengths, "<u4").tolist()), iter(split(digests))
    found, step = [list[Any]() for _ in cells], entry.width
    queue = deque((links, step * len(where), digest) for links, (where, digest) in zip(found, cells, strict=True))
    for count, blob, begin, *kinds in struct.iter_unpack("<IIIB" if is_coded else "<III", rows):
        at, kind = begin, sum(kinds)
        for links, nbytes, digest in [queue.popleft() for _ in range(count)]:
            links.append((blob, at, next(sizes) if kind else nbytes, kind, digest))
            queue.extend([(links, nbytes, next(bases))] if kind == 2 else [])
            at += links[-1][2]
    check(entry.rows[:1] <= b"\1" and not any(map(list, (queue, sizes, bases))), f"the rows of {entry.key}")
    return found


def decoded(frame: bytes, nbytes: int, base: bytes) -> bytes:
    """Decode a cell's frame. ``base``: the bytes of its base, if the frame needs one."""
    form, w, rotated, zero, told = struct.unpack_from("<BBBBI", frame)
    check(form in {1, 2, 3} and rotated <= (form == 1) and (zero, told) == (0, nbytes), "a frame of another form")
    (count, *gaps), at = (struct.unpack_from("<II", frame, 8), 16) if form == 2 else ([nbytes // w], 8)
    parts = list[np.ndarray[Any, Any]]()
    for length in [*gaps, *[count] * w]:
        kind, size = struct.unpack_from("<BI", frame, at)
        raw, at = frame[at + 5 : at + 5 + size], at + 5 + size
        parts.append(np.frombuffer(zstd.decompress(raw) if kind == 2 else raw * (length if kind else 1), np.uint8))
        check(kind <= 2 and len(parts[-1]) == length, "a part of a frame")
    numbers, ends = np.stack(parts[-w:], -1).reshape(-1).view(f"<u{w}"), parts[0] < 255
    check(at == len(frame), "the end of a frame")
    if form == 1:
        return bytes(numbers >> 1 | numbers << 8 * w - 1 if rotated else numbers)
    out = np.frombuffer(base, numbers.dtype).copy()
    out[(np.cumsum(parts[0] + ends.astype(int)) - 1)[ends] if gaps else slice(None)] += numbers >> 1 ^ -(numbers & 1)
    return bytes(out)


def by_key(rows: Sequence[Any], rank: int) -> dict[str, Any]:
    return {row.key: row for row in [*reversed(rows), *(row for row in rows if row.rank == rank + 1)]}


class Checkpoint:
    def __init__(self, root: pathlib.Path, record: dict[str, Any]) -> None:
        self.root, self.record = root / "objects", record
        raw = (self.root / record["places"] / f"{record['manifest']}.manifest").read_bytes()
        self.sections = read_head(raw, record["head"])
        part = {name: proved(raw[a : a + n], digest, name) for name, (a, n, digest) in self.sections.items()}
        index, blobs, places = (decode(part[name]) for name in ("index", "blobs", "places"))
        fits = (len(raw), self.sections["index"][2].hex()) == (record["manifest_bytes"], record["manifest"])
        same = (index[name] == record.get(name) for name in ("run", "step", "created_at", "parent"))
        check(fits and all(same), "the index is not that of the commit record")
        owners = (blobs["uploaders"][number] for number in column(blobs["index"]))
        names = (
            f"{owner}/{name.hex()}.safetensors" for owner, name in zip(owners, split(blobs["hashes"]), strict=True)
        )
        self.blobs = list(zip(names, column(blobs["sizes"]), strict=True))
        table, shape = index["entries"], iter(column(index["entries"]["shape"]))
        numbers = zip(*(column(table[name]) for name in ("kind", "index", "rank", "dtype", "dimensions")), strict=True)
        stored = [pieces(index["cells"], part["cells"], "cells"), pieces(places["rows"], part["rows"], "rows")]
        self.entries = [
            Entry._make((table["kinds"][kind], key, i, rank, *table["dtypes"][dtype], tuple(islice(shape, n)), *parts))
            for key, (kind, i, rank, dtype, n), *parts in zip(table["keys"], numbers, *stored, strict=True)
        ]
        table, data = index["objects"], iter(pieces(index["data"], part["objects"], "objects"))
        rows = zip(table["keys"], column(table["rank"]), column(table["pickled"]), data, strict=False)
        self.objects = [Object._make(row) for row in rows]
        self.index, self.short = index, dict(zip(index["attachments"], data, strict=True))

    def array(self, entry: Entry) -> np.ndarray[Any, Any]:
        """Read an entry and compare each cell with its digest. Return bytes if numpy lacks the dtype."""
        dtype = np.dtype(entry.dtype if re.fullmatch(NUMPY_HAS, entry.dtype) else f"V{entry.width}")
        out, hits = np.empty(prod(entry.shape), dtype), np.zeros(prod(entry.shape), int)
        cells, raw = cells_of(entry, self.index["cell_bytes"]), b""
        for (where, _), links in zip(cells, chains(entry, cells), strict=True):
            for blob, at, size, kind, digest in reversed(links):
                stored = np.fromfile(self.root / self.blobs[blob][0], np.uint8, size, offset=at).tobytes()
                stored = decoded(stored, len(where) * entry.width, raw) if kind else stored
                raw = proved(stored, digest, f"a cell of {entry.key}")
            out[where], hits[where] = np.frombuffer(raw, dtype), hits[where] + 1
        check((hits == 1).all(), f"not all of {entry.key}")
        return out.reshape(entry.shape)

    def read(self, rank: int = 0) -> Any:
        """Return the nested state of this rank, with tensors as arrays. Do not load pickles."""
        parts: dict[tuple[str, int], dict[int, bytes]] = defaultdict(dict)
        for entry in (each for each in self.entries if each.kind == "part"):
            parts[entry.key, entry.rank][entry.index] = self.array(entry).tobytes()
        tensors = by_key([entry for entry in self.entries if entry.kind == "tensor"], rank)
        arrays = {key: self.array(entry) for key, entry in tensors.items()}
        objects = by_key(self.objects, rank).items()
        values = {key: one if one.is_pickled else plain(decode(one.data), parts[one[:2]]) for key, one in objects}
        return nest(plain(decode(self.index["tree"]), {}), [arrays, values])

    def attachments(self) -> dict[str, bytes]:
        return self.short | {one.key: self.array(one).tobytes() for one in self.entries if one.kind == "attachment"}

    def leaves(self) -> dict[str, list[tuple[int, int, bool]]]:
        """Verify all blobs against their names. Return each leaf's bounds and health, the header's first."""
        found = {}
        for key, size in self.blobs:
            raw = (self.root / key).read_bytes()
            start = 4096 + json.loads(raw[8:4096])["proof"]["data_offsets"][0]
            name = blake3(raw[start:], derive_key_context=PROOF_CONTEXT).hexdigest()
            check(len(raw) == size and name in key, f"the proof of the blob {key}", DamagedError)
            lengths, hashes = zip(*struct.iter_unpack("<I32s", raw[start:]), strict=True)
            at, fits = [*accumulate(lengths, initial=0)], 2 <= len(lengths) <= 65536 and lengths[0] == 4096
            check(fits and 0 < min(lengths) <= max(lengths) <= 2**30 and at[-1] == start, f"the leaves of {key}")
            sound = (blake3(raw[a:b]).digest() == digest for (a, b), digest in zip(pairwise(at), hashes, strict=True))
            found[key] = list(zip(at, at[1:], sound, strict=False))
        return found


class Store:
    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        marker = json.loads((root / "casckpt.json").read_bytes())
        cell, blob = marker["cell_bytes"], marker["blob_bytes"]
        is_known = (marker["format"], marker["hash"], marker["features"]) == (1, "blake3", ["history-2"])
        check(is_known and 4096 <= cell <= blob <= 2**30 and cell % 4096 == 0, "a store that is not understood")

    def _names(self, folder: str, pattern: str) -> list[str]:
        return sorted(each.name for each in (self.root / folder).glob("*") if re.fullmatch(pattern, each.name))

    def record(self, key: str) -> dict[str, Any]:
        path = self.root / key
        check(path.is_file() and not path.is_symlink(), f"{key} is no object")
        line, _, rest = path.read_bytes().partition(b"\n")
        check(rest == blake3(line).hexdigest().encode() + b"\n", f"the record {key}", DamagedError)
        return dict(json.loads(line))

    def log(self, txid: str) -> Log:
        """Fold a log. Its record has the current places, and what the log says about them."""
        records, key = list[dict[str, Any]](), f"commits/{txid}"
        while (self.root / key).exists():
            records.append(self.record(key))
            key = f"commits/{txid}.{len(records)}"
        check(all(record["txid"] == txid for record in records), f"the log of {txid} tells of another transaction")
        state, current, existing = "", txid, {txid: dict[str, Any]()}
        for record in records:
            state, current = STATES.get(record["type"], state), record.get("by") or record.get("to") or current
            if record["type"] == "rewritten":
                existing[current] = {"head": record["head"], "manifest_bytes": record["manifest_bytes"]}
            elif record["type"] == "trimmed":
                existing = {current: existing[current]}
            elif state == "purged":
                break
        first = records[0] | existing[current] | {"places": current} if records else {}
        tagged = [(record["name"], record["generation"]) for record in records if record["type"] == "tagged"]
        return Log(state, first, [*existing] if state in {"visible", "forgotten"} else [], tagged)

    def visible(self) -> dict[tuple[str, int], str]:
        lists = [self.record(f"commits/ended/{name}")["ended"] for name in self._names("commits/ended", r"0|[1-9]\d*")]
        over = {txid for lines in lists for txid, *_ in lines}
        logs = [(txid, self.log(txid)) for txid in self._names("commits", TXID) if txid not in over]
        return {(log.record["run"], log.record["step"]): txid for txid, log in logs if log.state == "visible"}

    def newest_announced(self, run: str) -> str:
        """Find the newest visible checkpoint through the run's announcements. Return "" if there is none."""
        folder, best, floor = f"runs/{blake3(run.encode()).hexdigest()[:16]}", "", -1
        folders = self._names(folder, r"\d{6}")
        for key in (f"{six}/{name}" for six in folders for name in self._names(f"{folder}/{six}", r"\d{3}")):
            record = self.record(f"{folder}/{key}")
            told = [txid for txid, _ in record["announced"] if self.log(txid).state == "visible"]
            if 999_999_999 - int(key.replace("/", "")) > floor and max(told, default=best) > best:
                best, floor = max(told), record.get("seen", -1)
        return best

    def tags(self) -> dict[str, str]:
        """Return the ID that each tag refers to. Ignore expiry."""
        names = self._names("tags", r"[a-z0-9][a-z0-9._-]{0,99}")
        numbers = {name: max(map(int, self._names(f"tags/{name}", r"0|[1-9]\d{0,8}"))) for name in names}
        records = {name: self.record(f"tags/{name}/{number}") for name, number in numbers.items()}
        return {name: record["manifest"] for name, record in records.items() if record.get("manifest")}


def plain(item: Any, parts: dict[int, bytes]) -> Any:
    """Decode plain data, with parts for its large buffers. An unknown tag yields a tuple."""
    if not isinstance(item, list):
        return item
    tag, *rest = item[0], *(plain(each, parts) for each in item[1:])
    return parts[rest[0]] if tag == "part" else KINDS[tag](*rest) if tag in KINDS else (tag, *rest)


def nest(node: Any, leaves: list[dict[str, Any]], path: tuple[str, ...] = ()) -> Any:
    """Insert the leaves, tensors and objects by flat key, into a tree. A wrapper yields its form and its tensors."""
    if isinstance(node, int):
        return leaves[node][".".join(path)]
    if isinstance(node, tuple) and node[:1] == ("wrapper",):
        return json.loads(node[1][0]), nest(node[1][1], leaves, path)
    items = node.items() if isinstance(node, dict) else enumerate(node)
    found = {key: nest(child, leaves, (*path, str(key))) for key, child in items}
    return after(lambda made: made.update(found), node) if isinstance(node, dict) else type(node)(found.values())


def pairs(*flat: Any) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def after(change: Callable[[Any], object], made: Any) -> Any:
    change(made)
    return made


def ordered(more: Any, *flat: Any) -> Any:
    extra = {} if more is None else {"_metadata": more}
    return after(lambda made: vars(made).update(extra), OrderedDict(pairs(*flat)))


def dtype_of(form: Any) -> Any:
    if "formats" in form:
        return np.dtype(form | {"formats": [*map(dtype_of, form["formats"])]})
    return np.dtype((dtype_of(form[0]), form[1]) if isinstance(form, tuple) else form.partition("/")[0])


def generator(state: dict[str, Any], seed: dict[str, Any] | None) -> Any:
    kind = next(kind for kind in np.random.BitGenerator.__subclasses__() if kind.__name__ == state["bit_generator"])
    return after(lambda made: setattr(made, "state", state), kind(np.random.SeedSequence(**seed) if seed else 0))


PATHS = {kind: vars(pathlib)[kind] for kind in ("PurePosixPath", "PureWindowsPath", "PosixPath", "WindowsPath")}
FACTORIES = {kind.__name__: kind for kind in (list, dict, int, set, float, str, tuple)}
KINDS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: lambda *items, kind=kind: kind(items) for kind in (list, tuple, set, frozenset)},
    "Counter": lambda *flat: Counter(pairs(*flat)),
    "defaultdict": lambda name, *flat: defaultdict(FACTORIES.get(name), pairs(*flat)),
    "deque": lambda length, *items: deque(items, length),
    "SimpleNamespace": lambda *flat: types.SimpleNamespace(**pairs(*flat)),
    "Namespace": lambda *flat: after(lambda made: vars(made).update(pairs(*flat)), argparse.Namespace()),
    "int": lambda raw: int.from_bytes(raw, "little", signed=True),
    "str": lambda raw: raw.decode("utf-8", "surrogatepass"),
    "path": lambda kind, text: PATHS[kind](text),
    "time": lambda h, m, s, us, fold, zone: dt.time(h, m, s, us, zone, fold=fold),
    "datetime": lambda y, mo, d, h, m, s, us, fold, zone: dt.datetime(y, mo, d, h, m, s, us, zone, fold=fold),
    "timezone": lambda offset, name: dt.timezone(offset, *([] if name is None else [name])),
    "numpy.ndarray": lambda dtype, shape, raw: np.frombuffer(raw, dtype_of(dtype)).reshape(shape),
    "numpy.scalar": lambda dtype, raw: np.frombuffer(raw, dtype_of(dtype))[0],
    "numpy.Generator": lambda *two: np.random.Generator(generator(*two)),
    "numpy.RandomState": lambda state: after(lambda made: made.set_state(state), np.random.RandomState()),
}
KINDS |= {kind.__name__: kind for kind in (slice, range, complex, bytearray, dt.date, dt.timedelta)}
KINDS |= {"dict": pairs, "OrderedDict": ordered, "zoneinfo": zoneinfo.ZoneInfo}
KINDS |= {"numpy.str": np.str_, "numpy.bytes": np.bytes_, "numpy.BitGenerator": generator}
