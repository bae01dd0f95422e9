"""The files of a checkpoint and their ETags, which depend only on content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

import casckpt
from casckpt.format.dtypes import itemsize
from casckpt.format.sections.index import Entry
from casckpt.frontends.interchange.safetensors.layout import FileLayout
from casckpt.frontends.serve.folders import File, FileSpan, ServedFolder, ServedFolders, Unsatisfiable, parse_range
from casckpt.frontends.serve.sending import WINDOW_BYTES, RangeReader
from casckpt.frontends.views.recut import ViewTensor
from casckpt.store.store import Store
from tests.support.coded import code
from tests.support.saves import CELL, blob_keys, cells, flip, small, small_folder, trained

SHARD = 12 * CELL


def folder(store: Store, ref: str = "latest") -> ServedFolder:
    return ServedFolders(store, SHARD).of(store.get(ref))


def etags(store: Store, ref: str = "latest") -> dict[str, str]:
    return {name: file.etag for name, file in folder(store, ref).files.items()}


def content(store: Store, of: ServedFolder, name: str, start: int = 0, stop: int | None = None) -> bytes:
    file, buffer = of.files[name], memoryview(bytearray(WINDOW_BYTES))
    reader = RangeReader(store.repository, of, file, FileSpan(start, file.nbytes if stop is None else stop))
    found = bytes(reader.head)
    while window := reader.next():
        assert window.start == start + len(found)
        found += reader.read(window, buffer)
    return found


def state(step: int) -> dict[str, Any]:
    layers = {f"h.{n}.weight": trained(5, 1 if n < 3 else step, seed=n) for n in range(4)}
    return {"model": layers | {"bias": torch.arange(7), "none": torch.zeros(0, 3)}, "optim": {"x": cells(4, seed=1)}}


def test_served_files_equal_an_export(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    store.save(state(1), step=1, attachments={"config.json": b"{}", "sub/long.bin": bytes(range(256)) * 1000})
    store.export("latest", tmp_path / "out", max_shard_size=SHARD)
    of = folder(store)
    written = {path.relative_to(tmp_path / "out").as_posix(): path for path in (tmp_path / "out").rglob("*.*")}
    assert {name for name, path in written.items() if path.is_file()} == set(of.files)
    for name in of.files:
        assert content(store, of, name) == written[name].read_bytes(), name


@given(data=st.data())
def test_any_range_of_a_file_is_served(data: st.DataObject) -> None:
    store = small()
    store.save(state(1), step=1)
    whole = ServedFolders(store, 1 << 30).of(store.get("latest"))
    (name,) = whole.files
    every = content(store, whole, name)
    assert load(every).keys() == state(1)["model"].keys()
    start = data.draw(st.integers(0, len(every)))
    stop = data.draw(st.integers(start, len(every)))
    assert content(store, whole, name, start, stop) == every[start:stop]


def test_an_etag_changes_only_if_the_tensors_of_its_file_change() -> None:
    store = small()
    for step in (1, 2):
        store.save(state(step), step=step)
    one, other = etags(store, "default@1"), etags(store, "default@2")
    changed = {name for name in one if one[name] != other[name]}
    weights = folder(store, "default@1")
    heads = {name: bytes(file.wanted(FileSpan(0, file.nbytes))[0]) for name, file in weights.files.items()}
    holding = {name for name, head in heads.items() if b"h.3.weight" in head}
    assert changed == {name for name in holding if name.endswith(".safetensors")}
    assert 1 == len(changed) < len(one) - 1


@pytest.mark.parametrize("how", ["again", "another run", "repaired", "coded", "copied", "encoded", "thinned"])
def test_etags_do_not_depend_on_locations_or_ids(tmp_path: Path, how: str) -> None:
    store = small()
    store.save(state(1), step=1)
    store.save(state(2), step=2)
    before, other = etags(store, "default@2"), store
    contents = [content(store, folder(store, "default@2"), name) for name in before]
    ref = "default@2"
    if how == "again":
        store.save(state(2), step=3)
        ref = "default@3"
    elif how == "another run":
        other = small(blob_bytes=128 << 10)
        other.save(state(2), run="other", step=9)
        ref = "other@9"
    elif how == "repaired":
        twin = small()
        store.copy_to(twin)
        for key in blob_keys(store):
            flip(store, key, 5000)
        assert store.verify().is_damaged
        store.repair(twin)
    elif how == "coded":
        code(store, "default@2", "default@1")
    elif how in ("copied", "encoded"):
        other = small()
        store.copy_to(other, compress="always" if how == "encoded" else "off")
    else:
        store.thin("default@1", drop="optim.*")
        store.thin("default@2", drop="optim.*")
        store.gc(min_age=0)
    assert etags(other, ref) == before
    assert [content(other, folder(other, ref), name) for name in before] == contents


def test_etags_depend_on_names_dtypes_and_shapes() -> None:
    store, seen = small(), set[str]()
    zeros = torch.zeros(8)
    values = ("a", zeros), ("b", zeros), ("a", zeros.view(2, 4)), ("a", zeros.int()), ("a", zeros + 1)
    for step, (name, value) in enumerate(values):
        store.save({"model": {name: value}}, step=step)
        seen.add(etags(store)["model.safetensors"])
    assert len(seen) == 5


def test_a_checkpoint_without_a_model_is_served_without_config() -> None:
    store = small()
    store.save({"one": {"w": cells(1)}, "other": {"w": cells(1)}}, step=1, attachments={"config.json": b"{}", "a": b""})
    of = folder(store)
    assert set(of.files) == {"model.safetensors", "a"}
    assert set(load(content(store, of, "model.safetensors"))) == {"one.w", "other.w"}
    assert content(store, of, "a") == b""


def test_an_attachment_with_the_name_of_a_weight_file_is_not_served() -> None:
    store = small()
    store.save(state(1), step=1, attachments={"model.safetensors": b"old", "model.safetensors.index.json": b"old"})
    of = ServedFolders(store, 1 << 30).of(store.get("latest"))
    assert set(of.files) == {"model.safetensors"}
    assert set(load(content(store, of, "model.safetensors"))) == set(state(1)["model"])


def test_a_hand_written_view_is_an_ordinary_attachment() -> None:
    store, view = small(), b'{"rename": {"x": "y"}}'
    store.save({"model": {"x": cells(1)}}, step=1, attachments={"casckpt.view.json": view})
    of = folder(store)
    assert content(store, of, "casckpt.view.json") == view
    assert load(content(store, of, "model.safetensors")).keys() == {"x"}


def test_folders_that_are_served_are_cached_and_later_dropped() -> None:
    store = small()
    for step in range(12):
        store.save({"model": {"x": cells(1)}}, step=step)
    folders = ServedFolders(store, 1 << 30)
    made = [folders.of(one) for one in store.checkpoints()]
    assert folders.held(made[-1].checkpoint.id[:40]) is made[-1]
    assert folders.held(made[0].checkpoint.id[:40]) is None
    assert folders.of(made[-1].checkpoint) is made[-1]
    folders.drop(made[-1])
    assert folders.held(made[-1].checkpoint.id) is None


def test_a_store_opened_by_path_is_served(store: casckpt.Store) -> None:
    store.save({"model": {"x": torch.ones(3)}}, step=1)
    assert torch.equal(load(content(store, folder(store), "model.safetensors"))["x"], torch.ones(3))


@pytest.mark.parametrize(
    ("header", "span"),
    [
        (None, None),
        ("bytes=0-0", (0, 1)),
        ("bytes=0-99", (0, 100)),
        ("bytes=10-", (10, 100)),
        ("bytes=-10", (90, 100)),
        ("bytes=-1000", (0, 100)),
        ("bytes=99-5000", (99, 100)),
        ("Bytes= 3-7 ", (3, 8)),
        (f"bytes=0-{'9' * 5000}", (0, 100)),
        ("bytes=0-1,5-6", None),
        ("items=0-5", None),
        ("bytes=a-b", None),
        ("bytes=-", None),
        ("bytes=--5", None),
        ("bytes=1.5-2", None),
        ("bytes=" + "0-0," * 3000, None),
        ("", None),
    ],
)
def test_a_range_header_is_parsed(header: str | None, span: tuple[int, int] | None) -> None:
    assert parse_range(header, 100) == span


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=5-2", "bytes=-0", f"bytes={'9' * 5000}-", "bytes=100-200"])
def test_an_unsatisfiable_range_is_rejected(header: str) -> None:
    with pytest.raises(Unsatisfiable, match="does not overlap the file"):
        parse_range(header, 100)


def test_an_empty_file_has_no_range() -> None:
    assert parse_range(None, 0) is None
    with pytest.raises(Unsatisfiable):
        parse_range("bytes=0-", 0)


@given(text=st.text(max_size=20), size=st.integers(0, 200))
def test_every_parsed_range_is_within_the_file(text: str, size: int) -> None:
    for header in (text, f"bytes={text}"):
        try:
            span = parse_range(header, size)
        except Unsatisfiable:
            continue
        assert span is None or 0 <= span.start < span.stop <= size


TENSORS = st.lists(st.tuples(st.sampled_from(["uint8", "int16", "float32", "float64"]), st.integers(0, 20)), max_size=6)


@given(kinds=TENSORS, head=st.binary(max_size=20), data=st.data())
def test_a_range_is_read_from_the_elements_that_cover_it(
    kinds: list[tuple[str, int]], head: bytes, data: st.DataObject
) -> None:  # fmt: skip
    entries = [
        Entry("tensor", f"k{n}", 0, None, dtype, itemsize(dtype), (count,), n) for n, (dtype, count) in enumerate(kinds)
    ]
    held = [bytes((7 * n + 3 * i) % 251 for i in range(one.nbytes)) for n, one in enumerate(entries)]
    file = File(FileLayout("f", head, tuple(ViewTensor(one.key, one) for one in entries)), "etag")
    whole = head + b"".join(held)
    assert file.nbytes == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    in_head, sources, skip = file.wanted(FileSpan(start, stop))
    parts = [held[s.entry.number][s.lo * s.entry.itemsize : s.hi * s.entry.itemsize] for s in sources]
    found = bytes(in_head) + b"".join(parts)[skip:]
    assert found[: stop - start] == whole[start:stop]
    widest = max((s.entry.itemsize for s in sources), default=1)
    assert skip < widest
    assert len(found) - (stop - start) < widest


def test_a_stored_folder_of_another_program_is_served_as_it_is(tmp_path: Path) -> None:
    store, run = small_folder(tmp_path / "store"), tmp_path / "run"
    (run / "sub").mkdir(parents=True)
    (run / "model.safetensors").write_bytes(save({"w": cells(40, seed=1), "b": torch.arange(7)}))
    (run / "sub" / "config.json").write_text("{}")
    (run / "empty").touch()
    store.import_files(run, step=1)
    of = folder(store)
    assert {name: content(store, of, name) for name in of.files} == {
        name: (run / name).read_bytes() for name in ("model.safetensors", "sub/config.json", "empty")
    }
