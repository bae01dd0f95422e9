from __future__ import annotations

import enum
from pathlib import Path

import torch

import casckpt
from tests.cli.conftest import AsJson, Run, named
from tests.support.commands import STATS

# reads


def test_show_prints_details_and_tensors(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    store.tag("best", "b@1")
    shown = as_json("show", saved, "tag:best")
    assert named([shown]) == ["b@1"]
    assert shown["id"] == store.get("b@1").id
    assert set(shown["stats"]) == STATS
    assert shown["tensors"] == [
        {"key": "shared", "dtype": "float32", "shape": [5000], "bytes": 20_000, "health": None},
        {"key": "other", "dtype": "bfloat16", "shape": [2, 3], "bytes": 12, "health": None},
    ]
    assert shown["tags"] == ["best"]
    assert as_json("show", saved, "a@1")["objects"] == ["lr"]
    text = run("show", saved, "b@1").stdout
    assert "bfloat16" in text
    assert "2x3" in text


def test_show_marks_pickled_values(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    store.save({"odd": Odd(1), "n": 1}, run="odd", step=1, allow_pickle=True)
    assert as_json("show", saved, "odd@1")["pickled"] == ["odd"]
    assert "pickled  odd" in run("show", saved, "odd@1").stdout
    assert as_json("show", saved, "a@1")["pickled"] == []
    assert "pickled" not in run("show", saved, "a@1").stdout


class Odd(enum.IntEnum):
    ONE = 1


def test_show_can_select_entries_by_key(saved: Path, as_json: AsJson, run: Run) -> None:
    assert [one["key"] for one in as_json("show", saved, "a@1", "--keys", "o*")["tensors"]] == ["own"]
    assert as_json("show", saved, "a@1", "--keys", "x*", status=3)["error"]["kind"] == "missing-key"


def test_show_lists_all_tensors_only_on_request_if_there_are_many(
    store: casckpt.Store, store_path: Path, run: Run
) -> None:
    store.save({f"k{number}": torch.zeros(1) for number in range(30)}, step=0)
    assert "k17" not in run("show", store_path, "latest").stdout
    assert "k17" in run("show", store_path, "latest", "--tensors").stdout


# lists


def test_show_groups_values_by_container_if_there_are_many(saved: Path, store: casckpt.Store, run: Run) -> None:
    loops = {f"loop{number}": {"done": number} for number in range(30)}
    store.save({"lightning": loops, "epoch": 1, "optim": {"lr": 0.1, "eps": 0.2}}, run="c", step=1)
    (line,) = (line for line in run("show", saved, "c@1").stdout.splitlines() if line.startswith("objects"))
    assert line.split(maxsplit=1)[1] == "lightning.* (30 keys), epoch, optim.* (2 keys)"


def test_show_suggests_the_options_that_list_all_tensors(store: casckpt.Store, store_path: Path, run: Run) -> None:
    store.save({f"w{number}": torch.zeros(1) for number in range(30)}, run="many", step=1)
    assert "list all of them with --tensors" in run("show", store_path, "many@1").stdout
    assert "list all of them with --tensors" not in run("show", store_path, "many@1", "--tensors").stdout


# reads


def test_diff_prints_keys_and_bytes(saved: Path, as_json: AsJson, run: Run) -> None:
    found = as_json("diff", saved, "a@1", "a@3")
    assert {name: found[name] for name in ("added", "removed", "changed", "unchanged")} == {
        "added": [], "removed": [], "changed": ["own"], "unchanged": ["shared"],
    }  # fmt: skip
    assert found["bytes_changed"] == 4000
    found = as_json("diff", saved, "a@1", "b@1")
    assert (found["added"], found["removed"], found["bytes_added"]) == (["other"], ["own"], 12)
    assert "~ own  bytes, 3.9 KiB" in run("diff", saved, "a@1", "a@3").stdout
