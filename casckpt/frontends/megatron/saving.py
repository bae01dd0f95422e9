"""Saves a sharded state dict. First, all ranks check it together; then the store saves the shards of its tensors.

The save may run in the background, as Megatron's training loop schedules it.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple, TypeAlias, Unpack

from casckpt.contents.checkpoint import Checkpoint
from casckpt.format.regions import normalise
from casckpt.frontends.megatron.claims import Claim, Claims, ObjectClaim, check_claims, claims_of, main_regions
from casckpt.frontends.megatron.common import NOTES_NAME, set_apart
from casckpt.frontends.megatron.config import BACKEND, CONFIG_NAME, OURS, VERSION, encoded, is_only_config
from casckpt.frontends.megatron.errors import CheckpointingException, checkpointing_errors
from casckpt.frontends.megatron.kinds import (
    extract_nonpersistent,
    extract_sharded_base,
    is_nonpersistent,
    is_sharded_base,
    is_sharded_tensor,
)
from casckpt.frontends.megatron.mapping import apply_factories
from casckpt.frontends.megatron.nesting import Nested, Path, diff, nested_values
from casckpt.frontends.megatron.place import CheckpointDir, StoreRef, place_of
from casckpt.frontends.megatron.stored import COMMON_OBJECT, CONTENT_METADATA, is_object_key
from casckpt.ranks.ranks import Ranks, exchange_keeping, open_ranks
from casckpt.saving.options import CheckReplicas, SaveArguments, usable_check
from casckpt.saving.prepare import tensor_source
from casckpt.saving.replicas import Samples, compare, memory_of, samples_of
from casckpt.tensors.foreign import flat_range, megatron_shard
from casckpt.tensors.state import check_nesting
from casckpt.tensors.values import OfObjects, Shard


class AsyncRequest(NamedTuple):
    """A request with the fields and methods of Megatron-core's AsyncRequest.

    The save is already running, so the caller only waits. ``async_fn``: a function to run in a different process, or
    None. ``finalize_fns``: functions to call on every rank once ``async_fn`` has returned on all ranks. They return
    when the checkpoint is committed, and raise the error of the save.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] = {}
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a function to call after the existing ones. Raises RuntimeError if the request is frozen."""
        if self.is_frozen:
            raise RuntimeError("the request is frozen; add functions before you schedule it")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Run ``async_fn`` and the finalize functions now."""
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)
        for fn in self.finalize_fns:
            fn()

    def freeze(self) -> AsyncRequest:
        """Return a copy to which no more functions can be added."""
        return self._replace(is_frozen=True)


class Ending:
    """The end of a save, for which other processes can wait.

    It is a file that this process locks until `reached` is called. The system releases the lock if the process dies. A
    forked child does not inherit this kind of lock.
    """

    def __init__(self) -> None:
        self._file = NamedTemporaryFile(prefix="casckpt-save-")  # noqa: SIM115 (it lives until `reached`)
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    @property
    def path(self) -> str:
        """The argument that any process may pass to `wait_for_end`."""
        return self._file.name

    def reached(self) -> None:
        """Release the waiting processes."""
        self._file.close()


