"""A server requires its token, and refuses requests from web sites."""

from __future__ import annotations

import pytest

pytest.importorskip("uvicorn", reason="needs casckpt[serve]")
from casckpt.store.store import Store
from tests.support.serving import Served, serving

WEIGHTS = "/sft/resolve/main/model.safetensors"


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
def test_only_requests_with_a_valid_token_are_answered(small_store: Store, header: str | None, status: int) -> None:
    with serving(small_store, guard={"tokens": frozenset({"right"}), "checks_host": False}) as served:
        for path in ("/", "/api/models/sft", WEIGHTS, "/nothing"):
            found = served.get(path, "GET", None, **({} if header is None else {"Authorization": header}))
            assert found.status == (404 if status == 200 and path == "/nothing" else status), path
            assert (found.status == 401) == ("WWW-Authenticate" in found.headers)


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:80", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("evil.example", 403), ("", 403)],
)
def test_dns_rebinding_is_rejected(served: Served, host: str, status: int) -> None:
    assert served.get("/", Host=host).status == status
