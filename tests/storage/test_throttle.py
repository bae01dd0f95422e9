"""The throttle limits how many ranks on a node upload at the same time."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from casckpt.errors import StorageError
from casckpt.frontends.trainer import Checkpointer
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.storage.throttle import ThrottledStore, Turn
from casckpt.store.store import Store
from tests.support.faulty import Call, FaultyStore, look_on
from tests.support.ranks import Pool, die, tell, wait_for
from tests.support.saves import cells


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def uploads_in_turn(rank: int, size: int, path: Path, count: int) -> int:
    """Return the maximum number of simultaneous uploads that this rank observed."""
    here, most = path / "here", [0]
    here.mkdir(exist_ok=True)

    def look(_: Call) -> None:
        mark = here / f"{rank}"
        mark.touch()
        most[0] = max(most[0], len(list(here.iterdir())))
        mark.unlink()

    faulty = FaultyStore(LocalStore(path / "store"), [look_on("put", look, key="objects/*", times=1 << 20)])
    checkpointer = Checkpointer(Store(Repository(faulty)), run="sft", throttle=count, work_dir=path / "locks")
    for step in range(4):
        checkpointer.save(step, model(), None, {"x": cells(9, seed=100 * step + rank)})
    return most[0]


def test_the_throttle_limits_how_many_ranks_of_a_node_upload(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(4, uploads_in_turn, tmp_path, 1) == [1, 1, 1, 1]
    (tmp_path / "two").mkdir()
    assert max(ranks.run(4, uploads_in_turn, tmp_path / "two", 2)) <= 2


def holds_a_turn(rank: int, size: int, path: Path) -> None:
    turn = Turn(1, path)
    if rank == 0:
        with turn:
            tell("held")
            die()
    wait_for("held")
    with turn:  # a dead process does not hold a turn
        pass


def test_a_process_that_dies_gives_up_its_turn_to_upload(tmp_path: Path, ranks: Pool) -> None:
    found = ranks.outcomes(2, holds_a_turn, tmp_path)
    assert found[0].died == -signal.SIGKILL
    assert found[1].ok


def test_the_threads_of_a_process_share_its_turn_to_upload(tmp_path: Path) -> None:
    turn = Turn(1, tmp_path)
    with turn, turn:
        assert (tmp_path / "upload-0.lock").exists()


def test_a_save_raises_an_error_if_it_cannot_lock_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    checkpointer = Checkpointer(tmp_path / "store", run="sft", throttle=1, work_dir=tmp_path / "file")
    with pytest.raises(StorageError, match=r"cannot lock files in .* set work_dir="):
        checkpointer.save(1, model())
    assert not list(checkpointer.find_checkpoints())


def test_a_throttled_store_otherwise_behaves_normally(store_path: Path) -> None:
    inner = LocalStore(store_path)
    throttled: Any = ThrottledStore(inner, Turn(2))
    assert throttled.url == inner.url
    assert throttled.traits == inner.traits
    checkpointer = Checkpointer(str(store_path), run="sft", throttle=2)
    checkpointer.save(1, model())
    assert not checkpointer.store.verify().is_damaged
