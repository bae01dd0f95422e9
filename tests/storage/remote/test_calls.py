"""Calls to fsspec file systems."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from fsspec.asyn import get_loop

from casckpt.errors import Refused
from casckpt.storage.remote.calls import Calls, _is_below, read_whole, with_timeouts
from casckpt.storage.remote.patience import Patience


class Asynchronous:
    """An asynchronous file system. Its methods without an underscore must not be called."""

    async_impl = True

    def __init__(self) -> None:
        self.loop = get_loop()

    async def _cat_file(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        assert threading.current_thread() is not threading.main_thread()
        return path.encode()[start:end]


def test_asynchronous_clients_are_called_in_their_event_loop() -> None:
    calls = Calls(Asynchronous(), Patience(60, 180))
    assert calls.read("abcdef", 6) == b"abcdef"
    assert calls.part("abcdef", 2, 4) == b"cd"


class Plain:
    """A file system without an event loop."""

    async_impl = False

    def __init__(self, found: Any) -> None:
        self.found = found

    def find(self, folder: str, detail: bool) -> Any:
        assert detail
        return self.found


def test_an_object_in_place_of_a_folder_is_rejected_and_a_missing_folder_counts_as_empty() -> None:
    assert Calls(Plain({"a": {"size": 3}}), Patience()).find("x") == {"a": {"size": 3}}
    nothing: list[Any] = [{}, [], None]
    for found in nothing:
        assert Calls(Plain(found), Patience()).find("x") == {}
    with pytest.raises(Refused, match="x is a file where a folder of the store belongs"):
        Calls(Plain(["x"]), Patience()).find("x")


@pytest.mark.parametrize(
    ("link", "below"),
    [
        ("http://h/s/a", True), ("http://h/s/a/", True), ("http://h/s/", False), ("http://h/s/..", False),
        ("http://h/s/./", False), ("http://h/s/a/b", False), ("http://h/s/a?C=N", False), ("http://h/s/#top", False),
        ("http://h/", False), ("http://g/s/abc", False), ("http://h/t/a", False),
    ],
)  # fmt: skip
def test_only_links_to_direct_children_of_a_web_page_count_as_its_files(link: str, below: bool) -> None:
    assert _is_below("http://h/s/", link) is below


def test_the_timeouts_of_clients_are_longer_than_those_of_casckpt() -> None:
    patience = Patience(request=60, call=180)
    web = with_timeouts("https", {"client_kwargs": {"trust_env": True}}, patience)["client_kwargs"]
    assert (web["timeout"].total, web["timeout"].sock_connect, web["timeout"].sock_read) == (None, 10, 65)
    assert web["trust_env"] is True
    cloud = with_timeouts("gs", {"token": "anon"}, patience)
    assert (cloud["requests_timeout"].sock_connect, cloud["requests_timeout"].sock_read) == (10, 60)
    assert cloud["token"] == "anon"
    assert with_timeouts("az", {"a": 1}, patience) == {"a": 1}


class Arriving:
    """A body that returns two bytes at a time and counts them."""

    def __init__(self, size: int) -> None:
        self.left = size

    async def read(self, size: int, /) -> bytes:
        given = min(2, self.left)
        self.left -= given
        return bytes(given)


def test_a_response_is_read_only_up_to_its_expected_size() -> None:
    assert asyncio.run(read_whole(Arriving(5), 5, "it")) == bytes(5)
    longer = Arriving(100)
    with pytest.raises(Refused, match="it is longer than 5 bytes"):
        asyncio.run(read_whole(longer, 5, "it"))
    assert longer.left == 94
