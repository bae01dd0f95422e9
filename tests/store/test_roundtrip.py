"""Saved values are loaded exactly, with every dtype, every layout, and every bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import InvalidInput
from casckpt.store.store import Store
from tests.support.saves import blob_keys, cells, same_state, small, small_folder
from tests.support.tensors import COMPLEX, LAYOUTS, NAMES, WRONG, bytes_of, conjugated, dtype_of, raw, same, wrong

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


@pytest.fixture(params=["memory", "folder"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return small() if request.param == "memory" else small_folder(tmp_path / "store")


def every_tensor(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {layout: make(name, seed) for layout, make in LAYOUTS.items()} for name in NAMES}


def test_every_dtype_and_layout_is_read_back(anywhere: Store) -> None:
    state = every_tensor(1)
    ckpt = anywhere.save(state, step=1)
    back = anywhere.read("default@1")
    assert same_state(back, state)
    assert all(tensor.is_contiguous() for group in back.values() for tensor in group.values())
    info = ckpt.tensors["complex32.transposed"]
    assert (info.dtype, info.shape, info.bytes) == ("complex32", (5, 3, 4), 240)


def test_every_dtype_and_layout_is_filled_in_place(anywhere: Store) -> None:
    state, template = every_tensor(1), every_tensor(2)
    for group in template.values():
        for layout in ("expanded", "expanded scalar", "overlapping"):  # several of their positions share an element
            group[layout] = torch.empty_like(group[layout], memory_format=torch.contiguous_format)
    tensors = [tensor for group in template.values() for tensor in group.values()]
    anywhere.save(state, step=1)
    anywhere.load(template, "default@1")
    assert same_state(template, state)
    assert all(a is b for a, b in zip(tensors, (t for g in template.values() for t in g.values()), strict=True))


@pytest.mark.parametrize("name", COMPLEX)
def test_conjugated_and_negated_views_are_saved_and_loaded(name: str) -> None:
    store, state = small(), conjugated(name)
    store.save(state, step=1)
    assert same_state(store.read("default@1"), {key: t.resolve_conj().resolve_neg() for key, t in state.items()})


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_large_tensors_that_span_many_cells_and_blobs_are_loaded(anywhere: Store, verify: bool, layout: str) -> None:
    source = raw("float32", (150, 200, 2))
    state = {"contiguous": source, "transposed": source.permute(2, 0, 1), "strided": source[:, ::2]}[layout]
    anywhere.save({"w": state}, step=1)
    assert len(blob_keys(anywhere)) > 1
    assert same(anywhere.read("default@1", verify=verify)["w"], state)
    target = torch.empty_strided(state.shape, state.stride())
    anywhere.load({"w": target}, "default@1", verify=verify)
    assert same(target, state)


def test_saves_and_loads_preserve_the_bits_of_nans() -> None:
    store = small()
    patterns = torch.tensor([0x7F800001, 0x7FC00123, -0x400000, 0x7FFFFFFF, -1], dtype=torch.int32)
    state = {"f": patterns.view(torch.float32), "t": patterns.view(5, 1).view(torch.float32).expand(5, 3)}
    store.save(state, step=1)
    target = {"f": torch.zeros(5), "t": torch.zeros(3, 5).t()}
    store.load(target, "default@1")
    assert bytes_of(target["f"]) == bytes_of(patterns)
    assert same_state(store.read("default@1"), state)
    assert same(target["t"], state["t"])


def test_parameters_and_tensors_with_a_graph_are_saved() -> None:
    store, parameter = small(), torch.nn.Parameter(torch.randn(5, 6))
    state = {"p": parameter, "t": parameter.t(), "g": parameter * 2}
    store.save(state, step=1)
    back = store.read("default@1")
    assert type(back["p"]) is torch.Tensor
    assert not back["p"].requires_grad
    assert same_state(back, {key: value.detach() for key, value in state.items()})
    module = torch.nn.Linear(6, 5, bias=False)
    store.load({"p": module.weight}, "default@1")
    assert torch.equal(module.weight, parameter)
    assert module.weight.requires_grad


def test_a_module_and_its_optimizer_are_saved_and_loaded(anywhere: Store) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 30)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    anywhere.save(state, run="sft", step=3)
    back = anywhere.read("sft@3")
    assert same_state(back["optim"], state["optim"])
    assert list(back["model"]) == list(state["model"])
    assert vars(back["model"]) == vars(state["model"])
    other = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 2))
    other.load_state_dict(back["model"])
    assert all(same(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_read_returns_tied_tensors_as_separate_tensors() -> None:
    store, weight = small(), cells(2)
    store.save({"embed": weight, "head": weight, "view": weight.view(32, -1)}, step=1)
    back = store.read("default@1")
    assert same(back["embed"], weight)
    assert same(back["view"], weight.view(32, -1))
    assert back["embed"].data_ptr() != back["head"].data_ptr()


@pytest.mark.parametrize("problem", [name for name in WRONG if not name.startswith("sparse")])
@pytest.mark.filterwarnings("ignore")  # torch warns that quantization is deprecated and nested tensors are a prototype
def test_the_error_for_a_tensor_without_data_names_its_key(problem: str, tmp_path: Path) -> None:
    from casckpt.store.opening import open as open_store

    store = open_store(tmp_path / "store")
    with pytest.raises(InvalidInput, match=r"^'model\.w': ") as caught:
        store.save({"model": {"ok": torch.zeros(3), "w": wrong(problem)}}, step=1)
    assert caught.value.key == "model.w"
    assert not (tmp_path / "store").exists()


def test_reading_with_a_device_returns_tensors_on_that_device() -> None:
    store = small()
    store.save({"w": torch.ones(3)}, step=1)
    assert store.read("default@1", device=torch.device("cpu"))["w"].device.type == "cpu"


@given(st.sampled_from(NAMES), st.lists(st.integers(0, 9), max_size=4), st.data())
def test_tensors_of_any_shape_and_dimension_order_are_loaded(name: str, shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    state = {"w": raw(name, (*shape,)).permute(order)}
    store = small()
    store.save(state, step=1)
    assert same_state(store.read("default@1"), state)
    target = {"w": torch.empty(tuple(state["w"].shape), dtype=dtype_of(name))}
    store.load(target, "default@1", verify=False)
    assert same_state(target, state)
