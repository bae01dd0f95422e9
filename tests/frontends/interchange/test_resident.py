"""Pages of mapped files do not accumulate in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

import casckpt
from casckpt.frontends.convert import import_safetensors
from casckpt.frontends.interchange import resident
from tests.support.progress_calls import ProgressCalls
from tests.support.safetensors_files import file_of, same, tensors

pytestmark = pytest.mark.usefixtures("temporaries")


def test_an_import_is_correct_while_it_releases_the_pages_of_mapped_files(
    store: casckpt.Store, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "RESIDENT_BYTES", 1000)  # nearly all the time
    state = tensors(seed)
    done = ProgressCalls()
    import_safetensors(store, file_of(tmp_path, state), step=0, progress=done)
    assert same(store.read("latest"), state)
    assert done.done >= sum(tensor.nbytes for tensor in state.values())
