"""Advice about gc, copies, mirrors, thinning and repair."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import Conflict, Damaged, InvalidInput, MissingKey, NotFound, StorageError, Unsupported
from casckpt.history.transactions import begin
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from casckpt.upkeep.copies.mirror import Mirror
from casckpt.upkeep.doctor import examine
from tests.hints.conftest import Run, changed_blob
from tests.repository.test_exclusive import Ignoring
from tests.support.hints import Advice, Messages, follows

STATE = {"model": {"w": torch.arange(6.0)}, "optim": {"m": torch.ones(6)}}


@pytest.fixture
def trained(store: Store) -> Store:
    """A store with a model and an optimizer as a@1 and a@2."""
    for step in (1, 2):
        store.save({**STATE, "step": torch.tensor([float(step)])}, run="a", step=step)
    return store


# records that cannot be read


def spoil(path: Path) -> Callable[[], int]:
    """Damage a file, and return a function that restores it."""
    before = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(b"not a record")
    return lambda: path.write_bytes(before)


@follows("upkeep/saves.py:why_foreign", "and … more (`casckpt verify` lists them)")
@follows("upkeep/saves.py:why_foreign", "came from another store, whose files were put into this one")
def test_gc_can_run_after_checkpoints_of_another_store_are_copied_out_and_forgotten(
    trained: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    other = casckpt.open(store_path.with_name("other"))
    for step in (2, 3):
        other.save({"w": torch.ones(step)}, run="a", step=step)
    shutil.copytree(store_path.with_name("other"), store_path, copy_function=_copy_new, dirs_exist_ok=True)
    with messages.error(Damaged) as advice:
        trained.gc(keep_last=1)
    ids = [one.id for one in other.checkpoints()]
    assert torch.equal(trained.read(ids[1])["w"], torch.ones(3))
    for id in ids:
        assert id[:12] in run(*advice.command("verify"), store_path, status=4).output
    own = store_path.with_name("own")
    for id in ids:
        run(*advice.command("copy", STORE=store_path, DST=own, ID=id))
        run(*advice.command("forget", STORE=store_path, ID=id))
    assert [one.step for one in trained.gc(keep_last=1).forgotten] == [1]
    assert [one.step for one in casckpt.open(own).gc(keep_last=1).forgotten] == [2]


def _copy_new(source: str, target: str) -> None:
    if not Path(target).exists():
        shutil.copy2(source, target)


@follows("upkeep/saves.py:about_unreadable", "give up the checkpoint with `casckpt transactions STORE")
@pytest.mark.parametrize("way", ["put back", "give up"])
def test_gc_can_run_after_a_record_is_replaced_or_purged(
    trained: Store, store_path: Path, messages: Messages, run: Run, way: str
) -> None:
    put_back = spoil(min((store_path / "commits").iterdir()))
    with messages.error(Damaged) as advice:
        casckpt.open(store_path).gc()
    if way == "give up":
        run(*advice.command("transactions", STORE=store_path))
    else:
        advice.says("Restore the file")
        put_back()
    casckpt.open(store_path).gc()
    assert [one.step for one in casckpt.open(store_path).checkpoints()] == ([2] if way == "give up" else [1, 2])


@follows("upkeep/saves.py:about_unreadable", "first `casckpt copy STORE OTHER REF`, and afterwards")
def test_a_checkpoint_with_an_unreadable_note_is_kept_if_the_advice_is_followed(
    trained: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    first = trained.checkpoints()[0]
    trained.tag("best", first)
    (note,) = (path for path in (store_path / "commits").iterdir() if path.suffix == ".1")
    spoil(note)
    with messages.error(Damaged) as advice:
        casckpt.open(store_path).gc()
    other = store_path.with_name("other")
    assert first.id[:12] in run("list", store_path).output
    run(*advice.command("copy", STORE=store_path, OTHER=other, REF=first.id))
    run(*advice.command("transactions", STORE=store_path))
    run(*Advice(advice.message.partition("back: ")[2]).command("copy", STORE=store_path, OTHER=other, REF=first.id))
    casckpt.open(store_path).gc()
    assert [one.step for one in casckpt.open(store_path).checkpoints()] == [1, 2]


@follows("upkeep/saves.py:", "copy them back: `casckpt copy MIRROR STORE`")
@follows("upkeep/saves.py:", "repeat the copy, which brings the records")
@follows("upkeep/saves.py:check_recorded", "Only if nothing has them, give up their checkpoints for good")
@pytest.mark.parametrize("way", ["put back", "repeat", "copy", "give up"])
def test_gc_can_run_after_lost_records_are_replaced_or_revoked(
    trained: Store, store_path: Path, messages: Messages, run: Run, way: str
) -> None:
    mirror = store_path.with_name("mirror")
    trained.copy_to(mirror)
    lost = min((store_path / "commits").iterdir())
    name = lost.name
    lost.rename(store_path.with_name(name))
    with messages.error(Damaged) as advice:
        casckpt.open(store_path).gc()
    if way == "give up":
        run(*advice.command("transactions", STORE=store_path, TXID=name))
    elif way == "copy":
        run(*advice.command("copy", MIRROR=mirror, STORE=store_path))
    else:
        advice.says("Restore commits/" if way == "put back" else "repeat the copy")
        store_path.with_name(name).rename(lost)
    casckpt.open(store_path).gc()
    assert [one.step for one in casckpt.open(store_path).checkpoints()] == ([2] if way == "give up" else [1, 2])


@follows("upkeep/copies/copy.py:_unread", "Restore the record from a copy of …; `casckpt verify` shows the details")
def test_an_unreadable_record_can_be_replaced_before_a_copy(
    trained: Store, store_path: Path, tmp_path: Path, messages: Messages, run: Run
) -> None:
    record = min((store_path / "commits").iterdir())
    put_back = spoil(record)
    advice = messages.text(run("copy", store_path, tmp_path / "copy", status=4).output)
    assert record.name in run(*advice.command("verify"), store_path, status=4).output
    advice.says("Restore the record")
    put_back()
    run("copy", store_path, tmp_path / "copy")
    assert [one.step for one in casckpt.open(tmp_path / "copy").checkpoints()] == [1, 2]


@follows("upkeep/saves.py:give_up", "with an unreadable record; `casckpt verify STORE` lists such transactions")
@follows("upkeep/saves.py:give_up", "`casckpt forget` hides its checkpoint")
def test_verify_names_lost_checkpoints_and_readable_ones_can_be_forgotten(
    trained: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    first = trained.get("a@1").commit.txid
    with messages.error(Conflict) as advice:
        trained.give_up(first)
    run(*advice.command("forget"), store_path, "a@1")
    assert [one.step for one in trained.checkpoints()] == [2]
    trained.restore(first_id(trained))
    spoil(store_path / "commits" / first)
    with messages.error(NotFound) as advice:
        trained.give_up(first.replace("Z-", "Z-0")[: len(first)])
    output = run(*advice.command("verify", STORE=store_path), status=4).output
    named = next(word for word in output.replace("/", " ").replace(":", " ").split() if word == first)
    trained.give_up(named)
    assert [one.step for one in casckpt.open(store_path).checkpoints()] == [2]


def first_id(store: Store) -> str:
    return next(one.id for one in store.checkpoints(forgotten=True) if one.step == 1)


@follows("upkeep/saves.py:revoke_save", "`casckpt transactions STORE` lists")
@follows("upkeep/saves.py:revoke_save", "`casckpt list STORE` shows whether it was committed")
def test_the_suggested_list_shows_a_save_in_progress(
    trained: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    ended = trained.get("a@1").commit.txid
    save = begin(trained.repository, "a", 3)
    save.leave()  # its thread would otherwise live until the next collection of garbage
    with messages.error(Conflict) as advice:
        trained.revoke(ended)
    assert trained.get("a@1").id[:12] in run(*advice.command("list", STORE=store_path)).output
    with messages.error(NotFound) as advice:
        trained.revoke(save.txid[:-1] + ("1" if save.txid.endswith("0") else "0"))
    listed = run(*advice.command("transactions", STORE=store_path)).output.split()
    trained.revoke(next(word for word in listed if word == save.txid))
    assert trained.transactions() == []


# forgetting and thinning


@follows("upkeep/gc/forgetting.py:plan_forget", "delete the tags, or pass --tagged (tagged=True)")
@pytest.mark.parametrize("way", ["untag", "tagged", "--tagged"])
def test_a_tagged_checkpoint_can_be_forgotten_after_or_together_with_its_tag(
    trained: Store, store_path: Path, messages: Messages, run: Run, way: str
) -> None:
    trained.tag("best", "a@1")
    with messages.error(Conflict) as advice:
        trained.forget("a@1")
    if way == "untag":
        advice.says("delete the tags")
        trained.untag("best")
        trained.forget("a@1")
    elif way == "tagged":
        trained.forget("a@1", **advice.argument("tagged"))
    else:
        run("forget", store_path, "a@1", advice.says(way))
    assert [one.step for one in trained.checkpoints()] == [2]


def is_thinned(store: Store) -> bool:
    """Report whether a@1 holds only its model."""
    with pytest.raises(MissingKey, match="it was thinned"):
        store.read("a@1", keys=["optim.*"])
    return torch.equal(store.read("a@1", keys=["model.*"])["model"]["w"], STATE["model"]["w"])


@follows("upkeep/thin.py:_check_untagged", "and then pass --tagged (tagged=True)")
@pytest.mark.parametrize("way", ["tagged", "--tagged"])
def test_the_suggested_option_thins_a_tagged_checkpoint(
    trained: Store, store_path: Path, messages: Messages, run: Run, way: str
) -> None:
    trained.tag("best", "a@1")
    with messages.error(Conflict) as advice:
        trained.thin("a@1", drop="optim.*")
    if way == "tagged":
        trained.thin("a@1", drop="optim.*", **advice.argument("tagged"))
    else:
        run("thin", store_path, "a@1", "--drop", "optim.*", advice.says(way))
    assert is_thinned(trained)


@follows("upkeep/thin.py:_plan_one", "forget it instead (`casckpt forget`)")
def test_a_checkpoint_can_be_forgotten_instead_of_dropping_all_its_keys(
    trained: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    with messages.error(InvalidInput) as advice:
        trained.thin("a@1", drop="*")
    run(*advice.command("forget"), store_path, "a@1")
    assert [one.step for one in trained.checkpoints()] == [2]


@follows("upkeep/thin.py:check", "`casckpt show --tensors` lists keys")
def test_a_pattern_to_drop_can_be_chosen_from_the_listed_keys(
    trained: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    with messages.error(MissingKey) as advice:
        trained.thin("a@1", drop="optimizer.*")
    keys = run(*advice.command("show"), store_path, "a@1").output.split()
    trained.thin("a@1", drop=next(key for key in keys if key.startswith("optim")))
    assert is_thinned(trained)


# storages


@follows("upkeep/gc/gc.py:_check_storage", "stop all saves, then open the store with single_writer")
@follows("upkeep/doctor.py:_creates", "allow only one writer at a time with single_writer (--single-writer)")
def test_gc_works_on_storage_that_replaces_objects_if_there_is_a_single_writer(
    tmp_path: Path, messages: Messages
) -> None:
    storage = Ignoring()
    Store(Repository(storage, tmp_path / "cache", single_writer=True)).save({"x": 1}, run="a", step=1)
    findings = list(examine(Repository(storage, tmp_path / "other")))
    advice = messages.text("".join(str(one) for one in findings))
    advice.says("single_writer (--single-writer)")
    with messages.error(Unsupported) as advice:
        Store(Repository(storage, tmp_path / "other")).gc()
    alone: Any = {advice.says("single_writer"): True}
    Store(Repository(storage, tmp_path / "other", **alone)).gc()


# copies


@follows(
    "upkeep/copies/replication.py:_damaged_blob", "Run `casckpt verify` and `casckpt repair` on that store, then copy"
)
def test_a_damaged_source_can_be_repaired_before_it_is_copied(
    trained: Store, store_path: Path, tmp_path: Path, messages: Messages, run: Run
) -> None:
    shutil.copytree(store_path, tmp_path / "backup")
    changed_blob(store_path)
    advice = messages.text(run("copy", store_path, tmp_path / "copy", status=4).output)
    run(*advice.command("verify"), store_path, status=4)
    run(*advice.command("repair"), store_path, "--from", tmp_path / "backup")
    advice.says("then copy again")
    run("copy", store_path, tmp_path / "copy")
    assert [one.step for one in casckpt.open(tmp_path / "copy").checkpoints()] == [1, 2]


@follows("upkeep/copies/replication.py:taken", "If you do not need it, forget it there first (`casckpt forget`)")
def test_a_checkpoint_that_blocks_a_copy_can_be_forgotten(
    trained: Store, store_path: Path, tmp_path: Path, messages: Messages, run: Run
) -> None:
    other = casckpt.open(tmp_path / "other")
    other.save({"x": 5}, run="a", step=1)
    advice = messages.text(run("copy", store_path, tmp_path / "other", status=5).output)
    run(*advice.command("forget"), tmp_path / "other", "a@1")
    run("copy", store_path, tmp_path / "other")
    assert other.get("a@1").id == trained.get("a@1").id


@follows("upkeep/copies/mirror.py:Mirror.wait", "the next `casckpt.open` of the store continues the copies")
def test_the_next_program_continues_a_late_mirror(
    store_path: Path, tmp_path: Path, messages: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, may_end, attempt = tmp_path / "mirror", threading.Event(), Mirror._attempt

    def slow(self: Mirror, state: Any) -> Any:
        may_end.wait(60)
        return attempt(self, state)

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_attempt", slow)
        store = casckpt.open(store_path, mirror=mirror)
        store.save({"x": 1}, run="a", step=1)
        with messages.error(StorageError) as advice:
            store.wait_for_mirror(timeout=0.01)
        may_end.set()
        store.wait_for_mirror()
    store.save({"x": 2}, run="a", step=2)
    advice.says("casckpt.open")
    casckpt.open(store_path, mirror=mirror).wait_for_mirror()
    assert [one.step for one in casckpt.open(mirror).checkpoints()] == [1, 2]


@pytest.fixture
def mirrored(store_path: Path, tmp_path: Path) -> Path:
    """The mirror of a store with a@1 to a@3, of which the first is forgotten."""
    mirror = tmp_path / "mirror"
    store = casckpt.open(store_path, mirror=mirror)
    for step in (1, 2, 3):
        store.save({"x": torch.ones(step)}, run="a", step=step)
    store.wait_for_mirror()
    store.forget("a@1")
    store.wait_for_mirror()
    return mirror


@follows(
    "upkeep/saves.py:check_settings", "make the settings again, for example `casckpt settings STORE --set mirror=URL`"
)
@pytest.mark.parametrize("way", ["put back", "set"])
def test_lost_settings_can_be_replaced_or_set_again_as_advised(
    mirrored: Path, store_path: Path, messages: Messages, run: Run, way: str
) -> None:
    settings = store_path / "settings"
    settings.rename(store_path.with_name("settings"))
    with messages.error(Damaged) as advice:
        casckpt.open(store_path).gc(min_age=0)
    if way == "put back":
        advice.says("Restore it from a copy of the store")
        store_path.with_name("settings").rename(settings)
    else:
        run(
            *(
                word.replace("STORE", str(store_path)).replace("URL", str(mirrored))
                for word in advice.command("settings")
            )
        )
    assert [one.step for one in casckpt.open(store_path).gc(min_age=0).purged] == [1]


@follows(
    "upkeep/gc/purge.py:without_unmirrored",
    "Mount its disk, check the network and the credentials, or restore the mirror; `casckpt copy` fills a new mirror",
)
@pytest.mark.parametrize("way", ["put back", "copy", "unset"])
def test_a_lost_mirror_can_be_restored_refilled_or_unset_as_advised(
    mirrored: Path, store_path: Path, messages: Messages, run: Run, way: str
) -> None:
    mirrored.rename(mirrored.with_name("elsewhere"))
    with messages.log() as advice:
        assert casckpt.open(store_path).gc(min_age=0).purged == ()
    if way == "put back":
        advice.says("restore the mirror")
        mirrored.with_name("elsewhere").rename(mirrored)
    elif way == "copy":
        run(*advice.command("copy"), store_path, mirrored)
    else:
        run(*advice.command("settings"))
    purged = [one.step for one in casckpt.open(store_path).gc(min_age=0).purged]
    assert purged == ([] if way == "copy" else [1])  # a copy fills the mirror with visible checkpoints


@follows("upkeep/repair/verify.py:_check_arguments", "pass mode='full', or omit decode")
@follows("upkeep/repair/verify.py:_check_arguments", "pass mode='full' or mode='exists'")
def test_contradictory_options_of_verify_can_be_corrected_as_advised(trained: Store, messages: Messages) -> None:
    with messages.error(InvalidInput) as advice:
        trained.verify(mode="exists", decode=True)
    assert not trained.verify(decode=True, **advice.argument("mode")).is_damaged
    advice.says("omit decode")
    assert not trained.verify(mode="exists").is_damaged
    with messages.error(InvalidInput) as advice:
        trained.verify(mode="all")  # type: ignore[arg-type]
    advice.says("pass mode='full' or mode='exists'")
    for mode in ("full", "exists"):
        assert not trained.verify(mode=mode).is_damaged
