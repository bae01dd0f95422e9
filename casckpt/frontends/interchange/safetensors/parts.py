"""Safetensors files that hold parts of tensors: told from those that hold whole ones, and put together.

torch's `HuggingFaceStorageWriter(path, save_distributed=True)` writes a file, or several, for each rank, and says in
each where in the whole tensors its parts begin. It does not say how large those are, nor how many ranks there were.
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
"""Where in the metadata of a file the places of its parts stand, as JSON."""
WRITERS_OWN: Final = frozenset((PLACES, "DCP_VERSION"))
"""What a file says of how it was cut: true of that file only, and of nothing that is made of it."""

_OF_RANK = re.compile(r"shard-([0-9]{1,9})-model-[0-9]+-of-[0-9]+\.safetensors")
_OTHERS = re.compile(r"(?:rank_?|model-rank-)([0-9]{1,9})(?:-part-[0-9]+)?\.safetensors")
"""Parts that say nothing of themselves: OLMo-core's, TensorRT-LLM's, vLLM's sharded state."""

Part = tuple[Shape, torch.Tensor]


def offsets_of(path: Path, header: Header) -> Mapping[str, Shape] | None:
    """Tell where each tensor of a file begins in the whole one; None where the file does not say so.

    Raises InvalidInput for what it says if that is not usable.
    """
    text = header.metadata.get(PLACES)
    if text is None:
        return None
    try:
        said = json.loads(text)
        return {one.key: _offset(said[one.key]["saved_offsets"], len(one.shape)) for one in header.tensors}
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} does not say where its parts of tensors lie ({error!r:.100})") from error


def _offset(given: Any, dimensions: int) -> Shape:
    offset = tuple(given)
    if len(offset) != dimensions or any(type(start) is not int or not 0 <= start < 2**62 for start in offset):
        raise ValueError(f"{given!r:.60} is no offset")
    return offset


def check_alone(path: Path, header: Header) -> None:
    """Raise InvalidInput for a file that holds a part of what several ranks saved, and is to be imported alone."""
    offsets = offsets_of(path, header)
    part = offsets is not None and any(any(offset) for offset in offsets.values())
    if part or _OF_RANK.fullmatch(path.name) or _is_of_others(path):
        raise InvalidInput(
            f"{path.name} holds the parts of tensors that one rank had, of a model that several may have saved; give "
            f"the folder {path.parent} with the files of all ranks"
        )


def _is_of_others(path: Path) -> bool:
    if not _OTHERS.fullmatch(path.name):
        return False
    beside = (other for other in path.parent.glob("*.safetensors") if other != path)
    return (path.parent / "metadata.json").exists() or any(_OTHERS.fullmatch(other.name) for other in beside)


def check_numbers(files: Iterable[Path]) -> None:
    """Raise InvalidInput where the file of a rank is missing. Behind the last one that is there, no name tells."""
    numbers = sorted({int(found[1]) for path in files if (found := _OF_RANK.fullmatch(path.name))})
    missing = next((here for here, number in enumerate(numbers, 1) if here != number), None)
    if missing is not None:
        raise InvalidInput(
            f"there is no file shard-{missing:05}-model-*.safetensors, but there are some of later ranks; get all "
            "files of the folder (where that rank had nothing to save, give the others numbers without a gap)"
        )


def put_together(folder: Path, parts: Mapping[str, Sequence[Part]]) -> dict[str, list[Shard]]:
    """Each tensor as shards of the whole. Raises InvalidInput, naming the key, unless its parts make up one."""
    return {key: _tensor(folder, key, found) for key, found in parts.items()}


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
