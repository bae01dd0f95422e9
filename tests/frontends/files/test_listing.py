"""A folder is listed with all that can come back, and what cannot is refused by name."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from casckpt.errors import Conflict, InvalidInput, NotFound, StorageError
from casckpt.format.sections.recipe import ItemKind
from casckpt.frontends.files.listing import list_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a file, and a file beside it."""
    (tmp_path / "beside").write_bytes(b"secret")
    (tmp_path / "inner" / "root").mkdir(parents=True)
    (tmp_path / "inner" / "root" / "file").write_bytes(b"content")
    return tmp_path / "inner" / "root"


def listed(root: Path, **options: bool) -> dict[str, tuple[str, str, int]]:
    """Return the kind, target, and size of each item."""
    found = list_folder(root, **options).items
    return {one.item.path: (one.item.kind.name, one.item.target, one.size) for one in found}


@pytest.mark.parametrize("target", ["file", "./file", ".", "file/", "absent", "d", "d/", "d//.", "other", "é\n"])
def test_a_link_that_stays_inside_is_kept(root: Path, target: str) -> None:
    (root / "d").mkdir()
    (root / "other").symlink_to("d")
    os.symlink(target, root / "link")
    os.symlink(f"../{target}", root / "d" / "link")
    assert listed(root)["link"] == ("LINK", target, 0)
    assert listed(root)["d/link"] == ("LINK", f"../{target}", 0)


@pytest.mark.parametrize(
    "target",
    ["../..", "../../beside", "/", "/absent", "d/../file", "d/..", "../../root/file", b"\xff", "d/../../../beside"],
)
def test_a_link_that_may_lead_out_is_refused_by_name(root: Path, target: str | bytes) -> None:
    (root / "d").mkdir()
    os.symlink(os.fsencode(target), os.fsencode(root / "d" / "link"))
    with pytest.raises(InvalidInput, match=r"'d/link' is a link to .*which leads out of the folder"):
        list_folder(root)


def test_links_that_lead_out_are_followed_on_request(root: Path) -> None:
    outside = root.parent.parent / "hub" / "snapshots" / "abc"
    (outside / "deep").mkdir(parents=True)
    (outside.parents[1] / "blobs").mkdir()
    (outside.parents[1] / "blobs" / "w").write_bytes(b"weights")
    (outside / "deep" / "inside").symlink_to("../w")
    (outside / "w").symlink_to("../../blobs/w")
    (root / "a" / "b" / "c").mkdir(parents=True)
    (root / "a" / "b" / "c" / "model").symlink_to(outside)  # from there, two folders up are inside of the root
    (root / "one").symlink_to("../../beside")
    found = listed(root, follow_links=True)
    assert found["one"] == ("FILE", "", 6)
    assert found["a/b/c/model"] == ("FOLDER", "", 0)
    assert found["a/b/c/model/w"] == ("FILE", "", 7)
    assert found["a/b/c/model/deep/inside"] == ("LINK", "../w", 0)


@pytest.mark.parametrize("target", ["..", "../..", "{root}", "../root", "/proc/self/cwd/{root}"])
def test_a_link_to_a_folder_that_contains_it_is_refused_and_not_walked_forever(root: Path, target: str) -> None:
    (root / "loop").symlink_to(target.format(root=root))
    with pytest.raises(InvalidInput, match=r"'(loop/)+.*' is a link to a folder that contains it|'loop' is a link to"):
        list_folder(root, follow_links=True)


def test_a_link_to_nothing_outside_is_refused_even_if_links_are_followed(root: Path) -> None:
    (root / "link").symlink_to("/absent/file")
    with pytest.raises(InvalidInput, match=r"'link' is a link to '/absent/file'.*: remove the link"):
        list_folder(root, follow_links=True)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.fspath(path))


@pytest.mark.parametrize("make", [os.mkfifo, _socket], ids=["fifo", "socket"])
@pytest.mark.parametrize("is_linked", [False, True])
def test_a_special_file_is_refused_by_name(root: Path, make: Callable[[Path], None], is_linked: bool) -> None:
    place = (root.parent if is_linked else root) / "odd"
    make(place)
    if is_linked:
        (root / "odd").symlink_to(place)
    with pytest.raises(InvalidInput, match="'odd' is neither a file, a folder, nor a link"):
        list_folder(root, follow_links=True)
    with pytest.raises(InvalidInput, match="odd' is neither"):
        list_folder(place)


