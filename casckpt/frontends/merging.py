"""Merges checkpoints: stores a linear combination of their tensors as a new checkpoint, in bounded memory.

The tensors are read, combined and stored window by window. A checkpoint that shares cells with the one before it is
read as an update of that one, so a cell that consecutive checkpoints share is read once.

If the weights sum to exactly 1, a cell that is equal in all checkpoints is the result, and the save names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import chain
from typing import TYPE_CHECKING, Final, Unpack

import torch

from casckpt.base.groups import in_batches, runs
from casckpt.base.parallel import in_parallel, usable_threads
from casckpt.base.progress import Progress
from casckpt.base.text import listed
from casckpt.contents.checkpoint import Checkpoint, Frames, warn_if_forgotten
from casckpt.contents.contents import Contents
from casckpt.errors import CasckptError, InvalidInput, Mismatch, MissingKey
from casckpt.format import blob, dtypes
from casckpt.format.extents import StoredCell, build
from casckpt.format.manifest import Attachment, ObjectEntry
from casckpt.format.regions import Box
from casckpt.format.sections.index import ATTACHMENT, TENSOR, Entry, Name, StoredObject
from casckpt.format.tree import Wrapper, rebuild
from casckpt.frontends.views.model_part import is_training_state, without_training_state
from casckpt.loading.entry_reader import EntryReader
from casckpt.loading.options import check_used, usable_patterns
from casckpt.loading.regions import EntrySlice, RegionReader, plan_windows, requests, too_large, views
from casckpt.loading.update import Update
from casckpt.plan.averages import Term, terms_of
from casckpt.plan.reuse import ReusableCells
from casckpt.repository.repository import Repository
from casckpt.saving.local_entries import LocalEntry
from casckpt.saving.options import SaveOptions
from casckpt.saving.prepare import Prepared
from casckpt.saving.rounds import ComputedState, Rounds, save_in_rounds
from casckpt.storage.buffers import AlignedBuffer, BufferPool
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.memory import tensor_over
from casckpt.tensors.objects import TORCH_EXTENSIONS
from casckpt.tensors.shards import Piece
from casckpt.tensors.state import encode_tree

if TYPE_CHECKING:
    from casckpt.store.exports import MergeOptions
    from casckpt.store.store import Store

_ROUND_BYTES: Final = 32 << 20  # of sums whose results are stored together
_WINDOW_BYTES: Final = 8 << 20  # of sums that one thread computes together, at least
_BLOCK = (32 << 10) - 16  # elements that are combined together: in the CPU's cache, and too few for torch's threads
_ALIGN = 64  # bytes
_NAMED = 8
_ROUNDED = 0.01  # weights such as 0.33, 0.33, 0.33 are meant to sum to 1
_WIDER = 8  # an accumulator has at most this multiple of the size of an element, unless both are large
_REAL = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)
_COMPLEX = ("complex32", "complex64", "complex128")
_OTHERS = "select other keys with keys= (--keys)"

log = logging.getLogger("casckpt")


def merge(
    store: Store,
    chosen: Sequence[Checkpoint],
    *,
    run: str,
    step: int,
    dtype_of: Callable[[Name, torch.dtype], str] | None = None,
    **given: Unpack[MergeOptions],
) -> Checkpoint:
    """Merge the ``chosen`` checkpoints, which may be in other stores. See `casckpt.Store.merge`.

    ``dtype_of``: returns the dtype of a result, given its name and the dtype in which it is computed. A merge with this
    argument does not log its notes.
    """
    if not chosen:
        raise InvalidInput("there is nothing to merge: name at least one checkpoint")
    terms = terms_of(len(chosen), given.get("weights"), given.get("ema"))
    weighed = [(checkpoint, term) for checkpoint, term in zip(chosen, terms, strict=True) if term.weight]
    dtype = given.get("dtype")
    merging = _Merging(
        store.repository,
        [_Version(checkpoint, term) for checkpoint, term in weighed],
        None if dtype is None else _real(str(dtype).removeprefix("torch.")),
        # the sum of large fractions is slow
        is_average=given.get("weights") is None or sum(term.weight for _, term in weighed) == 1,
        progress=Progress(given.get("progress")),
        dtype_of=dtype_of,
    )
    keep = usable_patterns(given.get("keep"), "keep") or ()
    merging.choose(usable_patterns(given.get("keys")), keep)
    total = float(sum(term.weight for _, term in weighed))
    if given.get("weights") is not None and min(abs(total), abs(total - 1)) > _ROUNDED:  # 0: a task vector
        merging.note(f"the weights sum to {total:g}, not to 1", [f"{each.run}@{each.step}" for each, _ in weighed])
    metadata = given.get("metadata")
    metadata = merging.last.contents.manifest.metadata if metadata is None else metadata
    origins = [{"id": one.id, "run": one.run, "step": one.step, "weight": float(by.weight)} for one, by in weighed]
    options = SaveOptions(
        run=run, step=step, overwrite=given.get("overwrite", False), metadata=metadata,
        lineage={"merged_from": origins},
    ).checked()  # fmt: skip
    with merging.running:
        saved = save_in_rounds(store.repository, merging.state(), options, merging.progress)
    return Checkpoint(store.repository, saved, notes=tuple(merging.notes))


def _real(dtype: str) -> str:
    if dtype not in _REAL:
        raise InvalidInput(f"dtype={dtype!r:.40} is not valid: pass one of {', '.join(_REAL)}")
    return dtype


class _Version:
    """One of the checkpoints to merge."""

    def __init__(self, checkpoint: Checkpoint, term: Term) -> None:
        warn_if_forgotten(checkpoint.commit)
        if checkpoint.healthy is False:
            log.warning("%s is marked unhealthy, and is part of this merge", checkpoint)
        self.checkpoint, self.repo, self.term = checkpoint, checkpoint.repo, term
        self.contents = Contents.open(self.repo, checkpoint.commit, 0, TORCH_EXTENSIONS)
        self.entries = {entry.name: entry for entry in self.contents.manifest.entries}
        self.objects = {(stored.key, stored.rank): stored for stored in self.contents.manifest.objects}
        self.blobs = {(blob.uploader, blob.hash) for blob in self.contents.manifest.blobs}
        self.reader = EntryReader(
            self.repo, self.contents.manifest, True, usable_threads(None), ranks_here=usable_threads(None)
        )

    def cells(self, name: Name) -> Iterator[StoredCell]:
        """Iterate over the cells of an entry."""
        return self.contents.manifest.extents(self.entries[name]).stored_cells()


@dataclass
class _Merging:
    """One merge. ``dtype``: of the results, or None for their own.

    ``is_average``: whether the weights sum to 1. ``entries``, ``objects``: what to store, of the last version.
    ``combined``: the names of the entries to combine, with the dtype to compute in. ``is_chosen``: whether to store a
    container that was saved empty. ``running``: the rounds, which end with it. ``dtype_of``: see `merge`.
    """

    repo: Repository
    versions: Sequence[_Version]
    dtype: str | None
    is_average: bool
    progress: Progress
    dtype_of: Callable[[Name, torch.dtype], str] | None = None
    notes: list[str] = field(default_factory=list)
    entries: Sequence[Entry] = ()
    objects: Sequence[StoredObject] = ()
    combined: dict[Name, torch.dtype] = field(default_factory=dict)
    is_chosen: Callable[[str], bool] = bool
    running: ExitStack = field(default_factory=ExitStack)

    @property
    def last(self) -> _Version:
        """The last version, which has everything that is not combined."""
        return self.versions[-1]

    # what to merge

    def choose(self, patterns: Sequence[str] | None, keep: Sequence[str]) -> None:
        """Choose what to store. Raises MissingKey and Mismatch for what cannot be combined."""
        contents, manifest = self.last.contents, self.last.contents.manifest
        for given in (patterns, keep):
            check_used(given, [*contents.keys(), *contents.wrappers], contents.where)
        kept = _matching(contents, keep)
        wanted = {key for version in self.versions for key in _matching(version.contents, patterns)} - kept
        for version in self.versions:
            version.contents.ready(wanted | kept)
        if (misfit := next(self._misfits(wanted), None)) is not None:
            raise misfit
        self.entries = [one for one in manifest.entries if one.kind == ATTACHMENT or one.key in wanted | kept]
        self.objects = [one for one in manifest.objects if one.key in wanted | kept]
        named = [entry for entry in self.entries if entry.kind != ATTACHMENT and entry.key in wanted]
        self.combined = {entry.name: dtype for entry in named if (dtype := self._computed_in(entry)) is not None}
        if not self.combined:
            raise MissingKey(
                f"there is nothing to combine in {contents.where}: `casckpt show --tensors` lists its keys; select "
                "tensors of floats with keys= (--keys)"
            )
        contents.check_whole(self.entries)

        def is_chosen(key: str) -> bool:
            by_default = patterns is None and not is_training_state(key)
            return by_default or manifest.matches(key, [*(patterns or ()), *keep])

        self.is_chosen = is_chosen
        differing = {one.key for one in named if one.name not in self.combined and not self._is_same(one)}
        differing |= {one.key for one in self.objects if one.key in wanted and not self._is_same_object(one)}
        for key in differing & contents.outer.keys():
            raise Mismatch(
                f"{contents.outer[key]!r} consists of other tensors, which cannot be combined, and it differs between "
                "the checkpoints: keep that of the last one with keep= (--keep), or select other keys with keys= "
                "(--keys)",
                key=contents.outer[key],
            )
        if differing:
            self.note(f"not combined, but taken from {contents.where}", sorted(differing))

    def note(self, what: str, names: Iterable[str]) -> None:
        """Add a note for the user, and log it."""
        self.notes.append(f"{what}: {listed([*names], _NAMED)}")
        if self.dtype_of is None:
            log.warning("%s", self.notes[-1])

    def _misfits(self, wanted: set[str]) -> Iterator[CasckptError]:
        """Return an error for each key that a version lacks or has in a different shape."""
        last = self.last.contents
        for version in self.versions:
            contents = version.contents
            lacking = wanted - {*contents.keys()}
            for key in wanted & last.tensors.keys() - last.per_rank.keys() - lacking:
                there = contents.tensors.get(key)
                if there is None or contents.manifest.lacks(there):
                    lacking.add(key)
                elif there.shape != last.tensors[key].shape:
                    yield Mismatch(
                        f"{key!r} has the shape {list(there.shape)} in {contents.where}, but "
                        f"{list(last.tensors[key].shape)} in {last.where}: {_OTHERS}",
                        key=key,
                    )
            for key in sorted(lacking):
                why = contents.manifest.left_out if key in contents.tensors else None
                more = f" ({why})" if why else ""
                yield MissingKey(f"{contents.where} does not hold {key!r}{more}: {_OTHERS}", key=key, keys=(key,))

    def _dtypes(self, name: Name) -> set[str]:
        """Return the dtypes of an entry. One that a version lacks has none there."""
        return {version.entries[name].dtype if name in version.entries else "" for version in self.versions}

    def _computed_in(self, entry: Entry) -> torch.dtype | None:
        """Return the dtype in which to combine a tensor, or None if it is not combined."""
        found = self._dtypes(entry.name)
        is_plain = entry.kind == TENSOR and entry.rank is None and entry.key not in self.last.contents.outer
        if not is_plain or not (found <= {*_REAL} or found <= {*_COMPLEX}):
            return None
        # torch does not promote dtypes of 8 bits
        return reduce(torch.promote_types, [torch_dtype(one) for one in found if "float8" not in one], torch.float32)

    def _is_same(self, entry: Entry) -> bool:
        """Return whether all versions are known to hold the same entry."""
        if self._dtypes(entry.name) != {entry.dtype}:
            return False
        cells = [one.contents.manifest.raw_cells(one.entries[entry.name]) for one in self.versions]
        return all(of_version == cells[-1] for of_version in cells)

    def _is_same_object(self, stored: StoredObject) -> bool:
        """Return whether all versions hold the same object, except for its parts, which are entries."""
        every = [(one.contents.manifest, one.objects.get((stored.key, stored.rank))) for one in self.versions]
        found = [there and (manifest.data(there), there.pickled) for manifest, there in every]
        return all(there == found[-1] for there in found)

    # the checkpoint

    def _dtype(self, name: Name) -> str:
        """Return the dtype of the result. Complex tensors keep theirs."""
        own = self.last.entries[name].dtype
        if name not in self.combined:
            return own
        if self.dtype_of is not None:
            return self.dtype_of(name, self.combined[name])
        return self.dtype if self.dtype is not None and own in _REAL else own

    def state(self) -> ComputedState:
        """Return the state to save."""
        keys = {entry.key for entry in self.entries if entry.kind == TENSOR} | {one.key for one in self.objects}
        leaves = self.last.contents.keys()
        tree = rebuild(
            self.last.contents.tree, lambda _, leaf: leaf,
            lambda key: key in keys if key in leaves else self.is_chosen(key),
            lambda _, node, values: Wrapper(node.form, values),
        )  # fmt: skip
        streams = {entry.name: (self._dtype(entry.name), entry.shape) for entry in self.entries}
        source = self.last.checkpoint.commit if self.last.repo is self.repo else None
        return ComputedState(streams, encode_tree(tree), source, self._plan)

    def _plan(self, known: ReusableCells) -> Rounds:
        """Divide all cells into those that are stored, those to copy from the last version, and those to compute."""
        stored, copies, computed = {}, list[EntrySlice](), list[EntrySlice]()
        cell_bytes = self.repo.marker.cell_bytes
        may_name = known.any and self.last.contents.manifest.body.cell_bytes == cell_bytes
        for entry in self.entries:
            named, copied, rest = list[StoredCell](), list[StoredCell](), list[StoredCell]()
            equal = self._equal_cells(entry.name) if entry.name in self.combined else None
            for cell in self.last.cells(entry.name):
                if equal is not None and equal.get(cell[3:6]) != cell.digest:
                    rest.append(cell)
                elif (place := known.find(cell.digest) if may_name else None) is None:
                    copied.append(cell)
                else:
                    named.append(place._replace(box=cell.box, lo=cell.lo, hi=cell.hi))
            if named:
                table = build(entry.shape, entry.itemsize, cell_bytes // entry.itemsize, named)
                stored[entry.name] = (entry.dtype, table)
            copies += _slices(entry, copied)
            computed += _slices(entry, rest)
        sizes = ((part, dtypes.itemsize(self._dtype(part.entry.name))) for part in (*copies, *computed))
        self.progress.of(sum((part.hi - part.lo) * size for part, size in sizes))
        return Rounds(stored, self.running.enter_context(closing(self._rounds(copies, computed))))

    def _equal_cells(self, name: Name) -> Mapping[tuple[Box, int, int], bytes]:
        """Return the digests of the cells that are equal in all versions and are the result, by region."""
        if not self.is_average or self._dtypes(name) != {self._dtype(name)}:
            return {}
        equal = {cell[3:6]: cell.digest for cell in self.last.cells(name)}
        for version in self.versions[:-1]:
            cells = version.cells(name)
            equal = {cell[3:6]: cell.digest for cell in cells if equal.get(cell[3:6]) == cell.digest}
        return equal

    def _rounds(self, copies: Sequence[EntrySlice], computed: Sequence[EntrySlice]) -> Generator[Prepared, None, None]:
        contents, data = self.last.contents, self.last.contents.manifest.data
        objects = [ObjectEntry(one.key, one.rank, data(one), one.parts, one.pickled) for one in self.objects]
        inline = (one for one in contents.attachments.values() if isinstance(one, StoredObject))
        yield Prepared([], objects, [Attachment(one.key, data(one)) for one in inline], b"")
        reader = RegionReader(self.last.repo, contents.manifest, 0, Progress())
        for window in reader.windows(copies):
            read = reader.read([window])
            yield self._prepared((part, _flat(view, part.entry.dtype)) for part, view in read)
        wide = [
            part._replace(entry=part.entry.converted("", self.combined[part.entry.name].itemsize)) for part in computed
        ]
        wide.sort(key=lambda part: (blob.order(self._dtype(part.entry.name)), part.entry.key))
        threads = usable_threads(None)
        most = max(_ROUND_BYTES // threads, _WINDOW_BYTES)
        windows = plan_windows(wide, most, _WIDER * self.repo.marker.cell_bytes)
        with closing(BufferPool(threads, 2 * most)) as buffers:
            results = in_parallel(threads, partial(self._combine, buffers), windows, name="merge", waiting=1)
            for several in in_batches(results, lambda some: sum(part.nbytes for part, _ in some), _ROUND_BYTES):
                yield self._prepared(chain.from_iterable(several))

    def _prepared(self, parts: Iterable[tuple[EntrySlice, torch.Tensor]]) -> Prepared:
        """Return the entries for flat tensors, each with its slice."""
        held: dict[Name, LocalEntry] = {}
        for part, data in parts:
            name, region, dtype = part.entry.name, part.region, self._dtype(part.entry.name)
            if region.is_whole and region.box.shape == part.entry.shape:
                held[name] = LocalEntry(*name, dtype, part.entry.shape, data.view(part.entry.shape))
                continue
            piece = Piece(region, data.view(region.box.shape) if region.is_whole else data)
            before = held[name].shards if name in held else ()
            held[name] = LocalEntry(*name, dtype, part.entry.shape, shards=(*before, piece))
        return Prepared(list(held.values()), [], [], b"")

    def _combine(self, buffers: BufferPool, window: Sequence[EntrySlice]) -> list[tuple[EntrySlice, torch.Tensor]]:
        """Combine the slices of a window, in the calling thread."""
        nbytes = sum(-(-part.nbytes // _ALIGN) * _ALIGN for part in window)
        with AlignedBuffer(2 * nbytes) if 2 * nbytes > buffers.nbytes else buffers.borrow() as buffer:
            sums = [
                torch.split(tensor_over(data, self.combined[part.entry.name], (part.hi - part.lo,)), _BLOCK)
                for part, data in views(window, buffer.view[:nbytes], _ALIGN)
            ]
            for version, values in zip(self.versions, self._read(window, buffer.view[nbytes:]), strict=True):
                for total, value in zip(sums, values, strict=True):
                    _add(total, value, version.term, is_first=version is self.versions[0])
            return [(part, self._result(part, total)) for part, total in zip(window, sums, strict=True)]

    def _result(self, part: EntrySlice, total: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the result for a slice, in new memory, given the blocks of its sum."""
        factor = float(self.last.term.weight / self.last.term.share)
        result = torch.empty(part.hi - part.lo, dtype=torch_dtype(self._dtype(part.entry.name)), device="cpu")
        for target, block in zip(torch.split(result, _BLOCK), total, strict=True):
            target.copy_(block if factor == 1 else block.mul_(factor))
            if target.itemsize > 1 and (found := target.isinf()).any() and not block[found].isinf().all():
                raise too_large(part.entry.key, self._dtype(part.entry.name))
        return result

    def _read(self, window: Sequence[EntrySlice], room: memoryview) -> Iterator[list[torch.Tensor]]:
        """Read the slices of all versions, one version after the other, each slice always into the same memory.

        A version that shares blobs with the one before it is read as an update of that one.
        """
        before: _Version | None = None
        frames: Frames = {}
        for version in self.versions:
            held = before.contents if before is not None and before.blobs & version.blobs else None
            read = [
                (part, data[: part.nbytes])  # at most as large as its sum
                for wide, data in views(window, room, _ALIGN)
                for part in [wide._replace(entry=version.entries[wide.entry.name])]
            ]
            frames = Update(version.reader, requests(read, {}), held, frames if held else {}).run()
            yield [_flat(data, part.entry.dtype) for part, data in read]
            before = version


