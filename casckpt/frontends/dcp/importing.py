"""Imports a torch.distributed.checkpoint folder, window by window, with the same kind of save as `StorageWriter`."""

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
from casckpt.saving.options import SaveOptions, UnpicklingArguments
from casckpt.storage.files import Files
from casckpt.storage.paths import open_files

MAX_ATTACHMENT_BYTES: Final = 64 << 20
log = logging.getLogger(__name__)


def dcp_to_casckpt(
    path: str | os.PathLike[str], store: AnyStore, *, step: int, **options: Unpack[UnpicklingArguments]
) -> Checkpoint:
    """Save the contents of a DCP folder (a path or URL) as if one process had saved them through `StorageWriter`.

    Small files next to the tensors, such as ``common.pt`` in Megatron's `torch_dist` folders, become attachments. The
    import holds 256 MiB of tensors, or the largest chunk, in memory at a time. ``allow_pickle``: accept values that
    torch's restricted unpickler cannot read, and unpickle Megatron's objects, which may run code. Without it, such
    values raise InvalidInput. ``step``, ``options``: see `Store.save`.

    Raises NotFound, InvalidInput, Refused or Damaged for a folder that cannot be imported, and the errors of
    `Store.save`.
    """
    check_keywords("dcp_to_casckpt", options, UnpicklingArguments)
    return import_folder(open_files(path), store, SaveOptions(step=step, **options))


def import_folder(
    files: Files, store: AnyStore, options: SaveOptions, more: Mapping[Any, Any] | None = None
) -> Checkpoint:
    """Import any `Files` as `dcp_to_casckpt` does. ``more``: a state to save in addition.

    By default, small files become attachments.
    """
    folder, opened = Folder(files, allow_pickle=options.allow_pickle), as_store(store)
    if options.attachments is None:
        options = replace(options, attachments=small_files(files))
    plan = folder.plan()
    folder.read_values(plan)
    session = WriterSession(opened.repository, options.checked(), rank=0, alone=False, more=more or {})
    (plan,) = session.begin([session.local_plan(plan)])
    session.finish(folder.metadata, [session.write(plan, folder)])
    return opened.get(session.checkpoint)


def small_files(files: Files) -> dict[str, bytes]:
    """Return the files of at most 64 MiB that are next to the tensors. The log names larger files."""
    contents: dict[str, bytes] = {}
    for name in files.names():
        if name == METADATA or name.endswith(".distcp"):
            continue
        if not is_attachment_name(name):
            log.warning("skipped %r, because an attachment cannot have this name", name)
        elif files.size(name) > MAX_ATTACHMENT_BYTES:
            log.warning("skipped %s, because it is larger than 64 MiB", name)
        else:
            contents[name] = files.read(name)
    return contents
