"""A folder that follows the newest checkpoint of a run, for inference engines that map its files.

::

    current                  a symbolic link to the newest generation, replaced atomically
    000007-<step>-<id>/      a generation: a folder that `casckpt.export` wrote, which never changes
    .told                    a link to the last generation for which the command returned 0
    000007-average/          the unrounded average that the generation holds, if it holds an average

A new generation copies the current one, with shared blocks if the file system supports them. Only the differences are
read from the store.

If the process dies, the next process removes temporary folders and generations without a link. It reruns the command
if the command may not have finished.
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

from casckpt.base.lazy import cached_property
from casckpt.base.text import check_outside, is_news
from casckpt.base.units import Duration
from casckpt.contents.checkpoint import Arrival, Checkpoint
from casckpt.errors import Conflict, Damaged, InvalidInput, NotFound, StorageError, Unsigned, Unsupported
from casckpt.frontends.averaging import MovingAverage, moving_average
from casckpt.frontends.interchange.new_files import locked, storage_errors, sync_folder
from casckpt.frontends.interchange.safetensors.exporting import Base, export_safetensors
from casckpt.frontends.interchange.safetensors.planned import is_model
from casckpt.store.store import Store

CURRENT = "current"
_TOLD = ".told"
_AVERAGE = re.compile(r"[0-9]{6,}-average")
_GENERATION = re.compile(r"([0-9]{6,})-([0-9]+)-([0-9a-f]{64})")
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds until a retry: the first pause, and the longest one
_LEFT = re.compile(r"\.[0-9]{6,}-.*\.casckpt-[0-9a-f]+|\.link-[0-9a-f]+")

log = logging.getLogger("casckpt")


@dataclass(frozen=True)
class Switch:
    """A switch to a new generation. ``status``: the command's exit status, or None if there is no command."""

    checkpoint: Checkpoint
    folder: Path
    status: int | None


