"""Checkpoints of OLMo-core into a store: of its first checkpointer, and of its later trainer."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Unpack

import torch

from casckpt.base.keywords import check_keywords
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, NotFound, Refused
from casckpt.frontends.interchange.safetensors.files import read_header
from casckpt.frontends.interchange.safetensors.importing import Maps
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.saving.options import ImportArguments, SaveOptions
from casckpt.storage.local.files import LocalFiles
from casckpt.storage.paths import open_files
from casckpt.tensors.objects import refused_name
from casckpt.tensors.untrusted import BoundedUnpickler, check_expansion, misread
from casckpt.tensors.values import Shard

METADATA: Final = "metadata.json"
PARTS: Final = ("model", "optim")
MODEL_AND_OPTIM: Final = "model_and_optim"
_STATE = re.compile(r"state\.(.+)\.__(.+)", re.DOTALL)
_GROUP = re.compile(r"param_group[0-9]{1,9}")
_TRAIN = re.compile(r"train/rank([0-9]{1,9})\.pt")
_MISFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What malformed JSON raises; RecursionError, and what torch refuses, are RuntimeErrors."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Tensor:
    """One tensor as ``metadata.json`` describes it: its parts by file, each flat ranges or a box."""

    shape: tuple[int, ...]
    parts: Mapping[str, Mapping[str, Any]]


def import_olmo(
    path: str | os.PathLike[str],
    store: AnyStore,
    *,
    step: int,
    allow_pickle: bool = False,
    **options: Unpack[ImportArguments],
) -> Checkpoint:
    """Save a folder of OLMo-core 0.1: ``model/`` and ``optim/``, or one folder of ``metadata.json`` and its files.

    Keys are those of the training state of casckpt: ``model.<name>``, ``optim.state.<name>.<what>``, and groups of
    parameters by name. Groups are pickles of plain data; anything else in them needs ``allow_pickle``.

    Raises NotFound, Refused or InvalidInput for a folder of no use, and what `Store.save` raises.
    """
    check_keywords("import_olmo", options, ImportArguments)
    files, maps = LocalFiles(path), Maps(options.get("progress"))
    parts = {name: files.below(name) for name in PARTS if (files.path / name / METADATA).is_file()}
    if parts:
        found = {name: _tensors(part, maps) for name, part in parts.items()}
        state: dict[str, Any] = {"model": found.get("model", {})}
        if "optim" in found:
            state["optim"] = _optimizer(found["optim"], allow_pickle)
    else:
        state = dict(_tensors(files, maps))
    options["progress"] = maps.done
    return as_store(store).save(state, step=step, no_dist=True, allow_pickle=allow_pickle, **options)


def _tensors(files: LocalFiles, maps: Maps) -> dict[str, list[Shard]]:
    """Give what one folder with ``metadata.json`` holds, as shards of whole tensors."""
    described = _described(files)
    names = sorted({name for one in described.values() for name in one.parts})
    held = {name: _mapped(files, name, maps) for name in names}
    return {key: list(_shards(key, one, held)) for key, one in described.items()}


def _mapped(files: LocalFiles, name: str, maps: Maps) -> dict[str, torch.Tensor]:
    files.size(name)  # refuses names that lead elsewhere, and says what is not there
    path = files.path / name
    return dict(maps.mapped(path, read_header(path)))


def _described(files: LocalFiles) -> dict[str, _Tensor]:
    try:
        tensors = json.loads(files.read(METADATA))["tensors"]
        return {str(key): _Tensor(tuple(map(int, one["shape"])), _parts(one)) for key, one in tensors.items()}
    except _MISFORMED as error:
        raise Refused(f"{files.url}/{METADATA} is not one of OLMo-core's checkpointer: {error!r}") from error


def _parts(one: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    if "shard_spec_per_file" in one:
        return dict(one["shard_spec_per_file"])
    old = one["flattened_offsets_per_file"]  # what it was called first
    return {name: {"flattened_offsets": [at] if at and isinstance(at[0], int) else at} for name, at in old.items()}


def _shards(key: str, one: _Tensor, held: Mapping[str, Mapping[str, torch.Tensor]]) -> Iterator[Shard]:
    seen: set[str] = set()
    for name, spec in sorted(one.parts.items()):
        if repr(spec) in seen:
            continue  # a replica, which every rank wrote
        seen.add(repr(spec))
        data = held[name].get(key)
        try:
            found = [] if data is None else [_shard(data, one.shape, spec)]
            absent = data is None and _numel(spec) > 0  # an empty part of an optimizer's state need not be there
        except _MISFORMED as error:
            raise Refused(f"{METADATA} says of {key!r} in {name} what cannot be: {error!r}", key=key) from error
        if absent:
            raise NotFound(f"{name} lacks {key!r}, which {METADATA} says is in it; get the whole folder", key=key)
        yield from found


def _numel(spec: Mapping[str, Any]) -> int:
    flat = spec.get("flattened_offsets")
    return prod(spec["local_shape"]) if flat is None else sum(hi - lo for lo, hi in flat)


def _shard(data: torch.Tensor, shape: tuple[int, ...], spec: Mapping[str, Any]) -> Shard:
    if spec.get("flattened_offsets") is not None:
        return Shard(data, shape, flat=[tuple(pair) for pair in spec["flattened_offsets"]])
    box = tuple(spec["local_shape"])
    return Shard(data.view(box), shape, offset=tuple(spec["global_offset"]), shape=box)


# the optimizer


def _optimizer(flat: Mapping[str, list[Shard]], allow_pickle: bool) -> dict[str, Any]:
    state: dict[str, dict[str, list[Shard]]] = {}
    groups = []
    for key, shards in flat.items():
        found = _STATE.fullmatch(key)
        if found:
            state.setdefault(found[1], {})[found[2]] = shards
        elif _GROUP.fullmatch(key):
            groups.append((int(key.removeprefix("param_group")), _group(key, shards, allow_pickle)))
    return {"state": state, "param_groups": [group for _, group in sorted(groups, key=lambda pair: pair[0])]}


def _group(key: str, shards: list[Shard], allow_pickle: bool) -> dict[str, Any]:
    data = bytes(torch.cat([shard.data.reshape(-1) for shard in shards]).view(torch.uint8).numpy())
    where = f"{key!r} of the optimizer"
    with misread(lambda why: Refused(f"{where} is no group of parameters, or it is damaged: {why}", key=key)):
        try:
            group = dict(BoundedUnpickler(data, anything=allow_pickle).load())
        except pickle.UnpicklingError as error:
            if allow_pickle:
                raise
            raise InvalidInput(
                f"{where} is more than a pickle of plain data ({error}); pass allow_pickle=True (--allow-pickle) if "
                "you trust whoever wrote it",
                key=key,
            ) from error
        names = list(group.pop("_param_names"))
    check_expansion([group, names], len(data), where)
    return group | {"params": names}


# the later trainer


def import_olmo_trainer(
    path: str | os.PathLike[str],
    store: AnyStore,
    *,
    step: int,
    allow_pickle: bool = False,
    **options: Unpack[ImportArguments],
) -> Checkpoint:
    """Save a folder of OLMo-core's trainer: ``model_and_optim/``, which is a DCP folder, and what lies beside it.

    The train state of each rank, ``train/rank<N>.pt``, is kept as `casckpt.frontends.trainer` keeps it, if torch's
    restricted unpickler reads it or ``allow_pickle`` is given; else it is left out, with a line in the log. Other small
    files become attachments. Raises what `dcp_to_casckpt` raises.
    """
    from casckpt.frontends.dcp.importing import import_folder, small_files

    check_keywords("import_olmo_trainer", options, ImportArguments)
    files = open_files(path)
    beside = {name: data for name, data in small_files(files).items() if not name.startswith(f"{MODEL_AND_OPTIM}/")}
    train: dict[int, Any] = {}
    for name in list(beside):
        found = _TRAIN.fullmatch(name)
        if found and (value := _train_state(name, beside.pop(name), allow_pickle)) is not None:
            train[int(found[1])] = value
    more = {"train": dict(sorted(train.items()))} if train else {}
    given = SaveOptions(step=step, allow_pickle=allow_pickle, attachments=beside, **options)
    return import_folder(files.below(MODEL_AND_OPTIM), store, given, more)


def _train_state(name: str, data: bytes, allow_pickle: bool) -> Any:
    with misread(lambda why: Refused(f"{name} is no file that torch.save wrote, or it is damaged: {why}")):
        try:
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=not allow_pickle)
        except pickle.UnpicklingError as error:
            if allow_pickle:
                raise
            what = refused_name(error)
            log.warning("left out, for only unpickling reads it (allow_pickle, --allow-pickle): %s (%s)", name, what)
            return None
    check_expansion(found, len(data), name)
    return found
