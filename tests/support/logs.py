"""What casckpt logs, collected in any process, such as a rank, or from pytest's caplog."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def logged(name: str = "casckpt", level: int = logging.WARNING) -> Iterator[list[str]]:
    """Inside the block, collect the messages of a logger, from ``level`` on."""
    found: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(name)
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings and errors of this test."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
