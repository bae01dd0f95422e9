"""The additional memory of conversions, measured by the kernel in a separate process.

``python -m tests.support.peak_convert FOLDER MIB`` converts a state of this size, and prints the peak MiB of each
conversion: from a DCP folder into a store and back, from the store into a torch.save file and back, and into a
safetensors folder.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from casckpt.frontends.dcp import (
    casckpt_to_dcp,
    casckpt_to_torch_save,
    converters,
    dcp_to_casckpt,
    items,
    torch_save_to_casckpt,
)
from casckpt.frontends.interchange import resident
from casckpt.frontends.interchange.safetensors.exporting import export_safetensors
from casckpt.loading import regions
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.dcp import save
from tests.support.killed_saves import forked
from tests.support.peak import MIB, taken


def _state(mib: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.arange(i, i + MIB // 4, dtype=torch.float32) for i in range(mib)}


def _opened(folder: Path) -> Store:
    store = Store(Repository(LocalStore(folder), folder.with_name("cache")))
    store.create(blob_bytes=1 << 20)
    return store


def convert(store: Store, folder: Path, mib: int, run: str) -> list[float]:
    """Run all five conversions of a state of ``mib`` MiB, which a different process creates."""
    if forked(lambda: save(_state(mib), FileSystemWriter(str(folder / "in")))):
        raise SystemExit("the folder to be read could not be made")
    calls: list[Any] = [
        lambda: dcp_to_casckpt(folder / "in", store, run=run, step=1),
        lambda: casckpt_to_dcp(store, f"{run}@1", folder / "out"),
        lambda: casckpt_to_torch_save(store, f"{run}@1", folder / "out.pt"),
        lambda: torch_save_to_casckpt(folder / "out.pt", store, run=run, step=2),
        lambda: export_safetensors(store, f"{run}@1", folder / "hf", model=True, max_shard_size=32 * MIB),
    ]
    return [taken(call) for call in calls]


def main(folder: Path, mib: int) -> None:
    items.WINDOW_BYTES = converters.WINDOW_BYTES = 4 * MIB  # type: ignore[misc] # small, so that a test can be
    regions.WINDOW_BYTES = resident.RESIDENT_BYTES = 4 * MIB  # type: ignore[misc] # as above
    store = _opened(folder / "store")
    convert(store, folder / "warm", 12, "warm")
    print(" ".join(f"{found:.1f}" for found in convert(store, folder / "real", mib, "real")))  # noqa: T201 - its parent reads it


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]))
