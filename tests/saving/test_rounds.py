"""A save in rounds names stored cells without their data, and never one that it cannot reuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from casckpt.base.progress import silent
from casckpt.contents import manifests
from casckpt.errors import InvalidInput, Revoked
from casckpt.format.sections.index import TENSOR
from casckpt.history.transactions import Transaction
from casckpt.plan.reuse import CellSource, ReusableCells
from casckpt.saving.options import SaveOptions
from casckpt.saving.prepare import Prepared, prepare
from casckpt.saving.rounds import ComputedState, Rounds, save_in_rounds
from casckpt.store.store import Store
from tests.support.saves import cells, same_state, small

OPTIONS = SaveOptions(run="m", step=1).checked()


class Half:
    """A state whose tensor "x" is stored already, and whose tensor "y" is computed."""

    def __init__(self, store: Store, run: str = "a") -> None:
        self.x, self.y = cells(9), cells(5)
        self.source = store.save({"x": self.x}, run=run, step=0).commit
        self.manifest = manifests.get_with_extents(store.repository, self.source)
        self.named: list[bool] = []
        self.made = prepare({"x": self.x, "y": self.y}, None, rank=0, allow_pickle=False)

    def plan(self, known: ReusableCells) -> Rounds:
        table = self.manifest.extents(self.manifest.tensors["x"])
        places = [known.find(cell.digest) for cell in table.stored_cells()]
        self.named.append(all(places))
        x, y = (replace(self.made, sources=[source], objects=[]) for source in self.made.sources)
        stored = CellSource.of(self.manifest).extents[TENSOR, "x", 0, None]
        return Rounds({(TENSOR, "x", 0, None): stored}, [y]) if all(places) else Rounds({}, [x, y])

    @property
    def state(self) -> ComputedState:
        return ComputedState(self.made.streams, self.made.tree, self.source, self.plan)


def test_stored_cells_are_named_and_the_others_are_stored() -> None:
    store = small()
    half = Half(store)
    commit = save_in_rounds(store.repository, half.state, OPTIONS, silent)
    assert half.named == [True]
    assert same_state(store.read("m@1"), {"x": half.x, "y": half.y})
    assert commit.committed.bytes_reused == half.x.nbytes


def test_the_cells_of_a_purged_commit_are_not_named() -> None:
    store = small()
    half = Half(store)
    store.save({"x": cells(1)}, run="a", step=1)
    store.forget("a@0")
    store.gc(min_age=0, wait=0)
    save_in_rounds(store.repository, half.state, OPTIONS, silent)
    assert half.named == [False]
    assert same_state(store.read("m@1"), {"x": half.x, "y": half.y})


def test_a_revoked_save_is_retried_without_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    store = small()
    half = Half(store)
    real, failures = Transaction.commit, [Revoked("a gc revoked it")]

    def commit(transaction: Transaction, *given: object) -> None:
        if failures:
            raise failures.pop()
        real(transaction, *given)  # type: ignore[arg-type] # passed on

    monkeypatch.setattr(Transaction, "commit", commit)
    save_in_rounds(store.repository, half.state, OPTIONS, silent)
    assert half.named == [True, False]
    assert same_state(store.read("m@1"), {"x": half.x, "y": half.y})


def test_an_error_in_a_round_commits_nothing() -> None:
    store = small()
    half = Half(store)

    def rounds() -> Iterator[Prepared]:
        yield half.made
        raise InvalidInput("a test")

    state = replace(half.state, plan=lambda known: Rounds({}, rounds()))
    with pytest.raises(InvalidInput, match="a test"):
        save_in_rounds(store.repository, state, OPTIONS, silent)
    assert store.runs() == ["a"]
    assert store.transactions() == []


def test_a_missing_stream_is_an_error() -> None:
    store = small()
    half = Half(store)
    state = replace(half.state, plan=lambda known: Rounds({}, []))
    with pytest.raises(InvalidInput, match=r"'x' of shape .* is incomplete"):
        save_in_rounds(store.repository, state, OPTIONS, silent)
    assert torch.equal(store.read("a@0")["x"], half.x)
