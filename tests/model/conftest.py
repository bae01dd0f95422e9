"""Models are walked without looking for garbage: millions of states live to the end, and none refers to itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()
