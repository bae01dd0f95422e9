"""A store imports and exports torch.save files. Contents and URLs of all formats work."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import casckpt
from casckpt.errors import Conflict, InvalidInput, NotFound, Refused, StorageError, Unsupported
from casckpt.frontends.convert import export_safetensors, import_any, look_at, looked_at
from casckpt.frontends.dcp import casckpt_to_dcp, casckpt_to_torch_save, dcp_to_casckpt, torch_save_to_casckpt
from casckpt.frontends.interchange import resident, torch_files
from casckpt.loading import regions
from tests.support.dcp import Colour, example, stock, stringed
from tests.support.exact import same
from tests.support.progress_calls import ProgressCalls
from tests.support.scripts import run_script
from tests.support.together import numbers
from tests.support.training import identical

Store = casckpt.Store


# files of torch.save


def test_a_torch_save_file_is_imported_and_exported(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "WINDOW_BYTES", 10_000)
    monkeypatch.setattr(resident, "RESIDENT_BYTES", 10_000)
    store.create(cell_bytes=4096)
    state = example()
    for step, zipped in enumerate((True, False)):
        torch.save(state, tmp_path / "in.pt", _use_new_zipfile_serialization=zipped)
        done = ProgressCalls()
        torch_save_to_casckpt(tmp_path / "in.pt", store, step=step, progress=done)
        assert identical(store.read(f"default@{step}"), state)
        assert done.done >= 120_000
    assert store.get("default@1").stats.bytes_written == 0
    casckpt_to_torch_save(store, "default@0", tmp_path / "out.pt")
    assert identical(torch.load(tmp_path / "out.pt"), state)
    assert identical(torch.load(tmp_path / "out.pt", mmap=True), state)
    assert zipfile.ZipFile(tmp_path / "out.pt").testzip() is None
    with pytest.raises(Conflict):
        casckpt_to_torch_save(store, "default@0", tmp_path / "out.pt")


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Writes fail as on a nearly full disk: bytes beyond the limit are written only partly, or not at all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Fixed(dict[str, Any]):
    """A mapping that cannot be changed."""

    __setitem__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return Fixed, (dict(self),)


def test_a_mapping_that_cannot_be_changed_is_imported(store: Store, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "x": Fixed(y=1)}, tmp_path / "x.pt")
    torch_save_to_casckpt(tmp_path / "x.pt", store, run="a", step=1, allow_pickle=True)
    assert store.read("a@1")["x"] == {"y": 1}


def test_a_whole_module_in_a_torch_save_file_becomes_its_state(store: Store, tmp_path: Path) -> None:
    net, average = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    whole = {"model": net, "ema": average, "optimizer": optim, "more": [net, Colour.RED], "date": "today"}
    for step, file in enumerate((whole, net)):
        torch.save(file, tmp_path / "x.pt")
        with pytest.raises(InvalidInput, match=r"torch\.nn\.modules\.linear\.Linear.*Modules then become their state"):
            torch_save_to_casckpt(tmp_path / "x.pt", store, run="a", step=step)
        torch_save_to_casckpt(tmp_path / "x.pt", store, run="a", step=step, allow_pickle=True)
    read = store.read("a@0", allow_pickle=True)
    assert identical(read["model"], net.state_dict())
    assert identical(read["ema"], average.state_dict())
    assert read["optim"]["param_groups"][0]["params"] == ["weight", "bias"]
    assert identical(read["train"][0]["more"][0], net.state_dict())
    assert read["train"][0]["more"][1] is Colour.RED
    assert identical(store.read("a@1"), net.state_dict())


def test_a_file_with_the_arguments_of_a_script_is_imported_without_pickles(store: Store, tmp_path: Path) -> None:
    state = {
        "args": Namespace(lr=0.1, out=Path("x")),
        "best": np.float64(0.7),
        "rng": np.random.RandomState(4).get_state(),
    }
    for step, zipped in enumerate((True, False)):
        torch.save({"w": torch.ones(2), **state}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
        torch_save_to_casckpt(tmp_path / "x.pt", store, step=step)
        found = store.read(f"default@{step}")
        assert same({name: found[name] for name in state}, state)


@pytest.mark.parametrize("call", [casckpt_to_torch_save, casckpt_to_dcp])
def test_a_limit_on_the_size_of_files_is_reported(store: Store, tmp_path: Path, call: Callable[..., Any]) -> None:
    store.save({"a": numbers("a", 3000), "b": numbers("b", 100_000)}, step=1)
    with files_of_at_most(4000), pytest.raises(StorageError, match=r"out cannot be written: .*raise `ulimit -f`"):
        call(store, "default@1", tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_disk_that_fills_up_during_a_write_is_reported(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = torch_files._filled

    def filling(*args: Any) -> Any:
        try:
            with files_of_at_most(8192):
                return fill(*args)
        except OSError as error:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error

    monkeypatch.setattr(torch_files, "_filled", filling)
    store.save({"a": numbers("a", 3000)}, step=1)
    with pytest.raises(StorageError, match=r"out cannot be written: .*free some space"):
        casckpt_to_torch_save(store, "default@1", tmp_path / "out")


def test_invalid_files_are_rejected(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with pytest.raises(NotFound):
        torch_save_to_casckpt(path, store, step=1)
    torch.save([torch.ones(1)], path)
    with pytest.raises(InvalidInput, match="holds a list"):
        torch_save_to_casckpt(path, store, step=1)
    torch.save({"c": Colour.RED}, path)
    with pytest.raises(InvalidInput, match=r"--allow-pickle"):
        torch_save_to_casckpt(path, store, step=1)
    torch_save_to_casckpt(path, store, step=1, allow_pickle=True)
    assert store.read("default@1", allow_pickle=True) == {"c": Colour.RED}
    for data in (b"PK\x03\x04garbage", b"", path.read_bytes()[:-200]):
        path.write_bytes(data)
        with pytest.raises((Refused, InvalidInput)):
            torch_save_to_casckpt(path, store, step=2)


# memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_conversions_between_formats_use_bounded_memory(tmp_path: Path) -> None:
    done = run_script("tests.support.peak_convert", tmp_path, "64", cwd=Path(__file__).parents[3])
    assert done.status == 0, done.told
    assert max(map(float, done.printed.split())) <= 32  # MiB, for a state of 64: windows of 4, and reads in progress


# the content determines the format


def test_the_kind_of_a_path_is_detected_from_its_content(store: Store, tmp_path: Path) -> None:
    stock(tmp_path / "dcp", {"a": torch.ones(2)})
    (tmp_path / "dcp/common.pt").write_bytes(b"x")
    torch.save({"a": torch.ones(2)}, tmp_path / "weights")
    save_file({"a": torch.ones(2)}, tmp_path / "other")
    torch.save({"a": torch.ones(2)}, tmp_path / "old", _use_new_zipfile_serialization=False)
    kinds = {name: look_at(tmp_path / name).kind for name in ("dcp", "weights", "other", "old")}
    assert kinds == {"dcp": "dcp", "weights": "torch", "other": "safetensors", "old": "torch"}
    for step, name in enumerate(kinds):
        found = look_at(tmp_path / name)
        assert found.nbytes > 0
        assert import_any(store, found, run="x", step=step).tensors["a"].bytes == 8
    assert store.attachments("x@0") == {"common.pt": 1}
    shutil.rmtree(tmp_path / "dcp")
    with pytest.raises(NotFound):
        look_at(tmp_path / "dcp")


# URLs


@pytest.fixture
def bucket() -> Iterator[str]:
    """A folder in fsspec's in-memory file system."""
    yield "memory://bucket"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_exports_and_imports_accept_fsspec_urls(store: Store, tmp_path: Path, bucket: str) -> None:
    state = example()
    store.save(state, step=1)
    casckpt_to_dcp(store, "default@1", f"{bucket}/dcp")
    casckpt_to_torch_save(store, "default@1", f"{bucket}/x.pt")
    exported = export_safetensors(store, "default@1", f"{bucket}/hf", keys=["model.*"])
    assert exported.files == (f"{bucket}/hf/model.safetensors",)
    for call in (casckpt_to_dcp, casckpt_to_torch_save):
        with pytest.raises(Conflict):
            call(store, "default@1", f"{bucket}/dcp")
    casckpt_to_dcp(store, "default@1", f"{bucket}/dcp", force=True)
    assert identical(store.read(dcp_to_casckpt(f"{bucket}/dcp", store, run="direct", step=0)), stringed(state))
    for step, (name, kind) in enumerate({"dcp": "dcp", "x.pt": "torch", "hf": "safetensors"}.items()):
        with looked_at(f"{bucket}/{name}") as found:
            assert found.kind == kind
            made = import_any(store, found, run="url", step=step)
        assert made.tensors["model.w"].bytes == state["model"]["w"].nbytes
    with pytest.raises(NotFound), looked_at(f"{bucket}/none"):
        pass
    with pytest.raises(Unsupported), looked_at("nothing-of-this-name://x"):
        pass
    with pytest.raises(Unsupported), looked_at(f"file://{tmp_path}/store"):
        pass


