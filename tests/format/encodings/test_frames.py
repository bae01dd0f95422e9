"""Frames: every cell is decoded exactly, deltas can be chained and undone, and invalid bytes are refused."""

from __future__ import annotations

from itertools import pairwise
from struct import pack

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import InvalidInput, Refused
from casckpt.format.digest import cell_digest
from casckpt.format.encodings.frames import (
    MIN_CELL,
    WORTH,
    Form,
    decode,
    decode_chain,
    encode_delta,
    encode_planes,
    needs_base,
    undo,
)
from casckpt.format.encodings.parts import compress
from casckpt.format.extents import MAX_LINKS, Frame, StoredCell
from casckpt.format.regions import full_box
from tests.support import plain_reader
from tests.support.coded import encode

WIDTHS = st.sampled_from([1, 2, 4, 8])


SEEDS = st.integers(0, 2**32 - 1)


COUNTS = st.integers(MIN_CELL, 9_000) | st.sampled_from([17_001, 1 << 16, (1 << 16) + 1, 131_077])


SHARES = st.sampled_from([0, 1e-4, 0.01, 0.1, 0.37, 0.38, 0.9, 1])


MATTER = ["zeros", "constant", "random", "ramp", "normal", "positive", "special", "small"]


def special(width: int) -> list[int]:
    """Return special values of bf16, f16, f32, f64 and fp8: zeros, infinities, NaNs, subnormals, and the largest."""
    ones, top = (1 << 8 * width) - 1, 1 << (8 * width - 1)
    floats = [np.array(x, f"<f{width}").tobytes() for x in (np.inf, np.nan, 1, 5e-8)] if width > 1 else []
    numbers = [int.from_bytes(number, "little") for number in floats]
    return [0, 1, 2, top, top - 1, top + 1, ones, ones - 1, *numbers, *(number | top | 1 for number in numbers)]


def elements(width: int, count: int, matter: str, seed: int) -> npt.NDArray[np.unsignedinteger]:
    rng, dtype = np.random.default_rng(seed), np.dtype(f"<u{width}")
    match matter:
        case "zeros":
            return np.zeros(count, dtype)
        case "constant":
            return np.full(count, special(width)[seed % len(special(width))], dtype)
        case "random":
            return np.frombuffer(rng.bytes(count * width), dtype)
        case "ramp":
            return np.arange(count).astype(dtype)
        case "special":
            return rng.choice(np.array(special(width), dtype), count)
        case "small":
            return rng.integers(-3, 4, count).astype(dtype)
    floats = rng.standard_normal(count)
    wide = max(width, 4)
    found = (abs(floats) if matter == "positive" else floats).astype(f"<f{wide}").view(f"<u{wide}")
    return (found >> (8 * (wide - width))).astype(dtype)


@st.composite
def cells(draw: st.DrawFn) -> tuple[bytes, int]:
    """Draw (bytes, width) of a cell."""
    width = draw(WIDTHS)
    return elements(width, draw(COUNTS), draw(st.sampled_from(MATTER)), draw(SEEDS)).tobytes(), width


@st.composite
def versions(draw: st.DrawFn, most: int = 2) -> tuple[list[bytes], int]:
    """Draw (versions of a cell, width). From each version to the next, some of the elements change, most of them by
    little."""
    cell, width = draw(cells())
    found = [cell]
    for _ in range(draw(st.integers(1, most - 1))):
        array = np.frombuffer(found[-1], f"<u{width}").copy()
        rng = np.random.default_rng(draw(SEEDS))
        where = rng.random(array.size) < draw(SHARES)
        far = draw(st.sampled_from([1, 2, 300, 1 << 30]))
        array[where] += rng.integers(-far, far + 1, int(where.sum())).astype(array.dtype)
        found.append(array.tobytes())
    return found, width


def decoded(frame: bytes, nbytes: int, base: bytes | None = None) -> bytes:
    into = bytearray(b"\xaa" * nbytes)
    decode(memoryview(frame), memoryview(into), None if base is None else memoryview(base))
    return bytes(into)


def by_hand(frame: bytes, plain: bytes, base: bytes = b"") -> bytes:
    """Decode a frame of a cell as long as ``plain`` with the reader of docs/format.md."""
    return plain_reader.decoded(frame, len(plain), base)


def delta(cell: bytes, width: int, base: bytes) -> bytes | None:
    return encode_delta(memoryview(cell), width, memoryview(base))


