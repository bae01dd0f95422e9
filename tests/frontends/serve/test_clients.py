"""Real hub clients load from a served store: weights are equal, and only changes are transferred."""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

hub: Any = pytest.importorskip("huggingface_hub", reason="needs casckpt[transformers]")
pytest.importorskip("uvicorn", reason="needs casckpt[serve]")
pytest.importorskip("transformers", reason="needs casckpt[transformers]")

import casckpt
from casckpt.frontends.serve.hub import commit_of, repo_of
from casckpt.saving.options import Compress
from tests.support import servers
from tests.support.hub import gpt2, trained
from tests.support.pages import Reader
from tests.support.ranks import Pool
from tests.support.serving import Served, serving, serving_process
from tests.support.training import identical
from tests.test_docs import DOCS, ROOT

if TYPE_CHECKING:
    from tests.support.servers import Server

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the clients
SHARD = 20_000
SERVING = DOCS / "serving.md"
# the default of 10 seconds is too short on a busy machine
PATIENT = {
    "HF_HUB_ETAG_TIMEOUT": "120",
    "HF_HUB_DOWNLOAD_TIMEOUT": "120",
}


def sharded(rank: int, size: int, where: str, options: dict[str, Any], compress: Compress) -> dict[str, torch.Tensor]:
    """Train a model with FSDP2 on two ranks. Only one block changes between the two steps.

    Return the final weights.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from casckpt.frontends.training_state.contents import save_model_and_optim_state

    store = casckpt.open(where, storage_options=options)
    store.create()
    if rank == 0:
        store.change_settings(compress=compress)
    torch.distributed.barrier()
    model = gpt2().bfloat16()
    mesh = init_device_mesh("cpu", (size,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = trained(model)
    save_model_and_optim_state(store, model, optimizer, run="sft", step=100)
    with torch.no_grad():
        for parameter in model.transformer.h[2].parameters():
            parameter.add_(0.01)
    save_model_and_optim_state(store, model, optimizer, run="sft", step=200)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def bucket(moto_server: Server) -> tuple[str, dict[str, Any]]:
    return f"s3://{moto_server.new_bucket()}/store", moto_server.options


@pytest.fixture(
    params=[*(pytest.param(one, marks=pytest.mark.soak) for one in ("folder raw", "folder coded")), "bucket coded"]
)
def fsdp(request: pytest.FixtureRequest, tmp_path: Path, ranks: Pool) -> tuple[casckpt.Store, dict[str, torch.Tensor]]:
    where, options = str(tmp_path / "store"), dict[str, Any]()
    if request.param.startswith("bucket"):
        where, options = request.getfixturevalue("bucket")
    compress = "always" if request.param.endswith("coded") else "off"
    found = ranks.run(2, sharded, where, options, compress)[0]
    store = casckpt.open(where, storage_options=options)
    assert (store.get("sft@200").stats.bytes_coded > 0) == (compress == "always")
    return store, found


def weights_in(folder: str | Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    return dict(sorted(found.items()))


def test_snapshot_download_fetches_a_sharded_model_and_then_only_changes(
    fsdp: tuple[casckpt.Store, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    store, weights = fsdp
    with serving(store, max_shard_size=SHARD) as served:
        snapshot = partial(
            hub.snapshot_download, "sft", endpoint=served.endpoint, cache_dir=tmp_path / "hub", token=False
        )
        first = snapshot(revision="100")
        every = served.weights_sent()
        assert len(every) > 4
        served.sent.clear()
        second = snapshot(revision="200")
        again = served.weights_sent()
        assert 0 < len(again) <= len(every) // 2
        assert identical(weights_in(second), dict(sorted(weights.items())))
        assert not identical(weights_in(first), weights_in(second))
        store.export("sft@200", tmp_path / "out", max_shard_size=SHARD)
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert names == {path.name for path in Path(second).iterdir()}
        for name in names:
            assert (tmp_path / "out" / name).read_bytes() == (Path(second) / name).read_bytes(), name
        served.sent.clear()
        for revision in ("main", "latest", store.get("sft@200").id[:40]):
            assert snapshot(revision=revision) == second
        assert served.weights_sent() == []
    assert hub.snapshot_download("sft", revision="main", cache_dir=tmp_path / "hub", local_files_only=True) == second


@pytest.fixture
def served(store: casckpt.Store) -> Iterator[Served]:
    save(store, "sft", 100)
    save(store, "sft", 200, seed=4)
    save(store, "exp/a/b", 7)
    store.tag("best", "sft@100")
    with serving(store, max_shard_size=SHARD) as found:
        yield found


def save(store: casckpt.Store, run: str, step: int, seed: int = 3) -> None:
    files = {"tokenizer/vocab.json": b"{}", "notes.bin": bytes(300_000)}
    casckpt.save_model_and_optim_state(store, gpt2(seed), None, run=run, step=step, attachments=files)


def test_hf_hub_download_fetches_and_caches_a_file(store: casckpt.Store, served: Served, tmp_path: Path) -> None:
    get = partial(hub.hf_hub_download, "sft", endpoint=served.endpoint, cache_dir=tmp_path / "hub", token=False)
    config = get("config.json", revision="best")
    assert Path(config).read_bytes() == store.read_attachment("sft@100", "config.json")
    assert commit_of(store.get("sft@100").id) in config
    assert Path(get("notes.bin", revision="100")).read_bytes() == bytes(300_000)
    assert Path(get("vocab.json", subfolder="tokenizer")).read_bytes() == b"{}"
    with pytest.raises(hub.errors.EntryNotFoundError, match=r"no file 'nothing\.json'"):
        get("nothing.json")
    assert (
        hub.try_to_load_from_cache("sft", "nothing.json", cache_dir=tmp_path / "hub")
        == hub.file_download._CACHED_NO_EXIST
    )
    with pytest.raises(hub.errors.RevisionNotFoundError, match="no revision '300'"):
        get("config.json", revision="300")
    with pytest.raises(hub.errors.RepositoryNotFoundError, match="not contain run 'other'"):
        hub.hf_hub_download("other", "config.json", endpoint=served.endpoint, cache_dir=tmp_path / "hub", token=False)


def test_hf_api_lists_models_and_files(store: casckpt.Store, served: Served) -> None:
    api = hub.HfApi(endpoint=served.endpoint, token=False)
    info = api.model_info("sft", revision="100", files_metadata=True)
    ids = {step: commit_of(store.get(f"sft@{step}").id) for step in (100, 200)}
    assert (info.id, info.sha, info.library_name) == ("sft", ids[100], "transformers")
    sizes = {one.rfilename: one.size for one in info.siblings}
    assert sizes["notes.bin"] == 300_000
    assert sizes["tokenizer/vocab.json"] == 2
    assert info.safetensors.total == sum(value.numel() for value in gpt2().state_dict().values())
    assert api.model_info("sft").sha == ids[200]
    assert {one.id for one in api.list_models()} == {"sft", repo_of("exp/a/b")}
    assert [one.id for one in api.list_models(search="EXP")] == [repo_of("exp/a/b")]
    assert api.file_exists("sft", "config.json")
    assert not api.file_exists("sft", "x.json")
    assert api.revision_exists("sft", "best")
    assert not api.repo_exists("nothing")
    refs = api.list_repo_refs("sft")
    assert {one.name: one.target_commit for one in refs.branches} == {"main": ids[200]}
    assert {one.name: one.target_commit for one in refs.tags} == {"100": ids[100], "200": ids[200], "best": ids[100]}
    assert [one.commit_id for one in api.list_repo_commits("sft")] == [ids[200], ids[100]]
    assert [one.commit_id for one in api.list_repo_commits("sft", revision="best")] == [ids[100]]
    assert api.get_hf_file_metadata(url=f"{served.endpoint}/sft/resolve/main/config.json").commit_hash == ids[200]


def test_hf_api_lists_trees(served: Served) -> None:
    api = hub.HfApi(endpoint=served.endpoint, token=False)
    top = {one.path: type(one).__name__ for one in api.list_repo_tree("sft")}
    assert top["tokenizer"] == "RepoFolder"
    assert top["config.json"] == "RepoFile"
    assert "tokenizer/vocab.json" not in top
    assert {one.path for one in api.list_repo_tree("sft", "tokenizer")} == {"tokenizer/vocab.json"}
    every = {one.path: one for one in api.list_repo_tree("sft", recursive=True, expand=True)}
    assert every["tokenizer/vocab.json"].last_commit.title == "step 200"
    asked = api.get_paths_info("sft", ["config.json", "tokenizer", "nothing"], revision="100", expand=True)
    assert [one.path for one in asked] == ["config.json", "tokenizer"]
    assert asked[0].size == every["config.json"].size
    with pytest.raises(hub.errors.EntryNotFoundError):
        list(api.list_repo_tree("sft", "nothing"))


def test_a_run_whose_name_is_invalid_on_hubs_is_served(store: casckpt.Store, served: Served, tmp_path: Path) -> None:
    get = partial(hub.hf_hub_download, endpoint=served.endpoint, cache_dir=tmp_path / "hub", token=False)
    found = get(repo_of("exp/a/b"), "config.json", revision="7")
    assert Path(found).read_bytes() == store.read_attachment("exp/a/b@7", "config.json")
    with pytest.raises(hub.errors.RepositoryNotFoundError):
        get("exp-a-b", "config.json")


def test_hf_file_system_reads_files(served: Served) -> None:
    files = hub.HfFileSystem(endpoint=served.endpoint, token=False, skip_instance_cache=True)
    assert "runs/sft@100/tokenizer/vocab.json" in files.find("runs/sft@100")
    assert "runs/sft/config.json" in files.ls("runs/sft", detail=False)
    (name,) = files.glob("runs/sft@100/*-00002-of-*.safetensors")
    with files.open(name, block_size=1000) as file:
        length = int.from_bytes(file.read(8), "little")
        file.seek(length + 8)
        middle = file.read(5000)
    assert middle == files.cat_file(name)[length + 8 :][:5000]
    assert files.cat_file(name, start=100, end=200) == files.cat_file(name)[100:200]


def test_clients_send_their_token(store: casckpt.Store, tmp_path: Path) -> None:
    save(store, "sft", 100)
    with serving(store, guard={"tokens": frozenset({"hf_right", "hf_other"})}) as served:
        get = partial(hub.hf_hub_download, "sft", "config.json", endpoint=served.endpoint, cache_dir=tmp_path / "hub")
        for token, why in ((False, "a token is required"), ("hf_wrong", "Invalid credentials")):
            with pytest.raises(hub.errors.HfHubHTTPError, match=rf"401.*\n(.*\n)*{why}"):
                get(token=token)
        assert get(token="hf_other") == get(token="hf_right")


SCRIPT = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2LMHeadModel
from transformers.utils import logging
logging.set_verbosity_error()
model, info = AutoModelForCausalLM.from_pretrained("sft", revision=sys.argv[1], output_loading_info=True)
assert isinstance(model, GPT2LMHeadModel) and not any(info.values()), info
assert AutoConfig.from_pretrained("sft", revision=sys.argv[1]).n_layer == 3
torch.save(model.state_dict(), sys.argv[2])
"""


