from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.format.dtypes import itemsize
from casckpt.format.sections.index import Entry
from casckpt.frontends.interchange.safetensors.layout import FileLayout
from casckpt.frontends.serve.ranges import FileMap, FileSpan, Unsatisfiable, parse_range
from casckpt.frontends.views.recut import ViewTensor


@pytest.mark.parametrize(
    ("header", "span"),
    [
        (None, None),
        ("bytes=0-0", (0, 1)),
        ("bytes=0-99", (0, 100)),
        ("bytes=10-", (10, 100)),
        ("bytes=-10", (90, 100)),
        ("bytes=-1000", (0, 100)),
        ("bytes=99-5000", (99, 100)),
        ("Bytes= 3-7 ", (3, 8)),
        (f"bytes=0-{'9' * 5000}", (0, 100)),
        ("bytes=0-1,5-6", None),
        ("items=0-5", None),
        ("bytes=a-b", None),
        ("bytes=-", None),
        ("bytes=--5", None),
        ("bytes=1.5-2", None),
        ("bytes=" + "0-0," * 3000, None),
        ("", None),
    ],
)
def test_a_range_header_is_parsed(header: str | None, span: tuple[int, int] | None) -> None:
    assert parse_range(header, 100) == span


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=5-2", "bytes=-0", f"bytes={'9' * 5000}-", "bytes=100-200"])
def test_an_unsatisfiable_range_is_refused(header: str) -> None:
    with pytest.raises(Unsatisfiable, match="asks for no byte"):
        parse_range(header, 100)


def test_an_empty_file_has_no_range() -> None:
    assert parse_range(None, 0) is None
    with pytest.raises(Unsatisfiable):
        parse_range("bytes=0-", 0)


@given(text=st.text(max_size=20), size=st.integers(0, 200))
def test_every_parsed_range_lies_in_the_file(text: str, size: int) -> None:
    for header in (text, f"bytes={text}"):
        try:
            span = parse_range(header, size)
        except Unsatisfiable:
            continue
        assert span is None or 0 <= span.start < span.stop <= size


TENSORS = st.lists(st.tuples(st.sampled_from(["uint8", "int16", "float32", "float64"]), st.integers(0, 20)), max_size=6)


@given(kinds=TENSORS, head=st.binary(max_size=20), data=st.data())
def test_a_range_is_read_from_the_elements_that_cover_it(
    kinds: list[tuple[str, int]], head: bytes, data: st.DataObject
) -> None:  # fmt: skip
    entries = [
        Entry("tensor", f"k{n}", 0, None, dtype, itemsize(dtype), (count,), n) for n, (dtype, count) in enumerate(kinds)
    ]
    held = [bytes((7 * n + 3 * i) % 251 for i in range(one.nbytes)) for n, one in enumerate(entries)]
    file = FileMap(FileLayout("f", head, tuple(ViewTensor(one.key, one) for one in entries)))
    whole = head + b"".join(held)
    assert file.nbytes == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    wanted = file.wanted(FileSpan(start, stop))
    parts = [held[s.entry.number][s.lo * s.entry.itemsize : s.hi * s.entry.itemsize] for s in wanted.sources]
    found = bytes(wanted.head) + b"".join(parts)[wanted.skip :]
    assert found[: stop - start] == whole[start:stop]
    widest = max((s.entry.itemsize for s in wanted.sources), default=1)
    assert wanted.skip < widest
    assert len(found) - (stop - start) < widest
