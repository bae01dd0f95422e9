"""docs/examples/read_without_casckpt.py reads checkpoints, and refuses damaged or unknown ones."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3

import casckpt
from casckpt.contents import manifests
from casckpt.format.dtypes import DTYPES
from casckpt.format.sections.head import KNOWN, assemble
from casckpt.history.commits import bring_back, forget, purge, trim
from casckpt.saving.options import SaveOptions
from tests.store.test_damage import HOSTILE, forge
from tests.support.forging import setting, with_piece
from tests.support.frozen_store import hurt, model, value_of
from tests.support.rewrites import move
from tests.support.saves import cells, small_folder
from tests.support.simulated import Simulated
from tests.support.tensors import NAMES, bytes_of, raw
from tests.support.wrappers import scaled
from tests.test_frozen_store import CODED, CODED_STEPS, DATA, VISIBLE, WHOLE

SCRIPT = Path(__file__).resolve().parent.parent / "docs" / "examples" / "read_without_casckpt.py"
ALLOWED = {"numpy", "blake3", "msgspec"}
UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32"}


@pytest.fixture(scope="module")
def reader() -> Any:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("read_without_casckpt", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors_in(value: Any, *path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a nested state, by flat key."""
    if isinstance(value, torch.Tensor):
        yield ".".join(path), value
    elif isinstance(value, dict | list | tuple):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(child, *path, str(key))


def assert_read(checkpoint: Any, state: Any) -> None:
    """Check that the reader reads all tensors of a state, bit for bit."""
    saved = dict(tensors_in(state))
    assert set(checkpoint.tensors) == set(saved)
    for key, tensor in saved.items():
        dtype, array = str(tensor.dtype).removeprefix("torch."), checkpoint.read(key)
        assert checkpoint.tensors[key].dtype == dtype
        assert array.dtype == (dtype if hasattr(np, dtype) else UNSIGNED[tensor.element_size()])
        assert array.shape == tuple(tensor.shape)
        assert array.tobytes() == bytes_of(tensor)


def assert_as_casckpt(reader: Any, folder: Path) -> None:
    """Check that the reader finds the visible checkpoints with equal IDs and tensors, and the newest of each run."""
    mine, theirs = reader.Store(folder), casckpt.open(folder)
    told = [(one["run"], one["step"], one["manifest"]) for one in mine.checkpoints()]
    assert sorted(told) == sorted((one.run, one.step, one.id) for one in theirs.checkpoints())
    for run, step, _ in told:
        assert_read(mine.open(f"{run}@{step}"), theirs.read(f"{run}@{step}"))
    for run in {run for run, _, _ in told}:
        assert mine.open(f"{run}@latest").name == f"{run}@{theirs.get(f'{run}@latest').step}"


def test_the_example_reader_is_short_and_needs_few_packages() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) < 210
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [[one.name for one in node.names] if isinstance(node, ast.Import) else [node.module] for node in nodes]
    imported = {str(name).partition(".")[0] for several in names for name in several}
    assert imported - sys.stdlib_module_names == ALLOWED


