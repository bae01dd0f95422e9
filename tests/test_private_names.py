"""Each private name of another package that casckpt uses is known, and is there in the installed version."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import page_tables

from tests.support.private_names import HOLDERS, all_uses, has, may_lack, uses_in

NAMES = "an attribute of another package's object: add it to HOLDERS in tests/support/private_names.py"


def used_in(source: str) -> dict[str, bool]:
    """Return the private names in a module's source, and whether it handles that they are missing."""
    found = uses_in("a.py", ast.parse(source), frozenset({"_mine"}))
    return {use.name: use.is_handled for use in found}


def test_each_private_name_exists() -> None:
    installed = {use.name for use in all_uses() if find_spec(use.name.split(".")[0])}
    assert sorted(name for name in installed if not has(name) and not may_lack(name)) == []


def test_each_private_use_is_known() -> None:
    assert [f"{use.module}: {use.name}" for use in all_uses() if "." not in use.name] == [], NAMES
    holders = {f"{holder}.{name}" for holder, names in HOLDERS.items() for name in names.split()}
    assert sorted(holders - {use.name for use in all_uses()}) == [], "no longer used: remove them from HOLDERS"


def test_a_misspelled_name_is_found() -> None:
    source = "import torch, threading\nfrom torch._utils import _rebild\ntorch._C._nothing\nthreading._atexit(x._mine)"
    assert [has(name) for name in used_in(source)] == [False] * 3
    assert used_in("group._get_backnd; self._mine; self._shared; getattr(x, '_conn', 0)") == {
        "_get_backnd": False, "_shared": False, "_conn": True
    }  # fmt: skip
    assert not any(has(f"{holder}.{name}z") for holder, names in HOLDERS.items() for name in names.split())


def test_a_use_handles_a_missing_name() -> None:
    for guard in ("try: {}\nexcept ImportError: pass", "with suppress(AttributeError): {}",
                  "if torch.__version__ < '2.7': {}"):  # fmt: skip
        assert used_in("import torch\n" + guard.format("torch._nothing")) == {"torch._nothing": True}
    assert used_in("import torch\nwith torch.no_grad(): torch._nothing") == {"torch._nothing": False}


def test_the_site_lists_every_private_name() -> None:
    page = page_tables.inserted((Path(__file__).parent.parent / "docs" / "design.md").read_text())
    for use in all_uses():
        package, _, name = use.name.partition(".")
        assert any(row.startswith(f"| {package} | `{name}`") and f"`{use.module}`" in row for row in page.splitlines())
