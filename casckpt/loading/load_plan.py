"""The plan of a load: which entry of the checkpoint fills which leaf, and which bytes it reads.

Every leaf is checked when it is added, before anything is read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from types import NoneType
from typing import Any, Final, TypeAlias

import torch

from casckpt.base.parallel import usable_threads
from casckpt.base.progress import Progress
from casckpt.contents.checkpoint import Frames
from casckpt.contents.contents import Contents
from casckpt.errors import Damaged, InvalidInput, Mismatch, Refused
from casckpt.format.regions import whole
from casckpt.format.sections.index import Entry, StoredObject
from casckpt.format.tree import Node, Wrapper, find, join, kind_of, leaves
from casckpt.loading.entry_reader import EntryReader, RegionRequest
from casckpt.loading.job_reads import JobReads, Needs, passing
from casckpt.loading.mapped import MappedTensors
from casckpt.loading.options import LoadOptions
from casckpt.loading.tied_tensors import Content, TiedTensors
from casckpt.loading.update import Update, plan_update, update
from casckpt.plan.reads import covers
from casckpt.repository.repository import Repository
from casckpt.tensors.dtensors import is_dtensor
from casckpt.tensors.dtypes import check_cast, dtype_name, torch_dtype
from casckpt.tensors.kinds import PLAIN
from casckpt.tensors.memory import Destination, new_empty
from casckpt.tensors.objects import decode_object, refuse_pickle
from casckpt.tensors.shards import LocalTensor, check_apart, check_in_place, local_tensor
from casckpt.tensors.state import LeafValue, inflate

_Planned: TypeAlias = tuple[EntryReader, Sequence[RegionRequest], Sequence[RegionRequest]]
"""A reader, the requests that are filled together, and those that are filled one after the other."""

_ATOMS: Final = frozenset((NoneType, bool, int, float, str, bytes))


@dataclass(frozen=True)
class Entries:
    """A template mapping, ``target``, and the saved mapping, which ``decode`` returns.

    ``key``: the key of the mapping in the template. ``name``: its key in the checkpoint. ``rename``: the load's
    ``rename``. ``lacking``: the flat keys that only the template has. ``unread``: the flat keys that only the
    checkpoint has.
    """

    key: str
    name: str
    target: Mapping[Any, Any]
    decode: Callable[[], Any]
    rename: Callable[[str], str]
    lacking: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def compare(self, key: str, name: str, target: Any, saved: Any) -> None:
        """Compare the items of the mapping ``key`` in the template with those of ``name`` in the checkpoint.

        Raises Mismatch and InvalidInput.
        """
        if not (isinstance(saved, Mapping) and isinstance(target, Mapping)):
            here, there = type(target).__name__, type(saved).__name__
            raise Mismatch(f"{key!r} is a {here} here, but a {there} in the checkpoint (key {name!r})", key=key)
        if not isinstance(target, MutableMapping):
            raise InvalidInput(f"{key!r}: a {type(target).__qualname__} cannot be modified; pass a dict", key=key)
        for element, value in target.items():
            here, there = f"{key}.{element}", f"{name}.{element}"
            if (renamed := self.rename(here)) not in (here, there):
                raise no_entry(here, renamed, self.key, self.name)
            if element not in saved:
                self.lacking.append(here)
                continue
            one = saved[element]
            if _is_filled(value) or (isinstance(one, dict) and value is not None and not isinstance(value, Mapping)):
                self.compare(here, there, value, one)
        self.unread.extend(f"{name}.{element}" for element in saved if element not in target)


def no_entry(key: str, renamed: str, mapping: str, name: str) -> InvalidInput:
    """Return the error for a ``rename`` that maps a key in ``mapping`` to an item of the single object ``name``."""
    return InvalidInput(
        f"rename returns {renamed!r} for {key!r}, but {name!r} is a single object in the checkpoint, and its "
        f"entries keep their names. Map the whole mapping, with rename={{{re.escape(mapping)!r}: {name!r}}}, or read "
        f"the entries with store.read(ref, keys=[{name!r}])",
        key=key,
    )


def fill_entries(target: Any, saved: Any) -> None:
    """Set the items of ``target`` to the values in ``saved``."""
    nested = {element for element, value in target.items() if _is_filled(value)}
    for element in nested & saved.keys():
        fill_entries(target[element], saved[element])
    target.update({element: saved[element] for element in target if element in saved and element not in nested})


def _is_filled(value: Any) -> bool:
    if type(value) in _ATOMS:  # the usual case
        return False
    return isinstance(value, Mapping) and len(value) > 0 and not isinstance(value, Counter | defaultdict)


class LoadPlan:
    """The reads of a load, leaf by leaf. Leaves are first added and checked, then read, and finally built.

    ``named``: the checkpoint keys that it reads. ``frames``: the frames that an update decoded. They are set by `run`.
    """

    def __init__(self, contents: Contents, options: LoadOptions) -> None:
        self.contents, self.options = contents, options
        self._wants: list[RegionRequest] = []
        self._values: dict[str, Any] = {}
        self._objects: dict[str, tuple[StoredObject, list[torch.Tensor]]] = {}
        self._below: dict[str, tuple[Node, str, LoadPlan]] = {}
        self._entries: dict[str, Entries] = {}
        self._tied = TiedTensors(contents.manifest)
        self._planned: _Planned | None = None
        self._update: Update | None = None
        self._mapped = MappedTensors(contents) if options.mapped else None
        self.named: set[str] = set()
        self.frames: Frames = {}
        held = options.held
        self._not_held = set(() if held is None else (*held.missing_keys, *held.mismatched_keys))
        self._unread = set(() if held is None else held.unread_keys)

    @property
    def replaced(self) -> list[str]:
        """The template keys that receive new values."""
        return [*self._values, *self._objects, *self._below, *self._entries]

    def add(self, key: str, name: str, leaf: LeafValue) -> bool:
        """Add the template leaf ``key``, which is filled from ``name``.

        Return False if the checkpoint lacks ``name``.
        """
        entry = self.contents.tensors.get(name)
        stored = None if entry is not None else self.contents.objects.get(name)
        if entry is None and stored is None:
            return self._add_container(key, name, leaf)
        self.named.add(name)
        if entry is not None and self.contents.manifest.lacks(entry):
            return False
        if leaf.is_tensor:
            if entry is None:
                raise Mismatch(f"{key!r} is a tensor here, but plain data in the checkpoint (key {name!r})", key=key)
            if type(leaf.value) not in PLAIN:
                check_in_place(key, leaf.value)
            self._add_tensor(leaf, local_tensor(key, leaf.value), entry)
        elif entry is not None:
            if leaf.value is not None:
                kind = type(leaf.value).__name__
                raise Mismatch(f"{key!r} is a tensor in the checkpoint (key {name!r}), but {kind} here", key=key)
            self._values[key] = self.new_tensor(entry, torch.device("cpu"))
        elif stored is not None:
            self._add_object(key, stored)
        return True

    def fills(self, leaf: LeafValue) -> bool:
        """Return whether a different key fills a tensor's memory, as with tied weights."""
        if not leaf.is_tensor:
            return False
        try:
            local = local_tensor(leaf.key, leaf.value)
        except InvalidInput:  # a load never fills this kind of tensor
            return False
        return prod(local.shape) > 0 and all(self._tied.has(piece.data) for piece in local.pieces if piece.region.numel)

    def _add_container(self, key: str, name: str, leaf: LeafValue) -> bool:
        """Add a template leaf that receives a whole container of the checkpoint.

        The load creates the container, and replaces None or a list with it.
        """
        node = find(self.contents.tree, name)
        if node is None or isinstance(node, int):
            return False
        if not (leaf.value is None or (isinstance(leaf.value, list | tuple) and isinstance(node, list | tuple))):
            kind = "a tensor" if leaf.is_tensor else type(leaf.value).__name__
            hint = ""
            if leaf.is_tensor and isinstance(node, Wrapper):
                hint = "; call dequantize() (sparse: to_dense()) on what store.read returns, or on each of its parts"
            raise Mismatch(
                f"{key!r} is {kind} here, but a {kind_of(node)} in the checkpoint (key {name!r}){hint}", key=key
            )
        self._below[key] = (node, name, self._plan_below(node, name))
        return True

    def _plan_below(self, node: Node, name: str) -> LoadPlan:
        below = LoadPlan(self.contents, self.options)
        for path, _ in leaves(node):
            below.new(join((name, *path)), torch.device("cpu"))
        self.named.update(below.named)
        return below

    def _add_tensor(self, leaf: LeafValue, local: LocalTensor, entry: Entry) -> None:
        key, contents = leaf.key, self.contents
        if local.shape != entry.shape:
            raise Mismatch(
                f"{key!r} has shape {list(local.shape)} here, but {list(entry.shape)} in the checkpoint "
                f"(key {entry.key!r}). Create it with that shape to continue; ignore_mismatched= leaves it unchanged",
                key=key,
            )
        if dtype_name(local.dtype) != entry.dtype:
            check_cast(
                key,
                torch_dtype(entry.dtype),
                local.dtype,
                cast=self.options.cast and leaf.outer is None,
                where="convert",
            )
        table = None if contents.is_single_cell(entry) else contents.manifest.extents(entry)
        is_new = key in self._not_held or entry.key in self._unread
        stored, part_of = torch_dtype(entry.dtype), leaf.value if is_dtensor(leaf.value) else None
        for piece in local.pieces:
            region, data = piece.region, piece.data
            check_apart(key, data)
            if table is not None and not covers(table, region):
                raise Damaged(f"the checkpoint holds only a part of {key!r}; {region} is incomplete", key=key)
            if region.lo < region.hi:
                self._tied.add(Content(key, data, entry, region))
                destination = Destination(region, data, stored, part_of)
                self._wants.append(RegionRequest(entry.number, destination, table, is_new))

    def new_tensor(self, entry: Entry, device: torch.device) -> torch.Tensor:
        """Create a tensor for a whole entry. `run` fills it. Raises Damaged if the extents have holes."""
        mapped = None if self._mapped is None else self._mapped.new(entry)
        if mapped is not None:
            return mapped
        table = None if self.contents.is_single_cell(entry) else self.contents.extents(entry)
        data = new_empty(entry, device)
        if entry.numel:
            destination = Destination(whole(entry.shape), data, torch_dtype(entry.dtype))
            self._wants.append(RegionRequest(entry.number, destination, table, is_new=True))
        return data

    def _add_object(self, key: str, stored: StoredObject) -> None:
        if stored.pickled and not self.options.allow_pickle:
            refuse_pickle(key, self.contents.manifest.data(stored), stored.parts)  # raises before anything changes
        parts = [self.new_tensor(entry, torch.device("cpu")) for entry in self.contents.parts(stored)]
        self._objects[key] = (stored, parts)

    def new(self, key: str, device: torch.device) -> None:
        """Add a leaf that the load creates: a tensor on ``device``, or an object."""
        entry = self.contents.tensors.get(key)
        self.named.add(key)
        if entry is not None:
            self._values[key] = self.new_tensor(entry, device)
        elif key in self.contents.objects:
            self._add_object(key, self.contents.objects[key])
        else:
            raise self.contents.lacks(key)

    def add_entries(self, key: str, name: str, target: Mapping[Any, Any], rename: Callable[[str], str]) -> Entries:
        """Add a template mapping that is filled from the single object ``name``."""
        self.named.add(name)
        stored = self.contents.objects[name]
        if stored.pickled and stored.parts:
            raise Mismatch(f"{key!r} is a mapping here, but a pickle in the checkpoint: put None in its place", key=key)
        self._add_object(key, stored)
        decode = partial(self._decoded, key, *self._objects.pop(key))
        entries = self._entries[key] = Entries(key, name, target, decode, rename)
        entries.compare(key, name, target, entries.decode())  # the keys are known before the buffers are read
        return entries

    def first_entry(self, name: str) -> str | None:
        """Return the key of the first item of a mapping that was saved as one object.

        Return None for other values.
        """
        stored = self.contents.objects.get(name)
        if stored is None or stored.pickled:
            return None
        parts = [new_empty(entry, torch.device("cpu")) for entry in self.contents.parts(stored)]
        saved = self._decoded(name, stored, parts)  # only the keys are needed
        return join((name, next(iter(saved)))) if isinstance(saved, dict) and saved else None

    def check_shared(self, repo: Repository) -> None:
        """Raise Mismatch if any memory would be filled twice, with different values. Changes nothing."""
        self._tied.check(replace(self.reader(repo), reads=None, progress=Progress(None, self.options.alive)))

    def _plan(self, repo: Repository) -> _Planned:
        reader = self.reader(repo)
        if self._mapped is not None:
            self._wants += self._mapped.fill(reader)
        planned, options = (reader, *self._tied.in_turns(self.wants())), self.options
        if options.updates:
            self._update = plan_update(reader, planned[1], options.held, options.rank, check=options.check)
        self._planned = planned
        return planned

    def needs(self, repo: Repository) -> Needs | None:
        """Plan the reads. Return the blobs that this rank can share with other hosts, or None if it reads alone."""
        if self.options.ranks_here == self.options.ranks:
            return None
        reader, together, _ = self._plan(repo)
        if reader.reads is None:
            return None
        ranges = reader.plan(together).ranges if self._update is None else self._update.ranges()
        return Needs.of(repo, self.contents.manifest, ranges, reader.reads)

    def run(self, repo: Repository, job: JobReads | None = None) -> dict[str, Any]:
        """Read everything. Return the new leaves, by template key. ``job``: the reads that hosts share."""
        reader, together, alone = self._planned or self._plan(repo)
        with reader.sharing(), passing(job, repo, self.contents.manifest, reader.reads):
            if self._update is not None:
                self.frames = update(self._update)
            else:
                reader.fill(together)
            for want in alone:
                reader.fill([want])
        return self._built()

    def wants(self) -> list[RegionRequest]:
        """Return all requests."""
        return [*self._wants, *(want for _, _, below in self._below.values() for want in below.wants())]

    def reader(self, repo: Repository) -> EntryReader:
        """Return the reader for the requests."""
        options, manifest = self.options, self.contents.manifest
        threads, progress = usable_threads(options.threads), Progress(options.progress, options.alive)
        reads = repo.host_reads(manifest.head.digest, options.load_id, options.rank, options.sharing, options.patience)
        return EntryReader(
            repo, manifest, options.verify, threads, progress, options.ranks, options.ranks_here, reads=reads
        )

    def _built(self) -> dict[str, Any]:
        values = dict(self._values)
        for key, (stored, parts) in self._objects.items():
            values[key] = self._decoded(key, stored, parts)
        for key, (node, name, below) in self._below.items():
            values[key] = below._inflated(node, name)
        saved = [entries.decode() for entries in self._entries.values()]
        for (key, entries), mapping in zip(self._entries.items(), saved, strict=True):  # after all entries were decoded
            fill_entries(entries.target, mapping)
            values[key] = entries.target
        return values

    def _inflated(self, node: Node, name: str) -> Any:
        """Return the container at ``name``, all of whose leaves are in this plan."""
        values = self._built()
        return inflate(node, lambda path, _: values[f"{name}.{path}"], lambda _: True)

    def _decoded(self, key: str, stored: StoredObject, parts: Sequence[torch.Tensor]) -> Any:
        def load(index: int) -> memoryview:
            if not 0 <= index < len(parts):
                raise Refused(f"object {key!r} names a part that the manifest does not have", key=key)
            return parts[index].numpy().data

        data = self.contents.manifest.data(stored)
        return decode_object(key, data, stored.pickled, allow_pickle=self.options.allow_pickle, load=load)
