"""Invalid arguments raise an error with advice before anything is read or changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import ForgottenWarning, Gone, InvalidInput, NotFound
from tests.support.repositories import memory
from tests.support.saves import small


@pytest.fixture
def saved() -> casckpt.Store:
    store = small(memory())
    store.save({"w": torch.arange(3.0)}, step=1)
    return store


@pytest.mark.parametrize(
    ("rename", "names"),
    [
        ({"(": "x"}, r"'\(' is not a regular expression"),
        ({5: "x"}, "5 is not a regular expression"),
        ({"w": r"\9"}, r"'\\\\9' is not a replacement for 'w'"),
        ({"w": 5}, "5 is not a replacement"),
        ([("a", "b")], "rename is a list"),
        (lambda key: None, "returns None for 'w'"),
    ],
)
def test_invalid_renames_are_rejected(saved: casckpt.Store, rename: Any, names: str) -> None:
    target = torch.zeros(3)
    with pytest.raises(InvalidInput, match=names):
        saved.load({"w": target}, "default@1", rename=rename)
    assert not target.any()


@pytest.mark.parametrize("keys", [5, [5], [b"w"]])
def test_invalid_patterns_of_keys_are_rejected(saved: casckpt.Store, keys: Any) -> None:
    with pytest.raises(InvalidInput, match="pass a list of patterns"):
        saved.read("default@1", keys=keys)


@pytest.mark.parametrize("frozen", ["w", 5, True, [5], b"w"])
def test_invalid_values_of_frozen_are_rejected(saved: casckpt.Store, frozen: Any) -> None:
    with pytest.raises(InvalidInput, match="pass a list of patterns, or a function"):
        saved.save({"w": torch.zeros(3)}, step=2, frozen=frozen)


@pytest.mark.parametrize("device", ["nonsense", None])
def test_the_names_of_unknown_devices_are_rejected(saved: casckpt.Store, device: Any) -> None:
    with pytest.raises(InvalidInput, match="is not valid: pass a device such as"):
        saved.read("default@1", device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_an_unavailable_device_is_rejected(saved: casckpt.Store) -> None:
    with pytest.raises(InvalidInput, match=r"cannot allocate 'w' .* on cuda"):
        saved.read("default@1", device="cuda")


@pytest.mark.parametrize("ref", [5, None, b"latest", ("default", 1)])
def test_values_that_are_not_references_are_rejected(saved: casckpt.Store, ref: Any) -> None:
    for call in (saved.get, saved.read, saved.forget, saved.verify, saved.restore, saved.__contains__):
        with pytest.raises(InvalidInput, match="a reference must be a str"):
            call(ref)


@pytest.mark.parametrize("given", [["a"], "a", [("a", b"")]])
def test_invalid_attachments_are_rejected(saved: casckpt.Store, given: Any) -> None:
    with pytest.raises(InvalidInput, match="attachments is a"):
        saved.save({}, step=2, attachments=given)


@pytest.mark.parametrize("duration", [-1, 7, "1", float("nan")])
@pytest.mark.parametrize("name", ["wait", "revoke_after", "min_age", "keep_within"])
def test_invalid_gc_durations_are_rejected(saved: casckpt.Store, name: str, duration: Any) -> None:
    """A negative revoke_after would revoke every save in progress, and a plain 7 may mean days."""
    with pytest.raises(InvalidInput, match=f"{name.replace('_', '-')}: .* is not a duration with a unit"):
        saved.gc(keep_last=1, **{name: duration})
    with pytest.raises(InvalidInput, match=name.replace("_", "-")):
        saved.gc(keep_last=1, dry_run=True, **{name: duration})  # a dry run also refuses what the real one would refuse


def test_steps_can_be_numpy_integers(saved: casckpt.Store) -> None:
    import numpy as np

    ckpt = saved.save({}, step=np.int64(7))  # type: ignore[arg-type]  # a training loop may well count so
    assert type(ckpt.step) is int
    assert saved.get("default@7").step == 7


def test_a_checkpoint_object_is_accepted_as_a_reference_everywhere(saved: casckpt.Store) -> None:
    ckpt = saved.get("default@1")
    assert saved.verify(ckpt).checked_checkpoints == 1
    saved.forget(ckpt)
    with pytest.raises(NotFound):
        saved.get("default@1")


def test_runs_are_listed_by_name(saved: casckpt.Store) -> None:
    saved.save({}, run="zoo", step=1)
    saved.save({}, run="away", step=1)
    saved.forget("away@1")
    assert saved.runs() == ["default", "zoo"]


def test_every_result_has_a_short_repr(saved: casckpt.Store) -> None:
    saved.save({"w": torch.zeros(3)}, step=2)
    ckpt = saved.get("default@1")
    assert repr(saved.gc(keep_last=1).forgotten) == f"(<Commit default@1 ({ckpt.id[:12]}), forgotten>,)"


def test_repair_accepts_the_path_of_a_second_store(tmp_path: Path) -> None:
    state = {"w": torch.arange(1000.0)}
    store, other = casckpt.open(tmp_path / "a"), casckpt.open(tmp_path / "b")
    for one in (store, other):
        one.save(state, step=1)
    (blob,) = (tmp_path / "a").rglob("*.safetensors")
    blob.unlink()
    assert store.verify().is_damaged
    assert not store.repair(tmp_path / "b").is_damaged
    assert not store.verify().is_damaged


def test_loading_a_forgotten_checkpoint_warns(saved: casckpt.Store) -> None:
    held = saved.get("default@1")
    id = held.id
    saved.read(id)
    saved.forget(id)
    for load in (lambda: saved.read(id), lambda: saved.load({"w": torch.zeros(3)}, held)):
        text = rf"default@1 \({id[:10]}.* was forgotten, so the next gc may purge"
        with pytest.warns(ForgottenWarning, match=text) as told:
            load()
        assert [one.filename for one in told] == [__file__]  # instead of a file of casckpt
    saved.restore(id)
    saved.read(id)


def test_using_a_handle_of_a_purged_checkpoint_raises_gone(saved: casckpt.Store) -> None:
    ckpt = saved.get("default@1")
    saved.save({"w": torch.zeros(3)}, step=2)
    saved.forget(ckpt)
    saved.gc(min_age=0)
    for call in (saved.read, lambda ref: saved.load({"w": torch.zeros(3)}, ref), saved.get, saved.verify, saved.forget):
        with pytest.raises(Gone, match="purged"):
            call(ckpt)
    assert ckpt not in saved


def test_a_checkpoint_object_of_a_different_store_is_rejected(saved: casckpt.Store) -> None:
    other = small(memory())
    other.save({"w": torch.zeros(3)}, step=5)
    (ckpt,) = other.checkpoints()
    assert ckpt not in saved
    for call in (saved.read, saved.verify, saved.forget):
        with pytest.raises(NotFound, match=f"no checkpoint {ckpt.id}"):
            call(ckpt)
    other.copy_to(saved, ckpt)
    assert saved.read(ckpt)["w"].tolist() == [0, 0, 0]
