"""A folder of torch.distributed.checkpoint into a store, window by window: through the same save as `StorageWriter`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Final

from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.job import save_options
from casckpt.format.keys import is_attachment_name
from casckpt.frontends.dcp.folder import METADATA, Folder
from casckpt.frontends.dcp.session import Session, Wish
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.plan.progress import Shown
from casckpt.storage.files import Files, open_files

MAX_ATTACHMENT_BYTES: Final = 64 << 20
log = logging.getLogger(__name__)


def dcp_to_casckpt(
    path: str | os.PathLike[str],
    store: AnyStore,
    *,
    run: str = "default",
    step: int,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    progress: Shown | None = None,
) -> Checkpoint:
    """Save what a DCP folder, or a URL of one, holds, as if it had been saved through `StorageWriter`, by one process.

    Of Megatron's `torch_dist` folders too: ``common.pt`` and other small files become attachments. Memory holds 256 MiB
    of tensors, or the largest chunk, at a time. Nothing that is pickled in the folder is run unless ``allow_pickle``,
    and without it a value that torch's restricted unpickler does not read is refused: nobody could read it afterwards.

    Raises NotFound, InvalidInput, Refused or Damaged for a folder of no use, and what `Store.save` raises.
    """
    return import_folder(
        open_files(path), store, run=run, step=step, overwrite=overwrite, metadata=metadata, allow_pickle=allow_pickle,
        progress=progress,
    )  # fmt: skip


def import_folder(
    files: Files,
    store: AnyStore,
    *,
    allow_pickle: bool,
    attachments: Mapping[str, bytes] | None = None,
    more: Mapping[Any, Any] | None = None,
    **options: Any,
) -> Checkpoint:
    """`dcp_to_casckpt`, from any `Files`. ``more``: a state to save beside; ``attachments``: those of the folder."""
    folder, opened = Folder(files, allow_pickle=allow_pickle), as_store(store)
    found = small_files(files) if attachments is None else attachments
    folder.read_values()
    wish = Wish(found, None, allow_pickle, more or {})
    rest: dict[str, Any] = {"ephemeral": False, "dedup": "store", "threads": None, "check_replicas": False}
    session = Session(opened.repository, save_options(**rest, **options), wish, rank=0, alone=False)
    (plan,) = session.begin([session.ask(folder.plan())])
    results = session.write(plan, folder)
    session.finish(folder.metadata, [results])
    return opened.get(session.checkpoint)


def small_files(files: Files) -> dict[str, bytes]:
    """The files beside the tensors, up to 64 MiB each; larger ones are named in the log."""
    found: dict[str, bytes] = {}
    for name in files.names():
        if name == METADATA or name.endswith(".distcp"):
            continue
        if not is_attachment_name(name):
            log.warning("left out, for an attachment cannot have its name: %r", name)
        elif files.size(name) > MAX_ATTACHMENT_BYTES:
            log.warning("left out, for it is larger than 64 MiB: %s", name)
        else:
            found[name] = files.read(name)
    return found
