"""The comparison of folders finds every difference, and only differences."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.stored_folder import write_folder
from tests.support.trees import same_tree

CHANGES: dict[str, Callable[[Path], object]] = {
    "other bytes of the same size": lambda root: (root / "run.sh").write_text("#!/bin/zz\n"),
    "an item more": lambda root: (root / "shared" / "new").touch(),
    "an item fewer": lambda root: (root / "run.sh").unlink(),
    "an empty folder more": lambda root: (root / "logs" / "new").mkdir(),
    "an empty folder fewer": lambda root: (root / "logs").rmdir(),
    "another mode of a file": lambda root: (root / "run.sh").chmod(0o751),
    "another mode of a folder": lambda root: (root / "logs").chmod(0o750),
    "another mode of the root": lambda root: root.chmod(0o711),
    "another name": lambda root: (root / "run.sh").rename(root / "run.SH"),
    "another target": lambda root: relink(root / "latest", "checkpoint-2"),
    "a copy instead of a link": lambda root: copy_over(root / "checkpoint-2" / "tokenizer.json"),
}


def relink(link: Path, target: str) -> None:
    link.unlink()
    link.symlink_to(target)


def copy_over(link: Path) -> None:
    data = link.read_bytes()
    link.unlink()
    link.write_bytes(data)


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Path, Path]:
    write_folder(tmp_path / "one", 2)
    shutil.copytree(tmp_path / "one", tmp_path / "other", symlinks=True)
    return tmp_path / "one", tmp_path / "other"


def test_a_copy_is_the_same(copies: tuple[Path, Path]) -> None:
    same_tree(*copies)
    same_tree(*(copy / "run.sh" for copy in copies))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_copy_is_not(copies: tuple[Path, Path], change: Callable[[Path], object]) -> None:
    one, other = copies
    change(other)
    for pair in ((one, other), (other, one)):
        with pytest.raises(AssertionError, match="!="):
            same_tree(*pair)
