"""What a folder of safetensors files is to hold, planned from a manifest: a view, its layout, and which files go along.

It is known to the byte before any data is read.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from casckpt.base.lazy import cached_property
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.signatures import get_trusted
from casckpt.errors import InvalidInput, MissingKey
from casckpt.format.manifest import Manifest
from casckpt.frontends.interchange.safetensors.importing import METADATA_KEY
from casckpt.frontends.interchange.safetensors.layout import INDEX, Layout, lay_out
from casckpt.frontends.views.view import Rules, view_of
from casckpt.store.store import Store

CONFIG: Final = "config.json"
_OF_TRAINING = re.compile(r"optimizer\.(pt|bin)|scheduler\.pt|scaler\.pt|training_args\.bin|trainer_state\.json")
"""What Transformers' Trainer keeps in a folder of its own beside a model."""


class FolderPlan:
    """One checkpoint seen by some rules. Raises what `view_of` and `get_trusted` do."""

    def __init__(self, store: Store, checkpoint: Checkpoint, rules: Rules) -> None:
        self.store, self.checkpoint, self.rules = store, checkpoint, rules
        self.manifest: Manifest = get_trusted(store.repository, checkpoint.commit)
        self.view = view_of(self.manifest, rules)

    def lay_out(self, most: int | None) -> Layout:
        """The files with tensors, and their index. Raises InvalidInput for what such a file cannot hold."""
        return lay_out(self.view.tensors, file_metadata(self.checkpoint, self.rules), most)

    def attachments(self, *, wanted: bool = True) -> tuple[list[str], list[str]]:
        """Names of attachments for the folder, and of those that are of no use in it."""
        found = self.store.attachments(self.checkpoint)
        skipped = [name for name in found if not wanted or self._is_skipped(name)]
        return [name for name in found if name not in skipped], skipped

    def _is_skipped(self, name: str) -> bool:
        """Old indexes go; of a model what was for its training; and what says of other names that they are a model."""
        is_of_training = self.rules.model and _OF_TRAINING.fullmatch(name) is not None
        return name == INDEX or is_of_training or (name == CONFIG and self.is_no_model)

    @cached_property
    def is_no_model(self) -> bool:
        """Whether a folder with these names and a config.json would be loaded as a model with random weights."""
        rules, whole = self.rules, Rules(model=True)
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


def file_metadata(checkpoint: Checkpoint, rules: Rules) -> dict[str, str]:
    """Give what the imported file said of itself; else, and in any case of a model, what transformers asks for."""
    wanted, said = {"format": "pt"}, checkpoint.metadata.get(METADATA_KEY)
    if isinstance(said, dict) and all(isinstance(value, str) for value in said.values()):
        return (wanted | said) if rules.model else said
    return wanted
