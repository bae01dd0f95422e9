"""Any folder comes back as it was, or is refused with the name of what cannot come back."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.errors import InvalidInput, StorageError
from tests.support.forks import forked
from tests.support.odd_files import (
    TWICE,
    N,
    archive,
    array,
    drawn,
    entry,
    hostile,
    metadata,
    placed,
    safetensors,
    saved,
    torch_file,
)  # fmt: skip
from tests.support.stored_folder import described

NAMES = [
    "a", "A", "b", "model.safetensors", "w.pt", "é", "e\u0301", "名", "a\nb", "a\\b", "-rf", "--", ".hidden", "...",
    "..a", "~", "a b", " ", "*?[", "\x01\x7f", "{step}", "5", "checkpoint-5", "05", "x" * 255, "é" * 127, "%2e%2e",
    "\u202etxt", "🙂", "CON", "a:b", "$HOME", "`ls`", "'\"",
]  # fmt: skip
MODES = [0, 0o400, 0o444, 0o600, 0o644, 0o711, 0o755, 0o777, 0o6755]


def contents(dice: random.Random, canary: Path) -> bytes:
    """Return what a file may hold."""
    seed = dice.randrange(3)  # the same content in several files is stored once
    pickles = [data for _, data in hostile(canary)]
    makers: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: dice.randbytes(dice.randrange(1, 300)),
        lambda: dice.randbytes(dice.choice([4095, 4096, 4097, 65535, 65536, 65537, 90_000])),
        lambda: drawn(N, seed),
        lambda: bytes(70_000),
        lambda: safetensors({"w": entry(), "e": entry(shape=(0,), start=N)}, drawn(N, seed)),
        lambda: torch_file({"w": torch.arange(20_000.0) + seed, "n": seed}),
        lambda: torch_file({"w": torch.arange(20_000.0).bfloat16()}, _use_new_zipfile_serialization=False),
        lambda: archive(TWICE, zip64=True),
        lambda: archive(TWICE, how=zipfile.ZIP_DEFLATED),
        lambda: archive([("a/data.pkl", dice.choice(pickles)), ("a/data/0", drawn(N, seed))]),
        lambda: saved(np.arange(20_000.0).reshape(100, -1)),
        lambda: array("{'descr': ((("),
        lambda: archive([("x.npy", saved(np.arange(9_000.0))), ("y.npy", saved(np.zeros(9_000, "i1")))]),
        lambda: dice.choice(pickles) * 9,
    ]
    made = dice.choice(makers)()
    if made and dice.random() < 0.2:  # it is truncated
        made = made[: dice.randrange(len(made))]
    if made and dice.random() < 0.2:  # bytes are wrong
        there = bytearray(made)
        for _ in range(3):
            there[dice.randrange(len(there))] = dice.randrange(256)
        made = bytes(there)
    return made


def fill(folder: Path, dice: random.Random, canary: Path, *, depth: int = 0) -> None:
    """Write files, folders, and links into a folder."""
    for name in dice.sample(NAMES, dice.randrange(1, 9)):
        path, kind = folder / name, dice.random()
        if kind < 0.25 and depth < 5:
            path.mkdir()
            fill(path, dice, canary, depth=depth + 1) if dice.random() < 0.8 else None
        elif kind < 0.45:
            ups = "../" * dice.randrange(depth + 1)
            path.symlink_to(ups + dice.choice([".", "./", *NAMES, f"{dice.choice(NAMES)}/{dice.choice(NAMES)}"]))
        elif kind < 0.5:
            with path.open("wb") as file:  # mostly holes
                file.seek(dice.randrange(2_000_000))
                file.write(b"end")
                file.truncate(file.tell() + dice.randrange(100_000))
        else:
            path.write_bytes(contents(dice, canary))
    if dice.random() < 0.2:
        (folder / ".metadata").write_bytes(
            dice.choice(
                [metadata(a=placed(dice.randrange(99), 9999, path=dice.choice(NAMES))), pickle.dumps({}), b"cos\n"]
            )
        )


def close(folder: Path, dice: random.Random, modes: list[int]) -> None:
    """Change the modes of all files and folders."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if not path.is_symlink():
            path.chmod(dice.choice(modes) | (0o2000 if path.is_dir() else 0))


