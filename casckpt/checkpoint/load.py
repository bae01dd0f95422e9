"""A load, from a manifest into tensors that are there (`load_into`) or into new ones (`read`).

Everything that can be known to be wrong is found before the first byte changes: missing keys, shapes, dtypes, holes.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from socket import gethostname
from typing import Any

import torch

from casckpt.checkpoint.arguments import Rename, renamer, usable_patterns
from casckpt.checkpoint.download import Download, Want
from casckpt.checkpoint.garbage import collecting_later
from casckpt.checkpoint.ranks import Ranks, telling
from casckpt.checkpoint.tied import Tied
from casckpt.checkpoint.workers import usable_threads
from casckpt.errors import Damaged, InvalidInput, Mismatch, MissingKey, NotFound, Refused
from casckpt.format.extents import ExtentTable
from casckpt.format.manifest import ATTACHMENT, PART, TENSOR, BlobRef, Entry, Manifest, ObjectEntry
from casckpt.format.names import ManifestId, TxId
from casckpt.format.regions import whole
from casckpt.format.tree import LIST, TUPLE, Container, Leaf, Node, Path, decode_tree, find, join, leaves
from casckpt.plan.reads import covers
from casckpt.repository import manifests
from casckpt.repository.commits import Commit
from casckpt.repository.repository import Repository
from casckpt.tensors.dtypes import converts, dtype_name, torch_dtype
from casckpt.tensors.memory import Destination
from casckpt.tensors.objects import decode_object, refuse_pickle
from casckpt.tensors.shards import LocalTensor, Piece, check_destination, check_in_place, local_tensor
from casckpt.tensors.state import LeafValue, check_replaceable, flatten, inflate, replace_leaves


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What a load was asked for."""

    strict: bool = True
    rename: Rename = None
    cast: bool = False
    verify: bool = True
    allow_pickle: bool = False
    threads: int = 4
    rank: int = 0
    ranks: int = 1
    ranks_here: int = 1  # on this host
    progress: Callable[[int], None] = lambda nbytes: None


def load_options(
    *, threads: int | None = None, progress: Callable[[int], None] | None = None, **rest: Any
) -> LoadOptions:
    """The arguments of a load, checked. Raises InvalidInput."""
    return LoadOptions(threads=usable_threads(threads), progress=progress or (lambda nbytes: None), **rest)


class Contents:
    """What a manifest holds for one rank: of values that each rank has for itself, its own, else that of rank 0."""

    def __init__(self, manifest: Manifest, rank: int) -> None:
        self.manifest = manifest
        self.numbers: dict[tuple[str, str, int], int] = {}
        self.objects: dict[str, ObjectEntry] = {}
        self._ranks: dict[tuple[str, str, int], int | None] = {}
        for number, entry in enumerate(manifest.body.entries):
            name = (entry.kind, entry.key, entry.index)
            if name not in self.numbers or entry.rank == rank:
                self.numbers[name] = number
        for one in manifest.body.objects:
            if one.key not in self.objects or one.rank == rank:
                self.objects[one.key] = one

    def tensor(self, key: str) -> tuple[int, Entry] | None:
        """(number, entry) of a tensor."""
        number = self.numbers.get((TENSOR, key, 0))
        return None if number is None else (number, self.manifest.body.entries[number])

    @cached_property
    def tree(self) -> Node:
        """The containers that the leaves stand in."""
        return decode_tree(self.manifest.body.tree)

    def keys(self) -> list[str]:
        """All keys of the state: tensors and objects."""
        return [key for kind, key, _ in self.numbers if kind == TENSOR] + list(self.objects)

    def parts(self, one: ObjectEntry) -> list[int]:
        """Numbers of the entries that hold the large buffers of an object."""
        try:
            return [self.numbers[PART, one.key, index] for index in range(one.parts)]
        except KeyError as error:
            raise Damaged(f"a part of object {one.key!r} stands nowhere in the manifest", key=one.key) from error


