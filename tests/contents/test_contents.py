"""The contents of a checkpoint by key, as one rank sees them."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.contents.contents import Contents
from casckpt.errors import Damaged, Refused
from casckpt.format.extents import build
from casckpt.format.plain import Tagged
from casckpt.format.records import changed
from casckpt.format.sections.index import Entry, StoredObject
from tests.support.ranks import Pool


def saved(store: casckpt.Store, state: dict[str, Any], **options: Any) -> Contents:
    return Contents.open(store.repository, store.save(state, step=1, **options).commit)


@pytest.fixture
def store(tmp_path: Path) -> casckpt.Store:
    return casckpt.open(tmp_path)


def test_the_contents_of_a_checkpoint_are_found_by_their_keys(store: casckpt.Store) -> None:
    large = bytes(200_000)
    state = {"w": torch.ones(3), "sub": {"x": torch.zeros(2), "lr": 0.1}, "array": np.arange(100_000)}
    contents = saved(store, state, attachments={"small": b"abc", "large": large})
    assert contents.keys() == ["w", "sub.x", "sub.lr", "array"]
    assert contents.tensor("sub.x").shape == (2,)
    assert (contents.where, contents.per_rank) == ("default@1", {})
    assert [part.nbytes for part in contents.parts(contents.objects["array"])] == [800_000]
    small, big = contents.attachments["small"], contents.attachments["large"]
    assert isinstance(small, StoredObject)
    assert isinstance(big, Entry)
    assert (contents.manifest.data(small), big.nbytes) == (b"abc", len(large))


def own(rank: int, size: int, url: str) -> list[Any]:
    store = casckpt.open(url)
    saved = store.save({"n": casckpt.PerRank(torch.full((2 + rank,), rank)), "s": casckpt.PerRank(rank)}, step=1)
    seen = []
    for asked in (rank, size):
        contents = Contents.open(store.repository, saved.commit, asked)
        stored = contents.objects["s"]
        seen.append((contents.tensor("n").shape, stored.rank, contents.per_rank))
    return seen


def test_a_rank_sees_its_own_values_and_other_ranks_see_those_of_rank_0(ranks: Pool, tmp_path: Path) -> None:
    held = {"n": [0, 1], "s": [0, 1]}
    first, second = ranks.run(2, own, str(tmp_path))
    assert first == [((2,), 0, held), ((2,), 0, held)]
    assert second == [((3,), 1, held), ((2,), 0, held)]


def test_a_leaf_that_is_not_stored_is_rejected(store: casckpt.Store) -> None:
    contents = saved(store, {"w": torch.ones(3), "lr": 0.1})
    assert contents.whole_tree() == {"w": 0, "lr": 1}
    del contents.objects["lr"]
    for look in (contents.whole_tree, lambda: contents.tensor("lr")):
        with pytest.raises(Refused, match="names 'lr' in its tree, but has no entry for it"):
            look()


def test_a_missing_part_of_an_object_is_reported_as_damage(store: casckpt.Store) -> None:
    contents = saved(store, {"array": np.arange(100_000)})
    more = changed(contents.objects["array"], parts=2)
    with pytest.raises(Damaged, match="lacks a part of object 'array'"):
        contents.parts(more)


def test_an_entry_with_holes_is_reported_before_memory_is_allocated_for_it(store: casckpt.Store) -> None:
    contents = saved(store, {"w": torch.ones(3)})
    entry = contents.tensor("w")
    assert contents.extents(entry).shape == (3,)
    contents.check_whole([entry])
    contents.manifest.extents = lambda entry: build((3,), 4, 1024, [])  # type: ignore[method-assign]  # holds no cell
    with pytest.raises(Damaged, match=r"default@1 holds only a part of 'w' \(12 bytes\)"):
        contents.check_whole([entry])


def test_the_contents_of_a_checkpoint_can_be_read_without_torch(store: casckpt.Store, tmp_path: Path) -> None:
    state: OrderedDict[str, Any] = OrderedDict(w=torch.ones(3))
    vars(state)["_metadata"] = {"kind": torch.float16}
    contents = saved(store, {"model": state})
    assert vars(contents.tree["model"])["_metadata"] == {"kind": Tagged("torch.dtype", "float16")}  # type: ignore[index,call-overload]
    code = (
        "import sys, casckpt; from casckpt.contents.contents import Contents\n"
        f"store = casckpt.open({str(tmp_path)!r})\n"
        "contents = Contents.open(store.repository, store.get('default@1').commit)\n"
        "print(contents.tree, contents.keys(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("['model.w'] False")
