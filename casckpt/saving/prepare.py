"""Prepares a save: converts a state into entries, encoded objects and a tree. Writes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import torch

from casckpt.base.lazy import cached_property
from casckpt.base.names import check_attachment_name
from casckpt.base.text import listed, warn_once
from casckpt.errors import InvalidInput
from casckpt.format.manifest import Attachment, ObjectEntry
from casckpt.format.plain import Spill
from casckpt.format.records import changed
from casckpt.format.regions import check_shape
from casckpt.format.sections.index import ATTACHMENT, PART, TENSOR
from casckpt.format.sections.tables import Extents, Streams
from casckpt.format.tree import show
from casckpt.saving.local_entries import LocalEntry
from casckpt.saving.options import Frozen, Owners
from casckpt.tensors.dtypes import dtype_name
from casckpt.tensors.objects import encode_object
from casckpt.tensors.shards import Piece, local_tensor, may_differ
from casckpt.tensors.staging import Staging, distinct
from casckpt.tensors.state import FlatState, LeafValue, encode_tree, flatten, is_part

_INLINE_BYTES = 4096
LARGE = 10_000  # entries; with fewer, a save or a read takes well under a second
_UNKEPT = (
    "state%s is a %s, which is stored as a dict: Store.read returns a dict, and a load into such an object fills it"
)
_EMPTY = (
    "%d of the %d floating-point tensors of this state are empty. If these are placeholders, such as those that "
    "DeepSpeed's ZeRO-3 leaves, this checkpoint lacks the weights: gather the weights first, and then save again"
)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """One rank's flattened state. ``left``: the keys that it leaves to other ranks, with the rank for each key.

    ``in_parts``: the sharded wrappers, each flattened into parts, by key. See `casckpt.saving.apart`.
    """

    sources: Sequence[LocalEntry]
    objects: Sequence[ObjectEntry]
    attachments: Sequence[Attachment]
    tree: bytes
    left: Mapping[str, int] = field(default_factory=dict)
    in_parts: Mapping[str, FlatState] = field(default_factory=dict)

    @cached_property
    def streams(self) -> Streams:
        """The dtype and shape of each entry, in order."""
        return {(one.kind, one.key, one.index, one.rank): (one.dtype, one.shape) for one in self.sources}

    def share_streams(self, held: Extents) -> None:
        """Use the streams of ``held`` if they are the same, which saves their memory, and further comparisons."""
        if held.has_only(self.streams):
            vars(self)["streams"] = held.streams


def prepare(
    state: Mapping[Any, Any],
    attachments: Mapping[str, bytes] | None,
    *,
    rank: int,
    size: int = 1,
    allow_pickle: bool,
    frozen: Frozen = None,
    owners: Owners = None,
) -> Prepared:
    """Flatten ``state``. Raises InvalidInput, with the key, for a leaf that cannot be stored.

    ``size``: the number of ranks. Leaves that ``owners`` assigns to other ranks are omitted.
    """
    # with several ranks, the other ranks may hold different entries
    flat = flatten(state, is_whole=lambda _, mapping: size == 1 and len(mapping) >= LARGE)
    is_frozen = frozen_by(frozen)
    sources: list[LocalEntry] = []
    objects: list[ObjectEntry] = []
    left: dict[str, int] = {}
    for key, leaf in flat.leaves.items():
        unit = leaf.outer or leaf
        if owners is not None and not leaf.per_rank and (owner := _owner(owners, unit.key, size)) not in (None, rank):
            left[key] = owner
            _drop(flat.tree, unit.path)
            continue
        own = rank if leaf.per_rank else None
        if leaf.is_tensor:
            marked = frozen is not None and (is_frozen(key) or (unit is not leaf and is_frozen(unit.key)))
            source = tensor_source(key, leaf.value, own, frozen=marked, together=size > 1)
            sources.append(source if leaf.outer is None else _inner_source(source, leaf.outer))
        else:
            entry, parts = stored_object(key, own, partial(encode_object, key, leaf.value, allow_pickle))
            objects.append(entry)
            sources += parts
    tensors = flat.leaves.items() if frozen is not None else ()
    if trained := [key for key, leaf in tensors if getattr(leaf.value, "requires_grad", False) and is_frozen(key)]:
        warn_once(
            log,
            "%s are declared frozen, but require gradients. If they change, even in one row, later checkpoints may "
            "have their first values: leave them out of frozen=, or call requires_grad_(False)", listed(trained),
        )  # fmt: skip
    if rank == 0:
        _warn_if_empty(sources)
        for unkept, path in flat.unkept.items():
            warn_once(log, _UNKEPT, show(path), unkept.__qualname__)
    inline, large = _attachments(attachments or {})
    outer = {leaf.unit.key: leaf.unit.value for leaf in flat.leaves.values() if leaf.outer} if size > 1 else {}
    sharded = {key: value for key, value in outer.items() if is_part(value) and not flat.wrappers[key].in_parts}
    in_parts = {key: flatten({key: value}, apart=lambda _: True) for key, value in sharded.items()}
    return Prepared([*sources, *large], objects, inline, encode_tree(flat.tree), left, in_parts)


def _warn_if_empty(sources: Sequence[LocalEntry]) -> None:
    """Log a warning if most tensors of a state are empty.

    Libraries that partition parameters leave such tensors as placeholders.
    """
    empty = [0 in source.shape for source in sources if source.kind == TENSOR and "float" in source.dtype]
    if len(empty) > 1 and sum(empty) > len(empty) / 2:
        log.warning(_EMPTY, sum(empty), len(empty))


def _owner(owners: Callable[[str], int | None], key: str, size: int) -> int | None:
    owner = owners(key)
    if owner is not None and (type(owner) is not int or not 0 <= owner < size):
        raise InvalidInput(
            f"owners assigns {key!r} to rank {owner!r:.40}, but {size} ranks save: return a rank from 0 to "
            f"{size - 1}, or None if all ranks hold the same value",
            key=key,
        )
    return owner


def _drop(tree: Any, path: Sequence[Any]) -> None:
    """Remove a leaf from a tree. Do not remove items from lists, because the other items must keep their positions."""
    for element in path[:-1]:
        tree = tree[element]
    if isinstance(tree, dict):
        tree.pop(path[-1], None)  # a wrapper is already gone after its first tensor


def _inner_source(source: LocalEntry, outer: LeafValue) -> LocalEntry:
    """Return the entry of a tensor in a wrapper, which ranks share and compare like the wrapper."""
    is_parameter = isinstance(outer.value, torch.nn.Parameter)
    return changed(source, replicated=source.replicated or is_parameter, may_differ=False)


def tensor_source(
    key: str, value: Any, rank: int | None, *, frozen: bool = False, together: bool = False
) -> LocalEntry:
    """Return this rank's entry for a tensor. Raises InvalidInput, with the key, if the tensor cannot be stored.

    ``together``: whether other ranks take part in the save, and may hold the same tensor.
    """
    local = local_tensor(key, value)
    return LocalEntry(
        TENSOR, key, 0, rank, dtype_name(local.dtype), check_shape(local.shape), local.data, local.shards,
        local.replicated, None, frozen, together and may_differ(value, local), local.block,
    )  # fmt: skip


def stored_object(
    key: str, rank: int | None, encode: Callable[[Spill], tuple[bytes, bool]]
) -> tuple[ObjectEntry, list[LocalEntry]]:
    """Return an object, and the entries of its large buffers. A save stores these buffers in the same way as tensors.

    ``encode``: passes these buffers to its argument. It returns the remaining bytes, and whether they are a pickle.
    """
    parts: list[bytes] = []

    def spill(buffer: memoryview) -> int:
        parts.append(bytes(buffer))
        return len(parts) - 1

    data, pickled = encode(spill)
    sources = [LocalEntry(PART, key, number, rank, "uint8", (len(part),), part) for number, part in enumerate(parts)]
    return ObjectEntry(key, rank, data, len(parts), pickled), sources


def frozen_by(frozen: Frozen) -> Callable[[str], bool]:
    """Return ``frozen`` as a function of a key.

    Raises InvalidInput for a single string, and for any other wrong type.
    """
    if frozen is None:
        return lambda key: False
    if callable(frozen):
        return frozen
    patterns = None if isinstance(frozen, str) or not isinstance(frozen, Iterable) else list(frozen)
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise InvalidInput(f"frozen={frozen!r:.80} is not valid: pass a list of patterns, or a function of a key")
    return lambda key: any(fnmatchcase(key, pattern) for pattern in patterns)


def snapshot(prepared: Prepared, staging: Staging, threads: int) -> Prepared:
    """Copy all tensor data into ``staging``. Afterwards, the caller may change the original."""
    copies = iter(staging.copy(tensors_of(prepared), threads))
    sources = [
        changed(source, data=next(copies), block=None)
        if isinstance(source.data, torch.Tensor)
        else changed(source, shards=[Piece(piece.region, next(copies)) for piece in source.shards])
        for source in prepared.sources
    ]
    return replace(prepared, sources=sources)


def tensors_of(prepared: Prepared) -> list[torch.Tensor]:
    """Return the data of all pieces, in order."""
    return [data for source in prepared.sources for data in source.tensors]


def bytes_shared(prepared: Prepared) -> int:
    """Return the size of the tensors that another tensor of this rank already holds, such as tied weights."""
    tensors = tensors_of(prepared)
    return sum(one.nbytes for one in tensors) - sum(one.nbytes for one in distinct(tensors).values())


def _attachments(given: Mapping[str, bytes | bytearray | memoryview]) -> tuple[list[Attachment], list[LocalEntry]]:
    if not isinstance(given, Mapping):
        raise InvalidInput(f"attachments is a {type(given).__name__}: pass a dict that maps names to contents as bytes")
    inline, large = [], []
    for name, data in given.items():
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidInput(f"attachment {name!r} is a {type(data).__name__}: pass its contents as bytes")
        check_attachment_name(name)
        folder = next((above for above in map(str, PurePosixPath(name).parents) if above in given), None)
        if folder is not None:
            raise InvalidInput(f"attachment {folder!r} would be the folder of attachment {name!r}: rename one of them")
        content = bytes(data)  # `len` of a memoryview counts items, not bytes
        if len(content) < _INLINE_BYTES:
            inline.append(Attachment(name, content))
        else:
            large.append(LocalEntry(ATTACHMENT, name, 0, None, "uint8", (len(content),), content))
    return inline, large
