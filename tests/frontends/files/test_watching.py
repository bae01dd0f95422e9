"""Each checkpoint of a trainer is stored once it is complete, and never before."""

from __future__ import annotations

import gc
import io
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from weakref import ref

import pytest
import torch

import casckpt
from casckpt.base.progress import Shown
from casckpt.errors import InvalidInput, StorageError
from casckpt.frontends.files import importing, watching
from casckpt.frontends.files.watching import GENERIC, LAYOUTS, watch_files
from tests.support.killed_watch import KEPT, MARKER, RUN, digest, kill_at_random, whole
from tests.support.logs import logged
from tests.support.stored_folder import described

SETTLE = 60
STALL = 200  # seconds between two writes of a trainer, longer than any checkpoint needs to settle and be stored

Write: TypeAlias = tuple[str, "bytes | str | None"]
"""A path and its new content, or where it is moved to, or None: it is deleted."""


def saved(value: float) -> bytes:
    """A file of torch.save that is large enough to be cut."""
    buffer = io.BytesIO()
    torch.save({"w": torch.full((100, 300), value)}, buffer)
    return buffer.getvalue()


def folder(name: str, files: Sequence[str], marker: str = "") -> Callable[[int], list[Write]]:
    """Return what a program does for a step: it writes the files, and last the marker beside the folder."""

    def writes(step: int) -> list[Write]:
        made: list[Write] = [(f"{name.format(step)}/{file}", saved(step)) for file in files]
        return made + (
            [(marker, f"global_step{step}".encode() if marker == "latest" else b"%d" % step)] if marker else []
        )

    return writes


def file(name: str) -> Callable[[int], list[Write]]:
    """Return what a program does for a step: it writes a file slowly."""
    return lambda step: [(name.format(step), saved(step)[:size]) for size in (0, 1000, 100_000, None)]


def olmo(step: int) -> list[Write]:
    files = [f"step{step}-tmp/{one}" for one in ("train/rank0.pt", "model_and_optim/.metadata")]
    return [
        *((one, saved(step)) for one in files),
        (f"step{step}-tmp", f"step{step}"),
        (f"step{step}/.metadata.json", b"{}"),
    ]


ITERATION = "latest_checkpointed_iteration.txt"
PROGRAMS: dict[str, Callable[[int], list[Write]]] = {
    "huggingface": folder("checkpoint-{}", ["model.safetensors", "optimizer.pt", "trainer_state.json"]),
    "lightning": file("epoch=0-step={}.ckpt"),
    "deepspeed": folder("global_step{}", ["mp_rank_00_model_states.pt", "zero_pp_rank_0.pt"], "latest"),
    "torchtitan": folder("step-{}", ["__0_0.distcp", "__1_0.distcp", ".metadata"]),
    "megatron": folder("iter_{:07}", ["common.pt", "__0_0.distcp", ".metadata", "metadata.json"], ITERATION),
    "olmo-core": olmo,
    "verl": folder("global_step_{}", ["actor/model_world_size_1_rank_0.pt", "data.pt"], ITERATION),
    "skyrl": folder("global_step_{}", ["policy/model_rank_0.pt", "data.pt"], "latest_ckpt_global_step.txt"),
    "generic": file("model_{}.pt"),
    "file": file("ckpt.pt"),
}  # fmt: skip


