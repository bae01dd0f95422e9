"""The public surface is complete: tests/data/surface.json lists the names at 0e24385 and 6ce87e2."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec

import commands
import pytest

from casckpt.cli.main import cli
from tests.support.surface import surface
from tests.test_packaging import ROOT


def options() -> list[str]:
    """Return the long options of all commands, such as "casckpt gc: --dry-run"."""
    found = {f"casckpt {name}": commands.command_of(name) for name in commands.names()}
    pairs = [(name, param) for name, command in (*found.items(), ("casckpt", cli)) for param in command.params]
    own = [f"{name}: {option}" for name, param in pairs for option in (*param.opts, *param.secondary_opts)]
    return [*own, *(f"{name}: --help" for name in (*found, "casckpt"))]


def is_there(name: str) -> bool:
    """Report whether a front end has a name, such as "dcp: StorageWriter". True if its package is not installed."""
    page, _, wanted = name.partition(": ")
    module = {"casckpt": "casckpt", "errors": "casckpt.errors", "README": ""}.get(page, f"casckpt.frontends.{page}")
    module = page if page.startswith("casckpt.") else module
    try:
        return hasattr(import_module(module), wanted)
    except ImportError:
        return find_spec(module) is not None


@pytest.mark.process  # front ends import packages that start processes
@pytest.mark.filterwarnings("ignore")  # from the imports of front ends
def test_every_public_name_is_listed() -> None:
    before = json.loads((ROOT / "tests" / "data" / "surface.json").read_text())
    now = {**surface(ROOT), "options": options(), "imports": list(filter(is_there, before["imports"]))}
    assert [f"{kind}: {name}" for kind, names in before.items() for name in names if name not in now[kind]] == []
