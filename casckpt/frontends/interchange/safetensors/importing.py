"""Imports safetensors files and Hugging Face folders. It memory-maps tensors, and never copies a whole tensor."""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Unpack

import torch

from casckpt.base.names import check_keywords, is_attachment_name
from casckpt.base.progress import Shown
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, NotFound, Unsupported
from casckpt.format.regions import Box, Region, Shape
from casckpt.frontends.interchange.resident import letting_go
from casckpt.frontends.interchange.safetensors.files import (
    INDEX_SUFFIX,
    Header,
    check_safetensors,
    read_header,
    read_index,
)
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.plan.coverage import holes_and_overlaps
from casckpt.saving.options import ImportArguments
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.memory import tensor_over
from casckpt.tensors.values import Shard

PLACES: Final = "DCP_SHARDING_INFO"
"""The key in a file's metadata that holds the offsets of its parts, as JSON."""
WRITERS_OWN: Final = frozenset((PLACES, "DCP_VERSION"))
"""Metadata keys that describe only the file itself. They are not saved with the checkpoint."""

_OF_RANK = re.compile(r"shard-([0-9]{1,9})-model-[0-9]+-of-[0-9]+\.safetensors")
_OTHERS = re.compile(r"(?:rank_?|model-rank-)([0-9]{1,9})(?:-part-[0-9]+)?\.safetensors")
"""Names of files with parts but without offsets, from OLMo-core, TensorRT-LLM and vLLM's sharded state."""

Part = tuple[Shape, torch.Tensor]


def offsets_of(path: Path, header: Header) -> Mapping[str, Shape] | None:
    """Return the offset of each of a file's tensors in the whole tensor, or None if the file has no offsets.

    Raises InvalidInput for invalid offsets.
    """
    text = header.metadata.get(PLACES)
    if text is None:
        return None
    try:
        places = json.loads(text)
        return {part.key: _offset(places[part.key]["saved_offsets"], len(part.shape)) for part in header.tensors}
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} has no valid offsets for its tensor parts ({error!r:.100})") from error


def _offset(given: Any, dimensions: int) -> Shape:
    offset = tuple(given)
    if len(offset) != dimensions or any(type(start) is not int or not 0 <= start < 2**62 for start in offset):
        raise ValueError(f"{given!r:.60} is not an offset")
    return offset


def check_alone(path: Path, header: Header) -> None:
    """Raise InvalidInput for the import of a single file if several ranks saved the state."""
    offsets = offsets_of(path, header)
    part = offsets is not None and any(any(offset) for offset in offsets.values())
    if part or _OF_RANK.fullmatch(path.name) or _is_of_others(path):
        raise InvalidInput(
            f"{path.name} holds one rank's parts of tensors, but several ranks may have saved the model; pass "
            f"the folder {path.parent} with the files of all ranks"
        )


def _is_of_others(path: Path) -> bool:
    if not _OTHERS.fullmatch(path.name):
        return False
    beside = (other for other in path.parent.glob("*.safetensors") if other != path)
    return (path.parent / "metadata.json").exists() or any(_OTHERS.fullmatch(other.name) for other in beside)


def check_numbers(files: Iterable[Path]) -> None:
    """Raise InvalidInput if a rank's file is missing. This check cannot detect missing files of the last ranks."""
    numbers = sorted({int(match[1]) for path in files if (match := _OF_RANK.fullmatch(path.name))})
    missing = next((here for here, number in enumerate(numbers, 1) if here != number), None)
    if missing is not None:
        raise InvalidInput(
            f"there is no file shard-{missing:05}-model-*.safetensors, but files of later ranks exist; get all "
            "files of the folder. If that rank had nothing to save, renumber the later files to close the gap"
        )


def put_together(folder: Path, parts: Mapping[str, Sequence[Part]]) -> dict[str, list[Shard]]:
    """Build each tensor from its parts, as shards. Raises InvalidInput, naming the key, if the parts do not match."""
    return {key: _tensor(folder, key, of_tensor) for key, of_tensor in parts.items()}


def _tensor(folder: Path, key: str, parts: Sequence[Part]) -> list[Shard]:
    if len({(data.dtype, len(offset)) for offset, data in parts}) > 1:
        raise InvalidInput(f"{key!r:.200} has different dtypes in the files of {folder}", key=key)
    ends = [[start + extent for start, extent in zip(offset, data.shape, strict=True)] for offset, data in parts]
    shape = tuple(max(extents) for extents in zip(*ends, strict=True))
    shards = [Shard(data, shape, offset, tuple(data.shape)) for offset, data in parts]
    regions = [Region(Box(shard.offset, shard.shape), 0, shard.data.numel()) for shard in shards]
    holes, overlaps = holes_and_overlaps(shape, regions)
    if holes or overlaps:
        why = f"no file holds {holes[0]}" if holes else f"two files hold {regions[overlaps[0][0]]}"
        raise InvalidInput(
            f"{key!r:.200} of shape {list(shape)} is incomplete in {folder}: {why}; get all files from a single "
            "save, and remove all others",
            key=key,
        )
    return shards


