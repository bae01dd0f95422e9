"""What a hub says to requests that no client makes, to clients that misbehave, and when bytes are damaged."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
import torch
from safetensors.torch import load

pytest.importorskip("uvicorn", reason="needs casckpt[serve]")

import casckpt
from casckpt.errors import StorageError
from casckpt.frontends.serve import leases, sending, server
from casckpt.frontends.serve.answers import one_line
from casckpt.frontends.serve.folders import ServedFolders
from casckpt.frontends.serve.hub import Hub
from casckpt.frontends.serve.names import commit_of, repo_of
from casckpt.frontends.serve.ranges import FileSpan
from casckpt.frontends.serve.sending import RangeReader, RangeResponse, Window
from casckpt.store.store import Store
from tests.support.forging import gone_to
from tests.support.saves import blob_keys, flip, small, small_folder
from tests.support.serving import Served, serving, serving_process

WEIGHTS = "/sft/resolve/main/model.safetensors"


def weights_of(store: Store, step: int = 1) -> str:
    """The path that others lead to."""
    return f"/sft/resolve/{commit_of(store.get(f'sft@{step}').id)}/model.safetensors"


@pytest.fixture(scope="module")
def small_store() -> Store:
    store = small()
    files = {"config.json": b'{"a": 1}', "sub/x.bin": bytes(100), "empty": b""}
    store.save({"model": {"w": torch.arange(200_000)}}, run="sft", step=1, attachments=files)
    store.save({"model": {"w": torch.arange(9)}}, run="exp/a/b", step=1)
    store.save({"model": {"w": torch.ones(9, dtype=torch.complex128)}}, run="odd", step=1)
    return store


@pytest.fixture(scope="module")
def served(small_store: Store) -> Iterator[Served]:
    with serving(small_store) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 200),
        ("/sft/resolve/main/config.json", 200),
        ("/sft/raw/main/config.json", 200),
        ("/sft/resolve/main/sub/x.bin", 200),
        ("/sft/resolve/main/sub%2Fx.bin", 200),
        ("/sft/resolve/main/empty", 200),
        ("/runs/sft/resolve/1/config.json", 200),
        ("/sft/resolve/main/../../../../etc/passwd", 404),
        ("/sft/resolve/main/..%2f..%2fetc%2fpasswd", 404),
        ("/sft/resolve/main/%2e%2e/%2e%2e/etc/passwd", 404),
        ("/sft/resolve/main//etc/passwd", 404),
        ("/sft/resolve/main/sub/../config.json", 404),
        ("/sft/resolve/main/./config.json", 404),
        ("/sft/resolve/main/sub", 404),
        ("/sft/resolve/main/", 404),
        ("/sft/resolve/main", 404),
        ("/sft/resolve", 404),
        ("/sft/resolve/..%2f..%2fmain/config.json", 404),
        ("/sft/resolve/main/config.json%00", 400),
        ("/sft/resolve/main/a%0d%0aX-Evil:%20b", 404),
        ("/sft/resolve/main/%ff", 400),
        ("/sft/resolve/main/config.json%00.txt", 400),
        ("/../sft/resolve/main/config.json", 404),
        ("//sft/resolve/main/config.json", 404),
        ("/%2e%2e/resolve/main/config.json", 404),
        ("/exp/a/b/resolve/main/config.json", 404),
        ("/datasets/sft/resolve/main/config.json", 404),
        ("/api/datasets/sft", 404),
        ("/api/models", 200),
        ("/api/models/", 200),
        ("/api/models/sft", 200),
        ("/api/models/sft/", 404),
        ("/api/models/sft/paths-info/main", 405),
        ("/api/models/a/b/c/d", 404),
        ("/api/models/sft/revision/300", 404),
        ("/api/models/sft/revision/" + "9" * 30, 404),
        ("/api/models/sft/revision/" + "a" * 40, 404),
        ("/api/models/sft/tree/main/nothing", 404),
        ("/api/models/odd", 422),
        ("/api/whoami-v2", 404),
        ("/" + "x" * 5000, 404),
        ("/casckpt.json", 404),
        ("/objects/x", 404),
        ("/docs", 404),
        ("/a%0a/", 404),
        ("//evil.example%0a/", 404),
    ],
)
def test_paths(served: Served, path: str, status: int) -> None:
    assert served.get(path).status == status


@pytest.mark.parametrize(
    ("asked", "status", "start", "stop"),
    [
        ("bytes=0-0", 206, 0, 1),
        ("bytes=5-", 206, 5, None),
        ("bytes=-5", 206, -5, None),
        ("bytes=1000-200000", 206, 1000, 200001),
        ("bytes=0-99999999999999999999999", 206, 0, None),
        ("bytes=5-2", 416, 0, 0),
        ("bytes=999999999-", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
        ("bytes=0-0,2-2", 200, 0, None),
        ("bytes=" + "0-,"* 2000, 200, 0, None),
        ("chickens=1-2", 200, 0, None),
    ],
)  # fmt: skip
def test_ranges(served: Served, asked: str, status: int, start: int, stop: int | None) -> None:
    whole = served.body(WEIGHTS)
    found = served.get(WEIGHTS, Range=asked)
    assert found.status == status
    if status == 416:
        assert found.headers["Content-Range"] == f"bytes */{len(whole)}"
    else:
        assert found.body == whole[start:stop]  # type: ignore[attr-defined]
        assert int(found.headers["Content-Length"]) == len(whole[start:stop])


@pytest.mark.parametrize("revision", ["main", "latest", "1", "64 digits"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_another_name_leads_to_the_commit(small_store: Store, served: Served, revision: str, method: str) -> None:
    id = small_store.get("sft@1").id
    for repo, path in (("sft", "config.json"), ("runs/sft", "sub/x.bin"), ("sft", "sub%2Fx.bin")):
        asked = f"/{repo}/resolve/{id if revision == '64 digits' else revision}/{path}"
        led = served.ask(asked, method)
        assert (led.status, led.headers["X-Repo-Commit"]) == (307, commit_of(id))
        assert urljoin(asked, led.headers["Location"]) == f"/{repo}/resolve/{commit_of(id)}/{path}"


def test_what_is_saved_meanwhile_is_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub: Any = pytest.importorskip("huggingface_hub", reason="needs casckpt[transformers]")
    downloads: Any = pytest.importorskip("huggingface_hub.file_download", reason="needs casckpt[transformers]")
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.arange(9)}}, run="sft", step=1)
    get_of = downloads.http_get

    def after_a_save(*args: Any, **options: Any) -> None:
        store.save({"model": {"w": torch.arange(9) + 1}}, run="sft", step=2)
        get_of(*args, **options)

    monkeypatch.setattr(downloads, "http_get", after_a_save)
    with serving(store) as served:
        options = {"endpoint": served.endpoint, "cache_dir": tmp_path / "hub", "token": False}
        found = Path(hub.hf_hub_download("sft", "model.safetensors", **options))
    assert commit_of(store.get("sft@1").id) in str(found)
    assert torch.equal(load(found.read_bytes())["w"], torch.arange(9))


def test_heads_and_conditions(small_store: Store, served: Served) -> None:
    head = served.get(WEIGHTS, "HEAD")
    whole = served.body(WEIGHTS)
    assert (head.status, int(head.headers["Content-Length"])) == (200, len(whole))
    assert head.headers["X-Repo-Commit"] == commit_of(small_store.get("sft@1").id)
    etag = head.headers["ETag"]
    assert served.get(WEIGHTS, If_None_Match=etag).status == 304
    assert served.get(WEIGHTS, "HEAD", Range="bytes=9-2").status == 200
    assert served.get(WEIGHTS, Range="bytes=0-1", If_Range=etag).status == 206
    assert served.get(WEIGHTS, Range="bytes=0-1", If_Range='"other"').status == 200
    assert served.get(WEIGHTS, If_None_Match="*").status == 304
    assert served.get(WEIGHTS, If_Match=f'"other", {etag}').status == served.get(WEIGHTS, If_Match="*").status == 200
    assert served.get(WEIGHTS, Range="bytes=0-1", If_Match='"other"').status == 412
    missing = served.get("/sft/resolve/main/nothing", "HEAD")
    assert missing.headers["X-Error-Code"] == "EntryNotFound"
    assert missing.headers["X-Repo-Commit"] == head.headers["X-Repo-Commit"]


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "POST", "OPTIONS", "TRACE", "FOO"])
def test_it_is_read_only(served: Served, method: str) -> None:
    for path in ("/", WEIGHTS, "/api/models/sft/commit/main", "/api/repos/create"):
        assert served.get(path, method).status == 405


def test_what_nobody_thought_of_is_told_in_the_log(
    small_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Hub, "refs", lambda *_: 1 / 0)
    with serving(small_store) as served:
        assert served.get("/api/models/sft/refs").status == 500
        assert served.get("/").status == 200
    assert any("GET /api/models/sft/refs failed" in one.message and one.exc_info for one in caplog.records)


def test_bodies(served: Served) -> None:
    path = "/api/models/sft/paths-info/main"
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    assert json.loads(served.get(path, "POST", b"paths=config.json", **form).body)[0]["path"] == "config.json"  # type: ignore[attr-defined]
    assert served.get(path, "POST", b"\xff\x00&&&=", **form).status == 200
    assert served.get(path, "POST", bytes(2 << 20)).status == 413


def test_a_page_that_a_browser_can_trust(served: Served) -> None:
    page = served.get("/")
    text = page.body.decode()  # type: ignore[attr-defined]
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "<code>exp-a-b-" in text
    assert "revision=&quot;1&quot;" in text
    assert served.get("/sft/resolve/main/config.json").headers["X-Content-Type-Options"] == "nosniff"


def test_the_page_leads_to_charts_that_run_nothing(served: Served) -> None:
    pytest.importorskip("matplotlib", reason="needs casckpt[report]")
    assert b"href=report" in served.body("/")
    page = served.get("/report")
    assert page.headers["Content-Security-Policy"] == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert b"exp/a/b@1" in page.body  # type: ignore[attr-defined]


def test_charts_are_drawn_once_for_all_who_ask_and_hold_up_nobody(
    small_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    report: Any = pytest.importorskip("casckpt.frontends.report", reason="needs casckpt[report]")
    begun, may_end, drawn = threading.Event(), threading.Event(), list[str]()

    def page(store: Store) -> str:
        drawn.append(store.url)
        begun.set()
        assert may_end.wait(60)
        return "charts"

    monkeypatch.setattr(report, "page", page)
    with serving(small_store) as served, ThreadPoolExecutor(9) as pool:
        asking = [pool.submit(served.body, "/report") for _ in range(8)]
        assert begun.wait(60)
        assert len(served.json("/api/models")) == 3
        may_end.set()
        assert {one.result() for one in asking} == {b"charts"}
        assert served.body("/report") == b"charts"
    assert len(drawn) == 1


def test_charts_that_cannot_be_drawn_are_tried_again(small_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    report: Any = pytest.importorskip("casckpt.frontends.report", reason="needs casckpt[report]")
    answers: Iterator[object] = iter([StorageError("no network"), "charts"])

    def page(_: Store) -> object:
        answer = next(answers)
        if isinstance(answer, StorageError):
            raise answer
        return answer

    monkeypatch.setattr(report, "page", page)
    with serving(small_store) as served:
        assert [served.get("/report").status for _ in range(2)] == [503, 200]


def test_leases_are_no_tags(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    store.save({"model": {"w": torch.arange(9)}}, run="sft", step=1)
    store.tag("best", "sft@1")
    with serving(store) as served:
        served.body(WEIGHTS)
        assert any(name.startswith("lease-") for name in store.tags())
        assert [one["name"] for one in served.json("/api/models/sft/refs")["tags"]] == ["1", "best"]
        assert b"lease-" not in served.body("/")


def test_a_run_that_is_called_like_the_name_of_another() -> None:
    store, name = small(), repo_of("exp/a/b")
    for run, step in ((name, 1), ("exp/a/b", 2)):
        store.save({"model": {"w": torch.arange(9)}}, run=run, step=step)
    with serving(store) as served:
        (listed,) = served.json("/api/models")
        found = served.json(f"/api/models/{name}")
    assert listed["sha"] == found["sha"] == commit_of(store.get(f"{name}@1").id)


def test_what_a_header_can_hold() -> None:
    assert one_line("a\r\nb\0\x7f\x1b[1m \u2028\u00fc") == "a b [1m ?"


def test_a_page_of_nothing() -> None:
    from casckpt.repository.repository import Repository
    from tests.support.repositories import memory

    with serving(Store(Repository(memory(near=False)))) as served:
        assert b"no checkpoint yet" in served.body("/")
        assert served.json("/api/models") == []
        assert served.get(WEIGHTS).headers["X-Error-Code"] == "RepoNotFound"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Bearer right ", 200),
        ("bearer right", 200),
        ("Bearer rightright", 401),
        ("right", 401),
        ("Basic eDpyaWdodA==", 200),  # x:right
        ("Basic eDp3cm9uZw==", 401),
        ("Basic !!!", 401),
        ("Basic \xff\xfe", 401),
        ("Digest right", 401),
        ("Bearer \xff\xfe", 401),
    ],
)
def test_tokens(small_store: Store, header: str | None, status: int) -> None:
    with serving(small_store, guard={"tokens": frozenset({"right"}), "checks_host": False}) as served:
        for path in ("/", "/api/models/sft", WEIGHTS, "/nothing"):
            found = served.get(path, "GET", None, **({} if header is None else {"Authorization": header}))
            assert found.status == (404 if status == 200 and path == "/nothing" else status), path
            assert (found.status == 401) == ("WWW-Authenticate" in found.headers)


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:80", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("evil.example", 403), ("", 403)],
)
def test_a_web_site_whose_name_means_this_machine_reads_nothing(served: Served, host: str, status: int) -> None:
    assert served.get("/", Host=host).status == status


# damage


def damaged(tmp_path: Path, at: int) -> tuple[Store, bytes, int]:
    """A store of a file of several windows, of which one bit is wrong; that file, and where."""
    store = casckpt.open(tmp_path / "store")
    value = torch.arange(3 << 20, dtype=torch.int64)  # 24 MiB
    store.save({"model": {"w": value}}, run="sft", step=1)
    with serving(store) as served:
        whole = served.body(WEIGHTS)
    (key,) = blob_keys(store)
    flip(store, key, 4096 + at)
    return store, whole, len(whole) - value.nbytes + at


def test_a_flipped_byte_ends_the_response_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, whole, place = damaged(tmp_path, 17 << 20)
    with serving(store) as served, pytest.raises(http.client.IncompleteRead) as error:
        served.get(WEIGHTS)
    found = error.value.partial
    assert found == whole[: len(found)]
    assert len(found) <= place
    assert len(found) > 8 << 20
    assert any("ended short" in one.message and "is damaged" in one.message for one in caplog.records)
    with serving(store) as served:
        wrong = served.get(WEIGHTS, Range=f"bytes={place}-{place}")
        assert (wrong.status, "is damaged" in wrong.headers["X-Error-Message"]) == (500, True)
        assert served.body(WEIGHTS, Range="bytes=0-999999") == whole[:1_000_000]


def test_a_client_keeps_no_wrong_byte_and_goes_on_after_a_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    hub: Any = pytest.importorskip("huggingface_hub", reason="needs casckpt[transformers]")
    errors: Any = pytest.importorskip("huggingface_hub.errors", reason="needs casckpt[transformers]")
    store, whole, _ = damaged(tmp_path, 17 << 20)
    twin = casckpt.open(tmp_path / "twin")
    twin.save({"model": {"w": torch.arange(3 << 20, dtype=torch.int64)}}, run="sft", step=1)
    cache = tmp_path / "hub"
    with serving(store) as served:
        options = {"endpoint": served.endpoint, "cache_dir": cache, "token": False}
        with pytest.raises(errors.HfHubHTTPError, match="is damaged"):
            hub.hf_hub_download("sft", "model.safetensors", **options)
        assert not [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size > 1000]
        store.verify()
        store.repair(twin)
        monkeypatch.setattr(sending, "monotonic", lambda: time.monotonic() + sending.REMEMBERED_SECONDS)
        found = Path(hub.hf_hub_download("sft", "model.safetensors", **options))
    assert found.read_bytes() == whole


def cut_short(served: Served, path: str, process: subprocess.Popen[str]) -> tuple[bytes, str]:
    """What a client has of a file whose server is killed, and its ETag."""
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        found = answer.read(5 << 20)
        process.kill()
        process.wait()
        with suppress(http.client.IncompleteRead, OSError):
            while piece := answer.read(1 << 16):
                found += piece
        return found, answer.headers["ETag"]


def test_a_killed_server_and_a_client_that_resumes(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.arange(4 << 20, dtype=torch.int64)}}, run="sft", step=1)
    with serving(store) as served:
        whole = served.body(WEIGHTS)
    with serving_process(store.url) as (killed, process):
        found, etag = cut_short(killed, weights_of(store), process)
    with serving_process(store.url) as (again, process):
        rest = again.get(WEIGHTS, Range=f"bytes={len(found)}-", If_Range=etag)
        assert rest.status == 206
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (-signal.SIGTERM, 130, 143, 0, 1)
    assert len(found) < len(whole)
    assert found + rest.body == whole  # type: ignore[attr-defined]


def test_what_is_purged_while_it_is_held_in_mind(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    for step in (1, 2):
        store.save({"model": {"w": torch.arange(200_000) + step}}, run="sft", step=step)
    commit = commit_of(store.get("sft@1").id)
    path = f"/sft/resolve/{commit}/model.safetensors"
    with serving(store) as served:
        served.get(path, "HEAD")
        store.forget("sft@1")
        assert len(served.body(path)) > 1_600_000  # by its id it is there until it is purged
        store.gc(min_age=0)
        gone = served.get(path)
        assert (gone.status, gone.headers["X-Error-Code"]) == (404, "RevisionNotFound")
        assert served.get(path).status == 404


def test_a_gc_beside_takes_nothing_under_a_file_that_is_sent(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "store")
    for step in (1, 2):
        store.save({"model": {"w": torch.arange(4 << 20) + step}}, run="sft", step=step)
    with serving(store) as served:
        whole = served.body("/sft/resolve/1/model.safetensors")
        with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)) as connection:
            connection.request("GET", weights_of(store))
            answer = connection.getresponse()
            found = answer.read(1000)
            assert any(name.startswith("lease-") for name in store.tags())
            store.gc(keep_last=1, min_age=0)
            found += answer.read()
        assert found == whole
    assert not any(name.startswith("lease-") for name in store.tags())
    assert store.gc(keep_last=1, min_age=0).deleted_blobs


def test_only_what_is_signed(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="needs casckpt[sign]")
    from tests.support.signing import pair

    alice = pair(tmp_path / "alice")
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.ones(3)}}, run="sft", step=1)
    with serving(casckpt.open(tmp_path / "store", require_signature=alice.public)) as served:
        refused = served.get("/sft/resolve/1/model.safetensors")
        assert (refused.status, "no right signature" in refused.headers["X-Error-Message"]) == (403, True)
        store.sign("sft@1", key=alice.private)
        assert served.get("/sft/resolve/1/model.safetensors").status == 200


def test_a_false_record_is_not_answered_with_what_another_revision_was_asked_for(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "store")
    for step in (1, 2):
        store.save({"model": {"w": torch.full((3,), step)}}, run="sft", step=step)
    gone_to(store, "sft@2", "sft@1")
    with serving(casckpt.open(tmp_path / "store")) as served:
        assert served.get("/sft/resolve/1/model.safetensors").status == 200
        assert served.get("/sft/resolve/2/model.safetensors").status == 422


def test_where_no_lease_can_be_had_it_says_so_once(
    small_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise StorageError("access denied")

    monkeypatch.setattr(Store, "lease", refuse)
    monkeypatch.setattr(leases, "LINGER_SECONDS", 0.0)
    with serving(small_store) as served:
        for _ in range(3):
            assert served.get(WEIGHTS).status == 200
    assert sum("no lease can be taken" in one.message for one in caplog.records if one.levelno >= logging.WARNING) == 1


def test_what_several_clients_are_sent_at_once_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.arange(3 << 20, dtype=torch.int64)}}, run="sft", step=1)
    folders = ServedFolders(store, None, 1 << 30)
    folder, read, read_of = folders.of(store.get("sft@1")), list[int](), RangeReader.read
    file = folder.files["model.safetensors"]

    def counted(reader: RangeReader, window: Window, buffer: memoryview) -> memoryview:
        read.append(window.start)
        return read_of(reader, window, buffer)

    monkeypatch.setattr(RangeReader, "read", counted)

    async def receive() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # never

    async def all_at_once(count: int) -> list[bytes]:
        desk, barrier, found = sending.Desk(store, folders), asyncio.Barrier(count), [bytearray() for _ in range(count)]

        async def send(number: int, message: Any) -> None:
            found[number] += message.get("body", b"")
            await barrier.wait()  # nobody is ahead

        responses = [RangeResponse(desk, folder, file, FileSpan(0, file.nbytes), {}) for _ in range(count)]
        await asyncio.gather(*(one({}, receive, partial(send, number)) for number, one in enumerate(responses)))
        assert not desk.windows
        assert len(desk.buffers._free) == 2
        desk.close()
        return [bytes(one) for one in found]

    found = asyncio.run(all_at_once(5))
    assert len(found[0]) == file.nbytes
    assert set(found) == {found[0]}
    assert read == sorted(set(read))


# clients that misbehave


def test_a_client_that_does_not_read_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.zeros(16 << 20)}}, run="sft", step=1)
    with serving(store, guard={"slow_seconds": 0.5}) as served:
        with ExitStack() as held:
            for _ in range(sending.WINDOWS + 4):
                raw = held.enter_context(socket.create_connection(("127.0.0.1", served.port)))
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                raw.sendall(b"GET " + weights_of(store).encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert len(served.body(WEIGHTS)) > 60 << 20  # they hold up nobody for long
            while len([one for one in caplog.records if "does not read" in one.message]) < sending.WINDOWS + 4:
                time.sleep(0.05)
        assert served.get("/").status == 200


@pytest.mark.parametrize("at", ["http.response.start", "the end"])
def test_a_client_that_takes_neither_the_first_nor_the_last_word(tmp_path: Path, at: str) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.arange(1000)}}, run="sft", step=1)
    folders = ServedFolders(store, None, 1 << 30)
    folder = folders.of(store.get("sft@1"))
    file = folder.files["model.safetensors"]

    async def never(*_: object) -> Any:
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        is_end = message["type"] == "http.response.body" and not message["more_body"]
        if at == ("the end" if is_end else message["type"]):
            await never()

    async def run() -> None:
        desk = sending.Desk(store, folders, slow_seconds=0.1)
        await asyncio.wait_for(RangeResponse(desk, folder, file, FileSpan(0, file.nbytes), {})({}, never, send), 20)
        assert not desk.windows
        assert len(desk.buffers._free) == 1
        desk.close()

    asyncio.run(run())


@pytest.mark.parametrize(("count", "more"), [(40, b""), (1, b"Connection: close\r\n")])
def test_a_client_that_reads_no_answer_at_all(
    small_store: Store, monkeypatch: pytest.MonkeyPatch, count: int, more: bytes
) -> None:
    ended, lost_of = threading.Event(), server.Connection.connection_lost

    def lost(connection: server.Connection, error: Exception | None) -> None:
        lost_of(connection, error)
        ended.set()

    monkeypatch.setattr(server, "STUCK_SECONDS", 0.3)
    monkeypatch.setattr(server.Connection, "connection_lost", lost)
    monkeypatch.setattr(Hub, "refs", lambda *_: {"x": "y" * ((40 << 20) // count)})
    with serving(small_store) as served, socket.create_connection(("127.0.0.1", served.port)) as raw:
        raw.sendall((b"GET /api/models/sft/refs HTTP/1.1\r\nHost: localhost\r\n" + more + b"\r\n") * count)
        assert ended.wait(30)


def test_a_client_that_leaves(small_store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.zeros(16 << 20)}}, run="sft", step=1)
    with serving(store) as served:
        raw = socket.create_connection(("127.0.0.1", served.port))
        raw.sendall(b"GET " + weights_of(store).encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        raw.recv(1000)
        raw.close()
        while not any("the client left" in one.message for one in caplog.records):
            time.sleep(0.05)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", b"\0\0\0"])
def test_a_request_that_does_not_come(small_store: Store, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.3)
    with serving(small_store) as served, socket.create_connection(("127.0.0.1", served.port)) as raw:
        raw.sendall(sent)
        raw.settimeout(20)
        with suppress(ConnectionResetError):
            assert b"200" not in raw.recv(100)


def test_10_000_idle_connections(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.arange(200_000)}}, run="sft", step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = min(10_000, hard - 1000)
    with serving_process(store.url) as (served, _), ExitStack() as held:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, many + 900), hard))
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for number in range(many):
            held.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            if number % 1000 == 999:
                assert len(served.body(WEIGHTS)) > 1_600_000
        assert served.get("/").status == 200
