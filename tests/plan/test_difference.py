"""Two checkpoints are compared by key, dtype, shape and cells."""

from __future__ import annotations

import hashlib

from casckpt.format.manifest import Manifest
from casckpt.format.regions import Region, Shape, full_box
from casckpt.plan.difference import Change, difference
from tests.support.geometry import CELL, flat_cells, manifest


def _digests(text: str) -> list[bytes]:
    return [hashlib.sha256(letter.encode()).digest() for letter in text]


def _manifest(**tensors: str | tuple[str, str, Shape]) -> Manifest:
    """For each key, letters stand for the digests of its cells. All cells are full except in ``(dtype, letters,
    shape)``."""
    described = {}
    for key, value in tensors.items():
        dtype, text, shape = value if isinstance(value, tuple) else ("uint8", value, (CELL * len(value),))
        cells = flat_cells(shape, [min(CELL * (i + 1), shape[0]) for i in range(len(text))])
        described[key] = (dtype, 1, shape, list(zip(cells, _digests(text), strict=True)))
    return manifest(described)


def test_a_checkpoint_does_not_differ_from_itself() -> None:
    one = _manifest(w="abc", x="d")
    found = difference(one, one)
    assert found.unchanged == ("w", "x")
    assert (found.added, found.removed, found.changed) == ((), (), ())
    assert (found.bytes_added, found.bytes_removed, found.bytes_changed) == (0, 0, 0)
    assert found.bytes_unchanged == 4 * CELL


def test_every_kind_of_difference_is_found() -> None:
    old = _manifest(same="ab", cells="abcd", gone="xyz", dtype=("uint8", "a", (CELL,)), shape=("uint8", "a", (CELL,)))
    new = _manifest(same="ab", cells="aBcD", new="q", dtype=("int8", "a", (CELL,)), shape=("uint8", "ab", (2 * CELL,)))
    found = difference(old, new)
    assert found.added == ("new",)
    assert found.removed == ("gone",)
    assert found.unchanged == ("same",)
    assert found.changes == (
        Change("cells", "bytes", 2 * CELL),
        Change("dtype", "dtype", CELL),
        Change("shape", "shape", 2 * CELL),
    )
    assert found.changed == ("cells", "dtype", "shape")
    assert found.bytes_changed == 5 * CELL
    assert found.bytes_added == CELL
    assert found.bytes_removed == 3 * CELL
    assert found.bytes_unchanged == 4 * CELL


def test_a_short_last_cell_counts_only_its_own_bytes() -> None:
    shape = (CELL + 7,)
    found = difference(_manifest(w=("uint8", "ab", shape)), _manifest(w=("uint8", "aB", shape)))
    assert found.bytes_changed == 7


def test_cells_that_moved_to_a_different_blob_count_as_unchanged() -> None:
    shape = (2 * CELL,)
    old = _manifest(w=("uint8", "ab", shape))
    new = _manifest(pad="z", w=("uint8", "ab", shape))
    assert difference(old, new).unchanged == ("w",)


def test_cells_that_were_split_again_count_as_unchanged_where_boundaries_match() -> None:
    """After a save from more ranks, the first cell has two parts, and the second is unchanged."""
    shape = (2 * CELL,)
    box = full_box(shape)
    old = manifest(
        {"w": ("uint8", 1, shape, list(zip(flat_cells(shape, [CELL, 2 * CELL]), _digests("ab"), strict=True)))}
    )
    parts = [Region(box, 0, 100), Region(box, 100, CELL), Region(box, CELL, 2 * CELL)]
    new = manifest({"w": ("uint8", 1, shape, list(zip(parts, _digests("xyb"), strict=True)))})
    assert difference(old, new).bytes_changed == CELL


def test_a_comparison_includes_empty_tensors() -> None:
    one = manifest({"e": ("float32", 4, (0, 3), [])})
    assert difference(one, one).unchanged == ("e",)
    other = manifest({"e": ("float32", 4, (0, 4), [])})
    assert difference(one, other).changes == (Change("e", "shape", 0),)