MAX_ATTACHMENT_BYTES: Final = 64 << 20
MAX_ATTACHMENTS_BYTES: Final = 256 << 20
METADATA_KEY: Final = "safetensors"
"""The key in a checkpoint's metadata for the ``__metadata__`` of imported files."""

_WEIGHTS = frozenset((
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".hdf5", ".msgpack", ".onnx", ".gguf",
    ".ggml", ".ot", ".tflite", ".npz", ".pdparams", ".index.json",
))  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImportSources:
    """The input of an import. ``attachments``: files to attach, by name. ``skipped``: names of skipped files.

    ``keys``: the keys that the index lists.
    """

    weights: tuple[Path, ...]
    attachments: Mapping[str, Path]
    skipped: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """The total bytes of the files with weights."""
        return sum(path.stat().st_size for path in self.weights)


def import_safetensors(
    store: AnyStore,
    path: str | os.PathLike[str],
    *,
    step: int,
    **options: Unpack[ImportArguments],
) -> Checkpoint:
    """Save the tensors of a safetensors file, or of a Hugging Face folder, under their own keys.

    The config, the tokenizer and other small files in a folder become attachments. The ``__metadata__`` of the files
    is stored in the checkpoint's metadata under "safetensors". `export_safetensors` restores all of it.

    Raises NotFound, InvalidInput or Unsupported for files that cannot be imported, and the errors of `Store.save`.
    """
    check_keywords("import_safetensors", options, ImportArguments)
    sources = find_sources(path)
    notes = tuple(f"left out: {name}" for name in sources.skipped)
    if notes:
        log.warning("left out: %s", ", ".join(sources.skipped))
    maps = Maps(options.get("progress"))
    file_metadata = maps.add_all(sources.weights)
    state = maps.state | put_together(sources.weights[0].parent, maps.parts)
    if maps.parts and not sources.keys:
        log.warning(
            "assembled from %d ranks' files, but their full number is unknown: check that the folder is complete",
            len(sources.weights),
        )
    if missing := sorted(sources.keys - state.keys()):
        log.warning("the index of %s names tensors that are not in any file: %s", path, _few(missing))
    attachments = {name: file.read_bytes() for name, file in sources.attachments.items()}
    options["progress"] = maps.done
    options["metadata"] = {METADATA_KEY: file_metadata} | dict(options.get("metadata") or {})
    saved = as_store(store).save(state, step=step, attachments=attachments, no_dist=True, **options)
    return replace(saved, notes=notes)


def find_sources(path: str | os.PathLike[str]) -> ImportSources:
    """Return the files for an import of ``path``: a safetensors file, an index, or a folder with either.

    Raises NotFound, InvalidInput or Unsupported, naming the actual format.
    """
    given = Path(path).expanduser()
    if given.is_dir():
        weights = _weights_of(given)
        attachments, skipped = _attachments(given, weights.weights)
        return replace(weights, attachments=attachments, skipped=tuple(skipped))
    if given.name.endswith(INDEX_SUFFIX) and given.is_file():
        return _shards(given)
    check_alone(given, read_header(given))
    return ImportSources((given,), {})


def _weights_of(folder: Path) -> ImportSources:
    indexes = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    shards = {name for index in indexes for name in read_index(index).values()}
    loose = [file for file in files if file.name not in shards]
    if not indexes and loose and all(offsets_of(file, read_header(file)) is not None for file in loose):
        check_numbers(loose)
        return ImportSources(tuple(loose), {})
    choices = [*indexes, *loose]
    if not choices:
        raise _nothing_in(folder)
    if len(choices) > 1:
        names = _few([path.name for path in choices])
        raise InvalidInput(f"{folder} holds several models: {names}; pass the path of one of them")
    if indexes:
        return _shards(indexes[0])
    check_alone(files[0], read_header(files[0]))
    return ImportSources(tuple(files), {})


