"""Test servers start even if another process takes their port first."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.servers import Server


@pytest.mark.parametrize(
    "kind",
    [  # all are started by the same code, and rclone starts in no time
        servers.rclone,
        pytest.param(servers.moto, marks=pytest.mark.soak),
        pytest.param(servers.seaweed, marks=pytest.mark.soak),
    ],
)
def test_a_server_whose_port_is_in_use_starts_on_a_different_port(
    kind: Callable[[Path], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, drawn = servers.free_ports, 0

    def with_one_taken(count: int) -> list[int]:
        nonlocal drawn
        drawn += 1
        ports = draw(count)
        return [taken.getsockname()[1], *ports[1:]] if drawn == 1 else ports

    monkeypatch.setattr(servers, "free_ports", with_one_taken)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with servers.running(kind(tmp_path)) as server:
            assert drawn == 2
            assert server.look(server.new_bucket(), "nothing") is None


def test_test_servers_use_ports_below_the_ephemeral_range() -> None:
    ports = servers.free_ports(50)
    assert len(set(ports)) == 50
    assert max(ports) < 32_768
