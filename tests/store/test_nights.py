"""Clouds at night: keys expire or rotate, bursts of 503, dead connections, and clocks that differ.

Each trouble begins at one of the requests of a save, a load, a gc or a watch. The call succeeds, or its error names
the object, the cause and what to do. Nothing is partly visible, and the next attempt succeeds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from casckpt.errors import CasckptError, StorageError
from casckpt.frontends.trainer import Checkpointer, CheckpointEvent
from casckpt.repository.repository import Repository
from casckpt.storage.forking import PerProcess
from casckpt.storage.remote.patience import Backoff
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from casckpt.store.store import Store
from tests.support.buckets import state
from tests.support.proxy import Proxy
from tests.support.ranks import outcome_of
from tests.support.saves import BLOB, CELL, same_state, steps
from tests.support.servers import Server

IMPATIENT = {"request_timeout": 2, "call_timeout": 8}
BURST = 4.0  # seconds, all in pauses that take no time


def _set_keys(name: str) -> None:
    os.environ.update(AWS_ACCESS_KEY_ID=name, AWS_SECRET_ACCESS_KEY="secret")


@dataclass
class Cloud:
    """A store behind a proxy whose keys come from the environment. Pauses between attempts take no time."""

    server: Server
    proxy: Proxy
    folder: Path
    numbers: Iterator[int] = field(default_factory=count)
    read: set[int] = field(default_factory=set)
    slept: float = 0.0

    def __post_init__(self) -> None:
        _set_keys("old")
        self.bucket = self.server.new_bucket()
        self.use({})
        self.store.create(cell_bytes=CELL, blob_bytes=BLOB)
        self.look = Store(Repository(RemoteStore(RemoteLocation("s3", f"{self.bucket}/store", self.server.options))))
        for _ in range(2):
            self.save()

    def use(self, limits: Mapping[str, float]) -> None:
        """From now on, use these time limits."""
        options = {"endpoint_url": self.proxy.endpoint, **limits}
        place = RemoteLocation("s3", f"{self.bucket}/store", options)
        self.storage = RemoteStore(place, backoff=Backoff(sleep=self._sleep))
        self.store = self.fresh()

    def _sleep(self, seconds: float) -> None:
        self.slept += seconds
        if self.slept > BURST:
            self.proxy.calm()

    def fresh(self) -> Store:
        """Return the store without anything in its caches."""
        return Store(Repository(self.storage, self.folder / str(next(self.numbers))))

    def save(self) -> None:
        """Save the next step."""
        step = next(self.numbers)
        self.store.save(state(step), step=step)

    def load(self) -> None:
        """Load the latest checkpoint."""
        found = self.fresh().read("default@latest")
        assert same_state(found, state(steps(self.look)[-1][1]))

    def gc(self) -> None:
        """Delete all but the newest checkpoint."""
        self.fresh().gc(keep_last=1, min_age=0, wait=0)

    def watch(self) -> None:
        """Watch for the first checkpoint."""
        assert [*self.fresh().watch("default", after="start", timeout=0)]

    def check(self, *, again: bool = True) -> None:
        """Check that everything visible is complete, and end saves whose end could not be written.

        ``again``: also read what an earlier check has read.
        """
        self.slept = 0.0
        for save in self.look.transactions():
            self.look.revoke(save.txid)
        for _, step in steps(self.look):
            if again or step not in self.read:
                assert same_state(self.look.read(f"default@{step}"), state(step))
                self.read.add(step)


@pytest.fixture
def cloud(moto_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")  # restored at the end
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    with Proxy(moto_server.endpoint) as proxy:
        yield Cloud(moto_server, proxy, tmp_path)


@dataclass(frozen=True)
class Night:
    """``begin``: starts the trouble at a request. ``says``: part of the error, or None if the call must succeed.

    ``limits``: the time limits, which only silence needs. Shorter ones would fail on a busy machine.
    """

    begin: Callable[[Cloud, int], object]
    says: str | None = None
    limits: Mapping[str, float] = field(default_factory=dict)


def _refused(code: str) -> Callable[[Cloud, int], object]:
    return lambda cloud, at: cloud.proxy.refuse(code, after=at)


def _rotates(cloud: Cloud, at: int) -> None:
    """From this request on, only new keys are valid, and they are in the environment."""

    def rotate() -> None:
        new = f"new-{next(cloud.numbers)}"
        cloud.proxy.allow(lambda request: request.signer == new, "InvalidAccessKeyId")
        _set_keys(new)

    cloud.proxy.at(at, rotate)


NIGHTS = {
    "expired keys": Night(_refused("ExpiredToken"), "the credentials have expired: provide different ones"),
    "unauthorized, 401": Night(_refused("Unauthorized"), "the server does not accept these credentials: provide"),
    "a clock that differs": Night(_refused("RequestTimeTooSkewed"), "clock is too far off: set it, for example"),
    "a burst of 503": Night(_refused("SlowDown")),
    "rotated keys": Night(_rotates),
    "dead connections": Night(lambda cloud, at: cloud.proxy.at(at, cloud.proxy.abandon), limits=IMPATIENT),
    "a silent server": Night(lambda cloud, at: cloud.proxy.mute(after=at), "_timeout in storage_options", IMPATIENT),
}
WORK: dict[str, Callable[[Cloud], None]] = {
    "save": Cloud.save,
    "load": Cloud.load,
    "gc": Cloud.gc,
    "watch": Cloud.watch,
}


@pytest.mark.parametrize("work", WORK)
def test_work_survives_a_night(work: str, cloud: Cloud, full: bool) -> None:
    """By default, each trouble begins at one request of one kind of work. With ``--full``, all begin at every request.

    The time limit of the test shows that no call hangs.
    """
    do = WORK[work]
    seen = len(cloud.proxy.seen)
    do(cloud)
    requests = len(cloud.proxy.seen) - seen
    for number, night in enumerate(NIGHTS.values()):
        if not full and number % len(WORK) != [*WORK].index(work):
            continue
        for at in range(requests) if full else (requests * number // len(NIGHTS),):
            cloud.use(night.limits)
            if work == "gc":
                cloud.save()
            night.begin(cloud, at)
            outcome: Any = outcome_of(lambda: do(cloud))
            assert night.says or outcome is None, (at, outcome)
            if outcome is not None:
                assert isinstance(outcome, StorageError)
                assert str(night.says) in str(outcome)
                assert f"s3://{cloud.bucket}/store" in str(outcome)
            cloud.proxy.calm()
            cloud.check(again=full)
        cloud.use({})
        do(cloud)
    cloud.check()


def test_keys_that_arrive_after_the_old_ones_end_are_used_at_once(cloud: Cloud) -> None:
    """The lookup that found only the old keys does not count."""
    cloud.proxy.allow(lambda request: request.signer == "new", "ExpiredToken")
    for _ in range(2):
        with pytest.raises(StorageError, match="the credentials have expired"):
            cloud.save()
    _set_keys("new")
    cloud.save()
    cloud.load()


SAVE_BEGINS, BLOBS, COMMIT = 0, 4, 9
"""Request numbers in a save."""


@pytest.mark.parametrize(
    ("at", "new"),
    [
        (BLOBS, "in time"), (COMMIT, "too late"),
        *(pytest.param(at, "in time", marks=pytest.mark.soak) for at in (SAVE_BEGINS, COMMIT)),
        *(pytest.param(at, "too late", marks=pytest.mark.soak) for at in (SAVE_BEGINS, BLOBS)),
    ],
)  # fmt: skip
def test_keys_that_end_in_a_background_save_are_renewed_or_the_next_save_works(at: int, new: str, cloud: Cloud) -> None:
    def end() -> None:
        cloud.proxy.allow(lambda request: request.signer == "new", "ExpiredToken")
        if new == "in time":
            _set_keys("new")

    cloud.proxy.at(at, end)
    store, step, later = cloud.store, next(cloud.numbers), next(cloud.numbers)
    outcome: Any = outcome_of(store.save_async(state(step), step=step).result)
    if new == "too late":
        assert isinstance(outcome, StorageError)
        assert "the credentials have expired: provide different ones" in str(outcome)
        assert ("default", step) not in steps(cloud.look)
    _set_keys("new")
    store.save_async(state(later), step=later).result()
    assert [("default", one) in steps(cloud.look) for one in (step, later)] == [new == "in time", True]
    cloud.check()


def test_a_checkpointer_goes_on_after_keys_end_in_its_background_save(cloud: Cloud) -> None:
    events: list[CheckpointEvent] = []
    with Checkpointer(cloud.store, run="r", max_checkpoints=2, on_event=events.append) as checkpointer:
        for step in (1, 2, 3, 4):
            if step == 2:
                checkpointer.wait()
                cloud.proxy.at(BLOBS, lambda: cloud.proxy.allow(lambda seen: seen.signer == "new", "ExpiredToken"))
            if step == 3:
                with pytest.raises(StorageError, match="the credentials have expired: provide different ones"):
                    checkpointer.wait()
                _set_keys("new")
            checkpointer.save_async(step, state(step))
    assert [found[1] for found in steps(cloud.look) if found[0] == "r"] == [3, 4]
    assert [event.step for event in events if "have expired" in str(event.error)] == [2]
    assert same_state(cloud.look.read("r@4"), state(4))


def test_a_file_of_keys_that_is_read_while_it_is_written_is_read_again(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup that found no keys, or half of them, does not count."""
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = secret\n"
    file = tmp_path / "credentials"
    file.write_text(text.format("old"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    cloud.use({})
    cloud.load()
    cloud.proxy.allow(lambda request: request.signer == "new", "ExpiredToken")
    for half in ("", "[defa", text.format("ne").partition("aws_secret")[0], text.format("ne")):
        file.write_text(half)
        with pytest.raises(StorageError):
            cloud.save()
    file.write_text(text.format("new"))
    cloud.save()
    cloud.load()


@pytest.mark.parametrize("printed", ["expired", "half"])
def test_a_program_that_prints_keys_fails_with_advice(
    printed: str, cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client raises RuntimeError for new keys that have expired, and ValueError for half of the output."""
    keys = {"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "s", "SessionToken": "t"}
    text = json.dumps(keys | {"Expiration": "2020-01-01T00:00:00Z"})
    (tmp_path / "keys").write_text(text if printed == "expired" else text[:40])
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {tmp_path}/keys\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    says = {"expired": "the credentials have expired: provide", "half": "no credentials were found: provide"}
    cloud.storage._clients = PerProcess(cloud.storage._connect)
    with pytest.raises(CasckptError, match=says[printed]):
        cloud.load()


def test_a_slow_shard_delays_a_load_but_does_not_fail_it(cloud: Cloud) -> None:
    cloud.proxy.slow("*.safetensors", 0.3)
    cloud.save()
    cloud.load()
    cloud.check()
