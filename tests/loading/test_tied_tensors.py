"""Template keys that share memory load only if the checkpoint holds the same values for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from casckpt.errors import Mismatch
from casckpt.loading import tied_tensors as tied_module
from casckpt.loading.entry_reader import EntryReader
from tests.support.saves import cells, small

HEAD, EMBED = "head.weight", "embed.weight"


def tied(shape: tuple[int, ...], **options: Any) -> dict[str, torch.Tensor]:
    weight = torch.zeros(shape, **options)
    return {EMBED: weight, HEAD: weight}


@pytest.mark.parametrize("same", [True, False], ids=["one tensor", "equal tensors"])
def test_tied_tensors_load_values_that_are_tied_or_equal(same: bool) -> None:
    store, weight = small(), cells(5, seed=1)
    store.save({EMBED: weight, HEAD: weight if same else weight.clone()}, step=1)
    template = tied(tuple(weight.shape))
    store.load(template, "default@1")
    assert torch.equal(template[HEAD], weight)


@pytest.mark.parametrize("count", [1, 5])
def test_tied_tensors_with_different_values_are_rejected_before_any_change(count: int) -> None:
    """Otherwise, one load would overwrite the other while both are being verified."""
    store = small()
    store.save({EMBED: cells(count, seed=1), HEAD: cells(count, seed=2)}, step=1)
    template = tied((cells(count, seed=1).numel(),))
    with pytest.raises(Mismatch, match=r"'embed\.weight' and 'head\.weight' share memory here") as caught:
        store.load(template, "default@1")
    assert caught.value.keys == (EMBED, HEAD)
    assert not template[HEAD].any()
    store.load({HEAD: template[HEAD]}, "default@1")
    assert torch.equal(template[HEAD], cells(count, seed=2))


def test_tied_tensors_are_rejected_if_a_single_cell_differs() -> None:
    store, weight = small(), cells(6, seed=1)
    store.save({EMBED: weight}, step=1)
    other = weight.clone()
    other[-1] += 1
    store.save({EMBED: weight, HEAD: other}, step=2)
    with pytest.raises(Mismatch, match="share memory"):
        store.load(tied(tuple(weight.shape)), "default@2")


def test_one_stored_key_can_fill_both_tied_tensors() -> None:
    store, weight = small(), cells(2, seed=1)
    store.save({EMBED: weight, HEAD: weight + 1}, step=1)
    template = tied(tuple(weight.shape))
    store.load(template, "default@1", rename={".*": EMBED})
    assert torch.equal(template[HEAD], weight)


def test_adjacent_views_do_not_count_as_sharing_memory() -> None:
    store = small()
    store.save({"q": torch.ones(4, 3), "k": torch.full((4, 3), 2.0)}, step=1)
    both = torch.zeros(4, 6)
    store.load({"q": both[:, :3], "k": both[:, 3:]}, "default@1")
    assert both[0].tolist() == [1, 1, 1, 2, 2, 2]


# different tensors that share memory

View = Callable[[torch.Tensor], torch.Tensor]
VIEWS: dict[str, View] = {
    "transposed": lambda data: data.t(),
    "flat": lambda data: data.view(-1),
    "from an element on": lambda data: data.view(-1)[1000:],
    "first rows": lambda data: data[:100],
    "as integers": lambda data: data.view(torch.int32),
    "negative": torch._neg_view,
    "each other row": lambda data: data[::2],
}
OF_COMPLEX: dict[str, View] = {
    "conjugate": lambda data: data.conj(),
    "as pairs": torch.view_as_real,
    "imaginary, of the conjugate": lambda data: data.conj().imag,
    "transposed, conjugate": lambda data: data.t().conj(),
}
CASES = [(view, torch.float32) for view in VIEWS.values()] + [(view, torch.complex64) for view in OF_COMPLEX.values()]
NAMES = [*VIEWS, *OF_COMPLEX]


def of_two(view: View, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"a": whole, "b": view(whole)}


@pytest.mark.parametrize(("view", "dtype"), CASES, ids=NAMES)
@pytest.mark.parametrize("extent", [120, 300], ids=["one cell", "several"])
def test_views_of_shared_memory_load_their_saved_values(view: View, dtype: torch.dtype, extent: int) -> None:
    """An update also loads them from one version to the next, whether they are stored raw or encoded."""
    store = small()
    held = store.save(of_two(view, torch.randn(extent, extent, dtype=dtype)), step=1)
    second = torch.randn(extent, extent, dtype=dtype)
    store.save_async(of_two(view, second), step=2).result()
    found = of_two(view, torch.zeros(extent, extent, dtype=dtype))
    store.load(found, "default@1")
    assert store.compare(found, "default@1").is_same
    store.update(found, "default@2", held=held)
    assert torch.equal(found["a"], second)


@pytest.mark.parametrize(("view", "dtype"), CASES, ids=NAMES)
@pytest.mark.parametrize("extent", [120, 300], ids=["one cell", "several"])
def test_views_of_shared_memory_with_different_stored_values_are_rejected(
    view: View, dtype: torch.dtype, extent: int
) -> None:
    """Loads and updates refuse these views before any change, even if a single element differs."""
    store, whole = small(), torch.randn(extent, extent, dtype=dtype)
    held = store.save(of_two(view, whole), step=1)
    other = view(whole).clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    other.view(-1)[other.numel() // 2] += 1
    store.save({"a": whole, "b": other}, step=2)
    found = of_two(view, whole.clone())
    for call in (store.load, lambda state, ref: store.update(state, ref, held=held)):
        with pytest.raises(Mismatch, match="'a' and 'b' share memory here") as caught:
            call(found, "default@2")
        assert caught.value.keys == ("a", "b")
        assert torch.equal(found["a"], whole)


def test_a_head_that_shares_embedding_rows_rejects_different_values() -> None:
    store, embed = small(), torch.randn(400, 16)
    store.save({EMBED: embed, HEAD: torch.randn(300, 16)}, step=1)
    model = torch.zeros(400, 16)
    with pytest.raises(Mismatch, match="share memory here"):
        store.load({EMBED: model, HEAD: model[:300]}, "default@1")
    assert not model.any()
    store.load({EMBED: model, HEAD: model[:300].clone()}, "default@1")
    assert torch.equal(model, embed)


@pytest.mark.parametrize("differ", [False, True])
def test_partly_overlapping_views_need_one_value_per_element(differ: bool) -> None:
    store, whole = small(), torch.randn(150, 10)
    second = whole[50:].clone()
    second[49] += differ
    store.save({"a": whole[:100], "b": second}, step=1)
    both = torch.zeros(150, 10)
    with pytest.raises(Mismatch) if differ else nullcontext():
        store.load({"a": both[:100], "b": both[50:]}, "default@1")
    assert bool(both.any()) != differ


@pytest.mark.parametrize("differ", [False, True])
def test_tied_tensors_with_different_cells_or_dtypes_are_read_to_compare_them(differ: bool) -> None:
    store, weight = small(), torch.randn(3000, dtype=torch.bfloat16)
    wide = weight.float()
    wide[7] += differ
    store.save({EMBED: weight, HEAD: wide}, step=1)
    template = tied((3000,), dtype=torch.bfloat16)
    with pytest.raises(Mismatch, match="share memory") if differ else nullcontext():
        store.load(template, "default@1", cast=True)
    assert bool(template[EMBED].any()) != differ


def test_overlapping_views_are_not_filled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a cell is decoded in place, its memory holds the base, and so does every view of this memory."""
    filled: list[int] = []
    run = EntryReader.fill

    def counted(self: EntryReader, wants: Any, done: Any = frozenset()) -> None:
        filled.append(len(wants))
        run(self, wants, done)

    whole = torch.randn(120, 120)
    store = small()
    store.save({"a": whole, "b": whole.t(), "c": whole[:50], "d": torch.ones(3), "e": whole.t()}, step=1)
    found = torch.zeros(120, 120)
    monkeypatch.setattr(EntryReader, "fill", counted)
    store.load({"a": found, "b": found.t(), "c": found[:50], "d": torch.zeros(3), "e": found.t()}, "default@1")
    assert filled[-4:] == [2, 1, 1, 1]
    assert torch.equal(found, whole)


