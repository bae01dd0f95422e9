"""See tools/soak. One process forks workers, kills or stops one of them every second or so, and starts it again.

Of each minute the last third is calm, for what takes longer than the next kill is away. Two workers live as long as the
soak does: one follows a run, one does all that a program does with a store.

What a checkpoint holds follows from its run and step, so that everybody can tell whether it is right. Invariants:

- what is loaded under a lease, or is tagged, is what was saved, to the bit; without either it may be gone, never wrong
- once a save has returned, its run's latest is never an older one
- verify finds no damage, while everything else goes on
- what a watch tells can be loaded, or is gone; in each pause: nothing is open, no object is there that nothing names,
  every checkpoint loads, and a copy has what it should have
- memory, files and threads of the two that are never killed do not grow

Each save that returned is a line of ``ledger`` in the folder; ``counts.json`` has what happened in all runs together.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

import casckpt
from casckpt.checkpoint.saving.options import SaveArguments
from casckpt.errors import Conflict, Gone, MissingKey, NotFound, StorageError
from casckpt.format.keys import blob_key, manifest_key
from casckpt.repository import manifests
from casckpt.repository.commits import list_commits
from casckpt.store.store import Store

RUNS = ("alpha", "beta/lora")
LONG = "long"  # the run of one process
ENDS = (signal.SIGINT, signal.SIGTERM)
TAG, WRONG = "soak", 3
COMPRESS: tuple[Literal["off", "auto", "always"], ...] = ("off", "auto", "always")
CELL = 4096
SAMPLE_EVERY = 2.0  # seconds
REST = 300.0  # seconds, at most, until those that are not killed have ended their round


# what is saved


def state(run: str, step: int) -> dict[str, Any]:
    """What run@step holds: some that never changes, some of which few numbers change, some that is new; plain data."""
    made = torch.Generator().manual_seed(sum(run.encode()))
    told = torch.randn(16 * CELL, generator=made).bfloat16()
    told[:: max(1, 997 - step % 7)] += step % 251
    fresh = torch.Generator().manual_seed(1_000_003 * step + len(run))
    return {
        "model": {"kept": torch.randn(32 * CELL // 4, generator=made), "told": told},
        "optim": {"m": torch.randn(80 * CELL // 4, generator=fresh)},
        "step": step,
    }


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two nested states are equal to the bit."""
    if one.keys() != other.keys():
        return False
    return all(_equal(value, other[key]) for key, value in one.items())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return same(one, other)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


# the books


@dataclass
class Books:
    """What all processes write down, in a folder of this host; each line is one write at the end of a file."""

    folder: Path

    def note(self, book: str, **what: Any) -> None:
        """Add a line."""
        line = f"{json.dumps(what)}\n".encode()
        fd = os.open(self.folder / book, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    def lines(self, book: str) -> Iterator[Any]:
        """All lines of a book."""
        path = self.folder / book
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):  # a kill cut it off
                yield json.loads(line)

    def newest(self) -> dict[str, int]:
        """The highest step of each run whose save has returned."""
        found: dict[str, int] = {}
        for one in self.lines("ledger"):
            found[one["run"]] = max(one["step"], found.get(one["run"], -1))
        return found


class Wrong(Exception):
    """An invariant does not hold."""


class Ended(Exception):
    """Somebody ends the soak, by a signal."""


def _end(signum: int, frame: object) -> NoReturn:
    raise Ended


@dataclass
class Worker:
    """What every worker has. ``copy``: the other store. ``rounds``: that `live` has made."""

    store: Store
    copy: Store
    books: Books
    random: random.Random
    work: Path
    rounds: int = 0

    def did(self, what: str, **more: Any) -> None:
        """Count something."""
        self.books.note(f"counts.{os.getpid()}", did=what, **more)

    def check(self, ref: Any, found: Mapping[str, Any]) -> None:
        """Compare a checkpoint with what its run and step say."""
        wanted = {key: value for key, value in state(ref.run, ref.step).items() if key in found}
        if not same(found, wanted) or not {"model", "step"} <= set(found):
            raise Wrong(f"{ref} is not what was saved")

    def load(self, ref: Any) -> None:
        """Load and compare it; of one that is thin, or is thinned just now, what it has."""
        try:
            self.check(ref, self.store.read(ref))
        except MissingKey:
            self.check(ref, self.store.read(ref, keys=["model.*", "step"]))

    def read_or_gone(self, ref: Any) -> bool:
        """Load what may be purged, or thinned, meanwhile."""
        try:
            self.load(ref)
        except (NotFound, MissingKey):
            return False
        return True


