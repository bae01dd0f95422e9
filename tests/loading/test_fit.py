"""Names that do not match: which names are paired, and the suggested rename that loads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import InvalidInput, Mismatch, MissingKey
from casckpt.loading.fit import Fit, check_fit, chosen, merged, missed_pairs, name_without_adapters, plain, rename_for
from casckpt.loading.options import renamer
from tests.support.renames import rename_in

W = (2, 3)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("module.enc.w", "enc.w"),
        ("_orig_mod.enc.w", "enc.w"),
        ("model.enc._checkpoint_wrapped_module.w", "enc.w"),
        ("_fsdp_wrapped_module.enc._fsdp_wrapped_module.w", "enc.w"),
        ("base_model.model.q.base_layer.w", "q.w"),
        ("base_model.model.head.modules_to_save.default.w", "head.w"),
        ("base_model.model.head.original_module.w", "head.w"),
        ("base_model.model.q.lora_A.default.weight", "q.lora_A.weight"),
        ("q.lora_A.weight", "q.lora_A.weight"),
        ("module", "module"),
        ("model.module", "module"),
    ],
)
def test_names_are_compared_without_the_prefixes_of_wrappers(name: str, without: str) -> None:
    assert plain(name) == without


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("base_model.model.q.base_layer.w", "q.w"),
        ("base_model.model.model.norm.w", "model.norm.w"),
        ("base_model.model.head.modules_to_save.default.w", "head.w"),
        ("base_model.model.q.lora_A.default.weight", "q.lora_A.default.weight"),
        ("module.q.w", "module.q.w"),
    ],
)
def test_only_peft_additions_are_removed_from_base_names(name: str, before: str) -> None:
    assert name_without_adapters(name) == before


@pytest.mark.parametrize(
    ("mine", "its"),
    [("module.w", "w"), ("w", "module.w"), ("a.b.w", "b.w"), ("b.w", "a.b.w"), ("a._orig_mod.w", "x.a.w")],
)
def test_two_names_with_a_common_suffix_at_a_dot_are_a_pair(mine: str, its: str) -> None:
    assert missed_pairs({mine: W}, {its: W}) == {mine: its}
    assert missed_pairs({mine: W}, {its: (3, 2)}) == {}


@pytest.mark.parametrize(("mine", "its"), [("b.w", "ab.w"), ("a.w", "b.w"), ("a.w", "w.a")])
def test_names_that_merely_look_similar_are_not_a_pair(mine: str, its: str) -> None:
    assert missed_pairs({mine: W}, {its: W}) == {}


def test_each_key_is_part_of_at_most_one_pair() -> None:
    assert missed_pairs({"a.w": W, "b.w": W}, {"w": W}) == {"a.w": "w"}
    assert missed_pairs({"w": W}, {"a.w": W, "b.w": W}) == {"w": "a.w"}
    assert missed_pairs({"x.a.w": W, "a.w": W}, {"a.w": W, "y.a.w": W}) == {"x.a.w": "a.w", "a.w": "y.a.w"}


def test_a_model_is_filled_from_only_one_of_two_models_with_equal_names() -> None:
    missed = {"model.a.w": W, "model.b.w": W}
    saved = {"g.a.w": W, "d.b.w": W, "d.a.w": W, "g.b.w": W}
    assert missed_pairs(missed, saved) == {"model.a.w": "d.a.w", "model.b.w": "d.b.w"}


def test_the_most_similar_of_equal_unwrapped_names_are_a_pair() -> None:
    saved = {"model.model.module.w": W, "model.model.w": W}
    for keys in (["model.module.w", "model.w"], ["model.w", "model.module.w"]):
        assert missed_pairs(dict.fromkeys(keys, W), saved) == {key: f"model.{key}" for key in keys}


def test_a_rename_rule_preserves_numbers_and_filled_keys() -> None:
    layers = {f"m.layers.{n}.wrap.a.w": f"layers.{n}.a.w" for n in range(12)}
    assert rename_for(layers, {}) == {r"m\.layers\.(\d+)\.wrap\.(.*)": r"layers.\1.\2"}
    pairs, filled = {"model.a.w": "model.x.a.w"}, {"model.b.w": "model.b.w"}
    rules = rename_for(pairs, filled)
    assert [renamer(rules)(key) for key in (*pairs, *filled)] == ["model.x.a.w", "model.b.w"]


PART = st.sampled_from(
    ["a", "b", "0", "1", "17", "w", "module", "_orig_mod", "base_layer", "q+", "back\\slash", "lora_A"]
)
NAMES = st.dictionaries(st.lists(PART, min_size=1, max_size=5).map(".".join), st.sampled_from([W, (4,)]), max_size=12)


@given(unfilled=NAMES, unread=NAMES, filled=NAMES)
def test_the_rename_maps_every_pair_and_leaves_filled_keys_unchanged(
    unfilled: dict[str, tuple[int, ...]], unread: dict[str, tuple[int, ...]], filled: dict[str, tuple[int, ...]]
) -> None:
    unfilled = {key: shape for key, shape in unfilled.items() if key not in filled}
    unread = {key: shape for key, shape in unread.items() if key not in filled}
    pairs = missed_pairs(unfilled, unread)
    assert len(set(pairs.values())) == len(pairs)
    for key, name in pairs.items():
        one, other = plain(key), plain(name)
        assert unfilled[key] == unread[name]
        assert one == other or one.endswith(f".{other}") or other.endswith(f".{one}")
    apply = renamer(rename_for(pairs, {key: key for key in filled}))
    assert {key: apply(key) for key in pairs} == pairs
    assert [apply(key) for key in filled] == list(filled)


@given(unfilled=NAMES, unread=NAMES)
def test_every_pair_of_matching_names_is_found(
    unfilled: dict[str, tuple[int, ...]], unread: dict[str, tuple[int, ...]]
) -> None:
    pairs = missed_pairs(unfilled, unread)
    for key in unfilled.keys() - pairs.keys():
        for name in unread.keys() - set(pairs.values()):
            one, other = plain(key), plain(name)
            fits = one == other or one.endswith(f".{other}") or other.endswith(f".{one}")
            assert not (fits and unfilled[key] == unread[name])


def part_of(count: int, total: int) -> tuple[Fit, dict[str, tuple[int, ...]]]:
    """Return a model with ``count`` filled tensors. The checkpoint has the rest of its tensors below "net"."""
    keys = [f"model.layers.{n}.w" for n in range(total)]
    filled = {key: key for key in keys[:count]}
    others = {f"model.net.{key.removeprefix('model.')}": W for key in keys[count:]}
    return Fit(filled, dict.fromkeys(keys[count:], W)), {**dict.fromkeys(filled, W), **others}


@pytest.mark.parametrize("count", [0, 5, 261])
def test_a_load_that_misses_over_a_tenth_by_name_raises_an_error_with_the_rename(count: int) -> None:
    fit, saved = part_of(count, 291)
    with pytest.raises(MissingKey, match=f"would fill {count} of 291 tensors") as caught:
        check_fit(fit, saved, "a@1")
    apply = renamer(rename_in(str(caught.value)))
    assert {apply(key) for key in (*fit.filled, *fit.unfilled)} == saved.keys()
    assert caught.value.keys == tuple(fit.unfilled)


@pytest.mark.parametrize("count", [262, 280, 290])
def test_a_load_that_misses_less_than_a_tenth_logs_the_counts(count: int) -> None:
    said = check_fit(*part_of(count, 291), "a@1")
    assert said is not None
    assert f"filled {count} of 291 tensors from a@1" in said
    assert f"{291 - count} of them have different names there" in said


def test_a_complete_load_logs_nothing_and_an_empty_load_raises_an_error() -> None:
    assert check_fit(*part_of(7, 7), "a@1") is None
    assert check_fit(Fit(), {"w": W}, "a@1") is None  # a pipeline stage without tensors
    with pytest.raises(MissingKey, match=r"fill 0 of 1 tensors .* has 'other'.* unread=\"ignore\""):
        check_fit(Fit({}, {"w": W}), {"other": (9,)}, "a@1")
    said = check_fit(Fit({"a": "a"}, {"w": W}), {"a": W, "other": (9,)}, "a@1")
    assert said == "filled 1 of 2 tensors from a@1; left unchanged: 'w'."


def test_adapters_are_rejected_only_by_models_without_adapters() -> None:
    saved = {"q.lora_A.default.weight": (1, 2), "w": W}
    with pytest.raises(Mismatch, match=r"no adapters.*get_peft_model.*merge_and_unload"):
        check_fit(Fit({"w": "w"}, {"v": W}), saved, "a@1")
    assert check_fit(Fit({"w": "w"}, {"v.lora_A.x.weight": W}), saved, "a@1")


def test_a_key_filled_by_any_rank_counts_as_filled() -> None:
    found = merged([Fit({"a": "a"}, {"b": W}), Fit({"b": "b"}, {"c": W})])
    assert (found.filled, found.unfilled, found.count) == ({"a": "a", "b": "b"}, {"c": W}, 3)


def test_of_two_interpretations_of_names_the_one_that_fills_more_keys_is_used() -> None:
    two, one = {"model.a": "model.a", "model.b": "model.b"}, {"model.a": "a"}
    assert chosen("a@1", Fit(two), Fit(one)) is False
    assert chosen("a@1", Fit(one), Fit(two)) is True
    assert chosen("a@1", Fit(two), Fit(two)) is False  # a rename returned the same keys for both
    with pytest.raises(InvalidInput, match=r"twice: 'model\.a'.*rename=.*store\.load"):
        chosen("a@1", Fit({"model.a": "model.a"}), Fit(one))
