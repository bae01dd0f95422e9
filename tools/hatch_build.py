"""Puts a `casckpt/_version.py` into wheels and sdists that names the commit they were built from."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class VersionHook(BuildHookInterface[Any]):
    """The file holds only the version, because a commit cannot be read where they are installed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Replace the file, but not in an editable installation, which uses the checkout."""
        self.folder = Path(tempfile.mkdtemp())
        if version != "editable":
            made = self.folder / "_version.py"
            made.write_text(f'"""The version of casckpt."""\n\n__version__ = "{self.metadata.version}"\n')
            build_data["force_include"][str(made)] = "casckpt/_version.py"

    def finalize(self, *_: object) -> None:
        """Remove what `initialize` made."""
        shutil.rmtree(self.folder)