# the workers: each call is one round


def save(worker: Worker, run: str) -> None:
    """Save the next step, in one of several ways."""
    try:
        step = worker.store.get(f"{run}@latest").step + 1
    except NotFound:
        step = 0
    told = worker.books.newest().get(run, -1)
    if step <= told:
        raise Wrong(f"{run}@{told} was saved, and the latest is {step - 1}")
    how = SaveArguments(compress=worker.random.choice(COMPRESS), metrics={"loss": 1 / (step + 1)})
    if worker.random.random() < 0.3:
        worker.store.save_async(state(run, step), run=run, step=step, **how).result()
    else:
        worker.store.save(state(run, step), run=run, step=step, **how)
    worker.books.note("ledger", run=run, step=step)
    worker.did("save")


def read(worker: Worker) -> None:
    """Load anything: under a lease it must go well."""
    there = worker.store.checkpoints()
    if not there:
        return
    chosen = worker.random.choice(there)
    if worker.random.random() < 0.5:
        worker.did("load" if worker.read_or_gone(chosen) else "load of what was gone")
        return
    try:
        with worker.store.lease(chosen, expires="10m") as held:
            worker.load(worker.store.get(held.id))
    except (NotFound, Conflict):
        worker.did("lease of what was gone")
    else:
        worker.did("load under a lease")


def follow(worker: Worker) -> None:
    """Watch a run for a while, and update one state from version to version. It is never killed."""
    run, held, loaded = worker.random.choice(RUNS), None, None
    for told in worker.store.watch(run, latest_only=True, timeout="5s", poll="0.1s"):
        ref = told.checkpoint
        loaded = state(run, 0) if loaded is None else loaded
        try:
            held = worker.store.update(loaded, ref, held=held)
        except (NotFound, MissingKey):
            held = loaded = None
            worker.did("update to what was gone")
            continue
        worker.check(ref, loaded)
        worker.did("update")
        if worker.random.random() < 0.05:
            return


def live(worker: Worker) -> None:
    """Save, load under a lease, look, verify and collect in one process, which is never killed.

    It collects in its first round, too: it needs the most memory for that, and that is no growth.
    """
    save(worker, LONG)
    newest = worker.store.get(f"{LONG}@latest")
    with worker.store.lease(newest, expires="10m"):
        worker.load(newest)
    worker.store.diff(newest, newest)
    worker.store.stats()
    worker.store.verify(mode="exists")
    if worker.rounds % 20 == 0:
        with suppress(Conflict):
            worker.store.gc(keep_last=3, min_age=0, wait="2s")
    worker.rounds += 1
    worker.did("round of one process")


def collect(worker: Worker) -> None:
    """Forget by a rule, and delete."""
    try:
        worker.store.gc(
            keep_last=worker.random.choice([2, 3, 5]), min_age=worker.random.choice(["0s", "1s"]), wait="2s"
        )
    except Conflict:
        worker.did("gc in the way of others")
    else:
        worker.did("gc")


def thin(worker: Worker) -> None:
    """Leave optimizers out."""
    try:
        worker.store.thin(drop="optim.*", keep_last=2)
    except (Conflict, NotFound, MissingKey):
        worker.did("thin of what was gone")
    else:
        worker.did("thin")
    time.sleep(2)


def tag(worker: Worker) -> None:
    """Tag one, load it by its tag, and move the tag on."""
    there = worker.store.checkpoints()
    if not there:
        return
    name, chosen = f"{TAG}-{os.getpid()}", worker.random.choice(there)
    try:
        worker.store.tag(name, chosen)
    except (Conflict, NotFound):
        worker.did("tag on what was gone")
        return
    for _ in range(3):
        worker.load(_tagged(worker, name, chosen))
        time.sleep(0.2)
    worker.store.untag(name)
    worker.did("tag")


