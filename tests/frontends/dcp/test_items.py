"""Values of a DCP plan, stored as tensors, as plain data or as the planner's bytes."""

from __future__ import annotations

import enum
import hashlib
import io
import json
import logging
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

import casckpt
from casckpt.contents import manifests
from casckpt.errors import InvalidInput
from casckpt.frontends.dcp import StorageReader, StorageWriter, casckpt_to_dcp, dcp_to_casckpt
from tests.support.dcp import PLAIN, causes, failure, load, save, zeros
from tests.support.exact import same
from tests.support.together import numbers

Store = casckpt.Store
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Bytes(DefaultSavePlanner):
    """A planner that changes the bytes of torch.save with `made`. ``given`` contains the changed bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, bytes] = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        found: Any = super().resolve_data(write_item)
        if write_item.type != WriteItemType.BYTE_IO:
            return found
        data = self.given[write_item.index.fqn] = self.made(found.getvalue())
        return io.BytesIO(data)

    def made(self, data: bytes) -> bytes:
        return data


class Signed(Bytes):
    def made(self, data: bytes) -> bytes:
        return data + hashlib.sha256(data).digest()


class Recorded(Bytes):
    """A file with an additional record in the archive."""

    def made(self, data: bytes) -> bytes:
        stream = io.BytesIO(data)
        with zipfile.ZipFile(stream, "a") as archive:
            archive.writestr("archive/signature", hashlib.sha256(data).digest())
        return stream.getvalue()


class Older(Bytes):
    """A file without the records that older versions of torch do not write."""

    def made(self, data: bytes) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(stream, "w") as old:
            for name in archive.namelist():
                if "/." not in name:
                    old.writestr(name, archive.read(name))
        return stream.getvalue()


class Got(DefaultLoadPlanner):
    """A planner that keeps the bytes that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.got: dict[str, bytes] = {}

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.got[read_item.dest_index.fqn] = value.getvalue()


STATE: dict[str, Any] = {
    "step": 7, "lr": 0.5, "zero": 0.0, "minus": -0.0, "name": "adam" * 3, "betas": (0.9, 0.95),
    "names": ["a", "a", ("b", "b")], "pair": (torch.arange(3000.0), 1), "slice": (torch.arange(9.0)[::2],),
}  # fmt: skip


def is_state(found: Any) -> bool:
    tensors = all(torch.equal(found[key][0], STATE[key][0]) for key in ("pair", "slice"))
    return tensors and all(same(found[key], STATE[key]) for key in STATE if key not in ("pair", "slice"))


def pickled(store: Store, ref: str) -> set[str]:
    return {one.key for one in manifests.get(store.repository, store.get(ref).commit).body.objects if one.pickled}


@pytest.mark.parametrize("kind", [Bytes, Signed, Recorded, Older])
def test_a_planner_receives_its_own_bytes(store: Store, kind: type[Bytes]) -> None:
    planner, got = kind(), Got()
    save(STATE, StorageWriter(store, step=1), planner=planner)
    load(dict(STATE), StorageReader(store, "default@1"), planner=got)
    assert got.got == planner.given
    assert is_state(store.read("default@1"))
    save(STATE, StorageWriter(store, step=2), planner=kind())
    assert store.get("default@2").stats.bytes_written == 0


def test_values_of_a_planner_with_methods_of_its_own_are_stored_as_its_bytes(store: Store) -> None:
    save(STATE, StorageWriter(store, step=1), planner=Bytes())
    assert pickled(store, "default@1") == STATE.keys()
    found = load(dict.fromkeys(STATE), StorageReader(store, "default@1"))  # they need no allow_pickle
    assert is_state(found)


@pytest.mark.parametrize("kind", [Signed, Recorded])
def test_planner_bytes_survive_an_import_and_an_export(store: Store, tmp_path: Path, kind: type[Bytes]) -> None:
    planner, got = kind(), Got()
    save(STATE, FileSystemWriter(tmp_path / "old"), planner=planner)
    dcp_to_casckpt(tmp_path / "old", store, step=1)
    casckpt_to_dcp(store, "default@1", tmp_path / "new")
    load(dict(STATE), FileSystemReader(tmp_path / "new"), planner=got)
    assert got.got == planner.given


def test_an_import_converts_data_written_by_torch_to_plain_data(store: Store, tmp_path: Path) -> None:
    """The data is converted even if the current torch would write it differently, because only torch reads it."""
    save(STATE, FileSystemWriter(tmp_path / "old"), planner=Older())
    dcp_to_casckpt(tmp_path / "old", store, step=1)
    assert pickled(store, "default@1") == set()
    assert is_state(store.read("default@1"))


class Kind(enum.IntEnum):
    ONE = 1


class Pair(NamedTuple):
    one: int
    other: int


