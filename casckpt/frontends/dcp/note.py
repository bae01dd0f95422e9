"""A note of plain data in a manifest, for DCP alone: what the tree does not tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from casckpt.errors import InvalidInput, Refused
from casckpt.format import plain
from casckpt.format.manifest import Manifest
from casckpt.frontends.dcp.schema import NOTE
from casckpt.tensors.objects import decode_object, encode_object
from casckpt.tensors.plain_torch import TORCH_EXTENSIONS


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor that one rank saved for itself, under a key of its own. Offset and shape in elements."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Note:
    """What DCP is to get back as it was.

    ``keys``: of tensors and other values, where DCP's default planner would flatten the state otherwise; else None.
    ``planner_data``: with them. ``opaque``: keys of values that are bytes as a planner made them. ``chunks``: shape and
    parts of the tensors of a rank that saved for itself.
    """

    keys: list[str] | None = None
    planner_data: Any = None
    opaque: frozenset[str] = frozenset()
    chunks: Mapping[str, tuple[tuple[int, ...], list[Chunk]]] = field(default_factory=dict)

    def encoded(self, *, allow_pickle: bool) -> dict[str, bytes]:
        """As a manifest holds it. Raises InvalidInput for planner data that are not plain, unless they may be pickled.

        Nothing at all where there is nothing to say.
        """
        if self == Note():
            return {}
        try:
            data, pickled = encode_object("planner_data", self.planner_data, allow_pickle)
        except InvalidInput as error:
            raise InvalidInput(
                f"the planner's {error}. It is stored with the checkpoint: pass allow_pickle=True to StorageWriter",
                key="planner_data",
            ) from error
        chunks = {key: (shape, [(c.key, c.offset, c.shape) for c in found]) for key, (shape, found) in
                  self.chunks.items()}  # fmt: skip
        return {NOTE: plain.encode((self.keys, data, pickled, sorted(self.opaque), chunks))}


def read_note(manifest: Manifest, *, allow_pickle: bool) -> Note:
    """The note of a manifest; an empty one where there is none. Raises Refused for one of no use, InvalidInput."""
    data = manifest.body.notes.get(NOTE)
    if data is None:
        return Note()
    try:
        keys, planner, pickled, opaque, chunks = plain.decode(data, extensions=TORCH_EXTENSIONS, strict=True)
        parts = {key: (tuple(shape), [Chunk(*one) for one in found]) for key, (shape, found) in chunks.items()}
        note = Note(None if keys is None else list(keys), None, frozenset(opaque), parts)
    except (ValueError, TypeError, AttributeError) as error:
        raise Refused(f"manifest {manifest.id} is not usable: its note for DCP: {error}") from error
    planner_data = decode_object("planner_data", planner, bool(pickled), allow_pickle)
    return Note(note.keys, planner_data, note.opaque, note.chunks)