@pytest.mark.soak  # the examples below do the same
def test_from_pretrained_needs_only_an_endpoint(store: casckpt.Store, tmp_path: Path) -> None:
    save(store, "sft", 100)
    save(store, "sft", 200, seed=4)
    script = tmp_path / "load.py"
    script.write_text(SCRIPT)
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **PATIENT}
    with serving_process(store.url) as (served, _):
        environment["HF_ENDPOINT"] = served.endpoint
        # in a new process, because huggingface_hub reads these variables when it is imported
        command = [sys.executable, str(script), "100", str(tmp_path / "model.pt")]
        environment = os.environ | environment
        done = subprocess.run(command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert identical(torch.load(tmp_path / "model.pt"), dict(gpt2().state_dict()))


def test_the_examples_of_the_serving_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = servers.free_ports(1)[0]
    page = tmp_path / SERVING.name
    page.write_text(SERVING.read_text().replace("8000", str(port)))
    shim = tmp_path / "bin" / "hf"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m huggingface_hub.cli.hf "$@"\n')
    shim.chmod(0o755)
    for name, value in ({"OMP_NUM_THREADS": "1"} | PATIENT).items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "page"
    folder.mkdir()

    def no_ranks(ranks: int, block: object) -> None:
        raise AssertionError(f"{block} wants {ranks} ranks")

    try:
        assert Reader(folder, ROOT, {}, no_ranks).follow(page) == 5
    finally:
        with suppress(OSError, ValueError):
            os.kill(int((folder / "serve.pid").read_text()), signal.SIGKILL)
    weights = casckpt.unshard_model_state(folder / "checkpoints", "sft@100")
    downloads = [*(folder / "home").rglob("model.safetensors"), folder / "best" / "model.safetensors"]
    assert len(downloads) == 2
    for path in downloads:
        found = load_file(path)
        assert identical(found, {name: weights[name] for name in found})
