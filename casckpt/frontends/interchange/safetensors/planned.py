"""Plans a folder of safetensors files from a manifest: a view, its layout, and the attachments.

The plan determines every byte position before any data is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from casckpt.base.lazy import cached_property
from casckpt.base.progress import Progress
from casckpt.base.text import listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput, MissingKey
from casckpt.frontends.interchange.safetensors.importing import METADATA_KEY
from casckpt.frontends.interchange.safetensors.layout import INDEX, STEM, Layout, lay_out
from casckpt.frontends.training_state.hub_config import HUB_FILE
from casckpt.frontends.views.view import Rules, View, view_of
from casckpt.frontends.views.view_file import HubNames, HubView, read_hub_names
from casckpt.loading.regions import RegionReader
from casckpt.store.store import Store

CONFIG: Final = "config.json"
_OF_TRAINING = re.compile(r"optimizer\.(pt|bin)|scheduler\.pt|scaler\.pt|training_args\.bin|trainer_state\.json")
"""Files from Transformers' Trainer that belong to a training, not to a model."""


class FolderPlan:
    """The plan for one checkpoint under the given rules. Raises the errors of `Contents.open` and `view_of`."""

    def __init__(self, store: Store, checkpoint: Checkpoint, rules: Rules) -> None:
        self.store, self.checkpoint, self.rules = store, checkpoint, rules
        self.contents = Contents.open(store.repository, checkpoint.commit)
        views = self._hub.views
        if rules.keys:
            views = () if any(view.rules.keys for view in views) else views
            views = tuple(view._replace(rules=replace(view.rules, keys=rules.keys)) for view in views)
        self._roots = views or (HubView(STEM, rules),)
        self._views = [view_of(self.contents, root.rules) for root in self._roots]
        self.view = self._views[0] if len(self._views) == 1 else _joined(self._views)

    @cached_property
    def _hub(self) -> HubNames:
        """The names that the libraries of the model gave its tensors at the save, unless the caller wants others."""
        is_plain = replace(self.rules, keys=None) == Rules(model=True)
        if not is_plain or HUB_FILE not in self.store.attachments(self.checkpoint):
            return HubNames()
        text = self.store.read_attachment(self.checkpoint, HUB_FILE)
        return read_hub_names(text, f"{HUB_FILE} of {self.checkpoint.run}@{self.checkpoint.step}")

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What is unusual about the files, for the user."""
        found, cells = self.contents.tensors, self.contents.manifest.raw_cells
        pairs = [[found.get(f"{self.view.prefix}{name}") for name in pair] for pair in sorted(self._tied())]
        differ = [one.key for one, other in pairs if one and other and cells(one) != cells(other)]
        ties = (
            f"config.json ties {listed(differ)} to the input embeddings, but the values differ: set "
            "tie_word_embeddings to false in config.json"
        )
        return (*self._hub.notes, *([ties] if differ else []))

    def _tied(self) -> set[tuple[str, str]]:
        """Return the pairs of tensors that the model's config ties."""
        pairs, attached = set(self._hub.tied), self.store.attachments(self.checkpoint)
        if self.rules.model and CONFIG in attached:
            with suppress(ValueError, RecursionError, AttributeError):
                if json.loads(self.store.read_attachment(self.checkpoint, CONFIG)).get("tie_word_embeddings"):
                    pairs.add(("lm_head.weight", "model.embed_tokens.weight"))
        return pairs

    def lay_out(self, most: int | None) -> Layout:
        """Return the files with tensors, and their index. Raises InvalidInput if safetensors cannot hold a tensor."""
        metadata = file_metadata(self.checkpoint, self.rules)
        layouts = [
            lay_out(view.tensors, metadata, most, root.stem)
            for root, view in zip(self._roots, self._views, strict=True)
        ]
        files = tuple(file for layout in layouts for file in layout.files)
        return Layout(files, {name: index for layout in layouts for name, index in layout.indexes.items()})

    def reader(self, progress: Progress) -> RegionReader:
        """Return a reader for the view's tensors."""
        return RegionReader(self.store.repository, self.contents.manifest, self.view.nbytes, progress)

    def attachments(self, *, wanted: bool = True) -> tuple[list[str], list[str]]:
        """Return the names of the attachments for the folder, and of skipped attachments."""
        names = [name for name in self.store.attachments(self.checkpoint) if name != HUB_FILE]
        skipped = [name for name in names if not wanted or self._is_skipped(name)]
        return [name for name in names if name not in skipped], skipped

    def _is_skipped(self, name: str) -> bool:
        """Return whether to skip an old index, a training file next to a model, or a config.json without a model."""
        is_of_training = self.rules.model and _OF_TRAINING.fullmatch(name) is not None
        return name == INDEX or is_of_training or (name == CONFIG and self.is_no_model)

    @cached_property
    def is_no_model(self) -> bool:
        """Whether `from_pretrained` would load a folder with these names and a config.json with random weights."""
        rules, whole = self.rules, Rules(model=True)
        if rules.model:
            if rules.strip_prefix is None and not rules.keys:
                return False
            whole = replace(self._roots[0].rules, keys=None, strip_prefix=self.view.prefix or None)
        try:
            view = view_of(self.contents, whole)
        except (InvalidInput, MissingKey):
            return not rules.model  # this cannot be determined, so the user's choice counts
        names = {tensor.name for tensor in view.tensors}
        return not names <= {tensor.name for tensor in self.view.tensors}


def is_model(attachments: Collection[str]) -> bool:
    """Return whether a checkpoint with these attachments is a model, or an adapter of one, by default."""
    return CONFIG in attachments or HUB_FILE in attachments


def _joined(views: Sequence[View]) -> View:
    """Return one view for several roots of a folder. Tensors of different roots may have the same name."""
    left = set.intersection(*(set(view.left_out) for view in views))
    tensors = tuple(tensor for view in views for tensor in view.tensors)
    return View(tensors, tuple(key for key in views[0].left_out if key in left), views[0].prefix)


def file_metadata(checkpoint: Checkpoint, rules: Rules) -> dict[str, str]:
    """Return the ``__metadata__`` for a file: if the checkpoint was imported from a file, that file's metadata.

    For a model, and for a checkpoint that was not imported, it includes the metadata that Transformers requires.
    """
    required, imported = {"format": "pt"}, checkpoint.metadata.get(METADATA_KEY)
    if isinstance(imported, dict) and all(isinstance(value, str) for value in imported.values()):
        return (required | imported) if rules.model else imported
    return required
