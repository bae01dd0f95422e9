"""Arbitrarily nested states with objects and attachments load exactly. Errors name values that cannot be stored."""

from __future__ import annotations

import datetime
import random
from argparse import Namespace
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path, PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import CasckptError, InvalidInput, Mismatch, NotFound
from casckpt.frontends.trainer import Checkpointer
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from casckpt.tensors.values import PerRank, Shard
from tests.support.saves import blob_keys, cells, counted, same_state, small, steps

ODD: dict[str, Any] = {
    "nothing": None,
    "numbers": [True, 1, 1.0, -0.0, float("nan"), 10**40, -(10**40), 1 + 2j],
    "texts": ("a", "é", "\ud800", b"bytes", ""),
    "tuple": (1, (2, [3, ()])),
    "empty": {"dict": {}, "list": [], "tuple": (), "ordered": OrderedDict(), "set": set()},
    "sets": {1, 2, (3, 4)},
    "frozen": frozenset("ab"),
    "keys": {"a.b": 1, 5: 2, -1: 3},
    "plain keys": [{True: 1, None: 2, 1.5: 3, (1, 2): 4}],
    "ordered": OrderedDict([("z", 1), ("a", [2])]),
    "counter": Counter("aab"),
    "default": defaultdict(list, {"a": [1]}),
    "deque": deque([1, 2], maxlen=5),
    "range": range(1, 10, 2),
    "slice": slice(None, 5, 2),
    "namespace": SimpleNamespace(lr=0.1, betas=(0.9, 0.99)),
    "arguments": Namespace(run="x", steps=[1, 2]),
    "torch": [torch.bfloat16, torch.Size([2, 3]), torch.device("cpu")],
    "numpy": [np.arange(5, dtype=np.int16), np.float32(1.5), np.array("x"), np.array([[True]])],
    "path": [Path("a/b"), PurePosixPath("/c")],
    "times": [datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), datetime.timedelta(seconds=5)],
    "random": [random.Random(5).getstate(), np.random.default_rng(5)],
}


@pytest.mark.parametrize("key", ODD)
def test_plain_data_is_saved_and_read_back(key: str) -> None:
    store = small()
    state = {"x": ODD[key], "w": torch.ones(2)}
    store.save(state, step=1)
    assert same_state(store.read("default@1"), state)


def test_a_mixed_state_is_read_and_loaded_into_a_template() -> None:
    store = small()
    store.save(ODD | {"w": torch.ones(2)}, step=1)
    assert same_state(store.read("default@1"), ODD | {"w": torch.ones(2)})
    template: dict[str, Any] = dict.fromkeys(ODD, None)
    store.load(template, "default@1")
    assert same_state(template, ODD)


def test_containers_with_tensors_are_saved_and_read() -> None:
    state = {
        "list": [torch.ones(1), 2, [torch.ones(2)]],
        "tuple": (torch.ones(1), {"a": (torch.zeros(2), None)}),
        "ordered": OrderedDict([("z", torch.ones(3)), ("a", 1)]),
        "default": defaultdict(list, {"a": [torch.ones(1)]}),
        7: {8: torch.ones(1), -3: "x"},
        "deep": {"a": {"b": {"c": {"d": torch.ones(1)}}}},
    }
    store = small()
    ckpt = store.save(state, step=1)
    assert same_state(store.read("default@1"), state)
    assert set(ckpt.tensors) == {
        "list.0", "list.2.0", "tuple.0", "tuple.1.a.0", "ordered.z", "default.a.0", "7.8", "deep.a.b.c.d",
    }  # fmt: skip


def test_saves_and_loads_preserve_the_order_of_keys() -> None:
    state: dict[str, Any] = {key: torch.ones(1) if i % 2 else i for i, key in enumerate("qwertyuiop")}
    store = small()
    store.save(state, step=1)
    assert list(store.read("default@1")) == list(state)


def test_dcp_saves_and_loads_an_empty_state() -> None:
    store = small()
    ckpt = store.save({}, step=1)
    assert store.read("default@1") == {}
    assert ckpt.stats.bytes_total == 0
    assert blob_keys(store) == []


