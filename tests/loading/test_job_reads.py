"""Which ranks pass on which blobs. tests/store/test_job_reads.py tests the loads themselves."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from casckpt.format.manifest import Manifest
from casckpt.loading import job_reads as module
from casckpt.loading.job_reads import Deal, Needs, Pass, deals
from casckpt.repository.blob_cache import BlobCache
from casckpt.repository.host_reads import HostReads
from casckpt.store.store import Store
from tests.support.bucket_reads import bucket
from tests.support.saves import cells

MIB = 1 << 20
PLENTY = 1 << 40
HEAD = "the manifest of rank 0"


def rows(values: Sequence[int]) -> bytes:
    return zlib.compress(bytes(values))


def needs(
    host: str, parts: Sequence[int], *, held: Sequence[int] = (), room: int = PLENTY, manifest: str = HEAD
) -> Needs:
    """Return the needs of a rank: a byte for each blob with its eighths. ``held``: the blobs in the host's cache."""
    return Needs(host, manifest, room, rows(parts), rows([0x80 * (number in held) for number in range(len(parts))]))


def passes(given: Sequence[Needs | None], sizes: Sequence[int]) -> list[Pass]:
    """Return what is passed on, and check that each rank receives the part that its host needs."""
    found = [one for one in deals(given, HEAD, sizes) if one is not None]
    every = {one.blob: one for deal in found for one in deal.passes}
    for rank, deal in enumerate(found):
        mine = [one for one in every.values() if not {one.sender, *one.receivers}.isdisjoint(deal.ranks)]
        assert sorted(deal.passes) == sorted(mine), rank
    return sorted(every.values())


WHOLE = [0xFF] * 4


def test_reads_are_balanced_over_the_hosts() -> None:
    found = passes([needs("a", [0xFF] * 6), needs("b", [0xFF] * 6)], [3, 1, 1, 1, 2, 2])
    read = Counter[int]()
    for one in found:
        assert {one.sender, *one.receivers} == {0, 1}
        read[one.sender] += [3, 1, 1, 1, 2, 2][one.blob]
    assert read == {0: 5, 1: 5}


def test_the_ranks_of_a_host_take_turns() -> None:
    given = [needs("ab"[rank % 2], [0xFF] * 8) for rank in range(4)]
    found = passes(given, [1] * 8)
    assert Counter(one.sender for one in found) == dict.fromkeys(range(4), 2)
    assert Counter(one.receivers for one in found) == {(rank,): 2 for rank in range(4)}
    assert {(one.sender, *one.receivers) for one in found} == {(0, 1), (1, 0), (2, 3), (3, 2)}


@pytest.mark.parametrize(
    "given",
    [
        [needs("a", WHOLE), needs("a", WHOLE)],
        [needs("a", WHOLE), None],
        [needs("a", WHOLE), needs("b", [0xFE] * 4)],
        [needs("a", [0xFF, 0xFF, 0, 0]), needs("b", [0, 0, 0xFF, 0xFF])],
        [needs("a", WHOLE, held=range(4)), needs("b", WHOLE, held=range(4))],
        [needs("a", WHOLE, room=1), needs("b", WHOLE, room=1)],
        [needs("a", WHOLE), needs("b", WHOLE, manifest="another")],
        [None, None],
    ],
)
def test_nothing_is_passed_on_if_only_one_host_could_use_it(given: list[Needs | None]) -> None:
    assert deals(given, HEAD, [2] * 4) == [None, None]


def test_a_host_needs_a_blob_if_its_ranks_together_need_all_of_it() -> None:
    given = [needs("a", [0xF0]), needs("a", [0x0F]), needs("b", [0xFF])]
    assert passes(given, [5]) == [Pass(0, 0, (2,))]


def test_a_host_that_has_a_blob_passes_it_on_without_receiving_it() -> None:
    found = passes([needs("a", WHOLE), needs("b", WHOLE, held=[1, 2]), needs("c", WHOLE)], [1] * 4)
    assert [one.sender for one in found if one.blob in (1, 2)] == [1, 1]
    assert [one.receivers for one in found if one.blob in (1, 2)] == [(0, 2)] * 2


def test_a_host_receives_no_more_than_it_has_room_for() -> None:
    found = passes([needs("a", WHOLE), needs("b", WHOLE, room=6)], [2] * 4)
    assert [one.blob for one in found] == [0, 1, 2]


def test_many_hosts_form_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOSTS", 2)
    found = [one for one in deals([needs(str(n), [0xFF]) for n in range(5)], HEAD, [9]) if one]
    assert [deal.passes for deal in found] == [[Pass(0, 0, (1,))]] * 2 + [[Pass(0, 2, (3,))]] * 2 + [[]]


@pytest.mark.parametrize(
    ("size", "hosts", "piece"), [(10, 2, MIB), (256 * MIB, 2, MIB), (PLENTY, 2, 4 * MIB), (PLENTY, 32, 2 * MIB)]
)
def test_pieces_are_smaller_for_small_loads_and_for_many_hosts(size: int, hosts: int, piece: int) -> None:
    found = deals([needs(str(n), [0xFF]) for n in range(hosts)], HEAD, [size])
    assert {one.piece for one in found if one} == {piece}


def test_a_rank_knows_who_brings_a_blob_to_its_host() -> None:
    deal = Deal([1, 3], MIB, [Pass(0, 1, (0, 4)), Pass(7, 2, (3, 5))])
    assert deal.bringers == {0: (1, 1), 7: (3, 2)}


# needs


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = bucket(tmp_path / "store")[0]
    store.create(blob_bytes=4 * MIB)
    store.save({"large": cells(2 * MIB / 4096), "small": cells(5)}, step=1)
    return store


def of(store: Store, ranges: Sequence[tuple[int, int, int]], tmp_path: Path, **options: Any) -> Needs | None:
    """Return what a rank needs that reads ``ranges``."""
    reads = HostReads(BlobCache(tmp_path / "memory", in_memory=True, **options), "load", "load-0", 1)
    return Needs.of(store.repository, manifest(store), ranges, reads)


def manifest(store: Store) -> Manifest:
    from casckpt.contents import manifests

    return manifests.get(store.repository, store.get("latest").commit)


def test_a_rank_says_of_which_eighths_it_needs_half(store: Store, tmp_path: Path) -> None:
    sizes = list(manifest(store).blob_sizes)
    large = int(np.argmax(sizes))
    eighth = sizes[large] // 8
    others = [number for number in range(len(sizes)) if number != large]

    def parts(*ranges: tuple[int, int, int]) -> list[int]:
        found = of(store, ranges, tmp_path)
        assert found is not None
        return list(zlib.decompress(found.parts))

    assert parts((large, 0, sizes[large]))[large] == 0xFF
    assert parts((large, 0, eighth + eighth // 4), (large, 3 * eighth, eighth // 2 + 8))[large] == 0b1001_0000
    assert parts((large, 0, eighth // 2 - 8))[large] == 0
    assert [parts((number, 0, 100))[number] for number in others] == [0xFF for _ in others]  # they are small


@pytest.mark.parametrize("limit", [0, 99])
def test_a_rank_without_enough_memory_reads_alone(store: Store, tmp_path: Path, limit: int) -> None:
    assert of(store, [(0, 0, 100)], tmp_path, limit=100) is not None
    assert of(store, [(0, 0, 100)], tmp_path, limit=limit) is None
