"""Imports a folder of torch.distributed.checkpoint, window by window, through the save of `StorageWriter`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Unpack

from casckpt.base.names import check_keywords, is_attachment_name
from casckpt.contents.checkpoint import Checkpoint
from casckpt.frontends.dcp.folder import METADATA, Folder
from casckpt.frontends.dcp.session import WriterSession
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.saving.options import ImportArguments, SaveOptions
from casckpt.storage.files import Files
from casckpt.storage.paths import open_files

MAX_ATTACHMENT_BYTES: Final = 64 << 20
log = logging.getLogger(__name__)


def dcp_to_casckpt(
    path: str | os.PathLike[str],
    store: AnyStore,
    *,
    step: int,
    allow_pickle: bool = False,
    **options: Unpack[ImportArguments],
) -> Checkpoint:
    """Save the content of a DCP folder or its URL, as if one process had saved it through `StorageWriter`.

    Small files beside the tensors, such as ``common.pt`` of Megatron's `torch_dist` folders, become attachments. Memory
    holds 256 MiB of tensors, or the largest chunk, at a time. ``allow_pickle``: accept values that torch's restricted
    unpickler does not read, and unpickle Megatron's objects, which may run code. Without it, such values raise
    InvalidInput. ``step``, ``options``: those of `Store.save`.

    Raises NotFound, InvalidInput, Refused or Damaged for an unusable folder, and the errors of `Store.save`.
    """
    check_keywords("dcp_to_casckpt", options, ImportArguments)
    return import_folder(open_files(path), store, SaveOptions(step=step, allow_pickle=allow_pickle, **options))


def import_folder(
    files: Files, store: AnyStore, options: SaveOptions, more: Mapping[Any, Any] | None = None
) -> Checkpoint:
    """Import any `Files` like `dcp_to_casckpt`. ``more``: a state to add. By default, small files are attached."""
    folder, opened = Folder(files, allow_pickle=options.allow_pickle), as_store(store)
    if options.attachments is None:
        options = replace(options, attachments=small_files(files))
    plan = folder.plan()
    folder.read_values(plan)
    session = WriterSession(opened.repository, options.checked(), rank=0, alone=False, more=more or {})
    (plan,) = session.begin([session.local_plan(plan)])
    results = session.write(plan, folder)
    session.finish(folder.metadata, [results])
    return opened.get(session.checkpoint)


def small_files(files: Files) -> dict[str, bytes]:
    """Return the files beside the tensors, up to 64 MiB each. The log names larger files."""
    contents: dict[str, bytes] = {}
    for name in files.names():
        if name == METADATA or name.endswith(".distcp"):
            continue
        if not is_attachment_name(name):
            log.warning("skipped, because an attachment cannot have this name: %r", name)
        elif files.size(name) > MAX_ATTACHMENT_BYTES:
            log.warning("skipped, because it is larger than 64 MiB: %s", name)
        else:
            contents[name] = files.read(name)
    return contents