def _matching(contents: Contents, patterns: Sequence[str] | None) -> set[str]:
    """Return the keys that match. If one tensor of a wrapper matches, they include the others.

    None stands for everything except training state.
    """
    keys, outer, matches = contents.keys(), contents.outer, contents.manifest.matches
    if patterns is None:
        return without_training_state(contents.tree, keys)
    units = {outer.get(key, key) for key in keys if matches(key, patterns)}
    return {key for key in keys if outer.get(key, key) in units}


def _slices(entry: Entry, cells: Iterable[StoredCell]) -> Iterator[EntrySlice]:
    """Return the slices of an entry that these cells make up."""
    for run in runs(cells, lambda run, cell: run[-1].box == cell.box and run[-1].hi == cell.lo):
        yield EntrySlice(entry, run[0].lo, run[-1].hi, run[0].box)


def _flat(view: memoryview, dtype: str) -> torch.Tensor:
    return tensor_over(view, torch_dtype(dtype), (view.nbytes // dtypes.itemsize(dtype),))


def _add(total: Sequence[torch.Tensor], values: torch.Tensor, term: Term, *, is_first: bool) -> None:
    """Compute ``total = decay * total + share * value`` in the dtype of ``total``, as torch does.

    ``total``: the blocks of the sum. In a moving average, a value that equals the total leaves it unchanged.
    """
    share, decay = float(term.share), float(term.decay)
    scratch = torch.empty_like(total[0])
    for into, part in zip(total, torch.split(values, _BLOCK), strict=True):
        wide = into if is_first else scratch if len(into) == len(scratch) else scratch[: len(into)]
        value = part if part.dtype == wide.dtype else wide.copy_(part)
        equal = None if decay == 1 else into == value
        product = value if share == decay == 1 else torch.mul(value, share, out=wide)
        if is_first:
            into.copy_(product)
        elif equal is None:
            into.add_(product)
        else:
            torch.where(equal, into, product.add_(into * decay), out=into)