def test_large_buffers_are_stored_in_blobs_and_reused() -> None:
    store = small()
    state: dict[str, Any] = {
        "bytes": random.Random(1).randbytes(3 * 4096 + 5),
        "array": np.random.default_rng(1).random((100, 20)),
        "strided": np.arange(20_000, dtype=np.int32).reshape(100, 200)[:, ::2],
        "nested": [{"a": [random.Random(2).randbytes(5000), np.arange(9000, dtype=np.uint8)]}],
        "short": b"x" * 100,
    }
    first = store.save(state, step=1)
    assert same_state(store.read("default@1"), state)
    assert first.stats.bytes_written > 3 * 4096
    assert store.save(state, step=2).stats.bytes_written == 0
    template: dict[str, Any] = dict.fromkeys(state)
    store.load(template, "default@2")
    assert same_state(template, state)
    state["bytes"] = state["bytes"][:-1] + b"!"
    assert 0 < store.save(state, step=3).stats.bytes_written <= 2 * 4096  # the header and the last cell


def test_a_view_of_an_array_is_stored_with_its_values_at_the_time_of_the_save() -> None:
    store, array = small(), np.zeros(5000)
    state = {"a": array}
    store.save(state, step=1)
    array[:] = 1
    assert not store.read("default@1")["a"].any()


@pytest.mark.parametrize("names", [("a", "a/b"), ("x/y/z", "x"), ("x/y/z", "x/y")])
def test_an_attachment_with_the_name_of_a_folder_is_rejected(names: tuple[str, str]) -> None:
    """An export could not create both."""
    store = small()
    with pytest.raises(InvalidInput, match="would be the folder of attachment"):
        store.save({}, step=1, attachments=dict.fromkeys(names, b""))
    store.save({}, step=1, attachments=dict.fromkeys(("a", "ab/c", "b/a"), b""))


def test_short_and_long_attachments_are_read() -> None:
    store = small()
    files = {"config.json": b"{}", "dir/empty": b"", "dir/big.bin": random.Random(1).randbytes(10_000)}
    store.save({"w": torch.ones(1)}, step=1, attachments=files)
    assert store.attachments("default@1") == {name: len(data) for name, data in files.items()}
    for name, data in files.items():
        assert store.read_attachment("default@1", name) == data
    assert same_state(store.read("default@1"), {"w": torch.ones(1)})
    with pytest.raises(NotFound, match=r"'other'; it has config\.json, dir/big\.bin, dir/empty"):
        store.read_attachment("default@1", "other")
    assert store.save({"w": torch.ones(1)}, step=2, attachments=files).stats.bytes_written == 0


@pytest.mark.parametrize(
    "array",
    [np.arange(5000), np.ones((5000, 3), np.uint8), np.arange(9000, dtype=np.uint8)[::2], np.array(7)],
    ids=["wide", "matrix", "strided", "number"],
)
def test_an_attachment_can_be_any_view_of_bytes(array: np.ndarray[Any, Any]) -> None:
    store = small()
    store.save({}, step=1, attachments={"a": array.data})  # type: ignore[dict-item]  # what it takes, too
    assert store.read_attachment("default@1", "a") == array.tobytes()


@pytest.mark.parametrize("name", ["", "/abs", "../up", "a/../b", "a//b", "a/", ".", "x\n", "a\\b", "x" * 1025, 5])
def test_invalid_attachment_names_are_rejected(name: Any) -> None:
    store = small()
    with pytest.raises(InvalidInput, match="attachment name"):
        store.save({}, step=1, attachments={name: b""})
    assert steps(store) == []


def test_an_attachment_must_be_bytes() -> None:
    with pytest.raises(InvalidInput, match="pass its contents as bytes"):
        small().save({}, step=1, attachments={"a": "text"})  # type: ignore[dict-item]  # a wrong type on purpose


def test_per_rank_values_are_saved_and_read() -> None:
    store = small()
    state = {"rng": PerRank(torch.arange(5)), "n": PerRank({"seed": 5, "x": torch.ones(2)}), "b": PerRank(b"x" * 5000)}
    store.save(state, step=1)
    want = {"rng": torch.arange(5), "n": {"seed": 5, "x": torch.ones(2)}, "b": b"x" * 5000}
    assert same_state(store.read("default@1"), want)
    template: dict[str, Any] = {
        "rng": PerRank(torch.zeros(5, dtype=torch.int64)),
        "n": PerRank(None),
        "b": PerRank(None),
    }
    store.load(template, "default@1")
    assert same_state({key: value.value for key, value in template.items()}, want)


