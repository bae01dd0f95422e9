from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from casckpt.errors import CasckptError
from casckpt.storage.remote.files import RemoteFiles
from casckpt.storage.remote.patience import Patience
from tests.support.hostile import Hostility, hostile

MIB: Final = 1 << 20


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
