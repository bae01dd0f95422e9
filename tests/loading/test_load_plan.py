from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import casckpt
from casckpt.base import text
from casckpt.contents import manifests
from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput, Mismatch, MissingKey
from casckpt.loading.options import LoadArguments, LoadOptions, MatchArguments, ReadArguments
from casckpt.saving import prepare
from casckpt.saving.options import SaveArguments, SaveOptions
from casckpt.store.store import Store
from tests.support.hints import Advice
from tests.support.ranks import Pool
from tests.support.saves import small


@pytest.mark.parametrize(
    ("call", "names", "options"),
    [
        ("save", SaveArguments, SaveOptions),
        ("load", LoadArguments, LoadOptions),
        ("read", ReadArguments, LoadOptions),
        ("pre_download", MatchArguments, LoadOptions),
    ],
)
def test_every_option_has_a_default_and_is_documented(call: str, names: Any, options: Any) -> None:
    described = inspect.getdoc(getattr(casckpt.Store, call)) or ""
    assert [name for name in names.__annotations__ if f"``{name}``" not in described] == []
    defaults = {one.name for one in fields(options) if one.default is not MISSING}
    assert names.__annotations__.keys() <= defaults


SEEN: dict[Any, Any] = {
    "a": 1,
    "b": 2.5,
    3: "x",
    "deep": {"n": 1, "t": [2, 3]},
    "counts": Counter("aab"),
    "raw": b"r" * 99_999,
}


@pytest.fixture(params=[3, 1000], ids=["a single object", "entry by entry"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store that contains `SEEN`, stored in either form. Loads are the same for both."""
    monkeypatch.setattr(prepare, "LARGE", request.param)
    found = small()
    found.save({"w": torch.ones(2), "train": {"seen": SEEN}}, step=1)
    return found


def keys(store: Store) -> list[str]:
    return Contents(manifests.get(store.repository, store.get("default@1").commit), 0).keys()


def test_a_mapping_of_many_plain_values_is_stored_as_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "LARGE", 3)
    store = small()
    few = {"a": 1, "b": 2}
    mixed = {"a": 1, "b": 2, "c": torch.ones(1)}
    store.save({"w": torch.ones(2), "many": dict(few, c=3), "few": few, "mixed": mixed, "x": 1}, step=1)
    assert sorted(keys(store)) == ["few.a", "few.b", "many", "mixed.a", "mixed.b", "mixed.c", "w", "x"]


def test_a_mapping_of_entries_is_read_exactly(store: Store) -> None:
    read = store.read("latest")["train"]["seen"]
    assert read == SEEN
    assert list(read) == list(SEEN)


def template(**seen: Any) -> dict[str, Any]:
    return {"w": torch.zeros(2), "train": {"seen": seen}}


def test_a_template_with_the_same_entries_is_filled_in_place(store: Store) -> None:
    held: dict[Any, Any] = {"a": 0, "b": 0, 3: "", "deep": {"n": 0, "t": []}, "counts": Counter(), "raw": b""}
    into = {"w": torch.zeros(2), "train": {"seen": held}}
    deep = held["deep"]
    store.load(into, "latest")
    assert held == SEEN
    assert into["train"] == {"seen": SEEN}
    assert held["deep"] is deep


def test_a_template_with_some_of_the_entries_is_filled_and_the_rest_is_logged(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "known", set())
    into = template(a=0, deep={"n": 0})
    store.load(into, "latest")
    assert into["train"]["seen"] == {"a": 1, "deep": {"n": 1}}
    for key in ("train.seen.b", "train.seen.3", "train.seen.deep.t"):
        assert repr(key) in caplog.text


def test_an_entry_that_the_checkpoint_lacks_is_reported_as_missing(store: Store) -> None:
    into = template(a=0, deep={"n": 0, "m": 5}, z=7)
    with pytest.raises(MissingKey, match=r"lacks 'train\.seen\.(deep\.m|z)'"):
        store.load(into, "latest", unread="ignore")
    assert into["train"]["seen"] == {"a": 0, "deep": {"n": 0, "m": 5}, "z": 7}
    loaded = store.load(into, "latest", unread="ignore", strict=False)
    assert into["train"]["seen"] == {"a": 1, "deep": {"n": 1, "m": 5}, "z": 7}
    assert set(loaded.missing_keys) == {"train.seen.deep.m", "train.seen.z"}


def test_an_empty_mapping_is_not_a_template_for_entries(store: Store) -> None:
    with pytest.raises(Mismatch, match=r"'train\.seen' is an empty mapping here, but default@1 has 'train\.seen\.a'"):
        store.load(template(), "latest")
    into: dict[str, Any] = {"w": torch.zeros(2), "train": {"seen": None}}
    store.load(into, "latest")
    assert into["train"]["seen"] == SEEN


def test_a_mapping_and_a_value_do_not_match(store: Store) -> None:
    for seen in ({"a": {"x": 1}}, {"deep": 1}):
        with pytest.raises((Mismatch, MissingKey)):
            store.load(template(**seen), "latest", unread="ignore")
    fixed = {"w": torch.zeros(2), "train": {"seen": MappingProxyType({"a": 0})}}
    with pytest.raises(InvalidInput, match="cannot be modified"):
        store.load(fixed, "latest", unread="ignore")


def test_a_mapping_of_entries_can_be_renamed(store: Store) -> None:
    into = {"w": torch.zeros(2), "ids": {"a": 0}}
    store.load(into, "latest", rename=lambda key: key.replace("ids", "train.seen"), unread="ignore")
    assert into["ids"] == {"a": 1}


@pytest.mark.parametrize(
    "rename",
    [
        {r"ids\.(.*)": r"train.seen.\1"},
        {r"ids\.a": "train.seen.b", "ids": "train.seen"},
        {r"ids\.deep\.n": "train.seen.a", "ids": "train.seen"},
    ],
)
def test_renaming_individual_entries_is_rejected(rename: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "LARGE", 3)
    store = small()
    store.save({"w": torch.ones(2), "train": {"seen": SEEN}}, step=1)
    into: dict[str, Any] = {"w": torch.zeros(2), "ids": {"a": 0, "deep": {"n": 0}}}
    with pytest.raises(InvalidInput):
        store.load(into, "latest", rename=rename, strict=False, unread="ignore")
    with pytest.raises(InvalidInput, match=r"rename returns 'train\.seen") as refused:
        store.load(into, "latest", rename=rename, unread="ignore")
    advice = Advice(str(refused.value))
    assert into["ids"] == {"a": 0, "deep": {"n": 0}}
    assert store.read("latest", **advice.argument("keys"))["train"]["seen"]["a"] == 1
    store.load(into, "latest", **advice.argument("rename"), unread="ignore")
    assert into["ids"] == {"a": 1, "deep": {"n": 1}}


def saving(rank: int, size: int, where: str) -> Any:
    """Each rank has its own entries."""
    prepare.LARGE = 3
    store = casckpt.open(where)
    try:
        store.save({"w": torch.ones(2), "seen": {f"{rank} {number}": number for number in range(5)}}, step=1)
    finally:
        prepare.LARGE = 10_000
    return len(store.read("latest")["seen"])


def test_entries_of_several_ranks_are_merged(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(2, saving, str(tmp_path)) == [10, 10]
