"""The loops that people copy, with casckpt, in five situations: none crashes again and again, or loses anything.

`LOOPS` has, for each program of this folder, what is expected in each situation. It was written down from the issue
and the docs before any of the programs ran. The situations are:

- *killed*: five jobs, each with SIGKILL at a random moment. Each continues from the newest checkpoint.
- *finished*: the next job trains to the end. If nothing is left to chance, it has the weights of an uninterrupted run.
- *requeued*: the same command again. It succeeds, and changes nothing in the store.
- *forgotten*: the same command without its line that resumes. It fails before it changes anything in the store.
- *longer*: the same command with more steps, and so with another schedule.

Each job may log the warnings of casckpt that its cell names, and no others.

Run all of them, or one, with the kills of a seed (`tests/conftest.py` prints it)::

    OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/programs --full -q -k nanogpt --hypothesis-seed=7

Without ``--full``, nanoGPT's loop alone runs, and is killed once. A failure lists every difference, with what the job
printed. The folders of failed tests remain in pytest's temporary folder. A program also runs by hand::

    PYTHONPATH=. .venv/bin/python tests/programs/nanogpt.py --store checkpoints --steps 60
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import casckpt
from tests.programs.shared import KILL
from tests.support.afresh import afresh
from tests.support.scripts import ERR, OUT, environments, play

pytestmark = pytest.mark.kill

HERE = Path(__file__).resolve().parent
PATIENCE = 240.0  # seconds for a job
_WARNED = re.compile(r"^(?:WARNING|ERROR) casckpt.*", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """What a job does. ``status``: its exit status; None: any. ``says``: patterns, each of which the output matches.

    ``may``: patterns of warnings that may, or may not, be logged. ``ran``: the steps that it completes, or at most as
    many; None: those from its start to its end.
    """

    says: tuple[str, ...] = ()
    status: int | None = 0
    may: tuple[str, ...] = ()
    ran: tuple[int, ...] | int | None = None


@dataclass(frozen=True)
class Loop:
    """A program, and what is expected of it.

    ``holds``, ``more``: the newest checkpoints at the end, and after training for longer. ``others``: how many further
    ones rules may keep. ``is_exact``: the interrupted training ends with the weights of an uninterrupted one.
    ``rates``: whose schedule holds when it is trained for longer, the "given" one or the "saved" one. ``start``: the
    step of a start that resumes step 0, minus 0 (1 if the resumed step is repeated). ``unit``: steps of the store for
    each step that is printed. ``needs``: modules whose import takes long.
    """

    program: str
    run: str
    steps: int
    longer_steps: int
    pace: int
    holds: tuple[int, ...]
    more: tuple[int, ...]
    requeued: Cell
    forgotten: Cell
    longer: Cell
    killed: Cell = field(default=Cell())
    others: int = 0
    ranks: int = 0
    is_exact: bool = True
    is_exact_longer: bool = False
    repeats: bool = False
    rates: str = "given"
    unit: int = 1
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "-".join([self.program, *(word for word in self.arguments if not word.startswith("--"))])


def _refused(run: str, newest: int, ran: int) -> Cell:
    """Without its line that resumes: an error that names the newest checkpoint and two ways out."""
    two_ways = rf"(?s)Conflict: (?=.*resume)(?=.*(?:another|other|different|new|own) run).*\b{newest}\b"
    return Cell((rf"Conflict: .*{run}\b", two_ways), status=1, ran=ran)


_NOTHING = Cell(ran=())
_ALREADY = r"already saved"
_EPOCHS = {"steps": 24, "longer_steps": 36, "pace": 6}
_STEPS = {"steps": 60, "longer_steps": 90, "pace": 14}

LOOPS = [
    # Saves at the top, so a resumed step is saved again, with the same model and optimizer ("already saved"), even if
    # a new schedule gives it another rate. It draws batches ahead and at each evaluation, so resumed losses differ, as
    # in nanoGPT itself.
    Loop(
        "nanogpt", "gpt", **_STEPS, holds=(40, 50, 60), more=(70, 80, 90), is_exact=False, repeats=True,
        killed=Cell((_ALREADY,)),
        requeued=Cell((_ALREADY,), ran=(60,)),
        forgotten=_refused("gpt", 60, ran=0),
        longer=Cell((_ALREADY,)),
    ),
    # The same with `save`.
    Loop(
        "nanogpt", "gpt", **_STEPS, holds=(40, 50, 60), more=(70, 80, 90), is_exact=False, repeats=True,
        killed=Cell((_ALREADY,)),
        requeued=Cell((_ALREADY,), ran=(60,)),
        forgotten=_refused("gpt", 60, ran=10),
        longer=Cell((_ALREADY,)),
        arguments=("--call", "save"),
    ),
    # A resumed epoch is trained again, on top of what it gave before: the saved checkpoint stays, with a warning.
    Loop(
        "torchrun_tutorial", "snapshot", **_EPOCHS, holds=(22, 23, 24), more=(34, 35, 36), ranks=2, is_exact=False,
        repeats=True,
        killed=Cell((r"WARNING .*repeats step \d+",)),
        requeued=Cell((r"WARNING .*repeats step 24",), ran=(24,)),
        forgotten=_refused("snapshot", 24, ran=0),
        longer=Cell((r"WARNING .*repeats step 24",)),
    ),
    # README's loop. A resumed CosineAnnealingLR keeps its saved T_max.
    Loop(
        "ddp_tutorial", "demo", **_STEPS, holds=(40, 50, 60), more=(70, 80, 90), rates="saved",
        requeued=_NOTHING,
        forgotten=_refused("demo", 60, ran=0),
        longer=Cell((r"WARNING (?=.*\b60\b)(?=.*\b90\b).*T_max",)),
    ),
    # DCP's writer names run and step in each call: it refuses the first step that exists, and nothing rotates.
    Loop(
        "dcp_tutorial", "fsdp", **_STEPS, holds=(10, 20, 30, 40, 50, 60), more=(10, 20, 30, 40, 50, 60, 70, 80, 90),
        ranks=2, is_exact_longer=True,
        requeued=_NOTHING,
        forgotten=Cell((r"Conflict", r"fsdp@10\b"), status=1, ran=9),
        longer=Cell(),
    ),
    # Its schedule is not saved. The GradScaler is off before and after, so its empty state is worth no warning.
    Loop(
        "timm_train", "timm", **_EPOCHS, holds=(24,), more=(36,), others=3,
        requeued=_NOTHING,
        forgotten=_refused("timm", 24, ran=0),
        longer=Cell(),
    ),
    # A LambdaLR computes each rate from the given function. The script's own loader shuffles anew when it resumes.
    Loop(
        "diffusers_train", "ddpm", **_STEPS, holds=(40, 50, 60), more=(70, 80, 90), is_exact=False,
        needs=("transformers.trainer", "diffusers.training_utils"),
        requeued=_NOTHING,
        forgotten=_refused("ddpm", 60, ran=0),
        longer=Cell(),
    ),
    # An epoch has 8 steps, because Trainer trains the rest of an epoch when it resumes its last step.
    Loop(
        "transformers_trainer", "sft", 24, 40, 8, holds=(12, 18, 24), more=(30, 36, 40),
        needs=("transformers.trainer",),
        requeued=_NOTHING,
        forgotten=_refused("sft", 24, ran=0),
        longer=Cell(),
    ),
    Loop(
        "trl_sft", "sft", 24, 40, 8, holds=(18, 24), more=(36, 40), others=1,
        needs=("transformers.trainer",),
        requeued=_NOTHING,
        forgotten=_refused("sft", 24, ran=0),
        longer=Cell(),
    ),
    # Lightning restores the schedule itself. Its IO names run and step in each call, and leaves all else alone. A job
    # that is killed between a save and the removal of an older file leaves that file, as it does without casckpt.
    Loop(
        "lightning_fit", "fit", 16, 24, 4, holds=(64,), more=(96,), others=7, unit=4, rates="saved",
        needs=("lightning.pytorch",),
        requeued=_NOTHING,
        forgotten=Cell((r"exists and is not empty|Conflict",), status=None, ran=16),
        longer=Cell((r"(?=.*\b16\b)(?=.*\b24\b).*T_max",)),
    ),
    # The recipe builds its schedule anew, at its position.
    Loop(
        "torchtune_recipe", "tune", **_EPOCHS, holds=(22, 23, 24), more=(34, 35, 36),
        requeued=_NOTHING,
        forgotten=_refused("tune", 24, ran=0),
        longer=Cell((r"WARNING recipe: .*total_epochs",)),
    ),
    # A resumed StepLR keeps its saved step_size. The best one is tagged.
    Loop(
        "imagenet", "resnet", **_EPOCHS, holds=(22, 23, 24), more=(34, 35, 36), others=1, rates="saved",
        requeued=_NOTHING,
        forgotten=_refused("resnet", 24, ran=0),
        longer=Cell((r"WARNING (?=.*\b8\b)(?=.*\b12\b).*step_size",)),
    ),
]  # fmt: skip


class Refusal(NamedTuple):
    """A loop that cannot go on as it is: its first job, or the first that resumes, says why and how to change it."""

    loop: Loop
    arguments: tuple[str, ...]
    is_killed_before: bool
    says: tuple[str, ...]


REFUSED = {
    "torchrun_tutorial-save": Refusal(LOOPS[2], ("--call", "save"), True, (r"Conflict: .*snapshot@\d+ .*[Aa]dvanc",)),
    "diffusers_train-hooks": Refusal(
        LOOPS[6], ("--hooks", "1"), False, (r"save_model_hook", r"register_for_checkpointing")
    ),
}


class Job(NamedTuple):
    """A job that has ended. ``status``: of the first rank that failed, or 0. ``output``: of all ranks."""

    status: int
    printed: str
    output: str

    @property
    def start(self) -> int | None:
        found = re.search(r"^starts after (\d+)$", self.printed, re.MULTILINE)
        return int(found[1]) if found else None

    @property
    def rates(self) -> dict[int, str]:
        return {int(step): rate for step, rate in re.findall(r"^ran (\d+) (\S+)$", self.printed, re.MULTILINE)}

    @property
    def weights(self) -> str | None:
        found = re.search(r"^ended (\w+)$", self.printed, re.MULTILINE)
        return found[1] if found else None


class Folder(NamedTuple):
    """A folder in which jobs of a loop run, with a store."""

    path: Path
    loop: Loop

    def job(self, *arguments: str, steps: int = 0, kill: str = "-1:0") -> Job:
        """Run a job to its end. ``kill``: as `KILL` describes."""
        self.path.mkdir(exist_ok=True)
        words = ["--store", str(self.path / "store"), "--steps", str(steps or self.loop.steps), *self.loop.arguments]
        output, started = self.path / "output", list[Any]()
        for rank, own in enumerate(environments(self.loop.ranks)):
            given = {**own, KILL: kill, "XDG_CACHE_HOME": str(self.path / "cache")}  # pytest uses its folders again
            file = output.with_name(f"output{rank}")
            program = HERE / f"{self.loop.program}.py"
            started.append(afresh().Process(target=_play, args=(program, [*words, *arguments], self.path, given, file)))
            started[-1].start()
        status = _end(started)
        texts = {
            end: [output.with_name(f"output{rank}{end}").read_text() for rank in range(len(started))]
            for end in (OUT, ERR)
        }
        return Job(status, texts[OUT][0], "".join(texts[OUT] + texts[ERR]))

    def checkpoints(self) -> dict[int, str]:
        """Return the ids of the visible checkpoints, by step."""
        if not (self.path / "store" / "casckpt.json").exists():  # a killed job may leave empty folders
            return {}
        return {one.step: one.id[:8] for one in casckpt.open(self.path / "store").checkpoints(self.loop.run)}

    def copy(self, name: str) -> Folder:
        copied = self.path.with_name(name)
        shutil.copytree(self.path, copied)
        return Folder(copied, self.loop)


def _play(*arguments: Any) -> None:
    os.setsid()  # a kill strikes the program and the processes that it started, and nothing else
    play(*arguments)


def _end(ranks: list[BaseProcess]) -> int:
    """Wait for all ranks. When one is killed, kill the others, as a scheduler does. Return the first status."""
    status, running = 0, {rank.sentinel: rank for rank in ranks}
    while running:
        ended = wait(list(running), PATIENCE if status == 0 else PATIENCE / 4)
        codes = [running.pop(one).exitcode or 0 for one in ended if isinstance(one, int)]
        status = status or next((code for code in codes if code), 0)
        if not ended or -signal.SIGKILL in codes:
            status = status or -signal.SIGALRM  # it hung
            for rank in running.values():
                os.killpg(rank.pid or 0, signal.SIGKILL)
    for rank in ranks:
        rank.join()
    return status


class Story:
    """The situations of one loop, and how they differ from what is expected."""

    def __init__(self, loop: Loop, path: Path, chance: random.Random) -> None:
        self.loop, self.path, self.chance = loop, path, chance
        self.folder = Folder(path / "job", loop)
        for module in loop.needs:  # the process from which jobs are forked imports it too, if it has not started yet
            import_module(module)
        self.differences = dict[str, list[str]]()
        self.outputs = dict[str, str]()

    def hold(self, job: Job, where: str, holds: bool, what: str) -> None:
        """Note a difference unless ``holds``."""
        if not holds:
            self.differences.setdefault(where, []).append(what)
            self.outputs[where] = "\n    ".join(job.output.splitlines()[-20:])

    def check(self, job: Job, where: str, cell: Cell) -> None:
        """Compare a job with its cell."""
        self.hold(job, where, cell.status in {None, job.status}, f"exit status {job.status}, not {cell.status}")
        for pattern in cell.says:
            self.hold(job, where, re.search(pattern, job.output) is not None, f"did not say {pattern!r}")
        for line in _WARNED.findall(job.output):
            is_known = any(re.search(pattern, line) for pattern in (*cell.says, *cell.may))
            self.hold(job, where, is_known, f"unexpected: {line}")
        ran = tuple(job.rates)
        if isinstance(cell.ran, int):
            self.hold(job, where, len(ran) <= cell.ran, f"ran {len(ran)} steps, not at most {cell.ran}")
        elif cell.ran is not None:
            self.hold(job, where, ran == cell.ran, f"ran {ran}, not {cell.ran}")

    def check_start(self, job: Job, where: str, before: dict[int, str]) -> None:
        """A job starts after the newest checkpoint, and trains each step from there on."""
        ran, first = tuple(job.rates), self.loop.unit
        newest = max(before) // first if before else None
        if self.loop.unit == 1 and re.search("^starts", job.printed, re.MULTILINE):
            self.hold(job, where, job.start == newest, f"started after {job.start}, not {newest}")
        if ran and job.start is not None:
            first = job.start + (not self.loop.repeats)
            self.hold(job, where, ran == tuple(range(first, first + len(ran))), f"ran {ran} after {job.start}")

    def check_kept(self, job: Job, where: str, folder: Folder, holds: tuple[int, ...]) -> None:
        """The newest checkpoints are as expected."""
        steps = sorted(folder.checkpoints())
        is_right = tuple(steps[-len(holds) :]) == holds and len(steps) <= len(holds) + self.loop.others
        self.hold(job, where, is_right, f"holds {steps}, not {holds} and at most {self.loop.others} others")

    def killed(self, jobs: int) -> None:
        """Kill jobs at random moments."""
        strikes = 0
        for number in range(jobs):
            steps = self.chance.randint(0, self.loop.pace)
            before, kill = self.folder.checkpoints(), f"{steps}:{self.chance.random() * (0.05 if steps else 0.4):.4f}"
            job, where = self.folder.job(kill=kill), f"killed ({number}, {kill})"
            after = self.folder.checkpoints()
            self.hold(job, where, job.status in {0, -signal.SIGKILL}, f"exit status {job.status}")
            strikes += job.status == -signal.SIGKILL
            self.hold(job, where, max(after, default=0) >= max(before, default=0), f"{before} became {after}")
            if self.loop.holds[0] == min(self.loop.holds[0], *after, 10):  # nothing rotates
                self.hold(job, where, before.items() <= after.items(), f"{before} became {after}")
            self.check_start(job, where, before)
            says = self.loop.killed.says if job.start is not None and job.rates else ()
            self.check(job, where, Cell(says, None, (*self.loop.killed.says, *self.loop.killed.may)))
        if strikes <= jobs // 2:
            self.differences["killed"] = [f"only {strikes} of {jobs} jobs were killed"]

    def finished(self) -> None:
        """Train to the end, and compare with an uninterrupted run."""
        whole = Folder(self.path / "whole", self.loop)
        reference = whole.job()
        self.check(reference, "uninterrupted", Cell(may=self.loop.killed.may))
        self.check_kept(reference, "uninterrupted", whole, self.loop.holds)
        before = self.folder.checkpoints()
        job = self.folder.job()
        says = () if job.start is None else self.loop.killed.says
        self.check(job, "finished", Cell(says, may=self.loop.killed.may))
        self.check_start(job, "finished", before)
        self.check_kept(job, "finished", self.folder, self.loop.holds)
        self.hold(job, "finished", job.weights is not None, "has no weights")
        if self.loop.is_exact:
            self.hold(job, "finished", job.weights == reference.weights, "other weights than uninterrupted")
            common = {step: reference.rates.get(step) for step in job.rates}
            self.hold(job, "finished", common == job.rates, "other rates than uninterrupted")
        found = casckpt.open(self.folder.path / "store").verify()
        self.hold(job, "finished", not found.is_damaged, f"verify: {found}")

    def requeued(self) -> None:
        """Run the same command again."""
        before = self.folder.checkpoints()
        job = self.folder.job()
        self.check(job, "requeued", self.loop.requeued)
        after = self.folder.checkpoints()
        self.hold(job, "requeued", before == after, f"{before} became {after}")
        self.check_start(job, "requeued", before)

    def forgotten(self) -> None:
        """Run the same command without its line that resumes."""
        folder = self.folder.copy("forgotten")
        before = folder.checkpoints()
        job = folder.job("--no-resume")
        self.check(job, "forgotten", self.loop.forgotten)
        after = folder.checkpoints()
        is_kept = before == after if self.loop.forgotten.status else before.items() <= after.items()
        self.hold(job, "forgotten", is_kept, f"{before} became {after}")

    def longer(self) -> None:
        """Run the same command with more steps."""
        whole, folder = Folder(self.path / "whole-longer", self.loop), self.folder
        before = folder.checkpoints()
        job = folder.job(steps=self.loop.longer_steps)
        self.check(job, "longer", self.loop.longer)
        self.check_start(job, "longer", before)
        self.check_kept(job, "longer", folder, self.loop.more)
        if self.loop.longer.status == 0:
            ends = max(job.rates, default=None) == self.loop.longer_steps
            self.hold(job, "longer", ends, f"ran {tuple(job.rates)}")
            reference = whole.job(steps=self.loop.longer_steps)
            if self.loop.rates == "given":
                steps = list(job.rates)[1:]  # the rate of the first step may still be the saved one
                rates = [(step, reference.rates.get(step), job.rates[step]) for step in steps]
                others = [one for one in rates if one[1] != one[2]]
                self.hold(job, "longer", not others, f"other rates than the given schedule's: {others[:3]}")
            if self.loop.is_exact_longer:
                self.hold(job, "longer", job.weights == reference.weights, "other weights than uninterrupted")

    def tell(self) -> None:
        """Fail with all differences."""
        cells = [f"{where}: {what}" for where, found in self.differences.items() for what in found]
        outputs = [f"output, {where}:\n    {output}" for where, output in self.outputs.items()]
        if cells:
            pytest.fail("\n".join([f"{self.loop.name} differs:", *cells, *outputs]), pytrace=False)


def test_a_loop_like_nanogpts_survives_a_kill_a_requeue_and_a_forgotten_resume(tmp_path: Path, seed: int) -> None:
    story = Story(LOOPS[0], tmp_path, random.Random(seed))
    story.killed(1)
    story.finished()
    story.requeued()
    story.forgotten()
    story.tell()


@pytest.mark.soak
@pytest.mark.parametrize("loop", LOOPS, ids=[loop.name for loop in LOOPS])
def test_a_loop_that_people_copy_does_what_its_cells_say(loop: Loop, tmp_path: Path, seed: int) -> None:
    story = Story(loop, tmp_path, random.Random(seed))
    story.killed(5)
    story.finished()
    story.requeued()
    story.forgotten()
    story.longer()
    story.tell()


@pytest.mark.soak
@pytest.mark.parametrize("name", REFUSED)
def test_a_loop_that_cannot_go_on_says_how_to_change_it(name: str, tmp_path: Path) -> None:
    refusal = REFUSED[name]
    story = Story(refusal.loop, tmp_path, random.Random(0))
    if refusal.is_killed_before:
        story.folder.job(*refusal.arguments, kill="4:0.2")
        assert story.folder.checkpoints()
    before = story.folder.checkpoints()
    job = story.folder.job(*refusal.arguments)
    story.check(job, name, Cell(refusal.says, status=1, ran=1))
    story.hold(job, name, before == story.folder.checkpoints(), "the store changed")
    story.tell()