@dataclass(frozen=True)
class Follower:
    """Keeps ``folder`` up to date with the newest checkpoint of a run.

    ``keys``: fnmatch patterns for the tensors to write. ``command``: a shell command that runs after each switch, with
    CASCKPT_FOLDER, CASCKPT_RUN, CASCKPT_STEP and CASCKPT_ID; if the process is killed, it may run twice for the same
    id. ``keep``: the number of older generations to keep. Earlier ones are removed once the command has returned 0.
    ``merge``: "ema:0.99" writes the exponential moving average of the run's checkpoints up to the newest, with this
    decay per checkpoint.
    """

    store: Store
    run: str
    folder: Path
    keys: Sequence[str] = ()
    command: str | None = None
    keep: int = 1
    merge: str | None = None

    def follow(self, *, once: bool = False, poll: Duration = "1s") -> Iterator[Switch]:
        """Perform and yield switches indefinitely. ``once``: stop when the newest checkpoint is current.

        After a storage or disk error, it logs the error and retries, with growing pauses. With ``once``, it raises the
        error instead. It skips a checkpoint that is damaged or lacks a required signature. Raises Conflict if another
        process already updates this folder, InvalidInput if the folder has other contents or is in the store, NotFound
        (with ``once``) if no checkpoint is current at the end, and the errors of a watch, a merge and an export.
        """
        check_outside(self.store.url, self.folder)
        with _alone(self.folder, averages=self._average is not None):
            pause = _PAUSE
            if not once:
                self._warn_if_absent()
            while True:
                try:
                    for made in self._switches("0s" if once else None, poll):
                        pause = _PAUSE
                        yield made
                    if once and self._at(CURRENT) is None:
                        skipped = (
                            f"casckpt cannot follow any checkpoint of run {self.run!r} in {self.store.url}; see the log"
                        )
                        raise NotFound(self._absence() or skipped)
                    return
                except (NotFound, Conflict, Damaged):  # these are also OSErrors, but retrying does not help
                    raise
                except OSError as error:  # from the storage or the folder
                    if once:
                        raise
                    log.warning("casckpt cannot follow %s now, and will retry in %.0f s: %s", self.run, pause, error)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    @cached_property
    def _average(self) -> MovingAverage | None:
        return None if self.merge is None else moving_average(self.store, self.run, self.merge, self.keys)

    def _warn_if_absent(self) -> None:
        with suppress(StorageError):  # the watch will report the error
            if self._at(CURRENT) is None and (absence := self._absence()) is not None:
                log.warning("%s. casckpt is waiting for the first checkpoint", absence)

    def _absence(self) -> str | None:
        """Return the reason why there is no checkpoint yet, or None if there is one."""
        try:
            self.store.get(f"{self.run}@latest")
        except NotFound as error:
            return str(error)
        return None

    def _switches(self, timeout: Duration | None, poll: Duration) -> Iterator[Switch]:
        """Finish the switch that an earlier process began, and continue from there.

        If the current checkpoint was forgotten, the newest one takes its place, even if it is older.
        """
        self._tidy()
        held = self._at(CURRENT)
        visible = {} if held is None else {one.id: one for one in self.store.checkpoints(self.run)}
        if held is not None and held != self._at(_TOLD):
            status = self._notify(held)
            if (current := visible.get(_id_of(held))) is not None:
                yield Switch(current, held, status)
        is_lost = held is not None and self._average is None and _id_of(held) not in visible
        is_new = self._average is not None and held is not None and self._average.held_in(_average_of(held)) is None
        for new in self._arrivals("start" if held is None or is_lost or is_new else _id_of(held), timeout, poll):
            made = self._switch(new.checkpoint)
            if made is not None:
                yield made

    def _arrivals(self, after: str, timeout: Duration | None, poll: Duration) -> Iterator[Arrival]:
        try:
            return self.store.watch(self.run, after=after, latest_only=True, timeout=timeout, poll=poll)
        except NotFound:  # a different store has replaced this one
            log.warning(
                "%s does not know the current checkpoint, %s; casckpt continues with the newest one", self.store, after
            )
            return self.store.watch(self.run, after="start", latest_only=True, timeout=timeout, poll=poll)

    def _switch(self, checkpoint: Checkpoint) -> Switch | None:
        """Create a generation and make it current. Return None if the checkpoint is skipped."""
        if self._average is not None and checkpoint.healthy is False:
            log.error("skipping %s: it is marked unhealthy, so the average leaves it out", checkpoint)
            return None
        numbers = map(_number_of, self._generations())
        folder = self.folder / f"{max(numbers, default=0) + 1:06}-{checkpoint.step}-{checkpoint.id}"
        try:
            with self._leased(checkpoint) as held:
                self._make(held, folder)
        except NotFound as error:
            log.info("skipping %s: %s", checkpoint, error)
            return None
        except (Damaged, Unsigned) as error:
            log.error("skipping %s: %s", checkpoint, error)
            return None
        self._link(CURRENT, folder)
        return Switch(checkpoint, folder, self._notify(folder))

    @contextmanager
    def _leased(self, checkpoint: Checkpoint) -> Iterator[Checkpoint]:
        """Hold a lease on a checkpoint. If the store is not writable, log a warning once and continue without a lease.

        If gc then purges the checkpoint, the switch fails, and the next one takes a newer checkpoint.
        """
        with ExitStack() as taken:
            try:
                checkpoint = taken.enter_context(self.store.lease(checkpoint))
            except (StorageError, Unsupported) as error:
                if is_news("lease", self.store.url):
                    log.warning("cannot acquire a lease, so a gc may delete data that is being copied: %s", error)
            yield checkpoint

    def _make(self, checkpoint: Checkpoint, folder: Path) -> None:
        store, base, keys, current = self.store, self._base(), list(self.keys) or None, self._at(CURRENT)
        if self._average is not None:
            before, after = (None, "") if current is None else (_average_of(current), _id_of(current))
            checkpoint = self._average.advance(before, after, checkpoint, _average_of(folder))
            store = Store(checkpoint.repo)
        model = is_model(store.attachments(checkpoint))
        export_safetensors(store, checkpoint, folder, model=model, keys=keys, base=base)

    def _base(self) -> Base | None:
        """Return the base for the next generation: the current one."""
        current = self._at(CURRENT)
        if current is None or self._average is not None:  # all of an average is new
            return None
        try:
            checkpoint = self.store.get(_id_of(current))
        except NotFound:  # the checkpoint was purged, so a comparison is impossible
            return None
        return Base(checkpoint, current)

    def _old(self) -> list[Path]:
        """Return the generations to remove.

        The list is empty until the command has returned 0 for the current generation.
        """
        current, every = self._at(CURRENT), self._generations()
        if current not in every or current != self._at(_TOLD):
            return []
        return every[: max(0, every.index(current) - self.keep)]

    def _notify(self, folder: Path) -> int | None:
        """Run the command for the current generation. If it returns 0, remove older generations."""
        status = None if self.command is None else self._call(self.command, folder)
        if status:
            log.warning(
                "the command returned %d for %s; older generations are kept until the command returns 0", status, folder
            )
            return status
        self._link(_TOLD, folder)
        self._tidy()
        return status

    def _call(self, command: str, folder: Path) -> int:
        step = folder.name.split("-")[1]
        about = {"FOLDER": str(folder.absolute()), "RUN": self.run, "STEP": step, "ID": _id_of(folder)}
        # env(1) extends the environment of this process, so this code need not read it
        ran = ["env", *(f"CASCKPT_{name}={value}" for name, value in about.items()), "/bin/sh", "-c", command]
        return subprocess.run(ran, check=False).returncode

    def _link(self, name: str, folder: Path) -> None:
        """Create a link to a generation, atomically and durably."""
        temporary = self.folder / f".link-{secrets.token_hex(8)}"
        os.symlink(folder.name, temporary)
        os.replace(temporary, self.folder / name)
        sync_folder(self.folder)

    def _at(self, name: str) -> Path | None:
        """Return the generation that a link points to, if it exists."""
        link = self.folder / name
        return self.folder / os.readlink(link) if link.is_dir() else None

    def _generations(self) -> list[Path]:
        """Return all generations, oldest first."""
        generations = [path for path in self.folder.iterdir() if _GENERATION.fullmatch(path.name)]
        return sorted(generations, key=_number_of)

    def _tidy(self) -> None:
        """Remove what a killed process left behind, and the generations that need not be kept."""
        left = [path for path in self.folder.iterdir() if _LEFT.fullmatch(path.name)]
        current, every = self._at(CURRENT), self._generations()
        unfinished = every[every.index(current) + 1 :] if current in every else every
        averages = [path for path in self.folder.iterdir() if _AVERAGE.fullmatch(path.name)]
        unused = [path for path in averages if current is None or path != _average_of(current)]
        for path in [*left, *self._old(), *unfinished, *unused]:
            _remove(path)


