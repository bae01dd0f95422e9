"""Tensors are found where they are whole and contiguous. Nothing that a file claims is believed, and no pickle runs."""

from __future__ import annotations

import copyreg
import io
import json
import os
import pickle
import struct
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

import casckpt
from casckpt.contents import manifests
from casckpt.errors import StorageError
from casckpt.frontends.files import cutting
from casckpt.frontends.files.cutting import LEAST, Cut, Span, cut
from casckpt.frontends.interchange.safetensors.files import NAMES
from tests.support.odd_files import (
    LENGTH,
    PLAIN,
    TWICE,
    WHOLE,
    N,
    Unseekable,
    archive,
    array,
    drawn,
    entry,
    hostile,
    index,
    metadata,
    pickled,
    placed,
    safetensors,
    saved,
    torch_file,
)  # fmt: skip
from tests.support.stored_folder import described, items_of

Found = list[tuple[str, str, tuple[int, ...]]]
RAW: tuple[str, tuple[int, ...]] = ("uint8", (N,))
FLOATS: tuple[str, tuple[int, ...]] = ("float32", (N // 4,))


class Bytes:
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        assert 0 <= offset <= offset + len(buffer) <= len(self.data)
        buffer[:] = self.data[offset : offset + len(buffer)]


def checked(data: bytes, archives: Sequence[Span] = ()) -> Cut:
    """Cut, and check what holds for any file."""
    found = cut(Bytes(data), len(data), archives)
    assert all(one.start >= 0 and one.end - one.start >= LEAST for one in found.tensors)
    assert all(one.end <= other.start for one, other in pairwise(found.tensors))
    assert not found.tensors or found.tensors[-1].end <= len(data)
    return found


def found_in(data: bytes, archives: Sequence[Span] = ()) -> Found:
    return [(one.name, one.dtype, one.shape) for one in checked(data, archives).tensors]


# safetensors


ONE = safetensors({"w": entry()}, drawn(N))
SAFE: dict[str, tuple[bytes, Found]] = {
    "one tensor": (ONE, [("w", *FLOATS)]),
    "no name": (safetensors({"": entry()}, drawn(N)), [("", *FLOATS)]),
    "a NUL in a name": (safetensors({"a\0b": entry()}, drawn(N)), [("a\0b", *FLOATS)]),
    "a long name": (safetensors({"n" * 9000: entry()}, drawn(N)), [("n" * 9000, *FLOATS)]),
    "a name with slashes": (safetensors({"../../x": entry()}, drawn(N)), [("../../x", *FLOATS)]),
    "empty and small tensors between": (
        safetensors(
            {"e": entry(shape=(0, 5), end=0), "w": entry(), "s": entry(shape=(2,), start=N, end=N + 8)}, drawn(N + 8)
        ),
        [("w", *FLOATS)],
    ),
    "half bytes": (
        safetensors({"w": entry("F4", (2, N))}, drawn(N)), [("w", "float4_e2m1fn_x2", (2, N // 2))],
    ),
    "bytes behind": (ONE + b"more", [("w", *FLOATS)]),
    "the same name twice": (safetensors(b'{"w":%b,"w":%b}' % ((json.dumps(entry()).encode(),) * 2), drawn(N)), []),
    "a lone surrogate": (safetensors(b'{"\\ud800":%b}' % json.dumps(entry()).encode(), drawn(N)), []),
    "bytes without a tensor": (safetensors({"w": entry(start=8, end=N + 8)}, drawn(N + 8)), []),
    "tensors that overlap": (safetensors({"v": entry(), "w": entry(start=4, end=N + 4)}, drawn(N + 8)), []),
    "a size that lies": (safetensors({"w": entry(shape=(9,))}, drawn(N)), []),
    "a negative size": (safetensors({"w": entry(shape=(-2, -N // 8))}, drawn(N)), []),
    "a size that is no number": (safetensors({"w": entry() | {"shape": [N / 4]}}, drawn(N)), []),
    "many dimensions": (safetensors({"w": entry(shape=[N // 4] + [1] * 99)}, drawn(N)), []),
    "a huge size": (safetensors({"w": entry(shape=(2**62, 2**62), end=2**126)}, drawn(N)), []),
    "a dtype that is not known": (safetensors({"w": entry("F33")}, drawn(N)), []),
    "odd half bytes": (safetensors({"w": entry("F4", (2, 3))}, drawn(N)), []),
    "deep JSON": (safetensors(b"{" + b'"a":[' * 100_000, drawn(N)), []),
    "no JSON": (safetensors(b"{" * 90, drawn(N)), []),
    "a list": (safetensors(b"{}" + b" " * 80_000, b""), []),
    "metadata that is no text": (safetensors({"__metadata__": {"a": 1}, "w": entry()}, drawn(N)), []),
    "no data": (safetensors({}, drawn(N)), []),
}  # fmt: skip


@pytest.mark.parametrize("what", SAFE)
def test_tensors_in_safetensors_are_found_unless_the_header_breaks_a_rule(what: str) -> None:
    data, expected = SAFE[what]
    assert found_in(data) == expected


def test_tensors_of_every_dtype_are_found() -> None:
    """F4 has two elements in a byte, and one in the store."""
    for name, stored in NAMES.items():
        size = N // (torch.empty(0, dtype=getattr(torch, name)).element_size())
        data = safetensors({"w": entry(stored, (size * 2 if stored == "F4" else size,))}, drawn(N))
        assert found_in(data) == [("w", name, (size,))], name


@pytest.mark.parametrize("lost", [1, 4096, N, N + 5])
def test_a_truncated_file_is_not_cut_and_known_as_such(lost: int) -> None:
    archive = torch_file({"w": torch.ones(N // 4)})
    assert checked(ONE).is_whole
    assert checked(archive).is_whole
    assert checked(ONE[:-lost]) == Cut(is_whole=False) or lost > N
    assert checked(archive[:-lost]) == Cut(is_whole=False)
    assert checked(ONE[: 8 + len(ONE) - N - 10]).tensors == ()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 10])
@pytest.mark.parametrize("head", [ONE, b"PK\x03\x04" + bytes(9), b"\x93NUMPY\1\0\xff\xff"])
def test_a_file_of_few_bytes_is_not_cut(head: bytes, size: int) -> None:
    assert checked(head[:size]).tensors == ()


@pytest.mark.parametrize(("kind", "at"), [("safetensors", 0), ("safetensors", 9), ("zip", 0), ("zip", 9), ("zip", 70)])
def test_the_errors_of_the_file_system_are_not_taken_for_those_of_a_format(kind: str, at: int) -> None:
    class Failing(Bytes):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            if offset <= at < offset + len(buffer):
                raise StorageError("the disk is broken")
            super().read_into(offset, buffer)

    data = safetensors({"w" * 200: entry()}, b"") if kind == "safetensors" else torch_file({"w": torch.ones(N)})
    with pytest.raises(StorageError, match="broken"):
        cut(Failing(data), len(data))


# torch.save


BOTH: Found = [("data/0", *FLOATS), ("data/1", *FLOATS)]


def directory_of(data: bytes, number: int) -> int:
    """Return where the directory describes a member."""
    at = data.index(b"PK\1\2")
    for _ in range(number):
        at = data.index(b"PK\1\2", at + 4)
    return at


def changed(data: bytes, number: int, offset: int, code: str, value: int) -> bytes:
    """Change what the directory of a zip file says about a member."""
    there = bytearray(data)
    struct.pack_into(f"<{code}", there, directory_of(data, number) + offset, value)
    return bytes(there)


FLAGS, SIZES, PLACE = 8, 20, 42  # in a member's description
ZIPS: dict[str, Callable[[], tuple[bytes, Found]]] = {
    "a plain one": lambda: (archive(PLAIN), [("data/0", *FLOATS)]),
    "two storages": lambda: (archive(TWICE), BOTH),
    "views of one storage": lambda: (
        torch_file([(w := torch.arange(N // 4, dtype=torch.float32)), w[5:900], w.view(2, -1)]),
        [("data/0", *FLOATS)],
    ),
    "sizes of 0": lambda: (archive(TWICE, file=Unseekable()), BOTH),
    "zip64": lambda: (archive(TWICE, zip64=True), BOTH),
    "sizes of 0 and zip64": lambda: (archive(TWICE, zip64=True, file=Unseekable()), BOTH),
    "compressed members": lambda: (archive(TWICE, how=zipfile.ZIP_DEFLATED), []),
    "an encrypted member": lambda: (changed(archive(TWICE), 1, FLAGS, "H", 1), BOTH[1:]),
    "a pickle that is encrypted": lambda: (
        changed(archive(TWICE), 0, FLAGS, "H", 1), [("data/0", *RAW), ("data/1", *RAW)],
    ),
    "a compressed pickle": lambda: (
        changed(archive(TWICE), 0, 10, "H", 8), [("data/0", *RAW), ("data/1", *RAW)],
    ),
    "a method that is not known": lambda: (changed(archive(TWICE), 1, 10, "H", 99), BOTH[1:]),
    "a member that is too long": lambda: (
        changed(changed(archive(TWICE), 2, SIZES, "L", 1 << 20), 2, SIZES + 4, "L", 1 << 20), [],
    ),
    "a member outside": lambda: (changed(archive(TWICE), 2, PLACE, "L", 1 << 30), []),
    "a member without a header": lambda: (changed(archive(TWICE), 2, PLACE, "L", 999), []),
    "members in the same place": lambda: (
        changed(archive(TWICE), 2, PLACE, "L", archive(TWICE).index(b"a/data/0") - 30), [],
    ),
    "members that overlap": lambda: (
        changed(changed(archive(TWICE), 1, SIZES, "L", N + 4096), 1, SIZES + 4, "L", N + 4096), [],
    ),
    "a name that occurs twice": lambda: (
        archive([PLAIN[0], PLAIN[1], ("a/data/0", drawn(N, 1))]), [("data/0", *FLOATS)] * 2,
    ),
    "bytes behind": lambda: (archive(TWICE) + bytes(70), BOTH),
    "many bytes behind": lambda: (archive(TWICE) + bytes(70_000), []),
    "bytes in front": lambda: (b"#!/bin/sh\n" + archive(TWICE), []),
    "a zip file in front": lambda: (archive(PLAIN) + archive(TWICE), BOTH),
    "no directory": lambda: (archive(TWICE)[: directory_of(archive(TWICE), 0)], []),
    "a directory that begins in front of the file": lambda: (
        (data := archive(TWICE))[:-10] + struct.pack("<L", 1 << 30) + data[-6:], [],
    ),
    "no pickle": lambda: (archive(TWICE[1:]), [("a/data/0", *RAW), ("a/data/1", *RAW)]),
    "no storage for the pickle's type": lambda: (
        archive([("a/data.pkl", pickled("7")), PLAIN[1]]), [("data/0", *RAW)],
    ),
    "a part of an element": lambda: (
        archive([PLAIN[0], ("a/data/0", drawn(N - 1))]), [("data/0", "uint8", (N - 1,))],
    ),
    "a version that is not known": lambda: (changed(archive(TWICE), 1, 6, "H", 99), []),
    "a dtype that is not known": lambda: (
        archive([("a/data.pkl", pickled("0", kind=b"X\5\0\0\0float")), PLAIN[1]]), [],
    ),
    "a type of another module": lambda: (
        archive([("a/data.pkl", pickled("0", kind=b"cthis\nFloatStorage\n")), PLAIN[1]]), [("data/0", *RAW)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ZIPS)
def test_storages_in_zip_files_are_found_unless_the_directory_breaks_a_rule(what: str) -> None:
    data, expected = ZIPS[what]()
    assert found_in(data) == expected


def test_the_directory_of_a_zip_file_may_be_in_zip64_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "ZIP64_LIMIT", 100)
        patch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
        data = archive(TWICE, zip64=True)
    assert b"PK\6\6" in data
    assert found_in(data) == BOTH
    monkeypatch.setattr(cutting, "_MOST_BYTES", 100)
    assert found_in(data) == []


@pytest.mark.parametrize("dtype", sorted(set(cutting._STORAGES.values())))
def test_the_dtypes_of_storages_are_known(dtype: str) -> None:
    tensor = torch.zeros(N, dtype=torch.uint8).view(getattr(torch, dtype))
    assert found_in(torch_file({"w": tensor})) == [("data/0", dtype, tensor.shape)]


def test_storages_without_a_type_are_bytes() -> None:
    assert found_in(torch_file(torch.zeros(N, dtype=torch.uint8).view(torch.float8_e4m3fn))) == [("data/0", *RAW)]
    assert found_in(torch_file(torch.zeros(N).untyped_storage())) == [("data/0", "uint8", (N * 4,))]


def test_an_archive_of_torchscript_is_cut() -> None:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch plans to remove TorchScript
        torch.jit.save(torch.jit.script(torch.nn.Linear(N // 4, 1)), file)
    assert ("data/0", *FLOATS) in found_in(file.getvalue())


def _tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as written:
        info = tarfile.TarInfo("data/0")
        info.size = N
        written.addfile(info, io.BytesIO(drawn(N)))
    return file.getvalue()


@pytest.mark.parametrize(
    "make",
    [
        partial(torch_file, {"w": torch.ones(N)}, _use_new_zipfile_serialization=False), _tar,
        partial(drawn, 2 * N), partial(bytes, 2 * N), lambda: b"\xff" * N,
    ],
    ids=["legacy", "tar", "random", "zeros", "ones"],
)  # fmt: skip
def test_other_files_are_not_cut(make: Callable[[], bytes]) -> None:
    assert checked(make()) == Cut()


# pickles that may do harm


def test_no_pickle_is_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    copyreg.add_extension("os", "system", 240)
    copyreg._extension_cache[240] = os.system  # type: ignore[attr-defined] # a pickle has used it before
    modules, hidden = {*sys.modules}, sys.modules.pop("this", None)
    try:
        for name, data in hostile(canary):
            found = found_in(archive([("a/data.pkl", data), PLAIN[1]]))
            assert ("data/0", *RAW) in found, name
            assert not canary.exists(), name
            both = archive([("a/data.pkl", pickled("0")[:-1] + b"0" + data), PLAIN[1]])
            assert "data/0" in [one[0] for one in found_in(both)], name
            assert not canary.exists(), name
        assert {name for name in sys.modules if not name.startswith("encodings")} <= modules
        assert "this" not in sys.modules
    finally:
        copyreg.remove_extension("os", "system", 240)
        if hidden is not None:
            sys.modules["this"] = hidden


# numpy


def described_as(descr: str = "'<f4'", shape: str = f"({N // 4},)", order: object = False) -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}"


GRID = np.arange(N // 4, dtype="f4").reshape(90, -1)
RECORDS = np.zeros(N // 6, [("a", "<f4"), ("é", "<i2")])
ARRAYS: dict[str, tuple[bytes, Found]] = {
    "version 1": (saved(GRID, (1, 0)), [("array", "float32", (90, 200))]),
    "version 2": (saved(GRID, (2, 0)), [("array", "float32", (90, 200))]),
    "version 3": (saved(GRID, (3, 0)), [("array", "float32", (90, 200))]),
    "by columns": (saved(np.asfortranarray(GRID)), [("array", "float32", (200, 90))]),
    "big-endian": (saved(GRID.astype(">f4")), [("array", *RAW)]),
    "records": (saved(RECORDS, (3, 0)), [("array", *RAW)]),
    "records by columns": (saved(np.asfortranarray(RECORDS.reshape(80, -1))), [("array", *RAW)]),
    "a dtype with a shape": (array(described_as("('<f4', (3,))", f"({N // 12},)")), [("array", *RAW)]),
    "times": (saved(np.zeros(N // 8, "M8[s]")), [("array", *RAW)]),
    "text": (saved(np.zeros(N // 8, "U2")), [("array", *RAW)]),
    "one large element": (array(described_as(f"'|V{N}'", "()")), [("array", *RAW)]),
    "bytes behind": (array(described_as(), drawn(N) + b"more"), [("array", *FLOATS)]),
    "objects": (saved(np.array([{}] * 90_000, object)), []),
    "too few bytes": (array(described_as(), drawn(N - 1)), []),
    "nothing": (saved(np.zeros((0, 5))) + bytes(N), []),
    "negative sizes": (array(described_as(shape=f"(-2, -{N // 8})")), []),
    "a negative size": (array(described_as(shape="(-9,)")), []),
    "many dimensions": (array(described_as(shape=f"({N // 4}, {'1,' * 99})")), []),
    "sizes that are true": (array(described_as(shape=f"(True, {N // 4})")), [("array", "float32", (1, N // 4))]),
    "huge sizes": (array(described_as(shape="(2 ** 62, 2)")), []),
    "more elements than numbers have": (array(described_as(shape=f"({2**62}, {2**62})")), []),
    "a call": (array(described_as(shape="(__import__('this'),)")), []),
    "a header that is no Python": (array("{'descr': ((("), []),
    "a header that is no Python, in version 3": (array("{'descr': (((", version=(3, 0)), []),
    "an indented header": (array(" x\n  y\n z"), []),
    "a header with a NUL": (array("\0"), []),
    "a deep header": (array("[" * 9000), []),
    "a long header": (array(described_as() + " " * 20_000), []),
    "a header that is no dict": (array("[1]"), []),
    "a dtype that is not known": (array(described_as("'<f99'")), []),
    "a dtype that is deep": (array(described_as("[('a', " * 90 + "'f4'" + ")]" * 90)), [("array", *RAW)]),
    "a version that is not known": (b"\x93NUMPY\7\0" + drawn(N), []),
    "a header without an end": (b"\x93NUMPY\2\0\xff\xff\xff\xff" + drawn(N), []),
}


@pytest.mark.filterwarnings("ignore")  # numpy warns of old headers and of dtypes that it will not read later
@pytest.mark.parametrize("what", ARRAYS)
def test_arrays_are_found_unless_the_header_breaks_a_rule(what: str) -> None:
    data, expected = ARRAYS[what]
    assert found_in(data) == expected
    zipped = archive([("x.npy", data)])
    assert found_in(zipped) == [("x.npy", *rest) for _, *rest in expected]
    assert found_in(archive([("x.npy", data)], how=zipfile.ZIP_DEFLATED)) == []


# DCP


ALONE: Found = [("x.distcp/data/0", *FLOATS)]
DCP: dict[str, tuple[bytes, Found]] = {
    "two archives": (
        metadata(a=placed(), b=placed(LENGTH, key=index("v", offset=torch.Size([3, 0])))),
        [("x.distcp/w/data/0", *FLOATS), ("x.distcp/v@3,0/data/0", *FLOATS)],
    ),
    "one is described": (metadata(a=placed(LENGTH)), [("x.distcp/w/data/0", *FLOATS)]),
    "the same place twice": (metadata(a=placed(), b=placed(key=index("v"))), []),
    "places that overlap": (  # the second archive is the last one in its place
        metadata(a=placed(), b=placed(0, 2 * LENGTH, key=index("v"))),
        [("x.distcp/w/data/0", *FLOATS), ("x.distcp/v/data/0", *FLOATS)],
    ),
    "a place outside": (metadata(a=placed(LENGTH + 1)), []),
    "a place far outside": (metadata(a=placed(2**70)), []),
    "half an archive": (metadata(a=placed(length=LENGTH - 5)), []),
    "another place": (metadata(a=placed(3)), []),
    "no bytes": (metadata(a=placed(length=0)), []),
    "a negative place": (metadata(a=placed(-5)), ALONE),
    "a negative length": (metadata(a=placed(length=-LENGTH)), ALONE),
    "a place that is no number": (metadata(a=placed("0")), ALONE),
    "a place that is a float": (metadata(a=placed(0.0)), ALONE),
    "a place that is true": (metadata(a=placed(True)), ALONE),
    "a path that is no text": (metadata(a=placed(path=["x"])), ALONE),
    "a path elsewhere": (metadata(a=placed(path="../x.distcp"), b=placed(path="/etc/passwd", key=index("v"))), ALONE),
    "a position that is a number": (metadata(a=placed(key=index(offset=5))), ALONE),
    "a name that is None": (metadata(a=placed(key=index(None))), [("x.distcp/None/data/0", *FLOATS)]),
    "a name that no entry can have": (metadata(a=placed(key=index("\0" * 5000))), []),
    "a name that is no text": (metadata(a=placed(key=index("\ud800"))), []),
    "no places": (pickle.dumps(Metadata({}, storage_data=None)), ALONE),
    "places in a list": (pickle.dumps(Metadata({}, storage_data=[1])), ALONE),
    "places of something else": (pickle.dumps(Metadata({}, storage_data={1: 2})), ALONE),
    "something else": (pickle.dumps({}), ALONE),
    "a hostile pickle": (b"cos\nsystem\n(S'touch {canary}'\ntR.", ALONE),
    "a hostile index": (b"cthis\ns\n.", ALONE),
    "no pickle": (b"\x80\4garbage", ALONE),
    "nothing": (b"", ALONE),
}


@pytest.mark.parametrize("what", DCP)
def test_archives_of_dcp_are_found_unless_the_metadata_breaks_a_rule(
    tmp_path: Path, store: casckpt.Store, what: str
) -> None:
    folder, canary = tmp_path / "folder", tmp_path / "canary"
    folder.mkdir()
    data, expected = DCP[what]
    (folder / ".metadata").write_bytes(data.replace(b"{canary}", bytes(canary)))
    (folder / "x.distcp").write_bytes(WHOLE if expected is ALONE else WHOLE * 2)
    made = store.import_files(folder, step=1)
    assert not canary.exists()
    found = [(one.key, one.dtype, one.shape) for one in made_entries(store, made)]
    assert [one for one in found if "/data/" in one[0]] == expected
    store.export(made, tmp_path / "out")
    assert described(tmp_path / "out") == described(folder)


def made_entries(store: casckpt.Store, made: casckpt.Checkpoint) -> Sequence[Any]:
    return manifests.get(store.repository, made.commit).entries


# all of them


@pytest.mark.filterwarnings("ignore")
def test_every_file_comes_back_byte_for_byte_and_its_tensors_are_entries(tmp_path: Path, store: casckpt.Store) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "500 step").mkdir()
    samples = {f"safetensors {name}": data for name, (data, _) in SAFE.items()}
    samples |= {f"zip {name}": make()[0] for name, make in ZIPS.items()}
    samples |= {f"npy {name}": data for name, (data, _) in ARRAYS.items()}
    samples |= {f"pickle {name}": archive([("a/data.pkl", data), PLAIN[1]]) for name, data in hostile(tmp_path / "x")}
    for name, data in samples.items():
        (folder / "500 step" / name).write_bytes(data)
    made = store.import_files(folder, step=500)
    store.export(made, tmp_path / "out")
    assert described(tmp_path / "out") == described(folder)
    assert not (tmp_path / "x").exists()
    assert any(one.key == "{step} step/safetensors one tensor/w" for one in made_entries(store, made))
    pieces = {item.path: item.pieces for item in items_of(store, made)}
    assert len(pieces["500 step/safetensors one tensor"]) == 2
    assert len(pieces["500 step/safetensors a NUL in a name"]) == 1  # no entry can have this name
    assert len(pieces["500 step/zip a name that occurs twice"]) == 3
