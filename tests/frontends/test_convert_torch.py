"""Folders of torch.distributed.checkpoint, files of torch.save, folders of OLMo-core: into a store, and out of it."""

from __future__ import annotations

import enum
import json
import pickle
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan

import casckpt
from casckpt.errors import Conflict, Damaged, InvalidInput, NotFound, Refused, StorageError, Unsupported
from casckpt.frontends.convert import (
    export_safetensors,
    import_any,
    import_olmo,
    import_olmo_trainer,
    look_at,
    looked_at,
)
from casckpt.frontends.dcp import (
    StorageReader,
    StorageWriter,
    casckpt_to_dcp,
    casckpt_to_torch_save,
    dcp_to_casckpt,
    exporting,
    items,
    torch_save_to_casckpt,
)
from casckpt.frontends.interchange import resident, torch_files
from casckpt.frontends.views import windows
from tests.support.dcp import load, save, zeros
from tests.support.meshes import build, differing, state_of, whole
from tests.support.together import numbers
from tests.support.told import Told
from tests.support.training import identical

if TYPE_CHECKING:
    from tests.support.ranks import Pool

Store = casckpt.Store


class Colour(enum.Enum):
    RED = 1


def example() -> dict[str, Any]:
    return {
        "model": {"w": numbers("w", 300, 100), "half": numbers("half", 7).bfloat16(), "scalar": torch.tensor(3)},
        "optim": {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "empty": torch.zeros(0, 4), "pair": (torch.ones(3), "x"), "none": None, "list": [1, 2],
        "complex": torch.ones(2) * 1j,
    }  # fmt: skip


def stringed(state: dict[str, Any]) -> dict[str, Any]:
    """As DCP gives it back: keys are text."""
    found = dict(state)
    found["optim"] = {**state["optim"], "state": {str(k): v for k, v in state["optim"]["state"].items()}}
    return found


# folders of DCP


def stock(path: Path, state: Any) -> Path:
    save(state, FileSystemWriter(path))
    return path


def test_a_tensor_is_cut_into_as_few_boxes_of_whole_rows_as_are_small_enough() -> None:
    def rows(shape: tuple[int, ...], most: int) -> list[tuple[int, int]]:
        return [(box.offset[0], box.shape[0]) for box in exporting.split(shape, 4, most)]

    assert rows((7, 2, 3), 72) == [(0, 3), (3, 3), (6, 1)]  # a row has 24 bytes
    assert rows((3, 2, 3), 72) == [(0, 3)]
    assert rows((2, 2, 3), 23) == [(0, 1), (1, 1)]
    assert rows((0, 9), 1) == [(0, 0)]
    assert [box.shape for box in exporting.split((), 8, 1)] == [()]


def test_a_folder_of_dcp_goes_in_and_out(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "WINDOW_BYTES", 50_000)
    monkeypatch.setattr(exporting, "WINDOW_BYTES", 50_000)  # the largest tensor becomes three chunks
    monkeypatch.setattr(exporting, "FILE_BYTES", 60_000)
    state = example()
    done = Told()
    folder = stock(tmp_path / "in", state)
    (folder / "config.json").write_text("{}")
    found = dcp_to_casckpt(folder, store, run="a", step=3, metadata={"x": 1}, progress=done)
    assert (found.run, found.step, found.metadata) == ("a", 3, {"x": 1})
    assert identical(store.read("a@3"), stringed(state))
    assert done.done >= 120_000
    assert store.read_attachment(found, "config.json") == b"{}"
    store.save(state, run="native", step=1)
    for ref in ("a@3", "native@1"):
        out = tmp_path / ref
        casckpt_to_dcp(store, ref, out)
        back = load({key: zeros(value) for key, value in stringed(state).items()}, FileSystemReader(out))
        assert identical(back, stringed(state))
        assert len(list(out.glob("*.distcp"))) >= 2
    assert dcp_to_casckpt(folder, store, run="b", step=1).stats.bytes_written == 0
    again = dcp_to_casckpt(tmp_path / "a@3", store, run="b", step=2)
    assert identical(store.read(again), stringed(state))
    assert store.attachments(again) == {"config.json": 2}


def four_ranks(rank: int, size: int, path: Path) -> Any:
    state = state_of(*build("fsdp2", size, 1))
    save(state, FileSystemWriter(path))
    return whole(state)


def two_ranks(rank: int, size: int, path: Path, ref: str) -> Any:
    state = state_of(*build("fsdp2", size, 7))
    load(state, StorageReader(path, ref) if ref else FileSystemReader(path))
    return whole(state)


def test_what_stock_dcp_saved_on_four_ranks_loads_on_two_and_goes_back(
    ranks: Pool, store_path: Path, tmp_path: Path
) -> None:
    saved = ranks.run(4, four_ranks, tmp_path / "in")[0]
    dcp_to_casckpt(tmp_path / "in", store_path, run="a", step=1)
    casckpt_to_dcp(store_path, "a@1", tmp_path / "out")
    for where, ref in ((store_path, "a@1"), (tmp_path / "out", "")):
        for found in ranks.run(2, two_ranks, where, ref):
            assert differing(found, saved) == []


def test_a_pickle_in_a_folder_is_not_run(store: Store, tmp_path: Path) -> None:
    folder = stock(tmp_path / "in", {"colour": Colour.RED, "a": torch.ones(2), "n": 1})
    with pytest.raises(InvalidInput, match=r"'colour' \(1 of 2 values\) .*--allow-pickle") as caught:
        dcp_to_casckpt(folder, store, step=1)  # nobody could read it afterwards
    assert caught.value.keys == ("colour",)
    assert not Path(store.url).exists()
    dcp_to_casckpt(folder, store, step=1, allow_pickle=True)  # its values stay what they are: bytes
    with pytest.raises(InvalidInput, match="allow_pickle=True"):
        store.read("default@1")
    assert store.read("default@1", allow_pickle=True)["colour"] is Colour.RED
    with pytest.raises(InvalidInput, match="allow_pickle=True"):
        casckpt_to_dcp(store, "default@1", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    casckpt_to_dcp(store, "default@1", tmp_path / "out", allow_pickle=True)
    assert load({"colour": None}, FileSystemReader(tmp_path / "out"))["colour"] is Colour.RED
    casckpt_to_torch_save(store, "default@1", tmp_path / "out.pt", allow_pickle=True)
    assert torch.load(tmp_path / "out.pt", weights_only=False)["colour"] is Colour.RED


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return print, ("run",)


def test_metadata_of_no_use_are_refused(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stock(tmp_path / "in", {"a": torch.ones(2)})
    metadata = folder / ".metadata"
    good = metadata.read_bytes()
    metadata.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InvalidInput, match=r"builtins.print.*allow_pickle"):
        dcp_to_casckpt(folder, store, step=1)
    assert capsys.readouterr().out == ""
    for bad in (b"", b"garbage", pickle.dumps({"a": 1})):
        metadata.write_bytes(bad)
        with pytest.raises((Refused, InvalidInput)):
            dcp_to_casckpt(folder, store, step=1)
    metadata.write_bytes(good)
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:100])
    with pytest.raises(Damaged, match="'a' cannot be read"):
        dcp_to_casckpt(folder, store, step=1)
    data.unlink()
    with pytest.raises(NotFound, match=r"__0_0.distcp"):
        dcp_to_casckpt(folder, store, step=1)
    assert store.checkpoints() == []
    assert store.gc(wait=0).waiting == ()


