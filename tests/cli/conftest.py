"""Fixtures that run the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import casckpt
from casckpt.cli.main import cli
from tests.support.servers import Server

Run = Callable[..., Result]
AsJson = Callable[..., Any]


@pytest.fixture
def run() -> Run:
    """Run a command. All arguments become text. ``status``: the expected exit status."""

    def call(*args: object, status: int = 0) -> Result:
        result = CliRunner().invoke(cli, [str(arg) for arg in args])
        assert result.exit_code == status, result.output
        assert "Traceback" not in result.output
        return result

    return call


@pytest.fixture
def as_json(run: Run) -> AsJson:
    """Return a function that runs a command with --json and returns the result."""

    def call(*args: object, status: int = 0) -> Any:
        return json.loads(run(*args, "--json", status=status).stdout)

    return call


@pytest.fixture
def saved(store: casckpt.Store, store_path: Path) -> Path:
    """A store with a@1, a@2, a@3 and b@1, which share most of their bytes."""
    shared = torch.arange(5000.0)
    for step in (1, 2, 3):
        state = {"shared": shared, "own": torch.full((1000,), float(step)), "lr": 0.1}
        store.save(state, run="a", step=step, metadata={"loss": 1 / step})
    store.save({"shared": shared, "other": torch.zeros(2, 3, dtype=torch.bfloat16)}, run="b", step=1)
    return store_path


@pytest.fixture(params=[pytest.param("moto_server", marks=pytest.mark.soak), "seaweed_server"])
def safe(request: pytest.FixtureRequest) -> Server:
    """A server that gives all guarantees that casckpt needs."""
    server: Server = request.getfixturevalue(request.param)
    return server


def named(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{row['run']}@{row['step']}" for row in rows]
