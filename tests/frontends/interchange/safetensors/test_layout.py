"""Layouts: the position of every byte in files that do not exist yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput
from casckpt.frontends.convert import export_safetensors
from casckpt.frontends.interchange.safetensors.layout import FileLayout, index_name, lay_out, plan_shards
from casckpt.frontends.views.recut import ViewTensor
from casckpt.frontends.views.view import Rules, view_of
from casckpt.store.store import Store
from tests.support.safetensors_files import streams

STATE = {
    "b": torch.arange(700.0), "a": torch.ones(3, dtype=torch.bool), "d": torch.arange(5), "c": torch.ones(9).half(),
    "e": torch.zeros(0, 3), "f.10": torch.ones(4), "f.2": torch.ones(6).bfloat16(),
}  # fmt: skip


def layout(store: Store, most: int | None = None) -> list[FileLayout]:
    contents = Contents.open(store.repository, store.get("latest").commit)
    return lay_out(view_of(contents, Rules()).tensors, {"format": "pt"}, most)


def test_a_layout_determines_every_byte_before_anything_is_written(store: Store, tmp_path: Path) -> None:
    store.save(STATE, step=0)
    planned = layout(store, 1000)
    assert len(planned) > 3
    export_safetensors(store, "latest", tmp_path / "out", max_shard_size=1000)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {file.name for file in planned}
    assert planned[-1].name == index_name("model") == "model.safetensors.index.json"
    for file in planned:
        data = (tmp_path / "out" / file.name).read_bytes()
        assert (len(data), data[: len(file.head)]) == (file.nbytes, file.head)
        expected = [STATE[one.name].view(torch.uint8).numpy().tobytes() for one in file.tensors]
        assert data[len(file.head) :] == b"".join(expected)


def test_casckpt_writes_the_same_file_as_the_library_for_any_key_order(store: Store, tmp_path: Path) -> None:
    safetensors.torch.save_file(STATE, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    for step, state in enumerate((STATE, dict(reversed(STATE.items())))):
        store.save(state, step=step)
        found = export_safetensors(store, f"default@{step}", tmp_path / f"{step}.safetensors")
        assert Path(found.files[0]).read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


some_streams = st.lists(st.tuples(st.sampled_from(["uint8", "float32", "float64"]), st.integers(0, 300))).map(streams)


@given(given_streams=some_streams, most=st.integers(1, 2000))
def test_the_files_contain_every_tensor_once_and_in_order(given_streams: list[ViewTensor], most: int) -> None:
    shards = plan_shards(given_streams, most)
    assert [one for shard in shards for one in shard] == given_streams
    for shard in shards:
        assert len(shard) <= 1 or sum(one.entry.nbytes for one in shard) <= most
    assert len(shards) == 1 or all(shards)


def test_a_file_size_of_zero_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="max-shard-size"):
        plan_shards([], 0)