def _tagged(worker: Worker, name: str, chosen: Any) -> Any:
    """What a tag names. A gc that had not seen it may forget that, and be killed before it takes that back."""
    try:
        return worker.store.get(f"tag:{name}")
    except NotFound:
        worker.did("tagged and forgotten")
        time.sleep(1)
        with suppress(Conflict):  # it is visible again
            worker.store.restore(chosen.id)
        return worker.store.get(f"tag:{name}")


def verify(worker: Worker) -> None:
    """Nothing is ever damaged."""
    found = worker.store.verify(mode=worker.random.choice(["full", "exists"]))
    if found.is_damaged or found.failed:
        raise Wrong(f"verify: {found.damaged} {found.manifests} {found.records} {found.failed}")
    worker.did("verify")
    time.sleep(1)


def copy(worker: Worker) -> None:
    """Copy all that is visible, and rotate there."""
    result = worker.store.copy_to(worker.copy, check=False)
    for one in result.failed:
        if not isinstance(one.error, Conflict | Gone):
            raise one.error
    worker.did("copy", checkpoints=len(result.copied))
    with suppress(Conflict):
        worker.copy.gc(keep_last=4, min_age=0, wait="2s")
    time.sleep(1)


ROLES: dict[str, Callable[[Worker], None]] = {
    "save alpha": lambda worker: save(worker, RUNS[0]), "save beta": lambda worker: save(worker, RUNS[1]),
    "read": read, "gc": collect, "other gc": collect, "thin": thin, "tag": tag, "verify": verify, "copy": copy,
    "follow": follow, "live": live,
}  # fmt: skip
LASTING = frozenset({"follow", "live"})
"""Never killed: their memory, files and threads are looked at."""


# a pause


def make(worker: Worker) -> None:
    """Make both stores, of small cells and blobs."""
    for store in (worker.store, worker.copy):
        store.create(cell_bytes=CELL, blob_bytes=16 * CELL)


def look(worker: Worker) -> None:
    """With nobody at work: the store is as it should be, and so is its copy."""
    for save_in_progress in worker.store.transactions():
        worker.store.revoke(save_in_progress.txid)
    for name in worker.store.tags():
        worker.store.untag(name)  # leases of killed readers end by themselves; nobody reads now
    for store in (worker.store, worker.copy):
        store.gc(min_age=0, wait="5s", revoke_after=0)
        found = store.verify(decode=True)
        if found.is_damaged or found.failed:
            raise Wrong(f"verify in a pause: {found}")
        for one in store.checkpoints():
            worker.check(one, store.read(one, keys=None if one.dropped is None else ["model.*", "step"]))
        _check_objects(store)
    newest = worker.books.newest()
    for run, step in newest.items():
        if worker.store.get(f"{run}@latest").step < step:
            raise Wrong(f"{run}@{step} was saved, and is not there")
    worker.did("pause", checkpoints=len(worker.store.checkpoints()))


def _check_objects(store: Store) -> None:
    repo, named = store.repository, set[str]()
    for one in list_commits(repo).live():
        named.add(manifest_key(one.txid, one.id))
        named.update(blob_key(uploader, blob) for uploader, blob, _ in manifests.blobs_of(repo, one))
    there = {entry.key for entry in repo.storage.list("objects/")}
    if there != named:
        raise Wrong(f"{store.url}: needed and gone {named - there}, there and not needed {there - named}")


# processes