def wait_for_end(path: str) -> None:
    """Wait until the save has ended. In the process that runs the save, return immediately."""
    try:
        with open(path, "rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return


log = logging.getLogger(__name__)
Preprocess = Callable[[dict[Any, Any]], Any]
_Sorted: TypeAlias = tuple[list[Claim], bool, Samples | None]


def save(  # noqa: PLR0917 - the positions of Megatron-core's
    sharded_state_dict: dict[Any, Any],
    checkpoint_dir: CheckpointDir,
    sharded_strategy: tuple[str, int] | None = None,
    common_strategy: None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Preprocess | None = None,
    content_metadata: Mapping[str, Any] | None = None,
    *,
    fully_parallel: bool = False,
    **options: Unpack[SaveArguments],
) -> AsyncRequest | None:
    """Save a checkpoint. Every rank of ``process_group`` (None: all ranks) makes the call with its own part.

    Factories are built in the caller's dict, as in Megatron. Non-persistent values are omitted. Main replicas write
    the sharded tensors and objects under their keys. Rank 0 writes all other values under their keys in the state
    dict.

    ``validate_access_integrity``: before anything is written, all ranks check that every element has exactly one main
    replica, and log differences between their common part and rank 0's. ``preprocess_common_before_consistancy_check``
    is first applied to both. ``async_sharded_save``: copy the tensors, save in the background, and return a request
    whose ``finalize_fns`` wait for the save. ``content_metadata``: see `load_content_metadata`. ``fully_parallel``: all
    replicas, instead of only the main ones, share the writing, balanced by bytes. They must hold equal values.
    ``options``: those of `Store.save` (``overwrite``, ``attachments``, ``metadata``, ``allow_pickle``,
    ``threads``, ``check_replicas``, ``no_dist``, ...). ``sharded_strategy`` and ``common_strategy`` exist only to match
    Megatron's signature: pass None or ("casckpt", 1) for the first, and None for the second.

    Raises CheckpointingException on every rank, naming the key, rank and region. It is also a Conflict if the step
    exists and ``overwrite`` is false. Raises StorageError and RankFailed, as `Store.save` does. After an error, no new
    checkpoint is visible.
    """
    with checkpointing_errors():
        ranks = open_ranks(options.get("process_group"), no_dist=options.get("no_dist", False))
        locate = partial(located, checkpoint_dir, sharded_strategy, common_strategy)
        check = options.get("check_replicas", "sample")
        saving = Saving(sharded_state_dict, ranks.rank, content_metadata, fully_parallel, check)
        place, replaces = saving.agree(
            ranks,
            locate,
            validate=validate_access_integrity,
            preprocess=preprocess_common_before_consistancy_check,
            background=bool(async_sharded_save),
        )
        run, step = place.run_and_step()
        options["attachments"] = {**(options.get("attachments") or {}), **saving.files}
        options["overwrite"] = options.get("overwrite", False) or replaces
        if async_sharded_save:
            future = place.store.save_async(saving.state, run=run, step=step, **options)
            return AsyncRequest(None, (), [partial(_wait, future)])
        place.store.save(saving.state, run=run, step=step, **options)
        return None


def located(checkpoint_dir: CheckpointDir, sharded: Any, common: Any) -> StoreRef:
    """Find the checkpoint's location.

    Raises CheckpointingException, including for strategies of a different backend.
    """
    if common is not None:
        raise NotImplementedError(
            "common_strategy is not supported, because the common part is in the store; pass None"
        )
    if sharded in (None, (BACKEND, VERSION)):
        return place_of(checkpoint_dir)
    if isinstance(sharded, tuple | str):
        raise CheckpointingException(f"sharded_strategy={sharded!r} does not support stores; pass None")
    raise CheckpointingException(
        f"a {type(sharded).__name__} works only with Megatron-core's own save and load, which accept a folder. "
        "Here, STORE#RUN@STEP names the checkpoint: pass None as sharded_strategy, or pass the strategy to "
        "megatron.core.dist_checkpointing"
    )


def _wait(future: Future[Checkpoint]) -> None:
    with checkpointing_errors():
        future.result()


@dataclass
class Saving:
    """The part of a save that one rank performs."""

    sharded_state_dict: dict[Any, Any]
    rank: int
    content_metadata: Mapping[str, Any] | None = None
    fully_parallel: bool = False
    check_replicas: CheckReplicas = "sample"
    sharded: list[Any] = field(default_factory=list)
    common: dict[Any, Any] = field(default_factory=dict)
    selected: Sequence[bool] = ()
    files: dict[str, bytes] = field(default_factory=dict)
    _compared: Any = None  # the common part in the form that is compared with rank 0's

    def agree(
        self,
        ranks: Ranks,
        locate: Callable[[], StoreRef],
        *,
        validate: bool,
        preprocess: Preprocess | None,
        background: bool = False,
    ) -> tuple[StoreRef, bool]:
        """Sort the state dict and check it across all ranks.

        Returns the location, and whether the save replaces a checkpoint that holds only a config. ``background``:
        whether the save runs in the background. Ranks with different values would wait for each other.
        """

        def sort() -> tuple[StoreRef, _Sorted]:
            place = locate()
            run, step = place.run_and_step()
            self.check_replicas = usable_check(self.check_replicas)
            claims = self._sort(preprocess)
            return place, (claims, background, self._samples(run, step) if ranks.size > 1 else None)

        def decide(place: StoreRef, gathered: list[_Sorted]) -> list[tuple[list[bool], bytes | None, bool]]:
            claims = [of_rank for of_rank, _, _ in gathered]
            if len({asked for _, asked, _ in gathered}) > 1:
                ways = ", ".join(f"{asked} on rank {rank}" for rank, (_, asked, _) in enumerate(gathered[:8]))
                raise CheckpointingException(f"async_sharded_save is {ways}: pass the same value on all ranks")
            if validate:
                check_claims(claims)
            samples = (of_rank for _, _, of_rank in gathered)
            compare(samples, ranks.size, memory_of(place.store.url, ranks.group), "sample")
            self._make_room({claim.key for of_rank in claims for claim in of_rank})
            replaces, common = is_only_config(place), _packed(self._compared) if validate else None
            return [(selected, common, replaces) for selected in self.select(claims)]

        place, (self.selected, common, replaces) = exchange_keeping(ranks, sort, decide)
        if common is not None and self.rank:
            self._warn_of_differences(common)
        return place, replaces

    def _samples(self, run: str, step: int) -> Samples | None:
        """Return samples of all replicas if only main replicas are saved.

        Otherwise, the save itself compares replicas.
        """
        if self.fully_parallel or self.check_replicas != "sample":
            return None
        filled = [value for value in self.sharded if is_sharded_tensor(value) and value.data is not None]
        sources = [tensor_source(value.key, megatron_shard(value), None, together=True) for value in filled]
        return samples_of(sources, run, step, self.check_replicas)

    def _sort(self, preprocess: Preprocess | None) -> list[Claim]:
        """Build factories and sort the values. Raises CheckpointingException."""
        check_nesting(self.sharded_state_dict, "state")
        apply_factories(self.sharded_state_dict)
        _check_lists(self.sharded_state_dict, ())
        _, persistent = extract_nonpersistent(self.sharded_state_dict)
        sharded, self.common = extract_sharded_base(persistent)
        if self.content_metadata is not None:  # Megatron's metadata contains a process group, which cannot be stored
            kept = {key: value for key, value in self.content_metadata.items() if key != "dp_cp_group"}
            self.common = {**self.common, CONTENT_METADATA: kept}
        self.sharded = [value for value in nested_values(sharded) if not is_empty(value)]
        self._compared = preprocess(self.common) if preprocess else self.common
        return claims_of(self.sharded)

    def _make_room(self, keys: set[str]) -> None:
        """Create the attachments on rank 0, and rename values in the common part that have a sharded value's key."""
        self.common, notes = set_apart(self.common, keys)
        data = notes.encoded()
        self.files = {CONFIG_NAME: encoded(OURS)} | ({NOTES_NAME: data} if data else {})

    def select(self, gathered: Sequence[Claims]) -> list[list[bool]]:
        """Select the sharded values that each rank saves: main replicas, and any that share writing or are compared."""
        main = main_regions(gathered) if self.fully_parallel or self.check_replicas == "raise" else set()

        def is_selected(claim: Claim) -> bool:
            if claim.main or isinstance(claim, ObjectClaim):
                return claim.main
            return claim.filled and (claim.key, normalise(claim.region, claim.shape)) in main

        return [[is_selected(claim) for claim in claims] for claims in gathered]

    def leave_out(self, key: str) -> None:
        """Omit the value with this key from the save."""
        pairs = zip(self.sharded, self.selected, strict=True)
        self.selected = [selected and value.key != key for value, selected in pairs]

    def _warn_of_differences(self, common: bytes) -> None:
        try:
            left, right, mismatch = diff(pickle.loads(common), self._compared)  # noqa: S301 - from a rank of the same job
        except Exception as error:  # noqa: BLE001 - if a rank raised here, the others would wait in the save
            log.warning("the common state on rank %d could not be compared with rank 0's: %r", self.rank, error)
            return
        if left or right or mismatch:
            log.warning(
                "the common state on rank %d differs from rank 0's, which is saved. Only on rank 0: %s; only here: %s; "
                "different: %s",
                self.rank, left, right, mismatch,
            )  # fmt: skip

    def state(self) -> dict[Any, Any]:
        """Return the state for `Store.save`.

        Raises CheckpointingException for a key in the format of an object's unique key, and for `COMMON_OBJECT`.
        """
        shards: dict[str, list[Shard]] = {}
        objects: dict[str, Any] = {}
        for value in itertools.compress(self.sharded, self.selected):
            if is_sharded_tensor(value):
                shards.setdefault(value.key, []).append(megatron_shard(value, replicated=self.fully_parallel))
            else:
                objects[value.unique_key] = value.data
        common = self.common if self.rank == 0 else {}
        for key in map(str, (*shards, *common, *objects.keys() & {COMMON_OBJECT})):
            if is_object_key(key):
                what = "the common part" if key == COMMON_OBJECT else "an object"
                raise CheckpointingException(f"{key!r} would load as {what}, because of its form; rename it", key=key)
        return OfObjects({**common, **shards, **objects})


def _packed(common: Any) -> bytes | None:
    """Pickle the common part for the other ranks.

    Return None if that fails, because the save reports such values itself.
    """
    try:
        return pickle.dumps(common)
    except Exception:  # noqa: BLE001 - classes of the user may raise anything when they are pickled
        return None


def is_empty(value: Any) -> bool:
    """Return whether the value is a flattened tensor without elements."""
    flat = flat_range(value) if is_sharded_tensor(value) else None
    return flat is not None and not flat


def _check_lists(x: Nested, path: Path) -> frozenset[str]:
    """Return the kinds of values in ``x``. Raises CheckpointingException for a list that a load could not reassemble.

    A list that mixes kinds is stored in several parts. Each part closes its gaps, so the indices would be lost.
    """
    if isinstance(x, dict):
        kinds = [_check_lists(value, (*path, key)) for key, value in x.items()]
        return frozenset().union(*kinds) if kinds else frozenset(("plain values",))
    if isinstance(x, list):
        kinds = [_check_lists(value, (*path, i)) for i, value in enumerate(x)]
        if len(set(kinds)) > 1:
            every = ", ".join(sorted(frozenset().union(*kinds)))
            raise CheckpointingException(
                f"the list at {path} mixes {every}, so a load could not reassemble it; use a dict"
            )
        return kinds[0] if kinds else frozenset(("plain values",))
    if isinstance(x, tuple):
        _check_inside(x, path)
    if is_sharded_base(x):
        return frozenset(("sharded values",))
    return frozenset(("what is not saved",) if is_nonpersistent(x) else ("plain values",))


def _check_inside(x: Any, path: Path) -> None:
    """Raise CheckpointingException for a sharded or non-persistent value inside a tuple, because a tuple is a leaf."""
    if is_sharded_base(x) or is_nonpersistent(x):
        raise CheckpointingException(f"{path} is a {type(x).__name__} in a tuple, but a tuple is a leaf; use a list")
    for key, value in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list | tuple) else ():
        _check_inside(value, (*path, key))
