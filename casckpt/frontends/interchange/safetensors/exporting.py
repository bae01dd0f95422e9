"""Exports a checkpoint as safetensors files, window by window, without holding a whole model in memory.

Files have temporary names until they are complete and durable. An export can start from an earlier export of a
different checkpoint. In that case, it reads only the differences. If the file system shares blocks, it also writes
only the differences.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from casckpt.base.progress import Progress, Shown
from casckpt.base.text import is_url, listed
from casckpt.base.units import parse_size
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import Conflict, InvalidInput
from casckpt.frontends.interchange.new_files import (
    check_file_names,
    copied,
    new_file,
    new_folder,
    place_for,
    remove_others,
    synced_file,
    write_attached,
    write_durably,
)
from casckpt.frontends.interchange.safetensors.files import SUFFIX
from casckpt.frontends.interchange.safetensors.layout import FileLayout, is_index, stem_of
from casckpt.frontends.interchange.safetensors.planned import CONFIG, FolderPlan
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.views.recut import ViewTensor, sources_of
from casckpt.frontends.views.view import Rules
from casckpt.store.exports import Exported
from casckpt.store.store import Store
from casckpt.store.types import Rename

log = logging.getLogger(__name__)

_DTYPE = re.compile(rb'("(?:torch_)?dtype"\s*:\s*")(?:torch\.)?(?:float64|float32|float16|bfloat16)(")')
"""The fields of a config.json that name a floating-point dtype."""


class Base(NamedTuple):
    """A folder that holds an earlier export of ``checkpoint``."""

    checkpoint: Checkpoint
    folder: Path


def export_safetensors(
    store: AnyStore,
    ref: str | Checkpoint,
    out: str | os.PathLike[str],
    *,
    model: bool = False,
    keys: Sequence[str] | None = None,
    attachments: bool = True,
    strip_prefix: str | None = None,
    rename: Rename = None,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    dtype: str | None = None,
    force: bool = False,
    progress: Shown | None = None,
    base: Base | None = None,
) -> Exported:
    """Write a checkpoint's tensors as safetensors under their flat keys. Every byte that is read is verified.

    ``out``: a path, or a URL to which a temporary copy is uploaded. With the suffix ".safetensors", the export is one
    file. Otherwise, it is a folder with ``model.safetensors`` (or several files of at most ``max_shard_size``, 5GB by
    default, and their index), and, unless ``attachments=False``, all attachments. The weights of an imported folder
    have the beginning of their files' names, and their subfolders. ``metadata``: strings to add to the
    ``__metadata__`` of the files. ``force``: overwrite existing files. ``progress``: counts tensor bytes. ``base``: an
    earlier export. Its files are hashed completely, and reused if their layout is unchanged, without ``dtype``. The log
    names what is left out, unless ``model`` is set. The result's ``notes`` and the log report what else the user should
    know.

    ``keys``, ``strip_prefix``, ``rename``, ``dtype``: see `casckpt.frontends.views.view.Rules`. ``model``: write only
    the model's weights, for Transformers' `from_pretrained`. Otherwise, config.json is not written if the folder is not
    a model.

    Raises NotFound, MissingKey if a pattern matches nothing, Conflict if ``out`` exists, Damaged or StorageError.
    Raises InvalidInput for a key that safetensors cannot represent, for an attachment whose name is not a valid file
    name, and if several parts may be the model. After an error, no file exists under the final names.
    """
    opened = as_store(store)
    rules = Rules(keys, strip_prefix, rename, model, dtype=dtype)
    job = _Job(opened, opened.get(ref), rules, progress)
    job.metadata = metadata or {}
    with place_for(out, force=force, is_last=is_index) as target:
        found = _exported_to(target, job, max_shard_size, attached=attachments, force=force, base=base)
    if not is_url(out):
        return found
    names = [Path(path).relative_to(target).as_posix() for path in found.files]
    remove_others(os.fspath(out), names, lambda name: _stem(name) in {*map(_stem, names)} - {None})
    return replace(found, files=tuple(f"{out}/{name}" if name != "." else str(out) for name in names))


def _exported_to(
    target: Path, job: _Job, max_shard_size: int | str | None, *, attached: bool, force: bool, base: Base | None
) -> Exported:
    if target.suffix == SUFFIX and not os.path.isdir(target):  # Path.is_dir raises some OSErrors
        file = job.lay_out_file()
        with new_file(target, force=force) as path:
            job.write(path, file.head, file.tensors)
        return job.exported((target,), (), ())
    files = job.lay_out(parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size)
    attachments, skipped = job.attachments(wanted=attached)
    names = [file.name for file in files]
    check_file_names(attachments, frozenset(name.lower() for name in names).__contains__)
    if os.path.exists(target / CONFIG) and job.is_no_model:
        raise Conflict(
            f"{target} has a {CONFIG}, but these are not the names of a model: from_pretrained would load random "
            "weights. Choose a different folder, or pass --format hf to export only the model"
        )
    with new_folder(target, force=force, stale=lambda name: _stem(name) in map(_stem, names), last=names) as folder:
        write_attached(job.store, job.checkpoint, attachments, folder)
        for name in attachments:
            if job.rules.dtype is not None and Path(name).name == CONFIG:
                _set_dtype(folder / name, job.rules.dtype)
        for file in files:
            path = folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            if base is None or job.rules.dtype or not file.tensors or not job.revise(path, file, base):
                job.write(path, file.head, file.tensors)
    return job.exported([target / name for name in (*names, *attachments)], tuple(attachments), tuple(skipped))


class _Job(FolderPlan):
    """An export."""

    def __init__(self, store: Store, checkpoint: Checkpoint, rules: Rules, progress: Shown | None) -> None:
        super().__init__(store, checkpoint, rules)
        self._reader = self.reader(Progress(progress))

    def write(self, path: Path, head: bytes, streams: Sequence[ViewTensor]) -> None:
        """Write one file: ``head``, then the data of ``streams``."""
        with synced_file(path) as file:
            file.write(head)
            for window in self._reader.read_joined(sources_of(streams)):
                file.write(window)

    def revise(self, path: Path, file: FileLayout, base: Base) -> bool:
        """Create one file from a base's file. Return False if the base does not have a file with the same layout."""
        old = base.folder / file.name
        if not _is_like(old, file) or not copied(old, path):
            return False
        with path.open("r+b") as opened:
            opened.seek(len(file.head))
            self._reader.revise(sources_of(file.tensors), opened, base.checkpoint)
            opened.flush()
            os.fsync(opened)
        return True

    def exported(self, files: Sequence[Path], attachments: tuple[str, ...], skipped: tuple[str, ...]) -> Exported:
        """Return the result of the export."""
        view = self.view
        if view.left_out and not self.rules.model:
            log.warning("left out, because they are not tensors, or not below the prefix: %s", listed(view.left_out))
        wholes = dict.fromkeys(filter(None, (self.contents.outer.get(one.entry.key) for one in view.tensors)))
        if wholes and not self.rules.model:
            self.notes.append(f"of {listed([*wholes])}, the files have only the inner tensors, not shape and options")
        for note in self.notes:
            log.warning("%s", note)
        return Exported(
            self.checkpoint, tuple(files), len(view.tensors), view.nbytes, attachments, view.left_out, skipped,
            "hf" if self.rules.model else "safetensors", view.prefix, tuple(self.notes),
        )  # fmt: skip


def _set_dtype(config: Path, dtype: str) -> None:
    """Replace the floating-point dtypes in a model's config, in which from_pretrained would load the weights."""
    old = config.read_bytes()
    if re.search(rb'"quantization_config"\s*:\s*\{', old):
        raise InvalidInput(f"{config.name} has a quantization_config: omit dtype (--dtype), which would round scales")
    config.unlink()
    write_durably(config, _DTYPE.sub(rf"\1{dtype}\2".encode(), old))


def _is_like(path: Path, file: FileLayout) -> bool:
    """Return whether a file has these tensors at the same positions."""
    try:
        with path.open("rb") as found:
            return os.fstat(found.fileno()).st_size == file.nbytes and found.read(len(file.head)) == file.head
    except FileNotFoundError:
        return False


def _stem(name: str) -> str | None:
    """Return the stem of a file with weights or of an index. Files of an earlier export with this stem are stale."""
    return stem_of(name) if name.endswith(SUFFIX) or is_index(name) else None
