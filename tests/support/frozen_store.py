"""The stores in tests/data, which each version reads, extends, and prunes.

``python -m tests.support.frozen_store`` created them: frozen_store, frozen_store_coded, whose cells are stored as
frames, and folder_store. ``python -m tests.support.frozen_store FOLDER`` creates them below another folder. The same
code writes the same bytes. After the first release, do not regenerate them, because they would no longer test
anything. Add a new store when a later version writes something new.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import pathlib
import shutil
import sys
import tempfile
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

import casckpt
from casckpt.format.keys import commit_key
from casckpt.format.records import Began, Process, changed
from casckpt.history import leases, tags, transactions
from casckpt.history.commits import Commit, forget, list_commits, purge, trim
from casckpt.history.ended import line_of, write_list
from casckpt.repository.repository import Repository
from casckpt.saving.options import SaveOptions
from tests.support import rewrites, stored_folder
from tests.support.repositories import Ticks, half_rewrite
from tests.support.signing import pair
from tests.support.simulated import Simulated
from tests.support.tensors import NAMES, dtype_of
from tests.support.wrappers import scaled

DATA = Path(__file__).resolve().parents[1] / "data"
STORES = ("frozen_store", "frozen_store_coded", "folder_store")
_BEGIN = 1_767_225_600_000_000  # 2026-01-01, in microseconds: for all readers, the expiring tag has expired
MIRROR = "memory://frozen-mirror"
CELL, BLOB = 4096, 65536
LETTERS = "abcdefgh"
ATTACHMENTS = {"config.json": b'{"layers": 2}\n', "big.bin": bytes(range(256)) * 64}
METADATA = {"note": "as it was", "nested": [1, 2.5, None, {"a": True}]}
METRICS = {"loss": 0.25, "bad": float("nan"), "far": float("inf")}
LINEAGE: dict[str, Any] = {
    "resumed_from": {"id": "ab" * 32, "run": "first", "step": 3},
    "imported_from": {"path": "/old/model.pt", "digest": "cd" * 32},
    "merged_from": [{"id": "ef" * 32, "run": "other", "step": 4, "weight": 0.5}],
}
PICKLED = {"fraction": Fraction(1, 3)}
_PROCESS = Process(host="host", boot_id="0b07", pid=4242, pid_namespace="pid:[1]", started=99)


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Return bytes that do not depend on a random number generator."""
    numbers = torch.arange(nbytes, dtype=torch.int64) * (2 * seed + 3) + seed
    return ((numbers ^ (numbers >> 7)) % 251).to(torch.uint8)


