"""The note for DCP in a manifest. It holds information that the state's tree lacks."""

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
    """A part of a tensor that one rank saved alone, under its own key. Offset and shape are in elements."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Note:
    """The values that DCP must receive unchanged in a load.

    ``keys``: the keys of tensors and other values, if DCP's default planner would flatten the state differently;
    otherwise None. ``planner_data``: set together with ``keys``. ``opaque``: the keys of values that are stored as a
    planner's bytes. ``chunks``: the shapes and parts of the tensors, if one rank saved without the others.
    """

    keys: list[str] | None = None
    planner_data: Any = None
    opaque: frozenset[str] = frozenset()
    chunks: Mapping[str, tuple[tuple[int, ...], list[Chunk]]] = field(default_factory=dict)

    def encoded(self, *, allow_pickle: bool) -> dict[str, bytes]:
        """Encode the note for a manifest. Return an empty dict for an empty note.

        Raises InvalidInput if the planner data is not plain data, unless ``allow_pickle`` is set.
        """
        if self == Note():
            return {}
        try:
            data, pickled = encode_object("planner_data", self.planner_data, allow_pickle)
        except InvalidInput as error:
            raise InvalidInput(
                f"the planner's {error}. A checkpoint includes the planner's data: pass allow_pickle=True to "
                "StorageWriter",
                key="planner_data",
            ) from error
        chunks = {key: (shape, [(c.key, c.offset, c.shape) for c in parts]) for key, (shape, parts) in
                  self.chunks.items()}  # fmt: skip
        return {NOTE: plain.encode((self.keys, data, pickled, sorted(self.opaque), chunks))}


def read_note(manifest: Manifest, *, allow_pickle: bool) -> Note:
    """Return a manifest's note, or an empty note. Raises Refused for an invalid note, and InvalidInput for a pickle."""
    data = manifest.body.notes.get(NOTE)
    if data is None:
        return Note()
    try:
        keys, planner, pickled, opaque, chunks = plain.decode(data, extensions=TORCH_EXTENSIONS, strict=True)
        parts = {key: (tuple(shape), [Chunk(*part) for part in of_key]) for key, (shape, of_key) in chunks.items()}
        note = Note(None if keys is None else list(keys), None, frozenset(opaque), parts)
    except (ValueError, TypeError, AttributeError) as error:
        raise Refused(f"manifest {manifest.id} has an invalid note for DCP: {error}") from error
    planner_data = decode_object("planner_data", planner, bool(pickled), allow_pickle)
    return Note(note.keys, planner_data, note.opaque, note.chunks)