def test_values_that_the_default_planner_pickles_are_logged_once(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    state = STATE | {"cfg": {"kind": Kind.ONE}, "moves": Pair(1, 2)}
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            save(state, StorageWriter(store, step=step))
    (said,) = (text for text in caplog.messages if "pickle" in text)
    assert "stored as pickles: 'cfg.kind', 'moves'. " in said
    assert pickled(store, "default@2") == {"cfg.kind", "moves"}


class Boxed(Bytes):
    """Objects as Megatron keeps them, each in a list."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        stream = io.BytesIO()
        torch.save([self.state_dict[write_item.index.fqn]], stream)
        return stream


@pytest.mark.parametrize("allow_pickle", [True, False])
def test_megatron_objects_are_exported_unchanged(store: Store, tmp_path: Path, allow_pickle: bool) -> None:
    state = {"plain": 7, "list": [1], "parameter": (torch.nn.Parameter(torch.ones(2)),)}
    if allow_pickle:  # otherwise the import is refused
        state["kind"] = Kind.ONE
    save(state, FileSystemWriter(tmp_path / "old"), planner=Boxed())
    (tmp_path / "old/metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    dcp_to_casckpt(tmp_path / "old", store, step=1, allow_pickle=allow_pickle)
    assert store.read("default@1", keys=["plain"]) == {"plain": 7}
    casckpt_to_dcp(store, "default@1", tmp_path / "new", allow_pickle=True)
    got = Got()
    load(dict(state), FileSystemReader(tmp_path / "new"), planner=got)
    found = {key: torch.load(io.BytesIO(got.got[key]), weights_only=False) for key in state}
    assert str(found) == str({key: [value] for key, value in state.items()})


# equal to a save by `Store.save`


def test_plain_values_are_stored_without_a_pickle(store: Store) -> None:
    save(PLAIN, StorageWriter(store, run="dcp", step=1))
    store.save(PLAIN, run="native", step=1)
    body = manifests.get(store.repository, store.get("dcp@1").commit).body
    assert not any(one.pickled for one in body.objects)
    assert body.notes == {}
    for ref in ("dcp@1", "native@1"):
        assert same(store.read(ref), {**PLAIN, "ordered": store.read(ref)["ordered"]})
        found = load({key: None for key in PLAIN if key != "ordered"}, StorageReader(store, ref))
        assert all(same(found[key], PLAIN[key]) for key in found)


class Colour(enum.Enum):
    RED = 1


def test_loading_a_pickle_requires_allow_pickle(store: Store) -> None:
    state = {"colour": Colour.RED, "parameters": (nn.Parameter(torch.ones(2)),), "a": 1}
    save(state, StorageWriter(store, step=1))
    assert load({"a": 0}, StorageReader(store, "default@1"))["a"] == 1
    found = load({"parameters": None}, StorageReader(store, "default@1"))  # the restricted unpickler can read this one
    assert isinstance(found["parameters"][0], nn.Parameter)
    error = failure(lambda: load({"colour": None}, StorageReader(store, "default@1")))
    assert "allow_pickle=True" in str(causes(error)[0])
    assert load({"colour": None}, StorageReader(store, "default@1", allow_pickle=True))["colour"] is Colour.RED
    with pytest.raises(InvalidInput, match=r"colour is stored as a pickle.*allow_pickle=True"):
        store.read("default@1")
    assert store.read("default@1", allow_pickle=True)["colour"] is Colour.RED
    assert store.read("default@1", keys=["parameters*", "a"])["a"] == 1


class Json(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(object).encode())
        return super().transform_object(write_item, object)


class FromJson(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = json.loads(value.read())


class Evil(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return io.BytesIO(pickle.dumps(Run()))


class Run:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_only_the_planner_unpickles_its_own_bytes(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    save({"a": [1, 2], "t": (3, "x")}, StorageWriter(store, step=1), planner=Json())
    found = load({"a": None, "t": None}, StorageReader(store, "default@1"), planner=FromJson())
    assert found == {"a": [1, 2], "t": [3, "x"]}
    assert store.read("default@1")["a"] == b"[1, 2]"
    save({"a": 1}, StorageWriter(store, step=2), planner=Evil())
    for ref in ("default@1", "default@2"):
        error = failure(lambda ref=ref: load({"a": None}, StorageReader(store, ref)))  # type: ignore[misc] # mypy on defaults
        assert "allow_pickle=True" in str(causes(error)[0])
    assert capsys.readouterr().out == ""


# the examples in torch's documentation of planners


class Fp16Save(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        found: Any = super().resolve_data(write_item)
        return found if write_item.type == WriteItemType.BYTE_IO else found.to(torch.float16)


class SilentFp16Save(Fp16Save):
    """A planner whose metadata claims float32."""

    def create_local_plan(self) -> SavePlan:
        return DefaultSavePlanner.create_local_plan(self)


@pytest.mark.parametrize("planner", [Fp16Save, SilentFp16Save])
def test_a_planner_can_cast_on_save(
    store: Store, planner: type[DefaultSavePlanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    from casckpt.frontends.dcp import items

    monkeypatch.setattr(items, "WINDOW_BYTES", 1000)  # several windows
    state = {f"a{i}": numbers(f"a{i}", 100) for i in range(7)} | {"n": 1}
    save(state, StorageWriter(store, step=1), planner=planner())
    assert {info.dtype for info in store.get("default@1").tensors.values()} == {"float16"}
    into = load(zeros(state), StorageReader(store, "default@1"))
    assert all(torch.equal(into[f"a{i}"], numbers(f"a{i}", 100).half().float()) for i in range(7))
    assert into["n"] == 1
    told: Any = StorageReader(store, "default@1").read_metadata().state_dict_metadata["a0"]
    assert told.properties.dtype == torch.float16