class TestShards:
    """A tensor in several parts, all in a single process."""

    whole = torch.arange(240.0).view(12, 20)

    def rows(self, *bounds: int) -> list[Shard]:
        return [Shard(self.whole[lo:hi].clone(), (12, 20), offset=(lo, 0)) for lo, hi in pairwise(bounds)]

    def saved(self, shards: Any) -> Store:
        store = small()
        store.save({"m": {"w": shards}}, step=1)
        return store

    def test_rows_columns_and_flat_ranges_are_saved_and_read(self) -> None:
        w = self.whole
        flat = w.view(-1)
        grid = [Shard(w[r : r + 6, c : c + 5], (12, 20), offset=(r, c)) for r in (0, 6) for c in (0, 5, 10, 15)]
        left = w[:, :10].reshape(-1)
        for shards in (
            self.rows(0, 5, 12),
            grid,
            [Shard(w[:, c : c + 10], (12, 20), offset=(0, c)) for c in (0, 10)],
            [Shard(flat[lo:hi], (12, 20), flat=(lo, hi)) for lo, hi in ((0, 77), (77, 78), (78, 240))],
            [
                Shard(torch.cat([flat[200:], flat[:50]]), (12, 20), flat=[(200, 240), (0, 50)]),
                Shard(flat[50:200], (12, 20), flat=(50, 200)),
            ],
            [
                Shard(left[:33], (12, 20), (0, 0), (12, 10), (0, 33)),
                Shard(left[33:], (12, 20), (0, 0), (12, 10), (33, 120)),
                Shard(w[:, 10:], (12, 20), (0, 10)),
            ],
            Shard(w.clone(), (12, 20)),
        ):
            assert same_state(self.saved(shards).read("default@1"), {"m": {"w": w}})

    def test_a_load_fills_parts_of_tensors(self) -> None:
        store = self.saved(self.rows(0, 5, 12))
        part = Shard(torch.zeros(4, 7), (12, 20), offset=(3, 9))
        ranges = Shard(torch.zeros(30), (12, 20), flat=[(100, 120), (7, 17)])
        inner = Shard(torch.zeros(9), (12, 20), offset=(2, 3), shape=(5, 4), flat=(6, 15))
        for one in (part, ranges, inner, [part, ranges]):
            store.load({"m": {"w": one}}, "default@1")
        flat = self.whole.view(-1)
        assert torch.equal(part.data, self.whole[3:7, 9:16])
        assert torch.equal(ranges.data, torch.cat([flat[100:120], flat[7:17]]))
        assert torch.equal(inner.data, self.whole[2:7, 3:7].reshape(-1)[6:15])

    @pytest.mark.parametrize("bounds", [(0, 5), (5, 12), (0, 0)])
    def test_the_error_for_a_hole_names_key_and_region(self, bounds: tuple[int, ...]) -> None:
        store = small()
        with pytest.raises(InvalidInput, match=r"'m\.w' of shape \[12, 20\] is incomplete.*Nothing") as caught:
            store.save({"m": {"w": self.rows(*bounds)}}, step=1)
        assert caught.value.key == "m.w"
        assert steps(store) == []
        store.save({"m": {"w": self.whole}}, step=1)
        assert same_state(store.read("default@1"), {"m": {"w": self.whole}})

    def test_the_error_for_uncovered_elements_names_the_hole(self) -> None:
        shards = [self.rows(0, 5)[0], self.rows(7, 12)[0]]
        with pytest.raises(InvalidInput, match=r"no rank holds \[0:12\]x\[0:20\] elements 100\.\.140"):
            self.saved(shards)

    @pytest.mark.parametrize("columns", [False, True])
    def test_the_error_for_an_overlap_names_key_and_region(self, columns: bool) -> None:
        w = self.whole
        if columns:
            shards = [Shard(w[:, :11], (12, 20), (0, 0)), Shard(w[:, 10:], (12, 20), (0, 10))]
        else:
            shards = [*self.rows(0, 5, 12), self.rows(4, 6)[0]]
        store = small()
        with pytest.raises(
            InvalidInput, match=r"'m\.w' of shape \[12, 20\]: .* and .* overlap.*Nothing was saved"
        ) as caught:
            store.save({"m": {"w": shards}}, step=1)
        assert caught.value.key == "m.w"
        assert steps(store) == []

    def test_a_template_with_a_different_shape_is_rejected(self) -> None:
        store = self.saved(self.rows(0, 12))
        with pytest.raises(Mismatch, match=r"'m\.w' has shape \[12, 21\] here, but \[12, 20\] in the checkpoint"):
            store.load({"m": {"w": Shard(torch.zeros(1, 21), (12, 21), offset=(0, 0))}}, "default@1")

    def test_strided_data_of_a_flat_shard_is_saved_but_not_filled(self) -> None:
        strided = torch.zeros(20, 12).t()
        store = self.saved(Shard(self.whole.t().contiguous().t(), (12, 20), flat=[(0, 100), (100, 240)]))
        assert same_state(store.read("default@1"), {"m": {"w": self.whole}})
        with pytest.raises(InvalidInput, match="strides"):
            store.load({"m": {"w": Shard(strided, (12, 20), flat=[(0, 100), (100, 240)])}}, "default@1")