def test_columns_of_one_matrix_are_not_read_to_compare_them(monkeypatch: pytest.MonkeyPatch) -> None:
    store, state = small(), {f"q{i}": torch.full((20, 2), float(i)) for i in range(30)}
    store.save(state, step=1)
    whole = torch.zeros(20, 60)
    monkeypatch.setattr(tied_module, "_read_differently", None)
    store.load({f"q{i}": whole[:, 2 * i : 2 * i + 2] for i in range(30)}, "default@1")
    assert whole[7].tolist() == [i for i in range(30) for _ in range(2)]


def test_empty_tensors_do_not_count_as_sharing_memory() -> None:
    store, empty = small(), torch.empty(0, 3)
    store.save({"a": empty, "b": empty.clone()}, step=1)
    store.load({"a": empty, "b": empty}, "default@1")


def test_many_tied_tensors_are_compared_only_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing all pairs would take minutes for an optimizer whose ten thousand parameters share one step count."""
    compared: list[str] = []
    differ = tied_module._differ

    def counted(manifest: Any, one: Any, other: Any) -> bool | None:
        compared.append(other.key)
        return differ(manifest, one, other)

    monkeypatch.setattr(tied_module, "_differ", counted)
    store, steps = small(), torch.ones(1)
    store.save({f"step{i}": steps for i in range(50)}, step=1)
    store.load({f"step{i}": steps for i in range(50)}, "default@1")
    assert len(compared) == 49
