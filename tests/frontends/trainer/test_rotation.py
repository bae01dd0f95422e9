"""Rotation keeps the right checkpoints for any history, even if the process dies at any point."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import casckpt
from casckpt.errors import MissingKey, NotFound
from casckpt.format.keys import make_txid
from casckpt.format.names import ManifestId
from casckpt.format.records import Committed
from casckpt.frontends.trainer import Checkpointer
from casckpt.history.commits import Commit, just_committed, list_commits
from casckpt.plan.retention import Policy, Rotation
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from casckpt.upkeep.gc.forgetting import plan_rotation
from tests.support.far import far
from tests.support.faulty import Call, Fault, FaultyStore, call_first, fail_before, look_on
from tests.support.repositories import memory
from tests.support.saves import small, steps


def commit(number: int, step: int, *, ephemeral: bool = False) -> Commit:
    txid = make_txid(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number), bytes(8), "sft", step)
    record = Committed(
        txid=txid, run="sft", step=step, time=number, manifest=ManifestId("0" * 64), created_at=number,
        head="0" * 64, manifest_bytes=1, store="s", who="ann@node3",
        bytes_total=0, bytes_written=0, bytes_reused=0, blobs_written=0, blobs_reused=0, seconds=0.0, tensors=0,
        ephemeral=ephemeral,
    )  # fmt: skip
    return just_committed(record)


def history(found: Iterable[tuple[int, bool]]) -> list[Commit]:
    return [commit(number, step, ephemeral=ephemeral) for number, (step, ephemeral) in enumerate(found)]


def left(commits: list[Commit], rotation: Rotation, tagged: Iterable[int] = ()) -> list[int]:
    names = {one.txid for one in commits if one.step in set(tagged)}
    gone = {one.txid for one in plan_rotation(commits, rotation, names, now=0)}
    return [one.step for one in commits if one.txid not in gone]


PERMANENT = [(step, False) for step in (10, 20, 30, 40, 50)]


@pytest.mark.parametrize(
    ("rotation", "tagged", "expected"),
    [
        (Rotation(), (), [10, 20, 30, 40, 50]),
        (Rotation(fixed=frozenset([10])), (), [10, 20, 30, 40, 50]),
        (Rotation(max_checkpoints=2), (), [40, 50]),
        (Rotation(max_checkpoints=2), (20, 50), [20, 30, 40, 50]),
        (Rotation(max_checkpoints=2, fixed=frozenset([10, 50])), (), [10, 30, 40, 50]),
        (Rotation(keep=Policy(keep_every=20)), (), [20, 40, 50]),
        (Rotation(keep=Policy(keep_every=20), max_checkpoints=2), (10,), [10, 20, 40, 50]),
        (Rotation(keep=Policy(keep_last=3)), (10,), [10, 30, 40, 50]),
    ],
)
def test_permanent_checkpoints_are_kept_under_any_rule(
    rotation: Rotation, tagged: list[int], expected: list[int]
) -> None:
    assert left(history(PERMANENT), rotation, tagged) == expected


def test_an_ephemeral_checkpoint_is_forgotten_once_a_newer_checkpoint_exists() -> None:
    rotation = Rotation(keep=Policy(keep_every=1))
    mixed = history([(10, False), (11, True), (12, True)])
    assert left(mixed, rotation) == [10, 12]
    assert left(mixed, rotation, tagged=[11]) == [10, 11, 12]
    assert left(history([(10, False), (11, True), (20, False)]), rotation) == [10, 20]
    assert left(history([(10, True), (11, True)]), Rotation(max_checkpoints=1, fixed=frozenset([10]))) == [10, 11]


def test_rotation_counts_only_the_later_of_two_commits_of_a_step() -> None:
    assert left(history([(10, False), (20, False), (10, False)]), Rotation(max_checkpoints=2)) == [20, 10]


def test_the_newest_checkpoint_is_the_one_whose_transaction_began_last() -> None:
    rolled_back = history([(10, False), (20, False), (30, False), (15, False)])
    assert left(rolled_back, Rotation(max_checkpoints=2)) == [30, 15]


@given(
    found=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12),
    number=st.integers(1, 3),
    every=st.none() | st.integers(1, 4),
    fixed=st.frozensets(st.integers(0, 9), max_size=2),
    tagged=st.frozensets(st.integers(0, 9), max_size=2),
)
def test_tagged_and_newest_checkpoints_are_always_kept(
    found: list[tuple[int, bool]], number: int, every: int | None, fixed: frozenset[int], tagged: frozenset[int]
) -> None:
    commits = history(found)
    rotation = Rotation(max_checkpoints=number, keep=Policy(keep_every=every) if every else None, fixed=fixed)
    names = {one.txid for one in commits if one.step in tagged}
    gone = {one.txid for one in plan_rotation(commits, rotation, names, now=0)}
    stays = [one for one in commits if one.txid not in gone]
    assert not commits or commits[-1] in stays
    assert {one.step for one in stays} >= {one.step for one in commits} & (fixed | tagged)
    free = [one for one in stays if not one.committed.ephemeral and one.step not in fixed | tagged]
    assert len(free) <= number + 1 or every is not None  # plus one: the newest, which may not match any other rule
    assert plan_rotation(stays, rotation, names, now=0) == []
    assert gone <= {one.txid for one in plan_rotation(commits, rotation, (), now=0)}  # tags only add checkpoints


# with a store


def checkpointer_of(store: Store) -> Checkpointer:
    return Checkpointer(store, run="sft", max_checkpoints=3, fixed_steps=[20])


def history_of_a_run(store: Store, model: nn.Linear, *, gc: bool) -> Iterator[None]:
    """Save, tag and run gc several times. Yield after each action."""
    checkpointer = checkpointer_of(store)
    for step in range(10, 90, 10):
        model.weight.data.fill_(step)
        checkpointer.save(step, model, ephemeral=step in {30, 50, 80})
        yield
        if step == 10:
            store.tag("best", "sft@10")
            yield
        if gc:
            store.gc(wait=0)
            yield


def test_a_run_keeps_the_checkpoints_that_its_rotation_selects() -> None:
    store = small()
    for _ in history_of_a_run(store, nn.Linear(2, 2), gc=True):
        pass
    assert [step for _, step in steps(store)] == [10, 20, 40, 60, 70, 80]
    resumed = checkpointer_of(store)
    resumed.resume(model := nn.Linear(2, 2))
    resumed.save(90, model)
    assert [step for _, step in steps(store)] == [10, 20, 60, 70, 90]


class Death(BaseException):
    """The process died."""


@pytest.mark.sweep
def test_checkpoints_remain_loadable_if_the_process_dies_at_any_time(full: bool) -> None:
    """The process dies before each put and delete, or by default before every third."""
    storage = FaultyStore(memory())
    for _ in history_of_a_run(small(storage), nn.Linear(2, 2), gc=True):
        pass
    changes = [call.method for call in storage.calls if call.method in {"put", "delete"}]
    seen = set()
    for method in ("put", "delete"):
        for at in range(2, changes.count(method) + 1, 1 if full else 3):  # the first put creates the store
            seen.add(die_and_look(method, at))
    assert seen >= {0, 1, 3, 5, 9, 15}


def die_and_look(method: str, at: int) -> int:
    """Kill the process before a call, and return how far it got."""
    inner = memory()
    store = small(FaultyStore(inner, deadly(method, at)))
    done = 0
    try:
        for _ in history_of_a_run(store, nn.Linear(2, 2), gc=True):
            done += 1
    except Death:
        pass
    after = Store(type(store.repository)(inner))
    check_loadable(after, tagged=done >= 2)
    checkpointer = checkpointer_of(after)  # the training continues without a conflict
    resumed = checkpointer.resume(nn.Linear(2, 2))
    checkpointer.save(100 if resumed is None else resumed.step + 1, nn.Linear(2, 2))
    return done


def deadly(method: str, at: int) -> list[Fault]:
    def die(_: Call) -> NoReturn:
        dead.append(True)
        raise Death

    def stay_dead(call: Call) -> None:
        if dead:
            die(call)

    dead: list[bool] = []
    later = [look_on(other, stay_dead, times=1 << 30) for other in ("put", "delete", "list", "get")]
    return [call_first(method, die, at=at), *later]


def check_loadable(store: Store, *, tagged: bool) -> None:
    ended = list_commits(store.repository).commits.values()
    committed = sorted((one for one in ended if isinstance(one.first, Committed)), key=lambda one: one.txid)
    if not committed:
        return
    must = {committed[-1].step} | ({10} if tagged else set()) | {one.step for one in committed if one.step == 20}
    free = [one.step for one in committed if not one.committed.ephemeral and one.step not in {10, 20}]
    must |= set(free[-3:])
    assert must <= {step for _, step in steps(store)}
    for step in must:
        assert torch.equal(store.read(f"sft@{step}")["model"]["weight"], torch.full((2, 2), float(step)))


def test_a_rotation_that_forgets_nothing_does_not_read_tags() -> None:
    storage = FaultyStore(memory())
    checkpointer = Checkpointer(small(storage), run="sft", max_checkpoints=2)
    for step in range(3):
        checkpointer.save(step, nn.Linear(2, 2))
        assert (storage.count("list", "tags/") > 0) is (step == 2)


def test_the_steps_of_a_run_that_was_rolled_back_can_be_saved_again() -> None:
    store, model = small(), nn.Linear(2, 2)
    checkpointer = Checkpointer(store, run="sft", max_checkpoints=9)
    for step in range(100, 1000, 100):
        checkpointer.save(step, model)
    checkpointer.load("sft@500", model)
    assert [one.step for one in store.forget("sft@501..")] == [600, 700, 800, 900]
    for step in range(600, 1000, 100):
        checkpointer.save(step, model)  # must not raise a conflict
    assert [step for _, step in steps(store)] == list(range(100, 1000, 100))
    assert checkpointer.latest_checkpoint().step == 900


def test_rotated_checkpoints_are_purged_and_gc_is_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    """The purpose of a limit on the number of checkpoints is to save space, so the next gc frees them.

    The log reminds users to run gc.
    """
    store = small()
    checkpointer = Checkpointer(store, run="sft", max_checkpoints=2)
    with caplog.at_level("WARNING"):
        for step in range(1, 6):
            checkpointer.save(step, nn.Linear(30, 30))
    assert [one.getMessage() for one in caplog.records if "gc=True" in one.getMessage()] == [caplog.messages[-1]]
    assert store.stats().forgotten == 0
    assert store.stats().bytes_freed_now > 0
    assert store.gc().deleted_blobs == 3
    assert [step for _, step in steps(store)] == [4, 5]


def test_checkpoints_that_the_mirror_lacks_are_not_rotated(tmp_path: Path) -> None:
    broken = far()
    mirror = Store(Repository(broken, tmp_path / "cache"))
    store = casckpt.open(tmp_path / "store", mirror=mirror)
    checkpointer = Checkpointer(store, run="sft", max_checkpoints=1)
    checkpointer.save(1, nn.Linear(2, 2))
    store.wait_for_mirror()
    broken.inject(*(fail_before(method, times=1 << 30) for method in ("put", "get", "list", "size", "open")))
    checkpointer.save(2, nn.Linear(2, 2))
    checkpointer.save(3, nn.Linear(2, 2))
    assert [step for _, step in steps(store)] == [1, 2, 3], "nobody knows what the mirror has"
    broken.heal()
    store.wait_for_mirror()
    checkpointer.save(4, nn.Linear(2, 2))
    assert [step for _, step in steps(store)] == [4]


# entries that a rotation thins, and the best checkpoints


def trained(**settings: Any) -> tuple[Store, Checkpointer, nn.Linear, torch.optim.AdamW]:
    store, model = Store(Repository(memory())), nn.Linear(400, 700)
    optimizer = torch.optim.AdamW(model.parameters())
    return store, Checkpointer(store, run="sft", **settings), model, optimizer


def train(
    checkpointer: Checkpointer, model: nn.Linear, optimizer: torch.optim.AdamW, *losses: float
) -> list[nn.Linear]:
    kept = []
    for step, loss in enumerate(losses):
        model(torch.randn(3, 400)).square().sum().backward()
        optimizer.step()
        checkpointer.save(step, model, optimizer, metrics={"loss": loss}, metadata={"note": "x" * 100_000})
        kept.append(copy.deepcopy(model))
    return kept


def test_rotation_drops_the_optimizers_of_older_checkpoints() -> None:
    store, checkpointer, model, optimizer = trained(thin={"drop": ["optim.*"], "keep_last": 2})
    models = train(checkpointer, model, optimizer, *range(5))
    assert [one.dropped is not None for one in store.checkpoints()] == [True, True, True, False, False]
    before = store.stats().bytes_blobs
    # freed immediately, because the purpose of such a rule is to save space
    assert store.gc(wait=0).deleted_bytes > 0.39 * before
    for step, one in enumerate(models):
        fresh = nn.Linear(400, 700)
        checkpointer.load(f"sft@{step}", fresh)
        assert torch.equal(fresh.weight, one.weight)
    with pytest.raises(MissingKey, match="thinned by --drop 'optim"):
        checkpointer.load("sft@1", model, optimizer)
    assert checkpointer.resume(model, optimizer) is not None
    assert not store.verify().is_damaged


def test_the_best_checkpoints_are_kept_regardless_of_their_metadata_size() -> None:
    store, checkpointer, model, optimizer = trained(keep={"keep_last": 1, "keep_best": "loss:2"})
    train(checkpointer, model, optimizer, 3.0, 1.0, float("nan"), 2.0, 5.0, 4.0)
    assert steps(store) == [("sft", 1), ("sft", 3), ("sft", 5)]


def test_a_run_without_metrics_keeps_all_checkpoints() -> None:
    rule = {"drop": "optim.*", "keep_best": "loss:1"}
    store, checkpointer, model, optimizer = trained(keep={"keep_last": 1, "keep_best": "loss:1"}, thin=rule)
    for step in range(3):
        checkpointer.save(step, model, optimizer)
    assert steps(store) == [("sft", 0), ("sft", 1), ("sft", 2)]
    assert not any(one.dropped for one in store.checkpoints())
    checkpointer.save(3, model, optimizer, metrics={"loss": 1.0})
    checkpointer.save(4, model, optimizer)
    assert steps(store) == [("sft", 3), ("sft", 4)]


def test_a_metric_that_every_save_lacks_is_logged_at_intervals(caplog: pytest.LogCaptureFixture) -> None:
    store, checkpointer, model, optimizer = trained(keep={"keep_last": 1, "keep_best": "los:min:1"})
    for step in range(20):
        checkpointer.save(step, model, optimizer, metrics={"loss": 1.0})
    assert len(store.checkpoints()) == 20
    told = [one.getMessage() for one in caplog.records if "keep_best" in one.getMessage()]
    wanted = "keep_best: none of the %d checkpoints of run sft has a number for 'los', so all of them are kept"
    assert told == [f"{wanted % count} (they have loss)" for count in (1, 10, 20)]


def test_the_newest_healthy_checkpoint_is_kept() -> None:
    store, checkpointer, model, optimizer = trained(max_checkpoints=1)
    for step, word in enumerate([None, True, False, False]):
        model.weight.data.fill_(step)
        checkpointer.save(step, model, optimizer, healthy=word)
    assert steps(store) == [("sft", 1), ("sft", 3)]
    found = checkpointer.resume(model, optimizer, healthy=True)
    assert found is not None
    assert (found.step, model.weight[0, 0].item()) == (1, 1.0)
    store.forget("sft@1")
    with pytest.raises(NotFound, match="healthy=False"):
        checkpointer.resume(model, optimizer, healthy=True)
    assert Checkpointer(store, run="new").resume(model, optimizer, healthy=True) is None


def test_an_unhealthy_checkpoint_does_not_replace_a_healthy_one() -> None:
    store, checkpointer, model, optimizer = trained(max_checkpoints=1, health=True)
    for step, value in enumerate([0.0, 1.0, float("nan"), float("nan")]):
        model.weight.data[0, 0] = value
        checkpointer.save(step, model, optimizer)
    assert steps(store) == [("sft", 1), ("sft", 3)]
    assert checkpointer.resume(model, optimizer, healthy=True) == store.get("sft@1")


def test_a_thinned_checkpoint_is_exported(tmp_path: Path) -> None:
    store, checkpointer, model, optimizer = trained(thin={"drop": ["optim.*"], "keep_last": 1})
    models = train(checkpointer, model, optimizer, 1.0, 2.0)
    with pytest.raises(MissingKey, match="thinned"):
        store.export("sft@0", tmp_path / "all.safetensors")
    store.export("sft@0", tmp_path / "model.safetensors", strip_prefix="model")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], models[0].weight)


@pytest.mark.parametrize("in_background", [False, True])
def test_rotation_removes_nothing_if_the_metric_of_a_rule_was_left_out(
    in_background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = f"left-out-{in_background}"
    checkpointer = Checkpointer(small(), run=run, keep={"keep_last": 1, "keep_best": "wer:min:1"})

    def save(step: int, metrics: Any) -> list[int]:
        if in_background:
            checkpointer.save_async(step, nn.Linear(1, 1), metrics=metrics).result()
        else:
            checkpointer.save(step, nn.Linear(1, 1), metrics=metrics)
        return [one.step for one in checkpointer.find_checkpoints()]

    assert [save(step, {"wer": torch.tensor([wer])}) for step, wer in ((1, 0.1), (2, 0.2), (3, 0.3))][-1] == [1, 3]
    assert save(4, {"wer": None, "loss": 1.0}) == [1, 3, 4]
    assert f"after the save of {run}@4 removes nothing, because a rule names 'wer'" in caplog.text
    assert caplog.text.count("leaves out the metrics: 'wer'") == 1
    assert save(5, {"loss": 1.0}) == [1, 5]
    assert save(6, {f"{number:03}": number for number in range(99)} | {"wer": 0.0}) == [6]
