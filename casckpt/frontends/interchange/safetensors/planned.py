"""Plans a folder of safetensors files from a manifest: a view, its layout, and the attachments.

The plan determines every byte position before any data is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from casckpt.base.lazy import cached_property
from casckpt.base.names import HUB_FILE
from casckpt.base.progress import Progress
from casckpt.base.text import listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput, MissingKey
from casckpt.frontends.interchange.new_files import file_attachments
from casckpt.frontends.interchange.safetensors.files import INDEX_SUFFIX, SUFFIX
from casckpt.frontends.interchange.safetensors.importing import METADATA_KEY
from casckpt.frontends.interchange.safetensors.layout import (
    MAX_SHARD_BYTES,
    STEM,
    FileLayout,
    exported_metadata,
    lay_out,
)
from casckpt.frontends.views.view import Rules, View, view_of
from casckpt.frontends.views.view_file import HubNames, HubView, read_hub_names
from casckpt.loading.regions import RegionReader
from casckpt.store.store import Store

CONFIG: Final = "config.json"
_OF_TRAINING = re.compile(r"optimizer\.(pt|bin)|scheduler\.pt|scaler\.pt|training_args\.bin|trainer_state\.json")
"""Files from Transformers' Trainer that belong to a training run, not to a model."""


class FolderPlan:
    """The plan for one checkpoint under the given rules. Raises the errors of `Contents.open` and `view_of`.

    ``metadata`` adds to the metadata of files. ``notes``: messages for the user.
    """

    def __init__(self, store: Store, checkpoint: Checkpoint, rules: Rules) -> None:
        self.store, self.checkpoint, self.rules = store, checkpoint, rules
        self.metadata: Mapping[str, str] = {}
        self.contents = Contents.open(store.repository, checkpoint.commit)
        self.contents.check_loads()
        names = self._names()
        self._has_names, roots = bool(names.views), names.views or (HubView(STEM, rules),)
        views = [view_of(self.contents, root.rules) for root in roots]
        left = set.intersection(*(set(view.left_out) for view in views))
        tensors = tuple(tensor for view in views for tensor in view.tensors)
        left_out = tuple(key for key in views[0].left_out if key in left)
        self.view, self._rules = View(tensors, left_out, views[0].prefix), roots[0].rules
        self._models = {root.stem: view.tensors for root, view in zip(roots, views, strict=True)}
        self.notes = [*names.notes, *self._untied(names.tied)]

    def _names(self) -> HubNames:
        """Return the names that the model's own library uses, unless the caller asks for different names.

        In other formats, only an imported folder has the names of its files.
        """
        rules = self.rules
        is_asked = rules.model or METADATA_KEY in self.checkpoint.metadata
        is_plain = is_asked and replace(rules, keys=None, dtype=None, model=True) == Rules(model=True)
        if not is_plain or HUB_FILE not in self.store.attachments(self.checkpoint):
            return HubNames()
        text = self.store.read_attachment(self.checkpoint, HUB_FILE)
        names = read_hub_names(text, f"{HUB_FILE} of {self.checkpoint.run}@{self.checkpoint.step}")
        if rules.keys and (len(names.views) != 1 or names.views[0].rules.keys):
            return names._replace(views=())
        adapted = (
            (stem, replace(view, keys=rules.keys or view.keys, model=view.model and rules.model, dtype=rules.dtype))
            for stem, view in names.views
        )
        return names._replace(views=tuple(HubView(*root) for root in adapted))

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

    def lay_out(self, most: int | None) -> list[FileLayout]:
        """Return the files with tensors, and then their indexes.

        ``most``: the maximum number of data bytes in a file, `MAX_SHARD_BYTES` by default. Raises InvalidInput if
        safetensors cannot hold a tensor.
        """
        files = []
        for path, tensors in self._models.items():
            folder, slash, stem = path.rpartition("/")
            made = lay_out(tensors, self._metadata, MAX_SHARD_BYTES if most is None else most, stem)
            files += [replace(file, name=f"{folder}{slash}{file.name}") for file in made]
        return sorted(files, key=lambda file: file.name.endswith(".json"))

    @property
    def _metadata(self) -> dict[str, str]:
        return {**file_metadata(self.checkpoint, self.rules), **self.metadata}

    def lay_out_file(self) -> FileLayout:
        """Return one file with all tensors, under their keys unless it is a model."""
        if len(self._models) > 1 and self.rules.model:
            raise InvalidInput(f"{self.checkpoint} has several models, which need a folder: leave out {SUFFIX}")
        is_renamed = self._has_names and not self.rules.model
        view = view_of(self.contents, self.rules) if is_renamed else self.view
        return lay_out(view.tensors, self._metadata)[0]

    def reader(self, progress: Progress) -> RegionReader:
        """Return a reader for the view's tensors."""
        return RegionReader(
            self.store.repository, self.contents.manifest, self.view.bytes_read, progress, dtype=self.rules.dtype
        )

    def attachments(self, *, wanted: bool = True) -> tuple[list[str], list[str]]:
        """Return the names of the attachments for the folder, and those of skipped attachments."""
        names = file_attachments(self.store, self.checkpoint)
        files = [name for name in names if wanted and not self._is_skipped(name)]
        return files, [name for name in names if name not in files]

    def _is_skipped(self, name: str) -> bool:
        """Return whether to skip an old index, a training file next to a model, or a config.json without a model."""
        is_of_training = self.rules.model and _OF_TRAINING.fullmatch(name) is not None
        return name.endswith(INDEX_SUFFIX) or is_of_training or (name == CONFIG and self.is_no_model)

    @cached_property
    def is_no_model(self) -> bool:
        """Whether `from_pretrained` would load random weights from a folder with these names and a config.json."""
        rules, whole = self.rules, Rules(model=True)
        if not rules.keys and (self._has_names or (rules.model and rules.strip_prefix is None)):
            return False
        if rules.model:
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
