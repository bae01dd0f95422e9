"""Leases of a server: how many outlive their files, and what is left behind at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from casckpt.checkpoint.handle import Checkpoint
from casckpt.frontends.serve.leases import _MOST_IDLE, Leases
from casckpt.store.store import Store
from tests.support.saves import small


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of what is leased now, in place of leases."""
    found = list[int]()

    @contextmanager
    def lease(_: Store, checkpoint: Checkpoint, **__: Any) -> Iterator[None]:
        found.append(checkpoint.step)
        yield
        found.remove(checkpoint.step)

    monkeypatch.setattr(Store, "lease", lease)
    return found


def saved(count: int) -> tuple[Store, list[Checkpoint]]:
    store = small()
    for step in range(count):
        store.save({"w": torch.ones(1)}, step=step)
    return store, store.checkpoints()


def test_who_asks_for_many_checkpoints_has_few_leases(taken: list[int]) -> None:
    store, found = saved(_MOST_IDLE + 4)
    leases = Leases(store)
    with leases.hold(found[0]):
        for one in (*found[1:], found[2]):
            with leases.hold(one):
                assert one.step in taken
        assert sorted(taken) == [0, 2, *range(5, _MOST_IDLE + 4)]
    leases.close()
    assert not taken


def test_a_lease_that_is_taken_while_the_server_ends(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    store, (one,) = saved(1)
    leases, lease = Leases(store), Store.lease

    @contextmanager
    def at_the_end(*args: Any, **options: Any) -> Iterator[Checkpoint]:
        leases.close()
        with lease(*args, **options) as held:
            yield held

    monkeypatch.setattr(Store, "lease", at_the_end)
    with leases.hold(one):
        pass
    assert not taken