def load_together(
    repo: Repository, ranks: Ranks, state: Any, resolve: Callable[[], Commit], options: Callable[[], LoadOptions]
) -> tuple[Commit, tuple[str, ...], tuple[str, ...]]:
    """Fill the tensors of ``state`` in place and replace its other leaves; every rank of ``ranks`` calls it.

    Returns (commit, missing keys, unread keys). Rank 0 alone resolves, and reads the manifest for those that do not
    hold it. What is wrong on any rank is raised on all of them, before anything changes on one.
    """
    settings: list[LoadOptions] = []

    def hello() -> tuple[str, set[tuple[TxId, ManifestId]]]:
        given = options()
        settings.append(replace(given, progress=telling(ranks, given.progress)))
        return gethostname(), repo.manifests.names()

    def find(told: Sequence[tuple[str, set[tuple[TxId, ManifestId]]]]) -> list[tuple[Commit, Manifest | None, int]]:
        commit = resolve()
        manifest, name = manifests.get(repo, commit), (commit.committed.uploader, commit.id)
        on_host = Counter(host for host, _ in told)
        answers = {}  # one object for all that are told the same
        for host, names in told:
            answers[host, name in names] = (commit, None if name in names else manifest, on_host[host])
        return [answers[host, name in names] for host, names in told]

    commit, told, ranks_here = ranks.exchange(hello, find)
    if told is not None and ranks.rank != 0:
        repo.manifests.add(commit.committed.uploader, told, told.nbytes)
    loading = _Loading(told or manifests.get(repo, commit), replace(settings[0], ranks_here=ranks_here))
    ranks.exchange(lambda: loading.plan(state), lambda done: done)
    ranks.exchange(lambda: loading.run(repo, state), lambda done: done)
    return commit, loading.missing, loading.unread


def wanted_blobs(repo: Repository, manifest: Manifest, state: Any, options: LoadOptions) -> list[BlobRef]:
    """The blobs that a load into ``state`` reads. Raises MissingKey, Mismatch or InvalidInput, as the load would."""
    loading = _Loading(manifest, options)
    loading.plan(state)
    return loading.blobs(repo)


class _Loading:
    """One rank's part of a load into a template."""

    def __init__(self, manifest: Manifest, options: LoadOptions) -> None:
        self._plan = _Plan(Contents(manifest, options.rank), options)
        self.missing: tuple[str, ...] = ()
        self.unread: tuple[str, ...] = ()

    @collecting_later()
    def plan(self, state: Any) -> None:
        """Check all of it. Raises MissingKey, Mismatch or InvalidInput."""
        contents, options = self._plan.contents, self._plan.options
        flat = flatten(state)
        name_of = renamer(options.rename)
        names = {key: name_of(key) for key in flat.leaves}
        self.missing = tuple(key for key, leaf in flat.leaves.items() if not self._plan.add(key, names[key], leaf))
        if self.missing and options.strict:
            raise _missing_error(contents.manifest, self.missing, names, contents.keys())
        check_replaceable(state, self._plan.replaced)
        self.unread = tuple(key for key in contents.keys() if key not in self._plan.named)  # noqa: SIM118 - no mapping

    def blobs(self, repo: Repository) -> list[BlobRef]:
        """What is to be read."""
        return self._plan.download(repo).blobs(self._plan.wants())

    def run(self, repo: Repository, state: Any) -> None:
        """Read, and put the new leaves in. Raises Damaged, StorageError."""
        replace_leaves(state, self._plan.run(repo))


