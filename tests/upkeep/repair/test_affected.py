"""Reports of damage name the keys and checkpoints that need the blob."""

from __future__ import annotations

import json

import numpy as np
import pytest

from casckpt.cli.describe import plain
from casckpt.format.blob import DATA_OFFSET
from casckpt.history.commits import Commit
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.verify import verify
from tests.support.checkpoints import CELL, array, flip, only_blob, read_arrays, save_arrays
from tests.upkeep.repair.conftest import hash_in, marks

LEAF = 64 << 10


KINDS_OF_BYTES: dict[str, tuple[int, set[str]]] = {
    "the header": (100, set()),
    "a large cell": (DATA_OFFSET + LEAF + 5, {"a", "again"}),
    "the last cell of a tensor": (DATA_OFFSET + 2 * LEAF + 5, {"a", "again"}),
    "padding": (DATA_OFFSET + 2 * LEAF + 105, set()),
    "another large cell": (2 * DATA_OFFSET + 2 * LEAF, {"b"}),
    "a small one among others": (2 * DATA_OFFSET + 3 * LEAF + 410, {"d"}),
    "the proof": (-5, set()),
}


def spread(repo: Repository) -> tuple[Commit, Commit, Commit]:
    """Save three checkpoints in one blob, which contains two cells of "a", padding, one cell of "b", and four small
    cells.

    Cells are 64 KiB.
    """
    first = {"a": np.concatenate([array(1, 32), array(2, 100 / CELL)])}
    rest = {name: array(seed, 400 / CELL) for seed, name in enumerate("cdef", start=5)}
    one = save_arrays(repo, first | {"b": array(4, 16)} | rest, cell=LEAF)
    two = save_arrays(repo, {"again": first["a"]}, step=1, reuse=one, cell=LEAF)
    three = save_arrays(repo, {"g": array(9)}, step=2, cell=LEAF)
    return one, two, three


@pytest.mark.parametrize("what", KINDS_OF_BYTES)
def test_damage_anywhere_in_a_blob_is_reported_with_all_that_needs_the_blob(repo: Repository, what: str) -> None:
    one, two, three = spread(repo)
    position, lost = KINDS_OF_BYTES[what]
    flip(repo, only_blob(repo, one), position)
    (damaged,) = verify(repo).damaged
    assert damaged.keys == ("a", "again", "b", "c", "d", "e", "f")
    assert damaged.checkpoints == (one.id, two.id)
    assert marks(repo) == {damaged.blob}
    for commit, every in ((one, set("abcdef")), (two, {"again"}), (three, {"g"})):
        assert read_arrays(repo, commit, but=lost).keys() == every - lost, "all else is loaded"


def test_damage_is_marked_and_reported_with_keys_and_checkpoints(repo: Repository) -> None:
    one = save_arrays(repo, {"a": array(1), "b": array(2)})
    two = save_arrays(repo, {"a": array(1), "c": array(3)}, step=1, reuse=one)
    three = save_arrays(repo, {"d": array(4)}, step=2)
    key = only_blob(repo, one)
    flip(repo, key, DATA_OFFSET + 5)
    flip(repo, key, DATA_OFFSET + 2 * CELL)
    found = verify(repo)
    (damaged,) = found.damaged
    assert (damaged.blob, damaged.uploader) == (hash_in(key), one.txid)
    assert damaged.keys == ("a", "b")
    assert damaged.checkpoints == (one.id, two.id)
    assert three.id not in damaged.checkpoints
    assert marks(repo) == {damaged.blob}
    assert json.loads(json.dumps(plain(found)))["damaged"][0] == {
        "blob": damaged.blob,
        "uploader": one.txid,
        "keys": ["a", "b"],
        "checkpoints": [one.id, two.id],
        "why": damaged.why,
        "needed_by": [{"id": its.id, "run": "run", "step": its.step} for its in (one, two)],
    }
