"""Loads a checkpoint into a sharded state dict, whatever saved it.

`StrictHandling` determines how a load behaves if the state dict and the checkpoint have different keys.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from enum import Enum
from functools import partial
from typing import Any, Unpack

import torch

from casckpt.base.text import listed
from casckpt.format.regions import Box, Shape, full_box
from casckpt.frontends.megatron.claims import Claim, check_claims, claims_of
from casckpt.frontends.megatron.errors import (
    CheckpointingException,
    ShardedKeyMissing,
    ShardedMismatch,
    checkpointing_errors,
)
from casckpt.frontends.megatron.kinds import (
    extract_nonpersistent,
    extract_sharded_base,
    is_factory,
    is_sharded_object,
)
from casckpt.frontends.megatron.mapping import Copies, apply_factory_merges, boxes_of, copies
from casckpt.frontends.megatron.nesting import (
    Nested,
    dict_list_map_inplace,
    dict_list_map_outplace,
    extract_matching_values,
    merge,
    nested_values,
)
from casckpt.frontends.megatron.place import CheckpointDir
from casckpt.frontends.megatron.saving import is_empty, located
from casckpt.frontends.megatron.stored import MegatronCheckpoint, ReadRequest, object_key, read_common
from casckpt.loading.options import RankArguments
from casckpt.ranks.ranks import everyone, open_ranks
from casckpt.tensors.foreign import flat_range, megatron_shard, part_shape
from casckpt.tensors.memory import narrow
from casckpt.tensors.state import check_nesting
from casckpt.tensors.values import Shard

log = logging.getLogger(__name__)
_SHOWN = 10


class StrictHandling(Enum):
    """How a load handles keys that differ. The names and values are Megatron-core's.

    Unexpected keys that do not raise an error are omitted from the result.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """The caller assumes that there are no unexpected keys. Such keys nevertheless raise an error."""
    LOG_UNEXPECTED = "log_unexpected"
    """Unexpected keys are logged."""
    LOG_ALL = "log_all"
    """Unexpected and missing keys are logged."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """Unexpected keys raise an error."""
    RAISE_ALL = "raise_all"
    """Unexpected and missing keys raise an error."""
    RETURN_UNEXPECTED = "return_unexpected"
    """Unexpected keys are returned with the state dict, along with an empty set of missing keys."""
    RETURN_ALL = "return_all"
    """Missing and unexpected keys are returned with the state dict."""
    IGNORE_ALL = "ignore_all"
    """Missing and unexpected keys are ignored."""

    @property
    def raises(self) -> bool:
        """Whether unexpected keys raise an error."""
        return self.name.startswith(("ASSUME", "RAISE"))

    @property
    def logs(self) -> bool:
        """Whether unexpected keys are logged."""
        return self.name.startswith("LOG")

    @property
    def returns(self) -> bool:
        """Whether keys are returned."""
        return self.name.startswith("RETURN")

    @property
    def looks_for_missing(self) -> bool:
        """Whether missing keys matter. They are known only after all ranks have requested their keys."""
        return self in (StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL)

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Return whether Megatron-core reads the checkpoint's keys before a load. casckpt always knows them."""
        return parse_strict_flag(val) is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Return whether Megatron-core gathers the requests of all ranks."""
        strict = parse_strict_flag(val)
        return strict.looks_for_missing or strict is StrictHandling.IGNORE_ALL

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Return whether `load` returns keys in addition to the state dict."""
        return parse_strict_flag(val).returns


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Convert a StrictHandling or the value of one. Raises CheckpointingException (a ValueError)."""
    try:
        return StrictHandling(getattr(strict, "value", strict))  # Megatron-core's own enum also has a value
    except ValueError as error:
        known = ", ".join(repr(member.value) for member in StrictHandling)
        raise CheckpointingException(f"strict={strict!r} is not a known value; use one of {known}") from error


def check_unexpected(strict: StrictHandling, where: str, unexpected: Collection[str]) -> None:
    """Raise ShardedKeyMissing or log a warning, as ``strict`` requires."""
    if unexpected and strict.raises:
        raise ShardedKeyMissing(
            f"{where} lacks {_listed(unexpected)}; strict='log_unexpected' omits them from the result",
            keys=tuple(sorted(unexpected)),
        )
    if unexpected and strict.logs:
        log.warning("%s lacks the requested %s", where, _listed(unexpected))


def _listed(keys: Collection[str]) -> str:
    return listed(sorted(keys), _SHOWN)


def load(  # noqa: PLR0917 - the positions of Megatron-core's
    sharded_state_dict: dict[Any, Any],
    checkpoint_dir: CheckpointDir,
    sharded_strategy: tuple[str, int] | None = None,
    common_strategy: None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    **options: Unpack[RankArguments],
) -> Any:
    """Load a checkpoint. Every rank of ``process_group`` (None: all ranks) makes the call with its own part.

    Returns a new state dict: the common part of the checkpoint, the non-persistent values of this process, and the
    sharded values. If ``sharded_state_dict`` has tensors, the sharded values are read into them, and its factories
    merge the results. The plain values and the dicts of ``sharded_state_dict`` remain unchanged. ``strict``: see
    `StrictHandling`. With one of its RETURN values, the result is (state dict, missing keys, unexpected keys).

    ``checkpoint_dir`` may name any reference: ``ckpts#sft@latest``, ``ckpts#tag:best``. ``validate_access_integrity``:
    together, the main replicas of all ranks must request every element exactly once, as in `save`. ``options``:
    ``process_group``, ``no_dist``, ``allow_pickle``, ``verify``, ``threads`` and ``progress`` of `Store.load`.

    Raises CheckpointingException on every rank before any tensor changes. It is also a NotFound if there is no such
    checkpoint, a MissingKey for unexpected keys, and a Mismatch for a different global shape without
    ``allow_shape_mismatch``. Raises Damaged and StorageError during the read. After such an error, the tensors are
    undefined.
    """
    with checkpointing_errors():
        ranks = open_ranks(options.get("process_group"), no_dist=options.get("no_dist", False))
        locate = partial(located, checkpoint_dir, sharded_strategy, common_strategy)
        stored = MegatronCheckpoint.together(ranks, locate, common=True)
        loading = RankLoad(stored, sharded_state_dict)

        def decide(gathered: list[tuple[list[Claim], set[str]]]) -> list[set[str]]:
            if validate_access_integrity:
                check_claims([claims for claims, _ in gathered])
            return everyone(loading.missing(frozenset().union(*(used for _, used in gathered))), ranks.size)

        def plan() -> tuple[list[Claim], set[str]]:
            planned = loading.plan(strict)
            loading.put_into(read_common(stored, options.get("allow_pickle", False)))
            return planned

        missing = ranks.exchange(plan, decide)
        if missing and loading.strict is StrictHandling.LOG_ALL:  # on every rank, because each has its own log
            log.warning("%s holds %s, which no rank requested", stored.where, _listed(missing))
        loading.read(**options)
        loaded = loading.merged()
    return (loaded, missing, loading.unexpected) if loading.strict.returns else loaded


class RankLoad:
    """The part of a load that one rank performs."""

    def __init__(self, stored: MegatronCheckpoint, sharded_state_dict: dict[Any, Any]) -> None:
        self.stored = stored
        self.strict = StrictHandling.ASSUME_OK_UNEXPECTED
        self.unexpected: set[str] = set()
        self._template = sharded_state_dict
        self._request = ReadRequest()
        self._results: dict[int, Any] = {}
        self._padding: list[torch.Tensor] = []
        self._copies: Copies = []

    def plan(self, strict: str | StrictHandling) -> tuple[list[Claim], set[str]]:
        """Sort the state dict, plan the reads, and return (claims, flat keys), without changing anything.

        Raises CheckpointingException.
        """
        self.strict = parse_strict_flag(strict)
        check_nesting(self._template, "state")
        self.unexpected = {value.key for value in self._sorted() if self._is_unexpected(value)}
        check_unexpected(self.strict, self.stored.where, self.unexpected)
        self._leave_out()
        wanted = list(nested_values(self._sharded))
        claims = claims_of(wanted)
        return claims, {
            self._add_object(value) if is_sharded_object(value) else self._add_tensor(value) for value in wanted
        }

    def _sorted(self) -> list[Any]:
        """Return all sharded values. Their containers, and the values next to them, are kept."""
        copy, _ = extract_matching_values(self._template, lambda value: not is_empty(value))
        self._factories, _ = extract_matching_values(copy, is_factory, return_lists_as_dicts=True)
        self._built = {id(factory): factory.build() for factory in nested_values(self._factories)}
        copy = dict_list_map_outplace(lambda value: self._built.get(id(value), value), copy)
        self._local, copy = extract_nonpersistent(copy)
        self._sharded, _ = extract_sharded_base(copy)
        return list(nested_values(self._sharded))

    def _is_unexpected(self, value: Any) -> bool:
        if is_sharded_object(value):
            return value.key not in self.stored.object_names and self.stored.object_key(value) is None
        return self.stored.tensor_key(value.key) is None

    def _leave_out(self) -> None:
        """Omit unexpected values, and all values of any factory that built one of them."""
        gone = {id(value) for value in nested_values(self._sharded) if value.key in self.unexpected}
        broken = [number for number, built in self._built.items() if any(id(v) in gone for v in _values(built))]
        gone.update(id(value) for number in broken for value in _values(self._built[number]))
        _, self._sharded = extract_matching_values(self._sharded, lambda value: id(value) in gone)
        _, self._factories = extract_matching_values(
            self._factories, lambda factory: id(factory) in broken, return_lists_as_dicts=True
        )

    def _add_object(self, value: Any) -> str:
        """Request the object, and return the key under which the checkpoint lists it."""
        self._results[id(value)] = self.stored.ask_for(self._request, object_key(self.stored, value))
        return str(value.key)

    def _add_tensor(self, value: Any) -> str:
        """Plan the read of the tensor, and return its key in the checkpoint."""
        key = self.stored.tensor_key(value.key) or str(value.key)  # unexpected values have already been omitted
        data = _data(value)
        for shard in self._shards(value, data, self.stored.tensors[key].shape):
            self._request.add(key, shard)
        self._results[id(value)] = data.detach
        return key

    def _shards(self, value: Any, data: torch.Tensor, stored: Shape) -> list[Shard]:
        shape = tuple(value.global_shape)
        if shape == stored:
            return [megatron_shard(value, data)]
        part = part_shape(shape, stored)
        if part is not None:
            shards, pairs = copies(value, data, stored, part)
            self._copies += pairs
            return shards
        if not value.allow_shape_mismatch or len(value.global_shape) != len(stored):
            raise ShardedMismatch(
                f"{value.key!r} has global shape {list(value.global_shape)} here, but {list(stored)} in "
                f"{self.stored.where}; allow_shape_mismatch=True pads and truncates, for the same number of dimensions",
                key=value.key,
            )
        return list(self._clipped(value, data, stored))

    def _clipped(self, value: Any, data: torch.Tensor, stored: Shape) -> Iterator[Shard]:
        """Return the parts of ``data`` that lie within a tensor of a different global shape.

        Set all other elements to 0.
        """
        for box, piece in boxes_of(value, data):
            common = box.intersect(full_box(stored))
            if common is None:
                self._padding.append(piece)
                continue
            here = common.relative_to(box)
            self._padding += _outside(piece, here)
            yield Shard(narrow(piece, here), stored, common.offset)

    def missing(self, used: frozenset[str]) -> set[str]:
        """Return the keys of the checkpoint that no rank requested. ``used``: the keys that the ranks requested.

        Raises CheckpointingException if there are such keys and ``strict`` requires it.
        """
        if not self.strict.looks_for_missing:
            return set()
        missing = {*self.stored.tensors, *self.stored.object_names} - used
        if missing and self.strict is StrictHandling.RAISE_ALL:
            raise CheckpointingException(
                f"{self.stored.where} holds {_listed(missing)}, which no rank requests; strict='raise_unexpected' "
                "leaves them unread",
                keys=tuple(sorted(missing)),
            )
        return missing

    def put_into(self, common: dict[Any, Any]) -> None:
        """Insert non-persistent values, and the values to load, at their positions in the common part.

        Raises CheckpointingException if the common part already has a value there.
        """
        merge(common, dict_list_map_outplace(lambda value: value.unwrap(), self._local))
        self._state = merge(common, dict_list_map_outplace(lambda value: value, self._sharded))

    def read(self, **options: Unpack[RankArguments]) -> None:
        """Read the requested values. Raises the errors of `Store.load`."""
        self._request.run(self.stored, **options)
        for data in self._padding:
            data.zero_()
        for target, source in self._copies:
            target.copy_(source)

    def merged(self) -> Any:
        """Return the whole state dict: the values that were read, and those that `put_into` added."""
        return apply_factory_merges(dict_list_map_inplace(self._loaded, self._state), self._factories)

    def loaded(self) -> Nested:
        """Return only the sharded values that were read."""
        return dict_list_map_outplace(self._loaded, self._sharded)

    def _loaded(self, value: Any) -> Any:
        return self._results[id(value)]() if id(value) in self._results else value


def _values(built: Nested) -> list[Any]:
    return list(nested_values(built)) if isinstance(built, dict | list) else [built]


def _data(value: Any) -> torch.Tensor:
    """Return the data of a sharded tensor, or new memory on the CPU if it has none."""
    if value.data is not None:
        data: torch.Tensor = value.data
        return data
    flat = flat_range(value)
    shape = tuple(value.local_shape) if flat is None else (len(flat),)
    return torch.empty(shape, dtype=value.dtype, device="cpu")


def _outside(data: torch.Tensor, box: Box) -> Iterator[torch.Tensor]:
    """Return views that together cover ``data`` outside a box. They overlap at the corners."""
    for axis, (start, end) in enumerate(zip(box.offset, box.end, strict=True)):
        yield data.narrow(axis, 0, start)
        yield data.narrow(axis, end, data.shape[axis] - end)
