"""Stores each checkpoint that another program writes into a folder, while that program runs. Changes nothing there.

A checkpoint is complete if its marker, which the program writes last, says so, if it lacks no file that all others
have, and if nothing in it changes for a while. The second rule finds killed saves and half-deleted checkpoints that
have a marker. A checkpoint that changes while it is read is not stored, but read again. The latest of a run is what was
stored last, so an older one is not stored any more, such as one that gc has purged.
"""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Final, NamedTuple, Unpack

from casckpt.base.lazy import cached_property
from casckpt.base.names import check_keywords
from casckpt.base.text import listed
from casckpt.base.units import Duration, seconds_of
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.errors import CasckptError, Conflict, InvalidInput, NotFound, StorageError
from casckpt.format.sections.recipe import ItemKind
from casckpt.frontends.files.exporting import recipe_of
from casckpt.frontends.files.importing import STEP, is_stored, save_listing
from casckpt.frontends.files.listing import Listing, list_folder, local_folder
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.saving.options import ImportArguments, SaveOptions
from casckpt.store.store import Store

log = logging.getLogger(__name__)

_NUMBER = r"(?<!\d)(\d+)(?!\d)"
_LEAST_PAUSE, _MOST_PAUSE = 0.1, 15.0  # seconds between two looks
_MOST_SETTLES = 10  # until it is said that something changes all the time
_PASSING = (StorageError, NotFound, Conflict)  # trying again may help


class Layout(NamedTuple):
    """How a program names its checkpoints, and what it writes last.

    ``pattern``: relative to the folder, with {step} for digits, and fnmatch's * and ?. There may be several, separated
    by "|". ``marker``: relative to the checkpoint. If it is beside the checkpoints, its last number is the last step.
    """

    name: str
    pattern: str
    marker: str = ""


FILE: Final = Layout("file", "")
"""The watched path is a file, which the program overwrites. Its versions are counted."""
GENERIC: Final = Layout("generic", "*{step}|*{step}.pt|*{step}.pth|*{step}.ckpt|*{step}.safetensors")
LAYOUTS: Final = (
    Layout("huggingface", "checkpoint-{step}", "trainer_state.json"),
    Layout("lightning", "*step={step}*.ckpt"),
    Layout("deepspeed", "global_step{step}", "../latest"),
    Layout("torchtitan", "step-{step}", ".metadata"),
    Layout("megatron", "iter_{step}", "../latest_checkpointed_iteration.txt"),
    Layout("olmo-core", "step{step}", ".metadata.json"),
    Layout("verl", "global_step_{step}", "../latest_checkpointed_iteration.txt"),
    Layout("skyrl", "global_step_{step}", "../latest_ckpt_global_step.txt"),
)
"""The layouts that are recognized, in this order."""


def watch_files(
    store: AnyStore,
    path: str | os.PathLike[str],
    *,
    layout: str | None = None,
    settle: Duration = "60s",
    once: bool = False,
    follow_links: bool = False,
    stop: Callable[[], bool] = lambda: False,
    **options: Unpack[ImportArguments],
) -> Iterator[Checkpoint]:
    """Store and yield each checkpoint that another program completes in ``path``, the first step first.

    Skips a stored step with the same contents, and replaces one that the program wrote again, unless it was imported
    from another folder, or has files that the new one lacks. Does not store truncated files. Logs errors, once each,
    and tries again after those that may pass. ``path`` need not exist yet.

    - ``layout``: the name of one of `LAYOUTS`, "generic", "file", or a pattern such as "run-1/step_{step}.pt". Default:
      "file" for a file, and otherwise the first of `LAYOUTS` with a marked checkpoint.
    - ``settle``: for how long a checkpoint must be unchanged.
    - ``once``: end when what was there at the start is stored. Raises the first error of what could not be stored.
    - ``stop``: called often. Once it returns True, the iterator ends.
    - ``follow_links``, ``options``: those of `import_files`, except the step and ``overwrite``.

    Raises InvalidInput.
    """
    check_keywords("watch_files", options, ImportArguments)
    layouts = {one.name: one for one in (*LAYOUTS, GENERIC, FILE)}
    if layout is not None and layout not in layouts and layout.count(STEP) != 1:
        names = ", ".join(layouts)
        raise InvalidInput(f"layout={layout!r} is not valid: pass a pattern with {STEP}, or one of {names}")
    SaveOptions(step=0, **options).checked()
    chosen, seconds = layout and layouts.get(layout, Layout("given", layout)), seconds_of(settle, "settle")
    watch = _Watch(as_store(store), local_folder(path), chosen or None, seconds, follow_links, options)
    return watch.stored(once=once, stop=stop)


