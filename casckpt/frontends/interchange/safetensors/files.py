"""The metadata of safetensors files and Hugging Face folders: dtypes, headers and indexes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from casckpt.errors import InvalidInput, NotFound, Unsupported
from casckpt.format import dtypes
from casckpt.format.regions import Shape, check_shape

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
MAX_HEADER_BYTES: Final = 100_000_000
"""The largest header that readers of safetensors files accept."""
MAX_INDEX_BYTES: Final = 256 << 20

# maps torch's names to the names in files, for dtypes that blobs hold as U8
_MORE = {
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
_ALREADY = {dtypes.stored_name(name): name for name in dtypes.DTYPES if dtypes.stored_name(name) != "U8"}
NAMES: Final[Mapping[str, str]] = {"uint8": "U8"} | {name: stored for stored, name in _ALREADY.items()} | _MORE
"""Maps torch's dtype names to those of safetensors, for all dtypes that such a file can hold."""
_DTYPES = {stored: name for name, stored in NAMES.items()}
_ORDER = (
    "BOOL", "F4", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16",
    "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip

_BY_TORCH, _BY_ITS_OWN = "`casckpt import` reads it", "Read it with its own library, and save the state with store.save"
_MAGIC = (
    (b"PK\x03\x04", "a zip file, as torch.save writes", _BY_TORCH),
    (b"\x80", "a pickle, as old versions of torch.save wrote", _BY_TORCH),
    (b"GGUF", "a GGUF file", _BY_ITS_OWN),
    (b"\x89HDF", "an HDF5 file", _BY_ITS_OWN),
)


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor in a file: its name, torch's name for its dtype, its shape, and its size in bytes."""

    key: str
    dtype: str
    shape: Shape
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A file's header.

    ``tensors`` are listed in the order of their data, which follows the bytes ``head`` and has no holes.
    """

    tensors: tuple[TensorHeader, ...]
    head: bytes
    metadata: Mapping[str, str]


def encode_header(tensors: Iterable[TensorHeader], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the data of a safetensors file. The data of ``tensors`` follows in order, without holes.

    Raises InvalidInput, naming the key, for a tensor or header that such a file cannot hold.
    """
    if not all(isinstance(one, str) for entry in metadata.items() for one in entry):
        raise InvalidInput("the metadata of a safetensors file consists of strings; pass strings")
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for tensor in tensors:
        key = tensor.key
        if key == "__metadata__":
            raise InvalidInput("a safetensors file cannot hold a tensor named '__metadata__'; omit it", key=key)
        name, shape = file_type(key, tensor.dtype, tensor.shape)
        header[key] = {"dtype": name, "shape": shape, "data_offsets": [start, start + tensor.nbytes]}
        start += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # this aligns the data
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidInput(
            f"one file would need a header of {len(text)} bytes, which is more than readers accept; export fewer "
            "keys to it, "
            "or export to a folder with a smaller --max-shard-size"
        )
    return len(text).to_bytes(8, "little") + text


def file_type(key: str, dtype: str, shape: Shape) -> tuple[str, list[int]]:
    """Return the dtype and shape of a tensor in a safetensors file. Raises InvalidInput, naming the key."""
    name = NAMES.get(dtype)
    if name is None or (name == "F4" and not shape):
        raise InvalidInput(
            f"{key!r} is {dtype}, which a safetensors file cannot hold; choose different keys with --keys, or "
            "convert this tensor",
            key=key,
        )
    return name, [*shape[:-1], 2 * shape[-1]] if name == "F4" else list(shape)


def order(tensor: TensorHeader) -> tuple[int, str]:
    """Return the key by which the safetensors library sorts a file's tensors, so that all of them are aligned.

    Raises InvalidInput, naming the tensor, if such a file cannot hold it.
    """
    dtype, _ = file_type(tensor.key, tensor.dtype, tensor.shape)
    return -_ORDER.index(dtype), tensor.key


def read_header(path: Path) -> Header:
    """Read the header of a file. Raises NotFound, InvalidInput, or Unsupported, naming the actual format."""
    check_safetensors(path)
    with path.open("rb") as file:
        length = int.from_bytes(start := file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise InvalidInput(
                f"{path} has a header of {length} bytes, more than {MAX_HEADER_BYTES}; get a complete copy of the file"
            )
        head = start + file.read(length)
    try:
        return decode_head(head, path.stat().st_size)
    except Unsupported as error:
        raise Unsupported(f"{path}: {error}; convert the file first", key=error.key) from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{path} is not a valid safetensors file: {error}; get a complete copy of the file"
        ) from error


def decode_head(head: bytes, size: int | None = None) -> Header:
    """Decode the bytes before the data of a file. ``size``: the size of the file, if it is known.

    Raises ValueError, RecursionError, or Unsupported for an unknown dtype.
    """
    if len(head) - 8 != int.from_bytes(head[:8], "little"):
        raise InvalidInput("its header is truncated")
    found = json.loads(head[8:], object_pairs_hook=_without_twins)
    if not isinstance(found, dict):
        raise InvalidInput("its header is not a JSON object")
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidInput("its __metadata__ has values that are not strings")
    "".join((*found, *metadata, *metadata.values())).encode()  # fails for a lone surrogate
    places = sorted((_place(key, entry) for key, entry in found.items()), key=lambda place: place[:2])
    end = 0
    for start, stop, tensor in places:
        if start != end or stop - start != tensor.nbytes:
            raise InvalidInput(f"the byte range {start} to {stop} of {tensor.key!r:.200} has the wrong start or length")
        end = stop
    if size is not None and end != size - len(head):
        raise InvalidInput(f"its tensors have {end} bytes, but its data has {size - len(head)}")
    return Header(tuple(tensor for _, _, tensor in places), head, metadata)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidInput("its header contains the same key twice")
    return found


def _place(key: str, entry: Any) -> tuple[int, int, TensorHeader]:
    """Return the tensor's first byte, the byte after its last one, and the tensor."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise InvalidInput(f"the description of {key!r:.200} is invalid")
    kind, shape, offsets = entry["dtype"], _numbers(key, entry["shape"]), _numbers(key, entry["data_offsets"])
    if len(offsets) != 2:
        raise InvalidInput(f"the position of {key!r:.200} is invalid")
    if kind not in _DTYPES:
        raise Unsupported(f"{key!r:.200} has dtype {kind!r:.40}, which this version of casckpt does not know", key=key)
    if kind == "F4":  # two elements per byte
        if not shape or shape[-1] % 2:
            raise InvalidInput(f"the shape of {key!r:.200} is invalid for F4")
        shape = [*shape[:-1], shape[-1] // 2]
    dtype = _DTYPES[kind]
    return (
        offsets[0],
        offsets[1],
        TensorHeader(key, dtype, check_shape(tuple(shape)), prod(shape) * dtypes.itemsize(dtype)),
    )


def _numbers(key: str, given: Any) -> list[int]:
    if not isinstance(given, list) or not all(type(number) is int and number >= 0 for number in given):
        raise InvalidInput(f"the shape or position of {key!r:.200} is invalid")
    return given


def check_safetensors(path: Path) -> None:
    """Check the first bytes of a file. Raises NotFound, InvalidInput, or Unsupported, naming the actual format."""
    if not path.is_file():
        raise NotFound(f"there is no file {path}; pass the path of a safetensors file, or of a folder with such files")
    with path.open("rb") as file:
        head = file.read(9)
    length = int.from_bytes(head[:8], "little")
    if len(head) == 9 and head[8:] == b"{" and length <= path.stat().st_size - 8:
        return
    for magic, what, advice in _MAGIC:
        if head.startswith(magic):
            raise Unsupported(f"{path} is {what}, not a safetensors file. {advice}")
    raise InvalidInput(f"{path} is not a safetensors file, or is truncated; get a complete copy of the file")


def read_index(path: Path, suffix: str = SUFFIX) -> dict[str, str]:
    """Read an index, and return the name of the file that holds each key. Raises InvalidInput for an invalid index.

    ``suffix``: the suffix of the files.
    """
    if not path.is_file():
        raise InvalidInput(f"{path} is not a file, or is a link to a missing file; get a complete copy of the folder")
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise InvalidInput(f"{path} has more than {MAX_INDEX_BYTES} bytes: it is not an index of safetensors files")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not valid JSON ({error}); get a complete copy of the file") from error
    weights = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise InvalidInput(f"{path} lacks a weight_map, so it is not an index of safetensors files")
    for key, name in weights.items():
        if not _is_plain(name, suffix):
            raise InvalidInput(
                f"{path} lists {key!r:.200} in {name!r:.200}, which is not the plain name of a {suffix} file in the "
                "same folder; do not trust the index's source",
                key=key,
            )
    return weights


def _is_plain(name: Any, suffix: str) -> bool:
    if not isinstance(name, str) or not name.endswith(suffix) or name.startswith("."):
        return False
    return not any(character in "/\\:" or ord(character) < 32 for character in name) and len(name) < 256


def encode_index(files: Mapping[str, str], nbytes: int) -> bytes:
    """Return the index of ``files``, which maps keys to file names. ``nbytes``: the total bytes of all tensors."""
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
