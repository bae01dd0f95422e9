"""tools/setup skips broken Pythons and continues with one that works."""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from tests.test_packaging import ROOT


def setup() -> Any:
    """Return tools/setup as a module."""
    loader = SourceFileLoader("setup_tool", str(ROOT / "tools" / "setup"))
    spec = spec_from_loader("setup_tool", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def program(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.process
def test_setup_skips_shims_of_pythons_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shims, usual = tmp_path / "shims", tmp_path / "bin"
    shim = "#!/bin/sh\nexit 127\n"
    program(shims / "python3.13", shim)
    program(shims / "python3.12", "#!/nowhere/python\n")
    program(shims / "python3.11", shim)
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, (shims, usual))))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    tool = setup()
    assert tool.working_python() is None
    found = program(usual / "python3.11", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    assert tool.working_python() == found