def test_the_example_reader_runs_without_casckpt() -> None:
    gone = "import runpy, sys; sys.modules |= dict.fromkeys(('casckpt', 'torch', 'safetensors')); "
    command = [sys.executable, "-c", gone + "runpy.run_path(sys.argv.pop(1), run_name='__main__')", str(SCRIPT)]
    done = subprocess.run([*command, str(DATA), "hurt@1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    sound, refused, last = done.stdout.splitlines()
    assert sound == "whole uint8 [70000]"
    assert refused.startswith("refused: tensor hit of hurt@1 has a damaged cell")
    assert last == "hurt@1: 1 of 2 tensors are intact; nothing else was read"


# the stores in tests/data


def test_the_example_reader_lists_the_frozen_store(reader: Any) -> None:
    visible = sorted((one["run"], one["step"], one["id"]) for one in VISIBLE)
    found = reader.Store(DATA).checkpoints()
    assert sorted((one["run"], one["step"], one["manifest"]) for one in found) == visible
    assert reader.Store(DATA).open("train@latest").name == "train@6"


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(("run", "step"), WHOLE)
def test_the_example_reader_reads_the_frozen_store(reader: Any, run: str, step: int) -> None:
    if run == "dtypes" and len(NAMES) < len(DTYPES):
        pytest.skip("the installed torch lacks some dtypes")
    assert_read(reader.Store(DATA).open(f"{run}@{step}"), value_of(run, step))


def test_the_example_reader_reads_parts_of_wrappers_values_of_ranks_and_thinned_checkpoints(reader: Any) -> None:
    store, saved = reader.Store(DATA), scaled(1, 8, 4)
    for name in ("codes", "scale", "table"):
        assert store.open("wrapped@1").read(f"hand-made.{name}").tobytes() == bytes_of(getattr(saved, name))
    assert [store.open("ranks@1", rank).read("own").tolist() for rank in (0, 1)] == [[0] * 3, [1] * 3]
    for step in (1, 3):
        thinned = store.open(f"thin@{step}")
        assert thinned.read("model").tobytes() == bytes_of(model(step)["model"])
        with pytest.raises(ValueError, match="no longer in this checkpoint"):
            thinned.read("optim.m")


def test_the_example_reader_reads_undamaged_parts_of_a_damaged_checkpoint(reader: Any) -> None:
    checkpoint = reader.Store(DATA).open("hurt@1")
    assert checkpoint.read("whole").tobytes() == bytes_of(hurt(1)["whole"])
    with pytest.raises(ValueError, match=r"tensor hit of hurt@1 has a damaged cell, in .*safetensors"):
        checkpoint.read("hit")


@pytest.mark.parametrize("step", CODED_STEPS)
def test_the_example_reader_rejects_frames_and_reads_raw_cells(reader: Any, step: int) -> None:
    checkpoint, saved = reader.Store(CODED).open(f"coded@{step}"), dict(tensors_in(value_of("coded", step)))
    assert set(checkpoint.tensors) == set(saved)
    for key in ("never.0", "never.1"):
        assert checkpoint.read(key).tobytes() == bytes_of(saved[key])
    with pytest.raises(ValueError, match=f"tensor few of coded@{step} has cells stored as frames"):
        checkpoint.read("few")


# stores of this version


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_the_example_reader_reads_every_dtype_and_shape(reader: Any, tmp_path: Path) -> None:
    state: dict[str, Any] = {name: raw(name, (7, 3)) for name in NAMES}
    state |= {"none": torch.empty(0, 4), "scalar": torch.tensor(7.5), "turned": raw("int32", (30, 20)).t()}
    state["large"] = [raw("bfloat16", (1000, 701)), {"more": raw("float64", (300_001,))}]
    casckpt.open(tmp_path).save({"a": state, "note": "no tensor"}, run="a/b", step=1, attachments={"x": b"1"})
    assert_as_casckpt(reader, tmp_path)


def test_the_example_reader_reads_empty_stores_and_checkpoints(reader: Any, tmp_path: Path) -> None:
    store = small_folder(tmp_path)
    assert reader.Store(tmp_path).checkpoints() == []
    store.save({"step": 1}, run="r", step=1)
    assert reader.Store(tmp_path).open("r@1").tensors == {}


def test_the_example_reader_joins_shards(reader: Any, tmp_path: Path) -> None:
    store, whole = small_folder(tmp_path), raw("float32", (101, 90))

    def state(rank: int) -> dict[str, Any]:
        half, flat = slice(45 * rank, 45 * rank + 45), (4000 * rank, 4000 + 5090 * rank)
        return {
            "columns": casckpt.Shard(whole[:, half], (101, 90), (0, 45 * rank)),
            "flat": casckpt.Shard(whole.view(-1)[slice(*flat)], (101, 90), flat=flat),
            "own": casckpt.PerRank(torch.full((3,), rank)),
        }

    Simulated(store.repository, 2).save(state, SaveOptions(run="r", step=1))
    assert_as_casckpt(reader, tmp_path)
    checkpoint = reader.Store(tmp_path).open("r@1", rank=1)
    assert checkpoint.read("columns").tobytes() == checkpoint.read("flat").tobytes() == bytes_of(whole)
    assert [reader.Store(tmp_path).open("r@1", rank=rank).read("own").tolist() for rank in (0, 1, 2)] == [
        [0, 0, 0], [1, 1, 1], [0, 0, 0],
    ]  # fmt: skip


def test_the_example_reader_handles_forgotten_purged_and_overwritten_checkpoints(reader: Any, tmp_path: Path) -> None:
    store, whole = casckpt.open(tmp_path), torch.arange(600_000.0)
    for run, step in [("a", 6), ("b", 7), ("a", 2), ("a", 3), ("b", 8), ("a", 4)]:
        whole[step * 50_000] += 1
        store.save({"w": whole, run: torch.tensor(step)}, run=run, step=step)
    store.save({"w": whole * 2}, run="a", step=3, overwrite=True)
    store.forget("a@2", "b@7")
    store.gc(min_age=0)
    store.forget("a@4")
    store.restore(store.forget("b@8")[0])
    names = {f"{one['run']}@{one['step']}" for one in reader.Store(tmp_path).checkpoints()}
    assert names == {"a@6", "a@3", "b@8"}
    assert_as_casckpt(reader, tmp_path)
    for ref in ("a@2", "a@4", "b@7", "c@latest", "a@5", "latest"):
        with pytest.raises(ValueError, match=f"no visible checkpoint {ref}"):
            reader.Store(tmp_path).open(ref)


def test_the_example_reader_follows_rewrites_even_if_they_are_undone_or_trimmed(reader: Any, tmp_path: Path) -> None:
    store = small_folder(tmp_path)
    repo = store.repository
    saved = [store.save({"a": cells(2, seed=step)}, run="a", step=step).commit for step in range(5)]
    made = [move(repo, one) for one in saved[:4]]
    undone = bring_back(repo, move(repo, made[0]), made[0].places)
    trimmed = trim(repo, made[1])
    forget(repo, made[2])
    purge(repo, forget(repo, made[3]))
    found = {one["step"]: one["places"] for one in reader.Store(tmp_path).checkpoints()}
    assert found == {0: undone.places.txid, 1: trimmed.places.txid, 4: saved[4].txid}
    assert_as_casckpt(reader, tmp_path)


def test_the_example_reader_names_entries_missing_from_a_thinned_checkpoint(reader: Any, tmp_path: Path) -> None:
    store = casckpt.open(tmp_path)
    store.save({"model": torch.ones(9), "optim": torch.zeros(9)}, run="r", step=1)
    store.save({"model": torch.ones(9), "optim": torch.ones(9)}, run="r", step=2)
    store.thin("r@1", drop="optim")
    checkpoint = reader.Store(tmp_path).open("r@1")
    assert checkpoint.read("model").tolist() == [1] * 9
    with pytest.raises(ValueError, match="tensor optim of r@1 is no longer in this checkpoint, which was thinned"):
        checkpoint.read("optim")


# damage


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    store = small_folder(folder)
    store.save({"m": {"shared": cells(3, seed=1)}, "note": "x"}, run="a", step=1)
    store.save({"m": {"shared": cells(3, seed=1), "own": cells(3, seed=2)}}, run="a", step=2)
    return folder


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """Writable files of two checkpoints."""
    shutil.copytree(saved_once, tmp_path, dirs_exist_ok=True)
    return tmp_path


def read_all(reader: Any, folder: Path, ref: str = "a@2") -> dict[str, bytes]:
    checkpoint = reader.Store(folder).open(ref)
    return {key: checkpoint.read(key).tobytes() for key in checkpoint.tensors}


def places(data: bytes, kind: str) -> list[int]:
    """Return offsets of bytes to flip between the header and the proof of a blob. Reads do not need the proof."""
    if kind == "blob":
        return [4096, 4097, 8191, 8192, 4096 + 12_287]
    if kind == "manifest":
        return [0, 7, 8, 20, 60, 4000, 4063, 4064, 4095, *range(4096, len(data), 37), len(data) - 1]
    return [*range(0, len(data), 23), len(data) - 1]


def write(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.mark.parametrize(("kind", "told"), [("blob", "cell"), ("manifest", "manifest"), ("record", "damaged")])
def test_a_flipped_byte_is_rejected(reader: Any, saved: Path, kind: str, told: str) -> None:
    commit = reader.Store(saved).open("a@2")
    [record] = [one for one in reader.Store(saved).checkpoints() if one["step"] == 2]
    path = {
        "blob": saved / commit.blobs[-1],
        "manifest": saved / "objects" / record["txid"] / f"{record['manifest']}.manifest",
        "record": saved / "commits" / record["txid"],
    }[kind]
    before, sound = path.read_bytes(), read_all(reader, saved)
    for at in places(before, kind):
        write(path, before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
        with pytest.raises(ValueError, match=told):
            read_all(reader, saved)
    write(path, before)
    assert read_all(reader, saved) == sound


def test_truncated_or_missing_objects_are_rejected(reader: Any, saved: Path) -> None:
    paths = [path for path in saved.rglob("*") if path.suffix in {".safetensors", ".manifest"}]
    paths += [*(saved / "commits").iterdir(), saved / "casckpt.json"]
    for path in paths:
        kept = path.read_bytes()
        for data in (kept[: len(kept) // 2], b""):
            write(path, data)
            with pytest.raises(ValueError, match=r"."):
                [read_all(reader, saved, ref) for ref in ("a@1", "a@2")]
        path.unlink()
        with pytest.raises(ValueError, match=r"missing|no visible checkpoint"):
            [read_all(reader, saved, ref) for ref in ("a@1", "a@2")]
        path.write_bytes(kept)


def test_a_manifest_with_trailing_bytes_is_rejected(reader: Any, saved: Path) -> None:
    for path in saved.rglob("*.manifest"):
        write(path, path.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="the wrong length"):
        read_all(reader, saved)


def test_a_link_in_place_of_an_object_is_rejected(reader: Any, saved: Path) -> None:
    for path in [*saved.rglob("*.safetensors")]:
        path.symlink_to(path.rename(path.with_name("elsewhere")))
    with pytest.raises(ValueError, match="not a regular file"):
        read_all(reader, saved)


def test_a_log_with_a_missing_record_is_rejected(reader: Any, saved: Path) -> None:
    store = casckpt.open(saved)
    store.restore(store.forget("a@1")[0])
    txid = store.get("a@1").commit.txid
    (saved / "commits" / f"{txid}.1").unlink()
    with pytest.raises(ValueError, match=rf"{txid}\.1 is missing"):
        reader.Store(saved).checkpoints()


def write_record(path: Path, record: dict[str, Any]) -> None:
    line = json.dumps(record).encode()
    write(path, line + b"\n" + blake3(line).hexdigest().encode() + b"\n")


def test_records_that_only_keep_a_log_number_have_no_effect(reader: Any, saved: Path) -> None:
    store = casckpt.open(saved)
    first, second = (store.get(f"a@{step}").commit.txid for step in (1, 2))
    store.forget("a@1")
    for txid, number in ((first, 2), (second, 1)):
        path = saved / "commits" / f"{txid}.{number}"
        path.touch()
        write_record(path, {"type": "kept", "txid": txid, "time": 1_800_000_000_000_000})
    assert [one["txid"] for one in reader.Store(saved).checkpoints()] == [second]


def _other_cells(parts: dict[str, bytes], _: bytearray) -> None:
    parts["cells"] = parts["cells"][:-1] + bytes([parts["cells"][-1] ^ 1])


def _other_index(parts: dict[str, bytes], _: bytearray) -> None:
    parts["index"] = msgspec.msgpack.encode(msgspec.msgpack.decode(parts["index"]) | {"metadata": {"x": 1}})


def _later_version(_: dict[str, bytes], head: bytearray) -> None:
    head += b"CASCKPT\2"


def _more_sections(_: dict[str, bytes], head: bytearray) -> None:
    head += b"CASCKPT\1\7"


def _needed_section(parts: dict[str, bytes], _: bytearray) -> None:
    parts["new"] = b"1"


ANEW = {
    "damaged group of pieces": _other_cells,
    "index of a different checkpoint": _other_index,
    "later version": _later_version,
    "unexpected": _more_sections,
    "unexpected new": _needed_section,
}


@pytest.mark.parametrize("told", ANEW)
def test_a_replaced_manifest_is_rejected(reader: Any, saved: Path, told: str) -> None:
    """An attacker with write access can correct all hashes except those that the id proves."""
    store = casckpt.open(saved)
    commit = store.get("a@2").commit
    manifest = manifests.get(store.repository, commit)
    parts, head = {name: bytes(manifest.section(name)) for name in KNOWN}, bytearray()
    ANEW[told](parts, head)
    data = assemble(parts.items())[1]
    data = bytes(head) + data[len(head) :]
    data = data[:4064] + blake3(data[:4064]).digest() + data[4096:]
    [path] = (saved / "objects" / commit.txid).glob("*.manifest")
    write(path, data)
    record = saved / "commits" / commit.txid
    write_record(record, json.loads(record.read_bytes().splitlines()[0]) | {"head": data[4064:4096].hex()})
    with pytest.raises(ValueError, match=told):
        read_all(reader, saved)


# unknown versions and forms

BACKWARDS = msgspec.msgpack.encode([[], [[0, 0, 4096], [0, 4096, 3072]], bytes(96)])
UNKNOWN = {
    "span": (with_piece("cells", b"\1" + BACKWARDS), "does not fit its shape"),
    "kind": (setting("index", "entries", "kinds", to=["picture"]), "unknown kinds: {'picture'}"),
    "form of cells": (with_piece("cells", b"\2" + bytes(96)), "unknown form"),
    "width": (setting("index", "entries", "dtypes", to=[["float64", 4]]), "elements of 4 bytes and dtype float64"),
    "step": (setting("index", "step", to=7), "a different checkpoint"),
    "group": (lambda parts, _: parts.pieces["cells"].reverse(), "cell"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_encodings_and_kinds_are_rejected(reader: Any, saved: Path, name: str) -> None:
    change_it, told = UNKNOWN[name]
    ref = forge(casckpt.open(saved), change_it)
    with pytest.raises(ValueError, match=told):
        read_all(reader, saved, ref)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_does_not_yield_wrong_bytes(reader: Any, saved: Path, name: str) -> None:
    sound = [*read_all(reader, saved).values()]
    ref = forge(casckpt.open(saved), HOSTILE[name])
    try:
        found = read_all(reader, saved, ref)
    except (ValueError, LookupError, TypeError, OverflowError, msgspec.MsgspecError):
        return
    assert set(found.values()) <= {*sound}


@pytest.mark.parametrize(
    "new", [{"format": 2}, {"features": []}, {"features": ["history-2", "x"]}, {"hash": "sha256"}], ids=str
)
def test_a_later_format_is_rejected(reader: Any, saved: Path, new: dict[str, Any]) -> None:
    marker = saved / "casckpt.json"
    write(marker, json.dumps(json.loads(marker.read_text()) | new).encode())
    with pytest.raises(ValueError, match="has a different format"):
        reader.Store(saved)


@pytest.mark.parametrize("new", [{"type": "married"}, {"txid": "20260101T000000000000Z-0-0-1"}, {"step": 3}], ids=str)
def test_a_record_for_a_different_object_is_rejected(reader: Any, saved: Path, new: dict[str, Any]) -> None:
    path = next((saved / "commits").iterdir())
    write_record(path, json.loads(path.read_bytes().splitlines()[0]) | new)
    with pytest.raises(ValueError, match="a record of a different object, or has an unknown type"):
        reader.Store(saved).checkpoints()


def test_overlapping_boxes_are_rejected(reader: Any, tmp_path: Path) -> None:
    store, whole = small_folder(tmp_path), torch.ones(4, 4)
    shards = [casckpt.Shard(whole[:, :2], (4, 4), (0, 0)), casckpt.Shard(whole[:, 2:], (4, 4), (0, 2))]
    store.save({"m": shards}, run="a", step=2)
    boxes = [[[0, 0], [4, 2]], [[0, 1], [4, 2]]]
    manifest = manifests.get(store.repository, store.get("a@2").commit)
    table = msgspec.msgpack.decode(bytes(manifest.section("cells"))[1:])
    assert table[0] == [[[0, 0], [4, 2]], [[0, 2], [4, 2]]]
    ref = forge(store, with_piece("cells", b"\1" + msgspec.msgpack.encode([boxes, *table[1:]])))
    with pytest.raises(ValueError, match="elements that no cell covers"):
        read_all(reader, tmp_path, ref)
