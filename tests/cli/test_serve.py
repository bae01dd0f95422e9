"""``casckpt serve`` as a process: its start, its end, and the arguments that it rejects."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("uvicorn", reason="needs casckpt[serve]")

import casckpt
from casckpt.cli.main import cli


@pytest.fixture
def store(tmp_path: Path) -> Path:
    casckpt.open(tmp_path / "store").create()
    return tmp_path / "store"


def refused(*arguments: object, status: int = 1) -> str:
    done = CliRunner().invoke(cli, ["serve", *map(str, arguments), "--json"])
    assert done.exit_code == status, done.output
    found: str = json.loads(done.stdout)["error"]["message"]
    return found


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.com", ""])
def test_serving_on_an_address_that_others_can_reach_requires_a_token(tmp_path: Path, host: str) -> None:
    assert "pass --token-file or --no-token" in refused(tmp_path, "--host", host)


@pytest.mark.parametrize(
    ("text", "match"), [("", "does not contain a token"), ("a b", "with a space"), ("t\u00f6", "non-ASCII")]
)
def test_a_token_file_without_tokens_is_rejected(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "tokens").write_text(text)
    assert match in refused(tmp_path / "store", "--token-file", tmp_path / "tokens")
    assert "cannot read" in refused(tmp_path / "store", "--token-file", tmp_path / "none")


def test_serve_fails_if_there_is_no_store_at_the_path(tmp_path: Path) -> None:
    assert "there is no store at" in refused(tmp_path / "nope", status=3)
    assert not (tmp_path / "nope").exists()


def test_invalid_files_and_addresses_are_rejected(store: Path) -> None:
    assert "pass a larger --max-shard-size" in refused(store, "--max-shard-size", "0")
    assert "cannot listen on" in refused(store, "--host", "a..b", "--no-token")


def test_a_port_that_is_in_use_is_reported(store: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "change --port or --host" in refused(store, "--port", taken.getsockname()[1])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_serve_ends_on_a_signal(store: Path, number: signal.Signals, status: int) -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a parent may ignore it
        "import runpy; runpy.run_module('casckpt', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "serve", str(store), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        line = process.stdout.readline()
        assert "export HF_ENDPOINT=http://127.0.0.1:" in line
        with socket.create_connection(("127.0.0.1", int(line.rpartition(":")[2]))) as one:
            one.sendall(b"GET /api/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert one.recv(12) == b"HTTP/1.1 200"  # it answers, so it has its signal handlers
        process.send_signal(number)
        assert process.wait(30) == status
