"""Storages behind a network: S3 buckets, and all other storages that fsspec knows.

`urls` turns a URL into a storage, and `store` implements the contract of `casckpt.storage.base` on a `client`: `s3`
holds the client for S3, `fsspec_client` the one for everything else. `patience` limits how long a call may wait for a
server that makes no progress.
"""
