"""Decoders of stored data, with changed bytes. Each decoder returns a value or raises a casckpt error.

Where a hash protects the bytes, the test corrects the hash, as an attacker with write access would, so that the bytes
reach the decoder.

``python -m tests.support.fuzz_decoders KIND COUNT SEED`` decodes COUNT changed inputs, with 256 MiB of memory.
`tests.support.fuzz_guided` lets atheris choose inputs by coverage.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Final, TypeAlias

import numpy as np

from casckpt.base.digest import hex_digest
from casckpt.errors import CasckptError
from casckpt.format import blob, manifest, plain, proof, records, tree
from casckpt.format.encodings import frames
from casckpt.format.extents import ExtentTable
from casckpt.format.names import ManifestId
from casckpt.format.sections import recipe
from casckpt.format.sections.head import COPIED, KNOWN, Section, assemble
from casckpt.format.sections.health import HEALTH
from casckpt.frontends.dcp.folder import read_metadata
from tests.support.fuzz import bent, bound_memory
from tests.support.tally import tally

DATA: Final = Path(__file__).resolve().parents[1] / "data"
STORES: Final = (DATA / "frozen_store", DATA / "frozen_store_coded")
MEMORY: Final = 256 << 20
MOST: Final = 1 << 16
"""The maximum size of a seed in bytes, because thousands of them are modified."""
_VALUES: Final = (
    None, True, -7, 2**70, 1.5, "text\ud800", b"bytes", [1, [2, (3, {4})]], {"a": {1: 2.0, (1, "b"): None}}, 3 + 4j,
    datetime(2026, 1, 1, tzinfo=UTC), timedelta(1), Path("a/b"), np.arange(6, dtype=">i2").reshape(2, 3), range(3),
    np.random.default_rng(1), np.zeros(2, dtype=[("x", "f4"), ("y", "u1", 3)]), OrderedDict(a=1), frozenset({1}),
)  # fmt: skip

Decode: TypeAlias = Callable[[bytes], object]


def _record(data: bytes) -> None:
    line = data.partition(b"\n")[0]
    whole = line + b"\n" + hex_digest(line).encode() + b"\n"
    for kind in (*records.Record.__subclasses__(), records.FirstRecord, records.LaterRecord):
        with suppress(CasckptError):
            records.decode(whole, kind, "commits/x")


def _section(name: str, data: bytes) -> None:
    """Return a manifest with these bytes as one of its sections."""
    for seed in [_inspected()] if name == HEALTH else _manifests():
        sections = {one: bytes(seed.section(one)) for one in KNOWN}
        foreign = [(Section(name, COPIED, 0, len(data), b""), data)] if name == HEALTH else []
        head, whole = assemble((sections | ({} if foreign else {name: data})).items(), foreign)
        with suppress(CasckptError):
            _look_at(manifest.decode(whole, ManifestId(head["index"].digest.hex())))


def _look_at(found: manifest.Manifest) -> None:
    for each in (
        lambda: found.health,
        lambda: found.metadata,
        lambda: tree.decode_tree(found.body.tree),
        lambda: list(found.blobs),
    ):
        with suppress(CasckptError):
            each()
    for entry in found.entries:
        with suppress(CasckptError):
            _ = found.extents(entry).extents
        with suppress(CasckptError):
            found.cells(entry)
    for one in found.objects:
        with suppress(CasckptError):
            plain.decode(found.data(one))
    found.faults()


def _frame(data: bytes) -> None:
    base = memoryview(bytearray(range(256)) * 16)
    for nbytes in (4096, 4095, 8):
        with suppress(CasckptError):
            frames.decode(memoryview(data), memoryview(bytearray(nbytes)), base[:nbytes])
        with suppress(CasckptError):
            frames.undo(memoryview(data), memoryview(bytearray(nbytes)))


def _proof(data: bytes) -> None:
    for size in (len(data), len(data) + 4096, 1 << 20):
        found = proof.find_proof(data, size)
        if found is not None:
            proof.decode_proof(found)
    proof.decode_proof(data)


def _header(data: bytes) -> None:
    ends = re.findall(rb"([0-9]{1,18})]", data)
    blob.decode_header(data[:4096].ljust(4096), 4096 + (int(ends[-1]) if ends else 0))


def _recipe(data: bytes) -> None:
    recipe.decode_recipe(data, _folder().entries)


DECODERS: Final[dict[str, Decode]] = {
    "record": _record, "marker": records.decode_marker, "frame": _frame, "proof": _proof, "header": _header,
    "plain": plain.decode, "tree": tree.decode_tree,
    "recipe": _recipe,
    "dcp": lambda data: read_metadata(data, "x", anything=False),
    **{name: partial(_section, name) for name in (*KNOWN, HEALTH)},
}  # fmt: skip


@cache
def _manifests() -> list[manifest.Manifest]:
    """Return a plain manifest and an encoded one."""
    return [_decoded(min(store.rglob("*.manifest"), key=lambda path: (path.stat().st_size, path))) for store in STORES]


def _decoded(path: Path) -> manifest.Manifest:
    return manifest.decode(path.read_bytes(), ManifestId(path.name.partition(".")[0]))


@cache
def _inspected() -> manifest.Manifest:
    """Return a manifest with the health of its tensors."""
    (found,) = (one for path in STORES[0].rglob("*.manifest") if HEALTH in (one := _decoded(path)).head)
    return found


@cache
def _folder() -> manifest.Manifest:
    """Return the manifest of a folder of another program."""
    (path,) = (DATA / "folder_store").rglob("*.manifest")
    return _decoded(path)


def seeds(kind: str) -> list[bytes]:
    """Return the inputs to change: data from the frozen stores, and inputs found by atheris."""
    return stored(kind) + [path.read_bytes() for path in sorted((DATA / "fuzz" / kind).glob("*"))]


def stored(kind: str) -> list[bytes]:
    """Return data from the frozen stores, which casckpt wrote."""
    return [data for data in _seeds(kind) if len(data) <= MOST]


def _seeds(kind: str) -> Iterator[bytes]:
    files = [path for store in STORES for path in sorted(store.rglob("*")) if path.is_file()]
    if kind in KNOWN:
        yield from (bytes(one.section(kind)) for one in _manifests())
    elif kind == "record":
        others = ("objects", "signatures", "casckpt.json", "expected.json")
        yield from (path.read_bytes() for path in files if path.relative_to(DATA).parts[1] not in others)
    elif kind == HEALTH:
        yield bytes(_inspected().section(HEALTH))
    elif kind == "marker":
        yield from (path.read_bytes() for path in files if path.name == "casckpt.json")
    elif kind in ("header", "proof"):
        blobs = [path.read_bytes() for path in files if path.suffix == ".safetensors"]
        yield from (data[:4096] if kind == "header" else proof.find_proof(data, len(data)) or b"" for data in blobs)
    elif kind == "frame":
        yield from _stored_frames()
    elif kind == "dcp":
        yield (DATA / "torch_dist" / ".metadata").read_bytes()
    elif kind == "tree":
        yield from (bytes(one.body.tree) for one in _manifests())
    elif kind == "recipe":
        yield _folder().body.notes[recipe.NOTE]
    else:
        yield from (plain.encode(value) for value in _VALUES)


def _stored_frames() -> Iterator[bytes]:
    files = {path.stem: path for path in STORES[1].rglob("*.safetensors")}
    for path in sorted(STORES[1].rglob("*.manifest")):
        found = _decoded(path)
        found.left_out = "some of them were thinned"
        for entry in found.held:
            table: ExtentTable = found.extents(entry)
            for cell in (one for one in table.stored_cells() if one.frame):
                start = files[found.blob(cell.blob).hash].read_bytes()
                yield start[cell.offset : cell.offset + cell.stored]


def bend(kind: str, count: int, seed: int) -> int:
    """Decode ``count`` changed inputs. Return how many were valid. Raise any error that is not a casckpt error."""
    random, given = Random(f"{kind} {seed}"), seeds(kind)
    decoded = 0
    for _ in range(count):
        decoded += decodes(kind, bent(random.choice(given), random))
    tally(f"bent bytes: {kind}", count)
    return decoded


def decodes(kind: str, data: bytes) -> bool:
    """Decode some bytes. Return False if they are rejected. Raise any other error together with the bytes."""
    try:
        DECODERS[kind](data)
    except CasckptError:
        return False
    except BaseException as error:
        error.add_note(f"{kind}: {data!r}")
        raise
    return True


if __name__ == "__main__":
    bound_memory(MEMORY)
    print(bend(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))  # noqa: T201 - its parent reads it
