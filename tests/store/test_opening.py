from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import InvalidInput, NotFound
from casckpt.store.opening import open as open_store


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
