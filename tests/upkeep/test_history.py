"""The bytes that each checkpoint added, and why it added them. Damage does not hide other checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import casckpt
from casckpt.contents import blobs
from casckpt.store.store import Store
from casckpt.upkeep.history import group, heat, history, layer_of, summed

SIZE = 4 * 4096


@pytest.fixture
def store(store_path: Path) -> Store:
    return casckpt.open(store_path)


def save(store: Store, step: int, run: str = "a", **layers: float) -> None:
    model = {"layers": {name[1:]: torch.full((4096,), value) for name, value in layers.items()}}
    store.save({"model": model}, run=run, step=step)


def test_each_checkpoint_is_listed_with_the_bytes_that_it_added(store: Store) -> None:
    save(store, 1, _0=0.5, _1=1.5)
    save(store, 2, _0=0.5, _1=2.5)
    save(store, 3, _0=0.5, _1=2.5)
    save(store, 1, run="b", _0=0.5, _1=9.5)
    found = history(store.repository, ["a", "b"]).added
    assert [one.why for one in found] == [
        "all of it was new", "changed: model 16.0 KiB", "nothing changed", "16.0 KiB of it was already stored",
    ]  # fmt: skip
    assert found[0].bytes_added >= 2 * SIZE
    assert SIZE <= found[1].bytes_added < 2 * SIZE
    assert found[2].bytes_added == 0
    assert sum(one.bytes_added for one in found) == store.stats().bytes_blobs


def test_the_heat_of_a_layer_is_the_fraction_of_it_that_changed(store: Store) -> None:
    save(store, 1, _0=0.5, _1=1.5)
    save(store, 2, _0=0.5, _1=2.5)
    save(store, 3, _0=3.5, _1=2.5)
    found = heat(store.repository, history(store.repository, ["a"]).added)
    assert found is not None
    assert (found.layers, found.steps) == (["model.layers.0", "model.layers.1"], [2, 3])
    assert found.shares == [[0.0, 1.0], [1.0, 0.0]]


def test_only_the_newest_checkpoints_of_the_named_runs_are_compared(store: Store) -> None:
    for step in range(1, 6):
        save(store, step, _0=float(step))
    save(store, 1, run="b", _0=1.0)
    save(store, 2, run="b", _0=2.0)
    found = history(store.repository, ["a"], looked_at=2).added
    assert [(one.commit.run, one.commit.step) for one in found if one.changed is not None] == [("a", 4), ("a", 5)]
    assert heat(store.repository, [one for one in found if one.commit.run == "b"]) is None


def test_a_forgotten_checkpoint_is_hidden_but_its_bytes_still_count(store: Store) -> None:
    save(store, 1, _0=0.5)
    save(store, 2, _0=0.5)
    store.forget("a@1")
    found = history(store.repository, ["a"]).added
    assert [(one.commit.step, one.bytes_added) for one in found] == [(2, 0)]


def test_blobs_marked_as_damaged_are_listed(store: Store) -> None:
    save(store, 1, _0=0.5)
    commit = store.get("a@1").commit
    [(uploader, blob, _)] = casckpt.contents.manifests.blobs_of(store.repository, commit)
    blobs.mark_damaged(store.repository, uploader, blob, "a test")
    assert history(store.repository, ["a"]).damaged == [blob]


def test_an_unreadable_manifest_does_not_hide_other_checkpoints(store: Store, store_path: Path) -> None:
    for step in (1, 2, 3):
        save(store, step, _0=float(step))
    manifest = next(store_path.rglob(f"objects/**/{store.get('a@2').id}*"))
    manifest.unlink()
    found = history(casckpt.open(store_path).repository, ["a"]).added
    assert [one.commit.step for one in found] == [1, 2, 3]
    assert found[1].changed is None


KEYS = st.lists(
    st.lists(st.sampled_from(["model", "layers", "3", "17", "weight", "", "x"]), min_size=1, max_size=6).map(".".join),
    unique=True,
)


@pytest.mark.parametrize(
    ("key", "width", "expected"),
    [
        ("model.layers.3.attn.weight", 1, "model.layers.3"),
        ("model.layers.7.attn.weight", 4, "model.layers.4-7"),
        ("model.embed.weight", 1, "model.embed"),
        ("step", 1, "step"),
        ("0.weight", 1, "0"),
        ("train.0.rng", 1, "train.0"),
    ],
)
def test_a_layer_name_ends_at_the_first_number(key: str, width: int, expected: str) -> None:
    assert layer_of(key, width) == expected


def test_neighboring_layers_share_a_group_if_there_are_many_layers() -> None:
    found = group([f"model.layers.{n}.weight" for n in range(100)], most=40)
    assert found["model.layers.5.weight"] == "model.layers.4-7"
    assert len(set(found.values())) == 25


def test_names_without_numbers_are_shortened() -> None:
    found = group([f"a.{name}.w.x" for name in "bcdefgh"], most=3)
    assert set(found.values()) == {"a"}
    assert set(group([f"{name}.w" for name in "bcdefgh"], most=3).values()) == {"b", "c", "..."}


@given(KEYS, st.integers(1, 8))
def test_every_key_belongs_to_one_of_a_few_groups(keys: list[str], most: int) -> None:
    found = group(keys, most)
    assert list(found) == keys
    assert len(set(found.values())) <= most


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 2**40)))
def test_the_groups_together_contain_every_byte(nbytes: dict[str, int]) -> None:
    assert sum(summed(nbytes, group(nbytes)).values()) == sum(nbytes.values())
