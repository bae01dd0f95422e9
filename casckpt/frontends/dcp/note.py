"""A note in a manifest for DCP. It holds facts that the tree of the state lacks."""

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
    """The values that DCP must get back unchanged.

    ``keys``: the keys of tensors and other values, if DCP's default planner would flatten the state differently; else
    None. ``planner_data``: set together with ``keys``. ``opaque``: keys of values that are stored as the bytes of a
    planner. ``chunks``: the shapes and parts of the tensors of a rank that saved without the others.
    """

    keys: list[str] | None = None
    planner_data: Any = None
    opaque: frozenset[str] = frozenset()
    chunks: Mapping[str, tuple[tuple[int, ...], list[Chunk]]] = field(default_factory=dict)

    def encoded(self, *, allow_pickle: bool) -> dict[str, bytes]:
        """Encode the note for a manifest. An empty note gives an empty dict.

        Raises InvalidInput for planner data that are not plain data, unless ``allow_pickle`` is set.
        """
        if self == Note():
            return {}
        try:
            data, pickled = encode_object("planner_data", self.planner_data, allow_pickle)
        except InvalidInput as error:
            raise InvalidInput(
                f"the planner's {error}. A checkpoint includes planner data: pass allow_pickle=True to StorageWriter",
                key="planner_data",
            ) from error
        chunks = {key: (shape, [(c.key, c.offset, c.shape) for c in parts]) for key, (shape, parts) in
                  self.chunks.items()}  # fmt: skip
        return {NOTE: plain.encode((self.keys, data, pickled, sorted(self.opaque), chunks))}


def read_note(manifest: Manifest, *, allow_pickle: bool) -> Note:
    """Return the note of a manifest, or an empty note. Raises Refused for an unusable note, and InvalidInput."""
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
