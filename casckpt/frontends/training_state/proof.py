"""Proves a resume: compares the live state with the checkpoint that was loaded, value by value."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from casckpt.base.groups import grouped
from casckpt.base.text import listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput, Mismatch
from casckpt.format.tree import find
from casckpt.frontends.training_state.settings import Replaced
from casckpt.loading.fit import memory_of
from casckpt.loading.load import values_at
from casckpt.loading.options import LoadArguments, LoadOptions
from casckpt.ranks.ranks import everyone, open_ranks
from casckpt.store.store import Store
from casckpt.tensors.objects import TORCH_EXTENSIONS, encode_object
from casckpt.tensors.state import LeafValue, flatten, is_part

log = logging.getLogger(__name__)

_HOOKED = "changed by a hook of its module, so its digest proves nothing"
_CAST = "converted by the cast, so its digest proves nothing"
_PICKLED = "stored as a pickle, which is not compared"
_TRAIN = re.compile(r"^train\.(\d+)\.")
_RENAMED = "stored under a different name, so it was not compared"
_LEFT_OUT = "only in the checkpoint, and left out by the load"
_LACKING, _CHANGED, _ADDED = "missing now", "value", "missing"
NOT_THERE = "not in the checkpoint, left unchanged"
_NAMES_OF_GROUP = ("params", "param_names")
_NAMES = {_LACKING, _ADDED}
_BESIDE = re.compile(r"(train|lightning|optim(_\d+)?)\.")


@dataclass(frozen=True)
class Proof:
    """The result of a comparison after a resume. ``proved``: the number of values that are equal in every bit.

    The count is over the keys of all ranks. ``bytes``: the bytes of tensors that all ranks compared. ``unproved``: why
    other values could not be proved, by flat key. ``replaced``: the settings that the resume replaced, as in `Resumed`.
    """

    proved: int
    bytes: int
    unproved: Mapping[str, str]
    replaced: Replaced = field(default_factory=dict)

    def __str__(self) -> str:
        reasons = grouped(self.unproved, self.unproved.__getitem__).items()
        lines = [f"not proved: {listed(keys)} ({why})" for why, keys in reasons]
        return "\n  ".join([f"proved: {self.proved} values are equal in every bit", *lines])


@dataclass(frozen=True)
class _Found:
    """What one rank found. ``live``: its keys. ``differs``: how values differ, by key. ``excused``: why, by key.

    ``copies``: those of ``differs`` that it holds whole, so that other ranks may hold them too.
    """

    live: Collection[str]
    differs: Mapping[str, str]
    excused: Mapping[str, str]
    copies: Set[str]


def prove(
    store: Store,
    loaded: Checkpoint,
    state: Mapping[str, Any],
    model: Any,
    *,
    excused: Mapping[str, str],
    by_name: bool = False,
    as_stored: bool = False,
    **given: Unpack[LoadArguments],
) -> Proof:
    """Compare ``state``, as the next save would store it, with ``loaded``. Every rank makes the call.

    ``model``: a module, a list of modules, or a dict with modules. ``given``: the arguments of the load. ``excused``:
    why values may differ, by key or by the beginning of keys, such as parts that the load left out. There, "train" is
    the train state of any rank. ``by_name``: whether the load matched values only by their exact names, and "train" is
    a name like all others. Raises Mismatch, which names the keys, if anything else differs. Rank 0 logs the result.
    ``as_stored``: the state was not loaded. Where ranks hold copies of a value, compare only the one that a save would
    store. Nothing is logged, and ``unproved`` has all differences.
    """
    options = LoadOptions(**given)
    ranks = open_ranks(options.process_group, no_dist=options.no_dist)
    compared = store.compare(state, loaded, process_group=options.process_group, no_dist=options.no_dist)

    def look() -> _Found:
        differs = {one.key: one.what for one in compared.differs if one.rank == ranks.rank}
        return _look(
            store, loaded, state, model, rank=ranks.rank, differs=differs, options=options, known=excused,
            by_name=by_name,
        )  # fmt: skip

    def decide(reports: Sequence[_Found]) -> Sequence[Proof]:
        live = {key for report in reports for key in report.live}
        unproved, wrong, lower = dict[str, str](), dict[str, str](), set[str]()
        for report in reports:
            other = lower & report.copies if as_stored else set()
            differs = {k: what for k, what in report.differs.items() if k not in (live if what == _LACKING else other)}
            lower.update(report.live)
            unproved |= {key: report.excused[key] for key in differs if key in report.excused}
            wrong |= {key: what for key, what in differs.items() if key not in report.excused}
        is_renamed = options.rename is not None
        names = {} if by_name else {key: what for key, what in wrong.items() if what in _NAMES}
        named = [key for key in names if is_renamed or not _BESIDE.match(key)]
        if is_renamed or {wrong[key] for key in named} == _NAMES:  # a load may fill a model from different names
            unproved |= {key: _RENAMED for key in named if wrong.pop(key)}
        if as_stored:
            unproved |= wrong
        elif wrong:
            kinds = ", ".join(dict.fromkeys(wrong.values()))
            raise Mismatch(
                f"after the resume, {listed([*wrong])} differ from {loaded.run}@{loaded.step} ({kinds}): something "
                "changed them after they were loaded, or they were not loaded. Look for hooks and callbacks, and "
                "resume before other code uses the model. To resume without this comparison, pass prove=False, or do "
                "not call prove",
                keys=tuple(wrong),
            )
        return everyone(Proof(len(live - unproved.keys()), compared.bytes, unproved), len(reports))

    proof = ranks.exchange(look, decide)
    if ranks.rank == 0 and not as_stored:
        log.info("%s@%d: %s", loaded.run, loaded.step, proof)
    return proof


def _look(
    store: Store,
    loaded: Checkpoint,
    state: Mapping[str, Any],
    model: Any,
    *,
    rank: int,
    differs: dict[str, str],
    options: LoadOptions,
    known: Mapping[str, str],
    by_name: bool,
) -> _Found:
    """Compare the values of one rank. ``differs``: how its tensors differ. ``known``: the ``excused`` of `prove`."""
    contents = Contents.open(store.repository, loaded.commit, rank, TORCH_EXTENSIONS)
    flat = flatten(state, is_whole=lambda key, _: key in contents.objects, apart=contents.is_in_parts)
    objects = {key: leaf for key, leaf in flat.leaves.items() if not leaf.is_tensor}
    differs |= dict(_objects_that_differ(store, contents, objects, options))
    stored = {*contents.tensors, *contents.objects}
    within = tuple(f"{key}." for key in objects)
    lacking = (key for key in sorted(stored - flat.leaves.keys()) if not key.startswith(within))
    differs |= dict.fromkeys(lacking, _LACKING)
    optims = {at: live for at, live in state.items() if _names_parameters(live)}
    groups = tuple(f"{at}.param_groups." for at in optims)
    differs = {key: what for key, what in differs.items() if not f"{key}.".startswith(groups)}
    differs |= dict(_groups_that_differ(store, contents, optims, options, by_name=by_name))
    hooked, train_rank = {memory_of(value) for value in _hooked(model)}, None if by_name else rank
    excused = {key: why for key in differs if (why := _excuse(key, train_rank, stored, known)) is not None}
    for key in differs.keys() - excused.keys():
        leaf = flat.leaves.get(key)
        if options.cast and differs[key] == "dtype":
            excused[key] = _CAST
        elif differs[key] in {_PICKLED, _RENAMED, _LEFT_OUT}:
            excused[key] = differs[key]
        elif leaf is not None and memory_of(leaf.unit.value) in hooked:
            excused[key] = _HOOKED
    shared = {key: leaf for key, leaf in flat.leaves.items() if key in differs and not leaf.per_rank}
    copies = {key for key, leaf in shared.items() if not (leaf.is_tensor and is_part(leaf.value))}
    return _Found({*flat.leaves}, differs, excused, copies)


def _objects_that_differ(
    store: Store, contents: Contents, objects: Mapping[str, LeafValue], options: LoadOptions
) -> Iterator[tuple[str, str]]:
    """Yield the keys of values other than tensors that differ from the stored ones, and how.

    A list that holds only plain data is one value in a live state, but DCP may have stored its items separately.
    """
    pickles = [f"{key}." for key, stored in contents.objects.items() if stored.pickled]
    pickled = {key for key in objects if any(other.startswith(f"{key}.") for other in pickles)}
    split = {key for key in objects.keys() - contents.objects if not isinstance(find(contents.tree, key), int | None)}
    there = [key for key in objects if key not in pickled and (key in contents.objects or key in split)]
    stored = values_at(store.repository, contents, there, options)
    for key, leaf in objects.items():
        if key in pickled:
            yield key, _PICKLED
        elif key not in stored:
            yield key, _ADDED
        elif (live := _encoded(key, leaf.value)) is None or live != _encoded(key, stored[key]):
            yield key, _CHANGED


def _names_parameters(live: Any) -> bool:
    """Return whether ``live`` is the state of an optimizer whose groups name their parameters."""
    groups = live.get("param_groups") if isinstance(live, Mapping) else None
    return isinstance(groups, list) and all(isinstance(group, Mapping) and "params" in group for group in groups)


def _groups_that_differ(
    store: Store, contents: Contents, optims: Mapping[str, Any], options: LoadOptions, *, by_name: bool
) -> Iterator[tuple[str, str]]:
    """Yield the keys of optimizers' groups that differ from the stored ones, and how.

    They have other parameters, or give a parameter other options. A load matches parameters by name, so the groups may
    be different ones. Options that the checkpoint lacks do not count, because torch or a scheduler may have added them.
    """
    for at, live in optims.items():
        key = f"{at}.param_groups"
        if options.rename is not None or not {key, f"{key}.0.params"} & {*contents.objects, *contents.tensors}:
            yield key, _ADDED
            continue
        groups: Any = values_at(store.repository, contents, [key], options)[key]
        saved = {name: group for group in groups for name in group["params"]}
        here = dict.fromkeys(name for group in live["param_groups"] for name in group["params"])
        lost, added = saved.keys() - here, here.keys() - saved
        is_renamed = bool(lost and added) and not by_name
        how = _RENAMED if is_renamed else _LACKING if options.strict else _LEFT_OUT
        yield from ((f"{at}.state.{name}", how) for name in sorted(lost))
        yield from ((f"{at}.state.{name}", _RENAMED if is_renamed else _ADDED) for name in sorted(added))
        hows = set[str | None]()
        for group in live["param_groups"]:
            pairs = [(group, saved[name]) for name in group["params"] if name in saved]
            names = [(one, other, name) for one, other in pairs for name in other if name not in _NAMES_OF_GROUP]
            hows |= {_change(name, one[name], other[name]) if name in one else _CHANGED for one, other, name in names}
        yield from ((key, how) for how in (_PICKLED, _CHANGED) if how in hows)  # the last one counts


def _change(name: str, live: Any, saved: Any) -> str | None:
    """Return how two options differ, or None. A tensor may stand for a number."""
    if isinstance(live, list | tuple) and isinstance(saved, list | tuple) and len(live) == len(saved):
        hows = {_change(name, one, other) for one, other in zip(live, saved, strict=True)}
        return _CHANGED if _CHANGED in hows else _PICKLED if _PICKLED in hows else None
    for one, other in ((live, saved), (saved, live)):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor | int | float):
            is_same = torch.equal(one.cpu(), torch.as_tensor(other, dtype=one.dtype).cpu())
            return None if is_same else _CHANGED
    encoded = {_encoded(name, live), _encoded(name, saved)}
    return _PICKLED if encoded == {None} else None if len(encoded) == 1 else _CHANGED


def _excuse(key: str, rank: int | None, stored: Collection[str], known: Mapping[str, str]) -> str | None:
    """Return why a key may differ on a rank, or None. ``rank``: None if the state has no parts of single ranks.

    ``known``: the ``excused`` of `prove`.
    """
    at = f"{key}." if rank is None else _TRAIN.sub("train.", f"{key}.")
    why = next((why for start, why in known.items() if at.startswith(f"{start}.")), None)
    match = None if why is not None or rank is None else _TRAIN.match(key)
    if match is None:
        return why
    if int(match[1]) != rank:
        return "of a different rank"
    return None if any(other.startswith(match[0]) for other in stored) else "taken from a different rank"


def _encoded(key: str, value: Any) -> bytes | None:
    if isinstance(value, np.random.Generator):  # a load sets the state, but cannot set the seeds of spawned generators
        value = value.bit_generator.state
    try:
        return encode_object(key, value, allow_pickle=False)[0]
    except InvalidInput:
        return None


def _hooked(model: Any) -> Iterator[Any]:
    """Yield the parameters and buffers of modules that have hooks for their state_dict.

    Those of torch.distributed do not count: FSDP2 has them on all its modules, and they change no values.
    """
    given = model.values() if isinstance(model, Mapping) else model if isinstance(model, list | tuple) else [model]
    for inner in (inner for one in given if isinstance(one, nn.Module) for inner in one.modules()):
        hooks = (
            *inner._load_state_dict_pre_hooks.values(), *inner._load_state_dict_post_hooks.values(),
            *inner._state_dict_hooks.values(), *inner._state_dict_pre_hooks.values(),
        )  # fmt: skip
        if not all(str(getattr(hook, "__module__", "")).startswith("torch.distributed.") for hook in hooks):
            yield from inner.parameters(recurse=False)
            yield from inner.buffers(recurse=False)
