"""Lightning's files and their tags. casckpt forgets a checkpoint when no file names it any longer."""

from __future__ import annotations

import os

from casckpt.base.names import TAG, check_run
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import NotFound
from casckpt.frontends.lightning.pointer import Pointer
from casckpt.frontends.trainer.janitor import Janitor
from casckpt.store.store import Store


class RunFiles:
    """The files of a run. A single process manages them. ``gc``: run a gc after a removal."""

    def __init__(self, store: Store, run: str, *, gc: bool) -> None:
        self.store, self.run, self._gc = store, check_run(run), gc
        self._janitor = Janitor(store)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints of the run, or an empty list if the store does not exist yet."""
        return self.store.checkpoints(self.run) if self.store.exists() else []

    def place(self, pointer: Pointer, step: int) -> tuple[str, bool]:
        """Return (run, overwrite) for a save. The save replaces an existing checkpoint if no other file names it."""
        there = next((one for one in self.checkpoints() if one.step == step), None)
        if there is None or set(there.tags) <= {pointer.tag}:
            return self.run, there is not None
        return f"{self.run}/{pointer.name}", True

    def saved(self, pointer: Pointer, before: str | None, saved: Checkpoint) -> None:
        """Write the file for ``saved``.

        Forget ``before``, the checkpoint that it named before, if no other file names it.
        The tag is set before the file is written, so retention keeps every checkpoint that a file names.
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
        if text.startswith(("/", ".")) or "://" in text or (text.endswith(".ckpt") and not text.startswith(TAG)):
            raise NotFound(
                f"the file {text} does not exist; pass the path of an existing file, or a reference such as "
                f"{self.run}@latest"
            )
        return text

    def close(self) -> None:
        """Wait for a running gc."""
        self._janitor.close()
