"""Safetensors' tests on files that casckpt exports.

Each file that the library writes goes to a folder, which casckpt imports, and exports again to where the test expects
the file. The bytes must be the same.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = ["tests"]
FOLDER = "bindings/python"
SOURCE = None
SAVES = ["safetensors.serialize_file"]
REASONS: dict[str, str] = {}


def install(store: Callable[[], str]) -> None:
    """Import and export what the library writes. Its modules for frameworks are imported later."""
    import safetensors

    import casckpt
    from casckpt.frontends.interchange.safetensors.importing import import_safetensors

    original = safetensors.serialize_file
    steps = itertools.count()

    def serialize_file(tensor_dict: Any, filename: str | os.PathLike[str], metadata: Any = None) -> None:
        with tempfile.TemporaryDirectory() as name:
            written, exported = Path(name) / "in" / "model.safetensors", Path(name) / "out"
            written.parent.mkdir()
            original(tensor_dict, written, metadata=metadata)
            saved = import_safetensors(casckpt.open(store()), written.parent, run="files", step=next(steps))
            (file,) = casckpt.export(store(), saved, exported, format="safetensors").files
            assert Path(file).read_bytes() == written.read_bytes()
            shutil.move(file, filename)

    safetensors.serialize_file = serialize_file
