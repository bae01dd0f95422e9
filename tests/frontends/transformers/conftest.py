"""Transformers without a network and without its log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _quiet_and_offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    hub: Any = pytest.importorskip("transformers", reason="needs casckpt[transformers]")
    for name, value in {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}.items():
        monkeypatch.setenv(name, value)
    hub.logging.set_verbosity_error()
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)
