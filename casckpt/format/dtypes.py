"""The dtypes that can be stored, with torch's name, the size, and the name in safetensors files.

The row "a dtype" in docs/design.md explains how to add one. A dtype that safetensors lacks, or cannot represent
exactly, is stored as U8. The manifest records the true dtype.
"""

from __future__ import annotations

from casckpt.errors import Refused

_RAW = "U8"

# torch's name -> (bytes per element, name in the blob's header)
DTYPES: dict[str, tuple[int, str]] = {
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "int8": (1, "I8"),
    "int16": (2, "I16"),
    "uint16": (2, "U16"),
    "int32": (4, "I32"),
    "uint32": (4, "U32"),
    "int64": (8, "I64"),
    "uint64": (8, "U64"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float32": (4, "F32"),
    "float64": (8, "F64"),
    "complex64": (8, "C64"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e4m3fnuz": (1, _RAW),
    "float8_e5m2fnuz": (1, _RAW),
    "float8_e8m0fnu": (1, _RAW),
    "float4_e2m1fn_x2": (1, _RAW),
    "complex32": (4, _RAW),
    "complex128": (16, _RAW),
    **{f"int{bits}": (1, _RAW) for bits in range(1, 8)},
    **{f"uint{bits}": (1, _RAW) for bits in range(1, 8)},
    "bits8": (1, _RAW),
    "bits16": (2, _RAW),
    "bits1x8": (1, _RAW),
    "bits2x4": (1, _RAW),
    "bits4x2": (1, _RAW),
}


FLOATS = frozenset({"bfloat16", "float16", "float32", "float64", "complex32", "complex64"})
"""The dtypes for which the distribution of byte values depends on the byte's position in the element."""


def itemsize(dtype: str) -> int:
    """Return the size of an element in bytes. Raises Refused for a dtype that this version does not know."""
    if dtype not in DTYPES:
        raise Refused(f"dtype {dtype[:40]!r} is not known to this version of casckpt")
    return DTYPES[dtype][0]


def stored_name(dtype: str) -> str:
    """Return the dtype's name in a blob's header."""
    itemsize(dtype)
    return DTYPES[dtype][1]


def stored_itemsize(dtype: str) -> int:
    """Return the size of an element in bytes in a blob's header: 1 for dtypes stored as U8."""
    return 1 if stored_name(dtype) == _RAW else itemsize(dtype)


def coded_width(dtype: str) -> int:
    """Return the size of an element in bytes in a frame, where each part of a complex number is an element."""
    return itemsize(dtype) // 2 if dtype.startswith("complex") else itemsize(dtype)
