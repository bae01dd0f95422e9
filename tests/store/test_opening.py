from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import InvalidInput, NotFound, Refused
from casckpt.format.records import changed, encode_marker
from casckpt.repository.repository import Repository
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore
from tests.support.repositories import MARKER, memory
from tests.support.saves import small


def test_open_does_not_create_a_store() -> None:
    with pytest.raises(InvalidInput, match=r"casckpt.open\('ckpts'\)"):
        casckpt.Store("ckpts")  # type: ignore[arg-type]  # what people try


REF = "default@1"


def test_a_mistyped_path_raises_not_found_and_creates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "no" / "store"
    store = open_store(path)
    calls: list[Any] = [
        lambda: store.load({"w": torch.zeros(1)}, REF), lambda: store.read("latest"), lambda: store.get(REF),
        store.checkpoints, store.stats, lambda: store.attachments(REF), lambda: store.diff(REF, REF),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(NotFound, match=rf"there is no store at {re.escape(str(path))}"):
            call()
    assert not path.parent.exists()
    assert store.repository.exists() is False


def test_sizes_are_accepted_with_and_without_a_unit(tmp_path: Path) -> None:
    assert open_store(tmp_path, staging_bytes="2GiB").repository.staging_bytes == 2 << 30
    assert open_store(tmp_path, staging_bytes=0).repository.staging_bytes == 0
    for wrong in (-1, True, 1.5):
        with pytest.raises(InvalidInput, match=f"staging_bytes={wrong} is not valid: pass a size"):
            open_store(tmp_path, staging_bytes=wrong)  # type: ignore[arg-type]  # wrong values on purpose


# a store from before the first release


def filled() -> Store:
    store = small()
    store.save({}, run="a", step=1)
    return store


CALLS: dict[str, Callable[[Store], Any]] = {
    "save": lambda store: store.save({}, run="a", step=1),
    "load": lambda store: store.load({}, "a@1"),
    "watch": lambda store: next(store.watch("a", timeout=0)),
    "list": lambda store: store.checkpoints(),
    "tags": lambda store: store.tags(),
    "tag": lambda store: store.tag("best", "a@1"),
    "forget": lambda store: store.forget("a@1"),
    "gc": lambda store: store.gc(),
    "settings": lambda store: store.change_settings(compress="off"),
    "transactions": lambda store: store.transactions(),
    "stats": lambda store: store.stats(),
    "status": lambda store: store.status(),
    "report": lambda store: store.report(),
    "verify": lambda store: store.verify(),
    "repair": lambda store: store.repair(),
    "copy from it": lambda store: store.copy_to(small()),
    "copy to it": lambda store: filled().copy_to(store),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_store_from_before_the_first_release_is_refused_before_anything_is_listed(call: str, tmp_path: Path) -> None:
    storage = FaultyStore(memory())
    storage.put("casckpt.json", encode_marker(changed(MARKER, features=[])))
    with pytest.raises(Refused, match="a format from before the first release of casckpt: read it with the version"):
        CALLS[call](Store(Repository(storage, tmp_path)))
    assert (storage.count("list"), storage.count("put")) == (0, 1)