def change(folder: Path, dice: random.Random, canary: Path) -> None:
    """Do what a trainer does until its next checkpoint."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    for path in dice.sample(files, len(files) // 3):
        path.chmod(0o600)
        how = dice.random()
        if how < 0.3:
            path.unlink()
        elif how < 0.6:
            path.write_bytes(contents(dice, canary))
        elif how < 0.8 and (size := path.stat().st_size):
            with path.open("r+b") as file:
                file.seek(dice.randrange(size))
                file.write(b"?")
        else:
            path.rename(path.with_name("moved"))
    (folder / "new").mkdir()
    fill(folder / "new", dice, canary, depth=1)


def _refused(folder: Path, dice: random.Random) -> str:
    """Add one thing that cannot come back. Return a part of the error."""
    place = dice.choice(
        [folder, *(path for path in sorted(folder.rglob("*")) if path.is_dir() and not path.is_symlink())]
    )
    name = os.fsencode(place) + b"/bad"
    kind = dice.randrange(4)
    if kind == 0:
        os.mkfifo(name)
    elif kind == 1:
        os.close(os.open(name + b"\xff", os.O_CREAT))
    else:
        os.symlink(b"/absent" if kind == 2 else b"../" * 40 + b"etc", name)
    return ["bad' is neither", r"bad\\xff' is not a name in UTF-8", "bad' is a link to", "bad' is a link to"][kind]


STORES: list[dict[str, Any]] = [{}, {"cell_bytes": 4096, "blob_bytes": 65536}, {"compress": "always"}]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[casckpt.Store, dict[str, Any]]]:
    made = []
    for number, options in enumerate(STORES):
        base = tmp_path_factory.mktemp("stores")
        store = casckpt.open(base / f"{number}", cache_dir=base / "cache")
        store.create(**{key: value for key, value in options.items() if key != "compress"})
        made.append((store, {key: value for key, value in options.items() if key == "compress"}))
    return made


Stores = list[tuple[casckpt.Store, dict[str, Any]]]


def _there_and_back(tmp_path: Path, stores: Stores, number: int) -> None:
    dice = random.Random(number)
    folder, out, canary = tmp_path / "folder", tmp_path / "out", tmp_path / "canary"
    store, options = stores[number % len(stores)]
    folder.mkdir()
    fill(folder, dice, canary)
    if dice.random() < 0.3:
        with pytest.raises(InvalidInput, match=_refused(folder, dice)):
            store.import_files(folder, run=f"r{number}", step=5, **options)
        for place, folders, names in os.walk(os.fsencode(folder)):
            for name in (*folders, *names):
                if name.startswith(b"bad"):
                    os.unlink(os.path.join(place, name))
    close(folder, dice, MODES)
    first = store.import_files(folder, run=f"r{number}", step=5, **options)
    store.export(first, out)
    before = described(folder)
    assert described(out) == before
    change(folder, dice, canary)
    second = store.import_files(folder, run=f"r{number}", step=6, **options)
    store.export(second, out, force=True)
    after = described(folder)
    assert described(out) == after
    store.export(first, tmp_path / "again")
    assert described(tmp_path / "again") == before
    gone = {item["path"]: item for item in before if item["kind"] == "FILE"}
    moved = {item["path"]: item["data"] for item in described(tmp_path / "out.before")} if (
        tmp_path / "out.before"
    ).exists() else {}  # fmt: skip
    kinds = {item["path"]: item["kind"] for item in after}
    for path in gone.keys() - {path for path, kind in kinds.items() if kind != "FOLDER"}:
        assert moved[path] == gone[path]["data"], path
    assert not canary.exists()


@pytest.mark.filterwarnings("ignore")  # numpy warns of dtypes
@pytest.mark.parametrize("number", range(15))
def test_any_folder_comes_back_as_it_was_or_is_refused_by_name(tmp_path: Path, stores: Stores, number: int) -> None:
    _there_and_back(tmp_path, stores, number)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(15))
def test_300_folders_come_back(tmp_path: Path, stores: Stores, seed: int, number: int) -> None:
    for one in range(20):
        place = tmp_path / f"{one}"
        place.mkdir()
        try:
            _there_and_back(place, stores, seed + 20 * number + one)
        except BaseException as error:
            error.add_note(f"folder {seed + 20 * number + one}")
            raise
        shutil.rmtree(place)
    for store, _ in stores:
        assert not store.verify().is_damaged


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "entries", "most"), [("many", 500, 700), ("large", 2, 200)])
def test_many_files_and_large_ones_need_few_entries_and_little_memory(
    disk_path: Path, kind: str, entries: int, most: float
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.peak_files", disk_path, kind], capture_output=True, text=True, check=True
    )
    made, imported, _, exported, _, again, _ = numbers = [float(word) for word in done.stdout.split()]
    print("entries, and MiB and seconds of import, export, and a second export:", *numbers)  # noqa: T201 - a measure
    assert made <= entries
    assert max(imported, exported, again) < most


def test_a_path_that_the_system_cannot_use_is_refused_and_one_below_comes_back(
    store: casckpt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "r"
    root.mkdir()
    monkeypatch.chdir(root)
    deep = os.pathconf(root, "PC_PATH_MAX") - len(os.fsencode(root)) - 300
    for _ in range(deep // 200):
        os.mkdir("n" * 199)
        os.chdir("n" * 199)
    Path("file").write_bytes(drawn(N))
    store.import_files(root, step=1)
    store.export("default@1", tmp_path / "out")
    assert described(tmp_path / "out") == described(root)
    for _ in range(3):
        os.mkdir("n" * 199)
        os.chdir("n" * 199)
    with pytest.raises((InvalidInput, StorageError), match="nnn"):
        store.import_files(root, step=2)
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(root)
    assert [one.step for one in store.checkpoints()] == [1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_file_that_the_user_may_not_read_is_refused_by_name_and_what_may_be_read_comes_back(
    disk_path: Path, tmp_path: Path
) -> None:
    """Root may read everything."""
    disk_path.chmod(0o755)
    place, dice = disk_path / "place", random.Random(3)
    folder = place / "folder"
    folder.mkdir(parents=True)
    fill(folder, dice, tmp_path / "canary")
    close(folder, dice, [0o400, 0o500, 0o640])
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(dice.choice([0o500, 0o555, 0o700]))
    for path in (place, *place.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    store = casckpt.open(place / "store", cache_dir=place / "cache")

    def act() -> None:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        store.import_files(folder, step=1)
        store.export("default@1", place / "out")
        store.export("default@1", place / "out", force=True)
        assert described(place / "out") == described(folder)
        folder.chmod(0o700)
        (folder / "shut").write_text("secret")
        (folder / "shut").chmod(0)
        for what in ("shut", "shut folder"):
            with pytest.raises(StorageError, match=what):
                store.import_files(folder, step=2)
            (folder / "shut").unlink(missing_ok=True)
            (folder / "shut folder").mkdir(mode=0, exist_ok=True)
        assert [one.step for one in store.checkpoints()] == [1]

    (tmp_path / "warm").mkdir()
    warm = casckpt.open(tmp_path / "store", cache_dir=tmp_path / "cache")
    warm.export(warm.import_files(tmp_path / "warm", step=1), tmp_path / "warm-out")  # the other user imports no module
    with forked(act):
        pass
