"""Advice about exports and imports: safetensors, torch.save, folders of other programs, views and serving."""

from __future__ import annotations

import json
import pathlib
import pickle
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

pytest.importorskip("uvicorn", reason="needs casckpt[serve]")

import casckpt
from casckpt.base.names import HUB_FILE
from casckpt.errors import InvalidInput, Mismatch, MissingKey, Refused, Unsupported
from casckpt.frontends.convert import import_any, look_at
from casckpt.frontends.files import AS_FILES
from casckpt.frontends.interchange.olmo_import import import_olmo_trainer
from casckpt.frontends.interchange.safetensors import files, layout
from casckpt.frontends.interchange.safetensors.importing import import_safetensors
from casckpt.frontends.interchange.torch_files import casckpt_to_torch_save, torch_save_to_casckpt
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state
from tests.hints.conftest import Run
from tests.support.dcp import stock
from tests.support.fuzz import KINDS
from tests.support.hints import Messages, follows
from tests.support.hub import check_loads, llama
from tests.support.serving import serving
from tests.support.training import identical

Store = casckpt.Store


class Odd:
    """An object that can only be pickled."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    def __hash__(self) -> int:
        return 1


@follows("frontends/interchange/torch_files.py:_read", "import that file")
def test_the_weights_of_a_torchscript_archive_are_imported_as_advised(
    store: Store, tmp_path: Path, messages: Messages
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch plans to remove TorchScript
        scripted = torch.jit.script(model)
        torch.jit.save(scripted, tmp_path / "scripted.pt")
        with messages.error(InvalidInput) as advice:
            torch_save_to_casckpt(tmp_path / "scripted.pt", store, run="a", step=1)
        again: Any = torch.jit.load  # torch has no types for it
        torch.save(again(tmp_path / "scripted.pt").state_dict(), tmp_path / "weights.pt")
        advice.says(".state_dict(), file), and import that file")
        torch_save_to_casckpt(tmp_path / "weights.pt", store, run="a", step=1)
        fresh = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        load_model_and_optim_state(store, "a@1", fresh, None)
        assert identical(fresh.state_dict(), model.state_dict())
        store.save({"model": scripted}, run="b", step=1)
        other = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        store.load({"model": other}, "b@1")
        assert identical(other.state_dict(), model.state_dict())


@pytest.fixture
def training(store: Store) -> Store:
    """A store with a model and an optimizer as a@1."""
    state = {"model": {"h": {"w": torch.ones(3)}}, "optim": {"m": torch.zeros(2)}}
    store.save(state, run="a", step=1, attachments={"note.txt": b"x"})
    return store


def names_in(path: Path) -> set[str]:
    return set(safetensors.torch.load_file(path))


# targets


@follows(
    "frontends/interchange/export.py:_check_suffix",
    "has the suffix of --format …, but the format is …; choose a different name",
)
@pytest.mark.parametrize("way", ["name", "format"])
def test_an_export_succeeds_with_a_suffix_that_matches_its_format(
    saved: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    advice = messages.text(
        run("export", saved.url, "a@1", tmp_path / "x.pt", "--format", "safetensors", status=1).output
    )
    if way == "name":
        advice.says("choose a different name")
        run("export", saved.url, "a@1", tmp_path / "x.safetensors", "--format", "safetensors")
        assert names_in(tmp_path / "x.safetensors") == {"w", "b"}
    else:
        run("export", saved.url, "a@1", tmp_path / "x.pt", *advice.says("--format torch").split())
        assert torch.load(tmp_path / "x.pt").keys() == {"w", "b"}


@follows("frontends/interchange/export.py:_check_known", "applies to …: --format … does not support it")
def test_an_option_works_with_the_formats_that_the_error_names(
    saved: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    command = ("export", saved.url, "a@1", tmp_path / "out", "--keys", "w", "--format")
    advice = messages.text(run(*command, "dcp", status=1).output)
    for format in ("hf", "safetensors", "torch"):
        advice.says(format)
    run(*command[:3], tmp_path / "out.pt", *command[4:], "torch")
    run(*command, "safetensors")
    assert names_in(tmp_path / "out" / "model.safetensors") == {"w"}


@follows("frontends/interchange/new_files.py:_check_no_file", "choose a different name, or pass --force")
def test_the_force_option_overwrites_an_existing_file(
    saved: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    path = tmp_path / "x.safetensors"
    path.touch()
    advice = messages.text(run("export", saved.url, "a@1", path, status=5).output)
    run("export", saved.url, "a@1", path, advice.says("--force"))
    assert names_in(path) == {"w", "b"}


@follows("frontends/interchange/new_files.py:_check_empty", "choose a different folder, or pass --force")
def test_the_force_option_writes_into_a_folder_with_files(
    saved: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    advice = messages.text(run("export", saved.url, "a@1", tmp_path / "out", status=5).output)
    run("export", saved.url, "a@1", tmp_path / "out", advice.says("--force"))
    assert names_in(tmp_path / "out" / "model.safetensors") == {"w", "b"}


@follows(
    "frontends/interchange/new_files.py:check_file_names",
    "omit attachments with attachments=False (--no-attachments)",
)
@pytest.mark.parametrize("way", ["attachments", "--no-attachments"])
def test_an_attachment_that_conflicts_with_a_file_can_be_omitted(
    store: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    store.save({"w": torch.ones(1)}, run="a", step=1, attachments={"model.safetensors": b"x"})
    with messages.error(InvalidInput) as advice:
        store.export("a@1", tmp_path / "out")
    if way == "attachments":
        store.export("a@1", tmp_path / "out", **advice.argument(way))
    else:
        run("export", store.url, "a@1", tmp_path / "out", advice.says(way))
    assert names_in(tmp_path / "out" / "model.safetensors") == {"w"}
    advice.says("store.read_attachment")
    assert store.read_attachment("a@1", "model.safetensors") == b"x"


@follows("frontends/interchange/export.py:export", "or choose one of … with format= (--format)")
@pytest.mark.parametrize("way", ["name", "format", "--format"])
def test_a_format_that_the_name_does_not_show_can_be_passed_explicitly(
    saved: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    with messages.error(InvalidInput) as advice:
        saved.export("a@1", tmp_path / "m.onnx")
    if way == "name":
        for suffix in (".safetensors", ".pt", ".pth", ".bin"):
            saved.export("a@1", tmp_path / f"m{advice.says(suffix)}")
        assert torch.load(tmp_path / "m.bin").keys() == names_in(tmp_path / "m.safetensors")
    elif way == "format":
        given: Any = {advice.says("format=")[:-1]: advice.says("safetensors")}
        saved.export("a@1", tmp_path / "m.onnx", **given)
        assert names_in(tmp_path / "m.onnx" / "model.safetensors") == {"w", "b"}
    else:
        run("export", saved.url, "a@1", tmp_path / "m.onnx", advice.says(way), "dcp")
        assert (tmp_path / "m.onnx" / ".metadata").exists()


# parts


@follows("frontends/views/model_part.py:model_part", "but keys below …; pass --strip-prefix if one of these is a model")
def test_the_model_to_export_can_be_chosen_explicitly(
    store: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    store.save({"optim": {"w": torch.ones(2)}}, run="a", step=1)
    command = ("export", store.url, "a@1", tmp_path / "out", "--format", "hf")
    advice = messages.text(run(*command, status=3).output)
    run(*command, advice.says("--strip-prefix"), advice.says("optim."))
    assert names_in(tmp_path / "out" / "model.safetensors") == {"w"}


@follows("frontends/views/model_part.py:model_part", "`casckpt show --tensors` lists its contents")
def test_a_checkpoint_without_weights_can_be_inspected_as_advised(
    store: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    store.save({"epoch": 1, "loss": torch.ones(1)}, run="a", step=1)
    store.save({"epoch": 1}, run="b", step=1)
    advice = messages.text(run("export", store.url, "b@1", tmp_path / "out", "--format", "hf", status=3).output)
    assert "epoch" in run(*advice.command("show"), store.url, "b@1").output


@follows("frontends/views/model_part.py:_unclear", "--strip-prefix …")
@follows(
    "frontends/views/model_part.py:_unclear",
    "or select tensors with --keys, and pass --strip-prefix '' to keep their full names",
)
@pytest.mark.parametrize("way", ["prefix", "keys", "all"])
def test_one_of_two_models_can_be_chosen_as_advised(
    store: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    store.save({"policy": {"h": {"w": torch.ones(2)}}, "reference": {"h": {"w": torch.ones(3)}}}, run="a", step=1)
    command = ("export", store.url, "a@1", tmp_path / "out", "--format", "hf")
    advice = messages.text(run(*command, status=1).output)
    prefix = advice.says("--strip-prefix policy.")
    names = advice.says("--strip-prefix ''").replace("'", "").split(" ")
    ways = {"prefix": prefix.split(), "keys": [advice.says("--keys"), "policy.*"], "all": names}
    run(*command, *ways[way])
    expected = {"prefix": {"h.w"}, "keys": {"h.w"}, "all": {"policy.h.w", "reference.h.w"}}
    assert names_in(tmp_path / "out" / "model.safetensors") == expected[way]


@follows(
    "frontends/views/model_part.py:check_no_adapters", "Merge the adapter (merge_and_unload) before the save, or export"
)
@pytest.mark.parametrize("way", ["merge", "all", "prefix"])
def test_a_model_with_adapters_can_be_exported_in_three_ways(
    store: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    names = ("h.0.base_layer.weight", "h.0.lora_A.x.weight", "h.0.lora_B.x.weight")
    store.save({"model": {name: torch.ones(2, 2) for name in names}, "optim": {"m": torch.ones(1)}}, run="a", step=1)
    command = ["export", store.url, "a@1", tmp_path / "out", "--format", "hf"]
    advice = messages.text(run(*command, status=1).output)
    if way == "merge":
        advice.says("(merge_and_unload) before the save")
        store.save({"model": {"h.0.weight": torch.ones(2, 2)}, "optim": {"m": torch.ones(1)}}, run="a", step=2)
        run(*command[:2], "a@2", *command[3:])
    elif way == "all":
        run(*command[:4], *advice.says("--format safetensors").split())
    else:
        run(*command, *advice.says("--strip-prefix model.").split())
    expected = {"merge": {"h.0.weight"}, "all": {f"model.{name}" for name in names} | {"optim.m"}, "prefix": {*names}}
    assert names_in(tmp_path / "out" / "model.safetensors") == expected[way]


@follows("frontends/interchange/safetensors/exporting.py:_set_dtype", "omit dtype (--dtype)")
def test_a_quantized_model_can_be_exported_in_its_own_dtype(store: Store, tmp_path: Path, messages: Messages) -> None:
    config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "dtype": "float32"}}
    attached = {"config.json": json.dumps(config).encode()}
    weights = {"w": torch.ones(2).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1)}
    store.save(weights, run="q", step=1, attachments=attached)
    with messages.error(InvalidInput) as advice:
        store.export("q@1", tmp_path / "out", format="hf", dtype="bfloat16")
    advice.says("config.json has a quantization_config: omit dtype")
    store.export("q@1", tmp_path / "out", format="hf")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


@follows("frontends/views/view.py:_part", "`casckpt show --tensors` lists its tensors")
def test_patterns_and_prefixes_for_an_export_can_be_chosen_from_the_suggested_list(
    training: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    with messages.error(MissingKey) as advice:
        training.export("a@1", tmp_path / "x.safetensors", strip_prefix="weights")
    listed = run(*advice.command("show"), training.url, "a@1").output.split()
    key = next(word for word in listed if word.startswith("model."))
    training.export("a@1", tmp_path / "keys.safetensors", keys=[key])
    training.export("a@1", tmp_path / "prefix.safetensors", strip_prefix=key.partition(".")[0])
    assert names_in(tmp_path / "keys.safetensors") == {"model.h.w"}
    assert names_in(tmp_path / "prefix.safetensors") == {"h.w"}


# safetensors


@pytest.fixture
def small_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_HEADER_BYTES", 200)


@follows(
    "frontends/interchange/safetensors/exporting.py:_exported_to",
    "Choose a different folder, or pass --format hf",
)
@pytest.mark.parametrize("way", ["folder", "hf"])
def test_a_config_can_be_exported_with_its_model_as_advised(
    training: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    command = ("export", training.url, "a@1")
    advice = messages.text(run(*command, folder, "--format", "safetensors", "--force", status=5).output)
    if way == "folder":
        advice.says("Choose a different folder")
        run(*command, tmp_path / "other", "--format", "safetensors")
        assert names_in(tmp_path / "other" / "model.safetensors") == {"model.h.w", "optim.m"}
    else:
        run(*command, folder, *advice.says("--format hf").split(), "--force")
        assert names_in(folder / "model.safetensors") == {"h.w"}


@follows(
    "frontends/interchange/safetensors/files.py:encode_header",
    "export fewer keys to it, or export to a folder with a smaller",
)
@pytest.mark.usefixtures("small_headers")
@pytest.mark.parametrize("way", ["keys", "folder"])
def test_an_export_too_large_for_a_header_is_split_into_files(
    store: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    store.save({f"tensor-{number}": torch.ones(100) for number in range(4)}, run="a", step=1)
    command = ("export", store.url, "a@1")
    advice = messages.text(run(*command, tmp_path / "x.safetensors", status=1).output)
    if way == "keys":
        advice.says("export fewer keys to it")
        run(*command, tmp_path / "x.safetensors", "--keys", "tensor-1")
        assert names_in(tmp_path / "x.safetensors") == {"tensor-1"}
    else:
        run(*command, tmp_path / "out", advice.says("--max-shard-size"), "400")
        assert len(list((tmp_path / "out").glob("*.safetensors"))) == 4


@follows(
    "frontends/interchange/safetensors/files.py:file_type", "choose different keys with --keys, or convert this tensor"
)
@pytest.mark.parametrize("way", ["keys", "convert"])
def test_a_dtype_that_safetensors_lacks_can_be_omitted_or_converted(
    store: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    state = {"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex128)}
    store.save(state, run="a", step=1)
    command = ("export", store.url, "a@1", tmp_path / "x.safetensors")
    advice = messages.text(run(*command, status=1).output)
    if way == "keys":
        run(*command, advice.says("--keys"), "w")
    else:
        advice.says("convert this tensor")
        store.save({"w": state["w"], "c": torch.view_as_real(state["c"])}, run="a", step=1, overwrite=True)
        run(*command)
    assert names_in(tmp_path / "x.safetensors") == ({"w"} if way == "keys" else {"w", "c"})


@follows("frontends/interchange/safetensors/files.py:", "`casckpt import` reads it")
@follows(
    "frontends/interchange/safetensors/files.py:", "Read it with its own library, and save the state with store.save"
)
def test_a_file_of_a_different_kind_can_be_read_by_the_library_that_the_error_names(
    store: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(20))
    messages.text(run("import", store.url, tmp_path / "x.gguf", "--step", 1, status=1).output).says("store.save")
    store.save({"w": torch.ones(2)}, step=1)  # as the library returns it
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(Unsupported) as caught:
        import_safetensors(store, tmp_path / "x.pt", step=2)
    run(*messages.text(caught.value).command("import"), store.url, tmp_path / "x.pt", "--step", 2)
    assert store.read("default@2").keys() == {"w"}


@follows("frontends/interchange/safetensors/importing.py:_nothing_in", "`casckpt import` reads it directly")
@follows(
    "frontends/interchange/safetensors/importing.py:_nothing_in",
    "a checkpoint from a different trainer; save its state with",
)
def test_folders_without_safetensors_can_be_imported_or_saved_as_advised(
    store: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    folder = stock(tmp_path / "dcp", {"w": torch.ones(2)})
    with messages.error(Unsupported) as advice:
        import_safetensors(store, folder, step=1)
    run(*advice.command("import"), store.url, folder, "--step", 1)
    assert torch.equal(store.read("default@1")["w"], torch.ones(2))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metadata.json").write_text("{}")
    torch.save({"w": torch.ones(2)}, tmp_path / "other" / "part.bin")
    advice = messages.text(run("import", store.url, tmp_path / "other", "--step", 2, status=1).output)
    advice.says("with store.save")
    store.save(torch.load(tmp_path / "other" / "part.bin"), step=2)
    assert len(store.read("default@2")["w"]) == 2


@follows("frontends/interchange/safetensors/importing.py:", "pass --format files (store.import_files)")
@follows("frontends/files/__init__.py:", "store the folders that it writes with")
@follows("tensors/shards.py:_problem", "whose folders `casckpt import --format files` stores")
def test_a_folder_of_any_program_can_be_stored_as_files_as_advised(
    store: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "zero_to_fp32.py").write_text("pass")
    messages.text(run("import", store.url, tmp_path / "run", "--step", 1, status=1).output).says("--format files")
    run(*messages.text(AS_FILES).command("import"), store.url, tmp_path / "run", "--step", 1)
    placeholder: Any = torch.nn.Parameter(torch.empty(0))
    placeholder.ds_id, placeholder.ds_shape = 0, torch.Size([2])
    with pytest.raises(InvalidInput) as caught:
        store.save({"w": placeholder}, step=2)
    run(*messages.text(caught.value).command("import"), store.url, tmp_path / "run", "--step", 2)
    store.export("default@1", tmp_path / "back")
    assert (tmp_path / "back" / "zero_to_fp32.py").read_text() == "pass"


@follows("frontends/interchange/safetensors/layout.py:plan_shards", "pass a larger --max-shard-size")
@follows(
    "frontends/interchange/safetensors/layout.py:_file_names", "files are too many; pass a larger --max-shard-size"
)
def test_the_suggested_option_increases_a_file_size_that_is_too_small(
    saved: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    command = ("export", saved.url, "a@1", tmp_path / "out", "--max-shard-size")
    advice = messages.text(run(*command, "0", status=1).output)
    run(*command[:-1], advice.says("--max-shard-size"), "1KB")
    assert names_in(tmp_path / "out" / "model.safetensors") == {"w", "b"}
    with messages.error(Refused) as advice:
        layout._file_names(100_000, "model")
    advice.says("--max-shard-size")
    assert len(layout._file_names(2, "model")) == 2


# files of torch, folders of DCP and of OLMo-core


@follows(
    "frontends/interchange/torch_files.py:_read",
    "pass allow_pickle=True (--allow-pickle) if you trust its source",
)
@pytest.mark.parametrize("way", ["allow_pickle", "--allow-pickle"])
def test_a_file_with_a_pickle_can_be_imported_with_allow_pickle(
    store: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    torch.save({"x": Odd()}, tmp_path / "x.pt")
    with messages.error(InvalidInput) as advice:
        torch_save_to_casckpt(tmp_path / "x.pt", store, step=1)
    if way == "allow_pickle":
        torch_save_to_casckpt(tmp_path / "x.pt", store, step=1, **advice.argument(way))
    else:
        run("import", store.url, tmp_path / "x.pt", "--step", 1, advice.says(way))
    assert store.read("default@1", allow_pickle=True) == {"x": Odd()}


class Mark:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (ran.append, (1,))


ran: list[int] = []


@follows("frontends/interchange/torch_files.py:_read", "read it with pickle.load, make tensors of its arrays")
@pytest.mark.parametrize("protocol", [0, 4])
def test_a_plain_pickle_is_refused_before_its_code_runs_and_can_be_saved_as_advised(
    store: Store, tmp_path: Path, messages: Messages, run: Run, protocol: int
) -> None:
    path, arrays = tmp_path / "x.pkl", {"w": np.ones(3)}
    path.write_bytes(pickle.dumps({"model": arrays, "mark": Mark()}, protocol))
    ran.clear()
    with messages.error(Refused) as advice:
        torch_save_to_casckpt(path, store, run="a", step=1, allow_pickle=True)
    with pytest.raises(Refused, match=r"x\.pkl is a plain pickle, not a" if protocol else r"is not a torch\.save file"):
        torch_save_to_casckpt(path, store, run="a", step=1)
    run("import", store.url, path, "--run", "a", "--step", 1, "--allow-pickle", status=1)
    assert ran == []
    path.write_bytes(pickle.dumps({"model": arrays}, protocol))
    advice.says("read it with pickle.load, make tensors of its arrays, and use Store.save")
    found = {name: torch.from_numpy(array) for name, array in pickle.loads(path.read_bytes())["model"].items()}
    store.save({"model": found}, run="a", step=1)
    assert torch.equal(store.read("a@1")["model"]["w"], torch.ones(3, dtype=torch.float64))


@follows(
    "frontends/interchange/torch_files.py:casckpt_to_torch_save",
    "because plain torch.load cannot read it (pass allow_pickle=True to include it)",
)
def test_values_that_torch_load_rejects_can_be_exported_with_allow_pickle(
    store: Store, tmp_path: Path, messages: Messages
) -> None:
    state = {"when": datetime(2026, 1, 2, tzinfo=UTC), "n": 1}
    store.save(state, run="a", step=1)
    with messages.log() as advice:
        casckpt_to_torch_save(store, "a@1", tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt") == {"n": 1}
    casckpt_to_torch_save(store, "a@1", tmp_path / "y.pt", **advice.argument("allow_pickle"))
    assert torch.load(tmp_path / "y.pt", weights_only=False) == state


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optim.step()
    return optim


@follows(
    "frontends/interchange/torch_files.py:",
    "Import again with parameter_names= (--parameter-names FILE, which",
)
@follows("frontends/interchange/torch_files.py:_note", "it with store.read and optim.load_state_dict")
def test_an_optimizer_without_names_can_be_imported_with_names_or_loaded_directly(
    store: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    model = nn.ModuleDict({"a": a, "b": b})
    optim = optimizer_of(nn.ModuleList([b, a]))
    optim.state[b.weight]["momentum_buffer"].fill_(7)
    weights = model.state_dict() | {"more.weight": torch.ones(2, 2)}
    torch.save({"model": weights, "optimizer": optim.state_dict()}, tmp_path / "x.pt")
    with messages.log() as advice:
        torch_save_to_casckpt(tmp_path / "x.pt", store, step=1)
    line = advice.message.partition("which this writes: ")[2].partition("), or load")[0]
    exec(line, {"model": model, "optimizer": optim, "json": json, "pathlib": pathlib, "FILE": tmp_path / "names.json"})
    found: Any = {advice.says("parameter_names"): json.loads((tmp_path / "names.json").read_text())}
    torch_save_to_casckpt(tmp_path / "x.pt", store, step=2, **found)
    run("import", store.url, tmp_path / "x.pt", "--step", 3, advice.says("--parameter-names"), tmp_path / "names.json")
    for step in (2, 3):
        fresh = torch.optim.SGD([b.weight, a.weight], lr=0.5, momentum=0.9)
        load_model_and_optim_state(store, f"default@{step}", model, fresh, strict=False)
        assert (fresh.state[b.weight]["momentum_buffer"] == 7).all()
    advice.says("load it with store.read and optim.load_state_dict")
    other = torch.optim.SGD([b.weight, a.weight], lr=0.5, momentum=0.9)
    other.load_state_dict(store.read("default@1")["optimizer"])
    assert (other.state[b.weight]["momentum_buffer"] == 7).all()


@follows("frontends/interchange/torch_files.py:_note", "it with store.read and optim.load_state_dict")
def test_a_file_with_only_an_optimizer_can_be_loaded_directly(store: Store, tmp_path: Path, messages: Messages) -> None:
    weight = nn.Linear(2, 2)
    torch.save(optimizer_of(weight).state_dict(), tmp_path / "x.pt")
    with messages.log() as advice:
        torch_save_to_casckpt(tmp_path / "x.pt", store, step=1)
    assert "parameter_names" not in advice.message
    advice.says("Load it with store.read and optim.load_state_dict")
    other = torch.optim.SGD(weight.parameters(), lr=0.5, momentum=0.9)
    other.load_state_dict(store.read("default@1"))
    assert len(other.state) == 2


@follows(
    "frontends/interchange/olmo_import.py:_train_state", "because reading it requires allow_pickle (--allow-pickle)"
)
@pytest.mark.parametrize("way", ["allow_pickle", "--allow-pickle"])
def test_an_olmo_train_state_can_be_imported_with_allow_pickle(
    store: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    stock(tmp_path / "olmo" / "model_and_optim", {"model": {"w": torch.ones(2)}})
    (tmp_path / "olmo" / "train").mkdir()
    torch.save({"x": Odd()}, tmp_path / "olmo" / "train" / "rank0.pt")
    with messages.log() as advice:
        import_olmo_trainer(tmp_path / "olmo", store, step=1)
    if way == "allow_pickle":
        leave: Any = {advice.says(way): True}
        import_olmo_trainer(tmp_path / "olmo", store, step=2, **leave)
    else:
        run("import", store.url, tmp_path / "olmo", "--step", 2, advice.says(way))
    assert store.read("default@2", allow_pickle=True)["train"] == {0: {"x": Odd()}}


@follows(
    "frontends/interchange/olmo_import.py:_group",
    "pass allow_pickle=True (--allow-pickle) if you trust its source",
)
@pytest.mark.parametrize("way", ["allow_pickle", "--allow-pickle"])
def test_an_olmo_optimizer_can_be_imported_with_allow_pickle(
    store: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    folder = KINDS["olmo"](tmp_path, Odd())
    with messages.error(InvalidInput) as advice:
        import_any(store, look_at(folder), step=1)
    if way == "allow_pickle":
        import_any(store, look_at(folder), step=1, **advice.argument(way))
    else:
        run("import", store.url, folder, "--step", 1, advice.says(way))
    assert store.get("default@1").tensors


# serving


@follows("frontends/serve/app.py:Guard._refusal", "a token is required: set HF_TOKEN")
def test_the_suggested_environment_variable_sets_a_token(
    saved: Store, tmp_path: Path, messages: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub: Any = pytest.importorskip("huggingface_hub", reason="needs casckpt[transformers]")
    errors: Any = pytest.importorskip("huggingface_hub.errors", reason="needs casckpt[transformers]")
    with serving(saved, guard={"tokens": frozenset({"hf_right"})}) as served:
        where: Any = {"endpoint": served.endpoint, "cache_dir": tmp_path / "hub"}
        with pytest.raises(errors.HfHubHTTPError) as caught:
            hub.hf_hub_download("a", "model.safetensors", token=False, **where)
        monkeypatch.setenv(messages.text(caught.value).says("HF_TOKEN"), "hf_right")
        path = hub.hf_hub_download("a", "model.safetensors", **where)
    assert names_in(path) == {"w", "b"}


@follows("loading/tied_tensors.py:_mismatch", "set tie_word_embeddings=False in its config, and create it again")
def test_a_model_with_its_own_head_loads_if_it_is_created_untied(
    store: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    model = llama()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    save_model_and_optim_state(store, model, run="a", step=1)
    with pytest.raises(Mismatch) as caught:
        load_model_and_optim_state(store, "a@1", llama())
    messages.text(caught.value).says("set tie_word_embeddings=False")
    other = llama(tied=False)
    load_model_and_optim_state(store, "a@1", other)
    assert identical(dict(other.state_dict()), dict(model.state_dict()))
    run("export", store.url, "a@1", tmp_path / "out")
    assert "set tie_word_embeddings to false in config.json" in store.export("a@1", tmp_path / "again").notes[0]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    check_loads(tmp_path / "out", other)


@follows(
    "frontends/training_state/hub_config.py:_transformers_names",
    "load the checkpoint into a new model and call its save_pretrained",
)
def test_a_model_with_new_names_can_be_converted_by_its_library(
    store: Store, tmp_path: Path, messages: Messages
) -> None:
    hub: Any = pytest.importorskip("transformers", reason="needs casckpt[transformers]")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = hub.NomicBertConfig(**sizes, vocab_size=32)
    save_model_and_optim_state(store, hub.NomicBertModel(config), run="a", step=1)
    found = store.export("a@1", tmp_path / "new")
    messages.text(found.notes[0]).says("load the checkpoint into a new model and call its save_pretrained")
    other = hub.NomicBertModel(config)
    load_model_and_optim_state(store, "a@1", other)
    other.save_pretrained(tmp_path / "old")
    assert "encoder.layers.0.attn.Wqkv.weight" in names_in(tmp_path / "old" / "model.safetensors")


@follows(
    "frontends/views/view_file.py:read_hub_names", "export with --strip-prefix or --rename, which do not use the file"
)
@pytest.mark.parametrize("way", [["--strip-prefix", "model"], ["--rename", "w=v"]])
def test_an_export_can_ignore_invalid_name_rules(
    store: Store, tmp_path: Path, messages: Messages, run: Run, way: list[str]
) -> None:
    check_ignored(store, tmp_path, messages, run, views={"../x": {}}, way=way)


def check_ignored(store: Store, tmp_path: Path, messages: Messages, run: Run, *, views: Any, way: list[str]) -> None:
    hub_file = json.dumps({"views": views}).encode()
    store.save({"model": {"w": torch.ones(2)}}, run="a", step=1, attachments={HUB_FILE: hub_file})
    advice = messages.text(run("export", store.url, "a@1", tmp_path / "out", status=1).output)
    advice.says(way[0])
    run("export", store.url, "a@1", tmp_path / "out", *way)
    assert names_in(tmp_path / "out" / "model.safetensors") == {"v" if way[0] == "--rename" else "w"}


class Moded(torch.optim.SGD):
    """Stores its mode as schedule-free optimizers do."""

    def eval(self) -> None:
        self.param_groups[0]["train_mode"] = False


@follows("frontends/interchange/export.py:_warn_of_modes", "call the optimizer's eval() before a save")
def test_the_weights_for_evaluation_can_be_exported(
    store: Store, tmp_path: Path, messages: Messages, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    optim = Moded([{"params": model.parameters(), "train_mode": True}])
    save_model_and_optim_state(store, model, optim, run="a", step=1)
    with messages.log() as advice:
        store.export("a@1", tmp_path / "trained.safetensors")
    getattr(optim, advice.says("eval()").removesuffix("()"))()
    save_model_and_optim_state(store, model, optim, run="a", step=2)
    caplog.clear()
    store.export("a@2", tmp_path / "best.safetensors")
    assert "train mode" not in caplog.text
