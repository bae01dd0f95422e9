"""A team and its store in a shared folder: work, troubles, and the way back.

``python -m tests.support.drill FOLDER ACL`` mounts a small file system that only this process sees. Seven users of one
group, each with an own umask, root, a keeper, who runs gc, and an auditor, who may only read, act there at the same
time. The program fails if anybody is locked out, anything is lost, or ``casckpt status`` misses a trouble. ACL: "acl",
or "without" if the file system has none. The exit status is 2 if this cannot be tried here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

import casckpt
from casckpt.cli.main import cli
from casckpt.errors import Damaged, InvalidInput, StorageError
from tests.support.full_disks import fill, mount
from tests.support.pages import blocks_below, commands_in
from tests.support.ranks import outcome_of
from tests.support.saves import cells, same_state

DOCS = Path(__file__).parents[2] / "docs"
TEAM, SAVES, DAY = 4300, 4, 24 * 3600 * 1_000_000
_SETFACL = """# does what the page needs of setfacl: -m d:u::rwx,d:g::rwx,d:o::--- FOLDER
import os, struct, sys
bits, tags = {"r": 4, "w": 2, "x": 1, "-": 0}, {"u": 1, "g": 4, "o": 32}
parts = [part.split(":") for part in sys.argv[2].split(",")]
entries = [struct.pack("<HHI", tags[who], sum(bits[one] for one in may), 0xFFFFFFFF) for _, who, _, may in parts]
os.setxattr(sys.argv[3], "system.posix_acl_default", struct.pack("<I", 2) + b"".join(entries))
"""
_FORK = multiprocessing.get_context("fork")


def state(run: str, step: int) -> dict[str, torch.Tensor]:
    """Return what all runs share, and what no other checkpoint has."""
    own = int.from_bytes(f"{run}@{step}".encode(), "big") % (1 << 31)
    return {"base": cells(4, seed=1), "own": cells(2, seed=own)}


@dataclass(frozen=True)
class Person:
    """Somebody who acts in new processes, with rights, umask and cache of their own. ``groups``: the first counts."""

    name: str
    uid: int
    umask: int
    groups: tuple[int, ...]
    store: Path
    cache: Path

    def begin(self, act: Callable[..., Any], *given: Any) -> Callable[[], Any]:
        """Begin an act. Return what waits for its end, and returns its result or raises its error."""
        here, there = _FORK.Pipe()
        process = _FORK.Process(target=self._live, args=(there, partial(act, self, *given)), daemon=True)
        process.start()
        there.close()

        def end() -> Any:
            with closing(here):
                result = here.recv()
            process.join()
            if isinstance(result, BaseException):
                raise result
            return result

        return end

    def do(self, act: Callable[..., Any], *given: Any) -> Any:
        return self.begin(act, *given)()

    def run(self, *arguments: object, status: int = 0, store: Path | None = None) -> str:
        """Run a command, and return what it printed."""
        return str(self.do(command, arguments, status, store)[0])

    def json(self, *arguments: object, status: int = 0, store: Path | None = None) -> Any:
        return self.do(as_json, arguments, status, store)

    def _live(self, there: Any, act: Callable[[], Any]) -> None:
        os.umask(self.umask)
        os.setgroups(self.groups[1:])
        os.setresgid(*self.groups[:1] * 3)
        os.setresuid(*[self.uid] * 3)
        os.environ |= {"USER": f"{self.uid}", "CASCKPT_USER": self.name, "CASCKPT_CACHE_DIR": str(self.cache)}
        there.send(outcome_of(act))


# acts


def command(who: Person, arguments: tuple[object, ...], status: int = 0, store: Path | None = None) -> tuple[str, str]:
    """Run a command, and return what it printed, and what of it went to stdout."""
    name, *others = map(str, arguments)
    done = CliRunner().invoke(cli, [name, str(store or who.store), *others])
    assert done.exit_code == status, (who.name, arguments, done.output, done.exception)
    return done.output, done.stdout


def as_json(who: Person, arguments: tuple[object, ...], status: int = 0, store: Path | None = None) -> Any:
    return json.loads(command(who, (*arguments, "--json"), status, store)[1])


def bash(_: Person, program: str) -> None:
    subprocess.run(["bash", "-ec", program], check=True)


def make_files(_: Person, folder: Path) -> None:
    folder.mkdir()
    (folder / "file").write_text("text")


def replace_files(_: Person, folder: Path) -> None:
    assert (folder / "file").read_text() == "text"
    (folder / "file").unlink()
    (folder / "other").touch()


def trim(who: Person, *options: str) -> None:
    found = as_json(who, ("gc", *options))
    assert (found["purged"], found["refused"]) == ([], []), found


def save(who: Person, run: str, steps: Iterable[int], days_ago: int = 0, **options: Any) -> None:
    store = casckpt.open(who.store)
    clock = store.repository.clock
    store.repository.clock = lambda: clock() - days_ago * DAY
    for step in steps:
        store.save(state(run, step), run=run, step=step, **options)
        if step == 1:
            store.tag(f"{run}-first", f"{run}@1")


def save_with_all(who: Person, barrier: Any) -> None:
    barrier.wait()
    save(who, who.name, range(SAVES))


def hang(who: Person, hangs: Any, go_on: Any) -> None:
    """Save, and hang in it."""
    save(who, "hung", [7], 2, progress=lambda done, total: (hangs.set(), go_on.wait()))


def save_during(who: Person, begun: Any, enough: Any) -> None:
    """Save from before something begins until after it ends."""
    for step in count(SAVES):
        save(who, who.name, [step])
        if step == SAVES:
            begun.wait()
        if step >= 2 * SAVES and enough.is_set():
            break


def collect(who: Person, barrier: Any) -> None:
    barrier.wait()
    for _ in range(3):
        trim(who, "--keep-last", "2")


def undercut(who: Person) -> None:
    """Try to delete what others may still restore."""
    said = command(who, ("gc", "--keep-last", "1", "--min-age", "0"), InvalidInput.exit_status)[0]
    assert "less than the store's setting min_age (7d)" in said


def copy(who: Person, barrier: Any) -> None:
    """Follow the page, except that the copy is beside the store."""
    program = commands_in(blocks_below(DOCS / "copies.md", "Copies by hand", "console")[0])[0][0]
    barrier.wait()
    subprocess.run(["bash", "-ec", program], cwd=who.store.parent, check=True)


def check(who: Person, checkpoints: dict[str, tuple[str, int]]) -> None:
    """Load checkpoints, given by their ids, and compare all bits."""
    store = casckpt.open(who.store)
    for id, (run, step) in checkpoints.items():
        assert same_state(dict(store.read(id)), state(run, step)), (run, step)


def go_on(who: Person, checkpoints: dict[str, tuple[str, int]]) -> None:
    """Do all that a user does."""
    check(who, checkpoints)
    new = f"{who.name}-new"
    save(who, new, range(3))
    for line in (("tag", new, f"{new}@2"), ("forget", f"{new}@0"), ("restore", f"{new}@0")):
        command(who, line)
    trim(who, "--run", new, "--keep-last", "1")


def look(who: Person, checkpoints: dict[str, tuple[str, int]]) -> None:
    """Do all that a reader may, and try what no reader may."""
    check(who, checkpoints)
    for line in (("list",), ("stats",), ("report",), ("status",), ("verify",), ("gc", "--dry-run")):
        command(who, line)
    for refused in (("tag", "mine", "tag:u1-first"), ("forget", "u1@latest"), ("gc", "--keep-last", "1")):
        said = command(who, refused, StorageError.exit_status)[0]
        assert "permission denied" in said, said


class Drill:
    """The scenes."""

    def __init__(self, at: Path, *, acl: bool) -> None:
        self.at, self.acl, self.saved = at, acl, dict[str, tuple[str, int]]()
        self.root = self._person("root", 0, 0o077, 0)
        self.users = []
        for n, umask in enumerate((0o022, 0o077, 0o002, 0o022, 0o077, 0o002, 0o022), 1):
            groups = [TEAM] if n % 2 else [TEAM + n, TEAM]  # for some, the team is not the first group
            self.users.append(self._person(f"u{n}", TEAM + n, umask, *groups))
        self.removed = self.users[4]
        assert self.removed.umask == 0o077
        self.keeper = self._person("keeper", TEAM + 20, 0o022, TEAM)
        self.auditor = self._person("auditor", TEAM + 21, 0o022, TEAM + 21)

    def _person(self, name: str, uid: int, umask: int, *groups: int) -> Person:
        cache = self.at.parent / f"cache-{name}"
        cache.mkdir()
        os.chown(cache, uid, -1)
        return Person(name, uid, umask, groups, self.at / "ckpts", cache)

    def set_up(self) -> None:
        """Root follows the page, for folders that others may read, one of which has files."""
        first, own = blocks_below(DOCS / "running.md", "Permissions", "bash")
        first = first.replace("2770", "2775").replace("d:o::---", "d:o::r-x").replace("mkdir", "mkdir -p")
        if not self.acl:
            first = first.replace("setfacl", ": setfacl")
        elif not shutil.which("setfacl"):
            (self.at / "setfacl").write_text(_SETFACL)
            first = first.replace("setfacl", f"{sys.executable} {self.at / 'setfacl'}")
        old = self.at / "old"
        old.mkdir()
        old.chmod(0o777)
        self.removed.do(make_files, old / "before")
        for name in ("ckpts", "copy", "mirror", "old"):
            self.root.do(bash, self._on(first, name))
        self.removed.do(bash, self._on(own, "old"))
        made = [old / "before"]
        if self.acl:  # it also counts for other programs
            self.removed.do(make_files, old / "after")
            made.append(old / "after")
        for folder in made:
            self.keeper.do(replace_files, folder)
        self.root.run("init", "--cell-size", "4KiB", "--blob-size", "64KiB")
        self.root.run("settings", "--set", "min_age=7d")

    def _on(self, program: str, name: str) -> str:
        """Return a program of the page for a folder and this team."""
        return program.replace(" ckpts", f" {self.at / name}").replace("team", f"{TEAM}")

    def work(self) -> None:
        """All save and tag at once, and two gcs trim all runs meanwhile."""
        barrier = _FORK.Barrier(10)
        ends = [who.begin(save_with_all, barrier) for who in (self.root, *self.users)]
        ends += [who.begin(collect, barrier) for who in (self.keeper, self.users[1])]
        for end in ends:
            end()

    def copy_by_hand(self) -> None:
        """The keeper copies the folder while two users save."""
        before = {one["id"] for one in self.keeper.json("list", "--all")}
        begun, enough = _FORK.Barrier(3), _FORK.Event()
        ends = [who.begin(save_during, begun, enough) for who in self.users[:2]]
        self.keeper.do(copy, begun)
        enough.set()
        for end in ends:
            end()
        there = self.at / "copy"
        assert "all is well" in self.keeper.run("verify", store=there)
        assert before <= {one["id"] for one in self.keeper.json("list", "--all", store=there)}
        self.saved = {one["id"]: (one["run"], one["step"]) for one in self.keeper.json("list", "--all")}
        assert len(self.saved) >= 40

    def undo(self) -> None:
        """A user leaves, and others delete and restore. Nobody deletes for good what is younger than the floor."""
        self.users[0].run("restore", "u1@0")
        self.users[0].run("restore", "u2@0")
        self.users[1].do(undercut)
        self.keeper.run("tag", "--delete", f"{self.removed.name}-first")
        self.keeper.do(trim, "--run", self.removed.name, "--keep-last", "1")
        self.keeper.run("forget", f"{self.removed.name}@0..")
        self.auditor.do(look, {})

    def plant(self) -> None:
        """Plant troubles, let the auditor find them, and mend them."""
        limits = ("--max-save-age", "1d", "--max-mirror-age", "1d", "--max-gc-age", "1d", "--min-free", "1MB")
        self.keeper.run("settings", "--set", f"mirror={self.at / 'mirror'}")
        self.keeper.run("copy", self.at / "mirror", *self.saved)  # the forgotten ones, too
        self.auditor.run("status", *limits)
        hangs, go_on = _FORK.Event(), _FORK.Event()
        end = self.users[3].begin(hang, hangs, go_on)
        hangs.wait()
        self.users[5].do(save, "late", [5], 2)
        made = fill(self.at, "bytes")
        self.keeper.do(trim, "--wait", "0s")
        found = self.auditor.json("status", *limits, status=1)
        assert [line.partition(":")[0] for line in found["exceeded"]] == ["save", "mirror", "free"]
        assert [(one["run"], one["step"]) for one in found["saves"]] == [("hung", 7)]
        assert [(one["run"], one["step"]) for one in found["unmirrored"]] == [("late", 5)]
        id = self.keeper.json("show", "tag:u1-first")["id"]
        (manifest,) = self.at.glob(f"ckpts/objects/*/{id}.manifest")
        manifest.unlink()
        found = self.auditor.json("status", *limits, status=Damaged.exit_status)
        assert [Path(one["key"]).name for one in found["damaged"]] == [manifest.name]
        assert len(found["exceeded"]) == 3
        for path in made:
            path.unlink()
        self.keeper.run("transactions", "--revoke", found["saves"][0]["txid"])
        go_on.set()
        end()
        self.keeper.run("repair", "--from", self.at / "mirror")
        self.keeper.run("copy", self.at / "mirror")
        assert self.auditor.json("status", *limits)["unmirrored"] == []

    def check(self) -> None:
        """Nothing is gone, everybody but the user who left goes on, and a reader still reads."""
        every = {one["id"]: one for one in self.keeper.json("list", "--all")}
        assert every.keys() >= self.saved.keys()
        self.keeper.run("restore", *[id for id in self.saved if every[id]["forgotten"]])
        team = [who for who in (self.root, self.keeper, *self.users) if who != self.removed]
        parts = [{id: self.saved[id] for id in [*self.saved][n :: len(team)]} for n in range(len(team))]
        ends = [who.begin(go_on, part) for who, part in zip(team, parts, strict=True)]
        ends.append(self.auditor.begin(look, self.saved))
        for end in ends:
            end()
        tags = {one["name"]: f"{one['run']}@{one['step']}" for one in self.keeper.json("tag")}
        wanted = {f"{who.name}-first": f"{who.name}@1" for who in team if who != self.keeper}
        assert tags.items() >= wanted.items()
        for line in ("verify", "doctor"):
            assert "all is well" in self.keeper.run(line)


def main(folder: Path, *, acl: bool) -> None:
    package = Path(casckpt.__file__).parent
    for path in package.rglob("*.py"):  # once, instead of in each process
        module = path.relative_to(package.parent).with_suffix("").parts
        if not {"frontends", "__main__"} & {*module}:
            import_module(".".join(module).removesuffix(".__init__"))
    import_module("sqlite_utils")
    at = mount("tmpfs", "bytes", folder, 128 << 20)
    folder.chmod(0o755)
    drill = Drill(at, acl=acl)
    for scene in (drill.set_up, drill.work, drill.copy_by_hand, drill.undo, drill.plant, drill.check):
        began = time.monotonic()
        scene()
        sys.stderr.write(f"{scene.__name__}: {time.monotonic() - began:.1f} s\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), acl=sys.argv[2] == "acl")