@dataclass
class Soak:
    """One run of all."""

    asked: argparse.Namespace
    folder: Path
    random: random.Random

    def __post_init__(self) -> None:
        self.books = Books(self.folder)
        self.counts: Counter[str] = Counter(self._earlier())
        self.children: dict[int, str] = {}

    def _earlier(self) -> dict[str, int]:
        path = self.folder / "counts.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def run(self) -> int:
        """Go on for as long as asked; the exit status."""
        ends, began = time.monotonic() + 3600 * self.asked.hours, time.monotonic()
        status = 0
        for left in (self._rests(), *self.folder.glob("rests.*")):
            left.unlink(missing_ok=True)
        for one in ENDS:  # whatever they were: who runs this behind a shell's & ignores SIGINT
            signal.signal(one, _end)
        try:
            status = self._wait_for(self._start("pause", make))
            while status == 0 and time.monotonic() < ends:
                status = self._at_work(min(ends, time.monotonic() + self.asked.pause)) or self._pause()
        except Ended:
            pass
        finally:
            self._end_all()
            self._gather(time.monotonic() - began)
        sampled, grown = self.growth()
        print(json.dumps(dict(sorted(self.counts.items())) | {"sampled": sampled, "grown": grown}, indent=2))
        return status or int(bool(grown))

    def _at_work(self, until: float) -> int:
        """All workers, of which one is killed or stopped now and then. The status of what went wrong, else 0."""
        self._rests().unlink(missing_ok=True)
        calm = until - self.asked.pause / 3
        for role in [role for role in ROLES if role not in self.children.values()]:
            self._start(role, ROLES[role])
        while time.monotonic() < until:
            time.sleep(self.random.uniform(0.2, 2) * self.asked.every)
            if time.monotonic() < calm:
                self._hit(self.random.choice([pid for pid, role in self.children.items() if role not in LASTING]))
            while found := self._ended():
                pid, status = found
                role = self.children.pop(pid)
                if os.WIFEXITED(status) and os.WEXITSTATUS(status):
                    return WRONG
                self._start(role, ROLES[role])
        return 0

    def _pause(self) -> int:
        """Nobody is at work: those that last rest, the others are killed. The status of what went wrong, else 0."""
        self._end_all(but=LASTING)
        self._rests().touch()
        late = time.monotonic() + REST
        while not all(self._rests(pid).exists() for pid in self.children):
            if found := self._ended():  # of those that last none ends
                del self.children[found[0]]
                return WRONG
            if time.monotonic() > late:
                print(f"no end of a round in {REST} s: {self.children}", file=sys.stderr)
                return WRONG
            time.sleep(0.05)
        return self._wait_for(self._start("pause", look))

    def _rests(self, pid: int | None = None) -> Path:
        """There while all should rest; of one worker: while it does."""
        return self.folder / ("rest" if pid is None else f"rests.{pid}")

    def _hit(self, pid: int) -> None:
        if self.random.random() < 0.2:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.random.uniform(0, 1))
            os.kill(pid, signal.SIGCONT)
            self.counts["stopped"] += 1
        else:
            os.kill(pid, signal.SIGKILL)
            self.counts["killed"] += 1
            self.counts[f"killed: {self.children[pid]}"] += 1
            time.sleep(0.05)

    def _ended(self) -> tuple[int, int] | None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        return (pid, status) if pid else None

    def _start(self, role: str, one_round: Callable[[Worker], None]) -> int:
        seed = self.random.randrange(1 << 62)
        child = os.fork()
        if child == 0:
            self._work(role, one_round, seed)
        self.children[child] = role
        return child

    def _work(self, role: str, one_round: Callable[[Worker], None], seed: int) -> NoReturn:
        """In a child: rounds until somebody kills it; one round of a pause."""
        status = 0
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with its parent
            for one in ENDS:
                signal.signal(one, signal.SIG_IGN)  # a Ctrl-C is for the parent, who ends this
            os.nice(self.asked.nice)
            worker = self._worker(seed)
            sampled = 0.0
            while True:
                try:
                    one_round(worker)
                except StorageError as error:
                    if role == "pause":
                        raise
                    worker.did("storage error", text=str(error)[:200])
                    time.sleep(1)
                if role == "pause":
                    break
                if role in LASTING:
                    self._rest()
                if role in LASTING and time.monotonic() > sampled + SAMPLE_EVERY:
                    sampled = time.monotonic()
                    self.books.note(f"samples.{role}.{os.getpid()}", **_held())
                time.sleep(worker.random.uniform(0, self.asked.idle))
        except Ended:  # told to the whole group, before this one ignored it
            pass
        except BaseException:  # noqa: BLE001 - whatever it is, it is a finding
            self.books.note("failures", role=role, pid=os.getpid(), time=time.time(), text=traceback.format_exc())
            traceback.print_exc()
            status = WRONG
        os._exit(status)

    def _rest(self) -> None:
        """In a child: as long as all should."""
        mine = self._rests(os.getpid())
        while self._rests().exists():
            mine.touch()
            time.sleep(0.05)
        mine.unlink(missing_ok=True)

    def _worker(self, seed: int) -> Worker:
        options = dict(one.split("=", 1) for one in self.asked.storage_option)
        cache = self.folder / "caches" / str(seed % 3)
        here, there = (
            casckpt.open(f"{self.asked.storage}/{name}", storage_options=options, cache_dir=cache, cache_bytes=0)
            for name in ("store", "copy")
        )
        return Worker(here, there, self.books, random.Random(seed), self.folder)  # noqa: S311

    def _wait_for(self, pid: int) -> int:
        _, status = os.waitpid(pid, 0)
        del self.children[pid]
        return os.waitstatus_to_exitcode(status)

    def _end_all(self, but: frozenset[str] = frozenset()) -> None:
        ending = [pid for pid, role in self.children.items() if role not in but]
        for pid in ending:
            os.kill(pid, signal.SIGKILL)
        for pid in ending:
            os.waitpid(pid, 0)
            del self.children[pid]
            self._rests(pid).unlink(missing_ok=True)

    def _gather(self, seconds: float) -> None:
        """Take what workers counted into the sums of all runs."""
        for path in self.folder.glob("counts.[0-9]*"):
            self.counts.update(one["did"] for one in self.books.lines(path.name))
            path.unlink()
        self.counts["seconds"] += round(seconds)
        temporary = self.folder / "counts.new"
        temporary.write_text(json.dumps(self.counts))
        temporary.replace(self.folder / "counts.json")

    def growth(self) -> tuple[int, list[str]]:
        """How many samples of those that lived long there are, and who held more and more.

        That is: the median of its last third against that of its second.
        """
        sampled, grown = 0, []
        for path in self.folder.glob("samples.*"):
            samples = list(self.books.lines(path.name))
            third = len(samples) // 3
            if third < 5:
                continue
            sampled += len(samples)
            before, after = samples[third : 2 * third], samples[2 * third :]
            for what, room in (("rss", 32 << 20), ("files", 16), ("threads", 4)):
                was, now = (statistics.median(one[what] for one in part) for part in (before, after))
                if now > was + room:
                    grown.append(f"{path.name}: {what} from {was:.0f} to {now:.0f}")
        return sampled, grown


