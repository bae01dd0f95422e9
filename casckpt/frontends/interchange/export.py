"""Exports in every format, for `casckpt.export`, `casckpt.Store.export` and ``casckpt export``."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack, get_args

from casckpt.base.progress import Shown
from casckpt.base.text import check_outside, listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, InvalidInput
from casckpt.frontends.files.exporting import export_files
from casckpt.frontends.interchange.new_files import file_attachments
from casckpt.frontends.interchange.safetensors.exporting import export_safetensors
from casckpt.frontends.interchange.safetensors.files import SUFFIX
from casckpt.frontends.interchange.safetensors.planned import is_model
from casckpt.frontends.interchange.torch_files import export_torch
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.views.view import Rules
from casckpt.store.exports import CAST, Exported, FileOptions, Format
from casckpt.store.store import Store
from casckpt.store.types import Rename

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

FORMATS: Final[tuple[Format, ...]] = get_args(Format)
_SUFFIXES: Final[Mapping[str, Format]] = {SUFFIX: "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
_FOREIGN: Final = {
    ".ckpt", ".engine", ".gguf", ".gz", ".h5", ".hdf5", ".keras", ".mlmodel", ".mlpackage", ".msgpack", ".npy", ".npz",
    ".onnx", ".pb", ".pickle", ".pkl", ".pte", ".tar", ".tflite", ".zip",
}  # fmt: skip
"""Suffixes of other formats. An export to such a name would create a folder, which other programs do not expect."""
_OF_FILES: Final = ("max_shard_size", "metadata")
_OF_TENSORS: Final = ("keys", "strip_prefix", "rename", "dtype", *_OF_FILES)
_NOT_FOR: Final = {"dcp": _OF_TENSORS, "torch": _OF_FILES, "files": _OF_TENSORS}
"""Arguments that a format does not support."""


def export(
    store: AnyStore,
    ref: str | Checkpoint,
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,
    keys: Sequence[str] | None = None,
    strip_prefix: str | None = None,
    rename: Rename = None,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    dtype: str | torch.dtype | None = None,
    attachments: bool = True,
    force: bool = False,
    allow_pickle: bool = False,
    progress: Shown | None = None,
) -> Exported:
    """Write a checkpoint for other programs. Every byte that is read is verified.

    ``path``: may be a URL. ``{step}`` in it stands for the checkpoint's step.

    ``format``: "hf" writes only the model's weights, under their names in the model, for Transformers'
    ``from_pretrained``. "safetensors" writes all tensors under their keys. "dcp" writes the whole checkpoint for
    `torch.distributed.checkpoint`. "torch" writes the whole checkpoint to one file for plain `torch.load`. "files"
    gives back what `import_files` stored (see `casckpt.frontends.files.exporting`), and is the only format for that.

    If None, the suffix of ``path`` determines the format (.safetensors; .pt, .pth or .bin for "torch"). Without such a
    suffix, the format is "hf" if the config of a model is attached or the model has adapters, otherwise "safetensors".
    "hf" and "safetensors" create a folder, or one file if ``path`` ends in .safetensors.

    ``keys``: export only tensors whose key matches one of these fnmatch patterns. ``strip_prefix``: export only
    tensors below this prefix, and remove it from their names. ``rename``: how to map names to new names. It is a
    function, or a dict from regular expressions (matched against the whole name) to replacements. ``max_shard_size``:
    the size limit for each safetensors file in a folder (default: "5GB"). ``metadata``: strings for the
    ``__metadata__`` of safetensors files. ``dtype``: "float32", "float16" or "bfloat16", to which floating-point
    tensors of at least 16 bits are converted; in a config.json, too. ``attachments``: unless False, attachments
    become files in the folder. ``force``: overwrite existing files. ``allow_pickle``: also export values that need a
    pickle.

    Raises NotFound, MissingKey for a pattern or prefix that matches nothing, Conflict if ``path`` exists, Damaged or
    StorageError. Raises InvalidInput for values that the format cannot represent, for a ``path`` inside the store's
    folder, and if several parts may be the model. After an error, no file exists under the final names.
    """
    opened = as_store(store)
    checkpoint = opened.get(ref)
    path = os.fspath(path).replace("{step}", str(checkpoint.step))
    check_outside(opened.url, path)
    if format is None and checkpoint.holds_files:
        format = "files"
    if format is None and Path(path).suffix.lower() in _FOREIGN and not os.path.isdir(path):
        raise InvalidInput(
            f"casckpt cannot write {Path(path).suffix} files: use a name that ends in .safetensors, .pt, .pth or .bin, "
            f"use a folder, or choose one of {', '.join(FORMATS)} with format= (--format)"
        )
    chosen = format or _by_suffix(path) or ("hf" if is_model(opened.attachments(checkpoint)) else "safetensors")
    if chosen not in FORMATS:
        raise InvalidInput(f"format={chosen!r} is not a known format; choose one of {', '.join(FORMATS)}")
    _check_suffix(chosen, path)
    keys, rename, dtype = keys or None, rename or None, None if dtype is None else str(dtype).removeprefix("torch.")
    if dtype not in (None, *CAST):
        raise InvalidInput(f"dtype={dtype!r:.40} is not valid: pass one of {', '.join(CAST)}")
    given = {"keys": keys, "strip_prefix": strip_prefix, "rename": rename, "max_shard_size": max_shard_size}
    given |= {"metadata": metadata or None, "dtype": dtype}
    _check_known(chosen, [name for name, value in given.items() if value is not None])
    if chosen == "files":
        return export_files(opened, checkpoint, path, force=force, progress=progress)
    _warn_of_modes(opened, checkpoint)
    options: FileOptions = {"force": force, "allow_pickle": allow_pickle, "progress": progress}
    if chosen in ("hf", "safetensors"):
        return export_safetensors(
            opened, checkpoint, path, model=chosen == "hf", attachments=attachments, keys=keys,
            strip_prefix=strip_prefix, rename=rename, max_shard_size=max_shard_size, metadata=metadata, dtype=dtype,
            force=force, progress=progress,
        )  # fmt: skip
    if chosen == "dcp":
        return _export_dcp(opened, checkpoint, path, attachments, **options)
    rules = Rules(keys, strip_prefix, rename, dtype=dtype)
    return export_torch(opened, checkpoint, path, rules, **options)


def _warn_of_modes(store: Store, checkpoint: Checkpoint) -> None:
    """Warn of optimizers that were saved in train mode, such as schedule-free ones: their model has other weights."""
    with suppress(CasckptError):  # there is no optimizer, or it needs a pickle
        found = store.read(checkpoint, keys=["*param_groups*"])
        if names := [name for name, value in found.items() if _is_in_train_mode(value)]:
            log.warning(
                "%s of %s@%d was saved in train mode, so the model does not have its weights for evaluation. To export "
                "those, call the optimizer's eval() before a save", listed(names), checkpoint.run, checkpoint.step,
            )  # fmt: skip


def _is_in_train_mode(value: Any) -> bool:
    is_mapping = isinstance(value, Mapping)
    inner = value.values() if is_mapping else value if isinstance(value, list) else ()
    return (is_mapping and value.get("train_mode") is True) or any(map(_is_in_train_mode, inner))


def _by_suffix(path: str | os.PathLike[str]) -> Format | None:
    return _SUFFIXES.get(Path(path).suffix.lower())


def _check_suffix(format: Format, path: str | os.PathLike[str]) -> None:
    """Raise InvalidInput for a file with the suffix of a different format. A folder may have any name."""
    of = _by_suffix(path)
    if format == "files" or of in (None, format) or (of, format) == ("safetensors", "hf") or os.path.isdir(path):
        return
    raise InvalidInput(
        f"{Path(path).name} has the suffix of --format {of}, but the format is {format}; choose a different name"
    )


def _check_known(format: Format, given: Sequence[str]) -> None:
    for name in _NOT_FOR.get(format, ()):
        if name in given:
            others = " and ".join(other for other in FORMATS if name not in _NOT_FOR.get(other, ()))
            option = f"--{name.replace('_', '-')}"
            raise InvalidInput(f"{option} applies to {others}: --format {format} does not support it")


def _export_dcp(
    store: Store,
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    attachments: bool,
    **options: Unpack[FileOptions],
) -> Exported:
    from casckpt.frontends.dcp.converters import casckpt_to_dcp  # takes a while to import
    from casckpt.frontends.dcp.folder import METADATA

    casckpt_to_dcp(store, checkpoint, path, attachments=attachments, **options)
    attached, tensors = tuple(file_attachments(store, checkpoint)), checkpoint.tensors.values()
    written, skipped = (attached, ()) if attachments else ((), attached)
    place = Path(path).expanduser()
    names = [METADATA, *sorted(file.name for file in place.glob("*.distcp")), *written]
    files = tuple(place / name for name in names) if place.is_dir() else (os.fspath(path),)
    nbytes = sum(info.bytes for info in tensors)
    return Exported(checkpoint, files, len(tensors), nbytes, written, skipped=skipped, format="dcp")
