from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from casckpt.errors import CasckptError, NotFound
from casckpt.storage.remote.files import RemoteFiles
from casckpt.storage.remote.patience import Patience
from tests.support import servers
from tests.support.hostile import Hostility, hostile
from tests.support.servers import Server

MIB: Final = 1 << 20


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.running(servers.web(tmp_path_factory.mktemp("web"))) as server:
        yield server


def test_files_on_a_web_server_can_be_read(web: Server, tmp_path: Path) -> None:
    folder, contents = web.folder / "data" / "a" / "b", {"c/d": bytes(3 * MIB), "e": b"0123456789"}
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    files = RemoteFiles(f"{web.endpoint}/a/b")
    assert {*contents} <= {*files.names()}  # and links of the page's script
    assert {name: files.read(name) for name in contents} == contents
    assert files.part("e", 3, 4).read() == b"3456"
    assert files.below("c").size("d") == 3 * MIB
    assert RemoteFiles(f"{files.url}/c/d").fetch(tmp_path).read_bytes() == contents["c/d"]
    with pytest.raises(NotFound):
        files.read("f")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hostility", [Hostility.SILENT, Hostility.DRIP_BODY, Hostility.BODY])
def test_hostile_file_servers_raise_casckpt_errors(
    hostility: Hostility, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casckpt.storage.remote.files.Patience", lambda: Patience(request=0.2, call=0.3))
    with hostile(hostility) as server:
        files = RemoteFiles(f"{server.endpoint}/files")
        for act in (files.names, lambda: files.read("a"), lambda: files.fetch(tmp_path)):
            with pytest.raises(CasckptError):
                act()
        assert server.sent < 300 * MIB