def test_an_export_to_a_url_removes_weights_of_an_earlier_one(store: Store, tmp_path: Path, bucket: str) -> None:
    """Otherwise, from_pretrained would load the earlier single file."""
    state = example()
    for step in (1, 2):
        store.save(state, step=step)
    fs = fsspec.filesystem("memory")
    export_safetensors(store, "default@1", f"{bucket}/hf", keys=["model.*"])
    fs.pipe_file("/bucket/hf/mine.safetensors", b"mine")
    export_safetensors(store, "default@2", f"{bucket}/hf", keys=["model.*"], max_shard_size=1, force=True)
    names = {Path(path).name for path in fs.find("/bucket/hf")}
    assert "model.safetensors" not in names
    assert {"mine.safetensors", "model.safetensors.index.json"} < names
    export_safetensors(store, "default@1", f"{bucket}/hf", keys=["model.*"], force=True)
    assert {Path(path).name for path in fs.find("/bucket/hf")} == {"mine.safetensors", "model.safetensors"}


class Config:
    """A training script's config."""

    def __init__(self) -> None:
        self.rate = 0.1


def test_the_error_for_a_class_from_the_saving_script_names_the_class(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = sys.modules["__main__"]
    monkeypatch.setattr(Config, "__module__", "__main__")
    monkeypatch.setattr(script, "Config", Config, raising=False)
    torch.save({"w": torch.ones(2), "config": Config()}, tmp_path / "m.pt")
    monkeypatch.delattr(script, "Config")
    for allow_pickle in (False, True):
        with pytest.raises(InvalidInput, match=r"Config.* __main__\.NAME = NAME") as caught:
            torch_save_to_casckpt(tmp_path / "m.pt", store, step=1, allow_pickle=allow_pickle)
        assert "allow_pickle=True" in str(caught.value)
    monkeypatch.setattr(script, "Config", Config, raising=False)
    torch_save_to_casckpt(tmp_path / "m.pt", store, step=1, allow_pickle=True)
    assert store.read("latest", allow_pickle=True)["config"].rate == 0.1


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_a_folder_of_checkpoints_is_not_imported_as_a_checkpoint(kind: str, store: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        folder = tmp_path / f"step-{step}"
        if kind == "dcp":
            stock(folder, {"w": torch.ones(2)})
        else:
            folder.mkdir()
            save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(
        InvalidInput, match="is not a checkpoint itself, but contains several: step-10, step-20; choose"
    ):
        look_at(tmp_path)
    if kind == "dcp":
        with pytest.raises(InvalidInput, match="contains several: 'step-10', 'step-20'; choose one"):
            dcp_to_casckpt(tmp_path, store, step=1)
    assert import_any(store, look_at(tmp_path / "step-20"), step=1).step == 1


def test_a_folder_of_torch_files_is_not_imported_as_a_checkpoint(store: Store, tmp_path: Path) -> None:
    for name in ("step-10.pt", "step-20.ckpt", "notes.txt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(InvalidInput, match=r"contains several: step-10\.pt, step-20\.ckpt; choose one"):
        look_at(tmp_path)
    assert import_any(store, look_at(tmp_path / "step-20.ckpt"), step=1).step == 1
