"""Imports OLMo-core checkpoints, written by either its first checkpointer or its later trainer."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Final, TypeAlias, Unpack

import torch

from casckpt.base.names import check_keywords
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, NotFound, Refused
from casckpt.format.regions import Shape
from casckpt.frontends.interchange.safetensors.files import read_header
from casckpt.frontends.interchange.safetensors.importing import Maps
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.saving.options import SaveOptions, UnpicklingArguments
from casckpt.storage import open_files
from casckpt.storage.files import LocalFiles
from casckpt.tensors.objects import refused_name
from casckpt.tensors.untrusted import MISREAD, BoundedUnpickler, misread
from casckpt.tensors.values import Shard

METADATA: Final = "metadata.json"
PARTS: Final = ("model", "optim")
MODEL_AND_OPTIM: Final = "model_and_optim"
_STATE = re.compile(r"state\.(.+)\.__(.+)", re.DOTALL)
_GROUP = re.compile(r"param_group[0-9]{1,9}")
_TRAIN = re.compile(r"train/rank([0-9]{1,9})\.pt")
log = logging.getLogger(__name__)


_Parts: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The parts of a tensor by file, each as flat ranges or a box."""


def import_olmo(
    path: str | os.PathLike[str], store: AnyStore, *, step: int, **options: Unpack[UnpicklingArguments]
) -> Checkpoint:
    """Save a folder of OLMo-core 0.1: ``model/`` and ``optim/``, or one folder with ``metadata.json`` and its files.

    The keys are those of a casckpt training state: ``model.<name>``, ``optim.state.<name>.<what>``, and parameter
    groups by name. In such a folder, groups are pickles of plain data. Pickles of other values need ``allow_pickle``.

    Raises NotFound, Refused or InvalidInput for a folder that cannot be imported, and the errors of `Store.save`.
    """
    check_keywords("import_olmo", options, UnpicklingArguments)
    files, maps = LocalFiles(path), Maps(options.get("progress"))
    parts = {name: files.below(name) for name in PARTS if (files.path / name / METADATA).is_file()}
    if parts:
        tensors = {name: _tensors(part, maps) for name, part in parts.items()}
        state: dict[str, Any] = {"model": tensors.get("model", {})}
        if "optim" in tensors:
            state["optim"] = _optimizer(tensors["optim"], options.get("allow_pickle", False))
    else:
        state = dict(_tensors(files, maps))
    options["progress"] = maps.done
    return as_store(store).save(state, step=step, no_dist=True, **options)


def _tensors(files: LocalFiles, maps: Maps) -> dict[str, list[Shard]]:
    """Return the tensors of a folder that has a ``metadata.json`` file, as shards."""
    described = _described(files)
    names = sorted({name for _, parts in described.values() for name in parts})
    held = {name: _mapped(files, name, maps) for name in names}
    return {key: list(_shards(key, *tensor, held)) for key, tensor in described.items()}


def _mapped(files: LocalFiles, name: str, maps: Maps) -> dict[str, torch.Tensor]:
    files.size(name)  # raises an error for names outside the folder, and for missing files
    path = files.path / name
    return dict(maps.mapped(path, read_header(path)))


def _described(files: LocalFiles) -> dict[str, tuple[Shape, _Parts]]:
    try:
        tensors = json.loads(files.read(METADATA))["tensors"]
        return {str(key): (tuple(map(int, about["shape"])), _parts(about)) for key, about in tensors.items()}
    except MISREAD as error:
        raise Refused(f"{files.url}/{METADATA} was not written by OLMo-core's checkpointer: {error!r}") from error


def _parts(about: Mapping[str, Any]) -> _Parts:
    if "shard_spec_per_file" in about:
        return dict(about["shard_spec_per_file"])
    old = about["flattened_offsets_per_file"]  # the name in older versions
    return {name: {"flattened_offsets": [at] if at and isinstance(at[0], int) else at} for name, at in old.items()}


def _shards(key: str, shape: Shape, parts: _Parts, held: Mapping[str, Mapping[str, torch.Tensor]]) -> Iterator[Shard]:
    seen: set[str] = set()
    for name, spec in sorted(parts.items()):
        if repr(spec) in seen:
            continue  # a replica; every rank wrote one
        seen.add(repr(spec))
        yield from _of_file(key, name, held[name].get(key), shape, spec)