class Scene:
    """A folder, a store, and a clock, by which a trainer writes while a watcher runs."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = casckpt.open(tmp_path / "store", cache_dir=tmp_path / "cache")
        self.folder, self.back = tmp_path / "out", tmp_path / "back"
        self.now = 0.0
        self.events: list[tuple[float, Callable[[], object]]] = []
        monkeypatch.setattr(watching, "monotonic", lambda: self.now)
        monkeypatch.setattr(watching, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()

    def write(self, path: str, content: bytes | str | None) -> None:
        at = self.folder / path
        at.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            at.rename(self.folder / content)
        elif content is not None:
            at.write_bytes(content)
        elif at.is_dir():
            shutil.rmtree(at)
        else:
            at.unlink()

    def later(self, *writes: Write, each: float = STALL, after: float = 0) -> None:
        """Let the trainer write one after the other."""
        at = max([self.now + after, *(at for at, _ in self.events)])
        self.events += [(at + each * number, partial(self.write, *one)) for number, one in enumerate(writes, 1)]

    def watch(self, *, path: str = "", more: float = STALL, **options: Any) -> Iterator[casckpt.Checkpoint]:
        """Watch until some time after the trainer has ended."""
        end = max([self.now, *(at for at, _ in self.events)]) + more
        given: Any = {"run": "r", "settle": f"{SETTLE}s", "stop": lambda: self.now > end} | options
        return watch_files(self.store, self.folder / path, **given)

    def stored(self, **options: Any) -> list[int]:
        """Return the steps that a watch stores."""
        return [one.step for one in self.watch(**options)]

    def exported(self, step: int) -> Any:
        shutil.rmtree(self.back, ignore_errors=True)
        self.back.unlink(missing_ok=True)
        self.store.export(f"r@{step}", self.back, format="files")
        return described(self.back)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def hf(step: int) -> list[Write]:
    return PROGRAMS["huggingface"](step)


def test_every_layout_has_a_program() -> None:
    assert {*PROGRAMS} == {one.name for one in (*LAYOUTS, GENERIC)} | {"file"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_checkpoint_is_stored_when_it_is_complete_and_never_before(scene: Scene, name: str) -> None:
    """Each write is followed by a pause in which all that exists settles."""
    writes = [PROGRAMS[name](step) for step in (9, 10)]
    scene.later(*writes[0], *writes[1])
    file_only = name == "file"
    options: dict[str, Any] = {"layout": "generic"} if name == "generic" else {}
    options |= {"path": "ckpt.pt"} if file_only else {}
    found = []
    with logged() as messages:
        for number, made in enumerate(scene.watch(**options)):
            assert len(scene.events) == len(writes[1]) * (1 - number)  # all of the step is written, and no more
            found.append(made.step)
            assert scene.exported(made.step) == described(Path(made.lineage["imported_from"]["path"]))
    assert found == ([0, 1] if file_only else [9, 10])
    assert f"the layout of {scene.folder / options.get('path', '')} is {name}" in messages or name == "generic"


@pytest.mark.parametrize(("count", "told"), [(10, 0), (30, 1)])
def test_nothing_is_stored_while_it_changes_more_often_than_it_may_and_after_a_while_this_is_told(
    scene: Scene, count: int, told: int
) -> None:
    writes = [("step-1/.metadata", b"%d" % number) for number in range(count)]
    scene.later(*writes, each=SETTLE * 0.75)
    with logged() as messages:
        for made in scene.watch():
            assert not scene.events
            assert made.step == 1
    assert len([one for one in messages if "step-1 is not stored, because it has changed all the time" in one]) == told
    assert scene.exported(1) == described(scene.folder / "step-1")


def test_a_rank_that_is_slower_than_the_marker_is_waited_for(scene: Scene) -> None:
    """Rank 0 of DeepSpeed does not wait for the others before it writes `latest`."""
    slow, rank = saved(1), "global_step5/zero_pp_rank_1.pt"
    scene.later(*PROGRAMS["deepspeed"](5), (rank, slow[:50_000]), (rank, slow), each=SETTLE / 2)
    assert scene.stored() == [5]
    assert scene.exported(5) == described(scene.folder / "global_step5")


def test_a_file_that_stays_truncated_is_never_stored(scene: Scene) -> None:
    scene.later(("step-3/__0_0.distcp", saved(3)[:100_000]), ("step-3/.metadata", b"-"), *hf(4))
    with logged() as messages:
        assert scene.stored(layout="step-{step}", more=10 * STALL) == []
    told = [one for one in messages if "truncated" in one]
    assert len(told) == 1
    assert "step-3 is not stored: '__0_0.distcp' seem" in told[0]


def test_a_step_that_is_written_again_replaces_the_stored_one(scene: Scene) -> None:
    scene.later(*hf(5), *hf(10))
    assert scene.stored() == [5, 10]
    weights = ("checkpoint-5/model.safetensors", saved(50))
    scene.later(weights, ("checkpoint-5/trainer_state.json", saved(51)), each=SETTLE / 2)
    assert scene.stored() == [5]
    assert scene.exported(5) == described(scene.folder / "checkpoint-5")
    assert [one.step for one in scene.store.checkpoints("r")] == [10, 5]


def test_a_step_that_has_lost_a_file_does_not_replace_the_stored_one_until_that_is_forgotten(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.later(*hf(100), each=0)
    assert scene.stored() == [100]
    scene.write("checkpoint-100/optimizer.pt", None)
    assert scene.stored() == []
    assert "it lacks 'optimizer.pt', which r@100 has" in caplog.text
    scene.store.forget("r@100")
    assert scene.stored() == [100]


def test_a_step_in_another_folder_does_not_replace_the_stored_one(scene: Scene, tmp_path: Path) -> None:
    scene.later(*hf(100), each=0)
    assert scene.stored() == [100]
    before, scene.folder = scene.exported(100), tmp_path / "other"
    scene.later(*hf(100), ("checkpoint-100/optimizer.pt", saved(2)), each=0)
    assert scene.stored() == []
    with pytest.raises(InvalidInput, match=r"r@100 was imported from .*/out/checkpoint-100: choose a different run"):
        scene.stored(once=True)
    assert scene.exported(100) == before


def test_a_new_watcher_stores_nothing_twice_and_misses_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.later(*hf(1), *hf(2))
    assert scene.stored() == [1, 2]
    scene.later(*hf(3), each=1)
    scene.sleep(10 * STALL)
    assert scene.stored() == [3]
    monkeypatch.setattr(importing, "cut", None)  # nothing is read
    assert scene.stored() == []


def test_a_restored_folder_is_the_same_and_so_is_one_that_was_forgotten(scene: Scene) -> None:
    scene.later(*hf(1), *hf(2))
    assert scene.stored() == [1, 2]
    shutil.rmtree(scene.folder / "checkpoint-1")
    scene.store.export("r@1", scene.folder / "checkpoint-1")
    scene.store.forget("r@1")
    assert scene.stored() == []
    (scene.folder / "checkpoint-1" / "optimizer.pt").chmod(0o600)
    assert scene.stored() == [1]


def test_a_restored_file_is_the_same_version(scene: Scene) -> None:
    scene.later(*PROGRAMS["file"](7))
    assert scene.stored(path="ckpt.pt") == [0]
    scene.later(("ckpt.pt", None), each=1)
    assert scene.stored(path="ckpt.pt") == []
    scene.store.export("r@0", scene.folder / "ckpt.pt")
    assert scene.stored(path="ckpt.pt") == []
    scene.later(("ckpt.pt", saved(8)))
    assert scene.stored(path="ckpt.pt") == [1]


@pytest.mark.parametrize(
    ("program", "vanishes"),
    [("huggingface", "model.safetensors"), ("verl", "actor"), ("deepspeed", "mp_rank_00_model_states.pt")],
)
@pytest.mark.parametrize("stored", [False, True])
def test_what_a_killed_save_or_a_rotation_left_is_not_stored(
    scene: Scene, program: str, vanishes: str, stored: bool
) -> None:
    """verl deletes only a part of an old checkpoint. Others may be killed when they save, or delete."""
    scene.later(*PROGRAMS[program](1), *PROGRAMS[program](2))
    assert not stored or scene.stored() == [1, 2]
    whole = scene.store.get("r@1").id if stored else None
    first = PROGRAMS[program](1)[0][0].split("/")[0]
    scene.later((f"{first}/{vanishes}", None))
    if not stored:
        scene.sleep(10 * STALL)
    with logged() as messages:
        assert scene.stored(more=3 * STALL) == ([] if stored else [2])
    assert [one for one in messages if "lacks" in one and first in one and vanishes in one]
    assert not stored or scene.store.get("r@1").id == whole


def test_the_newest_that_lacks_a_file_of_the_one_before_it_waits_for_another_like_it(scene: Scene) -> None:
    """DeepSpeed's `latest` may name a step before another rank has begun its file. Or there are fewer ranks now."""
    scene.later(*PROGRAMS["deepspeed"](1), *(write for write in PROGRAMS["deepspeed"](2) if "zero_pp" not in write[0]))
    with logged() as messages:
        assert scene.stored(more=3 * STALL) == [1]
    assert [one for one in messages if "it lacks 'zero_pp_rank_0.pt', which all others have" in one]
    scene.later(*(write for write in PROGRAMS["deepspeed"](3) if "zero_pp" not in write[0]))
    assert scene.stored() == [2, 3]


