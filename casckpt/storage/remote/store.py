"""Network storage: S3 and compatible servers, and everything else that fsspec supports.

A `casckpt.storage.remote.client.Client` makes single requests: `casckpt.storage.remote.s3.client` to S3, and
`casckpt.storage.remote.fsspec_client` to all others. `RemoteStore` turns a client into an `ObjectStore`: it checks
keys, retries, converts errors, and gives each process its own client.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from typing_extensions import override

from casckpt.errors import CasckptError, StorageError
from casckpt.storage.base import (
    AlreadyExists,
    Finding,
    FolderListing,
    Known,
    ListedObject,
    ObjectStore,
    Reader,
    ShortObject,
    Traits,
    split_folder,
    split_key,
)
from casckpt.storage.buffers import plain_bytes
from casckpt.storage.forking import PerProcess
from casckpt.storage.remote.client import Client, Page, Ranged
from casckpt.storage.remote.patience import Backoff, Call

log = logging.getLogger(__name__)
T = TypeVar("T")

GAP = 1 << 20  # bytes: about as many as a connection transfers in the time that a request takes
REQUESTS = 32
BRIEF = 10.0  # seconds
UPLOADS = 4  # the minimum: a save has one upload for each of its threads


class Connect(Protocol):
    """A function that makes a client. `casckpt.storage.remote.urls.RemoteLocation` is a picklable one."""

    @property
    def url(self) -> str:
        """The URL, without credentials."""

    def __call__(self) -> Client:
        """Make a client for this process."""


class RemoteStore(ObjectStore):
    """`casckpt.storage.base.ObjectStore` over a network.

    ``single_writer``: the caller promises to be the only writer. A put then first checks whether the key exists, which
    allows storage that does not refuse to create an existing key.
    """

    def __init__(self, connect: Connect, *, single_writer: bool = False, backoff: Backoff = Backoff()) -> None:  # noqa: B008 - frozen
        self._connect = connect
        self._single_writer = single_writer
        self._backoff = backoff
        self._clients = PerProcess(connect)
        self._at_most = math.inf  # seconds for a call, if that is less than the client's limit
        self._given_up = -math.inf  # when the last call timed out, unless a call has received a response since

    def __reduce__(self) -> tuple[Callable[..., RemoteStore], tuple[Any, ...]]:
        again = partial(RemoteStore, single_writer=self._single_writer, backoff=self._backoff)
        return again, (self._connect,)

    def __repr__(self) -> str:
        return f"RemoteStore({self.url!r})"

    def brief(self) -> RemoteStore:
        """Return the same storage with the same connections. Its calls end after at most `BRIEF` seconds."""
        other = RemoteStore(self._connect, single_writer=self._single_writer, backoff=self._backoff)
        other._clients, other._at_most = self._clients, BRIEF
        return other

    @property
    def url(self) -> str:
        """The URL as given. It does not contain credentials."""
        return self._connect.url

    @property
    def traits(self) -> Traits:
        """The traits of this storage. Few clients report ``exclusive`` creates; a probe detects the others."""
        client = self._clients.get()
        return Traits(
            remote=True, read_gap=GAP, parallel=REQUESTS, exclusive=client.exclusive, uploads=UPLOADS
        )  # fmt: skip

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        """See `casckpt.storage.base.ObjectStore`. Every object is one request, regardless of its size.

        An earlier attempt of the same put may have created the object although its response was lost. To detect that,
        each object carries the id of its put.
        """
        split_key(key)
        view, put_id = plain_bytes(data), uuid.uuid4().hex

        def create(client: Client) -> None:
            if not self._single_writer:
                client.create(key, view, put_id)
            elif client.size(key) is not None:
                raise AlreadyExists(key)
            else:
                client.put(key, view, put_id)

        try:
            self.again("write", key, create)
        except AlreadyExists:
            if self._put_id(key) != put_id:
                raise

    def _put_id(self, key: str) -> str | None:
        try:
            return self.again("look at", key, lambda client: client.put_id(key))
        except CasckptError:  # AlreadyExists is then raised, and the caller reads the object back
            return None

    @override
    def replace(self, key: str, data: memoryview | bytes) -> None:
        split_key(key)
        view = plain_bytes(data)
        self.again("write", key, lambda client: client.put(key, view, uuid.uuid4().hex))

    def settle(self, folder: str) -> None:
        """Do nothing, because an acknowledged object already has its name."""
        split_folder(folder)

    @override
    def get(self, key: str, *, limit: int) -> bytes:
        split_key(key)
        return self.again("read", key, lambda client: client.get(key, limit))

    def open(self, key: str, *, shared: bool = False) -> RemoteReader:
        """See `casckpt.storage.base.ObjectStore`. Does not send a request; the first read reports a missing object."""
        split_key(key)
        return RemoteReader(self, key, self._clients.get().open(key))

    @override
    def size(self, key: str) -> int | None:
        split_key(key)
        return self.again("look at", key, lambda client: client.size(key))

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        """See `casckpt.storage.base.ObjectStore`. Pages are requested on demand.

        Everything that has a key is an object.
        """
        for page in self._pages(prefix, deep=True):
            yield from page.objects

    @override
    def list_folder(self, folder: str) -> FolderListing:
        split_folder(folder)
        pages = [*self._pages(f"{folder}/", deep=False)]
        return [entry for page in pages for entry in page.objects], [key for page in pages for key in page.folders]

    def _pages(self, prefix: str, *, deep: bool) -> Iterator[Page]:
        after: str | None = None

        def ask(client: Client) -> Page:
            return client.page(prefix, after, deep=deep)

        while True:
            page = self.again("list", prefix, ask)
            yield page
            after = page.after
            if after is None:
                return

    @override
    def delete(self, key: str) -> None:
        split_key(key)
        self.again("delete", key, lambda client: client.delete(key))

    def sweep(self, folder: str, *, below: bool = False) -> int:
        """Do nothing, because a failed put does not leave an object, and casckpt does not use multipart uploads."""
        split_folder(folder)
        return 0

    def examine(self) -> Iterator[Finding]:
        """See `casckpt.storage.base.Examinable`. Does not retry."""
        client = self._clients.get()
        try:
            yield from client.examine()
        except client.failures as error:
            raise StorageError(f"cannot read the settings of {self.url}: {client.explain(error).why}") from error

    def again(self, verb: str, key: str, call: Callable[[Client], T]) -> T:
        """Call ``call``, retrying as long as that may help. Raises the error of the last failure."""
        client, pauses, attempts, renewed = self._clients.get(), self._backoff.pauses(), 0, False
        patience = replace(client.patience, call=min(client.patience.call, self._at_most))
        whole = Call(patience, hopeless=time.monotonic() - self._given_up < patience.call)
        while True:
            attempts, began = attempts + 1, time.monotonic()
            try:
                with whole.running():
                    answer = call(client)
                self._given_up = -math.inf
                return answer
            except (CasckptError, AlreadyExists, ShortObject):  # some of these are also OSErrors
                self._given_up = -math.inf
                raise
            except client.failures as error:
                if not renewed and client.renew(error, began):
                    renewed = True
                    continue
                failure = client.explain(error)
                pause = next(pauses, None) if failure.again else None
                if late := whole.left <= (pause or 0):
                    self._given_up = time.monotonic()
                if pause is None or late:
                    tried = f", tried {attempts} times" if attempts > 1 else ""
                    why = f"{failure.why}; {whole.why}" if late and whole.why not in failure.why else failure.why
                    more = "" if self._single_writer else failure.unpromised
                    message = f"cannot {verb} {self.url}/{key}{tried}: {why}{more}"
                    raise failure.kind(message, key=key, full=failure.full) from error
                log.info("cannot %s %s/%s, retrying in %.1f s: %s", verb, self.url, key, pause, failure.why)
            whole.spend(pause)
            self._backoff.sleep(pause)


class RemoteReader(Reader, AbstractContextManager["RemoteReader"]):
    """An object in a `RemoteStore`. A read is one request. All reads see the same version of the object."""

    def __init__(self, store: RemoteStore, key: str, ranged: Ranged) -> None:
        self._store = store
        self._key = key
        self._ranged = ranged

    @property
    def size(self) -> int:
        """The size in bytes. This costs a request unless the object has already been read."""
        return self._store.again("look at", self._key, lambda _: self._ranged.size())

    @override
    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        filled = [buffer for buffer in buffers if buffer.nbytes]
        if not filled:
            return
        self._store.again("read", self._key, lambda _: self._ranged.read(offset, filled))

    def __exit__(self, *_: object) -> None:
        """Do nothing, because nothing is held open."""