def _of_file(key: str, name: str, data: torch.Tensor | None, shape: Shape, spec: Mapping[str, Any]) -> list[Shard]:
    try:
        if data is not None:
            return [_shard(data, shape, spec)]
        if not _numel(spec):  # an empty part of the optimizer state may be absent
            return []
    except MISREAD as error:
        raise Refused(f"{METADATA} is malformed for {key!r} in {name}: {error!r}", key=key) from error
    raise NotFound(f"{name} lacks {key!r}, although {METADATA} lists it; get a complete copy of the folder", key=key)


def _numel(spec: Mapping[str, Any]) -> int:
    flat = spec.get("flattened_offsets")
    return prod(spec["local_shape"]) if flat is None else sum(hi - lo for lo, hi in flat)


def _shard(data: torch.Tensor, shape: Shape, spec: Mapping[str, Any]) -> Shard:
    if spec.get("flattened_offsets") is not None:
        return Shard(data, shape, flat=[tuple(pair) for pair in spec["flattened_offsets"]])
    box = tuple(spec["local_shape"])
    return Shard(data.view(box), shape, offset=tuple(spec["global_offset"]), shape=box)


# the optimizer


def _optimizer(flat: Mapping[str, list[Shard]], allow_pickle: bool) -> dict[str, Any]:
    state: dict[str, dict[str, list[Shard]]] = {}
    groups = []
    for key, shards in flat.items():
        match = _STATE.fullmatch(key)
        if match:
            state.setdefault(match[1], {})[match[2]] = shards
        elif _GROUP.fullmatch(key):
            groups.append((int(key.removeprefix("param_group")), _group(key, shards, allow_pickle)))
    return {"state": state, "param_groups": [group for _, group in sorted(groups, key=lambda pair: pair[0])]}


def _group(key: str, shards: list[Shard], allow_pickle: bool) -> dict[str, Any]:
    data = bytes(torch.cat([shard.data.reshape(-1) for shard in shards]).view(torch.uint8).numpy())
    where = f"{key!r} of the optimizer"
    with misread(lambda why: Refused(f"{where} is not a parameter group, or is damaged: {why}", key=key)):
        try:
            group = dict(BoundedUnpickler(data, anything=allow_pickle).load())
        except pickle.UnpicklingError as error:
            if allow_pickle:
                raise
            raise InvalidInput(
                f"{where} is not a pickle of plain data ({error}); pass allow_pickle=True (--allow-pickle) if "
                "you trust its source",
                key=key,
            ) from error
        names = list(group.pop("_param_names"))
    return group | {"params": names}


# OLMo-core's later trainer


def import_olmo_trainer(
    path: str | os.PathLike[str], store: AnyStore, *, step: int, **options: Unpack[UnpicklingArguments]
) -> Checkpoint:
    """Save a folder of OLMo-core's trainer: ``model_and_optim/``, which is a DCP folder, and the files next to it.

    The train state of each rank, ``train/rank<N>.pt``, is saved in the layout of `casckpt.frontends.trainer` if
    torch's restricted unpickler reads it or ``allow_pickle`` is set. Otherwise, the import skips this file and logs
    its name. Other small files become attachments. Raises the errors of `dcp_to_casckpt`.
    """
    from casckpt.frontends.dcp.converters import import_folder, small_files

    check_keywords("import_olmo_trainer", options, UnpicklingArguments)
    files = open_files(path)
    beside = {name: data for name, data in small_files(files).items() if not name.startswith(f"{MODEL_AND_OPTIM}/")}
    train: dict[int, Any] = {}
    for name in list(beside):
        match = _TRAIN.fullmatch(name)
        if match and (value := _train_state(name, beside.pop(name), options.get("allow_pickle", False))) is not None:
            train[int(match[1])] = value
    more = {"train": dict(sorted(train.items()))} if train else {}
    given = SaveOptions(step=step, attachments=beside, **options)
    return import_folder(files.below(MODEL_AND_OPTIM), store, given, more)


def _train_state(name: str, data: bytes, allow_pickle: bool) -> Any:
    with misread(lambda why: Refused(f"{name} is not a torch.save file, or is damaged: {why}")):
        try:
            state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=not allow_pickle)
        except pickle.UnpicklingError as error:
            if allow_pickle:
                raise
            what = refused_name(error)
            log.warning("skipped, because reading it requires allow_pickle (--allow-pickle): %s (%s)", name, what)
            return None
    return state
