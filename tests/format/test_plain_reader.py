"""A reader written only from docs/format.md returns the same values as casckpt, and detects damage."""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3

import casckpt
from casckpt.history.commits import bring_back, forget, purge, trim
from tests.support import plain_reader
from tests.support.exact import same
from tests.support.plain_examples import EXAMPLES
from tests.support.plain_reader import Checkpoint, DamagedError, Entry, Store, cells_of, column, read_head
from tests.support.rewrites import move
from tests.support.saves import cells, small_folder

ODD = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.bfloat16]
NATIVE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32]
DTYPES = [*NATIVE, torch.float64, torch.complex64, torch.complex128, *ODD]


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def assert_same(mine: Any, theirs: Any) -> None:
    """Check that the plain reader and casckpt return the same types, order and bits."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(mine, np.ndarray)
        assert mine.shape == tuple(theirs.shape)
        assert mine.tobytes() == _raw(theirs)
        name = str(theirs.dtype).removeprefix("torch.")
        assert mine.dtype == (name if re.fullmatch(plain_reader.NUMPY_HAS, name) else f"V{theirs.element_size()}")
    elif isinstance(theirs, dict):
        assert type(mine) is type(theirs)
        assert list(mine) == list(theirs)
        assert getattr(mine, "_metadata", None) == getattr(theirs, "_metadata", None)
        for key in theirs:
            assert_same(mine[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert type(mine) is type(theirs)
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(theirs, np.ndarray | np.generic):
        assert type(mine) is type(theirs)
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)
    else:
        assert type(mine) is type(theirs)
        assert mine == theirs


def test_the_plain_reader_is_short_and_independent() -> None:
    lines = Path(plain_reader.__file__).read_text().splitlines()
    assert len(lines) <= 340
    assert not [line for line in lines if re.match(r"\s*(import|from) (casckpt|torch|tests)", line)]


def txids(folder: Path) -> list[str]:
    return sorted({path.name.partition(".")[0] for path in (folder / "commits").iterdir()})


def newest_listed(store: Store, run: str) -> str:
    found = [txid for (name, _), txid in store.visible().items() if name == run]
    return max(found, default="")


def _newest(folder: Path, run: str) -> Checkpoint:
    store = Store(folder)
    txid = store.newest_announced(run)
    assert txid == newest_listed(store, run)
    return Checkpoint(folder, store.log(txid).record)


def test_the_plain_reader_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    torch.manual_seed(1)
    noise = torch.randint(0, 256, (7 * 16,), dtype=torch.uint8)
    state: dict[str, Any] = {str(dtype): noise.view(dtype).view(7, -1) for dtype in DTYPES if dtype != torch.bool}
    state |= {"torch.bool": noise > 99, "none": torch.empty(0), "flat": torch.empty(3, 0, 2), "one": torch.tensor(7.5)}
    state["large"] = torch.rand(700_001, dtype=torch.float64)
    store = casckpt.open(tmp_path)
    store.save({"a": state, "b": {"c": torch.rand(4)}}, run="r", step=1)
    read = _newest(tmp_path, "r")
    assert_same(read.read(), store.read("r@1"))
    assert all(sound for leaves in read.leaves().values() for _, _, sound in leaves)


def test_the_plain_reader_reads_nested_states_plain_data_and_attachments(tmp_path: Path) -> None:
    bag: dict[Any, Any] = {
        "none": None, "ints": [1, -(2**40), 2**70, -(2**70), True], "text": "ä\ud800", "bytes": b"\0\1", "c": 1 + 2j,
        "kinds": ({1, 2}, frozenset("ab"), Counter("aab"), deque([1, 2], 5), range(3), slice(1, None), bytearray(b"x")),
        "od": OrderedDict(b=1, a=2), "dd": defaultdict(list, x=[1]), "empty": [{}, [], ()], 5: {("t", 1): 2.5},
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC), "delta": datetime.timedelta(-1, 2, 3),
        "path": Path("a/b"),
        "ods": [OrderedDict(a=1), OrderedDict()],
        "np": np.arange(6, dtype="<i2").reshape(2, 3), "scalar": np.float32(1.5),
        "large": np.arange(400_000, dtype="<f8"), "buffer": b"z" * 2_000_000,
        "fields": np.zeros(2, dtype=[("a", "<i4"), ("b", "<f8", (2,))]), "time": datetime.time(1, 2, fold=1),
    }  # fmt: skip
    nest = {"l": [torch.ones(2), {"x": (torch.zeros(1), 3)}], 4: torch.ones(1), "od": OrderedDict(z=torch.ones(1), a=1)}
    nest["model"] = torch.nn.Sequential(torch.nn.Linear(2, 2)).state_dict()
    nest["dd"] = defaultdict(dict, q={"r": torch.ones(1)})
    store = casckpt.open(tmp_path)
    files = {"config.json": b"{}", "notes/why.txt": b"because", "long.bin": b"0123456789" * 300_000, "empty": b""}
    bag |= {"generator": np.random.default_rng(3), "old": np.random.RandomState(4)}
    store.save({"bag": bag, "nest": nest}, run="r", step=1, attachments=files, metadata={"loss": 1.5})
    read = _newest(tmp_path, "r")
    mine, theirs = read.read(), store.read("r@1")
    for name in ("generator", "old"):
        assert mine["bag"].pop(name).bytes(8) == theirs["bag"].pop(name).bytes(8)
    assert_same(mine, theirs)
    assert read.attachments() == files
    assert read.index["metadata"] == read.record["metadata"] == {"loss": 1.5}


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("examples")
    casckpt.open(folder).save({"values": [[value] for value in EXAMPLES], "w": torch.ones(1)}, run="r", step=1)
    read: list[Any] = _newest(folder, "r").read()["values"]
    return read


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_plain_reader_reads_every_kind_of_plain_data(examples: list[Any], number: int) -> None:
    assert same(examples[number][0], EXAMPLES[number])


def test_the_plain_reader_reads_shared_cells_and_skips_forgotten_checkpoints(tmp_path: Path) -> None:
    store, whole = casckpt.open(tmp_path), torch.arange(1_000_000.0)
    for run, step in [("a", 6), ("b", 7), ("a", 2), ("a", 3), ("b", 8), ("a", 4)]:
        whole[step * 50_000] += 1
        store.save({"w": whole, "step": step, run: torch.tensor(step)}, run=run, step=step)
    store.save({"w": whole * 2}, run="a", step=3, overwrite=True)
    store.forget("a@4", "a@2", "b@7")
    store.restore(store.forget("b@8")[0])
    store.tag("best", "a@6")
    plain = Store(tmp_path)
    visible = plain.visible()
    assert sorted(visible) == [("a", 3), ("a", 6), ("b", 8)]
    states = sorted(plain.log(txid).state for txid in txids(tmp_path))
    assert states == ["forgotten"] * 4 + ["visible"] * 3
    for (run, step), txid in visible.items():
        assert_same(Checkpoint(tmp_path, plain.log(txid).record).read(), store.read(f"{run}@{step}"))
    for run in ("a", "b"):
        assert _newest(tmp_path, run).index["step"] == store.get(f"{run}@latest").step
    assert plain.newest_announced("c") == newest_listed(plain, "c") == ""
    assert plain.tags() == {"best": store.get("a@6").id}
    assert plain.log(visible["a", 6]).tagged == [("best", 0)]


def test_the_plain_reader_folds_rewrites_even_if_they_are_undone_or_trimmed(tmp_path: Path) -> None:
    store = small_folder(tmp_path)
    repo = store.repository
    saved = [store.save({"a": cells(2, seed=step)}, run="a", step=step).commit for step in range(5)]
    made = [move(repo, one) for one in saved[:4]]
    undone = bring_back(repo, move(repo, made[0]), made[0].places)
    trimmed = trim(repo, made[1])
    hidden = forget(repo, bring_back(repo, made[2], saved[2].places))
    purged = purge(repo, forget(repo, made[3]))
    plain = Store(tmp_path)
    found = {txid: plain.log(txid) for txid in txids(tmp_path)}
    for commit in (undone, trimmed, hidden, purged, saved[4]):
        log = found[commit.txid]
        assert log.existing == [places.txid for places in commit.existing]
        assert (log.record["places"], log.record["head"]) == (commit.places.txid, commit.committed.head)
    assert [log.state for log in found.values()] == ["visible", "visible", "forgotten", "purged", "visible"]
    assert [len(log.existing) for log in found.values()] == [3, 1, 2, 0, 1]
    for step in (0, 1, 4):
        assert_same(Checkpoint(tmp_path, found[saved[step].txid].record).read(), store.read(f"a@{step}"))
    assert _newest(tmp_path, "a").record["txid"] == saved[4].txid


def test_the_plain_reader_finds_the_later_of_two_twins(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path)
    store.save({"w": torch.arange(9.0), "from": "one"}, run="r", step=1)
    store.save({"w": torch.arange(9.0), "from": "two"}, run="r", step=1, overwrite=True)
    txid = txids(tmp_path)[0]
    line = json.dumps({"type": "restored", "txid": txid, "time": 1_800_000_000_000_000}).encode()
    record = tmp_path / "commits" / f"{txid}.2"  # by hand: casckpt refuses to restore a checkpoint whose place is taken
    record.write_bytes(line + b"\n" + blake3(line).hexdigest().encode() + b"\n")
    assert [Store(tmp_path).log(each).state for each in txids(tmp_path)] == ["visible", "visible"]
    read = _newest(tmp_path, "r")
    assert_same(read.read(), store.read("r@1"))
    assert read.read()["from"] == "two"


def test_the_plain_reader_lists_unhashed_entries(tmp_path: Path) -> None:
    store, state = casckpt.open(tmp_path), {"w": torch.rand(600_000), "v": torch.rand(3)}
    store.save(state, run="r", step=1)
    store.save(state, run="r", step=2, frozen=["*"], metadata={"long": "x" * 70_000})
    read = _newest(tmp_path, "r")
    assert column(read.index["entries"]["unhashed"]) == [0, 1]
    assert read.record.get("metadata") is None
    assert read.index["metadata"] == {"long": "x" * 70_000}
    assert_same(read.read(), store.read("r@2"))


def test_the_plain_reader_joins_boxes_flat_parts_and_ranks(tmp_path: Path) -> None:
    whole = torch.rand(1001, 1001)
    parts = [
        casckpt.Shard(whole[a:b, c:d], (1001, 1001), (a, c))
        for a, b in ((0, 400), (400, 1001))
        for c, d in ((0, 3), (3, 1001))
    ]
    flat = whole.view(-1)
    ranges = [
        casckpt.Shard(flat[a:b], (1001, 1001), flat=(a, b)) for a, b in ((0, 77), (77, 600_000), (600_000, 1002001))
    ]
    store = casckpt.open(tmp_path)
    state: dict[str, Any] = {"boxes": parts, "flat": ranges, "mine": casckpt.PerRank(torch.ones(3))}
    store.save(state | {"plain": casckpt.PerRank("x")}, run="r", step=1)
    read = _newest(tmp_path, "r").read()
    assert_same(read, store.read("r@1"))
    assert_same(read["boxes"], whole)


@pytest.mark.sweep
def test_the_plain_reader_reads_copies_and_large_manifests(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "here")
    many = {f"layer.{i}.{'weight' * 100}": torch.full((2,), i, dtype=torch.float32) for i in range(1_500)}
    store.save(many | {"note": "many"}, run="r", step=1)
    store.copy_to(tmp_path / "there", "r@1", tags=True)
    here, there = _newest(tmp_path / "here", "r"), _newest(tmp_path / "there", "r")
    assert here.record["manifest_bytes"] > 2**20
    assert here.record["manifest"] == there.record["manifest"]
    expected = store.read("r@1")
    assert_same(here.read(), expected)
    assert_same(there.read(), expected)


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(raw)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    store = casckpt.open(tmp_path)
    store.tag("t", store.save({"w": torch.arange(300_000.0), "n": 1}, run="r", step=1))
    return tmp_path


def test_a_flipped_byte_in_a_leaf_is_detected(saved: Path) -> None:
    read = _newest(saved, "r")
    [(key, _)] = read.blobs
    [leaves] = read.leaves().values()
    _flip(saved / "objects" / key, leaves[1][0] + 9)
    [leaves] = read.leaves().values()
    assert [sound for _, _, sound in leaves] == [i != 1 for i in range(len(leaves))]
    with pytest.raises(DamagedError, match="a cell of w"):
        read.read()


@pytest.mark.parametrize("back", [1, 36, 40])
def test_a_flipped_byte_in_a_proof_is_detected(saved: Path, back: int) -> None:
    read = _newest(saved, "r")
    _flip(saved / "objects" / read.blobs[0][0], -back)
    with pytest.raises(DamagedError, match="proof"):
        read.leaves()
    read.read()  # reading a checkpoint does not need the proof


def test_a_flipped_byte_in_a_head_or_section_is_detected(saved: Path) -> None:
    read = _newest(saved, "r")
    path = saved / "objects" / read.record["places"] / f"{read.record['manifest']}.manifest"
    places = [0, 7, 8, 20, 4000, 4095] + [
        offset + length // 2 for offset, length, _ in read.sections.values() if length
    ]
    for at in places:
        _flip(path, at)
        with pytest.raises(DamagedError):
            _newest(saved, "r").read()
        _flip(path, at)
    _newest(saved, "r").read()


@pytest.mark.parametrize("folder", ["commits", "runs", "tags"])
def test_a_flipped_byte_in_a_record_is_detected(saved: Path, folder: str) -> None:
    path = min(path for path in (saved / folder).rglob("*") if path.is_file())
    _flip(path, 12)
    plain = Store(saved)
    readers = {"commits": plain.visible, "runs": lambda: plain.newest_announced("r"), "tags": plain.tags}
    with pytest.raises(DamagedError, match=folder):
        readers[folder]()


HEADS = {"version": (7, b"\2"), "few": (8, b"\5"), "many": (8, b"\7"), "unknown": (16, b"other"), "gap": (40, b"\1")}


@pytest.mark.parametrize(("at", "data"), [*HEADS.values(), (4000, b"x")], ids=[*HEADS, "more"])
def test_the_plain_reader_rejects_a_malformed_head(saved: Path, at: int, data: bytes) -> None:
    raw = bytearray(next((saved / "objects").rglob("*.manifest")).read_bytes())
    assert "index" in read_head(bytes(raw), raw[4064:4096].hex())
    raw[at : at + len(data)] = data
    raw[4064:4096] = blake3(raw[:4064]).digest()
    with pytest.raises(ValueError, match=r"manifest|section"):
        read_head(bytes(raw), raw[4064:4096].hex())


MARKERS = [
    {"format": 2},
    {"features": []},
    {"features": ["history-2", "x"]},
    {"hash": "sha256"},
    {"cell_bytes": 5000},
    {"blob_bytes": 2**31},
]


@pytest.mark.parametrize("change", MARKERS, ids=str)
def test_the_plain_reader_rejects_an_unknown_format(saved: Path, change: dict[str, Any]) -> None:
    marker = saved / "casckpt.json"
    read = json.loads(marker.read_text())
    marker.chmod(0o644)
    marker.write_text(json.dumps(read | change))
    with pytest.raises(ValueError, match="not understood"):
        Store(saved)


TWO_SPANS: tuple[Any, ...] = ([[[2, 0], [2, 3]]], [[0, 0, 6], [1, 0, 6]], bytes(128))  # halves of a tensor [4, 3]
WRONG: dict[str, tuple[int, Any]] = {
    "a box outside": (0, [[[3, 0], [2, 3]]]), "no such box": (1, [[0, 0, 6], [2, 0, 6]]),
    "out of order": (1, [[1, 0, 6], [0, 0, 6]]), "an empty span": (1, [[0, 0, 6], [1, 6, 6]]),
    "outside its box": (1, [[0, 0, 6], [1, 0, 7]]), "a digest too few": (2, bytes(96)),
    "a digest too many": (2, bytes(160)), "a span of two numbers": (1, [[0, 0, 6], [1, 0]]),
}  # fmt: skip


def _places(table: tuple[Any, ...]) -> list[list[int]]:
    cells = b"\1" + msgspec.msgpack.encode(table)
    found = cells_of(Entry("tensor", "w", 0, 0, "uint8", 1, (4, 3), cells, b""), 4)
    return [where.tolist() for where, _ in found]


@pytest.mark.parametrize(("number", "part"), WRONG.values(), ids=WRONG)
def test_the_plain_reader_rejects_malformed_spans(number: int, part: Any) -> None:
    assert _places(TWO_SPANS) == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]
    with pytest.raises((ValueError, IndexError)):
        _places((*TWO_SPANS[:number], part, *TWO_SPANS[number + 1 :]))
