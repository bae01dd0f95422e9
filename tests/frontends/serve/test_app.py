"""Requests from clients, and who may make them."""

from __future__ import annotations

import json

import pytest

from casckpt.frontends.serve.hub import Hub
from casckpt.store.store import Store
from tests.support.serving import Served, serving

pytest.importorskip("uvicorn", reason="needs casckpt[serve]")


WEIGHTS = "/sft/resolve/main/model.safetensors"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 404),
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
def test_requests_for_valid_and_invalid_paths_get_the_correct_status(served: Served, path: str, status: int) -> None:
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
def test_the_server_answers_range_requests(
    served: Served, asked: str, status: int, start: int, stop: int | None
) -> None:
    whole = served.body(WEIGHTS)
    found = served.get(WEIGHTS, Range=asked)
    assert found.status == status
    if status == 416:
        assert found.headers["Content-Range"] == f"bytes */{len(whole)}"
    else:
        assert found.body == whole[start:stop]  # type: ignore[attr-defined]
        assert int(found.headers["Content-Length"]) == len(whole[start:stop])


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "POST", "OPTIONS", "TRACE", "FOO"])
def test_the_server_is_read_only(served: Served, method: str) -> None:
    for path in ("/", WEIGHTS, "/api/models/sft/commit/main", "/api/repos/create"):
        assert served.get(path, method).status == 405


def test_unexpected_errors_are_logged(
    small_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Hub, "refs", lambda *_: 1 / 0)
    with serving(small_store) as served:
        assert served.get("/api/models/sft/refs").status == 500
        assert served.get("/api/models").status == 200
    assert any("GET /api/models/sft/refs failed" in one.message and one.exc_info for one in caplog.records)


def test_request_bodies_are_parsed_within_limits(served: Served) -> None:
    path = "/api/models/sft/paths-info/main"
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    assert json.loads(served.get(path, "POST", b"paths=config.json", **form).body)[0]["path"] == "config.json"  # type: ignore[attr-defined]
    assert served.get(path, "POST", b"\xff\x00&&&=", **form).status == 200
    assert served.get(path, "POST", bytes(2 << 20)).status == 413


def test_responses_have_security_headers(served: Served) -> None:
    found = served.get("/sft/resolve/main/config.json").headers
    assert (found["X-Content-Type-Options"], found["Content-Security-Policy"]) == ("nosniff", "sandbox")


def test_an_empty_store_has_no_models() -> None:
    from casckpt.repository.repository import Repository
    from tests.support.repositories import memory

    with serving(Store(Repository(memory(near=False)))) as served:
        assert served.json("/api/models") == []
        assert served.get(WEIGHTS).headers["X-Error-Code"] == "RepoNotFound"


pytest.importorskip("uvicorn", reason="needs casckpt[serve]")


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
        ("Basic eDpyaWdodA==", 401),  # x:right
        ("Digest right", 401),
        ("Bearer \xff\xfe", 401),
    ],
)
def test_only_requests_with_a_valid_token_are_answered(small_store: Store, header: str | None, status: int) -> None:
    with serving(small_store, guard={"tokens": frozenset({"right"}), "checks_host": False}) as served:
        for path in ("/api/models", "/api/models/sft", WEIGHTS, "/nothing"):
            found = served.get(path, "GET", None, **({} if header is None else {"Authorization": header}))
            assert found.status == (404 if status == 200 and path == "/nothing" else status), path
            assert (found.status == 401) == ("WWW-Authenticate" in found.headers)


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:80", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("evil.example", 403), ("", 403)],
)
def test_dns_rebinding_is_rejected(served: Served, host: str, status: int) -> None:
    assert served.get("/api/models", Host=host).status == status
