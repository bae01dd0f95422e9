"""A folder of safetensors files holds a complete model with its config, or casckpt refuses it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
import torch
from safetensors.torch import load_file

from casckpt.errors import Conflict
from casckpt.store.store import Store


def test_exports_never_load_with_random_weights(store: Store, tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "optim": {"m": torch.ones(2)}}
    store.save(state, step=1, attachments={"config.json": b"{}"})
    store.export("latest", tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(Conflict, match="would load random weights"):
        store.export("latest", tmp_path / "out", format="safetensors", force=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    found = store.export("latest", tmp_path / "all", format="safetensors")
    assert (found.attachments, found.skipped, found.left_out) == ((), ("config.json",), ())
    found = store.export("latest", tmp_path / "all", format="safetensors", strip_prefix="model", force=True)
    assert (found.attachments, found.left_out) == (("config.json",), ("optim.m",))
    assert list(load_file(tmp_path / "all" / "model.safetensors")) == ["w"]


def test_values_of_registered_classes_are_omitted(store: Store, tmp_path: Path) -> None:
    """A reader may not have imported the class.

    For example, Megatron-core lets torch.load read paths and numpy arrays.
    """
    store.save({"path": PurePosixPath("x"), "w": torch.ones(2)}, step=1)
    with torch.serialization.safe_globals([PurePosixPath]):
        assert store.export("latest", tmp_path / "x.pt").left_out == ("path",)
    assert list(torch.load(tmp_path / "x.pt")) == ["w"]


def test_exporting_part_of_a_model_omits_the_config(store: Store, tmp_path: Path) -> None:
    """Regression: ``--keys`` wrote the config.json of the whole model and did not report the missing keys."""
    state = {"model": {"w": torch.ones(2), "v": torch.ones(1)}, "optim": {"m": torch.ones(2)}}
    store.save(state, step=1, attachments={"config.json": b"{}", "tokenizer.json": b"{}"})
    found = store.export("latest", tmp_path / "part", keys=["model.w"])
    assert (found.format, found.skipped, found.attachments) == ("hf", ("config.json",), ("tokenizer.json",))
    found = store.export("latest", tmp_path / "whole", keys=["model.*"])
    assert (found.skipped, "config.json" in found.attachments) == ((), True)
    found = store.export("latest", tmp_path / "as it is", strip_prefix="")
    assert (found.format, found.skipped, found.attachments) == ("hf", ("config.json",), ("tokenizer.json",))
    before = (tmp_path / "whole" / "model.safetensors").read_bytes()
    with pytest.raises(Conflict, match="would load random weights"):
        store.export("latest", tmp_path / "whole", format="hf", keys=["model.w"], force=True)
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == before


def test_a_requested_export_with_unchanged_keys_includes_the_config(store: Store, tmp_path: Path) -> None:
    flat = {"model.w": torch.ones(2), "head.w": torch.ones(1)}
    unclear = {key.replace("head", "optim.state"): value for key, value in flat.items()}
    for step, state in enumerate((flat, unclear)):
        store.save(state, step=step, attachments={"config.json": b"{}"})
        found = store.export("latest", tmp_path / f"{step}", strip_prefix="")
        assert (found.tensors, found.attachments) == (2, ("config.json",))


@pytest.mark.parametrize("is_nested", [False, True])
def test_an_export_reports_a_head_that_differs_from_the_embeddings_it_should_be_tied_to(
    store: Store, tmp_path: Path, is_nested: bool
) -> None:
    names = ["lm_head.weight", "model.embed_tokens.weight"]
    for step, config in enumerate((b'{"tie_word_embeddings": true}', b"{}", b"[]", b"nothing")):
        for other in (1.0, 2.0):
            state = dict(zip(names, (torch.ones(4), torch.full((4,), other)), strict=True))
            store.save(
                {"model": state} if is_nested else state, step=step, attachments={"config.json": config}, overwrite=True
            )
            found = store.export("latest", tmp_path / f"{step} {other}", format="hf")
            assert len(found.notes) == (step == 0 and other == 2.0)
            assert all(f"{names[0]}' to the input" in note for note in found.notes)
