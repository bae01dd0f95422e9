"""Wrappers are saved as their inner tensors, filled in place, and refused if the template's wrapper differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.testing._internal.two_tensor import TwoTensor

import casckpt
from casckpt.errors import InvalidInput, Mismatch, MissingKey, Refused
from casckpt.frontends.dcp import StorageReader, StorageWriter
from casckpt.tensors.kinds import KINDS
from casckpt.tensors.wrappers import Wrapped
from tests.support.dcp import load, save
from tests.support.saves import small
from tests.support.wrappers import Mode, Options, Scaled, bits, calls, rebuild, scaled

make_two: Any = TwoTensor


@pytest.fixture
def registered() -> Iterator[None]:
    casckpt.register_wrapper(Scaled, rebuild=rebuild)
    yield
    del KINDS["tests:Scaled"]


def state(seed: int, **of: Any) -> dict[str, Any]:
    return {"model": {"w": scaled(seed, 8, 16, **of), "b": torch.full((3,), float(seed))}}


def test_a_background_save_is_filled_in_place_without_an_operation_on_the_wrapper() -> None:
    store, saved = small(), state(1)
    expected = bits(saved["model"]["w"])
    calls.clear()
    future = store.save_async(saved, run="r", step=1)
    saved["model"]["w"].codes.zero_()
    future.result()
    template = state(2)
    inner = template["model"]["w"].codes
    store.load(template, "r@1")
    assert not calls
    assert template["model"]["w"].codes is inner
    assert bits(template["model"]["w"]) == expected
    assert torch.equal(template["model"]["b"], torch.ones(3))
    again = store.save(template, run="r", step=2)
    assert again.commit.committed.bytes_written == 0
    assert store.compare(template, "r@1").is_same


def test_one_changed_element_writes_one_cell() -> None:
    store = small()
    saved = {"w": scaled(1, 64, 4096)}
    store.save(saved, run="r", step=1)
    saved["w"].codes[3, 3] += 1
    second = store.save(saved, run="r", step=2)
    assert 0 < second.commit.committed.bytes_written <= 1 << 20
    template = {"w": scaled(2, 64, 4096)}
    store.load(template, "r@2")
    assert bits(template["w"]) == bits(saved["w"])


def test_changed_scales_are_stored_as_deltas() -> None:
    store = small()
    saved = {"w": scaled(1, 512, 512)}
    store.save(saved, run="r", step=1, compress="always")
    saved["w"].scale.mul_(1 + 2**-20)
    second = store.save(saved, run="r", step=2, compress="always")
    assert 0 < second.stats.bytes_deltas < saved["w"].scale.nbytes / 2
    template = {"w": scaled(2, 512, 512)}
    held = store.load(template, "r@2")
    assert bits(template["w"]) == bits(saved["w"])
    store.update(template, "r@1", held=held)
    assert bits(template["w"]) == bits(scaled(1, 512, 512))


def test_a_wrapper_inside_a_wrapper_is_saved_and_loaded() -> None:
    store = small()
    store.save({"w": [make_two(scaled(1, 4, 4), torch.ones(4, 4))]}, run="r", step=1)
    template = {"w": [make_two(scaled(2, 4, 4), torch.zeros(4, 4))]}
    store.load(template, "r@1")
    assert bits(template["w"][0].a) == bits(scaled(1, 4, 4))
    assert torch.equal(template["w"][0].b, torch.ones(4, 4))


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "context": (lambda: state(2, options=Options(Mode.EXACT)), 'mode.* is "EXACT" here, but "FAST"'),
    "blocks": (lambda: state(2, options=Options(blocks=(2, 4))), r"options\._data\.blocks\[0\] is 2 here, but 1"),
    "dtype": (lambda: state(2, dtype=torch.bfloat16), 'dtype is "bfloat16" here, but "float32"'),
    "shape": (lambda: holding(scaled(2, 16, 8)), r"shape\[0\] is 16 here, but 8"),
    "class": (lambda: holding(make_two(torch.zeros(8, 16), torch.zeros(8, 16))), "kind is"),
    "inner dtype": (lambda: changed(scale=torch.zeros(32, dtype=torch.float64)), "'scale' is float64 of shape"),
    "inner shape": (lambda: changed(table=torch.zeros(4)), r"'table' is float32 of shape \[4\] here"),
    "strides": (lambda: changed(codes=torch.zeros(16, 8, dtype=torch.int8).t()), "strides is .* here, but null"),
    "plain here": (lambda: holding(torch.zeros(8, 16)), "is a tensor here, but a wrapper"),
}  # fmt: skip


def holding(wrapper: Any) -> dict[str, Any]:
    return {"model": {"w": wrapper, "b": torch.zeros(3)}}


def changed(**inner: torch.Tensor) -> dict[str, Any]:
    found = state(2)
    for name, value in inner.items():
        setattr(found["model"]["w"], name, value)
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cast", [False, True])
def test_a_wrapper_that_differs_is_refused_and_nothing_changes(case: str, cast: bool) -> None:
    store = small()
    store.save(state(1), run="r", step=1)
    make, match = CASES[case]
    template = make()
    before = bits(template["model"]["w"]) if isinstance(template["model"]["w"], Scaled) else []
    with pytest.raises(Mismatch, match=match) as error:
        store.load(template, "r@1")
    assert error.value.key == "model.w"
    assert not template["model"]["b"].any() or float(template["model"]["b"][0]) == 2
    loaded = store.load(template, "r@1", ignore_mismatched="model.w")
    assert loaded.mismatched_keys == ("model.w",)
    assert torch.equal(template["model"]["b"], torch.ones(3))
    assert not before or bits(template["model"]["w"]) == before


def test_a_plain_tensor_is_not_loaded_into_a_wrapper() -> None:
    store = small()
    store.save({"w": torch.zeros(8, 16), "o": 5}, run="r", step=1)
    with pytest.raises(Mismatch, match="'w' is a wrapper of other tensors here, but a plain tensor"):
        store.load({"w": scaled(1, 8, 16), "o": 0}, "r@1")
    with pytest.raises(Mismatch, match="but plain data in r@1"):
        store.load({"w": torch.zeros(8, 16), "o": scaled(1, 8, 16)}, "r@1")


def test_missing_unread_and_renamed_wrappers_are_identified_by_their_own_key() -> None:
    store = small()
    store.save({"old": scaled(1, 8, 16), "more": {"w": scaled(2, 4, 4)}}, run="r", step=1)
    template = {"new": scaled(3, 8, 16)}
    with pytest.raises(MissingKey, match="r@1 lacks 'new'") as error:
        store.load(template, "r@1")
    assert error.value.keys == ("new",)
    loaded = store.load(template, "r@1", rename={"new": "old"})
    assert bits(template["new"]) == bits(scaled(1, 8, 16))
    assert loaded.unread_keys == ("more.w.codes", "more.w.scale", "more.w.table")
    assert loaded.unread_subtrees == ("more",)
    assert store.load({"else": scaled(1, 8, 16)}, "r@1", strict=False, unread="ignore").missing_keys == ("else",)


def test_a_read_rebuilds_only_registered_kinds(registered: None) -> None:
    store = small()
    saved = {"w": scaled(1, 8, 16), "two": make_two(torch.ones(2), torch.zeros(2))}
    store.save(saved, run="r", step=1)
    made = store.read("r@1")
    assert type(made["w"]) is Scaled
    assert bits(made["w"]) == bits(saved["w"])
    assert isinstance(made["two"], Wrapped)
    assert torch.equal(made["two"].tensors["a"], torch.ones(2))
    assert store.save(made, run="r", step=2).commit.committed.bytes_written == 0
    template = {"w": None, "two": None}
    store.load(template, "r@2")
    assert bits(template["w"]) == bits(saved["w"])
    for pattern in ("w", "w.codes", "*.table"):
        assert bits(store.read("r@1", keys=pattern)["w"]) == bits(saved["w"])


def test_a_rebuilt_wrapper_must_have_the_stored_form(registered: None) -> None:
    store = small()
    store.save(state(1, options=Options(dtype=torch.float64)), run="r", step=1)  # `rebuild` drops this dtype
    with pytest.raises(Refused, match=r"'model\.w': the form of a stored tests:Scaled is invalid: it describes"):
        store.read("r@1")


def test_a_wrapper_that_cannot_be_stored_is_refused_with_advice() -> None:
    store, wrapper = small(), scaled(1, 8, 16)
    wrapper.options = replace(Options(), mode=torch.relu)  # type: ignore[arg-type] # a function
    with pytest.raises(InvalidInput, match="'w': the context of a Scaled contains a builtin_function_or_method"):
        store.check({"w": wrapper})
    other = scaled(1, 8, 16)
    other.scale = 5  # type: ignore[assignment]
    with pytest.raises(InvalidInput, match="'w': 'scale', which the __tensor_flatten__ of a Scaled lists, is not the"):
        store.check({"w": other})
    with pytest.raises(InvalidInput, match=r"have the same flat key 'w\.codes'"):
        store.check({"w": scaled(1, 8, 16), "w.codes": torch.ones(1)})


def test_a_class_is_registered_once_for_each_name(registered: None) -> None:
    other = type("Scaled", (torch.Tensor,), {"__module__": "tests.elsewhere"})
    with pytest.raises(InvalidInput, match="a different class 'tests:Scaled' is already registered"):
        casckpt.register_wrapper(other)
    with pytest.raises(InvalidInput, match="needs a subclass of torch"):
        casckpt.register_wrapper(int)  # type: ignore[arg-type]


def test_a_wrapper_counts_as_missing_if_one_of_its_inner_tensors_was_thinned(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path)
    store.save(state(1), run="r", step=1)
    store.thin("r@1", drop="*.scale")
    template = state(2)
    before = bits(template["model"]["w"])
    assert store.load(template, "r@1", strict=False).missing_keys == ("model.w",)
    assert bits(template["model"]["w"]) == before


@pytest.mark.parametrize("cast", [False, True])
def test_a_plain_tensor_is_not_filled_from_a_wrapper(registered: None, cast: bool) -> None:
    store = small()
    store.save(state(1), run="r", step=1)
    template: Any = {"model": {"w": torch.zeros(8, 16), "b": torch.zeros(3)}}
    with pytest.raises(Mismatch, match=r"is a tensor here, but a wrapper .*; call dequantize\(\)"):
        store.load(template, "r@1", cast=cast)
    assert not template["model"]["w"].any()
    assert not template["model"]["b"].any()
    with pytest.raises(Mismatch, match="is int here, but a wrapper"):
        store.load({"model": {"w": 3}}, "r@1", cast=cast)
    with pytest.raises(Mismatch, match='kind is "torch:sparse_coo" here, but "tests:Scaled"'):
        store.load({"model": {"w": torch.eye(8, 16).to_sparse()}}, "r@1", cast=cast)


def test_a_wrapper_beside_an_object_is_saved_and_filled_in_place() -> None:
    store, model = small(), torch.nn.Linear(2, 2)
    store.save({"model": model, "w": scaled(1, 4, 4)}, run="r", step=1)
    template: dict[str, Any] = {"model": torch.nn.Linear(2, 2), "w": scaled(2, 4, 4)}
    inner = template["w"].codes
    store.load(template, "r@1")
    assert template["w"].codes is inner
    assert bits(template["w"]) == bits(scaled(1, 4, 4))
    assert torch.equal(template["model"].weight, model.weight)


def test_a_flat_optimizer_state_has_whole_wrappers() -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer, wrapper = torch.optim.SGD(model.parameters()), scaled(1, 4, 4)
    optimizer.state[model.weight] = {"codes": wrapper}
    flat = casckpt.flatten_optimizer_state(model, optimizer)
    assert flat["state.weight.codes"] is wrapper
    assert casckpt.unflatten_optimizer_state(flat)["state"][0]["codes"] is wrapper


def test_dcp_stores_a_sparse_tensor_inside_a_value_as_before() -> None:
    store = small()
    planner, writer = DefaultSavePlanner(flatten_state_dict=False), StorageWriter(store, run="d", step=1)
    save({"v": {"w": torch.eye(3).to_sparse(), "n": 1}, "t": torch.ones(2)}, writer, planner=planner)
    assert torch.equal(load({"t": torch.zeros(2)}, StorageReader(store, "d@1"))["t"], torch.ones(2))


SPARSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", SPARSE)
def test_a_sparse_tensor_is_saved_by_its_parts(layout: str) -> None:
    store, make = small(), SPARSE[layout]
    store.save({"w": make(torch.eye(4) * 3)}, run="r", step=1)
    read = store.read("r@1")["w"]
    assert read.layout == make(torch.eye(4)).layout
    assert torch.equal(read.to_dense(), torch.eye(4) * 3)
    template: dict[str, Any] = {"w": torch.nn.Parameter(make(torch.eye(4)))}
    store.load(template, "r@1")
    assert torch.equal(template["w"].detach().to_dense(), torch.eye(4) * 3)
    with pytest.raises(Mismatch, match="of shape"):
        store.load({"w": make(torch.ones(4, 4))}, "r@1")
    template["w"] = None
    store.load(template, "r@1")
    assert torch.equal(template["w"].to_dense(), torch.eye(4) * 3)


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "its values() and"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "the tensors that it unbinds to"),
        (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "int_repr() with q_scale()"),
        (lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
         "int_repr() with q_per_channel_scales()"),
        (lambda: torch.ones(4).to_mkldnn(), "store to_dense()"),
    ],
    ids=["jagged", "nested", "quantized", "per channel", "mkldnn"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_unsupported_tensor_layouts_are_refused_at_the_start_with_advice(make: Callable[[], Any], advice: str) -> None:
    with pytest.raises(InvalidInput) as error:
        small().check({"w": make()})
    assert advice in str(error.value)


@pytest.mark.parametrize("cut", [{"codes": -1}, {"codes": 1.5}, {"codes": True}, {"codes": 1 << 70}, ["codes"], None])
def test_a_save_refuses_a_cut_that_no_load_would_accept(cut: Any) -> None:
    casckpt.register_wrapper(Scaled, cut=lambda _: cut)
    try:
        with pytest.raises(InvalidInput, match=r"'w': the cut of tests:Scaled is .*, not a dict of non-negative ints"):
            small().check({"w": scaled(1, 8, 16)})
    finally:
        del KINDS["tests:Scaled"]


def test_a_wrapper_with_an_invalid_list_of_tensors_or_an_endless_context_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    one = scaled(1, 8, 16)
    for names, context, why in [
        ([], None, "lists, is not the name"),
        (["absent"], None, "'absent', which the __tensor_flatten__ of a Scaled lists, is not the name"),
        (["codes"], endless, "the context of a Scaled is nested too deeply"),
    ]:
        one.__tensor_flatten__ = lambda given=(names, context): given  # type: ignore[method-assign,misc]
        with pytest.raises(InvalidInput, match=why):
            small().check({"w": one})


@pytest.mark.filterwarnings("ignore:Sparse")  # torch warns once per process that CSR is in beta
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_without_elements_is_read(layout: torch.layout) -> None:
    store = small()
    store.save({"w": torch.zeros(0, 4).to_sparse(layout=layout)}, run="r", step=1)
    assert store.read("r@1")["w"].to_dense().shape == (0, 4)


def test_a_sharded_wrapper_without_elements_is_read() -> None:
    store = small()
    part = casckpt.Shard(scaled(1, 0, 4), (0, 4))
    store.save({"w": part, "b": torch.ones(2)}, run="r", step=1)
    assert list(store.read("r@1")) == ["w", "b"]
    store.load({"w": part}, "r@1")


def test_compare_reports_a_wrapper_that_is_described_differently() -> None:
    store = small()
    store.save(state(1), run="r", step=1)
    other = state(1, options=Options(Mode.EXACT))
    assert [(one.key, one.what) for one in store.compare(other, "r@1").differs] == [("model.w", "description")]


@pytest.mark.parametrize("cast", [False, True])
def test_a_torch_optimizer_does_not_receive_the_state_of_another_in_wrappers(registered: None, cast: bool) -> None:
    store, model = small(), torch.nn.Linear(16, 4, bias=False)
    optim = torch.optim.AdamW(model.parameters())
    average = scaled(1, 4, 16)
    optim.state[model.weight] = {"step": torch.tensor(1.0), "exp_avg": average, "exp_avg_sq": torch.ones(4, 16)}
    store.save({"model": model, "optim": optim}, run="r", step=1)
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.raises(Mismatch, match="to_dense"):
        store.load({"model": model, "optim": fresh}, "r@1", cast=cast)
    assert not fresh.state
