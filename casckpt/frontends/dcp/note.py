"""A note in a manifest for DCP: what the tree of the state does not show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from casckpt.errors import InvalidInput, Refused
from casckpt.format import plain
from casckpt.format.manifest import Manifest
from casckpt.frontends.dcp.schema import NOTE
from casckpt.tensors.objects import TORCH_EXTENSIONS, decode_object, encode_object


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor that one rank saved by itself, under its own key. Offset and shape in elements."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Note:
    """What DCP needs back unchanged.

    ``keys``: the keys of tensors and other values, if DCP's default planner would flatten the state differently; else
    None. ``planner_data``: set together with ``keys``. ``opaque``: keys of values that are stored as the bytes of a
    planner. ``chunks``: shape and parts of the tensors of a rank that saved by itself.
    """

    keys: list[str] | None = None
    planner_data: Any = None
    opaque: frozenset[str] = frozenset()
    chunks: Mapping[str, tuple[tuple[int, ...], list[Chunk]]] = field(default_factory=dict)

    def encoded(self, *, allow_pickle: bool) -> dict[str, bytes]:
        """Encode the note for a manifest; empty for an empty note.

        Raises InvalidInput for planner data that are not plain data, unless they may be pickled.
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
        chunks = {key: (shape, [(c.key, c.offset, c.shape) for c in parts]) for key, (shape, parts) in
                  self.chunks.items()}  # fmt: skip
        return {NOTE: plain.encode((self.keys, data, pickled, sorted(self.opaque), chunks))}


def read_note(manifest: Manifest, *, allow_pickle: bool) -> Note:
    """The note of a manifest; an empty one if it has none. Raises Refused for an unusable note, InvalidInput."""
    data = manifest.body.notes.get(NOTE)
    if data is None:
        return Note()
    try:
        keys, planner, pickled, opaque, chunks = plain.decode(data, extensions=TORCH_EXTENSIONS, strict=True)
        parts = {key: (tuple(shape), [Chunk(*part) for part in of_key]) for key, (shape, of_key) in chunks.items()}
        note = Note(None if keys is None else list(keys), None, frozenset(opaque), parts)
    except (ValueError, TypeError, AttributeError) as error:
        raise Refused(f"manifest {manifest.id} is not usable: its note for DCP: {error}") from error
    planner_data = decode_object("planner_data", planner, bool(pickled), allow_pickle)
    return Note(note.keys, planner_data, note.opaque, note.chunks)