@given(versions())
def test_deltas_are_applied_and_undone_in_place_and_into_new_memory(given: tuple[list[bytes], int]) -> None:
    (base, plain), width = given
    frame = delta(plain, width, base)
    if frame is None:
        return
    assert needs_base(Form(frame[0]))
    assert len(frame) <= WORTH * len(plain)
    assert decoded(frame, len(plain), base) == plain == by_hand(frame, plain, base)
    place = bytearray(base)
    decode(memoryview(frame), memoryview(place), memoryview(place))
    assert place == plain
    undo(memoryview(frame), memoryview(place))
    assert place == base


@given(versions(most=4))
def test_a_chain_of_deltas_is_applied_and_undone(given: tuple[list[bytes], int]) -> None:
    chain, width = given
    frames = [delta(new, width, old) for old, new in pairwise(chain)]
    usable = frames[: frames.index(None)] if None in frames else frames
    place = bytearray(chain[0])
    for frame, plain in zip(usable, chain[1:], strict=False):
        assert frame is not None
        decode(memoryview(frame), memoryview(place), memoryview(place))
        assert place == plain
    for frame in reversed(usable):
        assert frame is not None
        undo(memoryview(frame), memoryview(place))
    assert place == chain[0]


@given(versions())
def test_encoded_cells_decode_to_the_same_bytes(given: tuple[list[bytes], int]) -> None:
    (base, plain), width = given
    frame = encode(memoryview(plain), width, memoryview(base))
    if frame is not None:
        assert decoded(frame, len(plain), base) == plain


@pytest.mark.parametrize(
    ("share", "form"), [(0, Form.SPARSE), (0.01, Form.SPARSE), (0.3, Form.SPARSE), (0.5, Form.DIFF)]
)
def test_the_encoding_of_a_cell_depends_on_the_fraction_of_changed_elements(share: float, form: Form) -> None:
    base = elements(2, 1 << 16, "normal", 1)
    plain = base + (np.random.default_rng(2).random(base.size) < share).astype(base.dtype)
    frame = encode(memoryview(plain.tobytes()), 2, memoryview(base.tobytes()))
    assert frame is not None
    assert Form(frame[0]) == form


def test_an_unrelated_base_does_not_make_a_frame_smaller() -> None:
    plain, base = (elements(2, 1 << 16, "normal", seed).tobytes() for seed in (1, 2))
    alone = encode(memoryview(plain), 2, None)
    assert alone is not None
    other = delta(plain, 2, base)
    assert other is None or len(other) > len(alone)


def test_typical_states_reach_their_compression_ratios() -> None:
    base = elements(2, 1 << 19, "normal", 1)
    frame = encode(memoryview(base.tobytes()), 2, None)
    assert frame is not None
    assert len(frame) < 0.68 * base.nbytes
    rng = np.random.default_rng(3)
    plain = base + np.where(rng.random(base.size) < 0.008, rng.choice([1, 65535], base.size), 0).astype(base.dtype)
    change = delta(plain.tobytes(), 2, base.tobytes())
    assert change is not None
    assert len(change) < 1.15 * 0.0047 * base.nbytes, "0.0047 is the entropy of such changes"


