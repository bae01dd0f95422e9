"""Recognizes safetensors files with parts of tensors, and assembles the tensors.

torch's `HuggingFaceStorageWriter(path, save_distributed=True)` writes files for each rank. A file has the offset of
each part in the whole tensor, but neither the shape of the whole tensor nor the number of ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from casckpt.errors import InvalidInput
from casckpt.format.regions import Box, Region, Shape
from casckpt.frontends.interchange.safetensors.files import Header
from casckpt.plan.coverage import holes_and_overlaps
from casckpt.tensors.values import Shard

PLACES: Final = "DCP_SHARDING_INFO"
"""The metadata key of a file that holds the offsets of its parts, as JSON."""
WRITERS_OWN: Final = frozenset((PLACES, "DCP_VERSION"))
"""Metadata keys that describe only the file itself, so they are not saved with the checkpoint."""

_OF_RANK = re.compile(r"shard-([0-9]{1,9})-model-[0-9]+-of-[0-9]+\.safetensors")
_OTHERS = re.compile(r"(?:rank_?|model-rank-)([0-9]{1,9})(?:-part-[0-9]+)?\.safetensors")
"""Names of files with parts but without offsets: those of OLMo-core, TensorRT-LLM and vLLM's sharded state."""

Part = tuple[Shape, torch.Tensor]


def offsets_of(path: Path, header: Header) -> Mapping[str, Shape] | None:
    """The offset of each tensor of a file in the whole tensor; None if the file has no offsets.

    Raises InvalidInput for unusable offsets.
    """
    text = header.metadata.get(PLACES)
    if text is None:
        return None
    try:
        places = json.loads(text)
        return {part.key: _offset(places[part.key]["saved_offsets"], len(part.shape)) for part in header.tensors}
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} does not say where its parts of tensors belong ({error!r:.100})") from error


def _offset(given: Any, dimensions: int) -> Shape:
    offset = tuple(given)
    if len(offset) != dimensions or any(type(start) is not int or not 0 <= start < 2**62 for start in offset):
        raise ValueError(f"{given!r:.60} is no offset")
    return offset


def check_alone(path: Path, header: Header) -> None:
    """Raise InvalidInput if a file that is imported alone holds a part of what several ranks saved."""
    offsets = offsets_of(path, header)
    part = offsets is not None and any(any(offset) for offset in offsets.values())
    if part or _OF_RANK.fullmatch(path.name) or _is_of_others(path):
        raise InvalidInput(
            f"{path.name} holds the parts of tensors that one rank saved, of a model that several may have saved; give "
            f"the folder {path.parent} with the files of all ranks"
        )


def _is_of_others(path: Path) -> bool:
    if not _OTHERS.fullmatch(path.name):
        return False
    beside = (other for other in path.parent.glob("*.safetensors") if other != path)
    return (path.parent / "metadata.json").exists() or any(_OTHERS.fullmatch(other.name) for other in beside)


def check_numbers(files: Iterable[Path]) -> None:
    """Raise InvalidInput if the file of a rank is missing. Missing files of the last ranks are not noticed."""
    numbers = sorted({int(match[1]) for path in files if (match := _OF_RANK.fullmatch(path.name))})
    missing = next((here for here, number in enumerate(numbers, 1) if here != number), None)
    if missing is not None:
        raise InvalidInput(
            f"there is no file shard-{missing:05}-model-*.safetensors, but there are some of later ranks; get all "
            "files of the folder (where that rank had nothing to save, give the others numbers without a gap)"
        )


def put_together(folder: Path, parts: Mapping[str, Sequence[Part]]) -> dict[str, list[Shard]]:
    """Make each tensor from its parts, as shards. Raises InvalidInput, naming the key, if they do not fit together."""
    return {key: _tensor(folder, key, of_tensor) for key, of_tensor in parts.items()}


def _tensor(folder: Path, key: str, parts: Sequence[Part]) -> list[Shard]:
    if len({(data.dtype, len(offset)) for offset, data in parts}) > 1:
        raise InvalidInput(f"{key!r:.200} has another dtype in one file of {folder} than in another", key=key)
    ends = [[start + extent for start, extent in zip(offset, data.shape, strict=True)] for offset, data in parts]
    shape = tuple(max(extents) for extents in zip(*ends, strict=True))
    shards = [Shard(data, shape, offset, tuple(data.shape)) for offset, data in parts]
    regions = [Region(Box(shard.offset, shard.shape), 0, shard.data.numel()) for shard in shards]
    holes, overlaps = holes_and_overlaps(shape, regions)
    if holes or overlaps:
        why = f"no file holds {holes[0]}" if holes else f"two files hold {regions[overlaps[0][0]]}"
        raise InvalidInput(
            f"{key!r:.200} of shape {list(shape)} is not whole in {folder}: {why}; get all files of one save, and no "
            "others",
            key=key,
        )
    return shards
