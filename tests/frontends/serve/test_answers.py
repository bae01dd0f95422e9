"""Response headers, and responses without a body."""

from __future__ import annotations

import pytest

pytest.importorskip("uvicorn", reason="needs casckpt[serve]")
from casckpt.frontends.serve.answers import one_line
from casckpt.frontends.serve.hub import commit_of
from casckpt.store.store import Store
from tests.support.serving import Served

WEIGHTS = "/sft/resolve/main/model.safetensors"


def test_head_and_conditional_requests_are_answered(small_store: Store, served: Served) -> None:
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


def test_response_headers_contain_only_safe_characters() -> None:
    assert one_line("a\r\nb\0\x7f\x1b[1m \u2028\u00fc") == "a b [1m ?"
