"""A checkpoint out of a store, into safetensors files: window by window, never a whole model in memory.

What is written stands under temporary names until it is whole and on the disk. A folder may be made of what an earlier
export has left of another checkpoint: then little is read, and where the file system can share blocks, little written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from casckpt.checkpoint.arguments import Rename
from casckpt.checkpoint.handle import Checkpoint
from casckpt.errors import Conflict, InvalidInput, MissingKey
from casckpt.frontends.new_files import (
    check_file_names,
    copied,
    new_file,
    new_folder,
    place_for,
    synced_file,
    write_attached,
)
from casckpt.frontends.safetensors.importing import METADATA_KEY
from casckpt.frontends.safetensors.layout import INDEX, STEM, SUFFIX, FileLayout, Layout, lay_out
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.view import Rules, ViewTensor, view_of
from casckpt.frontends.windows import WindowReader
from casckpt.lazy import cached_property
from casckpt.plan.progress import Shown
from casckpt.plan.sizes import parse_size
from casckpt.repository import manifests
from casckpt.storage.paths import is_url
from casckpt.store.exports import Exported
from casckpt.store.store import Store

CONFIG: Final = "config.json"
_OURS = re.compile(rf"{STEM}(-[0-9]{{5}}-of-[0-9]{{5}})?\{SUFFIX}")
_OF_TRAINING = re.compile(r"optimizer\.(pt|bin)|scheduler\.pt|scaler\.pt|training_args\.bin|trainer_state\.json")
"""What Transformers' Trainer keeps in a folder of its own beside a model."""


class Base(NamedTuple):
    """A folder that an export made of a checkpoint. ``is_taken``: its files may be moved away, for nobody uses them."""

    checkpoint: Checkpoint
    folder: Path
    is_taken: bool


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
    force: bool = False,
    progress: Shown | None = None,
    base: Base | None = None,
) -> Exported:
    """Write the tensors of a checkpoint as safetensors, under their flat keys; every byte that is read is verified.

    ``out``, a path or a URL (to which a temporary one is copied): with the suffix ".safetensors" that one file; else a
    folder, for which ``model.safetensors``, or several files of at most ``max_shard_size`` (5GB) and their index, and
    all attachments are made (``attachments``: unless False). ``force``: write over what is there. ``progress``: of the
    bytes of tensors. ``base``: of its files those of a folder are made where they lie alike; all is hashed, and the
    rest written in full.

    ``keys``, ``strip_prefix``, ``rename``: see `casckpt.frontends.view.Rules`. ``model``: the weights of the model
    alone, as `from_pretrained` of Transformers loads them. Without it a folder of other names gets no config.json.

    Raises NotFound, MissingKey if a pattern matches nothing, Conflict if ``out`` is there, InvalidInput naming a key
    that safetensors cannot hold or an attachment that can be no file, or saying that the model cannot be told from the
    rest, Damaged, StorageError. After an error nothing stands under the final names.
    """
    opened = as_store(store)
    rules = Rules(keys, strip_prefix, rename, model)
    job = _Job(opened, opened.get(ref), rules, progress)
    with place_for(out, force=force, last=(INDEX,)) as target:
        found = _exported_to(target, job, max_shard_size, attached=attachments, force=force, base=base)
    if not is_url(out):
        return found
    names = (Path(path).relative_to(target).as_posix() for path in found.files)
    return replace(found, files=tuple(f"{out}/{name}" if name != "." else str(out) for name in names))


def _exported_to(
    target: Path, job: _Job, max_shard_size: int | str | None, *, attached: bool, force: bool, base: Base | None
) -> Exported:
    if target.suffix == SUFFIX and not os.path.isdir(target):  # Path.is_dir raises what the system refuses
        (file,) = job.lay_out(None).files
        with new_file(target, force=force) as path:
            job.write(path, file.head, file.tensors)
        return job.exported((target,), (), ())
    most = "5GB" if max_shard_size is None else max_shard_size
    layout = job.lay_out(parse_size(most) if isinstance(most, str) else most)
    attachments, skipped = job.attachments([*layout.names, INDEX], wanted=attached)
    if os.path.exists(target / CONFIG) and job.is_no_model:
        raise Conflict(
            f"{target} has a {CONFIG}, and these are not the names of a model: from_pretrained would load random "
            "weights. Give another folder, or --format hf for all of the model alone"
        )
    with new_folder(target, force=force, stale=_is_ours, last=layout.names) as folder:
        write_attached(job.store, job.checkpoint, attachments, folder)
        for file in layout.files:
            if base is None or not job.revise(folder / file.name, file, base):
                job.write(folder / file.name, file.head, file.tensors)
        if layout.index is not None:
            job.write(folder / INDEX, layout.index, ())
    return job.exported([target / name for name in (*layout.names, *attachments)], tuple(attachments), tuple(skipped))


