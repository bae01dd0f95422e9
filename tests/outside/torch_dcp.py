"""torch's tests of `torch.distributed.checkpoint`, with casckpt's writer and reader in place of those for folders.

A test's path becomes its `checkpoint_id`, as docs/dcp.md describes. What is saved in Hugging Face's format is saved to
the store and exported, and what is loaded is imported first. torch's reader for quantized files and its `_experimental`
package have no counterpart, and stay as they are.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

TESTS = ["test/distributed/checkpoint", "--noconftest"]  # its conftest.py needs an older pytest
SOURCE = None
PRELOADED = ("torch.testing._internal.common_fsdp", "torch.distributed.checkpoint", "torch.distributed.fsdp")
SAVES = [
    "torch.distributed.checkpoint.state_dict_saver._save_state_dict",
    "torch.distributed.checkpoint.format_utils._save_state_dict",
]
REASONS = {
    r"test_hf_storage\.py::.*then failed: .*(used before (set_up_storage_writer|read_metadata) was called|'fs'\n)": (
        "calls methods of torch's Hugging Face storage outside a save or load"
    ),
    r"test_(checkpoint|async_process_executor)\.py::.*wrote to no store": "saves with a storage writer of its own",
    r"::test_storage_meta: passed, then failed: .*@0' != '/": "checkpoints are named RUN@STEP, not by their path",
}


def start_ranks_as(process: type) -> None:
    """Use this class of process in torch's tests with several ranks, in both runs."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    start = MultiProcessTestCase._start_processes

    def forked(self: MultiProcessTestCase, proc: object) -> None:
        start(self, process)

    setattr(MultiProcessTestCase, "_start_processes", forked)  # noqa: B010  mypy refuses to assign to a method


def end_file() -> None:
    """Destroy the process group that a file leaves behind: torch's own runner gives each file its own process."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def install(store: Callable[[], str]) -> None:
    """Replace torch's classes in every module that names them."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _fsspec_filesystem, _storage_utils, filesystem, format_utils, hf_storage

    for module in (dcp, filesystem, format_utils, hf_storage, _fsspec_filesystem, _storage_utils):
        for name, replacement in classes(store).items():
            if hasattr(module, name):
                setattr(module, name, replacement)


@functools.cache
def classes(store: Callable[[], str]) -> dict[str, type]:
    """Return writers and readers that take torch's arguments. Those for files have no meaning for a store."""
    import torch.distributed as dist

    import casckpt
    from casckpt.frontends.dcp import StorageReader, StorageWriter
    from casckpt.frontends.interchange.safetensors.importing import import_safetensors
    from casckpt.ranks.ranks import this_rank

    class Writer(StorageWriter):
        def __init__(self, path: str | os.PathLike[str], *_: object, overwrite: bool = True, **__: object) -> None:
            super().__init__(store(), overwrite=overwrite)
            self.reset(path)

    class Reader(StorageReader):
        def __init__(self, path: str | os.PathLike[str], *_: object, **__: object) -> None:
            super().__init__(store(), path, allow_pickle=True, unread="ignore")

    class HubWriter(Writer):
        def __init__(self, path: str, fqn_to_index_mapping: Any = None, *_: object, **__: object) -> None:
            super().__init__(path)
            self.path = path if fqn_to_index_mapping else f"{path}/model-00001-of-00001.safetensors"

        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, results)
            ref = metadata.storage_data["checkpoint"]
            casckpt.export(store(), ref, self.path, format="safetensors", force=True)

    class HubReader(Reader):
        def __init__(self, path: str, *_: object, **__: object) -> None:
            super().__init__("imported@0")
            self.path = path

        def read_metadata(self, *args: Any, **options: Any) -> Any:
            if this_rank() == 0:
                import_safetensors(store(), self.path, run="imported", step=0, overwrite=True)
            if dist.is_initialized():
                dist.barrier()
            return super().read_metadata(*args, **options)

    found: dict[str, type] = {"FileSystemWriter": Writer, "FsspecWriter": Writer, "HuggingFaceStorageWriter": HubWriter}
    return found | {"FileSystemReader": Reader, "FsspecReader": Reader, "HuggingFaceStorageReader": HubReader}
