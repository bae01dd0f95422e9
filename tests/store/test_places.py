"""A store keeps its promises on imitations of storage services, and refuses those that would break them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import page_tables
import pytest

from casckpt.errors import CasckptError, Conflict, StorageError, Unsupported
from casckpt.repository.repository import Repository
from casckpt.storage.base import Finding
from casckpt.storage.remote.patience import Backoff
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from casckpt.store.store import Store
from tests.support import quirks
from tests.support.buckets import state
from tests.support.certificates import make_certificate
from tests.support.places import IMITATED, REAL, Imitation, Place, imitated
from tests.support.proxy import Trouble
from tests.support.saves import CELL, blob_keys, flip, same_state, small, steps
from tests.support.servers import Server

ROOT = Path(__file__).resolve().parents[2]
SAFE = [place for place in IMITATED if not place.unsafe]
UNSAFE = [place for place in IMITATED if place.unsafe]
DISTINCT = {place.quirks: place for place in reversed(SAFE)}.values()
"""One of the safe places for each set of quirks."""
ONLY_SAVES = (quirks.RefusesFrames, quirks.RequiresEncryption, quirks.KeepsVersions)
"""Quirks that matter to writes alone. By default, other tests save and load there, or on a bucket with object lock."""


def by_name(places: Iterable[Place], rare: Container[type[quirks.Quirk]] = ()) -> pytest.MarkDecorator:
    """Run a test at each place. Servers without quirks are covered elsewhere, so they are for --full.

    So are those whose first quirk is ``rare``.
    """
    params = [
        pytest.param(
            place,
            id=place.name.partition(",")[0],
            marks=[pytest.mark.soak] * (not place.quirks or place.quirks[0] in rare),
        )
        for place in places
    ]
    return pytest.mark.parametrize("place", params)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def opened(there: Imitation, cache: Path, **options: Any) -> Store:
    """Open the store as a new host does."""
    location = RemoteLocation("s3", there.url.removeprefix("s3://"), {**there.options, **options})
    return Store(Repository(RemoteStore(location, backoff=Backoff(sleep=lambda _: None)), cache))


def findings(store: Store) -> dict[str, Finding]:
    """Return what doctor finds, by name."""
    return {finding.name: finding for finding in store.doctor()}


def objects_in(there: Imitation, server: Server, prefix: str = "") -> list[str]:
    """Return the keys in the bucket of a store, as the server without quirks sees them."""
    bucket, _, store = there.url.removeprefix("s3://").partition("/")
    listed = server.client.list_objects_v2(Bucket=bucket, Prefix=f"{store}/{prefix}")
    return [entry["Key"] for entry in listed.get("Contents", ())]


@by_name(DISTINCT, rare=ONLY_SAVES)
def test_a_store_works_on_every_place_that_is_called_safe(
    place: Place, moto_server: Server, certificate: Path, tmp_path: Path, full: bool
) -> None:
    with imitated(place, moto_server, certificate) as there:
        store = opened(there, tmp_path / "writer", **place.options)
        store.create(cell_bytes=CELL, blob_bytes=160 << 10)
        for step in (2, 3, 4):
            for path in ("commits/*", "objects/*", "runs/*") if full or step == 2 else ():
                there.proxy.plan(Trouble.LOST, method="PUT", path=f"/{path}")
            store.save(state(step), run="r", step=step)
        with pytest.raises(Conflict):
            store.save(state(9), run="r", step=4)
        other = opened(there, tmp_path / "other", **place.options)
        assert steps(other) == [("r", step) for step in (2, 3, 4)]
        assert same_state(other.read("r@latest"), state(4))
        assert [arrival.checkpoint.step for arrival in other.watch("r", after=3, timeout=0)] == [4]
        store.tag("best", "r@2")
        store.forget("r@3")
        with other.lease("r@4") as held:
            assert store.gc(min_age=0, wait=0).deleted_blobs > 0
            assert same_state(other.read(held), state(4))
        assert same_state(other.read("tag:best"), state(2))
        store.copy_to(backup := small())
        flip(store, blob_keys(store)[-1], 4100)
        assert store.verify().is_damaged
        assert not store.repair(backup).is_damaged
        fresh = opened(there, tmp_path / "fresh", **place.options)
        assert not fresh.verify().is_damaged
        if full:
            assert [finding for finding in fresh.doctor() if finding.ok is False] == []


@by_name(UNSAFE)
def test_a_save_is_refused_on_every_place_that_is_not_safe(
    place: Place, moto_server: Server, certificate: Path, tmp_path: Path
) -> None:
    with imitated(place, moto_server, certificate) as there:
        store = opened(there, tmp_path)
        with pytest.raises((Unsupported, StorageError), match=place.unsafe):
            store.save(state(1), run="r", step=1)
        assert objects_in(there, moto_server, "commits/") == []


@by_name([place for place in SAFE if place.options])
def test_without_the_options_of_a_place_a_save_fails_and_doctor_names_them(
    place: Place, moto_server: Server, certificate: Path, tmp_path: Path
) -> None:
    with imitated(place, moto_server, certificate) as there:
        store = opened(there, tmp_path)
        with pytest.raises(CasckptError) as caught:
            store.save(state(1), run="r", step=1)
        finding = findings(store)["write"]
        assert finding.ok is False
        for text in (str(caught.value), finding.found):
            for name, value in place.options.items():
                assert all(word in text for word in (name, *value))
        assert objects_in(there, moto_server) == []
        right = opened(there, tmp_path, **place.options)
        right.save(state(1), run="r", step=1)
        assert same_state(right.read("r@1"), state(1))


def test_a_writer_without_the_options_cannot_harm_a_store_of_others(
    moto_server: Server, certificate: Path, tmp_path: Path
) -> None:
    """The server stores the frames of this writer's uploads, and earlier probes have found nothing wrong."""
    (place,) = (place for place in SAFE if quirks.StoresFrames in place.quirks)
    with imitated(place, moto_server, certificate) as there:
        store = opened(there, tmp_path / "a", **place.options)
        store.save(state(1), run="r", step=1)
        with pytest.raises(Unsupported, match="stores the checksums of uploads in the objects"):
            opened(there, tmp_path / "b").save(state(2), run="r", step=2)
        assert steps(store) == [("r", 1)]
        assert store.gc(min_age=0, wait=0).deleted_blobs == 0
        assert not store.verify().is_damaged


