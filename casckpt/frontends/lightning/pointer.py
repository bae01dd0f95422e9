"""The small file at the path of a Lightning checkpoint. It names the checkpoint in the store."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lightning.fabric.utilities.cloud_io import get_filesystem

from casckpt.base.digest import hex_digest
from casckpt.frontends.interchange.new_files import new_file

AnyPath: TypeAlias = str | os.PathLike[str]

_MAGIC = "casckpt"
_MAX_POINTER = 1 << 16


@dataclass(frozen=True)
class Pointer:
    """The small file at a path, local or remote, that names a checkpoint."""

    path: AnyPath

    @property
    def name(self) -> str:
        """The file's name, in a form that can be part of a run's name."""
        stem = os.fspath(self.path).rpartition("/")[2].removesuffix(".ckpt")
        return re.sub(r"[^A-Za-z0-9._-]", "-", stem)[:60] or "file"

    @property
    def tag(self) -> str:
        """The file's tag, derived from its whole path."""
        path = os.fspath(self.path)
        whole = path if "://" in path else os.path.abspath(path)
        return f"lightning.{hex_digest(whole.encode())[:16]}.{self.name.lower()}"[:100]

    @property
    def _files(self) -> Any:
        return get_filesystem(os.fspath(self.path))

    def exists(self) -> bool:
        """Return whether any file exists at the path."""
        return bool(self._files.isfile(os.fspath(self.path)))

    def read(self) -> str | None:
        """Return the id of the checkpoint, or None if there is no pointer file or the save has not finished."""
        found = self._contents()
        return found.get("id") if found is not None else None

    def is_foreign(self) -> bool:
        """Return whether the path has a file that casckpt did not write."""
        return self.exists() and self._contents() is None

    def is_pending(self) -> bool:
        """Return whether the file names a save that has not finished."""
        found = self._contents()
        return found is not None and "id" not in found

    def _contents(self) -> dict[str, Any] | None:
        if not self.exists():
            return None
        with self._files.open(os.fspath(self.path), "rb") as file:
            data = file.read(_MAX_POINTER)
        try:
            found = json.loads(data)[_MAGIC]
        except (ValueError, KeyError, TypeError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, contents: Mapping[str, Any]) -> None:
        """Write the file atomically."""
        files, path = self._files, os.fspath(self.path)
        folder = os.path.dirname(path)
        if folder:
            files.makedirs(folder, exist_ok=True)
        data = json.dumps({_MAGIC: contents}, indent=2).encode() + b"\n"
        if "://" in path:
            files.pipe_file(path, data)
            return
        with new_file(Path(path), force=True) as temporary:
            temporary.write_bytes(data)

    def delete(self) -> None:
        """Remove the file if it exists."""
        if self.exists():
            self._files.rm_file(os.fspath(self.path))