@pytest.mark.parametrize("width", [0, 1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("nbytes", [0, 1, MIN_CELL - 1, MIN_CELL - 8, MIN_CELL, MIN_CELL + 1, MIN_CELL + 4])
def test_incompressible_cells_are_stored_raw(width: int, nbytes: int) -> None:
    plain = memoryview(bytes(nbytes))
    worth = nbytes >= MIN_CELL and width in {1, 2, 4, 8} and not nbytes % width
    assert (encode(plain, width, None) is not None) == worth
    assert (encode(plain, width, plain) is not None) == worth


def test_a_cell_of_random_noise_is_stored_raw() -> None:
    one, other = (np.random.default_rng(seed).bytes(1 << 18) for seed in (1, 2))
    for width in (1, 2, 4, 8):
        assert encode(memoryview(one), width, None) is None
        assert encode(memoryview(one), width, memoryview(other)) is None
        assert delta(one, width, other) is None


@pytest.mark.parametrize("count", [5001, 5002])
def test_unaligned_memory_is_encoded_and_decoded(count: int) -> None:
    base, plain = (bytes(3) + elements(4, count, "normal", seed).tobytes() for seed in (1, 1))
    plain = plain[:-1] + b"\1"
    frame = encode(memoryview(plain)[3:], 4, memoryview(base)[3:])
    assert frame is not None
    into = bytearray(base)
    decode(memoryview(bytes(1) + frame)[1:], memoryview(into)[3:], memoryview(into)[3:])
    assert into == plain


def test_a_frame_with_many_gaps_is_decoded_in_pieces() -> None:
    base, where = np.zeros(400_000, np.uint8), np.random.default_rng(1).random(400_000) < 0.3
    plain = (base + where).tobytes()
    frame = delta(plain, 1, base.tobytes())
    assert frame is not None
    assert Form(frame[0]) == Form.SPARSE
    assert decoded(frame, len(plain), base.tobytes()) == plain


RAW2 = bytes.fromhex("01 02 01 00 06000000  00 03000000 02 05 ff  01 01000000 7f")


def test_frames_of_fixed_bytes_always_decode_to_the_same_values() -> None:
    planes = decoded(RAW2, 6)
    assert planes == pack("<3H", 0x3F81, 0xBF82, 0xBFFF) == by_hand(RAW2, planes)
    gaps = bytes.fromhex("02 01 00 00 00020000  03000000 04000000  00 04000000 00 ff 00 00  00 03000000 01 02 ff")
    base = bytes(range(256)) * 2
    sparse = bytearray(base)
    for where, difference in ((0, -1), (256, 1), (257, -128)):
        sparse[where] = (sparse[where] + difference) % 256
    assert decoded(gaps, 512, base) == sparse == by_hand(gaps, base, base)
    diff = bytes.fromhex("03 02 00 00 04000000  00 02000000 03 04  01 01000000 00")
    assert (
        decoded(diff, 4, pack("<2H", 1, 65535))
        == pack("<2H", 65535, 1)
        == by_hand(diff, b"....", bytes.fromhex("0100ffff"))
    )
    nothing = bytes.fromhex("02 02 00 00 04000000  00000000 00000000  00 00000000  00 00000000  00 00000000")
    assert decoded(nothing, 4, b"abcd") == b"abcd" == by_hand(nothing, b"abcd", b"abcd")


def frame_of(
    form: int, width: int, nbytes: int, *parts: tuple[int, bytes], sparse: tuple[int, int] | None = None
) -> bytes:
    head = pack("<BBBBI", form, width, 0, 0, nbytes) + (pack("<II", *sparse) if sparse else b"")
    return head + b"".join(pack("<BI", kind, len(data)) + data for kind, data in parts)


ZEROS = (1, b"\0")


WINDOW = bytes.fromhex("28b52ffd 00 68 4d00001000000100fb2ac002")
"""512 zeros, by a writer who may look back over 2**23 bytes."""


PLAIN = 512


SUMMED = bytes.fromhex("28b52ffd6400014d00001000000100fb2ac0027cb8c3e8")
"""512 zeros, and their checksum behind them."""


WRONG = {
    "nothing": b"",
    "half a head": RAW2[:7],
    "raw": frame_of(0, 1, PLAIN, ZEROS),
    "a form of the future": frame_of(4, 1, PLAIN, ZEROS),
    "width": frame_of(1, 3, PLAIN, ZEROS, ZEROS, ZEROS),
    "width 0": frame_of(1, 0, PLAIN),
    "another length": frame_of(1, 1, PLAIN + 1, ZEROS),
    "a shorter cell": frame_of(1, 1, PLAIN - 1, ZEROS),
    "rotated twice": frame_of(1, 1, PLAIN, ZEROS).replace(b"\1\1\0\0", b"\1\1\2\0", 1),
    "a flag": frame_of(1, 1, PLAIN, ZEROS).replace(b"\1\1\0\0", b"\1\1\0\1", 1),
    "rotated differences": frame_of(3, 1, PLAIN, ZEROS).replace(b"\3\1\0\0", b"\3\1\1\0", 1),
    "no part": frame_of(1, 1, PLAIN),
    "half a part": frame_of(1, 1, PLAIN, (0, bytes(PLAIN)))[:-1],
    "a part too few": frame_of(1, 2, PLAIN, ZEROS),
    "a part too many": frame_of(1, 1, PLAIN, ZEROS, ZEROS),
    "bytes behind it": frame_of(1, 1, PLAIN, ZEROS) + b"\0",
    "a kind of the future": frame_of(1, 1, PLAIN, (3, b"")),
    "short raw": frame_of(1, 1, PLAIN, (0, bytes(PLAIN - 1))),
    "long raw": frame_of(1, 1, PLAIN, (0, bytes(PLAIN + 1))),
    "a constant of no byte": frame_of(1, 1, PLAIN, (1, b"")),
    "a constant of two": frame_of(1, 1, PLAIN, (1, b"\0\0")),
    "no zstd": frame_of(1, 1, PLAIN, (2, b"plain bytes of any kind")),
    "zstd of nothing": frame_of(1, 1, PLAIN, (2, b"")),
    "short zstd": frame_of(1, 1, PLAIN, (2, compress(bytes(PLAIN - 1)))),
    "long zstd": frame_of(1, 1, PLAIN, (2, compress(bytes(PLAIN + 1)))),
    "a bomb": frame_of(1, 1, PLAIN, (2, compress(bytes(1 << 28)))),
    "half of zstd": frame_of(1, 1, PLAIN, (2, compress(bytes(range(256)) * 2)[:-1])),
    "zstd without its end": frame_of(1, 1, PLAIN, (2, SUMMED[:-1])),
    "two of zstd": frame_of(1, 1, PLAIN, (2, compress(bytes(PLAIN // 2)) * 2)),
    "one that zstd skips": frame_of(1, 1, PLAIN, (2, bytes.fromhex("502a4d18 04000000 00000000"))),
    "a large window": frame_of(1, 1, PLAIN, (2, WINDOW.replace(b"\x68", b"\x70"))),
    "zstd and more": frame_of(1, 1, PLAIN, (2, compress(bytes(PLAIN)) + b"\0")),
    "more changes than elements": frame_of(2, 1, PLAIN, ZEROS, ZEROS, sparse=(PLAIN + 1, PLAIN + 1)),
    "more gaps than fit": frame_of(2, 1, PLAIN, ZEROS, ZEROS, sparse=(PLAIN, PLAIN + 1)),
    "very many changes": frame_of(2, 1, PLAIN, (1, b"\xff"), ZEROS, sparse=(1 << 28, 1 << 27)),
    "very many gaps": frame_of(2, 1, PLAIN, (1, b"\xff"), ZEROS, sparse=(1, 1 << 28)),
    "gaps out of the cell": frame_of(2, 1, PLAIN, (0, b"\xff\xff\2"), ZEROS, sparse=(1, 3)),
    "fewer gaps than changes": frame_of(2, 1, PLAIN, (0, b"\1"), ZEROS, sparse=(2, 1)),
    "more gaps than changes": frame_of(2, 1, PLAIN, (0, b"\1\1"), ZEROS, sparse=(1, 2)),
    "gaps without an end": frame_of(2, 1, PLAIN, (0, b"\1\xff"), ZEROS, sparse=(1, 2)),
    "gaps without a change": frame_of(2, 1, PLAIN, (1, b"\xff"), (0, b""), sparse=(0, 1)),
    "a constant where nothing is": frame_of(2, 1, PLAIN, (0, b""), ZEROS, sparse=(0, 0)),
    "zstd where nothing is": frame_of(2, 1, PLAIN, (0, b""), (2, compress(b"")), sparse=(0, 0)),
}


@pytest.mark.parametrize("what", WRONG)
def test_malformed_frames_are_rejected(what: str) -> None:
    into = bytearray(b"\xaa" * PLAIN)
    with pytest.raises(Refused):
        decode(memoryview(WRONG[what]), memoryview(into), memoryview(into))
    with pytest.raises(Refused):
        undo(memoryview(WRONG[what]), memoryview(into))
    assert into == b"\xaa" * PLAIN


def test_a_delta_can_change_the_last_element() -> None:
    last = frame_of(2, 1, PLAIN, (0, b"\xff\xff\1"), (1, b"\2"), sparse=(1, 3))
    assert decoded(last, PLAIN, bytes(PLAIN)) == bytes(PLAIN - 1) + b"\1"
    every = frame_of(2, 1, PLAIN, ZEROS, (1, b"\1"), sparse=(PLAIN, PLAIN))
    assert decoded(every, PLAIN, bytes(PLAIN)) == b"\xff" * PLAIN


def test_a_cell_whose_length_is_not_a_multiple_of_the_element_size_is_rejected() -> None:
    frame = frame_of(1, 2, PLAIN + 1, ZEROS, ZEROS)
    with pytest.raises(Refused):
        decode(memoryview(frame), memoryview(bytearray(PLAIN + 1)), None)


def test_a_missing_or_wrong_base_is_rejected() -> None:
    frame = frame_of(3, 1, PLAIN, ZEROS)
    into = memoryview(bytearray(PLAIN))
    with pytest.raises(InvalidInput, match="needs a base"):
        decode(memoryview(frame), into, None)
    with pytest.raises(InvalidInput, match="needs a base"):
        decode(memoryview(frame), into, memoryview(bytes(PLAIN - 1)))
    with pytest.raises(InvalidInput, match="same length"):
        encode(into, 1, memoryview(bytes(PLAIN - 1)))
    with pytest.raises(Refused, match="cannot be undone"):
        undo(memoryview(frame_of(1, 1, PLAIN, ZEROS)), into)


def decoded_or_refused(frame: bytes) -> None:
    for width in (1, 2):
        into = bytearray(b"\xaa" * PLAIN * width)
        try:
            decode(memoryview(frame), memoryview(into), memoryview(into))
        except Refused:
            assert into == b"\xaa" * PLAIN * width


@given(st.binary(max_size=100), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
def test_arbitrary_bytes_decode_or_are_rejected(data: bytes, form: int, width: int) -> None:
    decoded_or_refused(data)
    decoded_or_refused(pack("<BBBBI", form, width, 0, 0, PLAIN * width) + data)
    decoded_or_refused(frame_of(form, width, PLAIN * width, (2, data)))


@given(st.data())
def test_a_frame_with_changed_bytes_decodes_or_is_rejected(data: st.DataObject) -> None:
    (base, plain), width = data.draw(versions())
    frame = bytearray(
        data.draw(st.sampled_from([encode_planes(memoryview(plain), width), delta(plain, width, base)])) or b""
    )
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(frame), 40)) | st.integers(0, len(frame)))
        frame[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    into = bytearray(base)
    try:
        decode(memoryview(frame), memoryview(into), memoryview(into))
    except Refused:
        assert into == base


CELL = 4096


def version(number: int) -> bytes:
    data = bytearray(bytes(range(1, 9)) * (CELL // 8))
    for later in range(number + 1):
        data[later::64] = bytes([later]) * len(data[later::64])
    return bytes(data)


def chain(links: int, *, coded_key: bool) -> tuple[StoredCell, list[bytes]]:
    """Return a cell with this many bases, and the stored bytes of each, oldest first. Blob numbers are positions."""
    stored, made = list[bytes](), None
    for number in range(links + 1):
        plain, base = memoryview(version(number)), memoryview(version(number - 1)) if number else None
        frame = encode(plain, 2, base) if number else encode_planes(plain, 2) if coded_key else None
        stored.append(bytes(plain) if frame is None else frame)
        how = None if frame is None else Frame(len(frame), made)
        made = StoredCell(number, 4096, CELL, full_box((CELL,)), 0, CELL, cell_digest(plain), how)
    assert made is not None
    return made, stored


@given(st.integers(0, MAX_LINKS), st.booleans())
def test_a_chain_of_frames_is_decoded_through_all_links(links: int, coded_key: bool) -> None:
    cell, stored = chain(links, coded_key=coded_key)
    assert len([*cell.chain]) == links + 1
    assert decode_chain(cell, lambda one: bytearray(stored[one.blob])) == version(links)


@given(st.data(), st.integers(0, 5), st.booleans())
def test_an_incorrect_byte_anywhere_in_a_chain_is_rejected_or_harmless(
    data: st.DataObject, links: int, coded_key: bool
) -> None:
    cell, stored = chain(links, coded_key=coded_key)
    number = data.draw(st.integers(0, links))
    wrong = bytearray(stored[number])
    wrong[data.draw(st.integers(0, len(wrong) - 1))] ^= data.draw(st.integers(1, 255))
    stored[number] = bytes(wrong)
    try:
        found = decode_chain(cell, lambda one: bytearray(stored[one.blob]))
    except Refused:
        return
    assert found == version(links)  # some bits of a frame have no effect


def test_frames_of_differences_without_a_base_are_rejected() -> None:
    cell, stored = chain(1, coded_key=False)
    with pytest.raises(Refused, match="base"):
        decode_chain(cell._replace(frame=Frame(cell.stored)), lambda one: bytearray(stored[one.blob]))
