"""docs/format.md says what the code does: names, fields, defaults and limits are compared with it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from casckpt.format import (
    blob,
    dtypes,
    extents,
    keys,
    manifest,
    plain,
    plain_codecs,
    plain_numpy,
    records,
    regions,
    tree,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
FORMAT = (DOCS / "format.md").read_text()
STRUCTS = (
    records.Marker, records.Settings, records.Process, records.Began, records.SignOfLife, records.Committed,
    records.Revoked, records.Forgotten, records.Restored, records.Purged, records.TagRecord, records.DamageRecord,
    manifest.Body, manifest.Blobs, manifest.Entry, manifest.ObjectEntry, manifest.Attachment, manifest.Places,
    extents.PackedExtents, extents.PackedWhole,
)  # fmt: skip


def section(title: str) -> str:
    """The text under a heading of the format page."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", FORMAT, re.MULTILINE | re.DOTALL)
    assert found, f"docs/format.md has no section {title!r}"
    return found[1]


def quoted(text: str) -> set[str]:
    """All that stands in back quotes."""
    return set(re.findall(r"`([^`\n]+)`", text))


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_of_what_is_stored_is_described(struct: type[msgspec.Struct]) -> None:
    config = struct.__struct_config__
    assert set(struct.__struct_encode_fields__) <= quoted(FORMAT)
    assert not isinstance(config.tag, str) or config.tag in quoted(section("Records"))
    if isinstance(config.tag, int):
        assert f"number {config.tag}" in section("Regions, cells, extents")


@pytest.mark.parametrize("name", ["format", "cell_bytes", "blob_bytes"])
def test_the_marker_has_the_defaults_that_are_described(name: str) -> None:
    info = msgspec.structs.fields(records.Marker)
    default = next(field.default for field in info if field.name == name)
    expected = "" if default is msgspec.NODEFAULT else f"{default} "
    assert f"| `{name}` | {expected}|" in section("Marker")


def test_every_dtype_stands_beside_its_name_in_a_blob() -> None:
    text = section("Dtypes").replace("`int1` to `int7`", " ".join(f"`int{n}`" for n in range(1, 8)))
    text = text.replace("`uint1` to `uint7`", " ".join(f"`uint{n}`" for n in range(1, 8)))
    found: dict[str, str] = {}
    for row in re.findall(r"^\| (`.*?) \| (`.*?) \|$", text, re.MULTILINE):
        names, stored = (re.findall(r"`(\w+)`", cell) for cell in row)
        found.update(zip(names, stored * (len(names) if len(stored) == 1 else 1), strict=True))
    assert found == {name: dtypes.stored_name(name) for name in dtypes.DTYPES}


def test_every_tag_of_plain_data_is_described() -> None:
    codecs = (*plain_codecs.STANDARD, *plain_numpy.NUMPY)
    column = "".join(re.findall(r"^\| (.*?) \|", section("Plain data"), re.MULTILINE))
    assert quoted(column) == {codec.tag for codec in codecs} | {plain._PART}


def test_every_kind_of_container_of_a_tree_is_described() -> None:
    kinds = re.search(r"^- its kind: (.*?);", section("Trees"), re.MULTILINE | re.DOTALL)
    assert kinds
    assert quoted(kinds[1]) == tree.KINDS
    assert (tree._LEAVES.index(tree.TENSOR), tree._LEAVES.index(tree.OBJECT)) == (0, 1)


def test_limits_are_those_of_the_code() -> None:
    assert records.MAX_RECORD_BYTES == 2**20
    assert records.MAX_METADATA_BYTES == 65536
    assert manifest.MAX_MANIFEST_BYTES == 2**32
    assert keys.MAX_STEP == 2**63 - 1
    assert regions.MAX_ELEMENTS == 2**62
    assert tree.MAX_DEPTH == plain.MAX_DEPTH
    text = section("Limits")
    for limit in (
        f"{manifest.MAX_KEY_CHARACTERS} characters",
        f"| {regions.MAX_DIMENSIONS}, ",
        f"| {plain.MAX_DEPTH} |",
    ):
        assert limit in text
    assert f"from byte {blob.DATA_OFFSET}" in section("Blobs")
    assert f"the {blob.MAX_RUNS} that fit" in FORMAT


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.rglob("*.md")), *sorted(DOCS.parent.glob("*.md"))], ids=lambda page: str(page.stem)
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
