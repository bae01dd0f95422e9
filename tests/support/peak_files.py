"""How much memory, and how long, an import and an export of many small files, and of a large one, need.

``python -m tests.support.peak_files FOLDER KIND`` prints the number of entries, the peak MiB of both, and the seconds.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import casckpt
from casckpt.contents import manifests
from tests.support.odd_files import entry, safetensors
from tests.support.peak import taken

COUNT, SIZE = 100_000, 5 << 30


def _many(folder: Path) -> None:
    dice = random.Random(0)
    for number in range(COUNT):
        if number % 1000 == 0:
            (folder / f"{number // 1000}").mkdir(parents=True)
        (folder / f"{number // 1000}" / f"{number}.json").write_bytes(dice.randbytes(dice.randrange(2000)))


def _large(folder: Path) -> None:
    """Write a file with mostly holes. Its tensor ends behind 4 GiB."""
    folder.mkdir()
    head = safetensors({"w": entry(shape=(SIZE // 4,), end=SIZE)}, b"")
    with (folder / "large.safetensors").open("wb") as file:
        file.write(head)
        file.seek(len(head) + SIZE - 5)
        file.write(b"end")
        file.truncate(len(head) + SIZE + 3)


def main(base: Path, kind: str) -> None:
    store = casckpt.open(base / "store", cache_dir=base / "cache")
    (base / "warm").mkdir()
    (base / "warm" / "file").write_bytes(bytes(100_000))
    store.export(store.import_files(base / "warm", run="warm", step=0), base / "warm-out")
    {"many": _many, "large": _large}[kind](base / "folder")
    numbers = list[float]()

    def measured(call: Callable[[], Any]) -> None:
        begun = time.monotonic()
        numbers.append(round(taken(call)))
        numbers.append(round(time.monotonic() - begun, 1))

    measured(lambda: store.import_files(base / "folder", step=1))
    measured(lambda: store.export("default@1", base / "out"))
    subprocess.run(["diff", "-r", base / "folder", base / "out"], check=True)
    measured(lambda: store.export("default@1", base / "out", force=True))
    subprocess.run(["diff", "-r", base / "folder", base / "out"], check=True)
    made = store.get("default@1")
    entries = len(manifests.get(store.repository, made.commit).entries)
    print(entries, *numbers)  # noqa: T201 - its parent reads it


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
