"""Loads into a template: checks before any change, values that are replaced, and values that do not change."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import CasckptError, InvalidInput, Mismatch, MissingKey, NotFound
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from tests.support.ids import named
from tests.support.progress_calls import ProgressCalls
from tests.support.saves import cells, same_state, small
from tests.support.tensors import NAMES, dtype_of, raw, same

REF = "default@1"


def state() -> dict[str, Any]:
    return {
        "model": {"w": cells(2, seed=1).view(64, 32), "b": torch.arange(5.0), "n": torch.tensor(3)},
        "optim": {
            "state": {0: {"step": torch.tensor(7.0), "exp": cells(1, seed=2)}},
            "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        },
        "epoch": 5,
        "history": [1.0, 2.0, 3.0],
        "tensors": [torch.ones(2), torch.zeros(3)],
    }


@pytest.fixture
def store() -> Store:
    made = small()
    made.save(state(), step=1)
    return made


def zeros(value: Any) -> Any:
    """Return a template with the same tensors, filled with zeros, and with different plain data."""
    if isinstance(value, dict):
        return {key: zeros(inner) for key, inner in value.items()}
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, list) and any(isinstance(item, dict | torch.Tensor) for item in value):
        return [zeros(item) for item in value]
    return "other"


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in inner for tensor in _tensors(item)]


def untouched(template: Any) -> bool:
    return same_state(template, zeros(template))


def test_every_value_is_filled_in_place_or_replaced(store: Store) -> None:
    template = zeros(state())
    tensors = _tensors(template)
    template["optim"]["groups"] = None
    ckpt = store.load(template, REF)
    assert same_state(template, state())
    assert len(tensors) == 7
    assert all(a is b for a, b in zip(tensors, _tensors(template), strict=True))
    assert (ckpt.missing_keys, ckpt.unread_keys) == ((), ())
    assert ckpt.id == store.get(REF).id


def test_keys_absent_from_the_template_are_not_read(store: Store) -> None:
    template = {"model": {"b": torch.zeros(5)}, "epoch": 0}
    ckpt = store.load(template, REF)
    assert same_state(template, {"model": {"b": torch.arange(5.0)}, "epoch": 5})
    assert set(ckpt.unread_keys) == {
        "model.w", "model.n", "optim.state.0.step", "optim.state.0.exp", "optim.groups", "history", "tensors.0",
        "tensors.1",
    }  # fmt: skip


def test_a_missing_key_is_an_error_before_anything_changes(store: Store) -> None:
    template = {"model": {"b": torch.zeros(5), "bias": torch.zeros(2)}, "epoch": 0, "epochs": 0}
    with pytest.raises(MissingKey, match=r"default@1 lacks 'model\.bias', 'epochs'") as caught:
        store.load(template, REF)
    assert caught.value.keys == ("model.bias", "epochs")
    assert "strict=False" in str(caught.value)
    assert isinstance(caught.value, KeyError)
    assert same_state(template, {"model": {"b": torch.zeros(5), "bias": torch.zeros(2)}, "epoch": 0, "epochs": 0})


def test_an_error_suggests_a_similar_key(store: Store) -> None:
    with pytest.raises(MissingKey, match=re.escape("Did you mean 'model.w'?")):
        store.load({"modul": {"w": torch.zeros(64, 32)}}, REF)


def test_a_load_without_strict_lists_differing_keys(store: Store) -> None:
    left = torch.full((2,), 9.0)
    template = {"model": {"b": torch.zeros(5), "bias": left}, "new": "kept", "none": None}
    ckpt = store.load(template, REF, strict=False)
    assert ckpt.missing_keys == ("model.bias", "new", "none")
    assert same_state(
        template, {"model": {"b": torch.arange(5.0), "bias": torch.full((2,), 9.0)}, "new": "kept", "none": None}
    )


def test_rename_accepts_a_callable(store: Store) -> None:
    template = {"net": {"b": torch.zeros(5)}, "epoch": 0}
    ckpt = store.load(template, REF, rename=lambda key: key.replace("net.", "model."))
    assert torch.equal(template["net"]["b"], torch.arange(5.0))  # type: ignore[index]  # a nested state
    assert "model.b" not in ckpt.unread_keys
    with pytest.raises(MissingKey, match=r"'x\.b'"):
        store.load(template, REF, rename=lambda key: "x." + key[-1])


def test_rename_accepts_regular_expressions(store: Store) -> None:
    template = {"module": {"net": {"b": torch.zeros(5)}}, "epoch": 0, "other": {"b": torch.zeros(5)}}
    store.load(
        template, REF, rename={r"module\.net\.(\w+)": r"model.\1", "other": "no", r"other\.(?P<x>.*)": r"model.\g<x>"}
    )
    assert torch.equal(template["module"]["net"]["b"], torch.arange(5.0))  # type: ignore[index]  # a nested state
    assert torch.equal(template["other"]["b"], torch.arange(5.0))  # type: ignore[index]  # a nested state


def test_a_regular_expression_matches_the_whole_key(store: Store) -> None:
    with pytest.raises(MissingKey, match=r"'model\.bb'"):
        store.load({"model": {"bb": torch.zeros(5)}}, REF, rename={r"model\.b": "model.b"})


@pytest.mark.parametrize("shape", [(5, 1), (4,), (), (6,), (0,)])
def test_a_template_tensor_with_a_different_shape_is_a_mismatch(store: Store, shape: tuple[int, ...]) -> None:
    template = {"epoch": 0, "model": {"n": torch.zeros((), dtype=torch.int64), "b": torch.zeros(shape)}}
    with pytest.raises(Mismatch) as caught:
        store.load(template, REF)
    assert f"'model.b' has shape {list(shape)} here, but [5] in the checkpoint" in str(caught.value)
    assert caught.value.key == "model.b"
    assert isinstance(caught.value, ValueError)
    assert same_state(
        template, {"epoch": 0, "model": {"n": torch.zeros((), dtype=torch.int64), "b": torch.zeros(shape)}}
    )


def test_a_template_tensor_with_a_different_dtype_is_a_mismatch_unless_it_is_cast(store: Store) -> None:
    template = {"model": {"w": torch.zeros(64, 32, dtype=torch.bfloat16), "b": torch.zeros(5)}}
    with pytest.raises(Mismatch, match=r"'model\.w' is bfloat16 here, but float32 in the checkpoint; pass cast=True"):
        store.load(template, REF)
    assert untouched(template)
    store.load(template, REF, cast=True)
    assert same(template["model"]["w"], state()["model"]["w"].bfloat16())
    assert same(template["model"]["b"], state()["model"]["b"])


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_load_with_cast_writes_into_any_layout(store: Store, layout: str, verify: bool) -> None:
    target = {
        "contiguous": torch.zeros(64, 32, dtype=torch.float64),
        "transposed": torch.zeros(32, 64, dtype=torch.float64).t(),
        "strided": torch.zeros(64, 64, dtype=torch.float64)[:, ::2],
    }[layout]
    store.load({"model": {"w": target}}, REF, cast=True, verify=verify)
    assert torch.equal(target, state()["model"]["w"].double())


@pytest.mark.sweep
@pytest.mark.in_memory
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_pair_of_dtypes_is_cast_as_torch_does_or_rejected(full: bool) -> None:
    """By default, an eighth of the pairs that are rejected, so that each dtype occurs."""
    store = small()
    stored = {name: (raw(name, (6,)) if name == "bool" else _numbers(name)) for name in NAMES}
    store.save(stored, step=1)
    refused = 0
    for number, source in enumerate(NAMES):
        template: dict[str, torch.Tensor] = {}
        wanted: dict[str, torch.Tensor] = {}
        for other, target in enumerate(NAMES):
            here = {target: torch.empty(6, dtype=dtype_of(target))}
            want = stored[source] if source == target else _cast(stored[source], target)
            if want is None:
                refused += 1
                if full or (number + other) % 8 == 0:
                    with pytest.raises(Mismatch):
                        store.load(here, REF, cast=True, rename={target: source})
            else:
                template |= here
                wanted[target] = want
        store.load(template, REF, cast=True, rename=dict.fromkeys(template, source))
        assert all(same(template[target], want) for target, want in wanted.items())
    assert 0 < refused < len(NAMES) ** 2


def _cast(tensor: torch.Tensor, name: str) -> torch.Tensor | None:
    """Return the tensor as torch casts it, or None if it cannot, or would drop the imaginary parts."""
    made = torch.empty(tensor.shape, dtype=dtype_of(name))
    if tensor.is_complex() and not made.is_complex():
        return None
    try:
        return made.copy_(tensor)
    except RuntimeError:  # NotImplementedError is also a RuntimeError
        return None


def _numbers(name: str) -> torch.Tensor:
    """The numbers are small, so that no conversion depends on how a processor handles out-of-range numbers."""
    try:
        return torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]).to(dtype_of(name))
    except RuntimeError:  # NotImplementedError is also a RuntimeError
        return raw(name, (6,))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"epoch": torch.zeros(1)}, "'epoch' is a tensor here, but plain data in the checkpoint"),
        ({"history": torch.zeros(3)}, "'history' is a tensor here, but plain data"),
        ({"model": {"b": 3}}, "'model.b' is a tensor in the checkpoint (key 'model.b'), but int here"),
        ({"model": {"b": [1.0]}}, "'model.b' is a tensor in the checkpoint (key 'model.b'), but list here"),
    ],
)
def test_a_tensor_and_plain_data_do_not_match_each_other(store: Store, template: Any, message: str) -> None:
    with pytest.raises(Mismatch) as caught:
        store.load(template, REF)
    assert message in str(caught.value)


def test_lists_are_resized_to_the_saved_length(store: Store) -> None:
    template: dict[str, Any] = {"history": [0.0] * 10, "optim": {"groups": []}}
    store.load(template, REF)
    assert template["history"] == [1.0, 2.0, 3.0]
    assert template["optim"]["groups"] == [{"lr": 0.1, "betas": (0.9, 0.99)}]


def test_none_in_a_template_is_replaced_with_a_cpu_tensor(store: Store) -> None:
    template: dict[str, Any] = {
        "model": {"w": None, "b": torch.zeros(5)},
        "optim": None,
        "epoch": None,
        "tensors": None,
    }
    ckpt = store.load(template, REF)
    whole = state()
    assert same_state(
        template, {key: whole[key] for key in template} | {"model": {k: whole["model"][k] for k in ("w", "b")}}
    )
    assert set(ckpt.unread_keys) == {"model.n", "history"}


def test_none_in_a_template_is_replaced_with_a_renamed_container(store: Store) -> None:
    template: dict[str, Any] = {"resumed": None}
    store.load(template, REF, rename={"resumed": "optim.state"})
    assert same_state(template, {"resumed": state()["optim"]["state"]})


def test_a_tuple_in_a_template_is_replaced_with_one_that_has_the_loaded_values(store: Store) -> None:
    store.save({"t": (torch.ones(2), 5)}, step=2)
    template: dict[str, Any] = {"t": (torch.zeros(2), None)}
    inside = template["t"][0]
    store.load(template, "default@2")
    assert same_state(template, {"t": (torch.ones(2), 5)})
    assert template["t"][0] is inside


@pytest.mark.parametrize(
    "target",
    [torch.zeros(1).expand(5), torch.zeros(3).as_strided((5,), (0,)), torch.zeros(4, 1).as_strided((5,), (0,))],
)
def test_an_expanded_destination_is_rejected(store: Store, target: torch.Tensor) -> None:
    template = {"model": {"n": torch.zeros((), dtype=torch.int64), "b": target}}
    with pytest.raises(InvalidInput, match=r"'model\.b': the elements of an expanded tensor"):
        store.load(template, REF)
    assert not template["model"]["n"]


@pytest.mark.parametrize("target", [torch.zeros(5, device="meta"), torch.zeros(5).to_mkldnn()])
def test_a_destination_without_memory_is_rejected(store: Store, target: torch.Tensor) -> None:
    with pytest.raises(InvalidInput, match=r"'model\.b'"):
        store.load({"model": {"b": target}}, REF)


def test_an_immutable_template_is_rejected_before_anything_changes(store: Store) -> None:
    template: dict[str, Any] = {"model": {"b": torch.zeros(5)}, "optim": MappingProxyType({"groups": None})}
    with pytest.raises(InvalidInput, match="optim"):
        store.load(template, REF)
    assert not template["model"]["b"].any()
    fixed = MappingProxyType({"model": MappingProxyType({"b": torch.zeros(5)})})
    store.load(fixed, REF)  # only tensors, which are filled in place
    assert torch.equal(fixed["model"]["b"], torch.arange(5.0))


@pytest.mark.parametrize("template", [None, [torch.zeros(5)], torch.zeros(5), 5])
def test_a_template_must_be_a_mapping(store: Store, template: Any) -> None:
    with pytest.raises(InvalidInput, match="a state must be a mapping"):
        store.load(template, REF)


def test_loading_into_an_empty_template_reads_nothing(store: Store) -> None:
    ckpt = store.load({}, REF)
    assert len(ckpt.unread_keys) == len(ckpt.tensors) + 3


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        (["model.*"], {"model": state()["model"]}),
        ("model.*", {"model": state()["model"]}),
        (["epoch"], {"epoch": 5}),
        (["*.b", "hist*"], {"model": {"b": torch.arange(5.0)}, "history": [1.0, 2.0, 3.0]}),
        (["optim.state.0.ste[p]"], {"optim": {"state": {0: {"step": torch.tensor(7.0)}}}}),
        (["tensors.*"], {"tensors": [torch.ones(2), torch.zeros(3)]}),
        (["tensors.1"], {"tensors": {1: torch.zeros(3)}}),
        (["*"], state()),
    ],
    ids=named,
)
def test_patterns_select_keys_to_read(store: Store, keys: Any, want: Any) -> None:
    assert same_state(store.read(REF, keys=keys), want)


@pytest.mark.parametrize("pattern", ["modl.*", "model", "Model.*", "", "model.*.x"])
def test_a_pattern_that_matches_nothing_is_an_error(store: Store, pattern: str) -> None:
    with pytest.raises(MissingKey, match=f"nothing in default@1 matches {re.escape(repr(pattern))}"):
        store.read(REF, keys=["epoch", pattern])


def test_an_empty_container_is_selected_by_its_key(store: Store) -> None:
    store.save({"a": {"x": {}, "y": 1}}, step=2)
    assert store.read("default@2", keys=["a.x"]) == {"a": {"x": {}}}


def test_an_empty_list_of_patterns_reads_nothing(store: Store) -> None:
    assert store.read(REF, keys=[]) == {}


def test_a_checkpoint_object_is_accepted_as_a_reference(store: Store) -> None:
    ckpt = store.get(REF)
    for ref in (ckpt, ckpt.id, ckpt.id[:12], "latest", "default@latest", REF):
        assert same_state(store.read(ref), state())
        template = {"epoch": 0}
        store.load(template, ref)
        assert template == {"epoch": 5}


@pytest.mark.parametrize("ref", ["default@2", "other@1", "other@latest", "ab" * 32])
def test_loading_a_missing_checkpoint_raises_not_found(store: Store, ref: str) -> None:
    assert ref not in store
    for call in (lambda: store.read(ref), lambda: store.load({"epoch": 0}, ref), lambda: store.get(ref)):
        with pytest.raises(NotFound):
            call()


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", True])
def test_invalid_thread_counts_are_rejected(store: Store, threads: Any) -> None:
    for call in (
        lambda: store.read(REF, threads=threads),
        lambda: store.load({"epoch": 0}, REF, threads=threads),
        lambda: store.save({}, step=9, threads=threads),
    ):
        with pytest.raises(InvalidInput, match="threads="):
            call()


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads_loads_the_same_values(store: Store, threads: int) -> None:
    assert same_state(store.read(REF, threads=threads), state())
    store.save(state() | {"x": cells(40)}, step=2, threads=threads)
    assert same_state(store.read("default@2", threads=threads, keys=["model.*"]), {"model": state()["model"]})


def test_the_progress_of_a_load_counts_every_byte_once(store: Store) -> None:
    data = {"w": cells(9.5), "x": torch.arange(10)}
    first, again, read = ProgressCalls(), ProgressCalls(), ProgressCalls()
    store.save(data, step=5, progress=first)
    store.save(data, step=6, progress=again)
    store.read("default@6", progress=read)
    for seen in (first, again, read):
        assert seen.done == seen.total == 9.5 * 4096 + 80


def test_state_dict_metadata_survives_a_load(store: Store) -> None:
    module = torch.nn.BatchNorm1d(4)
    store.save({"m": module.state_dict()}, step=2)
    template: dict[str, Any] = {"m": None}
    store.load(template, "default@2")
    assert isinstance(template["m"], OrderedDict)
    assert template["m"]._metadata == module.state_dict()._metadata  # type: ignore[attr-defined]  # torch hangs it on the dict


@given(st.data())
def test_any_part_of_a_state_loads_into_any_layout(data: st.DataObject) -> None:
    """The template has some of the keys. Its tensors are permuted, and are slices of larger tensors."""
    store = small()
    shapes = data.draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=4))
    whole = {str(i): raw("int32", (*shape,), i) for i, shape in enumerate(shapes)}
    store.save(whole, step=1)
    template = {}
    for key in data.draw(st.lists(st.sampled_from(sorted(whole)), unique=True)):
        order = data.draw(st.permutations(range(whole[key].dim())))
        larger = torch.zeros([whole[key].shape[dim] * 2 for dim in order], dtype=torch.int32)
        part = larger[tuple(slice(n // 2, n // 2 + n) for n in (whole[key].shape[dim] for dim in order))]
        template[key] = part.permute(*(order.index(dim) for dim in range(len(order))))
    try:
        store.load(template, REF, verify=data.draw(st.booleans()))
    except CasckptError as error:
        raise AssertionError(template) from error
    assert all(same(template[key], whole[key]) for key in template)


def test_a_list_is_resized_to_the_saved_length(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.save({"l": [torch.ones(2), torch.zeros(3)], "p": [1, 2, 3]}, step=1)
    template: dict[str, Any] = {"l": [], "p": [0]}
    store.load(template, "default@1")
    assert [value.tolist() for value in template["l"]] == [[1, 1], [0, 0, 0]]
    assert template["p"] == [1, 2, 3]


@pytest.mark.parametrize("here", [torch.zeros(2), 5, "text"], ids=["tensor", "int", "text"])
def test_a_template_with_a_leaf_in_place_of_a_saved_container_is_a_mismatch(tmp_path: Path, here: Any) -> None:
    store = open_store(tmp_path / "store")
    store.save({"a": {"b": torch.ones(2)}}, step=1)
    with pytest.raises(Mismatch, match=r"'a' is .* here, but a dict in the checkpoint"):
        store.load({"a": here}, "default@1")