@dataclass
class _Seen:
    """A checkpoint, and when it was unchanged: from the end of a listing until the begin of the last equal one."""

    path: Path
    step: int
    listing: Listing
    since: float
    first: float  # since when it has not been stored
    until: float = 0.0
    is_compared: bool = False
    is_done: bool = False  # it is stored
    is_refused: bool = False  # until it changes

    @property
    def written(self) -> int:
        """The time of most of its files, which one that is added later does not change."""
        times = sorted(found.state[2] for found in self.listing.items if found.item.kind == ItemKind.FILE)
        return times[(len(times) - 1) // 2] if times else 0

    @cached_property
    def names(self) -> dict[str, str]:
        """All paths, and how they read without the step."""
        step = re.compile(rf"(?<!\d)0*{self.step}(?!\d)")
        return {found.item.path: step.sub(STEP, found.item.path) for found in self.listing.items}

    def lacks(self, others: Sequence[_Seen]) -> list[str]:
        """Return the paths that all of these checkpoints have, and this one does not."""
        mine, *rest = [{*one.names, *one.names.values()} for one in (self, *others)]
        required = others[0].names.items() if others else ()
        return sorted(
            path for path, general in required
            if mine.isdisjoint((path, general)) and not any(one.isdisjoint((path, general)) for one in rest)
        )  # fmt: skip


@dataclass
class _Watch:
    """A watch. ``layout``: None until one fits."""

    store: Store
    root: Path
    layout: Layout | None
    settle: float
    follow_links: bool
    options: ImportArguments

    def __post_init__(self) -> None:
        self._pause = min(max(self.settle / 4, _LEAST_PAUSE), _MOST_PAUSE)
        self._shown = self.options.pop("progress", None)
        self._seen, self._said = dict[Path, _Seen](), set[str]()
        self._error: CasckptError | None = None

    def stored(self, *, once: bool, stop: Callable[[], bool]) -> Iterator[Checkpoint]:
        """See `watch_files`."""
        self._look()
        began = monotonic()
        while not stop():
            if (left := self._looked + self._pause - monotonic()) > 0:
                sleep(min(left, _LEAST_PAUSE))
                continue
            now = monotonic()
            self._look()
            for one in self._compared():
                if not (one.is_done or one.is_refused) and not stop() and self._is_complete(one):
                    made = self._stored(one)
                    if made is not None:
                        yield made
            if now - began >= self.settle:
                if not self._seen:
                    wanted = ", ".join(one.pattern for one in ([self.layout] if self.layout else LAYOUTS))
                    self._say(
                        "no checkpoint", "there is no checkpoint in %s yet, like %s (see --layout)", self.root, wanted
                    )
                if once and self._error is not None:
                    raise self._error
                if once:
                    return

    def _look(self) -> None:
        """List all checkpoints, and forget those that vanished."""
        found = self._found()
        for path in self._seen.keys() - found.keys():
            if not self._seen.pop(path).is_done:
                log.warning("%s vanished before it was stored", path)
        for path, step in found.items():
            now = monotonic()
            try:
                listing = list_folder(path, follow_links=self.follow_links)
            except CasckptError as error:
                self._note(path, error)
                continue
            old = self._seen.get(path)
            if old is None or old.listing != listing:
                first = now if old is None or old.is_done else old.first
                self._seen[path] = _Seen(path, step, listing, monotonic(), first)
                if now - first > _MOST_SETTLES * max(self.settle, 1):
                    problem = "has changed all the time since it appeared or was stored: pass a shorter --settle"
                    self._say(f"{path} changes", f"%s is not stored, because it {problem}", path)
            self._seen[path].until = now
        self._looked = monotonic()

    def _found(self) -> dict[Path, int]:
        """Return the steps of all checkpoints, by path. Choose the layout if necessary. No step is there twice."""
        if self.layout is None:
            fits = (
                one for one in LAYOUTS if any(os.path.exists(_marker(one, path)) for path in _matches(one, self.root))
            )
            self.layout = FILE if os.path.isfile(self.root) else next(fits, None)
            if self.layout is not None:
                log.warning("the layout of %s is %s", self.root, self.layout.name)
        if self.layout is None or not os.path.exists(self.root):
            return {}
        named = {self.root: 0} if self.layout == FILE else _matches(self.layout, self.root)
        last = {step: path for path, step in named.items()}
        for path, step in named.items():
            if not str(last[step]).startswith(re.sub(r"(-v\d+)?\.\w+$", "", str(path))):  # a version of Lightning
                self._say(f"{path} name", "%s is not stored: %s has the same step. See --layout", path, last[step].name)
        return {path: step for step, path in last.items()}

    def _is_quiet(self, one: _Seen) -> bool:
        return one.until - one.since >= self.settle

    def _is_complete(self, one: _Seen) -> bool:
        """Return whether an unchanged checkpoint is complete. If not, say why."""
        layout, problem = self.layout or FILE, ""
        marker, quiet = _marker(layout, one.path), filter(self._is_quiet, self._seen.values())
        marked = [seen for seen in quiet if os.path.exists(_marker(layout, seen.path))]
        last = max((seen.step for seen in marked), default=-1)
        if layout.marker.startswith(".."):
            with suppress(OSError):
                last = max(map(int, re.findall(r"\d+", marker.read_text(errors="replace"))[-1:]), default=-1)
        others = [seen for seen in marked if seen.step > one.step or (layout.marker and seen.step < one.step)]
        later = [
            seen.path.name
            for seen in self._seen.values()
            if seen.is_done and seen.step > one.step and seen.written >= one.written
        ]
        if last < one.step or not os.path.exists(marker):
            problem = f"no {marker.name} says that it is complete"
        elif not one.listing.nbytes:
            problem = "it is empty"
        elif lacks := one.lacks(others):
            problem = f"it lacks {listed(lacks)}, which all others have; if it is right, import it with --step"
        elif later:  # it would become the latest of the run
            problem = (
                f"{later[-1]}, which was written later, is stored; to store it all the same, import it with --step"
            )
        if problem:
            self._say(f"{one.path} {problem}", "%s is skipped: %s", one.path, problem)
            if others and others[-1].step < one.step and problem.startswith("it lacks"):  # which may be a mistake
                self._error = self._error or InvalidInput(f"{one.path} seems incomplete: {problem}")
        return not problem

    def _compared(self) -> list[_Seen]:
        """Return the checkpoints that do not change, by step. Find out, once, which of them are stored already."""
        quiet = sorted(filter(self._is_quiet, self._seen.values()), key=lambda seen: seen.step)
        for one in quiet:
            if not (one.is_done or one.is_refused or one.is_compared):
                try:
                    one.is_done = (old := self._old(one)) is not None and is_stored(old, one.listing)
                    one.is_compared = True
                except CasckptError as error:
                    self._note(one.path, error)
        return quiet

    def _stored(self, one: _Seen) -> Checkpoint | None:
        """Store a checkpoint. Return None after an error."""
        try:
            made = self._import(one)
        except CasckptError as error:
            self._note(one.path, error)
            return None
        self._said -= {error.kind for error in _PASSING}
        one.is_done = True
        return made

    def _old(self, one: _Seen) -> Checkpoint | None:
        """Return the stored version of a checkpoint, or the last one of a file. A visible one, if there is any."""
        stored = list[Checkpoint]()
        with suppress(NotFound):  # the import creates the store
            stored = self.store.checkpoints(self.options.get("run", "default"), forgotten=True)
        same = (old for old in stored if old.step == one.step or self.layout == FILE)
        return max(same, key=lambda old: (old.step, not old.forgotten, old.created_at), default=None)

    def _import(self, one: _Seen) -> Checkpoint:
        old = self._old(one)
        if old is not None and self.layout != FILE and not old.forgotten:
            self._check_again(old, one)
        step = one.step if self.layout != FILE else 0 if old is None else old.step + 1
        options: ImportArguments = {**self.options, "overwrite": old is not None, "progress": self._progress}
        return save_listing(self.store, one.listing, step=step, whole=True, **options)

    def _check_again(self, old: Checkpoint, one: _Seen) -> None:
        """Raise InvalidInput unless a checkpoint is a version of a stored one: as complete, in the same folder."""
        name, root = f"{old.run}@{old.step}", self.root.absolute()
        place = old.lineage.get("imported_from", {}).get("path", root)
        if not Path(place).is_relative_to(root):
            raise InvalidInput(f"{name} was imported from {place}: choose a different run, or forget {name}")
        recipe = recipe_of(Contents.open(old.repo, old.commit).manifest) or ()
        if gone := {item.path for item in recipe} - {found.item.path for found in one.listing.items}:
            raise InvalidInput(f"it lacks {listed(sorted(gone))}, which {name} has; if it is right, forget {name}")

    def _progress(self, done: int, total: int | None) -> None:
        """Look while an import runs, too, so that other checkpoints settle meanwhile."""
        if monotonic() >= self._looked + self._pause:
            self._look()
        if self._shown is not None:
            self._shown(done, total)

    def _note(self, path: Path, error: CasckptError) -> None:
        """Say an error once. Try again once the checkpoint has changed, or settled anew if the error may pass."""
        may_pass = isinstance(error, _PASSING) or not os.path.exists(path)
        if os.path.exists(path):
            self._say(error.kind if may_pass else f"{path} {error}", "%s is not stored: %s", path, error)
            if not isinstance(error, Conflict):
                self._error = self._error or error
        if (seen := self._seen.get(path)) is not None:
            seen.since, seen.is_refused = monotonic(), not may_pass

    def _say(self, key: str, message: str, *values: object) -> None:
        if key not in self._said:
            self._said.add(key)
            log.warning(message, *values)


def _marker(layout: Layout, path: Path) -> Path:
    """Return the path of a checkpoint's marker, or the checkpoint itself."""
    return Path(os.path.normpath(path / layout.marker))


def _matches(layout: Layout, root: Path) -> dict[Path, int]:
    """Return the steps of what has the names of a layout. Of several with the same step, the last one counts."""
    found = dict[Path, int]()
    for pattern in layout.pattern.split("|"):
        named = re.compile(fnmatch.translate(pattern.replace(STEP, "\0")).replace("\0", _NUMBER))
        for name in sorted(glob.glob(pattern.replace(STEP, "*"), root_dir=root), key=lambda name: (len(name), name)):
            if match := named.match(name):
                found[root / name] = int(match[1])
    return found