def _number_of(folder: Path) -> int:
    return int(folder.name.split("-")[0])


def _average_of(generation: Path) -> Path:
    return generation.with_name(f"{generation.name.split('-')[0]}-average")


def _id_of(folder: Path) -> str:
    return folder.name.split("-")[2]


def _remove(path: Path) -> None:
    """Rename a generation before removing it, so that casckpt never uses a partly removed one."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    if not path.name.startswith("."):
        path = path.rename(path.with_name(f".{path.name}.casckpt-{secrets.token_hex(4)}"))
    shutil.rmtree(path)


@contextmanager
def _alone(folder: Path, *, averages: bool) -> Iterator[None]:
    """Lock a follower's folder. Raises Conflict, InvalidInput and StorageError.

    ``averages``: whether it may hold averages.
    """
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        is_ours = path.name in (CURRENT, _TOLD) if path.is_symlink() else _GENERATION.fullmatch(path.name)
        if _AVERAGE.fullmatch(path.name) and not averages:
            raise InvalidInput(f"{folder} holds an average: pass merge= (--merge) as before, or choose an empty folder")
        if not is_ours and not _AVERAGE.fullmatch(path.name) and not _LEFT.fullmatch(path.name):
            raise InvalidInput(f"{folder} holds {path.name!r}, which is not this follower's; choose an empty folder")
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder.resolve(), fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise Conflict(f"another process already updates {folder}; end it, or choose a different folder") from error
        yield
