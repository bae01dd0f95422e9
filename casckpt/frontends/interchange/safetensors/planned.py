"""Plans a folder of safetensors files from a manifest: a view, its layout, and the attachments.

The plan determines every byte position before any data is read.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from casckpt.base.lazy import cached_property
from casckpt.base.progress import Progress
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput, MissingKey
from casckpt.frontends.interchange.safetensors.importing import METADATA_KEY
from casckpt.frontends.interchange.safetensors.layout import INDEX, Layout, lay_out
from casckpt.frontends.views.view import Rules, view_of
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
        self.view = view_of(self.contents, rules)

    def lay_out(self, most: int | None) -> Layout:
        """Return the files with tensors, and their index. Raises InvalidInput if safetensors cannot hold a tensor."""
        return lay_out(self.view.tensors, file_metadata(self.checkpoint, self.rules), most)

    def reader(self, progress: Progress) -> RegionReader:
        """Return a reader for the view's tensors."""
        return RegionReader(self.store.repository, self.contents.manifest, self.view.nbytes, progress)

    def attachments(self, *, wanted: bool = True) -> tuple[list[str], list[str]]:
        """Return the names of the attachments for the folder, and of skipped attachments."""
        names = self.store.attachments(self.checkpoint)
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
            whole = replace(rules, keys=None, strip_prefix=self.view.prefix or None)
        try:
            view = view_of(self.contents, whole)
        except (InvalidInput, MissingKey):
            return not rules.model  # this cannot be determined, so the user's choice counts
        names = {tensor.name for tensor in view.tensors}
        return not names <= {tensor.name for tensor in self.view.tensors}


def file_metadata(checkpoint: Checkpoint, rules: Rules) -> dict[str, str]:
    """Return the ``__metadata__`` for a file: if the checkpoint was imported from a file, that file's metadata.

    For a model, and for a checkpoint that was not imported, it includes the metadata that Transformers requires.
    """
    required, imported = {"format": "pt"}, checkpoint.metadata.get(METADATA_KEY)
    if isinstance(imported, dict) and all(isinstance(value, str) for value in imported.values()):
        return (required | imported) if rules.model else imported
    return required