class _Plan:
    """What is to be read for a template, checked as it is added."""

    def __init__(self, contents: Contents, options: LoadOptions) -> None:
        self.contents, self.options = contents, options
        self._wants: list[Want] = []
        self._values: dict[str, Any] = {}
        self._objects: dict[str, tuple[ObjectEntry, list[torch.Tensor]]] = {}
        self._below: dict[str, tuple[Node, str, _Plan]] = {}
        self._tied = Tied()
        self.named: set[str] = set()

    @property
    def replaced(self) -> list[str]:
        """Keys of the template that get new values."""
        return [*self._values, *self._objects, *self._below]

    def add(self, key: str, name: str, leaf: LeafValue) -> bool:
        """One leaf of the template, ``key``, to be filled from ``name``; False if the checkpoint has no such key."""
        found = self.contents.tensor(name)
        one = self.contents.objects.get(name)
        if found is None and one is None:
            return self._add_container(key, name, leaf)
        self.named.add(name)
        if leaf.is_tensor:
            if found is None:
                raise Mismatch(f"{key!r} is a tensor here, but plain data in the checkpoint (key {name!r})", key=key)
            check_in_place(key, leaf.value)
            self._add_tensor(key, local_tensor(key, leaf.value), *found)
        elif found is not None:
            if leaf.value is not None:
                kind = type(leaf.value).__name__
                raise Mismatch(f"{key!r} is a tensor in the checkpoint (key {name!r}), but {kind} here", key=key)
            self._values[key] = self.new_tensor(*found, torch.device("cpu"))
        elif one is not None:
            self._add_object(key, one)
        return True

    def _add_container(self, key: str, name: str, leaf: LeafValue) -> bool:
        """A leaf where the checkpoint has a mapping or list: in place of None, or of a list, all of it is made."""
        node = find(self.contents.tree, name)
        if not isinstance(node, Container):
            return False
        if not (leaf.value is None or (isinstance(leaf.value, list | tuple) and node.kind in (LIST, TUPLE))):
            kind = "a tensor" if leaf.is_tensor else type(leaf.value).__name__
            raise Mismatch(f"{key!r} is {kind} here, but a {node.kind} in the checkpoint (key {name!r})", key=key)
        below = _Plan(self.contents, self.options)
        for path, _ in leaves(node):
            below.new(join((name, *path)), torch.device("cpu"))
        self.named.update(below.named)
        self._below[key] = (node, name, below)
        return True

    def _add_tensor(self, key: str, local: LocalTensor, number: int, entry: Entry) -> None:
        if local.shape != entry.shape:
            raise Mismatch(
                f"{key!r} has shape {list(local.shape)} here, but {list(entry.shape)} in the checkpoint "
                f"(key {entry.key!r})",
                key=key,
            )
        if dtype_name(local.dtype) != entry.dtype:
            possible = converts(torch_dtype(entry.dtype), local.dtype)
            if not possible or not self.options.cast:
                raise Mismatch(
                    f"{key!r} is {dtype_name(local.dtype)} here, but {entry.dtype} in the checkpoint; "
                    + ("pass cast=True to convert" if possible else "torch cannot convert one to the other"),
                    key=key,
                )
        table = self.contents.manifest.extents(entry)
        for piece in local.pieces:
            check_destination(key, piece.data)
            if not covers(table, piece.region):
                raise Damaged(f"the checkpoint holds {key!r} only in part; {piece.region} is not all there", key=key)
            if piece.region.numel:
                self._tied.add(key, piece.data, entry.dtype, table, piece.region)
            self._want(number, table, piece, entry.dtype)

    def _want(self, number: int, table: ExtentTable, piece: Piece, stored: str) -> None:
        if piece.region.numel:
            self._wants.append(Want(number, Destination(piece.region, piece.data, torch_dtype(stored)), table))

    def new_tensor(self, number: int, entry: Entry, device: torch.device) -> torch.Tensor:
        """A tensor for the whole of an entry, to be filled by `run`. Raises Damaged if the extents have holes."""
        table = self.contents.manifest.extents(entry)
        if not covers(table, whole(entry.shape)):  # before memory is asked for: a hostile shape is caught here
            raise Damaged(f"the checkpoint holds {entry.key!r} ({entry.nbytes} bytes) only in part", key=entry.key)
        data = _empty(entry, device)
        self._want(number, table, Piece(whole(entry.shape), data), entry.dtype)
        return data

    def _add_object(self, key: str, one: ObjectEntry) -> None:
        if one.pickled and not self.options.allow_pickle:
            refuse_pickle(key, one.data, one.parts)  # before anything changes
        cpu = torch.device("cpu")
        entries = self.contents.manifest.body.entries
        parts = [self.new_tensor(number, entries[number], cpu) for number in self.contents.parts(one)]
        self._objects[key] = (one, parts)

    def new(self, key: str, device: torch.device) -> None:
        """A leaf that is to be made: a tensor on ``device``, or an object."""
        found = self.contents.tensor(key)
        self.named.add(key)
        if found is not None:
            self._values[key] = self.new_tensor(*found, device)
        elif key in self.contents.objects:
            self._add_object(key, self.contents.objects[key])
        else:
            raise Refused(
                f"manifest {self.contents.manifest.id} names {key!r} in its tree but holds nothing for it", key=key
            )

    def run(self, repo: Repository) -> dict[str, Any]:
        """Read everything; the new leaves by template key."""
        self.download(repo).run(self.wants())
        return self._built()

    def wants(self) -> list[Want]:
        """All that is to be read."""
        return [*self._wants, *(want for _, _, below in self._below.values() for want in below.wants())]

    def download(self, repo: Repository) -> Download:
        """What reads it."""
        options, manifest = self.options, self.contents.manifest
        return Download(
            repo, manifest, options.verify, options.threads, options.progress, options.ranks, options.ranks_here
        )

    def _built(self) -> dict[str, Any]:
        values = dict(self._values)
        for key, (one, parts) in self._objects.items():
            values[key] = self._decoded(key, one, parts)
        for key, (node, name, below) in self._below.items():
            values[key] = below._inflated(node, name)
        return values

    def _inflated(self, node: Node, name: str) -> Any:
        """The container at ``name``, of which this plan has all the leaves."""
        values = self._built()
        return inflate(node, lambda path, _: values[f"{name}.{path}"], lambda _: True)

    def _decoded(self, key: str, one: ObjectEntry, parts: Sequence[torch.Tensor]) -> Any:
        def load(index: int) -> memoryview:
            if not 0 <= index < len(parts):
                raise Refused(f"object {key!r} names a part that the manifest does not have", key=key)
            return parts[index].numpy().data

        return decode_object(key, one.data, one.pickled, allow_pickle=self.options.allow_pickle, load=load)