class _Odd:
    def __init__(self) -> None:
        self.x = 5

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Odd) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]  # as Python does it


def test_the_error_for_a_value_that_is_not_plain_names_its_path(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    with pytest.raises(InvalidInput, match=r"sched\.x\[1\]\['f'\].*_Odd.*allow_pickle=True") as caught:
        store.save({"w": torch.ones(1), "sched": {"x": [1, {"f": _Odd()}]}}, step=1)
    assert caught.value.key == "sched.x"
    assert not (tmp_path / "store").exists()


def test_pickles_must_be_allowed_in_saves_and_loads() -> None:
    store, big = small(), _Odd()
    big.x = [1] * 5000  # type: ignore[assignment]  # too large a value for it
    state = {"w": torch.ones(1), "odd": _Odd(), "big": big, "plain": [1]}
    store.save(state, step=1, allow_pickle=True)
    template = {"w": torch.zeros(1), "odd": None, "plain": None}
    for call in (lambda: store.read("default@1"), lambda: store.load(template, "default@1")):
        with pytest.raises(InvalidInput, match=r"odd is stored as a pickle.*allow_pickle=True"):
            call()
    assert same_state(template, {"w": torch.zeros(1), "odd": None, "plain": None})
    assert store.read("default@1", keys=["w", "plain"]) == {"w": torch.ones(1), "plain": [1]}
    back = store.read("default@1", allow_pickle=True)
    assert (back["odd"], back["big"], back["plain"]) == (state["odd"], state["big"], [1])
    store.load(template, "default@1", allow_pickle=True)
    assert template["odd"] == state["odd"]


@pytest.mark.parametrize("state", [None, [1], torch.ones(3), "text", 5, [("a", 1)]])
def test_a_state_must_be_a_mapping(state: Any, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    calls: list[Callable[[], object]] = [
        lambda: store.save(state, step=1),
        lambda: store.save_async(state, step=1).result(),
    ]
    for call in calls:
        with pytest.raises(InvalidInput, match="a state must be a mapping"):
            call()
    assert not (tmp_path / "store").exists()


def test_any_mapping_can_be_saved() -> None:
    store = small()
    store.save(MappingProxyType({"a": MappingProxyType({"w": torch.ones(2)})}), step=1)
    assert same_state(store.read("default@1"), {"a": {"w": torch.ones(2)}})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": 1}, "a.b": 2}, "the same flat key 'a.b'"),
        ({"a": {1: 1, "1": 2}}, "the same flat key 'a.1'"),
        ({(1, 2): torch.ones(1)}, "neither a string nor a 64-bit int"),
        ({"a" * 5000: 1}, "characters"),
        ({"": 1}, "an empty string"),
        ({"a\0": 1}, "NUL"),
    ],
    ids=["paths", "int and str", "tuple key", "long", "empty", "nul"],
)
def test_ambiguous_and_invalid_keys_are_rejected(state: Any, message: str) -> None:
    store = small()
    with pytest.raises(InvalidInput, match=message):
        store.save(state, step=1)
    assert steps(store) == []


def test_a_state_that_contains_itself_is_rejected() -> None:
    state: dict[str, Any] = {"w": torch.ones(1)}
    state["self"] = state
    with pytest.raises(InvalidInput, match="contains itself"):
        small().save(state, step=1)


tensors = st.builds(
    lambda dtype, shape, seed: torch.from_numpy(np.random.default_rng(seed).integers(0, 100, shape)).to(dtype),
    st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64]),
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.integers(0, 5),
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
large = st.builds(lambda n, seed: random.Random(seed).randbytes(n), st.integers(4000, 9000), st.integers(0, 3))
keys = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0."), min_size=1, max_size=5
) | st.integers(-(2**63), 2**63 - 1)


def _distinct(mapping: dict[Any, Any]) -> bool:
    return len({str(key) for key in mapping}) == len(mapping)


