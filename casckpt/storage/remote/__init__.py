"""Network storage: S3 buckets, and everything else that fsspec supports.

`urls` turns a URL into storage, and `store` implements the contract in `casckpt.storage.base` on top of a `client`.
`s3` contains the client for S3, and `fsspec_client` the one for everything else. `patience` limits how long a call may
wait for a server that makes no progress.
"""
