"""Marks name the resources that tests use, and plain tests do not start anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import kinds


def child() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


@pytest.fixture
def started() -> None:
    child()


def test_a_test_that_uses_no_resources_is_plain(request: pytest.FixtureRequest, tmp_path: object) -> None:
    assert kinds.kinds_of(request.node) == set()


@pytest.mark.usefixtures("started")
def test_a_fixture_that_starts_a_process_sets_the_mark(request: pytest.FixtureRequest) -> None:
    assert kinds.kinds_of(request.node) == {"process"}


@pytest.mark.parametrize("kind", ["moto_server", "seaweed_server"])
def test_a_server_requested_by_name_sets_the_mark(request: pytest.FixtureRequest, kind: str) -> None:
    assert kinds.kinds_of(request.node) == {"server"}


def test_an_unmarked_process_is_an_error(request: pytest.FixtureRequest) -> None:
    with kinds.on_its_own(request.node), pytest.raises(AssertionError, match="counts as plain and starts a process"):
        child()
    child()
