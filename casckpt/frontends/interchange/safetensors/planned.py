"""Plans a folder of safetensors files from a manifest: a view, its layout, and the attachments.

The plan determines every byte position before any data is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from casckpt.base.lazy import cached_property
from casckpt.base.names import HUB_FILE
from casckpt.base.progress import Progress
from casckpt.base.text import listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.errors import Damaged, InvalidInput, MissingKey
from casckpt.frontends.interchange.new_files import file_attachments
from casckpt.frontends.interchange.safetensors.files import INDEX_SUFFIX, SUFFIX
from casckpt.frontends.interchange.safetensors.heads import imported_models
from casckpt.frontends.interchange.safetensors.importing import METADATA_KEY
from casckpt.frontends.interchange.safetensors.layout import (
    MAX_SHARD_BYTES,
    STEM,
    FileLayout,
    exported_metadata,
    lay_out,
)
from casckpt.frontends.views.recut import ViewTensor
from casckpt.frontends.views.view import Rules, View, view_of
from casckpt.frontends.views.view_file import HubNames, HubView, read_hub_names
from casckpt.loading.regions import RegionReader
from casckpt.store.store import Store

CONFIG: Final = "config.json"
_OF_TRAINING = re.compile(r"optimizer\.(pt|bin)|scheduler\.pt|scaler\.pt|training_args\.bin|trainer_state\.json")
"""Files from Transformers' Trainer that belong to a training run, not to a model."""


