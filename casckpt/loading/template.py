"""Compares a template with a checkpoint before any read. Finds keys to fill, keys that do not fit, and unread keys."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from casckpt.base.cycle_collector import collector_paused
from casckpt.base.lazy import cached_property
from casckpt.base.text import listed
from casckpt.contents.contents import Contents
from casckpt.errors import Mismatch, MissingKey
from casckpt.format.manifest import Manifest
from casckpt.format.tree import Node, Path, children, find, join, leaves
from casckpt.loading.fit import PACKED, Fit, check_fit, merged, missed_pairs, rename_hint, saved_shapes, shape_of
from casckpt.loading.load_plan import LoadPlan, no_entry
from casckpt.loading.options import LoadOptions, matches, renamer
from casckpt.loading.unread import EVERYTHING, is_generator, left_unread, prefixes, that_hold
from casckpt.loading.wrapped import has_wrapper
from casckpt.repository.repository import Repository
from casckpt.tensors.objects import TORCH_EXTENSIONS
from casckpt.tensors.state import FlatState, LeafValue, check_replaceable, flatten, is_part

_SHOWN = 10


class Told(NamedTuple):
    """What every rank tells rank 0 about its template: see `Template`. ``is_full``: whether every key is filled."""

    empties: Mapping[str, str]
    is_full: bool


class Template:
    """One rank's part of a load into a template. ``reads``: what it reads, as far as the template fits.

    ``missing``: the template keys that the checkpoint lacks. ``mismatched``: the keys that remain unchanged because
    they do not fit. ``unread``: the checkpoint keys that the template does not name. ``subtrees``: the whole
    containers among them. ``dropped``: the single unread keys in containers with other keys that are read.
    ``empties``: the empty mappings of the template that are not empty in the checkpoint, each with a checkpoint key
    below it.
    """

    def __init__(self, manifest: Manifest, options: LoadOptions) -> None:
        self.reads = LoadPlan(Contents(manifest, options.rank, TORCH_EXTENSIONS), options)
        self._where = self.reads.contents.where
        self.missing: tuple[str, ...] = ()
        self.mismatched: tuple[str, ...] = ()
        self.unread: tuple[str, ...] = ()
        self.subtrees: tuple[str, ...] = ()
        self.dropped: tuple[str, ...] = ()
        self.empties: dict[str, str] = {}
        self._flat, self._names = FlatState({}, {}), dict[str, str]()
        self._inner: dict[str, list[LeafValue]] = {}
        self._has: dict[str, bool] = {}

    @collector_paused()
    def plan(self, repo: Repository, state: Any) -> None:
        """Check the template. Raises MissingKey, Mismatch, and InvalidInput.

        If it must read, also raises Damaged and StorageError.
        """
        name_of = renamer(self.reads.options.rename)
        contents, objects = self.reads.contents, self.reads.contents.objects
        self._flat = flat = flatten(
            state,
            is_whole=lambda key, value: len(value) > 0 and name_of(key) in objects,
            apart=lambda key: bool(contents.wrappers) and contents.is_in_parts(name_of(key)),
        )
        self._names = {key: name_of(key) for key in flat.wrappers}
        self._names |= {key: name_of(key) for key, leaf in flat.leaves.items() if leaf.outer is None}
        for key, leaf in flat.leaves.items() if flat.wrappers else ():
            outer = leaf.outer
            if outer is not None:
                self._names[key] = self._names[outer.key] + key[len(outer.key) :]
                self._inner.setdefault(outer.key, []).append(leaf)
        self.reads.contents.ready(self._names.values())
        errors, lacking = self._add()
        for leaf in lacking:
            self._check_no_entry(leaf.key, self._names[leaf.key])
        entries = self._add_entries(lacking, name_of)
        for key, of_optimizer in _empty_mappings(flat.tree, ()):
            self._look_below(key, name_of(key), of_optimizer=of_optimizer)
        lacking = [leaf for leaf in lacking if not self.reads.fills(leaf)]
        self.missing = tuple(dict.fromkeys(leaf.unit.key for leaf in lacking))
        self.unread = tuple(key for key in contents.keys() if key not in self.reads.named)  # noqa: SIM118 - not a mapping
        if self.unread:
            self.subtrees, self.dropped = left_unread(contents.tree, self.unread)
        self.unread, self.dropped = (*self.unread, *entries), (*self.dropped, *entries)
        if errors:
            raise self._misfits(errors)
        needed = [key for key in self.missing if not self._is_ignored(key)]
        if needed and self.reads.options.strict:
            raise self._lacks(needed)
        check_replaceable(state, self.reads.replaced)
        self.reads.check_shared(repo)
        self._check_packed(repo)

    def _check_packed(self, repo: Repository) -> None:
        """Raise Mismatch if weights would be loaded into a bitsandbytes module whose other state is different."""
        left, kept = frozenset((*self.missing, *self.mismatched)), dict[str, torch.Tensor]()
        plan = LoadPlan(self.reads.contents, replace(self.reads.options, updates=False, progress=None, sharing=0))
        for key, leaf in self._flat.leaves.items():
            if PACKED in key and isinstance(leaf.value, torch.Tensor) and key.partition(PACKED)[0] not in left:
                kept[key] = leaf.value.cpu()
                if key not in self.missing:
                    plan.new(self._names[key], torch.device("cpu"))
        saved = plan.run(repo) if kept else {}
        differ = [key for key, value in kept.items() if not torch.equal(value, saved.get(self._names[key], value[:0]))]
        if differ:
            weight = differ[0].partition(PACKED)[0]
            raise Mismatch(
                f"{differ[0]!r} is a copy of a value that a bitsandbytes module keeps, but {self._where} has a "
                "different value. With a different value, the saved weights have a different meaning. Omit "
                f"{weight!r}, and all keys that begin with it, from the state; or call "
                "casckpt.load_model_and_optim_state with the model, which loads such weights",
                keys=tuple(differ),
            )

    def _is_ignored(self, key: str) -> bool:
        return matches(key, self.reads.options.ignore_mismatched or ())

    def _add(self) -> tuple[list[Mismatch], list[LeafValue]]:
        """Add all values of the state. Return errors for values that do not fit, and for values that are not saved."""
        errors, lacking, left, done = [], [], [], set(self._flat.whole)
        for key, leaf in self._flat.leaves.items():
            if done and leaf.unit.key in done:
                continue
            try:
                lacks = leaf.outer is not None and not self._has_wrapper(leaf.outer)
                if lacks or not self.reads.add(key, self._names[key], leaf):
                    lacking.append(leaf)
            except Mismatch as error:
                done.add(leaf.unit.key)
                if self._is_ignored(leaf.unit.key):
                    left.append(leaf.unit.key)
                else:
                    errors.append(error)
        self.mismatched = tuple(left)
        return errors, lacking

    def _has_wrapper(self, outer: LeafValue) -> bool:
        """See `has_wrapper`. Checks a wrapper once, before any of its tensors is added."""
        if outer.key not in self._has:
            inner = [(leaf, self._names[leaf.key]) for leaf in self._inner[outer.key]]
            self.reads.named.update(name for _, name in inner if name in self.reads.contents.tensors)
            key, name, here = outer.key, self._names[outer.key], self._flat.wrappers[outer.key]
            self._has[key] = has_wrapper(self.reads.contents, key, name, here, inner)
        return self._has[outer.key]

    def _check_no_entry(self, key: str, name: str) -> None:
        """Raise InvalidInput if ``rename`` returns a missing ``name`` that would be an item of a single object."""
        above = next(filter(self.reads.contents.objects.__contains__, prefixes(name)), "") if name != key else ""
        if above and self.reads.first_entry(above) is not None:
            raise no_entry(key, name, key.rpartition(".")[0], above)

    def _add_entries(self, lacking: list[LeafValue], name_of: Callable[[str], str]) -> tuple[str, ...]:
        """Add mappings that the checkpoint stores as one object.

        Return the keys of the items that only the checkpoint has.
        """
        unread: list[str] = []
        for key in self._flat.whole:
            entries = self.reads.add_entries(key, self._names[key], self._flat.leaves[key].value, name_of)
            unread += entries.unread
            self._names.update({below: self._names[key] + below.removeprefix(key) for below in entries.lacking})
            lacking += [LeafValue(below, (below,), None, False, False) for below in entries.lacking]
        return tuple(unread)

    @cached_property
    def fit(self) -> Fit:
        """The template tensors that the load fills."""
        left = frozenset((*self.missing, *self.mismatched))
        tensors = {leaf.unit.key: leaf.unit.value for leaf in self._flat.leaves.values() if leaf.is_tensor}
        unfilled = {key: shape_of(value) or () for key, value in tensors.items() if key in left}
        return Fit({key: self._names[key] for key in tensors if key not in left}, unfilled)

    def check_fit(self, fits: Sequence[Fit]) -> str | None:
        """Return, on rank 0, the result of `casckpt.loading.fit.check_fit` for all ranks."""
        saved = saved_shapes(self.reads.contents.manifest)
        return check_fit(merged(fits), saved, self._where, self.reads.options.rename)

    @property
    def per_rank(self) -> dict[str, list[int]]:
        """The ranks that saved their own value, by key.

        Random number generators are omitted, because they are reseeded.
        """
        return {key: ranks for key, ranks in self.reads.contents.per_rank.items() if not is_generator(key)}

    def _look_below(self, key: str, name: str, *, of_optimizer: bool) -> None:
        """Handle an empty template mapping, which is filled if it is the state of a fresh optimizer."""
        node = find(self.reads.contents.tree, name)
        if (first := self.reads.first_entry(name)) is not None:
            self.empties[key] = first
        below = None if node is None else next(leaves(node), None)
        if node is None or isinstance(node, int) or below is None:
            return
        if not of_optimizer:
            self.empties[key] = join((name, *below[0]))
            return
        parts = [leaf.key for leaf in self._flat.leaves.values() if leaf.is_tensor and is_part(leaf.value)]
        if parts:
            raise Mismatch(
                f"{key!r} is the empty state of a fresh optimizer, which each rank would load in full, but "
                f"{parts[0]!r} is sharded: use casckpt.load_model_and_optim_state or Checkpointer.load, which load "
                "only the rank's own part",
                key=key,
            )
        self.reads.add(key, name, LeafValue(key, (key,), None, False, False))

    def _misfits(self, errors: Sequence[Mismatch]) -> Mismatch:
        if len(errors) == 1 and not self.missing:
            return errors[0]
        more = len(errors) - _SHOWN
        lines = [*map(str, errors[:_SHOWN]), *([f"and {more} more"] if more > 0 else [])]
        below = tuple(f"{key}." for key in self.subtrees if key != EVERYTHING)
        alone = [key for key in self.unread if key in self.reads.contents.tensors and not key.startswith(below)]
        others = [*alone, *(f"{start}*" for start in below if f"{start}param_groups" not in self.unread)]
        if self.missing:  # they may be among the others, under a different name
            lines += [f"only the template has {listed(self.missing)}"]
            lines += [f"only the checkpoint has {listed(others)}"] if others else []
        plural = "key does" if len(errors) == 1 else "keys do"
        return Mismatch(
            f"{len(errors)} {plural} not fit {self._where}:\n  " + "\n  ".join(lines) + "\n"
            "ignore_mismatched= accepts patterns of keys to leave unchanged",
            keys=tuple(error.key for error in errors),
            missing=self.missing,
            unexpected=self.unread,
        )

    def _lacks(self, needed: Sequence[str]) -> MissingKey:
        names = [self._names[key] for key in needed]
        near = difflib.get_close_matches(names[0], self.reads.contents.keys(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        if near == [names[0]]:
            hint = f" It was removed: {self.reads.contents.manifest.left_out}."
        filled, saved = self.fit.filled, saved_shapes(self.reads.contents.manifest)
        unread = {key: saved[key] for key in saved.keys() - set(filled.values())}
        mapped = rename_hint(missed_pairs(self.fit.unfilled, unread), filled, self.reads.options.rename)
        return MissingKey(
            f"{self._where} lacks {listed(names)}.{hint} Pass rename= to map them, or strict=False to leave them as "
            f"they are, which is random in a new model{f'. {mapped}' if mapped else ''}",
            keys=tuple(needed),
        )

    @property
    def told(self) -> Told:
        """This rank's message to rank 0."""
        return Told(self.empties, not (self.missing or self.mismatched))

    def compare(self, told: Sequence[Told]) -> tuple[tuple[str, ...], bool]:
        """Compare, on rank 0, the messages of all ranks. Raises Mismatch.

        Return the keys for which each rank must report whether it read them, and whether to compare the filled tensors.
        """
        self._check_empty([rank.empties for rank in told])
        warns, held = self.reads.options.unread == "warn", self.per_rank
        own = [key for key in self.unread if key in held and not that_hold(self.subtrees, [key])]
        asked = tuple(dict.fromkeys((*self.subtrees, *((*self.dropped, *own) if warns else ()))))
        return asked, warns and not all(rank.is_full for rank in told)

    def _check_empty(self, empties: Sequence[Mapping[str, str]]) -> None:
        """Raise Mismatch, on rank 0, for a mapping that is empty on all ranks, but not in the checkpoint."""
        first, *others = empties
        for key, below in first.items() if self.reads.options.strict else ():
            if all(key in other for other in others):
                raise Mismatch(
                    f"{key!r} is an empty mapping here, but {self._where} has {below!r} and perhaps more below it. "
                    "Put None in its place to load all of it, or pass strict=False to leave it empty",
                    key=key,
                )


def _empty_mappings(node: Node, path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the flat key of each empty container, and whether it is the state of an optimizer."""
    for element, child in children(node):
        if isinstance(child, int):
            continue
        below = (*path, element)
        if not child:
            yield join(below), element == "state" and any(name == "param_groups" for name, _ in children(node))
        yield from _empty_mappings(child, below)
