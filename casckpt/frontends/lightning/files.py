"""Lightning's files and their tags. casckpt forgets a checkpoint when no file names it any longer."""

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
from casckpt.base.names import TAG, check_new_run, is_reference
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import NotFound
from casckpt.frontends.interchange.new_files import new_file
from casckpt.frontends.trainer.saves import Janitor
from casckpt.store.store import Store
from casckpt.store.types import set_tag

AnyPath: TypeAlias = str | os.PathLike[str]

_MAGIC = "casckpt"
_MAX_POINTER = 1 << 16


@dataclass(frozen=True)
class Pointer:
    """The small file at a path, local or remote, that names a checkpoint."""

    path: AnyPath

    @property
    def name(self) -> str:
        """The file's name, changed so that it can be part of a run's name."""
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


class RunFiles:
    """The files of a run. A single process manages them. ``gc``: run a gc after a removal."""

    def __init__(self, store: Store, run: str, *, gc: bool) -> None:
        self.store, self.run, self._gc = store, check_new_run(run), gc
        self._janitor = Janitor(store)

    def checkpoints(self, run: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of the run, or an empty list if the store does not exist yet."""
        return self.store.checkpoints(run or self.run) if self.store.exists() else []

    def place(self, pointer: Pointer, step: int) -> tuple[str, bool]:
        """Return (run, overwrite) for a save. The save replaces an existing checkpoint if no other file names it."""
        for run in (self.run, f"{self.run}/{pointer.name}"):
            there = next((one for one in self.checkpoints(run) if one.step == step), None)
            if there is None or set(there.tags) <= {pointer.tag}:
                return run, there is not None
        return f"{self.run}/{pointer.tag}", True

    def saved(self, pointer: Pointer, before: str | None, saved: Checkpoint) -> None:
        """Write the file that names ``saved``.

        Forget ``before``, the checkpoint that the file named previously, if no other file names it. The tag is set
        before the file is written, so retention keeps every checkpoint that a file names.
        """
        set_tag(self.store.repository, pointer.tag, saved.commit, within=self.run)
        named = {"store": self.store.url, "run": saved.run, "step": saved.step, "id": saved.id}
        pointer.write(named | {"as_a_file": "casckpt.frontends.lightning.restore_checkpoint(store, id, path)"})
        if before not in (None, saved.id):
            self._let_go(before)

    def remove(self, pointer: Pointer) -> None:
        """Remove a file, and forget the checkpoint if no other file names it."""
        named = pointer.read()
        pointer.delete()
        if self.store.exists():
            if pointer.tag in self.store.tags():
                self.store.untag(pointer.tag)
            self._let_go(named)

    def _let_go(self, named: str | None) -> None:
        """Forget and purge a checkpoint that no tag names any longer, so that a gc can free its space."""
        if named is not None and named in self.store:
            found = self.store.get(named)
            if not found.tags and not found.forgotten:
                self.store.forget_now(found)
            if self._gc:
                self._janitor.ask(found.run)

    def named(self, pointer: Pointer) -> str:
        """Return the reference that a path names.

        Raises NotFound if the file is missing or its save did not finish.
        """
        named = pointer.read()
        if named is not None:
            return named
        if pointer.is_pending():
            raise NotFound(
                f"{pointer.path} names a save that did not finish; load a different checkpoint, or {self.run}@latest"
            )
        text = os.fspath(pointer.path)
        if not is_reference(text) or "://" in text or (text.endswith(".ckpt") and not text.startswith(TAG)):
            raise NotFound(
                f"the file {text} does not exist; pass the path of an existing file, or a reference such as "
                f"{self.run}@latest"
            )
        return text

    def close(self) -> None:
        """Wait for a running gc."""
        self._janitor.close()
