"""Keys are grouped by layer, in a limited number of groups, and each key is in one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.plan.layers import group, layer_of, summed

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


def test_neighboring_layers_share_a_group_if_there_are_many() -> None:
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
def test_the_groups_contain_every_byte(nbytes: dict[str, int]) -> None:
    assert sum(summed(nbytes, group(nbytes)).values()) == sum(nbytes.values())
