"""Loads of parts of a large manifest: each rank receives the front sections, and reads its own pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.contents import manifests
from casckpt.errors import Damaged, Gone
from casckpt.format.keys import manifest_key
from casckpt.format.sections.head import decode_head
from casckpt.history import commits
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from casckpt.tensors.values import PerRank
from tests.support.faulty import FaultyStore, call_first
from tests.support.ranks import Pool
from tests.support.saves import counted, flip, reopened, same_state, small
from tests.support.together import watched

TENSORS = 3000  # small, so that groups of pieces are a small part of each section


@contextmanager
def all_large() -> Iterator[None]:
    """Make every manifest count as large, so that it is read by range."""
    before, manifests.WHOLE_BYTES = manifests.WHOLE_BYTES, 0
    try:
        yield
    finally:
        manifests.WHOLE_BYTES = before


@pytest.fixture
def _large() -> Iterator[None]:
    with all_large():
        yield


def state(count: int = TENSORS) -> dict[str, Any]:
    return {f"w{n:05}": torch.full((4,), float(n)) for n in range(count)} | {"text": "x" * 3000, "long": b"y" * 70_000}


def save_and_load(rank: int, size: int, path: Path) -> tuple[bool, list[str], int]:
    with all_large():
        store, storage = watched(path)
        own = {"rng": PerRank(torch.full((3,), float(rank))), "seen": PerRank({"rank": rank, "text": "z" * 5000})}
        store.save({"model": state(), **own}, run="a", step=1)
        store = Store(Repository(storage))
        storage.calls.clear()
        with counted(store) as io:
            wanted = {f"w{n:05}": torch.zeros(4) for n in range(100 * rank, 100 * rank + 30)}
            mine: dict[str, Any] = {"model": dict(wanted), "rng": torch.zeros(3), "seen": None}
            store.load(mine, "a@1", unread="ignore")
        saved = state()
        right = all(torch.equal(mine["model"][key], saved[key]) for key in wanted)
        right &= torch.equal(mine["rng"], torch.full((3,), float(rank))) and mine["seen"]["rank"] == rank
        whole = store.get("a@1").commit.committed.manifest_bytes
        return right, storage.keys("read_into"), io.bytes_read - whole // 4


def test_each_rank_reads_the_pieces_of_its_own_keys(ranks: Pool, tmp_path: Path) -> None:
    found = ranks.run(3, save_and_load, tmp_path / "store")
    assert all(right for right, _, _ in found)
    reads = [sum(key.endswith(".manifest") for key in keys) for _, keys, _ in found]
    assert reads[0] == reads[1] + 2 == reads[2] + 2  # only rank 0 reads the head and the front sections
    assert reads[1] <= 6  # pieces of the cells, rows and objects sections
    assert all(excess < 0 for _, _, excess in found[1:]), "less than a quarter of the manifest, with all tensors"


@pytest.mark.usefixtures("_large")
def test_reading_part_of_a_manifest_needs_few_requests_and_few_bytes(tmp_path: Path) -> None:
    store = Store(Repository(FaultyStore(LocalStore(tmp_path / "store")), tmp_path / "cache"))
    store.save(state(), step=1)
    whole = store.get("default@1").commit.committed.manifest_bytes
    again = Store(Repository(store.repository.storage, tmp_path / "other"))
    again.get("default@1")
    with counted(again) as io:
        found = again.read("default@1", keys=["w00100", "w0010[1-9]"])
    saved = state()
    assert same_state(found, {key: saved[key] for key in found})
    assert len(found) == 10
    assert io.reads <= 9  # the run and the log, the head, the front, cells and rows, and the blob
    front = sum(section.length for section in decode_head(_manifest(again)).sections[:3])
    assert io.bytes_read < front + 4096 + whole // 5
    assert again.read("default@1", keys=["text"]) == {"text": "x" * 3000}
    assert again.read("default@1", keys=["long"]) == {"long": b"y" * 70_000}


def _manifest(store: Store) -> bytes:
    commit = store.get("default@1").commit
    return store.repository.storage.get(manifest_key(commit.txid, commit.id), limit=1 << 30)


@pytest.mark.usefixtures("_large")
def test_damage_in_other_parts_does_not_prevent_a_partial_read() -> None:
    store = small()
    ckpt = store.save({"a": torch.ones(9), "b": torch.ones(5), "text": "x" * 100}, step=1)
    key = manifest_key(ckpt.commit.txid, ckpt.commit.id)
    flip(store, key, decode_head(_manifest(store))["rows"].end - 1)  # the pieces of b
    again = reopened(store)
    assert same_state(again.read("default@1", keys=["a", "text"]), {"a": torch.ones(9), "text": "x" * 100})
    with pytest.raises(Damaged, match=r"'b'.*'rows'"):
        again.read("default@1")
    template = {"b": torch.zeros(5)}
    with pytest.raises(Damaged, match="'b'"):
        again.load(template, "default@1")
    assert torch.equal(template["b"], torch.zeros(5))


@pytest.mark.usefixtures("_large")
def test_purging_a_checkpoint_while_its_parts_are_read_raises_gone() -> None:
    store = small(faulty := FaultyStore(small().repository.storage))
    ckpt = store.save({"a": torch.ones(9)}, step=1)
    key = manifest_key(ckpt.commit.txid, ckpt.commit.id)

    def purge(_: object) -> None:
        commits.purge(store.repository, commits.forget(store.repository, ckpt.commit))
        faulty.inner.delete(key)

    again = reopened(store)
    faulty.inject(call_first("open", purge, at=2, key=key))  # the pieces after the head and the front sections
    with pytest.raises(Gone, match="purged just now"):
        again.read("default@1")
