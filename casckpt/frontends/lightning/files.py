"""The files of Lightning, each named by a tag: a checkpoint that no file names any more is forgotten."""

from __future__ import annotations

import os

from casckpt.base.names import TAG, check_run
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import NotFound
from casckpt.frontends.lightning.pointer import Pointer
from casckpt.frontends.trainer.janitor import Janitor
from casckpt.store.store import Store


class RunFiles:
    """The files of one run. One process keeps them. ``gc``: after a removal, delete what nobody needs."""

    def __init__(self, store: Store, run: str, *, gc: bool) -> None:
        self.store, self.run, self._gc = store, check_run(run), gc
        self._janitor = Janitor(store)

    def checkpoints(self) -> list[Checkpoint]:
        """Those of the run; none where there is no store yet."""
        return self.store.checkpoints(self.run) if self.store.exists() else []

    def place(self, pointer: Pointer, step: int) -> tuple[str, bool]:
        """(run, overwrite) to save with. A checkpoint that only this file names, or none, is replaced."""
        there = next((one for one in self.checkpoints() if one.step == step), None)
        if there is None or set(there.tags) <= {pointer.tag}:
            return self.run, there is not None
        return f"{self.run}/{pointer.name}", True

    def saved(self, pointer: Pointer, before: str | None, saved: Checkpoint) -> None:
        """Let the file name what was saved, in place of ``before``, which is let go.

        The tag comes before the file: what a file names is kept.
        """
        self.store.tag(pointer.tag, saved)
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
        """Forget a checkpoint that no tag names any more, and for good: a number of files to keep is about space."""
        if named is not None and named in self.store:
            found = self.store.get(named)
            if not found.tags and not found.forgotten:
                self.store.forget_now(found)
            if self._gc:
                self._janitor.ask(found.run)

    def named(self, pointer: Pointer) -> str:
        """What a path names: by its file, or as a reference. Raises NotFound: no such file, or a save did not end."""
        named = pointer.read()
        if named is not None:
            return named
        if pointer.is_pending():
            raise NotFound(f"{pointer.path} names a save that did not end; load another one, or {self.run}@latest")
        text = os.fspath(pointer.path)
        if text.startswith(("/", ".")) or "://" in text or (text.endswith(".ckpt") and not text.startswith(TAG)):
            raise NotFound(f"there is no file {text}; give the path of one, or a reference, such as {self.run}@latest")
        return text

    def close(self) -> None:
        """Wait for a gc that runs."""
        self._janitor.close()
