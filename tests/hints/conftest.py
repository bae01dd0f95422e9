"""Fixtures for the hint tests: messages, the command line, and a small store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import casckpt
from tests.cli.conftest import Run, run
from tests.support.hints import Messages

__all__ = ["Run", "run"]


class Changed(NamedTuple):
    """A blob with a changed byte, and its original."""

    path: Path
    data: bytes

    def put_back(self) -> None:
        self.path.write_bytes(self.data)


def changed_blob(store: Path, at: int = 4100) -> Changed:
    """Change one byte of the newest blob, by default after its header."""
    paths = list((store / "objects").rglob("*.safetensors"))
    path = max(paths, key=lambda path: path.stat().st_mtime_ns)
    data = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    return Changed(path, data)


@pytest.fixture
def messages(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Messages]:
    """Collect the messages of a test, which must follow all of them before it ends."""
    heard = Messages(request.function.follows, caplog)
    yield heard
    if getattr(request.node, "passed", False):
        heard.check()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield
    item.passed = True  # type: ignore[attr-defined] # for the fixture above


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6.0), "b": torch.ones(2)}


@pytest.fixture
def saved(store: casckpt.Store, store_path: Path, weights: dict[str, torch.Tensor]) -> casckpt.Store:
    """A store with ``weights`` as a@1."""
    store.save(weights, run="a", step=1)
    return store


def words(text: str) -> list[str]:
    """Return the words of a command's output."""
    return text.split()
