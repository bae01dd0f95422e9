"""The header of a blob: a safetensors file whose data starts at byte 4096, and whose last tensor is its proof.

::

    8 bytes     length of the header, little-endian: always 4088
    4088 bytes  JSON without spaces, padded with spaces at its end: flat tensors "0", "1", ... in the order of the file
    data        the tensors, one after the other, without holes
    proof       see `casckpt.format.proof`; in the header it is the tensor "proof"

The header is canonical: the same dtypes and lengths always produce the same bytes. It does not contain a key, step or
time, so equal cells produce equal blobs. casckpt itself reads blobs according to the manifest. The header is for other
readers of safetensors files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from operator import itemgetter

import msgspec
from msgspec.json import Decoder

from casckpt.errors import InvalidInput, Refused
from casckpt.format.dtypes import DTYPES, stored_itemsize, stored_name

DATA_OFFSET = 4096
"""The offset of a blob's data in bytes. It equals one direct I/O block."""

MAX_RUNS = 40
"""The number of runs that always fit into the header. A blob sorted by `order` has one run per dtype."""

RECORD_BYTES = 36
"""The size of a proof record in bytes. There is one record per leaf, with its length and digest."""

SPAN = 1 << 34
"""A size in bytes that no blob reaches. Ranges of several blobs are sorted by blob number * SPAN + offset."""

MIN_LEAVES, MAX_LEAVES = 2, 1 << 16
"""The number of leaves in a blob: the header, and at least one leaf of data."""

_LENGTH = DATA_OFFSET - 8
_PROOF = "proof"
_ITEMSIZES = {stored_name(dtype): stored_itemsize(dtype) for dtype in DTYPES}


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: list[int]


_HEADER: Decoder[dict[str, _Tensor]] = Decoder(dict[str, _Tensor])  # see `casckpt.format.records.DECODERS`


@cache
def order(dtype: str) -> tuple[int, str]:
    """Return the sort key of a dtype's cells in a blob. The largest elements come first, which aligns every tensor.

    Cells with the same stored dtype are adjacent, which keeps the number of runs small. Raises Refused for an unknown
    dtype.
    """
    return (-stored_itemsize(dtype), stored_name(dtype))


def most_data(size: int) -> int:
    """Return the maximum number of data bytes in a blob file of ``size`` bytes. Its proof has at least two records."""
    return size - DATA_OFFSET - MIN_LEAVES * RECORD_BYTES


def encode_header(runs: Sequence[tuple[str, int]], leaves: int) -> bytes:
    """Encode the first `DATA_OFFSET` bytes of a blob that holds ``runs``: (torch's dtype name, bytes), in order.

    ``leaves``: the number of records in its proof. Adjacent runs with the same stored name become one tensor, and
    empty runs are skipped. Raises InvalidInput for a length that is not a multiple of the element size, an unaligned
    run, or too many runs or leaves.
    """
    return _encode(((stored_name(dtype), nbytes) for dtype, nbytes in runs), leaves)


def decode_header(header: bytes | memoryview, size: int) -> list[tuple[str, int]]:
    """Decode the runs of a blob file of ``size`` bytes from its ``header``: (stored dtype name, bytes), in order.

    The proof follows the runs and extends to the end of the file. Raises Refused for any header that `encode_header`
    cannot produce.
    """
    head = bytes(header[:DATA_OFFSET])
    if len(head) < DATA_OFFSET or int.from_bytes(head[:8], "little") != _LENGTH:
        raise Refused(f"a blob does not begin with a header of {DATA_OFFSET} bytes")
    try:
        tensors = _HEADER.decode(head[8:])
        leaves, rest = divmod(_nbytes(tensors.pop(_PROOF)), RECORD_BYTES)
        runs = [(tensor.dtype, _nbytes(tensor)) for tensor in tensors.values()]
        canonical = not rest and _encode(runs, leaves) == head
    except KeyError as error:
        raise Refused("a blob's header does not name a proof") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refused(f"cannot parse a blob's header: {error}") from error
    if not canonical or sum(nbytes for _, nbytes in runs) + leaves * RECORD_BYTES != size - DATA_OFFSET:
        raise Refused("a blob's header does not match its data, or casckpt did not write it")
    return runs


def _nbytes(tensor: _Tensor) -> int:
    if len(tensor.data_offsets) != 2 or tensor.dtype not in _ITEMSIZES:
        raise InvalidInput(f"invalid tensor of dtype {tensor.dtype[:20]!r} at {tensor.data_offsets[:4]}")
    return tensor.data_offsets[1] - tensor.data_offsets[0]


def _encode(runs: Iterable[tuple[str, int]], leaves: int) -> bytes:
    tensors: dict[str, _Tensor] = {}
    start = 0
    for name, same in groupby((run for run in runs if run[1]), key=itemgetter(0)):
        itemsize, nbytes = _ITEMSIZES[name], sum(size for _, size in same)
        if nbytes < 0 or nbytes % itemsize or start % itemsize:
            raise InvalidInput(
                f"{nbytes} bytes of {name} cannot be stored at byte {start} of a blob: sort its cells by `order`"
            )
        tensors[str(len(tensors))] = _Tensor(name, [nbytes // itemsize], [start, start + nbytes])
        start += nbytes
    if not MIN_LEAVES <= leaves <= MAX_LEAVES:
        raise InvalidInput(f"a blob cannot have {leaves} leaves: it has {MIN_LEAVES} to {MAX_LEAVES}")
    proof = leaves * RECORD_BYTES
    text = msgspec.json.encode(tensors | {_PROOF: _Tensor("U8", [proof], [start, start + proof])})
    if len(text) > _LENGTH:
        raise InvalidInput(
            f"a blob cannot have {len(tensors)} runs: its header has room for {MAX_RUNS}; sort its cells by `order`"
        )
    return _LENGTH.to_bytes(8, "little") + text.ljust(_LENGTH)
