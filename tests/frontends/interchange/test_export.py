"""`casckpt.export` chooses the format by the suffix, and plain torch.load can read its torch.save files."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import casckpt
from casckpt.errors import Damaged, InvalidInput
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.store.store import Store
from casckpt.tensors.dtypes import torch_dtype
from tests.support.training import identical


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("name", "config", "format"),
    [
        ("m.pt", True, "torch"), ("m.PTH", False, "torch"), ("pytorch_model.bin", False, "torch"),
        ("m.safetensors", True, "safetensors"), ("out", False, "safetensors"), ("out.v2", True, "hf"),
    ],
)  # fmt: skip
def test_suffix_and_attachments_determine_the_format(
    store: Store, tmp_path: Path, name: str, config: bool, format: str
) -> None:
    saved = store.save({"w": torch.ones(2)}, step=1, attachments={"config.json": b"{}"} if config else {})
    found = casckpt.export(store, saved, tmp_path / name)
    assert (found.format, found.tensors, found.nbytes) == (format, 1, 8)
    assert identical(_loaded(Path(found.files[0])), {"w": torch.ones(2)})


def _loaded(path: Path) -> Any:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path)


def test_a_folder_name_can_have_a_suffix(store: Store, tmp_path: Path) -> None:
    store.save({"w": torch.ones(2)}, step=1)
    out = tmp_path / "m.safetensors"
    out.mkdir()
    assert store.export("latest", out).files == (out / "model.safetensors",)
    (tmp_path / "m.pt").mkdir()
    assert store.export("latest", tmp_path / "m.pt", format="hf").files == (tmp_path / "m.pt" / "model.safetensors",)


def test_a_model_is_exported_to_one_file(store: Store, tmp_path: Path) -> None:
    model = network()
    casckpt.save_model_and_optim_state(store, model, torch.optim.SGD(model.parameters(), 0.1), run="a", step=1)
    store.export("a@1", tmp_path / "m.safetensors", format="hf")
    assert identical(sorted(load_file(tmp_path / "m.safetensors").items()), sorted(model.state_dict().items()))


def test_torch_load_reads_an_exported_training_checkpoint(store: Store, tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    with Checkpointer(store, run="a") as checkpointer:
        checkpointer.save(1, model, optimizer, TrainState(optimizer=optimizer))
    found = store.export("a@1", tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt")
    assert identical(loaded["model"], model.state_dict())
    assert identical(loaded["optim"]["state"]["0.weight"]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])  # type: ignore[index]  # a module that is indexed
    assert found.left_out, "the state of numpy's generator"
    assert all("numpy" in key for key in found.left_out)
    assert found.left_out == tuple(key for key in found.left_out if key.startswith("train.0."))
    everything = store.export("a@1", tmp_path / "everything.pt", allow_pickle=True)
    assert everything.left_out == ()
    assert torch.load(tmp_path / "everything.pt", weights_only=False)["train"][0].keys() >= loaded["train"][0].keys()


def test_torch_load_reads_exported_model_weights(store: Store, tmp_path: Path) -> None:
    model, fresh = network(), network()
    casckpt.save_model_and_optim_state(store, model, torch.optim.SGD(model.parameters(), 0.1), run="a", step=1)
    found = store.export("a@1", tmp_path / "m.bin", strip_prefix="model", rename={r"0\.(.*)": r"first.\1"})
    assert found.prefix == "model."
    assert all(key.startswith("optim.") for key in found.left_out)
    loaded = torch.load(tmp_path / "m.bin")
    fresh.load_state_dict({name.replace("first.", "0."): value for name, value in loaded.items()})
    assert identical(dict(fresh.state_dict()), dict(model.state_dict()))


def test_an_exported_model_has_its_module_versions_so_torch_converts_nothing(store: Store, tmp_path: Path) -> None:
    norm = torch.nn.BatchNorm1d(2)
    store.save({"nets": {"main": norm}, "bare": dict(norm.state_dict())}, run="v", step=1)
    for given, want in (
        ({"strip_prefix": "nets.main"}, 2),
        ({"strip_prefix": "bare"}, None),
        ({"keys": ["nets.*"]}, None),
    ):
        store.export("v@1", tmp_path / "m.pt", force=True, **given)
        assert getattr(torch.load(tmp_path / "m.pt"), "_metadata", {}).get("", {}).get("version") == want


def test_containers_are_exported_as_types_that_torch_load_reads(store: Store, tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "a": defaultdict(list, {"w": torch.ones(2)}), "o": OrderedDict(w=torch.ones(1)), "n": np.arange(3),
        "pair": (torch.ones(3), np.float64(1), "x"), "path": Path("x"), "e": defaultdict(int),
    }  # fmt: skip
    store.save(state, step=1)
    found = store.export("latest", tmp_path / "x.pt")
    assert set(found.left_out) == {"n", "pair.1", "path", "e"}
    expected = {"a": {"w": torch.ones(2)}, "o": OrderedDict(w=torch.ones(1)), "pair": {0: torch.ones(3), 2: "x"}}
    assert identical(torch.load(tmp_path / "x.pt"), expected)


class _Averaged:
    """An object that holds tensors of its own."""

    def __init__(self) -> None:
        self.mean = torch.full((6,), 3.0)
        self.layer = torch.nn.Linear(2, 3)


def test_tensors_inside_objects_keep_only_their_own_data(store: Store, tmp_path: Path) -> None:
    ours = _Averaged()
    store.save({"first": ours, "w": torch.arange(6.0), "v": torch.ones(6)}, step=1, allow_pickle=True)
    store.export("latest", tmp_path / "x.pt", allow_pickle=True)
    loaded = torch.load(tmp_path / "x.pt", weights_only=False)
    assert identical(loaded["first"].mean, ours.mean)
    assert identical(dict(loaded["first"].layer.state_dict()), dict(ours.layer.state_dict()))
    assert identical({key: loaded[key] for key in "wv"}, {"w": torch.arange(6.0), "v": torch.ones(6)})


def test_an_int_that_torch_load_rejects_is_omitted(store: Store, tmp_path: Path) -> None:
    store.save({"huge": 1 << 5000, "seed": 1 << 100, "w": torch.ones(2)}, step=1)
    assert store.export("latest", tmp_path / "x.pt").left_out == ("huge",)
    assert identical(torch.load(tmp_path / "x.pt"), {"seed": 1 << 100, "w": torch.ones(2)})


def test_metadata_that_torch_load_rejects_is_omitted(store: Store, tmp_path: Path) -> None:
    kept, lost = OrderedDict(w=torch.ones(2)), OrderedDict(w=torch.zeros(2))
    vars(kept)["_metadata"], vars(lost)["_metadata"] = {"": {"version": 2}}, {"": {"seen": np.arange(3)}}
    store.save({"kept": kept, "lost": lost}, step=1)
    store.export("latest", tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt")
    assert identical(loaded, {"kept": OrderedDict(kept), "lost": OrderedDict(lost)})
    assert (vars(loaded["kept"]), vars(loaded["lost"])) == ({"_metadata": {"": {"version": 2}}}, {})


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_a_dtype_that_torch_save_does_not_support_is_rejected(store: Store, tmp_path: Path, format: Any) -> None:
    store.save({"w": torch.zeros(3, dtype=torch.uint8).view(torch_dtype("uint4"))}, step=1)
    with pytest.raises(InvalidInput, match=r"torch\.save cannot write this checkpoint \(dtype torch\.uint4"):
        store.export("latest", tmp_path / "x", format=format)
    assert list(tmp_path.glob("x*")) == []


@pytest.mark.parametrize("format", ["hf", "safetensors", "torch", "dcp"])
def test_an_incomplete_tensor_stops_an_export_before_anything_is_written(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: Any
) -> None:
    """A hostile shape would use up all memory, or yield endless boxes."""
    store.save({"w": torch.ones(3)}, step=1)
    monkeypatch.setattr("casckpt.contents.contents.covers", lambda table, region: False)
    with pytest.raises(Damaged, match=r"holds only a part of 'w' \(12 bytes\)"):
        store.export("latest", tmp_path / "x", format=format)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"format": "gguf"}, "format='gguf' is not a known format; choose one of hf, safetensors, dcp, torch"),
        ({"format": "dcp", "strip_prefix": "model"}, "--strip-prefix applies to hf and safetensors and torch"),
        (
            {"format": "torch", "max_shard_size": "1GB"},
            "--max-shard-size applies to hf and safetensors: --format torch",
        ),
    ],
)
def test_arguments_that_a_format_does_not_support_are_rejected(
    store: Store, tmp_path: Path, options: Any, match: str
) -> None:
    store.save({"w": torch.ones(2)}, step=1)
    with pytest.raises(InvalidInput, match=match):
        casckpt.export(store, "latest", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "format", "of"),
    [("m.pt", "hf", "torch"), ("m.bin", "safetensors", "torch"), ("m.PTH", "dcp", "torch"),
     ("m.safetensors", "torch", "safetensors"), ("m.safetensors", "dcp", "safetensors")],
)  # fmt: skip
def test_the_suffix_of_a_different_format_is_rejected(
    store: Store, tmp_path: Path, name: str, format: Any, of: str
) -> None:
    store.save({"w": torch.ones(2)}, step=1)
    with pytest.raises(InvalidInput, match=rf"{name} has the suffix of --format {of}, but the format is {format}"):
        store.export("latest", tmp_path / name, format=format)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["m.onnx", "m.gguf", "M.ONNX"])
def test_suffixes_of_unsupported_formats_are_rejected(name: str, store: Store, tmp_path: Path) -> None:
    store.save({"w": torch.ones(2)}, step=1)
    with pytest.raises(InvalidInput, match=r"cannot write \.\w+ files: use a name that ends in \.safetensors"):
        store.export("latest", tmp_path / name)
    assert not (tmp_path / name).exists()
    store.export("latest", tmp_path / "m.safetensors")
    store.export("latest", tmp_path / name, format="torch")


class ScheduleFree(torch.optim.SGD):
    """Stores its mode as schedule-free optimizers do."""

    def set_mode(self, *, train: bool) -> None:
        for group in self.param_groups:
            group["train_mode"] = train


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("mode", [True, False, None])
def test_an_export_warns_that_the_model_has_the_weights_of_train_mode(
    store: Store, tmp_path: Path, lr: Any, mode: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    optim = ScheduleFree(model.parameters(), lr=lr)
    if mode is not None:
        optim.set_mode(train=mode)
    saved = Checkpointer(store, run="sft").save(1, {"model": model, "tuned": optim})
    casckpt.export(store, saved, tmp_path / "m.safetensors")
    assert ("'tuned' of sft@1 was saved in train mode" in caplog.text) is (mode is True)
