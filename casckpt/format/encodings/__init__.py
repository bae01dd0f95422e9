"""Forms in which a cell is stored smaller: pure functions of its bytes, and of those of a base."""

from casckpt.format.encodings.frames import (
    MAX_LINKS,
    MIN_CELL,
    WORTH,
    Form,
    decode,
    encode,
    encode_delta,
    encode_planes,
    form_of,
    needs_base,
    undo,
)

__all__ = [
    "MAX_LINKS",
    "MIN_CELL",
    "WORTH",
    "Form",
    "decode",
    "encode",
    "encode_delta",
    "encode_planes",
    "form_of",
    "needs_base",
    "undo",
]