def test_the_newest_that_lacks_a_file_ends_a_watch_with_once_unless_it_is_stored(scene: Scene) -> None:
    """Another program may have added the file, such as the results of an evaluation."""
    scene.later(*hf(1), ("checkpoint-1/results.json", b"{}"), *hf(2), each=0)
    scene.sleep(1)
    with pytest.raises(
        InvalidInput, match=r"checkpoint-2 seems incomplete: it lacks 'results.json', which all others have"
    ):
        scene.stored(once=True)
    scene.store.import_files(scene.folder / "checkpoint-2", run="r", step=2)
    with logged() as messages:
        assert scene.stored(once=True) == []
    assert not [one for one in messages if "it lacks" in one]


def test_what_a_trainer_deletes_is_forgotten(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """One checkpoint vanishes before it has settled, and the other while it is read."""
    save = importing.save_listing

    def and_delete(*args: Any, **options: Any) -> casckpt.Checkpoint:
        scene.write("checkpoint-2", None)
        return save(*args, **options)

    monkeypatch.setattr(watching, "save_listing", and_delete)
    scene.later(*hf(1), ("checkpoint-1", None), each=SETTLE / 3)
    scene.later(*hf(2))
    with logged() as messages:
        assert scene.stored() == []
    assert [one.split("/")[-1] for one in messages if "vanished" in one] == [
        f"checkpoint-{step} vanished before it was stored" for step in (1, 2)
    ]
    assert not [one for one in messages if "not stored:" in one]


def test_what_a_trainer_deletes_once_it_is_stored_is_not_told(scene: Scene) -> None:
    scene.later(*hf(1), ("checkpoint-1", None), *hf(2))
    with logged() as messages:
        assert scene.stored() == [1, 2]
    assert not [one for one in messages if "vanished" in one]


@pytest.mark.parametrize("once", [True, False])
def test_a_checkpoint_that_changes_while_it_is_read_settles_and_is_read_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    save, began = importing.save_listing, list[float]()

    def and_change(*args: Any, **options: Any) -> casckpt.Checkpoint:
        began.append(scene.now)
        if len(began) == 1:
            scene.write("step-1/.metadata", b"other")
        return save(*args, **options)

    monkeypatch.setattr(watching, "save_listing", and_change)
    scene.later(("step-1/.metadata", b"one"), each=1)
    scene.sleep(2)
    if once:
        assert scene.stored(once=True) == []
        return
    assert scene.stored() == [1]
    assert began[1] - began[0] >= SETTLE
    assert scene.exported(1) == described(scene.folder / "step-1")


def test_other_checkpoints_settle_while_one_is_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    save, began = importing.save_listing, list[float]()

    def slowly(*args: Any, progress: Shown, **options: Any) -> casckpt.Checkpoint:
        began.append(scene.now)
        for _ in range(SETTLE * (2 - len(began))):
            scene.sleep(2)
            progress(0, None)
        return save(*args, progress=progress, **options)

    monkeypatch.setattr(watching, "save_listing", slowly)
    scene.later(*hf(1), each=0.1)
    scene.later(*hf(2), each=0.1, after=SETTLE * 1.5)
    assert scene.stored() == [1, 2]
    assert began[1] - began[0] < SETTLE * 2 + watching._MOST_PAUSE


def test_an_error_that_may_pass_is_said_once_and_the_import_is_tried_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, tries, times = importing.save_listing, list[int](), list[float]()

    def when_there_is_room(*args: Any, **options: Any) -> casckpt.Checkpoint:
        tries.append(options["step"])
        times.append(scene.now)
        if len(tries) in (1, 2, 3, 4, 7):
            raise StorageError(f"cannot write {len(tries)}: the disk is full")
        return save(*args, **options)

    monkeypatch.setattr(watching, "save_listing", when_there_is_room)
    scene.later(*hf(1), *hf(2), each=0.1)
    with logged() as messages:
        scene.later(*hf(3), after=5 * STALL)
        assert scene.stored() == [1, 2, 3]
    assert tries == [1, 2, 1, 2, 1, 2, 3, 3]
    assert all(times[number + 2] - times[number] >= SETTLE for number in range(4))
    assert len([one for one in messages if "is full" in one]) == 2


def test_a_checkpoint_that_cannot_be_stored_is_said_once_until_it_changes(scene: Scene) -> None:
    scene.later(*hf(1), *hf(2))
    scene.folder.mkdir()
    link = scene.folder / "checkpoint-1" / "link"
    link.parent.mkdir()
    link.symlink_to("/etc")
    with logged() as messages:
        assert scene.stored() == [2]
        assert len([one for one in messages if "leads out of the folder" in one]) == 1
        with pytest.raises(InvalidInput, match="leads out of the folder"):
            scene.stored(once=True)
        link.unlink()
        assert scene.stored(once=True) == []  # it would be the latest of the run
    assert [one for one in messages if "checkpoint-2, which was written later, is stored" in one]


def test_a_refused_checkpoint_does_not_count_as_stored_for_an_older_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = importing.save_listing, list[Any]()

    def fail_once(*args: Any, **options: Any) -> casckpt.Checkpoint:
        calls.append(args)
        if len(calls) == 1:
            raise StorageError("the bucket is away")
        return save(*args, **options)

    monkeypatch.setattr(watching, "save_listing", fail_once)
    scene.later(*hf(1), *hf(2), ("checkpoint-2/optimizer.pt", saved(2)[:50_000]), each=0)  # truncated
    assert scene.stored(more=5 * STALL) == [1]


def test_what_gc_has_purged_or_what_got_another_file_does_not_become_the_latest(scene: Scene) -> None:
    scene.later(*hf(1), *hf(2), *hf(3))
    assert scene.stored() == [1, 2, 3]
    scene.store.forget("r@1")
    scene.store.gc(min_age=0)
    scene.write("checkpoint-2/eval.json", b"{}")
    assert scene.stored() == []
    assert scene.store.get("r@latest").step == 3
    scene.later(*hf(4))
    assert scene.stored() == [4]


def test_a_trainer_that_went_back_writes_the_latest_checkpoint(scene: Scene) -> None:
    scene.later(*hf(1), *hf(2), *hf(3))
    assert scene.stored() == [1, 2, 3]
    scene.later(*((path, saved(7) if path.endswith(".pt") else content) for path, content in hf(2)))
    assert scene.stored() == [2]
    assert scene.store.get("r@latest").step == 2


def test_a_file_that_one_checkpoint_got_later_is_not_required_of_the_next(scene: Scene) -> None:
    scene.later(*hf(1), *hf(2), ("checkpoint-2/eval.json", b"{}"), *hf(3))
    assert scene.stored()[-1] == 3


def test_a_watcher_keeps_only_the_first_error(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    errors, kept = list[ref[InvalidInput]](), list[int]()

    def refuse(*_: Any, **__: Any) -> None:
        errors.append(ref(error := InvalidInput("it has a link")))
        raise error

    def stop() -> bool:
        if is_over := scene.now > 10 * STALL:
            gc.collect()
            kept.append(sum(one() is not None for one in errors))
        return is_over

    monkeypatch.setattr(watching, "list_folder", refuse)
    scene.later(*hf(1), each=0)
    assert scene.stored(stop=stop) == []
    assert len(errors) > 50
    assert kept == [1]


def test_a_run_with_other_checkpoints_is_left_alone(scene: Scene) -> None:
    native = scene.store.save({"w": torch.ones(3)}, run="r", step=1)
    scene.later(*hf(1), *hf(2))
    with logged() as messages:
        assert scene.stored() == [2]
    assert scene.store.get("r@1") == native
    assert [one for one in messages if "checkpoint-1 is not stored: r@1 does not hold a folder" in one]


def test_once_stores_what_is_complete_and_ends(scene: Scene) -> None:
    with logged() as messages:
        assert scene.stored(once=True, stop=lambda: False) == []
    assert len([one for one in messages if "there is no checkpoint" in one and "checkpoint-{step}" in one]) == 1
    scene.later(*hf(1), *hf(2)[:-1], each=0.1)
    scene.sleep(1)
    began = scene.now
    assert scene.stored(once=True, stop=lambda: False) == [1]
    assert SETTLE <= scene.now - began < 2 * SETTLE


@pytest.mark.parametrize(
    ("layout", "names", "steps"),
    [
        ("run-*/step_{step}/model.pt", ["run-1/step_5/model.pt", "run-1/step_6/other.pt", "step_7/model.pt"], [5]),
        ("{step}", ["00012", "x13", "14"], [12, 14]),
        ("generic", ["a9_step10.pt", "11", "epoch-12.ckpt", "12.tmp", "events.5.log", ".13"], [10, 11, 12]),
        ("lightning", ["epoch=0-step=3.ckpt", "epoch=0-step=3-v1.ckpt", "step=4.ckpt", "last.ckpt"], [3, 4]),
        ("*{step}", ["checkpoint-10", "checkpoint-010"], [10]),
    ],
)
def test_a_pattern_says_which_paths_are_checkpoints_and_of_which_step(
    scene: Scene, layout: str, names: Sequence[str], steps: Sequence[int]
) -> None:
    scene.later(*((name, saved(1)) for name in names), each=0.1)
    made = list(scene.watch(layout=layout, more=4 * STALL))
    assert [one.step for one in made] == steps
    assert "3.ckpt" not in made[0].lineage["imported_from"]["path"]  # Lightning's version of the step is newer


@pytest.mark.parametrize(
    ("layout", "names", "left_out"),
    [
        ("generic", ["model_1.pt", "optimizer_1.pt", "model_2.pt"], "model_1.pt"),
        ("*/step-{step}", ["a/step-1", "b/step-1"], "a/step-1"),
        ("lightning", ["step=3.ckpt", "step=3-v1.ckpt", "step=3-v2.ckpt", "step=30.ckpt"], None),
    ],
)
def test_what_has_the_step_of_another_is_named(
    scene: Scene, layout: str, names: Sequence[str], left_out: str | None
) -> None:
    scene.later(*((name, saved(1)) for name in names), each=0)
    with logged() as messages:
        scene.stored(layout=layout, once=True)
    told = [one.partition(" is not stored: ")[0] for one in messages if "has the same step" in one]
    assert told == ([str(scene.folder / left_out)] if left_out else [])


@pytest.mark.parametrize("options", [{"layout": "deepsped"}, {"settle": "5"}, {"compress": "no"}, {"run": ""}])
def test_arguments_are_checked_before_the_first_look(scene: Scene, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        watch_files(scene.store, scene.folder, **options)
    with pytest.raises(InvalidInput, match="is a URL"):
        watch_files(scene.store, "s3://bucket/out")


def test_nothing_in_the_folder_changes(scene: Scene) -> None:
    scene.later(*hf(1), each=0.1)
    states = list[Any]()
    scene.events.append((2, lambda: states.append([os.stat(one).st_ctime_ns for one in scene.folder.rglob("*")])))
    assert scene.stored() == [1]
    assert states == [[os.stat(one).st_ctime_ns for one in scene.folder.rglob("*")]]


def test_what_is_stored_was_complete_if_trainer_and_watcher_are_killed_at_random(tmp_path: Path, full: bool) -> None:
    folder, store, log = tmp_path / "out", tmp_path / "store", tmp_path / "log"
    kill_at_random(0, 200 if full else 3, folder, store, log)
    stored = [one.step for one in watch_files(store, folder, run=RUN, settle="0.1s", once=True)]
    complete = {*log.read_text().splitlines()}
    opened = casckpt.open(store)
    for made in opened.checkpoints(RUN, forgotten=True):
        opened.export(made, tmp_path / "back", format="files")
        assert f"{made.step} {digest(tmp_path / 'back')}" in complete
        assert (tmp_path / "back" / MARKER).exists()
        shutil.rmtree(tmp_path / "back")
    left = {int(one.name.split("-")[1]) for one in whole(folder)[-KEPT:]}
    assert left <= {one.step for one in opened.checkpoints(RUN)}
    assert len(opened.checkpoints(RUN)) > len(stored)  # the watcher that was killed has stored some, too