def of_dtype(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of ``shape`` with arbitrary bits (0 and 1 for bool)."""
    raw = pattern(dtype.itemsize * int(np.prod(shape, dtype=np.int64)), seed)
    return (raw % 2).bool().reshape(shape) if dtype is torch.bool else raw.view(dtype).reshape(shape)


def kinds() -> dict[str, Any]:
    """Return a state with every kind of plain data and of cell table."""
    tied = of_dtype(torch.float32, (40,), 50)
    return {
        "shapes": {
            "none": torch.empty(0, 4),
            "scalar": of_dtype(torch.float64, (), 51),
            "strided": of_dtype(torch.int32, (30, 20), 52).t(),
            "long": of_dtype(torch.bfloat16, (5, 3000), 53),
            "boxes": of_dtype(torch.int32, (60, 60), 54),
        },
        "tied": {"one": tied, "other": tied},
        "health": torch.tensor([0.5, math.nan, -math.inf, -2.0]),
        "plain": plain(),
    }


def dtypes() -> dict[str, Any]:
    """Return a tensor of every dtype."""
    return {name: of_dtype(dtype_of(name), (3, 70), n) for n, name in enumerate(NAMES)}


def plain() -> dict[str, Any]:
    """Return every kind of plain data."""
    seeded = np.random.default_rng(3)
    return {
        "numbers": [0, -1, 2**70, 0.1, math.inf, 1 + 2j, True, None, range(5, 1, -2), slice(1, None)],
        "texts": ("", "é\n", "\ud800", b"\x00\xff", bytearray(b"abc")),
        "long": bytes(range(256)) * 20,
        "mappings": [
            {1: "one", (2, "b"): "two"}, OrderedDict(b=1, a=2), Counter("aab"), defaultdict(list, {"a": [1]}),
            SimpleNamespace(a=1), argparse.Namespace(lr=0.1),
        ],
        "sets": [{1, "1", (1, 2)}, frozenset({2.5}), deque([1, 2], maxlen=3)],
        "times": [
            dt.date(2026, 1, 2), dt.timedelta(-1, 2, 3), dt.time(1, 2, fold=1), dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
            dt.timezone(dt.timedelta(hours=1), "CET"), zoneinfo.ZoneInfo("Europe/Berlin"),
        ],
        "paths": [pathlib.PurePosixPath("/a/../b"), pathlib.PureWindowsPath("c:\\x")],
        "arrays": [
            np.arange(6, dtype=">i2").reshape(2, 3), np.float32(1.5), np.array("2024-02-29", "M8[D]"), np.str_("s"),
            np.bytes_(b"b"), np.zeros(2, [("a", "<i4"), ("b", ">f8", (2,))]),
        ],
        "torch's": [torch.bfloat16, torch.Size([2, 3]), torch.device("cuda", 1)],
        "stream": streamed(b"stream", 3),
        "generators": {"new": seeded, "bits": np.random.PCG64(4), "old": np.random.RandomState(5)},
    }  # fmt: skip


def streamed(data: bytes, position: int) -> BytesIO:
    """Return a stream at a position."""
    stream = BytesIO(data)
    stream.seek(position)
    return stream


def wrapped() -> dict[str, Any]:
    """Return tensors that consist of other tensors. Reading the second one requires that its class is registered."""
    return {"sparse": torch.eye(4).to_sparse().coalesce(), "hand-made": scaled(1, 8, 4), "plain": torch.ones(2)}


def ranks(rank: int) -> dict[str, Any]:
    """Return the state of one of two ranks."""
    whole = of_dtype(torch.float32, (64, 64), 55)
    mine = slice(32 * rank, 32 * rank + 32)
    return {
        "rows": casckpt.Shard(whole[mine], (64, 64), (32 * rank, 0)),
        "own": casckpt.PerRank(torch.full((3,), rank)),
        "name": casckpt.PerRank(f"rank {rank}"),
        "differs": torch.full((5,), 1 + rank / 1000),
    }


def model(step: int) -> dict[str, Any]:
    """Return a state whose optimizer may be dropped."""
    return {
        "model": of_dtype(torch.float32, (1024,), 100 + step),
        "optim": {"m": of_dtype(torch.float32, (1024,), 110 + step), "v": of_dtype(torch.float32, (1500,), 120 + step)},
    }


def copied(step: int) -> dict[str, Any]:
    """Return a state of the other store."""
    return model(step + 10)


def train(step: int) -> dict[str, Any]:
    """Return eight tensors. Step 2 changes more than half of them, so the blob of step 1 becomes worn.

    Later steps change one.
    """
    new = {name: 2 if place < 5 else 1 for place, name in enumerate(LETTERS)} if step > 1 else dict.fromkeys(LETTERS, 1)
    new |= {LETTERS[later - 3]: later for later in range(3, step + 1)}
    return {
        "step": step,
        "model": {name: of_dtype(torch.float32, (1024,), 10 * new[name] + place) for place, name in enumerate(LETTERS)},
    }


def moved(step: int) -> dict[str, Any]:
    """Return a tensor that never changes and one that does."""
    return {"stays": of_dtype(torch.int16, (4096,), 60), "goes": of_dtype(torch.int16, (4096,), 60 + step)}


def hurt(step: int) -> dict[str, Any]:
    """Return two tensors, each of them a leaf."""
    return {"whole": of_dtype(torch.uint8, (70_000,), 70), "hit": of_dtype(torch.int64, (9_000,), 70 + step)}


def coded(step: int) -> dict[str, Any]:
    """Return floats that change slightly, considerably or completely at each step, and values that are never
    encoded."""
    few = pattern(20_000, 80).view(torch.int16) % 512 + 0x3F00
    for later in range(2, step + 1):
        few[later :: 60 * later] += later - 3
    little = pattern(12_288, 81).view(torch.int32) % 2**20 + 0x3F000000
    wholly = pattern(8192, 82 + step).view(torch.int16) % 1024 * 64 + 0x1C00  # both signs
    drift = pattern(3072, 82).int() % 16 * (step - 1)
    return {
        "few": few.view(torch.bfloat16).reshape(100, 100),
        "little": (little + drift).view(torch.float32),
        "wholly": wholly.view(torch.float16),
        "double": (pattern(8192, 90).view(torch.int64) % 2**40 + step + 0x3FF0 * 2**48).view(torch.float64),
        "complex": torch.complex((little + drift).view(torch.float32)[:1024], torch.full((1024,), 1.0 * step)),
        "never": [of_dtype(torch.int32, (1024,), 91), torch.full((3,), step)],
    }


def value_of(run: str, step: int) -> dict[str, Any]:
    """Return the value that was saved under this run and step."""
    by_step: dict[str, Callable[[int], dict[str, Any]]] = {
        "train": train, "moved": moved, "coded": coded, "thin": model, "copied": copied, "hurt": hurt,
    }  # fmt: skip
    single: dict[str, Callable[[], dict[str, Any]]] = {"kinds": kinds, "dtypes": dtypes}
    return by_step[run](step) if run in by_step else single[run]()


def told(store: casckpt.Store) -> list[dict[str, Any]]:
    """Return the listing of all checkpoints in the form of expected.json."""
    return [
        {
            "id": one.id, "run": one.run, "step": one.step, "forgotten": one.forgotten, "replaced": one.replaced,
            "lacks": one.commit.lacking,
        }
        for one in store.checkpoints(forgotten=True)
    ]  # fmt: skip


@contextmanager
def opened(folder: str | Path, cache: str, seed: int) -> Iterator[casckpt.Store]:
    """Open a new store. Nothing that it writes depends on the time, the host, the process, or the user."""
    store = casckpt.open(folder, cache_dir=cache)
    repo = store.repository
    repo.user, repo.clock, repo.entropy = "ann", Ticks(_BEGIN + 10**9 * seed), Random(seed).randbytes
    with (
        mock.patch("socket.gethostname", return_value="host"),
        mock.patch.object(transactions, "this_process", return_value=_PROCESS),
        mock.patch.object(tags, "_holder", return_value="ann@host:4242"),
    ):
        store.create(cell_bytes=CELL, blob_bytes=BLOB)
        yield store


def make(folder: Path, cache: str) -> None:
    """Write a store with everything but frames."""
    with (
        opened(folder, cache, 1) as store,
        opened(MIRROR, cache, 2) as mirror,
        opened("memory://other", cache, 3) as other,
    ):
        repo = store.repository
        store.change_settings(mirror=MIRROR)
        _save_kinds(store, cache)
        for step in range(1, 7):
            store.save(train(step), run="train", step=step, metrics={"loss": 1 / step}, healthy=step != 5)
        for step in range(1, 5):
            store.save(model(step), run="thin", step=step, ephemeral=True)
        for step in (1, 2):
            store.save(moved(step), run="moved", step=step, frozen=["stays"] if step == 2 else None)
            store.save(hurt(step), run="hurt", step=step)
        store.copy_to(mirror, jobs=1)
        _change_logs(store)
        _copy_in(store, other)
        _drop_a_log(store)
        _set_tags_and_leases(store)
        store.copy_to(mirror, jobs=1)
        for step in (2, 1):
            _flip(folder, hurt(step)["hit"])
            assert store.verify(f"hurt@{step}").is_damaged
            if step == 2:
                store.repair(mirror)
        store.sign("train@6", key=pair(Path(cache)).private)
        store.change_settings(
            min_age="2h", min_age_ephemeral="1h", revoke_after="1h", mirror_thinned=True, compress="auto"
        )
        repo.change_settings(exclusive_create=True)
        _leave_open(repo, other.get("copied@3").commit)
    _expect(folder)


def _save_kinds(store: casckpt.Store, cache: str) -> None:
    """Save every kind of leaf, from one process and from two."""
    state = kinds()
    whole = state["shapes"]["boxes"]
    state["shapes"]["boxes"] = [casckpt.Shard(whole[:, a:b], (60, 60), (0, a)) for a, b in ((0, 25), (25, 60))]
    store.save(
        state, run="kinds", step=1, attachments=ATTACHMENTS, metadata=METADATA, metrics=METRICS, healthy=True,
        health=True, lineage=LINEAGE,
    )  # fmt: skip
    store.save(dtypes(), run="dtypes", step=1)
    store.save(PICKLED, run="pickled", step=1, allow_pickle=True)
    store.save(wrapped(), run="wrapped", step=1)
    repo = store.repository
    both = [repo, replace(repo, cache_dir=Path(cache) / "rank1", clock=Ticks(_BEGIN), entropy=Random(9).randbytes)]
    Simulated(repo, 2, both).save(ranks, SaveOptions(run="ranks", step=1, check_replicas="sample"))


def _drop_a_log(store: casckpt.Store) -> None:
    """Delete what is left of the purged copied@2, as a gc does, and then its log, as an earlier version did."""
    repo = store.repository
    listed = list_commits(repo)
    (gone,) = (one for one in listed.commits.values() if one.last == "purged" and (one.run, one.step) == ("copied", 2))
    for entry in list(repo.storage.list(f"objects/{gone.txid}/")):
        repo.storage.delete(entry.key)
    repo.storage.sweep(f"objects/{gone.txid}")
    write_list(repo, {gone.txid: line_of(gone)})
    for number in (0, 1):
        repo.storage.delete(commit_key(gone.txid, number))
    assert gone.txid in list_commits(repo).over


def _change_logs(store: casckpt.Store) -> None:
    """Forget, restore, purge, revoke, thin, bring back, trim, and rewrite."""
    repo = store.repository
    store.forget("train@3")
    store.restore(store.forget("train@4")[0])
    begun = transactions.begin(repo, "train", 7)
    begun.abort("the save was stopped")
    store.thin("thin@1", "thin@2", "thin@3", drop="optim.*")
    store.restore("thin@2", whole=True)
    trim(repo, store.get("thin@3").commit)
    store.forget("moved@1")
    found = store.gc(min_age=0, run="moved")
    assert found.deleted_manifests == 2, found  # of moved@1, and of places of thin@3
    rewrites.move(repo, store.get("moved@2").commit)
    base = store.get("train@5").commit
    begun = transactions.begin(repo, "train", 5, after=[base.txid], slot=(base.txid, base.number + 1))
    begun.abort("the rewrite was stopped")


def _copy_in(store: casckpt.Store, other: casckpt.Store) -> None:
    """Copy a checkpoint without its optimizer, and then whole, and another one that was purged here in between."""
    for step in (1, 2, 3):
        other.save(copied(step), run="copied", step=step)
    other.thin("copied@1", drop="optim.*")
    other.copy_to(store, "copied@1", "copied@2", jobs=1)
    other.restore("copied@1", whole=True)
    repo = store.repository
    purge(repo, forget(repo, store.get("copied@2").commit))
    assert len(other.copy_to(store, "copied@1", "copied@2", jobs=1).copied) == 2


def _set_tags_and_leases(store: casckpt.Store) -> None:
    """Set tags that move, expire, and end, and leave leases of processes that died."""
    repo = store.repository
    store.tag("best", "train@1")
    store.tag("best", "train@2")
    store.tag("ends", "train@1", expires="1s")
    store.tag("gone", "train@4")
    store.untag("gone")
    lease, commit = leases.take(repo, store.get("train@4").commit, 60)
    leases.renew(repo, lease, commit, 60)
    lease, _ = leases.take(repo, commit, 60)
    tags.end_generation(repo, lease.name, lease.generation + 1, lease)


def _leave_open(repo: Repository, copied: Commit) -> None:
    """Leave a save, a rewrite, and a copy that two processes joined. All of these processes died."""
    save = transactions.begin(repo, "open", 1)
    save._pulse.beat()
    save.leave()
    half_rewrite(repo, casckpt.Store(repo).get("train@6").commit)
    began = Began(
        txid=copied.txid, run=copied.run, step=copied.step, time=_BEGIN, process=_PROCESS, manifest=copied.id,
        places=copied.places.txid,
    )  # fmt: skip
    for number in range(2):
        copy = transactions.join(repo, changed(began, time=_BEGIN + number))
        assert copy is not None
        copy.leave()


def make_coded(folder: Path, cache: str) -> None:
    """Write a store of encoded cells. The first checkpoint is purged, but the bases of other cells remain."""
    with opened(folder, cache, 4) as store:
        for step in range(1, 6):
            store.save(coded(step), run="coded", step=step, compress="always")
        store.gc(keep_last=4, min_age=0)
        store.thin("coded@2", drop="few")
    _expect(folder)


def make_folder(folder: Path, cache: str) -> None:
    """Write a store with a folder of another program."""
    with opened(folder, cache, 5) as store:
        stored_folder.fill(store, Path(cache) / "run")
        expected = stored_folder.described(Path(cache) / "run")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


def _expect(folder: Path) -> None:
    found = told(casckpt.open(folder))
    (folder / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


def _flip(folder: Path, tensor: torch.Tensor) -> None:
    """Flip a byte in the middle of a tensor in its blob."""
    wanted = bytes(tensor.view(torch.uint8).numpy())[CELL : CELL + 512]
    for path in folder.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        at = data.find(wanted)
        if at >= 0:
            data[at + 100] ^= 1
            path.chmod(0o644)
            path.write_bytes(data)
            return
    raise AssertionError("no blob holds these bytes")


def main(data: Path) -> None:
    """Create all stores below ``data``."""
    for name, create in zip(STORES, (make, make_coded, make_folder), strict=True):
        shutil.rmtree(data / name, ignore_errors=True)
        with tempfile.TemporaryDirectory() as cache:
            create(data / name, cache)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else DATA)
