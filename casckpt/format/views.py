"""The views in an attached `casckpt.base.names.HUB_FILE`. `casckpt.frontends.views.view.Rules` has their fields."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec.json import Decoder

from casckpt.errors import InvalidInput

MAX_BYTES: Final = 1 << 20

_Index: TypeAlias = list[int | tuple[int, int]]  # msgspec 0.22 confuses a bound of the numbers with the size 2


class ViewFile(msgspec.Struct, forbid_unknown_fields=True):
    """A view."""

    keys: list[str] | None = None
    strip_prefix: str | None = None
    rename: dict[str, str] | None = None
    model: bool = True
    split: dict[str, Annotated[dict[str, _Index], msgspec.Meta(min_length=1)]] = {}


class HubFile(msgspec.Struct):
    """The content of the file, with a view for each stem."""

    views: dict[str, ViewFile] = {}
    notes: list[str] = []
    tied: dict[str, str] = {}


_DECODER: Decoder[HubFile] = Decoder(HubFile)
"""Created at import: see `casckpt.format.records.DECODERS`."""


def decode(data: bytes, where: str, advice: str) -> HubFile:
    """Decode the file. Raises InvalidInput, with ``advice``, if it is not valid. ``where``: its name."""
    if len(data) > MAX_BYTES:
        raise InvalidInput(f"{where} has more than {MAX_BYTES >> 20} MiB; {advice}")
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is not valid ({error}); {advice}") from error