def _held() -> dict[str, int]:
    """Memory, open files and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return {"rss": pages * os.sysconf("SC_PAGE_SIZE"), "files": files, "threads": threads}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="tools/soak", description="Everything at once on one store, with kills.")
    parser.add_argument("hours", type=float)
    parser.add_argument("--folder", type=Path, help="for the books, and the store; a temporary one if it is left out")
    parser.add_argument("--storage", help="URL below which the store lies (default: the folder)")
    parser.add_argument("--storage-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--idle", type=float, default=0.2, help="seconds that a worker rests, at most")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between kills, about")
    parser.add_argument("--pause", type=float, default=60.0, help="seconds between looks with nobody at work")
    parser.add_argument("--nice", type=int, default=10)
    return parser.parse_args(given)


def main() -> int:
    """Soak."""
    asked = arguments()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="casckpt-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    asked.storage = asked.storage or str(folder)
    seed = asked.seed if asked.seed is not None else random.randrange(1 << 32)  # noqa: S311
    print(f"seed {seed}, folder {folder}", file=sys.stderr)
    torch.set_num_threads(1)
    if "://" in asked.storage:  # else each worker imports it anew
        for name in ("aiobotocore.session", "s3fs", "botocore.endpoint"):
            with suppress(ImportError):
                importlib.import_module(name)
    status = Soak(asked, folder, random.Random(seed)).run()  # noqa: S311
    if asked.folder is None and status == 0:
        shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