def _shards(index: Path) -> ImportSources:
    file_of = read_index(index)
    paths = [index.parent / name for name in sorted(set(file_of.values()))]
    for path in paths:
        if not path.is_file():
            raise NotFound(f"{index} names {path.name}, which does not exist; get a complete copy of the folder")
        check_safetensors(path)
    return ImportSources(tuple(paths), {}, keys=frozenset(file_of))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def _nothing_in(folder: Path) -> Exception:
    names = {path.name for path in folder.iterdir()}
    if "casckpt.json" in names:
        return Unsupported(f"{folder} is a casckpt store; pass a safetensors file, or a folder with such files")
    kinds = {
        ".metadata": "a torch.distributed.checkpoint checkpoint; `casckpt import` reads it directly",
        "metadata.json": "a checkpoint from a different trainer; save its state with store.save",
        "pytorch_model.bin": "weights that torch.save wrote; import the file pytorch_model.bin itself",
        "pytorch_model.bin.index.json": "weights from torch.save in several files; save the state with store.save",
    }
    for name, what in kinds.items():
        if name in names:
            return Unsupported(f"{folder} does not hold safetensors files, but {what}")
    deeper = sorted({path.parent.name for kind in (*kinds, "*.safetensors") for path in folder.glob(f"*/{kind}")})
    if deeper:
        return InvalidInput(
            f"{folder} is not a checkpoint itself, but contains several: {_few(deeper)}; choose one of them"
        )
    return NotFound(
        f"there is no safetensors file in {folder}; pass the path of such a file, or of a folder with such files"
    )


class Maps:
    """Memory-mapped files. ``state``: whole tensors. ``parts``: parts of tensors, each with its offset.

    ``done``: the progress to pass to the save; see `letting_go`.
    """

    def __init__(self, shown: Shown | None) -> None:
        self.state: dict[str, Any] = {}
        self.parts: dict[str, list[Part]] = {}
        self._maps: list[mmap.mmap] = []
        self.done = letting_go(shown, partial(_let_go, self._maps))

    def add_all(self, weights: Sequence[Path]) -> dict[str, str]:
        """Map the tensors of all files in order, and return the files' metadata."""
        metadata: dict[str, str] = {}
        for path in weights:
            header = read_header(path)
            metadata = dict(header.metadata) | metadata
            self._add(path, header, offsets_of(path, header))
        return {name: text for name, text in metadata.items() if name not in WRITERS_OWN}

    def _add(self, path: Path, header: Header, offsets: Mapping[str, Shape] | None) -> None:
        for key, tensor in self.mapped(path, header):
            if key in self.state or (offsets is None and key in self.parts):
                raise InvalidInput(f"{key!r} is in {path.name} and in a different file of {path.parent}", key=key)
            if offsets is None:
                self.state[key] = tensor
            else:
                self.parts.setdefault(key, []).append((offsets[key], tensor))

    def mapped(self, path: Path, header: Header) -> Iterator[tuple[str, torch.Tensor]]:
        """Map one file's tensors and yield them by key, without adding them to ``state``."""
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch requires writable memory
        self._maps.append(data)
        view, start = memoryview(data), header.start
        for tensor in header.tensors:
            yield tensor.key, tensor_over(view[start : start + tensor.nbytes], torch_dtype(tensor.dtype), tensor.shape)
            start += tensor.nbytes


def _let_go(maps: Sequence[mmap.mmap]) -> None:
    for data in maps:
        data.madvise(mmap.MADV_DONTNEED)


# attachments


def _attachments(folder: Path, weights: Iterable[Path]) -> tuple[dict[str, Path], list[str]]:
    """Return the files to attach, by name, and the names of skipped files."""
    chosen: dict[str, Path] = {}
    skipped: list[str] = []
    left = MAX_ATTACHMENTS_BYTES
    used = set(weights)
    for name, path in _files(folder):
        if path in used or ("/" not in name and name.endswith(INDEX_SUFFIX)):
            continue  # an export creates its own index
        nbytes = path.stat().st_size if _is_attachable(folder, name, path) else MAX_ATTACHMENT_BYTES + 1
        if nbytes > min(left, MAX_ATTACHMENT_BYTES):
            skipped.append(name)
            continue
        left -= nbytes
        chosen[name] = path
    return chosen, skipped


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the relative names and the paths of the files in a folder tree, sorted, without hidden files.

    Links to folders are yielded but not followed.
    """
    for place, folders, names in os.walk(folder):
        names += [name for name in folders if Path(place, name).is_symlink()]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                path = Path(place, name)
                yield path.relative_to(folder).as_posix(), path


def _is_attachable(folder: Path, name: str, path: Path) -> bool:
    if not path.is_file() or any(name.lower().endswith(suffix) for suffix in _WEIGHTS):
        return False
    if not is_attachment_name(name):
        return False
    return not path.is_symlink() or _leads_inside(folder, path)


def _leads_inside(folder: Path, link: Path) -> bool:
    """Return whether a link points into the folder or Hugging Face's cache, and therefore cannot reach other files."""
    homes = [folder.resolve()]
    if folder.parent.name == "snapshots":
        homes.append(folder.resolve().parent.parent / "blobs")
    return any(link.resolve().is_relative_to(home) for home in homes)