def read(
    repo: Repository, manifest: Manifest, *, keys: Sequence[str] | None, device: torch.device, options: LoadOptions
) -> Any:
    """New tensors on ``device`` and the other leaves, nested as they were saved; ``keys``: fnmatch patterns."""
    keys = usable_patterns(keys)
    contents = Contents(manifest, options.rank)
    tree = decode_tree(manifest.body.tree)
    plan = _Plan(contents, options)
    names = [join(path) for path, _ in leaves(tree)]
    for key in names:
        if _matches(key, keys):
            plan.new(key, device)
    if keys is not None:
        _check_used(manifest, keys, list(_names(tree, ())))
    values = plan.run(repo)
    return inflate(tree, lambda key, leaf: values[key], lambda key: _matches(key, keys))


def values_at(repo: Repository, contents: Contents, keys: Sequence[str], options: LoadOptions) -> dict[str, Any]:
    """What stands at flat keys, leaves or containers with all below them, in new tensors on the CPU.

    Raises MissingKey for one that is not there.
    """
    manifest, plan = contents.manifest, _Plan(contents, options)
    for key in keys:
        if not plan.add(key, key, LeafValue(key, (key,), None, False, False)):
            raise MissingKey(f"{manifest.body.run}@{manifest.body.step} lacks {key!r}", keys=(key,))
    return plan.run(repo)


def _matches(key: str, patterns: Sequence[str] | None) -> bool:
    return patterns is None or any(fnmatchcase(key, pattern) for pattern in patterns)


def _names(node: Node, path: Path) -> Iterator[str]:
    """The flat keys of all leaves, and of the containers that were saved empty."""
    if isinstance(node, Leaf) or not node.children:
        yield join(path)
    else:
        for element, child in node.children:
            yield from _names(child, (*path, element))


def _check_used(manifest: Manifest, patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise MissingKey(
                f"nothing in {manifest.body.run}@{manifest.body.step} matches {pattern!r}; casckpt show lists its keys",
                keys=(pattern,),
            )


def read_attachment(repo: Repository, manifest: Manifest, name: str, options: LoadOptions) -> bytes:
    """The contents of one attachment. Raises NotFound."""
    for short in manifest.body.attachments:
        if short.name == name:
            return short.data
    number = Contents(manifest, options.rank).numbers.get((ATTACHMENT, name, 0))
    if number is None:
        raise NotFound(f"{manifest.body.run}@{manifest.body.step} has no attachment {name!r}")
    plan = _Plan(Contents(manifest, options.rank), options)
    data = plan.new_tensor(number, manifest.body.entries[number], torch.device("cpu"))
    plan.run(repo)
    return data.numpy().tobytes()


def _empty(entry: Entry, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises where memory, or the device itself, is lacking
        raise InvalidInput(
            f"{entry.key!r} ({entry.nbytes} bytes) cannot be made on {device}: {error}; give another device",
            key=entry.key,
        ) from error


def _missing_error(
    manifest: Manifest, missing: Sequence[str], names: Mapping[str, str], have: Sequence[str]
) -> MissingKey:
    listed = ", ".join(repr(names[key]) for key in missing[:5]) + (
        f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    )
    near = difflib.get_close_matches(names[missing[0]], have, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return MissingKey(
        f"{manifest.body.run}@{manifest.body.step} lacks {listed}.{hint} Pass strict=False to leave them "
        "as they are, or rename= to map them",
        keys=tuple(missing),
    )


__all__ = ["ATTACHMENT", "Contents", "LoadOptions", "load_together", "read", "read_attachment", "values_at"]
