"""The digest of files is what b3sum and a second b3sum of its lines print."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from casckpt.base.digest import files_digest, hex_digest


def test_the_digest_of_a_folder_is_that_of_the_sorted_lines_of_b3sum(tmp_path: Path) -> None:
    contents = {"b": b"x" * 3_000_000, "a/c": b""}
    for name, data in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    files = [tmp_path / name for name in contents]
    assert files_digest(files[0], files[:1]) == hex_digest(contents["b"])
    lines = "".join(f"{blake3(contents[name]).hexdigest()}  {name}\n" for name in sorted(contents))
    assert files_digest(tmp_path, files) == hex_digest(lines.encode())
    assert files_digest(tmp_path / "index.json", files) == hex_digest(lines.encode())
