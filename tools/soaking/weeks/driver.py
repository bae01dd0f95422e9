"""The driver of a soak of weeks: see the docstring of the package. It never imports casckpt."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from soaking.books import Books, Wrong
from soaking.growth import growth
from soaking.weeks import plan, result
from soaking.weeks.children import AHEAD, DRIVER
from soaking.weeks.jobs import RunningJob
from soaking.weeks.ledger import Ledger, Saved, kept, rules
from soaking.weeks.place import Place

SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL = 0.05  # seconds
COMMAND = 1800.0  # seconds that a command may take
LOST, BACK = 0.55, 0.75  # of all saves: when the mirror is lost, and the older library is used again


class Ended(Exception):
    """A signal ends this run of the soak."""


def _end(signum: int, frame: object) -> NoReturn:
    raise Ended


class Weeks:
    """A run of the soak. ``asked``: the command line."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.place = Place(asked.folder, asked)
        self.books, self.saves, self.hours = Books(asked.folder), self.place.saves, self.place.hours
        self.keep, self.stores = rules(self.saves), {"store": self.place.store, "mirror": self.place.mirror}
        self.began, self.since = int(time.time()), time.monotonic()
        self.earlier = result.ran(self.books)
        self.noted = 0.0
        self.ledger = Ledger(self.books)
        self.jobs = list(self.books.lines("jobs"))
        self.events = {one["event"] for one in self.books.lines("events")}
        self.children: dict[str, subprocess.Popen[str]] = {}

    # time

    def ran(self) -> float:
        """Return for how many seconds all runs of the soak have run."""
        return self.earlier + time.monotonic() - self.since

    def _note_time(self) -> None:
        self.noted = time.monotonic()
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu = sum(one.ru_utime + one.ru_stime for one in used)
        self.books.note("wall", run=self.began, seconds=self.noted - self.since, cpu=cpu)

    def note_event(self, event: str, **more: Any) -> None:
        """Record something that happens rarely."""
        self.events.add(event)
        self.books.note("events", event=event, at=self.ran(), **more)

    def interval(self) -> float:
        """Return the seconds between two saves with which the soak ends on time."""
        left = max(1, self.saves - len(self.ledger.saved))
        return min(60.0, max(0.0, 3600 * self.hours - self.ran()) / left)

    # the whole

    def run(self) -> int:
        """Run until the end, a signal, or the first broken invariant. Return the exit status."""
        for one in SIGNALS:
            signal.signal(one, _end)
        status = 1
        try:
            self._all()
            status = 0
        except Ended:
            print("stopped: the same command continues", file=sys.stderr)
            status = 0
        except Exception:  # noqa: BLE001 - whatever it is, it is a finding
            self.books.note("failures", time=time.time(), text=traceback.format_exc())
            traceback.print_exc()
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        self._end_all()
        if status == 0:
            self.place.leave()
        return status

    def _end_all(self) -> None:
        """Kill all children."""
        for child in self.children.values():
            child.kill()
            child.wait()
        self.children.clear()
        self._note_time()

    def _all(self) -> None:
        self.place.enter()
        self.books.note("runs", began=self.began)
        if "made" not in self.events:
            for name in ("init", "mirror"):
                self.command(name, "before", 0.0)
            self.note_event("made")
        for name in ("before", "after"):
            self._follow(name)
        while len(self.ledger.saved) < self.saves or self.ran() < 3600 * self.hours:
            self._round()
        print(json.dumps(self._finish(), indent=2))

    def _round(self) -> None:
        """Run a job, and what comes after it."""
        last_ranks, done = self.jobs[-1]["ranks"] if self.jobs else 0, len(self.ledger.saved)
        job = plan.draw(
            self.place.seed, len(self.jobs), part=min(1.0, done / self.saves), most=self.place.longest,
            interval=self.interval(), last_ranks=last_ranks,
        )  # fmt: skip
        if done >= BACK * self.saves and "back" not in self.events:
            self.note_event("back", job=job.number)
            job = replace(job, library="before")
        self.jobs.append(asdict(job))
        self.books.note("jobs", **asdict(job), at=self.ran(), interval=self.interval())
        RunningJob(self, job).run()
        if len(self.ledger.saved) >= LOST * self.saves and "mirror lost" not in self.events:
            self.place.lose_mirror()
            self.note_event("mirror lost", step=self.ledger.last)
        if job.key and f"tag {job.key}" not in self.events:
            self.command("tag", job.library, job.ahead, number=job.key)
            told = json.loads(self.place.printed("command tag").read_text())
            self.note_event(f"tag {job.key}", step=told["step"])
        for name in job.upkeep:
            self.command(name, job.other, job.beside_ahead, number=job.number)
        self._look(job.ahead)

    # processes

    def start(self, name: str, library: str, ahead: float, *words: str) -> subprocess.Popen[str]:
        """Start a child, with its messages in a log."""
        with self.place.log(name) as log, self.place.printed(name).open("w") as printed:
            command = [sys.executable, "-m", "soaking.weeks.children", *words]
            told = {**self.place.environ(library), AHEAD: str(ahead), DRIVER: str(os.getpid())}
            child = subprocess.Popen(command, cwd=self.place.folder, env=told, stdout=printed, stderr=log, text=True)
        self.children[name] = child
        return child

    def wait(self, name: str, seconds: float) -> int:
        """Wait for a child, and return its exit status. Raises Wrong if it does not end."""
        child, late = self.children[name], time.monotonic() + seconds
        while child.poll() is None:
            if time.monotonic() > late:
                raise Wrong(f"{name} did not end in {seconds:.0f} s")
            self.breathe()
        del self.children[name]
        return child.returncode

    def breathe(self) -> None:
        """Let others work for a moment. Raises Wrong if a follower has ended."""
        time.sleep(POLL)
        self.ledger.read()
        if time.monotonic() > self.noted + 30:
            self._note_time()
        for name, child in self.children.items():
            if name.startswith("follow") and child.poll() is not None:
                raise Wrong(f"{name} has ended with {child.returncode}: see {self.place.folder}/errors")

    def _ask(self, role: str, ahead: float, **asked: Any) -> dict[str, Any]:
        """Run a role of a child with the newer library, and return what it printed."""
        self.start(role, "after", ahead, role, json.dumps({"folder": str(self.place.folder), **asked}))
        if status := self.wait(role, 4 * COMMAND):
            raise Wrong(f"{role} has ended with {status}: see {self.place.folder}/errors")
        told: dict[str, Any] = json.loads(self.place.printed(role).read_text())
        return told

    def _follow(self, name: str) -> None:
        every = max(1.0, 3.6 * self.hours)
        asked = {"folder": str(self.place.folder), "store": str(self.place.store), "name": f"follow-{name}"}
        more = {"poll": "2s", "sample_every": every, "at": self.ran(), "began": self.began}
        self.start(f"follow-{name}", name, 0.0, "follow", json.dumps(asked | more))

    # commands

    def begin_command(self, name: str, library: str, ahead: float, number: int = 0) -> str | None:
        """Start a command. Return the name of the child, or None if there is no mirror, or already a store."""
        words = plan.command(name, self.place, number, self.keep)
        if (Path(words[1]) / "casckpt.json").exists() == (words[0] == "init"):
            return None
        self.start(f"command {name}", library, ahead, "casckpt", *words, "--json")
        return f"command {name}"

    def command(self, name: str, library: str, ahead: float, number: int = 0) -> float:
        """Run a command. Return the seconds that it took."""
        begun = time.monotonic()
        if child := self.begin_command(name, library, ahead, number):
            self.end_command(child, library)
        return time.monotonic() - begun

    def end_command(self, child: str, library: str, *, may_be_killed: bool = False) -> None:
        """Wait for a command, and count what it did."""
        status, name = self.wait(child, COMMAND), child.removeprefix("command ")
        if status and not (may_be_killed and status == -signal.SIGKILL):
            raise Wrong(f"{name} has ended with {status}: see {self.place.folder}/logs/{child}")
        told = json.loads(self.place.printed(child).read_text()) if status == 0 else None
        known = result.counts(told) if isinstance(told, dict) else {}
        self.books.note("commands", name=name, library=library, status=status, **known)

    # checks

    def _seen(self, name: str, ahead: float) -> dict[str, Any]:
        """List a store in a new process."""
        return self._ask("look", ahead, store=str(self.stores[name]), known=name == "store")

    def _look(self, ahead: float) -> None:
        """List both stores. Check which checkpoints there are, and note how large everything is."""
        seen = {name: self._seen(name, ahead) for name in self.stores}
        took = {f"{name}_seconds": self.command(name, "after", ahead) for name in ("list", "stats", "status")}
        self._check_seen([Saved(**one) for one in seen["store"]["checkpoints"]])
        sizes = {f"{name}_{unit}": one for name, at in self.stores.items() for unit, one in result.size_of(at).items()}
        listed = {f"{name}_listing": one["seconds"] for name, one in seen.items()}
        counted = {f"{name}_checkpoints": one["count"] for name, one in seen.items()}
        self.books.note("sizes", at=self.ran(), saved=len(self.ledger.saved), **sizes, **listed, **counted, **took)

    def _check_seen(self, there: list[Saved]) -> None:
        """Check that each visible checkpoint was saved, and that all are visible that the rules keep."""
        for one in there:
            if (one.step, one.job) not in self.ledger.begun:
                raise Wrong(f"{one} is visible, but its save never began")
            if one.step not in self.ledger.saved:
                self.books.note("saved", **asdict(one))  # killed before it could tell
        self.ledger.read()
        ids = {one.id for one in there}
        wanted = kept(self.ledger.saved.values(), self.keep)
        lacking = [self.ledger.saved[step] for step in sorted(wanted) if self.ledger.saved[step].id not in ids]
        if lacking:
            raise Wrong(f"saved, and kept by the rules, but not there: {lacking}")

    def _finish(self) -> dict[str, str]:
        """Copy, collect, and check everything. Return the results, which are then in a file."""
        for name in ("copy", "final gc", "final gc of the mirror"):
            self.command(name, "after", plan.SPAN)
        self._look(plan.SPAN)
        keys = [str(self.place.key(number, public=True)) for number in range(plan.KEYS)]
        checked = {name: self._ask("check", plan.SPAN, store=str(at), keys=keys) for name, at in self.stores.items()}
        self._check_rules(checked["store"]["steps"], set(checked["store"]["tagged"]))
        self._check_mirror(set(checked["mirror"]["steps"]))
        grown = [text for run in self.books.lines("runs") for text in growth(self.books, run["began"])[1]]
        if grown:
            raise Wrong(f"these have grown: {grown}")
        self._end_all()
        found = result.rows(self.books, self.ledger, self.place.commits)
        for name, one in checked.items():
            more = f"{one['thinned']} of them thinned, in {one['blobs']:,} blobs"
            found[f"checkpoints in the {name} at the end, all compared"] = f"{len(one['steps']):,}, {more}"
        (self.place.folder / result.FILE).write_text(json.dumps(found, indent=2))
        return found

    def _check_rules(self, there: list[int], tagged: set[int]) -> None:
        """Check that a rule or a tag keeps each checkpoint, and that all tags are there."""
        more = set(there) - kept([self.ledger.saved[step] for step in there], self.keep) - tagged
        tags = {one["step"] for one in self.books.lines("events") if one["event"].startswith("tag")}
        if more or tags != tagged:
            raise Wrong(f"neither rules nor tags keep steps {sorted(more)}; tagged: {sorted(tagged)} of {sorted(tags)}")

    def _check_mirror(self, there: set[int]) -> None:
        """Check that the mirror has what its rules keep of all checkpoints that were saved since it was lost."""
        lost = max((one["step"] for one in self.books.lines("events") if one["event"] == "mirror lost"), default=0)
        since = sorted(step for step in self.ledger.saved if step > lost)
        lacking = {step for step in since if step % plan.MIRRORED == 0 or step in since[-plan.LAST_MIRRORED :]} - there
        if lacking:
            raise Wrong(f"the mirror lacks steps {sorted(lacking)}")


def main(given: list[str] | None = None) -> int:
    """Run or continue a soak of weeks."""
    parser = argparse.ArgumentParser(prog="tools/soak weeks", description="Imitate a training run of six weeks.")
    parser.add_argument("hours", type=float)
    parser.add_argument("--folder", type=Path, required=True, help="for the books, both stores and the libraries")
    parser.add_argument("--saves", type=int, default=3000)
    parser.add_argument("--longest", type=int, default=40, help="saves of a job, at most")
    parser.add_argument("--before", metavar="COMMIT", help="the older library (default: that of the checkout)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nice", type=int, default=10)
    parser.add_argument(
        "--write", action="store_true", help="write the results into docs/reliability.md, and run nothing"
    )
    asked = parser.parse_args(given)
    if asked.write:
        if not (asked.folder / result.FILE).exists():
            parser.error(f"no soak has ended in {asked.folder}")
        result.write(Books(asked.folder))
        return 0
    asked.folder = asked.folder.absolute()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if (asked.folder / result.FILE).exists():
        print((asked.folder / result.FILE).read_text())
        return 0
    with (asked.folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            parser.error(f"{asked.folder} is in use by another soak")
        os.nice(asked.nice)
        return Weeks(asked).run()