nested = st.recursive(
    tensors | plain | large,
    lambda inner: (
        st.dictionaries(keys, inner, max_size=4).filter(_distinct)
        | st.dictionaries(keys, inner, max_size=4).filter(_distinct).map(OrderedDict)
        | st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=12,
)


@given(st.dictionaries(keys, nested, max_size=5).filter(_distinct))
def test_any_state_is_restored_and_each_cell_is_written_once(state: dict[Any, Any]) -> None:
    store = small()
    first = store.save(state, step=1)
    assert same_state(store.read("default@1"), state)
    with counted(store) as io:
        second = store.save(state, step=2)
    assert second.stats.bytes_written == second.stats.blobs_written == 0
    assert second.stats.bytes_total == first.stats.bytes_total
    assert io.puts == 4  # the transaction, the manifest, the announcement, the commit
    assert same_state(store.read("default@2", verify=False), state)
    assert store.diff("default@1", "default@2").unchanged == tuple(first.tensors)


def test_a_second_store_object_for_the_same_storage_lists_the_same_checkpoints(tmp_path: Path) -> None:
    state = {"w": cells(3), "x": [1]}
    open_store(tmp_path / "s").save(state, step=1)
    assert same_state(open_store(tmp_path / "s").read("latest"), state)
    assert same_state(open_store((tmp_path / "s").as_uri()).read("latest"), state)
    with pytest.raises(CasckptError):
        open_store(tmp_path / "t").read("latest")


def test_a_model_is_rejected_as_a_state_without_running_it() -> None:
    """A model is callable, like a function that returns a state."""

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor | None = None) -> Any:
            raise AssertionError

    model, store = Model(2, 2), small()
    with pytest.raises(InvalidInput, match="not a Model; pass it by name"):
        store.save(model, step=1)
    store.save(model.state_dict(), step=1)
    with pytest.raises(InvalidInput, match="not a Model; pass it by name"):
        store.load(model, "default@1")


# a TensorDict


class Rows(UserDict[str, Any]):
    """What a TensorDict does: it iterates over its rows, has no ``in``, and is an object with a state_dict."""

    batch_size, is_locked = (2,), False

    def __iter__(self) -> Any:
        raise StopIteration

    def __contains__(self, key: object) -> bool:
        raise NotImplementedError

    def keys(self) -> Any:
        return self.data.keys()

    def values(self) -> Any:
        return self.data.values()

    def items(self) -> Any:
        return self.data.items()

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.to_dict().items() if not isinstance(value, str)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            self.data[key].copy_(value)

    def to_dict(self) -> dict[str, Any]:
        return {key: value.to_dict() if isinstance(value, Rows) else value for key, value in self.items()}


class Stacked(Rows):
    """A stack of several of them, which makes its tensors in each call."""

    def to_dict(self) -> dict[str, Any]:
        return {key: torch.stack([value]) for key, value in self.items()}


def rows(value: float, text: str = "") -> Rows:
    inner = Rows()
    inner.data = {"b": torch.full((2,), value)}
    outer = Rows()
    outer.data = {"a": torch.full((2, 3), value), "n": inner, "text": text}
    return outer


def test_a_tensor_dict_is_a_state_and_is_filled_in_place(store: Store) -> None:
    assert set(store.save(rows(1, "one"), step=1).tensors) == {"a", "n.b"}
    filled = rows(0)
    a, b = filled.data["a"], filled.data["n"].data["b"]
    store.load(filled, "default@1")
    assert same_state(filled.to_dict(), rows(1, "one").to_dict())
    assert filled.data["a"] is a
    assert filled.data["n"].data["b"] is b
    assert not store.compare(rows(1, "one"), "default@1").differs
    Checkpointer(store, run="loop").save(1, rows(2))
    assert Checkpointer(store, run="loop").resume(filled) is not None
    assert b.tolist() == [2, 2]


def test_a_tensor_dict_that_cannot_be_filled_is_rejected(store: Store) -> None:
    store.save(rows(1, "one"), step=1)
    locked, stacked = rows(0), Stacked()
    locked.is_locked, stacked.data = True, {"a": torch.zeros(3)}
    with pytest.raises(InvalidInput, match="a Rows cannot be modified"):
        store.load(locked, "default@1")
    assert locked.data["a"].sum() == 0
    with pytest.raises(InvalidInput, match=r'a Stacked cannot be the state itself; pass it by name, as \{"data": '):
        store.save(stacked, step=2)