def test_a_name_that_is_not_utf_8_is_refused_by_name(root: Path) -> None:
    (root / "d").mkdir()
    Path(os.fsdecode(os.fsencode(root / "d") + b"/\xff\xfe")).touch()
    with pytest.raises(InvalidInput, match=r"d/\\xff\\xfe' is not a name in UTF-8: rename it"):
        list_folder(root)


def test_the_root_may_be_a_file_or_a_link(root: Path) -> None:
    assert listed(root / "file") == {"": ("FILE", "", 7)}
    for name, target in (("folder", root), ("lone", root / "file")):
        (root.parent / name).symlink_to(target)
        assert listed(root.parent / name) == listed(target)


@pytest.mark.parametrize(
    ("path", "error", "says"),
    [
        ("absent", NotFound, "no file or folder .*absent"),
        ("dangling", NotFound, "no file or folder .*dangling"),
        ("loop", NotFound, "no file or folder .*loop"),
        ("file/below", NotFound, "no file or folder .*file/below"),
        ("x" * 300, StorageError, "cannot read .*xxx"),
    ],
)
def test_a_root_that_is_not_there_is_named(root: Path, path: str, error: type[Exception], says: str) -> None:
    (root / "dangling").symlink_to("nothing")
    (root / "loop").symlink_to("loop")
    with pytest.raises(error, match=says):
        list_folder(root / path)


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(InvalidInput, match="'' does not name a file"):
        list_folder("")


def _rewrite(root: Path) -> None:
    """Write other bytes of the same size, and put the time of change back."""
    times = (root / "file").stat()
    (root / "file").write_bytes(b"CONTENT")
    os.utime(root / "file", ns=(times.st_atime_ns, times.st_mtime_ns))


def _replace(root: Path) -> None:
    (root / "new").write_bytes(b"content")
    os.replace(root / "new", root / "file")


def _link(path: Path, target: str) -> None:
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    path.symlink_to(target)


CHANGES: dict[str, Callable[[Path], object]] = {
    "other bytes": _rewrite,
    "another file": _replace,
    "a new file": lambda root: (root / "d" / "new").touch(),
    "no file": lambda root: (root / "file").unlink(),
    "a mode": lambda root: (root / "file").chmod(0o600),
    "a longer file": lambda root: (root / "file").write_bytes(b"content!"),
    "a shorter file": lambda root: os.truncate(root / "file", 3),
    "a link": lambda root: _link(root / "link", "d"),
    "a folder that is a link": lambda root: _link(root / "d", "."),
    "a renamed file": lambda root: (root / "file").rename(root / "FILE"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_is_noticed(root: Path, what: str) -> None:
    (root / "d").mkdir()
    (root / "link").symlink_to("file")
    before = list_folder(root)
    before.check_unchanged()
    CHANGES[what](root)
    with pytest.raises(Conflict, match=r"changed while it was read, and nothing was stored"):
        before.check_unchanged()


@pytest.mark.parametrize(
    "what", ["other bytes", "another file", "no file", "a longer file", "a shorter file", "a renamed file"]
)
def test_no_byte_is_read_from_a_file_that_has_changed(root: Path, what: str) -> None:
    (root / "d").mkdir()
    [file] = [one for one in list_folder(root).items if one.item.kind == ItemKind.FILE]
    data = bytearray(3)
    file.read_into(4, memoryview(data))
    assert data == b"ent"
    CHANGES[what](root)
    with pytest.raises(Conflict, match="file changed while it was read"):
        file.read_into(4, memoryview(data))


def test_a_file_that_a_link_replaces_is_not_read(root: Path) -> None:
    [file] = [one for one in list_folder(root).items if one.item.kind == ItemKind.FILE]
    (root / "file").rename(root.parent / "moved")  # with its inode and times
    (root / "file").symlink_to("../moved")
    with pytest.raises((Conflict, StorageError)):
        file.read_into(0, memoryview(bytearray(1)))


def test_special_bits_are_dropped(root: Path) -> None:
    root.chmod(0o2775)
    (root / "file").chmod(0o6711)
    assert [oct(one.item.mode) for one in list_folder(root).items] == ["0o775", "0o711"]
