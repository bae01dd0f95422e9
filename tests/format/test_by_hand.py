"""A blob is verified with the shell commands of docs/format.md, with a substitute if b3sum is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from casckpt.format.digest import cell_digest
from tests.support.checkpoints import blob_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "format.md"
STAND_IN = f"""#!{sys.executable}
import sys
from blake3 import blake3
context = {{"derive_key_context": sys.argv[2]}} if sys.argv[1:2] == ["--derive-key"] else {{}}
print(blake3(sys.stdin.buffer.read(), **context).hexdigest() + "  -")
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The PATH of the commands: with b3sum, or with a substitute from the blake3 package."""
    found = os.environ.get("PATH", os.defpath)
    if shutil.which("b3sum") is None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "b3sum").write_text(STAND_IN)
        (tmp_path / "bin" / "b3sum").chmod(0o755)
        found = f"{tmp_path / 'bin'}{os.pathsep}{found}"
    return found


def commands() -> list[str]:
    """Return the commands of the page, without its comments."""
    found = re.findall(r"^((?:tail|dd) .*?)(?:   +.*)?$", PAGE.read_text(), re.MULTILINE)
    assert len(found) == 3
    return found


def test_common_shell_tools_verify_a_blob(tmp_path: Path, path: str) -> None:
    cells = [bytes([number]) * 4096 for number in (1, 2)]
    name, data, _ = blob_of({cell_digest(cell): ("uint8", cell) for cell in cells})
    (tmp_path / "BLOB").write_bytes(data)
    whole, records, leaf = (
        subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env={"PATH": path}, capture_output=True, check=True, text=True
        ).stdout
        for command in commands()
    )
    assert whole.split()[0] == name
    told = [bytes.fromhex(line.replace(" ", "")) for line in records.splitlines()]
    assert [int.from_bytes(record[:4], "little") for record in told] == [4096, 8192]
    assert told[1][4:].hex() == leaf.split()[0] == cell_digest(b"".join(cells)).hex()
    assert told[0][4:] == cell_digest(data[:4096])
