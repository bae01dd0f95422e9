"""Damaged and hostile ``.metadata`` files cause an error, and no code runs."""

from __future__ import annotations

import pathlib
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

import casckpt
from casckpt.errors import CasckptError, Refused
from casckpt.frontends.dcp import dcp_to_casckpt
from tests.support.dcp import save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that DCP wrote."""
    save({"a": torch.ones(4, 2), "b": {"c": 1}}, FileSystemWriter(tmp_path / "in"))
    return tmp_path / "in"


def twin() -> Any:
    """Return an object of a different type that has a chunk's attributes."""
    made = MetadataIndex("a")
    vars(made).update(offsets=torch.Size([0, 0]), sizes=torch.Size([4, 2]))
    return made


class Missing:
    """Marks an attribute to delete."""


PLACES: dict[str, Callable[[Any], Any]] = {
    "metadata": lambda found: found,
    "tensor": lambda found: found.state_dict_metadata["a"],
    "properties": lambda found: found.state_dict_metadata["a"].properties,
    "chunk": lambda found: found.state_dict_metadata["a"].chunks[0],
    "place": lambda found: next(iter(found.storage_data.values())),
}


SPOILT: dict[tuple[str, str], tuple[Any, ...]] = {
    ("metadata", "state_dict_metadata"): (Missing, None, [1], {1: 2}, {"a": 1}, {"a": None}),
    ("metadata", "storage_data"): ({}, [1], {1: 2}, {MetadataIndex("a"): 3}, "x"),
    ("tensor", "size"): (Missing, None, 4, *map(torch.Size, ([4], [4, 2, 1], [2, 2], [1 << 60, 2]))),
    ("tensor", "chunks"): (Missing, None, 5, "ab", [1], [None], [twin()]),
    ("tensor", "properties"): (Missing, None, "x"),
    ("properties", "dtype"): ("x", None),
    ("chunk", "sizes"): (Missing, None, 3, torch.Size([4]), torch.Size([5, 2]), [4, 2]),
    ("chunk", "offsets"): (Missing, None, torch.Size([1, 0])),
    ("place", "relative_path"): (Missing, None, 3, "../x", "/x"),
    ("place", "offset"): (Missing, None, "1", -5, 1 << 80),
    ("place", "length"): (Missing, None, 1.5, -5, 1),
}
"""For each object, the attributes to change and the values to set."""


@pytest.mark.parametrize(("what", "name"), SPOILT)
def test_invalid_metadata_raises_an_error(store: casckpt.Store, folder: Path, what: str, name: str) -> None:
    good = (folder / ".metadata").read_bytes()
    for value in SPOILT[what, name]:
        found = pickle.loads(good)
        held = vars(PLACES[what](found))
        if value is Missing:
            del held[name]
        else:
            held[name] = value
        (folder / ".metadata").write_bytes(pickle.dumps(found))
        with pytest.raises(CasckptError):
            dcp_to_casckpt(folder, store, step=1)
    assert not Path(store.url).exists() or store.checkpoints() == []


def test_invalid_metadata_raises_an_error_even_if_pickles_are_allowed(store: casckpt.Store, folder: Path) -> None:
    for data in (b"", b"\x80\x02R.", pickle.dumps(SavePlan([])), pickle.dumps({"state_dict_metadata": {}})):
        (folder / ".metadata").write_bytes(data)
        with pytest.raises(Refused, match=r"\.metadata"):
            dcp_to_casckpt(folder, store, step=1, allow_pickle=True)


def test_a_set_in_metadata_can_contain_only_strings_and_numbers(store: casckpt.Store, folder: Path) -> None:
    """Python calls the ``__hash__`` of every member of a set, so other members could run code."""
    found = pickle.loads((folder / ".metadata").read_bytes())
    for member, is_read in ((3, True), (torch.Size([3]), False)):
        found.planner_data = {"a": ("a",), "b.c": ("b", "c"), "x": {member}}
        (folder / ".metadata").write_bytes(pickle.dumps(found, protocol=3))
        with nullcontext() if is_read else pytest.raises(Refused, match="it has a set whose items"):
            dcp_to_casckpt(folder, store, step=1)


def test_a_folder_that_python_3_13_wrote_is_imported(
    store: casckpt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pathlib._local", pathlib)
        patch.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
        save({"a": torch.ones(4, 2)}, FileSystemWriter(tmp_path / "in"))
    assert b"pathlib._local" in (tmp_path / "in" / ".metadata").read_bytes()
    dcp_to_casckpt(tmp_path / "in", store, step=1)
    assert torch.equal(store.read("default@1")["a"], torch.ones(4, 2))


def test_tiny_hostile_metadata_does_not_allocate_memory(store: casckpt.Store, folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")
    with pytest.raises(Refused, match=r"\.metadata is not valid"):
        dcp_to_casckpt(folder, store, step=1)
