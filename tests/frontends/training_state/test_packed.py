"""Quantized layers of bitsandbytes resume exactly. Layers that do not match are refused before anything changes."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import casckpt
from casckpt.errors import Mismatch, Refused
from casckpt.frontends.trainer import Checkpointer
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state
from tests.support.training import identical

bnb: Any = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes, which is too large for the dev extra")

X = torch.linspace(-1, 1, 128).reshape(2, 64)
JSON = "0.weight.quant_state.bitsandbytes__nf4"


def layer(
    seed: int, shape: tuple[int, int] = (64, 64), blocksize: int = 64, dtype: Any = torch.float32, **options: Any
) -> Any:
    torch.manual_seed(seed)
    options = {"quant_type": "nf4", "compute_dtype": torch.float32} | options
    made = bnb.nn.Linear4bit(*shape, **options)
    made.weight.blocksize, made.weight.data = blocksize, made.weight.data.to(dtype)
    return made.to("cpu")


def network(seed: int, **options: Any) -> Any:
    """Return a 4-bit layer below a layer that trains, as an adapter does."""
    made = layer(seed, **options)
    made.requires_grad_(False)
    return nn.Sequential(made, nn.Linear(made.out_features, 64))


def step(model: nn.Module, optim: torch.optim.Optimizer) -> torch.Tensor:
    optim.zero_grad()
    loss: torch.Tensor = model(X).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    optim.step()
    return loss.detach()


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore")  # warnings of bitsandbytes
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_model_with_4_bit_weights_resumes_bit_for_bit(
    store: casckpt.Store, caplog: pytest.LogCaptureFixture, kind: str, nested: bool
) -> None:
    make = partial(network, quant_type=kind, compress_statistics=nested)
    model = make(0)
    optim = bnb.optim.AdamW8bit(model[1].parameters(), lr=0.1)
    step(model, optim)
    saved = copied(model)
    with Checkpointer(store, run="a") as checkpointer:
        checkpointer.save(1, model, optim)
        expected = step(model, optim)
        after = copied(model)
        checkpointer.wait()
    assert "does not read" not in caplog.text
    fresh = make(1)
    other = bnb.optim.AdamW8bit(fresh[1].parameters(), lr=0.1)
    codes = fresh[0].weight.data_ptr()
    with Checkpointer(store, run="a") as checkpointer:
        assert checkpointer.resume(fresh, other) is not None
    assert identical(copied(fresh), saved)
    assert fresh[0].weight.data_ptr() == codes
    assert fresh[0].quant_state is fresh[0].weight.quant_state
    assert torch.equal(step(fresh, other), expected)
    assert identical(copied(fresh), after)


def test_an_unchanged_4_bit_weight_is_stored_once(store: casckpt.Store) -> None:
    save_model_and_optim_state(store, layer(0), run="a", step=1)
    fresh = layer(1)
    load_model_and_optim_state(store, "a@1", fresh)
    stats = save_model_and_optim_state(store, fresh, run="b", step=1).stats
    assert stats is not None
    assert (stats.bytes_reused, stats.blobs_written) == (stats.bytes_total, 0)


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "quant type": ({"quant_type": "fp4"}, "bitsandbytes__fp4' is missing"),
    "block size": ({"blocksize": 128}, "blocksize is 128 here, but 64"),
    "shape": ({"shape": (64, 32)}, r"shape\[0\] is 32 here, but 64"),
    "transposed": ({"shape": (32, 128)}, r"shape\[0\] is 128 here, but 64"),
    "plain statistics": ({"compress_statistics": False}, "nested_blocksize is null here, but 256"),
    "dtype": ({"dtype": torch.bfloat16}, 'dtype is "bfloat16" here, but "float32"'),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_4_bit_weight_that_does_not_fit_is_refused(store: casckpt.Store, case: str) -> None:
    options, message = MISFITS[case]
    save_model_and_optim_state(store, nn.Sequential(layer(0)), run="a", step=1)
    model = nn.Sequential(layer(1, **options))
    before = copied(model)
    for strict in (True, False):
        with pytest.raises(Mismatch, match=message) as refused:
            load_model_and_optim_state(store, "a@1", model, strict=strict)
        assert "ignore_mismatched=['0.weight*']" in str(refused.value)
        assert identical(copied(model), before)
    load_model_and_optim_state(store, "a@1", model, ignore_mismatched=["0.*"])  # as the message advises
    now = copied(model)
    fits = {"0.bias"} & {name for name, value in before.items() if value.shape == (64,)}
    assert identical(
        {k: v for k, v in now.items() if k not in fits}, {k: v for k, v in before.items() if k not in fits}
    )
    model(X[:, : model[0].in_features].repeat(1, 2)[:, : model[0].in_features])


def test_an_ignored_4_bit_weight_keeps_its_statistics_with_its_codes(store: casckpt.Store) -> None:
    save_model_and_optim_state(store, nn.Sequential(layer(0)), run="a", step=1)
    model = nn.Sequential(layer(1, quant_type="fp4"))
    before = copied(model)
    loaded = load_model_and_optim_state(store, "a@1", model, ignore_mismatched=["0.weight*"])
    assert "model.0.weight.absmax" in loaded.mismatched_keys
    now = copied(model)
    assert torch.equal(now.pop("0.bias"), layer(0).bias)
    assert identical(now, {name: value for name, value in before.items() if name != "0.bias"})


def test_a_model_must_be_quantized_before_the_load(store: casckpt.Store) -> None:
    save_model_and_optim_state(store, nn.Sequential(layer(0)), run="a", step=1)
    model = nn.Sequential(bnb.nn.Linear4bit(64, 64, quant_type="nf4", compute_dtype=torch.float32))
    with pytest.raises(Mismatch, match="quantize the model before the load"):
        load_model_and_optim_state(store, "a@1", model)
    load_model_and_optim_state(store, "a@1", model.to("cpu"))
    assert torch.equal(model(X), layer(0)(X))


def test_weights_without_statistics_either_do_not_change_a_4_bit_weight_or_are_refused(store: casckpt.Store) -> None:
    state = nn.Sequential(layer(0)).state_dict()
    store.save({"model": {"0.bias": state["0.bias"]}}, run="a", step=1)
    store.save({"model": {name: state[name] for name in ("0.weight", "0.bias", "0.weight.absmax")}}, run="a", step=2)
    model = nn.Sequential(layer(1))
    before = copied(model)
    with pytest.raises(Mismatch, match=r"'0\.weight\.quant_map' is missing"):
        load_model_and_optim_state(store, "a@2", model, strict=False)
    assert identical(copied(model), before)
    load_model_and_optim_state(store, "a@1", model, strict=False, unread="ignore")
    now = copied(model)
    assert torch.equal(now.pop("0.bias"), state["0.bias"])
    assert identical(now, {name: value for name, value in before.items() if name != "0.bias"})


def text(**changed: Any) -> bytes:
    state = nn.Sequential(layer(0)).state_dict()
    return json.dumps(json.loads(bytes(state[JSON].tolist())) | changed).encode()


BROKEN = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b'"\xff"',
    "a list": b"[]",
    "deep": b"[" * 60_000,
    "an infinite offset": text(nested_offset=float("inf")),
    "an offset that is not a number": text(nested_offset="0.1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_malformed_json_in_a_4_bit_weight_is_refused_before_anything_changes(store: casckpt.Store, case: str) -> None:
    state = dict(nn.Sequential(layer(0)).state_dict())
    state[JSON] = torch.tensor([*BROKEN[case]], dtype=torch.uint8)
    store.save({"model": state}, run="a", step=1)
    model = nn.Sequential(layer(1))
    before = copied(model)
    for strict in (True, False):
        with pytest.raises(Refused, match="is not the JSON of a 4-bit weight") as refused:
            load_model_and_optim_state(store, "a@1", model, strict=strict)
        assert refused.value.key == JSON
        assert identical(copied(model), before)


WRONG = {
    "block size": (text(blocksize=128), "blocksize is 64 here, but 128"),
    "an unknown field": (text(more=1), "more is null here, but 1"),
    "no offset": (text().replace(b"nested_offset", b"other"), "nested_offset is true here, but false"),
    "too long": (b" " * (1 << 16) + text(), "is uint8 of shape .* here, but uint8 of shape"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_json_of_a_different_4_bit_weight_is_refused(store: casckpt.Store, case: str) -> None:
    saved, message = WRONG[case]
    state = dict(nn.Sequential(layer(0)).state_dict())
    state[JSON] = torch.tensor([*saved], dtype=torch.uint8)
    store.save({"model": state}, run="a", step=1)
    model = nn.Sequential(layer(1))
    before = copied(model)
    with pytest.raises(Mismatch, match=message):
        load_model_and_optim_state(store, "a@1", model)
    assert identical(copied(model), before)


def test_the_table_of_nested_statistics_is_not_shared_after_a_load(store: casckpt.Store) -> None:
    """bitsandbytes uses one table for all weights. A load must not write into it."""
    state = dict(nn.Sequential(layer(0)).state_dict())
    state["0.weight.nested_quant_map"] = state["0.weight.nested_quant_map"] * 2
    store.save({"model": state}, run="a", step=1)
    model, other = nn.Sequential(layer(1)), layer(2)
    before = copied(other)
    load_model_and_optim_state(store, "a@1", model)
    assert identical(copied(model), state)
    assert identical(copied(other), before)


def eight_bit(seed: int, width: int = 64) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(bnb.nn.Linear8bitLt(64, width, has_fp16_weights=False))


@pytest.mark.filterwarnings("ignore")  # warnings of bitsandbytes
def test_8_bit_layers_resume_bit_for_bit(store: casckpt.Store) -> None:
    model, used, fresh = (eight_bit(seed).to("cpu") for seed in range(3))
    used(X)  # moves the statistics from the weight to the layer
    save_model_and_optim_state(store, model, run="a", step=1)
    expected = model(X)
    save_model_and_optim_state(store, model, run="a", step=2)
    for ref in ("a@1", "a@2"):
        for other in (used, fresh, eight_bit(3).to("cpu")):
            load_model_and_optim_state(store, ref, other)
            assert torch.equal(other(X), expected)
            assert identical(copied(other), copied(model))


@pytest.mark.filterwarnings("ignore")  # warnings of bitsandbytes
def test_an_8_bit_layer_that_does_not_fit_is_refused(store: casckpt.Store) -> None:
    save_model_and_optim_state(store, eight_bit(0).to("cpu"), run="a", step=1)
    state = dict(eight_bit(0).to("cpu").state_dict())
    store.save({"model": {name: value for name, value in state.items() if name != "0.SCB"}}, run="a", step=2)
    for model, ref, message in (
        (eight_bit(1, 32).to("cpu"), "a@1", r"'0\.weight' is int8 of shape \[32, 64\] here"),
        (eight_bit(1).to("cpu"), "a@2", r"'0\.SCB' is missing"),
        (eight_bit(1), "a@1", "quantize the model before the load"),
    ):
        before = copied(model)
        for strict in (True, False):
            if strict or "SCB" in message or "int8" in message:
                with pytest.raises(Mismatch, match=message):
                    load_model_and_optim_state(store, ref, model, strict=strict)
        assert identical(copied(model), before)


def test_a_load_into_a_state_dict_refuses_statistics_that_differ(store: casckpt.Store) -> None:
    save_model_and_optim_state(store, nn.Sequential(layer(0)), run="a", step=1)
    model = nn.Sequential(layer(1))
    before = copied(model)
    with pytest.raises(Mismatch, match=r"call casckpt\.load_model_and_optim_state"):
        store.load({"model": model.state_dict()}, "a@1")
    assert identical(copied(model), before)
    load_model_and_optim_state(store, "a@1", model)  # as the message advises
    assert torch.equal(model(X), layer(0)(X))
    store.load({"model": model.state_dict()}, "a@1")