def test_objects_of_megatron_stand_in_lists(store: Store, tmp_path: Path) -> None:
    """Its `torch_dist` folders; that of the real package has more in its metadata: plans."""
    key, folder = "layer._extra_state/shard_0_1", tmp_path / "in"
    state = {"layer.weight": torch.ones(2), key: [{"scale": 1}]}
    save(state, FileSystemWriter(folder), planner=DefaultSavePlanner(flatten_state_dict=False))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.all_local_plans = [SavePlan([])]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "common.pt").write_bytes(b"common")
    found = dcp_to_casckpt(folder, store, step=1)
    assert store.read(found)[key] == {"scale": 1}
    assert set(store.attachments(found)) == {"common.pt", "metadata.json"}
    casckpt_to_dcp(store, found, tmp_path / "out")
    back = load({key: None}, FileSystemReader(tmp_path / "out"), planner=DefaultLoadPlanner(False, False))
    assert back[key] == [{"scale": 1}]


def test_an_export_is_whole_or_not_there(store: Store, tmp_path: Path) -> None:
    store.save({"a": numbers("a", 3000)}, step=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(Conflict):
        casckpt_to_dcp(store, "default@1", tmp_path / "full")
    casckpt_to_dcp(store, "default@1", tmp_path / "full", force=True)
    assert {path.name for path in (tmp_path / "full").iterdir()} == {"x", ".metadata", "__0_0.distcp"}
    for blob in Path(store.url).glob("objects/*/*.safetensors"):
        blob.chmod(0o600)
        blob.write_bytes(blob.read_bytes()[:5000])
    for call in (casckpt_to_dcp, casckpt_to_torch_save):
        with pytest.raises(Damaged):
            call(store, "default@1", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} <= {"full", "store"}


def test_what_a_rank_saved_alone_is_not_exported_as_a_whole(store: Store, tmp_path: Path) -> None:
    from tests.support.chunks import half

    save({"a": half()}, StorageWriter(store, run="x", step=1), use_collectives=False)
    with pytest.raises(InvalidInput, match="no whole state"):
        casckpt_to_dcp(store, "x/rank-0@1", tmp_path / "out")


# files of torch.save


def test_a_file_of_torch_save_goes_in_and_out(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 10_000)
    monkeypatch.setattr(resident, "RESIDENT_BYTES", 10_000)
    store.create(cell_bytes=4096)
    state = example()
    for step, zipped in enumerate((True, False)):
        torch.save(state, tmp_path / "in.pt", _use_new_zipfile_serialization=zipped)
        done = Told()
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
    """As on a disk that is almost full: what goes beyond is written in part, or not at all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_object_in_a_file_of_torch_save_stays_one(store: Store, tmp_path: Path) -> None:
    torch.save({"net": torch.nn.Linear(1, 1), "w": torch.ones(2)}, tmp_path / "x.pt")
    torch_save_to_casckpt(tmp_path / "x.pt", store, run="a", step=1, allow_pickle=True)
    assert type(store.read("a@1", allow_pickle=True)["net"]) is torch.nn.Linear


@pytest.mark.parametrize("call", [casckpt_to_torch_save, casckpt_to_dcp])
def test_a_full_disk_is_told_of(store: Store, tmp_path: Path, call: Callable[..., Any]) -> None:
    store.save({"a": numbers("a", 3000), "b": numbers("b", 100_000)}, step=1)
    with files_of_at_most(4000), pytest.raises(StorageError, match=r"out cannot be written: .*make room"):
        call(store, "default@1", tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_disk_that_fills_up_while_tensors_are_written_is_told_of(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = torch_files._filled

    def filling(*args: Any) -> Any:
        with files_of_at_most(8192):
            return fill(*args)

    monkeypatch.setattr(torch_files, "_filled", filling)
    store.save({"a": numbers("a", 3000)}, step=1)
    with pytest.raises(StorageError, match=r"out cannot be written: .*make room"):
        casckpt_to_torch_save(store, "default@1", tmp_path / "out")


def test_files_of_no_use_are_refused(store: Store, tmp_path: Path) -> None:
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


# folders of OLMo-core


def olmo(path: Path) -> dict[str, torch.Tensor]:
    """A folder as release 0.1.0 writes it on two ranks; the optimizer with groups of parameters."""
    full = {"up": numbers("up", 6, 4), "down": numbers("down", 5)}
    moments = {f"state.{key}.__exp_avg": value * 2 for key, value in full.items()}
    groups = {"_param_names": ["up", "down"], "params": [0, 1], "lr": 0.5, "betas": (0.9, 0.99)}
    packed = torch.frombuffer(bytearray(pickle.dumps(groups)), dtype=torch.uint8)
    optim = moments | {"param_group0": packed, "state_keys": packed[:3], "num_param_groups": torch.tensor(1)}
    _olmo_part(path / "model", full)
    _olmo_part(path / "optim", optim)
    return full


def _olmo_part(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.mkdir(parents=True)
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    described = {}
    for key, value in tensors.items():
        flat, cut = value.reshape(-1), value.numel() // 3
        specs: dict[str, Any]
        if key == "up":  # columns, as DTensors have them
            specs = {f"rank_{r}.safetensors": {"local_shape": [6, 2], "global_offset": [0, 2 * r]} for r in (0, 1)}
            for rank in (0, 1):
                files[rank][key] = value[:, 2 * rank : 2 * rank + 2].reshape(-1).clone()
        elif key == "state.down.__exp_avg":  # nothing of it on one rank, whose optimizer never saw it
            specs = {"rank_0.safetensors": {"flattened_offsets": [[0, 0]]},
                     "rank_1.safetensors": {"flattened_offsets": [[0, value.numel()]]}}  # fmt: skip
            files[1][key] = flat.clone()
        elif value.dim() and "state" in key and "param" not in key and "keys" not in key:  # flat, as FSDP has them
            specs = {"rank_0.safetensors": {"flattened_offsets": [[0, cut], [2 * cut, value.numel()]]},
                     "rank_1.safetensors": {"flattened_offsets": [[cut, 2 * cut]]}}  # fmt: skip
            files[0][key] = torch.cat([flat[:cut], flat[2 * cut :]])
            files[1][key] = flat[cut : 2 * cut].clone()
        else:  # replicas, which every rank writes
            specs = {f"rank_{r}.safetensors": {"flattened_offsets": [[0, value.numel()]]} for r in (0, 1)}
            for rank in (0, 1):
                files[rank][key] = flat.clone()
        described[key] = {"shape": list(value.shape), "is_sharded": True, "dtype": "x", "shard_spec_per_file": specs}
    (path / "metadata.json").write_text(json.dumps({"tensors": described}))
    for rank, held in enumerate(files):
        save_file(held, path / f"rank_{rank}.safetensors")


def test_a_folder_of_olmo_core(store: Store, tmp_path: Path) -> None:
    full = olmo(tmp_path / "in")
    import_olmo(tmp_path / "in", store, run="o", step=1)
    found = store.read("o@1")
    assert identical(found["model"], full)
    assert identical(found["optim"]["state"], {key: {"exp_avg": value * 2} for key, value in full.items()})
    assert found["optim"]["param_groups"] == [{"params": ["up", "down"], "lr": 0.5, "betas": (0.9, 0.99)}]
    assert look_at(tmp_path / "in").kind == "olmo"
    import_any(store, look_at(tmp_path / "in" / "model"), run="part", step=1)
    assert identical(store.read("part@1"), full)


def test_a_folder_of_olmo_core_that_is_not_whole(store: Store, tmp_path: Path) -> None:
    olmo(tmp_path / "in")
    (tmp_path / "in/model/rank_1.safetensors").unlink()
    with pytest.raises(NotFound, match=r"rank_1.safetensors"):
        import_olmo(tmp_path / "in", store, step=1)
    metadata = tmp_path / "in/model/metadata.json"
    metadata.write_text(metadata.read_text().replace("rank_1.safetensors", "../../x"))
    with pytest.raises(Refused):
        import_olmo(tmp_path / "in", store, step=1)
    metadata.write_text("{}")
    with pytest.raises(Refused, match="is not one of OLMo-core"):
        import_olmo(tmp_path / "in", store, step=1)


def test_a_folder_of_the_later_trainer(store: Store, tmp_path: Path) -> None:
    state = {"model": {"w": numbers("w", 9)}, "optim": {"state.w.step": torch.tensor(1.0)}}
    folder = tmp_path / "step10"
    stock(folder / "model_and_optim", state)
    (folder / "train").mkdir()
    torch.save({"step": 10, "rng": torch.ones(3)}, folder / "train/rank0.pt")
    torch.save({"c": Colour.RED}, folder / "train/rank1.pt")
    (folder / ".metadata.json").write_text('{"version": "v2"}')
    assert look_at(folder).kind == "olmo-trainer"
    import_olmo_trainer(folder, store, run="o", step=10)
    found = store.read("o@10")
    assert identical({key: found[key] for key in state}, state)
    assert list(found["train"]) == [0]
    assert identical(found["train"][0], {"step": 10, "rng": torch.ones(3)})
    assert store.attachments("o@10") == {".metadata.json": 17}
    import_olmo_trainer(folder, store, run="o", step=11, allow_pickle=True)
    assert store.read("o@11", allow_pickle=True)["train"][1] == {"c": Colour.RED}


# memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_conversions_take_a_bounded_amount_of_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.peak_convert", str(tmp_path), "64"]
    root = Path(__file__).parents[2]
    found = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    assert max(map(float, found.split())) <= 32  # MiB, of a state of 64: windows of 4, and what is in flight


# what it is shows in its contents


def test_contents_tell_what_a_path_is(store: Store, tmp_path: Path) -> None:
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
    """A place in fsspec's memory."""
    yield "memory://bucket"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_urls_of_other_programs(store: Store, tmp_path: Path, bucket: str) -> None:
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


class Config:
    """Of a training script."""

    def __init__(self) -> None:
        self.rate = 0.1


def test_a_class_of_the_script_that_saved_a_file_is_named_and_can_be_put_there(
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
def test_a_folder_of_checkpoints_is_told_from_one(kind: str, store: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        folder = tmp_path / f"step-{step}"
        if kind == "dcp":
            save({"w": torch.ones(2)}, FileSystemWriter(folder))
        else:
            folder.mkdir()
            save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(InvalidInput, match="holds no checkpoint, but folders that do: step-10, step-20; give"):
        look_at(tmp_path)
    if kind == "dcp":
        with pytest.raises(InvalidInput, match="holds no checkpoint, but folders that do: 'step-10', 'step-20'; give"):
            dcp_to_casckpt(tmp_path, store, step=1)
    assert import_any(store, look_at(tmp_path / "step-20"), step=1).step == 1
