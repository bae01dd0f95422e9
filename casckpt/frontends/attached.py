"""Attachments as files of an export, beside those that it makes itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from casckpt.errors import InvalidInput

_LONGEST = 255  # bytes of a file's name


def check_file_names(names: Iterable[str], is_taken: Callable[[str], bool]) -> None:
    """Raise InvalidInput, naming each attachment that cannot be a file, and what to do.

    ``is_taken``: is this the name of a file that the export makes? It is asked in lower case, as some disks are.
    """
    wrong = [f"{name!r} {why}" for name in names if (why := _why_not(name, is_taken))]
    if wrong:
        raise InvalidInput(
            f"the attachment {', '.join(wrong)}; leave attachments out with attachments=False (--no-attachments), and "
            "get them with store.read_attachment"
        )


def _why_not(name: str, is_taken: Callable[[str], bool]) -> str:
    parts = name.split("/")
    if is_taken(parts[0].lower()):
        return "has the name of a file with tensors"
    if any(len(part.encode(errors="surrogateescape")) > _LONGEST for part in parts):
        return f"has a name that no file can have: more than {_LONGEST} bytes"
    return ""
