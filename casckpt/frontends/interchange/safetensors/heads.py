"""The heads of imported safetensors files, from which an export writes the same files again.

For each file with weights, an import attaches the bytes before the data, and the indexes, under reserved names. Tensors
from the folder itself have the same names in the checkpoint. The name of a subfolder is a prefix ("unet.conv.weight").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from casckpt.base.names import HEADS
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, Unsupported
from casckpt.frontends.interchange.safetensors.files import SUFFIX, Header, decode_head, decode_index
from casckpt.frontends.interchange.safetensors.layout import FileLayout
from casckpt.frontends.views.recut import ViewTensor
from casckpt.store.store import Store

MAX_HEADS_BYTES: Final = 64 << 20

_INDEX = re.compile(r"(.+)\.safetensors\.index(\.[^.]+)?\.json")
_SHARD = re.compile(r"-[0-9]+-of-[0-9]+")


def is_index(name: str) -> bool:
    """Return whether a file has the name of an index."""
    return _INDEX.fullmatch(name) is not None


def stem_of(name: str) -> str:
    """Return the part of a file's name that the files of one model share, such as "model" or "model.fp16"."""
    match = _INDEX.fullmatch(name)
    return _SHARD.sub("", name.removesuffix(SUFFIX)) if match is None else match[1] + (match[2] or "")


@dataclass
class ImportedModel:
    """The files of one model in an imported folder, by name, without their tensors' data.

    ``stem``: see `stem_of`. The stem of an index takes precedence. ``indexes``: for each index, the file of each key.
    """

    stem: str
    heads: dict[str, Header] = field(default_factory=dict)
    indexes: dict[str, tuple[bytes, dict[str, str]]] = field(default_factory=dict)

    def add(self, name: str, data: bytes) -> None:
        """Add a file. Raises an error if its head or index is not valid."""
        if name.endswith(SUFFIX):
            self.heads[name] = decode_head(data)
        elif is_index(name):
            self.stem, self.indexes[name] = stem_of(name), (data, decode_index(data, name))
        else:
            raise InvalidInput("it does not have the name of a safetensors file or an index")

    def fits(self, tensors: Mapping[str, ViewTensor]) -> bool:
        """Return whether the files hold exactly these tensors, given by name."""
        file_of: dict[str, str] = {}
        for name, head in self.heads.items():
            for tensor in head.tensors:
                found = tensors.get(tensor.key)
                if found is None or tensor.key in file_of:
                    return False
                if (found.entry.dtype, found.entry.shape) != (tensor.dtype, tensor.shape):
                    return False
                file_of[tensor.key] = name
        return len(file_of) == len(tensors) and all(
            name in self.heads and file_of.get(key, name) == name
            for _, index in self.indexes.values()
            for key, name in index.items()
        )

    def files(self, tensors: Mapping[str, ViewTensor]) -> Iterator[FileLayout]:
        """Yield the files. The indexes are last."""
        for name, head in self.heads.items():
            yield FileLayout(name, head.head, tuple(tensors[tensor.key] for tensor in head.tensors))
        for name, (data, _) in self.indexes.items():
            yield FileLayout(name, data)


def imported_models(store: Store, checkpoint: Checkpoint) -> tuple[dict[str, ImportedModel], list[str]]:
    """Return the imported models by the name of their folder ("" for the root), and notes on invalid files."""
    sizes = {name: size for name, size in store.attachments(checkpoint).items() if name.startswith(HEADS)}
    if sum(sizes.values()) > MAX_HEADS_BYTES:
        return {}, [f"the attachments {HEADS}* are larger than {MAX_HEADS_BYTES} bytes"]
    models: dict[str, ImportedModel] = {}
    notes = []
    for attachment in sorted(sizes):
        folder, _, name = attachment.removeprefix(HEADS).rpartition("/")
        try:
            if "/" in folder or "." in folder:
                raise InvalidInput("it is in a folder that an import does not read")
            models.setdefault(folder, ImportedModel(stem_of(name))).add(
                name, store.read_attachment(checkpoint, attachment)
            )
        except (ValueError, RecursionError, Unsupported) as error:
            notes.append(f"the attachment {attachment!r:.200} is not valid: {error}")
    return models, notes