def test_part_of_a_folder_can_be_listed_on_s3_express(moto_server: Server, certificate: Path, tmp_path: Path) -> None:
    (place,) = (place for place in SAFE if quirks.ListsFolders in place.quirks)
    with imitated(place, moto_server, certificate) as there:
        storage = opened(there, tmp_path).repository.storage
        for key in ("transactions/a", "transactions/a.1", "transactions/b", "transactions/c/a"):
            storage.put(key, b"")
        assert {entry.key for entry in storage.list("transactions/a")} == {"transactions/a", "transactions/a.1"}


@pytest.mark.parametrize(
    ("part", "step"),
    [("Expiration", {"Days": 7}), ("Transitions", [{"Days": 7, "StorageClass": "GLACIER"}])],
    ids=["expires", "archives"],
)
def test_a_scratch_bucket_whose_rule_has_a_prefix_can_have_a_store_beside_it(
    part: str, step: Any, moto_server: Server, tmp_path: Path
) -> None:
    """The refusal says how the rule and a store can live side by side, and both ways work."""

    def rule(prefix: str) -> None:
        rules = [{"ID": "old", "Status": "Enabled", "Filter": {"Prefix": prefix}, part: step}]
        moto_server.client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": rules})

    def store(prefix: str) -> Store:
        location = RemoteLocation("s3", f"{bucket}/{prefix}", moto_server.options)
        return Store(Repository(RemoteStore(location), tmp_path / prefix))

    bucket, advice = moto_server.new_bucket(), "limit the rule to a Prefix outside this store"
    rule("")
    with pytest.raises(Unsupported, match=f"{advice}; gc deletes unneeded objects"):
        store("mine").create()
    rule("scratch/")
    with pytest.raises(Unsupported, match=f"{advice}, or put the store outside scratch/; gc deletes"):
        store("scratch/mine").create()
    assert store("mine").create()
    rule("scratch/other/")
    assert store("scratch/mine").create()


def test_doctor_names_what_differs_from_s3(moto_server: Server, certificate: Path, tmp_path: Path) -> None:
    (expiring,) = (place for place in UNSAFE if quirks.ExpiresObjects in place.quirks)
    odd = Place("odd", quirks=(quirks.DropsMetadata, quirks.ListsInNoOrder))
    found = []
    for place in (expiring, odd):
        with imitated(place, moto_server, certificate) as there:
            found.append(findings(opened(there, tmp_path / place.name)))
            assert objects_in(there, moto_server) == []
    assert [[finding.name for finding in one.values() if finding.ok is False] for one in found] == [["lifecycle"], []]
    assert expiring.unsafe in found[0]["lifecycle"].found
    assert ["in no particular order" in one["list-after-write"].found for one in found] == [False, True]


def test_every_quirk_belongs_to_a_place_and_the_table_names_all_places() -> None:
    known = {value for value in vars(quirks).values() if isinstance(value, type) and issubclass(value, quirks.Quirk)}
    assert {quirk for place in IMITATED for quirk in place.quirks} == known - {quirks.Quirk}
    page = page_tables.inserted((ROOT / "docs" / "remote.md").read_text())
    assert all(place.row in page for place in (*REAL, *IMITATED))
