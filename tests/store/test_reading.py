from __future__ import annotations

from pathlib import Path

import torch

from casckpt.frontends.trainer import Checkpointer
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore
from tests.support.repositories import memory
from tests.support.training import contents, identical, made, trained


def test_a_load_does_not_read_the_blobs_of_a_prefetched_checkpoint_again(tmp_path: Path) -> None:
    storage = FaultyStore(memory())
    store = Store(Repository(storage, cache_dir=tmp_path))
    model, optimizer = trained()
    checkpointer = Checkpointer(store, run="sft", pre_download=True)
    checkpointer.save(1, model, optimizer, {"seen": torch.arange(5000)})
    for wanted in (True, False):  # the second time, it is already there
        storage.calls.clear()
        other, fresh = made(1)
        checkpointer.load("sft@1", other, fresh)
        assert (storage.count("read_into", "objects/*.safetensors") > 0) is wanted
        assert identical(contents(other, fresh), contents(model, optimizer))
