from __future__ import annotations

import pytest

from casckpt.base.sizes import parse_size
from casckpt.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512B", 512),
        ("1KiB", 1024),
        ("1MiB", 1 << 20),
        ("1.5MiB", 3 << 19),
        (" 32 mib ", 32 << 20),
        ("5GB", 5 * 10**9),
        ("2G", 2 << 30),
        ("0.1GB", 10**8),
    ],
)
def test_a_size_is_parsed(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e3", "5 parsecs", "1..5MB", "٣MB", "1" * 16])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="not a size"):
        parse_size(text)
