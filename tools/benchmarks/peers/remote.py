"""Libraries for checkpoints in buckets. The server and the bucket are in the environment, see `tasks.buckets.reach`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.peers.base import FROM_BUCKET, TO_BUCKET, Best, Peer, Setting, missing

if TYPE_CHECKING:
    from benchmarks.peers.base import State

BUCKET = "BENCH_BUCKET"
_FILE = "state.safetensors"
_MIB = 1 << 20


def prefix_of(folder: Path) -> str:
    """Return the prefix in the bucket that stands for a folder."""
    return folder.parent.name


class S3Torch(Peer):
    """DCP with the storage of s3torchconnector. ``threads``: as for DCP. ``part``: MiB of each request.

    Loads use the reader that it made for DCP.
    """

    name = "s3torchconnector"
    environment = "buckets"
    durable = True
    best: ClassVar[Best] = {
        TO_BUCKET: tuple({"threads": threads, "part": part} for threads in (1, 8) for part in (8, 32)),
        FROM_BUCKET: tuple({"threads": threads, "part": 8} for threads in (1, 8)),
    }
    matters = ("threads", "part")

    def __init__(self, setting: Setting, threads: int) -> None:
        """See `Peer`."""
        super().__init__(setting, threads)
        self._client: Any = None  # which remains open, as casckpt's does here

    @classmethod
    def absent(cls) -> str | None:
        """See `Peer.absent`."""
        return missing("s3torchconnector.dcp")

    def save(self, state: State, folder: Path) -> None:
        """See `Peer.save`."""
        from s3torchconnector.dcp import S3StorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = S3StorageWriter(_region(), _url(folder), thread_count=self.setting["threads"])
        writer.fs = self._file_system()
        save({"model": state}, storage_writer=writer)

    def load(self, state: State, folder: Path) -> None:
        """See `Peer.load`."""
        from s3torchconnector.dcp import S3StorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = S3StorageReader(_region(), _url(folder))
        reader.fs = self._file_system(reader_constructor=reader._reader_constructor)
        load({"model": state}, storage_reader=reader)

    def _file_system(self, **more: Any) -> Any:
        """Return its file system for another server than Amazon's, for which the writer and reader have no argument."""
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3FileSystem

        config = S3ClientConfig(force_path_style=True, part_size=self.setting["part"] * _MIB)
        if self._client is None:
            self._client = S3Client(_region(), endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)
        return S3FileSystem(_region(), s3_client=self._client, **more)


class RunAi(Peer):
    """Run:ai's model streamer, for loads of a safetensors file. ``concurrency``, ``chunk`` (MiB): of its requests."""

    name = "runai"
    environment = "buckets"
    durable = True
    best: ClassVar[Best] = {
        FROM_BUCKET: tuple(
            {"concurrency": many, "chunk": chunk} for many, chunk in ((8, 8), (16, 8), (32, 8), (16, 32))
        )
    }

    def __init__(self, setting: Setting, threads: int) -> None:
        """See `Peer`."""
        super().__init__(setting, threads)
        self._found: State = {}

    @classmethod
    def absent(cls) -> str | None:
        """See `Peer.absent`."""
        return missing("runai_model_streamer", "runai_model_streamer_s3")

    def save(self, state: State, folder: Path) -> None:
        """Put the file that is loaded. The streamer itself has no saves."""
        import boto3
        from safetensors.torch import save

        key = f"{prefix_of(folder)}/{_FILE}"
        boto3.client("s3").put_object(Bucket=os.environ[BUCKET], Key=key, Body=save(state))

    def load(self, state: State, folder: Path) -> None:
        """See `Peer.load`. The streamer returns new tensors."""
        from runai_model_streamer import SafetensorsStreamer

        os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(self.setting["concurrency"])
        os.environ["RUNAI_STREAMER_CHUNK_BYTESIZE"] = str(self.setting["chunk"] * _MIB)
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(f"{_url(folder)}/{_FILE}")
            self._found = dict(streamer.get_tensors())

    def hand_over(self, state: State) -> None:
        """See `Peer.hand_over`."""
        for name, tensor in state.items():
            tensor.copy_(self._found[name])
        self._found = {}


def _region() -> str:
    return os.environ["AWS_REGION"]


def _url(folder: Path) -> str:
    return f"s3://{os.environ[BUCKET]}/{prefix_of(folder)}"
