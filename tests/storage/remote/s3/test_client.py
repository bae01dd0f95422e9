from __future__ import annotations

from typing import Any

import pytest

from casckpt.errors import CasckptError, StorageError
from casckpt.storage import open_storage
from casckpt.storage.remote.s3 import client as remotes3
from tests.support.servers import Server


def test_a_listing_can_span_many_pages(moto_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotes3, "PAGE", 7)
    bucket = moto_server.new_bucket()
    for number in range(21):
        moto_server.client.put_object(Bucket=bucket, Key=f"store/commits/{number}", Body=b"")
    moto_server.client.put_object(Bucket=bucket, Key="store/commits/", Body=b"")  # as browsers do
    storage = open_storage(f"s3://{bucket}/store", moto_server.options)
    assert sorted(entry.key for entry in storage.list("commits/")) == sorted(f"commits/{n}" for n in range(21))


def test_a_listing_that_ends_early_is_an_error(moto_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a listing is truncated, the missing objects seem never to have existed."""
    monkeypatch.setattr(remotes3, "PAGE", 7)
    bucket = moto_server.new_bucket()
    for number in range(9):
        moto_server.client.put_object(Bucket=bucket, Key=f"store/commits/{number}", Body=b"")
    call = remotes3.S3Client.call

    def without_token(self: remotes3.S3Client, operation: str, **arguments: Any) -> Any:
        answer = call(self, operation, **arguments)
        return {name: value for name, value in answer.items() if name != "NextContinuationToken"}

    monkeypatch.setattr(remotes3.S3Client, "call", without_token)
    storage = open_storage(f"s3://{bucket}/store", moto_server.options)
    with pytest.raises(StorageError, match=r"truncated the listing of 'commits/'"):
        list(storage.list("commits/"))


def test_a_missing_bucket_does_not_count_as_empty(moto_server: Server) -> None:
    storage = open_storage("s3://nobody-made-this/store", moto_server.options)
    for look in (lambda: list(storage.list("commits/")), lambda: storage.list_folder("objects")):
        with pytest.raises(CasckptError, match="nobody-made-this"):
            look()


def test_a_delete_in_a_versioned_bucket_frees_the_bytes_of_the_object(moto_server: Server) -> None:
    bucket, client = moto_server.new_bucket(), moto_server.client
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    storage = open_storage(f"s3://{bucket}/store", moto_server.options)
    storage.put("objects/a", b"1")
    storage.put("objects/ab", b"2")
    storage.delete("objects/a")
    left = client.list_object_versions(Bucket=bucket)
    assert [one["Key"] for one in left["Versions"]] == ["store/objects/ab"]
    assert "DeleteMarkers" not in left
    storage.put("objects/a", b"3")
    assert storage.get("objects/a", limit=1) == b"3"
