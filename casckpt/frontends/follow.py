"""Following a run with a folder: always one whole version under one name, for engines that map its files.

::

    current                  a symbolic link to the newest generation, replaced in one instant
    000007-<step>-<id>/      a generation: a folder as `casckpt.export` makes it; nothing in it changes while it is here
    .told                    a link to the generation of which the command was told, and returned 0

A new generation is a copy of the current one, which shares its blocks where the file system can, and of what differs
alone anything is read. Or it takes the files of an old one, of which nobody knows any more.

A process that dies leaves a temporary folder, or a generation without a link, which the next one removes; and a command
that may not have been called, or not have ended, which the next one calls again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from casckpt.base.durations import Duration
from casckpt.contents.checkpoint import Arrival, Checkpoint
from casckpt.errors import Conflict, Damaged, InvalidInput, NotFound, StorageError, Unsigned
from casckpt.frontends.interchange.new_files import locked, sync_folder
from casckpt.frontends.interchange.safetensors.exporting import Base, export_safetensors
from casckpt.frontends.interchange.safetensors.planned import CONFIG
from casckpt.store.store import Store

CURRENT = "current"
_TOLD = ".told"
_GENERATION = re.compile(r"([0-9]{6,})-([0-9]+)-([0-9a-f]{64})")
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds until what failed is tried again: at first, and at most
_LEFT = re.compile(r"\.[0-9]{6,}-.*\.casckpt-[0-9a-f]+|\.link-[0-9a-f]+")

log = logging.getLogger("casckpt")


@dataclass(frozen=True)
class Switch:
    """One generation that became current. ``status``: of the command; None without one."""

    checkpoint: Checkpoint
    folder: Path
    status: int | None


@dataclass(frozen=True)
class Follower:
    """Keeps ``folder`` at the newest version of a run.

    ``keys``: fnmatch patterns of the tensors that are written. ``command``: for a shell, called after each switch, with
    CASCKPT_FOLDER, CASCKPT_RUN, CASCKPT_STEP and CASCKPT_ID; a kill may make it come twice, with the same id. ``keep``:
    generations that stay beside the current one; those before go once the command has returned 0. ``reuse``: but for
    one, whose files become those of the next.
    """

    store: Store
    run: str
    folder: Path
    keys: Sequence[str] = ()
    command: str | None = None
    keep: int = 1
    reuse: bool = False

    def follow(self, *, once: bool = False, poll: Duration = "1s") -> Iterator[Switch]:
        """Iterate over the switches as they are made, for ever; ``once``: until the newest that is there is current.

        A storage or a disk that fails is told in the log, and tried again, less and less often; with ``once`` it is
        raised. A checkpoint that is damaged, or not signed as it must be, is left out. Raises Conflict where another
        process follows with this folder, InvalidInput where something else is in it; with ``once`` NotFound where
        nothing is current in the end; else what a watch and an export raise.
        """
        with _alone(self.folder):
            pause = _PAUSE
            if not once:
                self._say_what_is_awaited()
            while True:
                try:
                    for made in self._switches("0s" if once else None, poll):
                        pause = _PAUSE
                        yield made
                    if once and self._at(CURRENT) is None:
                        left_out = f"nothing of run {self.run!r} in {self.store.url} can be used, as was said above"
                        raise NotFound(self._absence() or left_out)
                    return
                except (NotFound, Conflict, Damaged):  # these are OSErrors too, and trying again does not mend them
                    raise
                except OSError as error:  # of the storage, or of the folder
                    if once:
                        raise
                    log.warning("%s is not followed for now; it is tried again in %.0f s: %s", self.run, pause, error)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _say_what_is_awaited(self) -> None:
        with suppress(StorageError):  # it is told when it is met again
            if self._at(CURRENT) is None and (absence := self._absence()) is not None:
                log.warning("%s. The first one is waited for", absence)

    def _absence(self) -> str | None:
        """Say why there is nothing to be followed yet; None if there is."""
        try:
            self.store.get(f"{self.run}@latest")
        except NotFound as error:
            return str(error)
        return None

    def _switches(self, timeout: Duration | None, poll: Duration) -> Iterator[Switch]:
        """Finish what was begun, and go on behind it."""
        self._tidy()
        held = self._at(CURRENT)
        if held is not None and held != self._at(_TOLD):
            self._tell(held)
        for new in self._arrivals("start" if held is None else _id_of(held), timeout, poll):
            made = self._switch(new.checkpoint)
            if made is not None:
                yield made

    def _arrivals(self, after: str, timeout: Duration | None, poll: Duration) -> Iterator[Arrival]:
        try:
            return self.store.watch(self.run, after=after, latest_only=True, timeout=timeout, poll=poll)
        except NotFound:  # another store is in the place of the one that it came from
            log.warning("%s knows nothing of %s, which is current; what is newest there is next", self.store, after)
            return self.store.watch(self.run, after="start", latest_only=True, timeout=timeout, poll=poll)

    def _switch(self, checkpoint: Checkpoint) -> Switch | None:
        """Make a generation, and let it be current; None for a checkpoint that is gone by now."""
        numbers = [int(one.name.split("-")[0]) for one in self._generations()]
        folder = self.folder / f"{max(numbers, default=0) + 1:06}-{checkpoint.step}-{checkpoint.id}"
        try:
            with self.store.lease(checkpoint) as held:
                self._make(held, folder)
        except NotFound as error:
            log.info("%s is left out: %s", checkpoint, error)
            return None
        except (Damaged, Unsigned) as error:
            log.error("%s is left out: %s", checkpoint, error)
            return None
        self._link(CURRENT, folder)
        return Switch(checkpoint, folder, self._tell(folder))

    def _make(self, checkpoint: Checkpoint, folder: Path) -> None:
        is_model = CONFIG in self.store.attachments(checkpoint)
        base, keys = self._base(), list(self.keys) or None
        export_safetensors(self.store, checkpoint, folder, model=is_model, keys=keys, base=base)
        if base is not None and base.is_taken:
            shutil.rmtree(base.folder)

    def _base(self) -> Base | None:
        """What the next generation is made of: an old one, under a name that is none, or the current one."""
        current, spare = self._at(CURRENT), self._spare()
        if current is None:
            return None
        try:
            checkpoint = self.store.get(_id_of(spare or current))
        except NotFound:  # it was purged, and nothing can be compared
            return None
        return Base(checkpoint, current if spare is None else _hidden(spare), spare is not None)

    def _spare(self) -> Path | None:
        """The old generation that stays to be reused, if there is one."""
        old = self._old()
        return old[-1] if old and self.reuse else None

    def _old(self) -> list[Path]:
        """Generations that nobody uses: before those that are kept, once the command knows the current one."""
        current, every = self._at(CURRENT), self._generations()
        if current not in every or current != self._at(_TOLD):
            return []
        return every[: max(0, every.index(current) - self.keep)]

    def _tell(self, folder: Path) -> int | None:
        """Call the command for what is current; where it returned 0 older generations go."""
        status = None if self.command is None else self._call(self.command, folder)
        if status:
            log.warning("the command returned %d for %s; older generations stay until one returns 0", status, folder)
            return status
        self._link(_TOLD, folder)
        self._tidy()
        return status

    def _call(self, command: str, folder: Path) -> int:
        step = folder.name.split("-")[1]
        said = {"FOLDER": str(folder.absolute()), "RUN": self.run, "STEP": step, "ID": _id_of(folder)}
        # by env(1), which adds to what this process has without a look at that
        ran = ["env", *(f"CASCKPT_{name}={value}" for name, value in said.items()), "/bin/sh", "-c", command]
        return subprocess.run(ran, check=False).returncode

    def _link(self, name: str, folder: Path) -> None:
        """Let a name mean a generation, in one instant, durably."""
        temporary = self.folder / f".link-{secrets.token_hex(8)}"
        os.symlink(folder.name, temporary)
        os.replace(temporary, self.folder / name)
        sync_folder(self.folder)

    def _at(self, name: str) -> Path | None:
        """The generation that a name means, if it is there."""
        link = self.folder / name
        return self.folder / os.readlink(link) if link.is_dir() else None

    def _generations(self) -> list[Path]:
        """All generations, oldest first."""
        found = [one for one in self.folder.iterdir() if _GENERATION.fullmatch(one.name)]
        return sorted(found, key=lambda one: int(one.name.split("-")[0]))

    def _tidy(self) -> None:
        """Remove what nobody uses: what a kill left; and, once the command knows the current one, older generations."""
        for path in self.folder.iterdir():
            if _LEFT.fullmatch(path.name):
                _remove(path)
        current, every, spare = self._at(CURRENT), self._generations(), self._spare()
        unfinished = every[every.index(current) + 1 :] if current in every else every
        for path in [*self._old(), *unfinished]:
            if path != spare:
                _remove(path)


def _id_of(folder: Path) -> str:
    return folder.name.split("-")[2]


def _remove(path: Path) -> None:
    """Remove a generation under a name that is none, so that one that is half gone is never taken for whole."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    shutil.rmtree(path if path.name.startswith(".") else _hidden(path))


def _hidden(path: Path) -> Path:
    """Rename a generation to what is none."""
    hidden = path.with_name(f".{path.name}.casckpt-{secrets.token_hex(4)}")
    path.rename(hidden)
    return hidden


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a folder that is ours. Raises Conflict, InvalidInput."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = {CURRENT, _TOLD}
    for path in folder.iterdir():
        is_ours = path.name in ours if path.is_symlink() else _GENERATION.fullmatch(path.name)
        if not is_ours and not _LEFT.fullmatch(path.name):
            raise InvalidInput(f"{folder} holds {path.name!r}, which is of no follower; give an empty folder")
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder.resolve(), fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise Conflict(f"another process follows with {folder}; end it, or give another folder") from error
        yield
