"""Keys of a template that share memory: they load where the checkpoint holds one content for them, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from casckpt.checkpoint.loading import tied as tied_module
from casckpt.errors import Mismatch
from tests.support.saves import cells, small

HEAD, EMBED = "head.weight", "embed.weight"


def tied(shape: tuple[int, ...], **options: Any) -> dict[str, torch.Tensor]:
    weight = torch.zeros(shape, **options)
    return {EMBED: weight, HEAD: weight}


@pytest.mark.parametrize("same", [True, False], ids=["one tensor", "equal tensors"])
def test_what_was_tied_or_equal_loads_into_tied(same: bool) -> None:
    store, weight = small(), cells(5, seed=1)
    store.save({EMBED: weight, HEAD: weight if same else weight.clone()}, step=1)
    template = tied(tuple(weight.shape))
    store.load(template, "default@1")
    assert torch.equal(template[HEAD], weight)


@pytest.mark.parametrize("count", [1, 5])
def test_what_differs_is_refused_before_anything_changes(count: int) -> None:
    """Else one would be written over the other while both are compared with their digests."""
    store = small()
    store.save({EMBED: cells(count, seed=1), HEAD: cells(count, seed=2)}, step=1)
    template = tied((cells(count, seed=1).numel(),))
    with pytest.raises(Mismatch, match=r"'embed\.weight' and 'head\.weight' share memory here") as caught:
        store.load(template, "default@1")
    assert caught.value.keys == (EMBED, HEAD)
    assert not template[HEAD].any()
    store.load({HEAD: template[HEAD]}, "default@1")
    assert torch.equal(template[HEAD], cells(count, seed=2))


def test_one_differing_cell_is_enough_however_the_rest_is_stored() -> None:
    store, weight = small(), cells(6, seed=1)
    store.save({EMBED: weight}, step=1)
    other = weight.clone()
    other[-1] += 1
    store.save({EMBED: weight, HEAD: other}, step=2)
    with pytest.raises(Mismatch, match="share memory"):
        store.load(tied(tuple(weight.shape)), "default@2")


def test_one_key_of_the_checkpoint_for_both() -> None:
    store, weight = small(), cells(2, seed=1)
    store.save({EMBED: weight, HEAD: weight + 1}, step=1)
    template = tied(tuple(weight.shape))
    store.load(template, "default@1", rename={".*": EMBED})
    assert torch.equal(template[HEAD], weight)


def test_views_beside_each_other_share_nothing() -> None:
    store = small()
    store.save({"q": torch.ones(4, 3), "k": torch.full((4, 3), 2.0)}, step=1)
    both = torch.zeros(4, 6)
    store.load({"q": both[:, :3], "k": both[:, 3:]}, "default@1")
    assert both[0].tolist() == [1, 1, 1, 2, 2, 2]


def test_empty_tensors_share_nothing() -> None:
    store, empty = small(), torch.empty(0, 3)
    store.save({"a": empty, "b": empty.clone()}, step=1)
    store.load({"a": empty, "b": empty}, "default@1")


def test_each_of_many_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with each would take minutes for an optimizer with one count of steps for its ten thousand parameters."""
    compared: list[str] = []
    differ = tied_module._differ

    def counted(one: Any, other: Any) -> bool:
        compared.append(other.key)
        return differ(one, other)

    monkeypatch.setattr(tied_module, "_differ", counted)
    store, steps = small(), torch.ones(1)
    store.save({f"step{i}": steps for i in range(50)}, step=1)
    store.load({f"step{i}": steps for i in range(50)}, "default@1")
    assert len(compared) == 49