class _Job:
    """One export."""

    def __init__(self, store: Store, checkpoint: Checkpoint, rules: Rules, progress: Shown | None) -> None:
        self.store, self.checkpoint = store, checkpoint
        self.manifest = manifests.get(store.repository, checkpoint.commit)
        self._rules = rules
        self.view = view_of(self.manifest, rules)
        self._reader = WindowReader(store.repository, self.manifest, self.view.nbytes, progress)

    def lay_out(self, most: int | None) -> Layout:
        """The files, before anything is written."""
        return lay_out(self.view.tensors, file_metadata(self.checkpoint, self._rules), most)

    def attachments(self, taken: Sequence[str], *, wanted: bool) -> tuple[list[str], list[str]]:
        """Names of attachments for the folder, and of those that are of no use in it."""
        found = self.store.attachments(self.checkpoint)
        skipped = [name for name in found if not wanted or self._is_skipped(name)]
        chosen = [name for name in found if name not in skipped]
        check_file_names(chosen, frozenset(taken).__contains__)
        return chosen, skipped

    def _is_skipped(self, name: str) -> bool:
        """Old indexes go; of a model what was for its training; and what says of other names that they are a model."""
        is_of_training = self._rules.model and _OF_TRAINING.fullmatch(name) is not None
        return name == INDEX or is_of_training or (name == CONFIG and self.is_no_model)

    @cached_property
    def is_no_model(self) -> bool:
        """Whether a folder with these names and a config.json would be loaded as a model with random weights."""
        rules, whole = self._rules, Rules(model=True)
        if rules.model:
            if rules.strip_prefix is None and not rules.keys:
                return False
            whole = replace(rules, keys=None, strip_prefix=self.view.prefix or None)
        try:
            view = view_of(self.manifest, whole)
        except (InvalidInput, MissingKey):
            return not rules.model  # what cannot be told is as whoever chose these names says
        names = {one.name for one in view.tensors}
        return not names <= {one.name for one in self.view.tensors}

    def write(self, path: Path, head: bytes, streams: Sequence[ViewTensor]) -> None:
        """Write one file: some bytes, then the data of ``streams``."""
        with synced_file(path) as file:
            file.write(head)
            for window in self._reader.read(streams):
                file.write(window)

    def revise(self, path: Path, file: FileLayout, base: Base) -> bool:
        """Make one file of that of a base; False where that has none like it."""
        old = base.folder / file.name
        if not _is_like(old, file):
            return False
        if base.is_taken:
            os.rename(old, path)
        elif not copied(old, path):
            return False
        with path.open("r+b") as opened:
            opened.seek(len(file.head))
            self._reader.revise(file.tensors, opened, base.checkpoint)
            opened.flush()
            os.fsync(opened)
        return True

    def exported(self, files: Sequence[Path], attachments: tuple[str, ...], skipped: tuple[str, ...]) -> Exported:
        """Give what was written."""
        view = self.view
        return Exported(
            self.checkpoint, tuple(files), len(view.tensors), view.nbytes, attachments, view.left_out, skipped,
            "hf" if self._rules.model else "safetensors", view.prefix,
        )  # fmt: skip


def file_metadata(checkpoint: Checkpoint, rules: Rules) -> dict[str, str]:
    """Give what the imported file said of itself; else, and in any case of a model, what transformers asks for."""
    wanted, said = {"format": "pt"}, checkpoint.metadata.get(METADATA_KEY)
    if isinstance(said, dict) and all(isinstance(value, str) for value in said.values()):
        return (wanted | said) if rules.model else said
    return wanted


def _is_like(path: Path, file: FileLayout) -> bool:
    """Whether a file has these tensors, in the same places."""
    try:
        with path.open("rb") as found:
            return os.fstat(found.fileno()).st_size == file.nbytes and found.read(len(file.head)) == file.head
    except FileNotFoundError:
        return False


def _is_ours(name: str) -> bool:
    """Whether an export of another shape made this file, which then must not stay beside the new ones."""
    return name == INDEX or _OURS.fullmatch(name) is not None
