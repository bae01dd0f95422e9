"""Failures on one of several ranks, and agreement on the checkpoint to resume from."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from casckpt.errors import Damaged, NotFound, RankFailed, StorageError, Unsupported
from casckpt.frontends.trainer import Checkpointer
from casckpt.repository.repository import Repository
from casckpt.storage.base import Known, ListedObject
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.faulty import Call, FaultyStore, call_first, fail_before
from tests.support.ranks import Pool, die, outcome_of
from tests.support.repositories import Ticks, meanwhile
from tests.support.saves import cells, small_folder, steps


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


# failures


def fails_on_one(rank: int, size: int, path: Path) -> Any:
    storage = FaultyStore(LocalStore(path))
    store = Store(Repository(storage))
    checkpointer = Checkpointer(store, run="sft", max_checkpoints=1)
    whole = {"model": torch.ones(4)}

    class Failing:
        def state_dict(self) -> dict[str, Any]:
            if rank == 1:
                raise ZeroDivisionError("of the loader")
            return {}

    found = [outcome_of(lambda: checkpointer.save_async(1, model(), None, Failing()))]
    if rank == 1:
        storage.inject(fail_before("put", key="objects/*.safetensors"))
    future = checkpointer.save_async(1, model(), None, {"big": cells(3, seed=rank)} | whole)
    found.append(future.exception(60))
    seen = steps(store)
    checkpointer.save(1, model(), None, {"big": cells(3, seed=rank)} | whole)
    mine = checkpointer.load("sft@1", model(), None, {"big": cells(3, seed=9)})
    same = bool(torch.equal(mine["big"], cells(3, seed=rank)))
    return [type(one) for one in found], [str(one) for one in found], seen, same


def test_a_save_that_fails_on_one_rank_fails_on_all_and_can_be_retried(store_path: Path, ranks: Pool) -> None:
    kinds, texts, seen, same = zip(*ranks.run(3, fails_on_one, store_path), strict=True)
    assert kinds == (
        [RankFailed, StorageError],
        [ZeroDivisionError, StorageError],
        [RankFailed, StorageError],
    )
    assert "rank 1" in texts[0][0]
    assert "rank 1" in texts[2][1]
    assert seen == ([], [], [])
    assert all(same)


def fails_again_and_again(rank: int, size: int, path: Path, *, repeats: bool) -> tuple[type, int]:
    """Let only rank 1 fail, and advance only its clock. Return each error with its step."""
    storage, clock = FaultyStore(LocalStore(path)), Ticks()
    checkpointer = Checkpointer(Store(Repository(storage)), run="sft", save_interval=2)
    checkpointer._failures._clock = lambda: clock() / 1e6
    if rank == 1:
        error = Unsupported("by the storage") if repeats else None
        storage.inject(fail_before("put", key="objects/*.safetensors", times=99, error=error))
    for step in range(2, 99):
        if rank == 1:
            clock.advance(60)
        saving = outcome_of(partial(checkpointer.save_if_due, step, model(), None, {"x": cells(2, seed=rank)}))
        if isinstance(saving, Exception):
            return type(saving), step
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("repeats", "want"), [(True, (Unsupported, 4)), (False, (StorageError, 20))])
def test_failures_are_raised_at_the_same_step_on_all_ranks(
    repeats: bool, want: tuple[type, int], store_path: Path, ranks: Pool
) -> None:
    assert ranks.run(2, fails_again_and_again, store_path, repeats=repeats) == [want] * 2


def dies_in_the_background(rank: int, size: int, path: Path) -> Any:
    storage = FaultyStore(LocalStore(path))
    checkpointer = Checkpointer(Store(Repository(storage)), run="sft")
    checkpointer.save(1, model(), None, {"x": rank})
    if rank == 1:
        storage.inject(call_first("put", lambda _: die(), key="objects/*"))
    future = checkpointer.save_async(2, model(), None, {"x": cells(2, seed=rank)})
    return type(future.exception(60)), [step for _, step in steps(checkpointer.store)]


def test_the_error_on_other_ranks_names_the_rank_that_died_during_a_save(store_path: Path, ranks: Pool) -> None:
    found = ranks.outcomes(3, dies_in_the_background, store_path)
    assert found[1].died == -signal.SIGKILL
    assert [one.value for one in (found[0], found[2])] == [(RankFailed, [1])] * 2


def resume_while_another_saves(rank: int, size: int, path: Path) -> int:
    store, state = small_folder(path), {"model": model().state_dict()}
    if rank == 0:
        store.save(state, run="sft", step=1, no_dist=True)
    else:
        store.repository.storage = FaultyStore(
            store.repository.storage,
            [
                call_first(
                    "open", meanwhile(lambda: store.save(state, run="sft", step=2, no_dist=True)), key="objects/*"
                )
            ],
        )
    found = Checkpointer(store, run="sft").resume(model())
    assert found is not None
    return found.step


def test_all_ranks_resume_from_the_checkpoint_that_rank_0_chooses(store_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, resume_while_another_saves, store_path) == [1, 1]


# a storage that lies to one rank


class Older(FaultyStore):
    """A folder in which this rank sees only ``keys``. ``lists``: it can read newer objects, but does not list them."""

    def __init__(self, path: Path, keys: set[str], *, lists: bool) -> None:
        super().__init__(LocalStore(path))
        self._keys, self._lists = keys, lists

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        return (one for one in super().list(prefix, known=known) if one.key in self._keys)

    def list_folder(self, folder: str) -> Any:
        objects, folders = super().list_folder(folder)
        return [one for one in objects if one.key in self._keys], folders

    def size(self, key: str) -> int | None:
        return super().size(key) if self._lists or key in self._keys else None

    @contextmanager
    def faults(self, method: str, key: str) -> Iterator[set[Any]]:
        if method in ("get", "open") and not self._lists and key not in self._keys:
            raise NotFound(f"{key} does not exist", key=key)
        with super().faults(method, key) as kinds:
            yield kinds


class FailsAt(FaultyStore):
    """A folder whose call number ``at`` fails."""

    def __init__(self, path: Path, at: int) -> None:
        super().__init__(LocalStore(path))
        self.at = at

    def _hit(self, call: Call) -> Any:
        hit = super()._hit(call)
        if len(self.calls) == self.at:
            raise StorageError(f"call {self.at} failed: {call.method}")
        return hit


def taught(seed: int) -> tuple[nn.Linear, torch.optim.AdamW]:
    """Return a model and an optimizer that has made a step. They are the same on all ranks."""
    torch.manual_seed(seed)
    made = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return made, optimizer


def save_steps(rank: int, size: int, path: Path) -> list[set[str]]:
    """Save steps 1 and 2. Return the keys in the store before the first save and after each save."""
    checkpointer = Checkpointer(path, run="sft")
    checkpointer.store.create()
    dist.barrier()
    keys = [{one.key for one in LocalStore(path).list("")}]
    for step in (1, 2):
        dist.barrier()
        checkpointer.save(step, *taught(step), {"big": cells(2, seed=10 * step + rank)})
        dist.barrier()
        keys.append({one.key for one in LocalStore(path).list("")})
    return keys


def resumed(rank: int, size: int, storage: FaultyStore, cache: Path) -> tuple[int | None, str] | tuple[type, str]:
    """Resume. Return the step, or the kind of the error, and its text."""
    (mine, optimizer), train = taught(99), {"big": cells(2)}
    checkpointer = Checkpointer(Store(Repository(storage, cache)), run="sft")
    found = outcome_of(lambda: checkpointer.resume(mine, optimizer, train))
    if isinstance(found, Exception):
        return type(found), str(found)
    if found is None:
        return None, ""
    want, want_optimizer = taught(found.step)
    assert torch.equal(mine.weight, want.weight)
    assert torch.equal(train["big"], cells(2, seed=10 * found.step + rank))
    moments = [one.state[next(iter(one.state))]["exp_avg"] for one in (optimizer, want_optimizer)]
    assert torch.equal(*moments)
    return found.step, ""


def told_by(who: int, kind: type, text: str) -> tuple[tuple[type, str], ...]:
    """Return the errors of all ranks if rank ``who`` raises an error."""
    return tuple((kind, text if rank == who else f"rank {who}: {text}") for rank in range(3))


def resume_with_old_view(
    rank: int, size: int, path: Path, who: int, keys: set[str], *, lists: bool
) -> list[tuple[Any, str]]:
    """Resume while rank ``who`` sees an older state of the store, and once more afterwards."""
    storage = Older(path, keys, lists=lists) if rank == who else FaultyStore(LocalStore(path))
    return [resumed(rank, size, one, path.parent / f"cache {rank}") for one in (storage, FaultyStore(LocalStore(path)))]


@pytest.mark.parametrize("lists", [True, False], ids=["listings", "everything"])
@pytest.mark.parametrize("age", [0, 1], ids=["new run", "step 1"])
def test_all_ranks_resume_alike_if_one_sees_an_older_store(
    store_path: Path, age: int, lists: bool, ranks: Pool
) -> None:
    keys = ranks.run(3, save_steps, store_path)[0][age]
    for who in range(3):
        first, then = zip(*ranks.run(3, resume_with_old_view, store_path, who, keys, lists=lists), strict=True)
        assert then == ((2, ""),) * 3
        if who == 0 or lists:
            assert first == (((age or None) if who == 0 else 2, ""),) * 3
        else:
            _, text = first[who]
            assert text.startswith("blob ")
            assert "sft@2 needs it. The" in text
            assert "This process does not list sft@2, so it may see an older state of the store" in text
            assert first == told_by(who, Damaged, text)


def resume_with_failures(rank: int, size: int, path: Path, who: int) -> list[tuple[Any, str]]:
    """Resume again and again. Each time, one more call of the storage succeeds on rank ``who`` before one fails."""
    found = []
    for at in count(1):
        storage = FailsAt(path, at if rank == who else 0)
        found.append(resumed(rank, size, storage, path.parent / f"cache {who} {rank} {at}"))
        calls = torch.tensor(len(storage.calls) if rank == who else 0)
        dist.all_reduce(calls)
        if calls < at:
            return found
    raise AssertionError("unreachable")


@pytest.mark.parametrize("who", range(3))
def test_all_ranks_resume_alike_if_one_cannot_read_the_store(store_path: Path, who: int, ranks: Pool) -> None:
    ranks.run(3, save_steps, store_path)
    *failed, last = zip(*ranks.run(3, resume_with_failures, store_path, who), strict=True)
    assert last == ((2, ""),) * 3
    assert {text.rpartition(" ")[2] for _, text in (found[who] for found in failed)} == {
        "get", "open", "read_into", *(("list", "") if who == 0 else ())  # "": it cannot look at the run after the load
    }  # fmt: skip
    for found in failed:
        assert found == (told_by(who, StorageError, found[who][1]) if found[who][1] else last)