class FolderPlan:
    """The plan for one checkpoint under the given rules. Raises the errors of `Contents.open` and `view_of`.

    An imported folder is restored with its own files, unless ``metadata`` is set, which adds to the metadata of files.
    ``notes``: the reasons, if this is not possible.
    """

    def __init__(self, store: Store, checkpoint: Checkpoint, rules: Rules) -> None:
        self.store, self.checkpoint, self.rules = store, checkpoint, rules
        self.metadata: Mapping[str, str] = {}
        self.contents = Contents.open(store.repository, checkpoint.commit)
        self.contents.check_loads()
        self._imported, self.notes = imported_models(store, checkpoint)
        component = (rules.strip_prefix or "").removesuffix(".")
        self._home = f"{component}/" if component and component in self._imported else ""
        if self._home:
            self._imported = {"": self._imported[component]}
        is_whole = bool(self._imported) and rules == Rules(model=True)
        self._stems, self._rules = dict[str, str](), rules
        self._folders: dict[str, dict[str, ViewTensor]] = {}
        names = self._names()
        if names.views:
            self._see_all(names.views)
        else:
            self.is_as_imported = has_components = False
            if is_whole:
                with suppress(MissingKey, Damaged):  # such as a thinned optimizer, which the model does not need
                    self._see(Rules())
                    has_components = "" not in self._folders and all(self._folders.values())
            if not self.is_as_imported and not has_components:
                self._see(rules)
        self.notes += [*names.notes, *self._untied(names.tied)]

    def _names(self) -> HubNames:
        """Return the tensor names that the model's own library uses, unless the caller asks for different names."""
        is_plain = replace(self.rules, keys=None) == Rules(model=True)
        if not is_plain or HUB_FILE not in self.store.attachments(self.checkpoint):
            return HubNames()
        text = self.store.read_attachment(self.checkpoint, HUB_FILE)
        names = read_hub_names(text, f"{HUB_FILE} of {self.checkpoint.run}@{self.checkpoint.step}")
        if not self.rules.keys:
            return names
        views = () if any(view.rules.keys for view in names.views) else names.views
        return names._replace(
            views=tuple(view._replace(rules=replace(view.rules, keys=self.rules.keys)) for view in views)
        )

    def _see_all(self, roots: Sequence[HubView]) -> None:
        """Set the view to the combined views of all ``roots``. Tensors of different roots may have the same name."""
        views = [view_of(self.contents, root.rules) for root in roots]
        left = set.intersection(*(set(view.left_out) for view in views))
        tensors = tuple(tensor for view in views for tensor in view.tensors)
        self.view = View(tensors, tuple(key for key in views[0].left_out if key in left), views[0].prefix)
        self._rules, self.is_as_imported = roots[0].rules, False
        for root, view in zip(roots, views, strict=True):
            folder, _, self._stems[folder] = root.stem.rpartition("/")
            self._folders[folder] = {tensor.name: tensor for tensor in view.tensors}

    def _untied(self, ties: Collection[tuple[str, str]]) -> list[str]:
        """Return a note about the tensors that the model's config ties, but that differ."""
        pairs, attached = set(ties), self.store.attachments(self.checkpoint)
        if self.rules.model and CONFIG in attached:
            with suppress(ValueError, RecursionError, AttributeError):
                if json.loads(self.store.read_attachment(self.checkpoint, CONFIG)).get("tie_word_embeddings"):
                    pairs.add(("lm_head.weight", "model.embed_tokens.weight"))
        found, cells = self.contents.tensors, self.contents.manifest.raw_cells
        entries = [[found.get(f"{self.view.prefix}{name}") for name in pair] for pair in sorted(pairs)]
        differ = [one.key for one, other in entries if one and other and cells(one) != cells(other)]
        note = (
            f"config.json ties {listed(differ)} to the input embeddings, but the values differ: set "
            "tie_word_embeddings to false in config.json"
        )
        return [note] if differ else []

    def _see(self, rules: Rules) -> None:
        """Set the view, its tensors by folder and name, and whether they are those of the imported files."""
        self.view = view_of(self.contents, rules)
        self._folders = {folder: {} for folder in self._imported} or {"": {}}
        for tensor in self.view.tensors:
            folder, _, name = tensor.name.partition(".")
            if not folder or folder not in self._imported:
                folder, name = "", tensor.name
            self._folders.setdefault(folder, {})[name] = tensor._replace(name=name)
        self.is_as_imported = self._folders.keys() == self._imported.keys() and all(
            self._imported[folder].fits(tensors) for folder, tensors in self._folders.items()
        )

    def lay_out(self, most: int | None) -> list[FileLayout]:
        """Return the files with tensors, and then their indexes. Imported files are restored unless they have changed.

        ``most``: the maximum number of data bytes in a file. By default, it is unlimited for imported files, and
        `MAX_SHARD_BYTES` for other files. Raises InvalidInput if safetensors cannot hold a tensor.
        """
        files = [
            replace(file, name=f"{folder}/{file.name}" if folder else file.name)
            for folder, tensors in self._folders.items()
            for file in self._files(folder, tensors, most)
        ]
        return sorted(files, key=lambda file: file.name.endswith(".json"))

    def _files(self, folder: str, tensors: Mapping[str, ViewTensor], most: int | None) -> Sequence[FileLayout]:
        imported = self._imported.get(folder)
        if imported is not None and imported.fits(tensors):
            files = list(imported.files(tensors))
            if not self.metadata and all(most is None or file.nbytes - len(file.head) <= most for file in files):
                return files
        elif imported is not None:
            where = f"{self._home}{folder and f'{folder}/'}{imported.stem}*{SUFFIX}"
            self.notes.append(f"the tensors are not those of the imported files {where}, so these are not restored")
            if not tensors:
                return ()
        stem = self._stems.get(folder) or (imported.stem if imported else STEM)
        most = MAX_SHARD_BYTES if most is None else most
        return lay_out(tensors.values(), self._metadata, most, stem)

    @property
    def _metadata(self) -> dict[str, str]:
        return {**file_metadata(self.checkpoint, self.rules), **self.view.metadata, **self.metadata}

    def lay_out_file(self) -> FileLayout:
        """Return one file with all tensors: the imported file if there was only one."""
        files = self.lay_out(None) if self.is_as_imported and "" in self._folders else []
        if len(self._stems) > 1:
            raise InvalidInput(f"{self.checkpoint} has several adapters, which need a folder: leave out {SUFFIX}")
        if len(files) != 1:
            files = lay_out(self.view.tensors, self._metadata)
        return files[0]

    def reader(self, progress: Progress) -> RegionReader:
        """Return a reader for the view's tensors."""
        return RegionReader(self.store.repository, self.contents.manifest, self.view.nbytes, progress)

    def attachments(self, *, wanted: bool = True) -> tuple[dict[str, str], list[str]]:
        """Return the names of the attachments for the folder, by file name, and those of skipped attachments."""
        names = file_attachments(self.store, self.checkpoint)
        of_file = {name.removeprefix(self._home): name for name in names if wanted and name.startswith(self._home)}
        files = {file: name for file, name in of_file.items() if not self._is_skipped(file)}
        return files, [name for name in names if name not in files.values()]

    def _is_skipped(self, name: str) -> bool:
        """Return whether to skip an old index, a training file next to a model, or a config.json without a model."""
        is_of_training = self.rules.model and _OF_TRAINING.fullmatch(name) is not None
        return name.endswith(INDEX_SUFFIX) or is_of_training or (name == CONFIG and self.is_no_model)

    @cached_property
    def is_no_model(self) -> bool:
        """Whether `from_pretrained` would load random weights from a folder with these names and a config.json."""
        rules, whole = self.rules, Rules(model=True)
        if self.is_as_imported:
            return False
        if rules.model:
            if rules.strip_prefix is None and not rules.keys:
                return False
            whole = replace(self._rules, keys=None, strip_prefix=self.view.prefix or None)
        try:
            view = view_of(self.contents, whole)
        except (InvalidInput, MissingKey):
            return not rules.model  # this cannot be determined, so the user's choice counts
        names = {tensor.name for tensor in view.tensors}
        return not names <= {tensor.name for tensor in self.view.tensors}


def is_model(attachments: Collection[str]) -> bool:
    """Return whether a checkpoint with these attachments is exported as a model, or as adapters, by default."""
    return CONFIG in attachments or HUB_FILE in attachments


def file_metadata(checkpoint: Checkpoint, rules: Rules) -> dict[str, str]:
    """Return the ``__metadata__`` for a file: if the checkpoint was imported from a file, that file's metadata.

    For a model, and for a checkpoint that was not imported, it includes the metadata that Transformers requires.
    """
    imported = checkpoint.metadata.get(METADATA_KEY)
    if isinstance(imported, dict) and all(isinstance(value, str) for value in imported.values()):
        return exported_metadata(imported, is_model=rules.model)
    return exported_metadata({}, is_model=True)
